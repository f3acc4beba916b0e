"""Line protocol in machine code: equal to the plain parser for any bytes. Numbers are read as Python reads them."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.codec.line_samples import bodies, changed_bodies, lines, same, texts
from tests.seeds import examples

from millstream.codec.line_protocol.line_parser import ScanMemory, Walk


@settings(max_examples=examples(400), deadline=None)
@given(bodies, st.sampled_from(["ns", "us", "ms", "s", "m", "h"]))
def test_lines_are_read_as_the_plain_parser_reads_them(body: bytes, precision: str):
    same(body, precision)


@settings(max_examples=examples(600), deadline=None)
@given(changed_bodies())
def test_so_are_changed_lines(body: bytes):
    same(body)


@settings(max_examples=examples(1500), deadline=None)
@given(texts)
@example(b"m\ta\n\n")
@example(b'm a=a="\nm a=1\n"\nm a=2')
def test_so_is_any_text(body: bytes):
    same(body)
    same(body, columns_max=1, rejected_max=2)


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=60))
def test_so_are_any_bytes(body: bytes):
    same(body)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(lines(), min_size=2, max_size=30), st.integers(1, 4))
def test_so_are_lines_that_disagree(some: list[bytes], columns_max: int):
    same(b"".join(some), columns_max=columns_max, rejected_max=5)


_PLAIN_LINES = st.lists(
    st.builds(
        "m{} {}={}".format,
        st.sampled_from(["", ",a=x", ",A=x", ",c=y"]),
        st.sampled_from(["a", "b", "c", "A"]),
        st.sampled_from(["1", "-0.0", "2.5", "1e300", "9007199254740992", "3i", "9007199254740993i", "-4i", "5u", "18446744073709551615u", '"x"', "t"]),
    ),
    min_size=1,
    max_size=8,
).map("\n".join)  # fmt: skip
_TYPES = st.sampled_from([pa.float64(), pa.int64(), pa.string(), pa.bool_()])


@settings(max_examples=examples(400), deadline=None)
@given(_PLAIN_LINES, st.dictionaries(st.sampled_from(["a", "b", "c"]), _TYPES))
@example('m a="x"\nm a=1\nm a=2.5\nm a=3i', {"a": pa.float64()})
@example("m a=1i,b=1\nm a=2.5,b=t\nm a=2,b=t", {"a": pa.int64()})
def test_so_are_lines_of_a_table_that_has_columns(body: str, columns: dict[str, pa.DataType]):
    same(body.encode(), columns_of=lambda tables: dict.fromkeys(tables, columns))


def floats_of(texts: list[str]) -> list[float]:
    body = "".join(f"m f={text}\n" for text in texts).encode()
    walk = Walk(body, ScanMemory(len(body)), seed=1, time_min=0, time_max=0, wrong_max=1, names_max=2)
    assert walk.wrong == []
    (table,) = walk.tables(unit_ns=1, now_us=0, bytes_max=1 << 30)
    found: list[float] = table.columns[0].values.to_pylist()
    return found


def bits(values: list[float]) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_floats_come_back_from_their_shortest_text(values: list[float]):
    assert bits(floats_of([repr(value) for value in values])) == bits(values)


_DECIMALS = st.builds(
    lambda sign, digits, cut, power: f"{sign}{digits[:cut]}{'.' if cut < len(digits) else ''}{digits[cut:]}e{power}",
    st.sampled_from(["", "-"]),
    st.text("0123456789", min_size=1, max_size=40),
    st.integers(1, 40),
    st.integers(-400, 290),
)


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(_DECIMALS, min_size=1, max_size=50))
def test_floats_of_any_digits_are_rounded_as_python_rounds_them(some: list[str]):
    some = [text for text in some if abs(float(text)) != float("inf")] or ["0"]
    assert bits(floats_of(some)) == bits([float(text) for text in some])


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**63 - 2**52 - 2**53), st.integers(-1, 1)), min_size=1, max_size=30))
def test_floats_half_way_between_two_and_beside_that_are_rounded_as_python_rounds_them(some: list[tuple[int, int]]):
    halves = []
    for place, beside in some:
        (low, high) = struct.unpack("<dd", struct.pack("<QQ", place % (0x7FE << 52), place % (0x7FE << 52) + 1))
        (low_ratio, high_ratio) = low.as_integer_ratio(), high.as_integer_ratio()
        # Exactly between the two: a number of up to 767 digits, all of them written out.
        scale = max(low_ratio[1], high_ratio[1]) * 2
        middle = (low_ratio[0] * (scale // low_ratio[1]) + high_ratio[0] * (scale // high_ratio[1])) // 2
        power = scale.bit_length() - 1
        halves.append(f"{middle * 5**power * 10 + beside}e{-power - 1}")
    assert bits(floats_of(halves)) == bits([float(text) for text in halves])


@pytest.mark.parametrize(
    "text",
    ["1.7976931348623157e308", "1.7976931348623158e308", "2.2250738585072014e-308", "2.2250738585072011e-308", "4.9e-324", "2.4703282292062327e-324",
     "2.4703282292062328e-324", "9007199254740993", "9007199254740992.9999999999999999999999", "0e99999999999999999999", "1e-99999999999999999999", "00000000000000000000000001",
     "0.00000000000000000000000000000000000001", "18446744073709551615", "9999999999999999999", "1.0000000000000000000000000000", "8.988465674311580e307", "-0", "-0.0e5", ".5", "5."],
)  # fmt: skip
def test_floats_at_edges(text: str):
    assert bits(floats_of([text])) == bits([float(text)])
