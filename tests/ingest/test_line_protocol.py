"""Lines of InfluxDB's line protocol as tables: every rule, at its edge and beyond."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.codec.line_samples import NOW_NS, same

from millstream.errors import IngestError, UsageError
from millstream.ingest.line_protocol import NAMES_MAX, PRECISIONS, Lines, bytes_max_of, tables_of_lines, warm
from millstream.ingest.python_rows import ROWS_BYTES_MAX, table_of
from millstream.testing.errors import coded

LONGEST = "n" * 255


def lines_of(body: bytes | str, precision: str = "ns") -> Lines:
    """Return the lines' tables, after checking that the oracle makes the same."""
    return same(body.encode() if isinstance(body, str) else body, precision)


def one_row(body: bytes | str) -> dict[str, Any]:
    """Return the row of a body of one line, without its time."""
    found = lines_of(body)
    assert found.rejected == []
    (table,) = found.tables
    (row,) = table.rows.to_pylist()
    return {name: value for name, value in row.items() if name not in {"time", "time_ns"}}


def reason(body: bytes | str, precision: str = "ns") -> str:
    """Return the reason why the only line of a body is rejected."""
    found = lines_of(body, precision)
    assert found.tables == []
    (line,) = found.rejected
    assert (line.line, found.rejected_count) == (1, 1)
    return line.reason


def test_a_line_of_every_type():
    row = one_row('cpu,host=a u=1.5,n=-3i,k=7u,ok=t,s="x \\"q\\" \\\\ \n y" 1700000000000000000')
    assert row == {"host": "a", "u": 1.5, "n": -3, "k": Decimal(7), "ok": True, "s": 'x "q" \\ \n y'}


def test_columns_have_the_logs_types_and_come_as_the_lines_bring_them():
    (table,) = lines_of('m,t=x f=1,i=1i,u=1u,s="",b=f 1000\nm g=2,f=3 2000').tables
    assert table.table == "public.m"
    assert table.rows.schema == pa.schema(
        [
            ("time", pa.timestamp("us", tz="UTC")), ("t", pa.string()), ("f", pa.float64()), ("i", pa.int64()), ("u", pa.decimal128(20, 0)),
            ("s", pa.string()), ("b", pa.bool_()), ("g", pa.float64()),
        ]
    )  # fmt: skip
    assert table_of(table.rows).equals(table.rows)
    assert table.rows.column("f").to_pylist() == [1.0, 3.0]
    assert table.rows.column("t").to_pylist() == ["x", None]


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (r"a\ b,t\ \,\==v\ \,\= k\,\ \==1", {"t ,=": "v ,=", "k, =": 1.0}),
        (r"m,t=a\\,u=b f=1", None),
        (r"m,t=a\\\,b f=1", {"t": r"a\\,b", "f": 1.0}),
        (r"m,t=a\n\" f\n=1", {"t": r"a\n\"", r"f\n": 1.0}),
        (r"m=\=,t=1 f=1", {"t": "1", "f": 1.0}),
        (r'm s="a\n\,\ \=\t"', {"s": r"a\n\,\ \=\t"}),
        (r'm s="\\\"\\",t="\\"', {"s": r"\"" + "\\", "t": "\\"}),
        (r'm s="a,b c=d#"', {"s": "a,b c=d#"}),
        ('m,"q"="w" "k"=1', {'"q"': '"w"', '"k"': 1.0}),
        ("m,t=\t f=1", {"t": "\t", "f": 1.0}),
        ('m,é=ü s="😀"', {"é": "ü", "s": "😀"}),
        ("  \tm  \t f=1 \t ", {"f": 1.0}),
        ("m f=1\r\n", {"f": 1.0}),
        ('m s="a\r\nb"\r\n', {"s": "a\r\nb"}),
        ("m f=1\n#", {"f": 1.0}),
    ],
)  # fmt: skip
def test_escapes_and_blanks(line: str, row: dict[str, Any] | None):
    if row is None:
        assert reason(line) == "a tag has no value" or "equals sign" in reason(line)
    else:
        assert one_row(line) == row


