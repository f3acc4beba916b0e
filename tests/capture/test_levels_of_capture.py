"""Capture doesn't confirm to a source what other machines have to hold and don't.

It doesn't do so while it captures, nor does the next process that captures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from tests.capture.beside import wait_until
from tests.capture.capture_stage import MemoryLog, Stage
from tests.wal.log_writers import Others
from tests.wal.plain_operations import MemoryReservations

from millstream.catalog import TableState
from millstream.model.ids import Epoch, ShardId
from millstream.model.positions import Seq
from millstream.model.replication import AckLevel
from millstream.wal.reader import StreamReader
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

FAR = 1 << 40


class Life:
    """Writers of a stage's log, one after the other, and a follower's acknowledgements."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage = stage
        self.folder = str(folder / "wal")
        self.others = Others()
        self.reservations = MemoryReservations()
        self.epoch = 0

    @contextmanager
    def writes(self) -> Iterator[LogWriter]:
        self.epoch += 1
        self.reservations.epoch = Epoch(self.epoch)
        kept = self.stage.log
        with LogWriter.open(
            self.folder,
            stream=self.stage.catalog.stream("shop").id,
            shards=[ShardId(0)],
            epoch=Epoch(self.epoch),
            reservations=self.reservations,
            options=LogOptions(disk_used_max=1.0, acks=AckLevel.parse("durable(1)"), acks_patience_s=0.0),
            high_water=self.others,
        ) as log:
            self.stage.log = cast("MemoryLog", log)
            yield log
            self.stage.log = kept

    def ids(self, *, durable: bool) -> list[int]:
        reader = StreamReader(self.folder, durable=durable)
        found = reader.read_between(Seq(reader.first_seq() - 1), reader.persisted_upto())
        return [row["id"] for part in found for row in part.batch.to_pylist() if "id" in row]

    def told(self) -> tuple[int, int]:
        """Return the LSNs that capture has reported to the source: received, and durable."""
        with self.stage.connect() as connection:
            row = connection.execute(
                "SELECT write_lsn - '0/0', flush_lsn - '0/0' FROM pg_stat_replication JOIN pg_replication_slots ON pid = active_pid"
                " WHERE slot_name = %s",
                [self.stage.config.slot],
            ).fetchone()
        return (0, 0) if row is None or row[0] is None else (int(row[0]), int(row[1] or 0))


def inserted(stage: Stage, number: int) -> int:
    """Insert a row in its own transaction; return an upper bound of its end in the source's WAL."""
    with stage.connect() as connection:
        connection.execute("INSERT INTO orders VALUES (%s)", [number])
        row = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone()
    assert row is not None
    return int(row[0])


def test_the_slot_stays_below_what_no_follower_holds_also_for_who_captures_next(stage: Stage, tmp_path: Path) -> None:
    stage.config = replace(stage.config, status_s=0.1, others_s=0.1)
    stage.sql("CREATE TABLE orders (id int PRIMARY KEY)")
    life = Life(stage, tmp_path)
    life.others.hold(FAR)
    with life.writes():
        running = stage.start()
        wait_until(lambda: stage.state("public.orders") is TableState.STREAMING, "the table is copied")
        held = inserted(stage, 1)
        wait_until(lambda: stage.slot_confirmed() >= held - 64 and life.ids(durable=False) == [1], "it is confirmed")
        life.others.hold(0)
        hidden = inserted(stage, 2)
        wait_until(lambda: life.ids(durable=True) == [1, 2], "it is durable")
        wait_until(lambda: life.told()[0] >= hidden - 64, "the source hears that it has come")
        beyond = inserted(stage, 3)
        wait_until(lambda: life.told()[0] >= beyond - 64, "and what comes behind it")
        assert life.told()[1] < hidden - 64
        assert life.ids(durable=False) == [1]
        running.stop()
    assert stage.slot_confirmed() < hidden - 64
    with life.writes():
        running = stage.start()
        last = inserted(stage, 4)
        wait_until(lambda: life.ids(durable=True) == [1, 2, 3, 4], "capture goes on where the log ends")
        wait_until(lambda: life.told()[0] >= last - 64, "the source hears that it has come")
        assert stage.slot_confirmed() < hidden - 64
        assert life.ids(durable=False) == [1]
        life.others.hold(FAR)
        wait_until(lambda: stage.slot_confirmed() >= last - 64, "all is confirmed")
        assert life.ids(durable=False) == [1, 2, 3, 4]
        running.stop()
