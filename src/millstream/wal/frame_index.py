"""Index of a shard's frames, for readers: from footers of sealed segments, and from heads in the open one.

It needs only the folder. The caller sets the end by a mark; nothing after the mark is touched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from millstream.codec.log_frame import FrameHeader, FrameKind, SchemaFrame, decode_frame
from millstream.codec.log_schemas import SchemaSet
from millstream.codec.log_segment import (
    SEGMENT_HEADER_SIZE,
    SEGMENT_TRAILER_SIZE,
    FrameEntry,
    SchemaPlace,
    SegmentFooter,
    SegmentHeader,
    SegmentTotals,
    frames_after,
    frames_from,
    schemas_of,
)
from millstream.errors import CorruptFrame, CorruptWal, UnreadableBytes
from millstream.model.ids import Epoch, ShardId, StreamId, TableId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.schema import is_definition
from millstream.ports import Files
from millstream.wal.durable_mark import read_dropped
from millstream.wal.growing_entries import GrowingEntries
from millstream.wal.layout import SegmentFile, list_segments
from millstream.wal.misplacement import REPLACED, misplacement
from millstream.wal.segment_scan import (
    UNREADABLE_HEADER,
    Loss,
    ReadAhead,
    ScannedFrame,
    header_of,
    read_frame,
    reader_of,
    scan_frames,
    scan_segment,
)
from millstream.wal.writing.segment import entry_of

OnDamage: TypeAlias = Callable[[CorruptWal], None]
Seal: TypeAlias = tuple[int, bytes]
"""A sealed file's size and trailer, which has the footer's checksum: those of a file that replaces it differ."""
_Read: TypeAlias = Callable[[int, int], bytes]
_Tail = TypeVar("_Tail", SegmentFooter, SegmentTotals)
_TAIL_BYTES: Final = 1 << 16
"""Bytes that hold the footers of most segments: one read of them costs less than three short ones."""
HEADS_AHEAD_BYTES: Final = 1 << 16
"""Read-ahead in bytes if only heads are wanted: longer payloads are skipped."""
_CACHED_FRAMES_MAX: Final = 200_000
"""Number of footer frames kept in memory, about 30 MiB."""


def damage(
    why: object, *, file: str, byte: int, offset_from: Offset, offset_to: Offset | None, table: TableId | None = None
) -> CorruptWal:
    """Return the error for bytes that no crash explains.

    Records at offsets `[offset_from, offset_to)` can't be read because of it: those of one table if
    `table` is given. With None as `offset_to`, the loss reaches to the end. The range is empty for
    a header or footer: a reader with `on_damage` reads past it.
    """
    details: dict[str, Any] = {"file": file, "byte": byte, "offset_from": int(offset_from)}
    details["offset_to"] = None if offset_to is None else int(offset_to)
    if table is not None:
        details["table"] = int(table)
    lost = f"at offsets [{offset_from}, {offset_to})" if offset_to is not None else f"from offset {offset_from} on"
    of = "" if table is None else f" of table {table}"
    told = "" if offset_from == offset_to else f"; records{of} {lost} can't be read"
    return CorruptWal(f"{file} is damaged at byte {byte}: {why}{told}", **details)


def missing_segments(shard_dir: str, offset_from: Offset, offset_to: Offset) -> CorruptWal:
    """Return the error for segments that aren't there: the records at offsets `[offset_from, offset_to)` are theirs."""
    return CorruptWal(
        f"segments are missing in {shard_dir}: records at offsets [{offset_from}, {offset_to}) can't be read",
        file=shard_dir,
        offset_from=int(offset_from),
        offset_to=int(offset_to),
    )


def damage_of(loss: Loss) -> CorruptWal:
    """Return the error for a loss that was found by walking a segment."""
    assert loss.offset_from is not None
    return damage(loss.why, file=loss.file, byte=loss.byte, offset_from=loss.offset_from, offset_to=loss.offset_to)


def unreadable(error: UnreadableBytes) -> CorruptWal:
    """Return the error for unreadable bytes of a log file, if nothing shows which records they held."""
    file, byte = str(error.details["path"]), int(error.details["byte"])
    return CorruptWal(f"{file} is damaged at byte {byte}: {error.message}", file=file, byte=byte)


