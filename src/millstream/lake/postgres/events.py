"""Event tables: one row a record, read in order of `seq`.

One transaction at a time writes to a stream's tables, so that numbers become visible in order: a
reader that asks for `seq > the last one it saw` misses nothing. `row` and `before` are JSON by
column: numbers if JSON holds them exactly, else PostgreSQL's text. `jsonb_populate_record` makes a
typed row of them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import copysign
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import LakeTableForeign
from millstream.lake.postgres import own_tables
from millstream.lake.postgres.target import PostgresTarget, copy_in, translated
from millstream.lake.postgres.texts import ZERO_STAND_IN, Versioned, column_texts, without_zeros
from millstream.model.names import literal, quote_ident
from millstream.model.positions import Lsn, format_lsn
from millstream.model.records import PARTITION_OID, Op
from millstream.model.row_values import row_values
from millstream.model.schema import TableSchema

if TYPE_CHECKING:
    from millstream.lake.postgres.target import Connection

LAYOUT: Final = 2
"""Layout of event tables. In layout 1, `seq` held the commit's LSN and `(seq, record_pk)` was unique, so that several
changes of one row in one transaction were one event. It had neither `commit_lsn` nor `commit_index`."""

_OWN: Final = {
    "op": "text NOT NULL",
    "record_pk": "text",
    "source": "integer",
    "commit_lsn": "pg_lsn",
    "commit_index": "bigint",
    "commit_ts": "timestamptz",
    "xid": "bigint",
    "row": "jsonb",
    "before": "jsonb",
    "unchanged": "text[]",
    "log_seq": "bigint",
}
_NAMES: Final = ", ".join(quote_ident(name) for name in _OWN)
_PARTITION: Final = "partition_oid"
"""A column that the events of partitioned tables have."""
_WITHOUT_KEY: Final = frozenset({Op.TRUNCATE.letter, Op.PARTITION_LEFT.letter})
_ZERO: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
"""A zero character as JSON has it: behind an odd number of backslashes."""
_TYPES: Final = {name: kind.removesuffix(" NOT NULL") for name, kind in _OWN.items()}


@dataclass(frozen=True, slots=True)
class EventTable:
    """An event table that is ready to be appended to."""

    place: own_tables.ViewPlace
    old_upto: int | None
    """The greatest commit LSN among events of an older layout; None if there are none."""
    has_partitions: bool = False
    """Whether the events have the column `partition_oid`."""

    @property
    def names(self) -> str:
        """The columns that are appended, as SQL has them."""
        return f"{_NAMES}, {_PARTITION}" if self.has_partitions else _NAMES


def ensure_events(connection: Connection, target: PostgresTarget, schema: TableSchema) -> EventTable:
    """Return the table's events as `_ensured`, with `partition_oid` if the table is partitioned."""
    table = _ensured(connection, target, schema)
    if not schema.partitioned:
        return table
    relation = own_tables.relation_at(connection, table.place)
    if relation is None or _PARTITION not in relation.columns:
        connection.execute(f"ALTER TABLE {table.place.quoted} ADD {_PARTITION} bigint".encode())
    return replace(table, has_partitions=True)


def _ensured(connection: Connection, target: PostgresTarget, schema: TableSchema) -> EventTable:
    """Return the table's events, created or migrated to this layout if necessary. Within a transaction.

    Raises:
        LakeTableForeign: something else has the name.
        LakeError (`lake_history_lost`): the table was ours, and was dropped.
    """
    place = own_tables.place_of(target, "changes", schema)
    owner, relation = own_tables.registered_at(connection, place), own_tables.relation_at(connection, place)
    if owner is None and relation is not None and _is_first_layout(relation):
        return _bring_up(connection, target, place, int(schema.table_id), relation)
    own_tables.check_owner(target, place, schema.full_name, owner, relation)
    if owner is None:
        _create(connection, place)
        own_tables.register(connection, target, place, int(schema.table_id), layout=LAYOUT)
        return EventTable(place, None)
    if owner.table_id != schema.table_id:
        # Events are stored by name: another table has it now, and its events follow the previous table's.
        own_tables.register(
            connection, target, place, int(schema.table_id), layout=owner.layout, old_upto=owner.old_upto
        )
    _check_shape(place, owner, relation)
    return EventTable(place, owner.old_upto)


