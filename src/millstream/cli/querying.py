"""`query`: SQL over the lake, from an argument, from stdin, or at a prompt."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import Future, wait
from importlib.abc import MetaPathFinder
from threading import Event, Thread
from traceback import clear_frames
from typing import TYPE_CHECKING, Final

import click

from millstream.cli.context import Session, note, pass_session, stream_option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from millstream.cli.results import Style
    from millstream.lake.query import LakeSession

_LOOK_S: Final = 0.1
"""How soon Ctrl-C is noticed."""


@click.command()
@click.argument("sql", required=False)
@click.option(
    "--as-of",
    metavar="TIME|TOKEN",
    help="Answer as things stood then: an ISO time (UTC unless it says), an age such as '10m ago', or a token.",
)
@click.option(
    "--format",
    "style",
    type=click.Choice(["table", "csv", "json", "arrow"]),
    default="table",
    show_default=True,
    help="csv has a header and tells NULL (nothing) from an empty text; json is a list of objects; arrow an IPC stream.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@stream_option
@pass_session
def query(
    session: Session, sql: str | None, as_of: str | None, style: Style, as_json: bool, stream: str | None
) -> None:
    r"""Ask SQL over the current tables, all at one token; they are named schema.table.

    Records are in history."schema.table". The token goes to stderr. Without SQL it is read from stdin; on a terminal
    there is a prompt then, with \? for help.
    """
    _leave_pandas_out()
    from millstream.app.opened import open_lake

    home = session.home(needs_source=False)
    style = "json" if as_json else style
    if sql is None and sys.stdin.isatty():
        from millstream.cli.prompt import Prompt

        Prompt(home, stream, as_of=as_of, style=style).run()
        return
    text = sys.stdin.read() if sql is None else sql
    with open_lake(home, stream, as_of=as_of) as lake:
        statements = lake.statements(text)
        if not statements:
            raise click.UsageError("There is no SQL to run.")
        if style == "arrow" and len(statements) > 1:
            raise click.UsageError("An Arrow stream holds one result: give one statement.")
        for statement in statements:
            answer(lake, statement, style)


def answer(lake: LakeSession, sql: str, style: Style) -> int:
    """Print one statement's rows on stdout, and on stderr where they stand; returns how many there were.

    Ctrl-C ends the query in DuckDB too, and raises KeyboardInterrupt.
    """
    count = _cancellable(lake, lambda: _print(lake, sql, style))
    for name, reason in lake.missing.items():
        note(f"not readable: {name}: {reason}")
    for name, reason in lake.held_back.items():
        note(f"set aside: {name}: {reason}")
    note(f"at {lake.token}")
    return count


def _print(lake: LakeSession, sql: str, style: Style) -> int:
    from millstream.cli.results import write_result

    with lake.stream(sql) as reader:
        count = write_result(reader, style)
    sys.stdout.flush()
    return count


def _cancellable(lake: LakeSession, work: Callable[[], int]) -> int:
    """Do it in a thread: while the main one is inside DuckDB, Python can't run the handler of Ctrl-C."""
    outcome: Future[int] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            # Its frames hold DuckDB's half-read result, and DuckDB complains on stderr of what outlives the interpreter.
            clear_frames(error.__traceback__)
            outcome.set_exception(error)

    cancelled = Event()
    # A handler that raises would do so anywhere, also while the first Ctrl-C is being dealt with.
    before = signal.signal(signal.SIGINT, lambda _number, _frame: cancelled.set())
    try:
        Thread(target=run, name="millstream-query", daemon=True).start()
        # Not by joining the thread, which Python 3.11 takes for ended once a signal came.
        while not wait([outcome], _LOOK_S).done:
            if cancelled.is_set():
                # More than once: between two of its steps DuckDB runs nothing that could be interrupted.
                lake.interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    if cancelled.is_set():
        raise KeyboardInterrupt
    return outcome.result()


class _WithoutPandas(MetaPathFinder):
    """Finds no pandas."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise for pandas; leave all else to others."""
        del path, target
        if fullname == "pandas":
            raise ImportError("left out")
        return None


def _leave_pandas_out() -> None:
    """Let pyarrow settle that there is no pandas: its import takes longer than a query, and nothing here uses it.

    pyarrow looks once a process, when it first meets a value of a type that could be pandas's.
    """
    import pyarrow as pa

    finder = _WithoutPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([1])
        pa.scalar(1)
    finally:
        sys.meta_path.remove(finder)
