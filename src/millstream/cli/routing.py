"""`route` and `reshard`: where applications' rows go, and spreading them over another number of shards."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import click

from millstream.cli.context import (
    Session,
    SuggestingGroup,
    json_option,
    note,
    pass_session,
    print_json,
    print_table,
    say,
    stream_option,
)


@click.group(cls=SuggestingGroup)
def route() -> None:
    """Where the rows that applications append go: rules, hash ring, partitions."""


@route.command("explain")
@click.argument("table")
@click.argument("row", required=False)
@click.option(
    "--moment",
    "moments",
    multiple=True,
    metavar="COLUMN=TIME",
    help="A column of ROW that is a moment, which JSON has no word for: `at=2026-01-31T12:30`, `at=now`. May be given several times.",
)
@click.option(
    "--as-of",
    metavar="TOKEN|TIME",
    help="By the hash ring that was in force at that position, or time: where such a row lies that was appended then. Rules are today's.",
)
@stream_option
@json_option
@pass_session
def explain(
    session: Session,
    table: str,
    row: str | None = None,
    moments: tuple[str, ...] = (),
    as_of: str | None = None,
    stream: str | None = None,
    as_json: bool = False,
) -> None:
    """Say which rule takes ROW of TABLE and why, and which shard, partition and sinks it goes to.

    ROW is a JSON object, as an application appends it. Without one, everything that may take a row of the table is listed, in the order in
    which it is tried. Nothing is written.
    """
    from millstream.app.route_explain import explain_route

    told = _moments(moments)
    asked = {} if row is None and told else _object(row)
    found = explain_route(session.home(needs_source=False), stream, table, asked, moments=told, as_of=as_of)
    if as_json:
        print_json(found)
        return
    titles = ["rule", "takes", "to"]
    print_table(titles, [[one["rule"] or "-", one["why"], one["to"]] for one in found["tried"]], right=titles[:1])
    if not found["tried"]:
        say("nothing takes rows of it: they are refused")
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
    from millstream.home.time_parsing import parse_moment

    found = {}
    now = datetime.now(UTC)
    for text in texts:
        column, said, moment = text.partition("=")
        if not column or not said:
            raise UsageError(f"{text!r} names no column's moment", hint="Such as --moment created_at=2026-01-31T12:30")
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
@click.option("--shards", type=int, required=True, help="How many shards the hash ring spreads rows over from now on.")
@json_option
@pass_session
def reshard(session: Session, shards: int, stream: str | None = None, as_json: bool = False) -> None:
    """Spread a stream's rows over another number of shards, from a cut on.

    Rows appended before stay where they are; readers see each key's records in their order across the
    cut. Works while `millstream run`, or an application, writes the home; otherwise this process does it.
    The cut is recorded: `millstream status` shows it.
    """
    from millstream.app.local_client import home_appender

    home = session.home(needs_source=False)
    name, _ = home.stream_config(stream)
    appender = home_appender(home)
    try:
        found = appender.reshard(name, shards)
    finally:
        appender.close()
    if as_json:
        print_json(found)
    elif found["changed"]:
        note(f"{name} is spread over {shards} shards, {found['before']} before, behind {found['token']}")
    else:
        note(f"{name} is spread over {shards} shards already, since {found['token']}")
