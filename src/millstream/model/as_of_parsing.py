"""Moments and positions as people write them: an ISO date or time, an age, or a token."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from millstream.errors import PositionError, UsageError
from millstream.model.ids import StreamId
from millstream.model.positions import StreamToken

_TOKEN: Final = re.compile(r"[0-9a-f]{8}\.[sm]")
_NUMBER: Final = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?\Z", re.IGNORECASE)
_AGE: Final = re.compile(r"(\d+)\s*(s|m|h|d|w|(?:sec|min|second|minute|hour|day|week)s?)\s+ago\Z", re.IGNORECASE)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_moment(text: str, *, now: datetime) -> datetime:
    """Return the moment that a text names; without a zone in UTC, a date alone is its first instant.

    Args:
        text: as in `2026-03-01`, `2026-03-01T12:30`, `2026-03-01 12:30:00+01:00`, `10m ago`, `2 hours
            ago`, `now`.
        now: with a time zone; ages are counted from it.

    Raises:
        PositionError (`invalid_time`): the text names no moment, or is a bare number, whose unit would be a guess.
    """
    text = text.strip()
    if text.lower() == "now":
        return now
    if _NUMBER.match(text):
        # `fromisoformat` takes some: 20260301, and 1712120112345 as an hour of 1712.
        raise PositionError(
            f"{text[:100]!r} is not a time: a bare number may be seconds, milliseconds or a date",
            code="invalid_time",
            hint="Write an ISO time (2026-03-01T12:30, 2026-03-01T12:30:00+01:00), an age (10m ago) or now.",
        )
    age = _AGE.match(text)
    try:
        if age is not None:
            return now - timedelta(**{_UNITS[age[2][0].lower()]: int(age[1])})
        found = datetime.fromisoformat(text)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise PositionError(f"{text[:100]!r} is not a time", code="invalid_time") from error


def moment_text(at: datetime | str) -> str:
    """Return a caller's moment as a text for `parse_moment`.

    Raises:
        UsageError: it is neither a `datetime` nor a text.
    """
    if isinstance(at, str):
        return at
    if not isinstance(at, datetime):
        raise UsageError(
            f"at is {at!r}: {type(at).__name__} is no time",
            hint="Pass a datetime, an ISO time (2026-03-01T12:30), an age (10m ago) or now.",
        )
    return at.isoformat()


def moment_of(at: datetime | str, *, now: datetime) -> datetime:
    """Return the moment that merged rows are asked for: a `datetime`, or a text as in `parse_moment`.

    Raises:
        UsageError: it is neither a `datetime` nor a text.
        PositionError (`invalid_time`): the text names no moment. A token names none: merged rows are of several logs.
    """
    text = moment_text(at)
    if is_token(text):
        raise PositionError(
            f"at is the token {text!r}, and merged rows have none",
            code="invalid_time",
            hint="Pass a time: 2026-03-01T12:30, 2026-03-01T12:30:00+01:00, 10m ago or now.",
        )
    return parse_moment(text, now=now)


def is_token(text: str) -> bool:
    """Return whether a text has the form of a token; otherwise it is parsed as a moment."""
    return _TOKEN.match(text.strip()) is not None


def microseconds(moment: datetime) -> int:
    """Return a moment as records store it: microseconds since 1970 UTC, exactly."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def parse_as_of(text: str, stream: StreamId, *, now: datetime) -> datetime | StreamToken:
    """Return a moment or a token of the stream.

    Raises:
        PositionError (`invalid_time`): it is neither.
        PositionError (`invalid_token`): it is a token, but malformed or of another stream.
    """
    if is_token(text):
        return StreamToken.parse(text.strip(), stream=stream)
    return parse_moment(text, now=now)
