"""The replication connection's bytes, in blocks of whole messages.

libpq hands messages out one by one, and each then costs several times what decoding it does (2.4 µs against 0.3). So where
the connection isn't encrypted, its socket is read directly from the answer to START_REPLICATION on: what has come is read and
split by machine code, and no Python runs for a message. libpq never sees a byte of it; it was asked nothing else and knows of no
answer. Encrypted connections, whose bytes only libpq can read, and processes without numba go through libpq.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import pq

from millstream.capture.connection import translate, translate_fields, translate_result
from millstream.codec.pgoutput import MessageRun
from millstream.errors import MillstreamError, ProtocolViolation, SourceUnreachable

HEADER_BYTES: Final = 25
"""Of XLogData, before each message: 'w', its LSN, the server's end of WAL, the server's clock."""
KEEPALIVE: Final = ord("k")
"""The kind of a keepalive in a block; pgoutput has no message of that kind."""

_BUFFER_BYTES: Final = 1 << 20
_READ_BYTES: Final = 256 << 10
_READ_SMALL_BYTES: Final = 16 << 10
_MESSAGES_FEW: Final = 100
_NAP_US: Final = 200
"""After a small read: some seventy rows come in that time. A Unix socket holds some three hundred, which take the source 0.8 ms."""
_ROOM_MIN: Final = 16 << 10
_SMALLEST_FRAME: Final = 1 + 4 + 18
_SEND_S: Final = 30.0
_ANSWER_S: Final = 60.0
_GOODBYE_S: Final = 2.0

Bytes8 = npt.NDArray[np.uint8]
Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Whole messages, in order; `kinds` has the first byte of each, `k` for a keepalive."""

    messages: MessageRun
    kinds: Bytes8

    def __len__(self) -> int:
        return len(self.kinds)

    def between(self, first: int, end: int) -> MessageRun:
        """Messages `[first, end)`."""
        run = self.messages
        return MessageRun(run.buffer, run.starts[first:end], run.ends[first:end])


class Wire(Protocol):
    """A connection in COPY BOTH. For one thread."""

    def fileno(self) -> int:
        """What to poll for bytes to read."""

    def read(self, gather_s: float = 0.0) -> Block | None:
        """The messages that have come; None where none has come whole.

        Args:
            gather_s: for how long it may go on reading, as long as more comes. With 0 it never waits.

        Raises:
            MillstreamError: the server ended the stream, the connection broke, or bytes make no sense.
        """

    def send(self, message: bytes) -> None:
        """Send one message; `SourceUnreachable` where that can't be done."""

    def say_goodbye(self) -> None:
        """End COPY from this side and wait a moment for the server to take it in."""

    def close(self) -> None:
        """Close the connection."""


def start_replication(connection: Connection, command: bytes) -> Wire:
    """Send START_REPLICATION and wait for its answer; the connection belongs to the wire from here on.

    Raises:
        MillstreamError: the server refused; the connection is still the caller's.
    """
    pgconn = connection.pgconn
    try:
        is_plain = not (pgconn.ssl_in_use or pgconn.used_gssapi) and _has_machine_code()
        pgconn.send_query(command)
        if is_plain and _takes_over(pgconn.socket):
            return SocketWire(connection)
        result = pgconn.get_result()
    except psycopg.Error as error:
        raise translate(error) from error
    if result is None or result.status != pq.ExecStatus.COPY_BOTH:
        assert result is not None
        raise translate_result(result)
    pgconn.nonblocking = 0
    return LibpqWire(connection)


def _has_machine_code() -> bool:
    """Whether there is any; it is ready then."""
    try:
        from millstream.capture._drain import compile_drain
    except ImportError:
        return False
    compile_drain()
    return True


