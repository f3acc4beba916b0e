"""A shard's bytes as they arrive: a frame that arrives whole is taken in one go, and checked like one in pieces."""

from __future__ import annotations

from functools import cache

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.wal.replica_pairs import Pair
from tests.wal.truth import FOLDER, SHARDS

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentHeader
from millstream.errors import Diverged, ShipmentUnreadable
from millstream.wal.layout import list_segments, shard_folder
from millstream.wal.replica.recovery import fresh_shard
from millstream.wal.replica.verify_continuity import ArrivingShard, WholeFrame, footer_start


@cache
def segments() -> list[bytes]:
    """Segments of shard 0, sealed ones and the last; the groups lie on two shards."""
    pair = Pair()
    pair.append(12)
    folder = shard_folder(FOLDER, SHARDS[0])
    return [pair.leader_files.read(one.path) for one in list_segments(pair.leader_files, folder)]


Outcome = tuple[type[Exception] | None, list[WholeFrame], int, int, object]


def taken(data: bytes, size: int) -> Outcome:
    """Return the result of a first segment's frames that arrive in pieces of a size."""
    header = SegmentHeader.decode(segments()[0])
    arriving = fresh_shard(header.stream, header.shard, header.base_offset)
    arriving.begin(memoryview(segments()[0][:SEGMENT_HEADER_SIZE]))
    whole: list[WholeFrame] = []
    try:
        for at in range(0, len(data), size):
            arriving.feed(memoryview(data)[at : at + size], whole)
    except (Diverged, ShipmentUnreadable) as error:
        return type(error), whole, arriving.verified, arriving.end_offset, hashes(arriving)
    return None, whole, arriving.verified, arriving.end_offset, hashes(arriving)


def hashes(arriving: ArrivingShard) -> tuple[bytes, bytes]:
    return arriving._heads.digest(), arriving._entries.digest()


def frames() -> bytes:
    first = segments()[0]
    return first[SEGMENT_HEADER_SIZE : footer_start(memoryview(first), 0)]


def test_all_sealed_segments_are_taken_alike_in_one_go_and_in_pieces() -> None:
    found = []
    for size in (1, 777, 1 << 20):
        header = SegmentHeader.decode(segments()[0])
        arriving = fresh_shard(header.stream, header.shard, header.base_offset)
        whole: list[WholeFrame] = []
        for segment in segments()[:-1]:
            arriving.begin(memoryview(segment))
            end = footer_start(memoryview(segment), 0)
            assert end is not None
            for at in range(SEGMENT_HEADER_SIZE, end, size):
                arriving.feed(memoryview(segment)[at : min(at + size, end)], whole)
            arriving.finish(memoryview(segment)[end:])
        found.append((whole, arriving.end, arriving.end_offset, arriving.group))
    assert len(found[0][0]) > 3
    assert found[0] == found[1] == found[2]


@settings(max_examples=60)
@given(st.integers(0), st.integers(0, 7), st.sampled_from([1, 5, 300, 4000]))
@example(0, 0, 1)
def test_damage_is_found_in_one_go_as_it_is_in_pieces(place: int, bit: int, size: int) -> None:
    data = bytearray(frames())
    data[place % len(data)] ^= 1 << bit
    in_one_go = taken(bytes(data), len(data))
    assert in_one_go[0] is not None or in_one_go[2] < SEGMENT_HEADER_SIZE + len(data)
    assert taken(bytes(data), size) == in_one_go


@settings(max_examples=30)
@given(st.integers(0), st.sampled_from([1, 5, 300, 4000]))
def test_frames_that_are_missing_or_come_twice_are_refused_in_one_go_as_in_pieces(place: int, size: int) -> None:
    data = frames()
    ends = [frame.end.position - SEGMENT_HEADER_SIZE for frame in taken(data, len(data))[1]]
    begin, end = [0, *ends][place % len(ends)], ends[place % len(ends)]
    for changed in (data[:begin] + data[end:], data[:end] + data[begin:]):
        assert taken(changed, size) == taken(changed, max(1, len(changed)))
