"""`run` and its parts, and `demo`."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from millstream.cli.context import Invocation, SuggestingGroup, for_home, note, on_terminal, pass_invocation, say
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.processes.logs import LogFormat

log_format_option = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    envvar="MILLSTREAM_LOG",
    show_envvar=True,
    help="Format of events on stderr: lines for people, or one JSON object per line.",
)
_UNTIL = click.option(
    "--until-caught-up",
    is_flag=True,
    help="Exit when every transaction that the source had committed at the start is processed.",
)


@click.command()
@_UNTIL
@log_format_option
@pass_invocation
def run(invocation: Invocation, until_caught_up: bool, log_format: LogFormat) -> None:
    """Run all configured streams, until SIGINT or SIGTERM.

    A process that dies is started again. One that can't start is reported, and the others continue.
    With --until-caught-up the command exits when everything is durable in the log, landed in the
    lake and folded; it serves HTTP and Flight only if a Spark cluster may read the log from it. It
    fails (exit code 1) if a table was quarantined or its copy is paused or held, once the others are
    done. If what is wrong is the configuration, the exit code is 2.
    """
    from millstream.cli.progress import JsonReport, RunReport
    from millstream.processes.run import run_home
    from millstream.writers.home_consumers import check_set

    home = invocation.own_home()
    if not until_caught_up:
        for stream in home.config.streams:
            check_set(home, stream)
    os.environ["MILLSTREAM_LOG"] = log_format  # its parts log to the same stderr
    report = (
        JsonReport() if log_format == "json" else RunReport(terminal=on_terminal(), until_caught_up=until_caught_up)
    )
    with report:
        outcome = run_home(home, until_caught_up=until_caught_up, on_event=report.heard)
    report.conclude(outcome)
    if until_caught_up:
        if outcome.interrupted:
            sys.exit(130)
        if outcome.caught_up and not outcome.waits_for_operator:
            sys.exit(0)
    elif not outcome.errors.keys() & {"capture", "pipeline"}:
        sys.exit(0)
    sys.exit(ConfigError.exit_code if outcome.is_refused else 1)


@click.group(cls=SuggestingGroup)
def capture() -> None:
    """Capture from the source into the log, in a separate process."""


@capture.command("run")
@_UNTIL
@log_format_option
@pass_invocation
def capture_run(invocation: Invocation, until_caught_up: bool, log_format: LogFormat) -> None:
    """Capture every configured stream, as the owner of their logs."""
    from millstream.app.alerts.alert_sender import watched_alerts
    from millstream.app.open_home import open_other
    from millstream.cli.progress import PartReport
    from millstream.processes.child_process import Lifeline
    from millstream.processes.logs import configure_logs
    from millstream.writers.owner import run_owner

    lifeline = Lifeline()
    with lifeline.held():
        configure_logs(part="capture", style=log_format, for_home=for_home)
        report = PartReport("capture", silent=lifeline.supervised, terminal=on_terminal())
        home = invocation.own_home()
        with nullcontext() if until_caught_up else watched_alerts(home):
            outcome = run_owner(
                home,
                lifeline,
                open_other=open_other,
                until_caught_up=until_caught_up,
                on_progress=report.heard,
            )
    if not lifeline.supervised:
        sys.exit(report.conclude(outcome, must_catch_up=until_caught_up))


@click.group(cls=SuggestingGroup)
def pipeline() -> None:
    """Land the log in the lake, in a separate process."""


@pipeline.command("run")
@_UNTIL
@log_format_option
@pass_invocation
def pipeline_run(invocation: Invocation, until_caught_up: bool, log_format: LogFormat) -> None:
    """Land every configured stream in the lake, with Spark. With --until-caught-up: land the log's present records, fold, then exit."""
    from millstream.app.pipelines import run_pipelines
    from millstream.cli.progress import PartReport
    from millstream.processes.child_process import Lifeline
    from millstream.processes.logs import configure_logs

    lifeline = Lifeline()
    if until_caught_up:
        lifeline.drain.set()
    with lifeline.held():
        configure_logs(part="pipeline", style=log_format, for_home=for_home)
        report = PartReport("pipeline", silent=lifeline.supervised, terminal=on_terminal())
        outcome = run_pipelines(invocation.own_home(), lifeline, on_progress=report.heard)
    if not lifeline.supervised:
        sys.exit(report.conclude(outcome, must_catch_up=until_caught_up))


@click.command()
@log_format_option
@pass_invocation
def serve(invocation: Invocation, log_format: LogFormat) -> None:
    """Serve HTTP: the console at /, appends, queries, /metrics for Prometheus, /healthz, /readyz and /status."""
    from millstream.processes.child_process import Lifeline
    from millstream.processes.logs import configure_logs
    from millstream.serving.row_processes.server_process import ServerProcess

    lifeline, process = Lifeline(), ServerProcess.inherited()
    with lifeline.held():
        configure_logs(part="serve", style=log_format)
        home = invocation.own_home(needs_source=False)
        if process is None and home.config.http.processes > 1:
            from millstream.serving.row_processes.supervision import serve_in_processes

            serve_in_processes(home, lifeline, log_format=log_format)
        elif process is not None and process.number > 1:
            from millstream.serving.row_processes.row_server import serve_rows

            serve_rows(home, lifeline, process)
        else:
            from millstream.app.alerts.alert_sender import watched_alerts
            from millstream.console.routes import Console
            from millstream.serving.server import serve_home

            with watched_alerts(home):
                serve_home(home, lifeline, [Console], process)


@click.command()
@click.option(
    "--folder",
    default="demo",
    show_default=True,
    metavar="DIR",
    help="The folder of its home; its contents are deleted first.",
)
def demo(folder: str) -> None:
    """Demonstrate exactly-once capture under failures: own PostgreSQL, live workload, SIGKILLs, and a check that nothing was lost."""
    from pathlib import Path

    from millstream.administration.demo import run_demo

    report: Any = run_demo(Path(folder), say=note)
    for line in report.lines():
        say(line)
