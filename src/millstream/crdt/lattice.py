"""The protocol of every kind of merging state, and the frame of its bytes.

    magic "MC" | kind u8 | version u8 | body | CRC32C of everything before it, u32

Numbers are big-endian. A state has one encoding: equal states have equal bytes, and bytes of no state are rejected.
The module of each kind has the layout of its body; `docs/internals/FORMAT.md` has them all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, Protocol, Self, TypeVar

import google_crc32c

from millstream.crdt.scalars import Cursor
from millstream.errors import MergeStateUnreadable

VERSION: Final = 1
_MAGIC: Final = b"MC"
_HEAD: Final = struct.Struct(">2sBB")
_CRC: Final = struct.Struct(">I")
_CHECKED_BYTES: Final = 1 << 20


class StateKind(IntEnum):
    """The kind of a state, in its bytes."""

    GROW_COUNTER = 1
    PN_COUNTER = 2
    REGISTER = 3
    UNION_SET = 4
    OBSERVED_SET = 5
    SIGNAL = 6
    HIDE = 7
    TABLE = 8


class Lattice(Protocol):
    """A merging state. Immutable, and pure: any number of callers."""

    def join(self, other: Self, /) -> Self:
        """Return the least state that holds what both hold: commutative, associative, idempotent."""
        ...

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        ...

    @classmethod
    def decode(cls, data: bytes, /) -> Self:
        """Return the state of its bytes; raise `MergeStateUnreadable` if no state has them."""
        ...


L = TypeVar("L", bound=Lattice)


def seal(kind: StateKind, body: bytes) -> bytes:
    """Return a body in its frame."""
    framed = _HEAD.pack(_MAGIC, kind, VERSION) + body
    return framed + _CRC.pack(google_crc32c.value(framed))


class Sealing:
    """A frame written piece by piece: the same bytes as `seal`, but never all of them at once."""

    def __init__(self, kind: StateKind, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._crc = 0
        self.closed = False
        """As on a file: Arrow writes into this object as into a file."""
        self.write(_HEAD.pack(_MAGIC, kind, VERSION))

    def write(self, data: bytes) -> int:
        """Write more of the body."""
        data = bytes(data)
        self._crc = google_crc32c.extend(self._crc, data)
        self._write(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing; files have this method."""

    def end(self) -> None:
        """End the frame: the body is whole."""
        self._write(_CRC.pack(self._crc))


def opened(kind: StateKind, data: bytes | memoryview) -> memoryview:
    """Return the body that `seal` framed, without a copy.

    `MergeStateUnreadable` if it is damaged, or of another kind or version.
    """
    if len(data) < _HEAD.size + _CRC.size:
        raise MergeStateUnreadable(f"{len(data)} bytes are no state: the shortest has {_HEAD.size + _CRC.size}")
    magic, found, version = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise MergeStateUnreadable("these bytes don't begin as a state does")
    framed = memoryview(data)[: -_CRC.size]
    crc = 0
    # The library takes `bytes` only: copy a part at a time, never everything.
    for start in range(0, len(framed), _CHECKED_BYTES):
        crc = google_crc32c.extend(crc, bytes(framed[start : start + _CHECKED_BYTES]))
    if _CRC.unpack_from(data, len(framed))[0] != crc:
        raise MergeStateUnreadable("the bytes of a state fail their checksum")
    if version != VERSION:
        raise MergeStateUnreadable(f"a state of version {version}; this Millstream reads {VERSION}", version=version)
    if found != kind:
        raise MergeStateUnreadable(f"a state of kind {found}, where {kind.name.lower()} ({int(kind)}) was expected")
    return framed[_HEAD.size :]


def decoded(kind: StateKind, data: bytes, parse: Callable[[Cursor], L]) -> L:
    """Return a state by its parser, which may raise any exception on wrong bytes; only canonical bytes are accepted."""
    cursor = Cursor(bytes(opened(kind, data)))
    try:
        state = parse(cursor)
        cursor.end()
        canonical = state.encode()
    except MergeStateUnreadable:
        raise
    except (ValueError, IndexError, ArithmeticError, struct.error, TypeError, RecursionError) as error:
        raise MergeStateUnreadable(f"the bytes of a state make no sense: {error}") from error
    if canonical != data:
        raise MergeStateUnreadable("the bytes aren't the canonical encoding of the state")
    return state
