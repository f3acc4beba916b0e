"""Records of the log as the Kafka messages that Debezium's PostgreSQL connector 3.4 sends.

The encoder is pure: it takes batches of records and the time, and returns bytes. It works column by
column, and row by row only where it joins their JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import pyarrow as pa

from millstream.delivery.kafka.debezium_options import DebeziumOptions
from millstream.delivery.kafka.debezium_tables import SentTable, message_blocks, sent_table
from millstream.delivery.kafka.debezium_types import binary_json
from millstream.delivery.kafka.debezium_values import NULL, quoted
from millstream.delivery.kafka.topic_names import MESSAGES_TOPIC, TOPIC, topic_name
from millstream.model.ids import Epoch, ShardId
from millstream.model.names import parse_qualified_name
from millstream.model.operations import FIRST_SHARD
from millstream.model.record_json import record_facts, to_json
from millstream.model.records import Op
from millstream.model.schema import TableKind, TableSchema

VERSION: Final = "3.4.0.Final"
"""Debezium's version in `source`: the one that these messages were compared with."""
NEW_KEY: Final = "__debezium.newkey"
"""Header of the delete and the tombstone of a key change: the key that follows."""
OLD_KEY: Final = "__debezium.oldkey"
"""Header of the create of a key change: the key that was."""

_CREATE, _UPDATE, _DELETE = Op.CREATE.letter, Op.UPDATE.letter, Op.DELETE.letter
_TRUNCATE, _COPY, _LEFT = Op.TRUNCATE.letter, Op.COPY.letter, Op.PARTITION_LEFT.letter

Headers = tuple[tuple[str, bytes], ...]
_Texts = dict[str, str | None]
"""PostgreSQL's texts of values by their columns' names."""


class KafkaMessage(NamedTuple):
    """One message."""

    row: int
    """Index of the record in its batch; several messages may come of one record, or none."""
    topic: str
    key: bytes | None
    value: bytes | None
    """None: a tombstone."""
    headers: Headers = ()


