"""`route` and `reshard`: where applications' rows go, and spreading them over another number of shards."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import click

from millstream.cli.context import (
    Invocation,
    SuggestingGroup,
    json_option,
    note,
    pass_invocation,
    print_json,
    print_table,
    say,
    stream_option,
)


@click.group(cls=SuggestingGroup)
def route() -> None:
    """Explain the routes of appended rows: rules, hash ring, partitions."""


@route.command("explain")
@click.argument("table")
@click.argument("row", required=False)
@click.option(
    "--moment",
    "moments",
    multiple=True,
    metavar="COLUMN=TIME",
    help="A timestamp column of ROW, because JSON has no timestamps: `at=2026-01-31T12:30`, `at=now`. May be "
    "given several times.",
)
@click.option(
    "--as-of",
    metavar="TOKEN|TIME",
    help="Use the hash ring of that position or time, to find the shard of a row appended then. The rules are the "
    "current ones.",
)
@stream_option
@json_option
@pass_invocation
def explain(
    invocation: Invocation,
    table: str,
    row: str | None = None,
    moments: tuple[str, ...] = (),
    as_of: str | None = None,
    stream: str | None = None,
    as_json: bool = False,
) -> None:
    """Show which rule matches ROW of TABLE and why, and its shard, partition and sinks.

    ROW is a JSON object, in the form in which an application appends it. Without ROW, the command
    lists every route of the table, in the order in which they are tried. It writes nothing.
    """
    from millstream.administration.route_explain import explain_route

    told = _moments(moments)
    asked = {} if row is None and told else _object(row)
    found = explain_route(invocation.home(needs_source=False), stream, table, asked, moments=told, as_of=as_of)
    if as_json:
        print_json(found)
        return
    titles = ["rule", "takes", "to"]
    print_table(titles, [[one["rule"] or "-", one["why"], one["to"]] for one in found["tried"]], right=titles[:1])
    if not found["tried"]:
        say("no route takes its rows: they are rejected")
    if "shard" in found:
        say(_place(found))
    if found["leader"] is not None:
        say(_leader(found["leader"]))


def _place(found: dict[str, Any]) -> str:
    words = []
    if found["shard"] is not None:
        words.append(f"shard {found['shard']}")
    if found["partition"] is not None:
        words.append(f"partition {found['partition']}")
    words += found["sinks"]
    return "goes to " + ", ".join(words)


def _leader(found: dict[str, Any]) -> str:
    where = "this node" if found["here"] else found["node"]
    address = "" if found["here"] or found["address"] is None else f" ({found['address']})"
    return f"is written at {where}{address}, which leads with epoch {found['epoch']}"


def _moments(texts: tuple[str, ...]) -> dict[str, datetime]:
    from millstream.errors import UsageError
    from millstream.model.as_of_parsing import parse_moment

    found = {}
    now = datetime.now(UTC)
    for text in texts:
        column, said, moment = text.partition("=")
        if not column or not said:
            raise UsageError(
                f"{text!r} is not a column and a timestamp", hint="Write --moment created_at=2026-01-31T12:30"
            )
        found[column] = parse_moment(moment, now=now)
    return found


def _object(row: str | None) -> dict[str, Any] | None:
    from millstream.errors import UsageError

    if row is None:
        return None
    try:
        found = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the row isn't JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError('the row isn\'t an object such as {"id": 1}')
    return found


@click.command()
@stream_option
@click.option("--shards", type=int, required=True, help="New number of shards of the hash ring.")
@json_option
@pass_invocation
def reshard(invocation: Invocation, shards: int, stream: str | None = None, as_json: bool = False) -> None:
    """Change the number of shards that a stream's rows are spread over, from a cut on.

    Rows appended before the cut stay on their shards; readers still see each key's records in
    order. The command works while `millstream run` or an application writes the home; otherwise
    this process does the change. `millstream status` shows the cut.
    """
    from millstream.app.open_home import home_appender

    home = invocation.home(needs_source=False)
    name, _ = home.stream_config(stream)
    appender = home_appender(home)
    try:
        found = appender.reshard(name, shards)
    finally:
        appender.close()
    if as_json:
        print_json(found)
    elif found["changed"]:
        note(f"{name} is spread over {shards} shards ({found['before']} before), after {found['token']}")
    else:
        note(f"{name} has been spread over {shards} shards since {found['token']}; nothing was changed")
