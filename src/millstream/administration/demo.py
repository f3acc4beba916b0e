"""`millstream demo`: the main job on one machine, with kills, and the proof that nothing was lost, doubled or changed.

An embedded PostgreSQL with a shop's tables, a live workload, and `millstream run` as any user runs it;
SIGKILL kills its processes while transactions arrive. At the end the lake is compared with the source by
a judge that shares no code with Millstream (`millstream.testing.oracle`: psycopg and deltalake only).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from millstream.errors import MillstreamError, UsageError
from millstream.home.home import Home
from millstream.processes.role_locks import Role, holder
from millstream.testing.oracle import (
    check_order,
    check_transactions,
    current_rows,
    difference,
    replay_history,
    source_rows,
    table_folder,
)
from millstream.testing.postgres import EmbeddedPostgres
from millstream.testing.workloads.shop import ShopWorkload
from millstream.workers import Worker

if TYPE_CHECKING:
    import psycopg

    from millstream.testing.workloads.workload import StepInfo

_MARKER: Final = ".millstream-demo"
"""Marks a folder as a demo's, which may be deleted."""
_PATIENCE_S: Final = 180.0
"""Timeout for steps that take seconds, on a machine with other work."""
_ANSWERS_WITHIN_S: Final = 30.0
"""Timeout for a home's first status, on a machine with other work."""
_TRANSACTIONS_PER_S: Final = 60.0
_STREAM: Final = "shop"
_SLOT_STANDS: Final = "SELECT 1 FROM pg_replication_slots WHERE confirmed_flush_lsn IS NOT NULL"


@dataclass(slots=True)
class DemoReport:
    """The actions and the proofs of a demo."""

    home: Path
    transactions: int = 0
    changes: int = 0
    workload_s: float = 0.0
    kills: list[str] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    """Number of rows in the source and in `current`, by table."""
    records: dict[str, int] = field(default_factory=dict)
    """Number of records in its history, by table."""
    catch_up_s: float = 0.0

    def lines(self) -> list[str]:
        """Return the report for people."""
        place, command = _shown(self.home), f"{_command()} --home {shlex.quote(str(self.home))}"
        tables = [
            f"  {name:<22} {self.rows[name]:>8,} rows equal the source, {self.records[name]:>8,} changes replay to it"
            for name in self.rows
        ]
        return [
            f"{self.transactions:,} transactions with {self.changes:,} changes in {self.workload_s:.0f} s.",
            "",
            "Killed by SIGKILL, with changes in flight:",
            *(f"  {kill}" for kill in self.kills),
            "",
            f"Started again, it caught up in {self.catch_up_s:.0f} s. Then each table was compared with PostgreSQL:",
            *tables,
            f"  all {self.transactions:,} transactions are there, whole, once, and in the order of their commits",
            "",
            "The lake tables are ordinary Delta tables:",
            f"  {place}/lake/{_STREAM}/current/    one row a key",
            f"  {place}/lake/{_STREAM}/history/    every change",
            "",
            "Try next:",
            f"  {command} query 'SELECT status, count(*), sum(total) FROM public.orders GROUP BY 1'",
            f"  {command} wal cat --table public.deals --limit 5",
            f"  {command} status",
            f"  {command} serve    (the console, on http://127.0.0.1:8787/)",
            f"  and on your own PostgreSQL: {_command()} init --help",
            "The demo's PostgreSQL has ended: commands that ask a source (`run`, `doctor`, `diff`) find none there.",
        ]


