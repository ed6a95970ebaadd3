"""Logging of the command: structlog to stderr. The library itself configures nothing."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from functools import cached_property

from kernel_muster.registry.logs import LOGGER_NAME


class StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Readable text on a terminal, one JSON object for each line elsewhere. The first event imports structlog."""

    @cached_property
    def _structured(self) -> logging.Formatter:
        import structlog

        renderer: structlog.typing.Processor = (
            structlog.dev.ConsoleRenderer() if self.stream.isatty() else structlog.processors.JSONRenderer()
        )
        before: list[structlog.typing.Processor] = [
            structlog.stdlib.add_log_level,
            structlog.stdlib.ExtraAdder(),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
        ]
        return structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )

    def format(self, record: logging.LogRecord) -> str:
        """Return one event as text."""
        return self._structured.format(record)


@contextlib.contextmanager
def configured_logs(*, verbose: bool) -> Iterator[None]:
    """Send this project's log events to stderr: all if verbose, else errors only. Warnings stand in the report."""
    handler = StderrHandler(sys.stderr)
    log = logging.getLogger(LOGGER_NAME)
    level, propagates = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbose else logging.ERROR)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates
