"""`init`, `doctor`, `config show`, `slot drop`, `catalog move`: before and after running."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from millstream.cli.context import (
    Invocation,
    SuggestingGroup,
    confirm,
    json_option,
    note,
    pass_invocation,
    print_json,
    print_raw,
    say,
    stream_option,
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
    "--location",
    metavar="PLACE",
    default="lake",
    show_default=True,
    help="Where the lake's tables lie: a folder, or the URL of an object store (s3://bucket/folder).",
)
@pass_invocation
def init(
    invocation: Invocation,
    folder: str | None,
    stream: str,
    source: str | None,
    tables: tuple[str, ...],
    password_env: str | None,
    location: str,
) -> None:
    """Write a commented millstream.toml into HOME (or the current folder); never overwrite one.

    The file doesn't contain the DSN's password: it refers to a variable, and the command prints
    which one to export. Other users of the machine can see a command's arguments while it runs;
    `--password-env` keeps the password out of them.
    """
    from millstream.app.initialize import make_home
    from millstream.errors import UsageError

    if tables and source is None:
        raise UsageError("--tables needs --source, the database to capture from")
    if password_env is not None and source is None:
        raise UsageError("--password-env needs --source, the database that the password is for")
    home = Path(folder or invocation.home_named or ".").absolute()
    patterns = tables or ("public.*",)
    made = make_home(home, stream=stream, source=source, tables=patterns, password_env=password_env, location=location)
    note(f"Wrote {made.file}.")
    if made.variable is not None:
        what = "is set already" if os.environ.get(made.variable) else f"is needed:  export {made.variable}=…"
        note(f"The password isn't in it. For other commands, {made.variable} {what}")
    if source is not None:
        _list_columns(home, dict(made.environ))
    shown = home.name if home.parent == Path.cwd() else home
    option = "" if home == Path.cwd() else f"--home {shown} "
    then = "run" if source is not None else "append TABLE rows.ndjson"
    note(f"Next:  millstream {option}doctor   then:  millstream {option}{then}")


def _list_columns(home: Path, environ: dict[str, str]) -> None:
    """Print which columns will be text in the lake and which won't be there, if the source can be asked."""
    from millstream.config.file import load_config
    from millstream.errors import MillstreamError
    from millstream.home.config_mapping import capture_config
    from millstream.home.home import Home

    try:
        from millstream.capture.source_checks import check_source

        config = load_config(home / "millstream.toml", environ).config
        findings = [f for name, s in config.streams.items() for f in check_source(capture_config(Home(home), name, s))]
    except (MillstreamError, ImportError) as error:
        note(f"Columns couldn't be checked yet: {error}")
        return
    blocking = [found for found in findings if found.blocks == "source"]
    generated = [found for found in findings if found.code == "column_generated"]
    texts = [found for found in findings if found.code == "column_is_text"]
    for found in blocking:
        end = "" if found.message.endswith((".", "?", "!")) else "."
        note(f"The source isn't ready: {found.message}{end} Run `millstream doctor` for the fix.")
    if texts:
        note("These columns will be text in the lake ([streams.S.types] can set a precision for numeric ones):")
        for found in texts:
            note(f"  {found.message.removesuffix(' will be text in the lake')}")
    if generated:
        note("Generated columns aren't captured; a query can compute them:")
        for found in generated:
            note(f"  {found.message}")


@click.command()
@click.option("--sql", "as_sql", is_flag=True, help="Print one SQL script for the database's administrator.")
@click.option("--quiet", is_flag=True, help="Print only notes and problems, without the count.")
@json_option
@pass_invocation
def doctor(invocation: Invocation, as_sql: bool, quiet: bool, as_json: bool) -> None:
    """Check home, disk, catalog, Java, Spark, lake and source; print the command that fixes each problem (exit code 3)."""
    from millstream.app.doctor import examine, repair_script

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
    for diagnosis in examine(home, (lambda _line: None) if quiet else note):
        found.append(diagnosis)
        if not as_json and not (quiet and diagnosis.is_ok):
            _print_diagnosis(diagnosis)
    wrong = [diagnosis for diagnosis in found if diagnosis.blocks != "nothing"]
    if not as_json and not quiet:
        right = sum(diagnosis.is_ok for diagnosis in found)
        notes = len(found) - right - len(wrong)
        checks, noted = "check" + "s" * (len(found) != 1), "note" + "s" * (notes != 1)
        say(f"{len(found)} {checks}: {right} right, {notes} {noted}, {len(wrong)} wrong")
    if as_json:
        print_json({"healthy": not wrong, "findings": [diagnosis.as_dict() for diagnosis in found]})
    sys.exit(3 if wrong else 0)


