"""A server's messages, read off its socket in large pieces and split by machine code.

For connections that aren't encrypted. libpq logs in, and sees none of the bytes after that.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from millstream.capture.connection import Connection, translate_fields
from millstream.capture.stream._drain import drain
from millstream.codec.pgoutput import MessageRun
from millstream.errors import ProtocolViolation, SourceError

KEEPALIVE: Final = ord("k")
"""The kind of a keepalive in a block; pgoutput has no message of that kind."""

_BUFFER_BYTES: Final = 1 << 20
_READ_BYTES: Final = 256 << 10
_READ_SMALL_BYTES: Final = 16 << 10
NAP_US: Final = 200
"""Nap after a small read: some seventy rows come in that time. A Unix socket holds some three hundred, which the
source sends in 0.8 ms."""
_ROOM_MIN: Final = 16 << 10
_SEND_S: Final = 30.0

Bytes8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Whole messages, in order; `kinds` has the first byte of each, `k` for a keepalive."""

    messages: MessageRun
    kinds: Bytes8
    resends_streamed: bool = False
    """Whether open streamed transactions are sent again from their beginning, or never go on."""

    def __len__(self) -> int:
        return len(self.kinds)

    def between(self, first: int, end: int) -> MessageRun:
        """Return messages `[first, end)`."""
        run = self.messages
        return MessageRun(run.buffer, run.starts[first:end], run.ends[first:end])


def is_unencrypted(connection: Connection) -> bool:
    """Return whether the connection's bytes can be read past libpq."""
    return not (connection.pgconn.ssl_in_use or connection.pgconn.used_gssapi)


class Frames:
    """The frames of one connection.

    Args:
        connection: connection whose socket to read; only this object reads it.
        split: one of the functions of `millstream.codec.pgoutput._framing`.
        frame_bytes_min: the smallest frame in which `split` finds a message.
        on_other: called with the kind and the body of each frame that isn't CopyData.
    """

    def __init__(
        self,
        connection: Connection,
        split: Callable[..., Any],
        *,
        frame_bytes_min: int,
        on_other: Callable[[str, bytes], None],
    ) -> None:
        self._split = split
        self._frame_bytes_min = frame_bytes_min
        self._on_other = on_other
        self._socket = socket.socket(fileno=os.dup(connection.pgconn.socket))
        self._socket.setblocking(False)
        self._filled = 0
        """Number of bytes received into the buffer …"""
        self._split_upto = 0
        """… and of those that were split into messages."""
        self._memory, self._writable, self._view = _new_buffer(_BUFFER_BYTES)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def read(self, gather_s: float = 0.0) -> Block | None:
        """Return the messages that have come, up to another kind of frame; None if none has come whole.

        Args:
            gather_s: how long it may go on reading while more comes. With 0 it never waits.

        Raises:
            MillstreamError: the connection broke, the bytes are malformed, or `on_other` raises it.
        """
        self._receive(int(gather_s * 1e6) // NAP_US)
        while True:
            capacity = (self._filled - self._split_upto) // self._frame_bytes_min + 1
            starts = np.empty(capacity, dtype=np.int64)
            ends = np.empty(capacity, dtype=np.int64)
            kinds = np.empty(capacity, dtype=np.uint8)
            found, at, why = self._split(self._view, self._split_upto, self._filled, starts, ends, kinds)
            self._split_upto = int(at)
            if found:  # the next call meets what stopped it
                return Block(MessageRun(self._view, starts[:found], ends[:found]), kinds[:found])
            if why == _MALFORMED:
                raise ProtocolViolation("the source sent a message of an unknown kind or length")
            if not why or not self._take_other():
                return None

    def send(self, data: bytes) -> None:
        """Send frames; raise `source_unreachable` if that fails."""
        deadline = time.monotonic() + _SEND_S
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SourceError(
                        "the source no longer reads from the connection", code="source_unreachable"
                    ) from None
                poll.poll(1000)
            except OSError as error:
                raise SourceError(f"the connection broke: {error}", code="source_unreachable") from error

    def close(self) -> None:
        """Close our side of the socket."""
        self._socket.close()

    def _receive(self, turns: int) -> None:
        """Receive what has come, up to a bound; with turns, also what comes during as many naps."""
        if len(self._memory) - self._filled < self._room_needed():
            self._renew(self._memory[self._split_upto : self._filled], self._size_needed())
        limit = min(len(self._memory), self._filled + _READ_BYTES)
        if turns:
            descriptor, before = self._socket.fileno(), self._filled
            filled = drain(descriptor, self._writable, before, limit, _READ_SMALL_BYTES, NAP_US, turns)
            self._filled = int(filled)
            if filled > before:
                return
        try:
            count = self._socket.recv_into(self._memory[self._filled : limit])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise SourceError(f"the connection broke: {error}", code="source_unreachable") from error
        if not count:
            raise SourceError("the connection was closed by the server", code="source_unreachable")
        self._filled += count

    def _room_needed(self) -> int:
        """Return the bytes that should be free before reading: for the rest of a partial message."""
        pending = self._filled - self._split_upto
        if pending < 5:
            return _ROOM_MIN
        (length,) = struct.unpack_from(">I", self._memory, self._split_upto + 1)
        return int(max(_ROOM_MIN, 1 + length - pending))

    def _size_needed(self) -> int:
        return max(_BUFFER_BYTES, self._filled - self._split_upto + self._room_needed())

    def _renew(self, left: bytes | memoryview, size: int) -> None:
        """Begin a new buffer with the rest of the old one; blocks keep the old one as long as they need it."""
        self._memory, self._writable, self._view = _new_buffer(size)
        self._memory[: len(left)] = left
        self._filled, self._split_upto = len(left), 0

    def _take_other(self) -> bool:
        """Hand on a frame that isn't CopyData; False if it isn't complete."""
        at = self._split_upto
        (length,) = struct.unpack_from(">I", self._memory, at + 1)
        if at + 1 + length > self._filled:
            return False
        self._split_upto = at + 1 + int(length)
        self._on_other(chr(self._view[at]), bytes(self._memory[at + 5 : at + 1 + length]))
        return True


_MALFORMED: Final = 2


def pass_over(kind: str, body: bytes, *, what: str) -> None:
    """Ignore a frame without meaning for us; raise the error that it holds, or one if it doesn't belong into `what`."""
    if kind == "E":
        fields = {part[:1]: part[1:].decode("utf-8", "replace") for part in body.split(b"\0") if part}
        raise translate_fields(fields.get(b"C"), fields.get(b"M", "the server ended the stream"))
    if kind not in "NSA":
        raise ProtocolViolation(f"unexpected message {kind!r} in {what}")


def _new_buffer(size: int) -> tuple[memoryview, Bytes8, Bytes8]:
    """Return memory to receive into, the same for machine code, and a read-only view of it."""
    memory = memoryview(bytearray(size))
    writable: Bytes8 = np.frombuffer(memory, dtype=np.uint8)
    view: Bytes8 = np.frombuffer(memory.toreadonly(), dtype=np.uint8)
    return memory, writable, view
