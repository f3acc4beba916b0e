"""`append`: rows from a file or a pipe into a table of a stream."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import count, islice
from typing import IO, Any

import click

from millstream.cli.context import (
    Invocation,
    json_option,
    note,
    pass_invocation,
    print_raw,
    silence_stdout,
    stream_option,
)
from millstream.model.human_text import counted


@click.command()
@click.argument("table")
@click.argument("file", type=click.File("r", encoding="utf-8"), default="-")
@stream_option
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Number of rows in one operation, at most.",
)
@click.option(
    "--acks",
    metavar="LEVEL",
    help="Acknowledgement level: local, durable(1), durable(2) … for that many followers, object for the object "
    "store. A level below the stream's own has no effect.",
)
@click.option(
    "--keep-valid-rows",
    is_flag=True,
    help="Leave out rows that don't fit the table, and report them on stderr; otherwise one of them refuses its operation.",
)
@click.option(
    "--idempotency-key",
    metavar="KEY",
    help="Append no operation again that a run with this key and the same --rows has appended: its key is KEY/0, KEY/1 …",
)
@click.option(
    "--session", metavar="NAME", help="The same by a session: each operation has a number in it. Needs --number."
)
@click.option(
    "--number",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of the first operation in --session; the others follow.",
)
@json_option
@pass_invocation
def append(
    invocation: Invocation,
    table: str,
    file: IO[str],
    stream: str | None = None,
    rows: int = 1000,
    acks: str | None = None,
    keep_valid_rows: bool = False,
    idempotency_key: str | None = None,
    session: str | None = None,
    number: int | None = None,
    as_json: bool = False,
) -> None:
    """Append the rows of FILE (or of stdin), one JSON object per line, to TABLE; return once they are durable.

    Each batch of rows is one operation, which readers see completely or not at all. If an operation
    fails, the earlier ones stay appended, and the command prints the line to continue with. With
    --json it prints a line per operation: its sequence numbers, and the token at which the rows are
    readable.
    """
    import millstream
    from millstream.errors import UsageError

    if (session is None) != (number is None) or (session is not None and idempotency_key is not None):
        raise UsageError("--session and --number go together, and exclude --idempotency-key")
    home = invocation.home(needs_source=False)
    with millstream.open(home.path) as opened:
        name = home.pick_stream(stream, of=sorted(home.config.streams))
        done = read = again = 0
        try:
            objects = _objects(file)
            for operation in count():
                found = list(islice(objects, rows))
                if not found:
                    break
                appended = opened.append(
                    name,
                    table,
                    found,
                    acks=acks,
                    keep_valid_rows=keep_valid_rows,
                    idempotency_key=None if idempotency_key is None else f"{idempotency_key}/{operation}",
                    session=session,
                    number=None if number is None else number + operation,
                )
                for row in appended.rejected:
                    note(f"left out: row {read + row.row + 1}: {row.reason}")
                done += appended.row_count
                read += len(found)
                again += appended.row_count if appended.duplicate else 0
                if as_json:
                    print_raw(json.dumps(appended.as_dict()))
        except BaseException as error:  # an interrupt and a line that isn't text too
            if done:
                note(
                    f"appended so far, and durable: {counted(done, 'row')}, from the first {counted(read, 'line')} with a row"
                )
            if isinstance(error, BrokenPipeError):  # later rows may not have been appended
                silence_stdout()
                raise click.exceptions.Exit(1) from error
            raise
        if not as_json:
            before = f", {again:,} of them from before" if again else ""
            note(f"{counted(done, 'row')} {'is' if done == 1 else 'are'} durable{before}")


def _finite(text: str) -> float:
    """Parse a number that JSON has: neither NaN nor an infinity, and none that would become one."""
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text} is neither a JSON number nor a 64-bit number; write null or text instead")
    return found


def _objects(file: IO[str]) -> Iterator[dict[str, Any]]:
    from millstream.errors import UsageError

    number = 0
    try:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line, parse_float=_finite, parse_constant=_finite)
            except (ValueError, RecursionError) as error:
                what = error.msg if isinstance(error, json.JSONDecodeError) else error
                raise UsageError(f"line {number} isn't JSON: {what}") from error
            if not isinstance(found, dict):
                raise UsageError(
                    f"line {number} is not a JSON object but {type(found).__name__}",
                    hint='Write {"column": value, …} on each line.',
                )
            yield found
    except UnicodeDecodeError as error:  # text is decoded ahead of its lines
        raise UsageError(f"the text behind line {number} isn't UTF-8: {error.reason}") from error
