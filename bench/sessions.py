"""The cost of sessions: the same appends with a session's numbers and without, and the memory of many sessions."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil
import pyarrow as pa

from bench.figures import Figure, asked, compared, measures, reported, say
from bench.places import folder
from millstream.app.open_home import home_appender
from millstream.home.home import Home
from millstream.model.ids import ShardId
from millstream.model.operations import Ack
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.model.writes import AppendBatch, WriteId
from millstream.protocol.deduplication.known_writes import Sessions
from millstream.wal.files import RealFiles
from millstream.wal.reader import StreamReader
from millstream.wal.writing.session_file import write_copy
from millstream.writers.home_appender import HomeAppender

REQUESTS = 40
"""Requests of a batch: those that wait together while an fsync runs."""
ROWS = 100
"""Rows of a request."""
BATCHES = 60
SESSIONS = 1_000_000


@measures("sessions_cost")
def sessions_cost() -> Iterator[Figure]:
    """Measure appends with session numbers; the peer is the same calls without, each run in a home of its own."""
    count = REQUESTS * ROWS
    say(f"sessions_cost: {BATCHES} batches of {REQUESTS} requests of {ROWS} rows")
    rows = _rows()
    counts = [ROWS] * REQUESTS

    def run_s(*, with_sessions: bool) -> float:
        with folder("sessions") as path:
            appender = _appender(path)
            took_s = []
            try:
                for number in range(1, BATCHES + 1):
                    ids = [WriteId(f"client-{i}", number) if with_sessions else None for i in range(REQUESTS)]
                    began = time.perf_counter()
                    appender.append_batch("web", AppendBatch.of_table("events", rows, counts, ids), deadline_s=60)
                    took_s.append(time.perf_counter() - began)
            finally:
                appender.close()
            return median(took_s[5:]) * 1e6 / REQUESTS

    yield compared(
        "sessions_cost", lambda: run_s(with_sessions=True), lambda: run_s(with_sessions=False), unit="us/request",
        goal="<= 1.05", rows=BATCHES * count, size_bytes=BATCHES * rows.nbytes,
        note=f"batches of {REQUESTS} requests of {ROWS} rows (5 columns), in this process, durable; median of {BATCHES} batches, less the first 5",
    )  # fmt: skip


@measures("session_bytes")
def session_bytes() -> Iterator[Figure]:
    """Measure the memory of a session among many: of one write, and of many writes."""
    count = asked.rows or SESSIONS
    for writes in (1, 16):
        say(f"session_bytes: {count:,} sessions of {writes} writes")
        gc.collect()
        before = psutil.Process().memory_info().rss
        sessions = Sessions()
        for i in range(count):
            for number in range(1, writes + 1):
                given = Ack({ShardId(0): (Offset(i), Offset(i + 100))}, SeqRange(Seq(i), 100))
                sessions.note(WriteId(_name(i), number), i, given, i)
        size = (psutil.Process().memory_info().rss - before) / count
        began = time.perf_counter()
        pieces = sessions.copied()
        held_ms = (time.perf_counter() - began) * 1000
        copied = sum(map(len, pieces()))
        yield reported(
            "session_bytes", [size], unit="bytes/session", goal="reported", rows=count, size_bytes=copied,
            note=f"{count:,} sessions with names of 26 characters, {writes} writes each; bytes are the copy's, for which the log's writer waits {held_ms:.0f} ms",
        )  # fmt: skip
        del sessions, pieces


@measures("sessions_open_ms", "sessions_append_among_many")
def among_many_sessions() -> Iterator[Figure]:
    """Measure a writer's open with many sessions, of one write and of many, and the cost of appends to some."""
    count = asked.rows or SESSIONS
    rows = _rows()
    for writes in (1, 16):
        say(f"sessions_open_ms: {count:,} sessions of {writes} writes")
        with folder("sessions") as path:
            appender = _appender(path)
            appender.append_batch("web", AppendBatch.of_table("events", rows, [rows.num_rows], [None]), deadline_s=60)
            appender.close()
            # In a process of its own, so that its memory is that of a writer.
            filling = multiprocessing.get_context("spawn").Process(target=_fill, args=(path, count, writes))
            filling.start()
            filling.join()
            copied = _session_file(path).stat().st_size
            gc.collect()
            before = psutil.Process().memory_info().rss
            began = time.perf_counter()
            appender = _appender(path)
            known = appender.session("web", _name(count - 1))
            opened_ms = (time.perf_counter() - began) * 1000
            assert known.mark == writes
            size = (psutil.Process().memory_info().rss - before) / count
            yield reported(
                "sessions_open_ms", [opened_ms], unit="ms", goal="reported", rows=count, size_bytes=copied,
                note=f"{count:,} sessions of {writes} writes, all in the copy; {size:.0f} B of memory a session once it is open",
            )  # fmt: skip
            apart = max(1, count // (REQUESTS * BATCHES * 8))
            following = [WriteId(_name(i), writes + 1) for i in range(0, count, apart)]

            def run_us(
                *, with_sessions: bool, appender: HomeAppender = appender, ids: list[WriteId] = following
            ) -> float:
                took_s = []
                for _ in range(BATCHES):
                    batch_ids = [ids.pop() if with_sessions else None for _ in range(REQUESTS)]
                    began = time.perf_counter()
                    appender.append_batch(
                        "web", AppendBatch.of_table("events", rows, [ROWS] * REQUESTS, batch_ids), deadline_s=60
                    )
                    took_s.append(time.perf_counter() - began)
                return median(took_s[5:]) * 1e6 / REQUESTS

            yield compared(
                "sessions_append_among_many", lambda: run_us(with_sessions=True), lambda: run_us(with_sessions=False), unit="us/request",
                goal="", rows=BATCHES * rows.num_rows, size_bytes=BATCHES * rows.nbytes,
                note=f"batches of {REQUESTS} requests of {ROWS} rows, each the next of another one of {count:,} sessions of {writes} writes",
            )  # fmt: skip
            appender.close()


def _fill(path: Path, count: int, writes: int) -> None:
    """Give a home's log so many sessions, as a writer would have copied them."""
    sessions = Sessions()
    given = Ack({ShardId(0): (Offset(1), Offset(101))}, SeqRange(Seq(1), 100))
    for i in range(count):
        for number in range(1, writes + 1):
            sessions.note(WriteId(_name(i), number), i, given, time.time_ns() // 1000)
    wal = _session_file(path).parent
    reader = StreamReader(str(wal))
    write_copy(RealFiles(), str(wal), reader.stream_id, reader.persisted_upto(), sessions.copied()())


def _session_file(path: Path) -> Path:
    """Return the path of the copy of a home's sessions."""
    return path / "data" / "wal" / "web" / "sessions.state"


def _name(number: int) -> str:
    return f"session-of-client-{number:08d}"


def _rows() -> pa.Table:
    """Return the rows of a batch."""
    count = REQUESTS * ROWS
    return pa.table(
        {
            "id": list(range(count)),
            "value": [i / 7 for i in range(count)],
            "name": [f"host-{i % 97}" for i in range(count)],
            "flag": [i % 3 == 0 for i in range(count)],
            "text": [f"some text of request {i}" for i in range(count)],
        }
    )


def _appender(path: Path) -> HomeAppender:
    (path / "millstream.toml").write_text("[streams.web]\n")
    return home_appender(Home(path))
