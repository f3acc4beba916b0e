"""A follower's log: the leader's bytes, verified as they come, in a folder that every reader reads as any other.

Position and state are committed together: the log is the position. A shipment's bytes are verified first; if they are
invalid, nothing is written. Then they are written and fsynced. Then the marks that came with them are moved, as a
writer moves its own (`wal.durable_mark`). So a concurrent reader sees whole groups only, at any time and after any crash.

Verified bytes below the end must equal those here (else `Diverged`; nothing is overwritten). Bytes above it: `ReplicaGap`.

When the disk fails:

- If there is no space, the shipment's bytes are cut back. The caller gets `DiskFull`, and may send it again.
- After any other failed write, and every failed fsync, the log takes nothing more (`replica_failed`). A new open
  verifies the bytes after the marks, rewrites them and continues from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from millstream import failpoints
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.errors import Diverged, MillstreamError, ReplicaGap, ReplicationError, ShipmentUnreadable
from millstream.model.ids import GroupNumber, RegionId, ShardId, StreamId, WriterId
from millstream.model.marks import DroppedMark, DurableMark
from millstream.model.positions import Offset, Seq
from millstream.model.replication import ByteEnd, ReplicaPosition, SegmentPart, Shipment
from millstream.ports import Clock, Files, WritableFile
from millstream.protocol.sequencer.persisted_upto import stream_cut
from millstream.wal.disk_space import NO_SPACE, check_space
from millstream.wal.durable_mark import MarkFile, read_dropped, read_mark
from millstream.wal.files import RealFiles, SystemClock, check_is_at, error_of_os, is_refused, replacing
from millstream.wal.layout import list_shards, segment_path, shard_folder
from millstream.wal.replica.follower_marks import NOBODY, check_mark, is_newer, moves, placeholder
from millstream.wal.replica.partial_groups import GroupEnds, PartialGroups
from millstream.wal.replica.recovery import fresh_shard, note_sealed, recover_replica
from millstream.wal.replica.verify_continuity import ArrivingShard, WholeFrame, footer_start
from millstream.wal.replica.visibility import ReplicaShown
from millstream.wal.shard_locks import lock_follower, lock_shards
from millstream.wal.startup_progress import StartupProgress


class ReplicaEnd(NamedTuple):
    """How far a follower shows its log."""

    group: GroupNumber
    """Last commit group that is there on all shards; with several writers, the lowest of their last groups."""
    persisted_upto: Seq
    records: int
    """Offsets before the marks, over all shards, including what retention has dropped."""


@dataclass(slots=True)
class _ReplicaShard:
    """One shard of the log."""

    folder: str
    mark: MarkFile
    shown: DurableMark | None
    dropped: DroppedMark | None
    arriving: ArrivingShard
    file: WritableFile | None = None
    """File of the arriving segment, once something is to be written."""
    anchored: Offset | None = None
    """Segment that the mark named at its last fsync."""


@dataclass(slots=True)
class _NewBytes:
    """New bytes for one segment's file."""

    shard: ShardId
    base: Offset
    position: int
    buffers: list[memoryview] = field(default_factory=list)
    size: int = 0
    is_end: bool = False


@dataclass(slots=True)
class _Plan:
    """Changes of a shipment, verified and not written yet."""

    arriving: dict[ShardId, ArrivingShard] = field(default_factory=dict)
    pieces: list[_NewBytes] = field(default_factory=list)
    whole: list[WholeFrame] = field(default_factory=list)
    dropped: dict[ShardId, DroppedMark] = field(default_factory=dict)
    """Starts of shards that have nothing yet."""


