"""Progress of builds and proofs on stderr: a bar at a terminal, elsewhere an occasional line."""

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


#: Interval of lines without a terminal. Without progress it doubles each time.
_PATIENCE_S = 15.0


@contextlib.contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield the display of progress on stderr: a bar that disappears at the end, or lines."""
    shown = _Bar() if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else _Lines()
    try:
        yield shown.show
    finally:
        shown.stop()


class _Lines:
    """Lines of progress, at most one in ``_PATIENCE_S``, from a thread that starts with the first piece of work."""

    def __init__(self) -> None:
        self._last: tuple[int, int, str] | None = None
        self._since = 0.0
        self._is_over = threading.Event()
        self._stderr = sys.stderr

    def show(self, done: int, total: int, name: str) -> None:
        """Record the number of finished pieces, and the last piece that began or ended."""
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
        if total and done >= total:  # the current work is outside the pieces, such as a decode
            return
        count = f"{done} of {total}" if total else f"{done}"
        with contextlib.suppress(OSError, ValueError):  # a closed stderr is no failure
            self._stderr.write(f"muster: {standing}{count} done; last: {ascii_only(name)}\n")
            self._stderr.flush()

    def stop(self) -> None:
        """Write no more lines."""
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
        # The command already redirects stdout to stderr while other code runs. The bar must not do it again.
        made = RichProgress(
            *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
        )
        made.start()
        return made

    @cached_property
    def _task(self) -> "TaskID":
        return self._rich.add_task("", total=None)

    def show(self, done: int, total: int, name: str) -> None:
        """Show the number of finished pieces and the last one. Without a total, show no number."""
        self._rich.update(self._task, completed=done, total=total or None, description=name)

    def stop(self) -> None:
        """Remove the bar, if there is one."""
        if "_rich" in self.__dict__:
            self._rich.stop()
