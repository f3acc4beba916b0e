"""A parser of one pgoutput message (protocol version 2, text values) to one value.

Layouts: PostgreSQL's manual, "Logical Replication Message Formats". The parser trusts nothing: for
any bytes, it returns a message or raises `ProtocolViolation`. Inside a streamed block (between
StreamStart and StreamStop) every message except Origin carries the id of its (sub)transaction right
after its type byte: pass `streamed=True` there.

Whole runs of transactions are decoded in machine code by `transaction_decoder`. Its `_message_scan` reads the bytes of
all messages but Relation and Type; a change of a layout belongs there, too.

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


class Unchanged:
    """The type of `UNCHANGED`, which stands for a TOAST value that the source didn't send because it didn't change."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged()

Value = bytes | None | Unchanged
"""A column's text (in UTF-8), SQL's NULL, or an unchanged TOAST value."""
Row = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """The start of a transaction. `commit_lsn` is where its commit record starts."""

    commit_lsn: Lsn
    commit_ts_us: int
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a transaction. `end_lsn` is where its commit record ends, to which a slot is confirmed."""

    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts_us: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The transaction came to the source from another server."""

    commit_lsn: Lsn
    name: str


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
class Insert:
    """An inserted row."""

    relation_oid: int
    row: Row
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """An updated row. At most one of `old_key` and `old_row` is set; `old_key` has nulls outside of the key."""

    relation_oid: int
    row: Row
    old_key: Row | None = None
    old_row: Row | None = None
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """A deleted row. Exactly one of `old_key` and `old_row` is set."""

    relation_oid: int
    old_key: Row | None = None
    old_row: Row | None = None
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables truncated together."""

    relation_oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool
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
class StreamStart:
    """The start of a block of a transaction that is still open; `first` marks the transaction's first block."""

    xid: int
    first: bool


@dataclass(frozen=True, slots=True)
class StreamStop:
    """The end of a block."""


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """The commit of a streamed transaction."""

    xid: int
    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_ts_us: int


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """The rollback of a streamed transaction (`subxid == xid`), or of one subtransaction of it."""

    xid: int
    subxid: int


Message = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Insert
    | Update
    | Delete
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
)


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
_BEGIN: Final = struct.Struct(">QqI")
_COMMIT: Final = struct.Struct(">BQQq")
_COLUMN: Final = struct.Struct(">Ii")
_STREAM_COMMIT: Final = struct.Struct(">IBQQq")


def parse_message(data: bytes, *, streamed: bool = False) -> Message:
    """Parse the message that `data` holds, from its first byte to its last.

    Raises:
        ProtocolViolation: the bytes are no message of this protocol version.
    """
    reader = _MessageCursor(data)
    kind = reader.u8()
    message: Message
    if kind in _CHANGE_PARSERS:
        message = _CHANGE_PARSERS[kind](reader, reader.u32() if streamed else None)
    elif kind in _PARSERS:
        message = _PARSERS[kind](reader)
    elif kind == ord("E"):
        message = StreamStop()
    else:
        raise ProtocolViolation(f"a message of unknown kind {chr(kind)!r}", kind=chr(kind))
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


def _begin(reader: _MessageCursor) -> Begin:
    lsn, time, own = reader.unpack(_BEGIN)
    return Begin(_position(lsn), _moment(time), own)


def _commit(reader: _MessageCursor) -> Commit:
    flags, lsn, end, time = reader.unpack(_COMMIT)
    return Commit(flags, _position(lsn), _position(end), _moment(time))


def _origin(reader: _MessageCursor) -> Origin:
    lsn = Lsn(int.from_bytes(reader.take(8), "big"))
    return Origin(lsn, reader.text("replace"))  # a name for people, in its own server's encoding


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
        raise ProtocolViolation(f"two columns of {namespace}.{name} bear one name")
    return Relation(oid, namespace, name, identity, tuple(columns), b"R" + body, xid)


