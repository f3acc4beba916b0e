"""The numbers of a log around a moment of its source's commits."""

from __future__ import annotations

from collections.abc import Iterable

from millstream.model.positions import Seq
from millstream.ports import Files
from millstream.wal.frame_index import HEADS_AHEAD_BYTES, read_header
from millstream.wal.reading.shard_merge import Place
from millstream.wal.segment_scan import ReadAhead, commit_times, read_frame, reader_of


def numbers_around(
    files: Files, frames: Iterable[Place], moment_us: int, first: Seq, persisted: Seq
) -> tuple[Seq, Seq]:
    """Return the numbers around a moment of the source's commits, in whole commit groups.

    Args:
        frames: the log's records frames, group by group.
        moment_us: the moment, µs since 1970 UTC.
        first: the number before the first frame.
        persisted: the number of the last one.

    Returns:
        The last number before the first group with a commit at or after the moment, and the last number of the last
        group with a commit at or before it.
    """
    since: Seq | None = None
    until = first
    ends = (until, until)
    """Ends of the previous group and of this one."""
    for _, segment, entry in frames:
        if entry.group_last_seq != ends[1]:
            ends = (ends[1], entry.group_last_seq)
        low, high = entry.commit_ts_min_us, entry.commit_ts_max_us
        if low is None or high is None:
            window = ReadAhead(reader_of(files, segment.path), HEADS_AHEAD_BYTES)
            head = read_frame(window, entry.position, payload=False).head
            low, high = commit_times(head, read_header(files, segment)) or (None, None)
        if low is None or high is None:
            continue
        if since is None and high >= moment_us:
            since = ends[0]
        if low <= moment_us:
            until = ends[1]
    return persisted if since is None else since, until
