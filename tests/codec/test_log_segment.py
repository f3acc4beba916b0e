"""Segment headers and footers, and the golden file that every later version must read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.codec.log_directory import DIRECTORY, Directory
from millstream.codec.log_frame import FrameKind, RecordsFrame, decode_frame, frame_extent
from millstream.codec.log_schemas import SchemaSet
from millstream.codec.log_segment import (
    SEGMENT_HEADER_SIZE,
    SEGMENT_TRAILER_SIZE,
    FrameEntries,
    FrameEntry,
    FrameTable,
    SegmentFooter,
    SegmentHeader,
    SegmentTotals,
    frames_after,
    frames_from,
    schemas_of,
)
from millstream.errors import CodecError, CorruptFrame, LogError
from millstream.model.ids import Epoch, GroupNumber, RegionId, SchemaVersion, ShardId, StreamId, TableId
from millstream.model.positions import Offset, Seq
from millstream.testing.errors import coded

GOLDEN = Path(__file__).parent.parent / "golden"
LATER_DIRECTORY = Directory(DIRECTORY.operations, DIRECTORY.batches.append(pa.field("origin", pa.string())))
"""As a later version may write it: with another column at the end."""
INT63 = st.integers(0, 2**63 - 1)
UINT32 = st.integers(0, 2**32 - 1)

headers = st.builds(
    SegmentHeader,
    stream=st.uuids().map(StreamId),
    region=UINT32.map(RegionId),
    shard=UINT32.map(ShardId),
    epoch=INT63.map(Epoch),
    base_offset=INT63.map(Offset),
    previous_hash=st.binary(min_size=32, max_size=32),
    created_ns=INT63,
    directory=st.sampled_from([DIRECTORY, LATER_DIRECTORY]),
)
entries = st.builds(
    FrameEntry,
    kind=st.sampled_from(FrameKind),
    offset=INT63.map(Offset),
    count=INT63,
    position=INT63,
    length=INT63,
    more=st.booleans(),
    first_seq=INT63.map(Seq),
    last_seq=INT63.map(Seq),
    group_last_seq=INT63.map(Seq),
    group=INT63.map(GroupNumber),
    commit_ts_min_us=st.none() | INT63,
    commit_ts_max_us=st.none() | INT63,
    tables=st.lists(
        st.builds(
            FrameTable,
            INT63.map(TableId),
            st.integers(1, 2**31 - 1).map(SchemaVersion),
            INT63,
            INT63,
        ),
        max_size=3,
    ).map(tuple),
)


@st.composite
def footers(draw: st.DrawFn) -> SegmentFooter:
    """Draw consecutive frames, in bytes and in offsets."""
    position, first = SEGMENT_HEADER_SIZE, draw(st.integers(0, 2**62))
    offset, frames = first, []
    for entry in draw(st.lists(entries, max_size=5)):
        count, length = draw(st.integers(0, 2**40)), draw(st.integers(1, 3000))
        frames.append(replace(entry, position=position, length=length, offset=Offset(offset), count=count))
        position, offset = position + length, offset + count
    return SegmentFooter(tuple(frames), Offset(offset), offset - first, draw(st.binary(min_size=32, max_size=32)))


def footer_of(data: bytes, *, behind: SegmentFooter | None = None) -> SegmentFooter | None:
    """Decode the footer of a file that ends with these bytes, after as many bytes as the frames of `behind` take."""
    frames = () if behind is None else behind.frames
    file = bytes(SEGMENT_HEADER_SIZE + sum(frame.length for frame in frames)) + data
    return SegmentFooter.decode_tail(lambda position, length: file[position : position + length], len(file))


@given(headers)
def test_a_header_gives_back_every_field(header: SegmentHeader) -> None:
    decoded = SegmentHeader.decode(header.encode())
    assert decoded == header
    assert decoded.directory == header.directory


@given(headers, st.integers(0, SEGMENT_HEADER_SIZE - 1), st.integers(1, 255))
def test_a_header_with_a_flipped_byte_is_a_typed_error(header: SegmentHeader, at: int, flip: int) -> None:
    data = bytearray(header.encode())
    data[at] ^= flip
    with pytest.raises((CodecError, LogError)):
        SegmentHeader.decode(bytes(data))


@given(headers, st.integers(0, SEGMENT_HEADER_SIZE - 1))
def test_a_header_cut_short_is_truncated(header: SegmentHeader, length: int) -> None:
    with pytest.raises(CorruptFrame, check=coded("truncated_frame")):
        SegmentHeader.decode(header.encode()[:length])


@given(footers())
def test_a_footer_gives_back_every_field(footer: SegmentFooter) -> None:
    assert footer_of(footer.encode(), behind=footer) == footer


@given(footers())
def test_a_footers_totals_are_those_of_its_frames_with_records(footer: SegmentFooter) -> None:
    file = bytes(SEGMENT_HEADER_SIZE + sum(frame.length for frame in footer.frames)) + footer.encode()
    totals = SegmentTotals.decode_tail(lambda position, length: file[position : position + length], len(file))
    frames = [frame for frame in footer.frames if frame.kind is FrameKind.RECORDS]
    firsts, lasts = [frame.first_seq for frame in frames], [frame.last_seq for frame in frames]
    times = [frame.commit_ts_min_us for frame in frames if frame.commit_ts_min_us is not None]
    assert totals == SegmentTotals(
        sum(frame.count for frame in frames),
        sum(frame.length for frame in frames),
        (min(firsts, default=Seq(0)), max(firsts, default=Seq(0))),
        (min(lasts, default=Seq(0)), max(lasts, default=Seq(0))),
        min(times, default=None),
        footer.end_offset,
    )


@given(footers(), st.data())
def test_a_footer_with_a_flipped_byte_is_damaged_or_no_footer(footer: SegmentFooter, data: st.DataObject) -> None:
    encoded = bytearray(footer.encode())
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    if at >= len(encoded) - 8:  # the magic: then the file ends like an open one, and its frames give the rest
        assert footer_of(bytes(encoded), behind=footer) is None
    else:
        with pytest.raises(CorruptFrame):
            footer_of(bytes(encoded), behind=footer)


@given(footers(), INT63)
def test_frames_of_a_footer_are_found_in_its_columns_as_one_by_one(footer: SegmentFooter, after: int) -> None:
    decoded = footer_of(footer.encode(), behind=footer)
    assert decoded is not None
    assert schemas_of(decoded.frames) == schemas_of(footer.frames)
    for bound in (after, *(frame.group_last_seq for frame in footer.frames)):
        assert list(frames_after(decoded.frames, Seq(bound))) == list(frames_after(footer.frames, Seq(bound)))
    for bound in (after, *(frame.offset for frame in footer.frames)):
        assert list(frames_from(decoded.frames, Offset(bound))) == list(frames_from(footer.frames, Offset(bound)))
    bounds = [Seq(after), *(number for frame in footer.frames for number in (frame.first_seq, frame.last_seq))]
    for low, high in zip(bounds, bounds[1:] or bounds, strict=False):
        assert isinstance(decoded.frames, FrameEntries)
        inside = [
            frame
            for frame in footer.frames
            if frame.kind is FrameKind.RECORDS and frame.last_seq > low and frame.first_seq <= high
        ]
        times = [frame.commit_ts_min_us for frame in inside if frame.commit_ts_min_us is not None]
        total = sum(frame.count for frame in inside), sum(frame.length for frame in inside), min(times, default=None)
        assert decoded.frames.total(low, high) == total
    assert list(decoded.frames[1:]) == list(footer.frames[1:])
    for place, found in enumerate(decoded.frames):
        frame = footer.frames[place]
        assert decoded.frames[place] == found == frame
        for wanted in (None, frozenset[TableId](), frozenset(table.table_id for table in frame.tables[:2])):
            assert list(found.tables_of(wanted)) == list(frame.tables_of(wanted))


def frame_at(position: int, length: int, offset: int, count: int) -> FrameEntry:
    numbers = Seq(1), Seq(1), Seq(1), GroupNumber(1)
    return FrameEntry(FrameKind.RECORDS, Offset(offset), count, position, length, False, *numbers)


@pytest.mark.parametrize("of", ["positions", "offsets"])
def test_frames_that_follow_on_each_other_by_overflow_alone_are_damage(of: str) -> None:
    huge, start = 2**63 - 1, SEGMENT_HEADER_SIZE
    if of == "positions":
        places = [(start, huge), (start + huge - 2**64, huge), (start - 2, 302)]
        frames = [frame_at(position, length, at, 1) for at, (position, length) in enumerate(places)]
        footer = SegmentFooter(tuple(frames), Offset(3), 3, bytes(32))
    else:
        counts = [(0, huge), (huge, huge), (-2, 3)]
        frames = [frame_at(start + 100 * at, 100, offset, count) for at, (offset, count) in enumerate(counts)]
        footer = SegmentFooter(tuple(frames), Offset(1), 1, bytes(32))
    file = bytes(start + 300) + footer.encode()
    with pytest.raises(CorruptFrame, match="don't follow on each other"):
        SegmentFooter.decode_tail(lambda position, length: file[position : position + length], len(file))


def test_nulls_in_a_footer_are_damage() -> None:
    footer = SegmentFooter((frame_at(SEGMENT_HEADER_SIZE, 100, 0, 1),), Offset(1), 1, bytes(32))
    for name in ("offset", "position", "length", "count", "kind", "group_last_seq"):
        changed: Any = {name: None}
        file = (
            bytes(SEGMENT_HEADER_SIZE + 100) + replace(footer, frames=(replace(footer.frames[0], **changed),)).encode()
        )

        def read(position: int, length: int, file: bytes = file) -> bytes:
            return file[position : position + length]

        with pytest.raises(CorruptFrame, match="nulls"):
            SegmentFooter.decode_tail(read, len(file))
        with pytest.raises(CorruptFrame, match="nulls"):
            SegmentTotals.decode_tail(read, len(file))


def test_an_open_segment_has_no_footer() -> None:
    assert footer_of(b"") is None
    assert footer_of(bytes(SEGMENT_TRAILER_SIZE)) is None


def read_golden(name: str, version: int) -> tuple[SegmentHeader, list[dict[str, Any]]]:
    """Return a golden segment's header and rows, after a check of its footer."""
    data = (GOLDEN / f"{name}.wal").read_bytes()
    expected = json.loads((GOLDEN / f"{name}.json").read_text())
    header = SegmentHeader.decode(data)
    assert header.stream == UUID(expected["stream"])
    footer = SegmentFooter.decode_tail(lambda p, n: data[p : p + n], len(data))
    assert footer is not None
    assert footer.end_offset == expected["end_offset"]
    known = SchemaSet(header.directory)
    rows = []
    position = SEGMENT_HEADER_SIZE
    for entry in footer.frames:
        assert entry.position == position
        length = frame_extent(data[position:]).length
        frame = decode_frame(data[position : position + length], known)
        assert (frame.header.shard, frame.header.region) == (header.shard, header.region)
        assert frame.header.version == data[position + 12] == version
        if isinstance(frame, RecordsFrame):
            for table_id in frame.table_ids():
                for schema, records in frame.records(table_id, offsets=True):
                    rows += [{"table": schema.name} | row for row in records.to_pylist()]
        position += length
    assert json.loads(json.dumps(rows, default=str)) == expected["rows"]
    return header, rows


def test_the_golden_segment_of_version_2_is_read() -> None:
    header, _ = read_golden("segment-v2", version=2)
    assert (header.shard, header.region, header.epoch, header.base_offset) == (1, 0, 7, 1000)
    assert header.directory == DIRECTORY


def test_the_golden_segment_of_a_partitioned_table_is_read() -> None:
    _, rows = read_golden("segment-partitioned", version=2)
    assert [(row["table"], row["__op"], row.get("__partition_oid", "none")) for row in rows] == [
        ("leafy", "c", 16_391), ("leafy", "c", None), ("leafy", "x", 16_391), ("leafy", "x", 2**32 - 1),
        ("orders", "c", "none"),
    ]  # fmt: skip


def test_the_golden_segment_with_headers_of_version_1_is_read() -> None:
    header, rows = read_golden("segment-header-v1", version=1)
    assert (header.shard, header.region, header.epoch, header.base_offset) == (0, 0, 7, 1000)
    assert [(row["table"], row["__offset"] - 1000, row["__seq"]) for row in rows] == [
        ("orders", 0, 5001), ("orders", 2, 5002), ("orders", 4, 5005), ("items", 1, 5003), ("items", 3, 5004)
    ]  # fmt: skip
