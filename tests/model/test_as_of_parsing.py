from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import PositionError
from millstream.model.as_of_parsing import parse_as_of, parse_moment
from millstream.model.ids import StreamId
from millstream.model.positions import Seq, StreamToken
from millstream.testing.errors import coded

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
STREAM = StreamId(UUID(int=42))
ZONES = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(st.datetimes(datetime(1970, 1, 3), datetime(2100, 1, 1), timezones=ZONES))  # noqa: DTZ001 - bounds of any zone
def test_an_iso_time_is_the_moment_that_it_names_and_utc_where_it_names_no_zone(moment: datetime) -> None:
    utc = moment.astimezone(UTC)
    assert parse_moment(moment.isoformat(), now=NOW) == utc
    assert parse_moment(utc.replace(tzinfo=None).isoformat(sep=" "), now=NOW) == utc
    assert parse_moment(utc.date().isoformat(), now=NOW) == datetime.combine(utc.date(), datetime.min.time(), UTC)


@given(
    st.integers(0, 10_000),
    st.sampled_from([("s", 1), ("sec", 1), ("m", 60), ("min", 60), ("hour", 3600), ("d", 86400), ("weeks", 604800)]),
)
def test_an_age_is_so_long_before_now(count: int, unit: tuple[str, int]) -> None:
    word, seconds = unit
    for text in (f"{count}{word} ago", f" {count} {word.upper()}  ago "):
        assert NOW - parse_moment(text, now=NOW) == timedelta(seconds=count * seconds)


def test_a_token_is_told_from_a_time_by_its_form() -> None:
    token = StreamToken.scalar(STREAM, Seq(7))
    assert parse_as_of(str(token), STREAM, now=NOW) == token
    assert parse_as_of("now", STREAM, now=NOW) == NOW
    with pytest.raises(PositionError, check=coded("invalid_token")):
        parse_as_of(str(StreamToken.scalar(StreamId(UUID(int=1 << 100)), Seq(7))), STREAM, now=NOW)
    for text in ("", "soon", "2026-13-01", "10 parsecs ago", "1000000d ago", "10ms ago", "2hs ago", "ago"):
        with pytest.raises(PositionError, check=coded("invalid_time")) as caught:
            parse_as_of(text, STREAM, now=NOW)
        assert "2026-03-01" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "1.5", "1e9", "20260301", "20260301123", "1767225600", "1712120112345", "1767225600000000000"],
)
def test_a_bare_number_is_no_time_because_its_unit_would_be_a_guess(text: str) -> None:
    with pytest.raises(PositionError, match="bare number", check=coded("invalid_time")):
        parse_as_of(text, STREAM, now=NOW)


def test_iso_times_without_separators_are_times_if_a_letter_marks_them() -> None:
    assert parse_moment("20260301T123000Z", now=NOW) == datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
