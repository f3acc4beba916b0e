"""The rows of a backfill: written once to a file of their own, numbered, and read from there in batches.

The file is an SQLite database. While it is written, it has the newest row of each key: those of the lake at a position,
if the log lacks the tables' beginning, and the log's records behind it up to the consumer's cursor. Then the rows that
match are numbered. So memory is bounded, and a row has one number as long as the file is there.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.delivery.definition import KEY, NO_GROUPS, Definition
from millstream.delivery.records.groups import groups_of
from millstream.delivery.records.record_messages import chosen
from millstream.errors import LakeBehind, LakeError, LogError
from millstream.lake.column_conversion import EXACT, from_text, same_type, texts_of, to_text
from millstream.lake.filled_columns import filled_records
from millstream.lake.layout import has_current
from millstream.model.column_renames import Names, names_in
from millstream.model.ids import Epoch, ShardId, TableId
from millstream.model.names import parse_qualified_name, quote
from millstream.model.positions import Seq
from millstream.model.predicate import Predicate
from millstream.model.record_filter import passing
from millstream.model.record_json import record_facts
from millstream.model.records import PARTITION_OID, Op, record_schema
from millstream.model.schema import TableKind, TableSchema
from millstream.protocol.delivery.messages import Kind
from millstream.wal.files import error_of_os
from millstream.wal.reader import StreamReader, TableRecords
from millstream.wal.records_json import Line, by_offset, merge_shards, table_lines

if TYPE_CHECKING:
    from millstream.lake.query.query_session import LakeSession

OpenLake = Callable[[Seq], "LakeSession"]
"""Opens the lake as of a number, or as of its last cut if that is earlier. Raises `LakeError` if there is none."""
_UNKNOWN: Final = dict.fromkeys(
    ("shard", "epoch", "offset", "seq", "source", "commit_lsn", "commit_index", "commit_ts", "xid", "before")
)
_SCHEMA: Final = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE newest (
    id INTEGER PRIMARY KEY, row_key TEXT UNIQUE, source INTEGER, leaf INTEGER, own TEXT, matches INTEGER, facts TEXT,
    row_text TEXT
);
CREATE TABLE keys (source INTEGER PRIMARY KEY, names TEXT);
CREATE INDEX equal_rows ON newest (source, row_text) WHERE row_key IS NULL;
"""
_NUMBERED: Final = """
CREATE TABLE numbered (number INTEGER PRIMARY KEY, source INTEGER, own TEXT, facts TEXT);
INSERT INTO numbered SELECT row_number() OVER (ORDER BY id) - 1, source, own, facts FROM newest WHERE matches;
DROP TABLE newest;
"""


class Stopped(Exception):
    """The caller no longer wants the rows."""


class Row(NamedTuple):
    """A row of a backfill."""

    number: int
    table: int
    group: str | None
    """None if each row is a group of its own."""
    record: str
    """The record as JSON."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows that a backfill delivers."""

    stream: str
    definition: Definition
    where: str | None
    """Selects rows in addition to the consumer's own `where`."""
    tables: Mapping[TableId, TableSchema]
    upto: Seq
    """The consumer's cursor: rows are as of it."""

    @property
    def predicates(self) -> list[Predicate]:
        """The conditions that a row must meet."""
        own = self.definition.predicate
        more = None if self.where is None else Predicate.parse(self.where)
        return [each for each in (own, more) if each is not None]


@dataclass(slots=True)
class _Record(Line):
    """A record of the log, with what the file needs of it."""

    keys: tuple[str, ...]
    own: str | None
    matches: bool


def tables_of(reader: StreamReader, definition: Definition) -> dict[TableId, TableSchema]:
    """Return the newest schema of each table that a consumer receives rows of; an idle table's is that of a definition."""
    found: dict[TableId, TableSchema] = {}
    with suppress(LogError):  # nothing has been written so far
        versions = [schema.defined() for schema in reader.schema_versions(definitions=True).values()]
        for schema in sorted(versions, key=lambda one: one.version):
            if schema.kind is TableKind.TABLE:
                found[schema.table_id] = schema
    return {
        table: schema
        for table, schema in found.items()
        if definition.takes(schema) and not (definition.kind is Kind.LATEST and not schema.key)
    }


