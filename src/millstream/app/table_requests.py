"""An operator's requests for a table: retry it, copy it again, pause its copy.

The running parts see them within seconds.
"""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from millstream.app.table_status import fold_failures_of, quarantine_of, shown_tables
from millstream.catalog import COPY_HELD, TableState
from millstream.catalog.rebuilds import Rebuilds
from millstream.errors import UsageError
from millstream.home.paths import PIPELINE
from millstream.model.ids import StreamId
from millstream.model.names import parse_qualified_name
from millstream.model.schema import TableKind

if TYPE_CHECKING:
    from millstream.catalog import Catalog, TableRow


def retry_table(catalog: Catalog, stream: StreamId, table: str, *, buffer: str | None = None) -> str:
    """Request that a table that was quarantined is picked up again; return what will happen.

    Args:
        table: its name; `_messages` for logical messages.
        buffer: the name of the write buffer that the stream reads from, if it does.

    Raises:
        UnknownTable: the stream has none of that name.
        UsageError: it isn't quarantined, or applications write a table of the same name.
    """
    from millstream.lake.layout import MESSAGES
    from millstream.writers.buffer_consumer import ask_again

    name, held = parse_qualified_name(table), quarantine_of(catalog, stream).all()
    done = []
    if buffer is not None and ask_again(catalog, stream, buffer, table):
        done.append(
            "its missing rows are read from the write buffer within seconds, or when the reader runs next; if that fails, it is held again"
        )
    # A table dropped at the source may wait in the lake under a name that another table has now.
    rows = [row for row in shown_tables(catalog, stream, held) if (row.namespace, row.name) == name]
    if not rows and table == MESSAGES:
        rows = [row for row in catalog.tables(stream) if row.kind is TableKind.MESSAGES]
    if not rows and not done:
        rows = [catalog.find_table(stream, *name)]
    if any(row.is_captured for row in rows) and any(row.source == 0 for row in rows):
        raise UsageError(
            f"applications write a table {table}, too: both would have one name in the lake",
            hint="Rename the table at the source; it is captured under its new name.",
        )
    for row in rows:
        if quarantine_of(catalog, stream).request_retry(row.id):
            done.append("the pipeline tries it again, from where it stopped")
        if row.state is TableState.QUARANTINED and catalog.set_state(
            row.id, TableState.COPY_REQUESTED, "asked for by `tables retry`", only_from=[TableState.QUARANTINED]
        ):
            catalog.resume_copy(stream, row.id)
            done.append("capture takes it up again, beginning with a copy")
    if not done and any(row.id in fold_failures_of(catalog, stream).all() for row in rows):
        return "its records land; the pipeline tries its fold again within minutes, or when it runs next"
    if not done:
        raise UsageError(
            f"{table} is not quarantined; it is {rows[0].shown_state}", hint="`millstream tables` shows states."
        )
    return "; ".join(dict.fromkeys(done))


def copy_table(catalog: Catalog, stream: StreamId, table: str, *, held: str = "") -> str:
    """Request a new copy of a table's rows, which ends a pause; return what will happen.

    Args:
        held: the reason why the copy may not begin until it is requested again; empty if it may.

    Raises:
        UnknownTable: the stream has none of that name.
        UsageError: it has no key to copy it by, or no source, or its older records are being deleted.
    """
    row = catalog.find_table(stream, *parse_qualified_name(table))
    if not row.is_captured:
        raise UsageError(f"applications write {table}: there is nothing to copy it from")
    erasing = Rebuilds(catalog, stream, PIPELINE).waiting()
    if not held and any(request.erases and request.table_id == row.id for request in erasing):
        # The copy's rows would be deleted with the older ones.
        raise UsageError(
            f"the older records of {table} are being deleted: its copy begins once they are gone",
            hint=f"If the command that deletes them was ended, run it again: `millstream tables copy {quote(table)} --forget`.",
        )
    states = [TableState.STREAMING, TableState.COPYING, TableState.COPY_REQUESTED, TableState.QUARANTINED]
    reason, details = held or "asked for by `tables copy`", {"cause": COPY_HELD} if held else None
    if not catalog.set_state(row.id, TableState.COPY_REQUESTED, reason, details=details, only_from=states):
        raise UsageError(
            f"{table} is {row.state.value} and can't be copied: {row.reason}",
            hint="Give the table a primary key or a replica identity, by which it is copied.",
        )
    catalog.resume_copy(stream, row.id)
    return "it will be copied by the running capture, or when it runs next"


def pause_table(catalog: Catalog, stream: StreamId, table: str) -> str:
    """Pause a table's copy, in every later run, until `resume_table`; return what will happen.

    Its changes go on entering the log. Rows that were read already enter too: the pause takes effect a
    moment later.

    Raises:
        UnknownTable: the stream has none of that name.
        UsageError: none of its copies is running, or it is held.
    """
    row = catalog.find_table(stream, *parse_qualified_name(table))
    if row.is_copy_held:
        raise _held(table, row)
    if not catalog.pause_copy(stream, row.id):
        raise UsageError(
            f"{table} is {row.state.value}: there is no copy to pause", hint="`millstream tables` shows states."
        )
    return "its copy is paused; its changes go on entering the log"


def resume_table(catalog: Catalog, stream: StreamId, table: str) -> str:
    """Resume a table's copy where it stopped; return what will happen.

    Raises:
        UnknownTable: the stream has none of that name.
        UsageError: it isn't paused, or is held.
    """
    row = catalog.find_table(stream, *parse_qualified_name(table))
    if row.is_copy_held:
        raise _held(table, row)
    if not catalog.resume_copy(stream, row.id):
        raise UsageError(f"the copy of {table} is not paused", hint="`millstream tables` shows states.")
    return "its copy goes on by the running capture, or when it runs next"


def _held(table: str, row: TableRow) -> UsageError:
    return UsageError(
        f"the copy of {table} is held, not paused: {row.reason}",
        hint=f"Run `millstream tables copy {quote(table)}` when the source can bear it.",
    )
