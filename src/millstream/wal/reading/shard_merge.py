"""Merging of shards: records of one table that a commit group has on several shards, in the order of their numbers.

A group's operations lie on the shards where routing placed them, so a table's numbers alternate
between shards. Memory is bounded by one frame per shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.codec.log_segment import FrameEntry
from millstream.model.ids import ShardId, TableId
from millstream.model.positions import Seq
from millstream.wal.layout import SegmentFile
from millstream.wal.reading.table_records import TableRecords

Place: TypeAlias = tuple[ShardId, SegmentFile, FrameEntry]
"""A frame's position, with its shard and segment."""


def by_shard_or_group(
    frames: Iterable[Place], wanted: frozenset[TableId] | None, *, alone: bool
) -> Iterator[tuple[ShardId | None, Iterator[Place]]]:
    """Group frames into the pieces that are read together.

    Args:
        frames: records frames, commit group by commit group; a shard's in their order.
        wanted: only frames with rows of these tables count.
        alone: whether all of them are of one shard.

    Returns:
        A shard with its consecutive frames, or None with one group's frames on
        several shards.
    """
    if alone:
        yield from groupby(frames, key=_shard)
        return
    groups = (list(group) for _, group in groupby(_with_rows_of(frames, wanted), lambda p: p[2].group_last_seq))
    for is_on_several, some in groupby(groups, key=lambda places: any(place[0] != places[0][0] for place in places)):
        if is_on_several:
            for places in some:
                yield None, iter(places)
        else:
            yield from groupby(chain.from_iterable(some), key=_shard)


def _shard(place: Place) -> ShardId:
    return place[0]


def _with_rows_of(frames: Iterable[Place], wanted: frozenset[TableId] | None) -> Iterator[Place]:
    return (place for place in frames if wanted is None or place[2].tables_of(wanted))


def group_records(
    places: Sequence[Place],
    wanted: frozenset[TableId] | None,
    records: Callable[[Place, frozenset[TableId]], Iterator[TableRecords]],
) -> Iterator[TableRecords]:
    """Read the records of a group that has frames on several shards, table by table.

    Args:
        places: its frames.
        records: reads a frame's records of some tables.
    """
    tables: dict[TableId, dict[ShardId, list[Place]]] = {}
    for place in places:
        for table in dict.fromkeys(entry.table_id for entry in place[2].tables_of(wanted)):
            tables.setdefault(table, {}).setdefault(place[0], []).append(place)
    for table, shards in tables.items():
        only = frozenset((table,))
        yield from merged_by_number(
            [chain.from_iterable(records(place, only) for place in of_shard) for of_shard in shards.values()]
        )


def merged_by_number(shards: Sequence[Iterator[TableRecords]]) -> Iterator[TableRecords]:
    """Merge records of one table, from several shards, in the order of their numbers.

    Args:
        shards: each shard's records of the table, in order.

    Returns:
        Parts that were merged are one piece, under the shard of the first part.
    """
    heads = [(head, rest) for rest in shards if (head := next(rest, None)) is not None]
    while len(heads) > 1:
        # The heads hold all records up to this number: a shard's next piece lies above the last
        # number of its head.
        limit = min(head.last_seq for head, _ in heads)
        parts = []
        following = []
        for head, rest in heads:
            end = int(np.searchsorted(_numbers(head), limit, side="right"))
            if end:
                parts.append(_rows(head, 0, end))
            left = _rows(head, end, head.batch.num_rows) if end < head.batch.num_rows else next(rest, None)
            if left is not None:
                following.append((left, rest))
        heads = following
        yield from _together(parts)
    for head, rest in heads:
        yield head
        yield from rest


def _together(parts: Sequence[TableRecords]) -> Iterator[TableRecords]:
    if len(parts) == 1:
        yield parts[0]
        return
    numbers = np.concatenate([_numbers(part) for part in parts])
    order = np.argsort(numbers, kind="stable")
    first = parts[0]
    if all(part.batch.schema.equals(first.batch.schema) and part.schema == first.schema for part in parts):
        places = pa.array(order)
        yield replace(
            first,
            batch=pa.concat_batches([part.batch for part in parts]).take(places),
            first_seq=Seq(int(numbers[order[0]])),
            last_seq=Seq(int(numbers[order[-1]])),
            operation_seq=pa.concat_arrays([part.operation_seq for part in parts]).take(places),
            hybrid_ns=pa.concat_arrays([part.hybrid_ns for part in parts]).take(places),
        )
        return
    # Records of several schema versions: adjacent records of the same version stay together.
    sizes = [part.batch.num_rows for part in parts]
    origin = np.repeat(np.arange(len(parts)), sizes)[order]
    ends = [*(np.flatnonzero(np.diff(origin)) + 1).tolist(), len(origin)]
    done = [0] * len(parts)
    start = 0
    for end in ends:
        number = int(origin[start])
        yield _rows(parts[number], done[number], done[number] + end - start)
        done[number] += end - start
        start = end


def _rows(found: TableRecords, start: int, end: int) -> TableRecords:
    if start == 0 and end == found.batch.num_rows:
        return found
    numbers = _numbers(found)
    return replace(
        found,
        batch=found.batch.slice(start, end - start),
        first_seq=Seq(int(numbers[start])),
        last_seq=Seq(int(numbers[end - 1])),
        operation_seq=found.operation_seq.slice(start, end - start),
        hybrid_ns=found.hybrid_ns.slice(start, end - start),
    )


def _numbers(found: TableRecords) -> npt.NDArray[np.int64]:
    numbers: npt.NDArray[np.int64] = found.batch.column("__seq").to_numpy()
    return numbers
