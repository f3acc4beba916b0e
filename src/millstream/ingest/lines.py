"""Lines of InfluxDB's line protocol as tables: a measurement is a table, tags and fields are its columns, `time` is a line's timestamp.

What is wrong with a line is told by its number, and the other lines are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.codec.line_protocol import REASONS, Kind, PlainFault, PlainLine, parse_plain
from millstream.errors import UsageError
from millstream.ingest.columns import COLUMNS_MAX, NAME_BYTES_MAX, ROWS_BYTES_MAX, too_large
from millstream.model.names import qualified_name
from millstream.model.records import INSTANT, RESERVED_COLUMNS, TIME_MAX_US, TIME_MIN_US

TABLES_MAX: Final = 1000
"""Measurements of one request: each is an operation of its own."""
REJECTED_MAX: Final = 1000
"""Lines that are told of by their number; of more, how many there are."""
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
"""Nanoseconds of a timestamp's unit, by the names that versions 1, 2 and 3 of InfluxDB have for it; nanoseconds where none is named."""
COLUMN_TYPES: Final[Mapping[Kind, pa.DataType]] = {
    Kind.FLOAT: pa.float64(),
    Kind.INTEGER: pa.int64(),
    Kind.UNSIGNED: pa.decimal128(20, 0),
    Kind.STRING: pa.string(),
    Kind.BOOLEAN: pa.bool_(),
    Kind.TAG: pa.string(),
}


@dataclass(frozen=True, slots=True)
class TableLines:
    """The rows of one measurement, in their lines' order."""

    table: str
    """`public.measurement`, quoted where it must be."""
    rows: pa.Table
    """In the log's types, as `ingest.columns.table_of` gives them: `time`, `time_ns` where some time isn't whole microseconds, and then the tags
    and fields by their first line."""
    lines: npt.NDArray[np.int64]
    """The number of each row's line in the body, from 1."""


@dataclass(frozen=True, slots=True)
class RejectedLine:
    """A line that is wrong."""

    line: int
    """Where it begins, from 1."""
    reason: str
    text: str
    """How it begins, for people."""


@dataclass(frozen=True, slots=True)
class Lines:
    """What a body of lines says."""

    tables: list[TableLines]
    """By their first line; none where no line is right."""
    rejected: list[RejectedLine]
    """In the lines' order; the first ones, where there are many."""
    rejected_count: int


