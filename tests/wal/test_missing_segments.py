"""Segments that are missing, or a whole log: nobody takes what is left for everything."""

from __future__ import annotations

import shutil
from pathlib import Path
from uuid import UUID

import pytest

from millstream.errors import CorruptWal
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.positions import Offset, Seq
from millstream.testing.log import MemoryReservations, plain_ops, plain_table
from millstream.wal.layout import shard_folder
from millstream.wal.reader import StreamReader
from millstream.wal.writer import LogWriter

STREAM = StreamId(UUID(int=7))
SHARD = ShardId(0)


def test_a_log_that_is_gone_as_a_whole_is_no_empty_log(tmp_path: Path) -> None:
    """The catalog says that numbers were given out: an empty folder isn't the log that they are in."""
    folder, reservations = str(tmp_path / "shop"), MemoryReservations()
    table = plain_table(1)
    with LogWriter.open(folder, stream=STREAM, shards=[SHARD], epoch=Epoch(1), reservations=reservations) as log:
        log.append(plain_ops({1: [(table, 2, "a")]}))
    shutil.rmtree(folder)
    with pytest.raises(CorruptWal, match="is gone"):
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
    reader = StreamReader(folder)
    with pytest.raises(CorruptWal):
        list(reader.read(SHARD, Offset(0)))
    with pytest.raises(CorruptWal):
        list(reader.read_between(Seq(0), reader.persisted_upto()))
