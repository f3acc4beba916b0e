"""The stream's two publications: create them if needed and permitted, and keep them in step with the tables.

`<publication>` holds tables whose updates and deletes carry an identity. `<publication>_inserts` holds
the others and publishes inserts and truncates only: a publication of updates would make the
*application's* UPDATE and DELETE of such a table fail. A publication made by a DBA (our role doesn't
own it) is used as it is.

From PostgreSQL 18 on both send stored generated columns. That setting is altered only if a publication
looks like one made by this module; a DBA's publication keeps its setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from psycopg import sql

from millstream.capture.connection import Connection, all_rows, first_row, one_row, translated
from millstream.capture.leaves.sent_by_leaves import MARK, leaves_published, others, reads_leaves
from millstream.capture.source_tables import SourceTable, list_tables, read_table
from millstream.capture.streamed_publications import StreamedPublications
from millstream.errors import SourceError
from millstream.model.names import TablePatterns, quote

DECIDES_AGAIN_FROM: Final = 150000
"""Version from which on a stream follows of which table a relation is a partition."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The tables and operations that the publications send now."""

    publications: tuple[str, ...]
    """Names of the publications that the session streams, for START_REPLICATION."""
    oids: frozenset[int]
    """Tables that are sent completely: inserts, and updates and deletes if they carry an identity."""
    refused: dict[int, str]
    """By OID, tables that aren't sent, or only in part: the reason and the SQL to run."""
    without_truncates: dict[int, str]
    """By OID, tables of `oids` whose truncates aren't sent: the reason and the SQL to run."""


@dataclass(frozen=True, slots=True)
class Lack:
    """A defect of the publications that this role may not repair."""

    message: str
    sql: str
    """The SQL for the tables' owner (or a superuser) to run."""
    table: SourceTable | None
    """The table concerned; None if nothing can be captured, because the first publication is missing and can't be created."""
    stops: bool = True
    """Whether the defect prevents capture; if not, capture is only less exact."""
    adds: tuple[SourceTable, ...] = ()
    """Tables that the SQL adds. PostgreSQL refuses updates of those without an identity from then on."""


def inserts_name(publication: str) -> str:
    """Return the name of the publication for tables without a usable identity."""
    return f"{publication}_inserts"


def sync_publications(
    connection: Connection, publication: str, tables: Sequence[SourceTable], streamed: StreamedPublications
) -> Coverage:
    """Create or repair both publications so that they send `tables`; return what they send.

    Raises:
        SourceError (`publication_missing`): the first publication doesn't exist and may not be created; the hint has the SQL.
    """
    usable = [t for t in tables if t.usable]
    others = [t for t in tables if not t.usable]
    refused: dict[int, str] = {}
    by_leaves = reads_leaves(connection, (publication, inserts_name(publication)))
    # Create both together, before the slot: a running stream doesn't send what a later publication publishes.
    fresh = _find(connection, publication) is None
    refused |= _sync_one(connection, publication, usable, others, inserts_only=False, by_leaves=by_leaves)
    alone = _sent_alone(connection, publication, others)
    apart = [t for t in others if t.oid not in alone]
    if fresh or apart or _find(connection, inserts_name(publication)) is not None:
        elsewhere = [t for t in tables if t.usable or t.oid in alone]
        first = _find(connection, publication)
        generated = first is None or first.generated
        refused |= _sync_one(
            connection,
            inserts_name(publication),
            apart,
            elsewhere,
            inserts_only=True,
            generated=generated,
            by_leaves=by_leaves,
        )
    existing = tuple(n for n in (publication, inserts_name(publication)) if _find(connection, n) is not None)
    names = streamed.choose(existing)
    streamed.look(connection, existing)
    late = {oid: name for name in existing if name not in names for oid in _members(connection, [name])}
    sent = _sent(connection, names)
    members = _members(connection, [publication])
    covered = _covered(sent, tables)
    untold = "no publication sends its {}" + f"; add it to {publication}"
    for table in tables:
        if table.oid in covered or not (verbs := _missing_verbs(sent.get(table.oid), table)):
            continue
        if table.oid in late:
            refused[table.oid] = (
                f"the publication {late[table.oid]} is streamed once the transactions have ended that ran when it was created"
            )
        elif table.oid in members:
            refused[table.oid] = _verbs_reason(connection, publication, verbs)
        else:
            refused.setdefault(table.oid, untold.format(_spoken(verbs)))
    truncates = {
        oid: _verbs_reason(connection, publication if oid in members else inserts_name(publication), ["truncate"])
        for oid in covered
        if "truncate" not in sent[oid]
    }
    return Coverage(names, covered, {oid: why for oid, why in refused.items() if oid not in covered}, truncates)


