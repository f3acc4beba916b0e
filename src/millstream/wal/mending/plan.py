"""Plan of a repair: what is lost, what is rebuilt, and how each segment will be written. Changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SEGMENT_TRAILER_SIZE, SegmentFooter, SegmentHeader
from millstream.errors import CorruptFrame, LogError, UsageError
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId
from millstream.model.marks import DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.schema import TableSchema
from millstream.ports import Files
from millstream.wal.durable_mark import missing_shards, read_dropped, read_mark
from millstream.wal.files import RealFiles
from millstream.wal.layout import SegmentFile, list_shards, segment_path, shard_folder
from millstream.wal.mending.misplaced_segments import Move, place_segments
from millstream.wal.misplacement import stream_of
from millstream.wal.salvage import CheckedFrame, KnownSchemas, Salvaged, salvage_segment
from millstream.wal.segment_scan import NO_STREAM, Loss, ReadAhead, ends_of, footer_of, header_of, read_frame, reader_of

_RANGE: Final = re.compile(r"(?:(seq|\d+):)?(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class AcceptedRange:
    """Records whose loss a person accepts."""

    start: int
    end: int
    """Exclusive end."""
    shard: ShardId | None = None
    """Shard; None if the log has only one."""
    by_number: bool = False
    """Whether these are numbers (`seq`), not offsets."""

    @classmethod
    def parse(cls, text: str) -> AcceptedRange:
        """Parse `FROM-TO` or `SHARD:FROM-TO`: offsets, TO exclusive, as `verify` prints them.

        `seq:A-B`: numbers, B inclusive.

        Raises:
            UsageError: it is neither.
        """
        found = _RANGE.fullmatch(text.strip())
        if found is None:
            raise UsageError(
                f"{text!r} isn't a range of records",
                hint="Write 1200-1240 or 0:1200-1240 (offsets of a shard, the end not included), or seq:501-620.",
            )
        start, end = int(found[2]), int(found[3])
        if found[1] == "seq":
            return cls(start, end + 1, None, by_number=True)
        return cls(start, end, None if found[1] is None else ShardId(int(found[1])))

    def __str__(self) -> str:
        if self.by_number:
            return f"seq:{self.start}-{self.end - 1}"
        return f"{'' if self.shard is None else f'{self.shard}:'}{self.start}-{self.end}"


@dataclass(slots=True)
class SegmentPlan:
    """A segment as it will be written."""

    shard: ShardId
    path: str
    base_offset: Offset
    header: SegmentHeader
    pieces: list[Salvaged] = field(default_factory=list)
    is_there: bool = True
    """False for a segment that is made in place of missing ones."""
    sealed: bool = True
    """Whether it has to end with a footer."""
    tail_from: int | None = None
    """Position in an open segment from which bytes are left for recovery to judge."""
    footer_from: int | None = None
    """Position of a footer that can't be read."""
    header_lost: bool = False
    changed: bool = False
    end_offset: Offset = Offset(0)


@dataclass(slots=True)
class RepairPlan:
    """The damage, and what its repair takes."""

    losses: list[Loss] = field(default_factory=list)
    """Unrecoverable records: each has to be accepted."""
    mends: list[Loss] = field(default_factory=list)
    """Damage that is rebuilt; no record is lost by it."""
    moves: list[Move] = field(default_factory=list)
    """Misplaced segments: set aside, or put where they belong."""
    kept_aside: list[str] = field(default_factory=list)
    """Files with what was cut, once it is done."""
    segments: dict[ShardId, list[SegmentPlan]] = field(default_factory=dict)
    """Segments that will be written; only for the repair."""

    @property
    def is_needed(self) -> bool:
        """Whether anything is damaged."""
        return bool(self.losses or self.mends or self.moves)

    def ranges(self) -> list[AcceptedRange]:
        """Return the ranges that have to be accepted, joined if losses touch."""
        found: list[AcceptedRange] = []
        for shard, start, end in sorted(span_of(loss) for loss in self.losses):
            if found and found[-1].shard == shard and start <= found[-1].end:
                found[-1] = replace(found[-1], end=max(end, found[-1].end))
            else:
                found.append(AcceptedRange(start, end, shard))
        return found


