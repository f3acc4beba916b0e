"""A stream's tables as a status shows them: their states, figures and folders in the lake."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from millstream.app.status_words import TRIED_AGAIN
from millstream.catalog.pipeline_tables import FoldFailures, LastFigures, QuarantineFacts, TableFigures
from millstream.home.home import Home
from millstream.home.paths import PIPELINE
from millstream.model.ids import StreamId, TableId
from millstream.model.names import qualified_name
from millstream.model.schema import TableKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from millstream.catalog import Catalog, TableRow
    from millstream.config.model import StreamConfig

    Paths = Callable[[TableRow], dict[str, str]]
    """Returns the path of each of a table's views in the lake, by the view's name."""


def quarantine_of(catalog: Catalog, stream: StreamId) -> QuarantineFacts:
    """Return the facts of the tables that the lake's pipeline has quarantined."""
    return QuarantineFacts(catalog, stream, PIPELINE)


def fold_failures_of(catalog: Catalog, stream: StreamId) -> FoldFailures:
    """Return the errors of the tables that the lake's pipeline fails to fold."""
    return FoldFailures(catalog, stream, PIPELINE)


def shown_tables(catalog: Catalog, stream: StreamId, held: Collection[TableId]) -> list[TableRow]:
    """Return the tables to show: those that the source has, and others that are quarantined in the lake.

    A table that was dropped at the source holds the log until the lake has the rest of it: an operator
    has to see it, and fix it.
    """
    from millstream.catalog import TableState

    rows = catalog.tables(stream, gone=True)
    return [row for row in rows if row.state is not TableState.GONE or row.id in held]


def lake_paths(home: Home, config: StreamConfig | None, catalog: Catalog, name: str, stream: StreamId) -> Paths:
    """A function that returns a table's folders in the lake, by view: those that exist, and all in an object store.

    None exist if the tables are in PostgreSQL or lie where a catalog says, or if the stream's configuration isn't known.
    """
    from millstream.home.config_mapping import lake_layout
    from millstream.lake.layout import folder_name, folders_in

    if config is None or config.lake.format == "postgres" or config.lake.lies_in_catalog:
        return lambda _row: {}
    root, views = lake_layout(home, name, config, stream).root, config.lake.shown

    names = catalog.newest_names(stream)
    # Listed: to ask for each table's folder takes several times as long.
    folders = {view: None if "://" in root else folders_in(f"{root}/{view}") for view in views}

    def paths(row: TableRow) -> dict[str, str]:
        named = names.get(row.id)
        folder = (
            folder_name(named.namespace, named.name, named.folder_id) if named else folder_name(row.namespace, row.name)
        )
        return {view: f"{root}/{view}/{folder}" for view, there in folders.items() if there is None or folder in there}

    return paths


def tables_of(
    catalog: Catalog,
    stream: StreamId,
    captured: dict[str, Any],
    landing: dict[str, Any],
    paths: Paths = lambda _row: {},
) -> list[dict[str, Any]]:
    """Return a stream's tables, with live figures: capture's progress and the pipeline's."""
    held = quarantine_of(catalog, stream).all()
    landed = {facts["table_id"]: facts for facts in landing.get("tables", ())}
    changed = {table_id: facts.get("changed_us") for table_id, facts in landed.items()}
    figures_us, figures = LastFigures(catalog, stream, PIPELINE).all()
    if not landed:
        changed = {int(table_id): last.changed_us for table_id, last in figures.items()}
    # A fold that fails quarantines a table too.
    aside = fold_failures_of(catalog, stream).all() | held
    failed, trying = dict(landing.get("quarantined", {})), dict(landing.get("trying", {}))
    paused = catalog.paused_copies(stream)
    return [
        table_facts(row, captured, landed.get(int(row.id)), aside.get(row.id), failed, trying, paused=row.id in paused)
        | {
            "last_change": _moment(changed.get(int(row.id))),
            "paths": paths(row),
            "last_figures": None if landed else _last(figures.get(row.id), figures_us),
        }
        for row in shown_tables(catalog, stream, held)
        if row.kind is TableKind.TABLE
    ]


def table_facts(
    row: TableRow,
    captured: dict[str, Any],
    landed: dict[str, Any] | None,
    held: dict[str, Any] | None,
    failed: dict[str, str],
    trying: dict[str, str] | None = None,
    *,
    paused: bool = False,
) -> dict[str, Any]:
    """Return the facts of one table.

    Its state is `quarantined` if capture or the lake has quarantined it, and the reason names which; `paused`
    or `copy_held` if its copy is. A table that the lake retries keeps its state, with the reason. `captured`: whether its rows
    come from a source; otherwise applications write them.
    """
    name = qualified_name(row.namespace, row.name)
    state, reason = row.shown_state, row.reason
    if paused and state in {"copy_requested", "copying"}:
        state, reason = "paused", "its copy waits for `millstream tables resume`"
    again = (trying or {}).get(name) or (trying or {}).get(f"{row.namespace}.{row.name}")
    reason = f"{TRIED_AGAIN}{again}" if again else reason
    lake_reason = (held or {}).get("reason") or failed.get(name) or failed.get(f"{row.namespace}.{row.name}")
    if lake_reason:
        state, reason = "quarantined", f"lake: {lake_reason}"
    # Records of a table that is quarantined wait for an operator, and aren't counted in history.
    lag = None if state == "quarantined" else landed
    copies = captured.get("copies") or {}
    return {
        "name": name,
        "id": int(row.id),
        "state": state,
        "reason": reason,
        "hint": (held or {}).get("hint") or row.details.get("hint", ""),
        "captured": row.is_captured,
        "shard": int(row.shard),
        "copy": copies.get(name),
        "fold_lag_s": None if lag is None else lag["fold_lag_s"],
        "fold_lag_records": None if lag is None else lag["fold_lag_records"],
        "landed_rows": None if landed is None else landed["rows"],
        "rows_per_s": None if landed is None else landed["rows_per_s"],
        "live_bytes": None if landed is None else landed["live_bytes"],
        "disk_bytes": None if landed is None else landed["disk_bytes"],
        "disk_factor": None if landed is None else _disk_factor(landed),
    }


def _moment(us: int | None) -> str | None:
    """Return a time in µs since 1970 as ISO text, in UTC."""
    if us is None:
        return None
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)).isoformat(timespec="milliseconds")


def _last(figures: TableFigures | None, us: int) -> dict[str, Any] | None:
    if figures is None:
        return None
    facts = asdict(figures)
    del facts["changed_us"]  # `last_change` has it
    return {"as_of": _moment(us), **facts}


def _disk_factor(landed: dict[str, Any]) -> float | None:
    """Return bytes on disk over live bytes, of `current`."""
    live, disk = landed["live_bytes"], landed["disk_bytes"]
    return round(disk / live, 2) if live else None
