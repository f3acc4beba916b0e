"""Views that lack records which their tables have landed: `views` was changed after the first run.

A table has one position, whatever its views. If records land without a view, the view's table in the destination is marked
as left behind. A start without `current` marks the stream, too, for tables that have no rows there so far. A view that lacks
records gets nothing until a record empties its table: a TRUNCATE, or the first one of a copy. From there on it is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, get_args

import pyarrow.compute as pc

from millstream.lake.postgres import own_tables
from millstream.lake.postgres.target import PostgresTarget, TargetView, translated
from millstream.lake.postgres.texts import Versioned
from millstream.model.ids import TableId
from millstream.model.positions import Seq

if TYPE_CHECKING:
    from millstream.lake.postgres.target import Connection

_LEFT_BEHIND: Final = 0
"""Layout of a table whose view lacks records. No table is made with it."""


def mark_stream(connection: Connection, target: PostgresTarget) -> None:
    """Mark a stream without `current`: tables that land from now on and have no rows there lack them."""
    if "current" not in target.views and not _is_marked(connection, target):
        own_tables.register(connection, target, _mark(target), 0, layout=_LEFT_BEHIND)


def leave_behind(connection: Connection, target: PostgresTarget, table_id: TableId) -> None:
    """Mark a table's views that aren't configured: they lack the records that land now."""
    for view in get_args(TargetView):
        if view not in target.views:
            connection.execute(
                "UPDATE millstream_lake.tables SET layout = %s"
                " WHERE (view, stream, pipeline, table_id) = (%s, %s, %s, %s) AND layout <> %s",
                [_LEFT_BEHIND, view, *target.owner, int(table_id), _LEFT_BEHIND],
            )


def lacks_records(
    connection: Connection, target: PostgresTarget, view: TargetView, table_id: TableId, stands: Seq
) -> bool:
    """Return whether a view of a table lacks records of those that the table has landed."""
    found = connection.execute(
        "SELECT layout FROM millstream_lake.tables WHERE (view, stream, pipeline, table_id) = (%s, %s, %s, %s)",
        [view, *target.owner, int(table_id)],
    ).fetchall()
    if not found:
        return stands > 0 and view == "current" and _is_marked(connection, target)
    return all(layout == _LEFT_BEHIND for (layout,) in found)


def _mark(target: PostgresTarget) -> own_tables.ViewPlace:
    """Return the name of no relation, under which the stream's mark stands."""
    return own_tables.ViewPlace("current", "millstream_lake", "/".join(target.owner))


def _is_marked(connection: Connection, target: PostgresTarget) -> bool:
    return own_tables.registered_at(connection, _mark(target)) is not None


def is_emptied(batches: Sequence[Versioned]) -> bool:
    """Return whether one of the records empties the table."""
    return any(pc.any(pc.equal(batch.column("__op"), "t")).as_py() for _, batch in batches)


def is_complete(
    connection: Connection, target: PostgresTarget, view: TargetView, table_id: TableId, layout: int
) -> None:
    """Take the mark off a table that was emptied."""
    connection.execute(
        "UPDATE millstream_lake.tables SET layout = %s WHERE (view, stream, pipeline, table_id) = (%s, %s, %s, %s)"
        " AND layout = %s",
        [layout, view, *target.owner, int(table_id), _LEFT_BEHIND],
    )


def lacking(
    target: PostgresTarget, tables: Collection[TableId], *, without_rows: Collection[TableId]
) -> dict[TableId, tuple[Seq, TargetView]]:
    """Return the tables with a configured view that lacks records: their positions, and the view.

    Args:
        tables: those that may have views.
        without_rows: those of them that have no `current`.
    """
    found: dict[TableId, tuple[Seq, TargetView]] = {}
    with target.connect("views") as connection, translated(target.place):
        if own_tables.is_missing(connection):
            return found
        rows = connection.execute(
            "SELECT table_id, n FROM millstream_lake.positions WHERE (stream, pipeline) = (%s, %s) AND table_id <> 0 AND n > 0",
            list(target.owner),
        ).fetchall()
        for table_id, n in rows:
            if table_id in tables:
                for view in target.views:
                    has_none = view == "current" and table_id in without_rows
                    if not has_none and lacks_records(connection, target, view, TableId(table_id), Seq(n)):
                        found[TableId(table_id)] = Seq(n), view
    return found
