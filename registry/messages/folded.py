"""Findings that differ only in their key: one text for all of them."""

from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.messages.audience import Audience


def _any_key(value: object) -> object:
    return "KEY" if isinstance(value, KernelKey) else value


FOLDED = Audience(
    "folded",
    {
        "lookup.chain": "chain: {outcome}",
        "lookup.reason": "{reason}",
        "remedy.declare": ('or declare it, with the true reason, in {manifest}: [expected_absent.MODULE] FUNC = "..."'),
    },
    value=_any_key,
)
