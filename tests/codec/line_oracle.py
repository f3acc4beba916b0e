"""Line protocol in plain Python, a line and a value at a time: the reference for the machine code's results and speed.

It shares the texts of reasons with the product, and the rules for a column's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from millstream.codec.line_protocol.grammar import REASONS, Fault, ValueKind
from millstream.ingest.fit_to_schema import ColumnsOf, TableColumns, no_columns
from millstream.ingest.line_protocol import (
    PRECISIONS,
    TIME,
    TIME_NS,
    Lines,
    RejectedLine,
    TableLines,
    column_fault,
    excerpt,
    measurement_fault,
    not_the_columns,
    other_case,
    other_kind,
    too_many,
)
from millstream.model.names import qualified_name
from millstream.model.records import INSTANT, TIME_MAX_US, TIME_MIN_US

Value: TypeAlias = float | int | str | bool


class Field(NamedTuple):
    """One field of a line."""

    key: str
    kind: ValueKind
    value: Value


@dataclass(frozen=True, slots=True)
class PlainLine:
    """A valid line."""

    number: int
    """Number of its first text line, from 1."""
    measurement: str
    tags: list[tuple[str, str]]
    fields: list[Field]
    """In their order; a key may come several times."""
    time: int | None
    """In the precision of the input."""
    span: tuple[int, int]
    """Its range in the body."""


@dataclass(frozen=True, slots=True)
class PlainFault:
    """An invalid line."""

    number: int
    fault: Fault
    span: tuple[int, int]


class _WrongError(Exception):
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


_BLANKS: Final = re.compile(rb"[ \t]*+")
_LINE_END: Final = re.compile(rb"\r?\n|\r?\Z")
_MEASUREMENT: Final = re.compile(rb"(?:[^\\, \n]++|\\[, ]?)*+")
_KEY: Final = re.compile(rb"(?:[^\\,= \n]++|\\[,= ]?)*+")
_STRING: Final = re.compile(rb'"((?:[^"\\]++|\\["\\]?)*+)"')
_OPENED: Final = re.compile(rb'"(?:[^"\\]++|\\["\\]?)*+"?')
_WORD: Final = re.compile(rb"[^, \n]*+")
_NUMBER: Final = re.compile(rb"-?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][-+]?[0-9]++)?")
_WHOLE: Final = re.compile(rb"(-?[0-9]++)([iu])")
_TIME: Final = re.compile(rb"-?[0-9]++")
_ENDLESS: Final = re.compile(rb"[-+]?(?:nan|inf|infinity)", re.IGNORECASE)
_BOOLEANS: Final = {
    **dict.fromkeys((b"t", b"T", b"true", b"True", b"TRUE"), True),
    **dict.fromkeys((b"f", b"F", b"false", b"False", b"FALSE"), False),
}
_UNESCAPE_MEASUREMENT: Final = re.compile(rb"\\([, ])")
_UNESCAPE_KEY: Final = re.compile(rb"\\([,= ])")
_UNESCAPE_STRING: Final = re.compile(rb'\\(["\\])')


def parse_plain(body: bytes, *, time_min: int, time_max: int) -> Iterator[PlainLine | PlainFault]:
    """Yield the lines of a body that aren't empty or comments, in their order.

    Args:
        body: lines.
        time_min: the earliest timestamp that a line may have, in the precision of the input.
        time_max: the latest.
    """
    at, number = 0, 1
    while at < len(body):
        start = _end(_BLANKS, body, at)
        if body.startswith(b"#", start):
            end = body.find(b"\n", start)
            at = len(body) if end < 0 else end + 1
        elif found := _LINE_END.match(body, start):
            at = max(found.end(), at + 1)
        else:
            try:
                line, at = _line(body, start, number, time_min, time_max)
                yield line
            except _WrongError as wrong:
                end = line_end(body, start)
                yield PlainFault(number, wrong.fault, (start, end))
                at = end + 1
            number += body.count(b"\n", start, at - 1)
        number += 1


def _end(pattern: re.Pattern[bytes], body: bytes, at: int) -> int:
    found = pattern.match(body, at)
    assert found is not None
    return found.end()


def _line(body: bytes, start: int, number: int, time_min: int, time_max: int) -> tuple[PlainLine, int]:
    at = _end(_MEASUREMENT, body, start)
    measurement = body[start:at]
    if not measurement:
        raise _WrongError(Fault.NO_MEASUREMENT)
    tags: list[tuple[bytes, bytes]] = []
    while body.startswith(b",", at):
        key, at = _key(body, at + 1)
        if not key:
            raise _WrongError(Fault.TAG_WITHOUT_KEY)
        if not body.startswith(b"=", at):
            raise _WrongError(Fault.TAG_WITHOUT_VALUE)
        if any(key == other for other, _ in tags):
            raise _WrongError(Fault.TAG_TWICE)
        value, end = _key(body, at + 1)
        if body.startswith(b"\n", end) or end == len(body):
            value = value.removesuffix(b"\r")
        if not value:
            raise _WrongError(Fault.TAG_WITHOUT_VALUE)
        at = end
        if body.startswith(b"=", at):
            raise _WrongError(Fault.TAG_WITH_EQUALS)
        tags.append((key, value))
    if not body.startswith(b" ", at):
        raise _WrongError(Fault.NO_FIELDS)
    at = _end(_BLANKS, body, at)
    if _LINE_END.match(body, at):
        raise _WrongError(Fault.NO_FIELDS)
    fields, at = _fields(body, at)
    time, at = _time(body, at, time_min, time_max)
    found = _LINE_END.match(body, at)
    if found is None:
        raise _WrongError(Fault.BEHIND_THE_TIME)
    try:
        body[start:at].decode()
    except UnicodeDecodeError as error:
        raise _WrongError(Fault.NOT_UTF8) from error
    line = PlainLine(
        number,
        _UNESCAPE_MEASUREMENT.sub(rb"\1", measurement).decode(),
        [(_unescaped(key), _unescaped(value)) for key, value in tags],
        [Field(_unescaped(key), kind, value) for key, kind, value in fields],
        time,
        (start, at),
    )
    return line, found.end() if found.group() else len(body)


def _unescaped(raw: bytes) -> str:
    return _UNESCAPE_KEY.sub(rb"\1", raw).decode()


def _key(body: bytes, at: int) -> tuple[bytes, int]:
    end = _end(_KEY, body, at)
    return body[at:end], end


def _fields(body: bytes, at: int) -> tuple[list[tuple[bytes, ValueKind, Value]], int]:
    fields: list[tuple[bytes, ValueKind, Value]] = []
    while True:
        key, at = _key(body, at)
        if not key:
            raise _WrongError(Fault.FIELD_WITHOUT_KEY)
        if not body.startswith(b"=", at):
            raise _WrongError(Fault.FIELD_WITHOUT_VALUE)
        kind, value, at = _value(body, at + 1)
        fields.append((key, kind, value))
        if not body.startswith(b",", at):
            return fields, at
        at += 1


def _value(body: bytes, at: int) -> tuple[ValueKind, Value, int]:
    if body.startswith(b'"', at):
        found = _STRING.match(body, at)
        if found is None:
            raise _WrongError(Fault.STRING_WITHOUT_END)
        end = found.end()
        if end < len(body) and body[end] not in b", " and not _LINE_END.match(body, end):
            raise _WrongError(Fault.BEHIND_A_STRING)
        # Invalid UTF-8 is reported for the whole line.
        return ValueKind.STRING, _UNESCAPE_STRING.sub(rb"\1", found[1]).decode("utf-8", "replace"), end
    end = _end(_WORD, body, at)
    if body.endswith(b"\r", at, end) and _LINE_END.match(body, end - 1):
        end -= 1
    word = body[at:end]
    if not word:
        raise _WrongError(Fault.FIELD_WITHOUT_VALUE)
    if word in _BOOLEANS:
        return ValueKind.BOOLEAN, _BOOLEANS[word], end
    if _NUMBER.fullmatch(word):
        number = float(word)
        if number in (float("inf"), float("-inf")):
            raise _WrongError(Fault.FLOAT_TOO_LARGE)
        return ValueKind.FLOAT, number, end
    if whole := _WHOLE.fullmatch(word):
        if whole[2] == b"u":
            if whole[1].startswith(b"-"):
                raise _WrongError(Fault.NO_VALUE)
            if _whole(whole[1]) >= 2**64:
                raise _WrongError(Fault.UNSIGNED_TOO_LARGE)
            return ValueKind.UNSIGNED, _whole(whole[1]), end
        if not -(2**63) <= _whole(whole[1]) < 2**63:
            raise _WrongError(Fault.INTEGER_TOO_LARGE)
        return ValueKind.INTEGER, _whole(whole[1]), end
    raise _WrongError(Fault.NOT_FINITE if _ENDLESS.fullmatch(word) else Fault.NO_VALUE)


def _whole(digits: bytes) -> int:
    """Return an integer; one of very many digits is returned as one beyond 64 bits."""
    kept = digits.lstrip(b"-").lstrip(b"0") or b"0"
    value = 10**30 if len(kept) > 30 else int(kept)  # int() refuses digits by the thousand
    return -value if digits.startswith(b"-") else value


def _time(body: bytes, at: int, time_min: int, time_max: int) -> tuple[int | None, int]:
    """Return the timestamp, and where the line's content ends."""
    at = _end(_BLANKS, body, at)
    if _LINE_END.match(body, at):
        return None, at
    end = _end(re.compile(rb"[^ \t\r\n]*+"), body, at)
    if not _TIME.fullmatch(body, at, end):
        raise _WrongError(Fault.NO_TIME)
    time = _whole(body[at:end])
    if not max(time_min, -(2**63)) <= time <= min(time_max, 2**63 - 1):
        raise _WrongError(Fault.TIME_TOO_FAR)
    return time, _end(_BLANKS, body, end)


