"""A writer whose files are removed or replaced under it acknowledges nothing more."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table
from tests.wal.replica_pairs import Pair
from tests.wal.truth import FOLDER

from millstream.errors import AppendOutcomeUnknown, CorruptWal, ReplicationError, WriterClosed
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.testing.errors import coded
from millstream.wal.writing.writer import LogWriter

STREAM = StreamId(UUID(int=7))


def opened(folder: Path, reservations: MemoryReservations, epoch: int) -> LogWriter:
    return LogWriter.open(
        str(folder), stream=STREAM, shards=[ShardId(0)], epoch=Epoch(epoch), reservations=reservations
    )


def append(log: LogWriter) -> None:
    log.append(plain_ops({1: [(plain_table(1), 3, "x")]}, shard_of={1: 0}))


def unlink(segment: Path) -> None:
    segment.unlink()


def put_back(segment: Path) -> None:
    """Put an older copy in its place, as a restore does."""
    copy = segment.with_suffix(".copy")
    shutil.copy(segment, copy)
    copy.replace(segment)


@pytest.mark.parametrize("harm", [unlink, put_back])
def test_nothing_is_acknowledged_in_a_segment_that_no_name_leads_to(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    """Regression: the segment's writer went on, and acknowledged records that vanished when it ended."""
    log = opened(tmp_path, MemoryReservations(), 1)
    append(log)
    (segment,) = (tmp_path / "00000").glob("*.wal")
    harm(segment)
    with pytest.raises(AppendOutcomeUnknown, match=f"removed or replaced.*{segment.name}"):
        append(log)
    with pytest.raises(WriterClosed):
        append(log)
    log.close()


def test_a_writer_that_opens_after_that_says_what_is_gone(tmp_path: Path) -> None:
    reservations = MemoryReservations()
    log = opened(tmp_path, reservations, 1)
    append(log)
    (segment,) = (tmp_path / "00000").glob("*.wal")
    segment.unlink()
    with pytest.raises(AppendOutcomeUnknown):
        append(log)
    log.close()
    with pytest.raises(CorruptWal):
        opened(tmp_path, reservations, 2)


def test_a_follower_takes_nothing_into_a_segment_that_no_name_leads_to() -> None:
    """Regression: the leader counted what the follower acknowledged as held there."""
    pair = Pair()
    for _ in range(2):  # the second shipment opens the files that the first has made
        pair.append()
        pair.ship()
    pair.append()
    for shard in (0, 1):
        folder = f"{FOLDER}/{shard:05}"
        (segment,) = (name for name in pair.files.listdir(folder) if name.endswith(".wal"))
        pair.files.remove(f"{folder}/{segment}")
    with pytest.raises(ReplicationError, check=coded("replica_failed"), match="removed or replaced"):
        pair.ship()


def test_a_folder_that_was_moved_is_told_and_taken_again_once_it_is_back(tmp_path: Path) -> None:
    """Regression: the error was `io_failed` with the hint to check the path; before, a bare FileNotFoundError."""
    log = opened(tmp_path, MemoryReservations(), 1)
    append(log)
    (tmp_path / "00000").rename(tmp_path / ".moved")
    with pytest.raises(CorruptWal, check=coded("log_missing"), match=f"{tmp_path} is missing") as refused:
        append(log)
    assert "Put the folder back" in refused.value.hint
    (tmp_path / ".moved").rename(tmp_path / "00000")
    append(log)
    log.close()
