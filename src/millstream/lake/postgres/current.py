"""`current` in PostgreSQL: the source's rows under the source's names and types, updated for each batch by one MERGE.

The records of a batch are first folded to one a key, as for every `current`; columns that they
leave unchanged come from the table. Values go in and out as PostgreSQL's text, which its own types
hold exactly. A type with meaning only in its own database (an enum, a domain, a composite, an
extension's type, names of catalog objects) is text here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from millstream.errors import LakeError, LakeTableForeign
from millstream.lake.column_conversion import EXACT
from millstream.lake.folded.current_rules import Folded, fold_records
from millstream.lake.postgres import own_tables
from millstream.lake.postgres.target import PostgresTarget, copy_in
from millstream.lake.postgres.texts import Versioned, text_columns, text_records, without_zeros
from millstream.lake.row_identity import Keys, key_codes
from millstream.model.ids import TableId
from millstream.model.names import literal, quote_ident
from millstream.model.pgtypes import builtin_name, element_oid
from millstream.model.records import PARTITION_OID
from millstream.model.schema import Column, TableSchema

if TYPE_CHECKING:
    from millstream.lake.postgres.target import Connection

MERGE_VERSION_MIN: Final = 150000
_TELLS_VERSION_MIN: Final = 160000
"""From this version on a server can report whether a type accepts a text (pg_input_is_valid)."""
LAYOUT: Final = 1
"""Layout of tables of rows."""
_LINES: Final = 8192

# Built-in, and yet text: they name objects of their own database, can't be inserted, or need a
# library that servers may lack.
_TEXT: Final = frozenset(
    {
        *("regproc", "regprocedure", "regoper", "regoperator", "regclass", "regtype", "regconfig", "regdictionary"),
        *("regnamespace", "regrole", "regcollation", "aclitem", "gtsvector", "xml", "name", '"char"'),
        *("pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list"),
        *("pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"),
    }
)
_OF_ARROW: Final = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int16, "smallint"),
    (pa.types.is_int32, "integer"),
    (pa.types.is_int64, "bigint"),
    (pa.types.is_float32, "real"),
    (pa.types.is_float64, "double precision"),
    (pa.types.is_date32, "date"),
    (pa.types.is_binary, "bytea"),
)
"""Types of columns that applications wrote."""


def check_can_merge(connection: Connection, target: PostgresTarget) -> None:
    """Raise `LakeError` (`destination`) if `current` is requested on a server that is too old for it."""
    if "current" in target.views and connection.info.server_version < MERGE_VERSION_MIN:
        raise LakeError(
            f"{target.place} is PostgreSQL {connection.info.server_version // 10000}: `current` tables take 15 or newer",
            code="destination",
            hint=f'Set views = ["changes"] in [streams.{target.stream_name}.lake], or upgrade the server.',
        )


def merge_current(
    connection: Connection,
    target: PostgresTarget,
    schema: TableSchema,
    batches: Sequence[Versioned],
    *,
    copying: bool,
    live: Collection[TableId],
) -> None:
    """Update a table's rows to a batch. Within a transaction.

    Args:
        schema: the newest of the records.
        batches: the records, none of which was merged before; none if a definition alone came.
        copying: whether the table's copy isn't complete yet. A record may then leave a column unchanged in a row that
            hasn't come; the column is null until the row comes.
        live: tables that the source still has; another table that had this one's name is kept if it is among them.

    Raises:
        LakeTableForeign, LakeError (`lake_history_lost`): see `check_owner`.
        LakeError (`lake_schema_conflict`): existing values don't fit a column's new type.
    """
    place = own_tables.place_of(target, "current", schema)
    holder = own_tables.registered_at(connection, place)
    if (
        holder is not None
        and holder.table_id != schema.table_id
        and schema.table_id not in live
        and holder.table_id in live
    ):
        return  # a late record of a dropped table, whose name another table has
    mixed = [at for at, (version, _) in enumerate(batches) if version.key != schema.key]
    if mixed:
        # Records with another key are copied again behind it.
        batches = batches[mixed[-1] + 1 :]
    owner = _take_name(connection, target, place, holder, schema, live)
    relation = own_tables.relation_at(connection, place)
    own_tables.check_owner(target, place, schema.full_name, owner, relation)
    have: dict[str, str] = {} if relation is None else relation.columns
    wanted = column_types(connection, schema.columns)
    if schema.source == 0 and owner is not None:
        # Records of another writer had more columns: in these records they are null.
        more = [name for name in owner.columns if name in have and name not in wanted]
        schema = replace(schema, columns=(*schema.columns, *(Column(name, pa.string()) for name in more)))
        wanted |= {name: have[name] for name in more}
    wanted |= {PARTITION_OID.name: "bigint"} if schema.partitioned else {}
    columns = text_columns(schema)
    filled = {c.name: c.filled for c in schema.columns if c.filled is not None and c.name not in have}
    """Defaults of columns that the table doesn't have so far: its rows are from before them."""
    emptied = bool(mixed) or (owner is not None and owner.key != schema.key)
    if relation is not None and not emptied and schema.key and relation.key and relation.key != schema.key:
        raise LakeTableForeign(
            f"{place.quoted} of {target.place} has a primary key other than its source's ({', '.join(schema.key)})",
            hint="Drop that key there; Millstream creates its own.",
            table=place.quoted,
        )

    def lookup(keys: Keys) -> pa.Table:
        there = [name for name in (*columns.names, EXACT.name) if name in have]
        found = _rows_of(connection, place, keys, there, wanted) if relation is not None and not emptied else None
        return _completed(found, keys, columns, filled, missing_allowed=copying or emptied)

    folded = fold_records(text_records(schema, batches), schema, columns, lookup)
    if relation is None:
        own_tables.make_schema(connection, place)
        _create(connection, place, wanted, schema.key)
    else:
        if folded.truncated or emptied:
            # A copy follows a change of the key. Not TRUNCATE: concurrent readers keep seeing the rows.
            connection.execute(f"DELETE FROM {place.quoted}".encode())
        elif folded.left and PARTITION_OID.name in have:
            left = ", ".join(map(str, folded.left))
            connection.execute(f"DELETE FROM {place.quoted} WHERE {PARTITION_OID.name} IN ({left})".encode())
        assert owner is not None, "its owner was checked"
        _evolve(connection, place, owner, have, wanted, schema.key, filled)
    ours = tuple(wanted)
    if owner is None or (owner.columns, owner.key) != (ours, schema.key):
        own_tables.register(
            connection, target, place, int(schema.table_id), layout=LAYOUT, columns=ours, key=schema.key
        )
    _TargetTable(connection, place, wanted, schema.key, EXACT.name in have, copying).put(folded)


