"""How processes say what happens: structlog on stderr, for people on a terminal and as JSON lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys

import structlog

LEVEL_VARIABLE = "MILLSTREAM_LOG_LEVEL"


def configure_logs(*, part: str = "") -> None:
    """Set up this process's logs. `part` stands in every line where it is given. `MILLSTREAM_LOG_LEVEL` sets the level."""
    level = logging.getLevelName(os.environ.get(LEVEL_VARIABLE, "info").upper())
    terminal = sys.stderr.isatty()

    def name_part(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        # Not by contextvars: threads start with none.
        return {**event, "part": part} if part else event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            name_part,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors="NO_COLOR" not in os.environ)
            if terminal
            else structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level if isinstance(level, int) else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
