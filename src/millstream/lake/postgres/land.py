"""Landing of a batch in PostgreSQL: one transaction for all of its tables, with their positions.

A table that fails is rolled back alone, to a savepoint: the others land. Writers of one stream wait
for each other, so that `seq` becomes visible in order. A task that was thought dead finds the batch
already landed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc

from millstream import failpoints
from millstream.errors import LakeError, MillstreamError
from millstream.lake.layout import TableCommit, folder_of, has_current
from millstream.lake.postgres.current import LAYOUT as ROWS_LAYOUT
from millstream.lake.postgres.current import check_can_merge, merge_current
from millstream.lake.postgres.events import LAYOUT as EVENTS_LAYOUT
from millstream.lake.postgres.events import append_events, bring_up_all, ensure_events
from millstream.lake.postgres.own_tables import place_of, prepare
from millstream.lake.postgres.target import PostgresTarget, TargetView, translate, translated
from millstream.lake.postgres.texts import Versioned
from millstream.lake.postgres.view_gaps import is_complete, is_emptied, lacks_records, leave_behind, mark_stream
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableKind, TableSchema

if TYPE_CHECKING:
    from millstream.lake.postgres.target import Connection


_NO_CUT: Final = Seq(0)


@dataclass(frozen=True, slots=True)
class Loaded:
    """One table's records of a batch."""

    schema: TableSchema
    """Schema of the last record."""
    batches: list[Versioned]


@dataclass(frozen=True, slots=True)
class LandedTable:
    """One table's result: a commit, or the error."""

    commit: TableCommit | None
    error: Exception | None = None


def land(
    target: PostgresTarget,
    tables: Mapping[TableId, Callable[[], Loaded]],
    upto: Seq,
    *,
    cut: Seq = _NO_CUT,
    copying: Collection[TableId] = (),
    live: Collection[TableId] = (),
    history_only: Collection[TableId] = (),
) -> dict[TableId, LandedTable]:
    """Land records up to `upto`, exactly once, in one transaction.

    Records at or below a table's position are dropped. So other batch bounds, a second call, and a
    call by a task that was thought dead are harmless.

    Args:
        tables: by table, a function that loads its records; one table's at a time are in memory.
        copying: tables whose copy isn't complete yet (see `merge_current`).
        live: tables that the source still has.
        history_only: tables whose rows weren't copied, and so have no `current`.

    Returns:
        For each table a commit or its own error; the same error for all if the transaction failed.

    Raises:
        LakeError (`destination_went_back`): the last cut is gone; a batch behind it would leave a gap.
    """
    import psycopg

    landed: dict[TableId, LandedTable] = {}
    try:
        with target.connect("landing") as connection, connection.transaction():
            _wait_for_others(connection, target)
            _check_cut(connection, target, cut)
            for table_id, load in sorted(tables.items()):
                try:
                    with connection.transaction():
                        commit = _land_one(
                            connection, target, load(), upto, copying=copying, live=live, history_only=history_only
                        )
                    landed[table_id] = LandedTable(commit)
                except psycopg.Error as error:
                    if connection.broken:
                        raise
                    landed[table_id] = LandedTable(None, translate(error, target.place))
                except Exception as error:  # noqa: BLE001 - whatever it is, it is this table's alone
                    landed[table_id] = LandedTable(None, error)
            failpoints.hit("lake.before_postgres_commit")
        failpoints.hit("lake.after_postgres_commit")
    except psycopg.Error as error:
        return _all_failed(tables, translate(error, target.place))
    except MillstreamError as error:
        if error.code == "destination_went_back":
            raise
        return _all_failed(tables, error)
    return landed


def begin(target: PostgresTarget, schemas: Iterable[TableSchema], sources: Collection[tuple[int, str]] = ()) -> None:
    """Prepare a destination for a pipeline: make its own tables, and migrate event tables to this version's layout.

    Args:
        sources: system identifier and database of each source of the stream.

    Raises:
        LakeError (`destination`): the database can't be used, or is the one that the stream captures.
    """
    with target.connect("landing") as connection:
        check_is_another(connection, target, sources)
        check_can_merge(connection, target)
        prepare(connection, target.place)
        with translated(target.place):
            mark_stream(connection, target)
        if "changes" in target.views:
            bring_up_all(connection, target, [schema for schema in schemas if schema.kind is not TableKind.RAW])


