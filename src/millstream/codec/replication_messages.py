"""Messages between a leader and its followers, in bytes: shipments, hellos, acknowledgements, errors.

    start     magic "MSHP", CRC32C of the rest, version, kind, length of the head, length of the bodies
    head      the message's own fields, fixed and counted ones
    bodies    of a shipment: the bytes of its parts, then of its documents, in sequence

Everything is little-endian. A message is encoded as a list of buffers, so that only the sender
copies a part's bytes, once. A decoded part is a view into the received bytes. The layout is in
docs/internals/FORMAT.md.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, TypeAlias
from uuid import UUID

from millstream.codec.checksums import Bytes, crc32c
from millstream.errors import MillstreamError, ShipmentUnreadable, UsageError, error_of
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId, StreamId, WriterId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import (
    Acknowledgement,
    ByteEnd,
    Document,
    Hello,
    NodeName,
    ReplicaPosition,
    SegmentPart,
    Shipment,
    check_node_name,
)

MAGIC: Final = b"MSHP"
VERSION: Final = 1
START_SIZE: Final = 24

Message: TypeAlias = Shipment | Hello | Acknowledgement | MillstreamError

_START: Final = struct.Struct("<4sIHHIQ")
_SHIPMENT: Final = struct.Struct("<16siqqqqIIIIIB")
"""stream, region, epoch, leader's end, sent, bytes left, parts, marks, shown marks, first kept, documents, flags"""
_TELLS_SHOWN, _BY_ONE = 1, 2
"""Flags."""
_PART: Final = struct.Struct("<IqqQ?")
"""shard, base offset, position, length, is end"""
_MARK: Final = struct.Struct("<I16siqqqqqqqI?q?")
"""shard, stream, writer, epoch, base offset, byte end, durable offset, group, persisted upto, reserved to, shards,
has elsewhere, elsewhere, is settled"""
_DROPPED: Final = struct.Struct("<Iqq")
"""shard, seq, offset"""
_DOCUMENT: Final = struct.Struct("<HqQ")
"""length of its name, version, length"""
_HELLO: Final = struct.Struct("<?16sqII")
"""has a stream, stream, promised, shards, documents"""
_END: Final = struct.Struct("<Iqq")
"""shard, base offset, position"""
_HELD: Final = struct.Struct("<Hq")
"""length of a document's name, version"""
_ACKNOWLEDGEMENT: Final = struct.Struct("<qqqqqqdI")
"""promised, group, persisted upto, applied, records behind, bytes behind, lag, shards"""
_TEXT: Final = struct.Struct("<H")


class _Kind(IntEnum):
    SHIPMENT = 1
    HELLO = 2
    ACKNOWLEDGEMENT = 3
    ERROR = 4


def encode_message(message: Message) -> list[Bytes]:
    """Encode a message as buffers, to be sent in sequence."""
    bodies: list[Bytes] = []
    if isinstance(message, Shipment):
        kind, head = _Kind.SHIPMENT, _shipment(message)
        bodies = [*(part.data for part in message.parts), *(document.data for document in message.documents)]
    elif isinstance(message, Hello):
        kind, head = _Kind.HELLO, _hello(message)
    elif isinstance(message, Acknowledgement):
        kind, head = _Kind.ACKNOWLEDGEMENT, _acknowledgement(message)
    else:
        kind, head = _Kind.ERROR, json.dumps(message.as_dict(), default=str).encode()
    start = _START.pack(MAGIC, 0, VERSION, kind, len(head), sum(len(body) for body in bodies))
    crc = crc32c(start[8:], head, *bodies)
    return [start[:4] + struct.pack("<I", crc) + start[8:] + head, *bodies]


def message_size(start: Bytes) -> int:
    """Return the size of the whole message that begins with these `START_SIZE` bytes.

    Only magic and version are verified.

    Raises:
        ShipmentUnreadable: no message begins here, or one of another version.
    """
    if len(start) < START_SIZE:
        raise ShipmentUnreadable("what came ends inside of a message's start")
    magic, _, version, _, head, bodies = _START.unpack_from(start)
    if magic != MAGIC:
        raise ShipmentUnreadable("no message begins here")
    if version != VERSION:
        raise ShipmentUnreadable(f"version {version} of what goes between nodes is unknown", version=int(version))
    return START_SIZE + int(head) + int(bodies)


