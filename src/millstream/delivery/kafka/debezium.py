"""Records of the log as the Kafka messages that Debezium's PostgreSQL connector 3.4 sends.

The encoder is pure: it takes batches of records and the time, and returns bytes. It works column by column, and row by row
only for records that are more than a new row: deletes, truncates, updates that have values before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import groupby, repeat
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.delivery.kafka.debezium_options import DebeziumOptions
from millstream.delivery.kafka.debezium_tables import SentTable, message_blocks, sent_table
from millstream.delivery.kafka.debezium_types import binary_json
from millstream.delivery.kafka.debezium_values import NULL, quoted
from millstream.delivery.kafka.json_columns import TEXTS, joined
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
_NEW: Final = frozenset({_CREATE, _UPDATE, _COPY})

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


_as_message: Final[Callable[[Iterable[Any]], KafkaMessage]] = partial(tuple.__new__, KafkaMessage)
"""Return a message of all its fields; `_make` takes twice the time."""


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
        return self._rows(schema, batch, now_ns)

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

    def _rows(self, schema: TableSchema, batch: pa.RecordBatch, now_ns: int) -> list[KafkaMessage]:
        table, skipped = self._table(schema), self.options.skipped()
        befores = _maps(batch.column("__before"))
        sources = self._sources(schema, batch, now_ns, is_captured=table.is_captured)
        columns = _sent_columns(table, schema, batch, befores)
        ops = batch.column("__op").to_pylist()
        new = self._new_rows(table, columns, sources, ops, now_ns)
        if batch.column("__before").null_count == len(ops) and _NEW.issuperset(ops) and skipped.isdisjoint(ops):
            return new
        writer = _RowWriter(table, self.options, skipped, sources, _tail(now_ns))
        rows = list(zip(*(column.to_pylist() for column in columns), strict=True)) or [()] * len(ops)
        found: list[KafkaMessage] = []
        for row, op in enumerate(ops):
            if op == _UPDATE and befores[row] is not None:
                found += writer.update(row, rows[row], befores[row] or {})
            elif op == _DELETE:
                found += writer.delete(row, new[row].key, table.row.text(rows[row]))
            elif op == _TRUNCATE:
                found += writer.truncate(row)
            elif op == _LEFT:
                continue  # Debezium sends nothing when a partition leaves, and no letter of its own stands for it
            elif op not in skipped:
                found.append(new[row])
        return found

    def _new_rows(
        self, table: SentTable, columns: Sequence[pa.Array], sources: Sequence[str], ops: Sequence[str], now_ns: int
    ) -> list[KafkaMessage]:
        """Return the message of each row as that of a new one: without a row before."""
        row = table.row.parts(columns)
        if self.options.format == "debezium-flat":
            block, value = table.row_block, row
        else:
            block = table.envelope_block
            letters: Any = ops[0] if len(set(ops)) == 1 else pa.array(ops, TEXTS)
            value = [
                *('{"before":null,"after":', *row, ',"source":', _texts_of(sources), ',"transaction":null,"op":"'),
                *(letters, '",', _tail(now_ns)),
            ]
        values = _bytes_of([block.before, *value, block.behind], len(ops))
        keys: Iterable[bytes | None] = repeat(None)
        if table.key:
            key = table.key_row.parts([columns[index] for index in table.key])
            keys = _bytes_of([table.key_block.before, *key, table.key_block.behind], len(ops))
        fields = zip(range(len(ops)), repeat(table.topic), keys, values, repeat(()), strict=False)
        return list(map(_as_message, fields))

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
        is_copy = map(_COPY.__eq__, batch.column("__op").to_pylist())
        for (is_copied, time, lsn, xid), same in groupby(zip(is_copy, times, lsns, xids, strict=True)):
            micros = now_ns // 1000 if time is None else time
            snapshot = "incremental" if is_copied else "false"
            sequence = NULL if lsn is None else f'"[null,\\"{lsn}\\"]"'
            source = (
                f'{head}{micros // 1000},"snapshot":"{snapshot}","db":{database},"sequence":{sequence},'
                f'"ts_us":{micros},"ts_ns":{micros * 1000},{place},'
                f'"txId":{NULL if xid is None else xid},"lsn":{NULL if lsn is None else lsn},"xmin":null}}'
            )
            made += repeat(source, len(list(same)))
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
        before, after = table.row.text(_old_values(table, old)), table.row.text(values)
        if old_key == key:
            if _UPDATE not in self.skipped:
                yield self.message(row, _UPDATE, key, before, after)
            return
        yield from self.delete(row, old_key, before, _header(NEW_KEY, table, values))
        if _CREATE not in self.skipped:
            yield self.message(row, _CREATE, key, NULL, after, _header(OLD_KEY, table, old_row))


def _tail(now_ns: int) -> str:
    return f'"ts_ms":{now_ns // 1_000_000},"ts_us":{now_ns // 1000},"ts_ns":{now_ns}}}'


def _maps(array: pa.Array) -> Sequence[_Texts | None]:
    if array.null_count == len(array):
        return (None,) * len(array)
    return [None if pairs is None else dict(pairs) for pairs in array.to_pylist()]


def _sent_columns(
    table: SentTable, schema: TableSchema, batch: pa.RecordBatch, befores: Sequence[_Texts | None]
) -> list[pa.Array]:
    """Return the values of the table's sent columns as JSON.

    A value that an update left unchanged is taken from the row before, if the replica identity sends it.
    """
    first = batch.num_columns - len(schema.columns)
    columns = [sent.converter.column(batch.column(first + sent.number), sent.column) for sent in table.columns]
    others: dict[int, dict[int, str]] = {}
    """By column and row, the values that the columns don't have."""
    for row, exact in _given(batch.column("__exact")):
        for name, text in exact:
            index = table.position.get(name)
            if index is not None and text is not None:
                others.setdefault(index, {})[row] = table.columns[index].converter.text(text)
    for row, names in _given(batch.column("__unchanged")):
        for name in names:
            index = table.position.get(name)
            if index is not None:
                found, text = table.columns[index].converter, (befores[row] or {}).get(name)
                others.setdefault(index, {})[row] = found.unavailable if text is None else found.text(text)
    for index, values in others.items():
        rows = np.zeros(batch.num_rows, dtype=bool)
        rows[list(values)] = True
        in_order = [values[row] for row in sorted(values)]
        columns[index] = pc.replace_with_mask(columns[index], pa.array(rows), pa.array(in_order, TEXTS))
    return columns