def look(target: PostgresTarget, sources: Collection[tuple[int, str]], schemas: Iterable[TableSchema] = ()) -> str:
    """Check whether a pipeline could land there, and describe the result; makes nothing. Arguments as of `begin`.

    Raises:
        LakeError (`destination`): it couldn't; the hint names what to run.
    """
    with target.connect("look") as connection:
        check_is_another(connection, target, sources)
        check_can_merge(connection, target)
        with translated(target.place):
            row = connection.execute(
                "SELECT current_setting('transaction_read_only') = 'on', EXISTS (SELECT FROM pg_namespace WHERE nspname = 'millstream_lake'), "
                "quote_ident(current_database()), quote_ident(current_user), current_setting('server_encoding'), "
                "ARRAY(SELECT p FROM unnest(ARRAY['CREATE', 'TEMP']) p WHERE NOT has_database_privilege(current_database(), p)), "
                "ARRAY(SELECT quote_ident(nspname) FROM pg_namespace WHERE nspname = ANY(%s) AND NOT has_schema_privilege(oid, 'CREATE'))",
                [_namespaces(target, schemas)],
            ).fetchone()
    assert row is not None, "a SELECT of values has a row"
    is_read_only, is_made, database, user, encoding, lacks, closed = row
    if is_read_only:
        raise LakeError(
            f"{target.place} rejects writes",
            code="destination_unavailable",
            hint="Name the primary, or end its read-only mode.",
        )
    if encoding != "UTF8":
        raise LakeError(
            f"{target.place} keeps text as {encoding}: it can't store all characters",
            code="destination",
            hint="Create it with encoding UTF8.",
        )
    grants = [f"GRANT {', '.join(lacks)} ON DATABASE {database} TO {user};"] if lacks else []
    grants += [f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {user};" for schema in closed]
    if grants:
        raise LakeError(
            f"{target.place}: {user} lacks privileges that are needed", code="destination", hint=" ".join(grants)
        )
    return f"{target.place} can be written" + ("" if is_made else "; the first run makes what it needs")


def _namespaces(target: PostgresTarget, schemas: Iterable[TableSchema]) -> list[str]:
    """Return the schemas for tables, as far as tables are known; before that, those of `public`."""
    known = [schema for schema in schemas if schema.kind is TableKind.TABLE]
    views = [view for view in target.views if view == "current" or known]
    found = {place_of(target, view, schema).namespace for view in views for schema in known}
    if not known and "current" in target.views:
        found.add(target.schema_prefix + "public")
    return sorted(found | {"millstream_lake"})


def check_is_another(connection: Connection, target: PostgresTarget, sources: Collection[tuple[int, str]]) -> None:
    """Reject the database that is captured: landed rows would be captured, and land again."""
    with translated(target.place):
        row = connection.execute("SELECT system_identifier, current_database() FROM pg_control_system()").fetchone()
    if row is not None and (int(row[0]), str(row[1])) in sources:
        raise LakeError(
            f"{target.place} is the database that stream {target.stream_name} captures",
            code="destination",
            hint="Have its tables land in another database, of the same server if you like.",
        )


def _wait_for_others(connection: Connection, target: PostgresTarget) -> None:
    connection.execute(
        "INSERT INTO millstream_lake.positions VALUES (%s, %s, 0, 0) ON CONFLICT DO NOTHING", list(target.owner)
    )
    connection.execute(
        "SELECT n FROM millstream_lake.positions WHERE (stream, pipeline, table_id) = (%s, %s, 0) FOR UPDATE",
        list(target.owner),
    )


def _check_cut(connection: Connection, target: PostgresTarget, cut: Seq) -> None:
    row = connection.execute(
        "SELECT n FROM millstream_lake.cuts WHERE (stream, pipeline) = (%s, %s)", list(target.owner)
    ).fetchone()
    has = 0 if row is None else int(row[0])
    if has < cut:
        raise LakeError(
            f"{target.place} had stream {target.stream_name} up to {cut}, and now has it only up to {has}",
            code="destination_went_back",
            has=has,
        )


def _land_one(
    connection: Connection,
    target: PostgresTarget,
    loaded: Loaded,
    upto: Seq,
    *,
    copying: Collection[TableId],
    live: Collection[TableId],
    history_only: Collection[TableId],
) -> TableCommit:
    schema = loaded.schema
    if schema.source == 0:
        # Writers see a new column only when they need one, so that versions alternate among an
        # application's records.
        schema = max([schema, *(version for version, _ in loaded.batches)], key=lambda version: version.version)
    table_id = schema.table_id
    row = connection.execute(
        "SELECT n FROM millstream_lake.positions WHERE (stream, pipeline, table_id) = (%s, %s, %s)",
        [*target.owner, int(table_id)],
    ).fetchone()
    stands = Seq(0 if row is None else row[0])
    batches = [
        (version, batch.filter(pc.greater(batch.column("__seq"), int(stands)))) for version, batch in loaded.batches
    ]
    # A definition may be the only sign of a new column that has a default in older rows.
    fills = any(batch.num_rows and one.kind is TableKind.DEFINITION for one, batch in batches) and any(
        column.filled is not None for column in schema.columns
    )
    batches = [(one, batch) for one, batch in batches if batch.num_rows and one.kind is not TableKind.DEFINITION]
    has_rows = "current" in target.views and has_current(schema) and table_id not in history_only
    if "current" in target.views and table_id not in history_only:
        _check_names(target, schema, loaded.batches, stands)
    rows = sum(batch.num_rows for _, batch in batches)
    begins_anew = is_emptied(batches)

    def takes(view: TargetView) -> bool:
        return begins_anew or not lacks_records(connection, target, view, table_id, stands)

    if batches:
        leave_behind(connection, target, table_id)
    if batches and "changes" in target.views and takes("changes"):
        append_events(connection, ensure_events(connection, target, schema), batches)
        is_complete(connection, target, "changes", table_id, EVENTS_LAYOUT)
    if has_rows and (batches or fills) and takes("current"):
        merge_current(connection, target, schema, batches, copying=table_id in copying, live=live)
        is_complete(connection, target, "current", table_id, ROWS_LAYOUT)
    # A definition alone leaves the table without a position, as it leaves its views without tables.
    if upto > stands and (batches or stands):
        connection.execute(
            "INSERT INTO millstream_lake.positions VALUES (%s, %s, %s, %s) ON CONFLICT (stream, pipeline, table_id) "
            "DO UPDATE SET n = excluded.n",
            [*target.owner, int(table_id), int(upto)],
        )
    return TableCommit(
        table_id=table_id,
        name=schema.full_name,
        folder=folder_of(schema),
        view="history",
        version=0,
        rows=rows,
        n=max(upto, stands),
    )


def _check_names(target: PostgresTarget, schema: TableSchema, batches: Sequence[Versioned], after: Seq) -> None:
    """Refuse a table whose columns were renamed without a copy, while another lake followed their numbers.

    Raises:
        LakeError (`lake_schema_conflict`): no later copy brings the new names.
    """
    renamed = emptied = int(after)
    for version, batch in batches:
        if version.kind is TableKind.DEFINITION:
            renamed = max(
                renamed, pc.max(batch.filter(batch.column("__before").is_valid()).column("__seq")).as_py() or 0
            )
        else:
            voids = pc.and_(pc.equal(batch.column("__op"), "t"), pc.is_null(batch.column("__commit_index")))
            emptied = max(emptied, pc.max(batch.filter(voids).column("__seq")).as_py() or 0)
    if renamed > emptied:
        raise LakeError(
            f"columns of {schema.full_name} were renamed without a copy, which {target.place} can't follow",
            code="lake_schema_conflict",
            hint=f"Run `millstream tables copy {quote(schema.full_name)}`.",
            table=schema.full_name,
        )


def _all_failed(tables: Iterable[TableId], error: Exception) -> dict[TableId, LandedTable]:
    return {table_id: LandedTable(None, error) for table_id in tables}