def plan_repair(
    folder: str,
    *,
    schemas: Iterable[TableSchema] = (),
    files: Files | None = None,
    only: Iterable[ShardId] | None = None,
    above: Seq | None = None,
) -> RepairPlan:
    """Find all damage and what its repair would cost. Reads and decodes everything; changes nothing.

    Args:
        schemas: known from a catalog, for records whose schema the log has lost.
        only: these shards; all by default.
        above: read only the last segments, with the groups that end above that number.

    Raises:
        LogError (`unexpected_file`): a file lies there that isn't the log's.
        LogError: nothing in the log names its stream.
        CorruptWal: a shard's folder is gone, and nothing shows what was in it.
    """
    files = RealFiles() if files is None else files
    plan = RepairPlan()
    elsewhere = KnownSchemas(files, folder, schemas)
    shards = list_shards(files, folder)
    marks = (read_mark(files, shard_folder(folder, shard)) for shard in shards)
    if (missing := missing_shards(folder, shards, filter(None, marks))) is not None:
        raise missing
    planned = shards if only is None else sorted(only)
    placement = place_segments(files, folder, shards, stream_of(files, folder))
    plan.moves = [move for move in placement.moves if move.shard in planned]
    for shard in planned:
        plan.segments[shard] = _plan_shard(files, folder, shard, placement.segments[shard], plan, elsewhere, above)
    known = {made.header.stream for segments in plan.segments.values() for made in segments} - {NO_STREAM}
    if plan.is_needed and len(known) != 1:
        raise LogError(
            f"the headers and marks in {folder} name no stream, or several",
            hint="Restore a segment, or the mark, from a copy.",
        )
    for segments in plan.segments.values():
        for made in segments:
            made.header = replace(made.header, stream=next(iter(known), NO_STREAM))
    return plan


def span_of(loss: Loss) -> tuple[ShardId, int, int]:
    """Return shard and offsets `[start, end)` of records that are lost."""
    assert loss.shard is not None
    assert loss.offset_from is not None
    assert loss.offset_to is not None
    return loss.shard, loss.offset_from, loss.offset_to


# --- damage --------------------------------------------------------------------------------------------------------


def _plan_shard(
    files: Files,
    folder: str,
    shard: ShardId,
    found: Sequence[SegmentFile],
    plan: RepairPlan,
    elsewhere: KnownSchemas,
    above: Seq | None,
) -> list[SegmentPlan]:
    """Plan how each of a shard's segments will be written, once those in `found` are in their places."""
    shard_dir = shard_folder(folder, shard)
    mark, dropped = read_mark(files, shard_dir), read_dropped(files, shard_dir)
    if dropped is not None:
        found = [segment for segment in found if segment.base_offset >= dropped.offset]
    expected = Offset(0) if dropped is None else dropped.offset
    if above is not None:
        found = _ending_above(files, found, above)
    if found and (mark is None or above is not None):
        expected = found[0].base_offset
    headers = [header_of(files, segment) for segment in found]
    planned: list[SegmentPlan] = []
    previous_hash: bytes | None = None
    for segment, header, end in zip(found, headers, ends_of(found, mark), strict=True):
        if segment.base_offset > expected:
            header_like = _like(headers, mark, shard, expected)
            planned.append(_missing(shard, shard_dir, expected, segment.base_offset, header_like, plan))
            previous_hash = None
        made = SegmentPlan(
            shard, segment.path, segment.base_offset, header or _like(headers, mark, shard, segment.base_offset)
        )
        planned.append(made)
        if header is None:
            made.header_lost = made.changed = True
            plan.mends.append(Loss(segment.path, 0, "the segment header can't be read", None, None, shard))
        elif previous_hash is not None and header.previous_hash != previous_hash:
            made.changed = True
            why = "it doesn't follow on the segment before it, as its header has it"
            plan.mends.append(Loss(segment.path, 0, why, None, None, shard))
        _survey(files, segment, made, plan, elsewhere, mark, end, is_last=segment is found[-1])
        expected = max(expected, made.end_offset)
        previous_hash = footer_hash_of(files, segment)
    if mark is not None and mark.durable_offset > expected:
        planned.append(
            _missing(shard, shard_dir, expected, mark.durable_offset, _like(headers, mark, shard, expected), plan)
        )
        planned[-1].sealed = False
    return planned


def _ending_above(files: Files, segments: Sequence[SegmentFile], above: Seq) -> list[SegmentFile]:
    """Return the last segments, from the last one that begins with a group at or below a number."""
    for place in reversed(range(len(segments))):
        with suppress(CorruptFrame):
            first = read_frame(ReadAhead(reader_of(files, segments[place].path)), SEGMENT_HEADER_SIZE, payload=False)
            if first.header.group_last_seq <= above:
                return list(segments[place:])
    return list(segments)