def test_a_measurements_name_is_quoted_where_a_tables_must_be():
    found = lines_of('CPU f=1\na.b f=1\na\\ b f=1\nq"q f=1\nuser f=1\ncpu f=1')
    assert [table.table for table in found.tables] == [
        'public."CPU"', 'public."a.b"', 'public."a b"', 'public."q""q"', 'public."user"', "public.cpu",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["t", "T", "true", "True", "TRUE", "f", "F", "false", "False", "FALSE"])
def test_booleans_in_every_spelling(text: str):
    assert one_row(f"m b={text}") == {"b": text[0] in "tT"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1.0), ("-1.5", -1.5), (".5", 0.5), ("5.", 5.0), ("-.5e-3", -0.0005), ("1E+5", 1e5), ("0x1", None), ("+1", None), ("1e", None),
        ("1e+", None), (".", None), ("-", None), ("--1", None), ("1.2.3", None), ("1_0", None), ("t1", None), ("tRUE", None), ("FALSe", None), ("yes", None),
        ("1.5i", None), ("1e5i", None), ("i", None), ("u", None), ("-1u", None), ("-0u", None), ("1ii", None), ("1iu", None), ("'a'", None), ('a"b"', None),
        ("9223372036854775807i", 2**63 - 1), ("-9223372036854775808i", -(2**63)), ("-0i", 0), ("0000000000000000000000000007i", 7),
        ("18446744073709551615u", Decimal(2**64 - 1)), ("00000000000000000000000018446744073709551615u", Decimal(2**64 - 1)),
    ],
)  # fmt: skip
def test_values_and_what_is_none(text: str, value: object):
    if value is None:
        assert reason(f"m v={text}") == "a field's value is no number, no boolean and no string in double quotes"
    else:
        found = one_row(f"m v={text}")["v"]
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (",t=1 f=1", "it has no measurement's name"), (" ,t=1 f=1", "it has no measurement's name"),
        ("m", "it has no fields"), ("m ", "it has no fields"), ("m,t=1", "it has no fields"), ("m,t=1 ", "it has no fields"), ("m\r\n", "it has no fields"),
        ("m,=1 f=1", "a tag has no key"), ("m, f=1", "a tag has no key"), ("m,,t=1 f=1", "a tag has no key"),
        ("m,t f=1", "a tag has no value"), ("m,t= f=1", "a tag has no value"), ("m,t=,u=1 f=1", "a tag has no value"), ("m,t=\r\n", "a tag has no value"),
        ("m,t=a=b f=1", "a tag's value has an equals sign that isn't escaped"),
        ("m,t=1,t=2 f=1", "it has a tag twice"), ("m,t=1,u=2,t=1 f=1", "it has a tag twice"),
        ("m =1", "a field has no key"), ("m f=1,", "a field has no key"), ("m f=1,,g=1", "a field has no key"),
        ("m f", "a field has no value"), ("m f=", "a field has no value"), ("m f=,g=1", "a field has no value"), ("m f= 1", "a field has no value"),
        ("m f,g=1", "a field has no value"), ("m f\\=1", "a field has no value"),
        ("m f=nan", "a field's value is NaN or infinite"), ("m f=NaN", "a field's value is NaN or infinite"), ("m f=-inf", "a field's value is NaN or infinite"),
        ("m f=+Infinity", "a field's value is NaN or infinite"),
        ("m f=1e309", "a float is beyond 64 bits"), ("m f=-1.8e308", "a float is beyond 64 bits"), ("m f=" + "9" * 400, "a float is beyond 64 bits"),
        ("m f=9223372036854775808i", "an integer is beyond 64 bits"), ("m f=-9223372036854775809i", "an integer is beyond 64 bits"),
        ("m f=" + "9" * 5000 + "i", "an integer is beyond 64 bits"), ("m f=18446744073709551616u", "an unsigned integer is beyond 64 bits"),
        ('m f="a', "a string has no end: everything that follows is part of it"), ('m f="a\\"', "a string has no end: everything that follows is part of it"),
        ('m f="a"b', "something follows a string that is neither a comma nor a space"), ('m f="a""b"', "something follows a string that is neither a comma nor a space"),
        ("m f=1 a", "its timestamp is no whole number"), ("m f=1 1.5", "its timestamp is no whole number"), ("m f=1 -", "its timestamp is no whole number"),
        ("m f=1 1i", "its timestamp is no whole number"), ("m f=1 +1", "its timestamp is no whole number"), ("m f=1, g=2", "a field has no key"), ("m f=1 g=2", "its timestamp is no whole number"),
        ("m f=1 9223372036854775808", "its timestamp is beyond the years 1 to 9999, or beyond 64 bits"),
        ("m f=1 -9223372036854775809", "its timestamp is beyond the years 1 to 9999, or beyond 64 bits"),
        ("m f=1 " + "9" * 5000, "its timestamp is beyond the years 1 to 9999, or beyond 64 bits"),
        ("m f=1 1 1", "something follows its timestamp"), ("m f=1 1 # c", "something follows its timestamp"), ("m f=1 1\rx", "something follows its timestamp"),
        (b"m,t=\xff f=1", "it isn't UTF-8"), (b"m\xc3 f=1", "it isn't UTF-8"), (b'm s="\xed\xa0\x80"', "it isn't UTF-8"), (b"m \xf5=1", "it isn't UTF-8"),
        (b"m \xc0\xaf=1", "it isn't UTF-8"), (b'm s="\xf4\x90\x80\x80"', "it isn't UTF-8"),
    ],
)  # fmt: skip
def test_what_may_be_wrong_with_a_line(line: str | bytes, why: str):
    assert reason(line) == why


