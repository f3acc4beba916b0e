"""The reader of a connection, over a simulated one."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import numpy as np
from tests.capture.beside import Beside

from millstream.capture.stream.frames import Block
from millstream.capture.stream.large_transactions import Spilled, StreamedAbort
from millstream.capture.stream.receiver import Receiver, TransactionRun
from millstream.capture.stream.spill_files import SpillFolder
from millstream.codec.pgoutput import MessageRun
from millstream.model.positions import Lsn

DEADLINE_S = 30.0


def stream_start(xid: int) -> bytes:
    return b"S" + struct.pack(">IB", xid, 1)


def stream_commit(xid: int, end: int) -> bytes:
    return b"c" + struct.pack(">IBQQq", xid, 0, end - 8, end, 0)


def transaction(end: int) -> list[bytes]:
    return [b"B" + struct.pack(">QqI", end - 8, 0, 1), b"C" + struct.pack(">BQQq", 0, end - 8, end, 0)]


def block(messages: list[bytes], *, anew: bool = False) -> Block:
    run = MessageRun.of(messages)
    return Block(run, np.frombuffer(bytes(message[0] for message in messages), np.uint8), resends_streamed=anew)


class PlayedWire:
    """A wire that gives blocks, one a read; over and over if it is endless."""

    def __init__(self, blocks: list[Block], *, endless: bool = False) -> None:
        self._blocks = blocks
        self._endless = endless
        self._at = 0
        self._silence, self._other_end = os.pipe()
        self.told = Lsn(0), Lsn(0), False
        self.said_goodbye = False
        self.gathered: list[float] = []

    def fileno(self) -> int:
        return self._silence

    def read(self, gather_s: float = 0.0) -> Block | None:
        self.gathered.append(gather_s)
        self._at += 1
        if self._endless:
            return self._blocks[self._at % len(self._blocks)]
        return self._blocks[self._at - 1] if self._at <= len(self._blocks) else None

    def tell(self, received: Lsn, confirmed: Lsn, *, ask: bool) -> None:
        self.told = received, confirmed, ask

    def say_goodbye(self) -> None:
        self.said_goodbye = True

    def close(self) -> None:
        os.close(self._silence)
        os.close(self._other_end)


def reader(wire: PlayedWire, folder: Path) -> Receiver:
    made = Receiver(
        wire,
        SpillFolder(str(folder)),
        confirmed=Lsn(0),
        buffer_bytes_max=1 << 20,
        run_bytes_max=8 << 20,
        status_s=10.0,
    )
    made.start()
    return made


def test_it_stops_however_much_there_is_to_read(tmp_path: Path):
    wire = PlayedWire([block(transaction(100))], endless=True)
    receiver = reader(wire, tmp_path / "spill")
    assert receiver.take(DEADLINE_S) is not None
    Beside(receiver.stop).ended(DEADLINE_S)
    assert wire.told == (100, 0, False)
    assert wire.said_goodbye


def test_what_is_sent_anew_takes_the_place_of_what_was_open(tmp_path: Path):
    """Transaction 7 is sent again and commits; 8 is never sent again."""
    folder = tmp_path / "spill"
    wire = PlayedWire(
        [
            block([stream_start(7), b"Iaaaa", b"E", stream_start(8), b"Ibbbb", b"E", *transaction(100)]),
            block([stream_start(7), b"Icccc", b"Idddd", b"E"], anew=True),
            block([stream_start(7), b"Ieeee", b"E", stream_commit(7, 200)]),
        ]
    )
    receiver = reader(wire, folder)
    found = []
    while not found or not isinstance(found[-1], Spilled):
        item = receiver.take(DEADLINE_S)
        assert item is not None
        found.append(item)
    kinds = [type(item) for item in found if isinstance(item, TransactionRun | StreamedAbort | Spilled)]
    assert kinds == [TransactionRun, StreamedAbort, StreamedAbort, Spilled]
    spilled = found[-1]
    assert isinstance(spilled, Spilled)
    assert [message for run in spilled.file.runs() for message in run] == [b"Icccc", b"Idddd", b"Ieeee"]
    assert len(list(folder.glob("*.messages"))) == 1, "what was open still lies there"
    receiver.stop()


def test_reading_on_ends_where_a_run_that_is_waited_for_is_due(tmp_path: Path):
    wire = PlayedWire([block(transaction(100))], endless=True)
    receiver = reader(wire, tmp_path / "spill")
    began = time.monotonic()
    runs = 0
    while runs < 20:
        assert time.monotonic() - began < DEADLINE_S
        runs += isinstance(receiver.take(DEADLINE_S), TransactionRun)
    receiver.stop()
    # Small runs go 3 ms after the one before; no waiter is kept for longer.
    waited = [gather_s for gather_s in wire.gathered if 0 < gather_s <= 0.003]
    assert len(waited) >= 20


def test_a_taker_that_is_nudged_before_every_call_still_gets_its_items(tmp_path: Path):
    """A look at the tables nudges five times a second, and a step of the taker may last longer than that."""
    receiver = reader(PlayedWire([block(transaction(100))]), tmp_path / "spill")
    until = time.monotonic() + DEADLINE_S
    item = None
    while item is None and time.monotonic() < until:
        receiver.nudge()
        receiver.nudge()
        item = receiver.take(DEADLINE_S)
        time.sleep(0.01)
    receiver.stop()
    assert isinstance(item, TransactionRun)


def test_who_wakes_a_reader_that_has_ended_writes_into_no_other_file(tmp_path: Path):
    wire = PlayedWire([])
    receiver = reader(wire, tmp_path / "spill")
    receiver.stop()
    # A thread that ends frees the lowest descriptors: new files take them.
    others = [os.open(tmp_path / f"file-{number}", os.O_CREAT | os.O_WRONLY) for number in range(16)]
    receiver.confirm(Lsn(100), now=True)
    receiver.ask_position()
    receiver.stop()
    for descriptor in others:
        os.close(descriptor)
    assert [(tmp_path / f"file-{number}").stat().st_size for number in range(16)] == [0] * 16
