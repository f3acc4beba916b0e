"""The shard of a key, and its leader: one map from the hashes of keys to shards, as a ring, as ranges, or all to one.

All three have the same form: points on the circle of 64-bit hashes, each with an owner. A hash belongs to the first
point at or after it; after the last point the circle begins again. So the map is total: every key has exactly one
shard, whatever the points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.model.ids import ShardId
from millstream.protocol.replication.leader_map import LeaderMap, Leadership
from millstream.routing.hashing import Hashes, key_hashes

VIRTUAL_NODES: Final = 128
"""Points of a shard on a ring: with so many, the fullest of some shards has about a fifth more keys than the mean."""
_LAST: Final = 2**64 - 1
_BUCKETS_BITS_MAX: Final = 16
_NOBODY: Final = LeaderMap()
"""The map without a known leader."""

Shards: TypeAlias = npt.NDArray[np.int64]


class ShardMap:
    """The shard of every key. Made by `single`, `ring` or `ranges`; immutable."""

    def __init__(self, points: Hashes, owners: Shards, leaders: LeaderMap = _NOBODY) -> None:
        """Args: points of the circle, rising, at least one; the shard of each; the map of their leaders."""
        if not len(points) or len(points) != len(owners) or (points[1:] <= points[:-1]).any():
            raise AssertionError("a map's points rise, and each has an owner")
        self.points, self.owners, self.leaders = points, owners, leaders
        bits = min(_BUCKETS_BITS_MAX, int(len(points) * 4).bit_length())
        self._shift = 64 - bits
        firsts = np.arange(2**bits, dtype=np.uint64) << np.uint64(self._shift)
        self._buckets = np.searchsorted(points, firsts).astype(np.int64)
        """For the highest bits of a hash, the first point that it may belong to."""

    @classmethod
    def single(cls, shard: ShardId) -> Self:
        """Return a map of all keys to one shard."""
        return cls(np.array([_LAST], dtype=np.uint64), np.array([shard], dtype=np.int64))

    @classmethod
    def ring(cls, shards: Sequence[ShardId], *, virtual_nodes: int = VIRTUAL_NODES) -> Self:
        """Return a map by hash: a shard added to n gets about 1/(n + 1) of all keys, and no other key moves.

        Args:
            shards: at least one. A shard's points follow from its number alone.
            virtual_nodes: number of points of each, from 1.
        """
        numbers = np.repeat(np.array(shards, dtype=np.int64), virtual_nodes)
        places = np.tile(np.arange(virtual_nodes, dtype=np.int64), len(shards))
        points = key_hashes([pa.array(numbers), pa.array(places)])
        order = np.lexsort((numbers, points))
        points, owners = points[order], numbers[order]
        first = np.concatenate(([True], points[1:] != points[:-1]))
        return cls(points[first], owners[first])

    @classmethod
    def ranges(cls, starts: Sequence[int], shards: Sequence[ShardId]) -> Self:
        """Return a map by ranges of hashes: shard n from start n to below the next, the last up to 2**64 - 1.

        Args:
            starts: rising, the first 0, below 2**64.
        """
        if not starts or starts[0] != 0:
            raise AssertionError("the first range begins at 0")
        points = np.array([*(start - 1 for start in starts[1:]), _LAST], dtype=np.uint64)
        return cls(points, np.array(shards, dtype=np.int64))

    @property
    def shards(self) -> tuple[ShardId, ...]:
        """The shards that have keys, in order."""
        return tuple(ShardId(int(shard)) for shard in np.unique(self.owners))

    def shards_of(self, hashes: Hashes) -> Shards:
        """Return the shard of each key, by its hash."""
        from millstream.routing._splitting import owners_of

        found: Shards = owners_of(hashes, self.points, self.owners, self._buckets, self._shift)
        return found

    def shards_of_keys(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> Shards:
        """Return the shard of each row, by its values in the columns of the key."""
        return self.shards_of(key_hashes(columns))

    def led_by(self, leaders: LeaderMap) -> ShardMap:
        """Return the same map with another map of leaders."""
        return ShardMap(self.points, self.owners, leaders)

    def leader_of(self, shard: ShardId) -> Leadership | None:
        """Return the leader of a shard, if it is known: writes to the shard go there."""
        return self.leaders.leader_of(shard)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardMap)
            and np.array_equal(self.points, other.points)
            and np.array_equal(self.owners, other.owners)
        )

    __hash__ = None  # type: ignore[assignment]
