"""Rebuilds of lake tables, and replays of record ranges into tables of their own, on an operator's request.

A rebuild is the pipeline's work, because nothing else may fold the table at the same time. A request is
left in the catalog, and the running pipeline takes it. If none runs, the caller takes the pipeline's role
and does the work itself, without Spark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from millstream.app.log_readers import open_reader
from millstream.app.table_requests import copy_table
from millstream.app.table_status import quarantine_of
from millstream.catalog import TableState
from millstream.catalog.rebuilds import RebuildRequest, Rebuilds
from millstream.errors import HomeBusy, MillstreamError, UnknownTable, UsageError, error_of
from millstream.home.config_mapping import lake_layout
from millstream.home.home import Home
from millstream.home.paths import PIPELINE
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.model.positions import Seq
from millstream.processes.role_locks import RoleLock, holder

if TYPE_CHECKING:
    from millstream.catalog import Catalog, TableRow
    from millstream.config.model import StreamConfig
    from millstream.lake.commit_cuts import Cut
    from millstream.lake.layout import LakeLayout, View
    from millstream.lake.replay import TableReplay
    from millstream.model.ids import TableId
    from millstream.model.schema import TableSchema

From = Literal["history", "source"]
_LOOK_EVERY_S: Final = 0.2
_RESTART_S: Final = 60.0
"""How long to wait for the pipeline's restart while `millstream run` runs."""
COPYING: Final = frozenset({TableState.COPY_REQUESTED, TableState.COPYING})


@dataclass(frozen=True, slots=True)
class RebuiltView:
    """The result for one view."""

    view: str
    rows: int | None
    """Rows of the new table; None if the copy will bring them."""
    aside: str | None
    """Where the replaced damaged table is kept: the folder that it was moved to, or in words."""


@dataclass(frozen=True, slots=True)
class _Target:
    """One table of one stream's lake."""

    home: Home
    catalog: Catalog
    stream: str
    layout: LakeLayout
    row: TableRow
    schema: TableSchema
    cut: Cut

    @property
    def rebuilds(self) -> Rebuilds:
        return Rebuilds(self.catalog, self.layout.stream_id, PIPELINE)


def rebuild_table(
    home: Home,
    table: str,
    *,
    stream: str | None = None,
    origin: From = "history",
    views: Sequence[str] = (),
    say: Callable[[str], None] = lambda _text: None,
) -> list[RebuiltView]:
    """Rebuild views of a table and return when they are done; a rebuild from the source returns once its copy is requested.

    Readers see the old table until one commit replaces it; from the source, that commit comes when the
    copy is complete.

    Args:
        origin: `history`: from the records in the lake. `source`: by a copy of the table's rows; damaged
            tables are moved aside first, history included.
        views: `current`, `scd2`, `merged`; if empty, those of the first two that the stream's `views` name.

    Raises:
        UnknownTable: the lake or the catalog has no table of that name.
        UsageError: it is being copied, it has no such view, or it can't be copied.
        LakeError (`lake_history_lost`): history can't provide it; the hint says what can.
        MillstreamError: it failed, with the pipeline's own reason.
    """
    home.prepare()
    name, config = home.stream_config(stream)
    if "merged" in views:
        return _merged(home, name, config, table, views, origin, say)
    with home.open_catalog() as catalog:
        target = _find(home, catalog, name, config, table)
        wanted = _views(target, config, views)
        if origin == "source":
            return _from_source(target, table, wanted, say)
        if target.row.state in COPYING:
            raise UsageError(
                f"{table} is being copied: its views are built from the copy when that is whole",
                hint="`millstream tables` shows how far it is.",
            )
        from millstream.lake.damaged_tables import check_history

        check_history(target.layout, target.schema)
        target.rebuilds.ask(target.row.id, wanted)
        return _await(target, wanted, say)


