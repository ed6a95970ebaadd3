"""Progress of builds and proofs on stderr, for whoever sits at a terminal."""

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from kernel_muster.registry.running import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


@contextlib.contextmanager
def shown_progress() -> Iterator[Progress | None]:
    """Yield what shows progress on stderr; None where that is no terminal. The bar goes when the work is done."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    bar = _Bar()
    try:
        yield bar.show
    finally:
        bar.stop()


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
        """Show that so many of all are done, and which was the last."""
        self._rich.update(self._task, completed=done, total=total, description=name)

    def stop(self) -> None:
        """Take the bar away, if there is one."""
        if "_rich" in self.__dict__:
            self._rich.stop()