def bring_up_all(connection: Connection, target: PostgresTarget, schemas: Iterable[TableSchema]) -> None:
    """Migrate event tables of an older layout to this one, each in a transaction of its own."""
    import psycopg

    with translated(target.place):
        known = {registered.place for registered in own_tables.registered_of(connection, target, "changes")}
    for schema in schemas:
        place = own_tables.place_of(target, "changes", schema)
        if place in known:
            continue
        # A table that can't be migrated now is retried with its first batch, and quarantined alone.
        with contextlib.suppress(psycopg.Error), connection.transaction():
            relation = own_tables.relation_at(connection, place)
            if (
                relation is not None
                and own_tables.registered_at(connection, place) is None
                and _is_first_layout(relation)
            ):
                _bring_up(connection, target, place, int(schema.table_id), relation)


def _is_first_layout(relation: own_tables.LandedRelation) -> bool:
    has = relation.columns
    keyed = ("seq", "record_pk") in relation.uniques.values()
    return relation.kind == "r" and keyed and has["seq"] == "bigint" and not {"commit_lsn", "commit_index"} & has.keys()


def _bring_up(
    connection: Connection,
    target: PostgresTarget,
    place: own_tables.ViewPlace,
    table_id: int,
    relation: own_tables.LandedRelation,
) -> EventTable:
    """Migrate a table of layout 1. Its events stay as they are, and new ones are numbered above them.

    Nothing is rewritten. The unique index stays if it isn't the primary key. `seq` is unique from
    here on, and readers page by it.
    """
    quoted = place.quoted
    connection.execute(f"LOCK TABLE {quoted} IN ACCESS EXCLUSIVE MODE".encode())
    changes = [f"ADD {quote_ident(name)} {_TYPES[name]}" for name in _OWN if name not in relation.columns]
    if relation.key == ("seq", "record_pk"):
        constraint = next(name for name, columns in relation.uniques.items() if columns == relation.key)
        changes.append(f"DROP CONSTRAINT {quote_ident(constraint)}")
    # Columns of the old layout that current events lack: they are no longer filled.
    changes += [f"ALTER {quote_ident(name)} DROP NOT NULL" for name in relation.columns if name not in {"seq", "op"}]
    connection.execute(f"ALTER TABLE {quoted} {', '.join(changes)}".encode())
    if relation.key == ("seq", "record_pk"):
        connection.execute(f"CREATE INDEX ON {quoted} (seq)".encode())
    found = connection.execute(f"SELECT max(seq) FROM {quoted}".encode()).fetchone()
    last = None if found is None else found[0]
    named = connection.execute("SELECT pg_get_serial_sequence(%s, 'seq')", [quoted]).fetchone()
    if named is not None and named[0] is not None:
        sequence = str(named[0])
    else:
        sequence = own_tables.ViewPlace("changes", place.namespace, own_tables.short(f"{place.name}_events_seq")).quoted
        connection.execute(f"CREATE SEQUENCE {sequence} AS bigint OWNED BY {quoted}.seq".encode())
        connection.execute(
            f"ALTER TABLE {quoted} ALTER seq SET DEFAULT nextval({literal(sequence)}), ALTER seq SET NOT NULL".encode()
        )
    if last is not None:
        connection.execute("SELECT setval(%s, %s)", [sequence, max(int(last), 1)])
    _index(connection, quoted)
    own_tables.register(connection, target, place, table_id, layout=LAYOUT, old_upto=last)
    return EventTable(place, last)


