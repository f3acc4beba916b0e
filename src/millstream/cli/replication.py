"""`follow`, `replicas`, `promote`, `restore`, `scrub`: a log on several machines."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millstream.cli.context import (
    Invocation,
    json_option,
    note,
    pass_invocation,
    print_json,
    print_table,
    say,
)
from millstream.cli.run import log_format_option
from millstream.cli.startup import importing
from millstream.model.human_text import human_bytes, human_seconds

if TYPE_CHECKING:
    from millstream.processes.logs import LogFormat


@click.command()
@click.argument("node", required=False)
@click.option(
    "--stream",
    "streams",
    multiple=True,
    metavar="S",
    help="Only this stream; may be repeated. With --rebuild also another region's log, such as shop@2. [default: "
    "all configured streams]",
)
@click.option(
    "--rebuild",
    is_flag=True,
    help="Set this node's copy aside, and build a new one from the object store if there is one, else from the "
    "leader's log.",
)
@click.option("--until-caught-up", is_flag=True, help="Exit when this node has all records of the leader.")
@click.option(
    "--only-note", is_flag=True, help="Only store which node this node follows; `millstream run` then follows it."
)
@log_format_option
@pass_invocation
def follow(
    invocation: Invocation,
    node: str | None,
    streams: tuple[str, ...],
    rebuild: bool,
    until_caught_up: bool,
    only_note: bool,
    log_format: LogFormat,
) -> None:
    """Follow NODE: keep a byte-for-byte copy of its streams' logs here, until SIGINT or SIGTERM.

    NODE is one of [replication] nodes. It may be left out if there is only one other node, or if
    this node already follows one. The role is stored: `millstream run` follows as well. If this
    node led before, records that its leader lacks are set aside.
    """
    with importing():
        from millstream.app.alerts.alert_sender import watched_alerts
        from millstream.model.addresses import mask_address
        from millstream.model.replication import check_node_name
        from millstream.nodes.follower_process import begin_to_follow, follow_home, start_anew
        from millstream.nodes.region_copies import logs_to_rebuild
        from millstream.processes.child_process import Lifeline
        from millstream.processes.logs import configure_logs

        home = invocation.own_home(needs_source=False)
    lifeline = Lifeline()
    with lifeline.held():
        configure_logs(part="follow", style=log_format)
        if not lifeline.supervised:
            facts = begin_to_follow(home, None if node is None else check_node_name(node), streams)
            for name in logs_to_rebuild(home, streams, facts) if rebuild else ():
                aside = start_anew(home, name)
                if aside is not None:
                    note(f"the previous copy of {name} is in {aside}")
            for name, fact in facts.items():
                store = home.config.replication.object_store
                anew = "" if not rebuild or store is None else f"; the new one starts from {mask_address(store)}"
                note(f"stream {name} follows {fact.leader}{anew}")
            if only_note:
                return
        with nullcontext() if until_caught_up else watched_alerts(home):
            found = follow_home(home, lifeline, until_caught_up=until_caught_up, on_progress=lambda _: None)
    if until_caught_up and not lifeline.supervised:
        lacking = [name for name, facts in found.items() if facts.get("records_behind") or facts.get("lag_s") is None]
        sys.exit(1 if lacking else 0)


@click.command()
@json_option
@pass_invocation
def replicas(invocation: Invocation, as_json: bool) -> None:
    """List the nodes that have this home's streams, with their lag."""
    from millstream.app.trouble_rules import node_errors
    from millstream.nodes.replicas import list_replicas

    found = list_replicas(invocation.home(needs_source=False))
    if as_json:
        print_json(found)
        return
    titles = ["stream", "node", "part", "group", "upto", "records behind", "bytes behind", "age"]
    rows: list[list[Any]] = []
    for one in found["streams"]:
        own = one["following"] or {}
        rows.append(
            [one["stream"], f"{found['node']} (this)", _part(one), one["group"], one["persisted_upto"], own.get("records_behind"),
             _bytes(own.get("bytes_behind")), _age(one["age_s"])]
        )  # fmt: skip
        rows += [
            [one["stream"], its["node"], its["phase"], its["group"], its["persisted_upto"], its["records_behind"],
             _bytes(its["bytes_behind"]), _age(its["lag_s"])]
            for its in one["followers"]
        ]  # fmt: skip
        if one["object_store"] is not None:
            rows.append([one["stream"], "object store", "stores", one["object_store"]["group"], None, None, None, None])
    print_table(titles, rows, right=titles[3:])
    for one in found["streams"]:
        for error in node_errors(one):
            note(f"stream {one['stream']}: {error['message']} ({error['code']})")
            note(f"  hint: {error['hint']}")
        leads = one["writes_go_to"]
        if leads is not None and leads["epoch"] > one["promised"]["epoch"]:
            note(f"{leads['node']} leads {one['stream']} since epoch {leads['epoch']}; this node wasn't informed of it")
    if not found["serves"] and any(one["role"] == "leads" for one in found["streams"]):
        note("`millstream serve` doesn't run here: no node can follow this one")
    if not found["follows"] and any(one["role"] == "follows" for one in found["streams"]):
        note("`millstream follow` doesn't run here: this node's copy isn't updated")


