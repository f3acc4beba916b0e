"""`diff`: compares the lake with the source."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Final, Self

import click

from millstream.cli.context import (
    Invocation,
    json_option,
    note,
    on_terminal,
    pass_invocation,
    print_json,
    say,
    stream_option,
)
from millstream.model.human_text import counted, readable

if TYPE_CHECKING:
    from millstream.diff.asked_repairs import RepairAsked
    from millstream.diff.compare import Difference, DiffReport, Progress, TableDiff

_SHOWN: Final = 10
"""Differing keys of a table that are printed for people."""
_SAY_EVERY_S: Final = 5.0
_VALUE_CHARS_MAX: Final = 60


@click.command()
@click.argument("tables", metavar="[TABLE]...", nargs=-1)
@stream_option
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="Time to wait for the source's running transactions, and for the lake to reach the same LSN.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=10_000,
    show_default=True,
    metavar="N",
    help="Number of differing keys that --json lists per table; others are only counted.",
)
@click.option("--repair", is_flag=True, help="Request that capture reads the differing keys again, through the log.")
@click.option("--wait", is_flag=True, help="With --repair: wait for the repair, then compare those tables again.")
@json_option
@pass_invocation
def diff(
    invocation: Invocation,
    tables: tuple[str, ...],
    stream: str | None,
    timeout_s: float,
    limit: int,
    repair: bool,
    wait: bool,
    as_json: bool,
) -> None:
    """Compare the lake's tables with the source at one LSN, by key and value, while both change.

    The exit code is 3 if a table differs or is damaged, and 1 if a table couldn't be compared. Without TABLE, all
    tables are compared.
    """
    from millstream.diff.asked_repairs import ask_repairs, wait_for_repairs
    from millstream.diff.compare import DAMAGED, Compared, diff_stream
    from millstream.errors import LakeFilesGone, LakeTableForeign

    if wait and not repair:
        raise click.UsageError("--wait needs --repair")
    home = invocation.home()
    teller = click.get_current_context().with_resource(_Teller())

    def compare(names: tuple[str, ...]) -> DiffReport:
        found = diff_stream(
            home,
            stream,
            tables=names,
            timeout_s=timeout_s,
            limit=limit,
            on_progress=teller.progress,
            on_table=(lambda _table: None) if as_json else teller.table,
        )
        teller.clear()
        return found

    try:
        report = compare(tables)
    except (LakeTableForeign, LakeFilesGone) as error:
        error.exit_code = DAMAGED
        raise
    facts = report.as_dict()
    if not as_json:
        _sum_up(report)
    differing = tuple(table.name for table in report.tables if table.state is Compared.DIFFERENT)
    if repair and differing:
        asked = ask_repairs(home, report)
        facts["repair"] = [one.as_dict() for one in asked.tables]
        for one in asked.tables:
            note(f"{one.table}: {_asked(one)}")
        if not asked.capture_runs:
            note("No capture runs; the next `millstream run` repairs the tables.")
        elif wait:
            wait_for_repairs(home, report, asked, timeout_s=timeout_s, on_wait=teller.say)
            teller.clear()
            report = compare(differing)
            facts["repaired"] = report.as_dict()
            if not as_json:
                _sum_up(report)
    if as_json:
        print_json(facts)
    sys.exit(report.exit_code)


def _sum_up(report: DiffReport) -> None:
    facts = report.as_dict()
    counts = ", ".join(f"{n} {state.replace('_', ' ')}" for state, n in facts["counts"].items() if n)
    note(f"{report.stream} at {facts['lsn']}: {counts or 'no tables'}")


def _asked(asked: RepairAsked) -> str:
    if asked.how == "keys":
        return f"{asked.keys:,} {'key is' if asked.keys == 1 else 'keys are'} read again"
    return f"it will be copied again: {asked.reason}" if asked.how == "copy" else f"can't be repaired: {asked.reason}"


class _Teller:
    """Prints the progress on stderr: one line that changes on a terminal; elsewhere the last one, now and then."""

    def __init__(self) -> None:
        from millstream.workers import Worker

        self._terminal = on_terminal()
        self._waiting = self._printed = ""
        self._wide = 0
        self._lock = threading.Lock()
        self._printing = Worker("millstream-diff-progress", self._print, every_s=_SAY_EVERY_S)

    def __enter__(self) -> Self:
        self._printing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._printing.stop()
        self._printing.join()

    def progress(self, progress: Progress) -> None:
        """Show the progress. From any thread."""
        words = progress.doing
        if progress.table:
            share = f"{progress.rows:,} of about {progress.rows_estimate:,} rows"
            words = f"{progress.table}: {progress.doing}, {share}"
        self.say(words)

    def say(self, words: str) -> None:
        """Print a line. From any thread."""
        with self._lock:
            if self._terminal:
                shown = readable(words)
                click.echo(f"\r{shown.ljust(self._wide)}", nl=False, err=True)
                self._wide = len(shown)
            else:
                self._waiting = words

    def _print(self) -> bool:
        with self._lock:
            if self._waiting != self._printed:
                note(self._waiting)
                self._printed = self._waiting
        return True

    def clear(self) -> None:
        """Remove the line."""
        self._waiting = self._printed
        if self._terminal and self._wide:
            click.echo(f"\r{' ' * self._wide}\r", nl=False, err=True)
            self._wide = 0

    def table(self, table: TableDiff) -> None:
        """Print a table's outcome on stdout."""
        with self._lock:
            self.clear()
            print_outcome(table)


def print_outcome(table: TableDiff) -> None:
    """Print a table's outcome for people."""
    colour = {"equal": "green", "different": "red", "not_compared": "yellow"}.get(table.state.value)
    words = {"equal": f"equal, {counted(table.rows_source, 'row')}"}
    words["different"] = (
        f"{table.different:,} {'key differs' if table.different == 1 else 'keys differ'},"
        f" {counted(table.rows_lake, 'row')} in the lake, {table.rows_source:,} in the source"
    )
    said = words.get(table.state.value) or f"{table.state.value.replace('_', ' ')}: {table.reason}"
    say(f"{table.name}: ", nl=False)
    say(said, fg=colour)
    for line in table.notes:
        say(f"  note: {line}")
    for difference in table.differences[:_SHOWN]:
        say(f"  {_words(difference)}")
    if table.different > _SHOWN:
        say(f"  … and {table.different - _SHOWN:,} more: --json lists them")


def _words(difference: Difference) -> str:
    key = ", ".join(f"{name}={_value(text)}" for name, text in difference.key.items())
    facts: dict[str, Any] = difference.as_dict()
    if facts["what"] == "values":
        return f"{key}: " + "; ".join(
            f"{name} is {_value(mine)}, {_value(other)} in the source"
            for name, (mine, other) in difference.columns.items()
        )
    if facts["what"] == "count":
        return f"{key}: {difference.counts[0]} times, {difference.counts[1]} in the source"
    return f"{key}: {facts['what'].replace('_', ' ').replace('lake', 'the lake').replace('source', 'the source')}"


def _value(text: str | None) -> str:
    if text is None:
        return "NULL"
    shown = text if len(text) <= _VALUE_CHARS_MAX else f"{text[:_VALUE_CHARS_MAX]}…"
    return repr(shown)
