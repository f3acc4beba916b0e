"""Reading a stream's log from its folder alone: any process, at any time, also while it is being written.

A reader trusts the marks (`wal.durable_mark`), so it never sees records that aren't durable, nor half an operation. The range `(A, B]`
returns the same rows every time, until retention drops it: then `OffsetExpired` is raised. Frames are split only
where a token inside a group requires it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from millstream.backoff import Backoff
from millstream.codec.log_frame import FrameHeader, FrameKind, RecordsFrame
from millstream.codec.log_segment import FrameEntry, FrameTable
from millstream.errors import CorruptWal, LogError, OffsetBeyondEnd, OffsetExpired
from millstream.model.ids import SchemaVersion, ShardId, StreamId, TableId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq, StreamToken, short_stream_id
from millstream.model.schema import TableKind, TableSchema, is_definition
from millstream.ports import Files
from millstream.protocol.sequencer.persisted_upto import writer_cuts
from millstream.wal.dropped_segments import past_dropped_front, past_drops
from millstream.wal.files import RealFiles
from millstream.wal.frame_index import OnDamage, ShardIndex, has_numbers, overlaps
from millstream.wal.layout import SegmentFile, shard_folder
from millstream.wal.readable_range import ReadableRange, from_future
from millstream.wal.reading.commit_time_lookup import numbers_around
from millstream.wal.reading.frame_cache import DecodedFrames
from millstream.wal.reading.frame_runs import run_records, runs_of
from millstream.wal.reading.newest_schemas import NewestSchemas
from millstream.wal.reading.operation_bounds import whole_before
from millstream.wal.reading.segment_reader import (
    GroupSize,
    LogSpan,
    SegmentSource,
    frames_in,
    span_source,
)
from millstream.wal.reading.shard_merge import Place, by_shard_or_group, group_records
from millstream.wal.reading.table_records import TablePart, TableRecords, sum_of_parts, within_offsets
from millstream.wal.salvage import KnownSchemas
from millstream.wal.segment_scan import ScannedFrame
from millstream.wal.truncation_watch import HistoryWatch, TruncationWatch

__all__ = ["LogSpan", "StreamReader", "TablePart", "TableRecords"]

_POLL_S: Final = (0.0005, 0.02)
"""Interval at which an idle reader reads the mark: a twentieth of what a person notices, at little CPU cost."""


class StreamReader:
    """Reader of one stream's log.

    Args:
        folder: `data/wal/<stream>`.
        without_mark: show every valid whole group: for a folder that was copied without marks.
        durable: go by what is durable here, not by what is shown: for the log's writer, and replication.
        on_damage: receives damage, which reads then leave out; without it they raise `CorruptWal`.
        decoded: frames that it shares with other readers of the log; `read` takes them from there.
        definitions: read definitions, too (`TableKind.DEFINITION`); their schemas are listed only where that is asked.

    Concurrency: one thread a reader; any number of readers.
    """

    def __init__(
        self,
        folder: str,
        *,
        files: Files | None = None,
        without_mark: bool = False,
        durable: bool = False,
        on_damage: OnDamage | None = None,
        decoded: DecodedFrames | None = None,
        definitions: bool = False,
    ) -> None:
        self._folder, self._definitions = folder, definitions
        self._files: Files = RealFiles() if files is None else files
        self.extent = ReadableRange(
            self._files, folder, without_mark=without_mark, on_damage=on_damage, durable=durable
        )
        self._on_damage, self._decoded = on_damage, decoded
        self._watch = HistoryWatch()
        self._indexes: dict[ShardId, ShardIndex] = {}
        self._stream: StreamId | None = None
        self._known_schemas: KnownSchemas | None = None
        self._newest = NewestSchemas(self._files)

    # --- positions -------------------------------------------------------------------------------------------------

    @property
    def stream_id(self) -> StreamId:
        """Stream of the log. Raises `LogError` if nothing has been written yet."""
        if self._stream is None:
            self._stream = next((mark.stream for mark in self._marks()[0].values()), None)
        if self._stream is None:
            raise LogError(f"{self._folder} holds no log yet", code="log_empty")
        return self._stream

    @property
    def shards(self) -> tuple[ShardId, ...]:
        """Shards that the folder has."""
        return self.extent.shards()

    def lacks_marks(self) -> bool:
        """Return whether a shard has frames but no mark: then only `without_mark` reads it."""
        return self.extent.lacks_marks()

    def persisted_upto(self) -> Seq:
        """Return the number up to which every number is durable and readable, or never will be."""
        return self._marks()[1]

    def token(self) -> StreamToken:
        """Return the newest consistent cut as a token."""
        return StreamToken.scalar(self.stream_id, self.persisted_upto())

    def vector_token(self) -> StreamToken:
        """Return how far each writer's records are durable: a vector of whole operations, but no cut of their order."""
        return self._vector(*self._marks())

    def _vector(self, marks: Mapping[ShardId, DurableMark], persisted: Seq) -> StreamToken:
        return StreamToken(short_stream_id(self.stream_id), persisted, writer_cuts(marks.values()))

    def first_seq(self) -> Seq:
        """Return the lowest number that can still be read: reading may begin at a token of one less."""
        return self.extent.first_seq()

    def durable_offset(self, shard: ShardId) -> Offset:
        """Return the exclusive end of a shard's durable offsets."""
        mark = self._marks()[0].get(shard)
        return Offset(0) if mark is None else mark.durable_offset

    def first_offset(self, shard: ShardId) -> Offset:
        """Return a shard's first remaining offset."""
        return self.extent.dropped(shard)[1]

    def frames_between(self, after: Seq, upto: Seq) -> Iterator[Place]:
        """Yield the places of all frames with records of `(after, upto]`, by commit group."""
        marks, _ = self._marks()
        with TruncationWatch(self.extent, marks):
            yield from self._all_frames(marks, after, upto)

    def offset_beyond(self, shard: ShardId, seq: Seq) -> Offset:
        """Return an offset of a shard before which all numbers are at or below `seq`."""
        marks, persisted = self._marks()
        if (mark := marks.get(shard)) is None:
            return Offset(0)
        with TruncationWatch(self.extent, {shard: mark}):
            return next((at.offset for _, _, at in self._frames_of(shard, seq, persisted, mark)), mark.durable_offset)

    def newest_headers(self, upto: Seq, *, readable: bool = False) -> list[FrameHeader]:
        """Return the header of each shard's newest group at or below `upto`; if `readable`, without those that can't be read."""
        found = [self._index(s).newest_header(upto, mark, readable=readable) for s, mark in self._marks()[0].items()]
        return [header for header in found if header is not None]

    def wait_beyond(self, seq: Seq, deadline_s: float) -> bool:
        """Return True once `persisted_upto` is greater than `seq`, or False after that many seconds."""
        end = time.monotonic() + deadline_s
        pause = Backoff(*_POLL_S, factor=1.5, jitter=0)
        while self.persisted_upto() <= seq:
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause.next_s(), left))
        return True

    # --- cuts and spans --------------------------------------------------------------------------------------------

    def cut(self, after: Seq, *, rows_max: int | None = None, bytes_max: int | None = None) -> Seq:
        """Return the greatest end of a commit group that can be read up to, within the bounds.

        Args:
            after: the reader's position.
            rows_max: records in `(after, cut]`; one group may exceed it.
            bytes_max: bytes of their frames; one group may exceed it.

        Returns:
            `after` itself if there is nothing after it.

        Raises:
            OffsetExpired, TokenFromFuture, CorruptWal.
        """
        marks, persisted = self._marks()
        self.extent.check_range(after, after, persisted)
        if rows_max is None and bytes_max is None:
            return persisted
        rows = size = 0
        reached = after
        for group in self._groups(after, marks, persisted):
            rows += group.rows
            size += group.size_bytes
            over = (rows_max is not None and rows > rows_max) or (bytes_max is not None and size > bytes_max)
            if over and reached > after:
                return reached
            reached = group.last_seq
            if over:
                return reached
        # After the last group there may be numbers that never will be durable: everything has been read nevertheless.
        return max(reached, persisted)

    def whole_upto(self, n: Seq) -> Seq:
        """Return the greatest position at or below `n` that splits no operation: `n`, or the start of its operation.

        Beyond what is durable, and below what retention has left, nothing is read. Raises `CorruptWal`.
        """
        return self._whole_upto(n, *self._marks())

    def whole_token(self, token: StreamToken) -> StreamToken:
        """As `whole_upto` for each writer's own position and its own operations."""
        marks, _ = self._marks()
        whole = dict(token.ahead)
        for writer, end in writer_cuts(marks.values()).items():
            own = {shard: mark for shard, mark in marks.items() if mark.writer == writer}
            whole[writer] = self._whole_upto(token.of(writer), own, end)
        return StreamToken(token.stream, min([token.minimum, *whole.values()]), whole)

    def _whole_upto(self, n: Seq, marks: Mapping[ShardId, DurableMark], end: Seq) -> Seq:
        return whole_before(n, self.first_seq(), end, lambda after, upto: self._frame_groups(after, upto, marks))

    def spans(self, after: Seq, upto: Seq, *, bytes_target: int = 32 << 20) -> list[LogSpan]:
        """Split the rows of `(after, upto]` into pieces, at frames.

        Args:
            upto: inclusive; at most `persisted_upto`.
            bytes_target: approximate size of a piece.
        """
        marks, persisted = self._marks()
        self.extent.check_range(after, upto, persisted)
        spans: list[LogSpan] = []
        for shard, mark in marks.items():
            piece: list[FrameEntry] = []
            of: SegmentFile | None = None
            with TruncationWatch(self.extent, {shard: mark}):
                for _, segment, entry in self._frames_of(shard, after, upto, mark):
                    size = piece[-1].position - piece[0].position if piece else 0
                    if of is not None and (segment != of or size + entry.length > bytes_target):
                        spans.append(self._span(shard, of, piece, after, upto, mark))
                        piece = []
                    of = segment
                    piece.append(entry)
                if of is not None and piece:
                    spans.append(self._span(shard, of, piece, after, upto, mark))
        return spans

    def _span(
        self, shard: ShardId, segment: SegmentFile, piece: list[FrameEntry], after: Seq, upto: Seq, mark: DurableMark
    ) -> LogSpan:
        end = piece[-1].position + piece[-1].length
        schemas = self._index(shard).schema_frames(segment, mark, end)
        return LogSpan(shard, segment.path, piece[0].position, end, after, upto, schemas, mark.stream)

    # --- records ---------------------------------------------------------------------------------------------------

    def read_span(
        self,
        span: LogSpan,
        *,
        tables: Iterable[TableId] | None = None,
        columns: frozenset[str] | None = None,
        moments: bool = False,
    ) -> Iterator[TableRecords]:
        """Yield the records of a span, of some tables or all, with `__seq` and some columns or all, in order.

        Reads only the bytes of those tables and the heads of frames. Needs neither mark nor footer. With `moments`,
        copied rows have the moment of their copy as `__commit_ts`.
        """
        wanted = None if tables is None else frozenset(tables)
        with TruncationWatch(self.extent, span.end, span.upto):
            source = span_source(self._files, span, wanted, definitions=self._definitions)
            for run in runs_of(((source, frame) for frame in frames_in(source, span, wanted)), wanted):
                yield from run_records(
                    run, span.after, span.upto, wanted, columns=columns, moments=moments, by_table=True
                )

    def schemas_in(self, span: LogSpan, tables: Iterable[TableId]) -> list[TableSchema]:
        """Return the schemas under which records of some tables may stand in a span, without definitions."""
        with TruncationWatch(self.extent, span.end, span.upto):
            source = span_source(self._files, span, frozenset(tables))
        return [schema for schema in source.known_schemas() if schema.kind is not TableKind.DEFINITION]

    def parts_of(self, span: LogSpan) -> list[TablePart]:
        """Return what a span's frames hold, by table and schema version, from their heads; those at its bounds count whole."""
        found: dict[tuple[TableId, SchemaVersion], TablePart] = {}
        with TruncationWatch(self.extent, span.end, span.upto):
            source = span_source(self._files, span, definitions=self._definitions)
            for scanned in frames_in(source, span):
                for part in source.parts(scanned):
                    key = (part.schema.table_id, part.schema.version)
                    found[key] = sum_of_parts(found[key], part) if key in found else part
        return list(found.values())

    def read_between(
        self, after: Seq, upto: Seq, *, table: TableId | None = None, offsets: bool = False
    ) -> Iterator[TableRecords]:
        """Yield the records of `(after, upto]`, by commit group; those of one table in the order of their numbers.

        Raises:
            OffsetExpired: retention has dropped part of it.
            TokenFromFuture: `upto` is beyond `persisted_upto`.
            CorruptWal: it is damaged; the records before the damage were right.
        """
        marks, persisted = self._marks()
        self.extent.check_range(after, upto, persisted)
        yield from self._between(marks, dict.fromkeys(marks, (after, upto)), table, offsets=offsets)

    def read_tokens(
        self, after: StreamToken, upto: StreamToken, *, table: TableId | None = None
    ) -> Iterator[TableRecords]:
        """Yield the records between two tokens: each writer's between its own positions, in the order of numbers.

        Args:
            after: a token that was given out, or `whole_token` of one: a position inside an operation splits it.
            upto: another one.
            table: only this table.

        Raises:
            OffsetExpired, TokenFromFuture, CorruptWal: as `read_between`.
        """
        marks, persisted = self._marks()
        newest = self._vector(marks, persisted)
        if not (after <= newest and upto <= newest):
            raise from_future(str(upto if after <= newest else after), persisted, newest)
        self.extent.check_range(after.minimum, after.minimum, persisted)
        bounds = {shard: (after.of(mark.writer), upto.of(mark.writer)) for shard, mark in marks.items()}
        yield from self._between(marks, bounds, table)

    def _between(
        self,
        marks: Mapping[ShardId, DurableMark],
        bounds: Mapping[ShardId, tuple[Seq, Seq]],
        table: TableId | None,
        *,
        offsets: bool = False,
    ) -> Iterator[TableRecords]:
        """Yield the records of each shard between its bounds; those of one table in the order of their numbers."""
        wanted = None if table is None else frozenset((table,))
        frames = heapq.merge(
            *(self._frames_of(shard, *bounds[shard], mark) for shard, mark in marks.items()),
            key=lambda found: (found[2].group_last_seq, found[2].first_seq),
        )
        sources: dict[ShardId, SegmentSource] = {}

        def records(place: Place, tables: frozenset[TableId] | None) -> Iterator[TableRecords]:
            return self._records(sources, place, marks[place[0]], tables, bounds[place[0]], offsets=offsets)

        with TruncationWatch(self.extent, marks):
            for shard, places in by_shard_or_group(frames, wanted, alone=len(marks) == 1):
                if shard is None:
                    yield from group_records(list(places), wanted, records)
                elif self._on_damage is not None:
                    yield from (found for place in places for found in records(place, wanted))
                else:
                    for run in runs_of(self._scanned(sources, places, marks[shard], wanted), wanted):
                        yield from run_records(run, *bounds[shard], wanted, offsets=offsets)

    def read(
        self,
        shard: ShardId,
        from_offset: Offset,
        *,
        tables: Iterable[TableId] | None = None,
        upto: Offset | None = None,
        numbers: tuple[Seq | None, Seq | None] = (None, None),
        moments: bool = False,
    ) -> Iterator[TableRecords]:
        """Yield a shard's records from an offset to the durable end (or `upto`), with their offsets.

        Args:
            from_offset: inclusive.
            tables: only these.
            upto: exclusive.
            numbers: only records with numbers in `(first, second]`; frames without any aren't read.
            moments: give copied rows the moment of their copy as `__commit_ts`.

        Raises:
            OffsetBeyondEnd: `from_offset` lies past the durable end.
            OffsetExpired: retention has dropped it; details: first.
            CorruptWal.
        """
        mark = self._marks()[0].get(shard)
        end = Offset(0) if mark is None else mark.durable_offset
        if from_offset > end:
            raise OffsetBeyondEnd(f"offset {from_offset} is beyond the end of shard {shard}, {end}", end=int(end))
        self.extent.check_offset(shard, from_offset)
        if mark is None:
            return
        last = end if upto is None else min(upto, end)
        wanted = None if tables is None else frozenset(tables)
        sources: dict[ShardId, SegmentSource] = {}
        with TruncationWatch(self.extent, {shard: mark}):
            for segment, entry in self._index(shard).from_offset(from_offset, mark):
                if entry.offset >= last:
                    return
                end_of_entry = entry.offset + entry.count
                if entry.kind is FrameKind.RECORDS and has_numbers(entry, numbers):
                    place = (shard, segment, entry)
                    is_cut = entry.offset < from_offset or end_of_entry > last
                    for found in self._records(sources, place, mark, wanted, numbers, offsets=True, moments=moments):
                        yield from within_offsets(found, from_offset, last) if is_cut else (found,)
                if end_of_entry >= last:
                    return

    def read_groups(self, after: Seq, upto: Seq) -> Iterator[list[RecordsFrame]]:
        """Yield the frames of each commit group of `(after, upto]`, by shard; rows are read on demand.

        Raises as `read_between`; rows raise `CorruptFrame`.
        """
        marks, persisted = self._marks()
        self.extent.check_range(after, upto, persisted)
        yield from self._frame_groups(after, upto, marks)

    def _frame_groups(
        self, after: Seq, upto: Seq, marks: Mapping[ShardId, DurableMark]
    ) -> Iterator[list[RecordsFrame]]:
        frames = heapq.merge(
            *(self._frames_of(shard, after, upto, mark) for shard, mark in marks.items()),
            key=lambda found: (found[2].group_last_seq, found[0]),
        )
        sources: dict[ShardId, SegmentSource] = {}
        group: list[RecordsFrame] = []
        with TruncationWatch(self.extent, marks):
            for shard, segment, entry in frames:
                source = self._source(sources, shard, segment, entry, marks[shard], None, entry.tables)
                frame = source.decode(source.frame(entry.position, frozenset()))
                if group and frame.header.group_last_seq != group[0].header.group_last_seq:
                    yield group
                    group = []
                group.append(frame)
        if group:
            yield group

    def numbers_at(self, moment_us: int) -> tuple[Seq, Seq]:
        """Return the numbers around a moment of the source's commits (µs since 1970 UTC); see `numbers_around`."""
        while True:
            (marks, persisted), first = self._marks(), Seq(self.first_seq() - 1)
            frames = self._all_frames(marks, first, persisted)
            try:
                with TruncationWatch(self.extent, marks):
                    return numbers_around(self._files, frames, moment_us, first, persisted)
            except OffsetExpired:
                if self.first_seq() == first + 1:
                    raise

    def schema_versions(self, *, definitions: bool = False) -> dict[tuple[TableId, SchemaVersion], TableSchema]:
        """Return every readable schema, of every table, by table and version; with `definitions`, also theirs."""
        return {k: one for k, one in sorted(self._elsewhere().all().items()) if definitions or not is_definition(k[1])}

    def schemas_between(
        self, after: Seq, upto: Seq, known: Container[tuple[TableId, SchemaVersion]] = (), *, definitions: bool = False
    ) -> dict[tuple[TableId, SchemaVersion], TableSchema]:
        """Return the schemas of the records of `(after, upto]`, by table and version, except the known; see `schema_versions`."""
        marks, _ = self._marks()
        found: dict[tuple[TableId, SchemaVersion], TableSchema] = {}
        sources: dict[ShardId, SegmentSource] = {}
        with TruncationWatch(self.extent, marks):
            for shard, segment, entry in self._all_frames(marks, after, upto):
                for table in entry.tables:
                    if (key := table[:2]) in known or key in found or (is_definition(key[1]) and not definitions):
                        continue
                    wanted = frozenset(key[:1])
                    source = self._source(sources, shard, segment, entry, marks[shard], wanted, entry.tables_of(wanted))
                    found[key] = source.schema(*key)
        return found

    def schemas(self) -> dict[TableId, TableSchema]:
        """Return the latest schema of every table that the log has rows of."""
        if self._on_damage is not None:
            return {table: schema for (table, _), schema in self.schema_versions().items()}
        marks, _ = self._marks()
        with TruncationWatch(self.extent, marks):
            return past_drops(
                self._files, lambda: self._newest.of((self._index(shard), mark) for shard, mark in marks.items())
            )

    # --- inside ----------------------------------------------------------------------------------------------------

    def _marks(self) -> tuple[Mapping[ShardId, DurableMark], Seq]:
        found = self.extent.marks()
        if self._watch.is_other(found[0]):
            self._indexes.clear()
            self._newest.forget()
            self._known_schemas = None
        return found

    def _elsewhere(self) -> KnownSchemas:
        if self._known_schemas is None:
            self._known_schemas = KnownSchemas(self._files, self._folder)
        return self._known_schemas

    def _index(self, shard: ShardId) -> ShardIndex:
        if shard not in self._indexes:
            self._indexes[shard] = ShardIndex(self._files, shard_folder(self._folder, shard), shard, self._on_damage)
        return self._indexes[shard]

    def _frames_of(self, shard: ShardId, after: Seq, upto: Seq, mark: DurableMark) -> Iterator[Place]:
        """Yield a shard's records frames with rows in `(after, upto]`."""
        checked = False
        read = partial(self._index(shard).from_seq, after, mark)
        for segment, entry in past_dropped_front(read, partial(self.extent.dropped, shard), after):
            if not checked:
                # The segments are listed by now, including those not yet marked as dropped.
                self.extent.check_front(shard, after)
                checked = True
            if entry.kind is not FrameKind.RECORDS:
                continue
            if entry.first_seq > upto and entry.group_last_seq > upto and not entry.more:
                return
            if overlaps(entry, after, upto):
                yield shard, segment, entry
            if entry.group_last_seq >= upto and not entry.more:
                return

    def _all_frames(self, marks: Mapping[ShardId, DurableMark], after: Seq, upto: Seq) -> Iterator[Place]:
        of_shards = (self._frames_of(shard, after, upto, mark) for shard, mark in marks.items())
        return heapq.merge(*of_shards, key=lambda found: found[2].group_last_seq)

    def _source(
        self,
        sources: dict[ShardId, SegmentSource],
        shard: ShardId,
        segment: SegmentFile,
        entry: FrameEntry,
        mark: DurableMark,
        wanted: frozenset[TableId] | None,
        tables: Sequence[FrameTable],
    ) -> SegmentSource:
        """Return a segment's source, with the schemas that a frame needs: those of `tables`, its entries of `wanted`."""
        source = sources.get(shard)
        if source is None or source.path != segment.path:
            source = sources[shard] = SegmentSource(
                self._files, segment.path, on_damage=self._on_damage, elsewhere=self._elsewhere, decoded=self._decoded,
                durable_end=mark.byte_end if segment.base_offset == mark.base_offset else None,
                definitions=self._definitions,
            )  # fmt: skip
        if not source.knows(tables):
            places = self._index(shard).schema_frames(segment, mark, entry.position)
            source.bring_schemas(places, wanted)
            if self._on_damage is not None:
                source.bring_from_elsewhere(tables)
        return source

    def _groups(self, after: Seq, marks: Mapping[ShardId, DurableMark], persisted: Seq) -> Iterator[GroupSize]:
        """Yield the commit groups after `after`, in order, over all shards."""
        frames = self._all_frames(marks, after, persisted)
        current: GroupSize | None = None
        with TruncationWatch(self.extent, marks):
            for _, _, entry in frames:
                if current is None or entry.group_last_seq != current.last_seq:
                    if current is not None:
                        yield current
                    current = GroupSize(entry.group_last_seq, 0, 0)
                current.rows += entry.count
                current.size_bytes += entry.length
        if current is not None:
            yield current

    def _scanned(
        self,
        sources: dict[ShardId, SegmentSource],
        places: Iterable[Place],
        mark: DurableMark,
        wanted: frozenset[TableId] | None,
    ) -> Iterator[tuple[SegmentSource, ScannedFrame]]:
        """Yield the heads of frames that have rows of the wanted tables, and load their schemas."""
        for shard, segment, entry in places:
            if (tables := entry.tables_of(wanted)) or wanted is None:
                source = self._source(sources, shard, segment, entry, mark, wanted, tables)
                end = Offset(entry.offset + entry.count)
                yield source, source.frame(entry.position, wanted, end=end, first=entry.offset)

    def _records(
        self,
        sources: dict[ShardId, SegmentSource],
        place: Place,
        mark: DurableMark,
        wanted: frozenset[TableId] | None,
        numbers: tuple[Seq | None, Seq | None],
        *,
        offsets: bool,
        moments: bool = False,
    ) -> Iterator[TableRecords]:
        """Yield the records of one frame; none if it is damaged and damage is only reported."""
        shard, segment, entry = place
        if not (tables := entry.tables_of(wanted)):
            return
        try:
            source = self._source(sources, shard, segment, entry, mark, wanted, tables)
            scanned = source.frame(entry.position, wanted, end=Offset(entry.offset + entry.count), first=entry.offset)
            yield from source.records(scanned, *numbers, wanted, offsets=offsets, moments=moments)
        except CorruptWal as error:
            if self._on_damage is None:
                raise
            self._on_damage(error)
