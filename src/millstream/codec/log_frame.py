"""Frames: a commit group's part for one shard, in bytes.

    +------------------------- head, under one CRC32C -------------------------+--------- payload ---------+
    | fixed header | other shards | reached | parts | operations | batches     | part | part | ...         |
    +--------------------------------------------------------------------------+---------------------------+

The head names each payload part (a table's rows under one schema version) with its length and its
own CRC32C. So one checksum covers everything, yet a reader of one table reads and checks only the
head and that table's bytes. Shard, region, epoch and offset stand in the head: a frame of
another shard, epoch or place can't pass for the one that belongs there.

Rows in a part are in the directory's order, entry by entry; their `__offset` is their place in the
shard. `log_parts` has the columns that a part leaves out. The layout, byte by byte, is in docs/internals/FORMAT.md.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from millstream.codec.arrow_ipc import decode_schema, encode_batch, encode_schema
from millstream.codec.checksums import Bytes, crc32c
from millstream.codec.log_directory import Announced, check_directory, decode_directory, ints_of
from millstream.codec.log_parts import (
    PART_SIZES,
    EntryNumbers,
    LeftOut,
    PayloadPart,
    check_rows,
    decode_parts,
    encode_parts,
    flags_of,
    verify_part,
)
from millstream.codec.log_records import log_columns, of_part, records_of
from millstream.codec.log_schemas import SchemaSet
from millstream.errors import CorruptFrame, UnsupportedFormat
from millstream.model.ids import Epoch, GroupNumber, RegionId, SchemaVersion, ShardId, SourceId, TableId, WriterId
from millstream.model.positions import Lsn, Offset, Seq
from millstream.model.records import log_row_prefix
from millstream.model.schema import TableSchema

BATCH_HEADER_VERSION: Final = 2
"""The version that is written unless a writer's options name another."""
BATCH_HEADER_VERSIONS: Final = (1, 2)
"""Versions that can be read and written. Version 1 has neither region nor shard: they read as 0."""
FRAME_HEADER_MIN: Final = 16
"""Bytes that determine a frame's extent: length, crc, head length, version, kind, flags."""

_START: Final = struct.Struct("<IIIBBH")
"""length, crc, head length, version, kind, flags"""
_FIXED: Final = struct.Struct("<qqqqqqqqqIIIHHIII")
"""first offset, count, first seq, last seq, group's last seq, reserved to, group, epoch, hybrid time, region, shard,
writer, other shards, sources, parts, operations length, batches length"""
_FIXED_V1: Final = struct.Struct("<qqqqqqqqqIHHIII")
"""The same without region and shard."""
_FIXED_OF_VERSION: Final = {1: _FIXED_V1, 2: _FIXED}
_SHARD: Final = struct.Struct("<I")
_REACHED: Final = struct.Struct("<IQ")
_NO_TABLE: Final = TableId(0)
_NO_VERSION: Final = SchemaVersion(0)
_FLAG_MORE: Final = 1
FRAME_SIZE_MAX: Final = 2**32 - 8
_COUNT_MAX: Final = 2**40
"""Maximum number of records in a frame, a thousand times what its bytes can hold. Sums of smaller
counts don't overflow."""


class FrameKind(IntEnum):
    """The content of a frame."""

    SCHEMA = 1
    RECORDS = 2
    LOSS = 3
    """Lost records: they can't be read, and an operator accepted the loss (`wal.mending.repair`).
    Offsets continue behind it."""


