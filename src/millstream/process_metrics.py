"""Counters and latency histograms of this process, for `/metrics`.

A process only adds to them, for as long as it lives; a forked child starts with its own. They are kept here without
`prometheus_client`, which only `serve` needs. `serve` collects the values of every process of the home and gives
each series the label `process`, so that a restart resets the series of one process and of no other.

The label `stream` is a stream's id: a process may write several homes. `serve` replaces it by the name.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from typing import Any, Final

_lock = threading.Lock()
_SHORT_S: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
_LONG_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)


class Count:
    """One series of a counter. Any thread."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float) -> None:
        """Add an amount, which isn't negative."""
        assert amount >= 0, "a counter only grows"
        with _lock:
            self.value += amount


class Durations:
    """One series of a histogram. Any thread."""

    __slots__ = ("_bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, *durations_s: float, count: int = 1) -> None:
        """Count durations, each of them so often."""
        found = [(bisect_left(self._bounds_s, seconds), max(0.0, seconds)) for seconds in durations_s]
        with _lock:
            for at, seconds in found:
                self.counts[at] += count
                self.sum_s += count * seconds


class Counter:
    """A value that only grows. Any thread."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name: Final = name
        self.text: Final = text
        self.labels: Final = labels
        self._series: dict[tuple[str, ...], Count] = {}

    def of(self, *labels: str) -> Count:
        """Return the series of these values of the labels; it begins at zero, so that `increase()` sees the first one."""
        found = self._series.get(labels)
        return self._series.setdefault(labels, Count()) if found is None else found

    def series(self) -> list[dict[str, Any]]:
        """Return the series, JSON-able: the values of the `labels`, and the `value`."""
        return [{"labels": list(labels), "value": one.value} for labels, one in self._series.copy().items()]

    def clear(self) -> None:
        """Drop all series, in a forked child."""
        self._series = {}


class Histogram:
    """Durations in seconds, counted by bucket. Any thread.

    Args:
        name: the metric's; it ends in `_seconds`.
        text: what takes that long.
        labels: the names of its labels.
        bounds_s: the upper bounds of the buckets; the last bucket has none.
    """

    def __init__(self, name: str, text: str, *labels: str, bounds_s: tuple[float, ...] = _SHORT_S) -> None:
        self.name: Final = name
        self.text: Final = text
        self.labels: Final = labels
        self.bounds_s: Final = bounds_s
        self._series: dict[tuple[str, ...], Durations] = {}

    def of(self, *labels: str) -> Durations:
        """Return the series of these values of the labels."""
        found = self._series.get(labels)
        return self._series.setdefault(labels, Durations(self.bounds_s)) if found is None else found

    def series(self) -> list[dict[str, Any]]:
        """Return the series, JSON-able: the values of the `labels`, the `counts` by bucket, the `sum_s`."""
        with _lock:
            return [
                {"labels": list(labels), "counts": list(one.counts), "sum_s": one.sum_s}
                for labels, one in self._series.copy().items()
            ]

    def forget(self, *labels: str) -> None:
        """Drop the series of these values of the labels, since what they name is gone."""
        self._series.pop(labels, None)

    def clear(self) -> None:
        """Drop all series, in a forked child."""
        self._series = {}


APPEND_SECONDS: Final = Histogram(
    "millstream_append_seconds",
    "Time of an append from its rows to its acknowledgement; requests that share a batch count once.",
    "stream",
)
COMMIT_SECONDS: Final = Histogram(
    "millstream_log_commit_seconds", "Time of a commit group, from the queue to readable.", "stream"
)
FSYNC_SECONDS: Final = Histogram(
    "millstream_log_fsync_seconds", "Time of a commit group's fsyncs, of all its shards.", "stream"
)
CAPTURE_COMMIT_SECONDS: Final = Histogram(
    "millstream_capture_commit_seconds",
    "Time of captured transactions from their submission to the log to durable there.",
    "stream",
)
REPLICA_APPLY_SECONDS: Final = Histogram(
    "millstream_replica_apply_seconds", "Time in which a follower verifies a shipment and makes it durable.", "stream"
)
LAKE_BATCH_SECONDS: Final = Histogram(
    "millstream_lake_batch_seconds", "Time of a pipeline's batch, up to its cut.", "stream", bounds_s=_LONG_S
)
CONSUMER_DELIVERY_SECONDS: Final = Histogram(
    "millstream_consumer_delivery_seconds",
    "Time from the commit of a record to its first delivery to a consumer.",
    "stream",
    "consumer",
    bounds_s=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0, 3600.0),
)
CONSUMER_REQUEST_SECONDS: Final = Histogram(
    "millstream_consumer_request_seconds",
    "Time of a batch's delivery to a consumer's sink, such as a webhook's request.",
    "stream",
    "consumer",
)
HTTP_REQUEST_SECONDS: Final = Histogram(
    "millstream_http_request_seconds",
    "Time of an HTTP request, from its head to the end of its answer.",
    "method",
    "route",
    "status",
)
LOG_OPERATIONS: Final = Counter("millstream_log_operations_total", "Operations made durable in the log.", "stream")
LOG_RECORDS: Final = Counter("millstream_log_records_total", "Records made durable in the log.", "stream")
LOG_WRITTEN_BYTES: Final = Counter("millstream_log_written_bytes_total", "Bytes written to the log.", "stream")
CAPTURED_RECORDS: Final = Counter(
    "millstream_captured_records_total", "Captured records made durable in the log.", "stream"
)
LANDED_ROWS: Final = Counter(
    "millstream_table_landed_rows_total", "Records landed in a table's history.", "stream", "table"
)
SINK_ROWS: Final = Counter(
    "millstream_sink_rows_total", "Rows that routing sent to a sink; for devnull, that it dropped.", "stream", "sink"
)
SINK_IGNORED_ERRORS: Final = Counter(
    "millstream_sink_ignored_errors_total",
    "Writes that succeeded although a sink that may fail didn't take them.",
    "stream",
    "sink",
)
MEASURES: Final[tuple[Counter | Histogram, ...]] = tuple(
    found for found in list(globals().values()) if isinstance(found, Counter | Histogram)
)
"""All of them."""


def all_series() -> dict[str, list[dict[str, Any]]]:
    """Return this process's series by the metric's name, JSON-able."""
    return {measure.name: found for measure in MEASURES if (found := measure.series())}


def _begin_again() -> None:
    # Another thread of the parent may have held the lock.
    global _lock  # noqa: PLW0603 (a forked child's own)
    _lock = threading.Lock()
    for measure in MEASURES:
        measure.clear()


os.register_at_fork(after_in_child=_begin_again)
