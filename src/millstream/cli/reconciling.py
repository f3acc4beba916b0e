"""`reconcile`: merges what several regions have written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from millstream.cli.context import Session, json_option, note, pass_session, print_json, print_table, say, stream_option

if TYPE_CHECKING:
    from millstream.regions.reconciling import Reconciliation


@click.command()
@click.argument("tables", metavar="[TABLE]...", nargs=-1)
@stream_option
@click.option(
    "--dry-run", is_flag=True, help="Show what differs between this region's log and the others', and change nothing."
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    metavar="N",
    help="Lines of a table and region that --dry-run shows.",
)
@json_option
@pass_session
def reconcile(
    session: Session, tables: tuple[str, ...], stream: str | None, dry_run: bool, limit: int, as_json: bool
) -> None:
    """Bring together what the regions of a stream have written, as [streams.S.merge] says.

    Takes from each region's log what is new there, and keeps the outcome, which `home.merged` goes on from. The tables that the
    configuration merges where none is named.
    """
    from millstream.cli.startup import leave_pandas_out
    from millstream.regions.reconciling import reconcile_stream

    leave_pandas_out()
    found = reconcile_stream(session.own_home(needs_source=False), stream, tables, dry_run=dry_run, limit=limit)
    if as_json:
        print_json(found.as_dict())
        return
    _print(found)


def _print(found: Reconciliation) -> None:
    for one in found.tables:
        if one.unwritten:
            names = ", ".join(one.unwritten)
            note(f"{one.name}: no region has written {names} yet, which [streams.{found.stream}.merge] names")
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
                rows = f"{taken.rows:,} {'row' if taken.rows == 1 else 'rows'}"
                words = f"{rows} out of numbers {taken.after + 1} to {taken.upto}"
            say(f"{one.name}: region {taken.region}, {whose}: {words}")
            if taken.is_anew:
                note("  the log lost what was merged of its end: it was taken anew")
            if taken.begins_at is not None:
                note(f"  what it had in front of number {taken.begins_at} was dropped by retention, and never merged")
        say(f"{one.name}: {one.rows:,} rows merged of {one.regions} {'region' if one.regions == 1 else 'regions'}")


def _print_lines(table: str, region: int, lines: list[dict[str, Any]]) -> None:
    say(f"{table}, with region {region}" + ("" if lines else ": nothing differs"))
    if lines:
        titles = ("key", "column", "local", "remote", "merged", "known_to")
        print_table(titles, [[_cell(line[title]) for title in titles] for line in lines])


def _cell(value: str | None) -> str:
    return "NULL" if value is None else value if len(value) <= 40 else f"{value[:40]}…"
