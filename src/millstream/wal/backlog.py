"""How much of a log lies between two numbers: counted from the indexes of frames, without reading a record."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.codec.log_frame import FrameKind
from millstream.model.positions import Seq
from millstream.ports import Files
from millstream.wal.files import RealFiles
from millstream.wal.index import ShardIndex
from millstream.wal.layout import list_segments, list_shards, shard_folder
from millstream.wal.mark import read_mark


@dataclass(frozen=True, slots=True)
class Backlog:
    """What lies in `(after, upto]`, in whole frames."""

    records: int
    size_bytes: int
    oldest_commit_us: int | None
    """The earliest commit time in it, at the source; None where nothing in it has one."""


def backlog(folder: str, after: Seq, upto: Seq, *, files: Files | None = None) -> Backlog:
    """Count what lies in `(after, upto]` of a stream's log; a frame that straddles a bound counts whole.

    Raises:
        CorruptWal: an index is damaged.
    """
    files = RealFiles() if files is None else files
    records = size = 0
    oldest: int | None = None
    for shard in list_shards(files, folder):
        mark = read_mark(files, shard_folder(folder, shard))
        if mark is None or after >= upto:
            continue
        for _, entry in ShardIndex(files, shard_folder(folder, shard), shard).from_seq(after, mark):
            if entry.kind is not FrameKind.RECORDS or entry.last_seq <= after or entry.first_seq > upto:
                continue
            records += entry.count
            size += entry.length
            if entry.commit_ts_min_us is not None:
                oldest = entry.commit_ts_min_us if oldest is None else min(oldest, entry.commit_ts_min_us)
    return Backlog(records, size, oldest)


def log_size(folder: str, *, files: Files | None = None) -> tuple[int, int]:
    """(segments, bytes) of a stream's log."""
    files = RealFiles() if files is None else files
    paths = [
        segment.path
        for shard in list_shards(files, folder)
        for segment in list_segments(files, shard_folder(folder, shard))
    ]
    return len(paths), sum(files.size(path) for path in paths)
