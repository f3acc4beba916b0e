"""Appends to a home as an application makes them: from a process of its own, through the process that writes the home."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pyarrow as pa

import millstream
from bench.figures import Figure, compared, measures, say
from bench.homes import Home, wait_for
from bench.places import folder
from bench.wal import BATCH_ROWS, ROW_BYTES, Commits, log_rows_s
from millstream import OpenHome

_STREAM = "bench"


@measures("home_append_batch")
def home_append_batch() -> Iterator[Figure]:
    """Measure the commits of `wal_append_batch` by `Home.append`; the peer is the log itself."""
    commits = Commits.made()
    say(f"home_append_batch: {commits.count} commits of {BATCH_ROWS} x {ROW_BYTES} B")
    yield compared(
        "home_append_batch",
        partial(_home_rows_s, commits),
        partial(log_rows_s, commits),
        unit="rows/s",
        goal=">= 0.6",
        rows=commits.rows,
        size_bytes=commits.rows * ROW_BYTES,
        note=f"{commits.count} calls of Home.append, each with a table of {BATCH_ROWS} rows of {ROW_BYTES} random bytes made from a Python list, one"
        " after the other, by a process that isn't the writer (`millstream capture run`); the peer is the log itself with the same"
        " lists, in one process, as in wal_append_batch_*",
    )


def _home_rows_s(commits: Commits) -> float:
    with folder("home") as place:
        path = place / "home"
        path.mkdir()
        (path / "millstream.toml").write_text(f'[streams.{_STREAM}.ingest]\nschema_on_write = "create"\n')
        with Home(path).running("capture", "run") as writer, millstream.open(str(path)) as home:
            wait_for("a process writes the home", lambda: bool(home.status()["processes"]["owner"]), process=writer)
            return commits.rows_s(_appends(home))


@contextmanager
def _appends(home: OpenHome) -> Iterator[Callable[[list[bytes]], object]]:
    def append(values: list[bytes]) -> None:
        home.append(_STREAM, "events", pa.table({"data": pa.array(values, pa.binary())}), deadline_s=60)

    append([bytes(ROW_BYTES)])
    yield append