def decode_message(data: Bytes, *more: Bytes) -> Message:
    """Decode a message; parts of a shipment are views into its bytes, so these mustn't change.

    Args:
        more: the rest, which may be split anywhere. Only pieces split in two are copied.

    Raises:
        ShipmentUnreadable: it is damaged, truncated, or of another version.
    """
    view, *behind = (memoryview(buffer).cast("B").toreadonly() for buffer in (data, *more))
    if behind and (len(view) < START_SIZE or len(view) < START_SIZE + _START.unpack_from(view)[4]):
        return decode_message(b"".join((view, *behind)))
    if message_size(view[:START_SIZE]) != len(view) + sum(map(len, behind)):
        raise ShipmentUnreadable("a message was cut, or more lies behind it")
    _, crc, _, kind, head, _ = _START.unpack_from(view)
    if crc != crc32c(view[8:], *behind):
        raise ShipmentUnreadable("a message fails its checksum")
    end = START_SIZE + int(head)
    taken = _ShipmentCursor(view[START_SIZE:end], [view[end:], *behind])
    try:
        message = _DECODERS[_Kind(kind)](taken)
    except (ValueError, KeyError, TypeError, AttributeError, UsageError, RecursionError, struct.error) as error:
        raise ShipmentUnreadable(f"a message has invalid content: {error}") from error
    if taken.left:
        raise ShipmentUnreadable("a message's lengths contradict its size")
    return message


class _ShipmentCursor:
    """A message's head and bodies, taken off the front piece by piece."""

    def __init__(self, head: memoryview, bodies: Sequence[memoryview]) -> None:
        self._head = head
        self._position = 0
        self._bodies = deque(view for view in bodies if view)

    def fields(self, of: struct.Struct) -> tuple[Any, ...]:
        """Take the next fields of the head."""
        end = self._position + of.size
        if end > len(self._head):
            raise ValueError("its head is too short")
        found = of.unpack_from(self._head, self._position)
        self._position = end
        return found

    def text(self, length: int) -> str:
        """Take the next text of the head."""
        return str(self.bytes_of_head(length), "utf-8")

    def bytes_of_head(self, length: int) -> memoryview:
        """Take the next bytes of the head."""
        end = self._position + length
        if end > len(self._head):
            raise ValueError("its head is too short")
        piece = self._head[self._position : end]
        self._position = end
        return piece

    def rest_of_head(self) -> memoryview:
        """Take the rest of the head."""
        return self.bytes_of_head(len(self._head) - self._position)

    def body(self, length: int) -> memoryview:
        """Take the next bytes of the bodies."""
        pieces: list[memoryview] = []
        while length:
            if not self._bodies:
                raise ValueError("what lies behind its head is too short")
            view = self._bodies.popleft()
            if len(view) > length:
                self._bodies.appendleft(view[length:])
            pieces.append(view[:length])
            length -= len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    @property
    def left(self) -> bool:
        """Whether anything but exactly everything was taken."""
        return self._position != len(self._head) or bool(self._bodies)


# --- shipments ------------------------------------------------------------------------------------------------------


def _shipment(shipment: Shipment) -> bytes:
    pieces = [
        _SHIPMENT.pack(
            shipment.stream.bytes, shipment.region, shipment.epoch, shipment.leader_end, shipment.sent_ns, shipment.bytes_left,
            len(shipment.parts), len(shipment.marks), len(shipment.shown or ()), len(shipment.first_kept), len(shipment.documents),
            _TELLS_SHOWN * (shipment.shown is not None) + _BY_ONE * shipment.by_one,
        ),
        _text(shipment.leader),
    ]  # fmt: skip
    pieces += [
        _PART.pack(part.shard, part.base_offset, part.position, len(part.data), part.is_end) for part in shipment.parts
    ]
    pieces += [
        _MARK.pack(
            shard, mark.stream.bytes, mark.writer, mark.epoch, mark.base_offset, mark.byte_end, mark.durable_offset,
            mark.group, mark.persisted_upto, mark.reserved_to, mark.shards, mark.elsewhere is not None,
            mark.elsewhere or 0, mark.is_settled,
        )
        for shard, mark in (*shipment.marks.items(), *(shipment.shown or {}).items())
    ]  # fmt: skip
    pieces += [_DROPPED.pack(shard, mark.seq, mark.offset) for shard, mark in shipment.first_kept.items()]
    for document in shipment.documents:
        name = document.name.encode()
        pieces += [_DOCUMENT.pack(len(name), document.version, len(document.data)), name]
    return b"".join(pieces)


def _decode_shipment(taken: _ShipmentCursor) -> Shipment:
    stream, region, epoch, leader_end, sent, left, n_parts, n_marks, n_shown, n_dropped, n_documents, flags = (
        taken.fields(_SHIPMENT)
    )
    if flags & ~(_TELLS_SHOWN | _BY_ONE) or (n_shown and not flags & _TELLS_SHOWN):
        raise ValueError("it has flags that none has")
    leader = _decode_promised_to(taken)
    parts = []
    for _ in range(n_parts):
        shard, base, position, length, is_end = taken.fields(_PART)
        if base < 0 or position < 0:
            raise ValueError("a part can't lie there")
        parts.append(SegmentPart(ShardId(shard), Offset(base), position, taken.body(length), is_end))
    marks = dict(_decode_mark(taken) for _ in range(n_marks))
    shown = dict(_decode_mark(taken) for _ in range(n_shown))
    first_kept = {}
    for _ in range(n_dropped):
        shard, seq, offset = taken.fields(_DROPPED)
        first_kept[ShardId(shard)] = DroppedMark(Seq(seq), Offset(offset))
    documents = []
    for _ in range(n_documents):
        n_name, version, length = taken.fields(_DOCUMENT)
        documents.append(Document(taken.text(n_name), version, bytes(taken.body(length))))
    return Shipment(
        StreamId(UUID(bytes=stream)), RegionId(region), Epoch(epoch), tuple(parts), marks, first_kept, tuple(documents),
        Seq(leader_end), sent, leader, left, shown if flags & _TELLS_SHOWN else None, bool(flags & _BY_ONE),
    )  # fmt: skip


