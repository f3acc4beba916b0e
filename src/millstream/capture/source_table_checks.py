"""The checks that `doctor` runs on the source: `server_checks` of its settings, and those of its tables and publication.

Each finding says whether it stops the source or only one table, and which SQL to run. Only `drop_slot`
changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from psycopg import sql

from millstream.capture.column_rules.binding import ColumnRules
from millstream.capture.config import CaptureConfig
from millstream.capture.connection import Connection, all_rows, connect, first_row
from millstream.capture.noted_slots import forget_slot
from millstream.capture.publication import find_lacks, list_published
from millstream.capture.server_checks import Finding, check_replication, check_server
from millstream.capture.slot import SlotState, check_slot, drop_slot_of, read_slot
from millstream.capture.source_tables import SourceTable, on_standby
from millstream.catalog import Catalog
from millstream.codec.pgoutput import relation_columns
from millstream.errors import ConfigError, MillstreamError, SourceError, UnknownTable
from millstream.model.column_rules import SourceRules
from millstream.model.ids import SourceId
from millstream.model.names import TablePatterns, quote_ident
from millstream.model.pgtypes import is_numeric_text, is_text_for_want_of_better, lake_type
from millstream.model.positions import Lsn
from millstream.model.records import log_names
from millstream.wal.reader import StreamReader

_SETTING: Final = "ALTER SYSTEM "


def check_source(config: CaptureConfig, rules: ColumnRules | None = None) -> list[Finding]:
    """Find everything at the source that would stop capture or a table, or deserves a warning; change nothing.

    Args:
        rules: the stream's, bound as its next start finds them; None: they aren't checked.
    """
    try:
        return _ask(config, rules)
    except MillstreamError as error:
        return [_of_error(error)]


def doctor_sql(config: CaptureConfig) -> str:
    """Return one script for a DBA that repairs everything that SQL can; empty if there is nothing to do.

    It may run in one transaction, except server settings, which come last as comments.

    Raises:
        MillstreamError: the source can't be queried, so the needed statements are unknown.
    """
    parts: list[str] = []
    settings: list[str] = []
    for finding in _ask(config):
        if finding.sql.startswith(_SETTING):
            needed = "optional" if finding.blocks == "nothing" else "needed"
            settings.append(sql_comment(f"{needed}, outside a transaction: {finding.message}\n{finding.sql}"))
        elif finding.sql and f"{finding.sql}\n" not in parts:
            parts += [sql_comment(finding.message), f"{finding.sql}\n"]
    return "".join([*parts, *settings])


def sql_comment(text: str) -> str:
    """Return the text as an SQL comment; names may contain line ends, so each line begins with `-- `."""
    return "".join(f"-- {line}\n" for line in text.splitlines())


def _ask(config: CaptureConfig, rules: ColumnRules | None = None) -> list[Finding]:
    with connect(config.dsn, purpose="doctor") as connection:
        return [
            *check_server(connection, config),
            *check_replication(connection, config),
            *check_tables(connection, config, rules),
        ]


def look_at_slot(config: CaptureConfig) -> SlotState | None:
    """Return the state of the stream's slot at the source; None if it has none.

    Raises:
        SourceError: the source can't be asked.
    """
    with connect(config.dsn, purpose="alerts") as connection:
        return read_slot(connection, config.slot)


def reached_in_log(reader: StreamReader) -> dict[SourceId, Lsn]:
    """Return the positions of sources that the log's own group headers have reached."""
    found: dict[SourceId, Lsn] = {}
    for header in reader.newest_headers(reader.persisted_upto(), readable=True):
        for source, lsn in header.reached.items():
            found[source] = max(lsn, found.get(source, lsn))
    return found


