"""`consumer`: named readers of a stream, whose positions the home stores."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from millstream.cli.context import (
    Invocation,
    SuggestingGroup,
    confirm,
    json_option,
    note,
    pass_invocation,
    print_json,
    print_table,
    say,
    stream_option,
)
from millstream.errors import InvalidValue, UsageError
from millstream.model.human_text import consumer_state_words, counted, human_bytes, human_seconds

if TYPE_CHECKING:
    from millstream.client.consumers import Consumers

_SINKS: Final = {"webhook": "url", "kafka": "location", "redis": "location"}
"""The sinks that a request may set, each with the setting that its option gives."""
_SHOWN = ("tables", "where", "columns", "kind", "group_by", "start", "ack_wait_ms", "max_deliver", "max_ack_pending")


@click.group(cls=SuggestingGroup)
def consumer() -> None:
    """Manage the consumers of a stream: named readers whose positions the home stores."""


@consumer.command("create")
@click.argument("name")
@click.option("--tables", metavar="P", multiple=True, help="Pattern of tables; may be repeated.  [default: all]")
@click.option("--where", metavar="EXPR", help="Deliver only records for which this holds, such as: total > 5.")
@click.option(
    "--columns", metavar="C", multiple=True, help="Column to deliver, as `name` or `name as other`; may be repeated."
)
@click.option(
    "--kind",
    type=click.Choice(["changes", "latest"]),
    help="changes: every record. latest: the newest state of each key.  [default: changes]",
)
@click.option(
    "--group-by",
    metavar="key|COLUMNS|none",
    help="Records delivered in order: those of each key, those of each value of some columns (a,b), or none.  "
    "[default: key]",
)
@click.option("--start", metavar="PLACE", help="earliest, latest, a token or a time.  [default: latest]")
@click.option("--backfill", is_flag=True, default=None, help="First deliver the tables' rows as of the start.")
@click.option(
    "--ack-wait-ms", type=int, metavar="MS", help="Time until a message is delivered again.  [default: 30000]"
)
@click.option(
    "--max-deliver", type=int, metavar="N", help="Failed deliveries until a message is dead; 0: never.  [default: 10]"
)
@click.option("--max-ack-pending", type=int, metavar="N", help="Most messages in flight.  [default: 1000]")
@click.option("--webhook", metavar="URL", help="Deliver to a webhook. It needs --set secret=@FILE.")
@click.option("--kafka", metavar="BROKERS", help="Deliver to topics of Kafka: host:9092,other:9092.")
@click.option("--redis", metavar="ADDRESS", help="Deliver to Redis streams: redis://host:6379/0.")
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="Another setting of the sink, such as batch_size=100; may be repeated. A list or an object is written as JSON; "
    "@FILE reads a secret from a file.",
)
@stream_option
@json_option
@pass_invocation
def create(
    invocation: Invocation,
    /,
    name: str,
    tables: tuple[str, ...],
    columns: tuple[str, ...],
    group_by: str | None,
    webhook: str | None,
    kafka: str | None,
    redis: str | None,
    settings: tuple[str, ...],
    stream: str | None,
    as_json: bool,
    **others: Any,
) -> None:
    """Create a consumer. The same command again changes nothing.

    With --webhook, --kafka or --redis `millstream serve` and `millstream run` deliver its messages.
    """
    others |= _sink({"webhook": webhook, "kafka": kafka, "redis": redis}, settings)
    groups: Any = group_by
    if group_by is not None and group_by not in {"key", "none"}:  # in double quotes, they are columns too
        groups = [one.strip() for one in next(csv.reader([group_by], skipinitialspace=True), [""])]
    names = [name for text in columns for name in ([text] if '"' in text else text.split(","))]
    fields = {"tables": list(tables) or None, "columns": names or None, "group_by": groups, **others}
    with _consumers(invocation, stream) as consumers:
        made = consumers.create(name, **{field: value for field, value in fields.items() if value is not None})
    if as_json:
        print_json(made)
    else:
        say(f"consumer {made['name']} begins after {made['cursor']}")
    for pattern in _without_table(invocation, stream, tables):
        note(f"the stream has no table that {pattern} matches: {name} waits for one")


@consumer.command("ls")
@stream_option
@json_option
@pass_invocation
def ls(invocation: Invocation, stream: str | None, as_json: bool) -> None:
    """List a stream's consumers, with their lag."""
    with _consumers(invocation, stream) as consumers:
        found = consumers.list()
    if as_json:
        print_json(found)
    elif not found:
        note("the stream has no consumers")
    else:
        for one in found:
            if one["error"]:
                note(f"{one['name']}: {one['error']}")
        titles = ["consumer", "state", "cursor", "lag", "size", "age", "in flight", "dead", "delivered"]
        print_table(titles, [_row(one) for one in found], right=titles[3:])


