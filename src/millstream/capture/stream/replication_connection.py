"""The replication connection's bytes, in blocks of whole messages.

libpq returns messages one by one, and each then costs several times its decoding (2.4 µs against 0.3). So if the
connection isn't encrypted, its socket is read directly from the answer to START_REPLICATION on. Machine code splits
the bytes, and no Python runs for a message. libpq never sees these bytes; it was asked nothing else and expects no
answer. Encrypted connections, whose bytes only libpq can read, use libpq.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from typing import Final, Protocol

import numpy as np
import psycopg
from psycopg import pq

from millstream.capture.connection import Connection, next_result, translate, translate_result
from millstream.capture.stream._drain import compile_drain
from millstream.capture.stream.frames import KEEPALIVE, NAP_US, Block, Frames, is_unencrypted, pass_over
from millstream.codec.pgoutput import MessageRun
from millstream.codec.pgoutput._framing import split_copy_data
from millstream.codec.pgoutput.rare_messages import POSTGRES_EPOCH_US
from millstream.errors import MillstreamError, ProtocolViolation, SourceError
from millstream.model.positions import Lsn

HEADER_BYTES: Final = 25
"""Size of the header of XLogData before each message: 'w', its LSN, the server's end of WAL, the server's clock."""

_STATUS: Final = struct.Struct(">cQQQqB")
_MESSAGES_FEW: Final = 100
_SMALLEST_FRAME: Final = 1 + 4 + 18
_ANSWER_S: Final = 60.0
_GOODBYE_S: Final = 2.0


class Wire(Protocol):
    """A connection that sends pgoutput's messages and receives how far the log is. For one thread."""

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""

    def read(self, gather_s: float = 0.0) -> Block | None:
        """Return the messages that have come; None if none has come whole.

        Args:
            gather_s: how long it may go on reading while more comes. With 0 it never waits.

        Raises:
            MillstreamError: the server ended the stream, the connection broke, or the bytes are malformed.
        """

    def tell(self, received: Lsn, confirmed: Lsn, *, ask: bool) -> None:
        """Report to the source what was received, and what is durable; `ask` requests its position in return.

        Raises:
            SourceError (`source_unreachable`): the report can't be sent.
        """

    def say_goodbye(self) -> None:
        """End the stream from this side and wait a moment until the server has received the last report."""

    def close(self) -> None:
        """Close the connection."""


def start_replication(connection: Connection, command: bytes, *, reads_socket: bool = True) -> Wire:
    """Send START_REPLICATION and wait for its answer; the connection belongs to the wire from here on.

    Args:
        reads_socket: whether machine code may read the socket, if the connection isn't encrypted.

    Raises:
        MillstreamError: the server refused; the connection is still the caller's.
    """
    pgconn = connection.pgconn
    is_plain = reads_socket and is_unencrypted(connection)
    if is_plain:
        compile_drain()
    try:
        pgconn.send_query(command)
        if is_plain and _takes_over(pgconn.socket):
            return SocketWire(connection)
        result = next_result(pgconn)
    except psycopg.Error as error:
        raise translate(error) from error
    if result is None or result.status != pq.ExecStatus.COPY_BOTH:
        assert result is not None
        raise translate_result(result)
    pgconn.nonblocking = 0
    return LibpqWire(connection)


def _takes_over(descriptor: int) -> bool:
    """Wait for the answer; take it off the socket if it opens the stream, leave it to libpq if it doesn't."""
    with socket.socket(fileno=os.dup(descriptor)) as peer:
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
                time.sleep(0.001)  # a part of an answer; poll would return at once because of it
            seen = len(data)
    return False


class SocketWire:
    """Reads the socket itself; see the module."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._frames = Frames(connection, split_copy_data, frame_bytes_min=_SMALLEST_FRAME, on_other=_on_other_frame)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._frames.fileno()

    def read(self, gather_s: float = 0.0) -> Block | None:
        """See `Wire`. A block's messages stay where they were received; later bytes go behind them."""
        return self._frames.read(gather_s)

    def tell(self, received: Lsn, confirmed: Lsn, *, ask: bool) -> None:
        """See `Wire`: sends a standby status, as CopyData."""
        message = standby_status(received, confirmed, ask=ask)
        self._frames.send(b"d" + struct.pack(">I", len(message) + 4) + message)

    def say_goodbye(self) -> None:
        """Send CopyDone; then read until the server has sent it too."""
        with contextlib.suppress(MillstreamError, OSError):
            self._frames.send(b"c\0\0\0\4")
            deadline = time.monotonic() + _GOODBYE_S
            poll = select.poll()
            poll.register(self._frames.fileno(), select.POLLIN)
            while time.monotonic() < deadline:
                if poll.poll(100):
                    self.read()

    def close(self) -> None:
        """Close the socket, and libpq's connection."""
        self._frames.close()
        self._connection.close()


def _on_other_frame(kind: str, body: bytes) -> None:
    if kind in "cCZ":
        raise SourceError("the server ended the stream", code="source_unreachable")
    pass_over(kind, body, what="the stream")


def standby_status(received: Lsn, confirmed: Lsn, *, ask: bool) -> bytes:
    """Return the message that reports to the source which WAL it may remove."""
    now_us = time.time_ns() // 1000 - POSTGRES_EPOCH_US
    return _STATUS.pack(b"r", max(received, confirmed), confirmed, confirmed, now_us, int(ask))


class LibpqWire:
    """Reads through libpq, message by message."""

    _MESSAGES_MAX = 1024

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pg = connection.pgconn
        self._got_few = False

    def fileno(self) -> int:
        """Return the descriptor of libpq's socket."""
        return self._pg.socket

    def read(self, gather_s: float = 0.0) -> Block | None:
        """See `Wire`. It naps once: it is slower than the sender that fills a socket."""
        if gather_s > 0 and self._got_few:
            time.sleep(min(gather_s, NAP_US / 1e6))
        found: list[bytes | memoryview] = []
        try:
            while len(found) < self._MESSAGES_MAX:
                count, data = self._pg.get_copy_data(1)
                if count < 0 and not found:
                    raise translate_result(next_result(self._pg) or _no_result())
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

    def tell(self, received: Lsn, confirmed: Lsn, *, ask: bool) -> None:
        """See `Wire`: sends a standby status, as CopyData."""
        try:
            self._pg.put_copy_data(standby_status(received, confirmed, ask=ask))
            self._pg.flush()
        except psycopg.Error as error:
            raise translate(error) from error

    def say_goodbye(self) -> None:
        """Send CopyDone; then read until the server has sent it too."""
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
        """Close the connection."""
        self._connection.close()


def _block(payloads: list[bytes | memoryview]) -> Block:
    run = MessageRun.of(payloads)  # type: ignore[arg-type]
    tags = run.buffer[run.starts]
    is_keepalive = tags == KEEPALIVE
    whole = np.where(
        is_keepalive, run.ends - run.starts == 18, (tags == ord("w")) & (run.ends - run.starts > HEADER_BYTES)
    )
    if not whole.all():
        raise ProtocolViolation("the source sent a replication message of an unknown kind or length")
    starts = np.where(is_keepalive, run.starts, run.starts + HEADER_BYTES)
    return Block(MessageRun(run.buffer, starts, run.ends), run.buffer[starts])


def _no_result() -> pq.abc.PGresult:
    raise SourceError("the replication connection was closed by the server", code="source_unreachable")
