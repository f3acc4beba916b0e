"""The rows of a COPY … TO STDOUT, taken from the connection in large pieces.

libpq returns rows one by one, which costs several times their reading. If the connection isn't encrypted, the command
is sent and answered past libpq, which sees none of these bytes: the rows stay where the socket put them.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from psycopg import pq

from millstream.capture.connection import Connection, next_result, translate_result, wait_for
from millstream.capture.copying import _text_scan as machine
from millstream.capture.stream.frames import is_unencrypted, pass_over
from millstream.errors import MillstreamError, ProtocolViolation, SourceError

_READ_BYTES: Final = 256 << 10
_READ_SMALL_BYTES: Final = 64 << 10
_NAP_S: Final = 0.0005
"""Nap after a small read. The server sends 8 KiB at a time, and waking for each costs both sides more than the copying;
a Unix socket holds what comes in about twice the nap."""
_ROOM_MAX: Final = 64 << 20

Messages = npt.NDArray[np.uint8]
"""CopyData messages, a row each: a head of `_text_scan.HEAD_BYTES`, then the line that COPY writes."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyText:
    """Rows as COPY writes them."""

    messages: Messages
    """Owned by the receiver; whole rows."""
    row_count: int
    whole: bool
    """Whether nothing follows; False: it stopped at the bound."""

    @property
    def size_bytes(self) -> int:
        """Size in bytes of the rows' text."""
        return len(self.messages) - machine.HEAD_BYTES * self.row_count

    def lines(self) -> list[bytes]:
        """Return each row's line, without its newline."""
        data = self.messages.tobytes()
        found = []
        at = 0
        for _ in range(self.row_count):
            end = at + 1 + int.from_bytes(data[at + 1 : at + machine.HEAD_BYTES], "big")
            found.append(data[at + machine.HEAD_BYTES : end - 1])
            at = end
        return found


def as_messages(lines: Iterable[bytes]) -> Messages:
    """Return rows, given as lines without their newlines, as messages."""
    messages = (b"d%b%b\n" % ((len(line) + machine.HEAD_BYTES).to_bytes(4, "big"), line) for line in lines)
    return np.frombuffer(bytearray().join(messages), np.uint8)


def copy_out(connection: Connection, query: bytes, *, bytes_max: int) -> CopyText:
    """Run a COPY … TO STDOUT and take its rows, until there are `bytes_max` bytes of them.

    Raises:
        MillstreamError: PostgreSQL refused or failed; psycopg.Error if the connection broke.
    """
    with closing(copy_pieces(connection, query, piece_bytes=lambda: bytes_max)) as pieces:
        return next(pieces)


def copy_pieces(
    connection: Connection, query: bytes, *, piece_bytes: Callable[[], int]
) -> Generator[CopyText, None, None]:
    """Run a COPY … TO STDOUT and yield all of its rows, in pieces of about the size that `piece_bytes` returns then.

    The last piece, which may be empty, is `whole`. Closing the generator earlier cancels the command, and with it the
    connection's transaction. Raises as `copy_out`.
    """
    source_type = _BySocket if is_unencrypted(connection) else _ByLibpq
    with closing(source_type(connection.pgconn, query)) as source:
        while True:
            piece = source.next(piece_bytes())
            if piece.whole and source.failure is not None:
                raise source.failure
            try:
                yield piece
            except GeneratorExit:
                if not piece.whole:
                    connection.cancel_safe()
                    while not source.next(_READ_BYTES).whole:
                        continue
                raise
            if piece.whole:
                return


