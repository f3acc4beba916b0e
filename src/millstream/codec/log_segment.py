"""A segment's header and footer: the first and, once it is sealed, the last bytes of a `.wal` file.

    +----------------+-------+-------+- - -+--------------+---------+
    | header, 4096 B | frame | frame | ... | footer index | trailer |
    +----------------+-------+-------+- - -+--------------+---------+

The header names the stream, shard and epoch that the file belongs to. It holds the Arrow schemas of
the directory that every frame carries, so that columns can be added to the directory without a new
format. The footer is an index of the frames. Its trailer has a fixed size and stands at the very
end, so that a sealed file is recognised by its last 64 bytes. The layout, byte by byte, is in
docs/internals/FORMAT.md.
"""

from __future__ import annotations

import hashlib
import struct
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain, repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple, Self, TypeAlias, overload
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc

from millstream.codec.arrow_ipc import decode_schema, encode_schema
from millstream.codec.checksums import crc32c
from millstream.codec.log_directory import DIRECTORY, Directory, Ints, ints_of
from millstream.codec.log_frame import FrameKind
from millstream.errors import CorruptFrame, UnsupportedFormat
from millstream.model.ids import Epoch, GroupNumber, RegionId, SchemaVersion, ShardId, StreamId, TableId
from millstream.model.positions import Offset, Seq

SEGMENT_HEADER_SIZE: Final = 4096
SEGMENT_TRAILER_SIZE: Final = 64
SEGMENT_VERSION: Final = 2
HASH_SIZE: Final = 32
NO_HASH: Final = bytes(HASH_SIZE)