def covered_tables(connection: Connection, publication: str, tables: Iterable[SourceTable]) -> frozenset[int]:
    """Return the OIDs of those of `tables` that the publications send completely now."""
    return _covered(_sent(connection, (publication, inserts_name(publication))), tables)


def memberships(
    connection: Connection, publications: Sequence[str], tables: Iterable[SourceTable]
) -> dict[int, set[str]]:
    """Return by OID each table's memberships: what the publications that send it completely name it by.

    A table, or the schema of one, that leaves a publication and rejoins it has another membership: PostgreSQL gives it
    another OID. A publication of all tables can only be dropped and created again. Nothing is returned for a table that
    only several publications together send completely.
    """
    usable = {table.oid: table.usable for table in tables}
    schemas = "UNION ALL SELECT pnpubid, 'schema ' || oid, NULL, pnnspid FROM pg_publication_namespace"
    rows = all_rows(
        connection,
        "SELECT t.oid, m.name, p.pubupdate AND p.pubdelete FROM unnest(%s::oid[]) t (oid) CROSS JOIN LATERAL"
        " (SELECT t.oid UNION SELECT relid FROM pg_partition_ancestors(t.oid::regclass)) above (oid)"
        " JOIN pg_class c ON c.oid = above.oid"
        " JOIN (SELECT prpubid, 'table ' || oid, prrelid, NULL::oid FROM pg_publication_rel"
        " UNION ALL SELECT oid, 'all tables ' || oid, NULL, NULL FROM pg_publication WHERE puballtables"
        f" {schemas if connection.info.server_version >= 150000 else ''}) m (publication, name, relation, namespace)"
        " ON coalesce(m.relation, c.oid) = c.oid AND coalesce(m.namespace, c.relnamespace) = c.relnamespace"
        " JOIN pg_publication p ON p.oid = m.publication WHERE p.pubname = ANY(%s) AND p.pubinsert",
        [list(usable), list(publications)],
    )
    found: dict[int, set[str]] = {}
    for oid, name, sends_identity in rows:
        if sends_identity or not usable[int(oid)]:
            found.setdefault(int(oid), set()).add(str(name))
    return found


@dataclass(frozen=True, slots=True)
class Restriction:
    """A publication's column list and row filter for a table."""

    columns: tuple[str, ...] | None = None
    """Names of the columns that are sent; None means all."""
    condition: str = ""
    """The row filter, as an SQL expression; empty means every row."""

    def applied_to(self, table: SourceTable) -> SourceTable:
        """Return the table with only the sent columns; not usable if generated identity columns are missing."""
        if self.columns is None:
            return table
        sent = tuple(column for column in table.relation.columns if column.name in self.columns)
        usable = table.usable and set(table.generated_identity) <= {column.name for column in sent}
        return replace(table, relation=replace(table.relation, columns=sent), usable=usable)


def restrictions(connection: Connection, publications: Sequence[str]) -> dict[tuple[str, str], Restriction]:
    """Return the restrictions of every published table, by schema and name; empty before PostgreSQL 15."""
    if connection.info.server_version < 150000:
        return {}
    rows = all_rows(
        connection,
        "SELECT DISTINCT ON (schemaname, tablename) schemaname, tablename, attnames::text[], rowfilter"
        " FROM pg_publication_tables WHERE pubname = ANY(%s) ORDER BY schemaname, tablename, pubname",
        [list(publications)],
    )
    return {(row[0], row[1]): Restriction(None if row[2] is None else tuple(row[2]), row[3] or "") for row in rows}


