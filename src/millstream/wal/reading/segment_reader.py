"""Records of one segment.

A frame's head is always read and checked; of its payload, only the wanted tables are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.codec.checksums import Bytes
from millstream.codec.log_frame import FrameHeader, FrameKind, RecordsFrame, records_frame
from millstream.codec.log_parts import PayloadPart
from millstream.codec.log_records import first_seqs, of_part
from millstream.codec.log_run import FramePart
from millstream.codec.log_schemas import SchemaSet
from millstream.codec.log_segment import FrameTable, SchemaPlace, SegmentHeader
from millstream.errors import CorruptFrame, CorruptWal, UnreadableBytes, UnsupportedFormat
from millstream.model.ids import Epoch, RegionId, SchemaVersion, ShardId, StreamId, TableId
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ByteEnd
from millstream.model.schema import TableSchema, is_definition
from millstream.ports import Files
from millstream.wal.frame_index import HEADS_AHEAD_BYTES, OnDamage, damage, load_schemas, read_header
from millstream.wal.layout import SegmentFile
from millstream.wal.reading.frame_cache import DecodedFrames, FrameKey
from millstream.wal.reading.frame_runs import decode_by_frame
from millstream.wal.reading.table_records import TablePart, TableRecords, piece_of, straddles, within_seqs
from millstream.wal.salvage import KnownSchemas
from millstream.wal.segment_scan import NO_STREAM, ReadAhead, ScannedFrame, loss_at, read_frame, reader_of, scan_frames

_READ_AHEAD_BYTES: Final = 2 << 20
"""Bytes that are read at once if payloads are wanted: what is decoded soon after is still in the processor's cache."""
_AHEAD_BYTES_MAX: Final = 128 << 10
"""Bytes of frames that are decoded at once for readers that share them: the calls for one weigh as much as 10 KiB."""
_GAP_BYTES: Final = 16 << 10
"""Bytes between two parts up to which the gap is read, which is cheaper than another system call."""


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
    """The schema frames before the piece."""
    stream: StreamId
    """The segment's stream."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its frames."""
        return self.byte_end - self.byte_start

    @property
    def end(self) -> dict[ShardId, ByteEnd]:
        """Minimum end of its shard for the span to exist."""
        base = Offset(int(self.path.rsplit("/", 1)[-1].removesuffix(".wal")))
        return {self.shard: ByteEnd(base, self.byte_end)}


@dataclass(slots=True)
class GroupSize:
    """Size of a commit group, as far as it was found."""

    last_seq: Seq
    rows: int
    size_bytes: int


