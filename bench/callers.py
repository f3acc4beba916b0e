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
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from bench.figures import Figure, asked, compared, interleaved, measures, reported, say
from bench.places import folder
from bench.wal import ROW_BYTES, log_in, operation

CALLERS = 64
CALLERS_S = 3.0
TIMER_S = 0.010


class _TimedLog:
    """The least work of a log with a group timer: rows of ten milliseconds go out in one write and one fsync."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path / "log", os.O_WRONLY | os.O_CREAT)
        self._end = 0
        self._waiting: list[tuple[bytes, threading.Event | asyncio.Future[None]]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def append(self, data: bytes) -> None:
        done = threading.Event()
        with self._lock:
            self._waiting.append((data, done))
        done.wait()

    async def append_async(self, data: bytes) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append((data, done))
        await done

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        while not self._stop.wait(TIMER_S):
            with self._lock:
                group, self._waiting = self._waiting, []
            if group:
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


def _by_threads(append: Callable[[bytes], object], took_ms: list[float]) -> float:
    """Return the appends a second of threads that each wait for their answer; put the time of each into `took_ms`."""
    data = os.urandom(ROW_BYTES)
    until = time.perf_counter() + _seconds()

    def call() -> None:
        mine = []
        while (began := time.perf_counter()) < until:
            append(data)
            mine.append((time.perf_counter() - began) * 1000)
        took_ms.extend(mine)

    before = len(took_ms)
    threads = [threading.Thread(target=call) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (len(took_ms) - before) / _seconds()


def _by_coroutines(append: Callable[[bytes], Awaitable[object]], took_ms: list[float]) -> float:
    """Return the same for coroutines in one event loop."""
    data = os.urandom(ROW_BYTES)

    async def call(until: float) -> None:
        while (began := time.perf_counter()) < until:
            await append(data)
            took_ms.append((time.perf_counter() - began) * 1000)

    async def all_of_them() -> None:
        until = time.perf_counter() + _seconds()
        await asyncio.gather(*(call(until) for _ in range(CALLERS)))

    before = len(took_ms)
    asyncio.run(all_of_them())
    return (len(took_ms) - before) / _seconds()


def _ours(took_ms: list[float], *, coroutines: bool) -> float:
    with folder("log") as path, log_in(path) as writer:
        if coroutines:
            return _by_coroutines(lambda data: writer.append_async(operation([data])), took_ms)
        return _by_threads(lambda data: writer.append(operation([data])), took_ms)


def _timer(*, coroutines: bool) -> float:
    with folder("timed") as path, closing(_TimedLog(path)) as log:
        return _by_coroutines(log.append_async, []) if coroutines else _by_threads(log.append, [])


def _hand_over(*, coroutines: bool) -> float:
    with closing(_HandOver()) as log:
        return _by_coroutines(log.append_async, []) if coroutines else _by_threads(log.append, [])


@measures("wal_append_64_callers_vs_timer", "wal_append_64_callers_vs_hand_over", "wal_ack_vs_raw_fsync")
def threads() -> Iterator[Figure]:
    """Measure 64 threads."""
    yield from _figures("callers", "threads", "wal_ack_vs_raw_fsync", coroutines=False)


@measures(
    "wal_append_64_coroutines_vs_timer", "wal_append_64_coroutines_vs_hand_over", "wal_ack_coroutines_vs_raw_fsync"
)
def coroutines() -> Iterator[Figure]:
    """Measure 64 coroutines of one event loop."""
    yield from _figures(
        "coroutines", "coroutines of one event loop", "wal_ack_coroutines_vs_raw_fsync", coroutines=True
    )


def _figures(word: str, who: str, ack: str, *, coroutines: bool) -> Iterator[Figure]:
    name = f"wal_append_{CALLERS}_{word}_vs"
    said = f"{CALLERS} {who} that each append a row of {ROW_BYTES} B and wait for its answer"
    ours = partial(_ours, coroutines=coroutines)
    for peer, other, goal, what in (
        (
            "timer", _timer, ">= 20",
            f"the peer joins what came in {TIMER_S * 1000:.0f} ms into one write and one fdatasync, raw bytes",
        ),
        (
            "hand_over", _hand_over, "reported",
            "the peer is a thread that answers what lies in a queue and does nothing else: what Python allows",
        ),
    ):  # fmt: skip
        say(f"{name}_{peer}: {CALLERS} {who}, {ROW_BYTES} B, {_seconds():.0f} s")
        yield compared(
            f"{name}_{peer}", partial(ours, []), partial(other, coroutines=coroutines), unit="rows/s", goal=goal,
            rows=round(CALLERS * _seconds()), size_bytes=ROW_BYTES, note=f"{said}; {what}",
        )  # fmt: skip

    say(f"{ack}: {CALLERS} {who}")
    mine, theirs = interleaved(lambda: _median_ms(ours), _raw_fsync_ms)
    yield reported(
        ack, mine, theirs, unit="ms", goal="<= 2", rows=1, size_bytes=ROW_BYTES,
        note=f"the median time of one of {said}; the peer is one pwrite of {ROW_BYTES} B and its fdatasync, alone",
    )  # fmt: skip


def _median_ms(ours: Callable[[list[float]], float]) -> float:
    took_ms: list[float] = []
    ours(took_ms)
    return statistics.median(took_ms)


def _raw_fsync_ms() -> float:
    data, took = os.urandom(ROW_BYTES), []
    with folder("raw") as path:
        file = os.open(path / "raw", os.O_WRONLY | os.O_CREAT)
        for number in range(300):
            began = time.perf_counter()
            os.pwrite(file, data, number * ROW_BYTES)
            os.fdatasync(file)
            took.append((time.perf_counter() - began) * 1000)
        os.close(file)
    return statistics.median(took)
