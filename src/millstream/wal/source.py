"""Records out of one segment: a frame's head is always read and checked, of its payload only the tables wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.codec.log_directory import Numbering
from millstream.codec.log_frame import RecordsFrame, SchemaSet, decode_frame
from millstream.codec.log_segment import SegmentHeader, TableEntry
from millstream.errors import CorruptFrame, CorruptWal, OffsetExpired
from millstream.model.ids import Epoch, RegionId, ShardId, TableId
from millstream.model.positions import Offset, Seq
from millstream.model.schema import TableSchema
from millstream.ports import Files
from millstream.wal.index import HEADS_AHEAD_BYTES, OnDamage, SchemaPlace, damage, load_schemas, read_header
from millstream.wal.layout import SegmentFile
from millstream.wal.scan import ScannedFrame, Window, read_frame, reader_of
from millstream.wal.survey import KnownSchemas
from millstream.wal.walk import NO_STREAM, loss_at


@dataclass(frozen=True, slots=True)
class TableRecords:
    """Records of one table under one schema version, out of one frame, in the order of their numbers."""

    schema: TableSchema
    batch: pa.RecordBatch
    """`record_schema(schema)`, or the columns asked for and `__seq`; with `__offset` first where asked."""
    shard: ShardId
    first_seq: Seq
    last_seq: Seq
    operation_seq: pa.Array
    """For each record the first number that its operation has on this shard: what shards are merged by."""
    frame_offset: Offset
    """The first offset of the frame: records of several tables are merged by offset within it."""


@dataclass(frozen=True, slots=True)
class TablePart:
    """What a stretch of the log holds of one table under one schema version, by the heads of its frames."""

    schema: TableSchema
    first_seq: Seq
    last_seq: Seq
    """Bounds of its numbers."""
    rows: int
    size_bytes: int
    """As they lie in the log, compressed."""


@dataclass(frozen=True, slots=True)
class LogSpan:
    """A piece of one segment to read, for any process that sees the folder; picklable."""

    shard: ShardId
    path: str
    byte_start: int
    byte_end: int
    after: Seq
    upto: Seq
    """Rows with numbers in `(after, upto]`."""
    schema_frames: tuple[SchemaPlace, ...]
    """The schema frames in front."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its frames."""
        return self.byte_end - self.byte_start


class Expiry:
    """Turns a segment that is gone into `OffsetExpired`: retention was faster."""

    def __init__(self, first_seq: Callable[[], Seq]) -> None:
        self._first_seq = first_seq

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            first = self._first_seq()
            raise OffsetExpired(
                f"retention has dropped {error.filename} while it was read; {first} is the first number left",
                first=int(first),
            ) from error


class SegmentSource:
    """One segment's file, read frame by frame.

    Args:
        files: the file system.
        path: the segment's.
        on_damage: told of a damaged header or schema, and of tables' rows in a frame, which are then done without; without it
            they are errors.
        elsewhere: where schemas are found that this segment has lost.

    Raises:
        CorruptWal, UnsupportedFormat, FileNotFoundError: from every method, the making included.
    """

    def __init__(
        self,
        files: Files,
        path: str,
        *,
        on_damage: OnDamage | None = None,
        elsewhere: Callable[[], KnownSchemas] | None = None,
    ) -> None:
        base = Offset(int(path.rsplit("/", 1)[-1].removesuffix(".wal")))
        self.path = path
        self._files = files
        self._on_damage = on_damage
        self._elsewhere = elsewhere
        try:
            self._header = read_header(files, SegmentFile(base, path))
        except CorruptWal as error:
            if on_damage is None:
                raise
            on_damage(error)
            self._header = SegmentHeader(NO_STREAM, RegionId(0), ShardId(0), Epoch(0), base)
        self._schemas = SchemaSet(self._header.directory)
        self._heads = Window(reader_of(files, path), HEADS_AHEAD_BYTES)

    def knows(self, tables: Iterable[TableEntry]) -> bool:
        """Whether the schemas of these have been brought."""
        return all((table.table_id, table.schema_version) in self._schemas for table in tables)

    def bring_schemas(self, places: Iterable[SchemaPlace]) -> None:
        """Read the schemas at these places."""
        for some in [places] if self._on_damage is None else [[place] for place in places]:
            try:
                found = load_schemas(self._files, self.path, self._header, some)
            except CorruptWal as error:
                if self._on_damage is None:
                    raise
                self._on_damage(error)
                continue
            for schema in found.tables.values():
                if (schema.table_id, schema.version) not in self._schemas:
                    self._schemas.add(schema)

    def bring_from_elsewhere(self, tables: Iterable[TableEntry]) -> None:
        """Take schemas that this segment has lost from another one."""
        for table in tables:
            if self._elsewhere is not None and (table.table_id, table.schema_version) not in self._schemas:
                schema = self._elsewhere().find(table.table_id, table.schema_version)
                if schema is not None:
                    self._schemas.add(schema)

    def frame(self, position: int, *, first: Offset | None = None, end: Offset | None = None) -> ScannedFrame:
        """The head of the frame at a position, verified; `first` and `end` are its offsets, for the error, where known."""
        try:
            return read_frame(self._heads, position, payload=False)
        except CorruptFrame as error:
            if first is None:
                segment = SegmentFile(self._header.base_offset, self.path)
                loss = loss_at(self._files, self._header.shard, segment, position)
                first, end = (segment.base_offset, None) if loss is None else (loss.offset_from, loss.offset_to)
                assert first is not None
            raise damage(error, file=self.path, byte=position, offset_from=first, offset_to=end) from error

    def decode(self, scanned: ScannedFrame) -> RecordsFrame:
        """A records frame; its rows are read when they are asked for."""
        behind = scanned.position + len(scanned.head)

        def read_payload(position: int, length: int) -> bytes:
            return self._files.read(self.path, behind + position, length)

        try:
            frame = decode_frame(scanned.head, self._schemas, read_payload=read_payload)
        except CorruptFrame as error:
            raise self._damage(error, scanned.position, scanned) from error
        assert isinstance(frame, RecordsFrame)
        return frame

    def records(
        self,
        scanned: ScannedFrame,
        after: Seq | None,
        upto: Seq | None,
        wanted: frozenset[TableId] | None,
        *,
        columns: frozenset[str] | None = None,
        offsets: bool = False,
        moments: bool = False,
    ) -> Iterator[TableRecords]:
        """A frame's records of the tables wanted, with numbers in `(after, upto]`; see `codec.log_records.records_of`."""
        header = scanned.header
        if wanted is not None and not any(part.table_id in wanted for part in header.parts):
            return
        frame = self.decode(scanned)
        straddles = (after is not None and header.first_seq <= after) or (upto is not None and header.last_seq > upto)
        firsts = first_seqs(frame)
        for table_id in frame.table_ids():
            if wanted is not None and table_id not in wanted:
                continue
            try:
                for schema, batch in frame.records(table_id, columns=columns, offsets=offsets, moments=moments):
                    found = _table_records(frame, firsts, schema, batch)
                    yield from _within_seqs(found, after, upto) if straddles else (found,)
            except CorruptFrame as error:
                told = self._damage(error, scanned.position, scanned, table_id)
                if self._on_damage is None:
                    raise told from error
                self._on_damage(told)

    def parts(self, scanned: ScannedFrame) -> list[TablePart]:
        """What a frame holds of which table; no payload is read."""
        try:
            frame = decode_frame(scanned.head, self._schemas, read_payload=lambda _position, _length: b"")
            assert isinstance(frame, RecordsFrame)
            found = []
            for part in scanned.header.parts:
                first, last = frame.numbers_of(part.table_id, part.schema_version)
                schema = self._schemas.find(part.table_id, part.schema_version)
                found.append(TablePart(schema, first, last, part.rows, part.length))
            return found
        except CorruptFrame as error:
            raise self._damage(error, scanned.position, scanned) from error

    def _damage(
        self, error: CorruptFrame, position: int, scanned: ScannedFrame, table: TableId | None = None
    ) -> CorruptWal:
        first = scanned.header.first_offset
        end = Offset(first + scanned.header.count)
        return damage(error, file=self.path, byte=position, offset_from=first, offset_to=end, table=table)


