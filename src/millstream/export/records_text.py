"""Records of the log as CSV and as InfluxDB's line protocol, for other programs; see docs/how-to/export-the-log.md."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TextIO

import pyarrow as pa

from millstream.model.arrow_texts import csv_field
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.names import name_fault
from millstream.model.records import INSTANT, PARTITION_OID, RESERVED_COLUMNS, Op
from millstream.model.schema import Column, TableKind, TableSchema
from millstream.wal.records_json import Line

FACTS: Final = ("shard", "offset", "seq", "op", "source", "commit_lsn", "commit_index", "commit_ts", "xid")
_NAME: Final = str.maketrans({",": "\\,", "=": "\\=", " ": "\\ "})
_MEASUREMENT: Final = str.maketrans({",": "\\,", " ": "\\ "})
_TEXT: Final = str.maketrans({'"': '\\"', "\\": "\\\\"})
_EPOCH: Final = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
_MICROSECOND: Final = timedelta(microseconds=1)
_TIME_NS_MAX: Final = 1 << 63
_TIMES: Final = frozenset({"time", "time_ns"})
_NO_POINTS: Final = {
    "d": "line protocol has no deletes",
    "t": "line protocol has no truncates",
    "x": "line protocol has no partitions that leave",
    "raw": "their table was quarantined when they came",
}
"""Operations without a point, each with the reason."""


def _columns_over(
    schemas: Mapping[tuple[TableId, SchemaVersion], TableSchema], tables: Container[TableId]
) -> list[str]:
    """Return the columns of some tables over all their versions: the newest's first, then former ones."""
    found: dict[str, None] = {}
    for (table, _), schema in sorted(schemas.items(), reverse=True):
        if table in tables:
            found |= dict.fromkeys(column.name for column in schema.columns)
    return list(found)


class CsvTable:
    """One table's records as CSV with a header. NULL, and missing values, are nothing; an empty text is `""`.

    Args:
        schemas: the log's schemas by table and version.
        tables: the tables whose records are written; their columns over all versions follow those of every record.
    """

    def __init__(
        self, out: TextIO, schemas: Mapping[tuple[TableId, SchemaVersion], TableSchema], tables: Container[TableId]
    ) -> None:
        self._out = out
        self._columns = _columns_over(schemas, tables)
        partitioned = any(schema.partitioned for (table, _), schema in schemas.items() if table in tables)
        self._leaves = [PARTITION_OID.name] if partitioned else []
        names = [*(f"__{fact}" for fact in FACTS), "__unchanged", "__before", *self._leaves, *self._columns]
        out.write(",".join(csv_field(name) for name in names) + "\n")

    def write(self, line: Line) -> None:
        """Write one record, read with values as text."""
        facts = line.facts | {"commit_ts": _as_postgresql(line.facts["commit_ts"])}
        row: dict[str, Any] = facts["row"] or {}
        old = facts["before"]
        if facts["op"] == Op.PARTITION_LEFT.letter:
            row, old = {}, row
        before = None if old is None else json.dumps(old, ensure_ascii=False)
        unchanged = json.dumps(facts["unchanged"], ensure_ascii=False) if facts["unchanged"] else None
        cells = [*(facts[fact] for fact in FACTS), unchanged, before]
        cells += [facts.get("partition_oid") for _ in self._leaves]
        cells += [row.get(name) for name in self._columns]
        self._out.write(",".join(csv_field(_text(cell)) for cell in cells) + "\n")


def _as_postgresql(moment: str | None) -> str | None:
    """Return a moment in UTC in the form of the values next to it."""
    if moment is None:
        return None
    day, _, time = moment.removesuffix("+00:00").partition("T")
    whole, point, fraction = time.partition(".")
    return f"{day} {whole}{point}{fraction.rstrip('0')}+00"