def _decode_mark(taken: _ShipmentCursor) -> tuple[ShardId, DurableMark]:
    (shard, stream, writer, epoch, base, byte_end, offset, group, persisted, reserved, shards, has_elsewhere, elsewhere,
     is_settled) = taken.fields(_MARK)  # fmt: skip
    return ShardId(shard), DurableMark(
        StreamId(UUID(bytes=stream)), WriterId(writer), Epoch(epoch), Offset(base), byte_end, Offset(offset), GroupNumber(group),
        Seq(persisted), Seq(reserved), shards, Seq(elsewhere) if has_elsewhere else None, is_settled,
    )  # fmt: skip


# --- what followers send


def _hello(hello: Hello) -> bytes:
    stream = bytes(16) if hello.stream is None else hello.stream.bytes
    pieces = [
        _text(hello.node),
        _HELLO.pack(
            hello.stream is not None, stream, hello.promised, len(hello.position), len(hello.documents)
        ),
        _text(hello.promised_to),
        _ends(hello.position),
    ]  # fmt: skip
    for name, version in hello.documents.items():
        encoded = name.encode()
        pieces += [_HELD.pack(len(encoded), version), encoded]
    if hello.home:  # at the very end: without a home the bytes are those of versions before it existed
        pieces.append(_text(hello.home))
    return b"".join(pieces)


def _decode_hello(taken: _ShipmentCursor) -> Hello:
    node = _decode_node(taken)
    has_stream, stream, promised, n_shards, n_documents = taken.fields(_HELLO)
    promised_to = _decode_promised_to(taken)
    position = _decode_ends(taken, n_shards)
    documents = {}
    for _ in range(n_documents):
        n_name, version = taken.fields(_HELD)
        documents[taken.text(n_name)] = version
    known = StreamId(UUID(bytes=stream)) if has_stream else None
    home = taken.text(taken.fields(_TEXT)[0]) if taken.left else ""
    return Hello(known, node, Epoch(promised), position, documents, promised_to, home)


def _acknowledgement(said: Acknowledgement) -> bytes:
    fixed = _ACKNOWLEDGEMENT.pack(
        said.promised, said.group, said.persisted_upto, said.applied_ns, said.records_behind, said.bytes_behind,
        said.lag_s, len(said.position),
    )  # fmt: skip
    return b"".join((_text(said.node), fixed, _ends(said.position)))


def _decode_acknowledgement(taken: _ShipmentCursor) -> Acknowledgement:
    node = _decode_node(taken)
    promised, group, persisted, applied, records, size, lag, n_shards = taken.fields(_ACKNOWLEDGEMENT)
    return Acknowledgement(
        node, Epoch(promised), _decode_ends(taken, n_shards), GroupNumber(group), Seq(persisted), applied, records, size, lag
    )  # fmt: skip


def _decode_error(taken: _ShipmentCursor) -> MillstreamError:
    said = json.loads(bytes(taken.rest_of_head()))
    if not isinstance(said, Mapping):
        raise ValueError("an error says nothing")  # noqa: TRY004 - as every other that what came deserves
    return error_of(said)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return _TEXT.pack(len(encoded)) + encoded


def _decode_node(taken: _ShipmentCursor) -> NodeName:
    return check_node_name(taken.text(taken.fields(_TEXT)[0]))


def _decode_promised_to(taken: _ShipmentCursor) -> NodeName:
    """Return the node; empty if no node was ever promoted."""
    name = taken.text(taken.fields(_TEXT)[0])
    return check_node_name(name) if name else NodeName("")


def _ends(position: ReplicaPosition) -> bytes:
    return b"".join(_END.pack(shard, end.base_offset, end.position) for shard, end in position.items())


def _decode_ends(taken: _ShipmentCursor, count: int) -> dict[ShardId, ByteEnd]:
    ends: Sequence[tuple[int, int, int]] = [taken.fields(_END) for _ in range(count)]
    return {ShardId(shard): ByteEnd(Offset(base), position) for shard, base, position in ends}


_DECODERS: Final[Mapping[_Kind, Callable[[_ShipmentCursor], Message]]] = {
    _Kind.SHIPMENT: _decode_shipment,
    _Kind.HELLO: _decode_hello,
    _Kind.ACKNOWLEDGEMENT: _decode_acknowledgement,
    _Kind.ERROR: _decode_error,
}
