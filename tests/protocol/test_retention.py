"""Retention by reference against an oracle that remembers every number."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millstream.errors import CursorExpired, FollowerBehindRetention
from millstream.model.ids import ShardId, TableId
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ByteEnd
from millstream.protocol import retention
from millstream.protocol.retention import (
    CutOff,
    Drop,
    HolderKind,
    Keep,
    Retention,
    RetentionBounds,
    SealedSegment,
    SegmentTable,
)

SECOND = 10**9
TABLES = (1, 2, 3)
PARTITIONS = (None, "a")
PIPELINES = ("lake", "second")
OTHERS = {
    "lake/1": HolderKind.BACKLOG,
    "mail": HolderKind.CONSUMER,
    "web": HolderKind.CONSUMER,
    "copy": HolderKind.FOLLOWER,
}
NUMBERS = st.integers(1, 80)


class RetentionAgainstOracle(RuleBasedStateMachine):
    """Retention against an oracle that keeps every record of every segment, and the numbers that each holder lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Retention(["lake"])
        self.segments: list[SealedSegment] = []
        self.now_ns = 0
        self.next = 1
        # The progress that holders reported, as reported, by holder.
        self.needed_from: dict[str, int] = {"lake": 0}
        self.kinds: dict[str, HolderKind] = {"lake": HolderKind.PIPELINE}
        self.landed: dict[str, set[tuple[int, str | None, int]]] = {"lake": set()}
        self.cut_off: set[str] = set()
        self.dropped_upto = 0

    # --- reports -----------------------------------------------------------------------------------------------------

    @rule(
        shard=st.integers(0, 2),
        batches=st.lists(
            st.tuples(st.sampled_from(TABLES), st.sampled_from(PARTITIONS), st.integers(1, 4)), max_size=3
        ),
        size=st.integers(1, 10),
    )
    def seal(self, shard: int, batches: list[tuple[int, str | None, int]], size: int) -> None:
        told = []
        for table, partition, count in batches:
            told.append(SegmentTable(TableId(table), Seq(self.next), Seq(self.next + count - 1), partition))
            self.next += count
        self.next += 1  # a number that was reserved and never used, or that belongs to another shard
        segment = SealedSegment(
            ShardId(shard), Offset(self.next), Offset(self.next), Seq(self.next - 1), size, self.now_ns, tuple(told)
        )
        self.segments.append(segment)

    @rule(name=st.sampled_from([*PIPELINES, *OTHERS]), seq=NUMBERS)
    def needs(self, name: str, seq: int) -> None:
        kind = OTHERS.get(name, HolderKind.PIPELINE)
        if name in self.cut_off:
            with pytest.raises(FollowerBehindRetention if kind is HolderKind.FOLLOWER else CursorExpired, match=name):
                self.machine.needs(name, kind, Seq(seq))
            return
        self.machine.needs(name, kind, Seq(seq))
        self.kinds[name] = kind
        self.needed_from[name] = max(self.needed_from.get(name, 0), seq)
        self.landed.setdefault(name, set())

    @rule(
        name=st.sampled_from([*PIPELINES, *OTHERS, "nobody"]),
        first=NUMBERS,
        length=st.integers(0, 30),
        table=st.sampled_from([None, *TABLES, 99]),
        partition=st.sampled_from(PARTITIONS),
    )
    def land(self, name: str, first: int, length: int, table: int | None, partition: str | None) -> None:
        self.machine.landed(
            name,
            Seq(first),
            Seq(first + length - 1),
            table=None if table is None else TableId(table),
            partition=partition,
        )
        if self.kinds.get(name) is not HolderKind.PIPELINE:
            return
        for seq in range(first, first + length):
            tables = TABLES if table is None else (table,)
            partitions = PARTITIONS if table is None or partition is None else (partition,)
            self.landed[name] |= {(t, p, seq) for t in tables for p in partitions}

    @rule(name=st.sampled_from(PIPELINES))
    def land_all(self, name: str) -> None:
        """Land a cut of the lake whose batch began at the end, which is what usually frees segments."""
        self.needs(name, self.next)
        self.land(name, 1, self.next, None, None)

    @rule(name=st.sampled_from([*PIPELINES, *OTHERS, "nobody"]))
    def release(self, name: str) -> None:
        self.machine.released(name)
        for known in (self.needed_from, self.kinds, self.landed):
            known.pop(name, None)
        self.cut_off.discard(name)
        if name == "lake":
            self.needed_from[name], self.kinds[name], self.landed[name] = 0, HolderKind.PIPELINE, set()

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND

    # --- questions ---------------------------------------------------------------------------------------------------

    @rule(age_s=st.integers(0, 40), size=st.integers(0, 40), more=st.integers(0, 30))
    def retain(self, age_s: int, size: int, more: int) -> None:
        bounds = RetentionBounds(age_s, size, size + more)
        while True:
            total = sum(segment.size_bytes for segment in self.segments)
            fronts: dict[int, SealedSegment] = {}
            for segment in self.segments:
                fronts.setdefault(segment.shard, segment)
            told = self.machine.step(fronts.values(), now_ns=self.now_ns, log_bytes=total, bounds=bounds)
            oldest = min(self.segments, key=lambda one: one.last_seq, default=None)
            needing = set() if oldest is None else {n for n in self.needed_from if self.is_needed_by(n, oldest)}
            match told:
                case Drop(segment):
                    assert segment == oldest
                    assert not needing
                    assert total > size or self.now_ns - segment.sealed_ns >= age_s * SECOND
                    self.segments.remove(segment)
                    self.dropped_upto = segment.last_seq
                    self.machine.forget_below(Seq(segment.last_seq + 1))
                case CutOff(name, kind, needed_from, first):
                    assert oldest is not None
                    assert total > size + more, "nobody is cut off below retention_bytes_max"
                    assert name in needing
                    assert kind in {HolderKind.CONSUMER, HolderKind.FOLLOWER}
                    assert (needed_from, first) == (self.needed_from[name], oldest.last_seq + 1)
                    assert all(self.kinds[n].can_be_cut_off for n in needing), "it frees nothing"
                    del self.needed_from[name], self.kinds[name], self.landed[name]
                    self.cut_off.add(name)
                case Keep(segment, needed_by):
                    assert segment == oldest
                    assert set(needed_by) == needing
                    if needing:
                        held_fast = any(not self.kinds[name].can_be_cut_off for name in needing)
                        assert total <= size + more or held_fast
                    elif oldest is not None:
                        assert total <= size
                        assert self.now_ns - oldest.sealed_ns < age_s * SECOND
                    return

    def is_needed_by(self, name: str, segment: SealedSegment) -> bool:
        if segment.last_seq >= self.needed_from[name]:
            return True
        if self.kinds[name] is not HolderKind.PIPELINE:
            return False
        return any(
            (batch.table, batch.partition, seq) not in self.landed[name]
            for batch in segment.batches
            for seq in range(batch.first, batch.last + 1)
        )

    @invariant()
    def those_who_hold_are_known_by_name(self) -> None:
        assert {n: (h.kind, h.needed_from) for n, h in self.machine.holders.items()} == {
            name: (self.kinds[name], seq) for name, seq in self.needed_from.items()
        }

    @precondition(lambda self: self.segments)
    @invariant()
    def nothing_below_what_was_dropped_is_left(self) -> None:
        assert min(segment.last_seq for segment in self.segments) > self.dropped_upto