def base_of(wanted: Wanted, reader: StreamReader, open_lake: OpenLake) -> LakeSession | None:
    """Return the lake from which the rows are made, which the caller closes; None if the log has them all.

    Raises:
        PositionError (`beyond_retention`): the lake no longer has them as of the consumer's cursor.
        LakeBehind: neither the lake nor the log has the tables from their beginning so far.
    """
    first = reader.first_seq()
    if first <= 1 or not wanted.tables:
        return None
    try:
        lake = open_lake(wanted.upto)
    except LakeBehind as error:
        raise behind(error.message) from error
    except LakeError as error:
        raise behind(f"the lake can't be read: {error.message}") from error
    reached = lake.token.linear()
    lacking = [schema.full_name for table, schema in wanted.tables.items() if lake.name_of(table) is None]
    if reached < first - 1 or lacking:
        lake.close()
        what = f"it lacks {lacking[0]}" if lacking else f"it has records up to {reached}"
        raise behind(f"the log begins at {first}, and of the lake {what}")
    try:
        for table in wanted.tables:
            lake.check_rows(table)
    except BaseException:
        lake.close()
        raise
    return lake


def behind(
    why: str,
    hint: str = "Wait until the pipeline has landed the tables, and repeat the call; `millstream status` shows its lag.",
) -> LakeBehind:
    """Return the error for a backfill that can't begin."""
    return LakeBehind(f"neither the log nor the lake has the tables from their beginning: {why}", hint=hint)


def write_rows(
    path: Path, wanted: Wanted, reader: StreamReader, open_lake: OpenLake, should_stop: Callable[[], bool]
) -> int:
    """Write the rows into a file; return their number. A file that is there is replaced.

    Raises:
        Stopped: `should_stop` returned true.
        PositionError, LakeBehind: as `base_of`.
        MillstreamError: the log, the lake or the disk can't be read or written.
    """
    part = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(part, isolation_level=None)) as file:
            file.executescript(_SCHEMA)
            file.execute("BEGIN")
            newest, after = _Newest(file, wanted), Seq(0)
            lake = base_of(wanted, reader, open_lake)
            if lake is not None:
                with lake:
                    after = lake.token.linear()
                    for table in wanted.tables:
                        schema = lake.schema_of(table)
                        for rows in _lake_rows(lake, table, schema, wanted):
                            newest.add_lake(schema, rows)
                            _check(should_stop)
            if wanted.tables and wanted.upto > after:
                for count, record in enumerate(_log_records(wanted, reader, after)):
                    newest.apply(record)
                    if count % 1024 == 0:
                        _check(should_stop)
            file.executemany("INSERT INTO keys VALUES (?, ?)", newest.keys())
            file.execute("COMMIT")
            file.executescript(_NUMBERED)
            (total,) = file.execute("SELECT count(*) FROM numbered").fetchone()
        part.replace(path)
    except sqlite3.Error as error:
        raise error_of_os(OSError(f"{path}: {error}")) from error
    except OSError as error:
        raise error_of_os(error) from error
    finally:
        part.unlink(missing_ok=True)
    return int(total)


