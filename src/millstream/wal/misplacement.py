"""The place in a log that a segment's header names: its stream, its shard and its base offset.

A file's name gives the place where a segment is; its header gives the place where it belongs. They
differ if a file was copied over another one, renamed, or taken from another shard or log.
"""

from __future__ import annotations

from collections import Counter

from millstream.codec.log_segment import SegmentHeader
from millstream.model.ids import ShardId, StreamId
from millstream.ports import Files
from millstream.wal.dropped_segments import skipping_dropped
from millstream.wal.durable_mark import read_mark
from millstream.wal.layout import SegmentFile, segments_and_strays, shard_folder, shards_and_strays
from millstream.wal.segment_scan import header_of

REPLACED = "it doesn't follow on the segment before it: one of them was replaced"


def misplacement(header: SegmentHeader, segment: SegmentFile, shard: ShardId, stream: StreamId | None) -> str | None:
    """Return why a header can't belong to a segment of this name, in this shard of this stream; None if it can.

    Args:
        segment: the file by its name.
        shard: the shard whose folder it lies in.
        stream: the stream of the log; None if that isn't known.
    """
    if stream is not None and header.stream != stream:
        return f"its header is that of a segment of another log, of stream {header.stream}"
    if (header.shard, header.base_offset) != (shard, segment.base_offset):
        return f"its header is that of the segment of shard {header.shard} that begins at offset {header.base_offset}"
    return None


def stream_of(files: Files, folder: str) -> StreamId | None:
    """Return the stream whose log a folder holds: from its marks, else from most headers; None if neither decides."""
    shards = shards_and_strays(files, folder)[0]
    marks = [mark for shard in shards if (mark := read_mark(files, shard_folder(folder, shard))) is not None]
    found = Counter(mark.stream for mark in marks)
    if not found:
        found = Counter(
            header.stream
            for shard in shards
            for segment in segments_and_strays(files, shard_folder(folder, shard), looks=True)[0]
            if (header := header_of(files, segment)) is not None
        )
    most = found.most_common(2)
    if not most or (len(most) > 1 and most[0][1] == most[1][1]):
        return None
    return most[0][0]


def split_misplaced(
    files: Files, shard: ShardId, segments: list[SegmentFile], stream: StreamId | None
) -> tuple[list[SegmentFile], list[tuple[SegmentFile, SegmentHeader, str]]]:
    """Split the segments into those whose headers name their place (or can't be read), and the others.

    Each of the others comes with its header and what is wrong. A segment that retention has just dropped is in neither.
    """
    placed: list[SegmentFile] = []
    misplaced: list[tuple[SegmentFile, SegmentHeader, str]] = []
    for segment in segments:
        with skipping_dropped(files):
            header = header_of(files, segment)
            why = None if header is None else misplacement(header, segment, shard, stream)
            if header is None or why is None:
                placed.append(segment)
            else:
                misplaced.append((segment, header, why))
    return placed, misplaced
