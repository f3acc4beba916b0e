"""Parses lines into columns in machine code: no Python for a line or a value, except numbers that Python has to read.

`_line_scan.scan` scans the bytes once and records the places of values. `_arrange.settle` removes lines
that disagree with their table or with lines before them, if there are any. `_arrange.spread` puts the rest into
columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.codec.line_protocol import _arrange as arrange
from millstream.codec.line_protocol import _line_scan as machine
from millstream.codec.line_protocol import _names as known
from millstream.codec.line_protocol import _values as reading
from millstream.codec.line_protocol.grammar import Fault, Refusal, ValueKind

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

BODY_BYTES_MAX: Final = (1 << 31) - 2
"""The place of a text has 31 bits."""
_LEAST_VALUE_BYTES: Final = 4
"""Bytes that a value takes with its separator and key, at least: `,a=1`."""
_LEAST_LINE_BYTES: Final = 6
"""Bytes that a line takes, at least: `m a=1` with its end."""
_NAMES_AT_FIRST: Final = 64
_COMMA_OR_SPACE: Final = re.compile(r"\\([, ])")
_COMMA_EQUALS_OR_SPACE: Final = re.compile(r"\\([,= ])")
_TEXTS: Final = frozenset({ValueKind.STRING, ValueKind.TAG})
_PLAIN: Final = {ValueKind.FLOAT: pa.float64(), ValueKind.INTEGER: pa.int64()}
UNSIGNED: Final = pa.decimal128(20, 0)
"""Arrow's `uint64` as the log stores it."""


class TooManyNamesError(Exception):
    """A body has more different names than it may have."""


class TooManyValuesError(Exception):
    """The columns would have more bytes than they may have."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


@dataclass(frozen=True, slots=True)
class WrongLine:
    """An invalid line."""

    number: int
    fault: Fault
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A valid line that is rejected: it conflicts with its table or with lines before it, or a name is rejected."""

    number: int
    why: Refusal
    measurement: int
    """Index of its measurement."""
    column: int
    """Index of the column at fault."""
    other: int
    """Index of the column that differs from this one only in case, or the kind that the column has, here or in its table."""
    kind: ValueKind
    """Kind of the value at fault."""
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class FoundColumn:
    """A column of a measurement."""

    name: str
    kind: ValueKind
    values: pa.Array


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A measurement's rows."""

    measurement: str
    numbers: Ints
    """Numbers of the rows' lines."""
    times_us: Ints
    times_ns: Ints | None
    """Times in nanoseconds, if some time isn't whole microseconds."""
    columns: list[FoundColumn]


class ScanMemory:
    """Memory for the results from bodies of up to a size, one at a time.

    It has nine bytes for each body byte, little of which is touched.
    """

    __slots__ = ("body_bytes_max", "columns_of", "doubles", "kinds", "lines", "payload", "slow", "timed", "times")

    def __init__(self, body_bytes_max: int) -> None:
        line_room, value_room = body_bytes_max // _LEAST_LINE_BYTES + 2, body_bytes_max // _LEAST_VALUE_BYTES + 2
        self.body_bytes_max = body_bytes_max
        self.lines = np.empty((line_room, machine.LINE_FACTS), np.int32)
        self.times = np.empty(line_room, np.int64)
        self.timed = np.empty(line_room, np.uint8)
        self.columns_of = np.empty(value_room, np.int32)
        self.kinds = np.empty(value_room, np.uint8)
        self.payload = np.empty(value_room, np.int64)
        self.doubles = self.payload.view(np.float64)
        self.slow = np.empty(value_room, np.int32)


