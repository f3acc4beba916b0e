"""A log of many tables, each of whose first frame brings a schema."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from uuid import UUID

from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.positions import Seq
from millstream.wal.files import RealFiles
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogWriter

TABLES = 60


class CountedFiles(RealFiles):
    """Files that count the reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        self.reads += 1
        return super().read(path, position, length)


def test_each_schema_of_a_segment_is_read_once(tmp_path: Path) -> None:
    """Regression: three hundred tables took half a minute to read.

    Each frame's schema read all earlier schemas again.
    """
    folder = str(tmp_path / "log")
    with closing(
        LogWriter.open(folder, stream=StreamId(UUID(int=7)), shards=[ShardId(0)], epoch=Epoch(1), reservations=MemoryReservations())
    ) as log:  # fmt: skip
        for number in range(1, TABLES + 1):
            log.append(plain_ops({number: [(plain_table(number), 1, "x")]}))
    files = CountedFiles()
    reader = StreamReader(folder, files=files)
    rows = sum(part.batch.num_rows for part in reader.read_between(Seq(0), reader.persisted_upto()))
    assert rows == TABLES
    assert files.reads < 10 * TABLES, "not each for each"
