"""Millstream's own tables in a destination, and the names of landed tables.

The schema `millstream_lake` holds the owner of each table (`tables`), each one's position
(`positions`) and the last cut (`cuts`). A table that isn't in `tables` belongs to someone else,
whatever its name, and is never written to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import LakeError, LakeTableForeign
from millstream.lake.postgres.target import PostgresTarget, TargetView, translated
from millstream.model.names import literal, qualified_name, quote_ident
from millstream.model.schema import TableKind, TableSchema

if TYPE_CHECKING:
    from millstream.lake.postgres.target import Connection

VERSION: Final = 1
"""Version of the tables here; event tables have layouts of their own (`events`)."""
_LOCK: Final = 0x6D73_6C61_6B65
"""Key of the advisory lock for making or migrating these tables."""
_NAME_BYTES_MAX: Final = 63

_FIRST: Final = """
CREATE SCHEMA IF NOT EXISTS millstream_lake;
CREATE TABLE millstream_lake.layout (version integer NOT NULL);
CREATE TABLE millstream_lake.tables (
  view text NOT NULL, namespace text NOT NULL, name text NOT NULL,
  stream uuid NOT NULL, pipeline text NOT NULL, table_id bigint NOT NULL,
  layout integer NOT NULL, columns text[] NOT NULL, key text[] NOT NULL, old_upto bigint,
  PRIMARY KEY (view, namespace, name));
CREATE TABLE millstream_lake.positions (
  stream uuid NOT NULL, pipeline text NOT NULL, table_id bigint NOT NULL, n bigint NOT NULL,
  PRIMARY KEY (stream, pipeline, table_id));
CREATE TABLE millstream_lake.cuts (
  stream uuid NOT NULL, pipeline text NOT NULL, number bigint NOT NULL, n bigint NOT NULL,
  committed_at timestamptz NOT NULL, commit_ts_max timestamptz, tables json NOT NULL, held json NOT NULL,
  PRIMARY KEY (stream, pipeline));
INSERT INTO millstream_lake.layout VALUES (1);
"""


def prepare(connection: Connection, place: str) -> None:
    """Make `millstream_lake`, or migrate it to this version. Safe to run concurrently.

    Raises:
        LakeError (`destination`): a newer Millstream made it, or this user may not.
    """
    with translated(place), connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        made = connection.execute("SELECT to_regclass('millstream_lake.layout') IS NOT NULL").fetchone()
        if made is None or not made[0]:
            connection.execute(_FIRST.encode())
            return
        found = connection.execute("SELECT version FROM millstream_lake.layout").fetchone()
    if found is None or found[0] != VERSION:
        raise LakeError(
            f"{place}: millstream_lake has layout {None if found is None else found[0]}, and this version reads {VERSION}",
            code="destination",
            hint="Run the newer Millstream that made it.",
        )


def is_missing(connection: Connection) -> bool:
    """Return whether a destination has none of these tables."""
    row = connection.execute("SELECT to_regclass('millstream_lake.tables') IS NULL").fetchone()
    return row is None or bool(row[0])


def short(name: str) -> str:
    """Return a name that PostgreSQL doesn't truncate: a name that is too long ends in a hash of the whole."""
    encoded = name.encode()
    if len(encoded) <= _NAME_BYTES_MAX:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:8]
    return f"{encoded[: _NAME_BYTES_MAX - 9].decode(errors='ignore')}~{digest}"


@dataclass(frozen=True, slots=True)
class ViewPlace:
    """The place of one view of one table."""

    view: TargetView
    namespace: str
    name: str

    @property
    def quoted(self) -> str:
        """`schema.name`, as SQL takes it."""
        return qualified_name(self.namespace, self.name)


def place_of(target: PostgresTarget, view: TargetView, schema: TableSchema) -> ViewPlace:
    """Return a view's place behind the prefix.

    The rows of `public.orders` are in `public.orders`, its events in `public_changes.orders`.
    """
    namespace = "millstream" if schema.kind is TableKind.MESSAGES else schema.namespace
    name = "messages" if schema.kind is TableKind.MESSAGES else schema.name
    return ViewPlace(view, short(target.schema_prefix + namespace + ("_changes" if view == "changes" else "")), name)


@dataclass(frozen=True, slots=True)
class Registered:
    """A row of `tables`."""

    place: ViewPlace
    stream: str
    pipeline: str
    table_id: int
    layout: int
    columns: tuple[str, ...]
    """Columns that Millstream made; a column that a user added is left alone."""
    key: tuple[str, ...]
    """The source's key of `current`, which identifies its rows."""
    old_upto: int | None
    """The greatest commit LSN among events taken over from an older layout."""


_COLUMNS: Final = "view, namespace, name, stream::text, pipeline, table_id, layout, columns, key, old_upto"


def registered_at(connection: Connection, place: ViewPlace) -> Registered | None:
    """Return the owner of a name; None if it is no table of ours."""
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM millstream_lake.tables WHERE (view, namespace, name) = (%s, %s, %s)",
        [place.view, place.namespace, place.name],
    ).fetchone()
    return None if row is None else _registered(row)