class Walk:
    """The contents of a body of lines, until they are made into columns.

    Args:
        body: at most `BODY_BYTES_MAX`.
        room: memory for the results; used by this walk only, until the tables are made.
        seed: 64 secret bits, to seed the names' hashes.
        time_min: the earliest valid timestamp, in the body's precision.
        time_max: the latest.
        names_max: maximum number of measurements, and of columns of all of them.

    Raises:
        TooManyNamesError: there are more.
    """

    def __init__(
        self, body: bytes, room: ScanMemory, *, seed: int, time_min: int, time_max: int, wrong_max: int, names_max: int
    ) -> None:
        self._body = body
        end = len(body)
        assert end <= room.body_bytes_max <= BODY_BYTES_MAX
        self._room = room
        self._buffer: Bytes = np.frombuffer(body if body.endswith(b"\n") else body + b"\n", np.uint8)
        wrong = np.empty((wrong_max, 4), np.int64)
        state = np.zeros(machine.STATE_SIZE, np.int64)
        state[machine.NUMBER] = 1
        measurements, columns = _NameTable(names_max), _NameTable(names_max)
        while True:
            outcome = machine.scan(
                self._buffer,
                end,
                np.uint64(seed),
                not body.isascii(),
                max(time_min, -(2**63)),
                min(time_max, 2**63 - 1),
                state,
                room.lines,
                room.times,
                room.timed,
                room.columns_of,
                room.kinds,
                room.payload,
                room.doubles,
                room.slow,
                measurements.facts,
                measurements.slots,
                columns.facts,
                columns.slots,
                wrong,
            )
            if outcome == machine.DONE:
                break
            (measurements if outcome == machine.MORE_MEASUREMENTS else columns).grow()
        self._line_count, self._token_count = int(state[machine.LINES]), int(state[machine.TOKENS])
        self._measurements = measurements.facts[: state[machine.MEASUREMENTS]]
        self._columns = columns.facts[: state[machine.COLUMNS]]
        machine.count(self._line_count, self._token_count, room.lines, room.columns_of, room.kinds, self._columns)
        self.wrong_count = int(state[machine.WRONG])
        self.wrong = [
            WrongLine(number, Fault(fault), (start, stop))
            for number, start, stop, fault in wrong[: min(self.wrong_count, wrong_max)].tolist()
        ]
        self._measurement_names: dict[int, str] | None = None
        self._column_names: dict[int, str] | None = None
        self._infinite = self._read_slowly(room.slow[: state[machine.SLOW]])

    def _read_slowly(self, tokens: npt.NDArray[np.int32]) -> list[int]:
        """Read the numbers that machine code wasn't sure about; return the lines with one beyond a double's range."""
        infinite = []
        for token in tokens.tolist():
            text = int(self._room.payload[token])
            at = text >> 32
            value = float(self._body[at : at + (text & 0x7FFFFFFF)])
            self._room.doubles[token] = value
            if value in (float("inf"), float("-inf")):
                starts = self._room.lines[: self._line_count, machine.LINE_TOKEN]
                infinite.append(int(np.searchsorted(starts, token, "right")) - 1)
        return infinite

    @property
    def measurement_count(self) -> int:
        """Number of measurements with lines."""
        return sum(kept > 0 for kept in self._measurements[:, known.KEPT].tolist())

    @property
    def column_count(self) -> int:
        """Number of columns, including those without values; their indexes are below it."""
        return len(self._columns)

    def measurement_names(self) -> dict[int, str]:
        """Return the names of measurements with valid lines, by index."""
        if self._measurement_names is None:
            self._measurement_names = self._names(self._measurements, _COMMA_OR_SPACE)
        return self._measurement_names

    def column_names(self) -> dict[int, str]:
        """Return the names of columns with values, by index."""
        if self._column_names is None:
            self._column_names = self._names(self._columns, _COMMA_EQUALS_OR_SPACE)
        return self._column_names

    def measurements_of_columns(self) -> list[int]:
        """Return the index of each column's measurement."""
        found: list[int] = self._columns[:, known.OF_MEASUREMENT].tolist()
        return found

    def _names(self, facts: Ints, escapes: re.Pattern[str]) -> dict[int, str]:
        names = {}
        body = self._body
        for place, (at, size, kept) in enumerate(facts[:, (known.NAME_AT, known.NAME_SIZE, known.KEPT)].tolist()):
            if kept:
                name = body[at : at + size].decode()
                names[place] = escapes.sub(r"\1", name) if "\\" in name else name
        return names

    def agrees(self, columns_max: int) -> bool:
        """Whether all lines agree: each column's values are of one kind, and no measurement has too many columns."""
        if self._infinite or self.mixed_columns():
            return False
        if len(self._columns) <= columns_max:
            return True
        return int(np.bincount(self._columns[:, known.OF_MEASUREMENT]).max()) <= columns_max

    def mixed_columns(self) -> list[int]:
        """Return the columns that have values of several kinds, by index."""
        kinds = self._columns[:, known.KINDS]
        found: list[int] = np.flatnonzero(kinds & (kinds - 1)).tolist()
        return found

    def fixed_kind(self, column: int, kind: pa.DataType) -> ValueKind | None:
        """Return the kind of value that a column of its table takes; None if lines have no value for such a type."""
        if pa.types.is_floating(kind):
            return ValueKind.FLOAT
        if pa.types.is_integer(kind):
            return ValueKind.INTEGER
        if pa.types.is_decimal(kind):
            has_unsigned = int(self._columns[column, known.KINDS]) >> ValueKind.UNSIGNED & 1
            return ValueKind.UNSIGNED if has_unsigned else ValueKind.INTEGER
        if pa.types.is_string(kind):
            return ValueKind.STRING
        return ValueKind.BOOLEAN if pa.types.is_boolean(kind) else None

    def settle(
        self,
        *,
        refused_measurements: list[int],
        refused_columns: list[int],
        case_of: Ints,
        fixed: Mapping[int, ValueKind],
        columns_max: int,
        refused_max: int,
    ) -> tuple[list[RefusedLine], int]:
        """Remove lines with rejected names, and lines that disagree with their table's columns or with earlier lines.

        Returns the first removed lines, and their total number.

        Args:
            refused_measurements: by index.
            refused_columns: by index.
            case_of: a number below their count for each column, the same for names of one measurement that
                differ only in case.
            fixed: the kind of value of each column that its table has already, by index (`fixed_kind`). The first
                line decides the kinds of the others.
        """
        count, room = self._line_count, self._room
        fixed_of = np.full(len(self._columns), -1, np.int64)
        for column, kind in fixed.items():
            fixed_of[column] = kind
        refused = np.empty((refused_max, arrange.REFUSED_FACTS), np.int64)
        self._line_count, self._token_count, gone = arrange.settle(
            count,
            self._token_count,
            room.lines,
            room.times,
            room.timed,
            room.columns_of,
            room.kinds,
            room.payload,
            room.doubles,
            self._measurements,
            self._columns,
            _marked(self._infinite, count),
            _marked(refused_measurements, len(self._measurements)),
            _marked(refused_columns, len(self._columns)),
            case_of,
            fixed_of,
            np.full(len(self._columns), -1, np.int64),
            np.full(len(self._columns), -1, np.int64),
            np.zeros(len(self._measurements), np.int64),
            columns_max,
            refused,
        )
        return [self._refused(facts) for facts in refused[: min(gone, refused_max)].tolist()], gone

    def _refused(self, facts: list[int]) -> RefusedLine:
        number, start, why, measurement, column, other, kind = facts
        return RefusedLine(
            number=number,
            why=Refusal(why),
            measurement=measurement,
            column=column,
            other=other,
            kind=ValueKind(kind),
            span=(start, reading.line_end(self._buffer, start, len(self._body))),
        )

    def tables(self, *, unit_ns: int, now_us: int, bytes_max: int) -> list[FoundTable]:
        """Return the columns of each measurement, by their first lines.

        Args:
            now_us: the time of lines that have none, in microseconds since 1970.
            bytes_max: maximum size of all columns together: eight bytes for each row's time and each value, null or
                not, and the texts' bytes.

        Raises:
            TooManyValuesError: they would have more.
        """
        room = self._room
        measurement_names, column_names = self.measurement_names(), self.column_names()
        measurements, columns = self._measurements.tolist(), self._columns.tolist()
        rows = [facts[known.KEPT] for facts in measurements]
        row_at = [total - count for total, count in zip(accumulate(rows), rows, strict=True)]
        used = sorted((facts[known.FIRST], place) for place, facts in enumerate(columns) if facts[known.KEPT])
        value_at, there_at = [0] * len(columns), [arrange.EVERYWHERE] * len(columns)
        cells = lacking = 0
        for _, place in used:
            facts = columns[place]
            measurement = facts[known.OF_MEASUREMENT]
            value_at[place] = cells - row_at[measurement]
            cells += rows[measurement]
            if facts[known.KEPT] < rows[measurement]:
                there_at[place] = lacking - row_at[measurement]
                lacking += rows[measurement]
        size = 8 * (cells + self._line_count)
        if size > bytes_max:
            raise TooManyValuesError(size)
        values: Ints = np.zeros(cells, np.int64) if lacking else np.empty(cells, np.int64)
        there = np.zeros(lacking, np.uint8)
        numbers, times_us, times_ns = np.empty((3, self._line_count), np.int64)
        is_odd = np.zeros(len(rows), np.uint8)
        arrange.spread(
            self._line_count,
            self._token_count,
            room.lines,
            room.times,
            room.timed,
            room.columns_of,
            room.payload,
            np.array(row_at, np.int64),
            np.array(value_at, np.int64),
            np.array(there_at, np.int64),
            unit_ns,
            now_us,
            numbers,
            times_us,
            times_ns,
            is_odd,
            values,
            there,
        )
        pieces = {
            place: slice(at, at + count) for place, (at, count) in enumerate(zip(row_at, rows, strict=True)) if count
        }
        tables = {
            place: FoundTable(
                measurement_names[place],
                numbers[piece],
                times_us[piece],
                times_ns[piece] if is_odd[place] else None,
                [],
            )
            for place, piece in sorted(pieces.items(), key=lambda item: measurements[item[0]][known.FIRST])
        }
        size += sum(8 * rows[place] for place in pieces if is_odd[place])
        found = [
            (place, ValueKind(kind), value_at[place] + row_at[of := columns[place][known.OF_MEASUREMENT]], rows[of])
            for (_, place), kind in zip(used, room.kinds[[first for first, _ in used]].tolist(), strict=True)
        ]
        texts = self._texts(values, [found_column[1:] for found_column in found], bytes_max - size)
        for place, kind, begin, count in found:
            measurement = columns[place][known.OF_MEASUREMENT]
            valid = None
            if there_at[place] != arrange.EVERYWHERE:
                at = there_at[place] + row_at[measurement]
                valid = pa.py_buffer(np.packbits(there[at : at + count], bitorder="little"))
            array = _array(kind, values[begin : begin + count], valid, texts)
            tables[measurement].columns.append(FoundColumn(column_names[place], kind, array))
        return list(tables.values())

    def _texts(
        self, values: Ints, columns: list[tuple[ValueKind, int, int]], bytes_max: int
    ) -> Iterator[tuple[pa.Buffer, pa.Buffer]]:
        """Return the offsets and the bytes of each text column among columns given by kind, start and row count."""
        texts = [facts for facts in columns if facts[0] in _TEXTS]
        if not texts:
            return iter(())
        are_strings = np.array([kind is ValueKind.STRING for kind, _, _ in texts], np.uint8)
        begins, counts = (np.array(facts, np.int64) for facts in list(zip(*texts, strict=True))[1:])
        offsets = np.empty(int(counts.sum()) + len(texts), np.int32)
        starts = np.empty(len(texts) + 1, np.int64)
        size = arrange.measure_texts(values, begins, counts, offsets, starts)
        if size > bytes_max:
            raise TooManyValuesError(size)
        data = np.empty(size + 8, np.uint8)
        arrange.gather_texts(self._buffer, values, begins, counts, are_strings, offsets, starts, data)
        all_offsets, all_data = pa.py_buffer(offsets), pa.py_buffer(data)
        places = accumulate((facts[2] + 1 for facts in texts), initial=0)
        bounds = pairwise(starts.tolist())
        return (
            (all_offsets.slice(4 * place, 4 * (facts[2] + 1)), all_data.slice(start, end - start))
            for facts, place, (start, end) in zip(texts, places, bounds, strict=False)
        )


