"""Records of the log made of their JSON, for the encoder: rows of a backfill, newest states of keys, dead letters.

Every value is PostgreSQL's text, in `__exact`. The columns themselves are empty, except those of a logical message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import pyarrow as pa

from millstream.model.column_texts import render_content
from millstream.model.positions import parse_lsn
from millstream.model.records import PARTITION_OID, Op, record_schema
from millstream.model.schema import TableKind, TableSchema


def records_of(
    schema: TableSchema, facts: Iterable[Mapping[str, Any]], renamed: Mapping[str, str] | None
) -> pa.RecordBatch:
    """Return records in `record_schema(schema, offsets=True)`.

    Args:
        schema: the table's.
        facts: the records as `model.record_json` has them.
        renamed: the new name of each column that they have; None: all, under their names. Other columns are null.
    """
    rows = [_record(schema, one, renamed) for one in facts]
    return pa.RecordBatch.from_pylist(rows, schema=record_schema(schema, offsets=True))


def _record(schema: TableSchema, facts: Mapping[str, Any], renamed: Mapping[str, str] | None) -> dict[str, Any]:
    lsn, time = facts["commit_lsn"], facts["commit_ts"]
    row, before = facts["row"] or {}, facts["before"]
    # A column that the record lacks isn't in the lists below: it is null.
    names = {column.name: column.name for column in schema.columns} if renamed is None else renamed
    found: dict[str, Any] = {
        "__op": facts["op"],
        "__seq": facts["seq"],
        "__offset": facts["offset"],
        "__source": facts["source"],
        "__commit_lsn": None if lsn is None else int(parse_lsn(lsn)),
        "__commit_index": facts["commit_index"],
        "__commit_ts": None if time is None else datetime.fromisoformat(time),
        "__xid": facts["xid"],
        "__unchanged": [name for name, new in names.items() if new in facts["unchanged"]],
        "__before": None if before is None else _texts(before, names),
        **({PARTITION_OID.name: facts.get("partition_oid")} if schema.partitioned else {}),
    }
    if facts["op"] == Op.PARTITION_LEFT.letter:
        return {**found, "__before": [("partition", row["partition"])]}
    if schema.kind is TableKind.MESSAGES:
        content = row.get("content")
        return {**found, **row, "content": None if content is None else _bytes(content)}
    texts = dict(_texts(row, names))
    for column in schema.columns:
        text = texts.get(column.name)
        if text is not None and column.pg is None and pa.types.is_binary(column.arrow):
            texts[column.name] = "\\x" + _bytes(text).hex()
    return {**found, "__exact": [(name, text) for name, text in texts.items() if text is not None]}


def _bytes(content: str) -> bytes:
    """Return the bytes of `model.column_texts.render_content`: a text, or digits of bytes that aren't one."""
    try:
        found = bytes.fromhex(content[2:]) if content.startswith("\\x") else content.encode()
    except ValueError:
        return content.encode()
    return found if render_content(found) == content else content.encode()


def _texts(values: Mapping[str, Any], names: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """Return values as PostgreSQL's texts, by the names of the table's columns."""
    return [(name, _text(values[new])) for name, new in names.items() if new in values]


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "t" if value else "f"
    return value if value is None or isinstance(value, str) else repr(value)
