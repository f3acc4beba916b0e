"""A parser of every kind of pgoutput message, one at a time: the reference of what machine code reads in runs."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from millstream.codec.pgoutput import rare_messages
from millstream.codec.pgoutput.rare_messages import (
    LogicalMessage,
    Relation,
    StreamCommit,
    Type,
    _MessageCursor,
    _moment,
    _position,
)
from millstream.errors import ProtocolViolation
from millstream.model.positions import Lsn


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
class StreamStart:
    """The start of a block of a transaction that is still open; `first` marks the transaction's first block."""

    xid: int
    first: bool


@dataclass(frozen=True, slots=True)
class StreamStop:
    """The end of a block."""


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


_LENGTH: Final = struct.Struct(">I")
_BEGIN: Final = struct.Struct(">QqI")
_COMMIT: Final = struct.Struct(">BQQq")


def parse_message(data: bytes, *, streamed: bool = False) -> Message:
    """Parse the message that `data` holds, from its first byte to its last.

    Raises:
        ProtocolViolation: the bytes are no message of this protocol version.
    """
    if data[:1] in {b"R", b"Y", b"M", b"c"}:
        return rare_messages.parse_message(data, streamed=streamed)
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


def _begin(reader: _MessageCursor) -> Begin:
    lsn, time, own = reader.unpack(_BEGIN)
    return Begin(_position(lsn), _moment(time), own)


def _commit(reader: _MessageCursor) -> Commit:
    flags, lsn, end, time = reader.unpack(_COMMIT)
    return Commit(flags, _position(lsn), _position(end), _moment(time))


def _origin(reader: _MessageCursor) -> Origin:
    lsn = Lsn(int.from_bytes(reader.take(8), "big"))
    return Origin(lsn, reader.text("replace"))  # a name for people, in its own server's encoding


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
    ord("A"): lambda reader: StreamAbort(reader.u32(), reader.u32()),
}
# The messages that carry the id of their (sub)transaction inside a streamed block.
_CHANGE_PARSERS: Final[dict[int, Callable[[_MessageCursor, int | None], Message]]] = {
    ord("I"): _insert,
    ord("U"): _update,
    ord("D"): _delete,
    ord("T"): _truncate,
}


def decode_raw(message: bytes) -> tuple[Relation, Insert | Update | Delete | Truncate]:
    """Return the parts that `encode_raw` joined; raises `ProtocolViolation` for anything else."""
    if len(message) < _LENGTH.size:
        raise ProtocolViolation("a raw row is too short")
    (length,) = _LENGTH.unpack_from(message)
    relation = parse_message(message[_LENGTH.size : _LENGTH.size + length] or b"\0")
    change = parse_message(message[_LENGTH.size + length :] or b"\0")
    if not isinstance(relation, Relation) or not isinstance(change, Insert | Update | Delete | Truncate):
        raise ProtocolViolation("a raw row holds no relation with its change")
    return relation, change