def _array(
    kind: ValueKind, values: Ints, valid: pa.Buffer | None, texts: Iterator[tuple[pa.Buffer, pa.Buffer]]
) -> pa.Array:
    """Return a column of its kind's type; a text column takes the next of the texts."""
    count = len(values)
    if kind in _TEXTS:
        return pa.Array.from_buffers(pa.string(), count, [valid, *next(texts)])
    if kind is ValueKind.BOOLEAN:
        bits = np.packbits(values.astype(np.uint8), bitorder="little")
        return pa.Array.from_buffers(pa.bool_(), count, [valid, pa.py_buffer(bits)])
    if kind is ValueKind.UNSIGNED:
        words = np.zeros(2 * count, np.int64)
        words[::2] = values
        return pa.Array.from_buffers(UNSIGNED, count, [valid, pa.py_buffer(words)])
    return pa.Array.from_buffers(_PLAIN[kind], count, [valid, pa.py_buffer(values)])


class _NameTable:
    """Room for names, and a hash table of them."""

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self.facts: Ints = np.empty((min(_NAMES_AT_FIRST, names_max), known.NAME_FACTS), np.int64)
        self.slots = np.full(2 * _NAMES_AT_FIRST, -1, np.int32)

    def grow(self) -> None:
        """Make room for more."""
        count = len(self.facts)
        if count == self._names_max:
            raise TooManyNamesError
        facts = np.empty((min(2 * count, self._names_max), known.NAME_FACTS), np.int64)
        facts[:count] = self.facts
        self.facts = facts
        self.slots = np.full(2 * len(self.slots), -1, np.int32)
        known.enter_again(self.facts, count, self.slots)


def _marked(places: list[int], count: int) -> Bytes:
    marks = np.zeros(count, np.uint8)
    marks[places] = 1
    return marks


def warm() -> None:
    """Compile or load the machine code; otherwise the first body does, which takes seconds."""
    body = b'm,a=1 b="x",c=1.5\nm,a=2 b="y",c=2i 1\nm b="z" 2\n'
    walk = Walk(body, ScanMemory(len(body)), seed=0, time_min=0, time_max=10, wrong_max=1, names_max=100)
    case_of = np.arange(3, dtype=np.int64)
    walk.settle(refused_measurements=[], refused_columns=[], case_of=case_of, fixed={}, columns_max=10, refused_max=1)
    walk.tables(unit_ns=1, now_us=0, bytes_max=1 << 20)
