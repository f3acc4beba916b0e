"""`query`: SQL over the lake, from an argument, from stdin, or at a prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from millstream.cli.context import Invocation, pass_invocation, stream_option
from millstream.cli.query_answer import answer

if TYPE_CHECKING:
    from millstream.cli.query_output import Style


@click.command()
@click.argument("sql", required=False)
@click.option(
    "--as-of",
    metavar="TIME|TOKEN",
    help="Query the tables at that position: an ISO time (UTC unless it has a zone), an age such as '10m ago', or "
    "a token.",
)
@click.option(
    "--lake-only",
    is_flag=True,
    help="Read nothing of the log: only what has landed. Tables of merged are then unknown.",
)
@click.option(
    "--format",
    "style",
    type=click.Choice(["table", "csv", "json", "arrow"]),
    default="table",
    show_default=True,
    help="Format of the result: csv has a header, and distinguishes NULL (nothing) from an empty text; json is a "
    "list of objects; arrow is an IPC stream.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@stream_option
@pass_invocation
def query(
    invocation: Invocation,
    sql: str | None,
    as_of: str | None,
    lake_only: bool,
    style: Style,
    as_json: bool,
    stream: str | None,
) -> None:
    r"""Run SQL on the current tables, all at one token; tables are named schema.table.

    Records are in history."schema.table", the rows of all regions in merged."schema.table". The token
    goes to stderr. Without SQL, the command reads it from stdin; on a terminal it opens a prompt,
    with \? for help.
    """
    from millstream.app.lake_sessions import open_lake

    home = invocation.home(needs_source=False)
    style = "json" if as_json else style
    if sql is None and sys.stdin.isatty():
        from millstream.cli.prompt import Prompt

        Prompt(home, stream, as_of=as_of, lake_only=lake_only, style=style).run()
        return
    text = sys.stdin.read() if sql is None else sql
    with open_lake(home, stream, as_of=as_of, lake_only=lake_only) as lake:
        statements = lake.statements(text)
        if not statements:
            raise click.UsageError("No SQL was given.")
        if style == "arrow" and len(statements) > 1:
            raise click.UsageError("An Arrow stream holds one result: give one statement.")
        for statement in statements:
            answer(lake, statement, style)
