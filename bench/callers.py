"""The log under many callers of one small row each, threads and coroutines, and the latency of one of them."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from bench.figures import Figure, asked, compared, measures, say
from bench.places import folder
from bench.wal import ROW_BYTES, log_in, operation

CALLERS = 64
CALLERS_S = 3.0
Kind = Literal["threads", "coroutines"]


class _RawLog:
    """The least work of a log under group commit: what came while a sync ran goes out in the next write and sync."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path / "log", os.O_WRONLY | os.O_CREAT)
        self._end = 0
        self._waiting: deque[tuple[bytes, threading.Event | asyncio.Future[None]]] = deque()
        self._work: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def append(self, data: bytes) -> None:
        done = threading.Event()
        self._put(data, done)
        done.wait()

    async def append_async(self, data: bytes) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(data, done)
        await done

    def close(self) -> None:
        self._work.put(False)
        self._thread.join()
        os.close(self._file)

    def _put(self, data: bytes, done: threading.Event | asyncio.Future[None]) -> None:
        self._waiting.append((data, done))
        if self._work.empty():
            self._work.put(True)

    def _run(self) -> None:
        while self._work.get():
            while self._waiting:
                group = [self._waiting.popleft() for _ in range(len(self._waiting))]
                data = b"".join(data for data, _ in group)
                os.pwrite(self._file, data, self._end)
                os.fdatasync(self._file)
                self._end += len(data)
                _answer([done for _, done in group])


class _HandOver:
    """A queue that a thread empties, and nothing else: the bare cost of callers and their answers."""

    def __init__(self) -> None:
        self._waiting: deque[threading.Event | asyncio.Future[None]] = deque()
        self._work: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def append(self, data: bytes) -> None:
        del data
        done = threading.Event()
        self._put(done)
        done.wait()

    async def append_async(self, data: bytes) -> None:
        del data
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(done)
        await done

    def close(self) -> None:
        self._work.put(False)
        self._thread.join()

    def _put(self, done: threading.Event | asyncio.Future[None]) -> None:
        self._waiting.append(done)
        if self._work.empty():
            self._work.put(True)

    def _run(self) -> None:
        while self._work.get():
            while self._waiting:
                _answer([self._waiting.popleft() for _ in range(len(self._waiting))])


def _answer(group: list[threading.Event | asyncio.Future[None]]) -> None:
    """Answer threads one by one, and the coroutines of an event loop in one call."""
    futures = []
    for done in group:
        if isinstance(done, threading.Event):
            done.set()
        else:
            futures.append(done)
    if futures:
        futures[0].get_loop().call_soon_threadsafe(_end, futures)


