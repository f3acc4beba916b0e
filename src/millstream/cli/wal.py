"""`wal …`: the log on disk, for people and programs. Needs no configuration: a copied folder will do."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from millstream.cli.context import (
    Invocation,
    SuggestingGroup,
    json_option,
    note,
    pass_invocation,
    print_json,
    print_raw,
    print_table,
    say,
    stream_option,
)
from millstream.cli.wal_damage_messages import TableWords, say_loss
from millstream.cli.wal_export_import import (
    DamagePrinter,
    export,
    import_,
    note_left_out,
    open_past_damage,
    sole_table,
    tables_meant,
    write_stream,
)
from millstream.model.human_text import counted, human_bytes

if TYPE_CHECKING:
    from millstream.export.records_text import LineProtocol
    from millstream.home.home import Home
    from millstream.model.ids import TableId
    from millstream.model.positions import Offset
    from millstream.model.schema import TableSchema
    from millstream.wal.mending.findings import SegmentInfo
    from millstream.wal.mending.repair import RepairPlan
    from millstream.wal.reader import StreamReader
    from millstream.wal.records_json import Cat, Line


_FOLLOW_POLL_S: Final = 0.5


@click.group(cls=SuggestingGroup)
def wal() -> None:
    """Inspect and repair the log on disk, live or in a copied folder."""


wal.add_command(export)
wal.add_command(import_)


@wal.command()
@click.option(
    "--format",
    "style",
    type=click.Choice(["ndjson", "arrow", "csv", "line-protocol"]),
    default="ndjson",
    show_default=True,
    help="Format of the records; arrow and csv are of one table, without --follow.",
)
@click.option(
    "--values",
    type=click.Choice(["json", "text"]),
    default="json",
    show_default=True,
    help="For ndjson. json: numbers that JSON holds exactly are numbers. text: every value as PostgreSQL prints it.",
)
@click.option("--from-offset", type=click.IntRange(min=0), metavar="N", help="Start at this offset (of each shard).")
@click.option(
    "--table", metavar="T", help="Only this table, as schema.table; arrow and csv need it if there are several."
)
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="Stop after this number of records.")
@click.option("--follow", is_flag=True, help="Continue with appended records, until interrupted.")
@click.option(
    "--without-mark",
    is_flag=True,
    help="Show every valid complete group, for a folder that was copied without its mark.",
)
@stream_option
@pass_invocation
def cat(
    invocation: Invocation,
    style: str,
    values: str,
    from_offset: int | None,
    table: str | None,
    limit: int | None,
    follow: bool,
    without_mark: bool,
    stream: str | None,
) -> None:
    """Print records in order, one per line unless the format is arrow, and nothing else on stdout.

    The command skips damage: it reports it on stderr, with exit code 3. `wal export` has ranges
    (--since, --until) and writes files.
    """
    from millstream.errors import UsageError
    from millstream.export.record_reading import table_ids
    from millstream.export.records_text import LineProtocol
    from millstream.model.positions import Offset
    from millstream.wal.records_json import Cat

    has_columns = style in {"arrow", "csv"}
    of_one = UsageError(
        f"{style} has the columns of one table, as they are now",
        hint="Name a table with --table, and leave out --follow; `wal export` writes several tables into a folder.",
    )
    if has_columns and follow:
        raise of_one
    home = invocation.home(needs_source=False)
    name = home.pick_stream(stream)
    damage = DamagePrinter()
    reader = open_past_damage(home, name, damage, without_mark=without_mark, definitions=style == "ndjson")
    wanted: frozenset[TableId] = frozenset()
    if table is not None:
        wanted = frozenset(table_ids(reader, table) if has_columns else tables_meant(home, name, reader, table))
    elif has_columns:
        wanted = sole_table(reader)
        if not wanted:
            raise of_one
    start = None if from_offset is None else Offset(from_offset)
    if style == "arrow":
        _print_arrow(reader, wanted, start, limit)
        sys.exit(3 if damage.told else 0)
    records = Cat(
        name,
        reader,
        "text" if style == "csv" or (style == "ndjson" and values == "text") else "json",
        wanted or None,
        start,
        moments=style == "line-protocol",
    )
    protocol = LineProtocol()
    print_record = _printer(style, reader, wanted, protocol)
    left = _print_records(records, print_record, limit)
    while follow and left != 0:
        sys.stdout.flush()
        upto = reader.persisted_upto()
        if reader.wait_beyond(upto, _FOLLOW_POLL_S) or records.is_behind():
            left = _print_records(records, print_record, left)
    sys.stdout.flush()
    note_left_out(protocol)
    sys.exit(3 if damage.told else 0)


def _print_arrow(reader: StreamReader, wanted: frozenset[TableId], start: Offset | None, limit: int | None) -> None:
    from millstream.model.positions import Seq

    if start is not None:
        for shard in reader.shards:
            reader.extent.check_offset(shard, start)
    begin, upto = Seq(reader.first_seq() - 1), reader.persisted_upto()
    write_stream(reader, begin, upto, wanted, start=start, limit=limit)


def _printer(
    style: str, reader: StreamReader, wanted: frozenset[TableId], protocol: LineProtocol
) -> Callable[[Line], None]:
    """Return what prints a record in a format of text; that of CSV prints the header now."""
    from millstream.export.records_text import CsvTable
    from millstream.model.record_json import to_json

    if style == "csv":
        return CsvTable(sys.stdout, reader.schema_versions(), wanted).write

    def print_record(line: Line) -> None:
        text = to_json(line.facts) if style == "ndjson" else protocol.line(line)
        if text is not None:
            sys.stdout.write(text + "\n")

    return print_record


def _print_records(records: Cat, print_record: Callable[[Line], None], limit: int | None) -> int | None:
    """Print the available records, at most `limit`; return how many are left to print."""
    if limit == 0:
        return 0
    for line in records.records():
        print_record(line)
        if limit is not None:
            limit -= 1
            if limit == 0:
                break
    return limit


@wal.command("ls")
@stream_option
@json_option
@pass_invocation
def ls(invocation: Invocation, stream: str | None, as_json: bool) -> None:
    """List segments, shard by shard. Exit code 3 if the header or footer of one can't be read."""
    from millstream.wal.mending.inspect import ls as list_segments

    home = invocation.home(needs_source=False)
    segments = list_segments(str(home.wal_folder(home.pick_stream(stream))))
    if as_json:
        print_json([asdict(segment) for segment in segments])
        sys.exit(_exit_code(segments))
    print_table(
        ["shard", "segment", "state", "offsets", "durable", "shown", "seq", "records", "size", "epoch"],
        [
            [
                s.shard,
                Path(s.path).name,
                s.state,
                f"[{s.base_offset}, {'?' if s.end_offset is None else s.end_offset})",
                "" if s.durable_to is None else s.durable_to,
                "" if s.shown_to is None else s.shown_to,
                "" if s.first_seq is None else f"{s.first_seq}-{s.last_seq}",
                s.records,
                human_bytes(s.size_bytes),
                s.epoch,
            ]
            for s in segments
        ],
    )
    sys.exit(_exit_code(segments))


