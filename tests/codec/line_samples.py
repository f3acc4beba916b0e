"""Line protocol for tests: lines that are right in every way, and texts that are nearly right."""

from __future__ import annotations

from hypothesis import strategies as st
from tests.codec.line_oracle import tables_of_lines_plain

from millstream.ingest.fit_to_schema import ColumnsOf, no_columns
from millstream.ingest.line_protocol import Lines, tables_of_lines

NOW_NS = 1_700_000_000_123_456_789


def same(
    body: bytes,
    precision: str = "ns",
    *,
    columns_max: int = 1600,
    rejected_max: int = 1000,
    columns_of: ColumnsOf = no_columns,
) -> Lines:
    """Parse a body in machine code, and check that the oracle makes the same of it, to the last bit."""
    ours, plain = (
        read(
            body,
            precision=precision,
            now_ns=NOW_NS,
            columns_max=columns_max,
            rejected_max=rejected_max,
            columns_of=columns_of,
        )
        for read in (tables_of_lines, tables_of_lines_plain)
    )
    assert ours.rejected == plain.rejected, body
    assert ours.rejected_count == plain.rejected_count, body
    assert [table.table for table in ours.tables] == [table.table for table in plain.tables], body
    for mine, theirs in zip(ours.tables, plain.tables, strict=True):
        mine.rows.validate(full=True)
        assert mine.rows.schema == theirs.rows.schema, body
        assert mine.lines.tolist() == theirs.lines.tolist(), body
        # Compared by their text: -0.0 equals 0.0.
        assert repr(mine.rows.to_pydict()) == repr(theirs.rows.to_pydict()), body
    return ours


_NAMES = st.sampled_from(
    [
        "a",
        "b",
        "A",
        "host",
        "région",
        "a b",
        "c,d",
        "e=f",
        "back\\slash",
        "end\\,",
        '"',
        "time",
        "__op",
        "long" * 40,
        "x\0",
    ]
)
_TEXTS = st.text(st.sampled_from('ab \\",=\n\r\té😀0'), max_size=12) | st.text(max_size=6)


def _escaped(text: str, escapable: str) -> str:
    return "".join(f"\\{c}" if c in escapable else c for c in text)


@st.composite
def _numbers(draw: st.DrawFn) -> str:
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return repr(draw(st.floats()))
    if kind == 1:
        return f"{draw(st.integers(-(2**64), 2**64))}i"
    if kind == 2:
        return f"{draw(st.integers(-2, 2**65))}u"
    if kind == 3:
        return draw(
            st.sampled_from(
                [
                    "t",
                    "T",
                    "true",
                    "True",
                    "TRUE",
                    "f",
                    "F",
                    "false",
                    "False",
                    "FALSE",
                    "tRUE",
                    "tr",
                    "FALSe",
                    "nan",
                    "-Inf",
                    "infinity",
                    "+1",
                    "1.",
                    ".5",
                    "-.5e+3",
                    "1e",
                    "0x1",
                ]
            )
        )
    digits = draw(st.text("0123456789", max_size=25))
    return f"{draw(st.sampled_from(['', '-']))}{digits}{draw(st.sampled_from(['', '.', '.0', '.' + digits]))}{draw(st.sampled_from(['', 'e5', 'E-7', 'e+300', 'e-330', 'e99999999999999']))}"


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Draw one line that is right, or wrong in some value."""
    measurement = draw(st.sampled_from(["m", "cpu", "m m", "m,m", "m=m", 'q"', "M"]))
    text = _escaped(measurement, ", ")
    for key in draw(st.lists(_NAMES, max_size=3)):
        value = draw(_TEXTS).replace("\n", "")
        text += f",{_escaped(key, ',= ')}={_escaped(value, ',= ')}"
    fields = []
    for key in draw(st.lists(_NAMES, min_size=1, max_size=4)):
        value = draw(_numbers() | _TEXTS.map(lambda text: '"' + _escaped(text, '"\\') + '"'))
        fields.append(f"{_escaped(key, ',= ')}={value}")
    text += draw(st.sampled_from([" ", " ", "  ", " \t"])) + ",".join(fields)
    if draw(st.booleans()):
        text += " " + str(draw(st.integers(-(2**63) - 2, 2**63 + 2) | st.integers(-2000, 2000)))
    text += draw(st.sampled_from(["", "", " ", "\t"]))
    return text.encode("utf-8", "surrogatepass") + draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n", b"\n# c\n"]))


bodies = st.lists(lines(), max_size=8).map(b"".join)


@st.composite
def changed_bodies(draw: st.DrawFn) -> bytes:
    """Draw lines with some bytes removed, inserted or changed."""
    body = bytearray(draw(bodies))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        body[at : at + draw(st.integers(0, 2))] = draw(
            st.sampled_from([b"", b"\n", b'"', b"=", b",", b" ", b"\\", b"\r", b"\xff", b"\xed\xa0\x80", b"1", b"e"])
        )
    return bytes(body)


texts = st.lists(
    st.sampled_from([bytes([byte]) for byte in b'ma,= "\\\n\r#tf1.eiu-\t'] + ["é".encode(), b"\xff", b"m a=1", b' "']),
    max_size=40,
).map(b"".join)
