"""Marks of several shards move one after another. A kill may come between any two of them."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from millstream.model.ids import Epoch, GroupNumber, ShardId, StreamId, WriterId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq
from millstream.protocol.sequencer.persisted_upto import stream_cut
from millstream.testing.files import MemoryFiles
from millstream.wal.durable_mark import MarkFile, read_mark
from millstream.wal.replica.follower_marks import is_newer, moves
from millstream.wal.shard_locks import lock_shards

SHARDS = (ShardId(0), ShardId(1), ShardId(2))
START = DurableMark(
    stream=StreamId(UUID("5f0c21aa-0000-4000-8000-000000000001")),
    writer=WriterId(1),
    epoch=Epoch(1),
    base_offset=Offset(0),
    byte_end=4096,
    durable_offset=Offset(0),
    group=GroupNumber(1),
    persisted_upto=Seq(8),
    reserved_to=Seq(100),
    shards=len(SHARDS),
)


def after(group: int) -> DurableMark:
    """Return the mark that a shard has once a group is durable on all of them."""
    return replace(START, byte_end=4096 + 100 * group, group=GroupNumber(group), persisted_upto=Seq(8 * group))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=6))
def test_readers_never_see_less_whatever_moves_a_kill_cuts_short(lives: list[tuple[int, int]]):
    marks = dict.fromkeys(SHARDS, START)
    group, seen = 1, stream_cut(marks.values())
    for further, moved in lives:
        group += further
        newer = {shard: after(group) for shard in SHARDS if is_newer(after(group), marks[shard])}
        for _, (shard, mark) in zip(range(moved), moves(dict(marks), newer), strict=False):
            marks[shard] = mark
            assert stream_cut(marks.values()) >= seen
            seen = stream_cut(marks.values())
    for shard, mark in moves(dict(marks), {shard: after(group + 1) for shard in SHARDS}):
        marks[shard] = mark
        assert stream_cut(marks.values()) >= seen
    assert seen <= stream_cut(marks.values()) == 8 * (group + 1)
    assert set(marks.values()) == {after(group + 1)}


class MovedAtTheLastMoment(MemoryFiles):
    """Lets the earlier writer move its mark, and let it go, once the later one has read it."""

    earlier: MarkFile | None = None

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        found = super().read(path, position, length)
        if self.earlier is not None and path.endswith("durable.mark"):
            earlier, self.earlier = self.earlier, None
            for group in (2, 3, 4):
                earlier.move(after(group))
            earlier.close()
        return found


def test_a_writers_marks_are_newer_than_those_of_the_writer_that_it_waited_for():
    files = MovedAtTheLastMoment()
    files.makedirs("/wal/shop")
    earlier = lock_shards(files, "/wal/shop", SHARDS[:1])[SHARDS[0]]
    earlier.move(after(1))
    files.earlier = earlier
    later = lock_shards(files, "/wal/shop", SHARDS[:1])[SHARDS[0]]
    later.move(after(5))
    assert read_mark(files, "/wal/shop/00000") == after(5)
