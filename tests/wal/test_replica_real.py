"""Real files: a writer appends, a follower applies what arrives, and a reader looks, all at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.wal.log_writers import OTHER, TABLE, opened, xids
from tests.wal.plain_operations import plain_ops

from millstream.wal.reader import StreamReader
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.replica.ship_source import ShipSource

OPERATIONS = 60


@pytest.mark.long
def test_a_follower_beside_a_busy_writer_shows_a_beginning_of_its_log_at_every_moment(tmp_path: Path):
    leader, folder = str(tmp_path / "leader"), str(tmp_path / "follower")
    writer = opened(leader, shards=(0, 1), segment_bytes=20_000)
    log, source = ReplicaLog.open(folder), ShipSource(leader)
    ended = threading.Event()
    wrong: list[list[int | None]] = []

    def append() -> None:
        for xid in range(1, OPERATIONS + 1):
            writer.append(plain_ops({xid: [(TABLE, 1, "x" * 50), (OTHER, 1, "y")]}, shard_of={2: 1}))

    def look() -> None:
        while not ended.is_set():
            found = xids(StreamReader(folder))
            if found != sorted([*range(1, len(found) // 2 + 1)] * 2):
                wrong.append(found)

    threads = [threading.Thread(target=append), threading.Thread(target=look)]
    try:
        for thread in threads:
            thread.start()
        while log.end().records < 2 * OPERATIONS:
            assert threads[0].is_alive() or source.leader_end() == 2 * OPERATIONS
            while (shipment := source.read(log.position(), 20_000)) is not None:
                log.apply(shipment)
            source.wait_beyond(0.1)
        # The mark of what readers see may have moved after the last bytes were read: it comes with the next shipment.
        threads[0].join(180)
        source.restart()
        while (shipment := source.read(log.position(), 20_000)) is not None:
            log.apply(shipment)
    finally:
        ended.set()
        for thread in threads:
            thread.join(180)
    assert not wrong
    assert xids(StreamReader(folder)) == xids(StreamReader(leader))
    writer.close()
    log.close()