def _create(connection: Connection, place: own_tables.ViewPlace) -> None:
    own_tables.make_schema(connection, place)
    own = ", ".join(f"{quote_ident(name)} {kind}" for name, kind in _OWN.items())
    connection.execute(f"CREATE TABLE {place.quoted} (seq bigserial PRIMARY KEY, {own})".encode())
    _index(connection, place.quoted)


def _index(connection: Connection, quoted: str) -> None:
    connection.execute(
        f"CREATE UNIQUE INDEX ON {quoted} (source, commit_lsn, commit_index) WHERE commit_index IS NOT NULL".encode()
    )


def _check_shape(
    place: own_tables.ViewPlace, owner: own_tables.Registered, relation: own_tables.LandedRelation | None
) -> None:
    """Reject a table whose columns were changed."""
    assert relation is not None, "its owner was checked"
    has = relation.columns | {
        name: "jsonb" for name in ("row", "before") if relation.columns.get(name) in {"json", "jsonb"}
    }
    wanted = {name: "timestamp with time zone" if kind == "timestamptz" else kind for name, kind in _TYPES.items()}
    wrong = [name for name, kind in ({"seq": "bigint"} | wanted).items() if has.get(name) != kind]
    if wrong:
        raise LakeTableForeign(
            f"{place.quoted} has another shape than event tables of layout {owner.layout}: {', '.join(wrong)}",
            hint="Restore the columns' types as documented for event tables.",
            table=place.quoted,
        )


def append_events(connection: Connection, table: EventTable, batches: Sequence[Versioned]) -> None:
    """Append records, in order of their numbers; skip existing ones, by `(source, commit_lsn, commit_index)`."""
    quoted, names = table.place.quoted, table.names
    rows = (row for some in in_order(batches) for row in _rows(*some, partitions=table.has_partitions))
    if not _may_be_there(connection, table, batches):
        copy_in(connection, f"COPY {quoted} ({names}) FROM STDIN", rows)
        return
    connection.execute(f"CREATE TEMP TABLE arriving (LIKE {quoted}) ON COMMIT DROP".encode())
    connection.execute(b"ALTER TABLE pg_temp.arriving ALTER seq DROP NOT NULL")
    copy_in(connection, f"COPY pg_temp.arriving ({names}) FROM STDIN", rows)
    known = "e.source = a.source AND e.commit_lsn = a.commit_lsn AND e.commit_index = a.commit_index AND a.commit_index IS NOT NULL"
    connection.execute(f"DELETE FROM pg_temp.arriving a USING {quoted} e WHERE {known}".encode())
    if table.old_upto is not None:
        # Events of the older layout are identified only by their commit and row.
        same = "e.seq = (a.commit_lsn - '0/0')::bigint AND e.record_pk IS NOT DISTINCT FROM a.record_pk AND e.log_seq IS NULL"
        connection.execute(
            f"DELETE FROM pg_temp.arriving a USING {quoted} e WHERE a.commit_index IS NOT NULL AND {same}".encode()
        )
    connection.execute(
        # Numbers are given in the order of the subquery: the sort is beneath the node that calls nextval.
        f"INSERT INTO {quoted} ({names}) SELECT * FROM (SELECT {names} FROM pg_temp.arriving ORDER BY log_seq) s".encode()
    )
    connection.execute(b"DROP TABLE pg_temp.arriving")


def _may_be_there(connection: Connection, table: EventTable, batches: Sequence[Versioned]) -> bool:
    """Whether some records may exist already: the table has events of their sources at or above the first of them."""
    first: dict[int, int] = {}
    for _, batch in batches:
        indexed = batch.filter(pc.is_valid(batch.column("__commit_index")))
        for source in pc.unique(indexed.column("__source")).to_pylist():
            of_source = indexed.filter(pc.equal(indexed.column("__source"), source))
            least = pc.min(of_source.column("__commit_lsn")).as_py()
            first[source] = min(least, first.get(source, least))
    for source, least in first.items():
        if table.old_upto is not None and least <= table.old_upto:
            return True
        found = connection.execute(
            f"SELECT EXISTS (SELECT FROM {table.place.quoted.replace('%', '%%')} "
            "WHERE source = %s AND commit_lsn >= %s::pg_lsn AND commit_index IS NOT NULL)".encode(),
            [source, format_lsn(Lsn(least))],
        ).fetchone()
        if found is not None and found[0]:
            return True
    return False


