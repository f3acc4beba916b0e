"""Frames of an Arrow Flight exchange between a leader and a follower, used by both ends, around `codec.replication_messages`.

A message's metadata begins with a byte for its kind. A shipment's bytes are the bodies of record
batches with one column of bytes, which gRPC sends without a copy. The metadata of each has the size
of the whole shipment, and the last one's marks the end. All other messages are metadata alone.

| from | byte | after it |
| --- | --- | --- |
| leader | `W` | nothing: the follower is welcome |
| leader | `S`, `E` | the size of the whole shipment in bytes (`<Q`); `E` with the last piece |
| leader | `R` | an error: why the follower gets nothing more |
| follower | `A` | an acknowledgement, a hello, or the error with which it stops |
| follower | `T` | the number of bytes of shipments that it has taken since the start (`<Q`) |
| both | `.` | nothing: a heartbeat |
| both | `Q` | nothing: the link is closed |
"""

from __future__ import annotations

import contextlib
import functools
import json
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.flight as fl

from millstream.codec.checksums import Bytes
from millstream.codec.replication_messages import decode_message, encode_message
from millstream.errors import (
    AccessError,
    LinkLost,
    MillstreamError,
    ShipmentUnreadable,
    Unauthenticated,
    UsageError,
    error_of,
)
from millstream.model.replication import Hello

WELCOME: Final = b"W"
PIECE: Final = b"S"
LAST_PIECE: Final = b"E"
REFUSAL: Final = b"R"
MESSAGE: Final = b"A"
TAKEN: Final = b"T"
BEAT: Final = b"."
QUIT: Final = b"Q"

COUNT: Final = struct.Struct("<Q")
SCHEMA: Final = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
SILENT_S: Final = 10.0
"""Seconds of silence after which the other end counts as gone: longer than a healthy process
pauses, shorter than people wait.
"""
BEATS_IN_SILENCE: Final = 4
"""Number of heartbeats in that time."""
CLOSES_WITHIN_S: Final = 2.0
"""Seconds that the other end has for its part in closing; then the connection is cut."""
_PIECE_BYTES: Final = 8 << 20
"""Bytes of one message: gRPC copies what it receives into one buffer, which shouldn't hold a whole large shipment."""
_JOINED_BYTES: Final = 256 << 10
"""Size in bytes below which a shipment's buffers are joined into one message: a message costs more than the copy."""
_COMMAND: Final = b"millstream-follow\x00"
_HEAD: Final = struct.Struct("<I")

FLIGHT_FAILURES: Final = (fl.FlightError, pa.ArrowException, OSError)


@dataclass(frozen=True, slots=True)
class FollowRequest:
    """The command of an exchange's descriptor."""

    stream: str
    """Name of the stream."""
    window_bytes: int
    """Bytes that the follower has room for and hasn't taken."""
    hello: Hello

    def command(self) -> bytes:
        """Encode the command."""
        head = json.dumps({"stream": self.stream, "window_bytes": self.window_bytes}).encode()
        return _COMMAND + _HEAD.pack(len(head)) + head + b"".join(encode_message(self.hello))

    @classmethod
    def parse(cls, command: bytes | None) -> Self:
        """Parse the command; None for a descriptor without a command.

        Raises `UsageError` if an exchange asks for something else, `ShipmentUnreadable` if the
        bytes are damaged.
        """
        if command is None or not command.startswith(_COMMAND):
            raise UsageError(
                "an exchange over Flight is how another node follows a stream, and this one asks for something else",
                hint="Append by DoPut, and read by DoGet.",
            )
        rest = memoryview(command)[len(_COMMAND) :]
        try:
            (length,) = _HEAD.unpack_from(rest)
            head = json.loads(bytes(rest[_HEAD.size : _HEAD.size + length]))
            stream, window_bytes = str(head["stream"]), int(head["window_bytes"])
        except (struct.error, ValueError, OverflowError, KeyError, TypeError, RecursionError) as error:
            raise ShipmentUnreadable(f"a follower's first message can't be read: {error}") from error
        hello = decode_message(rest[_HEAD.size + length :])
        if not isinstance(hello, Hello) or window_bytes < 1:
            raise ShipmentUnreadable("a follower's first message is no hello")
        return cls(stream, window_bytes, hello)


class Sending:
    """The outward half of an exchange. Each message is written whole, and none after `shut` has returned.

    Concurrency: any number of threads.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._is_shut = False
        self._said_s = time.monotonic()

    def say(self, kind: bytes, behind: bytes = b"") -> None:
        """Send a message without a body. Raises `LinkLost`."""
        self._write(lambda: self._writer.write_metadata(pa.py_buffer(kind + behind)))

    def ship(self, buffers: Sequence[Bytes], size: int) -> None:
        """Send a shipment's bytes; waits while the connection takes no more. Raises `LinkLost`."""
        pieces = [b"".join(buffers)] if size <= _JOINED_BYTES else _pieces(buffers)
        for number, piece in enumerate(pieces, 1):
            column = pa.Array.from_buffers(pa.uint8(), len(piece), [None, pa.py_buffer(piece)])
            batch = pa.RecordBatch.from_arrays([column], schema=SCHEMA)
            metadata = (LAST_PIECE if number == len(pieces) else PIECE) + COUNT.pack(size)
            self._write(functools.partial(self._writer.write_with_metadata, batch, metadata))

    def beat(self, every_s: float) -> None:
        """Send a heartbeat if nothing else was sent for that long. Raises `LinkLost`."""
        if time.monotonic() - self._said_s >= every_s:
            self.say(BEAT)

    def shut(self) -> None:
        """Wait for the message that is being written; nothing is written after that."""
        with self._lock:
            self._is_shut = True

    def end(self) -> None:
        """Send the last message.

        A client doesn't also close its writing side: pyarrow does that once the call has ended, and
        gRPC aborts the process if two threads both do it.
        """
        with contextlib.suppress(LinkLost):
            self.say(QUIT)
        self.shut()

    def _write(self, write: Callable[[], None]) -> None:
        with self._lock:
            if self._is_shut:
                raise LinkLost("the link was closed")
            try:
                write()
            except FLIGHT_FAILURES as error:
                self._is_shut = True
                raise LinkLost(f"the connection broke: {_said(error)}") from error
            self._said_s = time.monotonic()


def _pieces(buffers: Sequence[Bytes]) -> list[memoryview]:
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    return [view[at : at + _PIECE_BYTES] for view in views for at in range(0, len(view), _PIECE_BYTES)]


def error_of_flight(error: Exception) -> MillstreamError:
    """Return this project's error: the one that the other end sent, else the meaning of the connection's end."""
    extra = getattr(error, "extra_info", b"")
    if extra:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return error_of(json.loads(extra))
    said = _said(error)
    if isinstance(error, fl.FlightUnauthenticatedError):
        return Unauthenticated(f"the leader doesn't know who this is: {said}")
    if isinstance(error, fl.FlightUnauthorizedError):
        return AccessError(
            f"the leader refuses: {said}", code="forbidden", hint="Use a token with the right to admin the stream."
        )
    return LinkLost(f"the connection broke: {said}")


def _said(error: Exception) -> str:
    return str(error).split(". gRPC client debug context")[0] or type(error).__name__
