"""Size of a log between two numbers: counted from the indexes of frames, without reading a record."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from millstream.codec.log_frame import FrameKind
from millstream.codec.log_segment import FrameEntries
from millstream.model.ids import Epoch, ShardId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.schema import is_definition
from millstream.ports import Files
from millstream.wal.dropped_segments import past_drops
from millstream.wal.durable_mark import read_dropped, read_mark
from millstream.wal.files import RealFiles
from millstream.wal.frame_index import ShardIndex, read_header
from millstream.wal.layout import SegmentFile, list_segments, list_shards, shard_folder
from millstream.wal.segment_scan import ReadAhead, commit_times, read_frame, reader_of

if TYPE_CHECKING:
    from millstream.codec.log_segment import FrameTable
    from millstream.wal.reader import StreamReader

_CACHED_FRAMES_MAX: Final = 50_000
"""Number of frames cached for segments that a bound splits; others aren't cached. About 8 MiB."""


_COUNTS_MAX: Final = 16
_COMMIT_TIMES_MAX: Final = 1_000
"""Number of frames whose commit time is cached: those at which a count began."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """Counts of the range `(after, upto]`, in whole frames."""

    records: int
    size_bytes: int
    oldest_commit_us: int | None
    """Earliest commit time in it, at the source; None if nothing in it has one."""
    segments: int = 0
    """Number of segments with a record of it."""

    def __add__(self, other: Backlog) -> Backlog:
        """Return the sum of both; they share no segment."""
        times = [time for time in (self.oldest_commit_us, other.oldest_commit_us) if time is not None]
        return Backlog(
            self.records + other.records,
            self.size_bytes + other.size_bytes,
            min(times, default=None),
            self.segments + other.segments,
        )


_NOTHING: Final = Backlog(0, 0, None)


class Backlogs:
    """Counts of a stream's log. Indexes read for one count are cached for the next.

    A segment that lies whole between the bounds costs next to nothing; one that a bound splits is
    read frame by frame. Use it from one thread.
    """

    def __init__(self, folder: str, *, files: Files | None = None) -> None:
        self._folder = folder
        self._files = RealFiles() if files is None else files
        self._indexes: dict[ShardId, ShardIndex] = {}
        self._marks: dict[ShardId, tuple[DurableMark | None, DroppedMark | None]] = {}
        self._counts: dict[tuple[Seq, Seq], Backlog] = {}
        """Counts between the same bounds, while neither a writer nor retention has moved its mark."""
        self._commit_times_us: dict[tuple[str, Epoch, int], int | None] = {}
        """Commit times of frames that no footer lists, by file, the mark's epoch and position: each is decoded once."""

    @property
    def frames_kept(self) -> int:
        """Number of frames in memory, of some 160 bytes each."""
        return sum(index.frames_kept for index in self._indexes.values())

    def between(self, after: Seq, upto: Seq) -> Backlog:
        """Count the range `(after, upto]`; a frame that straddles a bound counts whole.

        Raises:
            CorruptWal: an index is damaged.
        """
        return _NOTHING if after >= upto else past_drops(self._files, partial(self._count, after, upto))

    def _count(self, after: Seq, upto: Seq) -> Backlog:
        folders = {shard: shard_folder(self._folder, shard) for shard in list_shards(self._files, self._folder)}
        marks = {
            s: (read_mark(self._files, folder), read_dropped(self._files, folder)) for s, folder in folders.items()
        }
        if marks != self._marks or len(self._counts) >= _COUNTS_MAX:
            self._marks, self._counts = marks, {}
        if (after, upto) not in self._counts:
            found = _NOTHING
            for shard, (mark, _) in marks.items():
                if mark is None:
                    continue
                if shard not in self._indexes:
                    self._indexes[shard] = ShardIndex(
                        self._files, folders[shard], shard, cached_frames_max=_CACHED_FRAMES_MAX
                    )
                found += self._on_shard(self._indexes[shard], mark, after, upto)
            self._counts[after, upto] = found
        return self._counts[after, upto]

    def _on_shard(self, index: ShardIndex, mark: DurableMark, after: Seq, upto: Seq) -> Backlog:
        found = _NOTHING
        for segment, totals in index.totals_from_seq(after, mark):
            if totals is None:
                found += self._of_frames(index, segment, mark, after, upto, heads=True)
            elif totals.records and totals.first_seqs[0] > upto:
                break
            elif totals.last_seqs[0] > after and totals.first_seqs[1] <= upto:
                found += Backlog(totals.records, totals.size_bytes, totals.commit_ts_min_us, 1)
            elif totals.last_seqs[1] > after:
                found += self._of_frames(index, segment, mark, after, upto, heads=False)
        return found

    def _of_frames(
        self, index: ShardIndex, segment: SegmentFile, mark: DurableMark, after: Seq, upto: Seq, *, heads: bool
    ) -> Backlog:
        """Count a segment's frames between the bounds; without a footer, commit times come from the frames' `heads`."""
        records = size = 0
        oldest: int | None = None
        entries = index.frames(segment, mark)
        if isinstance(entries, FrameEntries):
            records, size, oldest = entries.total(after, upto)
            return Backlog(records, size, oldest, int(records > 0))
        for entry in entries:
            if entry.kind is not FrameKind.RECORDS or entry.last_seq <= after or entry.first_seq > upto:
                continue
            records += entry.count
            size += entry.length
            time_us = entry.commit_ts_min_us
            if heads and time_us is None and oldest is None:
                time_us = self._commit_us(segment, mark.epoch, entry.position)
            if time_us is not None:
                oldest = time_us if oldest is None else min(oldest, time_us)
        return Backlog(records, size, oldest, int(records > 0))

    def _commit_us(self, segment: SegmentFile, epoch: Epoch, position: int) -> int | None:
        """Return as the function of this name; a log that was cut back goes on with a higher epoch."""
        key = segment.path, epoch, position
        if key not in self._commit_times_us:
            if len(self._commit_times_us) >= _COMMIT_TIMES_MAX:
                self._commit_times_us.clear()
            self._commit_times_us[key] = _commit_us(self._files, segment, position)
        return self._commit_times_us[key]


