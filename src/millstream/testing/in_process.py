"""A transport between two threads of one process, for tests: the same bytes as on the wire, and faults from a seed.

Without faults it keeps the promises of `ports.Transport`. With them a message may be lost while
later ones arrive, or come twice, early, late or damaged; nodes may be cut off for a time. That is
worse than any network under TCP, and followers have to withstand it. The fault of a message depends
on the seed, the node, and the number of messages before it on its link, so every run has the same
faults.

Time is the clock's. With a test's manual clock, waiting calls wake when the clock is moved.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from millstream.codec.replication_messages import decode_message, encode_message
from millstream.errors import LinkLost, MillstreamError, ShipmentUnreadable
from millstream.model.replication import Acknowledgement, Hello, NodeName, Shipment
from millstream.ports import Clock, FollowerLink, LeaderLink
from millstream.replication.queues import WINDOW_BYTES
from millstream.wal.files import SystemClock

_NS: Final = 1_000_000_000
_STEP_S: Final = 0.001
"""Seconds of one wait step, with a clock that isn't the system's, or if something happens by time alone."""
_FOR_EVER_S: Final = 1e8
_NEVER_NS: Final = 2**62


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """Probabilities of faults, each from 0 to 1."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    """The message overtakes the one before it."""
    corrupt: float = 0.0
    """A bit of it is flipped."""
    delay: float = 0.0
    delay_s: float = 0.1
    """Longest delay in seconds; the messages after it wait for it."""
    partition: float = 0.0
    """The node is cut off with it, both ways."""
    partition_s: float = 1.0


NO_FAULTS: Final = LinkFaults()


@dataclass(frozen=True, slots=True)
class _Message:
    data: bytes
    due_ns: int


class InProcessTransport:
    """Both ends in one object: followers connect to the caller of `accept`.

    Args:
        clock: for delays, partitions and timeouts.
        faults: the faults of messages.
        seed: of the faults.
        window_bytes: bound of the bytes in flight, each way; a single message may exceed it.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        faults: LinkFaults = NO_FAULTS,
        seed: int = 0,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._wire = _Wire(SystemClock() if clock is None else clock, faults, window_bytes)
        self._seed = seed
        self._waiting: deque[_LeaderEnd] = deque()
        self._pipes: list[tuple[_Pipe, _Pipe]] = []
        self._counted = 0
        self._is_closed = False

    def accept(self, timeout_s: float) -> FollowerLink | None:
        with self._wire.changed:
            self._wire.wait(lambda: self._waiting or self._is_closed, timeout_s)
            return self._waiting.popleft() if self._waiting and not self._is_closed else None

    def connect(self, hello: Hello, timeout_s: float) -> LeaderLink:
        """See `ports.Transport`; a node that is cut off waits for that long."""
        wire = self._wire
        with wire.changed:
            if not wire.wait(lambda: not wire.is_cut(hello.node) or self._is_closed, timeout_s) or self._is_closed:
                raise LinkLost(f"{hello.node} can't reach the leader")
            self._counted += 1
            down, up = (_Pipe(wire, hello.node, self._chance(way)) for way in ("down", "up"))
            self._pipes = [pair for pair in self._pipes if pair[0].is_open]
            self._pipes.append((down, up))
            said = decode_message(b"".join(encode_message(hello)))
            assert isinstance(said, Hello)
            self._waiting.append(_LeaderEnd(said, down, up))
            wire.changed.notify_all()
        return _FollowerEnd(down, up)

    def _chance(self, way: str) -> random.Random:
        return random.Random(f"{self._seed}/{self._counted}/{way}")  # faults, not secrets

    def cut(self, node: NodeName, seconds: float | None = None) -> None:
        """Cut a node off for that long, or until `mend`: messages to and from it are lost, and it can't connect."""
        self._wire.cut(node, seconds)

    def mend(self, node: NodeName) -> None:
        """Reconnect a node."""
        self._wire.cut(node, 0.0)

    def close(self) -> None:
        with self._wire.changed:
            self._is_closed = True
            for pipe in (pipe for pair in self._pipes for pipe in pair):
                pipe.end("the transport was closed", forget=True)
            self._waiting.clear()
            self._wire.changed.notify_all()


class _Wire:
    """Shared state of a transport's links: clock, faults, nodes cut off, and one lock."""

    def __init__(self, clock: Clock, faults: LinkFaults, window_bytes: int) -> None:
        self.clock: Final = clock
        self.faults: Final = faults
        self.window_bytes: Final = window_bytes
        self.changed: Final = threading.Condition()
        self._cut: dict[NodeName, int] = {}
        """Time until which each node is cut off."""
        self._wakes: Final = isinstance(clock, SystemClock) and faults == NO_FAULTS
        """Whether every change wakes the waiting threads, since nothing happens by time alone."""

    def cut(self, node: NodeName, seconds: float | None) -> None:
        with self.changed:
            self._cut[node] = _NEVER_NS if seconds is None else self.clock.monotonic_ns() + round(seconds * _NS)
            self.changed.notify_all()

    def is_cut(self, node: NodeName) -> bool:
        return self._cut.get(node, 0) > self.clock.monotonic_ns()

    def wait(self, is_so: Callable[[], object], timeout_s: float) -> bool:
        """Return whether the condition became true in time, by the clock. The caller holds the lock, once."""
        until_ns = self.clock.monotonic_ns() + round(timeout_s * _NS)
        while not is_so():
            left_ns = until_ns - self.clock.monotonic_ns()
            if left_ns <= 0:
                return False
            step_s = left_ns / _NS if self._wakes and not self._cut else min(left_ns / _NS, _STEP_S)
            if isinstance(self.clock, SystemClock):
                self.changed.wait(step_s)
                continue
            self.changed.release()
            try:
                self.clock.sleep(step_s)
            finally:
                self.changed.acquire()
        return True


