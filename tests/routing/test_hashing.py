"""A key's hash never changes, on any machine, whichever type holds the values."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import RoutingError
from millstream.routing._xxh64 import hash_bytes
from millstream.routing.hashing import key_hashes
from millstream.routing.shard_map import ShardMap
from millstream.testing.errors import coded


def one(*values: tuple[Any, pa.DataType]) -> int:
    return int(key_hashes([pa.array([value], kind) for value, kind in values])[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_the_function_is_xxh64_as_its_authors_publish_it(text: bytes, expected: int) -> None:
    hashes = np.zeros(1, dtype=np.uint64)
    data = np.frombuffer(text + b"\0", dtype=np.uint8)
    hash_bytes(data, np.array([0, len(text)], dtype=np.int64), np.empty(0, dtype=np.bool_), 0, hashes)
    assert int(hashes[0]) == expected


GOLDEN: list[tuple[list[tuple[Any, pa.DataType]], int]] = [
    ([(1, pa.int64())], 0x8AFB45D6A8B39709),
    ([(-1, pa.int64())], 0x0AD7F61289875125),
    ([(None, pa.int64())], 0xEF46DB3751D8E999),
    ([("a", pa.string())], 0x0B507C7A858D4C7B),
    ([("", pa.string())], 0x5A68F3B1643C966F),
    ([("Grüße aus dem Mühlbach, wo das Rad sich dreht", pa.string())], 0x6D0CA29B7E53E60E),
    ([(b"\x00\xff", pa.binary())], 0x64A79313513249B7),
    ([(True, pa.bool_())], 0x3CB892E9698F5161),
    ([(1.5, pa.float64())], 0x9346FF2B7E9F16A5),
    ([(dt.date(2026, 1, 2), pa.date32())], 0x23E5CBFF9AFF1259),
    ([(dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC), pa.timestamp("us", "UTC"))], 0x1514D19E896A1BFB),
    ([(Decimal("-12.50"), pa.decimal128(10, 2))], 0x15AF63442114BECF),
    ([(7, pa.int64()), ("x", pa.string())], 0x8114D296CBF4FD1A),
    ([("x", pa.string()), (None, pa.int64())], 0x231D74EC8F82E663),
]


@pytest.mark.parametrize(("key", "expected"), GOLDEN, ids=[str(key) for key, _ in GOLDEN])
def test_keys_have_the_hashes_that_they_always_had(key: list[tuple[Any, pa.DataType]], expected: int) -> None:
    assert one(*key) == expected


def test_shards_of_a_ring_are_those_that_they_always_were() -> None:
    ring = ShardMap.ring([0, 1, 2, 3])  # type: ignore[list-item]
    found = ring.shards_of(key_hashes([pa.array(range(32), pa.int64())]))
    assert found.tolist() == [
        1,
        3,
        3,
        2,
        1,
        2,
        2,
        1,
        2,
        2,
        3,
        3,
        1,
        0,
        3,
        2,
        0,
        0,
        3,
        0,
        2,
        0,
        2,
        3,
        3,
        3,
        3,
        0,
        2,
        2,
        1,
        3,
    ]


LONGS = st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=30)
TEXTS = st.lists(st.none() | st.text(max_size=80), min_size=1, max_size=30)


@given(LONGS)
def test_whole_numbers_hash_alike_whatever_their_width(values: list[int | None]) -> None:
    wide = key_hashes([pa.array(values, pa.int64())])
    narrow = key_hashes([pa.array(values, pa.int32())])
    assert (wide == narrow).all()
    assert (key_hashes([pa.array(values, pa.int64()).dictionary_encode()]) == wide).all()
    assert (
        key_hashes([pa.chunked_array([pa.array(values[:1], pa.int64()), pa.array(values[1:], pa.int64())])]) == wide
    ).all()


@given(TEXTS)
def test_texts_hash_alike_whatever_holds_them(values: list[str | None]) -> None:
    plain = key_hashes([pa.array(values, pa.string())])
    assert (key_hashes([pa.array(values, pa.large_string())]) == plain).all()
    assert (key_hashes([pa.array(values, pa.string()).dictionary_encode()]) == plain).all()
    padded = pa.array(["before", *values, "behind"], pa.string()).slice(1, len(values))
    assert (key_hashes([padded]) == plain).all()


@given(
    st.lists(
        st.none() | st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20, places=2),
        min_size=1,
    )
)
def test_decimals_hash_alike_whatever_their_scale(values: list[Decimal | None]) -> None:
    few = key_hashes([pa.array(values, pa.decimal128(38, 2))])
    assert (key_hashes([pa.array(values, pa.decimal128(38, 9))]) == few).all()


def test_null_is_none_of_the_values_that_look_like_it() -> None:
    seen = {
        one((None, pa.int64())), one((0, pa.int64())), one(("", pa.string())), one((b"", pa.binary())), one((False, pa.bool_())),
        one((0.0, pa.float64())), one((dt.date(1970, 1, 1), pa.date32())), one((Decimal(0), pa.decimal128(3, 0))),
        one((dt.datetime(1970, 1, 1), pa.timestamp("us"))),  # noqa: DTZ001
    }  # fmt: skip
    assert len(seen) == 9
    assert one((None, pa.int64())) == one((None, pa.string())) == one((None, pa.null()))


def test_doubles_that_are_equal_hash_alike() -> None:
    assert one((0.0, pa.float64())) == one((-0.0, pa.float64()))
    assert one((1.5, pa.float32())) == one((1.5, pa.float64()))
    quiet, other = np.array([0x7FF8000000000000, 0xFFF8000000000001], dtype=np.uint64).view(np.float64)
    assert one((quiet, pa.float64())) == one((other, pa.float64()))


def test_moments_hash_alike_whatever_their_unit() -> None:
    when = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    found = {one((when, pa.timestamp(unit, "UTC"))) for unit in ("s", "ms", "us", "ns")}
    assert len(found) == 1
    assert one((when.date(), pa.date32())) == one((when.date(), pa.date64()))


def test_the_order_of_columns_counts() -> None:
    assert one(("a", pa.string()), ("b", pa.string())) != one(("b", pa.string()), ("a", pa.string()))
    assert one(("ab", pa.string()), ("c", pa.string())) != one(("a", pa.string()), ("bc", pa.string()))


def test_a_list_tells_no_rows_apart() -> None:
    with pytest.raises(RoutingError, check=coded("invalid_route"), match="list"):
        key_hashes([pa.array([[1]])])
