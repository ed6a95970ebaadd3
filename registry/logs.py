"""The one logger: structlog over the standard library, so that a host application decides where it goes."""

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from kernel_muster.registry.foreign_text import written

if TYPE_CHECKING:
    import structlog

LOGGER_NAME = "kernel_muster"


class Logger:
    """Logs through structlog, which is imported with the first event that is wanted: it takes 70 ms."""

    def __init__(self) -> None:
        self._stdlib = logging.getLogger(LOGGER_NAME)

    def debug(self, event: str, **fields: Any) -> None:
        """Log for developers: every decision of a lookup."""
        if self._stdlib.isEnabledFor(logging.DEBUG):
            _bound().debug(_line(event), **_values(fields))

    def warning(self, event: str, **fields: Any) -> None:
        """Log what somebody should know although the program goes on.

        ``event`` says it whole: most handlers show no fields.
        """
        if self._stdlib.isEnabledFor(logging.WARNING):
            _bound().warning(_line(event), **_values(fields))

    def info(self, event: str, **fields: Any) -> None:
        """Log a finished unit of work."""
        if self._stdlib.isEnabledFor(logging.INFO):
            _bound().info(_line(event), **_values(fields))


def _line(text: str) -> str:
    return written(text, "log")


def _values(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields whose texts a handler may write as they are."""
    return {name: _line(value) if isinstance(value, str) else value for name, value in fields.items()}


def logger() -> Logger:
    """Return the logger. The library configures nothing; only the command does."""
    return Logger()


@cache
def _bound() -> "structlog.stdlib.BoundLogger":
    import structlog

    bound: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(LOGGER_NAME),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.add_log_level,
            structlog.stdlib.render_to_log_kwargs,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    return bound
