"""How much of a log lies between two numbers: counted from the indexes of frames, without reading a record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millstream.codec.log_frame import FrameKind
from millstream.codec.log_segment import FrameEntry
from millstream.model.ids import ShardId
from millstream.model.positions import Seq
from millstream.ports import Files
from millstream.wal.files import RealFiles
from millstream.wal.index import ShardIndex, read_header
from millstream.wal.layout import SegmentFile, list_segments, list_shards, shard_folder
from millstream.wal.mark import read_mark
from millstream.wal.scan import Window, commit_times, read_frame, reader_of


@dataclass(frozen=True, slots=True)
class Backlog:
    """What lies in `(after, upto]`, in whole frames."""

    records: int
    size_bytes: int
    oldest_commit_us: int | None
    """The earliest commit time in it, at the source; None where nothing in it has one."""


class Backlogs:
    """Counts of a stream's log. What one count has read of the indexes, the next one needn't read again.

    Use it from one thread.
    """

    def __init__(self, folder: str, *, files: Files | None = None) -> None:
        self._folder = folder
        self._files = RealFiles() if files is None else files
        self._indexes: dict[ShardId, ShardIndex] = {}

    def between(self, after: Seq, upto: Seq) -> Backlog:
        """Count what lies in `(after, upto]`; a frame that straddles a bound counts whole.

        Raises:
            CorruptWal: an index is damaged.
            FileNotFoundError: retention drops a segment at this very moment; count again.
        """
        records = size = 0
        oldest: int | None = None
        for segment, entry in self._frames(after, upto):
            records += entry.count
            size += entry.length
            time_us = entry.commit_ts_min_us
            if time_us is None and oldest is None:
                time_us = _commit_us(self._files, segment, entry.position)
            if time_us is not None:
                oldest = time_us if oldest is None else min(oldest, time_us)
        return Backlog(records, size, oldest)

    def _frames(self, after: Seq, upto: Seq) -> Iterator[tuple[SegmentFile, FrameEntry]]:
        for shard in list_shards(self._files, self._folder) if after < upto else []:
            folder = shard_folder(self._folder, shard)
            mark = read_mark(self._files, folder)
            if mark is None:
                continue
            index = self._indexes.setdefault(shard, ShardIndex(self._files, folder, shard))
            for segment, entry in index.from_seq(after, mark):
                if entry.kind is FrameKind.RECORDS and entry.last_seq > after and entry.first_seq <= upto:
                    yield segment, entry


def _commit_us(files: Files, segment: SegmentFile, position: int) -> int | None:
    """The least commit time of a frame that no footer tells about."""
    frame = read_frame(Window(reader_of(files, segment.path)), position, payload=False)
    times = commit_times(frame.head, read_header(files, segment))
    return None if times is None else times[0]


def log_size(folder: str, *, files: Files | None = None) -> tuple[int, int]:
    """(segments, bytes) of a stream's log."""
    files = RealFiles() if files is None else files
    paths = [
        segment.path
        for shard in list_shards(files, folder)
        for segment in list_segments(files, shard_folder(folder, shard))
    ]
    return len(paths), sum(files.size(path) for path in paths)