def read_header(
    files: Files, segment: SegmentFile, *, shard: ShardId | None = None, stream: StreamId | None = None
) -> SegmentHeader:
    """Return a segment's header; it must name the segment's base offset, and the shard and stream if they are given.

    Raises `CorruptWal`, `UnsupportedFormat`; `FileNotFoundError` if the file is gone.
    """
    base = segment.base_offset
    try:
        header = SegmentHeader.decode(files.read(segment.path, 0, SEGMENT_HEADER_SIZE))
    except CorruptFrame as error:
        why = f"{UNREADABLE_HEADER}: {error}"
        raise damage(why, file=segment.path, byte=0, offset_from=base, offset_to=base) from error
    elsewhere = misplacement(header, segment, header.shard if shard is None else shard, stream)
    if elsewhere is not None:
        raise damage(elsewhere, file=segment.path, byte=0, offset_from=base, offset_to=base)
    return header


class NewestSchema(NamedTuple):
    """Where the newest schema of a table lies."""

    place: SchemaPlace
    segment: SegmentFile
    seal: Seal | None
    """None if the segment is being written."""


@dataclass(slots=True)
class _OpenFrames:
    """The frames of the segment being written, up to the newest mark seen."""

    base_offset: Offset
    epoch: Epoch
    header: SegmentHeader | None = None
    entries: GrowingEntries = field(default_factory=GrowingEntries)
    byte_end: int = SEGMENT_HEADER_SIZE
    end_offset: Offset = Offset(0)