def _print_diagnosis(diagnosis: Any) -> None:
    if diagnosis.is_ok:
        say("ok      ", nl=False, fg="green")
    elif diagnosis.blocks == "nothing":
        say("note    ", nl=False, fg="yellow")
    else:
        say("wrong   ", nl=False, fg="red", bold=True)
    where = f" (stops the {diagnosis.blocks})" if diagnosis.blocks in {"source", "table"} else ""
    say(f"{diagnosis.check}: {diagnosis.message}{where}")
    if diagnosis.fix:
        say(f"          {diagnosis.fix}")
    for line in diagnosis.sql.splitlines():
        say(f"          {line}")


@click.group(cls=SuggestingGroup)
def config() -> None:
    """Show the configuration."""


@config.command("show")
@json_option
@pass_invocation
def config_show(invocation: Invocation, as_json: bool) -> None:
    """Print the effective configuration, secrets masked, with the origin of each value."""
    loaded = invocation.home(needs_source=False).loaded_config
    if as_json:
        from millstream.config.file import key_text

        print_json([{"key": key_text(p), "value": v, "origin": o} for p, v, o in loaded.effective()])
        return
    from millstream.config.file import key_text

    sections: dict[tuple[Any, ...], list[str]] = {}
    for path, value, origin in loaded.effective():
        # TOML allows a section only once, and its keys are split if tables stand between them.
        text = "{}" if value == {} else json.dumps(value, ensure_ascii=False)
        line = f"{key_text(path[-1:])} = {text}" if value is not None else f"# {key_text(path[-1:])} is not set"
        sections.setdefault(path[:-1], []).append(f"{line:<60}  # {origin}")
    for number, (section, lines) in enumerate(sections.items()):
        if number:
            say()
        if section and isinstance(section[-1], int):  # one of an array of tables
            say(f"[[{key_text(section[:-1])}]]", bold=True)
        elif section:
            say(f"[{key_text(section)}]", bold=True)
        for line in lines:
            say(line)
    for stream in loaded.config.streams:
        for name, error in loaded.unset_consumers(stream).items():
            note(f"consumer {name} isn't shown: {error.message}")


@click.group(cls=SuggestingGroup)
def slot() -> None:
    """Manage the replication slot at the source."""


@slot.command("drop")
@stream_option
@click.option("--yes", is_flag=True, help="Don't ask for confirmation.")
@pass_invocation
def slot_drop(invocation: Invocation, stream: str | None, yes: bool) -> None:
    """Drop a stream's slot, to free the source's disk.

    Later changes are not captured; the next run copies every table again.
    """
    from millstream.capture.source_checks import drop_slot
    from millstream.home.config_mapping import capture_config
    from millstream.model.readable import human_bytes
    from millstream.writers.stall_reasons import forget_given_up

    home = invocation.home()
    name, stream_config = home.stream_config(stream)
    capture = capture_config(home, name, stream_config)
    confirm(f"Drop the slot {capture.slot}? The next run will copy every table of {name} again", yes=yes)
    home.prepare()
    with home.open_catalog() as catalog:
        row = catalog.resolve_stream(name)
        held = drop_slot(capture, catalog)
        forget_given_up(catalog, row)
    note(
        f"there was no slot {capture.slot}" if held is None else f"dropped {capture.slot}; it held {human_bytes(held)}"
    )
    note("Its publications stay for the next run. If there will be none, run at the source:")
    for publication in (capture.publication, f"{capture.publication}_inserts"):
        quoted = publication.replace('"', '""')
        note(f'  DROP PUBLICATION IF EXISTS "{quoted}";')


@click.group(cls=SuggestingGroup)
def catalog() -> None:
    """Manage the catalog, which the home's processes share: streams, positions, tables."""


@catalog.command("move")
@pass_invocation
def catalog_move(invocation: Invocation) -> None:
    """Move the embedded catalog into the PostgreSQL database in [catalog] url.

    Stop all processes of the home first.
    """
    from millstream.app.catalog_move import move_catalog

    home = invocation.home(needs_source=False)
    moved = move_catalog(home)
    note(f"{', '.join(moved.streams) or 'no stream'}: moved to the {moved.place}; the old file is now {moved.kept}")
