"""A log on a real disk of a few MiB that runs full, played in its own process, where that disk is mounted.

`python -m tests.wal.small_disk FOLDER` raises if a promise is broken, and prints what happened. Writers
are processes too: they append without end, print what was acknowledged, and are killed.
"""

from __future__ import annotations

import atexit
import errno
import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from uuid import UUID

from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.errors import DiskFull
from millstream.model.ids import Epoch, StreamId
from millstream.model.positions import Seq
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.wal.mending.inspect import verify
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import drop_segments
from millstream.wal.writing.writer import LogOptions, LogWriter

STUCK_S = 120
"""Seconds after which a writer that is still alive prints its stacks."""
ROWS = 40
TABLES = plain_table(1), plain_table(2)


def say(line: str) -> None:
    """Print one line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def write(folder: str, epoch: Epoch, first_xid: int) -> None:
    """Append until killed: `open`, then `ack N` or `full N` for each transaction, on two shards."""
    faulthandler.dump_traceback_later(STUCK_S)
    reservations = MemoryReservations()
    reservations.reserve_to(Seq(10_000_000 * (epoch - 1)), epoch=epoch)
    log = LogWriter.open(
        folder,
        stream=StreamId(UUID(int=7)),
        shards=[0, 1],
        epoch=epoch,
        reservations=reservations,
        options=LogOptions(segment_bytes=200_000, disk_used_max=1.0),
    )
    say("open")
    xid = first_xid
    while True:
        # Incompressible data, and much of it: even a slow disk is full after few transactions.
        rows = [(table, 1, os.urandom(800).hex()) for table in TABLES for _ in range(ROWS // 2)]
        try:
            log.append(plain_ops({xid: rows}, shard_of={2: 1}))
            say(f"ack {xid}")
        except DiskFull:
            say(f"full {xid}")
            time.sleep(0.005)
        xid += 1


class Writer:
    """A writer's process."""

    def __init__(self, folder: Path, epoch: int, first_xid: int) -> None:
        command = [sys.executable, "-m", "tests.wal.small_disk", "write", str(folder), str(epoch), str(first_xid)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        atexit.register(self._process.kill)
        self.acknowledged: set[int] = set()
        self.refused: set[int] = set()
        assert self._line() == ["open"], "it didn't open"

    def until(self, done: Callable[[], bool]) -> None:
        """Read the writer's output until a condition holds."""
        while not done():
            word, xid = self._line()
            (self.acknowledged if word == "ack" else self.refused).add(int(xid))

    def kill(self) -> None:
        """Send SIGKILL, and read the output from before it."""
        self._process.kill()
        assert self._process.stdout is not None
        for line in self._process.stdout.readlines():
            if line.endswith("\n"):
                word, xid = line.split()
                (self.acknowledged if word == "ack" else self.refused).add(int(xid))
        self._process.wait()

    def _line(self) -> list[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the writer ended with {self._process.wait()}"
        return line.split()


def has_room(file: FileIO, size: int) -> bool:
    """Write some bytes; return whether they found room."""
    try:
        return file.write(os.urandom(size)) == size
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False


def fill(ballast: Path) -> None:
    """Leave no free byte. The system may return only now what was freed a moment ago."""
    for _ in range(100):
        with ballast.open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 64, 1):
                while has_room(file, size):
                    pass
        disk = os.statvfs(ballast.parent)
        if disk.f_bavail * disk.f_frsize == 0:
            return
        time.sleep(0.05)
    raise AssertionError("there is space left")


def shown(folder: Path) -> dict[int, int]:
    """Return the log's transactions, each with the number of its records that are there."""
    reader = StreamReader(str(folder))
    found: dict[int, int] = {}
    for records in reader.read_between(Seq(reader.first_seq() - 1), reader.persisted_upto()):
        for xid in records.batch.column("__xid").to_pylist():
            found[xid] = found.get(xid, 0) + 1
    return found


def play(disk: Path) -> None:
    """Play a disk that the log and other files fill: kills and starts without a free byte, and space that returns."""
    folder, ballast = disk / "wal", disk / "ballast"
    writer = Writer(folder, 1, 1)
    writer.until(lambda: len(writer.refused) >= 10)
    assert len(writer.acknowledged) > 50
    say(f"{len(writer.acknowledged)} transactions filled the disk")
    fill(ballast)
    seen = len(writer.refused)
    writer.until(lambda: len(writer.refused) >= seen + 10)
    writer.kill()
    check(folder, writer)

    fill(ballast)
    for epoch in (2, 3):  # the second start finds what the first one's recovery left
        again = Writer(folder, epoch, 100_000 * epoch)
        fill(ballast)
        again.until(lambda of=again: len(of.refused) >= 5)
        again.kill()
        check(folder, writer, again)
        writer.acknowledged |= again.acknowledged
        writer.refused |= again.refused
        fill(ballast)
    say("opened twice without a free byte")

    last = Writer(folder, 4, 900_000)
    fill(ballast)
    last.until(lambda: len(last.refused) >= 5)
    before = len(last.acknowledged)
    end = StreamReader(str(folder)).persisted_upto()
    swept = drop_segments(str(folder), Retention(), RetentionBounds(0.0, 0, 0))
    assert swept.dropped, "retention dropped nothing without a free byte"
    last.until(lambda: len(last.acknowledged) >= before + 5)
    say(f"appends went on by themselves once retention had dropped {len(swept.dropped)} segments")
    seen = len(last.refused)
    fill(ballast)
    last.until(lambda: len(last.refused) >= seen + 5)
    ballast.unlink()
    before = len(last.acknowledged)
    last.until(lambda: len(last.acknowledged) >= before + 20)
    last.kill()
    kept = shown(folder)
    assert last.acknowledged <= kept.keys(), "an acknowledged transaction is gone"
    assert not last.refused & kept.keys(), "a refused transaction is there"
    assert StreamReader(str(folder)).persisted_upto() > end
    assert verify(str(folder)).is_whole
    say("whole")


def check(folder: Path, *writers: Writer) -> None:
    """Check that every acknowledged transaction is there, whole, and no refused one is."""
    kept = shown(folder)
    for writer in writers:
        assert writer.acknowledged <= kept.keys(), "an acknowledged transaction is gone"
        assert not writer.refused & kept.keys(), "a refused transaction is there"
    assert set(kept.values()) == {ROWS}, "a transaction is there in part"
    assert verify(str(folder)).is_whole


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], Epoch(int(sys.argv[3])), int(sys.argv[4]))
    play(Path(sys.argv[1]))