def restriction(connection: Connection, publications: Sequence[str], table: SourceTable) -> Restriction:
    """Return one table's restriction, as the connection's transaction sees it."""
    if connection.info.server_version < 150000:
        return Restriction()
    row = first_row(
        connection,
        "SELECT attnames::text[], rowfilter FROM pg_publication_tables WHERE pubname = ANY(%s) AND schemaname = %s"
        " AND tablename = %s ORDER BY pubname LIMIT 1",
        [list(publications), table.namespace, table.name],
    )
    made = {column.name for column in table.layout if column.generated}
    if row is None and made and table.partitioned and not any(_sends_made(connection, name) for name in publications):
        return Restriction(tuple(c.name for c in table.relation.columns if c.name not in made))
    return Restriction() if row is None else Restriction(None if row[0] is None else tuple(row[0]), row[1] or "")


def list_published(
    connection: Connection, patterns: TablePatterns, publication: str, *, foreseen: bool = False
) -> list[SourceTable]:
    """List the tables that match the patterns, with the columns that the publications send.

    A table that isn't published yet has the columns that will be sent once it is.

    Args:
        foreseen: assume that `publish_generated` has run; else use the present settings.
    """
    found = _find(connection, publication)
    sent = restrictions(connection, (publication, inserts_name(publication)))
    generated = found is None or found.generated
    if foreseen and not generated and found is not None and found.ours:
        generated, sent = True, {}
    tables = []
    for table in list_tables(connection, patterns):
        made = () if generated else {c.name for c in table.layout if c.generated}
        unlisted = Restriction(tuple(c.name for c in table.relation.columns if c.name not in made))
        tables.append(sent.get((table.namespace, table.name), unlisted).applied_to(table))
    return tables


def publish_generated(connection: Connection, publication: str) -> None:
    """Make our publications send stored generated columns (18+; older servers can't).

    Both must have the same setting at any time: the stream ends if two publications differ about one
    table. So both are altered in one transaction. The second follows the first, even if a DBA made the
    first.

    Raises:
        SourceError: the change failed; nothing else depends on it.
    """
    if connection.info.server_version < 180000:
        return
    wanted = True
    statements = []
    for name in (publication, inserts_name(publication)):
        found = _find(connection, name)
        if found is not None and found.ours and found.generated is not wanted:
            setting = sql.SQL("stored" if wanted else "none")
            change = sql.SQL("ALTER PUBLICATION {} SET (publish_generated_columns = {})")
            statements.append(change.format(sql.Identifier(name), setting))
        elif found is not None and name == publication:
            wanted = found.generated
    if statements:
        _execute(connection, *statements)


def decide_again(connection: Connection, publications: Iterable[str]) -> bool:
    """Let a stream of PostgreSQL 14 decide again of each relation whether, and as part of which table, it is sent.

    It decides that once, when it meets the relation, and again only after a publication was altered. So it would go on to send a
    partition that was detached, and nothing of one that it has met as a table of its own. Later servers need no such help.

    Returns:
        False if this role may alter none of the publications.
    """
    for name in publications:
        found = _find(connection, name)
        if found is not None and found.owned:
            _execute(connection, _via_root(name) if found.via_root else leaves_published(name)[-1])
            return True
    return False


def deciding_again(connection: Connection, publication: str) -> str:
    """Return the SQL with which a publication's owner does what `decide_again` does."""
    found = _find(connection, publication)
    change = _via_root(publication) if found is None or found.via_root else leaves_published(publication)[-1]
    return f"{change.as_string(connection)};"