def _exit_code(segments: Sequence[SegmentInfo]) -> int:
    return 3 if any(segment.state == "damaged" for segment in segments) else 0


@wal.command("inspect")
@click.option("--seq", metavar="A-B", help="Only frames with numbers from A to B (either may be left out).")
@click.option("--table", metavar="T", help="Only frames with rows of this table.")
@stream_option
@json_option
@pass_invocation
def inspect_frames(
    invocation: Invocation, seq: str | None, table: str | None, stream: str | None, as_json: bool
) -> None:
    """List frames with position and content; skip damage (exit code 3)."""
    from millstream.model.positions import Seq
    from millstream.wal.mending.inspect import Loss, inspect

    home = invocation.home(needs_source=False)
    name = home.pick_stream(stream)
    first, last = _seq_range(seq)
    if seq is not None and not seq.startswith("-"):
        note_dropped(home, name, first)
    tables = [None] if table is None else tables_meant(home, name, open_past_damage(home, name, DamagePrinter()), table)
    damaged = False
    folder = str(home.wal_folder(name))
    words = TableWords(folder)
    for wanted in tables:
        frames = inspect(
            folder,
            after=Seq(max(0, first - 1)),
            upto=None if last is None else Seq(last),
            table=wanted,
        )
        for found in frames:
            damaged = damaged or isinstance(found, Loss)
            if as_json:
                kind = "loss" if isinstance(found, Loss) else "frame"
                print_raw(json.dumps({"found": kind, **asdict(found)}, default=str))
            elif isinstance(found, Loss):
                say_loss(found, words)
            else:
                say(
                    f"{Path(found.path).name}@{found.position}: {found.kind}, {found.length} bytes, group {found.group}"
                    f"{' (goes on)' if found.more else ''}, offsets [{found.first_offset}, {found.first_offset + found.count}),"
                    f" seq {found.first_seq}-{found.last_seq}"
                    ", tables "
                    + ", ".join(f"{words(t)} v{v}: {rows} rows, {size} B" for t, v, rows, size in found.tables)
                    + ("" if found.durable else " (not durable yet)")
                    + (" (not shown yet)" if found.durable and not found.shown else "")
                )
    sys.exit(3 if damaged else 0)


