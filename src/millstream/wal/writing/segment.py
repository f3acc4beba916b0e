"""A segment while it is written: frames go in, a footer seals it.

A new segment is made under a temporary name, and renamed once its header is durable: a `.wal` file
with a damaged header is damage, never a crash. Frames are *staged* (written) first and *kept* once
their group is durable everywhere. Staged frames can be cut back. `group_commit` decides when a segment is full or old.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.codec.checksums import Bytes
from millstream.codec.log_frame import FrameHeader, FrameKind, encode_records_frame, encode_schema_frame
from millstream.codec.log_segment import (
    SEGMENT_HEADER_SIZE,
    FrameEntry,
    FrameTable,
    SegmentFooter,
    SegmentHeader,
)
from millstream.errors import DiskFull
from millstream.model.ids import Epoch, GroupNumber, RegionId, SchemaVersion, ShardId, SourceId, TableId, WriterId
from millstream.model.positions import Lsn, Offset, Seq
from millstream.model.schema import TableSchema
from millstream.ports import Files, WritableFile
from millstream.process_metrics import FSYNC_SECONDS
from millstream.wal.disk_space import check_space
from millstream.wal.files import check_is_at, create_temporary, put_in_place
from millstream.wal.layout import SPARE_NAME, segment_path
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.record_numbering import FramePlan


class WriteFailed(Exception):
    """A write to a segment failed, in any part of it; distinct from errors in the source of the rows."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Fields that every frame header of a commit group shares."""

    group: GroupNumber
    group_last_seq: Seq
    epoch: Epoch
    region: RegionId
    writer: WriterId
    reserved_to: Seq
    hybrid_time: int
    reached: Mapping[SourceId, Lsn]
    shards: frozenset[ShardId]
    """All shards that the group touches."""
    frame_version: int
    """Version of the frames' headers."""

    def header(
        self, kind: FrameKind, of: SegmentHeader, *, more: bool, offset: Offset, plan: FramePlan | None
    ) -> FrameHeader:
        """Return the header of a frame of a segment; for a schema frame `plan` is None."""
        return FrameHeader(
            kind=kind,
            first_offset=offset,
            count=0 if plan is None else plan.count,
            first_seq=Seq(0) if plan is None else plan.first_seq,
            last_seq=Seq(0) if plan is None else plan.last_seq,
            group_last_seq=self.group_last_seq,
            group=self.group,
            epoch=self.epoch,
            region=self.region,
            shard=of.shard,
            writer=self.writer,
            other_shards=tuple(sorted(self.shards - {of.shard})),
            reserved_to=self.reserved_to,
            hybrid_time=self.hybrid_time,
            reached=self.reached,
            more=more,
            version=self.frame_version,
        )


@dataclass(slots=True)
class FrameLog:
    """The frames of a segment so far: entries for its footer, and the running hash of their heads."""

    entries: list[FrameEntry] = field(default_factory=list)
    heads: Any = field(default_factory=hashlib.sha256)

    def add(self, entry: FrameEntry, head: Bytes) -> None:
        """Add one frame."""
        self.entries.append(entry)
        self.heads.update(head)

    def footer(self, end_offset: Offset, base_offset: Offset) -> bytes:
        """Return the encoded footer."""
        return SegmentFooter(tuple(self.entries), end_offset, end_offset - base_offset, self.heads.digest()).encode()


def entry_of(
    header: FrameHeader,
    position: int,
    length: int,
    times: tuple[int, int] | None,
    tables: tuple[FrameTable, ...] | None = None,
) -> FrameEntry:
    """Return a frame's entry in the footer; `header` carries its parts if `tables` is None."""
    if tables is None:
        tables = tuple(FrameTable(p.table_id, p.schema_version, p.rows, p.length) for p in header.parts)
    return FrameEntry(
        kind=header.kind,
        offset=header.first_offset,
        count=header.count,
        position=position,
        length=length,
        more=header.more,
        first_seq=header.first_seq,
        last_seq=header.last_seq,
        group_last_seq=header.group_last_seq,
        group=header.group,
        commit_ts_min_us=None if times is None else times[0],
        commit_ts_max_us=None if times is None else times[1],
        tables=tables,
    )