def column_types(connection: Connection, columns: Sequence[Column]) -> dict[str, str]:
    """Return the destination's type for each column."""
    asked = [column for column in columns if column.pg is not None and _same_everywhere(column.pg.oid)]
    found = connection.execute(
        "SELECT format_type(o, m) FROM unnest(%s::oid[], %s::int[]) WITH ORDINALITY AS a (o, m, at) ORDER BY at",
        [[c.pg.oid for c in asked if c.pg], [c.pg.modifier for c in asked if c.pg]],
    ).fetchall()
    told = {column.name: str(row[0]) for column, row in zip(asked, found, strict=True)}
    types = {}
    for column in columns:
        kind = told.get(column.name, "text" if column.pg is not None else _of_arrow(column.arrow))
        types[column.name] = "text" if "?" in kind else kind
    return types


def _same_everywhere(oid: int) -> bool:
    name = builtin_name(element_oid(oid) or oid)
    return name is not None and name not in _TEXT


def _of_arrow(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"{_of_arrow(kind.value_type)}[]"
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "timestamp without time zone" if kind.tz is None else "timestamp with time zone"
    return next((name for fits, name in _OF_ARROW if fits(kind)), "text")


# --- names -----------------------------------------------------------------------------------------------------------


def _take_name(
    connection: Connection,
    target: PostgresTarget,
    place: own_tables.ViewPlace,
    holder: own_tables.Registered | None,
    schema: TableSchema,
    live: Collection[TableId],
) -> own_tables.Registered | None:
    """Rename a table to its current name, if it was renamed; another `holder` of that name is moved aside."""
    if holder is not None and (holder.table_id == schema.table_id or (holder.stream, holder.pipeline) != target.owner):
        return holder
    ours = [r for r in own_tables.registered_of(connection, target, "current") if r.table_id == schema.table_id]
    if holder is not None:
        if TableId(holder.table_id) in live:
            # It was renamed too, and gets its own new name with its next record.
            aside = own_tables.ViewPlace(
                "current", place.namespace, own_tables.short(f"{place.name}__{holder.table_id}")
            )
            _rename(connection, place, aside)
        else:
            connection.execute(f"DROP TABLE IF EXISTS {place.quoted}".encode())
            connection.execute(
                "DELETE FROM millstream_lake.tables WHERE (view, namespace, name) = (%s, %s, %s)",
                [place.view, place.namespace, place.name],
            )
    if not ours:
        return None
    if own_tables.relation_at(connection, place) is None:
        had, relation = ours[0].place, own_tables.relation_at(connection, ours[0].place)
        own_tables.check_owner(target, had, schema.full_name, ours[0], relation)
        _rename(connection, ours[0].place, place)
    return own_tables.registered_at(connection, place)


def _rename(connection: Connection, old: own_tables.ViewPlace, new: own_tables.ViewPlace) -> None:
    own_tables.make_schema(connection, new)
    moved = own_tables.ViewPlace(old.view, new.namespace, old.name)
    if moved != old:
        connection.execute(f"ALTER TABLE {old.quoted} SET SCHEMA {quote_ident(new.namespace)}".encode())
    if moved != new:
        connection.execute(f"ALTER TABLE {moved.quoted} RENAME TO {quote_ident(new.name)}".encode())
    connection.execute(
        "UPDATE millstream_lake.tables SET namespace = %s, name = %s WHERE (view, namespace, name) = (%s, %s, %s)",
        [new.namespace, new.name, old.view, old.namespace, old.name],
    )


# --- definitions ---------------------------------------------------------------------------------------------------


def _create(connection: Connection, place: own_tables.ViewPlace, types: dict[str, str], key: Sequence[str]) -> None:
    columns = [f"{quote_ident(name)} {kind}" for name, kind in types.items()]
    primary = [f"PRIMARY KEY ({_names(key)})"] if key else []
    connection.execute(f"CREATE TABLE {place.quoted} ({', '.join(columns + primary)})".encode())
    if not key:
        # If the destination is published, its rows can still be deleted.
        connection.execute(f"ALTER TABLE {place.quoted} REPLICA IDENTITY FULL".encode())


def _evolve(
    connection: Connection,
    place: own_tables.ViewPlace,
    owner: own_tables.Registered,
    have: dict[str, str],
    wanted: dict[str, str],
    key: Sequence[str],
    filled: Mapping[str, str],
) -> None:
    """Give the table the columns, the types and the key that its source has; `filled` are values for the rows that it has."""
    changes = []
    relation = own_tables.relation_at(connection, place)
    assert relation is not None, "it is there"
    has_other = owner.key != key and relation.key == owner.key and bool(owner.key)
    if has_other:
        changes += [
            f"DROP CONSTRAINT {quote_ident(name)}"
            for name, names in relation.uniques.items()
            if relation.key and names == relation.key
        ]
        changes += [f"ALTER {quote_ident(name)} DROP NOT NULL" for name in relation.key]
    changes += [f"DROP {quote_ident(name)}" for name in owner.columns if name not in wanted and name in have]
    changes += [
        f"ADD {quote_ident(name)} {kind}" + (f" DEFAULT {literal(filled[name])}" if name in filled else "")
        for name, kind in wanted.items()
        if name not in have
    ]
    retyped = [name for name, kind in wanted.items() if name in have and have[name] != kind]
    changes += [
        f"ALTER {quote_ident(name)} TYPE {wanted[name]} USING {quote_ident(name)}::text::{wanted[name]}"
        for name in retyped
    ]
    if key and (has_other or not relation.key):
        changes.append(f"ADD PRIMARY KEY ({_names(key)})")
    if bool(key) != bool(owner.key):
        changes.append(f"REPLICA IDENTITY {'DEFAULT' if key else 'FULL'}")
    if not changes:
        return
    import psycopg

    try:
        connection.execute(f"ALTER TABLE {place.quoted} {', '.join(changes)}".encode())
        drops = [f"ALTER {quote_ident(name)} DROP DEFAULT" for name in filled]
        if drops:
            connection.execute(f"ALTER TABLE {place.quoted} {', '.join(drops)}".encode())
    except (psycopg.DataError, psycopg.errors.DependentObjectsStillExist, psycopg.errors.FeatureNotSupported) as error:
        raise LakeError(
            f"{place.quoted} can't follow its source: {' '.join(str(error).split())}",
            code="lake_schema_conflict",
            hint=f"Drop {place.quoted} and its row in millstream_lake.tables at the destination, then `millstream tables copy` of it."
            if isinstance(error, psycopg.DataError)
            else f"Drop what depends on {place.quoted} at the destination; it is tried again.",
            table=place.quoted,
            column=", ".join(retyped),
        ) from error


# --- rows ------------------------------------------------------------------------------------------------------------


def _names(names: Iterable[str], table: str = "") -> str:
    return ", ".join(f"{table}{quote_ident(name)}" for name in names)


def _same(names: Iterable[str], one: str, other: str) -> str:
    return " AND ".join(f"{one}.{quote_ident(name)} = {other}.{quote_ident(name)}" for name in names)


def _rows_of(
    connection: Connection, place: own_tables.ViewPlace, keys: Keys, there: Sequence[str], types: dict[str, str]
) -> pa.Table:
    """Return rows of the table by their keys, every value as its text."""
    import psycopg
    from psycopg import pq

    _make_temporary(connection, "asked", {name: types[name] for name in keys.names})
    copy_in(connection, f"COPY pg_temp.asked ({_names(keys.names)}) FROM STDIN", _lines(keys.to_table()))
    # Bypass psycopg's parsing of types: the server's text is wanted.
    result = connection.pgconn.exec_(
        f"SELECT {_names(there, 'c.')} FROM {place.quoted} c JOIN pg_temp.asked a ON {_same(keys.names, 'c', 'a')}".encode()
    )
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise psycopg.errors.error_from_result(result)
    columns: dict[str, list[str | None]] = {}
    for at, name in enumerate(there):
        found = [result.get_value(row, at) for row in range(result.ntuples)]
        columns[name] = [None if value is None else value.decode() for value in found]
    connection.execute(b"DROP TABLE pg_temp.asked")
    for row, exact in enumerate(columns.pop(EXACT.name, ())):
        for name, text in json.loads(exact or "{}").items():
            if name in columns:
                columns[name][row] = text
    return pa.table([pa.array(values, pa.string()) for values in columns.values()], names=list(columns))


def _completed(
    found: pa.Table | None, keys: Keys, columns: pa.Schema, filled: Mapping[str, str], *, missing_allowed: bool
) -> pa.Table:
    """Return the rows found, with all columns, and rows of only their keys for rows that may yet come.

    `filled` are values of columns that the rows lack.
    """
    length = 0 if found is None else found.num_rows
    parts = []
    if found is not None:
        arrays = [
            found.column(name) if name in found.column_names else pa.array([filled.get(name)] * length, pa.string())
            for name in columns.names
        ]
        parts.append(pa.table([*arrays, pa.nulls(length, EXACT.type)], schema=pa.schema([*columns, EXACT])))
    if missing_allowed:
        known = set() if found is None else set(_lines(found.select(list(keys.names))))
        lost = [key for key in _lines(keys.to_table()) if key not in known]
        values = dict(zip(keys.names, zip(*lost, strict=True), strict=True)) if lost else {}
        arrays = [pa.array(values.get(name, [None] * len(lost)), pa.string()) for name in columns.names]
        parts.append(pa.table([*arrays, pa.nulls(len(lost), EXACT.type)], schema=pa.schema([*columns, EXACT])))
    return pa.concat_tables(parts) if parts else pa.schema([*columns, EXACT]).empty_table()


@dataclass(slots=True)
class _TargetTable:
    """The table whose rows are changed."""

    connection: Connection
    place: own_tables.ViewPlace
    types: dict[str, str]
    """Types of the source's columns."""
    key: tuple[str, ...]
    has_exact: bool
    """Whether the table has `__exact`, which it gets once a row needs it."""
    copying: bool
    """Whether its copy is incomplete. The copy of a table without a key begins by emptying it, so that
    deletes may find no row."""

    @property
    def names(self) -> list[str]:
        """The columns that are written."""
        return [*self.types, EXACT.name] if self.has_exact else [*self.types]

    def put(self, folded: Folded) -> None:
        """Delete and insert the rows of a fold."""
        if self.key:
            self._merge(folded)
        else:
            self._swap(folded)

    def _merge(self, folded: Folded) -> None:
        if not len(folded.gone):
            return
        rows = folded.rows.select(list(self.types))
        put, met = key_codes([Keys.of(rows, self.key), folded.gone])
        gone = folded.gone.take(np.flatnonzero(~np.isin(met, put)))
        run = self.connection.execute
        if len(gone):
            # Deletes first: keys of other texts may be equal to an inserted key, as 1.0 and 1.00 are.
            _make_temporary(self.connection, "leaving", {name: self.types[name] for name in self.key})
            into = f"COPY pg_temp.leaving ({_names(gone.names)}) FROM STDIN"
            copy_in(self.connection, into, _lines(gone.to_table()))
            same = _same(self.key, "c", "g")
            run(f"DELETE FROM {self.place.quoted} c USING pg_temp.leaving g WHERE {same}".encode())
            run(b"DROP TABLE pg_temp.leaving")
        self._stage(rows)
        updates = ", ".join(f"{quote_ident(name)} = s.{quote_ident(name)}" for name in self.names)
        run(
            f"MERGE INTO {self.place.quoted} c USING pg_temp.staged s ON {_same(self.key, 'c', 's')} "
            f"WHEN MATCHED THEN UPDATE SET {updates} "
            f"WHEN NOT MATCHED THEN INSERT ({_names(self.names)}) VALUES ({_names(self.names, 's.')})".encode()
        )
        run(b"DROP TABLE pg_temp.staged")

    def _swap(self, folded: Folded) -> None:
        """For rows without a key, each deleted row removes one that is equal, to the last character.

        In a partitioned table it is one of the same partition. If there is none, and one of the two has no known
        partition, it is any.
        """
        run, quoted = self.connection.execute, self.place.quoted
        if len(folded.gone):
            gone = folded.gone.to_table().select(list(self.types))
            self._stage(gone)
            found = self._remove(self.names)
            oid = PARTITION_OID.name
            if oid in self.types and found != gone.num_rows:
                others = [name for name in self.names if name != oid]
                found += self._remove(others, own=f"t.{oid} IS NULL", staged=f"t.{oid} IS NOT NULL")
                found += self._remove(others, own="true", staged=f"t.{oid} IS NULL")
            run(b"DROP TABLE pg_temp.staged")
            if found != gone.num_rows and not self.copying:
                raise LakeError(f"{quoted} lacks {gone.num_rows - found} of the rows that its source deleted")
        self._stage(folded.rows.select(list(self.types)))
        run(f"INSERT INTO {quoted} ({_names(self.names)}) SELECT {_names(self.names)} FROM pg_temp.staged".encode())
        run(b"DROP TABLE pg_temp.staged")

    def _remove(self, names: Sequence[str], *, own: str = "true", staged: str = "true") -> int:
        """Remove staged rows, each with a row of the table that is equal in some columns; return how many there were.

        Args:
            names: the columns.
            staged: a condition on the staged rows (`t`).
        """
        quoted = self.place.quoted
        whole = f"ROW({_names(names, 't.')})::text"
        numbered = f"SELECT {whole} AS line, row_number() OVER (PARTITION BY {whole}) AS at, t.ctid"
        pairs = (
            f"SELECT c.ctid AS own, g.ctid AS staged FROM ({numbered} FROM {quoted} t "
            f"WHERE {own} AND {whole} IN (SELECT {whole} FROM pg_temp.staged t WHERE {staged})) c "
            f"JOIN ({numbered} FROM pg_temp.staged t WHERE {staged}) g USING (line, at)"
        )
        done = ", done AS (DELETE FROM pg_temp.staged WHERE ctid IN (SELECT staged FROM pairs))"
        done = done if PARTITION_OID.name in self.types else ""
        sql = f"WITH pairs AS ({pairs}){done} DELETE FROM {quoted} WHERE ctid IN (SELECT own FROM pairs)"
        return self.connection.execute(sql.encode()).rowcount

    def _stage(self, rows: pa.Table) -> None:
        """Put rows in a temporary table of the written columns, including `__exact` if the table has it."""
        import psycopg

        exact = {EXACT.name: "jsonb"}
        _make_temporary(self.connection, "staged", self.types | (exact if self.has_exact else {}))
        try:
            with self.connection.transaction():
                copy_in(self.connection, f"COPY pg_temp.staged ({_names(self.types)}) FROM STDIN", _lines(rows))
        except psycopg.DataError:
            whole = self._set_apart(rows)
            if whole is None:
                raise
            if not self.has_exact:
                self.connection.execute(
                    b"ALTER TABLE pg_temp.staged ADD " + quote_ident(EXACT.name).encode() + b" jsonb"
                )
                self.connection.execute(f"ALTER TABLE {self.place.quoted} ADD {quote_ident(EXACT.name)} jsonb".encode())
                self.has_exact = True
            copy_in(self.connection, f"COPY pg_temp.staged ({_names([*self.types, EXACT.name])}) FROM STDIN", whole)

    def _set_apart(self, rows: pa.Table) -> Iterator[tuple[Any, ...]] | None:
        """Return the rows with their `__exact`: source values that the destination doesn't accept.

        Returns:
            None if no value can be separated: the server can't identify it (it is older than 16), or it is in a key.
        """
        if self.connection.info.server_version < _TELLS_VERSION_MIN:
            return None
        number = _free("number", self.types)
        _make_temporary(self.connection, "texts", {number: "bigint"} | dict.fromkeys(self.types, "text"))
        into = f"COPY pg_temp.texts ({_names([number, *self.types])}) FROM STDIN"
        copy_in(self.connection, into, ((at, *line) for at, line in enumerate(_lines(rows))))
        refused: dict[int, list[int]] = {}
        for place, (name, kind) in enumerate(self.types.items()):
            found = self.connection.execute(
                f"SELECT {quote_ident(number)} FROM pg_temp.texts WHERE NOT pg_input_is_valid({quote_ident(name)}, {literal(kind)})".encode()
            ).fetchall()
            if found and name in self.key:
                return None
            for (at,) in found:
                refused.setdefault(at, []).append(place)
        self.connection.execute(b"DROP TABLE pg_temp.texts")
        return self._apart(rows, refused) if refused else None

    def _apart(self, rows: pa.Table, refused: Mapping[int, Sequence[int]]) -> Iterator[tuple[Any, ...]]:
        names = list(self.types)
        for at, line in enumerate(_lines(rows)):
            places = refused.get(at, ())
            exact = json.dumps({names[place]: line[place] for place in places}) if places else None
            yield (*(None if place in places else value for place, value in enumerate(line)), exact)


def _make_temporary(connection: Connection, name: str, types: dict[str, str]) -> None:
    columns = ", ".join(f"{quote_ident(column)} {kind}" for column, kind in types.items())
    connection.execute(f"CREATE TEMP TABLE {name} ({columns}) ON COMMIT DROP".encode())


def _free(name: str, types: Collection[str]) -> str:
    """Return a name of our own that no column has."""
    while name in types:
        name += "_"
    return name


def _lines(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Yield rows as tuples, some thousand of them in memory at once."""
    for batch in rows.to_batches(max_chunksize=_LINES):
        yield from zip(*(without_zeros(column).to_pylist() for column in batch.columns), strict=True)
