"""The messages between a server and its query processes: pickled requests in one direction, frames in the other.

A frame is a byte for its kind, a little-endian u32 length, and that many bytes. Data from such a process
is never unpickled: it runs other users' code.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import IO, TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from millstream.home.home import Home

POSITION_HEADER: Final = "Millstream-Token"
"""The header of an answer to a query that has its token."""
_HEAD: Final = struct.Struct("<BI")


class Frame(IntEnum):
    """A frame's kind."""

    TAKEN = 0
    """The request has arrived; an answer follows."""
    PART = 1
    """Bytes of the answer."""
    ERROR = 2
    """An error as JSON, instead of the rest."""
    READY = 3
    """Nothing more comes; the worker waits for the next request."""
    LEAVES = 4
    """Nothing more comes, and the worker ends."""
    REGIONS = 5
    """The regions of merged rows, as JSON, before the answer's first bytes."""
    REASONS = 6
    """The reasons why rows may be missing, as JSON, before the answer's first bytes."""
    TOKEN = 7
    """The token of the answer, before its first bytes."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The settings that a worker gets at its start."""

    home: Home
    memory_bytes: int
    spill_bytes: int


@dataclass(frozen=True, slots=True)
class QueryRequest:
    """One query."""

    stream: str
    sql: str
    as_of: str | None
    lake_only: bool
    in_pieces: bool
    time_s: float
    """Seconds left until its answer has to be whole."""
    folder: str
    """Folder for its spill files; the server removes it."""


def write_frame(out: BinaryIO, kind: Frame, body: bytes = b"") -> None:
    """Write a frame to an unbuffered file; blocks until it is accepted."""
    rest = memoryview(_HEAD.pack(kind, len(body)) + body)
    while rest:
        rest = rest[out.write(rest) :]


def read_frame(source: IO[bytes]) -> tuple[int, bytes] | None:
    """Return the next frame of a buffered file: kind and body. None if the file ends first."""
    head = source.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, length = _HEAD.unpack(head)
    body = source.read(length)
    return (kind, body) if len(body) == length else None