def tables_of_lines(
    body: bytes,
    *,
    precision: str,
    now_ns: int,
    rows_bytes_max: int = ROWS_BYTES_MAX,
    tables_max: int = TABLES_MAX,
    columns_max: int = COLUMNS_MAX,
    rejected_max: int = REJECTED_MAX,
) -> Lines:
    """The tables of lines.

    Args:
        body: lines, as InfluxDB's clients send them, not compressed.
        precision: of the timestamps, one of `PRECISIONS`.
        now_ns: the time of lines without a timestamp, in nanoseconds since 1970; it is cut to whole microseconds.
        rows_bytes_max: of all tables together, as Arrow holds them.
        tables_max: how many measurements there may be.
        columns_max: of one table; a line that brings more is rejected.
        rejected_max: how many lines are told of by their number.

    Raises:
        UsageError: no such precision.
        RowsTooLarge: the lines make more than `rows_bytes_max` or `tables_max`: nothing of them is taken.
    """
    unit = PRECISIONS.get(precision)
    if unit is None:
        raise UsageError(
            f"{precision!r} is no precision of timestamps", hint=f"It is one of {', '.join(filter(None, PRECISIONS))}."
        )
    tables: dict[str, _Table] = {}
    rejected: list[RejectedLine] = []
    low, high = -((-TIME_MIN_US * 1000) // unit), (TIME_MAX_US * 1000 + 999) // unit
    for line in parse_plain(body, time_min=low, time_max=high):
        if isinstance(line, PlainFault):
            reason: str | None = REASONS[line.fault]
        else:
            table = tables.get(line.measurement) or _Table(line.measurement)
            reason = table.add(line, columns_max)
            if reason is None:
                tables[line.measurement] = table
        if reason is not None:
            rejected.append(RejectedLine(line.number, reason, excerpt(body, *line.span)))
    if len(tables) > tables_max:
        raise too_large("its measurements", len(tables), tables_max)
    found = [table.finish(unit, now_ns // 1000 * 1000) for table in tables.values()]
    size = sum(table.rows.nbytes for table in found)
    if size > rows_bytes_max:
        raise too_large("its rows' bytes", size, rows_bytes_max)
    return Lines(found, rejected[:rejected_max], len(rejected))


def excerpt(body: bytes, start: int, end: int) -> str:
    """How a line begins."""
    text = body[start : min(end, start + 4 * EXCERPT_CHARACTERS)].decode("utf-8", "replace").rstrip("\r\n")
    return text if len(text) <= EXCERPT_CHARACTERS else text[: EXCERPT_CHARACTERS - 1] + "…"


class _Table:
    def __init__(self, measurement: str) -> None:
        self.measurement = measurement
        self.kinds: dict[str, Kind] = {}
        self.lower: dict[str, str] = {}
        self.rows: list[tuple[int, int | None, dict[str, Any]]] = []

    def add(self, line: PlainLine, columns_max: int) -> str | None:
        """Take a line, or say why not."""
        why = name_fault("measurement", line.measurement, columns=False)
        if why is not None:
            return why
        kinds, lower, row = dict(self.kinds), dict(self.lower), {}
        for key, kind, value in [*((k, Kind.TAG, v) for k, v in line.tags), *line.fields]:
            why = name_fault("tag" if kind is Kind.TAG else "field", key, columns=True)
            if why is not None:
                return why
            other = lower.setdefault(key.lower(), key)
            if other != key:
                return f"its {key!r} differs from {other!r} by its case alone"
            had = kinds.setdefault(key, kind)
            if had is not kind:
                return clash(key, kind, had)
            row[key] = value
        if len(kinds) > columns_max:
            return f"its table would have more than {columns_max} columns of one request"
        self.kinds, self.lower = kinds, lower
        self.rows.append((line.number, line.time, row))
        return None

    def finish(self, unit: int, now_ns: int) -> TableLines:
        times = [now_ns if time is None else time * unit for _, time, _ in self.rows]
        columns = {TIME: pa.array([time // 1000 for time in times], pa.int64()).cast(INSTANT)}
        if any(time % 1000 for time in times):
            columns[TIME_NS] = pa.array(times, pa.int64())
        for key, kind in self.kinds.items():
            columns[key] = pa.array([row.get(key) for _, _, row in self.rows], COLUMN_TYPES[kind])
        lines = np.array([number for number, _, _ in self.rows], np.int64)
        return TableLines(qualified_name("public", self.measurement), pa.table(columns), lines)


def name_fault(what: str, name: str, *, columns: bool) -> str | None:
    """Why a name can't be a table's, or a column's."""
    if "\0" in name:
        return f"the name of {what} {name[:40]!r} has a zero byte"
    if len(name.encode()) > NAME_BYTES_MAX:
        return f"the name of {what} {name[:40]!r}… has more than {NAME_BYTES_MAX} bytes"
    if columns and (name.lower() in {TIME, TIME_NS} or name.lower() in RESERVED_COLUMNS):
        return f"{what} {name!r} has the name of a column that each row has"
    return None


def clash(key: str, kind: Kind, had: Kind) -> str:
    """Why a value has no place beside those of lines before it."""
    if Kind.TAG in (kind, had):
        return f"{key!r} is a {'tag' if kind is Kind.TAG else 'field'} here, and a {'field' if kind is Kind.TAG else 'tag'} before"
    return f"field {key!r} is of type {kind.name.lower()} here, and {had.name.lower()} before"
