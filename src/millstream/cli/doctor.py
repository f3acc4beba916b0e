"""`doctor`: everything that would keep a home from running, with the command that fixes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from millstream.cli.context import (
    Invocation,
    json_option,
    note,
    pass_invocation,
    print_json,
    print_raw,
    say,
)
from millstream.model.human_text import counted

if TYPE_CHECKING:
    from millstream.home.home import Home


@click.command()
@click.option("--sql", "as_sql", is_flag=True, help="Print one SQL script for the database's administrator.")
@click.option("--quiet", is_flag=True, help="Print only notes and problems, without the count.")
@json_option
@pass_invocation
def doctor(invocation: Invocation, as_sql: bool, quiet: bool, as_json: bool) -> None:
    """Check home, disk, catalog, Java, Spark, lake and source; print the command that fixes each problem (exit code 3)."""
    from millstream.administration.doctor import as_checks, examine, repair_script

    home = invocation.home()
    if as_sql:
        script, unasked = repair_script(home)
        print_raw(script, nl=False)
        for diagnosis in unasked:
            note(
                f"The script has no statements for the {diagnosis.check}, because the check failed: {diagnosis.message}"
            )
            note(diagnosis.fix)
        sys.exit(3 if unasked else 0)
    found = []

    for diagnosis in examine(home, (lambda _line: None) if quiet else note, partial(_served, home)):
        found.append(diagnosis)
        if not as_json and not (quiet and diagnosis.is_ok):
            _print_diagnosis(diagnosis)
    wrong = [diagnosis for diagnosis in found if diagnosis.is_wrong]
    if not as_json and not quiet:
        right = sum(diagnosis.is_ok for diagnosis in found)
        notes = len(found) - right - len(wrong)
        say(f"{counted(len(found), 'check')}: {right} right, {counted(notes, 'note')}, {len(wrong)} wrong")
    if as_json:
        findings = [diagnosis.as_dict() for diagnosis in found]
        print_json({"healthy": not wrong, "findings": findings, "checks": as_checks(home, found)})
    sys.exit(3 if wrong else 0)


@contextmanager
def _served(home: Home) -> Iterator[None]:
    """Run the home's Flight server while the block lasts: Spark's executors may read the log from it."""
    from millstream.app.open_home import home_appender
    from millstream.serving.access import Access
    from millstream.serving.flight.server import flight_of

    with (
        closing(Access.of_home(home)) as access,
        closing(home_appender(home)) as appender,
        flight_of(home, access, appender),
    ):
        yield


def _print_diagnosis(diagnosis: Any) -> None:
    if diagnosis.is_ok:
        say("ok      ", nl=False, fg="green")
    elif not diagnosis.is_wrong:
        say("note    ", nl=False, fg="yellow")
    else:
        say("wrong   ", nl=False, fg="red", bold=True)
    where = f" (stops the {diagnosis.blocks})" if diagnosis.blocks in {"source", "table"} else ""
    say(f"{diagnosis.check}: {diagnosis.message}{where}")
    if diagnosis.fix:
        say(f"          {diagnosis.fix}")
    for line in diagnosis.sql.splitlines():
        say(f"          {line}")
