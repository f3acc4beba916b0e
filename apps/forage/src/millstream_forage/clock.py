"""The time that Forage calls now: the system's clock, or a moment that FORAGE_NOW fixes.

Decay, the age of a feed, heartbeats and the times in records go by it. The log's hybrid times never do.
"""

from __future__ import annotations

import re
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
WHOLE: Final = re.compile(r"-?[0-9]{1,40}", re.ASCII)
BEYOND_MICROSECONDS: Final = re.compile(r"[.,][0-9]{6}([0-9]{1,3})", re.ASCII)
"""The seventh to ninth digit of a second's fraction."""
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
    try:
        moment_ns = int(text) if WHOLE.fullmatch(text) else iso_ns(text)
    except ValueError:
        raise InvalidTime(f"{text[:100]!r} is neither a time in ISO 8601 nor whole nanoseconds") from None
    if not -(1 << 63) <= moment_ns < 1 << 63:
        raise InvalidTime(f"{text!r} is beyond 64 bits of nanoseconds")
    return moment_ns


def iso_ns(text: str) -> int:
    """Return the moment of a text in ISO 8601; `ValueError` if it isn't one. Python's own reader drops the digits after the sixth."""
    moment = datetime.fromisoformat(text)
    since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
    dropped = BEYOND_MICROSECONDS.search(text)
    return since // timedelta(microseconds=1) * 1000 + (int(dropped[1].ljust(3, "0")) if dropped else 0)
