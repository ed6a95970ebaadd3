"""Progress of builds and proofs on stderr: a bar at a terminal, elsewhere a line now and then."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from kernel_muster.audit.render.plain import ascii_only
from kernel_muster.registry.launch.runners import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


#: Where there is no terminal, work is told of so often; where it gets no further, each time after twice as long.
_PATIENCE_S = 15.0


@contextlib.contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield what shows progress on stderr: a bar that goes when work is done; elsewhere lines."""
    shown = _Bar() if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else _Lines()
    try:
        yield shown.show
    finally:
        shown.stop()


class _Lines:
    """Lines about how far work is, at most one in ``_PATIENCE_S``, from a thread that begins with the first piece."""

    def __init__(self) -> None:
        self._last: tuple[int, int, str] | None = None
        self._since = 0.0
        self._is_over = threading.Event()
        self._stderr = sys.stderr

    def show(self, done: int, total: int, name: str) -> None:
        """Note that so many of all are done, and which piece began or ended last."""
        is_first = self._last is None
        self._since, self._last = time.monotonic(), (done, total, name)
        if is_first:
            threading.Thread(target=self._watch, name="muster: progress", daemon=True).start()

    def _watch(self) -> None:
        told, patience = self._last, 0.0
        while not self._is_over.wait(_PATIENCE_S):
            waited, last = time.monotonic() - self._since, self._last
            if last is None:
                continue
            if last is not told:
                told, patience = last, 0.0
                self._tell("", *last)
            elif waited >= patience:
                self._tell(f"nothing new for {waited:.0f} s; ", *last)
                patience = waited * 2

    def _tell(self, standing: str, done: int, total: int, name: str) -> None:
        if total and done >= total:  # what is being done now is no piece of that work: a decode, say
            return
        count = f"{done} of {total}" if total else f"{done}"
        with contextlib.suppress(OSError, ValueError):  # a closed stderr is no reason to fail
            self._stderr.write(f"muster: {standing}{count} done; last: {ascii_only(name)}\n")
            self._stderr.flush()

    def stop(self) -> None:
        """Say no more."""
        self._is_over.set()


class _Bar:
    """A bar that appears with the first piece of work: rich takes 50 ms to import."""

    @cached_property
    def _rich(self) -> "RichProgress":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        )
        # The command sends stdout to stderr while others' code runs; the bar must not do so a second time.
        made = RichProgress(
            *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
        )
        made.start()
        return made

    @cached_property
    def _task(self) -> "TaskID":
        return self._rich.add_task("", total=None)

    def show(self, done: int, total: int, name: str) -> None:
        """Show that so many of all are done, and which was the last; of no number, that nobody knows it yet."""
        self._rich.update(self._task, completed=done, total=total or None, description=name)

    def stop(self) -> None:
        """Take the bar away, if there is one."""
        if "_rich" in self.__dict__:
            self._rich.stop()