def find_lacks(connection: Connection, publication: str, tables: Sequence[SourceTable]) -> list[Lack]:
    """List the changes to the first publication that someone else must make, so that it sends `tables` completely.

    Tables without an identity count as if they had one: the SQL that gives them one has to be run first.
    """
    found = _find(connection, publication)
    may_create, own = _rights(connection, tables)
    if found is None:
        script = _create(connection, publication, tables, inserts_only=False).as_string(connection) + ";"
        message = f"the publication {publication} doesn't exist, and this role may not "
        if may_create and (own or not tables):
            return [
                Lack(f"{message}add {table.full_name} to it", script, table, adds=tuple(tables))
                for table in tables
                if table.oid not in own
            ]
        return [Lack(f"{message}create it", script, None, adds=tuple(tables))]
    lacks = []
    by_leaves = reads_leaves(connection, (publication, inserts_name(publication)))
    sent, members = _sent(connection, [publication]), _members(connection, [publication])
    named = _direct_members(connection, publication)
    for table in tables:
        if not by_leaves and found.sends_apart(table):
            message = f"the publication {publication} sends partitions of {table.full_name} as tables of their own"
            lacks.append(Lack(message, _via_root(publication).as_string(connection) + ";", table))
            if found.all_tables or table.oid in named or any(part.oid in members for part in table.partitions):
                continue
        if table.oid not in members:
            if found.owned and table.oid in own:
                continue
            change = _change(publication, "ADD", [table]).as_string(connection) + ";"
            message = f"the publication {publication} doesn't send {table.full_name}, and this role may not add it"
            lacks.append(Lack(message, change, table, adds=(table,)))
            continue
        verbs = [verb for verb in _PUBLISH if verb not in sent[table.oid]]
        if verbs:
            message = f"the publication {publication} doesn't publish {_spoken(verbs)} of {table.full_name}"
            change = _publish_all(publication).as_string(connection) + ";"
            lacks.append(Lack(message, change, table, stops=bool(_missing_verbs(sent[table.oid], table))))
    return lacks


def _rights(connection: Connection, tables: Iterable[SourceTable]) -> tuple[bool, set[int]]:
    """Return whether this role may create publications, and the OIDs of those of `tables` that it may add to one."""
    row = one_row(
        connection,
        "SELECT has_database_privilege(current_database(), 'CREATE') AND NOT pg_is_in_recovery(), ARRAY(SELECT c.oid::bigint"
        " FROM pg_class c WHERE c.oid = ANY(%s) AND pg_has_role(c.relowner, 'USAGE') AND NOT pg_is_in_recovery())",
        [[table.oid for table in tables]],
    )
    return bool(row[0]), set(row[1])


_JUST_CREATED: Final = frozenset({"42710", "23505"})
"""SQLSTATEs of a CREATE PUBLICATION that another stream or home was faster with, before and during its transaction."""
_PUBLISH: Final = ("insert", "update", "delete", "truncate")


def _sent(connection: Connection, names: Sequence[str]) -> dict[int, frozenset[str]]:
    """Return, by OID, the operations that the publications send of a table; PostgreSQL combines them."""
    found: dict[int, frozenset[str]] = {}
    for name in names:
        row = first_row(
            connection,
            "SELECT pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication WHERE pubname = %s",
            [name],
        )
        if row is not None:
            verbs = frozenset(verb for verb, sends in zip(_PUBLISH, row, strict=True) if sends)
            for oid in _members(connection, [name]):
                found[oid] = found.get(oid, frozenset()) | verbs
    return found


def _missing_verbs(sent: frozenset[str] | None, table: SourceTable) -> list[str]:
    """List the operations that should be sent and aren't; not truncates, without which capture works."""
    wanted = ("insert", "update", "delete") if table.usable else ("insert",)
    return [verb for verb in wanted if verb not in (sent or ())]


def _covered(sent: dict[int, frozenset[str]], tables: Iterable[SourceTable]) -> frozenset[int]:
    return frozenset(t.oid for t in tables if not _missing_verbs(sent.get(t.oid), t))


def _spoken(verbs: Sequence[str]) -> str:
    return " and ".join(f"{verb}s" for verb in verbs)


def _verbs_reason(connection: Connection, name: str, verbs: Sequence[str]) -> str:
    script = _publish_all(name).as_string(connection)
    return f"the publication {name} doesn't publish {_spoken(verbs)}; run: {script};"


def _apart_reason(connection: Connection, name: str) -> str:
    script = _via_root(name).as_string(connection)
    return f"the publication {name} sends its partitions as tables of their own; run: {script};"


def _via_root(name: str) -> sql.Composed:
    return sql.SQL("ALTER PUBLICATION {} SET (publish_via_partition_root = true)").format(sql.Identifier(name))


def _publish_all(name: str) -> sql.Composed:
    return sql.SQL("ALTER PUBLICATION {} SET (publish = {})").format(
        sql.Identifier(name), sql.Literal(", ".join(_PUBLISH))
    )


