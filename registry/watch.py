"""Run other people's code with a time limit, and turn whatever happens into a value."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Generic, TypeVar

import pluggy
from kernel_muster.registry.entered import entered
from kernel_muster.registry.values import frozen

_T = TypeVar("_T")
_LONGEST = 300
_MACHINERY = (os.path.dirname(__file__) + os.sep, os.path.dirname(pluggy.__file__) + os.sep, threading.__file__)

_IMPORTING = frozenset({"importlib", "_frozen_importlib", "_frozen_importlib_external"})
_NOT_THE_AUTHORS = frozenset({"kernel_muster", "pluggy", *sys.stdlib_module_names, *_IMPORTING})


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
    ``name`` says whose code it is, should it end the process.
    """
    outcome: list[Outcome[_T]] = []

    def run() -> None:
        try:
            outcome.append(Outcome(call()))
        except BaseException as error:  # noqa: BLE001  (the one place where foreign exceptions become values)
            outcome.append(Outcome(error=error))

    thread = threading.Thread(target=run, name=f"muster: {name}", daemon=True)
    with entered(name):
        thread.start()
        thread.join(seconds)
    if not outcome:
        frame = sys._current_frames().get(thread.ident or 0)
        stack = "".join(_stack(frame)) if frame else "no stack"
        return Outcome(stack=stack)
    if isinstance(outcome[0].error, KeyboardInterrupt):
        raise outcome[0].error
    return outcome[0]


def _stack(frame: FrameType) -> list[str]:
    """Return where a thread is, innermost first; the frames that only lead to the watched call come last."""
    frames = traceback.extract_stack(frame)[::-1]
    own = [f for f in frames if f.filename.startswith(_MACHINERY)]
    foreign = [f for f in frames if f not in own]
    return ["most recent call first:\n", *traceback.format_list([*foreign, *own])]


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


def one_line(error: BaseException) -> str:
    """Return an exception and its message on one line of bounded length."""
    text = " ".join(_text(error).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def located(error: BaseException) -> str:
    """Return an exception on one line of bounded length, with where it was raised."""
    return f"{one_line(error)}{_place(error)}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  (an exception whose own text raises still has to be reported)
        return "(its text cannot be shown)"


def _place(error: BaseException) -> str:
    """Return the line of whose code it is about: the last one that is neither ours, nor Python's own, nor pluggy's.

    Where there is none, it is the last line of all; what imports modules for others has none that helps.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    foreign = [place for place in frames if _package(place[0]) not in _NOT_THE_AUTHORS]
    if not foreign and frames and _package(frames[-1][0]) in _IMPORTING:
        return ""
    return "".join(f" (at {frame.f_code.co_filename}:{line})" for frame, line in (foreign or frames)[-1:])


def _package(frame: FrameType) -> str:
    """Return the top-level package of a frame's module. A generated ``__init__`` has the name of its class's."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
