"""Hybrid times of commit groups: they rise whatever the machine's clock does, also over restarts.

They exceed every time received from other regions.
"""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.crdt.hlc import DRIFT_MAX_NS, HLC
from millstream.errors import CorruptWal, ReplicationError
from millstream.model.ids import Epoch, RegionId, ShardId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.testing import ManualClock
from millstream.testing.errors import coded
from millstream.wal.reader import StreamReader
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

STREAM = StreamId(UUID(int=5))
REGION = RegionId(3)


def opened(
    folder: Path, epoch: int, clock: ManualClock, reservations: MemoryReservations, region: RegionId
) -> LogWriter:
    return LogWriter.open(
        str(folder),
        stream=STREAM,
        shards=[ShardId(0)],
        epoch=Epoch(epoch),
        reservations=reservations,
        clock=clock,
        region=region,
        options=LogOptions(disk_used_max=1.0),
    )


def times_of(folder: Path) -> dict[int, int]:
    """Return each record's number and hybrid time."""
    reader = StreamReader(str(folder))
    found: dict[int, int] = {}
    for part in reader.read_between(Seq(0), reader.persisted_upto()):
        assert part.region == REGION
        found |= dict(zip(part.batch.column("__seq").to_pylist(), part.hybrid_ns.to_pylist(), strict=True))
    return found


def test_groups_have_rising_times_over_clocks_that_go_back_and_restarts_and_are_later_than_what_was_heard(
    tmp_path: Path,
) -> None:
    clock, reservations, table = ManualClock(), MemoryReservations(), plain_table(1)
    times: dict[int, int] = {}
    for epoch in (1, 2):
        with opened(tmp_path / "log", epoch, clock, reservations, REGION) as log:
            for rows in (1, 2, 1):
                log.append(plain_ops({rows: [(table, rows, "x")]}))
                clock.step_wall(-7)
            remote = HLC(clock.now_ns() + DRIFT_MAX_NS, 9, 8)
            with pytest.raises(ReplicationError, check=coded("clock_skew"), match="oslo"):
                log.hear(HLC(remote.wall_ns + 1, 0, 8), name="oslo")
            log.hear(remote)
            log.append(plain_ops({9: [(table, 2, "x")]}))
        times = times_of(tmp_path / "log")
        assert max(times.values()) > remote.wall_ns
    in_order = [times[seq] for seq in sorted(times)]
    assert in_order == sorted(in_order)
    assert len(set(in_order)) == 8
    assert [in_order.count(time) for time in sorted(set(in_order))] == [1, 2, 1, 2, 1, 2, 1, 2]


def test_times_of_records_are_their_frames_where_only_some_are_asked_for(tmp_path: Path) -> None:
    clock, table = ManualClock(), plain_table(1)
    with opened(tmp_path / "log", 1, clock, MemoryReservations(), REGION) as log:
        for _ in range(3):
            log.append(plain_ops({1: [(table, 3, "x")]}))
    times = times_of(tmp_path / "log")
    reader = StreamReader(str(tmp_path / "log"))
    for after, upto in ((1, 5), (2, 3), (4, 9)):
        parts = list(reader.read_between(Seq(after), Seq(upto), table=TableId(1)))
        seqs = [seq for part in parts for seq in part.batch.column("__seq").to_pylist()]
        assert [time for part in parts for time in part.hybrid_ns.to_pylist()] == [times[seq] for seq in seqs]
    whole = list(reader.read(ShardId(0), reader.first_offset(ShardId(0))))
    assert [time for part in whole for time in part.hybrid_ns.to_pylist()] == [times[seq] for seq in sorted(times)]


def test_a_damaged_group_of_one_shard_does_not_hide_when_the_others_were_written(tmp_path: Path) -> None:
    """A pipeline asks for it in each batch, and stopped for good at damage in a shard that it reads nothing of."""
    clock, log = ManualClock(), tmp_path / "log"
    with LogWriter.open(
        str(log),
        stream=STREAM,
        shards=[ShardId(0), ShardId(1)],
        epoch=Epoch(1),
        reservations=MemoryReservations(),
        clock=clock,
        options=LogOptions(disk_used_max=1.0),
    ) as writer:
        for shard in (0, 1):
            writer.append(plain_ops({1: [(plain_table(1), 1, "x")]}, shard_of={1: shard}))
            clock.advance(1)
    first, newest = StreamReader(str(log)).newest_headers(Seq(2))
    assert first.hybrid_time < newest.hybrid_time
    [segment] = (log / "00001").glob("*.wal")
    segment.write_bytes(segment.read_bytes()[:SEGMENT_HEADER_SIZE] + b"\xff" * 100)
    damaged = StreamReader(str(log))
    assert damaged.newest_headers(Seq(2), readable=True) == [first]
    with pytest.raises(CorruptWal):
        damaged.newest_headers(Seq(2))


def test_a_log_is_not_opened_as_another_regions(tmp_path: Path) -> None:
    clock, reservations = ManualClock(), MemoryReservations()
    with opened(tmp_path / "log", 1, clock, reservations, REGION) as log:
        log.append(plain_ops({1: [(plain_table(1), 1, "x")]}))
    with pytest.raises(
        ReplicationError, check=coded("other_region"), match="region 3, but the configuration has region 0"
    ):
        opened(tmp_path / "log", 2, clock, reservations, RegionId(0))
    opened(tmp_path / "log", 3, clock, reservations, REGION).close()