def test_a_float_of_many_digits_that_rounds_to_infinity_rejects_its_line():
    most = (2**1024 - 2**970) * 10**20  # half way between the largest double and its next would-be neighbour
    found = lines_of(f"m f={most - 1}e-20\nm f={most}e-20\nm f={most + 1}e-20\nm g=1")
    assert [(line.line, line.reason) for line in found.rejected] == [
        (2, "a float is beyond 64 bits"),
        (3, "a float is beyond 64 bits"),
    ]
    (table,) = found.tables
    assert table.rows.column("f").to_pylist() == [1.7976931348623157e308, None]
    assert table.lines.tolist() == [1, 4]


def test_lines_count_from_one_blank_ones_comments_and_those_inside_of_strings_too():
    found = lines_of('\n# c "\n\r\nm s="a\nb\nc"\nm s="d"\n bad\n \t\nm s="e"')
    (table,) = found.tables
    assert table.lines.tolist() == [4, 7, 10]
    assert [(line.line, line.text) for line in found.rejected] == [(8, "bad")]


@pytest.mark.parametrize("body", ["", "\n", "\r\n", "#", "# m f=1", " \t\n\n", "\n#\r\n"])
def test_nothing_said_is_nothing_wrong(body: str):
    assert lines_of(body) == Lines([], [], 0)


def test_what_lies_in_a_string_is_never_a_line_whatever_else_is_wrong():
    found = lines_of('m v=nan,msg="evil\nadmin x=1\n",k=1\nm,t= msg="\nadmin x=2\n"\nm msg="\nadmin x=3" 5 5\nok x=4')
    assert [table.table for table in found.tables] == ["public.ok"]
    assert [line.line for line in found.rejected] == [1, 4, 7]
    assert found.rejected[0].text == 'm v=nan,msg="evil\nadmin x=1\n",k=1'


def test_a_string_without_end_takes_what_follows_and_is_told_once():
    found = lines_of('ok x=1\nm s="a\nok x=2\n')
    assert [(line.line, line.text) for line in found.rejected] == [(2, 'm s="a\nok x=2')]
    assert found.tables[0].lines.tolist() == [1]


def test_the_last_of_a_field_that_comes_twice_counts():
    assert one_row("m f=1,g=2,f=3") == {"f": 3.0, "g": 2.0}
    assert reason("m f=1,f=3i") == "the field 'f' is of type integer here, and float in a line before, or in this one"


