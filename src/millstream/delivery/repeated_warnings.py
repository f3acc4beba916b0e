"""Warnings of work that is tried again several times a second: a full disk is logged now and then, not all the time."""

from __future__ import annotations

import time
from typing import Final

import structlog

from millstream.errors import MillstreamError

logger = structlog.get_logger("millstream.delivery")

_EVERY_S: Final = 30.0


class RepeatedWarnings:
    """Logs each warning when it comes first, and every half a minute while it comes again.

    Args:
        facts: what each line names.

    Concurrency: any thread; two at once may both log.
    """

    def __init__(self, **facts: str) -> None:
        self._facts: Final = facts
        self._logged: Final[dict[tuple[str, ...], float]] = {}

    def warn(self, text: str, error: MillstreamError | OSError, **facts: str) -> None:
        """Log a warning; another code of the error, or other facts, make it another one."""
        what = str(error.code if isinstance(error, MillstreamError) else error.errno)
        key, now_s = (text, what, *facts.values()), time.monotonic()
        if now_s - self._logged.get(key, now_s - _EVERY_S) >= _EVERY_S:
            self._logged[key] = now_s
            logger.warning(text, **self._facts, **facts, error=str(error))
