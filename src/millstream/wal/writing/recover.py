"""Recovery: find what a log holds after any crash, and make that durable before any reader sees it.

A crash can only have hurt the one commit group that was being written, at the end of each shard's
last segment. The group before it was durable on all shards before the first byte of the next was
written. So:

1. Every segment except a shard's last must be sealed, and each header names the hash of the footer
   before it.
2. In the last segment, the walk stops at the first frame that fails its checksums or doesn't follow
   on.
3. The first group that lacks a part on some shard was never acknowledged: every shard is cut before
   it. The bytes cut off are kept in a `.torn` file.
4. A valid frame of a *later* group than that, on any shard, can't come from a crash. Nor can a hole
   in the groups, or a mark beyond the end of the log. All of these are damage: `CorruptWal`, and
   nothing is touched.
5. The bytes read may exist in the page cache only (after a failed fsync they may never reach the
   disk). A sealed segment means that its groups are whole on all shards. So before the first seal,
   recovery rewrites in place the frames that no mark covers, on every shard, and fsyncs them.
6. Then each tail is copied into a spare file, fsynced, and renamed over, so that a writer that was
   only paused holds a file that no reader opens. A footer at the end is written once more, and a
   tail without frames is removed. Only then may marks move.

Each step leaves a log that recovers to the same state: recovery may crash and be repeated anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from millstream.codec.log_segment import (
    NO_HASH,
    SEGMENT_HEADER_SIZE,
    SEGMENT_TRAILER_SIZE,
    SegmentFooter,
    SegmentHeader,
)
from millstream.errors import (
    CorruptFrame,
    CorruptWal,
    LogError,
    ReplicationError,
    StaleEpoch,
    UnreadableBytes,
)
from millstream.model.ids import Epoch, GroupNumber, RegionId, ShardId, SourceId, StreamId
from millstream.model.marks import DurableMark
from millstream.model.positions import Lsn, Offset, Seq
from millstream.ports import Files
from millstream.wal.disk_space import check_space
from millstream.wal.durable_mark import read_dropped, read_mark
from millstream.wal.files import put_in_place, replacing
from millstream.wal.frame_index import damage, missing_segments, unreadable
from millstream.wal.layout import SPARE_NAME, SegmentFile, list_segments, shard_folder
from millstream.wal.misplacement import REPLACED, misplacement
from millstream.wal.segment_scan import (
    ReadAhead,
    ScannedFrame,
    commit_times,
    footer_of,
    frames_behind,
    lost_groups,
    read_frame,
    reader_of,
    scan_frames,
)
from millstream.wal.writing.segment import FrameLog, entry_of

_COPY_BYTES = 1 << 20
"""Least size in bytes of a spare on a nearly full disk: it fits the end of a log that a full disk kept short."""
_FOOTER_AHEAD_BYTES = 32 << 10
"""Bytes read at a file's end to find its footer; most footers are smaller."""


@dataclass(frozen=True, slots=True)
class RecoveredShard:
    """The end of a shard's log, after recovery: all of it is in sealed segments."""

    shard: ShardId
    end_offset: Offset
    last_footer_hash: bytes


@dataclass(frozen=True, slots=True)
class Recovered:
    """The outcome of recovery."""

    shards: Mapping[ShardId, RecoveredShard]
    last_group: GroupNumber
    persisted_upto: Seq
    shown: Seq
    """Upper bound of the `persisted_upto` that marks have shown before."""
    reserved_to: Seq
    """Greatest reservation in any frame or mark."""
    reached: Mapping[SourceId, Lsn]
    hybrid_ns: int
    """Hybrid time of the last group that stays; 0 if there is none."""
    cut_bytes: int
    """Bytes that were cut off and kept aside, over all shards."""
    marks: Mapping[ShardId, DurableMark]
    """The marks as the last writer left them."""


