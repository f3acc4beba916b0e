"""`append`: rows from a file or a pipe into a table of a stream."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from typing import IO, Any

import click

from millstream.cli.context import Invocation, json_option, note, pass_invocation, print_raw, stream_option


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
@json_option
@pass_invocation
def append(
    invocation: Invocation,
    table: str,
    file: IO[str],
    stream: str | None = None,
    rows: int = 1000,
    acks: str | None = None,
    as_json: bool = False,
) -> None:
    """Append the rows of FILE (or of stdin), one JSON object per line, to TABLE; return once they are durable.

    Each batch of rows is one operation, which readers see completely or not at all. If an operation
    fails, the earlier ones stay appended, and the command prints the line to continue with. With
    --json it prints a line per operation: its sequence numbers, and the token at which the rows are
    readable.
    """
    import millstream

    home = invocation.home(needs_source=False)
    with millstream.open(home.path) as opened:
        name = home.pick_stream(stream, of=sorted(home.config.streams))
        done = 0
        try:
            objects = _objects(file)
            while found := list(islice(objects, rows)):
                appended = opened.append(name, table, found, acks=acks)
                done += appended.row_count
                if as_json:
                    print_raw(json.dumps(appended.as_dict()))
        except millstream.MillstreamError:
            if done:
                note(
                    f"appended before this error, and durable: {done:,} rows, from the first {done:,} lines with a row"
                )
            raise
        if not as_json:
            note(f"{done:,} row{' is' if done == 1 else 's are'} durable")


def _finite(text: str) -> float:
    """Parse a number that JSON has: neither NaN nor an infinity, and none that would become one."""
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text} is neither a JSON number nor a 64-bit number; write null or text instead")
    return found


def _objects(file: IO[str]) -> Iterator[dict[str, Any]]:
    from millstream.errors import UsageError

    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"line {number} isn't JSON: {error}") from error
        if not isinstance(found, dict):
            raise UsageError(
                f"line {number} is not a JSON object but {type(found).__name__}",
                hint='Write {"column": value, …} on each line.',
            )
        yield found