def _check(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise Stopped


class Rows:
    """The rows of a file that `write_rows` wrote. One thread at a time may use it."""

    def __init__(self, path: Path, definition: Definition) -> None:
        """Open the file.

        Raises:
            FileNotFoundError: it isn't there.
            MillstreamError: it can't be opened: no descriptor is free, or the disk fails.
        """
        if not path.exists():
            raise FileNotFoundError(path)
        try:
            self._file = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
        except sqlite3.Error as error:
            raise error_of_os(OSError(f"{path}: {error}")) from error
        self._op = (Op.UPDATE if definition.kind is Kind.LATEST else Op.COPY).letter
        self._definition = definition
        self._names: dict[int, Mapping[str, str] | None] = {}
        """The consumer's names of the columns of each table."""

    def read(self, number: int, count: int) -> list[Row]:
        """Return the rows from a number on. Raises `MillstreamError` if the disk fails."""
        try:
            found = self._file.execute(
                "SELECT number, source, own, facts FROM numbered WHERE number >= ? ORDER BY number LIMIT ?",
                (number, count),
            ).fetchall()
            return [Row(number, table, own, self._record(table, facts)) for number, table, own, facts in found]
        except sqlite3.Error as error:
            raise error_of_os(OSError(str(error))) from error

    def _record(self, table: int, text: str) -> str:
        if table not in self._names:
            ((key,),) = self._file.execute("SELECT names FROM keys WHERE source = ?", (table,))
            self._names[table] = self._definition.names_of(json.loads(key))
        names = self._names[table]
        facts = {**json.loads(text), **_UNKNOWN, "op": self._op, "unchanged": []}
        return msgspec.json.encode(facts if names is None else chosen(facts, names)).decode()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Newest:
    """The newest row of each key, in the file that is being written."""

    def __init__(self, file: sqlite3.Connection, wanted: Wanted) -> None:
        self._file = file
        self._conditions = {name for predicate in wanted.predicates for name in predicate.columns}
        self._of_lake: dict[TableId, TableSchema] = {}
        """Schemas under which rows of the lake were added."""
        self._schemas: dict[TableId, TableSchema] = {}
        """Schemas of the tables' last records."""
        file.create_function("renamed", 2, self._renamed, deterministic=True)
        self._names: Names = {}

    def add_lake(self, schema: TableSchema, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows of the lake, which come before all records."""
        self._of_lake[schema.table_id] = schema
        self.add(rows)

    def keys(self) -> list[tuple[int, str]]:
        """Return the names of each table's key columns, as its rows have them."""
        return [(int(table), json.dumps(schema.key)) for table, schema in (self._of_lake | self._schemas).items()]

    def add(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows as `_row` returns them."""
        self._file.executemany(
            "INSERT OR REPLACE INTO newest (row_key, source, leaf, own, matches, facts, row_text)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            rows,
        )

    def apply(self, record: _Record) -> None:
        """Apply a record of the log."""
        schema, op = record.schema, record.facts["op"]
        table = schema.table_id
        before = self._schemas.get(table)
        self._schemas[table] = schema
        if op == Op.TRUNCATE.letter or not (before is None or before.has_key_of(schema)):
            # After a change of its key, a table is copied again.
            self._file.execute("DELETE FROM newest WHERE source = ?", (int(table),))
        elif names := names_in(before or self._of_lake.get(table, schema), schema):
            self._rename(table, names)
        if op == Op.DELETE.letter:
            self._remove(record, record.facts["row"])
        elif op == Op.PARTITION_LEFT.letter:
            gone = int(table), record.facts["partition_oid"]
            self._file.execute("DELETE FROM newest WHERE source = ? AND leaf = ?", gone)
        elif op in {Op.CREATE.letter, Op.UPDATE.letter, Op.COPY.letter}:
            facts, matches = record.facts, record.matches
            if facts["unchanged"]:
                facts, matches = self._completed(record)
            if schema.key:
                for key in record.keys[1:]:
                    self._file.execute("DELETE FROM newest WHERE row_key = ?", (key,))
            elif op == Op.UPDATE.letter and facts["before"]:
                self._remove(record, facts["before"])
            self.add([_row(schema, facts, record.keys, record.own, matches=matches)])

    def _rename(self, table: TableId, names: Names) -> None:
        """Give the columns of a table's rows their names of now."""
        self._names = names
        self._file.execute(
            "UPDATE newest SET facts = renamed(facts, 0), row_text = CASE WHEN row_text IS NOT NULL THEN renamed(facts, 1) END"
            " WHERE source = ?",
            (int(table),),
        )

    def _renamed(self, text: str, is_row_alone: int) -> str:
        wanted = {old: name for name, old in self._names.items() if old is not None}
        facts = json.loads(text)
        for field in ("row", "exact"):
            kept = {n: v for n, v in facts[field].items() if n in wanted or n not in self._names}
            facts[field] = {wanted.get(name, name): value for name, value in kept.items()}
        return _text(facts["row"]) if is_row_alone else msgspec.json.encode(facts).decode()

    def _completed(self, record: _Record) -> tuple[dict[str, Any], bool]:
        """Return a record with the values that it left unchanged, and whether it matches."""
        facts = record.facts
        known = self._file.execute(
            "SELECT facts, matches FROM newest WHERE row_key = ?", (record.keys[-1] if record.schema.key else None,)
        ).fetchone()
        if known is None:
            return facts, record.matches
        earlier = json.loads(known[0])
        row, exact = dict(facts["row"]), dict(facts["exact"])
        for name in facts["unchanged"]:
            if name in earlier["row"]:
                row[name] = earlier["row"][name]
            if name in earlier["exact"]:
                exact[name] = earlier["exact"][name]
        is_decided = self._conditions and self._conditions <= set(facts["unchanged"])
        return {**facts, "row": row, "exact": exact}, bool(known[1]) if is_decided else record.matches

    def _remove(self, record: _Record, row: Mapping[str, Any] | None) -> None:
        if record.schema.key:
            for key in record.keys:
                self._file.execute("DELETE FROM newest WHERE row_key = ?", (key,))
        else:
            # An equal row may be in another partition that is detached, and whose `x` comes later.
            leaf = record.facts.get("partition_oid")
            self._file.execute(
                "DELETE FROM newest WHERE id = (SELECT id FROM newest WHERE row_key IS NULL AND source = ? AND row_text = ?"
                " AND (leaf IS ? OR leaf IS NULL OR ? IS NULL) ORDER BY leaf IS NOT ?, leaf IS NOT NULL, id LIMIT 1)",
                (int(record.schema.table_id), _text(row), leaf, leaf, leaf),
            )


def _row(
    schema: TableSchema, facts: Mapping[str, Any], keys: Sequence[str], own: str | None, *, matches: bool
) -> tuple[Any, ...]:
    """Return a row's values for the file."""
    key = keys[0] if schema.key else None
    row_text = None if schema.key else _text(facts["row"])
    text, leaf = msgspec.json.encode(facts).decode(), facts.get("partition_oid")
    return key, int(schema.table_id), leaf, own, matches, text, row_text


def _text(row: Mapping[str, Any] | None) -> str:
    return json.dumps(row, sort_keys=True)


def _owns(schema: TableSchema, batch: pa.RecordBatch, wanted: Wanted) -> list[str | None]:
    """Return the group of each row, by the consumer's `group_by`."""
    group_by = wanted.definition.group_by
    if group_by == NO_GROUPS:
        return [None] * batch.num_rows
    groups = groups_of(schema, batch, group_by, [""] * batch.num_rows)
    return [own[0] if own else None for own in groups]


def _matches(schema: TableSchema, batch: pa.RecordBatch, wanted: Wanted) -> list[bool]:
    """Return which rows meet the conditions."""
    found = np.ones(batch.num_rows, dtype=bool)
    for predicate in wanted.predicates:
        found &= passing(predicate, schema, batch)
    return [bool(each) for each in found]


# --- the log ---------------------------------------------------------------------------------------------------------


def _log_records(wanted: Wanted, reader: StreamReader, after: Seq) -> Iterator[_Record]:
    """Yield the tables' records in `(after, wanted.upto]`, in order."""

    def of_part(part: TableRecords) -> Iterator[_Record]:
        if part.schema.kind is not TableKind.TABLE:
            return
        schema, batch = filled_records(part.schema, part.batch, wanted.tables[part.schema.table_id])
        part = replace(part, schema=schema, batch=batch)
        keys = groups_of(part.schema, part.batch, KEY, [""] * part.batch.num_rows)
        more = (keys, _owns(part.schema, part.batch, wanted), _matches(part.schema, part.batch, wanted))
        for line, own_keys, own, matches in zip(table_lines(part, stream=wanted.stream), *more, strict=True):
            yield _Record(
                line.shard,
                line.offset,
                line.operation_seq,
                line.index,
                line.operation,
                line.facts,
                line.schema,
                own_keys,
                own,
                matches,
            )

    def of_shard(shard: ShardId) -> Iterator[_Record]:
        start = reader.offset_beyond(shard, after)
        parts = reader.read(shard, start, tables=frozenset(wanted.tables), numbers=(after, wanted.upto))
        return cast("Iterator[_Record]", by_offset(parts, of_part))

    shards = [of_shard(shard) for shard in reader.shards]
    return shards[0] if len(shards) == 1 else merge_shards(shards)


# --- the lake --------------------------------------------------------------------------------------------------------


def _lake_rows(
    lake: LakeSession, table: TableId, schema: TableSchema, wanted: Wanted
) -> Iterator[Iterator[tuple[Any, ...]]]:
    """Yield a table's rows of the lake, batch by batch, as values for the file."""
    name = lake.name_of(table)
    assert name is not None
    source = name
    if not has_current(schema):
        source = _records_there(lake, f"history.{quote('.'.join(parse_qualified_name(name)))}")
    for rows in lake.stream(f"SELECT * FROM {source}"):
        own, batch = filled_records(schema, copied_records(schema, rows), wanted.tables[table])
        facts = record_facts(own, batch, stream=wanted.stream, shard=ShardId(0), epoch=Epoch(0))
        keys = groups_of(own, batch, KEY, [""] * batch.num_rows)
        each = zip(facts, keys, _owns(own, batch, wanted), _matches(own, batch, wanted), strict=True)
        yield (_row(own, one, own_keys, group, matches=matches) for one, own_keys, group, matches in each)


def _records_there(lake: LakeSession, history: str) -> str:
    """Return the text behind FROM for records of which each is a row: those behind a truncate, and of partitions that are left."""
    truncated = f"SELECT coalesce(max(__seq), 0) FROM {history} WHERE __op = '{Op.TRUNCATE.letter}'"
    text = f"{history} h WHERE __op IN ('{Op.CREATE.letter}', '{Op.COPY.letter}') AND __seq > ({truncated})"
    if all(name != PARTITION_OID.name for name, _ in lake.columns(history)):
        return text
    left = f"x.__op = '{Op.PARTITION_LEFT.letter}' AND x.{PARTITION_OID.name} = h.{PARTITION_OID.name}"
    return f"{text} AND NOT EXISTS (FROM {history} x WHERE {left} AND x.__seq > h.__seq)"


def copied_records(schema: TableSchema, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of the lake as records of a copy, with the table's columns in the log's types.

    Args:
        schema: the table's schema.
        rows: its rows in the lake's types, with `__exact` if one of them needs it, and `__partition_oid` if it is there.
    """
    count, names = rows.num_rows, rows.schema.names
    exact = rows.column(EXACT.name) if EXACT.name in names else pa.nulls(count, EXACT.type)
    columns: dict[str, pa.Array] = {"__exact": exact.cast(EXACT.type)}
    for column in schema.columns:
        if column.name not in names:
            columns[column.name] = pa.nulls(count, column.arrow)
            continue
        values = rows.column(column.name)
        if same_type(column.arrow, values.type):
            columns[column.name] = values.cast(column.arrow)
        else:
            texts = pc.coalesce(texts_of(exact, column.name), to_text(values))
            columns[column.name] = from_text(column.arrow, texts)[0].cast(column.arrow)
    columns["__op"] = pa.array([Op.COPY.letter] * count)
    if PARTITION_OID.name in names:
        columns[PARTITION_OID.name] = rows.column(PARTITION_OID.name).cast(PARTITION_OID.type)
    shape = record_schema(schema, offsets=True)
    zero = {"__offset", "__seq"}
    arrays = []
    for field in shape:
        found = columns.get(field.name)
        if found is None:
            found = pa.array(np.zeros(count, np.int64)) if field.name in zero else pa.nulls(count, field.type)
        arrays.append(found.cast(field.type) if not found.type.equals(field.type) else found)
    fields = [pa.field(field.name, field.type) for field in shape]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
