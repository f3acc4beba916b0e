"""`status` and `tables`: the state of streams and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from millstream.app.status_words import holder_words, how_it_stands, retention_waits, undelivered, why_and_since
from millstream.cli.context import (
    Invocation,
    SuggestingGroup,
    json_option,
    note,
    note_lines,
    pass_invocation,
    print_json,
    print_table,
    say,
    stream_option,
)
from millstream.home.rows_before_rules import until_words
from millstream.model.human_text import consumer_state_words, copy_words, counted, human_bytes, human_seconds, lag_words

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.model.ids import StreamId

_HELD_BYTES: Final = 256 << 20
"""Bytes of the log that a holder may need without being named."""


@click.command()
@stream_option
@json_option
@pass_invocation
def status(invocation: Invocation, stream: str | None, as_json: bool) -> None:
    """Show each stream's state: writer, tokens, lag at each stage, tables with state and reason."""
    from millstream.app.status import collect_status

    home = invocation.home(needs_source=False)
    found = collect_status(home)
    if stream is not None:
        home.pick_stream(stream, of=[one["name"] for one in found["streams"]])
        found["streams"] = [one for one in found["streams"] if one["name"] == stream]
    if as_json:
        print_json(found)
        return
    for problem in found["problems"]:
        note_lines(f"problem: {problem}")
    running = [f"{part} (process {pid})" for part, pid in found["processes"].items() if pid is not None]
    say(f"{found['home']}: {', '.join(running) or 'nothing runs'}")
    _print_conditions([each for each in found["conditions"] if not each["stream"]])
    for one in found["streams"]:
        say()
        _print_stream(one, found["processes"])
        _print_conditions([each for each in found["conditions"] if each["stream"] == one["name"]])
    if (alerts := found["alerts"]) is not None and alerts["error"] is not None:
        note(f"alerts: {undelivered(alerts)}")


def _behind(numbers: int) -> str:
    return f" ({counted(numbers, 'number')} behind)" if numbers else ""


def _print_stream(stream: dict[str, Any], processes: Mapping[str, int | None]) -> None:
    say(f"stream {stream['name']}", bold=True, nl=False)
    if stream["id"] is None:
        say(f": {'has never run' if stream['state'] == 'never run' else stream['state']}")
        _print_nodes(stream)
        _print_part_errors(stream)
        return
    leads = (stream["replication"] or {"role": "leads"})["role"] == "leads"
    captures = stream["source"]["configured"] and leads
    reached = f"source at {stream['source']['reached'] or 'no position yet'}" if captures else "no source"
    written = (
        f", writer epoch {(stream['writer'] or {}).get('epoch', 0)}, {reached}"
        if leads and stream["state"] != "unknown"
        else ""
    )
    say(f": {_state_words(stream, processes)}{written}")
    _print_nodes(stream)
    landed = stream["tokens"]["landed"]
    say(f"  durable {stream['tokens']['durable'] or 'not known'}{'' if landed is None else f', landed {landed}'}")
    if len(stream["writers"]) > 1:
        told = (f"{one['name']} {one['state']}" + _behind(one["behind"]) for one in stream["writers"])
        say("  writers: " + ", ".join(told))
    lag = stream["lag"]
    stages = [("capture", "source → log")] if captures else []
    if leads:
        stages.append(("lake", "log → lake"))
    for stage, words in stages:
        if lag[stage]["records"] is None and lag[stage]["bytes"] is None:
            say(f"  {words}: unknown {'so far' if stream['state'] == 'running' else 'while nothing runs'}")
            continue
        more = _source_words(stream["source"]) if stage == "capture" else _landing_words(lag[stage], processes)
        say(f"  {words}: {lag_words(lag[stage])}{more}")
    if stream["replay"] is not None:
        say(f"  replay: {_replay_words(stream['replay'])}")
    if lag["fold"]["records"] is not None:
        say(f"  history → current: {_fold_words(lag['fold'])}")
    size = (
        "can't be read"
        if stream["log"]["segments"] is None
        else f"{counted(stream['log']['segments'], 'segment')}, {human_bytes(stream['log']['bytes'])}"
    )
    say(f"  log: {size}{_held(stream)}")
    if waits := retention_waits(stream):
        say(f"  {waits}")
    _print_errors(stream)
    if stream["consumers"]:
        titles = ["  consumer", "state", "behind", "in flight", "dead", "redelivered", "acked", "error"]
        print_table(titles, [_consumer_row(one) for one in stream["consumers"]], right=titles[3:7])
    if stream["tables"]:
        titles = ["  table", "state", "rows/s", "fold lag", "disk factor", "reason"]
        print_table(titles, [_table_row(t) for t in stream["tables"]], right=titles[2:5])
        _print_hints(stream["tables"])