@dataclass(slots=True)
class _Tail:
    """A shard as found before recovery."""

    shard: ShardId
    folder: str
    mark: DurableMark | None
    dropped_seq: Seq = Seq(0)
    """Last number of the last group whose part on this shard retention has dropped."""
    previous_hash: bytes = NO_HASH
    """Hash of the last sealed segment's footer."""
    sealed: SegmentFile | None = None
    """The last sealed segment."""
    sealed_last: ScannedFrame | None = None
    sealed_end: Offset = Offset(0)
    sealed_byte_end: int = SEGMENT_HEADER_SIZE
    open: SegmentFile | None = None
    """The last segment, if it has no valid footer."""
    header: SegmentHeader | None = None
    frames: list[ScannedFrame] = field(default_factory=list)
    """Frames of the open segment, in order, up to the first bad byte."""
    whole: set[GroupNumber] = field(default_factory=set)
    """Groups whose last frame for this shard is in `frames`."""
    behind: list[ScannedFrame] = field(default_factory=list)
    """Frames with a valid head after the first bad byte."""
    size: int = 0

    @property
    def sealed_group(self) -> GroupNumber:
        return GroupNumber(0) if self.sealed_last is None else self.sealed_last.header.group

    @property
    def byte_end(self) -> int:
        """End of the open segment's valid frames."""
        return self.frames[-1].end if self.frames else SEGMENT_HEADER_SIZE

    @property
    def end_offset(self) -> Offset:
        if self.frames:
            return Offset(self.frames[-1].header.first_offset + self.frames[-1].header.count)
        return self.sealed_end

    def has_whole(self, group: GroupNumber) -> bool:
        """Return whether this shard's part of a group is complete."""
        return group <= self.sealed_group or group in self.whole or self.has_lost(group)

    def has_lost(self, group: GroupNumber) -> bool:
        """Return whether a part of a group may have been among the bytes that `wal repair` cut out."""
        return any(group in lost for lost in lost_groups(self.frames, self.sealed_group))

    def damaged(self, why: str, byte: int | None = None) -> CorruptWal:
        segment = self.open or self.sealed
        return damage(
            why,
            file=self.folder if segment is None else segment.path,
            byte=self.byte_end if byte is None else byte,
            offset_from=self.end_offset,
            offset_to=None,
        )


def recover(
    files: Files, folder: str, *, stream: StreamId, region: RegionId, shards: Iterable[ShardId], epoch: Epoch
) -> Recovered:
    """Decide what the log holds and make it durable; afterwards every segment is sealed.

    Args:
        stream: the stream that the log must belong to.
        region: the region of all its shards.
        shards: all shards that share commit groups; the caller holds their locks, and their folders
            exist.
        epoch: the new writer's; above every epoch in the log.

    Raises:
        CorruptWal: damage that no crash explains; nothing was changed.
        StaleEpoch: this epoch or a later one has written the log; nothing was changed.
        DiskFull: no spare file and no space for a new one; what was readable stays so.
    """
    try:
        return _recover(files, folder, stream, region, shards, epoch)
    except UnreadableBytes as error:
        # Unreadable bytes are never a torn tail: they may hold acknowledged records.
        raise unreadable(error) from error


def _recover(
    files: Files, folder: str, stream: StreamId, region: RegionId, shards: Iterable[ShardId], epoch: Epoch
) -> Recovered:
    tails = {shard: _look(files, folder, stream, region, shard, epoch) for shard in shards}
    cut_from = _first_partial_group(tails)
    _check_for_damage(tails, cut_from)
    cut_bytes = 0
    for tail in tails.values():
        cut_bytes += _cut(tail, cut_from)
    _check_marks(tails.values(), stream)
    return _make_durable(files, tails, cut_bytes)


# --- looking -------------------------------------------------------------------------------------------------------


