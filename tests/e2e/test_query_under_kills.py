"""The lake under SIGKILL, at every point where it changes files, while clients query it.

Accounts and the entries that move money between them change together in every transaction, and a counter has
the number of the last transaction. So any answer of `query` can be checked: it holds whole transactions,
exactly those of its counter. The processes die in the first build of a large table, in folds, in compaction and
before files are deleted. They also die while a table is rebuilt and while rows are repaired.
"""

from __future__ import annotations

import csv
import io
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.e2e.harness import Home, wait_for

from millstream.testing.postgres import EmbeddedPostgres

pytestmark = pytest.mark.siege

POINTS = {
    "lake.fold_file_written": "a leaf written, not committed",
    "lake.before_fold_commit": "all leaves written, not committed",
    "lake.after_fold_commit": "a fold committed, no cut names it",
    "lake.before_compaction_commit": "history compacted, not committed",
    "lake.before_delete": "maintenance knows what to delete, and hasn't",
    "lake.before_log_delete": "maintenance knows which commits to delete from the log, and hasn't",
}
REPAIRS = {
    "capture.repair.before_append": "rows read again, not in the log",
    "capture.repair.durable": "in the log, the request not taken off",
}
ACCOUNTS = 40
LARGE_ROWS = 510_000
"""More rows than a first fold holds at once: it goes in parts."""
SETUP = f"""
    CREATE TABLE accounts (id int PRIMARY KEY, owner text, balance numeric(20, 2) NOT NULL);
    CREATE TABLE entries (id bigint PRIMARY KEY, tx bigint NOT NULL, account int NOT NULL, amount numeric(20, 2) NOT NULL);
    CREATE TABLE counter (id int PRIMARY KEY, tx bigint NOT NULL);
    CREATE TABLE large (id bigint PRIMARY KEY, body text);
    INSERT INTO accounts SELECT i, 'owner ' || i, 0 FROM generate_series(1, {ACCOUNTS}) AS i;
    INSERT INTO counter VALUES (1, 0);
    INSERT INTO large SELECT i, md5(i::text) FROM generate_series(1, {LARGE_ROWS}) AS i;
"""
JOINED = """
    SELECT a.id, a.owner, a.balance, count(e.id) AS entries, coalesce(sum(e.amount), 0)::numeric(20, 2) AS moved, max(e.tx) AS last_tx
    FROM public.accounts a LEFT JOIN public.entries e ON e.account = a.id GROUP BY a.id, a.owner, a.balance ORDER BY a.id
"""
WHOLE = """
    SELECT (SELECT tx FROM public.counter) AS tx, (SELECT count(DISTINCT tx) FROM public.entries) AS seen,
        (SELECT sum(amount) FROM public.entries) AS total,
        (SELECT count(*) FROM (SELECT a.id FROM public.accounts a LEFT JOIN public.entries e ON e.account = a.id
            GROUP BY a.id, a.balance HAVING a.balance <> coalesce(sum(e.amount), 0))) AS torn
"""
LAKE = """[streams.shop.lake]
maintenance_interval = "2s"
keep_replaced = "10s"
log_retention = "10s"
fold_interval = "0s"
compact_files = 10
disk_factor = 2
"""
"""Maintenance as often as possible. Folds of the large table are a quarter as frequent: each rewrites all of it."""
LOG = """[streams.shop.log]
segment_bytes = "64KiB"
retention_age = "0s"
"""
"""A log that drops every segment that isn't needed."""


