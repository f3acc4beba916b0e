"""`wal …`: the log on disk, for people and programs. Needs no configuration: a copied folder will do."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from millstream.cli.context import (
    Session,
    note,
    pass_session,
    stream_option,
)

if TYPE_CHECKING:
    from millstream.app.records_json import Cat

_FOLLOW_POLL_S = 0.5


@click.group()
def wal() -> None:
    """Look into the log on disk: live, or a copied folder."""


@wal.command()
@click.option(
    "--format", "style", type=click.Choice(["ndjson"]), default="ndjson", show_default=True, help="One record a line."
)
@click.option(
    "--values",
    type=click.Choice(["json", "text"]),
    default="json",
    show_default=True,
    help="json: numbers that JSON holds exactly are numbers. text: every value as PostgreSQL prints it.",
)
@click.option("--from-offset", type=click.IntRange(min=0), metavar="N", help="Begin at this offset (of each shard).")
@click.option("--table", metavar="T", help="Only this table, as schema.table.")
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="Stop after so many records.")
@click.option("--follow", is_flag=True, help="Go on with what is appended, until interrupted.")
@click.option(
    "--without-mark", is_flag=True, help="Show every valid whole group: for a folder copied without its mark."
)
@stream_option
@pass_session
def cat(
    session: Session,
    style: str,
    values: str,
    from_offset: int | None,
    table: str | None,
    limit: int | None,
    follow: bool,
    without_mark: bool,
    stream: str | None,
) -> None:
    """Print records, one a line, in order, and nothing else on stdout."""
    from millstream.app.opened import open_reader, table_ids
    from millstream.app.records_json import Cat
    from millstream.model.positions import Offset

    del style
    home = session.home()
    name = home.pick_stream(stream)
    reader = open_reader(home, name, without_mark=without_mark)
    if without_mark:
        note("without the mark: shown is every valid whole group, durable or not")
    records = Cat(
        name,
        reader,
        "text" if values == "text" else "json",
        None if table is None else frozenset(table_ids(reader, table)),
        None if from_offset is None else Offset(from_offset),
    )
    left = _print_lines(records, limit)
    while follow and left != 0:
        sys.stdout.flush()
        upto = reader.persisted_upto()
        if reader.wait_beyond(upto, _FOLLOW_POLL_S) or records.is_behind():
            left = _print_lines(records, left)


def _print_lines(records: Cat, limit: int | None) -> int | None:
    """Print what there is, at most `limit` lines; how many are left to print."""
    from millstream.app.records_json import to_json

    if limit == 0:
        return 0
    write = sys.stdout.write
    for facts in records.lines():
        write(to_json(facts) + "\n")
        if limit is not None:
            limit -= 1
            if limit == 0:
                break
    return limit


def echo_rows(rows: list[dict[str, Any]]) -> None:
    """Rows of one shape as a table."""
    from millstream.cli.context import print_table

    columns = list(rows[0]) if rows else []
    print_table(columns, [list(row.values()) for row in rows])
