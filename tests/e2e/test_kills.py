"""Random workloads under SIGKILL: nothing is lost, doubled, reordered or changed, whichever process dies when.

A workload of every operation and type runs without pause while processes are killed: at named points, each
several times, and at random moments. A kill counts only if something was in flight that wasn't acknowledged.
Then `run --until-caught-up` must repair everything, and the judge compares.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.e2e.harness import Home, Run, wait_for
from tests.e2e.verdict import judge
from tests.seeds import Seeds

from millstream.testing.postgres import EmbeddedPostgres
from millstream.testing.workloads.workload import StepInfo, Workload

POINTS = {
    "wal.before_fsync": "before the fsync",
    "capture.before_confirm": "after the fsync, before the slot is confirmed",
    "pipeline.before_batch": "a batch's stretches handed out",
    "lake.records_written": "lake files written, not committed",
    "lake.after_history_commit": "a table committed, the cut not",
    "pipeline.after_lake_commit": "lake committed, the catalog not told",
    "lake.before_fold_commit": "in a fold",
    "capture.copy_chunk_read": "in a chunk of the table copy",
}
WITHOUT_IDENTITY = """
    SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'r' AND (
        c.relreplident = 'n' OR (c.relreplident = 'd' AND NOT EXISTS (
            SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)))
"""
TIMES = 3
RANDOM_KILLS = TIMES + 1
COPIED_ROWS = 3_000


@dataclass
class Siege:
    """A home under a workload, and its kills so far."""

    home: Home
    server: EmbeddedPostgres
    database: str
    workload: Workload
    rng: random.Random
    witnesses: Path
    kills: Counter[str] = field(default_factory=Counter)
    steps: list[StepInfo] = field(default_factory=list)
    failure: list[BaseException] = field(default_factory=list)

    def in_flight(self) -> bool:
        """Return whether the source holds something that capture hasn't confirmed."""
        with self.server.connect(self.database, autocommit=True) as connection:
            row = connection.execute(
                "SELECT pg_current_wal_insert_lsn() > confirmed_flush_lsn FROM pg_replication_slots"
                " WHERE database = current_database() AND NOT temporary"
            ).fetchone()
        return bool(row and row[0])

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run the workload in a thread of its own."""
        stop = threading.Event()

        def work() -> None:
            try:
                with self.server.connect(self.database, autocommit=True) as connection:
                    while not stop.is_set():
                        self.steps.append(self.workload.step(connection))
                        stop.wait(self.rng.random() * 0.2)  # so that the judge, who reads all, ends soon
            except Exception as error:  # noqa: BLE001 - the main thread raises it
                self.failure.append(error)

        thread = threading.Thread(target=work, name="workload")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if self.failure:
            raise self.failure[0]

    def strike(self, point: str) -> None:
        """Arm a point and wait until a process has died there."""
        witness = self.witnesses / point
        witness.unlink()
        wait_for(witness.exists, f"a kill at {point}; so far {dict(self.kills)}", timeout_s=300)
        self.kills[point] += 1

    def strike_at_random(self, run: Run) -> None:
        """Kill one of the processes, chosen at random, once something is in flight."""
        wait_for(lambda: run.children() and self.in_flight(), "something in flight", timeout_s=400)
        victims = run.children()
        if not victims:
            return
        try:
            os.kill(self.rng.choice(victims), signal.SIGKILL)
        except ProcessLookupError:
            return
        self.kills["random"] += 1


@contextmanager
def siege(
    tmp_path: Path,
    server: EmbeddedPostgres,
    seed: int,
    *,
    database: str = "kills",
    points: Collection[str] = tuple(POINTS),
    lake: str = "",
) -> Iterator[tuple[Siege, psycopg.Connection[Any]]]:
    """Make a database with tables of every kind, and a home that captures it, until the block ends.

    `lake` is the lake's configuration, if its lake isn't files.
    """
    database = f"{database}_{seed}"
    dsn = server.create_database(database)
    try:
        with server.connect(database, autocommit=True) as connection:
            # Defaults of added columns are values that were never sent: this test compares only values that
            # were sent.
            workload = Workload(seed, add_defaults=False)
            workload.setup(connection)
            connection.execute("CREATE TABLE public.copied (id bigint PRIMARY KEY, body text)")
            connection.execute(
                "INSERT INTO public.copied SELECT i, repeat(md5(i::text), 4) FROM generate_series(1, %s) AS i",
                [COPIED_ROWS],
            )
            home = Home(tmp_path / "shop", dsn, tables=("*.*",), slot=database)
            home.init()
            config = home.path / "millstream.toml"
            config.write_text(
                config.read_text().replace(
                    "[streams.shop.source]", "[streams.shop.source]\ncopy_chunk_rows = 200\ncopy_workers = 1", 1
                )
            )
            if lake:
                home.set_lake(lake)
            witnesses = tmp_path / "witnesses"
            witnesses.mkdir()
            for point in points:
                (witnesses / point).touch()
            yield Siege(home, server, database, workload, random.Random(seed), witnesses), connection
    finally:
        server.drop_database(database)  # with its slot: others of this server may want the name


def kill_everything_everywhere(
    under: Siege,
    connection: psycopg.Connection[Any],
    *,
    times: int,
    at_random: int,
    points: Collection[str] = tuple(POINTS),
) -> None:
    """Strike the copy's point, then all others in random order, each so many times; then strike at random moments.

    Between two rounds `run` is killed with all its parts and started again: if its parts have died nine times,
    it waits half a minute before each restart.
    """
    for round_ in range(times):
        with under.home.running(failpoints=",".join(points), witnesses=under.witnesses) as run:
            if not round_:
                # The slot first: transactions before it are rows to copy.
                wait_for(
                    lambda: connection.execute(
                        "SELECT 1 FROM pg_replication_slots"
                        " WHERE database = current_database() AND confirmed_flush_lsn IS NOT NULL"
                    ).fetchone(),
                    "capture to make its slot",
                    timeout_s=400,
                )
            with under.working():
                others = [point for point in points if point != "capture.copy_chunk_read"]
                under.rng.shuffle(others)
                # Strike this point while there is something to copy.
                for point in ["capture.copy_chunk_read"] * (0 if round_ else times) + others:
                    under.strike(point)
                while round_ == times - 1 and under.kills["random"] < at_random:
                    under.strike_at_random(run)
            assert run.process.poll() is None, f"run ended:\n{run.output()[-4000:]}"


def settle(under: Siege, connection: psycopg.Connection[Any], *, is_here: bool = False) -> list[str]:
    """Catch up, in this process's Spark if `is_here`, and judge."""
    if is_here:
        assert not under.home.caught_up_here()
    else:
        under.home.caught_up()
    named = {(table.schema, table.name) for table in under.workload.tables} | {("public", "copied")}
    inserts_only = {(schema, name) for schema, name in connection.execute(WITHOUT_IDENTITY).fetchall()} & named
    with_current = sorted(named - inserts_only)
    return judge(under.home.path / "lake" / "shop", connection, with_current, under.steps, history_only=inserts_only)


