"""`pipeline rebuild` and `pipeline replay`: rebuilds of lake tables, and ranges of records as tables of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from millstream.cli.context import Session, json_option, note, pass_session, print_json, stream_option
from millstream.cli.run import pipeline

if TYPE_CHECKING:
    from millstream.app.rebuild import From

__all__ = ["pipeline"]


@pipeline.command("rebuild")
@click.argument("table", metavar="T")
@click.option(
    "--from",
    "origin",
    type=click.Choice(["history", "source"]),
    default="history",
    show_default=True,
    help="history: from the records in the lake. source: by a new copy of the table's rows.",
)
@click.option(
    "--view",
    "views",
    type=click.Choice(["current", "scd2"]),
    multiple=True,
    help="Which; all that the stream's `views` name where it isn't given.",
)
@stream_option
@json_option
@pass_session
def rebuild(
    session: Session, table: str, origin: From, views: tuple[str, ...], stream: str | None, as_json: bool
) -> None:
    """Rebuild a table of the lake, whatever became of it, and put it in the place of the old one in one commit.

    The running pipeline does it; if none runs, this command does. A folder that another program wrote
    into is moved aside. With --from source, a damaged history starts over too; the tables follow when the
    copy is whole.
    """
    from millstream.app.rebuild import rebuild_table

    done = rebuild_table(
        session.own_home(needs_source=False), table, stream=stream, origin=origin, views=views, say=note
    )
    if as_json:
        print_json([{"view": found.view, "rows": found.rows, "set_aside": found.aside} for found in done])
        return
    for found in done:
        if found.aside is not None:
            note(f"{table}: what stood in the place of its {found.view} lies in {found.aside}")
        what = "follows when the copy is whole" if found.rows is None else f"built anew, {found.rows:,} rows written"
        if found.view != "history":
            note(f"{table}: {found.view} {what}")
    if origin == "source":
        note(f"{table}: it will be copied by the running capture, or when it runs next")


@pipeline.command("replay")
@click.argument("table", metavar="T")
@click.option(
    "--from", "begin", metavar="TIME|TOKEN", help="Records behind it; from the first one where it isn't given."
)
@click.option("--to", "end", metavar="TIME|TOKEN", help="Records up to it; all that have landed where it isn't given.")
@click.option(
    "--into",
    required=True,
    metavar="NAME|PATH",
    help="A new name among the stream's replays, or a path (with a /; from the current folder) or URL.",
)
@stream_option
@json_option
@pass_session
def replay(
    session: Session, table: str, begin: str | None, end: str | None, into: str, stream: str | None, as_json: bool
) -> None:
    """Write a range of a table's records into a new Delta table, next to whatever runs.

    It lies in lake/<stream>/replays/NAME, or where PATH says, and is there whole or not at all. Asked
    again with the same range, it is found done; nothing is overwritten.
    """
    from millstream.app.rebuild import replay_table

    done = replay_table(session.own_home(needs_source=False), table, begin=begin, end=end, into=into, stream=stream)
    if as_json:
        print_json(
            {
                "path": done.path,
                "rows": done.rows,
                "after": int(done.after),
                "upto": int(done.upto),
                "already": done.already,
            }
        )
        return
    note(f"{table}: {done.rows:,} records {'were there already' if done.already else 'written'}, in {done.path}")