def _part(one: dict[str, Any]) -> str:
    role: str | None = one["role"]
    if role is None:
        return "unknown"
    return role if role == "leads" else f"{role}: {one['leader']}" if role == "fenced" else f"follows {one['leader']}"


def _bytes(count: int | None) -> str | None:
    return None if count is None else human_bytes(count)


def _age(seconds: float | None) -> str | None:
    return None if seconds is None else human_seconds(seconds)


_streams_option = click.option(
    "--stream",
    "streams",
    multiple=True,
    metavar="S",
    help="Only this stream; may be repeated. [default: all configured streams]",
)


@click.command()
@_streams_option
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Promote this node even if acknowledged records may be lost; the command prints which.",
)
@json_option
@pass_invocation
def promote(invocation: Invocation, streams: tuple[str, ...], accept_loss: bool, as_json: bool) -> None:
    """Make this node the leader of its streams.

    The command first asks the old leader to stop and to ship its last records. If it doesn't
    answer, enough other nodes must promise to accept nothing more from it. The streams' level
    (`acks`) sets their number; with `local` it is all of them, so that a dead leader requires
    --accept-loss. The command can be repeated.
    """
    from millstream.nodes.promote import promote as promote_stream

    home = invocation.own_home(needs_source=False)
    found = [
        promote_stream(home, name, accept_loss=accept_loss, tell=note)
        for name in streams or sorted(home.config.streams)
    ]
    if as_json:
        print_json(
            [
                {
                    "stream": one.stream,
                    "epoch": int(one.epoch),
                    "group": int(one.group),
                    "losses": list(one.losses),
                    "seconds": round(one.seconds, 3),
                }
                for one in found
            ]
        )
        return
    for one in found:
        say(
            f"this node leads stream {one.stream} with epoch {one.epoch}, after group {one.group} ({one.seconds:.1f} s)"
        )
        for loss in one.losses:
            note(f"may be lost: {loss}")


@click.command()
@click.option(
    "--from", "store", required=True, metavar="URL", help="The object store: s3://bucket/prefix, file:///folder …"
)
@click.option("--stream", required=True, metavar="S", help="The stream to restore.")
@click.option(
    "--region",
    type=click.IntRange(0),
    default=0,
    help="Number of the region whose log is restored, if several regions write the stream.",
)
@click.option(
    "--at",
    metavar="TIME|TOKEN",
    help="Restore up to that token, or up to that time: to the first commit group with a later commit. [default: "
    "everything]",
)
@click.option(
    "--epoch",
    type=click.IntRange(0),
    help="Restore the records stored up to that epoch, which were set aside when a node was promoted without the "
    "store.",
)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@json_option
def restore(
    store: str, stream: str, region: int, at: str | None, epoch: int | None, folder: Path, as_json: bool
) -> None:
    """Restore a stream from an object store alone, into FOLDER: a home with its log, its catalog and its sessions."""
    from millstream.model.ids import RegionId
    from millstream.nodes.restore import restore_stream

    found = restore_stream(store, stream, folder, region=RegionId(region), at=at, epoch=epoch, tell=note)
    if as_json:
        print_json(found)
        return
    say(f"{folder} has stream {stream} up to number {found['persisted_upto']:,} ({human_bytes(found['bytes'])})")


@click.command()
@_streams_option
@click.option("--dry-run", is_flag=True, help="Repair nothing; report the damage, and what this node could repair.")
@json_option
@pass_invocation
def scrub(invocation: Invocation, streams: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Verify all objects of this home's streams in the object store, and repair damaged ones.

    The command reads every byte, so it costs as much as reading the whole store. A damaged or
    missing segment is uploaded again if this node, leader or not, has it in its log and its hashes
    match those in the store. It may run while `millstream run` does. Exit code 3: something is
    still damaged.
    """
    from millstream.nodes.object_stores import scrub_home

    found = scrub_home(invocation.home(needs_source=False), streams, dry_run=dry_run, tell=note)
    if as_json:
        print_json(found)
    else:
        for one in found:
            say(f"{one['stream']}: {one['objects']:,} objects were read ({human_bytes(one['bytes'])})")
            for mended in one["mended"]:
                could = "can be repaired" if dry_run else "was repaired"
                say(f"{one['stream']}: {mended['object']} ({mended['was']}) {could} from this node's log")
            for error in one["damaged"]:
                note(f"{error['message']} ({error['code']})")
                note(f"  hint: {error['hint']}")
    sys.exit(3 if any(one["damaged"] or (dry_run and one["mended"]) for one in found) else 0)