@wal.command()
@stream_option
@json_option
@pass_invocation
def verify(invocation: Invocation, stream: str | None, as_json: bool) -> None:
    """Read and check the whole log. If something is damaged, report which records are lost and which are not (exit code 3)."""
    from millstream.wal.mending.inspect import verify as verify_log

    home = invocation.home(needs_source=False)
    folder = str(home.wal_folder(home.pick_stream(stream)))
    found = verify_log(folder)
    words = TableWords(folder)
    if as_json:
        print_json({"whole": found.is_whole, "has_marks": found.has_marks, **asdict(found)})
        sys.exit(0 if found.is_whole else 3)
    for loss in found.losses:
        say_loss(loss, words)
    for loss in found.accepted:
        say_loss(loss, words, accepted=True)
    for rest in found.unfinished:
        note(f"{rest.file}@{rest.byte}: {rest.why}; nothing durable is lost")
    if found.losses:
        outcome = f"{len(found.losses)} damaged"
    elif found.has_marks:
        outcome = (
            "all is well" if not found.accepted else f"nothing is lost except accepted losses ({len(found.accepted)})"
        )
    else:
        outcome = "nothing is damaged"
    say(
        f"{counted(found.segments, 'segment')}, {counted(found.frames, 'frame')}, {counted(found.records, 'record')},"
        f" {human_bytes(found.bytes_checked)} checked: {outcome}"
    )
    for shard, hidden in found.hidden.items():
        note(f"shard {shard}: {hidden:,} durable records are not shown to readers yet: too few other nodes have them")
    for shard in found.unmarked:
        note(
            f"shard {shard} has no mark: records may be missing at its end, and some of the valid records may never "
            "have been acknowledged"
        )
    if not found.is_whole:
        for shard, ranges in found.readable.items():
            whole = ", ".join(f"[{start}, {end})" for start, end in ranges)
            in_part = ", ".join(f"[{start}, {end})" for start, end in found.readable_in_part.get(shard, ()))
            beside = f"; some tables' records also at {in_part}" if in_part else ""
            say(f"shard {shard} can be read at offsets {whole or 'none'}{beside}")
    sys.exit(0 if found.is_whole else 3)


@wal.command("stats")
@stream_option
@json_option
@click.option("--partitions", is_flag=True, help="Also list each table's partitions: records, first and last number.")
@pass_invocation
def stats(invocation: Invocation, stream: str | None, as_json: bool, partitions: bool) -> None:
    """Count the log's segments, frames and records, in total and by table; skip damage (exit code 3). Rows aren't checked."""
    from millstream.wal.mending.inspect import stats as count

    home = invocation.home(needs_source=False)
    folder = str(home.wal_folder(home.pick_stream(stream)))
    found = count(folder, partitions=partitions)
    words = TableWords(folder)
    if not found.has_marks:
        note("there is no mark: every valid frame is counted, durable or not")
    tables = sorted(found.tables.values(), key=lambda t: -t.size_bytes)
    names = {table.table_id: table.name for table in tables}
    of_partitions = sorted(found.partitions.values(), key=lambda p: (names.get(p.table_id, ""), p.partition or ""))
    if as_json:
        told = [{"table": names.get(one.table_id), **asdict(one)} for one in of_partitions] if partitions else None
        facts = {**asdict(found), "tables": [asdict(table) for table in tables], "partitions": told}
        print_json(facts)
    else:
        say(
            f"{counted(found.segments, 'segment')}, {human_bytes(found.size_bytes)}, {counted(found.groups, 'group')} in"
            f" {counted(found.frames, 'frame')}, {counted(found.records, 'record')}"
        )
        say(
            f"seq {found.first_seq}-{found.last_seq}, durable up to {found.persisted_upto}, shown up to {found.high_water_mark},"
            f" dropped up to {found.dropped_upto}"
        )
        print_table(
            ["table", "records", "bytes"],
            [[t.name, f"{t.records:,}", human_bytes(t.size_bytes)] for t in tables],
            right=["records", "bytes"],
        )
        if partitions:
            print_table(
                ["table", "partition", "records", "seq"],
                [
                    [names.get(p.table_id), p.partition or "-", f"{p.records:,}", f"{p.first_seq}-{p.last_seq}"]
                    for p in of_partitions
                ],
                right=["records", "seq"],
            )
    for loss in found.losses:
        say_loss(loss, words)
    for loss in found.accepted:
        say_loss(loss, words, accepted=True)
    sys.exit(3 if found.losses else 0)


def note_dropped(home: Home, stream: str, first: int) -> None:
    """Print on stderr if requested frames are no longer there."""
    begin = open_past_damage(home, stream, DamagePrinter()).first_seq()
    if first < begin:
        note(f"retention has dropped numbers up to {begin - 1}; frames are listed from {begin} on")


def _seq_range(text: str | None) -> tuple[int, int | None]:
    """Parse `A-B`, `A-`, `-B` or `A` as (first, last)."""
    if text is None:
        return 1, None
    first, dash, last = text.partition("-")
    try:
        a, b = (int(first) if first else 1), (int(last) if last else None if dash else int(first))
    except ValueError as error:
        raise click.BadParameter("must read like 100-200", param_hint="--seq") from error
    if b is not None and b < a:
        raise click.BadParameter(f"{a} is above {b}; must read like 100-200", param_hint="--seq")
    return a, b


@wal.command()
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
    from millstream.protocol.replication.node_promises import Role

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
        note(f"to do it: `millstream wal repair{options}`")


def _catalog_schemas(home: Home, name: str) -> list[TableSchema]:
    """Return every schema that the home's catalog has of the stream: for records whose schema the log has lost."""
    from millstream.errors import MillstreamError

    with contextlib.suppress(ImportError, MillstreamError):
        if home.has_catalog():
            with home.open_catalog() as catalog:
                return list(catalog.schemas(catalog.stream(name).id).values())
    return []