def _steering(command: str, text: str, call: Callable[[Consumers, str], dict[str, Any]]) -> None:
    """Add a command that makes a call for a consumer, and prints the consumer as it is then."""

    @consumer.command(command, help=text)
    @click.argument("name")
    @stream_option
    @json_option
    @pass_invocation
    def steer(invocation: Invocation, name: str, stream: str | None, as_json: bool) -> None:
        with _consumers(invocation, stream) as consumers:
            _print(call(consumers, name), as_json=as_json)


_steering("show", "Show a consumer's definition and progress.", lambda consumers, name: consumers.get(name))
_steering(
    "pause",
    "Deliver nothing until `resume`. Acknowledgements still count.",
    lambda consumers, name: consumers.pause(name),
)
_steering("resume", "Deliver again.", lambda consumers, name: consumers.resume(name))


@consumer.command("rewind")
@click.argument("name")
@click.option("--to", metavar="PLACE", required=True, help="earliest, latest, a token (exclusive) or a time.")
@stream_option
@json_option
@pass_invocation
def rewind(invocation: Invocation, name: str, to: str, stream: str | None, as_json: bool) -> None:
    """Begin at another place of the log, earlier or later."""
    with _consumers(invocation, stream) as consumers:
        found = consumers.rewind(name, to)
    _print(found, as_json=as_json)
    if to not in {"earliest", "latest", found["cursor"]} and found["cursor"] == _beginning(invocation, stream):
        note(f"the log has nothing earlier: {name} begins at its first record")


@consumer.command("backfill")
@click.argument("name")
@click.option(
    "--tables", metavar="P", multiple=True, help="Pattern of tables; may be repeated.  [default: the consumer's]"
)
@click.option("--where", metavar="EXPR", help="Deliver only rows for which this holds, such as: total > 5.")
@stream_option
@json_option
@pass_invocation
def backfill(
    invocation: Invocation,
    /,
    name: str,
    tables: tuple[str, ...],
    where: str | None,
    stream: str | None,
    as_json: bool,
) -> None:
    """Deliver the rows of tables as they are at the cursor, before later records."""
    with _consumers(invocation, stream) as consumers:
        number = consumers.backfill(name, tables=list(tables) or None, where=where)
    if as_json:
        print_json({"backfill": number})
    else:
        say(f"backfill {number} of consumer {name} has begun")


@consumer.command("rm")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Don't ask for confirmation.")
@stream_option
@pass_invocation
def rm(invocation: Invocation, name: str, yes: bool, stream: str | None) -> None:
    """Remove a consumer, with its position and its dead letters."""
    with _consumers(invocation, stream) as consumers:
        consumers.get(name)
        confirm(f"Remove consumer {name}, with its position and its dead letters?", yes=yes)
        consumers.delete(name)
    say(f"consumer {name} is removed")