class ReplicaLog:
    """A follower's log, open for shipments. One thread uses it; any number of readers may read the folder."""

    def __init__(
        self,
        folder: str,
        files: Files,
        lock: WritableFile,
        stream: StreamId | None,
        shards: dict[ShardId, _ReplicaShard],
        groups: PartialGroups,
        readers: ReplicaShown,
        *,
        side_by_side: bool,
        withholds: bool,
    ) -> None:
        self._folder = folder
        self._files = files
        self._lock = lock
        self._stream = stream
        self._region: RegionId | None = next(
            (s.arriving.region for s in shards.values() if not s.arriving.is_new), None
        )
        self._shards = shards
        self._groups = groups
        self._readers = readers
        self._withholds = withholds
        self._syncers = ThreadPoolExecutor(4, "replica-sync") if side_by_side else None
        self.failure: ReplicationError | None = None
        """Reason why nothing more is taken; None while the log works."""

    @classmethod
    def open(
        cls,
        folder: str,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
        stream: StreamId | None = None,
        side_by_side: bool = True,
        withholds: bool = False,
        unmarked: frozenset[ShardId] = frozenset(),
    ) -> ReplicaLog:
        """Take the locks, verify what lies after the marks, and make it durable.

        Args:
            folder: the stream's; made if it doesn't exist.
            clock: measures the time: a slow start logs its progress.
            stream: the stream that the log must be of; None to take what lies there, or comes first.
            withholds: show readers nothing of a shipment that lacks shown positions.
            side_by_side: fsync several shards in parallel threads; otherwise in order, for tests that count.
            unmarked: the shards of the log, all of one writer, if its leader's marks will never come: show the whole
                groups that lie here.

        Raises:
            ShardLocked: another process follows here, or writes.
            CorruptWal: what the marks cover is damaged, or isn't there.
            ReplicationError (`other_stream`): another stream's log lies here.
            LogError (`unexpected_file`): a file lies there that isn't the log's.
            DiskFull: there is no space to rewrite what lies after the marks.
            ReplicationError (`replica_failed`): the disk failed; nothing that the marks cover was changed.
        """
        files = RealFiles() if files is None else files
        files.makedirs(folder)
        lock = lock_follower(files, folder)
        marks: dict[ShardId, MarkFile] = {}
        try:
            marks = lock_shards(files, folder, list_shards(files, folder))
            found = {shard: read_mark(files, shard_folder(folder, shard)) for shard in marks}
            known = next((mark.stream for mark in found.values() if mark is not None), None)
            if None not in (stream, known) and stream != known:
                raise ReplicationError(f"{folder} is the log of stream {known}, not of {stream}", code="other_stream")
            stream = stream or known
            groups, ends, readers = PartialGroups(), GroupEnds(), ReplicaShown(files)
            shards: dict[ShardId, _ReplicaShard] = {}

            def note(frames: Sequence[WholeFrame]) -> None:
                groups.note(frames)
                ends.note(frames)

            progress = StartupProgress("the log's recovery", clock or SystemClock(), folder)
            for shard, mark in marks.items():
                shard_dir = shard_folder(folder, shard)
                dropped = read_dropped(files, shard_dir)
                arriving = recover_replica(
                    progress.over(files), shard_dir, shard, stream=stream, mark=found[shard], dropped=dropped, note=note
                )
                if arriving is None:
                    mark.close()
                    continue
                stream = arriving.stream
                readers.found(shard, shard_dir, mark)
                shards[shard] = _ReplicaShard(shard_dir, mark, found[shard], dropped, arriving)
            progress.end()
        except BaseException as error:
            for mark in marks.values():
                mark.close()
            lock.close()
            if isinstance(error, OSError):
                raise _told(error, folder) from error
            raise
        log = cls(folder, files, lock, stream, shards, groups, readers, side_by_side=side_by_side, withholds=withholds)
        try:
            own = {number: mark for number, mark in log.marks().items() if mark.writer != NOBODY}
            covered = min((mark.group for mark in own.values()), default=GroupNumber(0))
            for number, shown in own.items():
                if shown.group > covered:
                    note_sealed(files, shards[number].folder, shown, covered, note)
            log._show_whole(ends, unmarked)
        except BaseException as error:
            log.close()
            if isinstance(error, OSError):
                raise _told(error, folder) from error
            raise
        return log

    @property
    def stream(self) -> StreamId | None:
        """The log's stream; None if nothing has come yet."""
        return self._stream

    @property
    def region(self) -> RegionId | None:
        """Region of all its segments; None if nothing has come yet."""
        return self._region

    def position(self) -> ReplicaPosition:
        """Return the end of the durable bytes of each shard that has any."""
        return {number: shard.arriving.end for number, shard in self._shards.items() if not shard.arriving.is_new}

    def marks(self) -> Mapping[ShardId, DurableMark]:
        """Return the durable mark of each shard; readers may be shown less."""
        return {number: shard.shown for number, shard in self._shards.items() if shard.shown is not None}

    def end(self) -> ReplicaEnd:
        """Return how far the log is shown."""
        marks = [mark for mark in self.marks().values() if mark.writer]
        return ReplicaEnd(
            GroupNumber(min((mark.group for mark in marks), default=0)),
            stream_cut(self.marks().values()),
            sum(mark.durable_offset for mark in marks),
        )

    def group_of(self, writer: WriterId) -> GroupNumber:
        """Return the last commit group of one writer that is there on all its shards."""
        return GroupNumber(min((mark.group for mark in self.marks().values() if mark.writer == writer), default=0))

    def apply(self, shipment: Shipment) -> None:
        """Apply a shipment: verify its bytes, make them durable, then show what its marks cover as the leader does.

        Raises:
            ReplicaGap: it lies beyond the end; nothing was changed. `position` is the next position expected.
            ShipmentUnreadable: a checksum fails, or the marks don't match the bytes; a frame that was cut must come
                again whole.
            Diverged: other bytes lie here at the same place, or whole frames don't follow on; nothing was changed.
            ReplicationError (`other_stream`): it is of another stream or region; nothing was changed.
            DiskFull: there is no space; nothing of it is here, and it may come again.
            ReplicationError (`replica_failed`): the disk failed; nothing more is taken.
            ShardLocked: a writer has one of the shards.
        """
        if self.failure is not None:
            raise ReplicationError(
                "the follower's log has failed; the shipment wasn't applied", code="replica_failed"
            ) from self.failure
        if self._stream not in (None, shipment.stream) or self._region not in (None, shipment.region):
            raise ReplicationError(
                f"the shipment belongs to stream {shipment.stream} in region {shipment.region}; {self._folder} holds stream {self._stream} in region {self._region}",
                code="other_stream",
            )
        plan = _Plan()
        for part in shipment.parts:
            try:
                self._plan(plan, shipment, part)
            except ShipmentUnreadable:
                self._forget_partial(part.shard)
                raise
        self._uninterrupted(plan, shipment)

    def show_all(self) -> None:
        """Show readers all whole groups here: what this follower has acknowledged is held as the level requires.

        Raises:
            ReplicationError (`replica_failed`): the disk failed; nothing more is taken.
        """
        if self.failure is not None:
            raise ReplicationError("the follower's log has failed", code="replica_failed") from self.failure
        try:
            self._readers.move(self.marks(), self.marks())
        except OSError as error:
            raise self._poison("the disk failed", error) from error

    def close(self) -> None:
        """Release the locks."""
        if self._syncers is not None:
            self._syncers.shutdown()
        for shard in self._shards.values():
            if shard.file is not None:
                shard.file.close()
            shard.mark.close()
        self._lock.close()

    # --- verifying -------------------------------------------------------------------------------------------------

    def _plan(self, plan: _Plan, shipment: Shipment, part: SegmentPart) -> None:
        """Verify one part, which follows those before it."""
        arriving = plan.arriving.get(part.shard)
        if arriving is None:
            known = self._shards.get(part.shard)
            arriving = fresh_shard(shipment.stream, part.shard, Offset(0)) if known is None else known.arriving.copy()
            arriving.region = shipment.region
        data = memoryview(part.data)
        if arriving.is_new and part.position == 0 and part.base_offset > arriving.base:
            dropped = shipment.first_kept.get(part.shard)
            if dropped is None or dropped.offset != part.base_offset:
                raise _gap(part, arriving.end)
            arriving = fresh_shard(shipment.stream, part.shard, part.base_offset)
            arriving.region = shipment.region
            plan.dropped[part.shard] = dropped
        start = ByteEnd(part.base_offset, part.position)
        if start > arriving.end or (part.position and part.base_offset != arriving.base and start > arriving.end):
            raise _gap(part, arriving.end)
        if start < arriving.end:
            taken = len(data) if part.base_offset < arriving.base else arriving.position - part.position
            self._compare(part, data[:taken], arriving)
            data = data[taken:]
        plan.arriving[part.shard] = arriving
        if data:
            self._take(plan, arriving, part, data)

    def _take(self, plan: _Plan, arriving: ArrivingShard, part: SegmentPart, data: memoryview) -> None:
        piece = _NewBytes(part.shard, arriving.base, arriving.position, [data], len(data), part.is_end)
        end = arriving.position + len(data)
        if arriving.position == 0:
            arriving.begin(data)
            data = data[SEGMENT_HEADER_SIZE:]
        if not part.is_end:
            arriving.feed(data, plan.whole)
        else:
            start = footer_start(data, end - len(data))
            if start is None:
                with suppress(ShipmentUnreadable, Diverged):  # the caller learns how far the valid bytes go
                    arriving.feed(data, plan.whole)
                raise arriving.unreadable("it ends without a footer, or the footer was cut")
            frames = start - (end - len(data))
            arriving.feed(data[:frames], plan.whole)
            arriving.finish(data[frames:])
        # Pieces of one shard are consecutive, whatever lies between them: one piece per file.
        last = next((made for made in reversed(plan.pieces) if made.shard == piece.shard), None)
        if last is not None and last.base == piece.base:
            last.buffers += piece.buffers
            last.size += piece.size
            last.is_end = piece.is_end
        else:
            plan.pieces.append(piece)

    def _compare(self, part: SegmentPart, data: memoryview, arriving: ArrivingShard) -> None:
        """Check that bytes already here are the same."""
        shard = self._shards.get(part.shard)
        if shard is None or part.base_offset > shard.arriving.base:
            raise _gap(part, arriving.end)  # twice in one shipment
        sure = len(data)
        if part.base_offset == shard.arriving.base:
            if part.position + len(data) > shard.arriving.position:
                raise _gap(part, arriving.end)
            sure = max(0, shard.arriving.verified - part.position)
        try:
            here = self._files.read(segment_path(shard.folder, part.base_offset), part.position, len(data))
        except FileNotFoundError:
            dropped = read_dropped(self._files, shard.folder)
            if dropped is not None and part.base_offset < dropped.offset:
                return
            here = b""
        if here[:sure] != data[:sure]:
            raise Diverged(
                f"segment {part.base_offset} of shard {part.shard} differs from the leader's between bytes {part.position} and "
                f"{part.position + len(data)}",
                shard=int(part.shard),
                base_offset=int(part.base_offset),
                byte=part.position,
            )
        if here != data:
            raise arriving.unreadable("a frame was sent again with other bytes")

    def _forget_partial(self, number: ShardId) -> None:
        """Drop the first piece of a cut frame, which may be the invalid one: the frame comes again."""
        shard = self._shards.get(number)
        if shard is None or shard.arriving.position == shard.arriving.verified:
            return
        shard.arriving.forget_partial()
        try:
            self._file(shard).truncate(shard.arriving.verified)
        except OSError as error:
            raise self._poison("cutting off a part of a frame failed", error) from error

    # --- writing ---------------------------------------------------------------------------------------------------

    def _uninterrupted(self, plan: _Plan, shipment: Shipment) -> None:
        """Make all changes to files; if it is interrupted, only a new open finds out what is there."""
        try:
            self._begin_shards(plan, shipment)
            self._write(plan)
            failpoints.hit("replica.before_marks")
            self._show(shipment)
        except OSError as error:
            raise self._poison("the disk failed", error) from error
        except MillstreamError:
            raise
        except BaseException as error:
            self._poison("it was interrupted", error)
            raise

    def _begin_shards(self, plan: _Plan, shipment: Shipment) -> None:
        """Make the shards that come for the first time, each with a mark that shows nothing and delays no other."""
        names = [shard for shard in {*plan.arriving, *shipment.marks} if shard not in self._shards]
        marks: dict[ShardId, MarkFile] = {}
        if names:
            try:
                marks = lock_shards(self._files, self._folder, sorted(names))
            except OSError as error:
                check_space(error, f"no disk space in {self._folder} for more shards")
                raise
        self._stream = shipment.stream
        self._region = shipment.region
        for number, mark in marks.items():
            arriving = fresh_shard(shipment.stream, number, Offset(0))
            self._shards[number] = _ReplicaShard(shard_folder(self._folder, number), mark, None, None, arriving)
        for number in sorted({*plan.arriving, *shipment.marks}):
            shard, dropped = self._shards[number], plan.dropped.get(number)
            if shard.shown is not None and dropped is None:
                continue
            if dropped is not None:
                shard.mark.move_dropped(dropped)
                shard.dropped = dropped
            first = placeholder(shipment.stream, shard.dropped)
            shard.mark.move(first, anchor=True)
            shard.shown = first

    def _write(self, plan: _Plan) -> None:
        """Write and fsync everything; each shard then ends where its verified bytes do."""
        made: list[str] = []
        try:
            touched: list[WritableFile] = []
            for piece in plan.pieces:
                shard = self._shards[piece.shard]
                if piece.position == 0:
                    self._make_segment(shard, piece, made)
                    continue
                file = self._file(shard)
                file.pwritev(piece.buffers, piece.position)
                if piece.is_end and file.size() > piece.position + piece.size:
                    file.truncate(piece.position + piece.size)
                touched.append(file)
            self._sync(touched)
            for shard in self._shards.values():
                if shard.file is not None:
                    check_is_at(shard.file, segment_path(shard.folder, shard.arriving.base))
        except OSError as error:
            if error.errno in NO_SPACE:
                self._cut_back(plan, made)
            check_space(error, f"no disk space in {self._folder} for the shipment")
            raise
        for number, arriving in plan.arriving.items():
            shard = self._shards[number]
            if shard.file is not None and arriving.base != shard.arriving.base:
                shard.file.close()
                shard.file = None
            shard.arriving = arriving
        self._groups.note(plan.whole)

    def _make_segment(self, shard: _ReplicaShard, piece: _NewBytes, made: list[str]) -> None:
        """Make a segment, and name it once its first bytes are durable: no reader meets half a header."""
        path = segment_path(shard.folder, piece.base)
        with replacing(self._files, path) as file:
            made.append(path)
            file.pwritev(piece.buffers, 0)

    def _sync(self, files: Sequence[WritableFile]) -> None:
        failpoints.hit("replica.before_fsync")
        if self._syncers is None or len(files) < 2:
            for file in files:
                file.sync()
            return
        outcomes = [self._syncers.submit(file.sync) for file in files]
        for error in [outcome.exception() for outcome in outcomes]:
            if error is not None:
                raise error

    def _cut_back(self, plan: _Plan, made: Sequence[str]) -> None:
        """Remove what was written of a shipment that doesn't fit. Raises `OSError` if that fails, too."""
        for path in filter(self._files.exists, reversed(made)):
            self._files.remove(path)
        for number in plan.arriving:
            shard = self._shards[number]
            if shard.file is not None:
                shard.file.truncate(shard.arriving.position)

    def _file(self, shard: _ReplicaShard) -> WritableFile:
        if shard.file is None:
            shard.file = self._files.open_write(segment_path(shard.folder, shard.arriving.base))
        return shard.file

    def _poison(self, what: str, error: BaseException) -> ReplicationError:
        self.failure = ReplicationError(
            f"{self._folder}: {what}: {str(error) or type(error).__name__}", code="replica_failed"
        )
        return self.failure

    # --- showing ---------------------------------------------------------------------------------------------------

    def _show(self, shipment: Shipment) -> None:
        """Move the marks that came, and move the shown positions as far as the leader's."""
        if not shipment.marks:
            return
        if shipment.shown or self._readers.is_required or (self._withholds and shipment.shown is None):
            self._require()
        self._move_marks(shipment.marks)
        if shipment.shown:
            self._readers.move(shipment.shown, self.marks())
        elif shipment.shown is not None:
            self._readers.allow_all(self.marks())

    def _require(self) -> None:
        """Hold readers at what is shown, before marks move past it on some shard."""
        self._readers.require(
            (number, shard.folder, shard.mark, shard.shown)
            for number, shard in self._shards.items()
            if shard.shown is not None
        )

    def _move_marks(self, marks: Mapping[ShardId, DurableMark]) -> None:
        """Move marks that are newer than those here, if everything they cover is here."""
        shown = self.marks()
        newer = {number: mark for number, mark in sorted(marks.items()) if is_newer(mark, shown.get(number))}
        for number, mark in newer.items():
            shard = self._shards[number]
            check_mark(self._files, shard.folder, mark, shard.arriving)
        self._check_groups({**shown, **newer})
        for number, mark in moves(shown, newer):
            shard = self._shards[number]
            anchor = shard.anchored != mark.base_offset and mark == newer.get(number)
            shard.mark.move(mark, anchor=anchor)
            shard.shown = mark
            if anchor:
                shard.anchored = mark.base_offset

    def _show_whole(self, ends: GroupEnds, unmarked: frozenset[ShardId]) -> None:
        """Show acknowledged groups that a power cut has kept, although the marks that came with them are gone."""
        shown = self.marks()
        dropped = {number: shard.dropped for number, shard in self._shards.items() if shard.dropped is not None}
        newer = ends.marks(shown, self._groups, dropped, unmarked)
        if self._readers.is_required:
            self._require()
        for number, mark in moves(shown, newer):
            self._shards[number].mark.move(mark)
            self._shards[number].shown = mark
        for shard in self._shards.values():
            # The marks shown from here on cover acknowledged bytes, and may exist in the page cache only.
            if shard.shown is not None:
                shard.mark.move(shard.shown, anchor=True)
                shard.anchored = shard.shown.base_offset

    def _check_groups(self, marks: Mapping[ShardId, DurableMark]) -> None:
        shown = self.marks()
        dropped = {number: shard.dropped for number, shard in self._shards.items() if shard.dropped is not None}
        for writer in {mark.writer for mark in marks.values() if mark.writer}:
            covered = GroupNumber(min(mark.group for mark in marks.values() if mark.writer == writer))
            missing = self._groups.missing(writer, covered, shown, dropped)
            if missing is not None:
                group, shard = missing
                raise ShipmentUnreadable(
                    f"the leader's marks show group {group} of writer {writer}, but shard {shard} has received nothing of it",
                    group=int(group),
                    shard=int(shard),
                )


def _gap(part: SegmentPart, end: ByteEnd) -> ReplicaGap:
    return ReplicaGap(
        f"the shipment starts at byte {part.position} of segment {part.base_offset} of shard {part.shard}; this log ends at byte {end.position} of segment {end.base_offset}",
        shard=int(part.shard),
    )


def _told(error: OSError, folder: str) -> MillstreamError:
    """Return the error of an open for one of the disk's; `DiskFull` is raised."""
    check_space(error, f"no disk space in {folder} to rewrite the last shipment")
    if is_refused(error):
        return error_of_os(error)
    return ReplicationError(f"the disk under {folder} failed: {error}", code="replica_failed")
