"""The page of one table: its live state, the versions of its schema, and its last records."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from millstream.console.html import Content, Html, Part, Piece, described, grid, shortened, tag, with_code
from millstream.console.pages import TABLE_HEADS, known_figure, table_cells
from millstream.errors import MillstreamError, UnknownStream
from millstream.model.human_text import human_bytes
from millstream.model.ids import TableId
from millstream.model.pgtypes import type_in_words
from millstream.model.positions import Seq

if TYPE_CHECKING:
    from millstream.app.record_rates import Status
    from millstream.home.home import Home
    from millstream.model.ids import SchemaVersion
    from millstream.model.schema import Column, TableSchema

RECORDS_SHOWN: Final = 20
_NUMBERS: Final = (1_000, 100_000, 10_000_000, 1_000_000_000)
"""How many numbers of the log are searched for a table's last records, one after the other …"""
_BYTES_MAX: Final = 32 << 20
"""… and how many bytes of it at most. Numbers have gaps: each start of a writer leaves one."""
_VALUE_MAX: Final = 400


def find_table(status: Status, stream: str, name: str) -> Mapping[str, Any] | None:
    """Return a table's facts in a status."""
    tables = (table for one in status["streams"] if one["name"] == stream for table in one.get("tables", ()))
    return next((table for table in tables if table["name"] == name), None)


def area(status: Status, stream: str, name: str) -> Iterator[Piece]:
    """Yield the live area."""
    table = find_table(status, stream, name)
    if table is None:
        yield Part("facts", tag("p", f"{name} is no longer among the tables of {stream}.", id="facts"))
        return
    values = table_cells(stream, table, several=len(status["streams"]) > 1)
    facts: list[tuple[str, Content]] = [
        ("Stream", stream),
        *zip(TABLE_HEADS[1:-1], values[1:-1], strict=True),
        ("On disk", None if (size := known_figure(table, "disk_bytes")) is None else human_bytes(size)),
        ("Shard", "" if table["shard"] is None else str(table["shard"])),
        *((f"Folder of {view}", tag("code", path)) for view, path in table["paths"].items()),
        (TABLE_HEADS[-1], values[-1]),
    ]
    yield described(facts)


def details(home: Home, stream: str, table_id: int) -> list[Content]:
    """Return a table's definitions, with what each changed, and its last records. Blocks."""
    from millstream.app.log_readers import open_reader

    with home.open_catalog() as catalog:
        try:
            schemas, times = catalog.schemas(catalog.stream(stream).id), catalog.schema_times(TableId(table_id))
        except UnknownStream:  # a follower's catalog lacks it
            schemas, times = open_reader(home, stream, of_any_age=True).schema_versions(), {}
    own = sorted((schema for (table, _), schema in schemas.items() if table == table_id), key=lambda one: -one.version)
    return [
        tag("section", tag("h2", "Definitions"), *_versions(own, times)),
        last_records(home, stream, TableId(table_id)),
    ]


def _versions(schemas: Sequence[TableSchema], times: Mapping[SchemaVersion, int]) -> Iterator[Html]:
    if not schemas:
        yield tag("p", "None so far.")
    for number, schema in enumerate(schemas):
        before = schemas[number + 1] if number + 1 < len(schemas) else None
        rows = [
            tag(
                "tr",
                tag("th", column.name, scope="row"),
                tag("td", type_in_words(column.pg) if column.pg is not None else str(column.arrow)),
                tag("td", "key" if column.name in schema.key else ""),
            )
            for column in schema.columns
        ]
        title = f"Version {schema.version}: {schema.full_name}, {len(rows)} columns" + _changes(before, schema)
        us = times.get(schema.version)
        since = "" if us is None else f", since {datetime.fromtimestamp(us // 1_000_000, UTC).isoformat(' ')}"
        yield tag("details", tag("summary", title, since), grid(("Column", "Type", "Key"), rows), open=number == 0)


def _changes(before: TableSchema | None, after: TableSchema) -> str:
    if before is None:
        return ""
    place = attrgetter("number" if before.is_numbered and after.is_numbered else "name")
    old = {place(column): column for column in before.columns}
    new = {place(column): column for column in after.columns}
    told = [
        *(f"added {column.name}{_default(column)}" for at, column in new.items() if at not in old),
        *(f"dropped {column.name}" for at, column in old.items() if at not in new),
    ]
    for was, column in ((old[at], column) for at, column in new.items() if at in old and column != old[at]):
        told.append(f"changed {column.name}" if was.name == column.name else f"renamed {was.name} to {column.name}")
    if before.full_name != after.full_name:
        told.append(f"renamed from {before.full_name}")
    if before.key != after.key:
        told.append("another key")
    return f" ({', '.join(told)})" if told else ""


def _default(column: Column) -> str:
    return "" if column.filled is None else f" with {column.filled} in older rows"


def last_records(home: Home, stream: str, table: TableId) -> Html:
    """Return a table's last records, the newest first. Blocks."""
    from millstream.app.log_readers import open_reader
    from millstream.wal.records_json import Cat

    title = tag("h2", "Last records")
    found: deque[dict[str, Any]] = deque(maxlen=RECORDS_SHOWN)
    try:
        reader = open_reader(home, stream)
        end = reader.persisted_upto()
        for count in _NUMBERS:
            after = Seq(max(0, end - count, reader.first_seq() - 1))
            size_bytes = sum(span.byte_end - span.byte_start for span in reader.spans(after, end))
            if size_bytes > _BYTES_MAX and count > _NUMBERS[0]:
                break
            found.clear()
            cat = Cat(stream, reader, tables=frozenset({table}), numbers=(after, end))
            found.extend(cat.lines())
            if len(found) == RECORDS_SHOWN or after < end - count:
                break
    except (MillstreamError, OSError) as error:
        hint = error.hint if isinstance(error, MillstreamError) else ""
        return tag(
            "section", title, tag("p", f"They can't be read: {error} ", *with_code(hint), class_="trouble error")
        )
    if not found:
        return tag("section", title, tag("p", f"None in the log's newest {human_bytes(_BYTES_MAX)}."))
    return tag("section", title, tag("ul", *(record(one) for one in reversed(found)), class_="records"))


def record(facts: Mapping[str, Any]) -> Html:
    """Return a record that opens with all its fields, its row before and after next to each other."""
    row, before = facts["row"] or {}, facts["before"] or {}
    names = list(dict.fromkeys([*row, *before]))
    rows = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            tag("td", _value(before, name)),
            tag("td", _value(row, name)),
            class_="changed" if name in before and name in row and before[name] != row[name] else None,
        )
        for name in names
    ]
    rest = {name: value for name, value in facts.items() if name not in {"row", "before", "stream", "table"} and value}
    summary = f"{_OPS.get(facts['op'], facts['op'])} {facts['table'] or 'message'}"
    return tag(
        "li",
        tag(
            "details",
            tag("summary", tag("strong", summary), f" number {facts['seq']:,}", f", {facts['commit_ts'] or ''}"),
            grid(("Column", "Before", "After"), rows),
            tag("p", tag("code", json.dumps(rest, ensure_ascii=False)), class_="note"),
        ),
    )


_OPS: Final = {
    "c": "insert into",
    "u": "update of",
    "d": "delete from",
    "r": "copied row of",
    "t": "truncate of",
    "x": "partition left",
    "m": "message",
    "s": "definition of",
}


def _value(row: Mapping[str, Any], name: str) -> Content:
    if name not in row:
        return ""
    value = row[name]
    text = "NULL" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(text, _VALUE_MAX)