class LineProtocol:
    """Records, read with values as JSON, as lines that InfluxDB and `POST /write` take.

    The measurement is the table. Tags are key columns of text, fields the other columns. The time is
    the column `time`, as `/write` makes it; in a table without one, the commit's.
    """

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        """Records and values that no line holds: their number by what they are and why."""
        self._points: dict[tuple[TableId, SchemaVersion], _Point | None] = {}

    def line(self, line: Line) -> str | None:
        """Return a record's line; None, and count it, if line protocol can't hold it."""
        facts, schema = line.facts, line.schema
        if facts["op"] in _NO_POINTS:
            return self._none(_NO_POINTS[facts["op"]])
        version = (schema.table_id, schema.version)
        if version not in self._points:
            self._points[version] = _point_of(schema)
        point, row = self._points[version], facts["row"]
        if point is None:
            return self._none("`POST /write` refuses the name of the table or of a column")
        time_ns = _time_ns(row, facts["commit_ts"], timed=point.timed)
        if time_ns is None:
            return self._none("they have no time, or one beyond 64 bits of nanoseconds")
        tags = [(key, str(row[name])) for name, key in point.tags if row.get(name) is not None]
        if not all(text and _is_writable(text) for _, text in tags):
            return self._none("their key is empty, has a newline, or ends with a backslash")
        values = [(key, write(row[name])) for name, key, write in point.fields if row.get(name) is not None]
        fields = ",".join(f"{key}={value}" for key, value in values if value is not None)
        if not fields:
            return self._none("they have no value outside of their key")
        self.left_out["values are left out: NaN, infinite, or beyond 64 bits"] += sum(
            value is None for _, value in values
        )
        self.left_out["values are left out: an update didn't repeat them (unchanged TOAST)"] += len(facts["unchanged"])
        head = ",".join([point.measurement, *(f"{key}={text.translate(_NAME)}" for key, text in tags)])
        return f"{head} {fields} {time_ns}"

    def _none(self, why: str) -> str | None:
        self.left_out[f"records are left out: {why}"] += 1
        return None


@dataclass(frozen=True, slots=True)
class _Point:
    """The points of one version of a table; names are escaped as in lines."""

    measurement: str
    tags: tuple[tuple[str, str], ...]
    """Columns that are tags, sorted as InfluxDB likes them, each with its key."""
    fields: tuple[tuple[str, str, Callable[[Any], str | None]], ...]
    """Columns that are fields, each with its key and what writes a value."""
    timed: bool
    """Whether the table has the time in a column, as tables that `/write` makes."""


def _point_of(schema: TableSchema) -> _Point | None:
    """Return the form of a table's points; None if `POST /write` would refuse each."""
    is_messages = schema.kind is TableKind.MESSAGES
    timed = any((column.name, column.arrow) == ("time", INSTANT) for column in schema.columns)
    columns = [column for column in schema.columns if not (timed and column.name in _TIMES)]
    measurement = schema.name if is_messages or schema.namespace == "public" else f"{schema.namespace}.{schema.name}"
    names = [column.name.lower() for column in columns]
    if (
        measurement.startswith(("#", "\t"))
        or not all(name_fault(name) is None and _is_writable(name) for name in (measurement, *names))
        or not _TIMES.union(RESERVED_COLUMNS).isdisjoint(names)
        or len(set(names)) < len(names)
    ):
        return None
    key = (
        {"prefix"}
        if is_messages
        else {column.name for column in columns if column.arrow == pa.string()}.intersection(schema.key)
    )
    return _Point(
        measurement.translate(_MEASUREMENT),
        tuple((name, name.translate(_NAME)) for name in sorted(key)),
        tuple((c.name, c.name.translate(_NAME), _field_writer(c)) for c in columns if c.name not in key),
        timed,
    )


def _time_ns(row: Mapping[str, Any], commit_ts: str | None, *, timed: bool) -> int | None:
    """Return a record's time in nanoseconds since 1970, if there is one that a timestamp holds."""
    if timed and row.get("time_ns") is not None:
        return int(row["time_ns"])
    moment = row.get("time") if timed else commit_ts
    if moment is None:
        return None
    try:
        since = datetime.fromisoformat(moment) - _EPOCH
    except ValueError:  # before Christ, or infinite
        return None
    time_ns = since // _MICROSECOND * 1000
    return time_ns if abs(time_ns) < _TIME_NS_MAX else None


def _is_writable(text: str) -> bool:
    """Return whether a name or a tag's value can be written: a newline, and a backslash at its end, can't be escaped."""
    return "\n" not in text and not text.endswith("\\")


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _field_writer(column: Column) -> Callable[[Any], str | None]:
    kind = column.arrow
    if pa.types.is_integer(kind):
        return lambda value: f"{value}i"
    if kind == pa.decimal128(20, 0) and column.pg is None:
        return lambda value: f"{value}u" if 0 <= int(value) < 1 << 64 else None  # `/write` makes it of unsigned ones
    if pa.types.is_floating(kind):
        exact = kind.to_pandas_dtype()  # an `f` of 32 bits is shown shortened
        return lambda value: repr(float(exact(value))) if math.isfinite(float(value)) else None
    if pa.types.is_boolean(kind):
        return lambda value: "true" if value in (True, "t") else "false"
    return lambda value: f'"{str(value).translate(_TEXT)}"'