TestRetentionAgainstOracle = RetentionAgainstOracle.TestCase


@given(
    notices=st.lists(
        st.tuples(st.sampled_from([None, 1, 2]), st.sampled_from(PARTITIONS), st.integers(1, 20), st.integers(0, 12)),
        max_size=8,
    ),
    table=st.sampled_from([1, 2]),
    partition=st.sampled_from(PARTITIONS),
    first=st.integers(1, 20),
    length=st.integers(1, 8),
)
def test_a_batch_has_landed_when_every_number_of_it_was_told_in_whatever_pieces(
    notices: list[tuple[int | None, str | None, int, int]], table: int, partition: str | None, first: int, length: int
):
    machine = Retention(["lake"])
    machine.needs("lake", HolderKind.PIPELINE, Seq(1000))
    told: set[int] = set()
    for whose, part, start, count in notices:
        of = None if whose is None else TableId(whose)
        machine.landed("lake", Seq(start), Seq(start + count - 1), table=of, partition=part)
        if whose is None or (whose == table and part in {None, partition}):
            told |= set(range(start, start + count))
    batch = SegmentTable(TableId(table), Seq(first), Seq(first + length - 1), partition)
    waits = SealedSegment(ShardId(0), Offset(0), Offset(0), Seq(500), 1, 0, (batch,))
    assert bool(machine.needed_by(waits)) == (not set(range(first, first + length)) <= told)