def _type(reader: _MessageCursor, xid: int | None) -> Type:
    oid = reader.u32()
    namespace = reader.text() or "pg_catalog"
    return Type(oid, namespace, reader.text(), xid)


def _row(reader: _MessageCursor) -> Row:
    values: list[Value] = []
    for _ in range(reader.u16()):
        kind = reader.u8()
        if kind == _TEXT:
            values.append(reader.take(reader.u32()))
        elif kind == _NULL:
            values.append(None)
        elif kind == _UNCHANGED:
            values.append(UNCHANGED)
        else:
            raise ProtocolViolation(f"a value of unknown kind {chr(kind)!r}", kind=chr(kind))
    return tuple(values)


def _insert(reader: _MessageCursor, xid: int | None) -> Insert:
    oid = reader.u32()
    _expect(reader, _NEW)
    return Insert(oid, _row(reader), xid)


def _update(reader: _MessageCursor, xid: int | None) -> Update:
    oid = reader.u32()
    kind = reader.u8()
    old_key = old_row = None
    if kind == _KEY:
        old_key = _row(reader)
        kind = reader.u8()
    elif kind == _OLD:
        old_row = _row(reader)
        kind = reader.u8()
    if kind != _NEW:
        raise ProtocolViolation("an update has no new row")
    return Update(oid, _row(reader), old_key, old_row, xid)


def _delete(reader: _MessageCursor, xid: int | None) -> Delete:
    oid = reader.u32()
    kind = reader.u8()
    if kind == _KEY:
        return Delete(oid, old_key=_row(reader), xid=xid)
    if kind == _OLD:
        return Delete(oid, old_row=_row(reader), xid=xid)
    raise ProtocolViolation("a delete has no old row")


def _truncate(reader: _MessageCursor, xid: int | None) -> Truncate:
    count = reader.u32()
    flags = reader.u8()
    if count * 4 > len(reader.data):
        raise ProtocolViolation(f"a truncate of {count} tables in {len(reader.data)} bytes")
    oids = tuple(reader.u32() for _ in range(count))
    return Truncate(oids, bool(flags & 1), bool(flags & 2), xid)


def _logical_message(reader: _MessageCursor, xid: int | None) -> LogicalMessage:
    flags = reader.u8()
    lsn = _position(int.from_bytes(reader.take(8), "big"))
    prefix = reader.text()
    return LogicalMessage(bool(flags & 1), lsn, prefix, reader.take(reader.u32()), xid)


def _stream_commit(reader: _MessageCursor) -> StreamCommit:
    own, flags, lsn, end, time = reader.unpack(_STREAM_COMMIT)
    return StreamCommit(own, flags, _position(lsn), _position(end), _moment(time))


def _expect(reader: _MessageCursor, kind: int) -> None:
    found = reader.u8()
    if found != kind:
        raise ProtocolViolation(f"expected {chr(kind)!r} in a message, found {chr(found)!r}")


_TEXT, _NULL, _UNCHANGED = ord("t"), ord("n"), ord("u")
_NEW, _KEY, _OLD = ord("N"), ord("K"), ord("O")
_PARSERS: Final[dict[int, Callable[[_MessageCursor], Message]]] = {
    ord("B"): _begin,
    ord("C"): _commit,
    ord("O"): _origin,
    ord("S"): lambda reader: StreamStart(reader.u32(), reader.u8() == 1),
    ord("c"): _stream_commit,
    ord("A"): lambda reader: StreamAbort(reader.u32(), reader.u32()),
}
# The messages that carry the id of their (sub)transaction inside a streamed block.
_CHANGE_PARSERS: Final[dict[int, Callable[[_MessageCursor, int | None], Message]]] = {
    ord("R"): _relation,
    ord("Y"): _type,
    ord("I"): _insert,
    ord("U"): _update,
    ord("D"): _delete,
    ord("T"): _truncate,
    ord("M"): _logical_message,
}
