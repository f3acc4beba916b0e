"""Repair, the only way past damage: unreadable bytes are cut out, and kept, once a person accepts the loss.

`plan_repair` reports what is damaged, and which of it costs records; nothing is changed. `repair`
performs it, if the accepted ranges cover exactly the lost records: no fewer, and nothing that could
still be read.

An accepted loss is made durable as a *loss frame*, in place of the cut bytes and of the same
length. It records which offsets are lost, and why. So offsets stay dense and positions in the file
stay the same. Every reader, old index or copy of the folder works without further knowledge. A
frame that has lost one table's rows keeps the others': its directory names records that no part
holds. Anything that costs no records is rebuilt: a footer from the frames, a header from the
adjacent segments, a schema from any other copy of it.

A damaged segment is rewritten to a second file, fsynced and renamed over; what was cut is fsynced
before, in `.torn` files. The next segment's header names the footer, and is rewritten after it.
After a crash in between, the repair can be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

from millstream.codec.log_frame import FrameKind, RecordsFrame, decode_frame
from millstream.codec.log_schemas import SchemaSet
from millstream.errors import LogError
from millstream.model.ids import ShardId
from millstream.model.positions import Offset, Seq
from millstream.model.schema import TableSchema
from millstream.ports import Clock, Files
from millstream.wal.durable_mark import MarkFile
from millstream.wal.files import RealFiles, SystemClock
from millstream.wal.layout import list_shards, shard_folder
from millstream.wal.mending.misplaced_segments import move_segments
from millstream.wal.mending.plan import AcceptedRange, RepairPlan, SegmentPlan, plan_repair, span_of
from millstream.wal.mending.rewrite import Rewriter
from millstream.wal.salvage import CheckedFrame, KnownSchemas
from millstream.wal.segment_scan import Loss, ScannedFrame
from millstream.wal.shard_locks import folder_lock, lock_shards

logger = logging.getLogger("millstream.wal")

__all__ = ["AcceptedRange", "RepairPlan", "plan_repair", "repair", "set_tail_aside"]


def repair(
    folder: str,
    accepted: Iterable[AcceptedRange],
    *,
    drop_readable: bool = False,
    schemas: Iterable[TableSchema] = (),
    files: Files | None = None,
    clock: Clock | None = None,
) -> RepairPlan:
    """Repair a log: afterwards a writer opens it, and readers skip what was lost.

    Args:
        accepted: exactly the records that are lost.
        drop_readable: accept ranges that include whole readable frames, and drop those too, so that
            no half of a transaction stays.
        schemas: known from a catalog, for records whose schema the log has lost.
        clock: for the recorded time of acceptance.

    Returns:
        The plan as performed, with the files that hold what was cut.

    Raises:
        LogError (`loss_not_accepted`): the ranges don't cover what is lost, or cover what isn't; nothing was
            changed.
        ShardLocked: a writer runs.
        LogError: as `plan_repair`.
        OSError: the disk failed, or is full; what was renamed before stays, and the rest can be
            repeated.
    """
    files = RealFiles() if files is None else files
    clock = SystemClock() if clock is None else clock
    # A writer among several takes over locked shards only under the folder's lock.
    with folder_lock(files, folder, clock), ExitStack() as held:
        marks = lock_shards(files, folder, list_shards(files, folder))
        for mark in marks.values():
            held.callback(mark.close)
        known, ranges = list(schemas), list(accepted)
        plan = plan_repair(folder, schemas=known, files=files)
        _check_accepted(plan, ranges, drop_readable=drop_readable)
        if plan.moves:
            moves, aside = plan.moves, move_segments(files, plan.moves)
            plan = plan_repair(folder, schemas=known, files=files)
            _check_accepted(plan, ranges, drop_readable=drop_readable)
            plan.moves, plan.kept_aside = moves, aside
        rewriter = Rewriter(files, plan, KnownSchemas(files, folder, known), clock.now_ns())
        for shard in plan.segments:
            rewriter.write(shard, shard_folder(folder, shard), marks[shard])
    return plan


def set_tail_aside(
    files: Files, folder: str, marks: Mapping[ShardId, MarkFile], *, above: Seq, now_ns: int
) -> list[str]:
    """Cut out what a forgotten writer wrote above a number: readers have passed those numbers.

    Args:
        marks: of all the writer's shards; the caller holds their locks.
        above: the end of one of its groups.
        now_ns: the time to record for the loss.

    Returns:
        The files that hold what was cut; none if nothing had to be.

    Raises:
        LogError (`loss_not_accepted`): these shards have other damage; nothing was changed.
        OSError: the disk failed, or is full; the rest can be repeated.
    """
    plan = plan_repair(folder, files=files, only=marks, above=above)
    damaged, given_up = plan.is_needed, list[Loss]()
    for segments in plan.segments.values():
        for made in segments:
            for place, piece in enumerate(made.pieces):
                if not isinstance(piece, CheckedFrame) or piece.frame.header.kind is FrameKind.LOSS:
                    continue
                # Cut their schema frames too: a frame after the log's end must name the previous
                # group.
                if piece.is_whole and piece.frame.header.group_last_seq > above:
                    made.pieces[place] = lost = _loss_of(made, piece.frame, f"its writer was forgotten at {above}")
                    made.changed = True
                    given_up.append(lost)
    plan.losses += [lost for lost in given_up if lost.offset_to != lost.offset_from]
    if not given_up:
        return []
    if damaged:
        raise LogError(
            f"{folder} is damaged, so the records above {above}, at which its writer was forgotten, can't be set aside yet",
            code="loss_not_accepted",
            hint="Run `millstream wal verify` to list the damage and `millstream wal repair` to repair it, then start the "
            "writer again.",
        )
    rewriter = Rewriter(files, plan, KnownSchemas(files, folder, ()), now_ns)
    for shard, mark in marks.items():
        rewriter.write(shard, shard_folder(folder, shard), mark)
    logger.warning("this writer was forgotten: what it wrote above %s lies in %s", above, ", ".join(plan.kept_aside))
    return plan.kept_aside


# --- accepted losses -----------------------------------------------------------------------------------------------


def _check_accepted(plan: RepairPlan, accepted: Sequence[AcceptedRange], *, drop_readable: bool) -> None:
    """Raise `loss_not_accepted` unless the ranges are exactly what is lost; turn readable frames to drop into losses."""
    needed = " ".join(f"--accept-loss {wanted}" for wanted in plan.ranges())
    for offered in accepted:
        if offered.shard is None and not offered.by_number and len(plan.segments) > 1:
            raise LogError(
                f"the range {offered} lacks a shard",
                code="loss_not_accepted",
                hint=f"Write SHARD:FROM-TO; the lost ranges are {needed or 'none'}.",
            )
    for loss in plan.losses:
        if not _is_covered(loss, accepted):
            shard, start, end = span_of(loss)
            raise LogError(
                f"offsets [{start}, {end}) of shard {shard} can't be read ({loss.file}: {loss.why}), and their loss wasn't accepted",
                code="loss_not_accepted",
                hint=f"Accept the loss: {needed}.",
                file=loss.file,
            )
    for segments in plan.segments.values():
        for made in segments:
            _check_readable(made, accepted, plan, needed, drop_readable=drop_readable)
    before = [_loss_like(frame) for frame in _accepted_before(plan)]
    for offered in accepted:
        if not any(_meets(offered, loss) for loss in (*plan.losses, *before)):
            raise LogError(
                f"nothing is lost in {offered}",
                code="loss_not_accepted",
                hint=f"Name exactly the lost ranges: {needed or 'none'}.",
            )


def _accepted_before(plan: RepairPlan) -> Iterator[ScannedFrame]:
    """Yield loss frames that exist already: a repair that was cut short may be repeated."""
    for segments in plan.segments.values():
        for made in segments:
            for piece in made.pieces:
                if (
                    isinstance(piece, CheckedFrame)
                    and piece.frame.header.kind is FrameKind.LOSS
                    and piece.frame.header.count
                ):
                    yield piece.frame


def _loss_like(frame: ScannedFrame) -> Loss:
    header = frame.header
    end = Offset(header.first_offset + header.count)
    return Loss(
        "", frame.position, "", header.first_offset, end, header.shard, frame.end, header.first_seq, header.last_seq
    )


def _is_covered(loss: Loss, accepted: Sequence[AcceptedRange]) -> bool:
    shard, at, end = span_of(loss)
    for offered in sorted(accepted, key=lambda offered: offered.start):
        if offered.by_number:
            known = loss.first_seq is not None and loss.last_seq is not None
            if known and offered.start <= (loss.first_seq or 0) and (loss.last_seq or 0) < offered.end:
                return True
        elif offered.shard in (None, shard) and offered.start <= at:
            at = max(at, offered.end)
    return at >= end


def _meets(offered: AcceptedRange, loss: Loss) -> bool:
    shard, start, end = span_of(loss)
    if offered.by_number:
        known = loss.first_seq is not None and loss.last_seq is not None
        return known and offered.start <= (loss.last_seq or 0) and (loss.first_seq or 0) < offered.end
    return offered.shard in (None, shard) and offered.start < end and start < offered.end


def _check_readable(
    made: SegmentPlan,
    accepted: Sequence[AcceptedRange],
    plan: RepairPlan,
    needed: str,
    *,
    drop_readable: bool,
) -> None:
    for place, piece in enumerate(made.pieces):
        if (
            not isinstance(piece, CheckedFrame)
            or not piece.is_whole
            or piece.frame.header.kind is not FrameKind.RECORDS
        ):
            continue
        whole = _loss_of(made, piece.frame, "dropped with what was lost")
        _, start, end = span_of(whole)
        for offered in accepted:
            if not _meets(offered, whole) or (offered.by_number and not _holds(made, piece.frame, offered)):
                continue
            if not drop_readable:
                raise LogError(
                    f"{offered} covers records that can be read: offsets [{start}, {end}) of shard {made.shard}",
                    code="loss_not_accepted",
                    hint=f"Name only the lost ranges ({needed or 'none'}), or pass --drop-readable to drop readable records too.",
                )
            if not _is_covered(whole, [offered]):
                raise LogError(
                    f"{offered} cuts through a frame with offsets [{start}, {end}) of shard {made.shard}; a frame is dropped as a whole",
                    code="loss_not_accepted",
                    hint="Widen the range to the whole frame, or leave it out.",
                )
            made.pieces[place] = whole
            made.changed = True
            plan.losses.append(whole)
            break


def _loss_of(made: SegmentPlan, frame: ScannedFrame, why: str) -> Loss:
    """Return a whole frame as a loss."""
    header = frame.header
    end = Offset(header.first_offset + header.count)
    return Loss(
        made.path, frame.position, why, header.first_offset, end, made.shard, frame.end, header.first_seq,
        header.last_seq,
    )  # fmt: skip


def _holds(made: SegmentPlan, frame: ScannedFrame, offered: AcceptedRange) -> bool:
    """Return whether a frame has a record with a number in the range; numbers of several tables interleave."""
    found = decode_frame(frame.head, SchemaSet(made.header.directory), read_payload=lambda _position, _length: b"")
    assert isinstance(found, RecordsFrame)
    firsts, counts = (found.batches.column(name).to_pylist() for name in ("first_seq", "count"))
    return any(
        first < offered.end and offered.start < first + count for first, count in zip(firsts, counts, strict=True)
    )
