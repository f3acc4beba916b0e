"""Partition templates: one name for rows that belong together, and no two partitions of one name."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.routing.rows import batch_of, schema_of

from millstream.errors import RoutingError, UsageError
from millstream.routing.partitions import PartitionTemplate
from millstream.testing.errors import coded

INSTANT = pa.timestamp("us", "UTC")
FIRST, LAST = (dt.datetime(*day) for day in ((1, 1, 1), (9999, 12, 31)))  # noqa: DTZ001 (a local time)
WHEN = dt.datetime(2026, 3, 4, 5, 6, 7, tzinfo=dt.UTC)


def names(template: str, columns: dict[str, pa.Array]) -> list[str]:
    schema = schema_of({name: values.type for name, values in columns.items()})
    found, codes = PartitionTemplate.parse(template).partitions(schema, batch_of(schema, columns))
    assert found == sorted(set(found))
    assert set(codes.tolist()) <= set(range(len(found)))
    return [found[code] for code in codes]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("%Y-%m-%d", "2026-03-04"),
        ("{time:%Y-%m}", "2026-03"),
        ("{time:%H:%M:%S}", "05:06:07"),
        ("{__table}/%Y", "public.clicks/2026"),
        ("{country}", "de"),
        ("c={country}/d={time:%j}", "c=de/d=063"),
        ("100%%", "100%"),
        ("all", "all"),
        ("{n}-{flag}", "7-true"),
        ("%Y{country}%m", "2026de03"),
    ],
)
def test_templates_are_filled_in(template: str, expected: str) -> None:
    columns = {
        "time": pa.array([WHEN], INSTANT),
        "country": pa.array(["de"]),
        "n": pa.array([7]),
        "flag": pa.array([True]),
    }
    assert names(template, columns) == [expected]


@given(
    st.lists(
        st.none() | st.datetimes(min_value=FIRST, max_value=LAST),
        min_size=1,
        max_size=20,
    )
)
def test_a_day_is_spelled_as_the_calendar_spells_it(moments: list[dt.datetime | None]) -> None:
    found = names("%Y-%m-%d", {"time": pa.array(moments, pa.timestamp("us"))})
    assert found == ["~" if when is None else when.date().isoformat() for when in moments]
    hours = names("{time:%Y%m%d%H}", {"time": pa.array(moments, pa.timestamp("us"))})
    assert hours == [
        "~" if when is None else f"{when.year:04d}{when.month:02d}{when.day:02d}{when.hour:02d}" for when in moments
    ]


@given(st.lists(st.none() | st.text(max_size=300), min_size=1, max_size=30))
def test_two_values_never_make_one_partition(values: list[str | None]) -> None:
    found = names("{country}", {"country": pa.array(values, pa.string())})
    assert len(set(found)) == len(set(values))
    assert all(len(name.encode()) < 2000 for name in found)


def test_a_date_and_years_beyond_the_calendar_have_partitions_too() -> None:
    assert names("%Y-%m-%d", {"time": pa.array([dt.date(2026, 1, 2), None], pa.date32())}) == ["2026-01-02", "~"]
    far = pa.array([2**62], pa.int64()).cast(INSTANT)
    assert names("%Y", {"time": far})[0].startswith("~")


@pytest.mark.parametrize(
    "text", ["", "{", "}", "{}", "%", "%q", "{a:%q}", "{a:plain}", "a%", "{__table:%Y}", "{:%Y}", "{{a}}"]
)
def test_what_is_no_template_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        PartitionTemplate.parse(text)


@pytest.mark.parametrize(
    ("template", "columns", "match"),
    [
        ("{id:%Y}", {"id": pa.array([1])}, "take a moment"),
        ("{ids}", {"ids": pa.array([[1]])}, "told apart"),
        ("{id}", {"id": pa.array(range(1001))}, "1000 partitions"),
    ],
)
def test_rows_that_have_no_partition_are_refused_by_name(
    template: str, columns: dict[str, pa.Array], match: str
) -> None:
    with pytest.raises(RoutingError, check=coded("invalid_route"), match=match) as caught:
        names(template, columns)
    assert caught.value.details["table"] == "public.clicks"


def test_rows_of_a_table_without_the_column_belong_to_the_partition_of_null() -> None:
    """Regression: a row without a time was refused until another had brought the column, and then it was `~`."""
    assert names("%Y-%m-%d/{region}", {"region": pa.array(["eu", "us"])}) == ["~/eu", "~/us"]
    assert names("{region}/%Y", {"id": pa.array([1])}) == ["~/~"]
