"""Records of the log as CSV and as InfluxDB's line protocol, for other programs; see docs/how-to/export-the-log.md."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, TextIO

import pyarrow as pa

from millstream.export.records_json import Line
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.schema import TableKind, TableSchema

FACTS: Final = ("shard", "offset", "seq", "op", "source", "commit_lsn", "commit_index", "commit_ts", "xid")
_QUOTED: Final = re.compile(r'[",\r\n]')
_NAME: Final = str.maketrans({",": "\\,", "=": "\\=", " ": "\\ ", "\n": "\\n", "\r": "\\r"})
_MEASUREMENT: Final = str.maketrans({",": "\\,", " ": "\\ ", "\n": "\\n", "\r": "\\r"})
_TEXT: Final = str.maketrans({'"': '\\"', "\\": "\\\\"})
_EPOCH: Final = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


def columns_over(schemas: Mapping[tuple[TableId, SchemaVersion], TableSchema], tables: Container[TableId]) -> list[str]:
    """Return the columns of some tables over all their versions: the newest's first, then former ones."""
    found: dict[str, None] = {}
    for (table, _), schema in sorted(schemas.items(), reverse=True):
        if table in tables:
            found |= dict.fromkeys(column.name for column in schema.columns)
    return list(found)


class CsvTable:
    """One table's records as CSV with a header. NULL, and missing values, are nothing; an empty text is `""`.

    Args:
        out: the target.
        columns: the table's own, in order.
    """

    def __init__(self, out: TextIO, columns: Iterable[str]) -> None:
        self._out = out
        self._columns = list(columns)
        names = [*(f"__{fact}" for fact in FACTS), "__unchanged", "__before", *self._columns]
        out.write(",".join(csv_field(name) for name in names) + "\n")

    def write(self, line: Line) -> None:
        """Write one record, read with values as text."""
        facts = line.facts
        row: dict[str, Any] = facts["row"] or {}
        before = None if facts["before"] is None else json.dumps(facts["before"], ensure_ascii=False)
        unchanged = json.dumps(facts["unchanged"], ensure_ascii=False) if facts["unchanged"] else None
        cells = [*(facts[fact] for fact in FACTS), unchanged, before, *(row.get(name) for name in self._columns)]
        self._out.write(",".join(csv_field(_text(cell)) for cell in cells) + "\n")


def csv_field(text: str | None) -> str:
    """Return a value as a CSV field."""
    if text is None:
        return ""
    if text and not _QUOTED.search(text):
        return text
    return '"' + text.replace('"', '""') + '"'


def line_protocol(line: Line) -> str | None:
    """Return one record (read with values as JSON) as a line of InfluxDB's protocol; None for one without a time.

    Measurement: the table. Tags: the key. Fields: the other columns, `__op` and `__seq`. Time: the
    commit's, in ns. Integers, floats and booleans keep their types; everything else is PostgreSQL's text.
    NULL, unchanged TOAST and floats that are no number have no field.
    """
    facts, schema = line.facts, line.schema
    if facts["commit_ts"] is None:
        return None
    row: dict[str, Any] = facts["row"] or {}
    key = ("prefix",) if schema.kind is TableKind.MESSAGES else schema.key
    measurement = schema.name if schema.kind is TableKind.MESSAGES else f"{schema.namespace}.{schema.name}"
    head = _no_backslash_end(measurement.translate(_MEASUREMENT))
    for name in sorted(key):
        value = row.get(name)
        # An empty tag can't be written, and neither can a null one.
        if value is not None and value != "":
            head += f",{_tag(name)}={_tag(_text(value) or '')}"
    fields = [f'__op="{facts["op"]}"', f"__seq={facts['seq']}i"]
    for column in schema.columns:
        value = row.get(column.name)
        if value is not None and column.name not in key:
            written = _field_writer(column.arrow)(value)
            if written is not None:
                fields.append(f"{_tag(column.name)}={written}")
    since = datetime.fromisoformat(facts["commit_ts"]) - _EPOCH
    nanoseconds = ((since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds) * 1000
    return f"{head} {','.join(fields)} {nanoseconds}"


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _tag(text: str) -> str:
    return _no_backslash_end(text.translate(_NAME))


def _no_backslash_end(text: str) -> str:
    """A backslash before the separator would escape it."""
    return text + " ".translate(_NAME) if text.endswith("\\") else text


def _field_writer(kind: pa.DataType) -> Callable[[Any], str | None]:
    if pa.types.is_integer(kind):
        return lambda value: f"{value}i"
    if pa.types.is_floating(kind):
        return _float
    if pa.types.is_boolean(kind):
        return lambda value: "true" if value in (True, "t") else "false"
    return lambda value: f'"{str(value).translate(_TEXT)}"'


def _float(value: Any) -> str | None:
    number = float(value)
    return repr(number) if math.isfinite(number) else None
