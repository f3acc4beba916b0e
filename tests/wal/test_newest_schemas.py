"""A reader's newest schemas: remembered of sealed segments, and read again of a file that replaces one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.codec.log_frame import FrameKind
from millstream.codec.log_segment import SEGMENT_TRAILER_SIZE, SegmentFooter
from millstream.errors import CorruptWal
from millstream.model.ids import Epoch, ShardId, StreamId, TableId
from millstream.model.schema import TableSchema
from millstream.wal.files import RealFiles
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogOptions, LogWriter

FIRST, OTHER, LAST = plain_table(1, "mine_"), plain_table(1, "yours"), plain_table(2)


class NotedFiles(RealFiles):
    """Files that note the reads of segments."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Path, int, int]] = []

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        found = super().read(path, position, length)
        if path.endswith(".wal"):
            self.noted.append((Path(path), position, len(found)))
        return found

    def take(self, path: Path) -> list[tuple[int, int]]:
        """Return the places read of a file since the last call."""
        found = [place[1:] for place in self.noted if place[0] == path]
        self.noted = [place for place in self.noted if place[0] != path]
        return found


def opened(folder: Path, epoch: int = 1) -> LogWriter:
    return LogWriter.open(
        str(folder), stream=StreamId(UUID(int=7)), shards=[ShardId(0)], epoch=Epoch(epoch),
        reservations=MemoryReservations(), options=LogOptions(segment_bytes=6000, disk_used_max=1.0),
    )  # fmt: skip


def filled(folder: Path, tables: Sequence[TableSchema]) -> list[Path]:
    """Fill a log with a group of each table; return its segments."""
    with closing(opened(folder)) as log:
        for xid, table in enumerate(tables, 1):
            log.append(plain_ops({xid: [(table, 1, "x")]}))
    return segments(folder)


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "00000").glob("*.wal"))


def names(reader: StreamReader) -> list[str]:
    return [schema.name for schema in reader.schemas().values()]


def trailer(path: Path) -> list[tuple[int, int]]:
    return [(path.stat().st_size - SEGMENT_TRAILER_SIZE, SEGMENT_TRAILER_SIZE)]


def test_a_later_call_reads_no_sealed_segment_again(tmp_path: Path) -> None:
    paths = filled(tmp_path, [FIRST] * 12 + [LAST] * 20)
    assert len(paths) > 5
    files = NotedFiles()
    reader = StreamReader(str(tmp_path), files=files)
    assert names(reader) == ["mine_", "table2"]
    assert sum(size for path in paths[:-1] for _, size in files.take(path)) > 10 * SEGMENT_TRAILER_SIZE
    assert names(reader) == ["mine_", "table2"]
    assert all(files.take(path) == trailer(path) for path in paths[:-1]), "whether it is still the same file"

    with closing(opened(tmp_path, epoch=2)) as log:  # another epoch: all may differ
        log.append(plain_ops({99: [(plain_table(1, "mine_", version=2), 1, "x")]}))
        assert reader.schemas()[TableId(1)].version == 2
        for xid in range(100, 120):
            log.append(plain_ops({xid: [(LAST, 1, "x")]}))
        for path in paths:
            files.take(path)
        assert [schema.version for schema in reader.schemas().values()] == [2, 1]
        assert all(files.take(path) == trailer(path) for path in paths[:-1])


def test_a_replaced_segment_is_read_again(tmp_path: Path) -> None:
    mine = filled(tmp_path / "mine", [FIRST] * 12 + [LAST] * 20)
    others = filled(tmp_path / "others", [OTHER] * 12 + [LAST] * 20)
    files = NotedFiles()
    reader = StreamReader(str(tmp_path / "mine"), files=files)
    assert names(reader) == ["mine_", "table2"]
    for old, new in zip(mine[:-1], others, strict=False):
        assert (old.name, old.stat().st_size) == (new.name, new.stat().st_size)
        new.rename(old)
    assert names(reader) == ["yours", "table2"]
    for path in mine:
        files.take(path)
    assert names(reader) == ["yours", "table2"]
    assert all(files.take(path) == trailer(path) for path in mine[:-1])


def test_a_table_is_gone_with_its_last_segment_and_no_other_segment_is_read_for_that(tmp_path: Path) -> None:
    paths = filled(tmp_path, [FIRST] * 12 + [LAST] * 20)
    files = NotedFiles()
    reader = StreamReader(str(tmp_path), files=files)
    of_first = [path for path in paths if b"mine_" in path.read_bytes()]
    for path in of_first[:-1]:
        assert names(reader) == ["mine_", "table2"]
        path.unlink()
    for path in paths:
        files.take(path)
    assert names(reader) == ["mine_", "table2"]
    assert all(files.take(path) == trailer(path) for path in [of_first[-1], *paths[len(of_first) : -1]])
    of_first[-1].unlink()
    assert names(reader) == ["table2"]


def test_whatever_is_added_or_dropped_the_schemas_are_those_that_a_new_reader_finds(tmp_path: Path) -> None:
    drawn = random.Random(5)
    tables = [plain_table(number, version=version) for number in range(1, 5) for version in range(1, 4)]
    reader = StreamReader(str(tmp_path))
    with closing(opened(tmp_path)) as log:
        for xid in range(1, 100):
            log.append(plain_ops({xid: [(drawn.choice(tables), drawn.randint(1, 5), "x")]}))
            if xid % 5 == 0 and drawn.random() < 0.7:
                segments(tmp_path)[0].unlink()
            if xid % 3 == 0:
                assert reader.schemas() == StreamReader(str(tmp_path)).schemas()


def rewritten(path: Path, change: Callable[[Any], Any]) -> None:
    """Write a sealed segment's footer again, with other entries for its schema frames."""
    data = path.read_bytes()
    footer = SegmentFooter.decode_tail(lambda position, length: data[position : position + length], len(data))
    assert footer is not None
    end = footer.frames[-1].position + footer.frames[-1].length
    frames = tuple(change(frame) if frame.kind is FrameKind.SCHEMA else frame for frame in footer.frames)
    path.write_bytes(data[:end] + replace(footer, frames=frames).encode())


def test_a_footer_that_names_another_schema_than_lies_there_is_damage(tmp_path: Path) -> None:
    paths = filled(tmp_path, [FIRST] * 12 + [LAST] * 20)
    reader = StreamReader(str(tmp_path))
    assert names(reader) == ["mine_", "table2"]
    rewritten(paths[0], lambda frame: replace(frame, tables=(frame.tables[0]._replace(table_id=TableId(9)),)))
    with pytest.raises(CorruptWal, match="schema 1 of table 9"):
        reader.schemas()


def test_a_sealed_segment_that_is_damaged_later_is_reported(tmp_path: Path) -> None:
    paths = filled(tmp_path, [FIRST] * 12 + [LAST] * 20)
    reader = StreamReader(str(tmp_path))
    assert names(reader) == ["mine_", "table2"]
    data = paths[1].read_bytes()
    for cut, flip in ((1, 0), (0, -20), (0, -SEGMENT_TRAILER_SIZE)):
        damaged = bytearray(data[: len(data) - cut])
        damaged[flip] ^= 1 if flip else 0
        paths[1].write_bytes(damaged)
        for _ in range(2):
            with pytest.raises(CorruptWal, match="is damaged"):
                reader.schemas()
        paths[1].write_bytes(data)
        assert names(reader) == ["mine_", "table2"]
