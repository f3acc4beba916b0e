"""Every key has exactly one shard, and few keys move when the number of shards changes by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.model.ids import Epoch, ShardId
from millstream.model.replication import NodeName
from millstream.protocol.replication.leader_map import LeaderMap, Leadership
from millstream.protocol.replication.node_promises import Promise
from millstream.routing.shard_map import ShardMap

HASHES = np.random.default_rng(7).integers(0, 2**64, 200_000, dtype=np.uint64)
EDGES = np.array([0, 1, 2**63, 2**64 - 2, 2**64 - 1], dtype=np.uint64)


def shards(count: int) -> list[ShardId]:
    return [ShardId(n) for n in range(count)]


def by_hand(router: ShardMap, hashes: np.ndarray) -> np.ndarray:
    """Find shards by the ring's points alone, without the buckets that make it fast."""
    places = np.searchsorted(router.points, hashes)
    return router.owners[np.where(places == len(router.points), 0, places)]


@given(st.integers(1, 40), st.integers(1, 300), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_every_key_has_exactly_one_shard_of_a_ring(count: int, virtual_nodes: int, keys: list[int]) -> None:
    router = ShardMap.ring(shards(count), virtual_nodes=virtual_nodes)
    hashes = np.concatenate((np.array(keys, dtype=np.uint64), EDGES, router.points, router.points + np.uint64(1)))
    found = router.shards_of(hashes)
    assert set(found.tolist()) <= set(range(count))
    assert (found == by_hand(router, hashes)).all()
    assert (router.shards_of(router.points) == router.owners).all()


@given(st.sets(st.integers(1, 2**64 - 1), max_size=20), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_every_key_has_exactly_one_shard_of_ranges(cuts: set[int], keys: list[int]) -> None:
    starts = [0, *sorted(cuts)]
    router = ShardMap.ranges(starts, shards(len(starts)))
    hashes = np.concatenate((np.array(keys, dtype=np.uint64), EDGES, np.array(starts, dtype=np.uint64)))
    expected = np.searchsorted(np.array(starts, dtype=np.uint64), hashes, side="right") - 1
    assert (router.shards_of(hashes) == expected).all()


@given(st.sets(st.integers(1, 2**64 - 1), max_size=20), st.booleans())
def test_the_last_range_has_the_last_value_of_the_key_space_and_each_range_its_first(
    cuts: set[int], to_the_end: bool
) -> None:
    starts = [0, *sorted(cuts | ({2**64 - 1} if to_the_end else set()))]
    router = ShardMap.ranges(starts, shards(len(starts)))
    ends = np.array([*(start - 1 for start in starts[1:]), 2**64 - 1], dtype=np.uint64)
    assert router.shards_of(ends).tolist() == list(range(len(starts)))
    assert router.shards_of(np.array(starts, dtype=np.uint64)).tolist() == list(range(len(starts)))


def test_a_map_of_leaders_changes_no_place() -> None:
    router = ShardMap.ring(shards(3))
    assert router.leader_of(ShardId(1)) is None
    leader = Leadership(Promise(Epoch(2), NodeName("b")), NodeName("b"))
    led = router.led_by(LeaderMap.of([leader]))
    assert led.leader_of(ShardId(1)) == led.leader_of(ShardId(2)) == leader
    assert led == router
    assert (led.shards_of(HASHES) == router.shards_of(HASHES)).all()


def test_one_shard_has_all_keys() -> None:
    assert set(ShardMap.single(ShardId(5)).shards_of(EDGES).tolist()) == {5}


@pytest.mark.parametrize("count", [1, 2, 4, 8, 31])
def test_a_new_shard_takes_its_share_and_nothing_else_moves(count: int) -> None:
    before = ShardMap.ring(shards(count)).shards_of(HASHES)
    after = ShardMap.ring(shards(count + 1)).shards_of(HASHES)
    moved = before != after
    assert set(after[moved].tolist()) == {count}
    share = 1 / (count + 1)
    assert 0.6 * share < moved.mean() < 1.5 * share


def test_shards_have_about_as_many_keys() -> None:
    counts = np.bincount(ShardMap.ring(shards(8)).shards_of(HASHES), minlength=8)
    assert counts.max() < 1.35 * counts.mean()
    assert counts.min() > 0.7 * counts.mean()


def test_a_ring_is_the_same_each_time_that_it_is_made() -> None:
    assert ShardMap.ring(shards(5)) == ShardMap.ring(shards(5))
    assert ShardMap.ring(shards(5)) != ShardMap.ring(shards(5), virtual_nodes=64)
    assert ShardMap.ring(shards(5)).shards == tuple(shards(5))
