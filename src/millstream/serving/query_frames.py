"""The messages between a server and the processes that run its queries: pickled requests one way, frames the other.

A frame is a byte for its kind, a little-endian u32 length, and so many bytes. Nothing that comes from such a process is unpickled: it runs what others send.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import IO, TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from millstream.home.home import Home

_HEAD: Final = struct.Struct("<BI")


class Frame(IntEnum):
    """A frame's kind."""

    TAKEN = 0
    """The request has come; an answer follows."""
    PART = 1
    """Bytes of the answer."""
    ERROR = 2
    """An error as JSON, in place of the rest."""
    READY = 3
    """Nothing more comes; the worker waits for the next request."""
    LEAVES = 4
    """Nothing more comes, and the worker ends."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The settings that a worker gets when it begins."""

    home: Home
    memory_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class QueryRequest:
    """One query."""

    stream: str
    sql: str
    as_of: str | None
    in_pieces: bool
    time_s: float
    """Time left until its answer has to be whole."""
    folder: str
    """For what it puts aside; the server takes it away."""


def write_frame(out: BinaryIO, kind: Frame, body: bytes = b"") -> None:
    """Write a frame to an unbuffered file, waiting until it is taken."""
    rest = memoryview(_HEAD.pack(kind, len(body)) + body)
    while rest:
        rest = rest[out.write(rest) :]


def read_frame(source: IO[bytes]) -> tuple[int, bytes] | None:
    """The next frame of a buffered file: kind and body. None where the file ends first."""
    head = source.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, length = _HEAD.unpack(head)
    body = source.read(length)
    return (kind, body) if len(body) == length else None