def registered_of(connection: Connection, target: PostgresTarget, view: TargetView) -> list[Registered]:
    """Return all of a view's tables of this stream and pipeline."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM millstream_lake.tables WHERE (view, stream, pipeline) = (%s, %s, %s) ORDER BY table_id",
        [view, *target.owner],
    ).fetchall()
    return [_registered(row) for row in rows]


def _registered(row: Sequence[Any]) -> Registered:
    view, namespace, name, stream, pipeline, table_id, layout, columns, key, old_upto = row
    place = ViewPlace(view, namespace, name)
    return Registered(place, stream, pipeline, table_id, layout, tuple(columns), tuple(key), old_upto)


def register(
    connection: Connection,
    target: PostgresTarget,
    place: ViewPlace,
    table_id: int,
    *,
    layout: int,
    columns: Sequence[str] = (),
    key: Sequence[str] = (),
    old_upto: int | None = None,
) -> None:
    """Record a table as ours, or a change of its facts."""
    stream, pipeline = target.owner
    connection.execute(
        "INSERT INTO millstream_lake.tables VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (view, namespace, name) "
        "DO UPDATE SET stream = excluded.stream, pipeline = excluded.pipeline, table_id = excluded.table_id, layout = excluded.layout, "
        "columns = excluded.columns, key = excluded.key, old_upto = excluded.old_upto",
        [
            place.view,
            place.namespace,
            place.name,
            stream,
            pipeline,
            table_id,
            layout,
            list(columns),
            list(key),
            old_upto,
        ],
    )


@dataclass(frozen=True, slots=True)
class LandedRelation:
    """A relation of the destination."""

    kind: str
    """`r` for an ordinary table."""
    columns: dict[str, str]
    """By name, the type as `format_type` prints it."""
    key: tuple[str, ...]
    """Columns of its primary key."""
    uniques: dict[str, tuple[str, ...]]
    """By name of a unique index, its columns; including the primary key's index."""


def relation_at(connection: Connection, place: ViewPlace) -> LandedRelation | None:
    """Return the relation with a name; None if there is none."""
    found = connection.execute(
        "SELECT c.oid, c.relkind FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relname = %s",
        [place.namespace, place.name],
    ).fetchone()
    if found is None:
        return None
    oid, kind = found
    columns = connection.execute(
        "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        [oid],
    ).fetchall()
    indexes = connection.execute(
        "SELECT i.relname, x.indisprimary, array_agg(a.attname ORDER BY k.at) FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid "
        "CROSS JOIN LATERAL unnest(x.indkey) WITH ORDINALITY AS k (attnum, at) "
        "JOIN pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.attnum "
        "WHERE x.indrelid = %s AND x.indisunique AND x.indpred IS NULL GROUP BY i.relname, x.indisprimary",
        [oid],
    ).fetchall()
    uniques = {name: tuple(names) for name, _, names in indexes}
    key = next((tuple(names) for _, primary, names in indexes if primary), ())
    return LandedRelation(kind if isinstance(kind, str) else kind.decode(), dict(columns), key, uniques)


def check_owner(
    target: PostgresTarget, place: ViewPlace, table: str, owner: Registered | None, relation: LandedRelation | None
) -> None:
    """Reject a relation that isn't this stream's, and a missing one that was.

    Args:
        table: the full name of the table that lands there.

    Raises:
        LakeTableForeign: something else has the name.
        LakeError (`lake_history_lost`): the table was ours, and was dropped.
    """
    where = f"{place.quoted} of {target.place}"
    if owner is None and relation is not None:
        raise LakeTableForeign(
            f"{where} exists already and doesn't belong to this table",
            hint=f"Rename or drop it there, then run `millstream tables retry {quote(table)}`; before the first run, "
            f"`schema_prefix` in [streams.{target.stream_name}.lake] gives all tables separate schemas.",
            table=place.quoted,
        )
    if owner is not None and (owner.stream, owner.pipeline) != target.owner:
        raise LakeTableForeign(
            f"{where} belongs to another stream",
            hint=f"Set `schema_prefix` in [streams.{target.stream_name}.lake], or drop the table and its row in millstream_lake.tables.",
            table=place.quoted,
        )
    if owner is not None and relation is None:
        raise LakeError(
            f"{where} was created by Millstream and no longer exists",
            code="lake_history_lost",
            hint=f"Run DELETE FROM millstream_lake.tables WHERE (view, namespace, name) = ({', '.join(map(literal, (place.view, place.namespace, place.name)))}), "
            f"then `millstream tables copy {quote(table)}`, to write the table again.",
            table=place.quoted,
        )


def make_schema(connection: Connection, place: ViewPlace) -> None:
    """Create the schema of a table if it is missing."""
    found = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [place.namespace]).fetchone()
    if found is None:
        connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quote_ident(place.namespace)}".encode())