@consumer.command("repair")
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Cut the state off at the damage, or go on without a state that is missing. Without it nothing is changed.",
)
@stream_option
@json_option
@pass_invocation
def repair(invocation: Invocation, accept_loss: bool, stream: str | None, as_json: bool) -> None:
    """Go on after damage to the file of the consumers' state, without what comes after the damage.

    Consumers then have the state from before the damage: their messages since then are delivered again, under the same ids.
    The cut bytes are kept in a .torn file. If the file is missing, the stream has no consumers then; those of millstream.toml are
    made again, and begin at their `start`. Stop `millstream run` and `serve` first.
    """
    from millstream.administration.consumer_checks import lost_state
    from millstream.delivery.state_repair import damage_of
    from millstream.delivery.state_repair import repair as repair_state
    from millstream.processes.role_locks import RoleLock

    home = invocation.home(needs_source=False)
    name = home.pick_stream(stream)
    home.prepare()
    aside = None
    with RoleLock.take(home.run_folder, "delivery"):
        folder = home.delivery_folder(name)
        lost = damage = lost_state(home, name, forget=accept_loss)
        if lost is None and folder.exists():
            damage, aside = repair_state(folder) if accept_loss else (damage_of(folder), None)
    is_done = damage is not None and accept_loss
    if as_json:
        print_json({"done": is_done, "damage": None if damage is None else asdict(damage), "kept_aside": aside})
    elif damage is None:
        say("nothing is damaged")
    else:
        would, touched = "" if is_done else "would be ", ", ".join(damage.touched) or "no consumer"
        if lost is None:
            changes = f"{damage.lost_changes:,} changes behind byte {damage.byte} of {damage.file}"
            say(f"{would}lost: {changes}, as far as they can be read; they touch {touched}")
            say(f"{would}kept, as before the damage: {', '.join(damage.kept) or 'no consumer'}")
        else:
            say(f"{would}lost: {touched}, whose state in {lost.file} is missing")
        if not is_done:
            note("to do it: `millstream consumer repair --accept-loss`")
        elif aside is not None:
            note(f"the cut bytes are in {aside}")
    sys.exit(3 if damage is not None and not is_done else 0)


@consumer.group("dead", cls=SuggestingGroup)
def dead() -> None:
    """Manage dead letters: messages that failed too often."""


@dead.command("ls")
@click.argument("name")
@stream_option
@json_option
@pass_invocation
def dead_ls(invocation: Invocation, name: str, stream: str | None, as_json: bool) -> None:
    """List a consumer's dead letters, the oldest first."""
    from millstream.client.consumers import dead_letters

    with _consumers(invocation, stream) as consumers:
        found = list(dead_letters(consumers, name))
    if as_json:
        print_json(found)
    elif not found:
        note("there are no dead letters")
    else:
        rows = [[one["id"], str(one["deliveries"]), one["died"], one["error"]] for one in found]
        print_table(["id", "deliveries", "died", "error"], rows, right=["deliveries"])


def _of_letters(command: str, text: str, call: Callable[[Consumers, str, Sequence[str] | str], dict[str, Any]]) -> None:
    """Add a command that makes a call for dead letters, and prints what became of each."""

    @dead.command(command, help=text)
    @click.argument("name")
    @click.argument("ids", nargs=-1)
    @click.option("--all", "is_all", is_flag=True, help="All of them.")
    @stream_option
    @json_option
    @pass_invocation
    def settle(
        invocation: Invocation, name: str, ids: tuple[str, ...], is_all: bool, stream: str | None, as_json: bool
    ) -> None:
        with _consumers(invocation, stream) as consumers:
            _print_results(call(consumers, name, _named(ids, is_all=is_all))["results"], as_json=as_json)


_of_letters("retry", "Deliver dead messages again.", lambda consumers, name, ids: consumers.retry(name, ids))
_of_letters("drop", "Forget dead messages.", lambda consumers, name, ids: consumers.drop(name, ids))


@contextlib.contextmanager
def _consumers(invocation: Invocation, stream: str | None) -> Iterator[Consumers]:
    from millstream.app.open_home import OpenHome

    home = invocation.home(needs_source=False)
    name, _ = home.stream_config(stream)
    with OpenHome(home) as opened:
        try:
            yield opened.consumers(name)
        except InvalidValue as error:
            error.exit_code = UsageError.exit_code  # the value is the command's
            raise