class _ByLibpq:
    """Rows one by one, for an encrypted connection."""

    def __init__(self, pgconn: pq.abc.PGconn, query: bytes) -> None:
        self.failure: MillstreamError | None = None
        """The error that ended the command, once a piece was `whole`."""
        self._pgconn = pgconn
        pgconn.send_query(query)
        result = next_result(pgconn)
        assert result is not None
        self._is_ended = result.status != pq.ExecStatus.COPY_OUT
        if self._is_ended:
            self._finish(result)

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def next(self, piece_bytes: int) -> CopyText:
        lines: list[bytes] = []
        size = 0
        while size < piece_bytes and not self._is_ended:
            count, data = self._pgconn.get_copy_data(1)
            if count > 0:
                lines.append(bytes(data)[:-1])
                size += count
            elif count < 0:
                self._is_ended = True
                self._finish(next_result(self._pgconn))
            else:
                wait_for(self._pgconn, select.POLLIN)
                self._pgconn.consume_input()
        return CopyText(as_messages(lines), len(lines), self._is_ended)

    def _finish(self, result: pq.abc.PGresult | None) -> None:
        """Read all results: the connection takes no other command before."""
        while result is not None:
            if result.status != pq.ExecStatus.COMMAND_OK and self.failure is None:
                self.failure = translate_result(result)
            result = next_result(self._pgconn)


class _BySocket:
    """Rows where the socket put them.

    libpq must be idle: it is asked nothing, and all bytes of the answer are taken before it is used again.
    """

    def __init__(self, pgconn: pq.abc.PGconn, query: bytes) -> None:
        self.failure: MillstreamError | None = None
        """The error that ended the command, once a piece was `whole`."""
        self._socket = socket.socket(fileno=os.dup(pgconn.socket))
        self._rest = b""
        """Bytes that were received behind the last piece."""
        self._is_ready = False
        """Whether the server takes another command."""
        self._got_little = False
        left = memoryview(b"Q%b%b\0" % ((len(query) + 5).to_bytes(4, "big"), query))
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)
            except OSError as error:
                raise SourceError(f"the connection broke: {error}", code="source_unreachable") from error

    def close(self) -> None:
        self._socket.close()

    def next(self, piece_bytes: int) -> CopyText:
        rest = self._rest
        buffer: Messages = np.empty(min(piece_bytes, _ROOM_MAX) + len(rest) + _READ_BYTES, np.uint8)
        buffer[: len(rest)] = np.frombuffer(rest, np.uint8)
        at, filled, rows = 0, len(rest), 0
        while True:
            at, kind, found, _ = machine.walk_rows(buffer, at, filled)
            rows += found
            head = buffer[at : min(filled, at + machine.HEAD_BYTES)].tobytes()
            length = 1 + int.from_bytes(head[1:], "big") if len(head) == machine.HEAD_BYTES else 0
            if kind == machine.MALFORMED:
                raise ProtocolViolation("a row of a COPY has an invalid length")
            if kind != machine.PARTIAL and at + length <= filled:
                # The rows before and behind it come together.
                self._take_other(chr(kind), buffer[at + machine.HEAD_BYTES : at + length].tobytes())
                buffer[at : filled - length] = buffer[at + length : filled].copy()
                filled -= length
            elif self._is_ready and at == filled:
                return CopyText(buffer[:at], rows, whole=True)
            elif at - machine.HEAD_BYTES * rows >= piece_bytes:
                self._rest = buffer[at:filled].tobytes()
                return CopyText(buffer[:at], rows, whole=False)
            else:
                if filled + _READ_SMALL_BYTES > len(buffer):
                    more: Messages = np.empty(2 * len(buffer) + length, np.uint8)
                    more[:filled] = buffer[:filled]
                    buffer = more
                filled += self._receive(buffer[filled : filled + _READ_BYTES].data)

    def _receive(self, room: memoryview) -> int:
        if self._got_little:
            time.sleep(_NAP_S)
        while True:
            try:
                count = self._socket.recv_into(room)
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            except OSError as error:
                raise SourceError(f"the connection broke during a COPY: {error}", code="source_unreachable") from error
            if not count:
                raise self.failure or SourceError("the connection was closed during a COPY", code="source_unreachable")
            self._got_little = count < _READ_SMALL_BYTES
            return count

    def _take_other(self, kind: str, body: bytes) -> None:
        """Note the end of the command, or its error; ignore COPY's own begin and end, notices and changed settings."""
        if kind == "Z":
            self._is_ready = True
        elif kind not in "HcC":
            try:
                pass_over(kind, body, what="a COPY")
            except SourceError as error:
                self.failure = self.failure or error

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        poll.poll(1000)