class Bank:
    """A client that moves money, one transaction after the other, and reads the source's state between two of them."""

    def __init__(self, server: EmbeddedPostgres, database: str, seed: int) -> None:
        self._server, self._database = server, database
        self._rng = random.Random(seed)
        self._go, self._stop = threading.Event(), threading.Event()
        self._idle = threading.Event()
        self._tx = self._entry = 0
        self.failure: list[BaseException] = []

    @contextmanager
    def working(self) -> Iterator[None]:
        thread = threading.Thread(target=self._work, name="bank")
        thread.start()
        self._go.set()
        try:
            yield
        finally:
            self._stop.set()
            self._go.set()
            thread.join()
        if self.failure:
            raise self.failure[0]

    @contextmanager
    def resting(self) -> Iterator[int]:
        """Pause transactions in the block; yield the last one's number."""
        self._idle.clear()
        self._go.clear()
        wait_for(lambda: self._idle.is_set() or self.failure, "the bank to rest")
        try:
            yield self._tx
        finally:
            self._go.set()

    def _work(self) -> None:
        try:
            with self._server.connect(self._database) as connection:
                while not self._stop.is_set():
                    if not self._go.is_set():
                        self._idle.set()
                        self._go.wait()
                        continue
                    self._move(connection)
                    self._stop.wait(self._rng.random() * 0.05)  # the source does other things too
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self.failure.append(error)

    def _move(self, connection: psycopg.Connection[Any]) -> None:
        tx = self._tx + 1
        rows = []
        for _ in range(self._rng.randrange(1, 6)):
            a, b = self._rng.sample(range(1, ACCOUNTS + 1), 2)
            amount = self._rng.randrange(1, 10**6) / 100
            for account, change in ((a, -amount), (b, amount)):
                self._entry += 1
                rows.append((self._entry, tx, account, f"{change:.2f}"))
        with connection.transaction():
            cursor = connection.cursor()
            cursor.executemany("INSERT INTO entries VALUES (%s, %s, %s, %s::numeric)", rows)
            moves = [(amount, account) for _, _, account, amount in rows]
            cursor.executemany("UPDATE accounts SET balance = balance + %s::numeric WHERE id = %s", moves)
            cursor.execute("UPDATE large SET body = %s WHERE id = %s", [f"in {tx}", self._rng.randrange(1, LARGE_ROWS)])
            cursor.execute("UPDATE counter SET tx = %s", [tx])
        self._tx = tx


def ask(home: Home, sql: str, *arguments: str) -> list[dict[str, str]]:
    """Return a query's rows as text; empty if the tables haven't landed so far."""
    return list(csv.DictReader(io.StringIO(home.command("query", sql, "--format", "csv", *arguments, check=False))))


def in_source(connection: psycopg.Connection[Any]) -> list[tuple[str | None, ...]]:
    """Return the joined tables as one REPEATABLE READ transaction sees them."""
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    rows = connection.execute(JOINED).fetchall()
    connection.execute("COMMIT")
    return [tuple(None if v is None else str(v) for v in row) for row in rows]


def in_lake(home: Home, *arguments: str) -> list[tuple[str | None, ...]]:
    return [tuple(v or None for v in row.values()) for row in ask(home, JOINED, *arguments)]


def check_whole(home: Home) -> int:
    """Check that a query over all three tables holds whole transactions; return the last one's number."""
    (answer,) = ask(home, WHOLE) or [{"tx": "0", "seen": "0", "total": "", "torn": "0"}]
    tx = int(answer["tx"] or 0)
    assert answer["torn"] == "0", f"an account and its entries differ at transaction {tx}: {answer}"
    assert int(answer["seen"]) == tx, f"the counter says {tx}, the entries {answer}"
    assert not answer["total"] or float(answer["total"]) == 0, answer
    return tx


def unsent(connection: psycopg.Connection[Any], statement: str) -> None:
    """Change a table while the publication sends no operations, as only a fault could."""
    with connection.transaction():
        connection.execute("ALTER PUBLICATION millstream_shop SET (publish = '')")
        connection.execute(statement)
        connection.execute("ALTER PUBLICATION millstream_shop SET (publish = 'insert, update, delete, truncate')")


def leftovers(folder: Path) -> int:
    """Return the files in a table's folder that its newest version doesn't name."""
    from deltalake import DeltaTable

    live = {Path(uri.removeprefix("file://")).name for uri in DeltaTable(str(folder)).file_uris()}
    there = {path.name for path in folder.rglob("*.parquet") if "_delta_log" not in path.parts}
    return len(there - live)