def _end(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        future.set_result(None)


def _seconds() -> float:
    return asked.seconds or CALLERS_S


def _by_threads(append: Callable[[bytes], object], callers: int) -> list[float]:
    """Return the milliseconds of each append of threads that each wait for their answer."""
    data = os.urandom(ROW_BYTES)
    until = time.perf_counter() + _seconds()
    took_ms: list[float] = []

    def call() -> None:
        mine = []
        while (began := time.perf_counter()) < until:
            append(data)
            mine.append((time.perf_counter() - began) * 1000)
        took_ms.extend(mine)

    threads = [threading.Thread(target=call) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took_ms


def _by_coroutines(append: Callable[[bytes], Awaitable[object]], callers: int) -> list[float]:
    """Return the same for coroutines in one event loop."""
    data = os.urandom(ROW_BYTES)
    took_ms: list[float] = []

    async def call(until: float) -> None:
        while (began := time.perf_counter()) < until:
            await append(data)
            took_ms.append((time.perf_counter() - began) * 1000)

    async def all_of_them() -> None:
        until = time.perf_counter() + _seconds()
        await asyncio.gather(*(call(until) for _ in range(callers)))

    asyncio.run(all_of_them())
    return took_ms


def _ours(kind: Kind, callers: int = CALLERS) -> list[float]:
    with folder("log") as path, log_in(path) as writer:
        if kind == "coroutines":
            return _by_coroutines(lambda data: writer.append_async(operation([data])), callers)
        return _by_threads(lambda data: writer.append(operation([data])), callers)


def _raw_log(kind: Kind) -> list[float]:
    with folder("raw") as path, closing(_RawLog(path)) as log:
        return _peer(log, kind)


def _hand_over(kind: Kind) -> list[float]:
    with closing(_HandOver()) as log:
        return _peer(log, kind)


def _peer(log: _RawLog | _HandOver, kind: Kind) -> list[float]:
    return _by_coroutines(log.append_async, CALLERS) if kind == "coroutines" else _by_threads(log.append, CALLERS)


@measures("wal_append_64_callers_vs_hand_over", "wal_ack_64_callers_vs_raw_group_commit")
def threads() -> Iterator[Figure]:
    """Measure 64 threads."""
    yield from _figures("callers", "threads", goal=">= 0.6", kind="threads")


@measures("wal_append_64_coroutines_vs_hand_over", "wal_ack_64_coroutines_vs_raw_group_commit")
def coroutines() -> Iterator[Figure]:
    """Measure 64 coroutines of one event loop."""
    yield from _figures("coroutines", "coroutines of one event loop", goal=">= 0.4", kind="coroutines")


def _figures(word: str, who: str, *, goal: str, kind: Kind) -> Iterator[Figure]:
    said = f"{CALLERS} {who} that each append a row of {ROW_BYTES} B and wait for its answer, for {_seconds():.0f} s"
    rows = round(CALLERS * _seconds())

    name = f"wal_append_{CALLERS}_{word}_vs_hand_over"
    say(f"{name}: {CALLERS} {who}, {ROW_BYTES} B, {_seconds():.0f} s")
    yield compared(
        name, lambda: len(_ours(kind)) / _seconds(), lambda: len(_hand_over(kind)) / _seconds(), unit="rows/s", goal=goal,
        rows=rows, size_bytes=ROW_BYTES,
        note=f"{said}; the peer is a thread that answers what lies in a queue and does nothing else: what Python allows",
    )  # fmt: skip

    name = f"wal_ack_{CALLERS}_{word}_vs_raw_group_commit"
    say(f"{name}: {CALLERS} {who}, {ROW_BYTES} B, {_seconds():.0f} s")
    yield compared(
        name, lambda: statistics.median(_ours(kind)), lambda: statistics.median(_raw_log(kind)), unit="ms", goal="reported",
        rows=rows, size_bytes=ROW_BYTES,
        note=f"the median time of an append of {said}; the peer is a thread that joins what came while it synced into one pwrite and one"
        " fdatasync, raw bytes",
    )  # fmt: skip


@measures("wal_ack_vs_raw_fsync")
def one_caller() -> Iterator[Figure]:
    """Measure a caller alone, which waits for its answer before its next append."""
    say(f"wal_ack_vs_raw_fsync: 1 thread, {ROW_BYTES} B, {_seconds():.0f} s")
    yield compared(
        "wal_ack_vs_raw_fsync", lambda: statistics.median(_ours("threads", 1)), _raw_fsync_ms, unit="ms", goal="<= 2", rows=1,
        size_bytes=ROW_BYTES,
        note=f"the median time of an append by one thread alone, {ROW_BYTES} B each, one after the other; the peer is one pwrite of as many bytes"
        " and its fdatasync, in the same loop",
    )  # fmt: skip


def _raw_fsync_ms() -> float:
    with folder("raw") as path:
        file = os.open(path / "raw", os.O_WRONLY | os.O_CREAT)
        numbers = count()

        def append(data: bytes) -> None:
            os.pwrite(file, data, next(numbers) * ROW_BYTES)
            os.fdatasync(file)

        try:
            return statistics.median(_by_threads(append, 1))
        finally:
            os.close(file)