class ShardIndex:
    """The frames of one shard up to its mark, in order.

    Every method may raise `CorruptWal`, and `FileNotFoundError` if retention drops a segment during
    the call.
    """

    def __init__(
        self,
        files: Files,
        shard_dir: str,
        shard: ShardId,
        on_damage: OnDamage | None = None,
        *,
        cached_frames_max: int = _CACHED_FRAMES_MAX,
    ) -> None:
        self._files = files
        self._on_damage = on_damage
        self._dir = shard_dir
        self._shard = shard
        self._cached_frames_max = cached_frames_max
        self._sealed: OrderedDict[Offset, Sequence[FrameEntry]] = OrderedDict()
        self._cached_frames = 0
        self._totals: dict[Offset, SegmentTotals] = {}
        self._lost_upto: dict[Offset, Offset] = {}
        """End of the last loss reported, by the base offset of a segment that had to be walked."""
        self._first_group_end: dict[Offset, Seq] = {}
        self._headers: dict[tuple[Offset, Epoch | None], SegmentHeader] = {}
        """Headers by base offset; for the segment being written, also by its mark's epoch."""
        self._footer_hashes: dict[Offset, bytes] = {}
        self._reported: set[Offset] = set()
        """Base offsets of segments already reported as misplaced, or as not following the previous one."""
        self._open: _OpenFrames | None = None
        self._seals: dict[Offset, Seal] = {}
        self._newest_schemas: dict[TableId, NewestSchema] = {}
        """The newest schema of each table, of the segments in `_schemas_of`."""
        self._schemas_of: dict[SegmentFile, Seal] = {}

    @property
    def frames_kept(self) -> int:
        """Number of frames in memory, of some 160 bytes each."""
        return self._cached_frames + (0 if self._open is None else len(self._open.entries))

    def segments(self, mark: DurableMark) -> list[SegmentFile]:
        """Return the segments that hold what the mark shows, without dropped ones that a crash left behind."""
        segments = list_segments(self._files, self._dir)
        dropped = read_dropped(self._files, self._dir)
        first = Offset(0) if dropped is None else dropped.offset
        return [segment for segment in segments if first <= segment.base_offset <= mark.base_offset]

    def frames(self, segment: SegmentFile, mark: DurableMark) -> Sequence[FrameEntry]:
        """Return a segment's frames that the mark shows; none if it is misplaced and damage is reported, not raised."""
        if self._is_misplaced(segment, mark):
            return ()
        if segment.base_offset == mark.base_offset:
            return self._open_frames(segment, mark)
        known = self._sealed.get(segment.base_offset)
        if known is None:
            known = self._sealed_frames(segment, mark)
            self._sealed[segment.base_offset] = known
            self._cached_frames += len(known)
            while self._cached_frames > self._cached_frames_max and len(self._sealed) > 1:
                self._cached_frames -= len(self._sealed.popitem(last=False)[1])
        else:
            self._sealed.move_to_end(segment.base_offset)
        return known

    def from_seq(self, after: Seq, mark: DurableMark) -> Iterator[tuple[SegmentFile, FrameEntry]]:
        """Yield the frames of all groups that end after `after`, in order, except schema frames."""
        for segment, entries in self._chain(self._segments_from(after, mark), mark):
            for entry in frames_after(entries, after):
                yield segment, entry

    def newest_header(self, upto: Seq, mark: DurableMark, *, readable: bool) -> FrameHeader | None:
        """Return the header of the shard's last group with a number at or below `upto`.

        None if none is left; if `readable`, also if it can't be read: it is damaged, or was just dropped.
        """
        with suppress(*((CorruptWal, CorruptFrame, FileNotFoundError) if readable else ())):
            for segment in self._segments_from(upto, mark)[:1]:
                for entry in reversed(self.frames(segment, mark)):
                    if entry.kind is FrameKind.RECORDS and entry.first_seq <= upto:
                        window = ReadAhead(reader_of(self._files, segment.path), HEADS_AHEAD_BYTES)
                        return read_frame(window, entry.position, payload=False).header
        return None

    def totals_from_seq(self, after: Seq, mark: DurableMark) -> Iterator[tuple[SegmentFile, SegmentTotals | None]]:
        """Yield the segments of groups that end after `after`, and the one before them, in order, with their totals.

        The totals are None for a segment that is being written, or whose footer is damaged (if
        damage is reported, not raised): `frames` has them.
        """

        def end_of(segment: SegmentFile) -> Offset:
            totals = self._totals_of(segment, mark)
            return self._end_of(segment, mark) if totals is None else totals.end_offset

        for segment in self._following(self._segments_from(after, mark), mark, end_of):
            yield segment, self._totals_of(segment, mark)

    def _totals_of(self, segment: SegmentFile, mark: DurableMark) -> SegmentTotals | None:
        if segment.base_offset >= mark.base_offset or segment.base_offset in self._lost_upto:
            return None
        known = self._totals.get(segment.base_offset)
        if known is None:
            try:
                known = self._totals[segment.base_offset] = self._decoded_tail(segment, SegmentTotals.decode_tail)
            except CorruptWal:
                if self._on_damage is None:
                    raise
        return known

    def _segments_from(self, after: Seq, mark: DurableMark) -> list[SegmentFile]:
        """Return the segments from the one before the first that begins with a group ending after `after`."""
        segments = self.segments(mark)
        # The ends of segments' first groups ascend; the group that holds `after` may be in the
        # segment before.
        low, high = 0, len(segments)
        while low < high:
            middle = (low + high) // 2
            end = self._group_end_from(segments, middle, mark)
            if end is not None and end <= after:
                low = middle + 1
            else:
                high = middle
        return segments[max(low - 1, 0) :]

    def from_offset(self, offset: Offset, mark: DurableMark) -> Iterator[tuple[SegmentFile, FrameEntry]]:
        """Yield frames with records at or after an offset, in order."""
        segments = self.segments(mark)
        start = bisect_right([segment.base_offset for segment in segments], offset) - 1
        for segment, entries in self._chain(segments[max(start, 0) :], mark):
            for entry in frames_from(entries, offset):
                yield segment, entry

    def _chain(
        self, segments: Iterable[SegmentFile], mark: DurableMark
    ) -> Iterator[tuple[SegmentFile, Sequence[FrameEntry]]]:
        """Yield segments with their frames, checked as `_following` does."""
        for segment in self._following(segments, mark, lambda segment: self._end_of(segment, mark)):
            yield segment, self.frames(segment, mark)

    def _end_of(self, segment: SegmentFile, mark: DurableMark) -> Offset:
        entries = self.frames(segment, mark)
        return Offset(entries[-1].offset + entries[-1].count) if entries else segment.base_offset

    def _following(
        self, segments: Iterable[SegmentFile], mark: DurableMark, end_of: Callable[[SegmentFile], Offset]
    ) -> Iterator[SegmentFile]:
        """Yield segments; each must begin where the previous one ended, and the last must end at the mark."""
        expected: Offset | None = None
        known = list(segments)
        for segment, following in zip_longest(known, known[1:]):
            if self._is_misplaced(segment, mark):
                # Its name proves nothing: the segment that belongs there is missing.
                expected = segment.base_offset if expected is None else expected
                continue
            if expected is not None and segment.base_offset != expected:
                self._tell_missing(expected, segment.base_offset)
            end = end_of(segment)
            if following is not None and following.base_offset == end:
                self._check_follows(segment, following, mark)
            yield segment
            expected = max(end, self._lost_upto.get(segment.base_offset, end))
        if expected is None and mark.durable_offset > 0:
            self._tell_missing(Offset(0), mark.durable_offset)
        elif expected is not None and expected < mark.durable_offset:
            self._tell_missing(expected, mark.durable_offset)

    def _header_of(self, segment: SegmentFile, mark: DurableMark) -> SegmentHeader | None:
        """Return a segment's header, read once; None if it can't be read: the frames' reader reports that."""
        base = segment.base_offset
        is_open = base >= mark.base_offset
        key = (base, mark.epoch if is_open else None)
        header = self._headers.get(key)
        if header is None:
            header = header_of(self._files, segment)
            # The writer that starts next may replace a segment without frames.
            if header is not None and not (is_open and mark.byte_end <= SEGMENT_HEADER_SIZE):
                self._headers[key] = header
        return header

    def _other_place(self, segment: SegmentFile, mark: DurableMark) -> str | None:
        """Return why a segment's header belongs elsewhere.

        None if it doesn't, or if the mark shows nothing of the segment.
        """
        if segment.base_offset == mark.base_offset and mark.byte_end <= SEGMENT_HEADER_SIZE:
            return None
        header = self._header_of(segment, mark)
        return None if header is None else misplacement(header, segment, self._shard, mark.stream)

    def _is_misplaced(self, segment: SegmentFile, mark: DurableMark) -> bool:
        """Return whether a segment's header belongs elsewhere, and report it."""
        why = self._other_place(segment, mark)
        if why is not None:
            self._tell_once(segment, why)
        return why is not None

    def _check_follows(self, segment: SegmentFile, following: SegmentFile, mark: DurableMark) -> None:
        """Report if the next header names another footer than this sealed segment has, before any of it is read."""
        footer_hash = self._footer_hashes.get(segment.base_offset)
        if footer_hash is None or segment.base_offset in self._lost_upto:
            return  # its footer is damaged, which was reported
        with suppress(FileNotFoundError):  # a starting writer replaces an empty segment
            header = self._header_of(following, mark)
            if header is None or header.previous_hash == footer_hash:
                return
            # `wal repair` may have rewritten both since one of them was read.
            header, footer = header_of(self._files, following), self._footer(segment)
            if header is None or misplacement(header, following, self._shard, mark.stream) is not None:
                return
            if header.previous_hash != footer.footer_hash:
                self._tell_once(following, REPLACED)

    def _tell_once(self, segment: SegmentFile, why: str) -> None:
        base = segment.base_offset
        if base not in self._reported:
            self._tell(damage(why, file=segment.path, byte=0, offset_from=base, offset_to=base))
            self._reported.add(base)

    def _tell_missing(self, offset_from: Offset, offset_to: Offset) -> None:
        self._tell(missing_segments(self._dir, offset_from, offset_to))

    def _tell(self, error: CorruptWal) -> None:
        """Report damage, or raise it if there is no `on_damage`."""
        if self._on_damage is None:
            raise error
        self._on_damage(error)

    def schema_frames(self, segment: SegmentFile, mark: DurableMark, before: int) -> tuple[SchemaPlace, ...]:
        """Return a segment's schema frames before a position."""
        return tuple(place for place in self._schema_places(segment, mark) if place.position < before)

    def newest_schemas(self, mark: DurableMark) -> Mapping[TableId, NewestSchema]:
        """Return the newest schema of each table, without definitions.

        A sealed segment is read once; later calls read its trailer alone, unless another file has replaced it.
        """
        segments = self.segments(mark)
        sealed: dict[SegmentFile, Seal] = {}
        for segment in segments:
            if segment.base_offset < mark.base_offset:
                try:
                    sealed[segment] = self._seal(segment)
                except FileNotFoundError:  # retention has just dropped it
                    continue
                except UnreadableBytes as error:
                    raise unreadable(error) from error
        lost = {segment for segment, seal in self._schemas_of.items() if sealed.get(segment) != seal}
        if any(found.segment in lost for found in self._newest_schemas.values()):
            self._newest_schemas.clear()
            self._schemas_of.clear()
        for segment in lost & self._schemas_of.keys():
            del self._schemas_of[segment]
        for segment, seal in sealed.items():
            if segment not in self._schemas_of:
                self._note_schemas(self._newest_schemas, segment, mark, seal)
                self._schemas_of[segment] = seal
        newest = dict(self._newest_schemas)
        if segments and segments[-1].base_offset == mark.base_offset:
            self._note_schemas(newest, segments[-1], mark, None)
        return newest

    def _note_schemas(
        self, to: dict[TableId, NewestSchema], segment: SegmentFile, mark: DurableMark, seal: Seal | None
    ) -> None:
        for place in self._schema_places(segment, mark):
            known = to.get(place.table_id)
            if not is_definition(place.version) and (known is None or _age(known) < _age((place, segment))):
                to[place.table_id] = NewestSchema(place, segment, seal)

    def _seal(self, segment: SegmentFile) -> Seal:
        size = self._files.size(segment.path)
        return self._noted_seal(segment.base_offset, reader_of(self._files, segment.path), size)

    def _noted_seal(self, base: Offset, read: _Read, size: int) -> Seal:
        """Return a sealed segment's seal. If it isn't the one known, forget what was read of the file before it."""
        start = max(size - SEGMENT_TRAILER_SIZE, 0)
        seal = size, bytes(read(start, size - start))
        if self._seals.setdefault(base, seal) != seal:
            self._seals[base] = seal
            self._cached_frames -= len(self._sealed.pop(base, ()))
            self._totals.pop(base, None)
            self._first_group_end.pop(base, None)
            self._headers.pop((base, None), None)
            self._footer_hashes.pop(base, None)
        return seal

    def _schema_places(self, segment: SegmentFile, mark: DurableMark) -> Sequence[SchemaPlace]:
        return schemas_of(self.frames(segment, mark))

    def _group_end_from(self, segments: Sequence[SegmentFile], place: int, mark: DurableMark) -> Seq | None:
        """As `_group_end_at_start`, for the first segment from an index on that isn't misplaced."""
        while place + 1 < len(segments) and self._other_place(segments[place], mark) is not None:
            place += 1
        return self._group_end_at_start(segments[place], mark)

    def _group_end_at_start(self, segment: SegmentFile, mark: DurableMark) -> Seq | None:
        """Return the last number of a segment's first group; None if the mark shows nothing of it yet."""
        known = self._first_group_end.get(segment.base_offset)
        if known is not None:
            return known
        if segment.base_offset == mark.base_offset and mark.byte_end <= SEGMENT_HEADER_SIZE:
            return None
        try:
            frame = read_frame(ReadAhead(reader_of(self._files, segment.path)), SEGMENT_HEADER_SIZE, payload=False)
        except CorruptFrame:
            # Later frames may still be whole: the footer lists them.
            entries = self.frames(segment, mark)
            return entries[0].group_last_seq if entries else None
        self._first_group_end[segment.base_offset] = frame.header.group_last_seq
        return frame.header.group_last_seq

    def _sealed_frames(self, segment: SegmentFile, mark: DurableMark) -> Sequence[FrameEntry]:
        try:
            return self._footer(segment).frames
        except CorruptWal as error:
            self._tell(error)
            return tuple(self._walk(segment, mark))

    def _footer(self, segment: SegmentFile) -> SegmentFooter:
        return self._decoded_tail(segment, SegmentFooter.decode_tail)

    def _decoded_tail(self, segment: SegmentFile, decode: Callable[[_Read, int], _Tail | None]) -> _Tail:
        size = self._files.size(segment.path)
        read = _reader_of_tail(self._files, segment.path, size)
        try:
            self._noted_seal(segment.base_offset, read, size)
            footer = decode(read, size)
            if footer is None:
                raise CorruptFrame("the segment's footer is missing")
        except CorruptFrame as error:
            base = segment.base_offset
            raise damage(error, file=segment.path, byte=size, offset_from=base, offset_to=base) from error
        self._footer_hashes[segment.base_offset] = footer.footer_hash
        return footer

    def _open_frames(self, segment: SegmentFile, mark: DurableMark) -> Sequence[FrameEntry]:
        known = self._open
        if known is None or (known.base_offset, known.epoch) != (mark.base_offset, mark.epoch):
            known = _OpenFrames(segment.base_offset, mark.epoch, end_offset=segment.base_offset)
        if known.byte_end > mark.byte_end:
            return [entry for entry in known.entries if entry.position < mark.byte_end]
        if known.byte_end == mark.byte_end:
            return known.entries
        try:
            if known.header is None:
                known.header = self._header_of(segment, mark) or read_header(self._files, segment)
            self._scan(segment, known, known.header, mark)
        except CorruptWal as error:
            if known.header is None:
                self._tell(error)
            # Keep the result, so that the next call doesn't walk the segment again.
            known.entries = self._walk(segment, mark)
            if self._on_damage is None:
                raise
            known.byte_end, known.end_offset = mark.byte_end, mark.durable_offset
        self._open = known
        return known.entries

    def _scan(self, segment: SegmentFile, known: _OpenFrames, header: SegmentHeader, mark: DurableMark) -> None:
        """Add the frames that the mark has come to show. Raises `CorruptWal`."""
        window = ReadAhead(reader_of(self._files, segment.path), HEADS_AHEAD_BYTES)
        try:
            for frame in scan_frames(
                window, header, position=known.byte_end, offset=known.end_offset, end=mark.byte_end, payload=False
            ):
                known.entries.append(entry_of(frame.header, frame.position, frame.length, None))
                known.byte_end = frame.end
                known.end_offset = Offset(frame.header.first_offset + frame.header.count)
        except CorruptFrame as error:
            raise damage(
                error,
                file=segment.path,
                byte=known.byte_end,
                offset_from=known.end_offset,
                offset_to=mark.durable_offset,
            ) from error

    def _walk(self, segment: SegmentFile, mark: DurableMark) -> GrowingEntries:
        """Return entries for the frames before the mark that can be found without a footer.

        Report each loss between them.
        """
        following = (other.base_offset for other in self.segments(mark) if other.base_offset > segment.base_offset)
        end = min(following, default=mark.durable_offset)
        entries = GrowingEntries()
        for found in scan_segment(self._files, self._shard, segment, end=end, payload=False):
            if isinstance(found, ScannedFrame):
                if (segment.base_offset, found.end) <= (mark.base_offset, mark.byte_end):
                    entries.append(entry_of(found.header, found.position, found.length, None))
            elif (segment.base_offset, found.byte) < (mark.base_offset, mark.byte_end):
                self._lost_upto[segment.base_offset] = found.offset_to or segment.base_offset
                self._tell(damage_of(found))
        return entries


