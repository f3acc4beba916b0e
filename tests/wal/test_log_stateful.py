"""Random lives of a log: groups of any shape, restarts, crashes of every kind, a full disk, retention."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.seeds import examples
from tests.wal.truth import FOLDER, SMALL, Truth

from millstream.errors import DiskFull
from millstream.testing.files import Crash, MemoryFiles, keep_any, lose_all
from millstream.wal.reader import StreamReader

PIECES = st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 9)), min_size=1, max_size=3)
OPTIONS = replace(SMALL, disk_used_max=1.0)


class LifeOfALog(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.truth = Truth()
        self.files = MemoryFiles()
        self.seen: list[int] = []
        self.open()

    def open(self) -> None:
        self.log = self.truth.open(self.files, options=OPTIONS)
        self.reader = StreamReader(FOLDER, files=self.files)

    @rule(group=st.lists(st.lists(PIECES, min_size=1, max_size=4), min_size=1, max_size=3))
    def commit(self, group: list[list[list[tuple[int, int]]]]) -> None:
        self.truth.commit(self.log, *(self.truth.ops(*operations) for operations in group))

    @rule(chunks=st.lists(st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 9)), max_size=2), max_size=4))
    def commit_spilled(self, chunks: list[list[tuple[int, int]]]) -> None:
        self.truth.commit(self.log, self.truth.spilled([(1, 1)], *chunks))

    @rule()
    def restart(self) -> None:
        """Restart cleanly; the same reader continues with the new writer."""
        self.log.close()
        self.log = self.truth.open(self.files, options=OPTIONS)

    @rule(after=st.integers(1, 25), seed=st.integers(0, 10**6), kind=st.sampled_from(["kill", "cut", "any"]))
    def crash(self, after: int, seed: int, kind: str) -> None:
        self.files.plan.crash_at = self.files.plan.operations + after
        try:
            for _ in range(4):
                self.truth.commit(self.log, self.truth.ops([(1, 2), (2, 1)], [(3, 1 + after % 5)]))
            self.log.close()
        except Crash:
            self.seen = sorted({*self.seen, *self.truth.shown(self.files)})
        keep = {"kill": None, "cut": lose_all, "any": keep_any(seed)}[kind]
        self.files = self.files.crash(keep)
        self.open()

    @rule(spare_bytes=st.integers(0, 3000))
    def fill_the_disk(self, spare_bytes: int) -> None:
        self.files.capacity_bytes = self.files.used_bytes() + spare_bytes
        ops = self.truth.ops([(1, 12), (2, 12)], size=400)
        with pytest.raises(DiskFull):
            self.truth.commit(self.log, ops)
        self.truth.refused.add(self.truth.attempted[-1])
        self.files.capacity_bytes = 1 << 40

    @invariant()
    def what_was_acknowledged_or_seen_is_there_whole(self) -> None:
        shown = self.truth.judge(self.files, seen=self.seen)
        self.seen = shown
        assert self.reader.persisted_upto() == self.log.persisted_upto
        rows = sum(len(self.truth.rows[xid]) for xid in shown)
        assert rows == sum(self.reader.durable_offset(shard) for shard in self.reader.shards)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.close()
            self.truth.judge_every_way_of_reading(self.files)


LifeOfALog.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=12)
TestLifeOfALog = pytest.mark.long(LifeOfALog.TestCase)