def _print_conditions(conditions: list[dict[str, Any]]) -> None:
    """Print the conditions that need an operator, except those that the stream's own lines show."""
    for condition in conditions:
        if condition["kind"] not in {"table_quarantined", "lake_waits"}:
            say(f"  {condition['kind']}: {condition['message']}", fg="red" if condition["is_alert"] else None)
            say(f"    {condition['hint']}")


def _print_errors(stream: dict[str, Any]) -> None:
    """Print the troubles of a stream's parts, and what to do about them."""
    if stream["lake"]["state"] != "ok":
        say(f"  lake: {stream['lake']['state']}; the log keeps what the lake lacks", fg="red")
    if stream["pipeline"]["waits_for"] is not None:
        say(
            f"  pipeline: waits for Spark's master at {stream['pipeline']['waits_for']}, which doesn't answer", fg="red"
        )
    _print_part_errors(stream)


def _print_part_errors(stream: dict[str, Any]) -> None:
    for part, error in stream["errors"].items():
        say(f"  {how_it_stands(part, error)}: {error['code']}: {why_and_since(error)}", fg="red")
        if error.get("hint"):
            say(f"    {error['hint']}")


def _print_nodes(stream: dict[str, Any]) -> None:
    """Print a node's leader and its lag, or its followers; nothing if the home is no node."""
    its = stream["replication"]
    if its is None:
        return
    _print_part(its)
    for region in stream["regions"]:
        _print_part(region, of=f"{region['stream']} ")


def _print_part(its: dict[str, Any], of: str = "") -> None:
    if its["error"] is not None:
        say(f"  {of}{its['error']['code']}: {its['error']['message']}", fg="red")
        return
    if its["role"] == "leads":
        if (leads := its["writes_go_to"]) is not None and leads["epoch"]:
            say(f"  leads with epoch {leads['epoch']}")
        for one in its["followers"]:
            apart = "apart, " if one["phase"] == "apart" else ""
            say(f"  followed by {one['node']}: {apart}{_behind_words(one)}{_age_words(one['lag_s'])}")
        return
    own = its["following"]
    if its["role"] == "fenced" or not own:  # a condition
        return
    error = own.get("error")
    age = _age_words(its["age_s"])
    upto = "" if its["persisted_upto"] is None else f"up to {its['persisted_upto']:,}, "
    say(f"  {of}follows {its['leader']}: {upto}{_behind_words(own)}{age} at most")
    if error is not None:
        say(f"  {of}follow: {error['code']}: {error['message']}", fg="red")


def _age_words(seconds: float | None) -> str:
    return "of unknown age" if seconds is None else f"{human_seconds(seconds)} old"


def _behind_words(lag: dict[str, Any]) -> str:
    """Return the lag in words; empty if it is unknown, as for a follower that hasn't connected."""
    records = lag.get("records_behind")
    return "" if records is None else f"{counted(records, 'record')}, {human_bytes(lag['bytes_behind'])} behind, "


def _state_words(stream: dict[str, Any], processes: Mapping[str, int | None]) -> str:
    is_idle = stream["state"] == "running" and not (stream["writer"] or {}).get("alive")
    if is_idle and processes.get("serve") is not None:
        return "nothing appended since `serve` began"
    return str(stream["state"])