def check_slot_of_log(
    config: CaptureConfig, catalog: Catalog, log: Callable[[], Mapping[SourceId, Lsn]]
) -> list[Finding]:
    """Find whether the next start would refuse the slot, because it is gone or no longer follows the log.

    Args:
        log: returns the positions that the log's own group headers have reached.

    Raises:
        MillstreamError: the source can't be queried, or the log can't be read.
    """
    stream = catalog.stream(config.stream).id
    source = catalog.current_source(stream)
    if source is None or catalog.fact(f"capture/{stream}", "slot_dropped"):
        return []
    # Read the slot first: a running capture stores its position before it confirms it.
    slot = look_at_slot(config)
    if slot is not None and (
        slot.active_pid is not None or slot.synced or slot.invalidation or slot.wal_status == "lost"
    ):
        return []  # in use, or reported by `check_server`
    try:
        check_slot(
            slot,
            name=config.slot,
            database=source.database,
            reached=catalog.reached_in(source.id, log()),
        )
    except SourceError as error:
        return [_of_error(error)]
    return []


def drop_slot(config: CaptureConfig, catalog: Catalog | None = None) -> int | None:
    """Drop the stream's slot, so that the source can free its WAL.

    Args:
        catalog: catalog in which to record that this was on purpose. The next run then makes a new slot
            and copies every table again; without the record it stops with `slot_lost`. A stream that was never
            captured needs none: its first run does so.

    Returns:
        Bytes of WAL that the slot held; None if there was no such slot (a captured stream's record is made all the same).

    Raises:
        SourceError (`slot_active`): the slot is in use.
        SourceError: the source can't be reached, or refuses.
    """
    held = drop_slot_of(config.dsn, config.slot)
    if catalog is not None:
        stream = catalog.stream(config.stream).id
        if catalog.current_source(stream) is not None:
            catalog.put_fact(f"capture/{stream}", "slot_dropped", value=True)
        forget_slot(catalog, stream, config.slot)
    return held


def _of_error(error: MillstreamError) -> Finding:
    return Finding(error.code, error.message, "source", fix=error.hint)


def check_tables(connection: Connection, config: CaptureConfig, rules: ColumnRules | None = None) -> Iterator[Finding]:
    """Yield what would stop a table, or deserves a warning, at every table that the patterns match.

    Rules that don't fit the tables stop the source, as they would stop capture's start.
    """
    patterns = TablePatterns.parse(config.tables)
    tables = list_published(connection, patterns, config.publication, foreseen=True)
    if not tables:
        yield Finding(
            "no_tables_match",
            f"no table matches {', '.join(config.tables)}",
            "source",
            fix="Correct `tables` in millstream.toml.",
        )
        return
    names = all_rows(
        connection,
        "SELECT nspname, relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace WHERE relkind IN ('r', 'p')",
    )
    for pattern in patterns.patterns:
        if not any(pattern.matches(*name) for name in names):
            what = f"{pattern.text} in `tables` matches no table"
            yield Finding(
                "pattern_unused", what, "nothing", fix="Correct it in millstream.toml, unless the table is yet to come."
            )
    if rules is not None:
        yield from _check_rules(rules, tables)
    for table in tables:
        yield from _check_table(connection, table)
    yield from _check_types(tables, config)
    for table in tables:
        yield from _check_derived(connection, table, config.rules)
    where = " at the primary" if on_standby(connection) else ""
    for lack in find_lacks(connection, config.publication, tables):
        blocks = "source" if lack.table is None else "table" if lack.stops else "nothing"
        name = lack.table.full_name if lack.table else ""
        fix = f"Have the tables' owner (or a superuser) run the SQL{where}, once every table of the publication has an identity."
        identities = [_identity_remedy(connection, added)[1] for added in lack.adds if not added.usable]
        script = " ".join(filter(None, [*identities, lack.sql]))
        yield Finding("publication_missing", lack.message, blocks, name, fix, script)


def _check_rules(rules: ColumnRules, tables: list[SourceTable]) -> list[Finding]:
    try:
        rules.check(tables)
    except (ConfigError, UnknownTable) as error:
        return [Finding(error.code, error.message, "source", error.details.get("table", ""), error.hint)]
    return []