_KINDS: Final = {int(kind): kind for kind in FrameKind}


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """Batch header. A schema frame has `count` 0 and takes no numbers."""

    kind: FrameKind
    first_offset: Offset
    count: int
    first_seq: Seq
    last_seq: Seq
    """With `first_seq`, the least and greatest number in this frame; (0, 0) if it has none."""
    group_last_seq: Seq
    """The value of `persisted_upto` once the group is durable on all its shards."""
    group: GroupNumber
    epoch: Epoch
    region: RegionId
    shard: ShardId
    writer: WriterId
    other_shards: tuple[ShardId, ...] = ()
    """The other shards on which this group has frames."""
    reserved_to: Seq = Seq(0)
    """Numbers up to it may have been given out."""
    hybrid_time: int = 0
    reached: Mapping[SourceId, Lsn] = field(default_factory=dict)
    """For each source, the commit end LSN up to which the log has everything once this group is durable."""
    more: bool = False
    """Whether the group continues in this shard's next frame."""
    version: int = BATCH_HEADER_VERSION
    """One of `BATCH_HEADER_VERSIONS`."""
    parts: tuple[PayloadPart, ...] = ()
    """Filled in by the encoder."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reached", MappingProxyType(dict(self.reached)))

    @property
    def payload_length(self) -> int:
        """Size in bytes of the payload behind the head."""
        return sum([part.length for part in self.parts])


class FrameExtent(NamedTuple):
    """Sizes in bytes of a frame's head and of the whole frame, not yet verified."""

    head_length: int
    length: int
    kind: FrameKind


@dataclass(frozen=True, slots=True)
class SchemaFrame:
    """A frame with a table's schema."""

    header: FrameHeader
    schema: TableSchema


@dataclass(frozen=True, slots=True)
class RecordsFrame:
    """A frame with records: its verified head, and its payload, read and verified part by part on demand."""

    header: FrameHeader
    operations: pa.RecordBatch
    batches: pa.RecordBatch
    """`BATCH_SCHEMA` by name."""
    schemas: SchemaSet
    read_payload: Callable[[int, int], Bytes]
    """Returns payload bytes at (position behind the head, length)."""
    _numbers: list[EntryNumbers] = field(default_factory=list, repr=False, compare=False)
    """The numbers of the directory's entries, once they are asked for."""

    def table_ids(self) -> list[TableId]:
        """Return the tables with rows here, in payload order."""
        return list(dict.fromkeys(part.table_id for part in self.header.parts))

    def log_rows(self, table_id: TableId, version: SchemaVersion) -> pa.RecordBatch:
        """Return one part's rows as they lie in the log (`log_row_schema`).

        Raises `KeyError` if the frame has no such part.
        """
        position = 0
        for part in self.header.parts:
            if (part.table_id, part.schema_version) == (table_id, version):
                schema = self.schemas.find(table_id, version)
                mine = of_part(self.batches, schema)
                counts = ints_of(self.batches.column("count"))[mine]
                if counts.sum() != part.rows:
                    raise CorruptFrame(f"the directory and the rows of table {table_id} disagree")
                left_out = LeftOut(schema, counts, mine, self._entry_numbers)
                return left_out.added_to(self._read_part(part, position), None)
            position += part.length
        raise KeyError((table_id, version))

    def records(
        self,
        table_id: TableId,
        *,
        columns: frozenset[str] | None = None,
        offsets: bool = False,
        moments: bool = False,
    ) -> Iterator[tuple[TableSchema, pa.RecordBatch]]:
        """Yield a table's records in `record_schema`, one batch a schema version; see `records_of`.

        Rows are in directory order. Only what `columns` need is decoded, and so verified beyond its
        checksum. Decoding all columns uses Arrow's threads. Decoding some doesn't: the reader is
        then a Spark worker, and all cores are busy.

        Raises:
            CorruptFrame: a part fails its checksum, or rows and directory disagree.
        """
        position = 0
        for part in self.header.parts:
            if part.table_id == table_id:
                schema = self.schemas.find(part.table_id, part.schema_version)
                needed = log_columns(schema, columns, offsets=offsets)
                rows = self._read_part(part, position, needed, threads=columns is None)
                yield schema, self.as_records(schema, rows, columns=columns, offsets=offsets, moments=moments)
            position += part.length

    def as_records(
        self,
        schema: TableSchema,
        rows: pa.RecordBatch,
        *,
        columns: frozenset[str] | None = None,
        offsets: bool = False,
        moments: bool = False,
    ) -> pa.RecordBatch:
        """Return one part's log rows as records, in their order; see `records_of`."""
        return records_of(
            schema,
            rows,
            self.operations,
            self.batches,
            self._entry_numbers,
            columns=columns,
            offsets=offsets,
            moments=moments,
        )

    def _entry_numbers(self) -> EntryNumbers:
        if not self._numbers:
            first = np.full(1, self.header.first_offset, np.int64)
            self._numbers.append(EntryNumbers(self.batches, np.zeros(self.batches.num_rows, np.int64), first))
        return self._numbers[0]

    def numbers_of(self, table_id: TableId, version: SchemaVersion) -> tuple[Seq, Seq]:
        """Return the least and the greatest of a part's numbers, from the directory alone."""
        tables, versions, firsts, counts = (
            ints_of(self.batches.column(name)) for name in ("table_id", "schema_version", "first_seq", "count")
        )
        mine = (tables == table_id) & (versions == version)
        if not mine.any():
            raise CorruptFrame(f"a frame's directory doesn't name its rows of table {table_id}")
        return Seq(int(firsts[mine].min())), Seq(int((firsts + counts)[mine].max()) - 1)

    def _read_part(
        self, part: PayloadPart, position: int, columns: frozenset[str] | None = None, *, threads: bool = True
    ) -> pa.RecordBatch:
        """Return verified rows, of the columns that the part has; only the named ones, if any are named."""
        data = self.read_payload(position, part.length)
        verify_part(part, data)
        picker = self.schemas.picker(part.table_id, part.schema_version, part.flags, columns, threads=threads)
        rows = picker.decode(data)
        if rows.num_rows != part.rows:
            raise CorruptFrame(f"{part.rows} rows of table {part.table_id} were announced, {rows.num_rows} are there")
        check_rows(part.table_id, rows)
        return rows