def _without_table(invocation: Invocation, stream: str | None, patterns: Sequence[str]) -> list[str]:
    """Return the patterns that match none of the stream's tables so far: misspelt names, as a rule."""
    from millstream.model.names import TablePattern

    home = invocation.home(needs_source=False)
    if not patterns or not home.has_catalog():
        return []
    name, _ = home.stream_config(stream)
    with home.open_catalog() as catalog:
        streams = [one.id for one in catalog.streams() if one.name == name]
        known = [(row.namespace, row.name) for one in streams for row in catalog.tables(one)]
    wanted = [pattern for pattern in map(TablePattern.parse, patterns) if not pattern.leaves_out]
    return [pattern.text for pattern in wanted if not any(pattern.matches(*table) for table in known)]


def _beginning(invocation: Invocation, stream: str | None) -> str:
    """Return the token before the first record that the log has."""
    from millstream.model.positions import Seq, StreamToken
    from millstream.wal.reader import StreamReader

    home = invocation.home(needs_source=False)
    reader = StreamReader(str(home.wal_folder(home.pick_stream(stream))))
    return str(StreamToken.scalar(reader.stream_id, Seq(reader.first_seq() - 1)))


def _sink(addresses: Mapping[str, str | None], settings: Sequence[str]) -> dict[str, Any]:
    """Return the sink of the definition, if there is one."""
    kinds = [kind for kind, address in addresses.items() if address is not None]
    if not kinds and settings:
        raise click.UsageError("--set needs a sink: pass --webhook, --kafka or --redis")
    if len(kinds) > 1:
        raise click.UsageError(f"a consumer has one sink: pass --{kinds[0]} or --{kinds[1]}")
    return {kind: {**dict(map(_setting, settings)), _SINKS[kind]: addresses[kind]} for kind in kinds}


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise click.UsageError(f"--set needs NAME=VALUE, not {name[:80]!r}")
    if value.startswith("@"):
        try:
            return name, Path(value[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"--set {name}: {value[1:]} can't be read: {error}") from error
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _named(ids: Sequence[str], *, is_all: bool) -> Sequence[str] | str:
    if is_all == bool(ids):
        raise click.UsageError("name dead letters by their ids, or pass --all")
    return "all" if is_all else list(ids)


def _row(found: dict[str, Any]) -> list[str]:
    lag = found["lag"]
    return [
        found["name"],
        consumer_state_words(found),
        found["cursor"] or "",
        "" if lag["records"] is None else f"{lag['records']:,}",
        human_bytes(lag["bytes"]),
        human_seconds(lag["seconds"]),
        f"{found['in_flight']:,}",
        f"{found['dead']:,}",
        f"{found['delivered']:,}",
    ]


def _print(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    lag = found["lag"]
    say(f"{found['name']}: {consumer_state_words(found)}, behind {found['cursor']}")
    if found["error"]:
        say(f"  {found['error']}")
    behind = (
        "unknown" if lag["records"] is None else f"{counted(lag['records'], 'record')}, {human_bytes(lag['bytes'])}"
    )
    say(f"  lag: {behind}, {human_seconds(lag['seconds'])}")
    say(
        f"  in flight: {found['in_flight']:,}; dead: {found['dead']:,}; delivered: {found['delivered']:,}; "
        f"redelivered: {found['redelivered']:,}; acknowledged: {found['acked']:,}"
    )
    for field in _SHOWN:
        value = found[field]
        if value is not None:
            say(f"  {field}: {', '.join(value) if isinstance(value, list) else value}")
    for kind, address in _SINKS.items():
        if kind in found:
            say(f"  {kind}: {found[kind][address]}")


def _print_results(results: list[dict[str, str]], *, as_json: bool) -> None:
    if as_json:
        print_json(results)
    else:
        for result in results:
            say(f"{result['id']}: {result['status']}")
        if not results:
            note("there are no dead letters")
    if any(result["status"] == "unknown" for result in results):
        sys.exit(1)
