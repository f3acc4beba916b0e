"""FORAGE_NOW fixes the time; a text that is no time is refused."""

from __future__ import annotations

import time

import pytest

from millstream_forage.clock import InvalidTime, clock_of, parse_ns


@pytest.mark.parametrize(
    ("text", "moment_ns"),
    [
        ("1970-01-01T00:00:01Z", 1_000_000_000),
        ("1970-01-01T00:00:00.000001", 1_000),
        ("1970-01-01T00:00:00.000001002Z", 1_002),
        ("1969-12-31T23:59:59.9999999+00:00", -100),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1969-12-31T23:59:59Z", -1_000_000_000),
        ("1700000000000000001", 1_700_000_000_000_000_001),
        ("-5", -5),
    ],
)
def test_a_moment_is_iso_8601_or_whole_nanoseconds(text: str, moment_ns: int):
    assert parse_ns(text) == moment_ns
    assert clock_of({"FORAGE_NOW": text})() == moment_ns


@pytest.mark.parametrize("text", ["now", "1.5", "--5", str(1 << 63), "9" * 5000, "2026-13-01"])
def test_another_text_is_refused_with_the_variables_name(text: str):
    with pytest.raises(InvalidTime, match="FORAGE_NOW"):
        clock_of({"FORAGE_NOW": text})


def test_without_the_variable_the_time_passes():
    assert clock_of({})() <= time.time_ns()
    assert clock_of({"FORAGE_NOW": ""}) is time.time_ns
