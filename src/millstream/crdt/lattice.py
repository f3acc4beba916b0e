"""The shape that every kind of merging state has, and how its bytes are framed.

    magic "MC" | kind u8 | version u8 | body | CRC32C of all before it, u32

Numbers are big-endian. A state has one encoding: equal states have equal bytes, and bytes that no state has are refused. The layouts of
the bodies stand with their kinds; `docs/internals/FORMAT.md` has them all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, Protocol, TypeVar

import google_crc32c

from millstream.errors import MergeStateUnreadable

VERSION: Final = 1
_MAGIC: Final = b"MC"
_HEAD: Final = struct.Struct(">2sBB")
_CRC: Final = struct.Struct(">I")
_CHECKED_BYTES: Final = 1 << 20


class Kind(IntEnum):
    """What a state is, in its bytes."""

    GROW_COUNTER = 1
    PN_COUNTER = 2
    REGISTER = 3
    UNION_SET = 4
    OBSERVED_SET = 5
    SIGNAL = 6
    HIDE = 7
    TABLE = 8


S = TypeVar("S")
V_co = TypeVar("V_co", covariant=True)


class Lattice(Protocol[S, V_co]):
    """One kind of state. Pure: any number of callers."""

    def empty(self) -> S:
        """The state of who has heard nothing: joined with any other it gives that other."""
        ...

    def join(self, a: S, b: S) -> S:
        """The least state that holds what both hold: commutative, associative, idempotent."""
        ...

    def encode(self, state: S) -> bytes:
        """Its canonical bytes."""
        ...

    def decode(self, data: bytes) -> S:
        """The state of its bytes; `MergeStateUnreadable` where they are no state's."""
        ...

    def value(self, state: S) -> V_co:
        """What readers see."""
        ...


def seal(kind: Kind, body: bytes) -> bytes:
    """A body in its frame."""
    framed = _HEAD.pack(_MAGIC, kind, VERSION) + body
    return framed + _CRC.pack(google_crc32c.value(framed))


class Sealing:
    """A frame that is written piece by piece: bytes as `seal` gives them, and never all of them at once.

    Args:
        kind: what it holds.
        write: takes the bytes.
    """

    def __init__(self, kind: Kind, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._crc = 0
        self.closed = False
        """As files have it: Arrow writes into it as into one."""
        self.write(_HEAD.pack(_MAGIC, kind, VERSION))

    def write(self, data: bytes) -> int:
        """More of the body."""
        data = bytes(data)
        self._crc = google_crc32c.extend(self._crc, data)
        self._write(data)
        return len(data)

    def flush(self) -> None:
        """As files have it."""

    def end(self) -> None:
        """The body is whole."""
        self._write(_CRC.pack(self._crc))


def opened(kind: Kind, data: bytes | memoryview) -> memoryview:
    """The body that `seal` framed, where it lies. `MergeStateUnreadable` where it is damaged, another kind's, or of another version."""
    if len(data) < _HEAD.size + _CRC.size:
        raise MergeStateUnreadable(f"{len(data)} bytes are no state: the shortest has {_HEAD.size + _CRC.size}")
    magic, found, version = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise MergeStateUnreadable("these bytes don't begin as a state does")
    framed = memoryview(data)[: -_CRC.size]
    crc = 0
    # It takes bytes alone, of which there is to be no second copy of everything.
    for start in range(0, len(framed), _CHECKED_BYTES):
        crc = google_crc32c.extend(crc, bytes(framed[start : start + _CHECKED_BYTES]))
    if _CRC.unpack_from(data, len(framed))[0] != crc:
        raise MergeStateUnreadable("the bytes of a state fail their checksum")
    if version != VERSION:
        raise MergeStateUnreadable(f"a state of version {version}; this Millstream knows {VERSION}", version=version)
    if found != kind:
        raise MergeStateUnreadable(f"a state of kind {found}, where {kind.name.lower()} ({int(kind)}) was expected")
    return framed[_HEAD.size :]


def decoded(kind: Kind, data: bytes, parse: Callable[[bytes], S], encode: Callable[[S], bytes]) -> S:
    """A state by its parser, which may raise whatever wrong bytes make it raise; only canonical bytes are taken."""
    body = bytes(opened(kind, data))
    try:
        state = parse(body)
        canonical = encode(state)
    except MergeStateUnreadable:
        raise
    except (ValueError, IndexError, ArithmeticError, struct.error, TypeError, RecursionError) as error:
        raise MergeStateUnreadable(f"the bytes of a state make no sense: {error}") from error
    if canonical != data:
        raise MergeStateUnreadable("the bytes of a state aren't as a state's are written")
    return state