class _Pipe:
    """One direction of a link."""

    def __init__(self, wire: _Wire, node: NodeName, chance: random.Random) -> None:
        self._wire = wire
        self._node = node
        self._chance = chance
        self._messages: deque[_Message] = deque()
        self._bytes = 0
        self._ended: LinkLost | None = None

    @property
    def is_open(self) -> bool:
        return self._ended is None

    def put(self, data: bytes, *, waits: bool = True) -> None:
        """Send a message: wait for room, except with a last message.

        Raises `LinkLost` if the pipe has ended. LinkFaults are silent.
        """
        with self._wire.changed:
            if waits:
                self._wire.wait(lambda: self._ended is not None or self._has_room(len(data)), _FOR_EVER_S)
            if self._ended is not None:
                raise self._ended.with_traceback(None)
            for message, overtakes in self._befallen(data):
                self._messages.insert(len(self._messages) - (1 if overtakes and self._messages else 0), message)
                self._bytes += len(message.data)
            self._wire.changed.notify_all()

    def take(self, timeout_s: float) -> bytes | None:
        """Return the next message that is due; messages from before the end come first."""
        with self._wire.changed:
            self._wire.wait(lambda: self._is_due() or (self._ended is not None and not self._messages), timeout_s)
            if self._is_due():
                message = self._messages.popleft()
                self._bytes -= len(message.data)
                self._wire.changed.notify_all()
                return message.data
            if self._ended is not None and not self._messages:
                raise self._ended.with_traceback(None)
            return None

    def end(self, why: str, *, forget: bool = False) -> None:
        """End the pipe: nothing more comes. With `forget`, messages in flight are dropped too."""
        with self._wire.changed:
            self._ended = self._ended or LinkLost(why)
            if forget:
                self._messages.clear()
                self._bytes = 0
            self._wire.changed.notify_all()

    def _has_room(self, size: int) -> bool:
        return not self._messages or self._bytes + size <= self._wire.window_bytes

    def _is_due(self) -> bool:
        return bool(self._messages) and self._messages[0].due_ns <= self._wire.clock.monotonic_ns()

    def _befallen(self, data: bytes) -> list[tuple[_Message, bool]]:
        """Return the message as often as it comes, and whether it overtakes.

        Each message draws the same number of random values, so that one fault doesn't shift the
        others.
        """
        faults, dice = self._wire.faults, [self._chance.random() for _ in range(9)]
        if dice[0] < faults.partition:
            self._wire.cut(self._node, faults.partition_s)
        if self._wire.is_cut(self._node) or dice[1] < faults.drop:
            return []
        if dice[2] < faults.corrupt:
            spoilt = bytearray(data)
            spoilt[int(dice[3] * len(data))] ^= 1 << int(dice[4] * 8)
            data = bytes(spoilt)
        delay_s = faults.delay_s * dice[6] if dice[5] < faults.delay else 0.0
        message = _Message(data, self._wire.clock.monotonic_ns() + round(delay_s * _NS))
        return [(message, dice[8] < faults.reorder)] * (2 if dice[7] < faults.duplicate else 1)


class _PipeEnd:
    def __init__(self, inward: _Pipe, outward: _Pipe) -> None:
        self._inward = inward
        self._outward = outward

    def _heard(self, timeout_s: float) -> Shipment | Acknowledgement | Hello | None:
        """Return the next message; raise it if it is an error."""
        said = self._inward.take(timeout_s)
        if said is None:
            return None
        try:
            message = decode_message(said)
        except ShipmentUnreadable:
            self.close()
            raise
        if isinstance(message, MillstreamError):
            self.close()
            raise message
        return message

    def close(self) -> None:
        self._inward.end("the link was closed", forget=True)
        self._outward.end("the other end has closed the link")


class _LeaderEnd(_PipeEnd):
    """See `ports.FollowerLink`."""

    def __init__(self, hello: Hello, down: _Pipe, up: _Pipe) -> None:
        super().__init__(up, down)
        self._hello = hello

    @property
    def hello(self) -> Hello:
        return self._hello

    def send(self, shipment: Shipment) -> None:
        self._outward.put(b"".join(encode_message(shipment)))

    def recv(self, timeout_s: float) -> Acknowledgement | Hello | None:
        message = self._heard(timeout_s)
        if isinstance(message, Shipment):
            self.close()
            raise ShipmentUnreadable("a follower has sent a shipment")
        return message

    def refuse(self, error: MillstreamError) -> None:
        with contextlib.suppress(LinkLost):
            self._outward.put(b"".join(encode_message(error)), waits=False)
        self.close()


class _FollowerEnd(_PipeEnd):
    """See `ports.LeaderLink`."""

    def __init__(self, down: _Pipe, up: _Pipe) -> None:
        super().__init__(down, up)

    def recv(self, timeout_s: float) -> Shipment | None:
        came = self._heard(timeout_s)
        if came is not None and not isinstance(came, Shipment):
            self.close()
            raise ShipmentUnreadable("a leader has sent what followers say")
        return came

    def send(self, message: Acknowledgement | Hello | MillstreamError) -> None:
        self._outward.put(b"".join(encode_message(message)))
