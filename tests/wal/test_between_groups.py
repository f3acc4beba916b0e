"""A caller that needs the writer still for a moment gets it after the present group, however much is queued."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from uuid import UUID

from tests.wal.log_writers import HeldSyncs, one
from tests.wal.plain_operations import MemoryReservations

from millstream.model.ids import Epoch, RegionId, ShardId, StreamId
from millstream.model.operations import Ack
from millstream.model.writes import WriteId
from millstream.protocol.deduplication.known_writes import SessionLimits
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

QUEUED = 200


def test_writes_of_another_region_are_noted_after_the_present_group() -> None:
    """The writer took its lock for the next group before any caller that waited could, until its queue was empty."""
    files, reservations = HeldSyncs(), MemoryReservations()
    reservations.epoch = Epoch(1)
    groups: list[int] = []
    with LogWriter.open(
        "/wal/shop",
        stream=StreamId(UUID(int=9)),
        shards=[ShardId(0)],
        epoch=Epoch(1),
        reservations=reservations,
        files=files,
        options=LogOptions(group_bytes_max=1, disk_used_max=1.0),
        sessions=SessionLimits(),
    ) as log:

        def none_of_them() -> Iterator[tuple[WriteId, int, Ack, int]]:
            groups.append(log.stats().groups)
            yield from ()

        log.append(one(1))
        files.may_sync.clear()
        answers = [log.submit(one(xid)) for xid in range(2, QUEUED)]
        assert files.waiting.wait(60)
        hears = threading.Thread(target=log.hear_writes, args=(RegionId(1), none_of_them(), None))
        hears.start()
        time.sleep(0.2)  # it waits for the lock
        files.may_sync.set()
        hears.join(60)
        assert all(answer.result(60).seqs.count for answer in answers)
        assert groups == [2]