class OpenSegment:
    """A segment that its writer appends to."""

    def __init__(self, file: WritableFile, path: str, header: SegmentHeader) -> None:
        self.path = path
        self.header = header
        self._fsyncs = FSYNC_SECONDS.of(str(header.stream))
        self.byte_end = SEGMENT_HEADER_SIZE
        """Exclusive end, in bytes, of the kept frames."""
        self.end_offset = header.base_offset
        """Exclusive end of the kept frames' offsets."""
        self.sealed_hash: bytes | None = None
        """Hash of the footer, once sealed."""
        self._file = file
        self._kept = FrameLog()
        self._schemas: set[tuple[TableId, SchemaVersion]] = set()
        self._staged: list[tuple[FrameEntry, Bytes]] = []
        self._staged_schemas: set[tuple[TableId, SchemaVersion]] = set()
        self._staged_end = self.byte_end

    @classmethod
    def create(cls, files: Files, shard_dir: str, header: SegmentHeader) -> OpenSegment:
        """Make a segment: durable with its name when this returns.

        Raises:
            DiskFull: there's no space for it.
            OSError: any other failure; after both, at most a `.tmp` is left.
        """
        try:
            file = create_temporary(files, segment_path(shard_dir, header.base_offset))
            return cls._begin(files, shard_dir, header, file)
        except OSError as error:
            check_space(error, f"no disk space in {shard_dir} for a new segment")
            raise

    @classmethod
    def create_first(cls, files: Files, shard_dir: str, header: SegmentHeader) -> OpenSegment:
        """As `create`, for a start. On a full disk, the spare becomes the segment if recovery didn't need it."""
        try:
            return cls.create(files, shard_dir, header)
        except DiskFull:
            spare = f"{shard_dir}/{SPARE_NAME}"
            if not files.exists(spare):
                raise
            file = files.open_write(spare)
            file.truncate(SEGMENT_HEADER_SIZE)
            return cls._begin(files, shard_dir, header, file, spare)

    @classmethod
    def _begin(
        cls, files: Files, shard_dir: str, header: SegmentHeader, file: WritableFile, made_as: str | None = None
    ) -> OpenSegment:
        path = segment_path(shard_dir, header.base_offset)
        try:
            file.pwrite(header.encode(), 0)
            put_in_place(files, file, path, made_as)
        except OSError:
            file.close()
            raise
        return cls(file, path, header)

    def is_full(self, options: LogOptions, now_ns: int) -> bool:
        """Return whether it has the size or the age at which it is sealed, and another begins."""
        age_ns = now_ns - self.header.created_ns
        # The age is negative if the wall clock was set back since.
        is_young = 0 <= age_ns < int(options.segment_age_s * 1e9)
        return self.byte_end >= options.segment_bytes or not is_young

    @property
    def holds_records(self) -> bool:
        """Whether any frame has been kept."""
        return bool(self._kept.entries)

    @property
    def staged_offset(self) -> Offset:
        """Next offset after the staged frames."""
        staged = sum(entry.count for entry, _ in self._staged)
        return Offset(self.end_offset + staged)

    def stage(self, facts: GroupFacts, plans: Sequence[FramePlan], *, more: bool) -> None:
        """Write frames after the last ones, each preceded by its schema frames if the segment lacks a schema.

        Args:
            facts: the group's.
            plans: this shard's, in offset order, following what is staged.
            more: whether the group continues in this shard after the last of them.

        Raises:
            WriteFailed: any part of it may have been written.
        """
        buffers: list[Bytes] = []
        end = self._staged_end
        for place, plan in enumerate(plans):
            for schema, _ in plan.payload:
                key = (schema.table_id, schema.version)
                if key in self._schemas or key in self._staged_schemas:
                    continue
                header = facts.header(FrameKind.SCHEMA, self.header, more=True, offset=plan.first_offset, plan=None)
                encoded = encode_schema_frame(header, schema)
                end = self._stage_one(header, encoded, [(schema, 0)], end, None)
                self._staged_schemas.add(key)
                buffers += encoded
            goes_on = more or place + 1 < len(plans)
            header = facts.header(FrameKind.RECORDS, self.header, more=goes_on, offset=plan.first_offset, plan=plan)
            encoded = encode_records_frame(header, plan.operations, plan.batches, plan.payload)
            tables = [(schema, rows.num_rows) for schema, rows in plan.payload]
            end = self._stage_one(header, encoded, tables, end, plan.commit_ts_us)
            buffers += encoded
        try:
            self._file.pwritev([memoryview(buffer) for buffer in buffers], self._staged_end)
        except OSError as error:
            raise WriteFailed(error) from error
        self._staged_end = end

    def _stage_one(
        self,
        header: FrameHeader,
        encoded: Sequence[Bytes],
        tables: Sequence[tuple[TableSchema, int]],
        position: int,
        times: tuple[int, int] | None,
    ) -> int:
        length = sum(len(buffer) for buffer in encoded)
        parts = tuple(
            FrameTable(schema.table_id, schema.version, rows, len(data))
            for (schema, rows), data in zip(tables, encoded[1:], strict=True)
        )
        self._staged.append((entry_of(header, position, length, times, parts), encoded[0]))
        return position + length

    def sync(self) -> None:
        """Make what is staged durable."""
        began_s = time.perf_counter()
        self._file.sync()
        self._fsyncs.observe(time.perf_counter() - began_s)

    def keep(self) -> int:
        """Keep what was staged: the group is durable everywhere, so it belongs to the log. Return its bytes.

        Raises:
            OSError: the file was removed or replaced: no reader finds the group, and it is gone
                with the writer.
        """
        check_is_at(self._file, self.path)
        for entry, head in self._staged:
            self._kept.add(entry, head)
        written = self._staged_end - self.byte_end
        self.end_offset = self.staged_offset
        self.byte_end = self._staged_end
        self._schemas |= self._staged_schemas
        self._forget_staged()
        return written

    def cut_back(self) -> None:
        """Durably remove what was staged; raises `OSError` if that fails."""
        self._forget_staged()
        self._file.truncate(self.byte_end)
        self._file.sync()

    def seal(self) -> None:
        """Write the footer and make it durable. Nothing may be staged.

        Raises:
            OSError: if there was no space, `cut_back` repairs it; after a failed fsync nothing
                does.
        """
        footer = self._kept.footer(self.end_offset, self.header.base_offset)
        self._file.pwrite(footer, self.byte_end)
        self._file.sync()
        self.sealed_hash = SegmentFooter.encoded_hash(footer)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _forget_staged(self) -> None:
        self._staged.clear()
        self._staged_schemas.clear()
        self._staged_end = self.byte_end
