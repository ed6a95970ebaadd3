"""Work counted, not timed: the Python instructions of a call, and the growth of their number."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(call: Callable[[], object]) -> int:
    """Return how many instructions a call runs in this thread."""
    count = 0

    def each(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return each

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return each

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def growth(make: Callable[[int], Callable[[], object]], size: int) -> float:
    """Return by how much the work of doubling grows from one doubling to the next: 2 if linear, 4 if quadratic.

    ``make`` returns the call for a size. What each call costs besides, whatever its size, does not count.
    """
    small, medium, large = (instructions(make(size * times)) for times in (1, 2, 4))
    return (large - medium) / (medium - small)
