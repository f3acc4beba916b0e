"""`pipeline fold`, `pipeline rebuild` and `pipeline replay`: work on lake tables on request."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from millstream.cli.context import Invocation, json_option, note, pass_invocation, print_json, say, stream_option
from millstream.cli.run import pipeline

if TYPE_CHECKING:
    from millstream.administration.rebuild import From


@pipeline.command("fold")
@click.argument("tables", metavar="[TABLE]…", nargs=-1)
@stream_option
@json_option
@pass_invocation
def fold(invocation: Invocation, tables: tuple[str, ...], stream: str | None, as_json: bool) -> None:
    """Fold tables of the lake now: bring `current` and `scd2` to what has landed. Without TABLE: all tables.

    The running pipeline does it; if none runs, this command does. With `fold = "manual"` in the
    stream's lake, tables are folded by this command alone.
    """
    from millstream.administration.fold import fold_tables

    done = fold_tables(invocation.own_home(needs_source=False), tables, stream=stream, say=note)
    if as_json:
        print_json([{"table": found.table, "view": found.view, "rows": found.rows} for found in done])
        return
    for found in done:
        note(f"{found.table}: {found.view} folded, {found.rows:,} rows written")


@pipeline.command("env")
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--platform",
    "platforms",
    metavar="TAG",
    multiple=True,
    help="The workers' platform, as in names of wheels (manylinux_2_28_aarch64), if it isn't this machine's: pip fetches "
    "the packages. May be repeated; any of them fits.",
)
@json_option
def env(file: Path, platforms: tuple[str, ...], as_json: bool) -> None:
    """Pack what Spark's executors need into FILE (.tar.gz), and print the lines for millstream.toml.

    The packages are this Python's, so workers need a Python of the same minor version, and the same
    platform unless --platform names theirs.
    """
    from millstream.administration.executor_packages import pack_executor_packages

    packed = pack_executor_packages(file, platforms)
    if as_json:
        facts = {"file": str(packed.file), "size_bytes": packed.size_bytes, "packages": packed.versions}
        print_json(facts | {"conf": packed.conf()})
        return
    names = ", ".join(f"{name} {version}" for name, version in packed.versions.items())
    note(f"{packed.file}: {packed.size_bytes >> 20} MiB with {names}. Add these lines to millstream.toml:")
    say("[spark.conf]")
    for key, value in packed.conf().items():
        say(f"{json.dumps(key)} = {json.dumps(value)}")


@pipeline.command("move")
@click.argument("location", metavar="URL")
@stream_option
@json_option
@pass_invocation
def move(invocation: Invocation, location: str, stream: str | None, as_json: bool) -> None:
    """Move the lake to URL, an object store's prefix or a folder, and write it into millstream.toml as `location`.

    Nothing may land while it runs: stop `run` and `serve` first. Every file is copied, read again and
    compared. The old lake stays, and the command says how to remove it. If it is interrupted, run it again.
    Set the new store's `storage_options` before. After an Iceberg lake's files or its home were moved by hand, name
    the lake's present location: the tables' metadata are written again with its address.
    """
    from millstream.administration.lake_move import move_lake
    from millstream.model.addresses import mask_address
    from millstream.model.human_text import counted, human_bytes

    done = move_lake(invocation.own_home(needs_source=False), location, stream=stream, say=note)
    if as_json:
        facts = {"stream": done.stream, "old": done.old, "new": done.new}
        print_json(facts | {"files": done.files, "size_bytes": done.size_bytes})
        return
    if not done.files:
        note(f"The lake is at {mask_address(done.new)} now; no file had to be copied.")
        return
    note(
        f"{counted(done.files, 'file')} ({human_bytes(done.size_bytes)}) copied to {mask_address(done.new)}, and compared."
    )
    remove = f"aws s3 rm --recursive {done.old}/" if "://" in done.old else f"rm -r {shlex.quote(done.old)}"
    note(f"millstream.toml names the new place. Nothing reads the old lake now; remove it with:  {remove}")


@pipeline.command("rebuild")
@click.argument("table", metavar="T")
@click.option(
    "--from",
    "origin",
    type=click.Choice(["history", "source"]),
    default="history",
    show_default=True,
    help="history: rebuild from the records in the lake. source: copy the table's rows again.",
)
@click.option(
    "--view",
    "views",
    type=click.Choice(["current", "scd2", "merged"]),
    multiple=True,
    help="The view to rebuild; `merged` from the logs of all regions. [default: current and scd2, if in the stream's "
    "`views`]",
)
@stream_option
@json_option
@pass_invocation
def rebuild(
    invocation: Invocation, table: str, origin: From, views: tuple[str, ...], stream: str | None, as_json: bool
) -> None:
    """Rebuild a table of the lake, and replace the old one in one commit.

    The running pipeline does it; if none runs, this command does. A folder that another program
    wrote into is moved away; an Iceberg table gets a tag and is emptied. With --from source, a damaged history starts over too; the other views
    follow when the copy is complete.
    """
    from millstream.administration.rebuild import rebuild_table

    done = rebuild_table(
        invocation.own_home(needs_source=False), table, stream=stream, origin=origin, views=views, say=note
    )
    if as_json:
        print_json([{"view": found.view, "rows": found.rows, "set_aside": found.aside} for found in done])
        return
    for found in done:
        if found.aside is not None:
            note(f"{table}: what its {found.view} was is kept: {found.aside}")
        what = "follows when the copy is complete" if found.rows is None else f"rebuilt, {found.rows:,} rows written"
        if found.view != "history":
            note(f"{table}: {found.view} {what}")
    if origin == "source":
        note(f"{table}: the running capture will copy it, or the next run")


@pipeline.command("replay")
@click.argument("table", metavar="T")
@click.option(
    "--from",
    "begin",
    metavar="TIME|TOKEN",
    help="Position after which records are written. [default: the first record in the lake]",
)
@click.option(
    "--to", "end", metavar="TIME|TOKEN", help="Position of the last record to write. [default: all records in the lake]"
)
@click.option(
    "--into",
    required=True,
    metavar="NAME|PATH",
    help="A new name among the stream's replays, or a path (with a /; relative to the current folder) or URL.",
)
@stream_option
@json_option
@pass_invocation
def replay(
    invocation: Invocation, table: str, begin: str | None, end: str | None, into: str, stream: str | None, as_json: bool
) -> None:
    """Write a range of a table's records into a new Delta table, while everything else continues.

    The new table is in lake/<stream>/replays/NAME, or at PATH, and is complete or absent. The same
    call with the same range returns the finished table; nothing is overwritten.
    """
    from millstream.administration.rebuild import replay_table

    done = replay_table(invocation.own_home(needs_source=False), table, begin=begin, end=end, into=into, stream=stream)
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
    note(f"{table}: {done.rows:,} records {'were already written' if done.already else 'written'}, in {done.path}")
