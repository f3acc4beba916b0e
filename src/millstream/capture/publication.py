"""The two publications: made where they are missing and may be made, and kept in step with the tables.

`<publication>` holds tables whose updates and deletes carry an identity. The others stand in `<publication>_inserts`,
which publishes inserts and truncates only: in a publication of updates such a table makes the *application's* UPDATE and
DELETE fail. A publication that a DBA has made (one that our role doesn't own) is used as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from millstream.capture.connection import translated
from millstream.capture.source import Connection, SourceTable
from millstream.errors import PublicationMissing, SourceError, SourcePrivilegeMissing


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the publications give capture now."""

    publications: tuple[str, ...]
    """Those that exist, for START_REPLICATION."""
    oids: frozenset[int]
    """Tables that one of them sends."""
    refused: dict[int, str]
    """By oid, tables that none sends and that we may not add, with the reason."""


def inserts_name(publication: str) -> str:
    """The name of the publication of tables without a usable identity."""
    return f"{publication}_inserts"


def sync_publications(connection: Connection, publication: str, tables: Sequence[SourceTable]) -> Coverage:
    """Make or mend both publications so that they send `tables`; say what they send.

    Args:
        connection: an ordinary one.
        publication: the first one's name.
        tables: all that the patterns take in.

    Raises:
        PublicationMissing: the first one isn't there and may not be made; the hint has the SQL.
    """
    usable = [t for t in tables if t.usable]
    others = [t for t in tables if not t.usable]
    refused: dict[int, str] = {}
    refused |= _sync_one(connection, publication, usable, others, inserts_only=False)
    if others or _find(connection, inserts_name(publication)) is not None:
        refused |= _sync_one(connection, inserts_name(publication), others, usable, inserts_only=True)
    names = tuple(n for n in (publication, inserts_name(publication)) if _find(connection, n) is not None)
    covered = frozenset(_members(connection, names))
    return Coverage(names, covered, {oid: why for oid, why in refused.items() if oid not in covered})


def covered_tables(connection: Connection, publication: str) -> frozenset[int]:
    """OIDs of the tables that the publications send now."""
    return frozenset(_members(connection, (publication, inserts_name(publication))))


def restrictions(
    connection: Connection, publications: Sequence[str], table: SourceTable
) -> tuple[list[str] | None, str]:
    """The columns (None: all) and the condition (empty: none) that a publication's lists and filters let through (15+)."""
    if connection.info.server_version < 150000:
        return None, ""
    with translated():
        row = connection.execute(
            "SELECT attnames::text[], rowfilter FROM pg_publication_tables WHERE pubname = ANY(%s) AND schemaname = %s"
            " AND tablename = %s ORDER BY pubname LIMIT 1",
            [list(publications), table.namespace, table.name],
        ).fetchone()
    return (None, "") if row is None else (row[0], row[1] or "")


def missing_publications(connection: Connection, publication: str, tables: Sequence[SourceTable]) -> list[str]:
    """The SQL that a DBA would have to run so that both publications send `tables`; empty where nothing is missing."""
    statements: list[str] = []
    for name, wanted, inserts_only in (
        (publication, [t for t in tables if t.usable], False),
        (inserts_name(publication), [t for t in tables if not t.usable], True),
    ):
        found = _find(connection, name)
        if found is None and (wanted or not inserts_only):
            statements.append(_create(name, wanted, inserts_only=inserts_only).as_string(connection) + ";")
        elif found is not None and not found.all_tables:
            members = _members(connection, [name])
            absent = [t for t in wanted if t.oid not in members]
            if absent:
                statements.append(_change(name, "ADD", absent).as_string(connection) + ";")
    return statements


@dataclass(frozen=True, slots=True)
class _Publication:
    owned: bool
    all_tables: bool
    updates: bool


def _find(connection: Connection, name: str) -> _Publication | None:
    with translated():
        row = connection.execute(
            "SELECT pg_has_role(pubowner, 'USAGE'), puballtables, pubupdate OR pubdelete FROM pg_publication"
            " WHERE pubname = %s",
            [name],
        ).fetchone()
    return None if row is None else _Publication(*row)


def _members(connection: Connection, names: Iterable[str]) -> set[int]:
    """OIDs of the tables that the publications name or send: roots of partitioned tables included."""
    with translated():
        rows = connection.execute(
            "SELECT c.oid FROM pg_publication_tables t JOIN pg_class c ON c.relname = t.tablename"
            " JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = t.schemaname WHERE t.pubname = ANY(%s)"
            " UNION SELECT r.prrelid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid"
            " WHERE p.pubname = ANY(%s)",
            [list(names), list(names)],
        ).fetchall()
    return {int(row[0]) for row in rows}


def _direct_members(connection: Connection, name: str) -> set[int]:
    with translated():
        rows = connection.execute(
            "SELECT r.prrelid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE p.pubname = %s",
            [name],
        ).fetchall()
    return {int(row[0]) for row in rows}


def _sync_one(
    connection: Connection,
    name: str,
    wanted: Sequence[SourceTable],
    elsewhere: Sequence[SourceTable],
    *,
    inserts_only: bool,
) -> dict[int, str]:
    found = _find(connection, name)
    if found is None:
        try:
            _execute(connection, _create(name, wanted, inserts_only=inserts_only))
        except SourcePrivilegeMissing as error:
            script = _create(name, wanted, inserts_only=inserts_only).as_string(connection)
            if inserts_only:
                return {
                    t.oid: f"the publication {name} isn't there and may not be made: {error.message}" for t in wanted
                }
            raise PublicationMissing(
                f"the publication {name} isn't there and may not be made: {error.message}",
                hint=f"Run as the tables' owner: {script}; (`millstream doctor --sql` prints the whole script)",
                sql=script,
            ) from error
        return {}
    if found.all_tables:
        return {}
    members = _direct_members(connection, name)
    refused: dict[int, str] = {}
    # First out, then in: a table whose identity went must leave before the application's next UPDATE.
    leaving = [t for t in elsewhere if t.oid in members]
    if leaving and found.owned:
        _execute(connection, _change(name, "DROP", leaving))
    sent = _members(connection, [name])
    for table in [t for t in wanted if t.oid not in sent]:
        try:
            _execute(connection, _change(name, "ADD", [table]))
        except SourceError as error:
            script = _change(name, "ADD", [table]).as_string(connection)
            refused[table.oid] = f"it can't be added to the publication {name} ({error.message}); run: {script};"
    return refused


def _create(name: str, tables: Sequence[SourceTable], *, inserts_only: bool) -> sql.Composed:
    publish = "insert, truncate" if inserts_only else "insert, update, delete, truncate"
    targets = sql.SQL(" FOR TABLE {}").format(_list(tables)) if tables else sql.SQL("")
    return sql.SQL("CREATE PUBLICATION {}{} WITH (publish = {}, publish_via_partition_root = true)").format(
        sql.Identifier(name), targets, sql.Literal(publish)
    )


def _change(name: str, verb: str, tables: Sequence[SourceTable]) -> sql.Composed:
    return sql.SQL("ALTER PUBLICATION {} {} TABLE {}").format(sql.Identifier(name), sql.SQL(verb), _list(tables))


def _list(tables: Sequence[SourceTable]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(t.namespace, t.name) for t in tables)


def _execute(connection: psycopg.Connection[tuple[Any, ...]], statement: sql.Composed) -> None:
    """Run DDL with a short wait for its lock (SHARE UPDATE EXCLUSIVE): the application's own DDL goes first."""
    with translated(), connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '2s'")
        connection.execute(statement)
