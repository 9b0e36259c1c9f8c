"""Events on standard error, where ``$KPOLICY_LOG`` asks for them. The library itself configures no logging."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

from kpolicy.engine import Engine
from kpolicy.errors import UnknownNameError

__all__ = ["LOG_VARIABLE", "log_engines"]

LOG_VARIABLE = "KPOLICY_LOG"
"""Environment variable that holds the least level whose events are printed."""
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def log_engines(engines: Iterable[Engine]) -> None:
    """Print the Engines' events to standard error, at the level of ``$KPOLICY_LOG`` and above; nothing without it.

    Raises:
        UnknownNameError: the variable isn't a level.
    """
    level = log_level()
    if level is None:
        return
    from kpolicy.observe.events import log_events

    logger = _logger(level)
    for engine in engines:
        log_events(engine, logger)


def log_level() -> int | None:
    """What the variable asks for; None where it isn't set.

    Raises:
        UnknownNameError: it isn't a level.
    """
    name = os.environ.get(LOG_VARIABLE, "")
    if not name:
        return None
    if name.lower() not in _LEVELS:
        raise UnknownNameError(f"level in ${LOG_VARIABLE}", name, _LEVELS, "Unset it for no log.")
    return _LEVELS[name.lower()]


def _logger(level: int) -> Any:
    """A logger of structlog, or of the standard library where that isn't installed."""
    try:
        import structlog
    except ModuleNotFoundError:
        logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
        logger = logging.getLogger("kpolicy")
        logger.setLevel(level)
        return logger
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    return structlog.get_logger()
