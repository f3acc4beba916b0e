"""The text of a COPY … TO STDOUT, taken from the connection in large pieces.

libpq returns rows one by one, which costs several times their reading. If the connection isn't encrypted, its socket
is read here instead, from the answer to COPY up to the last row. Each piece is looked at first (MSG_PEEK), and only
whole messages are taken. So libpq finds the end of the command, or an error, as if it had read nothing else.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import pq

from millstream.capture.connection import next_result, translate_result, wait_for
from millstream.capture.copying import _text_scan as machine
from millstream.errors import ProtocolViolation, SourceError

_PIECE_BYTES: Final = 256 << 10
_TEXT_BYTES: Final = 4 << 20
_DATA: Final = ord("d")
_SAY_NOTHING: Final = frozenset(b"HcNS")
"""Messages to ignore: COPY's own beginning and end, notices, settings that changed."""
_LIBPQS: Final = frozenset(b"EC")
"""Messages that end the command: libpq reads them."""

Connection = psycopg.Connection[tuple[Any, ...]]
Text = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class CopyText:
    """Rows as COPY writes them."""

    text: Text
    """Owned by the receiver; whole lines."""
    row_count: int
    whole: bool
    """Whether nothing follows; False: it stopped at the bound."""


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
    pgconn = connection.pgconn
    pgconn.send_query(query)
    while pgconn.flush():
        _wait(pgconn.socket, select.POLLOUT)
    encrypted = pgconn.ssl_in_use or pgconn.used_gssapi
    source: _ByLibpq | _BySocket = _ByLibpq(pgconn) if encrypted else _BySocket(pgconn)
    with closing(source):
        while True:
            piece = source.next(piece_bytes())
            if piece.whole:
                _finish(pgconn)
            try:
                yield piece
            except GeneratorExit:
                if not piece.whole:
                    connection.cancel_safe()
                    source.skip()
                    _finish(pgconn, cut_off=True)
                raise
            if piece.whole:
                return


def _finish(pgconn: pq.abc.PGconn, *, cut_off: bool = False) -> None:
    """Make libpq read the end of the command; the error of a command that was cut off is ignored."""
    failure = None
    while (result := next_result(pgconn)) is not None:
        if result.status != pq.ExecStatus.COMMAND_OK and not cut_off:
            failure = failure or translate_result(result)
    if failure is not None:
        raise failure


class _ByLibpq:
    """Rows one by one, for an encrypted connection."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        self._pgconn = pgconn
        result = next_result(pgconn)
        assert result is not None
        if result.status != pq.ExecStatus.COPY_OUT:
            while next_result(pgconn) is not None:
                continue  # the connection takes no other command before
            raise translate_result(result)

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def next(self, piece_bytes: int) -> CopyText:
        parts: list[Any] = []
        append, get = parts.append, self._pgconn.get_copy_data
        size = 0
        whole = False
        while size < piece_bytes:
            count, data = get(1)
            if not count:
                self._await_more()
                continue
            if count < 0:
                whole = True
                break
            append(data)
            size += count
        return CopyText(np.frombuffer(bytearray(b"".join(parts)), np.uint8), len(parts), whole)

    def skip(self) -> None:
        while (count := self._pgconn.get_copy_data(1)[0]) >= 0:
            if not count:
                self._await_more()

    def _await_more(self) -> None:
        wait_for(self._pgconn, select.POLLIN)
        self._pgconn.consume_input()


class _BySocket:
    """Rows read from the socket."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        self._peer = socket.socket(fileno=os.dup(pgconn.socket))
        self._pieces = _Pieces(self._peer)
        self._size = _TEXT_BYTES

    def close(self) -> None:
        self._peer.close()

    def next(self, piece_bytes: int) -> CopyText:
        pieces = self._pieces
        text: Text = np.empty(self._size, np.uint8)
        end = rows = 0
        while True:
            at, kind, end, found = machine.take_rows(pieces.look(), pieces.filled, text, end)
            rows += found
            pieces.take(at, kind)
            if kind in _LIBPQS:
                return CopyText(text[:end], rows, whole=True)
            if end >= piece_bytes:
                self._size = min(len(text), piece_bytes + _TEXT_BYTES)
                return CopyText(text[:end], rows, whole=False)
            if kind == machine.NO_ROOM:
                text = _enlarged(text, pieces.next_length())

    def skip(self) -> None:
        self._pieces.skip_rows()


