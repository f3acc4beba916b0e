"""A follower's marks: which of the leader's it may write, and in which order.

No reader may see less than before, or half a group.

The leader's marks of one moment show at most what all of them cover. A follower takes each one that
is newer than its own, once the bytes that it covers are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentHeader
from millstream.errors import CorruptFrame, ReplicaGap, ShipmentUnreadable
from millstream.model.ids import Epoch, GroupNumber, ShardId, StreamId, WriterId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import SEQ_MAX, Offset, Seq
from millstream.model.replication import ByteEnd
from millstream.ports import Files
from millstream.protocol.sequencer.persisted_upto import common_cut, left_behind, stream_cut
from millstream.wal.layout import segment_path
from millstream.wal.replica.verify_continuity import ArrivingShard
from millstream.wal.segment_scan import ReadAhead, reader_of, scan_frames

NOBODY = WriterId(0)
"""Writer of a shard's mark before its first own one came."""


def placeholder(stream: StreamId, dropped: DroppedMark | None) -> DurableMark:
    """Return the mark of a shard that shows nothing yet, or nothing any longer.

    Its writer is `NOBODY`, and it is settled, so that it holds back nothing that other marks show.
    """
    base = Offset(0) if dropped is None else dropped.offset
    return DurableMark(
        stream=stream,
        writer=NOBODY,
        epoch=Epoch(0),
        base_offset=base,
        byte_end=SEGMENT_HEADER_SIZE,
        durable_offset=Offset(0),
        group=GroupNumber(0),
        persisted_upto=Seq(0) if dropped is None else dropped.seq,
        reserved_to=Seq(0),
        elsewhere=SEQ_MAX,
        is_settled=True,
    )


def is_newer(mark: DurableMark, shown: DurableMark | None) -> bool:
    """Return whether a new mark covers more than the current one.

    A later mark of a shard covers no less of anything.
    """
    if shown is None:
        return True
    later = (_place(mark) >= _place(shown), mark.group >= shown.group, mark.persisted_upto >= shown.persisted_upto)
    return mark != shown and all(later)


def _place(mark: DurableMark) -> tuple[int, ...]:
    return mark.base_offset, mark.byte_end, mark.epoch, mark.reserved_to, mark.is_settled


def check_mark(files: Files, shard_dir: str, mark: DurableMark, arriving: ArrivingShard) -> None:
    """Check that what a mark covers is here, verified, and ends with a frame; then it may be shown.

    Raises:
        ReplicaGap: it isn't here yet.
        ShipmentUnreadable: the mark doesn't match the bytes.
    """
    if mark.stream != arriving.stream:
        raise ShipmentUnreadable(f"a mark belongs to stream {mark.stream}, the log to stream {arriving.stream}")
    here = ByteEnd(arriving.base, arriving.verified)
    there = ByteEnd(mark.base_offset, mark.byte_end)
    if mark.byte_end == SEGMENT_HEADER_SIZE and mark.base_offset == arriving.base:
        # A segment that has only its header isn't shipped.
        there = replace(there, position=min(arriving.verified, SEGMENT_HEADER_SIZE))
    if there > here:
        raise ReplicaGap(
            f"a mark of shard {arriving.shard} covers {there}; this log ends at {here}", shard=int(arriving.shard)
        )
    if there == here:
        end, group, more = arriving.end_offset, arriving.group, arriving.more
    elif mark.byte_end == SEGMENT_HEADER_SIZE:
        end, group, more = mark.base_offset, GroupNumber(0), False
    else:
        end, group, more = _end_in(files, shard_dir, mark)
    if (end, more) != (mark.durable_offset, False) or group > mark.group:
        raise ShipmentUnreadable(
            f"a mark of shard {arriving.shard} has offset {mark.durable_offset} and group {mark.group}, but the frames there end with {end} and {group}",
            shard=int(arriving.shard),
        )


def _end_in(files: Files, shard_dir: str, mark: DurableMark) -> tuple[Offset, GroupNumber, bool]:
    """Return the end of the last frame before a place inside the log, its group, and whether the group goes on."""
    read = reader_of(files, segment_path(shard_dir, mark.base_offset))
    try:
        header = SegmentHeader.decode(read(0, SEGMENT_HEADER_SIZE))
        frames = list(scan_frames(ReadAhead(read), header, end=mark.byte_end, payload=False))
    except (CorruptFrame, FileNotFoundError) as error:
        raise ShipmentUnreadable(f"a mark names an invalid position: {error}") from error
    if not frames or frames[-1].end != mark.byte_end:
        raise ShipmentUnreadable(f"a mark ends at byte {mark.byte_end}, where no frame ends")
    found = frames[-1].header
    return Offset(found.first_offset + found.count), found.group, found.more


def moves(
    shown: Mapping[ShardId, DurableMark], newer: Mapping[ShardId, DurableMark]
) -> Iterator[tuple[ShardId, DurableMark]]:
    """Yield the marks to write, in order.

    With several shards, first what a kill left behind; then all positions, with what was shown
    before; then what is complete up to them.
    """
    if len(shown) > 1:
        written = {shard: mark for shard, mark in shown.items() if mark.writer != NOBODY}
        behind = dict(left_behind(written)) if newer else {}
        yield from behind.items()
        shown = {**shown, **behind}
        before = stream_cut(shown.values())
        for shard, mark in newer.items():
            old = shown.get(shard)
            own = common_cut([other for other in shown.values() if other.writer == mark.writer])
            yield (
                shard,
                replace(
                    mark,
                    persisted_upto=min(mark.persisted_upto, max(own, before)),
                    is_settled=mark.is_settled if old is None or old.writer == NOBODY else old.is_settled,
                ),
            )
    yield from newer.items()
