"""The time that Forage calls now: the system's clock, or a moment that FORAGE_NOW fixes.

Decay, the age of a feed, heartbeats and the times in records go by it. The log's hybrid times never do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from millstream_forage.errors import ForageError

Clock: TypeAlias = Callable[[], int]
"""Returns nanoseconds since 1970."""

VARIABLE: Final = "FORAGE_NOW"
SECOND_NS: Final = 1_000_000_000
MINUTE_NS: Final = 60 * SECOND_NS
DAY_NS: Final = 24 * 60 * MINUTE_NS
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class InvalidTime(ForageError):
    """A text is no moment."""

    code = "invalid_time"
    status = 422
    default_hint = "Write 2026-03-01T12:00:00Z, or whole nanoseconds since 1970."


def clock_of(environment: Mapping[str, str]) -> Clock:
    """Return the clock for a process with these variables.

    Raises:
        InvalidTime: FORAGE_NOW is no moment.
    """
    text = environment.get(VARIABLE)
    if not text:
        return time.time_ns
    try:
        fixed_ns = parse_ns(text)
    except InvalidTime as error:
        raise InvalidTime(f"{VARIABLE}: {error.message}") from None
    return lambda: fixed_ns


def parse_ns(text: str) -> int:
    """Return a moment in nanoseconds since 1970: ISO 8601, which is UTC if it names no zone, or the whole number itself.

    Raises:
        InvalidTime: it is neither, or a moment that 64 bits can't hold.
    """
    if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit():
        moment_ns = int(text)
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidTime(f"{text!r} is neither a time in ISO 8601 nor whole nanoseconds") from None
        since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
        moment_ns = since // timedelta(microseconds=1) * 1000
    if not -(1 << 63) <= moment_ns < 1 << 63:
        raise InvalidTime(f"{text!r} is beyond 64 bits of nanoseconds")
    return moment_ns