def _takes_over(descriptor: int) -> bool:
    """Wait for the answer; take it off the socket where it opens the stream, leave it to libpq where it doesn't."""
    with socket.socket(fileno=_duplicate(descriptor)) as peer:
        poll = select.poll()
        poll.register(peer, select.POLLIN)
        deadline = time.monotonic() + _ANSWER_S
        seen = -1
        while time.monotonic() < deadline:
            poll.poll(1000)
            try:
                data = peer.recv(65536, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            if not data:
                return False
            at = 0
            while at + 5 <= len(data):
                (length,) = struct.unpack_from(">I", data, at + 1)
                end = at + 1 + length
                if data[at : at + 1] == b"W" and end <= len(data):
                    peer.recv(end)
                    return True
                if data[at : at + 1] not in b"WNSA":
                    return False
                at = end
            if len(data) == seen:
                time.sleep(0.001)  # a part of an answer; poll would say at once that it's there
            seen = len(data)
    return False


def _duplicate(descriptor: int) -> int:
    import os

    return os.dup(descriptor)


class SocketWire:
    """Reads the socket itself; see the module."""

    def __init__(self, connection: Connection) -> None:
        from millstream.capture import _drain
        from millstream.codec.pgoutput import _framing

        self._drain = _drain.drain
        self._split = _framing.split_copy_data
        self._connection = connection
        self._socket = socket.socket(fileno=_duplicate(connection.pgconn.socket))
        self._socket.setblocking(False)
        self._filled = 0
        """Bytes received into the buffer."""
        self._split_upto = 0
        """… and of them, those that were split into messages."""
        self._memory, self._writable, self._view = _new_buffer(_BUFFER_BYTES)

    def fileno(self) -> int:
        """The socket."""
        return self._socket.fileno()

    def read(self, gather_s: float = 0.0) -> Block | None:
        """See `Wire`. Messages of a block lie where they were received; what comes later goes behind them."""
        self._receive(int(gather_s * 1e6) // _NAP_US)
        capacity = (self._filled - self._split_upto) // _SMALLEST_FRAME + 1
        starts = np.empty(capacity, dtype=np.int64)
        ends = np.empty(capacity, dtype=np.int64)
        kinds = np.empty(capacity, dtype=np.uint8)
        found, at, why = self._split(self._view, self._split_upto, self._filled, starts, ends, kinds)
        self._split_upto = int(at)
        if why:
            self._on_other(int(at), malformed=why == 2)
        if not found:
            return None
        return Block(MessageRun(self._view, starts[:found], ends[:found]), kinds[:found])

    def send(self, message: bytes) -> None:
        """As CopyData."""
        self._send_raw(b"d" + struct.pack(">I", len(message) + 4) + message)

    def say_goodbye(self) -> None:
        """CopyDone; then read until the server has said so too."""
        with contextlib.suppress(MillstreamError, OSError):
            self._send_raw(b"c\0\0\0\4")
            deadline = time.monotonic() + _GOODBYE_S
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            while time.monotonic() < deadline:
                if poll.poll(100):
                    self.read()

    def close(self) -> None:
        """Close it, and libpq's side."""
        self._socket.close()
        self._connection.close()

    def _receive(self, turns: int) -> None:
        """Take what has come, up to a bound; with turns, what comes in so many naps too."""
        if len(self._memory) - self._filled < self._room_needed():
            self._renew(self._memory[self._split_upto : self._filled], self._size_needed())
        limit = min(len(self._memory), self._filled + _READ_BYTES)
        if turns:
            descriptor, before = self._socket.fileno(), self._filled
            filled = self._drain(descriptor, self._writable, before, limit, _READ_SMALL_BYTES, _NAP_US, turns)
            self._filled = int(filled)
            if filled > before:
                return
        try:
            count = self._socket.recv_into(self._memory[self._filled : limit])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise SourceUnreachable(f"the replication connection broke: {error}") from error
        if not count:
            raise SourceUnreachable("the replication connection was closed by the server")
        self._filled += count

    def _room_needed(self) -> int:
        """Bytes that should be free before reading: for the rest of a message that has come in part."""
        pending = self._filled - self._split_upto
        if pending < 5:
            return _ROOM_MIN
        (length,) = struct.unpack_from(">I", self._memory, self._split_upto + 1)
        return int(max(_ROOM_MIN, 1 + length - pending))

    def _size_needed(self) -> int:
        return max(_BUFFER_BYTES, self._filled - self._split_upto + self._room_needed())

    def _renew(self, left: bytes | memoryview, size: int) -> None:
        """Begin a new buffer, with what is left of the old one; blocks keep the old one for as long as they need it."""
        self._memory, self._writable, self._view = _new_buffer(size)
        self._memory[: len(left)] = left
        self._filled, self._split_upto = len(left), 0

    def _on_other(self, at: int, *, malformed: bool) -> None:
        """A frame that isn't CopyData: notices are skipped, an error or the end is raised."""
        if malformed:
            raise ProtocolViolation("a replication message of an unknown kind or length came")
        kind = chr(self._view[at])
        (length,) = struct.unpack_from(">I", self._memory, at + 1)
        if at + 1 + length > self._filled:
            return  # the rest is still to come
        body = bytes(self._memory[at + 5 : at + 1 + length])
        if kind == "E":
            fields = {part[:1]: part[1:].decode("utf-8", "replace") for part in body.split(b"\0") if part}
            raise translate_fields(fields.get(b"C"), fields.get(b"M", "the server ended the stream"))
        if kind in "cCZ":
            raise SourceUnreachable("the server ended the stream")
        if kind not in "NSA":
            raise ProtocolViolation(f"a message {kind!r} came in the stream")
        self._split_upto = at + 1 + length

    def _send_raw(self, data: bytes) -> None:
        deadline = time.monotonic() + _SEND_S
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SourceUnreachable("the source takes nothing any more") from None
                poll.poll(1000)
            except OSError as error:
                raise SourceUnreachable(f"the replication connection broke: {error}") from error


def _new_buffer(size: int) -> tuple[memoryview, Bytes8, Bytes8]:
    """Memory to receive into, the same for machine code, and what readers see of it."""
    memory = memoryview(bytearray(size))
    writable: Bytes8 = np.frombuffer(memory, dtype=np.uint8)
    view: Bytes8 = np.frombuffer(memory.toreadonly(), dtype=np.uint8)
    return memory, writable, view


class LibpqWire:
    """Reads through libpq, message by message."""

    _MESSAGES_MAX = 1024

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pg = connection.pgconn
        self._got_few = False

    def fileno(self) -> int:
        """libpq's socket."""
        return self._pg.socket

    def read(self, gather_s: float = 0.0) -> Block | None:
        """See `Wire`. It naps once: it is slower than what fills a socket."""
        if gather_s > 0 and self._got_few:
            time.sleep(min(gather_s, _NAP_US / 1e6))
        found: list[bytes | memoryview] = []
        try:
            while len(found) < self._MESSAGES_MAX:
                count, data = self._pg.get_copy_data(1)
                if count < 0 and not found:
                    raise translate_result(self._pg.get_result() or _no_result())
                if count > 0:
                    found.append(data)
                    continue
                if not found:
                    self._pg.consume_input()
                    count, data = self._pg.get_copy_data(1)
                    if count > 0:
                        found.append(data)
                        continue
                break
        except psycopg.Error as error:
            raise translate(error) from error
        self._got_few = len(found) < _MESSAGES_FEW
        return _block(found) if found else None

    def send(self, message: bytes) -> None:
        """As CopyData."""
        try:
            self._pg.put_copy_data(message)
            self._pg.flush()
        except psycopg.Error as error:
            raise translate(error) from error

    def say_goodbye(self) -> None:
        """CopyDone; then read until the server has said so too."""
        with contextlib.suppress(psycopg.Error, MillstreamError):
            self._pg.put_copy_end()
            self._pg.flush()
            deadline = time.monotonic() + _GOODBYE_S
            poll = select.poll()
            poll.register(self._pg.socket, select.POLLIN)
            while time.monotonic() < deadline:
                count, _ = self._pg.get_copy_data(1)
                if count < 0:
                    return
                if count == 0 and poll.poll(100):
                    self._pg.consume_input()

    def close(self) -> None:
        """Close it."""
        self._connection.close()


def _block(payloads: list[bytes | memoryview]) -> Block:
    run = MessageRun.of(payloads)  # type: ignore[arg-type]
    tags = run.buffer[run.starts]
    is_keepalive = tags == KEEPALIVE
    whole = np.where(
        is_keepalive, run.ends - run.starts == 18, (tags == ord("w")) & (run.ends - run.starts > HEADER_BYTES)
    )
    if not whole.all():
        raise ProtocolViolation("a replication message of an unknown kind or length came")
    starts = np.where(is_keepalive, run.starts, run.starts + HEADER_BYTES)
    return Block(MessageRun(run.buffer, starts, run.ends), run.buffer[starts])


def _no_result() -> pq.abc.PGresult:
    raise SourceUnreachable("the replication connection was closed by the server")