_HEADER_MAGIC: Final = b"MILLWAL\n"
_FOOTER_MAGIC: Final = b"MILLEND\n"
_HEADER: Final = struct.Struct("<8sIHH16sIIqq32sqII")
"""magic, crc, version, unused, stream, region, shard, epoch, base offset, previous hash, created, two schema lengths"""
_TRAILER: Final = struct.Struct("<IIqq32s8s")
"""crc, index length, end offset, record count, frames' hash, magic"""
_ENTRY_FIELDS: Final = (
    pa.field("table_id", pa.int64(), nullable=False),
    pa.field("schema_version", pa.int32(), nullable=False),
    pa.field("rows", pa.int64(), nullable=False),
    pa.field("bytes", pa.int64(), nullable=False),
)
_TABLES: Final = pa.list_(pa.struct(_ENTRY_FIELDS))
_INDEX: Final = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("more", pa.bool_(), nullable=False),
        pa.field("first_seq", pa.int64(), nullable=False),
        pa.field("last_seq", pa.int64(), nullable=False),
        pa.field("group_last_seq", pa.int64(), nullable=False),
        pa.field("group", pa.int64(), nullable=False),
        pa.field("commit_ts_min_us", pa.int64()),
        pa.field("commit_ts_max_us", pa.int64()),
        pa.field("tables", _TABLES, nullable=False),
    ]
)
# Without Arrow's thread pool: waking it takes five times as long as a small footer's buffers, and
# is no faster for ten thousand frames.
_LZ4: Final = ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_UNTHREADED: Final = ipc.IpcReadOptions(use_threads=False)
_KINDS: Final = {int(kind): kind for kind in FrameKind}
_OFFSET, _COUNT, _POSITION, _LENGTH, _KIND, _FIRST, _LAST, _GROUP_END, _TIME = map(
    _INDEX.names.index,
    (
        "offset", "count", "position", "length", "kind", "first_seq", "last_seq", "group_last_seq", "commit_ts_min_us",
    ),
)  # fmt: skip
_ENTRIES_AT_ONCE: Final = 1024
Column: TypeAlias = npt.NDArray[Any]
_FRAME_FACTS: Final = attrgetter(*_INDEX.names[:-1])
"""The fields of a `FrameEntry`, in the index's order."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """A segment's owner and its first offset."""

    stream: StreamId
    region: RegionId
    shard: ShardId
    epoch: Epoch
    base_offset: Offset
    previous_hash: bytes = NO_HASH
    """Hash of the previous segment's footer; zeros for a shard's first segment."""
    created_ns: int = 0
    """Wall clock of the writer, in nanoseconds since 1970 UTC."""
    directory: Directory = field(default=DIRECTORY, compare=False)
    """The schemas under which this segment's frames wrote their directory."""

    def encode(self) -> bytes:
        """Encode the header as `SEGMENT_HEADER_SIZE` bytes."""
        operations = bytes(encode_schema(self.directory.operations))
        batches = bytes(encode_schema(self.directory.batches))
        fixed = _HEADER.pack(
            _HEADER_MAGIC, 0, SEGMENT_VERSION, 0, self.stream.bytes, self.region, self.shard, self.epoch,
            self.base_offset, self.previous_hash, self.created_ns, len(operations), len(batches),
        )  # fmt: skip
        body = fixed + operations + batches
        if len(body) > SEGMENT_HEADER_SIZE:
            raise AssertionError("the directory's schemas no longer fit into the segment header")
        body = body.ljust(SEGMENT_HEADER_SIZE, b"\0")
        crc = crc32c(body[:8], body[12:])
        return body[:8] + struct.pack("<I", crc) + body[12:]

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        """Decode the header from a segment's first bytes.

        Raises:
            CorruptFrame (`truncated_frame`): fewer than `SEGMENT_HEADER_SIZE` bytes.
            UnsupportedFormat: a version that this code doesn't support.
            CorruptFrame: not a segment, or damaged.
        """
        head = bytes(data[:SEGMENT_HEADER_SIZE])
        if len(head) < SEGMENT_HEADER_SIZE:
            raise CorruptFrame(
                f"a segment header has {SEGMENT_HEADER_SIZE} bytes, here are {len(head)}", code="truncated_frame"
            )
        (magic, crc, version, _, stream, region, shard, epoch, base, previous, created, n_ops, n_batches) = (
            _HEADER.unpack_from(head)
        )
        if magic != _HEADER_MAGIC:
            raise CorruptFrame("not a Millstream segment: the magic bytes are missing")
        if crc != crc32c(head[:8], head[12:]):
            raise CorruptFrame("the segment header fails its checksum")
        if version != SEGMENT_VERSION:
            raise UnsupportedFormat(f"segment format version {version} is unknown", version=version)
        middle = _HEADER.size + n_ops
        directory = _directory(head[_HEADER.size : middle], head[middle : middle + n_batches])
        if base < 0:
            raise CorruptFrame("a segment can't begin at a negative offset")
        return cls(
            StreamId(UUID(bytes=stream)), RegionId(region), ShardId(shard), Epoch(epoch), Offset(base), previous,
            created, directory,
        )  # fmt: skip


@lru_cache(maxsize=16)  # opening a log decodes every segment's, and they are all alike
def _directory(operations: bytes, batches: bytes) -> Directory:
    return Directory(decode_schema(operations), decode_schema(batches)).check()


class FrameTable(NamedTuple):
    """A frame's rows of one table and schema version; for a schema frame 0 rows."""

    table_id: TableId
    schema_version: SchemaVersion
    rows: int
    size_bytes: int


class TableEntries(Sequence[FrameTable]):
    """The entries of one frame, made from a footer's columns on demand: a reader of one table among many needs few.

    Args:
        columns: of the entries of all frames: table ids, schema versions, rows, sizes.
        first: index of this frame's first entry.
        end: exclusive end of this frame's entries.
    """

    __slots__ = ("_columns", "_end", "_first")

    def __init__(self, columns: tuple[Ints, ...], first: int, end: int) -> None:
        self._columns = columns
        self._first = first
        self._end = end

    def of(self, wanted: Collection[TableId]) -> Sequence[FrameTable]:
        """Return the entries of some tables."""
        ids = self._columns[0][self._first : self._end]
        if len(wanted) == 1 and len(ids) > 1:
            return [self[place] for place in np.flatnonzero(ids == next(iter(wanted))).tolist()]
        return [entry for entry in self if entry.table_id in wanted]

    def __len__(self) -> int:
        return self._end - self._first

    def __iter__(self) -> Iterator[FrameTable]:
        return map(FrameTable, *(column[self._first : self._end].tolist() for column in self._columns))

    @overload
    def __getitem__(self, place: int) -> FrameTable: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[FrameTable]: ...
    def __getitem__(self, place: int | slice) -> FrameTable | Sequence[FrameTable]:
        found = range(self._first, self._end)[place]
        if isinstance(found, int):
            ids, versions, rows, sizes = (column.item(found) for column in self._columns)
            return FrameTable(TableId(ids), SchemaVersion(versions), rows, sizes)
        return [self[at - self._first] for at in found]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True, slots=True)