class _Pieces:
    """The server's messages, peeked at before they are taken.

    Messages with rows may be taken in part, others never are.
    """

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._renew(_PIECE_BYTES, memoryview(b""))
        self._owned = 0
        """Number of bytes at the front that are off the socket already: the beginning of a message with a row."""
        self.filled = 0
        """Number of bytes peeked at."""

    def _renew(self, size: int, left: memoryview) -> None:
        data = bytearray(size)
        data[: len(left)] = left
        self._memory = memoryview(data)
        self._view: Text = np.frombuffer(data, np.uint8)

    def look(self) -> Text:
        """Return everything that has come, after the owned bytes; wait if nothing has."""
        while True:
            try:
                count = self._peer.recv_into(self._memory[self._owned :], 0, socket.MSG_PEEK)
            except BlockingIOError:
                _wait(self._peer.fileno(), select.POLLIN)
                continue
            except OSError as error:
                raise SourceError(f"the connection broke during a COPY: {error}", code="source_unreachable") from error
            if not count:
                raise SourceError("the connection was closed during a COPY", code="source_unreachable")
            self.filled = self._owned + count
            return self._view

    def take(self, upto: int, kind: int) -> None:
        """Take everything before `upto`, where a message of that kind begins; take a message to be ignored as well."""
        if kind == machine.PARTIAL and upto < self.filled and self._memory[upto] == _DATA:
            self._receive(self.filled - self._owned)
            left = bytes(self._memory[upto : self.filled])
            size = 5 + int.from_bytes(left[1:5], "big") if len(left) >= 5 else 0
            if size + _PIECE_BYTES // 2 > len(self._memory):
                self._renew(size + _PIECE_BYTES, memoryview(left))
            else:
                self._memory[: len(left)] = left
            self._owned = len(left)
        elif kind in _LIBPQS or kind in {machine.NO_ROOM, machine.PARTIAL}:
            if upto >= self._owned:  # otherwise the owned bytes have no room
                self._receive(upto - self._owned)
                self._owned = 0
        elif kind in _SAY_NOTHING:
            self._receive(upto - self._owned)
            self._owned = 0
            self._skip_message()
        elif kind == machine.MALFORMED:
            raise ProtocolViolation("a row of a COPY has an invalid length")
        else:
            raise ProtocolViolation(f"unexpected message {chr(kind)!r} in a COPY")

    def next_length(self) -> int:
        """Return the length of the message that begins here, which has been peeked at."""
        self.look()
        return int.from_bytes(self._memory[1:5], "big")

    def skip_rows(self) -> None:
        """Take everything up to the message that ends the command."""
        nowhere = np.empty(len(self._memory), np.uint8)
        kind = machine.PARTIAL
        while kind not in _LIBPQS:
            view = self.look()
            nowhere = nowhere if len(nowhere) >= len(view) else np.empty(len(view), np.uint8)
            at, kind, _, _ = machine.take_rows(view, self.filled, nowhere, 0)
            self.take(at, kind)

    def _receive(self, count: int) -> None:
        """Take bytes off the socket that were peeked at."""
        assert count >= 0, "what was owned was taken before"
        at = self._owned
        while count:
            taken = self._peer.recv_into(self._memory[at:], count)
            at, count = at + taken, count - taken

    def _skip_message(self) -> None:
        length = 4
        while length > 0:
            self.look()
            if length == 4 and self.filled >= 5:
                length = 1 + int.from_bytes(self._memory[1:5], "big")
                while length:
                    self.look()
                    taken = min(length, self.filled)
                    self._receive(taken)
                    length -= taken
            elif self.filled < 5:
                time.sleep(0.001)  # a part of its header has come; poll would return at once because of it


def _enlarged(text: Text, more: int) -> Text:
    larger = np.empty(max(2 * len(text), len(text) + more), np.uint8)
    larger[: len(text)] = text
    return larger


def _wait(descriptor: int, event: int) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    poll.poll(1000)
