"""The figures of a home over time: taken from its status while it is served, and kept in a ring for each stream."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.app.record_rates import records_written
from millstream.errors import MillstreamError
from millstream.home.figure_ring import PERIODS, Figure, FigureRing, Values
from millstream.process_metrics import COMMIT_SECONDS
from millstream.workers import Worker

if TYPE_CHECKING:
    from millstream.app.record_rates import Status
    from millstream.home.home import Home

logger = structlog.get_logger("millstream.serve")

OF_STREAM: Final = (
    Figure("records_s", "into the log", "records/s", "mean"),
    Figure("durable_mean_s", "mean", "seconds", "mean"),
    Figure("durable_p99_s", "99th percentile", "seconds"),
    Figure("lake_s", "oldest that waits", "seconds"),
    Figure("lake_records", "for the lake", "records"),
    Figure("consumer_records", "for the last consumer", "records"),
    Figure("source_bytes", "at the source", "bytes"),
    Figure("log_bytes", "log", "bytes"),
    Figure("lake_bytes", "files of current in the lake", "bytes"),
)
OF_HOME: Final = (Figure("memory_bytes", "all processes", "bytes"), Figure("disk_free_bytes", "free", "bytes", "least"))
_SHARE: Final = 0.005
"""The part of a core that taking samples may cost: a large home is sampled less often."""
_OLD_S: Final = max(period.step_s * period.samples for period in PERIODS.values())


class Figures:
    """A home's figures. Any thread.

    Args:
        collect: returns its status; it may block.
        now_s: returns seconds since 1970-01-01 UTC.
    """

    def __init__(self, home: Home, collect: Callable[[], Status], now_s: Callable[[], float] = time.time) -> None:
        self._folder = home.figures_folder
        self._collect = collect
        self._now_s = now_s
        self._lock = threading.Lock()
        self._rings: dict[str, FigureRing] = {}
        """By stream; the home's own under an empty name."""
        self._before: tuple[float, dict[str, int], dict[str, list[float]]] | None = None
        self._worker = Worker("figures", self._step)
        self.version = 0
        """Number of samples taken: the figures are the same while it is."""

    def start(self) -> None:
        """Take a sample now and regularly, until it is closed. The first one also loads what a status needs, so that no viewer waits for it."""
        for file in self._folder.glob("*.ring"):
            with suppress(OSError):
                if self._now_s() - file.stat().st_mtime > _OLD_S:
                    file.unlink()  # of a stream that is gone
        self._worker.start()

    def close(self) -> None:
        """Take no more, and close the files."""
        self._worker.stop()
        with self._lock:
            for ring in self._rings.values():
                ring.close()
            self._rings.clear()

    def _step(self) -> bool:
        start_s = time.thread_time()
        try:
            self.take()
        except (MillstreamError, OSError) as error:
            logger.warning("figures aren't kept for now", error=str(error))
        except Exception:
            # Our bug. The charts end with it otherwise.
            logger.exception("figures aren't kept for now")
        # The first sample's is that of imports.
        costs_s = time.thread_time() - start_s if self.version > 1 else 0.0
        self._worker.stopping.wait(max(PERIODS["hour"].step_s, costs_s / _SHARE))
        return True

    def take(self) -> None:
        """Take a sample. Raises `OSError` if it can't be kept."""
        status, now_s = self._collect(), self._now_s()
        counts, commits = records_written(status), _commits(status)
        before_s, counts_before, commits_before = self._before or (now_s, {}, {})
        self._before = (now_s, counts, commits)
        with self._lock:
            if self._worker.stopping.is_set():
                return
            self.version += 1
            for stream in status["streams"]:
                name = stream["name"]
                if stream.get("id"):
                    rate = _rate(counts.get(name), counts_before.get(name), now_s - before_s)
                    passed = _passed(commits.get(name), commits_before.get(name))
                    self._ring(name).add(now_s, (rate, *passed, *_levels(stream)))
            memory = status["resources"]["memory_bytes"].values()
            free = status["resources"]["disk_free_bytes"]
            self._ring("").add(now_s, (float(sum(memory)) if memory else math.nan, _known(free)))

    def _ring(self, name: str) -> FigureRing:
        ring = self._rings.get(name)
        if ring is None:
            file = self._folder / (f"stream-{name}.ring" if name else "home.ring")
            ring = self._rings[name] = FigureRing(file, OF_STREAM if name else OF_HOME)
        return ring

    def of(self, name: str, period: str) -> tuple[list[tuple[int, Values]], str]:
        """Return the samples of a stream (of the home if it is empty) in a period, and what is missing of them."""
        with self._lock:
            ring = self._ring(name)
            return ring.samples(PERIODS[period], self._now_s()), ring.note


def _levels(stream: Mapping[str, Any]) -> Iterator[float]:
    """Yield what a stream has at the moment: the last six of `OF_STREAM`."""
    lag = stream["lag"]
    behind = [one["lag"]["records"] for one in stream["consumers"] if one["lag"]["records"] is not None]
    lakes = [table["disk_bytes"] for table in stream["tables"] if table["disk_bytes"] is not None]
    yield from (_known(lag["lake"]["seconds"]), _known(lag["lake"]["records"]), _known(max(behind, default=None)))
    yield from (_known(lag["capture"]["bytes"]), _known(stream["log"]["bytes"]), _known(sum(lakes) if lakes else None))


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _rate(count: int | None, before: int | None, took_s: float) -> float:
    return math.nan if count is None or before is None or count < before or took_s <= 0 else (count - before) / took_s


def _commits(status: Status) -> dict[str, list[float]]:
    """Return by stream the counts of commit groups by their time, and last the sum of their times, over all processes."""
    names = {stream["id"]: stream["name"] for stream in status["streams"] if stream.get("id")}
    found: dict[str, list[float]] = {}
    for series in status["measures"].values():
        for one in series.get(COMMIT_SECONDS.name, ()):
            name = names.get(one["labels"][0])
            if name is not None:
                now = [*one["counts"], one["sum_s"]]
                found[name] = [a + b for a, b in zip(found.get(name, [0.0] * len(now)), now, strict=True)]
    return found


def _passed(now: list[float] | None, before: list[float] | None) -> tuple[float, float]:
    """Return the mean time of the commit groups since a sample, and the time that 99 of 100 took at most."""
    if now is None or before is None:
        return math.nan, math.nan
    *counts, sum_s = [a - b for a, b in zip(now, before, strict=True)]
    total = sum(counts)
    if total <= 0 or min(counts) < 0:
        return math.nan, math.nan
    at = next(n for n, count in enumerate(accumulate(counts)) if count >= 0.99 * total)
    bounds_s = COMMIT_SECONDS.bounds_s
    return sum_s / total, bounds_s[min(at, len(bounds_s) - 1)]
