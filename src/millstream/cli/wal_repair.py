"""`wal repair`: repairs damage, by naming the records that are given up."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from millstream.cli.context import Invocation, json_option, note, pass_invocation, print_json, say, stream_option
from millstream.cli.wal_damage_messages import TableWords

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.model.schema import TableSchema
    from millstream.wal.mending.repair import RepairPlan


@click.command()
@click.option(
    "--accept-loss",
    "accepted",
    multiple=True,
    metavar="RANGE",
    help="Lost records to accept: FROM-TO or SHARD:FROM-TO (offsets, TO excluded), or seq:A-B. May be given "
    "several times.",
)
@click.option("--drop-readable", is_flag=True, help="Allow ranges that include readable records, and drop those too.")
@click.option(
    "--dry-run", is_flag=True, help="Report the damage and the records that a repair would lose; change nothing."
)
@stream_option
@json_option
@pass_invocation
def repair(
    invocation: Invocation,
    accepted: tuple[str, ...],
    drop_readable: bool,
    dry_run: bool,
    stream: str | None,
    as_json: bool,
) -> None:
    """Cut out damage, so that writers and readers continue; the cut bytes are kept in .torn files.

    Lost records must be named exactly; --dry-run prints how. Parts without records (a footer, a
    header, a schema that has another copy) are rebuilt without that. Stop the stream's writer
    first.
    """
    from millstream.wal.mending.repair import AcceptedRange, plan_repair
    from millstream.wal.mending.repair import repair as repair_log

    home = invocation.home(needs_source=False)
    name = home.pick_stream(stream)
    folder = str(home.wal_folder(name))
    ranges = [AcceptedRange.parse(text) for text in accepted]
    schemas = _catalog_schemas(home, name)
    if dry_run:
        plan = plan_repair(folder, schemas=schemas)
    else:
        _refuse_copies(home, name)
        plan = repair_log(folder, ranges, drop_readable=drop_readable, schemas=schemas)
    _report(plan, TableWords(folder), dry_run=dry_run, as_json=as_json)
    sys.exit(3 if dry_run and plan.is_needed else 0)


def _refuse_copies(home: Home, name: str) -> None:
    """Refuse a copy: rebuilt parts would differ from the leader's bytes, and the leader has the lost records."""
    from millstream.errors import ReadOnly
    from millstream.leadership.node_roles import Roles
    from millstream.protocol.replication.promises_and_fencing import Role

    fact = Roles(home).of(name)
    # A node that stands for leader itself has no node to fetch it from again.
    if fact.role is Role.FOLLOWS and fact.promise.node != home.config.replication.node:
        raise ReadOnly(
            f"stream {name} is a copy of the log of {fact.leader}, and can't be repaired alone",
            hint="Run `millstream follow --rebuild` to replace it with a new copy. If no leader is left, run `millstream "
            "promote` first, then repair.",
            stream=name,
            leader=str(fact.leader),
        )


def _report(plan: RepairPlan, words: TableWords, *, dry_run: bool, as_json: bool) -> None:
    wanted = [str(found) for found in plan.ranges()]
    if as_json:
        print_json(
            {
                "done": not dry_run,
                "losses": [asdict(loss) for loss in plan.losses],
                "mends": [asdict(mend) for mend in plan.mends],
                "moves": [asdict(move) for move in plan.moves],
                "accept": wanted,
                "kept_aside": plan.kept_aside,
            }
        )
        return
    for loss in plan.losses:
        numbers = f", numbers {loss.first_seq}-{loss.last_seq}" if loss.first_seq and loss.last_seq else ""
        say(
            f"{'lost' if not dry_run else 'would be lost'}: records{words.of(loss.tables)} at offsets [{loss.offset_from}, {loss.offset_to}) of"
            f" shard {loss.shard}{numbers} ({loss.file}@{loss.byte}: {loss.why})"
        )
    for move in plan.moves:
        would, to = "would be " if dry_run else "", "set aside" if move.target is None else f"moved to {move.target}"
        say(f"{would}{to}: {move.path}: {move.why}")
    for mend in plan.mends:
        say(f"{'rebuilt' if not dry_run else 'would be rebuilt'}: {mend.file}@{mend.byte}: {mend.why}")
    for kept in plan.kept_aside:
        note(f"the cut bytes are in {kept}")
    if not plan.is_needed:
        say("nothing is damaged")
    elif dry_run:
        options = "".join(f" --accept-loss {found}" for found in wanted)
        note(f"to do it: millstream wal repair{options}")


def _catalog_schemas(home: Home, name: str) -> list[TableSchema]:
    """Return every schema that the home's catalog has of the stream: for records whose schema the log has lost."""
    from millstream.errors import MillstreamError

    with contextlib.suppress(ImportError, MillstreamError):
        if home.has_catalog():
            with home.open_catalog() as catalog:
                return list(catalog.schemas(catalog.stream(name).id).values())
    return []