def line_end(body: bytes, start: int) -> int:
    """Return the end of the line that begins at `start`, valid or not.

    It is the next newline outside of strings, or the body's end.
    """
    at, in_fields = start, False
    while at < len(body) and body[at : at + 1] != b"\n":
        if body.startswith(b" ", at) and body[at - 1 : at] != b"\\":
            in_fields = True
        elif in_fields and body.startswith(b'="', at) and body[at - 1 : at] != b"\\":
            at = _end(_OPENED, body, at + 1) - 1
        at += 1
    return min(at, len(body))


_TYPES: Final = {
    ValueKind.FLOAT: pa.float64(),
    ValueKind.INTEGER: pa.int64(),
    ValueKind.UNSIGNED: pa.decimal128(20, 0),
    ValueKind.STRING: pa.string(),
    ValueKind.BOOLEAN: pa.bool_(),
    ValueKind.TAG: pa.string(),
}


def tables_of_lines_plain(
    body: bytes,
    *,
    precision: str,
    now_ns: int,
    columns_max: int,
    rejected_max: int,
    columns_of: ColumnsOf = no_columns,
) -> Lines:
    """Return the result of `ingest.line_protocol.tables_of_lines`, without its limits for the whole."""
    unit = PRECISIONS[precision]
    tables: dict[str, _Table] = {}
    rejected: list[RejectedLine] = []
    low, high = -((-TIME_MIN_US * 1000) // unit), (TIME_MAX_US * 1000 + 999) // unit
    found = list(parse_plain(body, time_min=low, time_max=high))
    known = {name: columns_of([qualified_name("public", name)]) for name in _disagreeing(found)}
    for line in found:
        if isinstance(line, PlainFault):
            reason: str | None = REASONS[line.fault]
        else:
            table = tables.get(line.measurement) or _Table(line.measurement, known.get(line.measurement, {}))
            reason = table.add(line, columns_max)
            if reason is None:
                tables[line.measurement] = table
        if reason is not None:
            rejected.append(RejectedLine(line.number, reason, excerpt(body, *line.span)))
    made = [table.finish(unit, now_ns // 1000 * 1000) for table in tables.values()]
    return Lines(made, rejected[:rejected_max], len(rejected))


def _values_of(line: PlainLine) -> list[tuple[str, ValueKind, Value]]:
    return [*((key, ValueKind.TAG, value) for key, value in line.tags), *line.fields]


def _disagreeing(lines: Sequence[PlainLine | PlainFault]) -> set[str]:
    """Return the measurements that have a key with values of several kinds, or in two cases."""
    kinds: dict[tuple[str, str], set[tuple[str, ValueKind]]] = {}
    for line in lines:
        if isinstance(line, PlainLine) and measurement_fault(line.measurement) is None:
            for key, kind, _ in _values_of(line):
                kinds.setdefault((line.measurement, key.lower()), set()).add((key, kind))
    return {measurement for (measurement, _), found in kinds.items() if len(found) > 1}


_WANTED: Final = {
    pa.float64(): ValueKind.FLOAT,
    pa.int64(): ValueKind.INTEGER,
    pa.string(): ValueKind.STRING,
    pa.bool_(): ValueKind.BOOLEAN,
}


def _fits(kind: ValueKind, value: Any, wanted: ValueKind) -> bool:
    if wanted is ValueKind.FLOAT and kind is ValueKind.INTEGER:
        return bool(abs(value) <= 2**53)
    if wanted is ValueKind.INTEGER and kind in {ValueKind.FLOAT, ValueKind.UNSIGNED}:
        return bool(value == int(value) and -(2**63) <= value < 2**63)
    return kind is wanted or (kind, wanted) == (ValueKind.TAG, ValueKind.STRING)


class _Table:
    def __init__(self, measurement: str, known: TableColumns) -> None:
        self.measurement = measurement
        self.known: Mapping[str, pa.DataType] = next(iter(known.values()), {})
        self.cases = {name.lower(): name for name in self.known}
        self.kinds: dict[str, ValueKind] = {}
        self.lower: dict[str, str] = {}
        self.rows: list[tuple[int, int | None, dict[str, Any]]] = []

    def add(self, line: PlainLine, columns_max: int) -> str | None:
        """Take a line, or return why not."""
        why = measurement_fault(line.measurement)
        if why is not None:
            return why
        kinds, lower, row = dict(self.kinds), dict(self.lower), {}
        for key, said, value in _values_of(line):
            kind = said
            why = column_fault(key)
            if why is not None:
                return why
            if (known := self.cases.get(key.lower(), key)) != key:
                return other_case(key, known)
            other = lower.setdefault(key.lower(), key)
            if other != key:
                return other_case(key, other)
            if key in self.known:
                wanted = _WANTED[self.known[key]]
                if not _fits(kind, value, wanted):
                    return not_the_columns(key, kind, wanted)
                if kind is not ValueKind.TAG:
                    kind = wanted
            had = kinds.setdefault(key, kind)
            if had is not kind:
                return other_kind(key, kind, had)
            row[key] = value
        if len(kinds) > columns_max:
            return too_many(columns_max)
        self.kinds, self.lower = kinds, lower
        self.rows.append((line.number, line.time, row))
        return None

    def finish(self, unit: int, now_ns: int) -> TableLines:
        times = [now_ns if time is None else time * unit for _, time, _ in self.rows]
        columns = {TIME: pa.array([time // 1000 for time in times], pa.int64()).cast(INSTANT)}
        if any(time % 1000 for time in times):
            columns[TIME_NS] = pa.array(times, pa.int64())
        for key, kind in self.kinds.items():
            columns[key] = pa.array([row.get(key) for _, _, row in self.rows], _TYPES[kind])
        lines = np.array([number for number, _, _ in self.rows], np.int64)
        return TableLines(qualified_name("public", self.measurement), pa.table(columns), lines)