@dataclass(frozen=True, slots=True)
class _Publication:
    owned: bool
    all_tables: bool
    ours: bool
    """Whether it looks like a publication made by this module, and can be altered now."""
    generated: bool
    """Whether stored generated columns of tables without a column list are sent."""
    via_root: bool
    """Whether changes of partitions are sent as those of their partitioned table, and not under the partitions' own names."""

    def sends_apart(self, table: SourceTable) -> bool:
        """Return whether it can't send a table, because it sends each partition as a table of its own."""
        return table.partitioned and not self.via_root


def _find(connection: Connection, name: str) -> _Publication | None:
    row = first_row(
        connection,
        "SELECT pg_has_role(pubowner, 'USAGE'), puballtables, NOT pg_is_in_recovery() AND NOT"
        f" {others(connection.info.server_version)}, coalesce(to_jsonb(p) ->> 'pubgencols' = 's', false), pubviaroot"
        " FROM pg_publication p WHERE pubname = %(name)s",  # `pubgencols` exists from 18 on
        {"mark": MARK, "name": name},
    )
    if row is None:
        return None
    return _Publication(row[0], row[1], ours=row[0] and row[2], generated=row[3], via_root=row[4])


def _sends_made(connection: Connection, name: str) -> bool:
    found = _find(connection, name)
    return found is not None and found.generated


def _sent_alone(connection: Connection, publication: str, tables: Iterable[SourceTable]) -> set[int]:
    """Return the OIDs of tables with stored generated columns that a DBA's first publication sends alone.

    It sends their inserts and truncates. They don't join the second publication: if the first is then
    altered, the two differ for a while, and the stream ends.
    """
    stored = [t.oid for t in tables if any(c.generated == "s" for c in t.layout)]
    if not stored or connection.info.server_version < 180000:
        return set()
    sent = _sent(connection, [publication])
    return {oid for oid in stored if {"insert", "truncate"} <= sent.get(oid, frozenset())}


def _members(connection: Connection, names: Iterable[str]) -> set[int]:
    """Return the OIDs of the tables that the publications send, under their own names or as their leaf partitions."""
    rows = all_rows(
        connection,
        "SELECT c.oid FROM pg_publication_tables t JOIN pg_class c ON c.relname = t.tablename"
        " JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = t.schemaname WHERE t.pubname = ANY(%(names)s)"
        " UNION SELECT r.prrelid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid"
        f" JOIN pg_class c ON c.oid = r.prrelid WHERE c.relkind = 'p' AND NOT {others(connection.info.server_version)}"
        " AND p.pubname = ANY(%(names)s)",
        {"mark": MARK, "names": list(names)},
    )
    return {int(row[0]) for row in rows}


def _direct_members(connection: Connection, name: str) -> set[int]:
    rows = all_rows(
        connection,
        "SELECT r.prrelid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE p.pubname = %s",
        [name],
    )
    return {int(row[0]) for row in rows}


def _sync_one(
    connection: Connection,
    name: str,
    wanted: Sequence[SourceTable],
    elsewhere: Sequence[SourceTable],
    *,
    inserts_only: bool,
    by_leaves: bool,
    generated: bool = True,
) -> dict[int, str]:
    found = _find(connection, name)
    if found is None:
        # A table of another owner is refused below, and keeps no other out; unless this role owns none.
        _, own = _rights(connection, [*wanted, *elsewhere])
        first = [table for table in wanted if table.oid in own] if own else wanted
        create = partial(_create, connection, name, inserts_only=inserts_only, generated=generated)
        try:
            _execute(connection, create(first), *(leaves_published(name) if by_leaves else ()))
        except SourceError as error:
            if error.details.get("sqlstate") in _JUST_CREATED:
                return _sync_one(
                    connection,
                    name,
                    wanted,
                    elsewhere,
                    inserts_only=inserts_only,
                    by_leaves=by_leaves,
                    generated=generated,
                )
            if error.code != "source_privilege_missing" and not _on_standby(error):
                raise
            script = create(wanted).as_string(connection)
            if inserts_only:
                return {
                    t.oid: f"the publication {name} doesn't exist and can't be created: {error.message}" for t in wanted
                }
            raise SourceError(
                f"the publication {name} doesn't exist and can't be created: {error.message}",
                code="publication_missing",
                hint=f"Run {'at the primary, ' if _on_standby(error) else ''}as the tables' owner: {script}; (`millstream doctor --sql` prints the whole script)",
                sql=script,
            ) from error
        found = _find(connection, name)
        assert found is not None
    refused = {t.oid: _apart_reason(connection, name) for t in wanted if not by_leaves and found.sends_apart(t)}
    if found.all_tables:
        return refused
    members = _direct_members(connection, name)
    # Drop before adding: a table that lost its identity must leave before the application's next UPDATE.
    leaving = [t for t in elsewhere if t.oid in members]
    if found.ours:
        leaving += _added_along(connection, members, [*wanted, *elsewhere])
    if leaving and found.owned:
        try:
            _execute(connection, _change(name, "DROP", leaving))
        except SourceError as error:
            if not _on_standby(error):
                raise
    sent = _members(connection, [name])
    for table in [t for t in wanted if t.oid not in sent and t.oid not in refused]:
        try:
            _execute(connection, _change(name, "ADD", [table]))
        except SourceError as error:
            script = _change(name, "ADD", [table]).as_string(connection)
            where = " at the primary" if _on_standby(error) else ""
            refused[table.oid] = f"it can't be added to the publication {name} ({error.message}); run{where}: {script};"
    return refused


