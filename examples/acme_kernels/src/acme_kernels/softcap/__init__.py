"""A new family: soft-capped logits, module ``acme_softcap``."""

import kernel_muster as km

from acme_kernels.softcap.contract import SOFTCAP
from acme_kernels.softcap.cpu import softcap_rows

__all__ = ["SOFTCAP", "SOFTCAP_ROWS"]

SOFTCAP_ROWS = km.KernelSpec(
    key="acme_softcap::softcap",  # a new key: its module begins with the plugin's name
    contract=SOFTCAP.name,
    archs=("cpu",),
    backend=km.PythonKernel(softcap_rows),
    tier="reference",
)