def _reader_of_tail(files: Files, path: str, size: int) -> _Read:
    """Return a function (position, length) → bytes of a file; its last `_TAIL_BYTES` are read at once."""
    read = reader_of(files, path)
    start = max(size - _TAIL_BYTES, 0)
    try:
        tail = read(start, size - start)
    except UnreadableBytes:  # perhaps of frames alone
        return read

    def read_tail(position: int, length: int) -> bytes:
        inside = position - start
        return read(position, length) if inside < 0 else tail[inside : inside + length]

    return read_tail


def load_schemas(files: Files, path: str, header: SegmentHeader, frames: Iterable[SchemaPlace]) -> SchemaSet:
    """Load the schemas in some of a segment's schema frames. Raises `CorruptWal`."""
    schemas = SchemaSet(header.directory)
    for position, length, *_ in frames:
        try:
            frame = decode_frame(files.read(path, position, length), schemas)
            if not isinstance(frame, SchemaFrame):
                raise CorruptFrame("the footer lists a schema frame here, and there is none")
        except CorruptFrame as error:
            base = header.base_offset
            raise damage(error, file=path, byte=position, offset_from=base, offset_to=base) from error
    return schemas


def _age(found: NewestSchema | tuple[SchemaPlace, SegmentFile]) -> tuple[int, SegmentFile, int]:
    place, segment, *_ = found
    return place.version, segment, place.position


def has_numbers(entry: FrameEntry, numbers: tuple[Seq | None, Seq | None]) -> bool:
    """Return whether a frame has numbers in `(first, second]`."""
    after, upto = numbers
    return (after is None or entry.last_seq > after) and (upto is None or entry.first_seq <= upto)


def overlaps(entry: FrameEntry, after: Seq, upto: Seq) -> bool:
    """As `has_numbers`, with both bounds given."""
    return entry.last_seq > after and entry.first_seq <= upto
