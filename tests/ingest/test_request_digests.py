"""Digests of requests depend on the table and the rows alone, not on other requests in the batch."""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from millstream.codec.checksums import crc32c
from millstream.ingest.request_digests import digests_of

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
    # Also as a slice of other arrays.
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


PACKED: dict[str, Callable[[Any], bytes]] = {
    "i2": struct.Struct("<h").pack,
    "i8": struct.Struct("<q").pack,
    "f4": struct.Struct("<f").pack,
    "f8": struct.Struct("<d").pack,
    "b": lambda value: bytes([value]),
    "s": str.encode,
    "bin": bytes,
    "d": lambda value: struct.pack("<i", (value - dt.date(1970, 1, 1)).days),
    "ts": lambda value: struct.pack(
        "<q", (value - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)
    ),
    "dec": lambda value: int(value * 10**9).to_bytes(16, "little", signed=True),
    "l": str.encode,
    "li": struct.Struct("<q").pack,
}
LENGTHS = struct.Struct("<i")


def parts_by_the_format(name: str, kind: pa.DataType, values: list[Any], tag: int) -> list[tuple[bytes, int]]:
    """Return a column's parts with their tags."""
    nulls = [(bytes(value is not None for value in values), tag)] if None in values else []
    if pa.types.is_list(kind):
        lengths = b"".join(LENGTHS.pack(len(value or ())) for value in values)
        items = [item for value in values for item in value or ()]
        return [*nulls, (lengths, tag + 1), *parts_by_the_format(name, kind.value_type, items, tag + 2)]
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        texts = [b"" if value is None else PACKED[name](value) for value in values]
        return [*nulls, (b"".join(LENGTHS.pack(len(text)) for text in texts), tag + 1), (b"".join(texts), tag + 2)]
    zeros = bytes(1 if pa.types.is_boolean(kind) else kind.bit_width // 8)
    return [*nulls, (b"".join(zeros if value is None else PACKED[name](value) for value in values), tag + 1)]


def digest_by_the_format(table: str, rows: list[dict[str, Any]]) -> int:
    """Compute the digest as docs/internals/FORMAT.md defines it, value by value."""
    mix = 0x9E3779B97F4A7C15
    digest = crc32c(table.encode()) * mix + len(rows)
    for name, (kind, _) in TYPES.items():
        values = [row.get(name) for row in rows]
        if all(value is None for value in values):
            continue
        s = crc32c(name.encode())
        for part, tag in parts_by_the_format(name, kind, values, 1):
            if part:
                s = (s * mix + crc32c(part) + tag) % 2**63
        digest += (s ^ s // 2**29) * mix
    return digest % 2**63


@given(REQUESTS)
def test_a_digest_is_what_the_format_says(requests: list[list[dict[str, Any]]]) -> None:
    columns = columns_of([row for request in requests for row in request], list(TYPES))
    counts = [len(request) for request in requests]
    found = digests_of("public.t", list(TYPES), columns, counts, [True] * len(counts))
    assert found == [digest_by_the_format("public.t", request) for request in requests]


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


def golden_rows() -> list[dict[str, Any]]:
    """Rows of all types, with nulls, empty texts and empty lists among them."""
    full: dict[str, Any] = {
        "i2": -7, "i8": 1 << 60, "f4": 0.5, "f8": -1.25, "b": True, "s": "grün", "bin": b"\x00\xff", "d": dt.date(2024, 2, 29),
        "ts": dt.datetime(2024, 2, 29, 12, 30, tzinfo=dt.UTC), "dec": Decimal("12.5"), "l": ["a", None, "bc"], "li": [1, 2],
    }  # fmt: skip
    partly = {name: value for place, (name, value) in enumerate(full.items()) if place % 2}
    return [full, partly, {"s": "", "l": [], "li": [None], "b": False}, {}, full, {"i8": 5}, {"i8": 6}, {"b": True}]


def test_digests_that_stand_in_logs_are_made_for_ever() -> None:
    """If the same rows had another digest after an upgrade, every write that is sent again would be refused."""
    names = list(TYPES)
    rows = golden_rows()
    counts = [1, 3, 1, 2, 1]
    found = digests_of("public.t", names, columns_of(rows, names), counts, [True] * 5)
    assert found == GOLDEN
    assert digests_of("public.t", ["i8"], columns_of(rows[5:7], ["i8"]), [2], [True]) == [GOLDEN[3]]


GOLDEN = [7061580257458354805, 4726763680472693789, 7061580257458354805, 7942718739588017692, 6516384148168560731]
