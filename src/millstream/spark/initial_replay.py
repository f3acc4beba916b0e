"""Replay: the records that a starting pipeline finds in the log and the lake lacks, and its progress with them.

Progress is measured against the durable end at the start, so that later records change nothing: the
amount done only grows, up to the total. It is counted from the log's indexes alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

from millstream.errors import LogError
from millstream.model.positions import Seq
from millstream.spark.pipeline import Amount, ReplayProgress
from millstream.wal.backlog import Backlog, Backlogs

_RECORDS_MIN: Final = 250_000
"""Some seconds' work of a pipeline on two cores, however few bytes they have. More bytes than a batch
takes are a replay too."""


class ReplayWatch:
    """Computes the progress of a replay. The caller serialises calls.

    Args:
        start: the lake's position when the pipeline started.
        target: the log's durable end at that moment.
        bytes_max: of a batch: a start that finds no more than this, and fewer than `records_min` records, is
            no replay.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        folder: str,
        start: Seq,
        target: Seq,
        *,
        bytes_max: int,
        records_min: int = _RECORDS_MIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._target, self._bytes_max, self._records_min = start, target, bytes_max, records_min
        self._clock = clock
        self._began_s = self._landed_s = clock()
        self._first: tuple[float, int] | None = None
        """When the first batch had landed, and how many bytes were left then."""
        self._backlogs: Backlogs | None = Backlogs(folder)
        """None once there is nothing more to count."""
        self._whole: Backlog | None = None
        self._left: tuple[Seq, Backlog] | None = None
        """The number, and the backlog behind it."""
        self._told: ReplayProgress | None = None
        self.finished: ReplayProgress | None = None
        """The replay that is over; None before that, or if there was none."""

    def look(self, n: Seq) -> ReplayProgress | None:
        """Return the progress now that the lake has reached `n`; None if no replay is in progress.

        The first call reads the index of every segment behind `start`; later calls cost little, and
        next to nothing at the same `n`.
        """
        if self._backlogs is None:
            return None
        # The lander meets and reports the same fault; or a segment has just been dropped.
        with contextlib.suppress(LogError, OSError):
            self._told = self._looked(self._backlogs, n)
        return self._told

    def _looked(self, backlogs: Backlogs, n: Seq) -> ReplayProgress | None:
        whole = self._whole
        if whole is None:
            whole = self._whole = backlogs.between(self._start, self._target)
            if whole.size_bytes <= self._bytes_max and whole.records < self._records_min:
                self._backlogs = None
                return None
        if self._left is None or self._left[0] != n:
            self._left = n, backlogs.between(n, self._target) if n > self._start else whole
            self._landed_s = self._clock()
        left = self._left[1]
        found = ReplayProgress(
            Amount(whole.segments - left.segments, whole.segments),
            Amount(whole.records - left.records, whole.records),
            Amount(whole.size_bytes - left.size_bytes, whole.size_bytes),
            self._eta_s(whole.size_bytes, left.size_bytes),
            self._clock() - self._began_s,
        )
        if left.records:
            return found
        self.finished, self._backlogs = found, None
        return None

    def _eta_s(self, whole: int, left: int) -> float | None:
        """Estimate from the bytes landed since the first batch, in which Spark's workers start; None before that.

        A batch in flight doesn't count against the rate, unless it takes longer than all before it.
        """
        if left == whole:
            return None
        if self._first is None:
            self._first = self._landed_s, left
        since_s, then = self._first
        took_s = max(self._landed_s - since_s, self._clock() - self._landed_s)
        return left * took_s / (then - left) if left < then else None
