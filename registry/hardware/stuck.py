"""Devices that are stuck: a kernel does not end there, and whatever waits for it waits for ever.

Only the end of the process ends such a kernel. Until then nothing is loaded, launched, waited for or freed there.
"""

import sys
from types import FrameType

_STUCK: dict[int, str] = {}
_KEPT: list[FrameType] = []


def mark_stuck(ordinal: int, by: str) -> None:
    """Give a device up, to the end of this process. ``by`` is what does not end there.

    Who called keeps what it holds, also when it is over: to give a device's memory back is to wait for it.
    """
    why = f"cuda:{ordinal} still runs {by}, which did not end: nothing else runs there until this process ends"
    _STUCK.setdefault(ordinal, why)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        _KEPT.append(frame)
        frame = frame.f_back


def why_stuck(ordinal: int | None) -> str:
    """Say why nothing runs on a device; empty where it is free, and for the host (None)."""
    return _STUCK.get(ordinal, "") if ordinal is not None else ""


def has_stuck() -> bool:
    """Whether some device is stuck: then the interpreter's own end would wait for it, and ``os._exit`` does not."""
    return bool(_STUCK)