@dataclass(slots=True)
class DebeziumEncoder:
    """Turns records of one stream into Kafka messages.

    Args:
        stream: the stream's name, which stands for Debezium's `topic.prefix`.
        database: the name of the source's database.
        options: how values are written.
        topic: template of a table's topic, with `{stream}`, `{schema}` and `{table}`.
        columns: the new name of each column that is sent; None: all, under their names. Those of the key are always sent.
    """

    stream: str
    database: str = ""
    options: DebeziumOptions = field(default_factory=DebeziumOptions)
    topic: str = TOPIC
    columns: Mapping[str, str] | None = None
    _tables: dict[TableSchema, SentTable] = field(default_factory=dict)
    _topics: Callable[[str | None], str] = field(init=False)

    def __post_init__(self) -> None:
        self._topics = lru_cache(10_000)(self._topic_of)

    def encode(
        self,
        schema: TableSchema,
        batch: pa.RecordBatch,
        *,
        now_ns: int,
        shard: ShardId = FIRST_SHARD,
        epoch: Epoch = Epoch(1),
    ) -> list[KafkaMessage]:
        """Return the messages of a batch, in its order.

        Args:
            schema: the table's schema when the records were made.
            batch: records in `record_schema(schema)`, with offsets for the format `json`.
            now_ns: the time in nanoseconds since 1970: when the record is sent.
            shard: the batch's shard.
            epoch: the one in the header of its segment.

        Raises:
            InvalidValue: a value that the log never takes.
        """
        if self.options.format == "json":
            return list(self._json(schema, batch, shard, epoch))
        if schema.kind is TableKind.RAW:
            return []  # changes of a quarantined table: nothing of Debezium's has their form
        if schema.kind is TableKind.MESSAGES:
            return list(self._messages(schema, batch, now_ns))
        return list(self._rows(schema, batch, now_ns))

    def _topic_of(self, table: str | None) -> str:
        """Return the topic of a table; None: of logical messages."""
        if table is None:
            return topic_name(MESSAGES_TOPIC, self.stream, "", "")
        return topic_name(self.topic, self.stream, *parse_qualified_name(table))

    def _table(self, schema: TableSchema) -> SentTable:
        if schema not in self._tables:
            self._tables[schema] = sent_table(schema, self.stream, self.topic, self.options, self.columns)
        return self._tables[schema]

    # --- json

    def _json(self, schema: TableSchema, batch: pa.RecordBatch, shard: ShardId, epoch: Epoch) -> Iterator[KafkaMessage]:
        for row, facts in enumerate(record_facts(schema, batch, stream=self.stream, shard=shard, epoch=epoch)):
            for message in self.json(facts, to_json(facts).encode(), schema.key):
                yield message._replace(row=row)

    def json(self, facts: Mapping[str, Any], value: bytes, key: Sequence[str]) -> Iterator[KafkaMessage]:
        """Yield a record as `wal cat` prints it, with tombstones for keys that are gone.

        Args:
            facts: the record.
            value: the value that is sent.
            key: names of the key's columns in `facts`.
        """
        op, row, before = facts["op"], facts["row"], facts["before"]
        if op in self.options.skipped():
            return
        topic, tombstones = self._topics(facts["table"]), self.options.tombstones_on_delete
        own = None if op == _LEFT else _json_key(key, row)
        if op == _UPDATE and before is not None and tombstones:
            old = _json_key(key, {**row, **before})
            if old != own:
                yield KafkaMessage(0, topic, old, None)
        yield KafkaMessage(0, topic, own, value)
        if op == _DELETE and tombstones:
            yield KafkaMessage(0, topic, own, None)

    # --- logical messages

    def _messages(self, schema: TableSchema, batch: pa.RecordBatch, now_ns: int) -> Iterator[KafkaMessage]:
        key_block, value_block = message_blocks(self.options)
        encode = binary_json(self.options)
        sources = self._sources(schema, batch, now_ns, is_captured=True)
        prefixes, contents = batch.column("prefix").to_pylist(), batch.column("content").to_pylist()
        topic = self._topics(None)
        for row, (source, prefix, content) in enumerate(zip(sources, prefixes, contents, strict=True)):
            named = f'"prefix":{quoted(prefix)}'
            value = (
                f'{{"op":"m","ts_ms":{now_ns // 1_000_000},"source":{source},"transaction":null,'
                f'"message":{{{named},"content":{encode(content)}}}}}'
            )
            yield KafkaMessage(row, topic, key_block(f"{{{named}}}"), value_block(value))

    # --- rows of tables

    def _rows(self, schema: TableSchema, batch: pa.RecordBatch, now_ns: int) -> Iterator[KafkaMessage]:
        table = self._table(schema)
        befores = _maps(batch.column("__before"))
        sources = self._sources(schema, batch, now_ns, is_captured=table.is_captured)
        writer = _RowWriter(table, self.options, self.options.skipped(), sources, _tail(now_ns))
        rows = _row_values(table, schema, batch, befores)
        for row, op in enumerate(batch.column("__op").to_pylist()):
            if op == _UPDATE and befores[row] is not None:
                yield from writer.update(row, rows[row], befores[row] or {})
            elif op == _DELETE:
                yield from writer.delete(row, _key(table, rows[row]), table.row % tuple(rows[row]))
            elif op == _TRUNCATE:
                yield from writer.truncate(row)
            elif op == _LEFT:
                continue  # Debezium sends nothing when a partition leaves, and no letter of its own stands for it
            elif op not in writer.skipped:
                after = table.row % tuple(rows[row])
                yield writer.message(row, op, _key(table, rows[row]), NULL, after)

    def _sources(self, schema: TableSchema, batch: pa.RecordBatch, now_ns: int, *, is_captured: bool) -> list[str]:
        """Return each record's `source` as JSON. A record without a commit time has the time of its sending."""
        is_table = schema.kind is TableKind.TABLE
        head = f'{{"version":"{VERSION}","connector":"postgresql","name":{quoted(self.stream)},"ts_ms":'
        database = quoted(self.database if is_captured else "")
        place = (
            f'"schema":{quoted(schema.namespace if is_table else "")},"table":{quoted(schema.name if is_table else "")}'
        )
        times = batch.column("__commit_ts").cast(pa.int64()).to_pylist()
        lsns, xids = batch.column("__commit_lsn").to_pylist(), batch.column("__xid").to_pylist()
        made: list[str] = []
        last: tuple[Any, ...] | None = None
        for op, time, lsn, xid in zip(batch.column("__op").to_pylist(), times, lsns, xids, strict=True):
            if (op == _COPY, time, lsn, xid) == last:  # most are of the operation before
                made.append(made[-1])
                continue
            last = op == _COPY, time, lsn, xid
            micros = now_ns // 1000 if time is None else time
            snapshot = "incremental" if op == _COPY else "false"
            sequence = NULL if lsn is None else f'"[null,\\"{lsn}\\"]"'
            made.append(
                f'{head}{micros // 1000},"snapshot":"{snapshot}","db":{database},"sequence":{sequence},'
                f'"ts_us":{micros},"ts_ns":{micros * 1000},{place},'
                f'"txId":{NULL if xid is None else xid},"lsn":{NULL if lsn is None else lsn},"xmin":null}}'
            )
        return made


