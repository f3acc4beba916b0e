"""`init`: writes the configuration of a new home."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from millstream.cli.context import (
    Invocation,
    note,
    pass_invocation,
)


@click.command()
@click.argument("folder", metavar="[HOME]", required=False)
@click.option("--stream", required=True, metavar="S", help="The stream's name: lower-case letters, digits and _.")
@click.option(
    "--source",
    metavar="DSN",
    help="The database, as libpq takes it. Without one, the stream holds only appended rows.",
)
@click.option(
    "--tables",
    multiple=True,
    metavar="P",
    help='A pattern of tables; may be repeated. "!" excludes.  [default: public.*]',
)
@click.option(
    "--password-env",
    metavar="NAME",
    help="The environment variable that holds the password: the DSN contains none, and the file refers to the "
    "variable.",
)
@click.option(
    "--lake",
    "lake_format",
    type=click.Choice(["delta", "iceberg"]),
    default="delta",
    show_default=True,
    help="The format of the lake's tables.",
)
@click.option(
    "--location",
    metavar="PLACE",
    help="Where the lake's tables lie: a folder, or the URL of an object store (s3://bucket/folder).  [default: lake; with "
    "--catalog rest=URI: where the catalog says]",
)
@click.option(
    "--catalog",
    metavar="sql|rest=URI",
    help="The catalog of Iceberg tables: `sql`, a file in the home, or the address of a REST catalog.  [default: sql]",
)
@pass_invocation
def init(
    invocation: Invocation,
    folder: str | None,
    stream: str,
    source: str | None,
    tables: tuple[str, ...],
    password_env: str | None,
    lake_format: str,
    location: str | None,
    catalog: str | None,
) -> None:
    """Write a commented millstream.toml into HOME (or the current folder); never overwrite one.

    The file doesn't contain the DSN's password: it refers to a variable, and the command prints
    which one to export. Other users of the machine can see a command's arguments while it runs;
    `--password-env` keeps the password out of them.
    """
    from millstream.administration.initialize import make_home
    from millstream.errors import UsageError

    if tables and source is None:
        raise UsageError("--tables needs --source, the database to capture from")
    if password_env is not None and source is None:
        raise UsageError("--password-env needs --source, the database that the password is for")
    home = Path(folder or invocation.home_named or ".").absolute()
    patterns = tables or ("public.*",)
    made = make_home(
        home,
        stream=stream,
        source=source,
        tables=patterns,
        password_env=password_env,
        lake_format=lake_format,
        location=location,
        catalog=catalog,
    )
    note(f"Wrote {made.file}.")
    if made.variable is not None:
        what = "is set already" if os.environ.get(made.variable) else f"is needed:  export {made.variable}=…"
        note(f"The password isn't in it. For other commands, {made.variable} {what}")
    if source is not None:
        _list_columns(home, dict(made.environ))
    shown = home.name if home.parent == Path.cwd() else str(home)
    is_found = home == Path.cwd() and "MILLSTREAM_HOME" not in os.environ
    option = "" if is_found else f"--home {shlex.quote(shown)} "
    then = "run" if source is not None else "append TABLE rows.ndjson"
    note(f"Next:  millstream {option}doctor   then:  millstream {option}{then}")


def _list_columns(home: Path, environ: dict[str, str]) -> None:
    """Print which columns will be text in the lake and which won't be there, if the source can be asked."""
    from millstream.errors import MillstreamError
    from millstream.home.config_mapping import capture_config
    from millstream.home.home import Home

    try:
        from millstream.capture.source_table_checks import check_source

        made = Home(home, environ=environ)
        streams = made.config.streams.items()
        findings = [found for name, one in streams for found in check_source(capture_config(made, name, one))]
    except (MillstreamError, ImportError) as error:
        note(f"Columns couldn't be checked yet: {error}")
        return
    blocking = [found for found in findings if found.blocks == "source"]
    generated = [found for found in findings if found.code == "column_generated"]
    texts = [found for found in findings if found.code == "column_is_text"]
    for found in blocking:
        note(f"The source isn't ready: {found.message}")
    if texts:
        note("These columns will be text in the lake ([streams.S.types] can set a precision for numeric ones):")
        for found in texts:
            note(f"  {found.message.removesuffix(' will be text in the lake')}")
    if generated:
        note("Generated columns aren't captured; a query can compute them:")
        for found in generated:
            note(f"  {found.message}")