def _missing(
    shard: ShardId, shard_dir: str, start: Offset, end: Offset, header: SegmentHeader, plan: RepairPlan
) -> SegmentPlan:
    path = segment_path(shard_dir, start)
    loss = Loss(path, SEGMENT_HEADER_SIZE, "segments are missing here", start, end, shard)
    plan.losses.append(loss)
    return SegmentPlan(shard, path, start, header, [loss], is_there=False, changed=True, end_offset=end)


def _like(
    headers: Sequence[SegmentHeader | None], mark: DurableMark | None, shard: ShardId, base: Offset
) -> SegmentHeader:
    """Return what a lost header must have had, from the shard's other headers and its mark."""
    known = [header for header in headers if header is not None]
    near = max((h for h in known if h.base_offset <= base), key=lambda h: h.base_offset, default=None)
    near = near or (known[0] if known else None)
    if near is not None:
        return SegmentHeader(near.stream, near.region, shard, near.epoch, base, created_ns=near.created_ns)
    if mark is not None:
        return SegmentHeader(mark.stream, RegionId(0), shard, mark.epoch, base)
    return SegmentHeader(NO_STREAM, RegionId(0), shard, Epoch(0), base)


def _survey(
    files: Files,
    segment: SegmentFile,
    made: SegmentPlan,
    plan: RepairPlan,
    elsewhere: KnownSchemas,
    mark: DurableMark | None,
    end: Offset | None,
    *,
    is_last: bool,
) -> None:
    footer = footer_of(files, segment)
    is_open = is_last and not isinstance(footer, SegmentFooter)
    made.sealed = not is_open
    waiting: list[Salvaged] = []
    """In an open segment: what a crash may have left."""
    torn_group = group = GroupNumber(0)
    for found in salvage_segment(files, made.shard, segment, elsewhere, end=end):
        is_whole = isinstance(found, CheckedFrame) and found.is_whole
        position = found.frame.position if isinstance(found, CheckedFrame) else found.byte
        if isinstance(found, CheckedFrame):
            header = found.frame.header
            if made.header_lost:
                made.header = replace(made.header, epoch=header.epoch, region=header.region)
            if waiting and mark is None and header.group > torn_group:
                made.pieces += waiting
                waiting = []
            group = GroupNumber(header.group + (0 if header.more or not is_whole else 1))
        beyond = mark is not None and (segment.base_offset, position) >= (mark.base_offset, mark.byte_end)
        if is_open and (waiting or (not is_whole and (mark is None or beyond))):
            torn_group = torn_group if waiting else group
            waiting.append(found)
        else:
            made.pieces.append(found)
    if is_open:
        made.tail_from = position_of(waiting[0]) if waiting else _end_of(made.pieces, files.size(segment.path))
    made.end_offset = made.base_offset
    for piece in made.pieces:
        _take_stock(segment, made, piece, plan)
    if not isinstance(footer, SegmentFooter) and not is_last:
        made.changed = True
        made.footer_from = _end_of(made.pieces, files.size(segment.path))
        why = "the segment's footer is missing" if footer is None else str(footer)
        plan.mends.append(Loss(segment.path, made.footer_from, why, None, None, made.shard))


def _take_stock(segment: SegmentFile, made: SegmentPlan, piece: Salvaged, plan: RepairPlan) -> None:
    """Count a piece, or what is lost of it."""
    if isinstance(piece, CheckedFrame) and piece.is_whole:
        header = piece.frame.header
        made.end_offset = Offset(header.first_offset + header.count)
        return
    loss = piece if isinstance(piece, Loss) else piece.loss(segment)
    made.changed = True
    assert loss.offset_from is not None
    assert loss.offset_to is not None
    made.end_offset = max(made.end_offset, loss.offset_to)
    (plan.losses if loss.offset_to > loss.offset_from else plan.mends).append(loss)


def position_of(piece: Salvaged) -> int:
    """Return the piece's position in its file."""
    return piece.byte if isinstance(piece, Loss) else piece.frame.position


def _end_of(pieces: Sequence[Salvaged], size: int) -> int:
    """Return where the bytes of the last piece end."""
    if not pieces:
        return SEGMENT_HEADER_SIZE
    last = pieces[-1]
    if isinstance(last, CheckedFrame):
        return last.frame.end
    return size if last.byte_to is None else last.byte_to


def footer_hash_of(files: Files, segment: SegmentFile) -> bytes | None:
    """Return the hash that the next segment's header must name; None if the footer isn't valid."""
    if not isinstance(footer_of(files, segment), SegmentFooter):
        return None
    size = files.size(segment.path)
    length = SegmentFooter.size_in(files.read(segment.path, size - SEGMENT_TRAILER_SIZE, SEGMENT_TRAILER_SIZE))
    return SegmentFooter.encoded_hash(files.read(segment.path, size - length, length))