def test_lines_whose_field_is_of_another_type_than_in_the_first_are_rejected():
    found = lines_of('m a=1\nm a=2i\nm a=3,b=1i\nm b=2u\nm b="3"\nm b=4i,a=t\nn a=1i')
    assert [line.line for line in found.rejected] == [2, 4, 5, 6]
    assert (
        found.rejected[0].reason == "the field 'a' is of type integer here, and float in a line before, or in this one"
    )
    assert [(table.table, table.lines.tolist()) for table in found.tables] == [("public.m", [1, 3]), ("public.n", [7])]


def test_a_line_that_is_rejected_decides_nothing():
    found = lines_of("m a=1i,time=1\nm b=1,b=1i\nm a=2 1 2\nm a=2,b=1i")
    (table,) = found.tables
    assert table.lines.tolist() == [4]
    assert table.rows.drop_columns("time").to_pylist() == [{"a": 2.0, "b": 1}]


def kept_lines(body: str, **columns: pa.DataType) -> list[int]:
    """Return the lines that are kept in a table with these columns."""
    found = tables_of_lines(
        body.encode(), precision="ns", now_ns=0, columns_of=lambda tables: dict.fromkeys(tables, columns)
    )
    return [line for table in found.tables for line in table.lines.tolist()]


def test_a_tables_columns_decide_and_not_the_first_line():
    wrong_first = 'm v="x"\nm v=1.5\nm v=2\nm v=3i'
    assert kept_lines(wrong_first) == [1]
    assert kept_lines(wrong_first, v=pa.float64()) == [2, 3, 4]
    assert kept_lines(wrong_first, v=pa.float32()) == [2, 3, 4]
    assert kept_lines("m v=1i\nm v=2.5", v=pa.float64()) == [1, 2]
    assert kept_lines("m v=1i\nm v=2.5\nm v=3.0\nm v=4u", v=pa.int64()) == [1, 3, 4]
    assert kept_lines('m v=1\nm v="x"\nm v=t', v=pa.string()) == [2]
    assert kept_lines("m v=1u\nm v=2i\nm v=-3i\nm v=4.0", v=pa.decimal128(20, 0)) == [1, 2]
    assert kept_lines("m v=t\nm v=-3i\nm v=4i", v=pa.decimal128(20, 2)) == [2, 3]
    assert kept_lines("m HOST=1\nm host=2", host=pa.float64()) == [2]


def test_a_line_that_its_table_refuses_decides_nothing_of_new_columns():
    columns = {"v": pa.float64()}
    found = same(b'm v="x",n="t"\nm v=1,n=2\nm n=3', columns_of=lambda tables: dict.fromkeys(tables, columns))
    assert [(line.line, line.reason) for line in found.rejected] == [
        (1, "the table's column 'v' holds values of type float, and can't take this string")
    ]
    assert found.tables[0].rows.column("n").to_pylist() == [2.0, 3.0]


def test_tables_are_looked_up_only_if_their_lines_disagree():
    asked: list[str] = []

    def columns_of(tables: Collection[str]) -> dict[str, dict[str, pa.DataType]]:
        asked.extend(tables)
        return {}

    same(b'm v=1\nn v="x"\nm v=2', columns_of=columns_of)
    assert asked == []
    tables_of_lines(b'm v=1\nn v="x"\nm v=2i\nN v=t', precision="ns", now_ns=0, columns_of=columns_of)
    assert asked == ["public.m"]


def test_a_tag_and_a_field_of_one_name():
    assert reason("m,a=1 a=1") == "'a' is a field here and a tag in a line before, or in this one"
    found = lines_of("m a=1\nm,a=1 b=1\nm b=2")
    assert [(line.line, line.reason) for line in found.rejected] == [
        (2, "'a' is a tag here and a field in a line before, or in this one")
    ]


def test_keys_that_differ_by_case_alone():
    found = lines_of("m Host=1\nm,host=a b=1\nm HOST=1,b=2\nn host=1\nm é=1\nm É=1")
    assert [(line.line, line.reason.partition(" by ")[0]) for line in found.rejected] == [
        (2, "the key 'host' differs from 'Host'"), (3, "the key 'HOST' differs from 'Host'"), (6, "the key 'É' differs from 'é'"),
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["time", "TIME", "time_ns", "__op", "__SEQ", "__commit_lsn", "__operation", "__offset"])
@pytest.mark.parametrize("line", ["m,{}=1 f=1", "m {}=1"])
def test_names_that_each_row_has_are_refused(key: str, line: str):
    assert reason(line.format(key)) == f"the key {key!r} is the name of a column that each row has"