class FrameEntry:
    """One frame in a segment: its place and its content."""

    kind: FrameKind
    offset: Offset
    count: int
    position: int
    """Byte position in the file."""
    length: int
    """Size in bytes of the whole frame."""
    more: bool
    first_seq: Seq
    last_seq: Seq
    group_last_seq: Seq
    group: GroupNumber
    commit_ts_min_us: int | None = None
    commit_ts_max_us: int | None = None
    tables: tuple[FrameTable, ...] | TableEntries = ()

    def tables_of(self, wanted: Collection[TableId] | None) -> Sequence[FrameTable]:
        """Return the entries of some tables, or of all."""
        if wanted is None:
            return self.tables
        if isinstance(self.tables, TableEntries):
            return self.tables.of(wanted)
        return [table for table in self.tables if table.table_id in wanted]


class SchemaPlace(NamedTuple):
    """Position of a schema frame, and its schema."""

    position: int
    length: int
    table_id: TableId
    version: SchemaVersion


class IndexedEntries(Sequence[FrameEntry]):
    """A segment's frames, of which a reader finds the wanted ones without looking at all others."""

    __slots__ = ()

    @abstractmethod
    def after(self, after: Seq) -> Iterator[FrameEntry]:
        """Yield the frames of groups that end after a number, except schema frames."""

    @abstractmethod
    def from_offset(self, offset: Offset) -> Iterator[FrameEntry]:
        """Yield the frames with records at or after an offset."""

    @abstractmethod
    def schemas(self) -> list[SchemaPlace]:
        """Return the places of the schema frames."""