def _look(files: Files, folder: str, stream: StreamId, region: RegionId, shard: ShardId, epoch: Epoch) -> _Tail:
    shard_dir = shard_folder(folder, shard)
    tail = _Tail(shard, shard_dir, read_mark(files, shard_dir))
    dropped = read_dropped(files, shard_dir)
    segments = list_segments(files, shard_dir)
    if dropped is not None:
        tail.dropped_seq = dropped.seq
        # A crash may leave holes among dropped segments; retention removes the rest of them.
        segments = [segment for segment in segments if segment.base_offset >= dropped.offset]
    if tail.mark is not None:
        first = Offset(0) if dropped is None else dropped.offset
        there = segments[0].base_offset if segments else tail.mark.durable_offset
        if there > first or (not segments and there > 0):
            raise missing_segments(shard_dir, first, there)
    for place, segment in enumerate(segments):
        last = place + 1 == len(segments)
        header = _segment_header(files, tail, segment, stream, region, epoch)
        if place and header.previous_hash != tail.previous_hash:
            raise _not_following(files, shard_dir, segments[place - 1], segment)
        read = reader_of(files, segment.path)
        size = files.size(segment.path)
        footer = _footer_bytes(read, size)
        if last and (footer is None or not _footer_holds(read, size)):
            tail.open, tail.header, tail.size = segment, header, size
            _walk(tail, read)
        elif footer is None:
            raise damage(
                "it isn't sealed, though another segment follows",
                file=segment.path, byte=size, offset_from=segment.base_offset,
                offset_to=segments[place + 1].base_offset,
            )  # fmt: skip
        else:
            tail.sealed, tail.previous_hash = segment, SegmentFooter.encoded_hash(footer)
            tail.sealed_byte_end = size - len(footer)
    _read_last_sealed(files, tail)
    if tail.open is not None and tail.open.base_offset != (tail.sealed_end if tail.sealed else tail.open.base_offset):
        raise tail.damaged("the last segment doesn't begin where the one before it ends", 0)
    return tail


def _not_following(files: Files, shard_dir: str, segment: SegmentFile, following: SegmentFile) -> CorruptWal:
    """Return the error for a segment whose header names another footer than the one before it has."""
    base = following.base_offset
    footer = footer_of(files, segment)
    if isinstance(footer, SegmentFooter) and footer.end_offset < base:
        return missing_segments(shard_dir, footer.end_offset, base)
    return damage(REPLACED, file=following.path, byte=0, offset_from=base, offset_to=base)


def _segment_header(
    files: Files, tail: _Tail, segment: SegmentFile, stream: StreamId, region: RegionId, epoch: Epoch
) -> SegmentHeader:
    try:
        header = SegmentHeader.decode(files.read(segment.path, 0, SEGMENT_HEADER_SIZE))
    except CorruptFrame as error:
        raise damage(str(error), file=segment.path, byte=0, offset_from=segment.base_offset, offset_to=None) from error
    if header.stream != stream and (tail.mark is None or tail.mark.stream != stream):
        raise LogError(
            f"{segment.path} belongs to stream {header.stream}, not to {stream}",
            hint="Move the other stream's log elsewhere, or restore the catalog that goes with it.",
            file=segment.path,
        )
    elsewhere = misplacement(header, segment, tail.shard, stream)
    if elsewhere is not None:
        base = segment.base_offset
        raise damage(elsewhere, file=segment.path, byte=0, offset_from=base, offset_to=base)
    if header.epoch >= epoch:
        raise StaleEpoch(
            f"{segment.path} has epoch {header.epoch}, not below this writer's epoch {epoch}",
            hint="Stop the newer writer that owns the shard, or restore the catalog that goes with the log.",
            epoch=int(header.epoch),
        )
    if header.region != region:
        raise ReplicationError(
            f"{segment.path} belongs to region {header.region}, but the configuration has region {region}",
            code="other_region",
            file=segment.path,
            found=int(header.region),
            expected=int(region),
        )
    return header


