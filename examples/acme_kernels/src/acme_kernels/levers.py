"""The plugin's one lever: a kill switch."""

import kernel_muster as km

NO_SOFTCAP = km.Lever(
    name="MUSTER_ACME_NO_SOFTCAP",
    kind="bool",
    default=False,
    doc="Choose the next token from the uncapped logits: the cap is monotonic, but its rounding can make ties.",
    effects={True: "acme_softcap::softcap dropped, never looked up", False: "kernel kept"},
    diagnostic=True,
)
