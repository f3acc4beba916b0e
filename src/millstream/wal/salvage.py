"""The readable parts of a damaged log, part by part: a frame may lose one table's rows and keep the others'.

Everything is read and decoded. If a schema frame is damaged, the schema is taken from any other
segment that has it: then its records aren't lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from millstream.codec.log_frame import FrameKind, LossFrame, RecordsFrame, SchemaFrame, decode_frame
from millstream.codec.log_parts import PayloadPart
from millstream.codec.log_schemas import SchemaSet
from millstream.codec.log_segment import SegmentFooter
from millstream.errors import CorruptFrame, MillstreamError
from millstream.model.ids import SchemaVersion, ShardId, StreamId, TableId
from millstream.model.positions import Offset, Seq
from millstream.model.schema import TableSchema, is_definition
from millstream.ports import Files
from millstream.wal.dropped_segments import skipping_dropped
from millstream.wal.layout import SegmentFile, segments_and_strays, shard_folder, shards_and_strays
from millstream.wal.misplacement import stream_of
from millstream.wal.segment_scan import Loss, ScannedFrame, footer_of, header_of, scan_segment


@dataclass(frozen=True, slots=True)
class CheckedFrame:
    """A frame with a valid head."""

    frame: ScannedFrame
    lost: tuple[PayloadPart, ...] = ()
    """Its parts that can't be read."""
    why: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is lost."""
        return not self.lost

    def loss(self, segment: SegmentFile) -> Loss:
        """Return what is lost of it."""
        header = self.frame.header
        end = Offset(header.first_offset + header.count)
        tables = None if len(self.lost) == len(header.parts) else tuple(part.table_id for part in self.lost)
        return Loss(
            segment.path,
            self.frame.position,
            self.why,
            header.first_offset,
            end,
            header.shard,
            self.frame.end,
            header.first_seq if header.count else None,
            header.last_seq if header.count else None,
            tables,
        )


Salvaged: TypeAlias = CheckedFrame | Loss


class KnownSchemas:
    """All schemas in a log's segments, read when first asked for.

    Args:
        others: schemas known from elsewhere (a catalog).
    """

    def __init__(self, files: Files, folder: str, others: Iterable[TableSchema] = ()) -> None:
        self._files = files
        self._folder = folder
        self._found = {(schema.table_id, schema.version): schema for schema in others}
        self._looked = False

    def find(self, table: TableId, version: SchemaVersion) -> TableSchema | None:
        """Return one schema; None if no segment has it."""
        return self.all().get((table, version))

    def names(self) -> dict[TableId, str]:
        """Return each table's name, from its newest readable schema."""
        found = sorted(self.all().items(), key=lambda item: item[0])
        return {table: schema.full_name for (table, version), schema in found if not is_definition(version)}

    def all(self) -> dict[tuple[TableId, SchemaVersion], TableSchema]:
        """Return every readable schema."""
        if not self._looked:
            self._looked = True
            with suppress(MillstreamError):
                stream = stream_of(self._files, self._folder)
                for shard in shards_and_strays(self._files, self._folder)[0]:
                    for segment in segments_and_strays(self._files, shard_folder(self._folder, shard), looks=True)[0]:
                        with skipping_dropped(self._files):
                            self._look(stream, shard, segment)
        return self._found

    def _look(self, stream: StreamId | None, shard: ShardId, segment: SegmentFile) -> None:
        header = header_of(self._files, segment)
        # Another log's tables may have the same ids, and other columns.
        if header is None or stream in (None, header.stream):
            for schema in schemas_in(self._files, shard, segment):
                self._found[schema.table_id, schema.version] = schema


def schemas_in(files: Files, shard: ShardId, segment: SegmentFile) -> Iterator[TableSchema]:
    """Yield a segment's readable schemas."""
    footer = footer_of(files, segment)
    if isinstance(footer, SegmentFooter):
        places = [(entry.position, entry.length) for entry in footer.frames if entry.kind is FrameKind.SCHEMA]
    else:
        places = [
            (frame.position, frame.length)
            for frame in scan_segment(files, shard, segment, end=None, payload=False)
            if isinstance(frame, ScannedFrame) and frame.header.kind is FrameKind.SCHEMA
        ]
    for position, length in places:
        with suppress(MillstreamError):
            frame = decode_frame(files.read(segment.path, position, length), SchemaSet())
            if isinstance(frame, SchemaFrame):
                yield frame.schema


def salvage_segment(
    files: Files, shard: ShardId, segment: SegmentFile, elsewhere: KnownSchemas, *, end: Offset | None
) -> Iterator[Salvaged]:
    """Yield a segment's frames, each checked to its last row, and the losses between them; see `scan_segment`."""
    header = header_of(files, segment)
    schemas = SchemaSet() if header is None else SchemaSet(header.directory)
    for found in scan_segment(files, shard, segment, end=end, payload=False):
        yield found if isinstance(found, Loss) else _check(files, segment, found, schemas, elsewhere)


def _check(
    files: Files, segment: SegmentFile, found: ScannedFrame, schemas: SchemaSet, elsewhere: KnownSchemas
) -> Salvaged:
    header = found.header

    def read_payload(position: int, length: int) -> bytes:
        return files.read(segment.path, found.position + len(found.head) + position, length)

    for part in header.parts if header.kind is FrameKind.RECORDS else ():
        if (part.table_id, part.schema_version) not in schemas:
            schema = elsewhere.find(part.table_id, part.schema_version)
            if schema is not None:
                schemas.add(schema)
    try:
        frame = decode_frame(found.head, schemas, read_payload=read_payload)
    except CorruptFrame as error:
        return CheckedFrame(found, header.parts, str(error))
    if not isinstance(frame, RecordsFrame):
        return CheckedFrame(found)
    lost: list[PayloadPart] = []
    why = ""
    for part in header.parts:
        try:
            schema = schemas.find(part.table_id, part.schema_version)
            frame.as_records(schema, frame.log_rows(part.table_id, part.schema_version))
        except CorruptFrame as error:
            lost.append(part)
            why = why or str(error)
    return CheckedFrame(found, tuple(lost), why)


def accepted_loss(files: Files, segment: SegmentFile, found: ScannedFrame) -> Loss:
    """Return the loss that a loss frame stands for."""
    header = found.header
    why, tables = "it was accepted that this is lost", None
    with suppress(CorruptFrame):
        frame = decode_frame(files.read(segment.path, found.position, found.length), SchemaSet())
        if isinstance(frame, LossFrame) and "offset_from" in frame.facts:
            why = str(frame.facts.get("why", why))
            of = frame.facts.get("tables")
            tables = None if of is None else tuple(TableId(table) for table in of)
            first, end = (Offset(int(frame.facts[name])) for name in ("offset_from", "offset_to"))
            numbers = (Seq(frame.facts.get("first_seq", 0)), Seq(frame.facts.get("last_seq", 0)))
            return Loss(segment.path, found.position, why, first, end, header.shard, found.end, *numbers, tables)
    end = Offset(header.first_offset + header.count)
    return Loss(
        segment.path, found.position, why, header.first_offset, end, header.shard, found.end, None, None, tables
    )
