"""`reconcile`: merges what several regions have written."""

from __future__ import annotations

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
    stream_option,
)
from millstream.model.human_text import counted

if TYPE_CHECKING:
    from millstream.regions.reconcile import Reconciliation


@click.command()
@click.argument("tables", metavar="[TABLE]...", nargs=-1)
@stream_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show the differences between this region's log and the others', and change nothing.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    metavar="N",
    help="Number of lines that --dry-run shows per table and region.",
)
@json_option
@pass_invocation
def reconcile(
    invocation: Invocation, tables: tuple[str, ...], stream: str | None, dry_run: bool, limit: int, as_json: bool
) -> None:
    """Merge the writes of a stream's regions, by the rules in [streams.S.merge].

    Reads the new records of each region's log and stores the merged state, which `home.merged`
    reads. Without TABLE, all tables with merge rules are merged.
    """
    from millstream.regions.reconcile import reconcile_stream

    found = reconcile_stream(invocation.own_home(needs_source=False), stream, tables, dry_run=dry_run, limit=limit)
    if as_json:
        print_json(found.as_dict())
        return
    _print(found)


def _print(found: Reconciliation) -> None:
    for one in found.tables:
        if one.unwritten:
            names = ", ".join(one.unwritten)
            note(f"{one.name}: [streams.{found.stream}.merge] names {names}, which no region has written yet")
        if found.is_dry_run:
            for region, lines in one.differences.items():
                _print_lines(one.name, region, lines.to_pylist())
            if not one.differences:
                note(f"{one.name}: this home has no other region's log")
            continue
        for taken in one.taken:
            whose = "own log" if taken.is_own else "log"
            words = "nothing new"
            if taken.upto > taken.after:
                words = f"{counted(taken.rows, 'row')} out of numbers {taken.after + 1} to {taken.upto}"
            say(f"{one.name}: region {taken.region}, {whose}: {words}")
            if taken.is_anew:
                note("  the log lost merged records at its end, or was recreated; its state was merged again")
            if taken.begins_at is not None:
                note(f"  retention dropped records before number {taken.begins_at} that were never merged")
        say(f"{one.name}: {one.rows:,} rows merged of {counted(one.regions, 'region')}")


def _print_lines(table: str, region: int, lines: list[dict[str, Any]]) -> None:
    say(f"{table}, compared with region {region}" + ("" if lines else ": nothing differs"))
    if lines:
        titles = ("key", "column", "local", "remote", "merged", "known_to")
        print_table(titles, [[_cell(line[title]) for title in titles] for line in lines])


def _cell(value: str | None) -> str:
    return "NULL" if value is None else value if len(value) <= 40 else f"{value[:40]}…"
