"""Rewriting a damaged segment without what is lost: see `repair`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from millstream.codec.checksums import Bytes
from millstream.codec.log_frame import (
    BATCH_HEADER_VERSION,
    FrameHeader,
    FrameKind,
    decode_frame_header,
    encode_loss_frame,
    encode_schema_frame,
    without_parts,
)
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SegmentFooter
from millstream.errors import LogError
from millstream.model.ids import GroupNumber, SchemaVersion, ShardId, TableId, WriterId
from millstream.model.marks import DurableMark, ShownMark
from millstream.model.positions import Offset, Seq
from millstream.ports import Files, WritableFile
from millstream.wal.durable_mark import MarkFile, read_mark, read_shown
from millstream.wal.files import replacing
from millstream.wal.layout import SegmentFile
from millstream.wal.mending.plan import RepairPlan, SegmentPlan, footer_hash_of, position_of
from millstream.wal.salvage import CheckedFrame, KnownSchemas, Salvaged
from millstream.wal.segment_scan import Loss, ScannedFrame, commit_times, read_filled, reader_of
from millstream.wal.writing.segment import FrameLog, entry_of

_COPY_BYTES: Final = 1 << 20


class Rewriter:
    """Writes the planned segments, shard by shard, segment by segment."""

    def __init__(self, files: Files, plan: RepairPlan, elsewhere: KnownSchemas, now_ns: int) -> None:
        self.files = files
        self.plan = plan
        self.elsewhere = elsewhere
        self.now_ns = now_ns
        self.newest = max((h.group for h in self._headers()), default=GroupNumber(0))
        self.newest_seq = max((h.group_last_seq for h in self._headers()), default=Seq(0))
        self.reserved = max((h.reserved_to for h in self._headers()), default=Seq(0))

    def _headers(self) -> Iterator[FrameHeader]:
        for segments in self.plan.segments.values():
            for made in segments:
                for piece in made.pieces:
                    if isinstance(piece, CheckedFrame):
                        yield piece.frame.header

    def write(self, shard: ShardId, shard_dir: str, mark_file: MarkFile) -> None:
        """Write the shard's changed segments, and the segments after them whose headers name their footers."""
        segments = self.plan.segments[shard]
        mark, shown = read_mark(self.files, shard_dir), read_shown(self.files, shard_dir)
        if mark is not None:
            self.newest = GroupNumber(max(self.newest, mark.group))
            self.newest_seq = Seq(max(self.newest_seq, mark.persisted_upto))
            self.reserved = Seq(max(self.reserved, mark.reserved_to))
        before: FrameHeader | None = None
        previous_hash: bytes | None = None
        for place, made in enumerate(segments):
            if previous_hash is not None and made.header.previous_hash != previous_hash:
                made.header = replace(made.header, previous_hash=previous_hash)
                made.changed = True
            following = self._following(segments[place + 1 :])
            if made.changed:
                writing = _Writing(self, made, mark, shown, before, following)
                writing.run()
                previous_hash = writing.footer_hash
                is_last = place + 1 == len(segments)
                if mark is not None and (mark.base_offset == made.base_offset or (is_last and not made.is_there)):
                    moved = replace(mark, base_offset=made.base_offset, byte_end=writing.durable_end)
                    if moved != mark:
                        mark_file.move(moved, anchor=True)
                if shown is not None and shown.required and shown.mark.base_offset == made.base_offset:
                    seen = replace(shown.mark, byte_end=writing.shown_end)
                    mark_file.move_shown(replace(shown, mark=seen), anchor=True)
            else:
                segment = SegmentFile(made.base_offset, made.path)
                previous_hash = footer_hash_of(self.files, segment)
            before = next((p.frame.header for p in reversed(made.pieces) if isinstance(p, CheckedFrame)), before)

    @staticmethod
    def _following(segments: Sequence[SegmentPlan]) -> FrameHeader | None:
        return next((p.frame.header for made in segments for p in made.pieces if isinstance(p, CheckedFrame)), None)