def _footer_bytes(read: Callable[[int, int], bytes], size: int) -> bytes | None:
    """Return the encoded footer at a file's end, unverified; None if the file doesn't end like a sealed one."""
    if size < SEGMENT_HEADER_SIZE + SEGMENT_TRAILER_SIZE:
        return None
    ahead = min(size - SEGMENT_HEADER_SIZE, _FOOTER_AHEAD_BYTES)
    end = read(size - ahead, ahead)
    trailer = end[-SEGMENT_TRAILER_SIZE:]
    if not SegmentFooter.is_trailer(trailer):
        return None
    length = min(SegmentFooter.size_in(trailer), size - SEGMENT_HEADER_SIZE)
    return end[-length:] if length <= len(end) else read(size - length, length)


def _footer_holds(read: Callable[[int, int], bytes], size: int) -> bool:
    try:
        return SegmentFooter.decode_tail(read, size) is not None
    except CorruptFrame:
        return False


def _read_last_sealed(files: Files, tail: _Tail) -> None:
    """Read from the last sealed segment where it ends, and its last frame's header."""
    if tail.sealed is None:
        if tail.open is not None:
            tail.sealed_end = tail.open.base_offset
        return
    read = reader_of(files, tail.sealed.path)
    size = files.size(tail.sealed.path)
    try:
        footer = SegmentFooter.decode_tail(read, size)
        assert footer is not None
        tail.sealed_end = footer.end_offset
        if footer.frames:
            tail.sealed_last = read_frame(ReadAhead(read), footer.frames[-1].position, payload=False)
    except CorruptFrame as error:
        raise damage(
            str(error), file=tail.sealed.path, byte=tail.sealed_byte_end, offset_from=tail.sealed.base_offset,
            offset_to=None,
        ) from error  # fmt: skip


def _walk(tail: _Tail, read: Callable[[int, int], bytes]) -> None:
    """Collect the open segment's frames, and what looks like frames after the first bad byte."""
    assert tail.header is not None
    group = 0
    try:
        for frame in scan_frames(ReadAhead(read), tail.header):
            if frame.header.group < group:
                raise CorruptFrame("group numbers go back")
            group = frame.header.group
            tail.frames.append(frame)
            if not frame.header.more:
                tail.whole.add(frame.header.group)
    except UnreadableBytes:
        raise
    except CorruptFrame:
        pass
    tail.behind = [
        frame
        for frame in frames_behind(read, tail.byte_end, tail.size)
        if (frame.header.epoch, frame.header.shard) == (tail.header.epoch, tail.header.shard)
    ]


# --- deciding ------------------------------------------------------------------------------------------------------


def _first_partial_group(tails: Mapping[ShardId, _Tail]) -> GroupNumber:
    """Return the first group that isn't whole on all its shards; the number after the last group if all are."""
    needed: dict[GroupNumber, tuple[Seq, set[ShardId]]] = {}
    latest = 0
    for tail in tails.values():
        latest = max(latest, tail.sealed_group)
        for frame in (*tail.frames, *([tail.sealed_last] if tail.sealed_last else [])):
            _, shards = needed.setdefault(frame.header.group, (frame.header.group_last_seq, set()))
            shards.update({tail.shard, *frame.header.other_shards})
            latest = max(latest, frame.header.group)
    for group, (last_seq, shards) in sorted(needed.items()):
        for shard in shards:
            if shard not in tails:
                raise LogError(f"group {group} has a part on shard {shard}, which isn't open", shard=int(shard))
            # A shard that seals more often may have lost its part to retention while another
            # shard's segment is still written.
            if last_seq > tails[shard].dropped_seq and not tails[shard].has_whole(group):
                return group
    return GroupNumber(latest + 1)


