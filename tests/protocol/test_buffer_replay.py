"""Replay of a buffer after a restart.

Nothing that is in the log is read again, and everything that isn't in it is, for each partition of each table.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.model.buffered_operations import BufferOffset
from millstream.model.ids import ShardId
from millstream.protocol.buffer_replay import Checkpoint, PartitionRows, fold

SHARDS = [ShardId(0), ShardId(1)]
PARTS = [
    PartitionRows(shard, table, partition) for shard in SHARDS for table in ("a", "b") for partition in (None, "p")
]
offsets = st.integers(0, 30).map(BufferOffset)


@given(
    items=st.lists(st.sets(st.sampled_from(PARTS)), max_size=30),
    place=offsets,
    held=st.dictionaries(st.sampled_from(PARTS), offsets),
    stale=st.lists(st.tuples(st.sampled_from(PARTS), offsets)),
    chance=st.randoms(use_true_random=False),
)
def test_every_row_is_taken_exactly_once(
    items: list[set[PartitionRows]],
    place: BufferOffset,
    held: dict[PartitionRows, BufferOffset],
    stale: list[tuple[PartitionRows, BufferOffset]],
    chance: object,
) -> None:
    """The log has all rows below `place`; of a held part it has only those below the part's minimum.

    Checkpoints arrive in any order, old ones too.
    """
    place = BufferOffset(min(place, len(items)))
    held = {part: BufferOffset(min(minimum, place)) for part, minimum in held.items()}

    def is_in_log(part: PartitionRows, offset: int) -> bool:
        return offset < held.get(part, place)

    told = [Checkpoint.of_shard(shard, place) for shard in SHARDS]
    told += [Checkpoint(part, minimum, place) for part, minimum in held.items()]
    told += [Checkpoint(part, BufferOffset(min(old, held[part])), place) for part, old in stale if part in held]
    told += [Checkpoint.of_shard(shard, BufferOffset(place // 2)) for shard in SHARDS]
    chance.shuffle(told)  # type: ignore[attr-defined]
    replay = fold(told)
    log = {(offset, part) for offset, parts in enumerate(items) for part in parts if is_in_log(part, offset)}
    for shard in SHARDS:
        assert replay.start(shard) == min([place, *(at for part, at in held.items() if part.shard == shard)])
        assert replay.end(shard) == place
        for offset in range(replay.start(shard), len(items)):
            for part in items[offset]:
                if part.shard == shard and not replay.is_persisted(part, BufferOffset(offset)):
                    assert (offset, part) not in log
                    log.add((offset, part))
    assert log == {(offset, part) for offset, parts in enumerate(items) for part in parts}


def test_a_shard_that_nothing_is_known_of_is_read_from_its_start() -> None:
    replay = fold([])
    assert (replay.start(ShardId(7)), replay.place(ShardId(7)), replay.end(ShardId(7))) == (0, 0, 0)
    assert not replay.is_persisted(PartitionRows(ShardId(7), "a", None), BufferOffset(0))
