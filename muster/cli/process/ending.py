"""Clean-up before a signal ends the process."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = ("SIGHUP", "SIGTERM")


class _Ended(BaseException):
    """A signal ends the process. No code of this project catches this on the way."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """Clean up in the block on SIGTERM or SIGHUP, then end by that signal. Further signals are ignored.

    Ignored signals, signals with another handler, and everything outside the main thread are left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)] if is_main else []
    numbers = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        _set(numbers, signal.SIG_IGN)
        raise _Ended(number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    except _Ended as ended:
        signal.signal(ended.number, signal.SIG_DFL)
        os.kill(os.getpid(), ended.number)
    finally:
        _set(numbers, signal.SIG_DFL)


def _set(numbers: list[int], handler: signal.Handlers) -> None:
    for number in numbers:
        signal.signal(number, handler)