class SegmentSource:
    """One segment's file, read frame by frame.

    Args:
        on_damage: receives a damaged header or schema, and tables' rows in a frame, which are then
            skipped; without it they are errors.
        elsewhere: finds schemas that this segment has lost.
        decoded: frames that other readers share; without `on_damage` only.
        durable_end: where the durable frames end, if the segment is being written.
        shard, stream: the shard and stream that its header must name, if they are given.

    Raises:
        CorruptWal, UnsupportedFormat, FileNotFoundError: from every method, including the
            constructor.
    """

    def __init__(
        self,
        files: Files,
        path: str,
        *,
        on_damage: OnDamage | None = None,
        elsewhere: Callable[[], KnownSchemas] | None = None,
        decoded: DecodedFrames | None = None,
        durable_end: int | None = None,
        shard: ShardId | None = None,
        stream: StreamId | None = None,
        definitions: bool = False,
    ) -> None:
        base = Offset(int(path.rsplit("/", 1)[-1].removesuffix(".wal")))
        self.path = path
        self._files = files
        self._on_damage = on_damage
        self._elsewhere = elsewhere
        self._decoded = decoded if on_damage is None else None
        self._durable_end = durable_end
        self._definitions = definitions
        try:
            self._header = read_header(files, SegmentFile(base, path), shard=shard, stream=stream)
        except CorruptWal as error:
            if on_damage is None:
                raise
            on_damage(error)
            self._header = SegmentHeader(NO_STREAM, RegionId(0), ShardId(0), Epoch(0), base)
        self._schemas = SchemaSet(self._header.directory)
        self._brought: set[int] = set()
        """Positions of schemas that were read."""
        self._heads = ReadAhead(reader_of(files, path), HEADS_AHEAD_BYTES)
        self._frames = ReadAhead(reader_of(files, path), _READ_AHEAD_BYTES)
        self._reads_whole = False
        """Whether the last frame held little else than what was wanted of it: then payloads are read along with heads."""
        self._ahead: dict[int, ScannedFrame] = {}
        """Frames that were decoded before they were asked for, by position."""

    @property
    def schemas(self) -> SchemaSet:
        """The schemas that have been loaded."""
        return self._schemas

    def continues(self, other: SegmentSource) -> bool:
        """Return whether this segment's frames may be decoded together with those of the one before it."""
        mine, others = self._header, other._header
        are_alike = (mine.epoch, mine.directory) == (others.epoch, others.directory)
        return other is self or (are_alike and mine.stream != NO_STREAM)  # a lost header's epoch isn't known

    def knows(self, tables: Iterable[FrameTable]) -> bool:
        """Return whether the schemas of these tables have been loaded."""
        return all((table.table_id, table.schema_version) in self._schemas for table in tables)

    def schema(self, table: TableId, version: SchemaVersion) -> TableSchema:
        """Return a schema that has been loaded."""
        return self._schemas.find(table, version)

    def _shows(self, part: PayloadPart) -> bool:
        return self._definitions or not is_definition(part.schema_version)

    def known_schemas(self) -> list[TableSchema]:
        """Return the schemas that have been loaded."""
        return list(self._schemas.tables.values())

    def bring_schemas(self, places: Iterable[SchemaPlace], wanted: frozenset[TableId] | None = None) -> None:
        """Load the schemas at these positions, each once; if `wanted` is given, only those of its tables.

        In a new log each frame may bring one, for hundreds of tables.
        """
        new = [
            place
            for place in places
            if place.position not in self._brought and (wanted is None or place.table_id in wanted)
        ]
        for some in [new] if self._on_damage is None else [[place] for place in new]:
            try:
                found = load_schemas(self._files, self.path, self._header, some)
            except CorruptWal as error:
                if self._on_damage is None:
                    raise
                self._on_damage(error)
                continue
            self._brought.update(place[0] for place in some)
            for schema in found.tables.values():
                if (schema.table_id, schema.version) not in self._schemas:
                    self._schemas.add(schema)

    def bring_from_elsewhere(self, tables: Iterable[FrameTable]) -> None:
        """Load schemas that this segment has lost from another segment."""
        for table in tables:
            if self._elsewhere is not None and (table.table_id, table.schema_version) not in self._schemas:
                schema = self._elsewhere().find(table.table_id, table.schema_version)
                if schema is not None:
                    self._schemas.add(schema)

    def frame(
        self,
        position: int,
        wanted: frozenset[TableId] | None = None,
        *,
        first: Offset | None = None,
        end: Offset | None = None,
    ) -> ScannedFrame:
        """Return the verified head of the frame at a position.

        `wanted` are the tables whose rows will be read. `first` and `end` are its offsets, for the error, if known.
        """
        try:
            scanned = self._ahead.pop(position, None) or self._read_frame(position)
        except CorruptFrame as error:
            if first is None:
                segment = SegmentFile(self._header.base_offset, self.path)
                loss = loss_at(self._files, self._header.shard, segment, position)
                first, end = (segment.base_offset, None) if loss is None else (loss.offset_from, loss.offset_to)
                assert first is not None
            raise damage(error, file=self.path, byte=position, offset_from=first, offset_to=end) from error
        needed = sum([part.length for part in scanned.header.parts if wanted is None or part.table_id in wanted])
        self._reads_whole = 2 * needed > scanned.length
        return scanned

    def _read_frame(self, position: int) -> ScannedFrame:
        if self._reads_whole:
            with suppress(UnreadableBytes):  # perhaps of rows alone
                return read_frame(self._frames, position, payload=None)
        return read_frame(self._heads, position, payload=False)

    def decode(self, scanned: ScannedFrame) -> RecordsFrame:
        """Decode a records frame; its rows are read on demand."""
        behind = scanned.position + len(scanned.head)

        def read_payload(position: int, length: int) -> Bytes:
            if scanned.payload is not None:
                return scanned.payload[position : position + length]
            return self._files.read(self.path, behind + position, length)

        try:
            return records_frame(scanned.header, scanned.operations, scanned.batches, self._schemas, read_payload)
        except CorruptFrame as error:
            raise self._damage(error, scanned.position, scanned) from error

    def read_parts(
        self, frames: Iterable[tuple[int, ScannedFrame]], wanted: frozenset[TableId] | None
    ) -> list[FramePart]:
        """Return the parts of some tables, or of all, in file order; parts close together are read at once.

        `frames` are numbered as in their run.
        """
        places: list[tuple[int, int, PayloadPart]] = []
        found = []
        for number, scanned in frames:
            begin = position = scanned.position + len(scanned.head)
            for part in scanned.header.parts:
                if (wanted is None or part.table_id in wanted) and self._shows(part):
                    if scanned.payload is None:
                        places.append((position, number, part))
                    else:
                        data = scanned.payload[position - begin : position - begin + part.length]
                        found.append(FramePart(number, part, data))
                position += part.length
        start, data = 0, memoryview(b"")
        for at, (position, number, part) in enumerate(places):
            if position + part.length > start + len(data):
                start, end = position, position + part.length
                for following, _, other in places[at + 1 :]:
                    if following - end > _GAP_BYTES:
                        break
                    end = following + other.length
                data = memoryview(self._files.read(self.path, start, end - start))
            found.append(FramePart(number, part, data[position - start : position - start + part.length]))
        return sorted(found, key=attrgetter("frame")) if len(places) < len(found) else found

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
        """Yield a frame's records of the wanted tables, with numbers in `(after, upto]`.

        See `codec.log_records.records_of`.
        """
        header = scanned.header
        tables = _tables_of(header, wanted)
        if not tables:
            return
        if self._decoded is not None and offsets and columns is None and not moments:
            records: Iterable[TableRecords] = self._shared(self._decoded, scanned, wanted)
        else:
            records = self._all_records(scanned, tables, columns, offsets=offsets, moments=moments)
        is_cut = straddles(header.first_seq, header.last_seq, after, upto)
        for found in records:
            yield from within_seqs(found, after, upto) if is_cut else (found,)

    def _shared(
        self, decoded: DecodedFrames, scanned: ScannedFrame, wanted: frozenset[TableId] | None
    ) -> list[TableRecords]:
        """Return a frame's records from those that readers share; if it must be decoded, so are small ones behind it."""

        def key_of(one: ScannedFrame) -> FrameKey:
            return one.header.epoch, one.head, _tables_of(one.header, wanted)

        def decode() -> list[TableRecords]:
            run, size = [scanned], scanned.length
            self._ahead.clear()
            for following in self._following(scanned):
                size += following.length
                if size > _AHEAD_BYTES_MAX or key_of(following) in decoded:
                    break
                self._ahead[following.position] = following
                if _tables_of(following.header, wanted):
                    run.append(following)
            if len(run) > 1:
                with suppress(CorruptFrame):  # if it is this one, decoding it alone says so
                    first, *others = decode_by_frame([(self, frame) for frame in run], wanted)
                    for following, records in zip(run[1:], others, strict=True):
                        decoded.keep(key_of(following), records, following.length)
                    return first
            tables = _tables_of(scanned.header, wanted)
            return list(self._all_records(scanned, tables, None, offsets=True, moments=False))

        return decoded.find(key_of(scanned), decode)

    def _following(self, scanned: ScannedFrame) -> Iterator[ScannedFrame]:
        """Yield the durable records frames behind a frame, up to the first of another kind or with an unknown schema."""
        header = replace(self._header, base_offset=Offset(scanned.header.first_offset + scanned.header.count))
        with suppress(CorruptFrame, UnsupportedFormat):  # whoever reads it says so
            for following in scan_frames(
                self._heads, header, position=scanned.end, end=self._durable_end, payload=False
            ):
                parts = following.header.parts
                if following.header.kind is not FrameKind.RECORDS or not all(
                    (part.table_id, part.schema_version) in self._schemas for part in parts
                ):
                    return
                yield following

    def _all_records(
        self,
        scanned: ScannedFrame,
        tables: frozenset[TableId],
        columns: frozenset[str] | None,
        *,
        offsets: bool,
        moments: bool,
    ) -> Iterator[TableRecords]:
        frame = self.decode(scanned)
        firsts = first_seqs(frame.operations, frame.batches)
        for table_id in frame.table_ids():
            if table_id not in tables:
                continue
            try:
                for schema, batch in frame.records(table_id, columns=columns, offsets=offsets, moments=moments):
                    if is_definition(schema.version) and not self._definitions:
                        continue
                    yield _table_records(frame, firsts, schema, batch)
            except CorruptFrame as error:
                told = self._damage(error, scanned.position, scanned, table_id)
                if self._on_damage is None:
                    raise told from error
                self._on_damage(told)

    def parts(self, scanned: ScannedFrame) -> list[TablePart]:
        """Return what a frame holds, by table; no payload is read."""
        frame = self.decode(scanned)
        try:
            found = []
            for part in filter(self._shows, scanned.header.parts):
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


