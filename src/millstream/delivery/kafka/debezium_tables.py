"""A table as Debezium describes it: topic, key and row templates, and the schema blocks around payloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from millstream.delivery.kafka.debezium_options import DebeziumOptions
from millstream.delivery.kafka.debezium_types import TEXT, Converter, converter
from millstream.delivery.kafka.json_columns import Template
from millstream.delivery.kafka.topic_names import topic_name
from millstream.model.record_json import to_json
from millstream.model.schema import Column, TableKind, TableSchema

SOURCE_FIELD: Final[dict[str, Any]] = {
    "type": "struct",
    "fields": [
        {"type": "string", "optional": False, "field": "version"},
        {"type": "string", "optional": False, "field": "connector"},
        {"type": "string", "optional": False, "field": "name"},
        {"type": "int64", "optional": False, "field": "ts_ms"},
        {
            "type": "string",
            "optional": True,
            "name": "io.debezium.data.Enum",
            "version": 1,
            "parameters": {
                "allowed": "true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"
            },
            "default": "false",
            "field": "snapshot",
        },
        {"type": "string", "optional": False, "field": "db"},
        {"type": "string", "optional": True, "field": "sequence"},
        {"type": "int64", "optional": True, "field": "ts_us"},
        {"type": "int64", "optional": True, "field": "ts_ns"},
        {"type": "string", "optional": False, "field": "schema"},
        {"type": "string", "optional": False, "field": "table"},
        {"type": "int64", "optional": True, "field": "txId"},
        {"type": "int64", "optional": True, "field": "lsn"},
        {"type": "int64", "optional": True, "field": "xmin"},
    ],
    "optional": False,
    "name": "io.debezium.connector.postgresql.Source",
    "version": 1,
    "field": "source",
}
_TRANSACTION_FIELD: Final[dict[str, Any]] = {
    "type": "struct",
    "fields": [
        {"type": "string", "optional": False, "field": "id"},
        {"type": "int64", "optional": False, "field": "total_order"},
        {"type": "int64", "optional": False, "field": "data_collection_order"},
    ],
    "optional": True,
    "name": "event.block",
    "version": 1,
    "field": "transaction",
}


@dataclass(frozen=True, slots=True)
class Block:
    """The text around a payload: its schema block, if there is one."""

    before: str
    behind: str

    def __call__(self, payload: str) -> bytes:
        """Return a payload as bytes, in its block."""
        return f"{self.before}{payload}{self.behind}".encode()


def block(schema: dict[str, Any], options: DebeziumOptions) -> Block:
    """Return the block of payloads of a schema."""
    return Block(f'{{"schema":{to_json(schema)},"payload":', "}") if options.schemas_enable else Block("", "")


def _struct(name: str, fields: Sequence[dict[str, Any]], *, version: int | None = None) -> dict[str, Any]:
    schema = {"type": "struct", "fields": list(fields), "optional": False, "name": name}
    return schema if version is None else {**schema, "version": version}


@dataclass(frozen=True, slots=True)
class SentColumn:
    """A column that is sent."""

    number: int
    """Its index among the table's own columns."""
    column: Column
    converter: Converter
    name: str
    """The name that it is sent under."""


@dataclass(frozen=True, slots=True)
class SentTable:
    """One version of a table, ready to be sent."""

    topic: str
    columns: tuple[SentColumn, ...]
    row: Template
    """Template of a row's JSON."""
    key: tuple[int, ...]
    """Indexes of the key's columns within `columns`; empty if the table has no key."""
    key_row: Template
    """Template of a key's JSON."""
    key_block: Block
    envelope_block: Block
    row_block: Block
    position: dict[str, int]
    """Index within `columns` by the column's name."""
    is_captured: bool
    """Whether the rows come from PostgreSQL, and not from an application."""


def sent_table(
    schema: TableSchema,
    stream: str,
    template: str,
    options: DebeziumOptions,
    renamed: Mapping[str, str] | None = None,
) -> SentTable:
    """Return how a table's records are sent.

    Args:
        schema: the table's schema when the records were made.
        stream: the stream's name.
        template: of the topic's name.
        options: how values are written.
        renamed: the new name of each column that is sent; None: all, under their names. Those of the key are always
            sent.
    """
    columns: list[SentColumn] = []
    wanted = None if renamed is None else {*schema.key, *renamed}
    for number, column in enumerate(schema.columns):
        if wanted is not None and column.name not in wanted:
            continue
        found = converter(column, options)
        if found is None and column.name in schema.key:
            found = TEXT  # without it, two rows would have the same key
        if found is not None:
            name = column.name if renamed is None else renamed.get(column.name, column.name)
            columns.append(SentColumn(number, column, found, name))
    position = {sent.column.name: index for index, sent in enumerate(columns)}
    key = tuple(position[name] for name in schema.key)
    topic = topic_name(template, stream, schema.namespace, schema.name)
    fields = [sent.converter.field(sent.name, optional=index not in key) for index, sent in enumerate(columns)]
    row = {"type": "struct", "fields": fields, "optional": True, "name": f"{topic}.Value"}
    envelope = [
        {**row, "field": "before"},
        {**row, "field": "after"},
        SOURCE_FIELD,
        _TRANSACTION_FIELD,
        {"type": "string", "optional": False, "field": "op"},
        *({"type": "int64", "optional": True, "field": name} for name in ("ts_ms", "ts_us", "ts_ns")),
    ]
    return SentTable(
        topic,
        tuple(columns),
        Template.of(sent.name for sent in columns),
        key,
        Template.of(columns[index].name for index in key),
        block(_struct(f"{topic}.Key", [fields[index] for index in key]), options),
        block(_struct(f"{topic}.Envelope", envelope, version=2), options),
        block({**row, "optional": False}, options),
        position,
        any(column.pg is not None for column in schema.columns) or schema.kind is TableKind.MESSAGES,
    )


def message_blocks(options: DebeziumOptions) -> tuple[Block, Block]:
    """Return the blocks of a logical message's key and value."""
    name = "io.debezium.connector.postgresql.Message"
    kind = "bytes" if options.binary_handling_mode == "bytes" else "string"
    content = [
        {"type": "string", "optional": True, "field": "prefix"},
        {"type": kind, "optional": True, "field": "content"},
    ]
    fields = [
        {"type": "string", "optional": False, "field": "op"},
        {"type": "int64", "optional": True, "field": "ts_ms"},
        SOURCE_FIELD,
        _TRANSACTION_FIELD,
        {**_struct(name, content, version=1), "field": "message"},
    ]
    return (
        block(_struct(f"{name}Key", content[:1], version=1), options),
        block(_struct(f"{name}Value", fields, version=1), options),
    )
