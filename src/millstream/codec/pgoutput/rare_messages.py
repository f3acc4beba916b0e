"""A parser of the pgoutput messages that Python reads (protocol version 2, text values), each to one value.

Layouts: PostgreSQL's manual, "Logical Replication Message Formats". The parser trusts nothing: for
any bytes, it returns a message or raises `ProtocolViolation`. Inside a streamed block (between
StreamStart and StreamStop) every message except Origin carries the id of its (sub)transaction right
after its type byte: pass `streamed=True` there.

Machine code reads all others, in whole runs of transactions (`transaction_decoder`, `_row_messages`). The tests have a
parser of all kinds (`tests/codec/reference_messages.py`).

Times are microseconds since 1970-01-01 UTC (the protocol counts from 2000).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from millstream.errors import ProtocolViolation
from millstream.model.names import qualified_name
from millstream.model.pgtypes import builtin_name
from millstream.model.positions import Lsn, format_lsn
from millstream.model.records import TIME_MAX_US, TIME_MIN_US
from millstream.model.schema import ReplicaIdentity

POSTGRES_EPOCH_US: Final = 946_684_800_000_000
"""2000-01-01 UTC in microseconds since 1970."""
LSN_MAX: Final = 2**63 - 2
"""Maximum LSN: positions, and the position behind each, are int64 in the log."""


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column of a Relation message. `type_name` is filled in from Type messages and the built-in list."""

    name: str
    type_oid: int
    type_modifier: int
    in_identity: bool
    type_name: str = "?"


@dataclass(frozen=True, slots=True)
class Relation:
    """The form of the rows that follow. `encoded` is the message itself, without a streamed one's xid."""

    oid: int
    namespace: str
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[RelationColumn, ...]
    encoded: bytes
    xid: int | None = None

    @property
    def qualified_name(self) -> str:
        """`schema.name`, quoted as PostgreSQL quotes it."""
        return qualified_name(self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class Type:
    """The name of a type that isn't built in; for a domain the name of its base type (without its modifier)."""

    oid: int
    namespace: str
    name: str
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message that `pg_logical_emit_message` sent."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """The commit of a streamed transaction."""

    xid: int
    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts_us: int


Message = Relation | Type | LogicalMessage | StreamCommit


class _MessageCursor:
    """A cursor over one message; every step checks that the bytes are there."""

    __slots__ = ("data", "position")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if count < 0 or end > len(self.data):
            raise ProtocolViolation(f"a message of {len(self.data)} bytes ends too early")
        found = self.data[self.position : end]
        self.position = end
        return found

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def u8(self) -> int:
        return self.take(1)[0]

    def u16(self) -> int:
        return self.unpack(_U16)[0]

    def u32(self) -> int:
        return self.unpack(_U32)[0]

    def text(self, errors: str = "strict") -> str:
        end = self.data.find(b"\0", self.position)
        if end < 0:
            raise ProtocolViolation("a text in a message has no end")
        found = self.data[self.position : end]
        self.position = end + 1
        try:
            return found.decode(errors=errors)
        except UnicodeDecodeError as error:
            raise ProtocolViolation("a name in a message isn't UTF-8") from error

    def finish(self) -> None:
        if self.position != len(self.data):
            raise ProtocolViolation(f"{len(self.data) - self.position} bytes stand behind the end of a message")


_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_COLUMN: Final = struct.Struct(">Ii")
_STREAM_COMMIT: Final = struct.Struct(">IBQQq")


def parse_message(data: bytes, *, streamed: bool = False) -> Message:
    """Parse the message that `data` holds, from its first byte to its last.

    Raises:
        ProtocolViolation: the bytes are no message of these kinds.
    """
    reader = _MessageCursor(data)
    kind = reader.u8()
    message: Message
    if kind in _PARSERS:
        message = _PARSERS[kind](reader, reader.u32() if streamed else None)
    elif kind == ord("c"):
        message = _stream_commit(reader)
    else:
        raise ProtocolViolation(f"a message of the kind {chr(kind)!r} came where none can", kind=chr(kind))
    reader.finish()
    return message


def _position(lsn: int) -> Lsn:
    """Check that an LSN fits into the log's 63 bits, with room for the byte behind it."""
    if lsn > LSN_MAX:
        raise ProtocolViolation(f"no source gets as far as {format_lsn(Lsn(lsn))}")
    return Lsn(lsn)


def _moment(time: int) -> int:
    """Return a time of the protocol as time since 1970, checked to lie in the years 1 to 9999."""
    if not TIME_MIN_US <= time + POSTGRES_EPOCH_US <= TIME_MAX_US:
        raise ProtocolViolation(f"no source's clock shows {time} µs since 2000")
    return time + POSTGRES_EPOCH_US


def _relation(reader: _MessageCursor, xid: int | None) -> Relation:
    body = reader.data[reader.position :]
    oid = reader.u32()
    namespace = reader.text() or "pg_catalog"
    name = reader.text()
    letter = chr(reader.u8())
    try:
        identity = ReplicaIdentity(letter)
    except ValueError as error:
        raise ProtocolViolation(f"unknown replica identity {letter!r} of {namespace}.{name}") from error
    columns = []
    for _ in range(reader.u16()):
        flags = reader.u8()
        column = reader.text()
        type_oid, modifier = reader.unpack(_COLUMN)
        columns.append(RelationColumn(column, type_oid, modifier, bool(flags & 1), builtin_name(type_oid) or "?"))
    if len({column.name for column in columns}) != len(columns):
        raise ProtocolViolation(f"two columns of {namespace}.{name} have one name")
    return Relation(oid, namespace, name, identity, tuple(columns), b"R" + body, xid)


def _type(reader: _MessageCursor, xid: int | None) -> Type:
    oid = reader.u32()
    namespace = reader.text() or "pg_catalog"
    return Type(oid, namespace, reader.text(), xid)


def _logical_message(reader: _MessageCursor, xid: int | None) -> LogicalMessage:
    flags = reader.u8()
    lsn = _position(int.from_bytes(reader.take(8), "big"))
    prefix = reader.text()
    return LogicalMessage(bool(flags & 1), lsn, prefix, reader.take(reader.u32()), xid)


def _stream_commit(reader: _MessageCursor) -> StreamCommit:
    own, flags, lsn, end, time = reader.unpack(_STREAM_COMMIT)
    return StreamCommit(own, flags, _position(lsn), _position(end), _moment(time))


_PARSERS: Final[dict[int, Callable[[_MessageCursor, int | None], Message]]] = {
    ord("R"): _relation,
    ord("Y"): _type,
    ord("M"): _logical_message,
}
