"""Lines of InfluxDB's line protocol as tables: a measurement is a table, with its tags and fields as columns.

The column `time` is a line's timestamp. The error of a line names its number, and the other lines are
kept. A table's columns decide the types of their values, and the first line those of new columns.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.codec.line_protocol.grammar import REASONS, Fault, Refusal, ValueKind
from millstream.codec.line_protocol.line_parser import (
    BODY_BYTES_MAX,
    FoundTable,
    RefusedLine,
    ScanMemory,
    TooManyNamesError,
    TooManyValuesError,
    Walk,
)
from millstream.errors import UsageError
from millstream.ingest.append_requests import TABLES_MAX
from millstream.ingest.fit_to_schema import ColumnsOf, no_columns
from millstream.ingest.increment_columns import NAMED
from millstream.ingest.python_rows import COLUMNS_MAX, ROWS_BYTES_MAX, too_large
from millstream.model.names import name_fault, qualified_name
from millstream.model.records import INSTANT, RESERVED_COLUMNS, TIME_MAX_US, TIME_MIN_US

REJECTED_MAX: Final = 1000
"""Limit of rejected lines that are listed by number; beyond it only their count is given."""
NAMES_MAX: Final = 1 << 16
"""Limit of distinct measurements per request, and of distinct columns of all its measurements, including
rejected lines."""
EXCERPT_CHARACTERS: Final = 80
TIME: Final = "time"
TIME_NS: Final = "time_ns"
PRECISIONS: Final[Mapping[str, int]] = {
    "": 1, "n": 1, "ns": 1, "nanosecond": 1,
    "u": 1_000, "µ": 1_000, "us": 1_000, "microsecond": 1_000,
    "ms": 1_000_000, "millisecond": 1_000_000,
    "s": 1_000_000_000, "second": 1_000_000_000,
    "m": 60_000_000_000, "h": 3_600_000_000_000,
}  # fmt: skip
"""Nanoseconds of a timestamp's unit, by its names in versions 1, 2 and 3 of InfluxDB; nanoseconds if none is named."""
_SPARE_BYTES: Final = 4 << 20
_GROWTH_MAX: Final = 32
_ROOM_KEPT_BYTES: Final = 1 << 20
"""Largest body in bytes whose memory is kept: it takes nine times as much, in each thread that reads lines."""
_kept: Final = threading.local()
_SEED: Final = secrets.randbits(64)
"""Seed of the hash tables of names, so that a client can't choose names that collide."""


@dataclass(frozen=True, slots=True)
class TableLines:
    """The rows of one measurement, in their lines' order."""

    table: str
    """`public.measurement`, quoted where necessary."""
    rows: pa.Table
    """The rows in the log's types, as from `ingest.python_rows.table_of`: `time`, `time_ns` if some time isn't
    whole microseconds, and then the tags and fields in the order of their first line."""
    lines: npt.NDArray[np.int64]
    """The number of each row's line in the body, from 1."""


@dataclass(frozen=True, slots=True)
class RejectedLine:
    """A line that was refused."""

    line: int
    """Number of its first line, from 1."""
    reason: str
    text: str
    """Its beginning, for messages."""


@dataclass(frozen=True, slots=True)
class Lines:
    """The content of a body of lines."""

    tables: list[TableLines]
    """The tables by their first line; empty if no line is valid."""
    rejected: list[RejectedLine]
    """The rejected lines in order; only the first ones, if there are many."""
    rejected_count: int


