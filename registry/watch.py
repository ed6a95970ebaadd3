"""Run other people's code with a time limit, and turn whatever happens into a value."""

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from kernel_muster.registry.values import frozen

_T = TypeVar("_T")


@frozen
class Outcome(Generic[_T]):
    """What a watched call did: its value, or the exception, or the stack where it still hangs."""

    value: _T | None = None
    error: BaseException | None = None
    stack: str = ""

    @property
    def is_hanging(self) -> bool:
        """Whether it was still running when the time was up."""
        return bool(self.stack)


def watched(call: Callable[[], _T], seconds: float, name: str) -> Outcome[_T]:
    """Run ``call`` in a thread of its own for at most ``seconds``.

    A call that hangs is abandoned, with its stack: Python cannot end a thread. KeyboardInterrupt is raised again.
    """
    outcome: list[Outcome[_T]] = []

    def run() -> None:
        try:
            outcome.append(Outcome(call()))
        except BaseException as error:  # noqa: BLE001  (the one place where foreign exceptions become values)
            outcome.append(Outcome(error=error))

    thread = threading.Thread(target=run, name=f"muster: {name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        frame = sys._current_frames().get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else "no stack"
        return Outcome(stack=stack)
    if isinstance(outcome[0].error, KeyboardInterrupt):
        raise outcome[0].error
    return outcome[0]


def cause_chain(error: BaseException) -> str:
    """Return an exception and what caused it, one line each, with where it was raised."""
    lines = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        lines.append(f"{type(current).__name__}: {_text(current)}{_place(current)}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\n  because of ".join(lines)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (an exception whose own text raises still has to be reported)
        return "(its text cannot be shown)"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
