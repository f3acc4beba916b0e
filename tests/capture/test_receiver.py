"""The reader of the replication connection over a wire of its own making."""

from __future__ import annotations

import os
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from millstream.capture.receiver import Receiver, Run
from millstream.capture.spill import SpillFolder
from millstream.capture.wire import Block
from millstream.codec.pgoutput import MessageRun
from millstream.model.positions import Lsn

DEADLINE_S = 30.0


class EndlessWire:
    """A source that always has one more transaction."""

    def __init__(self) -> None:
        self._descriptors = os.pipe()
        self.sent: list[bytes] = []
        self.gathered: list[float] = []
        self._end = 0

    def fileno(self) -> int:
        return self._descriptors[0]

    def read(self, gather_s: float = 0.0) -> Block:
        self.gathered.append(gather_s)
        self._end += 8
        messages = [
            b"B" + struct.pack(">QqI", self._end, 0, 1),
            b"C" + struct.pack(">BQQq", 0, self._end, self._end, 0),
        ]
        time.sleep(0.0001)  # what a read takes
        return Block(MessageRun.of(messages), np.frombuffer(b"BC", np.uint8))

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def say_goodbye(self) -> None:
        self.sent.append(b"goodbye")

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


@pytest.fixture
def endless(tmp_path: Path) -> tuple[EndlessWire, Receiver]:
    wire = EndlessWire()
    receiver = Receiver(
        wire, SpillFolder(str(tmp_path / "spill")), confirmed=Lsn(0), buffer_bytes_max=1 << 20, status_s=10
    )
    receiver.start()
    return wire, receiver


def test_a_stop_is_heard_while_the_source_sends_without_a_pause(endless: tuple[EndlessWire, Receiver]) -> None:
    wire, receiver = endless
    assert isinstance(receiver.take(DEADLINE_S), Run)
    stopping = threading.Thread(target=lambda: receiver.stop(final=Lsn(8)), daemon=True)
    stopping.start()
    stopping.join(DEADLINE_S)
    assert not stopping.is_alive()
    assert wire.sent[-1] == b"goodbye"
    assert wire.sent[-2][9:17] == (8).to_bytes(8, "big")


def test_reading_on_ends_where_a_run_that_is_waited_for_is_due(endless: tuple[EndlessWire, Receiver]) -> None:
    wire, receiver = endless
    began = time.monotonic()
    runs = 0
    while runs < 20:
        assert time.monotonic() - began < DEADLINE_S
        runs += isinstance(receiver.take(DEADLINE_S), Run)
    receiver.stop()
    # Small runs go 3 ms after the one before; nobody who waits is kept for longer.
    waited = [gather_s for gather_s in wire.gathered if 0 < gather_s <= 0.003]
    assert len(waited) >= 20