class FrameEntries(IndexedEntries):
    """A footer's frames, made from its columns on demand: a reader of some frames doesn't need the others.

    Args:
        facts: the columns of `FrameEntry` except `tables`, in the index's order.
        bounds: where the entries of each frame's tables begin in `tables`, and where the last frame's end.
    """

    __slots__ = ("_bounds", "_facts", "_tables")

    def __init__(self, facts: tuple[Column, ...], bounds: Ints, tables: tuple[Ints, ...]) -> None:
        self._facts = facts
        self._bounds = bounds
        self._tables = tables

    def after(self, after: Seq) -> Iterator[FrameEntry]:
        return self._at(np.flatnonzero((self._facts[_GROUP_END] > after) & (self._facts[_KIND] != FrameKind.SCHEMA)))

    def from_offset(self, offset: Offset) -> Iterator[FrameEntry]:
        starts, counts = self._facts[_OFFSET], self._facts[_COUNT]
        return self._at(np.flatnonzero((counts > 0) & (starts + counts > offset)))

    def total(self, after: Seq, upto: Seq) -> tuple[int, int, int | None]:
        """Return (records, bytes, least commit time) of the records frames with numbers in `(after, upto]`."""
        firsts, lasts = self._facts[_FIRST], self._facts[_LAST]
        inside = (self._facts[_KIND] == FrameKind.RECORDS) & (lasts > after) & (firsts <= upto)
        count, size = (int(self._facts[column][inside].sum()) for column in (_COUNT, _LENGTH))
        return (
            count,
            size,
            min((time for time in self._facts[_TIME][inside].tolist() if time is not None), default=None),
        )

    def schemas(self) -> list[SchemaPlace]:
        is_schema = (self._facts[_KIND] == FrameKind.SCHEMA) & (np.diff(self._bounds) > 0)
        places, (ids, versions, *_) = np.flatnonzero(is_schema), self._tables
        firsts = self._bounds[places]
        columns = (self._facts[_POSITION][places], self._facts[_LENGTH][places], ids[firsts], versions[firsts])
        return list(map(SchemaPlace, *(column.tolist() for column in columns)))

    def _at(self, places: Ints) -> Iterator[FrameEntry]:
        # A few at a time: a reader may end after any.
        for some in np.split(places, range(_ENTRIES_AT_ONCE, len(places), _ENTRIES_AT_ONCE)):
            facts: list[Iterable[Any]] = [column[some].tolist() for column in self._facts]
            kinds = map(_KINDS.__getitem__, facts.pop(_KIND))
            bounds = self._bounds[some].tolist(), self._bounds[some + 1].tolist()
            yield from map(FrameEntry, kinds, *facts, map(TableEntries, repeat(self._tables), *bounds))

    def __iter__(self) -> Iterator[FrameEntry]:
        return self._at(np.arange(len(self)))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, place: int) -> FrameEntry: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[FrameEntry]: ...
    def __getitem__(self, place: int | slice) -> FrameEntry | Sequence[FrameEntry]:
        at = range(len(self))[place]
        return next(self._at(np.array([at]))) if isinstance(at, int) else list(self._at(np.array(at, np.int64)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def frames_after(frames: Sequence[FrameEntry], after: Seq) -> Iterator[FrameEntry]:
    """As `IndexedEntries.after`, for any frames."""
    if isinstance(frames, IndexedEntries):
        return frames.after(after)
    return (frame for frame in frames if frame.group_last_seq > after and frame.kind is not FrameKind.SCHEMA)


def frames_from(frames: Sequence[FrameEntry], offset: Offset) -> Iterator[FrameEntry]:
    """As `IndexedEntries.from_offset`, for any frames."""
    if isinstance(frames, IndexedEntries):
        return frames.from_offset(offset)
    return (frame for frame in frames if frame.count and frame.offset + frame.count > offset)


def schemas_of(frames: Sequence[FrameEntry]) -> list[SchemaPlace]:
    """As `IndexedEntries.schemas`, for any frames."""
    if isinstance(frames, IndexedEntries):
        return frames.schemas()
    return [
        SchemaPlace(frame.position, frame.length, *frame.tables[0][:2])
        for frame in frames
        if frame.kind is FrameKind.SCHEMA and frame.tables
    ]


@dataclass(frozen=True, slots=True)
class SegmentFooter:
    """The index of a sealed segment."""

    frames: Sequence[FrameEntry]
    end_offset: Offset
    """Exclusive end of the offsets in the segment."""
    record_count: int
    frames_hash: bytes
    """SHA-256 over the heads of all frames in order; a head holds the checksums of its frame's payload."""
    footer_hash: bytes = field(default=NO_HASH, compare=False)
    """Hash of index and trailer, which the next segment's header must name; zeros unless it was decoded."""

    def encode(self) -> bytes:
        """Encode index and trailer, to stand right behind the last frame."""
        # By columns: a segment of small groups has ten thousand frames, and its writer waits for this.
        facts = list(zip(*map(_FRAME_FACTS, self.frames), strict=True)) or [()] * (len(_INDEX) - 1)
        columns = [pa.array(values, field.type) for values, field in zip(facts, list(_INDEX)[:-1], strict=True)]
        entries = chain.from_iterable(frame.tables for frame in self.frames)
        of_entries = list(zip(*entries, strict=True)) or [()] * len(_ENTRY_FIELDS)
        parts = [pa.array(values, field.type) for values, field in zip(of_entries, _ENTRY_FIELDS, strict=True)]
        ends = pa.array(accumulate((len(frame.tables) for frame in self.frames), initial=0), pa.int32())
        tables = pa.StructArray.from_arrays(parts, fields=_ENTRY_FIELDS)
        columns.append(pa.ListArray.from_arrays(ends, tables, type=_TABLES))
        sink = pa.BufferOutputStream()
        with ipc.new_stream(sink, _INDEX, options=_LZ4) as stream:
            stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=_INDEX))
        index: bytes = sink.getvalue().to_pybytes()
        rest = _TRAILER.pack(
            0, len(index), self.end_offset, self.record_count, self.frames_hash, _FOOTER_MAGIC
        )[4:]  # fmt: skip
        return index + struct.pack("<I", crc32c(index, rest)) + rest

    @classmethod
    def decode_tail(cls, read: Callable[[int, int], bytes], file_size: int) -> Self | None:
        """Decode the footer of a file of `file_size` bytes; None if the file isn't sealed.

        Args:
            read: returns bytes at (position, length).

        Raises:
            CorruptFrame: the file ends as a sealed file does, and its footer is damaged.
        """
        encoded = _read_footer(read, file_size)
        if encoded is None:
            return None
        table = _index_table(encoded.index_bytes)
        _check_chain(table, encoded.start, encoded.end_offset, encoded.record_count)
        return cls(
            _decode_index(table), encoded.end_offset, encoded.record_count, encoded.frames_hash, encoded.footer_hash
        )

    @staticmethod
    def encoded_hash(encoded: bytes) -> bytes:
        """Return the SHA-256 of the encoded footer, which the next segment's header holds as `previous_hash`."""
        return hashlib.sha256(encoded).digest()

    @staticmethod
    def is_trailer(data: bytes) -> bool:
        """Whether a file that ends with these `SEGMENT_TRAILER_SIZE` bytes was sealed (if they are undamaged)."""
        return len(data) == SEGMENT_TRAILER_SIZE and data.endswith(_FOOTER_MAGIC)

    @staticmethod
    def size_in(trailer: bytes) -> int:
        """Return the size of index and trailer together, from a sealed file's last `SEGMENT_TRAILER_SIZE` bytes."""
        return int(_TRAILER.unpack(trailer)[1]) + SEGMENT_TRAILER_SIZE


