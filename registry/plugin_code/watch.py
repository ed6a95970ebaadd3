"""Run other people's code with a time limit, and turn whatever happens into a value."""

import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Generic, TypeVar

import pluggy
from kernel_muster.registry.plugin_code.plain_text import class_name
from kernel_muster.registry.plugin_code.running import running
from kernel_muster.registry.values import frozen

_T = TypeVar("_T")
_Calls = SimpleQueue[Callable[[], object] | None]
_LONGEST = 300
_VALUES: Any = vars(BaseException)["__dict__"]
_KEPT = "_muster_text"
_REGISTRY = os.path.dirname(os.path.dirname(__file__))
_MACHINERY = (_REGISTRY + os.sep, os.path.dirname(pluggy.__file__) + os.sep, threading.__file__)

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

    A call that hangs is abandoned, with its stack: Python cannot end a thread. A KeyboardInterrupt of the call is an
    exception like any other: nobody's key raises one outside the main thread.
    ``name`` says whose code it is, should it end the process.
    """
    outcome: list[Outcome[_T]] = []
    thread = _begun(lambda: outcome.append(_outcome_of(call)), name)
    with running(name):
        thread.start()
        thread.join(seconds)
    return outcome[0] if outcome else _hanging(thread)


class Worker:
    """A thread that runs calls in turn, each watched; ``begin`` runs there first. It ends when this object does.

    Many short calls cost less so than with a thread each. One that hangs takes the thread along: the next gets another.
    """

    def __init__(self, begin: Callable[[], object] = lambda: None) -> None:
        self._begin = begin
        self._calls: _Calls | None = None
        self._thread = threading.current_thread()

    def watched(self, call: Callable[[], _T], seconds: float, name: str) -> Outcome[_T]:
        """Run ``call`` as :func:`watched` does."""
        outcomes: SimpleQueue[Outcome[_T]] = SimpleQueue()
        if self._calls is None:
            calls: _Calls = SimpleQueue()
            self._calls = calls
            self._thread = _begun(lambda: _work(calls), "worker")
            self._thread.start()
            weakref.finalize(self, calls.put, None)
            call = _after(self._begin, call)
        try:
            with running(name):
                self._calls.put(lambda: outcomes.put(_outcome_of(call)))
                return outcomes.get(timeout=seconds)
        except Empty:
            self._calls.put(None)
            self._calls = None
            return _hanging(self._thread)


def _begun(work: Callable[[], None], name: str) -> threading.Thread:
    return threading.Thread(target=work, name=f"muster: {name}", daemon=True)


def _after(begin: Callable[[], object], call: Callable[[], _T]) -> Callable[[], _T]:
    def both() -> _T:
        begin()
        return call()

    return both


def _work(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # what it holds is not this thread's


def _outcome_of(call: Callable[[], _T]) -> Outcome[_T]:
    own = os.getpid()
    try:
        outcome = Outcome(call())
    except BaseException as error:  # noqa: BLE001  (the one place where foreign exceptions become values)
        _keep_texts(error)
        outcome = Outcome(error=error)
    if os.getpid() != own:  # what the call forked has this thread alone, and nobody who would give it work or end it
        os._exit(1)
    return outcome


def is_interrupt(error: BaseException) -> bool:
    """Whether somebody may have interrupted the process: Python tells the main thread alone."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def _hanging(thread: threading.Thread) -> Outcome[Any]:
    frame = sys._current_frames().get(thread.ident or 0)
    return Outcome(stack="".join(_stack(frame)) if frame else "no stack")


def _stack(frame: FrameType) -> list[str]:
    """Return where a thread is, innermost first; the frames that only lead to the watched call come last."""
    frames = traceback.extract_stack(frame)[::-1]
    own = [f for f in frames if f.filename.startswith(_MACHINERY)]
    foreign = [f for f in frames if f not in own]
    return ["most recent call first:\n", *traceback.format_list([*foreign, *own])]


def cause_chain(error: BaseException) -> str:
    """Return an exception and what caused it, one line each, with where it was raised."""
    lines = [f"{class_name(one)}: {_text(one)}{_place(one)}" for one in _chain(error)]
    return "\n  because of ".join(lines)


def one_line(error: BaseException) -> str:
    """Return an exception and its message on one line of bounded length."""
    text = " ".join(_text(error).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"{class_name(error)}: {text}" if text else class_name(error)


def located(error: BaseException) -> str:
    """Return an exception on one line of bounded length, with where it was raised."""
    return f"{one_line(error)}{_place(error)}"


def _text(error: BaseException) -> str:
    """Return an exception's text: that of a plugin's own class was taken where its code is watched."""
    kept = _VALUES.__get__(error).get(_KEPT)
    return kept if type(kept) is str else _own_text(error)


def _keep_texts(error: BaseException) -> None:
    """Take the texts of an exception and of its causes here, where the code of a plugin may hang or raise."""
    for one in _chain(error):
        values = _VALUES.__get__(one)
        if _KEPT not in values:
            values[_KEPT] = _own_text(one)


def _own_text(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException as inner:
        if is_interrupt(inner):
            raise
        return "(its text cannot be shown)"
    return text if type(text) is str else str.__str__(text)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _place(error: BaseException) -> str:
    """Return the line of whose code it is about: the last one that is neither ours, nor Python's own, nor pluggy's.

    Where there is none, it is the last line of all; what imports modules for others has none that helps.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    foreign = _foreign(frames)
    if not foreign and frames and _package(frames[-1][0]) in _IMPORTING:
        return ""
    return _last(foreign or frames)


def foreign_place(error: BaseException) -> str:
    """Return the last line of somebody else's code that raised an exception, or called what did; empty without one."""
    return _last(_foreign(traceback.walk_tb(error.__traceback__)))


def _foreign(frames: Iterable[tuple[FrameType, int]]) -> list[tuple[FrameType, int]]:
    return [place for place in frames if _package(place[0]) not in _NOT_THE_AUTHORS]


def _last(frames: list[tuple[FrameType, int]]) -> str:
    return "".join(f" (at {frame.f_code.co_filename}:{line})" for frame, line in frames[-1:])


def _package(frame: FrameType) -> str:
    """Return the top-level package of a frame's module. A generated ``__init__`` has the name of its class's."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