def _added_along(connection: Connection, members: Iterable[int], tables: Sequence[SourceTable]) -> list[SourceTable]:
    """Return members that aren't among `tables` and inherit from one of them.

    PostgreSQL adds them along with their parent unless its name follows ONLY, as it didn't in older versions.
    """
    listed = {table.oid for table in tables}
    others = [oid for oid in members if oid not in listed]
    if not others:
        return []
    rows = all_rows(
        connection,
        "WITH RECURSIVE heir (oid) AS (SELECT inhrelid FROM pg_inherits WHERE inhparent = ANY (%s)"
        " UNION SELECT i.inhrelid FROM pg_inherits i JOIN heir ON i.inhparent = heir.oid)"
        " SELECT c.oid FROM heir JOIN pg_class c ON c.oid = heir.oid WHERE NOT c.relispartition AND c.oid = ANY (%s)",
        [list(listed), others],
    )
    found = (read_table(connection, int(row[0])) for row in rows)
    return [table for table in found if table is not None]


def _on_standby(error: SourceError) -> bool:
    """Return whether the server refused because it is read-only."""
    return error.details.get("sqlstate") == "25006"


def _create(
    connection: Connection, name: str, tables: Sequence[SourceTable], *, inserts_only: bool, generated: bool = True
) -> sql.Composed:
    publish = "insert, truncate" if inserts_only else "insert, update, delete, truncate"
    targets = sql.SQL(" FOR TABLE {}").format(_list(tables)) if tables else sql.SQL("")
    options = "publish_via_partition_root = true"
    if generated and connection.info.server_version >= 180000:
        options += ", publish_generated_columns = stored"
    return sql.SQL("CREATE PUBLICATION {}{} WITH (publish = {}, {})").format(
        sql.Identifier(name), targets, sql.Literal(publish), sql.SQL(options)
    )


def _change(name: str, verb: str, tables: Sequence[SourceTable]) -> sql.Composed:
    return sql.SQL("ALTER PUBLICATION {} {} TABLE {}").format(sql.Identifier(name), sql.SQL(verb), _list(tables))


def _list(tables: Sequence[SourceTable]) -> sql.Composed:
    # ONLY: else the tables that inherit from one join with it, and an UPDATE of one that has no identity fails.
    return sql.SQL(", ").join(sql.SQL("ONLY {}").format(sql.Identifier(t.namespace, t.name)) for t in tables)


def _execute(connection: Connection, *statements: sql.Composed) -> None:
    """Run DDL in one transaction with a short lock timeout, so that the application's own DDL goes first.

    The lock is SHARE UPDATE EXCLUSIVE.
    """
    with translated(), connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '2s'")
        for statement in statements:
            connection.execute(statement)


def pgoutput_options(publications: Iterable[str], *, origin: str) -> dict[str, str]:
    """Return the options for pgoutput; streaming and SQL functions give the same messages."""
    names = ",".join(quote(name) for name in publications)
    options = {"proto_version": "2", "publication_names": names, "streaming": "on", "messages": "true"}
    return options if origin == "any" else options | {"origin": origin}
