"""The host's kernels with test arguments."""

import ml_dtypes
import numpy as np
from families import CONTRACTS, SPECS
from hypothesis import strategies as st
from kernel_muster.registry.contract.specs import Provider
from kernel_muster.registry.launch.runners import HostRunner
from kernel_muster.registry.selection.handles import Handle

BF16 = ml_dtypes.bfloat16


def kernel(func, module=None):
    """Return the handle of a host kernel."""
    spec = next(s for s in SPECS.values() if s.kernel_key.func == func and module in (None, s.kernel_key.module))
    return Handle(spec.kernel_key, spec, CONTRACTS[spec.contract], Provider("test", "test", "1"), HostRunner())


def empty(*shape, dtype=BF16):
    """Return an output that nobody has written."""
    return np.full(shape, np.nan, dtype)


def gaussian(rng, *shape, dtype=BF16):
    return rng.standard_normal(shape).astype(dtype)


def ints(*values):
    return np.array(values, np.int32)


def same(a, b):
    """Whether two arrays have the same bits."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


#: Rows of up to four sequences.
ragged = st.lists(st.integers(0, 5), min_size=1, max_size=4)