@dataclass(frozen=True, slots=True)
class LossFrame:
    """A frame in the place of records that are lost: `header.count` offsets that can never be read."""

    header: FrameHeader
    facts: Mapping[str, Any]
    """JSON-able facts recorded about the loss."""


# --- encoding ------------------------------------------------------------------------------------------------------


def encode_schema_frame(header: FrameHeader, schema: TableSchema) -> list[Bytes]:
    """Encode a schema frame as buffers, head first. `header.count` is 0."""
    data = encode_schema(schema.to_arrow(log_row_prefix(schema)))
    part = PayloadPart(schema.table_id, schema.version, 0, len(data), crc32c(data))
    return [_encode_head(header, (part,), b"", b""), data]


def encode_records_frame(
    header: FrameHeader,
    operations: pa.RecordBatch,
    batches: pa.RecordBatch,
    payload: Sequence[tuple[TableSchema, pa.RecordBatch]],
) -> list[Bytes]:
    """Encode a records frame as buffers, head first, to be written in sequence.

    Args:
        header: its `parts` are filled in here.
        operations: `OPERATION_SCHEMA`.
        batches: `BATCH_SCHEMA`; entries of one (table, version) are in the order of that part's rows.
        payload: one (schema, rows) for every table and schema version, each at most once. The rows have the
            columns of `part_schema` of some flags; under batch header version 1, all.
    """
    parts = []
    buffers: list[Bytes] = []
    for schema, rows in payload:
        data = encode_batch(rows)
        part = PayloadPart(schema.table_id, schema.version, rows.num_rows, len(data), crc32c(data), flags_of(rows))
        parts.append(part)
        buffers.append(data)
    return [_encode_head(header, tuple(parts), encode_batch(operations), encode_batch(batches)), *buffers]


