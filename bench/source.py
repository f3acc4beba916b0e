"""The source of the figures: an embedded PostgreSQL, a backlog, copies of its slot, and the peer that reads one.

A copied slot begins at the position of its original. So every run, ours or the peer's, decodes the same backlog
from the same position; a run's copy is dropped after it.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

from bench.figures import say
from millstream.testing.postgres import EmbeddedPostgres

DATABASE = "bench"
PUBLICATION = "bench"
SLOT = "bench"
SETTINGS = {
    "max_wal_size": "8GB",  # no checkpoint in the middle of a run …
    "checkpoint_timeout": "1h",
    "autovacuum": "off",  # … and no other work of the server's own
    "shared_buffers": "512MB",
}
"""fsync stays on. The rest is PostgreSQL's default."""

COLUMNS = "id bigint PRIMARY KEY, customer integer, status text, total numeric(12,2), placed_at timestamptz, note text"
SHAPE = "6 columns (int8 key, int4, text, numeric(12,2), timestamptz, text of 32 B), about 100 B a row"
ROW_BYTES = 100
"""Approximate bytes of a row in PostgreSQL's text with the protocol's lengths; a figure's `bytes` is measured."""
VALUES = (
    "n, (n % 100000)::int, (ARRAY['new','paid','packed','shipped'])[1 + n % 4], (n % 1000000) / 100.0, "
    "'2026-01-01 00:00:00+00'::timestamptz + n * interval '1 second', md5(n::text)"
)

_copies = itertools.count(1)


@contextmanager
def postgres(*, load_unsynced: bool = True, tcp: bool = False) -> Iterator[EmbeddedPostgres]:
    """Run a server with the database of the figures.

    Args:
        load_unsynced: commits that fill backlogs and tables don't wait for the disk (`synchronous_commit=off`); fsync is on.
        tcp: it listens on the loopback too.
    """
    settings = SETTINGS | ({"synchronous_commit": "off"} if load_unsynced else {})
    with EmbeddedPostgres(18, settings=settings, tcp=tcp) as server:
        server.create_database(DATABASE)
        yield server


@dataclass(frozen=True, slots=True)
class Backlog:
    """Transactions that were committed to the published table `name` after the slot was made."""

    server: EmbeddedPostgres
    name: str
    slot: str
    rows: int
    end: str
    """The insert LSN after its last commit, as text: a reader that was sent everything below it has all of it."""
    size_bytes: int
    """The insert LSN after its last commit, as text: a reader that was sent everything below it has all of it."""
    made_s: float = 0.0

    @property
    def publication(self) -> str:
        """The name of the table's publication."""
        return self.name

    @contextmanager
    def copied_slot(self) -> Iterator[str]:
        """Yield a copy of the slot, and drop it at the end (after waiting until it is unused)."""
        name = f"{self.slot}_{next(_copies)}"
        with self.server.connect(DATABASE) as connection:
            connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", [self.slot, name])
            # Both sides find the server idle, with its writes finished.
            connection.execute("CHECKPOINT")
        try:
            yield name
        finally:
            drop_slot(self.server, name)


def drop_slot(server: EmbeddedPostgres, name: str) -> None:
    """Drop a slot once its walsender has gone; do nothing if there is none."""
    deadline = time.monotonic() + 30
    with server.connect(DATABASE) as connection:
        while True:
            row = connection.execute(
                "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", [name]
            ).fetchone()
            if row is None:
                return
            if row[0] is None:
                connection.execute("SELECT pg_drop_replication_slot(%s)", [name])
                return
            if time.monotonic() > deadline:
                connection.execute("SELECT pg_terminate_backend(%s, 5000)", [row[0]])
            time.sleep(0.01)


def make_backlog(server: EmbeddedPostgres, name: str, *, transactions: int, rows_each: int) -> Backlog:
    """Insert `transactions` transactions of `rows_each` rows into a new table, behind a new slot.

    The server gives the figures' size: the result of `pg_logical_slot_peek_binary_changes` for the backlog.
    """
    started = time.monotonic()
    rows = transactions * rows_each
    with server.connect(DATABASE) as connection:
        connection.execute(f"CREATE TABLE {name} ({COLUMNS})")
        connection.execute(f"CREATE PUBLICATION {name} FOR TABLE {name}")
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
        insert_transactions(connection, name, transactions=transactions, rows_each=rows_each)
        end = last_commit(connection)
        size = _backlog_bytes(connection, name, name)
    made_s = time.monotonic() - started
    say(
        f"  backlog {name}: {transactions:,} transactions of {rows_each:,} rows, {size / 1e6:,.0f} MB, made in {made_s:.1f} s"
    )
    return Backlog(server, name, name, rows, end, size, made_s)


def insert_transactions(
    connection: psycopg.Connection, table: str, *, transactions: int, rows_each: int, after: int = 0
) -> None:
    """Insert rows with the keys after `after`, so many a transaction."""
    connection.execute(
        f"""
        DO $$ BEGIN
          FOR t IN 0 .. {transactions - 1} LOOP
            INSERT INTO {table} SELECT {VALUES} FROM
              generate_series({after} + t * {rows_each}::bigint + 1, {after} + (t + 1) * {rows_each}::bigint) AS n;
            COMMIT;
          END LOOP;
        END $$"""
    )


def last_commit(connection: psycopg.Connection) -> str:
    """Return the insert LSN now, with all WAL below it flushed: commits so far end at or below it."""
    row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
    assert row is not None
    # A synchronous commit flushes all WAL before its own.
    with connection.transaction():
        connection.execute("SET LOCAL synchronous_commit = on")
        connection.execute("SELECT pg_logical_emit_message(true, 'millstream.bench', 'end')")
    return str(row[0])


def _backlog_bytes(connection: psycopg.Connection, slot: str, publication: str) -> int:
    row = connection.execute(
        "SELECT coalesce(sum(length(data)), 0) FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
        " 'proto_version', '2', 'publication_names', %s)",
        [slot, publication],
    ).fetchone()
    assert row is not None
    return int(row[0])


def recvlogical_rows_s(backlog: Backlog, *, options: dict[str, str]) -> float:
    """Return the rows a second of `pg_recvlogical` into /dev/null over the backlog.

    The time is from START_REPLICATION's answer to its end.

    Args:
        backlog: the backlog; a copy of its slot is read.
        options: pgoutput's, the same as our connection's (`publication_names` is added).
    """
    with backlog.copied_slot() as slot:
        command = [str(backlog.server.program("pg_recvlogical")), "--dbname", backlog.server.dsn(DATABASE)]
        command += ["--slot", slot, "--start", "--no-loop", "--file", "/dev/null", "--endpos", backlog.end, "--verbose"]
        for key, value in ({"publication_names": backlog.publication} | options).items():
            command += ["--option", f"{key}={value}"]
        began_at = 0.0
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if "streaming initiated" in line:
                    began_at = time.perf_counter()
            process.wait()
            ended_at = time.perf_counter()
        if process.returncode or not began_at:
            raise RuntimeError(f"pg_recvlogical ended with {process.returncode}")
        return backlog.rows / (ended_at - began_at)