def tables_of_lines(
    body: bytes,
    *,
    precision: str,
    now_ns: int,
    columns_of: ColumnsOf = no_columns,
    rows_bytes_max: int | None = None,
    tables_max: int = TABLES_MAX,
    columns_max: int = COLUMNS_MAX,
    rejected_max: int = REJECTED_MAX,
) -> Lines:
    """Return the tables of lines.

    Args:
        body: lines, as InfluxDB's clients send them, not compressed.
        precision: the timestamps' unit, one of `PRECISIONS`.
        now_ns: the time of lines without a timestamp, in nanoseconds since 1970; it is cut to whole
            microseconds.
        columns_of: returns the columns of tables as they are now. It is called only if lines of these tables disagree,
            and then once.
        rows_bytes_max: limit for all tables together: eight bytes for each time and each value, null or
            not, and the bytes of texts. The default is `ROWS_BYTES_MAX`, or less for a small body:
            `bytes_max_of`.
        columns_max: limit of a table's columns; a line that adds more is rejected.
        rejected_max: limit of lines that are listed by number.

    Raises:
        UsageError: no such precision.
        IngestError (`rows_too_large`): the lines make more than `rows_bytes_max` or `tables_max`, or have more than
            `NAMES_MAX` names: none of them is taken.
    """
    unit = PRECISIONS.get(precision)
    if unit is None:
        raise UsageError(
            f"{precision!r} is no precision of timestamps", hint=f"It is one of {', '.join(filter(None, PRECISIONS))}."
        )
    if rows_bytes_max is None:
        rows_bytes_max = bytes_max_of(len(body))
    if len(body) > BODY_BYTES_MAX:
        raise too_large("its lines' bytes", len(body), BODY_BYTES_MAX)
    try:
        walk = Walk(
            body,
            _room(len(body)),
            seed=_SEED,
            time_min=-((-TIME_MIN_US * 1000) // unit),
            time_max=(TIME_MAX_US * 1000 + 999) // unit,
            wrong_max=rejected_max,
            names_max=NAMES_MAX,
        )
    except TooManyNamesError as error:
        raise too_large("its names of measurements or of columns", NAMES_MAX + 1, NAMES_MAX) from error
    rejected = [RejectedLine(wrong.number, REASONS[wrong.fault], excerpt(body, *wrong.span)) for wrong in walk.wrong]
    rejected_count = walk.wrong_count
    names = _LineNames.of(walk)
    if not (names.are_fine and walk.agrees(columns_max)):
        names, fixed = names.beside_tables(walk, columns_of)
        refused, count = walk.settle(
            refused_measurements=list(names.refused_measurements),
            refused_columns=list(names.refused_columns),
            case_of=names.case_of,
            fixed=fixed,
            columns_max=columns_max,
            refused_max=rejected_max,
        )
        rejected_count += count
        rejected += [
            RejectedLine(line.number, names.reason(line, columns_max), excerpt(body, *line.span)) for line in refused
        ]
        rejected = sorted(rejected, key=lambda line: line.line)[:rejected_max]
    if walk.measurement_count > tables_max:
        raise too_large("its measurements", walk.measurement_count, tables_max)
    try:
        tables = walk.tables(unit_ns=unit, now_us=now_ns // 1000, bytes_max=rows_bytes_max)
    except TooManyValuesError as error:
        raise too_large("its rows' bytes", error.size, rows_bytes_max) from error
    return Lines([_table(table) for table in tables], rejected, rejected_count)


def _room(size: int) -> ScanMemory:
    """Return memory for a body's parse result, kept for the thread's next one if it isn't large."""
    if size > _ROOM_KEPT_BYTES:
        return ScanMemory(size)
    room: ScanMemory | None = getattr(_kept, "room", None)
    if room is None or room.body_bytes_max < size:
        room = _kept.room = ScanMemory(min(max(2 * size, _ROOM_KEPT_BYTES // 16), _ROOM_KEPT_BYTES))
    return room


def bytes_max_of(body_bytes: int) -> int:
    """Return the limit in bytes of a body's tables.

    Lines of few values in many columns would otherwise expand a thousandfold.
    """
    return min(ROWS_BYTES_MAX, _SPARE_BYTES + _GROWTH_MAX * body_bytes)


def warm() -> None:
    """Compile or load the machine code now; otherwise the first lines do, which takes seconds."""
    from millstream.codec.line_protocol.line_parser import warm

    warm()


def _table(found: FoundTable) -> TableLines:
    times = pa.Array.from_buffers(INSTANT, len(found.numbers), [None, pa.py_buffer(found.times_us)])
    columns = {TIME: times}
    if found.times_ns is not None:
        columns[TIME_NS] = pa.array(found.times_ns)
    columns.update((column.name, column.values) for column in found.columns)
    return TableLines(qualified_name("public", found.measurement), pa.table(columns), found.numbers)


@dataclass(frozen=True, slots=True)
class _LineNames:
    """The names of a walk's measurements and columns, by their places, and which of them are invalid."""

    measurements: dict[int, str]
    columns: dict[int, str]
    refused_measurements: dict[int, str]
    """The invalid measurements, with the reason."""
    refused_columns: dict[int, str]
    case_of: npt.NDArray[np.int64]
    """A number for each column, equal for names of one measurement that differ only by case."""
    are_fine: bool

    @classmethod
    def of(cls, walk: Walk) -> Self:
        measurements, columns = walk.measurement_names(), walk.column_names()
        refused_measurements = {
            place: why for place, name in measurements.items() if (why := measurement_fault(name)) is not None
        }
        refused_columns = {place: why for place, name in columns.items() if (why := column_fault(name)) is not None}
        case_of = np.arange(walk.column_count, dtype=np.int64)
        first: dict[tuple[int, str], int] = {}
        of = walk.measurements_of_columns()
        for place, name in columns.items():
            same = first.setdefault((of[place], name.lower()), place)
            if same != place:
                case_of[place] = same
        are_fine = not refused_measurements and not refused_columns and len(first) == len(columns)
        return cls(measurements, columns, refused_measurements, refused_columns, case_of, are_fine)

    def beside_tables(self, walk: Walk, columns_of: ColumnsOf) -> tuple[Self, dict[int, ValueKind]]:
        """Return the names, refused as well if a table has them in another case; and the kinds of the tables' columns.

        Only the tables whose lines disagree matter.
        """
        of = walk.measurements_of_columns()
        clashing = {*walk.mixed_columns(), *np.flatnonzero(self.case_of != np.arange(len(self.case_of))).tolist()}
        tables = {
            place: qualified_name("public", self.measurements[place])
            for place in {of[column] for column in clashing if column in self.columns}
            if place not in self.refused_measurements
        }
        found = columns_of(tables.values()) if tables else {}
        refused, fixed = dict(self.refused_columns), {}
        spelled = {table: {name.lower(): name for name in columns} for table, columns in found.items()}
        for column, name in self.columns.items():
            table = tables.get(of[column], "")
            if table not in found:
                continue
            if (kind := found[table].get(name)) is not None:
                if (taken := walk.fixed_kind(column, kind)) is not None:
                    fixed[column] = taken
            elif (other := spelled[table].get(name.lower())) is not None:
                refused.setdefault(column, other_case(name, other))
        return replace(self, refused_columns=refused), fixed

    def reason(self, line: RefusedLine, columns_max: int) -> str:
        """Return the reason for refusing a line."""
        if line.why is Refusal.INFINITE:
            return REASONS[Fault.FLOAT_TOO_LARGE]
        if line.why is Refusal.MEASUREMENT:
            return self.refused_measurements[line.measurement]
        if line.why is Refusal.TOO_MANY_COLUMNS:
            return too_many(columns_max)
        if line.why is Refusal.COLUMN:
            return self.refused_columns[line.column]
        name = self.columns[line.column]
        if line.why is Refusal.OTHER_CASE:
            return other_case(name, self.columns[line.other])
        if line.why is Refusal.NOT_THE_COLUMNS:
            return not_the_columns(name, line.kind, ValueKind(line.other))
        return other_kind(name, line.kind, ValueKind(line.other))


def excerpt(body: bytes, start: int, end: int) -> str:
    """Return a line's beginning."""
    text = body[start : min(end, start + 4 * EXCERPT_CHARACTERS)].decode("utf-8", "replace").rstrip("\r\n")
    return text if len(text) <= EXCERPT_CHARACTERS else text[: EXCERPT_CHARACTERS - 1] + "…"


@lru_cache(maxsize=4096)
def measurement_fault(name: str) -> str | None:
    """Return why a measurement's name can't be a table's."""
    fault = name_fault(name)
    return None if fault is None else f"the measurement's name {name[:40]!r} {fault}"


@lru_cache(maxsize=4096)
def column_fault(name: str) -> str | None:
    """Return why a tag's or a field's key can't be a column's name."""
    fault = name_fault(name)
    if fault is not None:
        return f"the key {name[:40]!r} {fault}"
    if name.lower() in {TIME, TIME_NS, NAMED} or name.lower() in RESERVED_COLUMNS:
        return f"the key {name!r} is the name of a column that each row has"
    return None


def other_case(name: str, other: str) -> str:
    """Return why a key conflicts with one of an earlier line."""
    return f"the key {name!r} differs from {other!r} by its case alone: they would be one column in the lake"


def other_kind(name: str, kind: ValueKind, other: ValueKind) -> str:
    """Return why a value conflicts with those of earlier lines."""
    if ValueKind.TAG in (kind, other):
        here, before = ("tag", "field") if kind is ValueKind.TAG else ("field", "tag")
        return f"{name!r} is a {here} here and a {before} in a line before, or in this one"
    return f"the field {name!r} is of type {kind.name.lower()} here, and {other.name.lower()} in a line before, or in this one"


def not_the_columns(name: str, kind: ValueKind, column: ValueKind) -> str:
    """Return why a value doesn't fit its table's column."""
    return f"the table's column {name!r} holds values of type {column.name.lower()}, and can't take this {kind.name.lower()}"


def too_many(columns_max: int) -> str:
    """Return why a line that adds columns is refused."""
    return f"its measurement would have more than {columns_max} tags and fields"