@dataclass(frozen=True, slots=True)
class _RowWriter:
    """The messages of one batch's rows."""

    table: SentTable
    options: DebeziumOptions
    skipped: frozenset[str]
    sources: list[str]
    tail: str

    def message(
        self, row: int, op: str, key: bytes | None, before: str, after: str, headers: Headers = ()
    ) -> KafkaMessage:
        """Return the message of one event."""
        table = self.table
        if self.options.format == "debezium-flat":
            return KafkaMessage(row, table.topic, key, table.row_block(after), headers)
        value = (
            f'{{"before":{before},"after":{after},"source":{self.sources[row]},"transaction":null,"op":"{op}",'
            f"{self.tail}"
        )
        return KafkaMessage(row, table.topic, key, table.envelope_block(value), headers)

    def delete(self, row: int, key: bytes | None, before: str, headers: Headers = ()) -> Iterator[KafkaMessage]:
        """Yield a delete and its tombstone; the tombstone alone if values are flat."""
        if _DELETE in self.skipped:
            return
        is_flat = self.options.format == "debezium-flat"
        if not is_flat:
            yield self.message(row, _DELETE, key, before, NULL, headers)
        if is_flat or self.options.tombstones_on_delete:
            yield KafkaMessage(row, self.table.topic, key, None, headers)

    def truncate(self, row: int) -> Iterator[KafkaMessage]:
        """Yield a truncate, which flat values don't have."""
        if _TRUNCATE not in self.skipped and self.options.format != "debezium-flat":
            yield self.message(row, _TRUNCATE, None, NULL, NULL)

    def update(self, row: int, values: Sequence[str], old: _Texts) -> Iterator[KafkaMessage]:
        """Yield an update with old values; a change of the key is a delete and a create, and skipped as such."""
        table = self.table
        old_row = _old_row(table, values, old)
        key, old_key = _key(table, values), _key(table, old_row)
        before, after = table.row % tuple(_old_values(table, old)), table.row % tuple(values)
        if old_key == key:
            if _UPDATE not in self.skipped:
                yield self.message(row, _UPDATE, key, before, after)
            return
        yield from self.delete(row, old_key, before, _header(NEW_KEY, table, values))
        if _CREATE not in self.skipped:
            yield self.message(row, _CREATE, key, NULL, after, _header(OLD_KEY, table, old_row))


def _tail(now_ns: int) -> str:
    return f'"ts_ms":{now_ns // 1_000_000},"ts_us":{now_ns // 1000},"ts_ns":{now_ns}}}'


def _maps(array: pa.Array) -> list[_Texts | None]:
    return [None if pairs is None else dict(pairs) for pairs in array.to_pylist()]


def _row_values(
    table: SentTable, schema: TableSchema, batch: pa.RecordBatch, befores: Sequence[_Texts | None]
) -> list[Any]:
    """Return each row's values as JSON, in the order of the table's sent columns.

    A value that an update left unchanged is taken from the row before, if the replica identity sends it.
    """
    first = batch.num_columns - len(schema.columns)
    columns = [sent.converter.column(batch.column(first + sent.number), sent.column) for sent in table.columns]
    rows: list[Any] = list(zip(*columns, strict=True)) if columns else [()] * batch.num_rows
    for row, exact in enumerate(_maps(batch.column("__exact"))):
        if exact is not None:
            rows[row] = [
                rows[row][index] if text is None else sent.converter.text(text)
                for index, sent in enumerate(table.columns)
                for text in (exact.get(sent.column.name),)
            ]
    for row, names in enumerate(batch.column("__unchanged").to_pylist()):
        if names:
            rows[row] = list(rows[row])
            before = befores[row] or {}
            for name in names:
                index = table.position.get(name)
                if index is not None:
                    found, text = table.columns[index].converter, before.get(name)
                    rows[row][index] = found.unavailable if text is None else found.text(text)
    return rows


def _old_values(table: SentTable, old: _Texts) -> list[str]:
    """Return the values before an update as JSON; `null` where the source didn't send one."""
    texts = [(sent.converter, old.get(sent.column.name)) for sent in table.columns]
    return [NULL if text is None else found.text(text) for found, text in texts]


def _header(name: str, table: SentTable, values: Sequence[str]) -> Headers:
    """Return a header with a key, as Connect's default converter of headers writes a struct: without a schema.

    That converter reads it, too. It takes JSON with a schema for a map whose values have different types, and Debezium's
    sinks fail on such a map.
    """
    if not table.key:
        return ()
    row = table.key_row % tuple(table.columns[index].converter.in_header(values[index]) for index in table.key)
    return ((name, row.encode()),)


def _old_row(table: SentTable, values: Sequence[str], old: _Texts) -> list[str]:
    """Return a row's values with its key before an update; a column that the source didn't send is as it was."""
    before = list(values)
    for index in table.key:
        sent = table.columns[index]
        text = old.get(sent.column.name)
        if text is not None:
            before[index] = sent.converter.text(text)
    return before


def _key(table: SentTable, values: Sequence[str]) -> bytes | None:
    if not table.key:
        return None
    return table.key_block(table.key_row % table.key_of(values))


def _json_key(key: Sequence[str], row: Mapping[str, Any] | None) -> bytes | None:
    if row is None or not key:
        return None
    return to_json({name: row.get(name) for name in key}).encode()