def _check_for_damage(tails: Mapping[ShardId, _Tail], cut_from: GroupNumber) -> None:
    for tail in tails.values():
        for frame in (*tail.frames, *tail.behind, *([tail.sealed_last] if tail.sealed_last else [])):
            if frame.header.group > cut_from:
                culprit = next((t for t in tails.values() if not t.has_whole(cut_from) and t.open is not None), tail)
                raise culprit.damaged(f"group {cut_from} isn't whole, though group {frame.header.group} follows")
        if tail.sealed_last is not None and tail.sealed_group >= cut_from:
            raise tail.damaged(f"group {cut_from} isn't whole, though a sealed segment holds it")
    # Some groups that retention has reached on one shard may have had no part on any other shard.
    dropped = max((tail.dropped_seq for tail in tails.values()), default=Seq(0))
    headers = [frame.header for tail in tails.values() for frame in tail.frames]
    groups = {header.group for header in headers if header.group < cut_from and header.group_last_seq > dropped}
    last_sealed = max(
        (tail.sealed_last.header for tail in tails.values() if tail.sealed_last), key=lambda h: h.group, default=None
    )
    sealed_upto = 0 if last_sealed is None else last_sealed.group
    open_groups = sorted(group for group in groups if group > sealed_upto)
    follows = last_sealed is not None and last_sealed.group_last_seq >= dropped
    first = sealed_upto + 1 if follows else (open_groups[0] if open_groups else 1)
    for group in open_groups:
        for missing in range(first, group):
            if not any(tail.has_lost(GroupNumber(missing)) for tail in tails.values()):
                culprit = max(tails.values(), key=lambda tail: tail.size - tail.byte_end if tail.open else -1)
                raise culprit.damaged(f"group {missing} is missing, though group {group} is there")
        first = group + 1


def _cut(tail: _Tail, cut_from: GroupNumber) -> int:
    """Drop the frames from a group on; return the number of bytes in the file after the frames that stay."""
    while tail.frames and tail.frames[-1].header.group >= cut_from:
        tail.frames.pop()
    return tail.size - tail.byte_end if tail.open is not None else 0


def _check_marks(tails: Iterable[_Tail], stream: StreamId) -> None:
    """Check that the log has everything that its marks record: a mark moves only after an fsync."""
    for tail in tails:
        mark = tail.mark
        if mark is not None and mark.stream == stream and mark.durable_offset > tail.end_offset:
            raise tail.damaged(
                f"offsets up to {mark.durable_offset} were durable, but the log ends at {tail.end_offset}"
            )


# --- making it durable ---------------------------------------------------------------------------------------------


def _make_durable(files: Files, tails: Mapping[ShardId, _Tail], cut_bytes: int) -> Recovered:
    last = _last_frame(tails.values())
    if len(tails) > 1:
        for tail in tails.values():
            with _room_at(tail):
                _write_undecided_again(files, tail)
    shards: dict[ShardId, RecoveredShard] = {}
    for shard, tail in tails.items():
        with _room_at(tail):
            shards[shard] = _seal_tail(files, tail)
    marks = {shard: tail.mark for shard, tail in tails.items() if tail.mark is not None}
    return Recovered(
        shards=shards,
        last_group=GroupNumber(0) if last is None else last.header.group,
        persisted_upto=Seq(0) if last is None else last.header.group_last_seq,
        shown=Seq(max([mark.persisted_upto for mark in marks.values()], default=0)),
        reserved_to=Seq(
            max([0 if last is None else last.header.reserved_to, *(m.reserved_to for m in marks.values())])
        ),
        reached={} if last is None else dict(last.header.reached),
        hybrid_ns=0 if last is None else last.header.hybrid_time,
        cut_bytes=cut_bytes,
        marks=marks,
    )


@contextmanager
def _room_at(tail: _Tail) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        check_space(error, f"no disk space to rewrite the end of {tail.folder}; the log stays readable as it was")
        raise


