"""Random lives of a log whose groups are shown only once followers hold them, with restarts, crashes and slow followers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.wal.truth import FOLDER, SMALL, Truth

from millstream.model.ids import GroupNumber, ShardId
from millstream.testing.files import Crash, MemoryFiles, keep_any, lose_all
from millstream.wal.durable_mark import read_mark, read_readable
from millstream.wal.layout import shard_folder
from millstream.wal.reader import StreamReader

PIECES = st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 9)), min_size=1, max_size=3)
OPTIONS = replace(SMALL, disk_used_max=1.0)


class LifeOfAHiddenLog(RuleBasedStateMachine):
    @initialize(hides=st.booleans())
    def begin(self, *, hides: bool) -> None:
        self.truth = Truth()
        self.files = MemoryFiles()
        self.hides = hides
        self.held = 0
        """The last group that followers hold. It never goes back."""
        self.free: set[int] = set()
        """Transactions that became readable while no follower had to hold them."""
        self.group_of: dict[int, int] = {}
        self.seen: set[int] = set()
        self.open()

    def open(self) -> None:
        before = set(self.truth.shown(self.files)) if self.truth.attempted and not self.hides_now() else set()
        self.free |= before
        self.log = self.truth.open(self.files, options=OPTIONS, hides=self.hides)
        for xid in self.truth.shown(self.files, durable=True):
            self.group_of.setdefault(xid, self.log.group)
        self.show()

    def hides_now(self) -> bool:
        """Return whether readers of the log as it lies there go by the shown marks."""
        folder = shard_folder(FOLDER, ShardId(0))
        return read_mark(self.files, folder) != read_readable(self.files, folder)

    def show(self) -> None:
        if self.log.shown is not None:
            self.log.shown.show(GroupNumber(self.held))

    @rule(group=st.lists(st.lists(PIECES, min_size=1, max_size=4), min_size=1, max_size=3))
    def commit(self, group: list[list[list[tuple[int, int]]]]) -> None:
        self.committed(*(self.truth.ops(*operations) for operations in group))

    @rule(chunks=st.lists(st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 9)), max_size=2), max_size=4))
    def commit_spilled(self, chunks: list[list[tuple[int, int]]]) -> None:
        self.committed(self.truth.spilled([(1, 1)], *chunks))

    def committed(self, *ops: object) -> None:
        before = len(self.truth.attempted)
        self.truth.commit(self.log, *ops)  # type: ignore[arg-type]
        self.group_of.update(dict.fromkeys(self.truth.attempted[before:], self.log.group))

    @rule(share=st.integers(0, 4))
    def others_hold_more(self, share: int) -> None:
        """Let followers hold some or all of the durable groups. A late acknowledgement of an older group comes too."""
        self.held = max(self.held, self.held + (self.log.group - self.held) * share // 4)
        if self.log.shown is not None:
            self.log.shown.show(GroupNumber(self.held // 2))
        self.show()

    @rule(hides=st.booleans())
    def restart(self, *, hides: bool) -> None:
        self.log.close()
        if not self.hides:
            self.free |= set(self.truth.shown(self.files))
        self.hides = hides
        self.open()

    @rule(after=st.integers(1, 40), seed=st.integers(0, 10**6), kind=st.sampled_from(["kill", "cut", "any"]))
    def crash(self, after: int, seed: int, kind: str) -> None:
        """Crash at any operation on the disk, also while marks move or the log is opened."""
        self.files.plan.crash_at = self.files.plan.operations + after
        try:
            for _ in range(4):
                self.committed(self.truth.ops([(1, 2), (2, 1)], [(3, 1 + after % 5)]))
                self.held = max(self.held, self.log.group - 1)
                self.show()
            self.log.close()
            self.open()
        except Crash:
            pass
        if not self.hides:
            self.free |= set(self.truth.shown(self.files))
        self.files = self.files.crash({"kill": None, "cut": lose_all, "any": keep_any(seed)}[kind])
        if kind != "kill":
            # A power cut may restore an older mark. Readers see the rest again once followers acknowledge it.
            self.seen = set()
        self.open()

    @invariant()
    def readers_see_whole_groups_that_others_hold_and_never_less_than_before(self) -> None:
        self.truth.judge(self.files)
        shown = set(self.truth.shown(self.files))
        assert shown >= self.seen
        self.seen = shown
        reader = StreamReader(FOLDER, files=self.files)
        if self.hides:
            assert all(self.group_of[xid] <= self.held or xid in self.free for xid in shown)
            assert self.log.shown is not None
            assert reader.persisted_upto() == self.log.shown.persisted_upto
            if self.held >= self.log.group:
                assert not self.log.shown.hides
        else:
            assert reader.persisted_upto() == self.log.persisted_upto
        rows = sum(len(self.truth.rows[xid]) for xid in shown)
        assert rows == sum(reader.durable_offset(s) for s in reader.shards)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.close()


LifeOfAHiddenLog.TestCase.settings = settings(max_examples=8, stateful_step_count=12)
TestLifeOfAHiddenLog = LifeOfAHiddenLog.TestCase


def test_a_kill_between_the_marks_of_two_shards_leaves_no_half_of_an_operation_readable() -> None:
    """The next writer once took the marks as they lay: a reader by offsets saw one shard's part of a group."""
    life = LifeOfAHiddenLog()
    life.begin(hides=True)
    for after in (2, 20):
        life.crash(after=after, kind="kill", seed=0)
        life.readers_see_whole_groups_that_others_hold_and_never_less_than_before()
    life.teardown()


def test_a_kill_between_marks_of_one_group_takes_nothing_from_readers_at_the_next_kill() -> None:
    """Marks of one group with different numbers once stayed so, and the next move fell back to the lower number."""
    life = LifeOfAHiddenLog()
    life.begin(hides=True)
    for after, kind, seed in [
        (14, "kill", 0),
        (35, "any", 0),
        (8, "cut", 456182),
        (25, "cut", 313754),
        (20, "kill", 0),
    ]:
        life.crash(after=after, kind=kind, seed=seed)
        life.readers_see_whole_groups_that_others_hold_and_never_less_than_before()
    life.teardown()