def _check_table(connection: Connection, table: SourceTable) -> Iterator[Finding]:
    name = sql.Identifier(table.namespace, table.name).as_string(connection)
    row = first_row(
        connection,
        "SELECT has_schema_privilege(relnamespace, 'USAGE'), has_table_privilege(oid, 'SELECT'),"
        " relrowsecurity AND NOT pg_has_role(relowner, 'USAGE')"
        " AND NOT (SELECT rolbypassrls FROM pg_roles WHERE rolname = current_user), current_user"
        " FROM pg_class WHERE oid = %s",
        [table.oid],
    )
    if row is None:
        return
    role = sql.Identifier(str(row[3])).as_string(connection)
    if not (row[0] and row[1]):
        schema = sql.Identifier(table.namespace).as_string(connection)
        yield Finding(
            "source_privilege_missing",
            f"the role may not read {table.full_name}",
            "table",
            table.full_name,
            "Grant it; else the table's existing rows can't be copied.",
            f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {name} TO {role};",
        )
    if row[2]:
        yield Finding(
            "row_security",
            f"row security hides rows of {table.full_name} from the role",
            "table",
            table.full_name,
            "Let the role bypass it; else the table's existing rows can't be copied.",
            f"ALTER ROLE {role} BYPASSRLS;",
        )
    if not table.usable:
        yield Finding(
            "replica_identity_unusable",
            f"{table.full_name} has no usable replica identity: inserts only, into history only, without its existing rows",
            "current",
            table.full_name,
            *_identity_remedy(connection, table),
        )
    names = [column.name for column in table.relation.columns]
    for name, captured in zip(names, log_names(names), strict=True):
        if captured != name:
            full_name = f"{table.full_name}.{quote_ident(name)}"
            yield Finding(
                "column_renamed",
                f"{full_name} has the name of one of Millstream's own columns: it is captured as {captured}",
                "nothing",
                table.full_name,
                f"Nothing has to be done; use the name {captured} in queries.",
            )
    yield from _check_generated(connection, table)


def _check_types(tables: list[SourceTable], config: CaptureConfig) -> Iterator[Finding]:
    """Yield the columns that will be text, and the configured types that no column can have."""
    unused = dict(config.lake_types)
    for table in tables:
        rules = _rules_of(table, config.rules)
        for column in relation_columns(table.relation):
            name = f"{table.full_name}.{column.name}"
            wanted = unused.pop(f"{table.namespace}.{table.name}.{column.name}", None)
            try:
                lake_type(column, wanted)
            except ConfigError as error:
                yield Finding(error.code, f"{table.full_name}: {error.message}", "table", table.full_name, error.hint)
            if wanted is None and column.name not in rules and is_text_for_want_of_better(column):
                fix = "Nothing has to be done"
                fix += "; `[streams.S.types]` can give it a precision." if is_numeric_text(column) else "."
                kind = column.pg.name if column.pg else "?"
                yield Finding(
                    "column_is_text", f"{name} ({kind}) will be text in the lake", "nothing", table.full_name, fix
                )
    for name in unused:
        yield Finding(
            "type_unused",
            f"[streams.S.types] has {name}, but no captured table has this column",
            "nothing",
            fix="Correct the name in millstream.toml, as schema.table.column.",
        )


def _rules_of(table: SourceTable, rules: SourceRules) -> set[str]:
    """Return the columns of a table that have a rule, its own or one of a partitioned table above it."""
    names = ((table.namespace, table.name), *table.ancestors)
    return {column for name in names for column in rules.tables.get(name, ())}