def forget_table(
    home: Home, table: str, *, stream: str | None = None, say: Callable[[str], None] = lambda _text: None
) -> int:
    """Delete the older records and rows of a captured table, and request the copy that brings its rows as they are now.

    Its history, versions and `current` in the lake go at once, with all files, and its dead letters. The log's
    segments go by retention. Until the copy has landed, queries of the table fail. If this is interrupted, the table's
    copy is held, and the same call goes on.

    Returns:
        The number of dead letters that were dropped.

    Raises:
        UnknownTable: the lake or the catalog has no table of that name.
        UsageError: it is being copied, it can't be copied, or the lake is in PostgreSQL.
        HomeBusy: another call deletes a table's older records.
        MillstreamError: it failed, with the pipeline's own reason.
    """
    from millstream.capture.column_rules.rows_before_rules import note_forgotten

    home.prepare()
    name, config = home.stream_config(stream)
    if config.lake.format == "postgres":
        raise UsageError(
            f"the lake of {name} is in PostgreSQL, where Millstream keeps no older rows of {table}",
            hint=f"Delete them there, and run `millstream tables copy {quote(table)}`.",
        )
    # A second call would delete the rows of the first one's copy.
    with RoleLock.take(home.run_folder, "forget"), home.open_catalog() as catalog:
        target = _find(home, catalog, name, config, table)
        row, stream_id = target.row, target.layout.stream_id
        if row.state is TableState.COPYING:
            raise UsageError(
                f"{table} is being copied: that copy would bring back what it has read",
                hint="Run the command again when the copy is whole; `millstream tables` shows how far it is.",
            )
        # A copy that began before the files are gone would go with them.
        copy_table(
            catalog, stream_id, table, held=f"its older records are deleted by `tables copy {quote(table)} --forget`"
        )
        views = ("history", "current", "scd2")
        target.rebuilds.ask(row.id, views, before_copy=True, erases=True)
        _await(target, views, say)
        note_forgotten(catalog, stream_id, row.id, time.time_ns() // 1000)
        dropped = _drop_dead_letters(home, name, target.row)
        copy_table(catalog, stream_id, table)
    return dropped


def _drop_dead_letters(home: Home, stream: str, row: TableRow) -> int:
    """Drop all consumers' dead letters of a table; return how many."""
    from millstream.app.open_home import OpenHome
    from millstream.client.consumers import dead_letters

    table, dropped = qualified_name(row.namespace, row.name), 0
    with OpenHome(home) as opened:
        consumers = opened.consumers(stream)
        for consumer in consumers.list():
            name = consumer["name"]
            ids = [one["id"] for one in dead_letters(consumers, name) if one["record"]["table"] == table]
            # Also if there are none: those that were settled are in the consumers' file until a drop replaces it.
            dropped += len(consumers.drop(name, ids)["results"])
    return dropped


def replay_table(
    home: Home, table: str, *, begin: str | None, end: str | None, into: str, stream: str | None = None
) -> TableReplay:
    """Write the records of a table between two moments into a new Delta table; see `millstream.lake.replay`.

    Args:
        begin: a time or a token; records after it are taken; None: from the first one that the lake has.
        end: a time or a token, inclusive; None: the lake's last cut. For both, a token inside an
            operation stands for the last one before it.
        into: a new name among the stream's replays, or a path.

    Raises:
        PositionError (`invalid_time`, `invalid_token`, `time_from_future`): a bound can't be parsed, or is in the future.
        MillstreamError: as `replay_range`.
    """
    from millstream.lake.replay import replay_range

    home.prepare()
    name, config = home.stream_config(stream)
    with home.open_catalog() as catalog:
        layout = lake_layout(home, name, config, catalog.stream(name).id)
    cut = _last_cut(layout, name)
    after = None if begin is None else _position(layout, begin)
    upto = cut.n if end is None else _position(layout, end)
    with RoleLock.take(home.run_folder, "replay"):
        return replay_range(layout, cut, table, after=after, upto=upto, into=into)


def _position(layout: LakeLayout, text: str) -> Seq:
    from millstream.errors import PositionError
    from millstream.lake.commit_cuts import cut_at_time
    from millstream.lake.operation_ends import whole_upto
    from millstream.model.as_of_parsing import parse_as_of

    now = datetime.now(UTC)
    moment = parse_as_of(text, layout.stream_id, now=now)
    if not isinstance(moment, datetime):
        return whole_upto(layout, moment.linear())
    if moment > now:
        raise PositionError(
            f"{moment.isoformat()} lies in the future", code="time_from_future", hint=f"It is {now.isoformat()} now."
        )
    cut = cut_at_time(layout, moment)
    return Seq(0) if cut is None else cut.n


def _last_cut(layout: LakeLayout, stream: str) -> Cut:
    from millstream.lake.commit_cuts import last_cut

    cut = last_cut(layout)
    if cut is None:
        raise UsageError(
            f"nothing of {stream} has landed in the lake yet", hint="`millstream status` shows how far it is."
        )
    return cut


def _find(home: Home, catalog: Catalog, stream: str, config: StreamConfig, table: str) -> _Target:
    stream_id = catalog.stream(stream).id
    layout = lake_layout(home, stream, config, stream_id)
    row = catalog.find_table(stream_id, *parse_qualified_name(table))
    cut = _last_cut(layout, stream)
    schema = catalog.latest_schemas(stream_id).get(row.id)
    if schema is None or all(found.table_id != row.id for found in cut.tables.values()):
        earlier = {layout.table_path("history", known).rpartition("/")[2] for known in catalog.schemas_of(row.id)}
        if taken := [found.name for folder, found in cut.tables.items() if folder in earlier]:
            raise UnknownTable(
                f"what the lake may have of {table} lies under its earlier name, {taken[0]}, which another table has now",
                hint=f"Change a row of {table} at the source, and wait until that has landed: it brings the older records along.",
                table=table,
            )
        raise UnknownTable(f"nothing of {table} has landed in the lake yet", table=table)
    return _Target(home, catalog, stream, layout, row, schema, cut)


def _views(target: _Target, config: StreamConfig, asked: Sequence[str]) -> tuple[str, ...]:
    named = folded_views(config.lake.shown, target.schema)
    for view in asked:
        if view not in named:
            name = f"{target.schema.namespace}.{target.schema.name}"
            raise UsageError(f"{name} has no {view}", hint=f"It has: history{''.join(f', {n}' for n in named)}.")
    wanted = tuple(asked) or tuple(named)
    if not wanted:
        raise UsageError(
            f"{target.schema.namespace}.{target.schema.name} has history only: no view is built from it",
            hint="Give the table a primary key, or REPLICA IDENTITY FULL.",
        )
    return wanted


def folded_views(views: Collection[str], schema: TableSchema) -> list[str]:
    """Return those of some views that are folded of a table's history."""
    from millstream.lake.folded.scd2_table import has_versions
    from millstream.lake.layout import has_current

    has = {"current": has_current(schema), "scd2": has_versions(schema)}
    return [view for view in has if view in views and has[view]]


def _merged(
    home: Home,
    stream: str,
    config: StreamConfig,
    table: str,
    views: Sequence[str],
    origin: From,
    say: Callable[[str], None],
) -> list[RebuiltView]:
    """Rebuild `merged`, which comes from the logs of all regions, and then the other views."""
    if "merged" not in config.lake.shown:
        raise UsageError(
            f"the lake of {stream} has no merged", hint=f'Add "merged" to `views` in [streams.{stream}.lake].'
        )
    if origin == "source":
        raise UsageError(
            f"merged comes from the regions' logs, and {table} has no source for it", hint="Leave --from out."
        )
    from millstream.regions.landed_state import rebuild_landed

    with home.open_catalog() as catalog:
        layout = lake_layout(home, stream, config, catalog.stream(stream).id)
    say("merged is built")
    rows, aside = rebuild_landed(home, stream, layout, table)
    others = [view for view in views if view != "merged"]
    return [
        *(rebuild_table(home, table, stream=stream, views=others, say=say) if others else []),
        RebuiltView("merged", rows, aside),
    ]


def _from_source(target: _Target, table: str, views: Sequence[str], say: Callable[[str], None]) -> list[RebuiltView]:
    """Request the copy first: from then on nothing folds the table. Then move the damaged tables aside."""
    from millstream.lake.damaged_tables import damage_of

    copy_table(target.catalog, target.layout.stream_id, table)
    damaged = {
        view: damage
        for view in ("history", *views)
        if (damage := damage_of(target.layout, cast("View", view), target.schema)) is not None
    }
    held = quarantine_of(target.catalog, target.layout.stream_id).all().get(target.row.id, {})
    if held.get("code") == "lake_schema_conflict":
        for view in {"history", "scd2"} & {"history", *views}:
            damaged.setdefault(view, held["reason"])
    for view, damage in damaged.items():
        say(f"{view}: {damage}")
    if not damaged:
        return [RebuiltView(view, None, None) for view in views]
    target.rebuilds.ask(target.row.id, tuple(damaged), before_copy=True)
    done = {found.view: found for found in _await(target, tuple(damaged), say)}
    return [done.get(view, RebuiltView(view, None, None)) for view in dict.fromkeys([*damaged, *views])]


def _await(target: _Target, views: Sequence[str], say: Callable[[str], None]) -> list[RebuiltView]:
    """Return a request's outcome; see `await_outcome`."""
    outcome = await_outcome(
        target.home, target.rebuilds, target.row.id, views, lambda request: _perform(target, request, say), say
    )
    return [RebuiltView(view, result.get("rows"), result["aside"]) for view, result in outcome.items()]


def await_outcome(
    home: Home,
    requests: Rebuilds,
    table_id: TableId,
    views: Sequence[str],
    perform: Callable[[RebuildRequest], None],
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Return a request's outcome by view: from the running pipeline, or from our own work if none runs.

    Args:
        perform: carries the request out and settles it; called while this process holds the pipeline's role.
        say: called once if the running pipeline does the work.

    Raises:
        HomeBusy: another call for the same table has replaced the request, or has taken its outcome.
        MillstreamError: a view failed, with the pipeline's own reason.
    """
    is_announced = False
    give_up_s = time.monotonic() + _RESTART_S
    while (outcome := requests.outcome(table_id)) is None:
        if holder(home.run_folder, "pipeline"):
            give_up_s = time.monotonic() + _RESTART_S
        elif holder(home.run_folder, "run") and time.monotonic() < give_up_s:
            # It died and is being restarted: its role isn't ours to take.
            time.sleep(_LOOK_EVERY_S)
            continue
        try:
            with RoleLock.take(home.run_folder, "pipeline", patience_s=0):
                for request in requests.waiting():
                    if request.table_id == table_id:
                        perform(request)
        except HomeBusy:
            if not is_announced:
                say("the running pipeline takes it up")
                is_announced = True
            time.sleep(_LOOK_EVERY_S)
    if not outcome.keys() >= set(views):
        raise HomeBusy(
            f"another call has replaced this request of {', '.join(views)}, or taken its outcome",
            hint="Run the command again once the other has ended.",
        )
    requests.forget(table_id)
    for result in outcome.values():
        if result["state"] == "failed":
            raise error_of({**result, "details": {}})
    return outcome


def failed_view(error: MillstreamError) -> dict[str, Any]:
    """Return the outcome of a view that failed."""
    return {"state": "failed", "code": error.code, "message": error.message, "hint": error.hint}


def _perform(target: _Target, request: RebuildRequest, say: Callable[[str], None]) -> None:
    """Carry out a request; the caller holds the pipeline's role."""
    from millstream.lake.commit_cuts import commit_cut, last_cut
    from millstream.lake.damaged_tables import erase_view, make_way, prepare_rebuild, rebuild_view

    cut = last_cut(target.layout) or target.cut
    held = quarantine_of(target.catalog, target.layout.stream_id).all().get(target.row.id)
    for view in cast("tuple[View, ...]", request.views):
        say(f"{view} is built")
        outcome: dict[str, Any]
        try:
            if request.erases:
                n = open_reader(target.home, target.stream).persisted_upto()
                earlier = target.catalog.schemas_of(target.row.id)
                erase_view(target.layout, view, target.schema, n, earlier=earlier)
                outcome = {"state": "done", "aside": None}
            elif request.before_copy:
                forget = held is not None and held.get("code") == "lake_schema_conflict"
                n = cut.n if held is None or forget else Seq(held["after"])
                outcome = {"state": "done", "aside": make_way(target.layout, view, target.schema, n, forget=forget)}
            else:
                aside = prepare_rebuild(target.layout, view, target.schema)
                commit = rebuild_view(target.layout, view, target.schema, cut.n)
                commit_cut(target.layout, cut.n, [commit], committed_at=datetime.now(UTC))
                outcome = {"state": "done", "rows": commit.rows, "aside": aside}
        except MillstreamError as error:
            outcome = failed_view(error)
        target.rebuilds.settle(target.row.id, view, outcome)
    if held is not None and request.before_copy:
        quarantine_of(target.catalog, target.layout.stream_id).request_retry(target.row.id)