def test_lengths_of_names():
    assert one_row(f"{LONGEST},{LONGEST}=x f=1") == {LONGEST: "x", "f": 1.0}
    assert "of at most 255" in reason(f"{LONGEST}n f=1")
    assert "of at most 255" in reason(f"m {LONGEST}n=1")
    assert "of at most 255" in reason(f"m,{'é' * 128}=x f=1")
    assert one_row(f"m,{'é' * 127}=x f=1")
    assert "zero byte" in reason("m\0 f=1")
    assert "zero byte" in reason("m f\0=1")
    assert one_row("m,t=\0 f=1") == {"t": "\0", "f": 1.0}


def test_columns_of_one_measurement():
    body = "\n".join(
        ["m " + ",".join(f"f{n}=1" for n in range(3)), "m f3=1", "m f4=1", "m f3=2", "m f0=1,f4=1,f2=1", "n f9=1"]
    )
    found = same(body.encode(), columns_max=4)
    assert [(line.line, line.reason) for line in found.rejected] == [
        (3, "its measurement would have more than 4 tags and fields"), (5, "its measurement would have more than 4 tags and fields"),
    ]  # fmt: skip
    assert [table.lines.tolist() for table in found.tables] == [[1, 2, 4], [6]]


def test_timestamps_in_every_precision():
    units = {"n": 1, "u": 1000, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
    for precision, unit in units.items():
        (table,) = lines_of("m f=1 -1001\nm f=1 7\nm f=1\nm f=1 0\n", precision).tables
        ns = [-1001 * unit, 7 * unit, NOW_NS // 1000 * 1000, 0]
        assert table.rows.column("time").cast(pa.int64()).to_pylist() == [time // 1000 for time in ns]
        if precision == "n":
            assert table.rows.column("time_ns").to_pylist() == ns
        else:
            assert "time_ns" not in table.rows.column_names
    assert {PRECISIONS[name] for name in ("", "ns", "nanosecond")} == {1}


def test_nanoseconds_are_kept_where_a_time_isnt_whole_microseconds():
    found = lines_of("m f=1 1000\nm f=1 2001\nm f=1 -1\nm f=1\nn f=1 5000")
    of_m, of_n = found.tables
    assert of_m.rows.column("time").cast(pa.int64()).to_pylist() == [1, 2, -1, NOW_NS // 1000]
    assert of_m.rows.column("time_ns").to_pylist() == [1000, 2001, -1, NOW_NS // 1000 * 1000]
    assert of_m.rows.column_names[:2] == ["time", "time_ns"]
    assert "time_ns" not in of_n.rows.column_names


@pytest.mark.parametrize(
    ("precision", "first", "last"),
    [
        ("ns", -(2**63), 2**63 - 1),
        ("us", -62_135_596_800_000_000, 253_402_300_799_999_999),
        ("ms", -62_135_596_800_000, 253_402_300_799_999),
        ("s", -62_135_596_800, 253_402_300_799),
        ("h", -17_259_888, 70_389_527),
    ],
)
def test_times_of_the_years_1_to_9999(precision: str, first: int, last: int):
    (table,) = lines_of(f"m f=1 {first}\nm f=1 {last}", precision).tables
    if precision != "ns":
        years = [time.year for time in table.rows.column("time").to_pylist()]
        assert years == [1, 9999]
    for beyond in (first - 1, last + 1):
        assert reason(f"m f=1 {beyond}", precision) == "its timestamp is beyond the years 1 to 9999, or beyond 64 bits"


def test_a_time_is_a_moment_in_utc():
    (table,) = lines_of("m f=1 1700000000", "s").tables
    assert table.rows.column("time").to_pylist() == [dt.datetime(2023, 11, 14, 22, 13, 20, tzinfo=dt.UTC)]


@pytest.mark.parametrize("precision", ["auto", "d", "NS", " "])
def test_an_unknown_precision_is_said(precision: str):
    with pytest.raises(UsageError, match="no precision of timestamps"):
        tables_of_lines(b"m f=1", precision=precision, now_ns=0)


def test_many_wrong_lines_are_counted_and_the_first_of_them_told():
    body = b"".join(b"m a=1\nm a=1i\nbad\n" for _ in range(500))
    found = same(body, rejected_max=101)
    assert (len(found.rejected), found.rejected_count) == (101, 1000)
    assert [line.line for line in found.rejected[:4]] == [2, 3, 5, 6]
    assert found.rejected[-1].line == 152
    assert same(body, rejected_max=0).rejected_count == 1000


def test_an_excerpt_is_short_and_readable():
    (line,) = lines_of(b"m f=\xff" + b"x" * 500).rejected
    assert line.text == "m f=\ufffd" + "x" * 74 + "…"
    (line,) = lines_of(b"m f=1i\r\nm f=1\r\n").rejected
    assert line.text == "m f=1"


def test_bounds_on_the_whole_refuse_it():
    body = b"".join(b'm%d,t=ab f=1,s="xyz" 1000\n' % (n % 3) for n in range(9))
    size = 9 * 8 * 4 + 9 * 5
    limits = {"precision": "ns", "now_ns": 0}
    assert len(tables_of_lines(body, rows_bytes_max=size, tables_max=3, **limits).tables) == 3  # type: ignore[arg-type]
    for bounds in ({"rows_bytes_max": size - 1}, {"rows_bytes_max": 9 * 8 * 4 - 1}, {"tables_max": 2}):
        with pytest.raises(IngestError, check=coded("rows_too_large")):
            tables_of_lines(body, **bounds, **limits)  # type: ignore[arg-type]
    with pytest.raises(IngestError, check=coded("rows_too_large"), match="names"):
        tables_of_lines(b"".join(b"m f%d=1\n" % n for n in range(NAMES_MAX + 1)), **limits)  # type: ignore[arg-type]


def test_many_names_in_one_body():
    body = "".join(f"m{n % 700} a{n}=1,{'abc'[n % 3]}={n}\n" for n in range(5000))
    found = lines_of(body)
    assert (len(found.tables), found.rejected_count) == (700, 0)


def test_memory_follows_the_values_and_not_the_shapes_of_lines():
    body = b"".join(b"m " + b",".join(b"f%d_%d=t" % (n % 7, k) for k in range(200)) + b"\n" for n in range(5000))
    with pytest.raises(IngestError, check=coded("rows_too_large"), match="rows' bytes"):
        tables_of_lines(body, precision="ns", now_ns=0, rows_bytes_max=32 << 20)
    sparse = b"".join(b"m f%d=t\n" % n for n in range(1500)) * 2
    with pytest.raises(IngestError, check=coded("rows_too_large"), match="rows' bytes"):
        tables_of_lines(sparse, precision="ns", now_ns=0)
    assert bytes_max_of(len(sparse)) < 3000 * 1501 * 8 < ROWS_BYTES_MAX
    assert bytes_max_of(10 << 20) == ROWS_BYTES_MAX


def test_machine_code_is_there_after_warming_up():
    warm()
    (table,) = tables_of_lines(b"m f=1 1", precision="s", now_ns=0).tables
    assert table.lines.dtype == np.int64


def test_tables_stay_as_they_are_while_other_bodies_are_read_in_any_thread():
    def body_of(number: int) -> bytes:
        return b"".join(
            b'm%d,t=t%d f=%d,i=%di,s="%d",b=t %d\n' % (n % 3, n, n, number, number, n) for n in range(50 + number)
        )

    def read(number: int) -> Lines:
        return tables_of_lines(body_of(number), precision="ns", now_ns=0)

    expected = [repr([table.rows.to_pydict() for table in same(body_of(number)).tables]) for number in range(40)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(read, [*range(40)] * 5))
    for number, lines in zip([*range(40)] * 5, found, strict=True):
        assert repr([table.rows.to_pydict() for table in lines.tables]) == expected[number]