def encode_loss_frame(header: FrameHeader, facts: Mapping[str, Any], *, length: int = 0) -> list[Bytes]:
    """Encode a loss frame as buffers, head first, `length` bytes long if the facts fit."""
    text = json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode()
    bare = len(_encode_head(header, (PayloadPart(_NO_TABLE, _NO_VERSION, 0, 0, 0),), b"", b""))
    text = text.ljust(max(length - bare, len(text) + -len(text) % 8))
    part = PayloadPart(_NO_TABLE, _NO_VERSION, 0, len(text), crc32c(text))
    return [_encode_head(header, (part,), b"", b""), text]


def without_parts(head: bytes, lost: Collection[tuple[TableId, SchemaVersion]]) -> bytes:
    """Return a records frame's head without some of its parts; the directory still names their lost records."""
    header, _, operations, batches = decode_frame_head(head)
    kept = tuple(part for part in header.parts if (part.table_id, part.schema_version) not in lost)
    return _encode_head(header, kept, operations, batches)


def _encode_head(header: FrameHeader, parts: tuple[PayloadPart, ...], operations: Bytes, batches: Bytes) -> bytes:
    place = (header.region, header.shard)
    if header.version == 1 and any(place):
        raise AssertionError("batch header version 1 has neither region nor shard")
    pieces: list[bytes] = [
        _FIXED_OF_VERSION[header.version].pack(
            header.first_offset, header.count, header.first_seq, header.last_seq, header.group_last_seq,
            header.reserved_to, header.group, header.epoch, header.hybrid_time, *(place if header.version > 1 else ()),
            header.writer, len(header.other_shards), len(header.reached), len(parts), len(operations), len(batches),
        )
    ]  # fmt: skip
    pieces.extend(_SHARD.pack(shard) for shard in header.other_shards)
    pieces.extend(_REACHED.pack(source, lsn) for source, lsn in header.reached.items())
    pieces.append(encode_parts(parts, header.version))
    body = b"".join(pieces)
    padding = bytes(-(_START.size + len(body)) % 8)  # Arrow's messages need to start at multiples of 8
    body = b"".join((body, padding, bytes(operations), bytes(batches)))
    head_length = _START.size + len(body)
    length = head_length + sum(part.length for part in parts)
    if length > FRAME_SIZE_MAX:
        raise AssertionError("a frame can't exceed 4 GiB: the writer splits what is larger")
    start = _START.pack(length, 0, head_length, header.version, header.kind, _FLAG_MORE if header.more else 0)
    crc = crc32c(start[:4], start[8:], body)
    return b"".join((start[:4], struct.pack("<I", crc), start[8:], body))


# --- decoding ------------------------------------------------------------------------------------------------------


def frame_extent(start: bytes | memoryview) -> FrameExtent:
    """Return the ends of a frame's head and of the frame, from its first `FRAME_HEADER_MIN` bytes.

    Nothing is verified yet.

    Raises:
        CorruptFrame (`truncated_frame`): fewer bytes than that.
        CorruptFrame: these bytes can't begin a frame (for example zeros).
        UnsupportedFormat: a header version that this code doesn't support.
    """
    if len(start) < FRAME_HEADER_MIN:
        raise CorruptFrame("the file ends inside of a frame's header", code="truncated_frame")
    length, _, head_length, version, kind, flags = _START.unpack_from(start)
    if length == 0 or kind not in _KINDS:
        raise CorruptFrame("no frame begins here")
    fixed = _FIXED_OF_VERSION.get(version, _FIXED_V1)
    if not _START.size + fixed.size <= head_length <= length:
        raise CorruptFrame("a frame's lengths contradict each other")
    if version not in BATCH_HEADER_VERSIONS or flags & ~_FLAG_MORE:
        raise UnsupportedFormat(f"batch header version {version} with flags {flags:#x} is unknown", version=version)
    return FrameExtent(head_length, length, _KINDS[kind])


