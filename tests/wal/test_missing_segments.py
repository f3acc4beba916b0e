"""A missing segment, or a whole missing log: no reader takes the rest for everything."""

from __future__ import annotations

import shutil
from pathlib import Path
from uuid import UUID

import pytest
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.errors import CorruptWal
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.positions import Offset, Seq
from millstream.wal.files import RealFiles
from millstream.wal.layout import shard_folder
from millstream.wal.mending.inspect import FrameInfo, Loss, inspect, stats, verify
from millstream.wal.mending.repair import plan_repair
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogWriter

STREAM = StreamId(UUID(int=7))
SHARD = ShardId(0)


def test_a_log_that_is_gone_as_a_whole_is_no_empty_log(tmp_path: Path) -> None:
    """The catalog has numbers that were given out: an empty folder isn't the log that has them."""
    folder, reservations = str(tmp_path / "shop"), MemoryReservations()
    table = plain_table(1)
    with LogWriter.open(folder, stream=STREAM, shards=[SHARD], epoch=Epoch(1), reservations=reservations) as log:
        log.append(plain_ops({1: [(table, 2, "a")]}))
    shutil.rmtree(folder)
    with pytest.raises(CorruptWal, match="is missing"):
        LogWriter.open(folder, stream=STREAM, shards=[SHARD], epoch=Epoch(2), reservations=reservations)


@pytest.mark.parametrize("gone", ["first", "middle", "last", "renamed"])
def test_readers_notice_segments_that_are_missing(tmp_path: Path, gone: str) -> None:
    folder, reservations = str(tmp_path / "shop"), MemoryReservations()
    table = plain_table(1)
    for epoch in range(1, 5):
        with LogWriter.open(
            folder, stream=STREAM, shards=[SHARD], epoch=Epoch(epoch), reservations=reservations
        ) as log:
            log.append(plain_ops({epoch: [(table, 2, "a")]}))
    segments = sorted(Path(shard_folder(folder, SHARD)).glob("*.wal"))
    victim = {"first": segments[0], "middle": segments[1], "last": segments[-2], "renamed": segments[1]}[gone]
    if gone == "renamed":
        victim.rename(victim.with_name(f"{5:020d}.wal"))
    else:
        victim.unlink()
    whole = verify(folder).losses
    assert whole
    assert stats(folder).losses == whole
    assert [found for found in inspect(folder) if isinstance(found, Loss)] == whole
    with pytest.raises(CorruptWal) as refused:
        LogWriter.open(folder, stream=STREAM, shards=[SHARD], epoch=Epoch(5), reservations=reservations)
    if gone != "renamed":
        base = int(victim.name.removesuffix(".wal"))
        assert (refused.value.details["offset_from"], refused.value.details["offset_to"]) == (base, base + 2)
        assert "segments are missing" in str(refused.value)
    reader = StreamReader(folder)
    with pytest.raises(CorruptWal):
        list(reader.read(SHARD, Offset(0)))
    with pytest.raises(CorruptWal):
        list(reader.read_between(Seq(0), reader.persisted_upto()))


def test_a_file_that_ends_within_its_last_durable_frame_is_damage_to_all_that_look(tmp_path: Path) -> None:
    folder, reservations = str(tmp_path / "shop"), MemoryReservations()
    with LogWriter.open(folder, stream=STREAM, shards=[SHARD], epoch=Epoch(1), reservations=reservations) as log:
        log.append(plain_ops({1: [(plain_table(1), 2, "a" * 500)]}))
    (segment,) = Path(shard_folder(folder, SHARD)).glob("*.wal")
    last = [frame for frame in inspect(folder) if isinstance(frame, FrameInfo)][-1]
    with segment.open("r+b") as file:  # the footer goes, and half of the frame's rows
        file.truncate(last.position + last.length - 200)
    (loss,) = verify(folder).losses
    assert [(found.offset_from, found.offset_to) for found in stats(folder).losses] == [
        (loss.offset_from, loss.offset_to)
    ]
    (told,) = [found for found in inspect(folder) if isinstance(found, Loss)]
    assert (told.offset_from, told.offset_to) == (loss.offset_from, loss.offset_to) == (0, 2)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_shards_folder_that_is_gone_is_damage_to_all_that_look(tmp_path: Path, gone: int) -> None:
    """Regression: the shard's contents were left out silently, with halves of operations.

    A writer began the shard again.
    """
    folder, reservations = str(tmp_path / "shop"), MemoryReservations()
    tables, shards = [plain_table(number) for number in (1, 2, 3)], [ShardId(number) for number in range(3)]
    with LogWriter.open(folder, stream=STREAM, shards=shards, epoch=Epoch(1), reservations=reservations) as log:
        log.append(plain_ops({1: [(table, 2, "a") for table in tables]}, shard_of={2: 1, 3: 2}))
        for number, table in enumerate(tables, 2):
            log.append(plain_ops({number: [(table, 1, "b")]}, shard_of={2: 1, 3: 2}))
    shutil.rmtree(shard_folder(folder, ShardId(gone)))
    with pytest.raises(CorruptWal, match="shards are missing"):
        StreamReader(folder).persisted_upto()
    told: list[CorruptWal] = []
    reader = StreamReader(folder, on_damage=told.append)
    assert sum(found.batch.num_rows for found in reader.read_between(Seq(0), reader.persisted_upto())) == 6
    assert "shards are missing" in str(told[0])
    assert [loss.why for loss in verify(folder).losses] == [str(told[0])]
    assert [loss.why for loss in stats(folder).losses] == [str(told[0])]
    assert [found.why for found in inspect(folder) if isinstance(found, Loss)] == [str(told[0])]
    with pytest.raises(CorruptWal, match="shards are missing"):
        plan_repair(folder)
    with pytest.raises(CorruptWal, match="shards are missing"):
        LogWriter.open(folder, stream=STREAM, shards=shards, epoch=Epoch(2), reservations=reservations)
    assert not Path(shard_folder(folder, ShardId(gone))).exists()


def test_a_shard_that_a_writer_adds_is_found_by_readers_that_look_meanwhile(tmp_path: Path) -> None:
    """Regression: a reader that had listed the folders before left out the contents of the new one."""
    folder, reservations = str(tmp_path / "shop"), MemoryReservations()
    one, other = plain_table(1), plain_table(2)
    with LogWriter.open(folder, stream=STREAM, shards=[SHARD], epoch=Epoch(1), reservations=reservations) as log:
        log.append(plain_ops({1: [(one, 2, "a")]}))

    class AddsShard(RealFiles):
        added = False

        def listdir(self, path: str) -> list[str]:
            names = super().listdir(path)
            if path == folder and not self.added:
                self.added = True
                shards = [SHARD, ShardId(1)]
                with LogWriter.open(
                    folder, stream=STREAM, shards=shards, epoch=Epoch(2), reservations=reservations
                ) as log:
                    log.append(plain_ops({2: [(one, 1, "b"), (other, 1, "b")]}, shard_of={2: 1}))
            return names

    reader = StreamReader(folder, files=AddsShard())
    upto = reader.persisted_upto()
    assert sum(found.batch.num_rows for found in reader.read_between(Seq(0), upto)) == 4