def run_demo(folder: Path, *, say: Callable[[str], None]) -> DemoReport:
    """Run the demo in `folder`, which is emptied first; it leaves a home there.

    Args:
        folder: new, empty, or left by an earlier demo.
        say: called with progress, a line at a time.

    Raises:
        UsageError: `folder` holds something else.
        MillstreamError (`demo_failed`): a comparison failed, or a process ended unexpectedly.
    """
    folder = folder.absolute()
    _clear(folder)
    report = DemoReport(folder)
    say("starting a PostgreSQL of its own")
    # Not inside the folder: under root the server runs as another user, who may not be able to enter it.
    with EmbeddedPostgres(settings={"max_wal_size": "4GB"}) as server:
        dsn = server.create_database(_STREAM)
        shop = ShopWorkload(seed=20)
        with server.connect(_STREAM, autocommit=True) as connection:
            shop.setup(connection)
        say("shop made: customers, products, orders, order_items, payments, deals")
        _millstream(folder, "init", str(folder), "--stream", _STREAM, "--source", dsn, "--tables", "public.*")
        with server.connect(_STREAM, autocommit=True) as connection:
            steps = _live_and_die(folder, connection, shop, report, say)
        say("the shop has closed; catching up with its last changes")
        start = time.monotonic()
        _millstream(folder, "run", "--until-caught-up")
        report.catch_up_s = time.monotonic() - start
        say("comparing every table with PostgreSQL, and every history's replay with PostgreSQL")
        with server.connect(_STREAM, autocommit=True) as connection:
            _prove(folder, connection, steps, report)
    return report


def _live_and_die(
    folder: Path,
    connection: psycopg.Connection[Any],
    shop: ShopWorkload,
    report: DemoReport,
    say: Callable[[str], None],
) -> list[StepInfo]:
    """Keep the shop open while processes are killed; return its transactions."""
    steps: list[StepInfo] = []
    closing = threading.Event()

    def live() -> None:
        steps.extend(shop.run(connection, seconds=600, tx_per_second=_TRANSACTIONS_PER_S, stop=closing))

    workload = Worker("shop", live, on_failure=lambda _: None)  # raised at the end
    start = time.monotonic()
    try:
        with _running(folder) as run, connection.cursor() as cursor:
            # Transactions before the slot are rows to copy; only later ones can be checked one by one.
            _await(lambda: bool(cursor.execute(_SLOT_STANDS).fetchone()), _PATIENCE_S, "capture to make its slot")
            workload.start()
            say("`millstream run` is up: it copies the tables while transactions change them")
            _wait_for_cut(folder, run, above=-1)
            say("the first changes are in the lake")
            if (address := _console(folder)) is not None:
                say(f"see it in a browser for as long as it runs: {address}")
            _kill(folder, run, "owner", "capture and the log's writer", report, say)
            _wait_for_cut(folder, run, above=_cuts(folder) + 1)
            _kill(folder, run, "pipeline", "the Spark driver", report, say)
            _wait_for_cut(folder, run, above=_cuts(folder))
            _kill(folder, run, "owner", "capture and the log's writer, again", report, say)
            _wait_for_cut(folder, run, above=_cuts(folder) + 1)
            _kill(folder, run, "run", "the supervisor, and with it everything", report, say)
    finally:
        closing.set()
        workload.join()
    workload.check()
    report.workload_s = time.monotonic() - start
    report.transactions = sum(1 for step in steps if step.committed)
    report.changes = sum(step.changes for step in steps if step.committed)
    return steps


def _prove(folder: Path, connection: psycopg.Connection[Any], steps: list[StepInfo], report: DemoReport) -> None:
    lake = folder / "lake" / _STREAM
    problems: list[str] = []
    histories: dict[str, Path] = {}
    for table in ShopWorkload.TABLES:
        name = f"public.{table}"
        source = source_rows(connection, name)
        current = current_rows(table_folder(lake / "current", "public", table), source)
        histories[name] = table_folder(lake / "history", "public", table)
        replay = replay_history(histories[name], source)
        problems += [f"{name}, current: {line}" for line in difference(current, source)]
        problems += [f"{name}, replay: {line}" for line in difference(replay.rows, source)]
        problems += [f"{name}, history: {line}" for line in replay.violations]
        report.rows[name] = len(source)
        report.records[name] = replay.records
    problems += check_order(histories)
    expected = [(step.xid, step.events) for step in steps if step.committed and step.xid is not None]
    problems += check_transactions(histories, expected)
    if problems:
        raise MillstreamError(
            "the lake differs from the source:\n  " + "\n  ".join(problems[:20]),
            code="demo_failed",
            problems=problems[:200],
        )