def decode_frame_head(
    head: bytes | memoryview, extent: FrameExtent | None = None
) -> tuple[FrameHeader, FrameExtent, memoryview, memoryview]:
    """Return a frame's verified header, its extent, and the encoded operations and batches.

    Args:
        head: at least the frame's whole head.
        extent: the head's `frame_extent`, if the caller has it.

    Raises:
        CorruptFrame, UnsupportedFormat: as `frame_extent`, or the head fails its checksum.
    """
    view = memoryview(head)
    try:
        extent = extent or frame_extent(view)
    except UnsupportedFormat:
        # A damaged version byte is damage, not a newer format: only a head with a valid checksum proves a version.
        _verify_head(view, _START.unpack_from(view)[2])
        raise
    _verify_head(view, extent.head_length)
    _, _, _, version, _, flags = _START.unpack_from(view)
    fixed = _FIXED_OF_VERSION[version]
    found = fixed.unpack_from(view, _START.size)
    (first_offset, count, first_seq, last_seq, group_last_seq, reserved_to, group, epoch, hybrid_time, region, shard,
     writer, n_shards, n_sources, n_parts, n_ops, n_batches) = found if version > 1 else (*found[:9], 0, 0, *found[9:])  # fmt: skip
    at = _START.size + fixed.size
    shards_end = at + n_shards * _SHARD.size
    reached_end = shards_end + n_sources * _REACHED.size
    parts_end = reached_end + n_parts * PART_SIZES[version]
    directory = extent.head_length - n_batches - n_ops
    if not parts_end <= directory < parts_end + 8:
        raise CorruptFrame("a frame's header contradicts its length")
    header = FrameHeader(
        kind=extent.kind,
        first_offset=Offset(first_offset),
        count=count,
        first_seq=Seq(first_seq),
        last_seq=Seq(last_seq),
        group_last_seq=Seq(group_last_seq),
        group=GroupNumber(group),
        epoch=Epoch(epoch),
        region=RegionId(region),
        shard=ShardId(shard),
        writer=WriterId(writer),
        other_shards=tuple(ShardId(s) for (s,) in _SHARD.iter_unpack(view[at:shards_end])),
        reserved_to=Seq(reserved_to),
        hybrid_time=hybrid_time,
        reached={SourceId(s): Lsn(lsn) for s, lsn in _REACHED.iter_unpack(view[shards_end:reached_end])},
        more=bool(flags & _FLAG_MORE),
        version=version,
        parts=decode_parts(view[reached_end:parts_end], version),
    )
    if extent.head_length + header.payload_length != extent.length:
        raise CorruptFrame("a frame's parts contradict its length")
    rows = sum([part.rows for part in header.parts])
    if min(first_offset, count, first_seq, last_seq, group_last_seq, group, epoch) < 0 or (
        extent.kind is FrameKind.RECORDS and not rows <= count <= _COUNT_MAX
    ):
        raise CorruptFrame("a frame's numbers contradict each other")
    operations_end = directory + n_ops
    return header, extent, view[directory:operations_end], view[operations_end : extent.head_length]


def decode_frame_header(head: bytes | memoryview) -> tuple[FrameHeader, int]:
    """Return the verified header of a frame and the frame's whole length; `head` holds at least the head."""
    header, extent, _, _ = decode_frame_head(head)
    return header, extent.length


def decode_frame(
    data: bytes | memoryview,
    schemas: SchemaSet,
    *,
    read_payload: Callable[[int, int], Bytes] | None = None,
) -> SchemaFrame | RecordsFrame | LossFrame:
    """Decode a frame; a schema frame's schema is added to `schemas`.

    Args:
        data: the whole frame, or only its head if `read_payload` is given.
        read_payload: returns payload bytes at (position behind the head, length); parts are then read on demand.

    Raises:
        CorruptFrame, UnsupportedFormat: never wrong data. Payload parts are verified when read.
    """
    header, extent, operations, batches = decode_frame_head(data)
    if read_payload is None:
        view = memoryview(data)
        if len(view) < extent.length:
            raise CorruptFrame("the bytes end inside of a frame's payload", code="truncated_frame")

        def read_payload(position: int, length: int) -> Bytes:
            return view[extent.head_length + position : extent.head_length + position + length]

    if header.kind is FrameKind.SCHEMA:
        schema = _decode_schema_payload(header, read_payload)
        schemas.add(schema)
        return SchemaFrame(header, schema)
    if header.kind is FrameKind.LOSS:
        return LossFrame(header, _decode_facts(header, read_payload))
    return records_frame(header, operations, batches, schemas, read_payload)