def _landing_words(lag: dict[str, Any], processes: Mapping[str, int | None]) -> str:
    """Return that nothing lands what waits for the lake; empty if a process does, or nothing waits."""
    is_landed = processes.get("pipeline") is not None or not lag["bytes"]
    return "" if is_landed else "; nothing lands it until `millstream run` or `pipeline run` does"


def _fold_words(lag: dict[str, Any]) -> str:
    """Return what waits for the folds of its tables."""
    if not lag["records"]:
        return "nothing waits"
    behind = f"{counted(lag['records'], 'record')}, {human_seconds(lag['seconds'])} behind"
    return f"{behind}; they wait for a fold (`fold_interval`), and `query` has them already"


def _source_words(source: dict[str, Any]) -> str:
    """Return how a source is read, and what that keeps there; empty while it isn't."""
    words = ", catching up in chunks" if source["mode"] == "catching up" else ""
    holds = source["slot_holds_bytes"]
    return words if holds is None else f"{words}, its slot holds {human_bytes(holds)}"


def _replay_words(replay: dict[str, Any]) -> str:
    parts = [f"{replay[key]['done']:,} of {counted(replay[key]['total'], key[:-1])}" for key in ("segments", "records")]
    done, total = (human_bytes(replay["bytes"][key]) for key in ("done", "total"))
    words = f"{', '.join(parts)}, {done} of {total} landed"
    return words if replay["eta_s"] is None else f"{words}, about {human_seconds(replay['eta_s'])} left"


def _held(stream: dict[str, Any]) -> str:
    """Return the holder that keeps most of the log, if that is more than records in transit."""
    held = {holder: facts["bytes"] or 0 for holder, facts in stream["log"]["held"].items()}
    holder = max(held, key=lambda name: held[name], default=None)
    if holder is None or held[holder] < _HELD_BYTES:
        return ""
    return f", {human_bytes(held[holder])} of it needed by {holder_words(stream, holder)}"


def _print_hints(tables: list[dict[str, Any]]) -> None:
    """Print the commands for tables that were quarantined, or that wait."""
    from millstream.app.trouble_rules import what_to_run

    for table in tables:
        if hint := what_to_run(table):
            note(f"{table['name']}: {hint}")
        if raw := table.get("raw_values"):
            note(f"raw_values_kept: {table['name']}: {until_words(raw)}")


def _consumer_row(consumer: dict[str, Any]) -> list[str]:
    lag = consumer["lag"]
    return [
        "  " + consumer["name"],
        consumer_state_words(consumer),
        "unknown"
        if lag["records"] is None
        else "none"
        if lag["records"] == 0
        else lag_words(lag).removesuffix(" behind"),
        *(f"{consumer[key]:,}" for key in ("in_flight", "dead", "redelivered", "acked")),
        consumer["error"] or "",
    ]


def _table_row(table: dict[str, Any]) -> list[str]:
    rate, lag, factor = table["rows_per_s"], table["fold_lag_s"], table["disk_factor"]
    return [
        "  " + table["name"],
        table["state"],
        "" if rate is None else f"{rate:,.0f}",
        ""
        if lag is None
        else "none"
        if lag == 0
        else f"{human_seconds(lag)}, {counted(table['fold_lag_records'], 'record')}",
        "" if factor is None else f"{factor:.1f}",
        _reason(table),
    ]


def _reason(table: dict[str, Any]) -> str:
    """Return why a table is in its state; for one that is being copied, the progress."""
    copy = table.get("copy") or {}
    if table["state"] == "copying" and copy.get("rows") is not None:
        return copy_words(copy)
    if table["state"] == "paused" and copy.get("rows"):
        return f"{table['reason']}; {copy_words(copy)}"
    return str(table["reason"])


@click.group(cls=SuggestingGroup, invoke_without_command=True)
@stream_option
@json_option
@click.pass_context
def tables(context: click.Context, stream: str | None, as_json: bool) -> None:
    """List tables; retry, copy, pause or resume one."""
    # The options count for a command after them, too.
    context.default_map = {name: {"stream": stream, "as_json": as_json} for name in tables.commands}
    if context.invoked_subcommand is None:
        context.invoke(tables_ls, stream=stream, as_json=as_json)