def _table_records(
    frame: RecordsFrame, first: npt.NDArray[np.int64], schema: TableSchema, batch: pa.RecordBatch
) -> TableRecords:
    mine = of_part(frame.batches, schema)
    operation, count = (frame.batches.column(name).to_numpy()[mine] for name in ("operation", "count"))
    of_row = np.repeat(operation, count)
    times_ns = pa.array(np.full(len(of_row), frame.header.hybrid_time, np.int64))
    return piece_of(frame.header, schema, batch, pa.array(first[of_row]), times_ns)


def span_source(
    files: Files, span: LogSpan, wanted: frozenset[TableId] | None = None, *, definitions: bool = False
) -> SegmentSource:
    """Return the source of a span's segment, with the schemas that its frames need; `wanted` as in `bring_schemas`."""
    source = SegmentSource(files, span.path, shard=span.shard, stream=span.stream, definitions=definitions)
    source.bring_schemas(span.schema_frames, wanted)
    return source


def _tables_of(header: FrameHeader, wanted: frozenset[TableId] | None) -> frozenset[TableId]:
    """Return the tables of a frame's rows, of the wanted ones."""
    return frozenset(part.table_id for part in header.parts if wanted is None or part.table_id in wanted)


def frames_in(
    source: SegmentSource, span: LogSpan, wanted: frozenset[TableId] | None = frozenset()
) -> Iterator[ScannedFrame]:
    """Yield the records frames of a span; `wanted` are the tables whose rows will be read."""
    position = span.byte_start
    while position < span.byte_end:
        scanned = source.frame(position, wanted)
        position = scanned.end
        if scanned.header.kind is FrameKind.RECORDS:
            yield scanned