def records_frame(
    header: FrameHeader,
    operations: Bytes,
    batches: Bytes,
    schemas: SchemaSet,
    read_payload: Callable[[int, int], Bytes],
) -> RecordsFrame:
    """Return a records frame from the parts that `decode_frame_head` returned.

    Raises `CorruptFrame` as `decode_frame`.
    """
    found = decode_directory(schemas.directory, operations, batches)
    check_directory(*found, np.zeros(1, np.int64), announced([header]))
    return RecordsFrame(header, *found, schemas, read_payload)


def announced(headers: Sequence[FrameHeader]) -> Announced:
    """Return the counts and numbers of frames' headers."""
    said = np.array([(header.count, header.first_seq, header.last_seq) for header in headers], np.int64)
    return Announced(*said.T)


def verify_payload(header: FrameHeader, payload: Bytes) -> None:
    """Check every part of a frame's payload against its CRC32C; raises `CorruptFrame`."""
    view = memoryview(payload)
    if len(view) < header.payload_length:
        raise CorruptFrame("the file ends inside of a frame's payload", code="truncated_frame")
    position = 0
    for part in header.parts:
        verify_part(part, view[position : position + part.length])
        position += part.length


def _verify_head(view: memoryview, head_length: int) -> None:
    if len(view) < head_length:
        raise CorruptFrame("the file ends inside of a frame's head", code="truncated_frame")
    (crc,) = struct.unpack_from("<I", view, 4)
    if crc != crc32c(bytes(view[:4]), bytes(view[8:head_length])):  # copying a few bytes is cheaper than wrapping them
        raise CorruptFrame("a frame's head fails its checksum")


def _decode_schema_payload(header: FrameHeader, read: Callable[[int, int], Bytes]) -> TableSchema:
    if len(header.parts) != 1:
        raise CorruptFrame("a schema frame holds one schema")
    part = header.parts[0]
    data = read(0, part.length)
    if len(data) < part.length:
        raise CorruptFrame("the file ends inside of a schema frame", code="truncated_frame")
    if crc32c(data) != part.crc:
        raise CorruptFrame("a schema frame's payload fails its checksum")
    decode = _known_schema if len(data) <= _KNOWN_BYTES_MAX else _table_schema
    schema = decode(bytes(data))
    if (schema.table_id, schema.version) != (part.table_id, part.schema_version):
        raise CorruptFrame("a schema frame's schema differs from the one in its header")
    return schema


def _table_schema(data: bytes) -> TableSchema:
    message = decode_schema(data)
    try:
        schema = TableSchema.from_arrow(message)
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptFrame(f"a schema frame holds no table schema: {error!r}") from error
    if not message.equals(schema.to_arrow(log_row_prefix(schema))):
        raise CorruptFrame("a schema frame's schema differs from the columns that it names")
    return schema


_KNOWN_BYTES_MAX: Final = 1 << 14
_known_schema = lru_cache(maxsize=1024)(_table_schema)
"""Each segment repeats the schemas that it uses. Larger ones are left out: they would take too much memory."""


def _decode_facts(header: FrameHeader, read: Callable[[int, int], Bytes]) -> Mapping[str, Any]:
    length = header.payload_length
    if len(header.parts) != 1 or not length:
        return {}
    data = bytes(read(0, length))
    verify_payload(header, data)
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptFrame(f"a loss frame is unreadable: {error}") from error
    return facts if isinstance(facts, dict) else {}