@dataclass(frozen=True, slots=True)
class SegmentTotals:
    """Totals of a sealed segment's frames with records, from its footer: far cheaper than the frames one by one."""

    records: int
    size_bytes: int
    """Total size in bytes of the whole frames that have records."""
    first_seqs: tuple[Seq, Seq]
    """The least and the greatest of the frames' first numbers; zeros if no frame has a record."""
    last_seqs: tuple[Seq, Seq]
    """The least and the greatest of the frames' last numbers."""
    commit_ts_min_us: int | None
    """The least commit time; None if no frame has one."""
    end_offset: Offset
    """Exclusive end of the offsets in the segment."""
    footer_hash: bytes = field(default=NO_HASH, compare=False)
    """As `SegmentFooter.footer_hash`."""

    @classmethod
    def decode_tail(cls, read: Callable[[int, int], bytes], file_size: int) -> Self | None:
        """Decode the totals as `SegmentFooter.decode_tail` decodes a footer."""
        encoded = _read_footer(read, file_size)
        if encoded is None:
            return None
        table = _index_table(encoded.index_bytes)
        length = encoded.start - SEGMENT_HEADER_SIZE
        if (_sum(table, "length"), _sum(table, "count")) != (length, encoded.record_count):
            raise CorruptFrame("the segment footer contradicts itself")
        records = table.filter(pc.equal(table.column("kind"), int(FrameKind.RECORDS)))
        firsts, lasts = pc.min_max(records.column("first_seq")).as_py(), pc.min_max(records.column("last_seq")).as_py()
        return cls(
            _sum(records, "count"),
            _sum(records, "length"),
            (Seq(firsts["min"] or 0), Seq(firsts["max"] or 0)),
            (Seq(lasts["min"] or 0), Seq(lasts["max"] or 0)),
            pc.min(records.column("commit_ts_min_us")).as_py(),
            encoded.end_offset,
            encoded.footer_hash,
        )


def _sum(table: pa.Table, column: str) -> int:
    return int(pc.sum(table.column(column)).as_py() or 0)