class _Writing:
    """One segment being rewritten."""

    def __init__(
        self,
        rewriter: Rewriter,
        made: SegmentPlan,
        mark: DurableMark | None,
        shown: ShownMark | None,
        before: FrameHeader | None,
        following: FrameHeader | None,
    ) -> None:
        self._rewriter = rewriter
        self._files = rewriter.files
        self._size = rewriter.files.size(made.path) if made.is_there else 0
        self._made = made
        self._mark = mark
        self._shown = shown
        self._before = before
        self._following = following
        self._log = FrameLog()
        self._position = SEGMENT_HEADER_SIZE
        self._brought: set[tuple[TableId, SchemaVersion]] = set()
        self.footer_hash: bytes | None = None
        self.durable_end = self.shown_end = SEGMENT_HEADER_SIZE

    def run(self) -> None:
        """Write a second file, with what is cut kept aside; rename it over the first."""
        made, files = self._made, self._files
        self._keep_aside()
        with replacing(files, made.path) as file:
            file.pwrite(made.header.encode(), 0)
            for place, piece in enumerate(made.pieces):
                self._write_piece(file, place, piece)
                if self._mark is None or position_of(piece) < self._mark.byte_end:
                    self.durable_end = self._position
                if self._shown is not None and position_of(piece) < self._shown.mark.byte_end:
                    self.shown_end = self._position
            if made.sealed:
                footer = self._log.footer(made.end_offset, made.base_offset)
                file.pwrite(footer, self._position)
                self.footer_hash = SegmentFooter.encoded_hash(footer)
            elif made.tail_from is not None and made.is_there:
                self._copy(file, made.tail_from, files.size(made.path) - made.tail_from)

    # --- cut bytes -------------------------------------------------------------------------------------------------

    def _keep_aside(self) -> None:
        """Copy what the new segment won't have, durably, into `.torn` files."""
        made = self._made
        if not made.is_there:
            return
        size = self._files.size(made.path)
        spans = [(0, min(SEGMENT_HEADER_SIZE, size))] if made.header_lost else []
        for piece in made.pieces:
            if isinstance(piece, Loss):
                spans.append((piece.byte, min(size, size if piece.byte_to is None else piece.byte_to)))
            elif piece.lost:
                spans.append((piece.frame.position, min(size, piece.frame.end)))
        if made.footer_from is not None:
            spans.append((made.footer_from, size))
        for start, end in spans:
            if start < end:
                self._keep_bytes(start, end)

    def _keep_bytes(self, start: int, end: int) -> None:
        stem = f"{self._made.path.removesuffix('.wal')}-{start}"
        name, number = f"{stem}.torn", 1
        while self._files.exists(name):
            number += 1
            name = f"{stem}-{number}.torn"
        torn = self._files.create(name)
        try:
            for position in range(start, end, _COPY_BYTES):
                read = reader_of(self._files, self._made.path)
                data = read_filled(read, position, min(_COPY_BYTES, end - position))
                torn.pwrite(data, position - start)
            torn.sync()
        finally:
            torn.close()
        self._rewriter.plan.kept_aside.append(name)

    # --- pieces ----------------------------------------------------------------------------------------------------

    def _write_piece(self, file: WritableFile, place: int, piece: Salvaged) -> None:
        if isinstance(piece, Loss):
            self._write_loss(file, place, piece)
            return
        frame = piece.frame
        if frame.header.kind is FrameKind.SCHEMA:
            if piece.is_whole:
                self._brought |= {(part.table_id, part.schema_version) for part in frame.header.parts}
                self._write_kept(file, frame)
            # A lost schema frame is rewritten from another copy before its first use.
            return
        lost = {(part.table_id, part.schema_version) for part in piece.lost}
        self._bring_schemas(file, frame.header, lost)
        if not lost:
            self._write_kept(file, frame)
        elif len(lost) == len(frame.header.parts):
            self._write_loss(file, place, piece.loss(SegmentFile(self._made.base_offset, self._made.path)))
        else:
            self._write_parts(file, piece, lost)

    def _write_kept(self, file: WritableFile, frame: ScannedFrame) -> None:
        self._catch_up(file, frame)
        times = commit_times(frame.head, self._made.header)
        self._log.add(entry_of(frame.header, self._position, frame.length, times), frame.head)
        self._copy(file, frame.position, frame.length)
        self._before = frame.header

    def _catch_up(self, file: WritableFile, frame: ScannedFrame) -> None:
        """Fill up to where the frame was, so that positions that readers hold stay right; only if there is room."""
        room = frame.position - self._position
        filler = encode_loss_frame(self._empty(frame.header), {"why": "filled"}, length=max(room, 0))
        if sum(len(buffer) for buffer in filler) == room:
            self._write_new(file, filler)

    def _write_new(self, file: WritableFile, buffers: Sequence[Bytes]) -> None:
        head = bytes(buffers[0])
        header, length = decode_frame_header(head)
        times = commit_times(head, self._made.header)
        self._log.add(entry_of(header, self._position, length, times), head)
        file.pwritev([memoryview(buffer) for buffer in buffers], self._position)
        self._position += length
        self._before = header

    def _bring_schemas(self, file: WritableFile, header: FrameHeader, lost: set[tuple[TableId, SchemaVersion]]) -> None:
        """Write the schemas that a records frame needs and that the new segment lacks."""
        for part in header.parts if header.kind is FrameKind.RECORDS else ():
            key = (part.table_id, part.schema_version)
            if key in self._brought or key in lost:
                continue
            schema = self._rewriter.elsewhere.find(*key)
            if schema is None:
                raise LogError(f"schema {key[1]} of table {key[0]} disappeared while the table's records were read")
            bare = replace(self._empty(header), kind=FrameKind.SCHEMA, reached=header.reached)
            self._write_new(file, encode_schema_frame(bare, schema))
            self._brought.add(key)

    def _write_parts(self, file: WritableFile, piece: CheckedFrame, lost: set[tuple[TableId, SchemaVersion]]) -> None:
        """Write a frame without its lost parts, after a note that records the loss, in as many bytes as it had."""
        frame = piece.frame
        position = frame.position + len(frame.head)
        buffers: list[Bytes] = [without_parts(frame.head, lost)]
        for part in frame.header.parts:
            if (part.table_id, part.schema_version) not in lost:
                buffers.append(self._files.read(self._made.path, position, part.length))
            position += part.length
        loss = piece.loss(SegmentFile(self._made.base_offset, self._made.path))
        facts = self._facts(loss, sum(part.rows for part in piece.lost))
        room = frame.end - self._position - sum(len(buffer) for buffer in buffers)
        # The note takes no offsets: the frame keeps them all.
        self._write_new(file, encode_loss_frame(self._empty(frame.header), facts, length=max(room, 0)))
        self._write_new(file, buffers)

    def _write_loss(self, file: WritableFile, place: int, loss: Loss) -> None:
        """Write a loss frame in place of what is cut, with the same length."""
        assert loss.offset_from is not None
        assert loss.offset_to is not None
        count = loss.offset_to - loss.offset_from
        if not count:
            return  # a schema, which is written again before its first use
        following = next((p.frame.header for p in self._made.pieces[place + 1 :] if isinstance(p, CheckedFrame)), None)
        header = replace(self._loss_header(following, loss), first_offset=loss.offset_from, count=count)
        room = 0 if loss.byte_to is None else min(loss.byte_to, self._size) - self._position
        self._write_new(file, encode_loss_frame(header, self._facts(loss, count), length=max(room, 0)))

    def _loss_header(self, following: FrameHeader | None, loss: Loss) -> FrameHeader:
        if following is not None:
            # Part of the next group may be lost, too: its own last frame shows when it is whole.
            return self._empty(following)
        rewriter, made = self._rewriter, self._made
        before, behind = self._before, self._following
        if behind is None:
            # Nothing follows on this shard: the marks and the other shards show how far the log
            # goes.
            group, last = rewriter.newest, rewriter.newest_seq
        else:
            group = GroupNumber(max(behind.group - 1, 0 if before is None else before.group))
            last = Seq(0) if before is None else before.group_last_seq
        return FrameHeader(
            kind=FrameKind.LOSS,
            first_offset=Offset(0),
            count=0,
            first_seq=loss.first_seq or Seq(0),
            last_seq=loss.last_seq or Seq(0),
            group_last_seq=last,
            group=group,
            epoch=made.header.epoch,
            region=made.header.region,
            shard=made.shard,
            writer=WriterId(0) if before is None else before.writer,
            reserved_to=rewriter.reserved if behind is None else (Seq(0) if before is None else before.reserved_to),
            hybrid_time=0 if before is None else before.hybrid_time,
            reached={} if before is None else before.reached,
            version=BATCH_HEADER_VERSION if before is None else before.version,
        )

    def _empty(self, like: FrameHeader) -> FrameHeader:
        """Return a header for a frame before one of the same group, which takes no offsets."""
        return replace(
            like,
            kind=FrameKind.LOSS,
            count=0,
            first_seq=Seq(0),
            last_seq=Seq(0),
            other_shards=(),
            reached={} if self._before is None else self._before.reached,
            more=True,
            parts=(),
        )

    def _facts(self, loss: Loss, records: int) -> dict[str, object]:
        return {
            "why": loss.why,
            "offset_from": loss.offset_from,
            "offset_to": loss.offset_to,
            "first_seq": loss.first_seq or 0,
            "last_seq": loss.last_seq or 0,
            "tables": None if loss.tables is None else list(loss.tables),
            "records": records,
            "accepted_ns": self._rewriter.now_ns,
        }

    def _copy(self, file: WritableFile, position: int, length: int) -> None:
        for start in range(position, position + length, _COPY_BYTES):
            read = reader_of(self._files, self._made.path)
            data = read_filled(read, start, min(_COPY_BYTES, position + length - start))
            file.pwrite(data, self._position)
            self._position += len(data)