def sum_of_parts(one: TablePart, other: TablePart) -> TablePart:
    """Both together; of one table and version."""
    return TablePart(
        one.schema,
        min(one.first_seq, other.first_seq),
        max(one.last_seq, other.last_seq),
        one.rows + other.rows,
        one.size_bytes + other.size_bytes,
    )


def first_seqs(frame: RecordsFrame) -> npt.NDArray[np.int64]:
    """The first number of each operation of a frame."""
    first = np.full(frame.operations.num_rows, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(first, frame.batches.column("operation").to_numpy(), frame.batches.column("first_seq").to_numpy())
    return first


def _table_records(
    frame: RecordsFrame, first: npt.NDArray[np.int64], schema: TableSchema, batch: pa.RecordBatch
) -> TableRecords:
    batches = frame.batches
    operation = batches.column("operation").to_numpy()
    mine = (batches.column("table_id").to_numpy() == schema.table_id) & (
        batches.column("schema_version").to_numpy() == schema.version
    )
    of_row = np.repeat(operation[mine], batches.column("count").to_numpy()[mine])
    if frame.header.numbering is Numbering.OPERATION:  # partitions of a table stand one behind the other
        order = np.argsort(batch.column("__seq").to_numpy(), kind="stable")
        batch, of_row = batch.take(pa.array(order)), of_row[order]
    seqs = batch.column("__seq")
    return TableRecords(
        schema,
        batch,
        frame.header.shard,
        Seq(seqs[0].as_py()),
        Seq(seqs[-1].as_py()),
        pa.array(first[of_row]),
        frame.header.first_offset,
    )


def _within_seqs(found: TableRecords, after: Seq | None, upto: Seq | None) -> Iterator[TableRecords]:
    seqs = found.batch.column("__seq").to_numpy()
    keep = np.ones(len(seqs), dtype=bool)
    if after is not None:
        keep &= seqs > after
    if upto is not None:
        keep &= seqs <= upto
    yield from _filtered(found, keep)


def within_offsets(found: TableRecords, start: Offset, end: Offset) -> Iterator[TableRecords]:
    """The records with offsets in `[start, end)`, or nothing."""
    offsets = found.batch.column("__offset").to_numpy()
    yield from _filtered(found, (offsets >= start) & (offsets < end))


def _filtered(found: TableRecords, keep: npt.NDArray[np.bool_]) -> Iterator[TableRecords]:
    if keep.all():
        yield found
        return
    if not keep.any():
        return
    mask = pa.array(keep)
    batch = found.batch.filter(mask)
    seqs = batch.column("__seq")
    yield TableRecords(
        found.schema,
        batch,
        found.shard,
        Seq(seqs[0].as_py()),
        Seq(seqs[-1].as_py()),
        found.operation_seq.filter(mask),
        found.frame_offset,
    )
