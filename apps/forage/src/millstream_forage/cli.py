"""The command `millstream-forage`: serve a feed, bring items into it, and export and evaluate what was learned from.

Exit codes: 0, 1 for an error, 2 for a wrong use of the command.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import click

import millstream
from millstream import MillstreamError
from millstream_forage.clock import InvalidTime, clock_of, parse_ns
from millstream_forage.errors import ForageError, InvalidField, SparkMissing
from millstream_forage.homes import CONFIG_FILE
from millstream_forage.tables import ID_MAX, KINDS, other_regions

DEFAULT_HOME: Final = Path("forage-home")
PORT: Final = 4242


class Command(click.Group):
    """A group whose commands print the errors of Forage and of the log as `millstream` does."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except InvalidTime as error:
            raise click.UsageError(f"{error.message}. {error.hint}", ctx) from error
        except (ForageError, MillstreamError) as error:
            click.echo(f"error[{error.code}]: {error.message}", err=True)
            if error.hint:
                click.echo(f"  hint: {error.hint}", err=True)
            ctx.exit(1)


class Moment(click.ParamType[int]):
    """A time, in nanoseconds since 1970."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the moment of a text."""
        try:
            return parse_ns(value)
        except InvalidTime as error:
            self.fail(f"{error.message}. {error.hint}", param, ctx)


@click.group(cls=Command)
def main() -> None:
    """Forage: a discovery feed on Millstream."""
    clock_of(os.environ)


@main.command()
@click.option(
    "--home", type=click.Path(file_okay=False, path_type=Path), help=f"Folder of the home [default: {DEFAULT_HOME}]."
)
@click.option("--ephemeral", is_flag=True, help="Use a home that is gone at the end.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0 picks a free one.")
@click.option("--no-corpus", is_flag=True, help="Leave an empty stream empty.")
def serve(*, home: Path | None, ephemeral: bool, port: int, no_corpus: bool) -> None:
    """Serve the feed and its page on this machine."""
    if home is not None and ephemeral:
        raise click.UsageError("--home and --ephemeral exclude each other.")
    from millstream_forage.server import serve as run

    run(None if ephemeral else home or DEFAULT_HOME, port=port, corpus=not no_corpus)


@main.command()
@click.option("--home", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the home.")
@click.option("--since", type=Moment(), help="Inclusive: 2026-03-01T12:00:00Z, or whole nanoseconds since 1970.")
@click.option("--until", type=Moment(), help="Exclusive.")
@click.option("--user", type=click.IntRange(0, ID_MAX), help="Signals of this user alone.")
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="Signals of this kind; may be repeated.")
@click.option("--limit", type=click.IntRange(1), help="Most lines: the first ones.")
@click.option("--with-impressions", is_flag=True, help="Add slot, propensity and policy of each signal's impression.")
@click.option("--pairs", is_flag=True, help="Preferences: items chosen over others of the same feed.")
def export(
    *,
    home: Path,
    since: int | None,
    until: int | None,
    user: int | None,
    kinds: tuple[str, ...],
    limit: int | None,
    with_impressions: bool,
    pairs: bool,
) -> None:
    """Print signals, or preferences, as JSON Lines in the order of the log. At least one bound is needed."""
    if since is None and until is None:
        raise click.UsageError("Give --since, --until or both.")
    if since is not None and until is not None and since >= until:
        raise click.UsageError("--since must be before --until: the interval is empty.")
    if with_impressions and pairs:
        raise click.UsageError("--with-impressions and --pairs exclude each other.")
    from millstream_forage.export import RecordedLog, Selection

    selection = Selection(since, until, user, kinds, limit)
    with millstream.open(home) as opened:
        log = RecordedLog(opened, other_regions((opened.path / CONFIG_FILE).read_text()))
    rows = log.pairs(selection) if pairs else log.signals(selection, with_impressions=with_impressions)
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")


@main.command()
@click.argument("registry", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--home", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the home.")
def discover(*, registry: Path, home: Path) -> None:
    """Read each source of a registry once, and add the items that keep the rules. No server may have the home.

    If a source can't be read, the others are, and the exit code is 1.
    """
    from millstream_forage.discovery import discover as run
    from millstream_forage.engine import ForageEngine
    from millstream_forage.sources import Registry

    sources = Registry.load(registry)
    with ForageEngine.open(home) as engine:
        outcome = run(engine, sources)
    for refused in outcome.refused:
        what = f"can't read {refused.source}" if refused.is_unread else f"refused {refused.entry} of {refused.source}"
        click.echo(f"{what}: {refused.reason}", err=True)
    click.echo(f"added {outcome.added}, known {outcome.known}, refused {len(outcome.refused)}")
    if any(refused.is_unread for refused in outcome.refused):
        sys.exit(1)


@main.command()
@click.option("--home", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the home.")
@click.option(
    "--policies",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Policies to estimate, as JSON: {"name": {"category/source": probability}}.',
)
def batch(*, home: Path, policies: Path | None) -> None:
    """Write features, the yield of exploring and estimates of policies to lake tables, on Spark; also next to a server."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        from pyspark.sql import SparkSession

        from millstream_forage.batch import run_batch
    except ModuleNotFoundError as error:
        raise SparkMissing(f"the batch side needs {error.name}") from error
    others = {} if policies is None else policies_of(policies)
    for table in run_batch(SparkSession.builder.getOrCreate(), home, policies=others):
        click.echo(f"{table.name}: {table.rows} rows in {table.folder}")


def policies_of(path: Path) -> dict[str, dict[str, float]]:
    """Return the policies of a file."""
    try:
        policies = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidField("policies", f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidField("policies", f"{path} is no JSON that can be read: {error}") from None
    is_map = isinstance(policies, dict) and all(isinstance(arms, dict) for arms in policies.values())
    if not is_map or not all(is_probability(chance) for arms in policies.values() for chance in arms.values()):
        raise InvalidField("policies", "must name for each policy the probability of each arm, from 0 to 1")
    return dict(policies)


def is_probability(value: object) -> bool:
    """Return whether a value of JSON is a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
