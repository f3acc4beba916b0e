"""Latency from a commit in PostgreSQL until the log's readers can read it."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.figures import RUNS, Figure, asked, measures, reported, say
from bench.homes import Home, make_home, wait_for
from bench.load import CLIENTS, Load, PacedLoad, Protocol, percentiles_of_windows
from bench.places import folder
from bench.source import DATABASE, postgres
from millstream.errors import MillstreamError
from millstream.model.positions import Seq
from millstream.testing.postgres import EmbeddedPostgres
from millstream.wal.reader import StreamReader

RATE = 1000
DURABLE_S = 50
"""Five windows of 10 s."""
WARM_UP_S = 5


class MarkWatcher:
    """Another process's view of the log: the time at which `persisted_upto` was first seen at each number."""

    def __init__(self, wal: str) -> None:
        self._reader = StreamReader(wal)
        self._stop = threading.Event()
        self._seen: list[tuple[int, int]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        upto = self._reader.persisted_upto()
        while not self._stop.is_set():
            if self._reader.wait_beyond(upto, 0.2):
                upto = self._reader.persisted_upto()
                self._seen.append((int(upto), time.time_ns()))

    def is_quiet(self) -> bool:
        """Return whether nothing has become readable for two seconds."""
        return bool(self._seen) and time.time_ns() - self._seen[-1][1] > 2 * 10**9

    def stop(self) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers, and when each was first seen to be readable; both rise."""
        self._stop.set()
        self._thread.join()
        upto, at = np.array(self._seen, dtype=np.int64).reshape(-1, 2).T
        return upto, at


def _numbers_of(wal: str, load: Load) -> np.ndarray:
    """Return the `seq` of each transaction's record, found by client and number in the log itself."""
    reader = StreamReader(wal)
    found: dict[tuple[int, int], int] = {}
    for records in reader.read_between(Seq(reader.first_seq() - 1), reader.persisted_upto()):
        if records.schema.name != "ticks":
            continue
        batch = records.batch
        columns = (batch.column(name).to_pylist() for name in ("client", "n", "__seq"))
        found.update({(client, n): seq for client, n, seq in zip(*columns, strict=True)})
    keys = zip(load.client.tolist(), load.number.tolist(), strict=True)
    return np.array([found[key] for key in keys], dtype=np.int64)


@measures("commit_to_durable_ms")
def commit_to_durable() -> Iterator[Figure]:
    """Measure paced one-row inserts; `millstream capture run` in a process, a reader of the log in another."""
    seconds = asked.seconds or DURABLE_S
    say(f"commit_to_durable_ms: {RATE} transactions a second for {seconds} s")
    with postgres(load_unsynced=False) as server, folder("durable") as path:
        with server.connect(DATABASE) as connection:
            connection.execute("CREATE TABLE ticks (client int, n bigint, note text, PRIMARY KEY (client, n))")
        home = make_home(server, path / "home", ["public.ticks"])
        home.run("capture", "run", "--until-caught-up")
        with home.running("capture", "run") as capture:
            insert_until_seen(server, home, capture)
            watcher = MarkWatcher(home.wal)
            statement = "INSERT INTO ticks VALUES (:client_id, :n, 'a row of a tick, with a text of 40 bytes.')"
            load = paced(server, path, statement, seconds=seconds)
            wait_for("the log is quiet", watcher.is_quiet, process=capture)
            upto, at = watcher.stop()
        seqs = _numbers_of(home.wal, load)
        seen = at[np.searchsorted(upto, seqs)]
        p50, p99 = percentiles_of_windows(load, (seen - load.committed_ns) / 1e6, RUNS)
    yield reported(
        "commit_to_durable_ms",
        p50,
        unit="ms",
        goal="p50 <= 5, p99 <= 50",
        rows=len(load),
        size_bytes=len(load) * 60,
        note=f"p50; {RATE} one-row inserts a second by {CLIENTS} clients of pgbench, PostgreSQL's fsync and synchronous_commit on;"
        " from the client's answer to its COMMIT until another process sees the log's mark behind the record;"
        f" medians over {RUNS} windows of {seconds / RUNS:g} s",
        p99=p99,
    )


def insert_until_seen(server: EmbeddedPostgres, home: Home, capture: subprocess.Popen[bytes]) -> None:
    """Return once a new change enters the log: capture streams."""
    with server.connect(DATABASE) as connection:
        connection.execute("INSERT INTO ticks VALUES (-1, 0, 'first')")

    def seen() -> bool:
        try:
            return StreamReader(home.wal).persisted_upto() > 0
        except (MillstreamError, OSError):
            return False

    wait_for("capture streams", seen, process=capture)


def paced(
    server: EmbeddedPostgres, path: Path, statement: str, *, seconds: int, protocol: Protocol = "prepared"
) -> Load:
    """Run a load after a warm-up run that doesn't count: caches, prepared statements, machine code."""
    for name in ("warm-up", "load"):
        (path / name).mkdir()
    warm = PacedLoad(
        server,
        path / "warm-up",
        statement.replace(":client_id", "(:client_id - 100)"),
        rate=RATE,
        seconds=WARM_UP_S,
        protocol=protocol,
    )
    warm.wait()
    paced = PacedLoad(server, path / "load", statement, rate=RATE, seconds=seconds, protocol=protocol)
    try:
        return paced.wait()
    finally:
        paced.stop()