def _given(array: pa.Array) -> Iterable[tuple[int, Any]]:
    """Return the rows and values of a column that aren't null: mostly none."""
    rows = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False)).tolist()
    return zip(rows, array.drop_null().to_pylist(), strict=True) if rows else ()


def _texts_of(texts: Sequence[str]) -> pa.Array:
    """Return texts, most of which repeat the one before, as an array."""
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    if len(places) == len(texts):
        return pa.array(texts, TEXTS)
    return pa.array(places, TEXTS).take(pa.array(map(places.__getitem__, texts), pa.int32()))


def _bytes_of(parts: Sequence[str | pa.Array], count: int) -> list[bytes]:
    """Return so many texts as UTF-8, each of an array's value or the same text for each part."""
    if not all(isinstance(part, str) for part in parts):
        found: list[bytes] = joined(*parts).cast(pa.large_binary()).to_pylist()
        return found
    return ["".join(map(str, parts)).encode()] * count


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
    row = table.key_row.text(table.columns[index].converter.in_header(values[index]) for index in table.key)
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
    return table.key_block(table.key_row.text(values[index] for index in table.key))


def _json_key(key: Sequence[str], row: Mapping[str, Any] | None) -> bytes | None:
    if row is None or not key:
        return None
    return to_json({name: row.get(name) for name in key}).encode()