def _console(folder: Path) -> str | None:
    """Return the address of the home's console, if it is really this home that answers there."""
    host, port = Home(folder).config.http.address
    try:
        with contextlib.closing(HTTPConnection(host, port, timeout=_ANSWERS_WITHIN_S)) as connection:
            connection.request("GET", "/status")
            status = json.loads(connection.getresponse().read())
    except (OSError, HTTPException, ValueError):
        return None  # another program may have the port
    is_own = isinstance(status, dict) and status.get("home") == str(folder)
    return f"http://{host}:{port}/" if is_own else None


# --- processes


def _argv(folder: Path, command: str, *arguments: str) -> list[str]:
    home = [] if command == "init" else ["--home", str(folder)]
    return [sys.executable, "-P", "-m", "millstream.cli", *home, command, *arguments]


def _millstream(folder: Path, command: str, *arguments: str) -> None:
    """Run one command to its end; its stderr goes to run.log."""
    with (folder / "run.log").open("ab") as log:
        done = subprocess.run(_argv(folder, command, *arguments), stdout=log, stderr=log, check=False)
    if done.returncode != 0:
        raise MillstreamError(
            f"`millstream {command}` ended with {done.returncode}: see {_shown(folder)}/run.log",
            code="demo_failed",
        )


@contextmanager
def _running(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "run.log").open("ab") as log:
        run = subprocess.Popen(_argv(folder, "run"), stdout=log, stderr=log)
    try:
        yield run
    finally:
        if run.poll() is None:
            run.kill()
        run.wait()
        _await(
            lambda: not any(holder(folder / "data" / "run", role) for role in _ROLES),
            _PATIENCE_S,
            "the processes to end",
        )


_ROLES: Final[tuple[Role, ...]] = ("run", "owner", "pipeline", "serve")


def _kill(
    folder: Path, run: subprocess.Popen[bytes], role: Role, what: str, report: DemoReport, say: Callable[[str], None]
) -> None:
    """Send SIGKILL to the holder of a role, once there is one."""
    pid: int | None = None

    def found() -> bool:
        nonlocal pid
        pid = run.pid if role == "run" else holder(folder / "data" / "run", role).get("pid")
        return pid is not None

    _await(found, _PATIENCE_S, f"{what} to run")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    report.kills.append(what)
    say(f"kill -9: {what}")


def _cuts(folder: Path) -> int:
    """Return how often the lake's tables have advanced together: versions of `_commits`; -1 for never."""
    try:
        return int(DeltaTable(str(folder / "lake" / _STREAM / "_commits")).version())
    except TableNotFoundError:
        return -1


def _wait_for_cut(folder: Path, run: subprocess.Popen[bytes], *, above: int) -> None:
    def moved() -> bool:
        if run.poll() is not None:
            raise MillstreamError(
                f"`millstream run` ended with {run.returncode}: see {_shown(folder)}/run.log", code="demo_failed"
            )
        return _cuts(folder) > above

    _await(moved, 240, "the lake to move on")


def _await(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise MillstreamError(f"waited {seconds:.0f} s for {what}, without success", code="demo_failed")
        time.sleep(0.2)


def _clear(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARKER).exists() and not (folder / "run.log").exists():
            raise UsageError(
                f"{_shown(folder)} holds something that isn't a demo's",
                hint="Name another folder with --home, or empty this one yourself.",
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).touch()


def _command() -> str:
    """Return the command that runs this Millstream from any folder, for a shell."""
    program, found = Path(sys.executable).with_name("millstream"), shutil.which("millstream")
    if found is not None and program.exists() and Path(found).samefile(program):
        return "millstream"
    return shlex.join([str(program)] if program.exists() else [sys.executable, "-m", "millstream.cli"])


def _shown(folder: Path) -> str:
    """Return a path as a user would type it here."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)
