"""What sessions cost: the same appends with a session's numbers and without, and the memory of many sessions."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil
import pyarrow as pa

from bench.figures import Figure, asked, compared, measures, say
from bench.places import folder
from millstream.app.home import Home
from millstream.app.opened import home_appender
from millstream.app.writing.appending import HomeAppender
from millstream.model.ids import ShardId
from millstream.model.operations import Ack
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.model.writes import AppendBatch, WriteId
from millstream.protocol.sessions import Sessions

REQUESTS = 40
"""Of a batch: what waits together while an fsync runs."""
ROWS = 100
"""Of a request."""
BATCHES = 60
SESSIONS = 1_000_000


@measures("sessions_cost")
def sessions_cost() -> Iterator[Figure]:
    """Appends with session numbers beside appends without, through the same calls, each run in a home of its own."""
    count = REQUESTS * ROWS
    say(f"sessions_cost: {BATCHES} batches of {REQUESTS} requests of {ROWS} rows")
    rows = pa.table(
        {
            "id": list(range(count)),
            "value": [i / 7 for i in range(count)],
            "name": [f"host-{i % 97}" for i in range(count)],
            "flag": [i % 3 == 0 for i in range(count)],
            "text": [f"some text of request {i}" for i in range(count)],
        }
    )
    counts = [ROWS] * REQUESTS

    def run_s(*, with_sessions: bool) -> float:
        with folder("sessions") as path:
            appender = _appender(path)
            took_s = []
            try:
                for number in range(1, BATCHES + 1):
                    ids = [WriteId(f"client-{i}", number) if with_sessions else None for i in range(REQUESTS)]
                    began = time.perf_counter()
                    appender.append_batch("web", AppendBatch("events", rows, counts, ids), deadline_s=60)
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
    """Memory a session takes where there are many: of one write, and of many writes."""
    count = asked.rows or SESSIONS
    for writes in (1, 16):
        say(f"session_bytes: {count:,} sessions of {writes} writes")
        gc.collect()
        before = psutil.Process().memory_info().rss
        sessions = Sessions()
        for i in range(count):
            for number in range(1, writes + 1):
                given = Ack({ShardId(0): (Offset(i), Offset(i + 100))}, SeqRange(Seq(i), 100))
                sessions.note(WriteId(f"session-of-client-{i:08d}", number), i, given, i)
        size = (psutil.Process().memory_info().rss - before) / count
        began = time.perf_counter()
        pieces = sessions.copied()
        held_ms = (time.perf_counter() - began) * 1000
        copied = sum(map(len, pieces()))
        yield Figure(
            "session_bytes", None, round(size, 1), None, "bytes/session", 1, "", count, copied,
            f"{count:,} sessions with names of 26 characters, {writes} writes each; bytes are the copy's, for which the log's writer waits {held_ms:.0f} ms",
        )  # fmt: skip
        del sessions, pieces


def _appender(path: Path) -> HomeAppender:
    (path / "millstream.toml").write_text("[streams.web]\n")
    return home_appender(Home(path))
