"""Devices that are stuck: a kernel does not end there, and whatever waits for it waits for ever.

Only the end of the process ends such a kernel. Until then nothing is loaded, launched, waited for or freed there.
"""

_STUCK: dict[int, str] = {}
_KEPT: list[object] = []


def mark_stuck(ordinal: int, by: str) -> None:
    """Give a device up, to the end of this process. ``by`` is what does not end there."""
    _STUCK.setdefault(
        ordinal, f"cuda:{ordinal} still runs {by}, which did not end: nothing else runs there until this process ends"
    )


def why_stuck(ordinal: int | None) -> str:
    """Say why nothing runs on a device; empty where it is free, and for the host (None)."""
    return _STUCK.get(ordinal, "") if ordinal is not None else ""


def has_stuck() -> bool:
    """Whether some device is stuck: then the interpreter's own end would wait for it, and ``os._exit`` does not."""
    return bool(_STUCK)


def keep(owner: object) -> None:
    """Keep an object whose memory must not be given back, for that waits."""
    _KEPT.append(owner)