@pytest.mark.timeout(2400)
def test_nothing_is_lost_doubled_or_reordered_whatever_is_killed_when(
    tmp_path: Path, postgres_server: EmbeddedPostgres, seeds: Seeds, request: pytest.FixtureRequest
) -> None:
    """Kill at each named point: once in `make test`, three times and also at random moments in `make test-all`.

    `make test` catches up in the Spark that its tests share.
    """
    times, at_random = seeds.count(TIMES, quick=1), seeds.count(RANDOM_KILLS, quick=0)
    if seeds.is_quick:
        request.getfixturevalue("spark")
    besiege(
        tmp_path,
        postgres_server,
        seeds.kept_or_new(20),
        times=times,
        at_random=at_random,
        is_here=seeds.is_quick,
    )


@pytest.mark.soak
def test_soak_of_kills(tmp_path: Path, postgres_server: EmbeddedPostgres) -> None:
    """Run for hours, one seed after the other; MILLSTREAM_SOAK_SEED repeats one."""
    wanted = os.environ.get("MILLSTREAM_SOAK_SEED")
    for round_ in range(1 if wanted else int(os.environ.get("MILLSTREAM_SOAK_ROUNDS", "1000"))):
        seed = int(wanted) if wanted else random.SystemRandom().randrange(10**9)
        print(f"seed {seed} (round {round_}; MILLSTREAM_SOAK_SEED={seed} repeats it)", flush=True)  # noqa: T201 - counts and seeds are told
        folder = tmp_path / str(seed)
        folder.mkdir()
        besiege(folder, postgres_server, seed, times=TIMES, at_random=3 * RANDOM_KILLS)


def besiege(
    tmp_path: Path, server: EmbeddedPostgres, seed: int, *, times: int, at_random: int, is_here: bool = False
) -> None:
    """Play a siege from its seed, and return its verdict."""
    with siege(tmp_path, server, seed) as (under, connection):
        kill_everything_everywhere(under, connection, times=times, at_random=at_random)
        problems = settle(under, connection, is_here=is_here)
        report(under, seed)
        assert not problems, "\n".join([f"seed {seed}", *problems])
        assert all(under.kills[point] >= times for point in POINTS)


def report(under: Siege, seed: int) -> None:
    """Print the kills; -s or a failure shows them on the terminal."""
    committed = sum(1 for step in under.steps if step.committed)
    print(f"seed {seed}: {committed} transactions; kills with work in flight:")  # noqa: T201 - counts and seeds are told
    for point, count in sorted(under.kills.items()):
        print(f"  {count} × {POINTS.get(point, 'a process at a random moment')}")  # noqa: T201 - counts and seeds are told
