"""The renderer against PostgreSQL: values go in by the binary protocol, and PostgreSQL's text is compared."""

import random
import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import pq

from millstream.testing.oracle import pgtext
from millstream.testing.pytest_plugin import Database

EPOCH_DAYS = 10_957  # days from 1970 to 2000, which PostgreSQL counts from
EPOCH_US = EPOCH_DAYS * 86_400_000_000
RANDOM = random.Random(20)


def doubles() -> list[float]:
    bits = [struct.unpack(">d", RANDOM.randbytes(8))[0] for _ in range(400)]
    edges = [0.0, -0.0, 5e-324, 1.7976931348623157e308, 1e15, 1e14, 123456789012345.6, 1e-4, 9.9e-5, 0.1, 1 / 3, 1e22]
    near = [RANDOM.randrange(-(10**18), 10**18) / 10 ** RANDOM.randrange(25) for _ in range(400)]
    return edges + bits + near + [float("inf"), float("-inf"), float("nan")]


def singles() -> list[float]:
    bits = [struct.unpack(">f", RANDOM.randbytes(4))[0] for _ in range(400)]
    edges = [0.0, -0.0, 1e6, 999999.0, 1234567.0, 1e-4, 9.9e-5, 0.1, 16777216.0, 1e-45, 3.4028235e38]
    near = [
        struct.unpack(">f", struct.pack(">f", RANDOM.uniform(-2, 2) * 10 ** RANDOM.randrange(12)))[0]
        for _ in range(400)
    ]
    return edges + bits + near + [float("inf"), float("-inf"), float("nan")]


def days() -> list[int]:
    edges = [0, -1, -719_162, -719_163, 2_932_896, 2_932_897, -141_428, 11_016, -2_440_588 + 1, EPOCH_DAYS]
    return edges + [RANDOM.randrange(-2_000_000, 5_000_000) for _ in range(400)]


def moments() -> list[int]:
    edges = [0, -1, 1, 1_000_000, 1_500_000, 253_402_300_799_999_999, -62_135_596_800_000_000]
    return edges + [RANDOM.randrange(-100_000_000_000_000_000, 9_000_000_000_000_000_000) for _ in range(400)]


CASES: dict[str, tuple[pa.DataType, Callable[[], list[Any]], Callable[[Any], bytes]]] = {
    "int2": (pa.int16(), lambda: [0, -32768, 32767], lambda v: struct.pack(">h", v)),
    "int4": (pa.int32(), lambda: [0, -(2**31), 2**31 - 1], lambda v: struct.pack(">i", v)),
    "int8": (pa.int64(), lambda: [0, -(2**63), 2**63 - 1], lambda v: struct.pack(">q", v)),
    "bool": (pa.bool_(), lambda: [True, False], lambda v: struct.pack(">?", v)),
    "float8": (pa.float64(), doubles, lambda v: struct.pack(">d", v)),
    "float4": (pa.float32(), singles, lambda v: struct.pack(">f", v)),
    "date": (pa.date32(), days, lambda v: struct.pack(">i", v - EPOCH_DAYS)),
    "timestamp": (pa.timestamp("us"), moments, lambda v: struct.pack(">q", v - EPOCH_US)),
    "timestamptz": (pa.timestamp("us", tz="UTC"), moments, lambda v: struct.pack(">q", v - EPOCH_US)),
    "bytea": (pa.binary(), lambda: [b"", b"\x00\xff\\'", RANDOM.randbytes(300)], bytes),
    "text": (pa.string(), lambda: ["", "NULL", "ünï\t\\N\n\U0001f980", "\x01"], str.encode),
}


def printed(connection: "psycopg.Connection[Any]", kind: str, raw: bytes) -> str:
    row = connection.execute("SELECT %s::regtype::oid::int", [kind]).fetchone()
    assert row is not None
    result = connection.pgconn.exec_params(b"SELECT $1", [raw], [row[0]], [pq.Format.BINARY], pq.Format.TEXT)
    assert result.status == pq.ExecStatus.TUPLES_OK, result.error_message
    value = result.get_value(0, 0)
    assert value is not None
    return value.decode()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", CASES)
def test_every_value_is_printed_as_postgresql_prints_it(postgres: Database, kind: str):
    arrow, make, pack = CASES[kind]
    values = make()
    with postgres.connect() as connection:
        connection.execute("SET timezone = 'UTC'")
        expected = [printed(connection, kind, pack(value)) for value in values]
    storage = {pa.date32(): pa.int32(), pa.timestamp("us"): pa.int64(), pa.timestamp("us", tz="UTC"): pa.int64()}
    array = pa.array(values, storage.get(arrow, arrow)).cast(arrow)
    assert pgtext.texts(array) == expected
    assert pgtext.texts(pa.chunked_array([array, pa.nulls(2, arrow)])) == [*expected, None, None]


@pytest.mark.parametrize(("precision", "scale"), [(38, 0), (38, 38), (38, 10), (12, 2), (1, 1)])
def test_decimals_are_printed_with_all_their_digits(postgres: Database, precision: int, scale: int):
    numbers = [0, 1, -1, 10**precision - 1, 1 - 10**precision, *(RANDOM.randrange(10**precision) for _ in range(50))]
    values = [Decimal(number).scaleb(-scale) for number in numbers]
    # scaleb rounds to the context's 28 digits, so exact text is used
    values = [Decimal((0 if n >= 0 else 1, tuple(map(int, str(abs(n)))), -scale)) for n in numbers]
    with postgres.connect() as connection:
        query = f"SELECT (%s::numeric({precision},{scale}))::text"
        expected = [connection.execute(query, [format(value, "f")]).fetchone() for value in values]
    assert [(text,) for text in pgtext.texts(pa.array(values, pa.decimal128(precision, scale)))] == expected


@pytest.mark.parametrize(
    ("kind", "arrow", "values"),
    [
        ("int4[]", pa.list_(pa.int32()), [[], [1, None, -3], [None]]),
        ("text[]", pa.list_(pa.string()), [["", "null", "NuLL", None, "a b", 'q"\\', "{}", ",", "\t", "\u00a0", "x"]]),
        ("bytea[]", pa.list_(pa.binary()), [[b"", b"\x00\xff"]]),
        ("bool[]", pa.list_(pa.bool_()), [[True, False, None]]),
        ("float8[]", pa.list_(pa.float64()), [[0.1, float("inf"), float("nan"), -0.0]]),
        ("numeric(9,2)[]", pa.list_(pa.decimal128(9, 2)), [[Decimal("1.50"), Decimal("-0.01")]]),
    ],
)
def test_arrays_are_printed_as_postgresql_prints_them(
    postgres: Database, kind: str, arrow: pa.DataType, values: list[Any]
):
    with postgres.connect() as connection:
        expected = [connection.execute(f"SELECT %s::{kind}::text", [value]).fetchone() for value in values]
    assert [(text,) for text in pgtext.texts(pa.array(values, arrow))] == expected


def test_a_type_that_no_lake_column_has_is_refused():
    with pytest.raises(TypeError, match="duration"):
        pgtext.texts(pa.array([1], pa.duration("us")))