@pytest.mark.timeout(2400)
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("times", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_answers_hold_whole_transactions_whatever_part_of_the_lake_is_killed_when(
    tmp_path: Path, postgres_server: EmbeddedPostgres, times: int
) -> None:
    home = Home(tmp_path / "shop", postgres_server.create_database("bank"), slot="bank", extra_config=LOG)
    home.init()
    config = home.path / "millstream.toml"
    config.write_text(config.read_text().replace("[streams.shop.lake]\n", LAKE, 1))
    witnesses = tmp_path / "witnesses"
    witnesses.mkdir()
    for point in (*POINTS, *REPAIRS):
        (witnesses / point).touch()
    kills: Counter[str] = Counter()

    def strike(*points: str) -> None:
        for point in points:
            (witnesses / point).unlink()
        for point in points:
            wait_for((witnesses / point).exists, f"a kill at {point}; so far {dict(kills)}", timeout_s=500)
            kills[point] += 1

    with postgres_server.connect("bank", autocommit=True) as connection:
        connection.execute(SETUP)
        bank = Bank(postgres_server, "bank", 3)
        with home.running(failpoints=",".join([*POINTS, *REPAIRS]), witnesses=witnesses) as run:
            with bank.working():
                # Kill during the large table's first build, between its parts.
                wait_for(lambda: home.lake("history", "public.large").exists(), "the copy to land", timeout_s=600)
                strike("lake.fold_file_written")
                wait_for(lambda: check_whole(home) > 0, "the first transactions in the lake", timeout_s=300)
                order = [*POINTS] * times
                random.Random(3).shuffle(order)
                for point in order:
                    strike(point)
                    check_whole(home)
                # Once transactions pause, the lake reaches the source's state, and both have the same rows.
                with bank.resting() as last:
                    wait_for(lambda: check_whole(home) == last, f"transaction {last} in the lake", timeout_s=500)
                    assert in_lake(home) == in_source(connection)
                    token = json.loads(home.command("status", "--json"))["streams"][0]["tokens"]["landed"]
                    then = in_source(connection)
                wait_for(lambda: check_whole(home) > last, "the next transactions", timeout_s=500)
                assert in_lake(home, "--as-of", token) == then, "a moment that has passed is answered as it was"
                with home.commanding("pipeline", "rebuild", "public.large"):
                    strike("lake.fold_file_written", "lake.before_fold_commit")
                    check_whole(home)
                with bank.resting():
                    unsent(connection, "UPDATE large SET body = 'unsent' WHERE id % 1000 = 7")
                with home.commanding("diff", "public.large", "--repair", "--wait"):
                    strike(*REPAIRS)
                    check_whole(home)
            # Half-written files go, once no reader can need them.
            tables = [home.lake("current", f"public.{name}") for name in ("accounts", "entries", "counter", "large")]
            wait_for(lambda: all(leftovers(table) == 0 for table in tables), "leftovers to go", timeout_s=500)
            wait_for(lambda: home.status()["streams"][0]["log"]["first_seq"] > 1, "the log to let go", timeout_s=500)
            assert run.process.poll() is None, f"run ended:\n{run.output()[-4000:]}"
        assert home.caught_up_here() == {}
        assert in_lake(home) == in_source(connection)
        (large,) = ask(home, "SELECT count(*) AS rows, md5(string_agg(body, ',' ORDER BY id)) AS sum FROM public.large")
        there = connection.execute("SELECT count(*), md5(string_agg(body, ',' ORDER BY id)) FROM large").fetchone()
        assert there is not None
        assert (int(large["rows"]), large["sum"]) == there
        expected = Counter(dict.fromkeys(POINTS, times)) + Counter(REPAIRS.keys())
        assert kills == expected + Counter(["lake.fold_file_written"] * 2 + ["lake.before_fold_commit"])