class _EncodedFooter(NamedTuple):
    """A footer with a valid checksum."""

    index_bytes: bytes
    start: int
    """Position in the file where index and trailer begin."""
    end_offset: Offset
    record_count: int
    frames_hash: bytes
    footer_hash: bytes


def _read_footer(read: Callable[[int, int], bytes], file_size: int) -> _EncodedFooter | None:
    """Return the footer; None if the file isn't sealed. Raises `CorruptFrame` if its footer is damaged."""
    if file_size < SEGMENT_HEADER_SIZE + SEGMENT_TRAILER_SIZE:
        return None
    trailer = read(file_size - SEGMENT_TRAILER_SIZE, SEGMENT_TRAILER_SIZE)
    if len(trailer) < SEGMENT_TRAILER_SIZE or not trailer.endswith(_FOOTER_MAGIC):
        return None
    crc, index_length, end_offset, record_count, frames_hash, _ = _TRAILER.unpack(trailer)
    start = file_size - SEGMENT_TRAILER_SIZE - index_length
    if start < SEGMENT_HEADER_SIZE:
        raise CorruptFrame("the segment footer's length can't be")
    index = read(start, index_length)
    if len(index) < index_length or crc != crc32c(index, trailer[4:]):
        raise CorruptFrame("the segment footer fails its checksum")
    footer_hash = hashlib.sha256(index)
    footer_hash.update(trailer)
    return _EncodedFooter(index, start, Offset(end_offset), record_count, frames_hash, footer_hash.digest())


def _check_chain(table: pa.Table, byte_end: int, end_offset: int, record_count: int) -> None:
    """Raise `CorruptFrame` unless the frames are contiguous from header to index, and match the trailer's totals."""
    position, offset, length, count = (
        ints_of(table.column(name).combine_chunks()) for name in ("position", "offset", "length", "count")
    )
    for found, sizes, least, end in ((position, length, 1, byte_end), (offset, count, 0, end_offset)):
        # Numbers from 0 on: no difference overflows.
        if len(found) and (min(int(found.min()), end) < 0 or sizes.min() < least):
            raise CorruptFrame("the segment footer's frames don't follow on each other")
        if (np.diff(found, append=end) != sizes).any():
            raise CorruptFrame("the segment footer's frames don't follow on each other")
    if (position[0] if len(position) else byte_end) != SEGMENT_HEADER_SIZE or record_count != int(count.sum()):
        raise CorruptFrame("the segment footer contradicts itself")


def _index_table(index: bytes) -> pa.Table:
    try:
        table = ipc.open_stream(index, options=_UNTHREADED).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, TypeError, ValueError) as error:
        raise CorruptFrame(f"the segment footer's index can't be read: {error}") from error
    if table.schema.names != _INDEX.names or table.schema.types != _INDEX.types:
        raise CorruptFrame("the segment footer's index has other columns than it must have")
    if any(table.column(column.name).null_count for column in _INDEX if not column.nullable):
        raise CorruptFrame("the segment footer's index has nulls where there can be none")
    return table


def _decode_index(table: pa.Table) -> FrameEntries:
    try:
        lists = table.column("tables").combine_chunks()
        if lists.values.null_count:
            raise CorruptFrame("the segment footer's index has nulls where there can be none")
        tables = tuple(ints_of(lists.values.field(place)) for place in range(lists.values.type.num_fields))
        facts = tuple(_column(table.column(name).combine_chunks()) for name in _INDEX.names[:-1])
        bounds = ints_of(lists.offsets)
    except (pa.ArrowException, OSError, EOFError, TypeError, ValueError) as error:
        raise CorruptFrame(f"the segment footer's index can't be read: {error}") from error
    if not np.isin(facts[_KIND], list(_KINDS)).all():
        raise CorruptFrame("the segment footer lists frames of unknown kinds")
    return FrameEntries(facts, bounds, tables)


def _column(values: pa.Array) -> Column:
    if values.null_count or not pa.types.is_integer(values.type):
        return np.array(values.to_pylist(), object)
    return ints_of(values)