def segment(last: int, *batches: tuple[int, int, int], size: int = 10, sealed_s: int = 0) -> SealedSegment:
    told = tuple(SegmentTable(TableId(table), Seq(first), Seq(to)) for table, first, to in batches)
    return SealedSegment(ShardId(0), Offset(0), Offset(0), Seq(last), size, sealed_s * SECOND, told)


TIGHTEST = RetentionBounds(0, 0, 0)


def ask(
    machine: Retention, oldest: SealedSegment, bounds: RetentionBounds = TIGHTEST, *, log_bytes: int = 10
) -> object:
    return machine.step([oldest], now_ns=0, log_bytes=log_bytes, bounds=bounds)


def test_a_pipeline_that_has_said_nothing_needs_everything():
    assert ask(Retention(["lake"]), segment(5)) == Keep(segment(5), ("lake",))
    assert ask(Retention(), segment(5)) == Drop(segment(5))
    consumer_only = Retention(["lake"])
    consumer_only.needs("mail", HolderKind.CONSUMER, Seq(100))
    assert ask(consumer_only, segment(5)) == Keep(segment(5), ("lake",))


def test_what_landed_stays_while_the_engine_may_ask_for_its_batch_again():
    machine = Retention(["lake"])
    machine.needs("lake", HolderKind.PIPELINE, Seq(11))
    machine.landed("lake", Seq(1), Seq(30))
    assert ask(machine, segment(10, (1, 1, 10))) == Drop(segment(10, (1, 1, 10)))
    replayed = segment(30, (1, 11, 30))
    assert ask(machine, replayed) == Keep(replayed, ("lake",))
    machine.needs("lake", HolderKind.PIPELINE, Seq(31))
    assert ask(machine, replayed) == Drop(replayed)


def test_a_table_that_has_not_landed_keeps_its_segment_whatever_the_pipeline_needs():
    machine = Retention(["lake"])
    machine.needs("lake", HolderKind.PIPELINE, Seq(100))
    two = segment(20, (1, 1, 9), (2, 10, 20))
    machine.landed("lake", Seq(10), Seq(20), table=TableId(2))
    machine.landed("lake", Seq(5), Seq(9), table=TableId(1))
    assert ask(machine, two) == Keep(two, ("lake",))
    machine.landed("lake", Seq(1), Seq(4), table=TableId(1))
    assert ask(machine, two) == Drop(two)


def test_consumers_and_followers_are_cut_off_past_the_greatest_size_and_each_by_its_name():
    machine = Retention(["lake"])
    machine.needs("mail", HolderKind.CONSUMER, Seq(3))
    machine.needs("copy", HolderKind.FOLLOWER, Seq(4))
    oldest, bounds = segment(5, (1, 1, 5)), RetentionBounds(0, 50, 100)
    assert ask(machine, oldest, bounds, log_bytes=1000) == Keep(oldest, ("copy", "lake", "mail")), (
        "it would free nothing"
    )
    machine.needs("lake", HolderKind.PIPELINE, Seq(6))
    machine.landed("lake", Seq(1), Seq(5))
    assert ask(machine, oldest, bounds, log_bytes=100) == Keep(oldest, ("copy", "mail"))
    follower, consumer, dropped = (ask(machine, oldest, bounds, log_bytes=101) for _ in range(3))
    assert follower == CutOff("copy", HolderKind.FOLLOWER, Seq(4), Seq(6))
    assert consumer == CutOff("mail", HolderKind.CONSUMER, Seq(3), Seq(6))
    assert dropped == Drop(oldest)
    with pytest.raises(CursorExpired, match="mail") as caught:
        machine.needs("mail", HolderKind.CONSUMER, Seq(50))
    assert caught.value.details == {"holder": "mail", "needed_from": 3, "first": 6}
    with pytest.raises(FollowerBehindRetention, match="copy"):
        machine.needs("copy", HolderKind.FOLLOWER, Seq(50))
    machine.released("mail")
    machine.needs("mail", HolderKind.CONSUMER, Seq(50))
    assert machine.holders["mail"].needed_from == 50