def _write_undecided_again(files: Files, tail: _Tail) -> None:
    """Make the frames durable that no mark covers: the next recovery finds them, even if this one fails."""
    durable = 0 if tail.mark is None else tail.mark.durable_offset
    ends = ((frame.position, frame.header.first_offset, frame.header.count) for frame in tail.frames)
    # A schema frame holds no records: it belongs to the frames after it.
    start = next((position for position, first, count in ends if first + max(count, 1) > durable), None)
    if start is None:
        return
    assert tail.open is not None
    file = files.open_write(tail.open.path)
    try:
        for position in range(start, tail.byte_end, _COPY_BYTES):
            file.pwrite(files.read(tail.open.path, position, min(_COPY_BYTES, tail.byte_end - position)), position)
        file.sync()
    finally:
        file.close()
    files.sync_dir(tail.folder)


def _last_frame(tails: Iterable[_Tail]) -> ScannedFrame | None:
    """Return a frame of the last group that stays: its header has the state of the whole log."""
    frames = [frame for tail in tails for frame in (tail.frames[-1] if tail.frames else tail.sealed_last,) if frame]
    return max(frames, key=lambda frame: frame.header.group, default=None)


def _seal_tail(files: Files, tail: _Tail) -> RecoveredShard:
    if tail.open is None:
        if tail.sealed is not None:
            _write_footer_again(files, tail)
        files.sync_dir(tail.folder)
        return RecoveredShard(tail.shard, tail.sealed_end, tail.previous_hash)
    _keep_torn(files, tail)
    if not tail.frames:
        files.remove(tail.open.path)
        files.sync_dir(tail.folder)
        return RecoveredShard(tail.shard, tail.sealed_end, tail.previous_hash)
    footer = _rewrite(files, tail)
    return RecoveredShard(tail.shard, tail.end_offset, SegmentFooter.encoded_hash(footer))


def _write_footer_again(files: Files, tail: _Tail) -> None:
    """Write the footer again, over itself, and fsync it: the seal's fsync may have failed.

    The footer's frames were durable.
    """
    assert tail.sealed is not None
    size = files.size(tail.sealed.path)
    footer = files.read(tail.sealed.path, tail.sealed_byte_end, size - tail.sealed_byte_end)
    file = files.open_write(tail.sealed.path)
    try:
        file.pwrite(footer, tail.sealed_byte_end)
        file.sync()
    finally:
        file.close()


def _keep_torn(files: Files, tail: _Tail) -> None:
    """Copy the bytes cut off into a `.torn` file: for people, so a full disk only means that there is none."""
    assert tail.open is not None
    path = f"{tail.open.path.removesuffix('.wal')}-{tail.byte_end}.torn"
    if tail.size == tail.byte_end or files.exists(path):
        return
    with suppress(OSError), replacing(files, path) as torn:
        for position in range(tail.byte_end, tail.size, _COPY_BYTES):
            data = files.read(tail.open.path, position, min(_COPY_BYTES, tail.size - position))
            torn.pwrite(data, position - tail.byte_end)


def _rewrite(files: Files, tail: _Tail) -> bytes:
    """Replace the file by a sealed copy of the tail's frames; return the encoded footer."""
    assert tail.open is not None
    assert tail.header is not None
    log = FrameLog()
    for frame in tail.frames:
        times = commit_times(frame.head, tail.header)
        log.add(entry_of(frame.header, frame.position, frame.length, times), frame.head)
    footer = log.footer(tail.end_offset, tail.header.base_offset)
    spare_path = f"{tail.folder}/{SPARE_NAME}"
    spare = files.open_write(spare_path) if files.exists(spare_path) else files.create(spare_path)
    try:
        for position in range(0, tail.byte_end, _COPY_BYTES):
            data = files.read(tail.open.path, position, min(_COPY_BYTES, tail.byte_end - position))
            spare.pwrite(data, position)
        spare.pwrite(footer, tail.byte_end)
        spare.truncate(tail.byte_end + len(footer))
        put_in_place(files, spare, tail.open.path, made_as=spare_path)
    finally:
        spare.close()
    return footer