def in_order(batches: Sequence[Versioned], rows_max: int = 8192) -> Iterator[Versioned]:
    """Yield the records by their numbers, in slices of a few thousand, to bound the memory of results.

    Records of a captured table come in order; an application's may lie in several shards.
    """
    if not batches:
        return
    seqs = np.concatenate([batch.column("__seq").to_numpy() for _, batch in batches])
    which = np.concatenate([np.full(batch.num_rows, place) for place, (_, batch) in enumerate(batches)])
    row = np.concatenate([np.arange(batch.num_rows) for _, batch in batches])
    order = np.argsort(seqs, kind="stable")
    which, row = which[order], row[order]
    starts = np.flatnonzero(np.append(True, (np.diff(which) != 0) | (np.diff(row) != 1)))
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
        schema, batch = batches[int(which[start])]
        for at in range(start, end, rows_max):
            yield schema, batch.slice(int(row[at]), min(rows_max, end - at))


def _rows(schema: TableSchema, batch: pa.RecordBatch, *, partitions: bool) -> Iterator[tuple[Any, ...]]:
    """Yield records as rows of an event table, in the order of `_OWN`, with `partition_oid` behind if asked."""
    told = row_values(schema, batch)
    keys = _keys(schema, batch)
    ops, seqs = batch.column("__op").to_pylist(), batch.column("__seq").to_pylist()
    sources, lsns = batch.column("__source").to_pylist(), batch.column("__commit_lsn").to_pylist()
    indexes, times = batch.column("__commit_index").to_pylist(), batch.column("__commit_ts").to_pylist()
    xids, unchanged = batch.column("__xid").to_pylist(), batch.column("__unchanged").to_pylist()
    leaves = batch.column(PARTITION_OID.name).to_pylist() if schema.partitioned else [None] * batch.num_rows
    for i in range(batch.num_rows):
        yield (
            ops[i],
            None if ops[i] in _WITHOUT_KEY else keys[i],
            sources[i],
            None if lsns[i] is None else format_lsn(Lsn(lsns[i])),
            indexes[i],
            times[i],
            xids[i],
            _json(told.rows[i]),
            _json(told.befores[i]),
            unchanged[i] or None,
            seqs[i],
            *([leaves[i]] if partitions else []),
        )


def _keys(schema: TableSchema, batch: pa.RecordBatch) -> list[str | None]:
    """Return the text of each row's key; for several columns a JSON array of texts. None for rows without a key."""
    if not schema.key:
        return [None] * batch.num_rows
    columns = [without_zeros(column_texts(schema, batch, name)).to_pylist() for name in schema.key]
    if len(columns) == 1:
        only: list[str | None] = columns[0]
        return only
    return [json.dumps(key, ensure_ascii=False, separators=(",", ":")) for key in zip(*columns, strict=True)]


def _json(values: dict[str, Any] | None) -> str | None:
    if values is None:
        return None
    told = {name: "-0" if _is_negative_zero(value) else value for name, value in values.items()}
    text = json.dumps(told, ensure_ascii=False, separators=(",", ":"))
    return _ZERO.sub(rf"\1{ZERO_STAND_IN}", text) if "\\u0000" in text else text


def _is_negative_zero(value: Any) -> bool:
    """Whether a value is -0.0, which jsonb's numbers don't have: it is text."""
    return isinstance(value, float) and value == 0 and copysign(1, value) < 0
