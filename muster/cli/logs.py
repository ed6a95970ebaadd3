"""Logging of the command: structlog to stderr. The library itself configures nothing."""

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def configured_logs(*, verbose: bool) -> Iterator[None]:
    """Send our log events to stderr: readable on a terminal, one JSON object a line elsewhere."""
    import structlog
    from kernel_muster.registry.logs import LOGGER_NAME

    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    log = logging.getLogger(LOGGER_NAME)
    level, propagates = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates
