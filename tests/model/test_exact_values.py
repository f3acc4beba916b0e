"""Texts of values: kept exactly and returned unchanged, or not kept at all; compared with a real PostgreSQL."""

import math
import random
import struct
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.model.column_texts import json_column, render_column
from millstream.model.exact_values import INEXACT, array_of, storage_values, text_parser, text_renderer
from millstream.model.pgtypes import log_type
from millstream.model.records import INSTANT
from millstream.model.schema import Column, PgType
from millstream.testing.pytest_plugin import Database

NOWHERE = Column("c", pa.string(), PgType(0, -1, "?"))

KINDS = [
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.bool_(),
    pa.float32(),
    pa.float64(),
    pa.date32(),
    pa.timestamp("us"),
    INSTANT,
    pa.binary(),
    pa.decimal128(12, 2),
    pa.decimal128(38, 38),
    pa.string(),
    pa.list_(pa.string()),
    pa.list_(pa.int32()),
    pa.list_(pa.date32()),
    pa.list_(INSTANT),
    pa.list_(pa.float64()),
    pa.list_(pa.binary()),
]
LIKELY = st.text(' {}",\\0123456789-+:.eNULainfty\t', max_size=30) | st.from_regex(
    r"-?[0-9]{1,20}(\.[0-9]{1,20})?", fullmatch=True
)


@given(st.sampled_from(KINDS), LIKELY | st.text(max_size=20))
def test_a_text_that_is_held_is_given_back_to_the_letter(kind: pa.DataType, text: str):
    value = text_parser(kind)(text)
    if value is not INEXACT:
        assert text_renderer(kind)(value) == text
        array = array_of([value, None], kind)
        assert storage_values(array)[1] is None
        assert render_column(array, NOWHERE) == [text, None]


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (pa.int16(), ["32768", "-32769", "+1", "01", " 1", "1_0", "-0", "", "1.0"]),
        (pa.int64(), ["9223372036854775808", "-9223372036854775809"]),
        (pa.bool_(), ["true", "T", ""]),
        (
            pa.date32(),
            ["infinity", "-infinity", "0044-03-15 BC", "10000-01-01", "2023-02-29", "20240101", "2024-W01-1"],
        ),
        (
            pa.timestamp("us"),
            ["infinity", "2024-01-01 24:00:00", "294276-12-31 23:59:59.999999", "2024-01-01 00:00:00.10"],
        ),
        (INSTANT, ["infinity", "2024-01-01 00:00:00", "2024-01-01 00:00:00+01", "0044-03-15 00:00:00+00 BC"]),
        (pa.binary(), ["\\x0", "\\xAB", "abc", "\\x 00"]),
        (pa.decimal128(4, 2), ["NaN", "Infinity", "100.00", "1.0", "1.000", "-0.00", "00.10", "1e2", ".10"]),
        (pa.list_(pa.int32()), ["[0:1]={1,2}", "{{1,2},{3,4}}", "{1,a}", "{1, 2}", "{1,}", "{", "{1", "1}", ""]),
        (pa.list_(pa.date32()), ["{2024-01-01,infinity}"]),
        (pa.list_(pa.string()), ['{"a"}', "{a b}", "{null}", '{"}', '{a"b}']),
        (
            pa.float64(),
            ["1.50", "inf", "nan", "1e5", "0x10", "1e400", "1E+20", ".5", "0.00001", "100000000000000000000"],
        ),
        (pa.float32(), ["1234567", "3.5e+38", "0.1000000015"]),
    ],
    ids=lambda value: str(value) if isinstance(value, pa.DataType) else "",
)
def test_what_a_type_cannot_hold_to_the_letter_is_inexact(kind: pa.DataType, texts: list[str]):
    assert [text for text in texts if text_parser(kind)(text) is not INEXACT] == []


def test_values_at_the_edges_are_held():
    assert text_parser(pa.list_(pa.int32()))("{}") == []
    assert text_parser(pa.list_(pa.string()))('{"",NULL,"NULL","a\\"\\\\b"}') == ["", None, "NULL", 'a"\\b']
    assert text_parser(pa.date32())("0001-01-01") == -719162
    assert text_parser(INSTANT)("1969-12-31 23:59:59.999999+00") == -1
    assert text_parser(pa.float64())("-0") == 0.0
    assert text_parser(pa.float32())("NaN") != text_parser(pa.float32())("NaN")
    assert text_parser(pa.decimal128(4, 2))("-99.99") == Decimal("-99.99")
    assert text_parser(pa.binary())("\\x") == b""


# --- against PostgreSQL --------------------------------------------------------------------------------------------

SESSION = (
    "SET datestyle = 'ISO'; SET timezone = 'UTC'; SET intervalstyle = 'postgres'; SET bytea_output = 'hex';"
    " SET extra_float_digits = 3"
)
ROWS = 400


def _double(rng: random.Random) -> float:
    return struct.unpack(">d", rng.randbytes(8))[0]


# For each type an expression over a seeded random number r (0 to 1) and a row number n, with edge
# cases.
EXPRESSIONS = {
    "smallint": "(r * 65535 - 32768)::int2",
    "integer": "(r * 4294967295 - 2147483648)::int4",
    "bigint": "(r * 1.8446e19 - 9.223e18)::int8",
    "boolean": "r < 0.5",
    "real": "((r - 0.5) * power(10::float8, (n % 77) - 38))::float4",
    "double precision": "(r - 0.5) * power(10::float8, (n % 600) - 300)",
    "numeric(12,2)": "((r - 0.5) * 1e9)::numeric(12,2)",
    "numeric(38,20)": "((r - 0.5) * 1e17)::numeric(38,20)",
    "numeric(3,-2)": "((r - 0.5) * 99000)::numeric(3,-2)",
    "numeric(2,4)": "(r * 0.0099)::numeric(2,4)",
    "text": "md5(r::text)",
    "character(9)": "left(md5(r::text), n % 9)",
    "date": "date '0001-01-01' + (r * 3652058)::int",
    "timestamp": "timestamp '0001-01-01' + r * interval '9998 years' + (n % 4) * interval '1.5 s'",
    "timestamp with time zone": "timestamptz '1970-01-01' + (r - 0.5) * interval '900 years'",
    "bytea": "decode(md5(r::text), 'hex')",
    "uuid": "md5(r::text)::uuid",
    "jsonb": "jsonb_build_object('a', r, 'b', n)",
    "integer[]": "ARRAY[n, NULL, -n]",
    "text[]": """ARRAY[md5(r::text), NULL, '', 'NULL', 'nUll', E'q"\\\\ b', '{a,b}', E'\\t', E'\\u00a0', 'ä']""",
    "date[]": "ARRAY[date '2000-01-01' + n]",
    "timestamp with time zone[]": "ARRAY[timestamptz '2000-01-01' + r * interval '1 year']",
    "double precision[]": "ARRAY[r, -r * 1e20, 'NaN', '-Infinity', '-0']",
    "numeric(9,3)[]": "ARRAY[r, NULL, n]::numeric(9,3)[]",
    "bytea[]": "ARRAY[decode(md5(r::text), 'hex'), '']",
    "boolean[]": "ARRAY[true, false, NULL]",
}


def _kinds() -> list[object]:
    """Return the kinds of values; numbers with such a scale need PostgreSQL 15."""
    newer = {"numeric(3,-2)", "numeric(2,4)"}
    return [pytest.param(kind, marks=[pytest.mark.since_postgres(15)] if kind in newer else []) for kind in EXPRESSIONS]


@pytest.mark.parametrize("kind", _kinds())
def test_every_value_postgresql_makes_is_held_and_given_back(postgres: Database, kind: str):
    with postgres.connect() as connection:
        connection.execute(SESSION)
        connection.execute("SELECT setseed(0.25)")
        connection.execute(f"CREATE TABLE t (v {kind})")
        connection.execute(
            f"INSERT INTO t SELECT ({EXPRESSIONS[kind]})::{kind} FROM (SELECT random() AS r, n FROM generate_series(1, {ROWS}) n) s"
        )
        oid, modifier = connection.execute(
            "SELECT atttypid::int, atttypmod FROM pg_attribute WHERE attrelid = 't'::regclass AND attname = 'v'"
        ).fetchone()
        with connection.cursor() as cursor, cursor.copy("COPY t TO STDOUT") as copy:
            texts = [_unescape(line) for line in b"".join(copy).decode().splitlines()]
    assert len(texts) == ROWS
    arrow = log_type(oid, modifier)
    assert pa.types.is_string(arrow) == (kind in {"text", "character(9)", "uuid", "jsonb"})
    values = [text_parser(arrow)(text) for text in texts]
    assert [text for text, value in zip(texts, values, strict=True) if value is INEXACT] == []
    assert render_column(array_of(values, arrow), NOWHERE) == texts


def _unescape(text: str) -> str:
    return text.replace("\\\\", "\0").replace("\\t", "\t").replace("\0", "\\")


def test_floats_read_as_postgresql_prints_them(postgres: Database):
    rng = random.Random(7)
    doubles = [_double(rng) for _ in range(3000)] + [
        float(f"{rng.randint(1, 10**17)}e{rng.randint(-40, 30)}") for _ in range(3000)
    ]
    doubles += [2.0**power for power in range(-1074, 1024, 7)]
    # Few short numbers lie half-way between two doubles: PostgreSQL takes more digits there.
    doubles += [2.711931410949051e16, 1e23, 9007199254740993.0, 5e-324, 1e15, 999999999999999.0, 0.0001, 0.00001, -0.0]
    doubles = [value for value in doubles if not math.isnan(value)]
    reals = [struct.unpack(">f", rng.randbytes(4))[0] for _ in range(3000)]
    reals = [value for value in reals if not math.isnan(value)] + [16777216.0, 33554432.0, 1e6, 123456.0, 1e10, 1e-5]
    with postgres.connect() as connection:
        for kind, values in ((pa.float64(), doubles), (pa.float32(), reals)):
            name = "float8" if kind == pa.float64() else "float4"
            query = f"SELECT v::{name}::text FROM unnest(%s::float8[]) WITH ORDINALITY AS t(v, n) ORDER BY n"
            texts = [row[0] for row in connection.execute(query, [values]).fetchall()]
            assert [text_renderer(kind)(value) for value in values] == texts


# --- columns -------------------------------------------------------------------------------------------------------


def test_json_has_numbers_where_it_holds_them_exactly():
    number = Column("n", pa.int64(), PgType(20, -1, "bigint"))
    values = [1, 2**53, 2**53 + 1, -(2**53), -(2**53) - 1, None]
    expected = [1, 2**53, "9007199254740993", -(2**53), "-9007199254740993", None]
    assert json_column(pa.array(values, pa.int64()), number) == expected
    floats = pa.array([0.1, float("nan"), float("-inf"), None], pa.float32())
    assert json_column(floats, number) == [0.1, "NaN", "-Infinity", None]
    assert json_column(pa.array([Decimal("1.50")], pa.decimal128(4, 2)), number) == ["1.50"]
    assert json_column(pa.array([True, None]), Column("b", pa.bool_(), PgType(16, -1, "boolean"))) == ["t", None]
    assert json_column(pa.array([True, None]), Column("transactional", pa.bool_())) == [True, None]


def test_a_logical_messages_content_is_text_where_it_is_utf8():
    content = Column("content", pa.binary())
    assert render_column(pa.array([b"h\xc3\xa9", b"\xff", None, b""]), content) == ["hé", "\\xff", None, ""]
    assert render_column(pa.array([b"ab"]), Column("c", pa.binary(), PgType(17, -1, "bytea"))) == ["\\x6162"]
