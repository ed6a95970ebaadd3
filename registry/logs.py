"""The one logger: structlog over the standard library, so that a host application decides where it goes."""

import logging

import structlog

LOGGER_NAME = "kernel_muster"


def logger() -> structlog.stdlib.BoundLogger:
    """Return the bound logger. The library configures nothing; only the command does."""
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
