"""A start that takes long logs how far it has come; a quick one logs nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.wal.test_sessions import Life
from tests.wal.truth import FOLDER, Truth

from millstream.testing.clock import ManualClock
from millstream.testing.files import MemoryFiles
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.replica.ship_source import ShipSource


class SlowDisk(MemoryFiles):
    """Files in memory, each read of which takes a time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.read_s = 0.0

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        self.clock.advance(self.read_s)
        return super().read(path, position, length)


def lines_of(lines: list[Any], step: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"].startswith(step)]


def check(lines: list[Any], step: str, disk: SlowDisk, began_ns: int) -> None:
    """Check lines of one slow step: the first in time, none too often, each with more than the one before."""
    told = lines_of(lines, step)
    assert [line["event"] for line in told] == [f"{step} goes on"] * (len(told) - 1) + [f"{step} is done"]
    assert len(told) >= 3
    assert all(line["folder"] in {FOLDER, "/wal"} for line in told)
    assert 2.0 < told[0]["seconds"] <= 2.0 + 2 * disk.read_s
    gaps = [after["seconds"] - before["seconds"] for before, after in pairwise(told[:-1])]
    assert all(10.0 < gap <= 10.0 + 2 * disk.read_s for gap in gaps)
    assert told[-1]["seconds"] <= (disk.clock.monotonic_ns() - began_ns) / 1e9
    for name in ("segments", "bytes"):
        assert 0 <= told[0][name] < told[-1][name]


def test_a_writers_slow_recovery_logs_segments_bytes_and_time() -> None:
    disk, truth = SlowDisk(), Truth()
    leader = truth.open(disk, clock=disk.clock)
    for _ in range(30):
        truth.commit(leader, truth.ops([(1, 3), (2, 2)], [(3, 1)]))
    leader.close()
    segments = [
        name for shard in disk.listdir(FOLDER) for name in disk.listdir(f"{FOLDER}/{shard}") if name.endswith(".wal")
    ]
    disk.read_s, began_ns = 0.6, disk.clock.monotonic_ns()
    with capture_logs() as lines:
        truth.open(disk, clock=disk.clock).close()
    check(lines, "the log's recovery", disk, began_ns)
    assert lines_of(lines, "the log's recovery")[-1]["segments"] == len(segments)


def test_a_followers_slow_start_logs_its_progress() -> None:
    truth, disk, leader_files = Truth(), SlowDisk(), MemoryFiles()
    leader, source = truth.open(leader_files), ShipSource(FOLDER, files=leader_files)
    log = ReplicaLog.open(FOLDER, files=disk, side_by_side=False)
    for _ in range(30):
        truth.commit(leader, truth.ops([(1, 3), (2, 2)], [(3, 1)]))
    while (shipment := source.read(log.position(), 20_000)) is not None:
        log.apply(shipment)
    log.close()
    disk.read_s, began_ns = 0.6, disk.clock.monotonic_ns()
    with capture_logs() as lines:
        ReplicaLog.open(FOLDER, files=disk, clock=disk.clock, side_by_side=False).close()
    check(lines, "the log's recovery", disk, began_ns)


def test_reading_the_sessions_of_a_long_log_logs_its_progress() -> None:
    disk, life = SlowDisk(), Life(every_bytes=1 << 30)
    life.clock = disk.clock
    committer, _ = life.open_with_segments(disk)
    committer.close()
    disk.read_s, began_ns = 0.6, disk.clock.monotonic_ns()
    with capture_logs() as lines:
        committer, _ = life.open(disk)
    committer.close()
    check(lines, "reading the sessions' writes", disk, began_ns)


@pytest.mark.parametrize("read_s", [0.0, 0.001])
def test_a_quick_start_logs_nothing(read_s: float) -> None:
    disk, life = SlowDisk(), Life()
    life.clock = disk.clock
    life.open_with_segments(disk)[0].close()
    disk.read_s = read_s
    with capture_logs() as lines:
        life.open(disk)[0].close()
    assert [line for line in lines if "segments" in line] == []
