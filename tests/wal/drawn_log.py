"""Draws that the searches over logs in memory share: options, operations, disk failures, and what the disk keeps."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import ClassVar

from tests.wal.truth import SMALL, Truth

from millstream.testing.clock import ManualClock
from millstream.testing.files import MemoryFiles, keep_any, lose_all
from millstream.wal.writing.options import LogOptions

PLENTY = 1 << 40


@dataclass
class DrawnLog:
    """A writer's log, drawn from one seed."""

    value_sizes: ClassVar[list[int]] = [8, 8, 120]

    seed: int
    truth: Truth = field(default_factory=Truth)
    files: MemoryFiles = field(default_factory=MemoryFiles)
    clock: ManualClock = field(default_factory=ManualClock)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def _break_within(self, files: MemoryFiles, operations: int, *, crashes: float) -> None:
        """At one of the next operations cut the power, with probability `crashes`, or let the call fail."""
        at = files.plan.operations + self.chance.randint(1, operations)
        if self.chance.random() < crashes:
            files.plan.crash_at = at
        else:
            files.plan.fail_at = frozenset({at})

    def _mend(self, files: MemoryFiles) -> None:
        files.plan.crash_at = None
        files.plan.fail_at = frozenset()
        files.capacity_bytes = PLENTY

    def _kept(self) -> object:
        """Draw which unsynced writes survive a power cut: all, none, or any."""
        return self.chance.choice([None, lose_all, keep_any(self.chance.randrange(1 << 30))])

    def _options(self) -> LogOptions:
        return replace(
            SMALL,
            segment_bytes=self.chance.choice([3_000, 9_000, 30_000]),
            frame_bytes_max=self.chance.choice([300, 1_500, 1 << 20]),
            disk_used_max=1.0,
        )

    def _ops(self) -> object:
        size = self.chance.choice(self.value_sizes)
        return self.truth.ops(*(self._pieces() for _ in range(self.chance.randint(1, 3))), size=size)

    def _pieces(self) -> list[tuple[int, int]]:
        return [(self.chance.choice([1, 2, 3]), self.chance.randint(1, 6)) for _ in range(self.chance.randint(1, 3))]

    def _count(self, what: str) -> None:
        self.counts[what] += 1
