"""`millstream`: the tree of commands, and the mapping of errors to messages on stderr and exit codes.

Exit codes: 0 done; 1 failed; 2 usage or configuration; 3 a check found a difference or damage; 130
interrupted.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any, Final, NoReturn

import click

from millstream.cli.context import (
    Invocation,
    SuggestingGroup,
    misplaced_words_hint,
    name_home,
    note,
    note_lines,
    say,
    silence_stdout,
)
from millstream.cli.malloc_settings import return_large_buffers
from millstream.cli.startup import ended_by_signals, without_pandas
from millstream.errors import MillstreamError
from millstream.errors.missing_extras import missing_extra_of_module

_COMMANDS: Final = {
    "init": "millstream.cli.init:init",
    "doctor": "millstream.cli.doctor:doctor",
    "config": "millstream.cli.config:config",
    "slot": "millstream.cli.slot:slot",
    "catalog": "millstream.cli.catalog:catalog",
    "run": "millstream.cli.run:run",
    "capture": "millstream.cli.run:capture",
    "pipeline": "millstream.cli.pipeline:pipeline",
    "serve": "millstream.cli.run:serve",
    "status": "millstream.cli.status_and_tables:status",
    "tables": "millstream.cli.status_and_tables:tables",
    "writers": "millstream.cli.writers:writers",
    "token": "millstream.cli.tokens:token",
    "append": "millstream.cli.append:append",
    "consumer": "millstream.cli.consumers:consumer",
    "route": "millstream.cli.routing:route",
    "reshard": "millstream.cli.routing:reshard",
    "follow": "millstream.cli.replication:follow",
    "replicas": "millstream.cli.replication:replicas",
    "promote": "millstream.cli.replication:promote",
    "restore": "millstream.cli.replication:restore",
    "scrub": "millstream.cli.replication:scrub",
    "query": "millstream.cli.query:query",
    "diff": "millstream.cli.diff:diff",
    "reconcile": "millstream.cli.reconcile:reconcile",
    "wal": "millstream.cli.wal:wal",
    "demo": "millstream.cli.run:demo",
}


class LazyGroup(SuggestingGroup):
    """A group whose commands are imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of commands, in the order in which a user needs them."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        del ctx
        place = _COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, _, name = place.partition(":")
        found: click.Command = getattr(importlib.import_module(module), name)
        return found


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--home",
    metavar="DIR",
    help="The home. [default: MILLSTREAM_HOME, or the nearest parent folder with a millstream.toml]",
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(package_name="millstream", message="millstream %(version)s")
@click.pass_context
def cli(context: click.Context, home: str | None, debug: bool) -> None:
    """Write PostgreSQL's changes, in order and exactly once, to a log and to lake tables."""
    context.obj = Invocation(home, debug=debug)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return_large_buffers()
    try:
        # Not by click's own main, which takes a broken pipe for a failure.
        with (
            ended_by_signals(arguments),
            without_pandas(),
            cli.make_context("millstream", list(arguments)) as context,
        ):
            name_home(context.params["home"])
            cli.invoke(context)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - this is the edge: every way to end becomes an exit code
        if isinstance(error, BrokenPipeError):
            silence_stdout()  # of head, or a pager
            sys.exit(0)
        sys.exit(_report(error, debug="--debug" in arguments))
    finally:
        name_home(None)
    sys.exit(0)


def _report(error: BaseException, *, debug: bool) -> int:
    """Print an error on stderr; return its exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if debug and not isinstance(error, click.exceptions.Exit):
        for line in "".join(traceback.format_exception(error)).split("\n"):
            note(line)
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.Abort | KeyboardInterrupt):
        note("interrupted")
        return 130
    if isinstance(error, click.UsageError):
        invocation = error.ctx.find_object(Invocation) if error.ctx is not None else None
        hint = misplaced_words_hint(error, invocation.home_named if invocation is not None else None)
        # An error with a hint shows no similar option.
        (error if hint is None else click.UsageError(error.message, error.ctx)).show(sys.stderr)
        if hint:
            note(f"  hint: {hint}")
        return 2
    if isinstance(error, click.ClickException):
        error.show(sys.stderr)
        return 1
    if isinstance(error, ModuleNotFoundError):
        error = missing_extra_of_module(error)
    if isinstance(error, OSError):
        from millstream.wal.files import error_of_os

        error = error_of_os(error)
    if isinstance(error, MillstreamError):
        # A traceback has the hint already.
        say_error(error.as_dict() | ({"hint": ""} if debug else {}))
        return error.exit_code
    say_error(
        {
            "code": "unexpected",
            "message": f"{type(error).__name__}: {error}",
            "hint": "Report this bug in Millstream, with the traceback that --debug prints.",
        }
    )
    return 1


def say_error(facts: dict[str, Any]) -> None:
    """Print an error's code, message and hint on stderr."""
    say(f"error[{facts.get('code', 'unexpected')}]:", err=True, nl=False, fg="red", bold=True)
    note_lines(f" {facts.get('message', '')}")
    if facts.get("hint"):
        say("  hint:", err=True, nl=False, bold=True)
        note(f" {facts['hint']}")