def backlog_of_tables(reader: StreamReader, after: Seq, upto: Seq, takes: Callable[[FrameTable], bool]) -> Backlog:
    """Count some tables' records of the range `(after, upto]`, exactly; the bytes are those of their compressed columns.

    Definitions aren't counted.

    Args:
        after: exclusive; a lower number than the log's first counts from there.
        takes: returns whether records of a frame's table are counted.

    Raises:
        CorruptWal, OffsetExpired, LogTruncated: as `StreamReader.read`.
    """
    records = size = 0
    oldest: int | None = None
    for shard, segment, entry in reader.frames_between(after, upto):
        taken = [table for table in entry.tables if not is_definition(table.schema_version) and takes(table)]
        if not taken:
            continue
        if entry.first_seq <= after or entry.last_seq > upto:
            wanted = frozenset(table.table_id for table in taken)
            end = Offset(entry.offset + entry.count)
            parts = reader.read(shard, entry.offset, tables=wanted, upto=end, numbers=(after, upto))
            count = sum(part.batch.num_rows for part in parts)
            size += sum(table.size_bytes for table in taken) * count // max(1, sum(table.rows for table in taken))
        else:
            count = sum(table.rows for table in taken)
            size += sum(table.size_bytes for table in taken)
        records += count
        if count and oldest is None:
            oldest = entry.commit_ts_min_us
            if oldest is None:
                oldest = _commit_us(RealFiles(), segment, entry.position)
    return Backlog(records, size, oldest)


def _commit_us(files: Files, segment: SegmentFile, position: int) -> int | None:
    """Return the least commit time of a frame that no footer lists."""
    frame = read_frame(ReadAhead(reader_of(files, segment.path)), position, payload=False)
    times = commit_times(frame.head, read_header(files, segment))
    return None if times is None else times[0]


def log_size(folder: str, *, files: Files | None = None) -> tuple[int, int]:
    """Return (segments, bytes) of a stream's log. Segments that retention deletes during the count are left out."""
    files = RealFiles() if files is None else files
    segments = size_bytes = 0
    for shard in list_shards(files, folder):
        for segment in list_segments(files, shard_folder(folder, shard)):
            with suppress(FileNotFoundError):
                size_bytes += files.size(segment.path)
                segments += 1
    return segments, size_bytes