@tables.command("ls")
@stream_option
@json_option
@pass_invocation
def tables_ls(invocation: Invocation, stream: str | None = None, as_json: bool = False) -> None:
    """List each table with its state and the reason."""
    from millstream.app.status import collect_status

    home = invocation.home(needs_source=False)
    if home.has_catalog():
        home.open_catalog().close()  # its error ends the command, and is one of many problems of a status
    status = collect_status(home)
    for problem in status["problems"]:
        note(f"problem: {problem}")
    known = {one["name"]: one for one in status["streams"] if one["id"] is not None}
    names = sorted(known) if stream is None or not known else [home.pick_stream(stream, of=sorted(known))]
    found = [{"stream": name, **table} for name in names for table in known[name]["tables"]]
    if as_json:
        print_json(found)
        return
    print_table(
        ["stream", "table", "state", "shard", "reason"],
        [[t["stream"], t["name"], t["state"], t["shard"], _reason(t)] for t in found],
    )
    for t in found:
        for path in t["paths"].values():
            say(f"{t['name']}: {path}")
    _print_hints(found)


def _ask(invocation: Invocation, table: str, stream: str | None, do: Callable[[Catalog, StreamId, str], str]) -> None:
    """Request something for a table, and print what will happen."""
    home = invocation.home(needs_source=False)
    with home.open_catalog() as catalog:
        name = home.pick_stream(stream, of=sorted(row.name for row in catalog.streams()))
        note(f"{table}: {do(catalog, catalog.stream(name).id, table)}")


@tables.command("retry")
@click.argument("table", metavar="T")
@stream_option
@pass_invocation
def tables_retry(invocation: Invocation, table: str, stream: str | None) -> None:
    """Retry a table that was quarantined by capture or by the pipeline, or that the reader of a write buffer holds."""
    from millstream.app.table_requests import retry_table
    from millstream.writers.write_buffers import buffer_of

    streams = invocation.home(needs_source=False).config.streams

    def retry(catalog: Catalog, stream: StreamId, table: str) -> str:
        name = next(row.name for row in catalog.streams() if row.id == stream)
        return retry_table(catalog, stream, table, buffer=buffer_of(name, streams[name]) if name in streams else None)

    _ask(invocation, table, stream, retry)


@tables.command("copy")
@click.argument("table", metavar="T")
@click.option(
    "--forget",
    is_flag=True,
    help="First delete the table's older records and rows: its history, versions and files in the lake, and its dead "
    "letters. The log's segments go by retention.",
)
@stream_option
@pass_invocation
def tables_copy(invocation: Invocation, table: str, stream: str | None, *, forget: bool) -> None:
    """Copy a table's rows again, while its changes are captured."""
    from millstream.app.table_requests import copy_table

    if forget:
        from millstream.administration.rebuild import forget_table

        dropped = forget_table(invocation.home(needs_source=False), table, stream=stream, say=note)
        note(f"{table}: its older records are deleted, and {counted(dropped, 'dead letter')}")
        note(f"{table}: its rows will be copied by the running capture, or when it runs next")
        return
    _ask(invocation, table, stream, copy_table)


@tables.command("pause")
@click.argument("table", metavar="T")
@stream_option
@pass_invocation
def tables_pause(invocation: Invocation, table: str, stream: str | None) -> None:
    """Pause a table's copy, also in later runs, while its changes are captured."""
    from millstream.app.table_requests import pause_table

    _ask(invocation, table, stream, pause_table)


@tables.command("resume")
@click.argument("table", metavar="T")
@stream_option
@pass_invocation
def tables_resume(invocation: Invocation, table: str, stream: str | None) -> None:
    """Resume a paused copy at the point where it stopped."""
    from millstream.app.table_requests import resume_table

    _ask(invocation, table, stream, resume_table)