def _check_generated(connection: Connection, table: SourceTable) -> list[Finding]:
    """Report the table's generated columns that aren't captured."""
    lost = _generated_unsent(table)
    if not lost:
        return []
    stored = [name for name, kind in lost.items() if kind == "s"] if _publishes_generated(connection) else []
    computed = [name for name in lost if name not in stored]
    fix = "Nothing has to be done; a query can compute them from the columns that they are made of."
    if stored:
        fix = (
            f"Set publish_generated_columns of the publication to stored, or add {', '.join(stored)} to its column list"
        )
        fix += f"; a query can compute {', '.join(computed)}." if computed else "."
    told = f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} generated and won't be captured"
    return [Finding("column_generated", f"{table.full_name}: {told}", "nothing", table.full_name, fix)]


def _check_derived(connection: Connection, table: SourceTable, rules: SourceRules) -> list[Finding]:
    """Report generated columns without a rule whose expressions use a column with a rule: they may show its values."""
    asked = _rules_of(table, rules)
    if not asked:
        return []
    # Up to 14, the generated column itself depends on the others; from 15 on, its expression does.
    rows = all_rows(
        connection,
        "SELECT g.attname, string_agg(DISTINCT a.attname, ', ' ORDER BY a.attname)"
        " FROM pg_attrdef e JOIN pg_attribute g ON g.attrelid = e.adrelid AND g.attnum = e.adnum AND g.attgenerated <> ''"
        " JOIN pg_depend d ON (d.classid = 'pg_attrdef'::regclass AND d.objid = e.oid)"
        " OR (d.classid = 'pg_class'::regclass AND d.objid = e.adrelid AND d.objsubid = e.adnum)"
        " JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid AND a.attnum <> g.attnum"
        " WHERE e.adrelid = %s AND d.refclassid = 'pg_class'::regclass AND d.refobjid = e.adrelid"
        " AND a.attname = ANY (%s) GROUP BY g.attname ORDER BY g.attname",
        [table.oid, list(asked)],
    )
    return [
        Finding(
            "column_derived",
            f"{table.full_name}.{quote_ident(name)} has no rule and is generated from {used}, which has one",
            "nothing",
            table.full_name,
            f"Exclude, hash or redact {name} too, unless its values may leave the source.",
        )
        for name, used in rows
        if name not in asked
    ]


def _generated_unsent(table: SourceTable) -> dict[str, str]:
    """Return `attgenerated` of the table's generated columns that aren't sent, by name."""
    sent = {column.name for column in table.relation.columns}
    return {column.name: column.generated for column in table.layout if column.generated and column.name not in sent}


def _publishes_generated(connection: Connection) -> bool:
    return connection.info.server_version >= 180000


def _identity_remedy(connection: Connection, table: SourceTable) -> tuple[str, str]:
    """Return the advice for a table without an identity, and the statements if they are known."""
    unsent = _generated_unsent(table).values() if _publishes_generated(connection) else ()
    if unsent:
        # FULL includes all columns, even those that aren't published.
        fix = "Give it a primary key without generated columns, and REPLICA IDENTITY DEFAULT; it is copied whole then."
        if "v" not in unsent:
            fix = f"Set publish_generated_columns of the publication to stored, with a usable identity; else {fix[0].lower()}{fix[1:]}"
        return fix, ""
    fix = "Give it a primary key (not a deferrable one), or another identity; it is copied whole then."
    return fix, _identity_sql(connection, table)


def _identity_sql(connection: Connection, table: SourceTable) -> str:
    """Return statements that give a table an identity; partitions don't inherit it and need their own."""
    leaves = all_rows(
        connection,
        "SELECT n.nspname, c.relname FROM pg_partition_tree(%s::oid::regclass) p JOIN pg_class c ON c.oid = p.relid"
        " JOIN pg_namespace n ON n.oid = c.relnamespace WHERE p.isleaf AND p.relid <> %s ORDER BY 1, 2",
        [table.oid, table.oid],
    )
    names = [sql.Identifier(*name).as_string(connection) for name in ((table.namespace, table.name), *leaves)]
    return " ".join(f"ALTER TABLE {name} REPLICA IDENTITY FULL;" for name in names)
