"""The size of what lies between two numbers of a log, counted from its indexes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.model.positions import Seq
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.wal import backlog
from millstream.wal.backlog import Backlogs, log_size
from millstream.wal.files import RealFiles
from millstream.wal.segment_deletion import drop_segments
from millstream.wal.segment_scan import read_frame
from millstream.wal.writing.writer import LogOptions, LogWriter

TABLE = plain_table(1)


class CountedFiles(RealFiles):
    """Files that count the bytes read."""

    def __init__(self) -> None:
        self.bytes_read = 0

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        found = super().read(path, position, length)
        self.bytes_read += len(found)
        return found


def opened(folder: Path, **options: Any) -> LogWriter:
    return LogWriter.open(
        str(folder),
        stream=uuid4(),
        shards=(0,),
        epoch=1,
        reservations=MemoryReservations(),
        options=LogOptions(disk_used_max=1.0, **options),
    )


def test_records_and_bytes_between_two_numbers_over_sealed_and_open_segments(tmp_path: Path):
    with opened(tmp_path, segment_bytes=4096) as log:
        acks = [log.append(plain_ops({xid: [(TABLE, 3, "x")]})) for xid in range(1, 21)]
        backlogs = Backlogs(str(tmp_path))
        assert len(list((tmp_path / "00000").glob("*.wal"))) > 3
        end = log.persisted_upto()
        whole = backlogs.between(Seq(0), end)
        assert whole.records == 60
        assert whole.oldest_commit_us is not None
        half = backlogs.between(acks[9].seqs.last, end)
        assert half.records == 30
        assert 0 < half.size_bytes < whole.size_bytes
        assert backlogs.between(end, end).records == 0
        # A number in a frame's middle: the frame counts whole.
        assert backlogs.between(Seq(acks[9].seqs.first), Seq(acks[10].seqs.first)).records == 6


def test_another_count_reads_only_what_has_come_since(tmp_path: Path):
    files = CountedFiles()
    with opened(tmp_path) as log:
        for xid in range(1, 301):
            log.append(plain_ops({xid: [(TABLE, 1, "x" * 500)]}))
        backlogs = Backlogs(str(tmp_path), files=files)
        before = log.persisted_upto()
        assert backlogs.between(Seq(0), before).records == 300
        first, files.bytes_read = files.bytes_read, 0
        log.append(plain_ops({1000: [(TABLE, 1, "x")]}))
        assert backlogs.between(before, log.persisted_upto()).records == 1
        assert files.bytes_read < first / 10


def test_the_same_count_again_reads_no_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The oldest commit time of a count is in its first frame, which was read and decoded each time."""
    read: list[int] = []

    def counted(window: object, position: int, **named: bool) -> object:
        read.append(position)
        return read_frame(window, position, **named)

    monkeypatch.setattr(backlog, "read_frame", counted)
    with opened(tmp_path) as log:
        ends = [log.append(plain_ops({xid: [(TABLE, 1, "x")]})).seqs.last for xid in range(1, 11)]
        backlogs = Backlogs(str(tmp_path))
        first = backlogs.between(Seq(0), ends[-1])
        later = backlogs.between(ends[4], ends[-1])
        assert len(read) == 2
        assert backlogs.between(Seq(0), ends[-1]) == first
        assert backlogs.between(ends[4], ends[-1]) == later
        assert len(read) == 2
        assert first.oldest_commit_us <= later.oldest_commit_us


def test_the_same_count_again_goes_through_no_index_until_a_mark_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gone_through: list[int] = []
    index = backlog.ShardIndex.totals_from_seq

    def noted(self: Any, after: Seq, mark: Any) -> Any:
        gone_through.append(after)
        return index(self, after, mark)

    monkeypatch.setattr(backlog.ShardIndex, "totals_from_seq", noted)
    with opened(tmp_path, segment_bytes=4096) as log:
        ends = [log.append(plain_ops({xid: [(TABLE, 1, "x" * 500)]})).seqs.last for xid in range(1, 41)]
        backlogs = Backlogs(str(tmp_path))
        counts = [backlogs.between(after, ends[-1]) for after in ends]
        assert len(gone_through) == len(ends) - 1, "none is asked for nothing"
        gone_through.clear()
        assert [backlogs.between(after, ends[-1]) for after in ends[-5:]] == counts[-5:]
        assert gone_through == []
        # The writer's mark moves, then retention's.
        end = log.append(plain_ops({100: [(TABLE, 2, "x")]})).seqs.last
        assert backlogs.between(ends[-2], end).records == 3
        before = backlogs.between(Seq(0), end)
        drop_segments(str(tmp_path), Retention(), RetentionBounds(0.0, 0, 0))
        assert backlogs.between(Seq(0), end).records < before.records


def test_whatever_the_bounds_a_count_is_the_sum_of_its_frames_and_segments(tmp_path: Path):
    """Segments whole between the bounds are counted by their totals, others frame by frame; both counts agree."""
    with opened(tmp_path, segment_bytes=12_000) as log:
        ends = [log.append(plain_ops({xid: [(TABLE, xid % 4 + 1, "x")]})).seqs.last for xid in range(1, 41)]
        bases = [int(file.stem) for file in sorted((tmp_path / "00000").glob("*.wal"))]
        backlogs = Backlogs(str(tmp_path))
        whole = backlogs.between(Seq(0), ends[-1])
        assert whole.records == ends[-1], "numbers without gaps: each is a record"
        assert 3 < whole.segments < len(ends) / 2
        for after in (Seq(0), *ends):
            left, done = backlogs.between(after, ends[-1]), backlogs.between(Seq(0), after)
            assert left.records == ends[-1] - after
            assert left.size_bytes + done.size_bytes == whole.size_bytes
            # Offsets count from 0, numbers from 1: a segment that ends at offset n ends with number n.
            assert left.segments == len({end for end in [*bases[1:], ends[-1]] if end > after})
            assert done.segments == len({base for base in bases if base < after})


def test_counting_again_reads_no_footer_twice(tmp_path: Path):
    files = CountedFiles()
    with opened(tmp_path, segment_bytes=4096) as log:
        ends = [log.append(plain_ops({xid: [(TABLE, 1, "x")]})).seqs.last for xid in range(1, 201)]
        backlogs = Backlogs(str(tmp_path), files=files)
        whole = backlogs.between(Seq(0), ends[-1])
        first, files.bytes_read = files.bytes_read, 0
        assert backlogs.between(Seq(0), ends[-1]) == whole
        assert files.bytes_read < first / 10, "marks alone"


class DeletedByRetention(RealFiles):
    """Deletes each segment but the newest between its listing and the question for its size."""

    def size(self, path: str) -> int:
        """Delete the file unless it is the last of its folder, then ask."""
        if Path(path) != max(Path(path).parent.glob("*.wal")):
            Path(path).unlink()
        return super().size(path)


def test_segments_that_retention_deletes_during_the_count_are_left_out(tmp_path: Path):
    with opened(tmp_path, segment_bytes=4096) as log:
        for xid in range(1, 21):
            log.append(plain_ops({xid: [(TABLE, 3, "x")]}))
        newest = max((tmp_path / "00000").glob("*.wal"))
        assert log_size(str(tmp_path), files=DeletedByRetention()) == (1, newest.stat().st_size)
