"""Digests of requests: of the table and the rows alone, whichever others they came with."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from millstream.ingest.digests import digests_of

TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "i2": (pa.int16(), st.integers(-3, 3)),
    "i8": (pa.int64(), st.integers(-(1 << 62), 1 << 62)),
    "f4": (pa.float32(), st.floats(width=32, allow_nan=False).map(lambda x: x + 0.0)),
    "f8": (pa.float64(), st.floats(allow_nan=False).map(lambda x: x + 0.0)),
    "b": (pa.bool_(), st.booleans()),
    "s": (pa.string(), st.text(max_size=3)),
    "bin": (pa.binary(), st.binary(max_size=3)),
    "d": (pa.date32(), st.dates()),
    "ts": (pa.timestamp("us", tz="UTC"), st.datetimes(timezones=st.just(dt.UTC))),
    "dec": (pa.decimal128(38, 9), st.integers(-5, 5).map(Decimal)),
    "l": (pa.list_(pa.string()), st.lists(st.none() | st.text(max_size=2), max_size=3)),
    "li": (pa.list_(pa.int64()), st.lists(st.none() | st.integers(0, 3), max_size=3)),
}
ROWS = st.fixed_dictionaries({name: st.none() | values for name, (_, values) in TYPES.items()})
REQUESTS = st.lists(st.lists(ROWS, min_size=1, max_size=4), min_size=1, max_size=5)


def columns_of(rows: list[dict[str, Any]], names: list[str]) -> list[pa.Array]:
    return [pa.array([row.get(name) for row in rows], TYPES[name][0]) for name in names]


def digest(rows: list[dict[str, Any]], names: list[str]) -> int:
    return digests_of("public.t", names, columns_of(rows, names), [len(rows)], [True])[0]


@given(REQUESTS, st.data())
def test_a_digest_is_the_rows_own(requests: list[list[dict[str, Any]]], data: st.DataObject) -> None:
    names = list(TYPES)
    columns = columns_of([row for request in requests for row in request], names)
    counts = [len(request) for request in requests]
    together = digests_of("public.t", names, columns, counts, [True] * len(counts))
    # As a slice of others, too.
    shifted = [pa.concat_arrays([column[:1], column])[1:] for column in columns]
    assert digests_of("public.t", names, shifted, counts, [True] * len(counts)) == together
    for request, found in zip(requests, together, strict=True):
        some = [name for name in names if any(row[name] is not None for row in request)]
        order = data.draw(st.permutations(some + data.draw(st.lists(st.sampled_from(names), unique=True))))
        alone = digest(request, list(dict.fromkeys(order)))
        assert alone == found
        assert 0 <= found < 1 << 63
    for one, found in zip(requests, together, strict=True):
        for other, another in zip(requests, together, strict=True):
            assert (one == other) == (found == another)
    elsewhere = digests_of("public.u", names, columns, counts, [True] * len(counts))
    assert not set(elsewhere) & set(together)
    skipped = digests_of("public.t", names, columns, counts, [i == 0 for i in range(len(counts))])
    assert skipped == [together[0], *[0] * (len(counts) - 1)]


def test_what_moves_between_rows_or_columns_is_another_digest() -> None:
    found = {
        digest(rows, ["i8", "s", "l", "i2"])
        for rows in (
            [{"i8": 1}, {"i8": 2}],
            [{"i8": 2}, {"i8": 1}],
            [{"i8": 1}, {"i8": 2}, {}],
            [{"i2": 1}, {"i2": 2}],
            [{"s": "ab"}, {"s": "c"}],
            [{"s": "a"}, {"s": "bc"}],
            [{"s": "a"}, {"s": None}],
            [{"s": "a"}, {"s": ""}],
            [{"l": ["a", "b"]}, {"l": []}],
            [{"l": ["a"]}, {"l": ["b"]}],
            [{"l": ["a", None]}, {"l": ["b"]}],
            [{"l": ["a"]}, {"l": [None, "b"]}],
        )
    }
    assert len(found) == 12