def test_who_has_bytes_needs_a_segment_up_to_its_end_also_where_its_numbers_are_long_past():
    """An idle shard may be sealed while an absent follower has all its records, but lacks its footer."""
    machine, bounds = Retention(), RetentionBounds(0, 50, 100)
    quiet = replace(segment(5, (1, 1, 5)), base_offset=Offset(10), end_offset=Offset(15))
    busy = replace(segment(20, (1, 6, 20)), base_offset=Offset(15), end_offset=Offset(30))
    inside = {quiet.shard: ByteEnd(quiet.base_offset, 4200)}
    machine.needs("copy", HolderKind.FOLLOWER, Seq(100), inside)
    assert ask(machine, quiet, bounds) == Keep(quiet, ("copy",))
    machine.needs("copy", HolderKind.FOLLOWER, Seq(100), {ShardId(quiet.shard + 1): ByteEnd(Offset(1000), 0)})
    assert ask(machine, quiet, bounds) == Keep(quiet, ("copy",)), "it has nothing of the shard"
    machine.needs("copy", HolderKind.FOLLOWER, Seq(100), {quiet.shard: ByteEnd(quiet.end_offset, 0)})
    assert ask(machine, quiet, bounds) == Drop(quiet)
    machine.needs("copy", HolderKind.FOLLOWER, Seq(100), inside)
    assert ask(machine, busy, bounds, log_bytes=100) == Keep(busy, ("copy",))
    gone = ask(machine, quiet, bounds, log_bytes=101)
    assert gone == CutOff("copy", HolderKind.FOLLOWER, Seq(100), Seq(6), inside)
    with pytest.raises(FollowerBehindRetention, match="the end of a segment"):
        machine.needs("copy", HolderKind.FOLLOWER, Seq(100))


def remembered(machine: Retention) -> int:
    """Return the number of ranges that a machine remembers."""
    return sum(holder.landed.count for holder in machine.holders.values() if holder.landed is not None)


def test_notices_that_never_match_take_no_more_than_their_bound_and_hide_no_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retention, "RANGES_MAX", 50)
    machine = Retention(["lake"])
    for number in range(1000):
        machine.landed("lake", Seq(10 * number + 5), Seq(10 * number + 6), table=TableId(77), partition=f"p{number}")
        machine.landed("lake", Seq(10 * number + 5), Seq(10 * number + 6))
        machine.landed("ghost", Seq(number), Seq(number))
    assert 0 < remembered(machine) <= 100
    machine.needs("lake", HolderKind.PIPELINE, Seq(2000))
    machine.landed("lake", Seq(1), Seq(1999))
    assert ask(machine, segment(1999, (1, 1, 1999))) == Drop(segment(1999, (1, 1, 1999)))
    machine.landed("lake", Seq(1), Seq(10**6))
    assert remembered(machine) == 1
    machine.forget_below(Seq(10**6 + 1))
    assert remembered(machine) == 0


def test_a_notice_costs_the_same_however_long_the_machine_has_run():
    def cost(before: int) -> float:
        machine = Retention(["lake"])
        for n in range(before):
            machine.needs("lake", HolderKind.PIPELINE, Seq(n))
            machine.landed("lake", Seq(1), Seq(n + 1))
        started = time.perf_counter()
        for n in range(before, before + 100):
            machine.landed("lake", Seq(1), Seq(n + 1))
        return time.perf_counter() - started

    short, long = (min(cost(before) for _ in range(10)) for before in (10, 10_000))
    assert long <= 5 * short
