"""Scrubbing of a log in an object store: it is verified byte for byte, and repaired from a node's own log.

A stored segment never changes, so any node that has its bytes may write them again, whether it
leads or not. Hashes prove that they are its bytes: the next segment's header names the hash of this
one's footer, which has that of all frames' heads, which have those of the rows. So shards are read
from their ends. If nothing is stored after a segment, its own footer is the proof, if it can be
read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE, SEGMENT_TRAILER_SIZE, SegmentFooter, SegmentHeader
from millstream.errors import CorruptFrame, Diverged, ReplicationError, ShipmentUnreadable, UnsupportedFormat
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.positions import Offset
from millstream.model.replication import Shipment
from millstream.ports import Files
from millstream.replication.object_store.branches import History, history_of
from millstream.replication.object_store.object_names import (
    Layout,
    group_of,
    listed_in,
    message_in,
    segment_of,
    shards_of,
)
from millstream.replication.object_store.store_client import Objects
from millstream.wal.layout import list_segments, segment_path, shard_folder
from millstream.wal.replica.verify_continuity import ArrivingShard
from millstream.wal.segment_scan import reader_of

_PIECE_BYTES: Final = 8 << 20

_Read = Callable[[int, int], bytes]
"""Function (position, length) → bytes, fewer at the end."""


@dataclass(frozen=True, slots=True)
class Mended:
    """An object that was restored, or could be."""

    name: str
    shard: ShardId
    base_offset: Offset
    size_bytes: int
    was: str
    """Description of the damage."""


@dataclass(slots=True)
class Scrubbed:
    """Result of a scrub of one log."""

    objects: int = 0
    """Number of segments and shipments that were read."""
    size_bytes: int = 0
    mended: list[Mended] = field(default_factory=list)
    damaged: list[ShipmentUnreadable] = field(default_factory=list)
    """Remaining damage, each with what to do."""


class _StoredSegment(NamedTuple):
    """A whole segment."""

    end: Offset
    previous_hash: bytes
    """Hash of the previous segment's footer, from its header."""
    footer_hash: bytes


@dataclass(slots=True)
class _Next:
    """The segment after the place reached; a shard is read from its end."""

    base: Offset | None = None
    """Its base offset; None: nothing is stored there."""
    previous_hash: bytes | None = None
    """Hash of the previous footer, from its header; None if that isn't known."""
    epoch: Epoch = Epoch(0)
    """Epoch under which it was stored."""


class Scrub:
    """Scrub of one log.

    Args:
        stream: the stream that the log must be of.
        mend: whether to restore damaged objects from this node's log; else only report that it
            could be done.
        tell: called for each shard.
    """

    def __init__(
        self,
        objects: Objects,
        layout: Layout,
        stream: StreamId,
        files: Files,
        folder: str,
        *,
        mend: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._objects = objects
        self._layout = layout
        self._stream = stream
        self._files = files
        self._folder = folder
        self._mend = mend
        self._tell = tell
        self._found = Scrubbed()

    def run(self) -> Scrubbed:
        """Scrub the log. A leader may ship during it; objects that arrive since aren't read.

        Raises:
            StoreUnavailable: the store doesn't answer; objects restored so far stay.
            ReplicationError (`other_stream`): the store has another stream of that name.
            ShipmentUnreadable: a branch of the log's history can't be read, so it is unknown which
                objects are the log.
        """
        # Segments are listed after shipments: a shipment deleted since is in a segment then.
        names = list(listed_in(self._objects, self._layout.groups))
        history = history_of(self._objects, self._layout)
        behind = self._shipments([listed.name for listed in names], history)
        begins = self._begins()
        for shard in sorted({*shards_of(self._objects, self._layout), *behind}):
            self._tell(f"shard {shard}: behind {self._found.size_bytes >> 20} MiB")
            self._shard(shard, history, behind.get(shard, {}), begins.get(shard, Offset(0)))
        return self._found

    # --- stored objects ------------------------------------------------------------------------------------------

    def _shipments(self, names: list[str], history: History) -> dict[ShardId, dict[Offset, _Next]]:
        """Verify shipments; return, by shard, the segments that they have bytes of."""
        found: dict[ShardId, dict[Offset, _Next]] = {}
        for name in names:
            data = self._objects.get(name)
            if data is None:
                continue
            self._count(len(data))
            try:
                message = message_in(name, data)
            except ShipmentUnreadable as error:
                self._found.damaged.append(
                    ShipmentUnreadable(error.message, code="store_damaged", hint=error.hint, object=name)
                )
                continue
            epoch = group_of(name)[0]
            for part in message.parts if isinstance(message, Shipment) else ():
                if not history.has(part.shard, epoch, part.base_offset):
                    continue
                one = found.setdefault(part.shard, {}).setdefault(part.base_offset, _Next(part.base_offset))
                one.epoch = epoch
                if part.position == 0:
                    with suppress(CorruptFrame, UnsupportedFormat):
                        one.previous_hash = SegmentHeader.decode(part.data).previous_hash
        return found

    def _begins(self) -> dict[ShardId, Offset]:
        """Return, by shard, what retention had dropped before the first shipment."""
        data = self._objects.get(self._layout.begins)
        message = None if data is None else message_in(self._layout.begins, data)
        if not isinstance(message, Shipment):
            return {}
        return {shard: mark.offset for shard, mark in message.first_kept.items()}

    def _shard(self, shard: ShardId, history: History, behind: dict[Offset, _Next], begin: Offset) -> None:
        stored = {}
        for listed in listed_in(self._objects, self._layout.shard(shard)):
            epoch, base = segment_of(listed.name)
            if history.has(shard, epoch, base):
                stored[base] = listed
        later = [base for base in behind if base > max(stored, default=Offset(-1))]
        after = behind[min(later)] if later else _Next()
        for base, listed in sorted(stored.items(), reverse=True):
            self._count(listed.size)
            epoch = segment_of(listed.name)[0]
            whole, why = self._whole(shard, base, listed.size, self._reader_of_object(listed.name, listed.size))
            if whole is not None and after.base is not None and whole.end != after.base:
                if whole.end > after.base:
                    why = f"it ends with offset {whole.end}, and the next one begins with {after.base}"
                else:
                    after = self._fill(shard, whole.end, after)
            if (
                not why
                and whole is not None
                and after.base == whole.end
                and after.previous_hash not in (None, whole.footer_hash)
            ):
                why = "the segment behind it follows on another one"
            if why or whole is None:
                after = self._put_back(
                    shard, base, listed.name, listed.size, f"object {listed.name} is damaged: {why}", after
                )
            else:
                after = _Next(base, whole.previous_hash)
            after.epoch = epoch
        if after.base is not None and after.base > begin:
            self._fill(shard, begin, after)

    def _count(self, size_bytes: int) -> None:
        self._found.objects += 1
        self._found.size_bytes += size_bytes

    # --- putting back --------------------------------------------------------------------------------------------

    def _fill(self, shard: ShardId, begin: Offset, after: _Next) -> _Next:
        """Restore missing segments from an offset on; return what then lies after it."""
        own = {segment.base_offset for segment in list_segments(self._files, shard_folder(self._folder, shard))}
        epoch = after.epoch
        while after.base is not None and after.base > begin:
            base = max((base for base in own if begin <= base < after.base), default=begin)
            name = self._layout.segment(shard, epoch, base)
            was = f"the object store has no segments of shard {shard} from offset {base} to {after.base}"
            before, after = after.base, self._put_back(shard, base, name, 0, was, after)
            assert after.base is not None
            after.epoch = epoch
            if after.base >= before:
                break
        return after

    def _put_back(self, shard: ShardId, base: Offset, name: str, stored_bytes: int, was: str, after: _Next) -> _Next:
        """Restore a segment if this node has it; return what is then known of it."""
        path = segment_path(shard_folder(self._folder, shard), base)
        read = reader_of(self._files, path)
        try:
            size = self._files.size(path)
            own, why = self._own(shard, base, size, read)
            if own is not None and not self._is_same(own, after, name, stored_bytes):
                own, why = None, "nothing that is stored shows that this node's segment is the same"
                if after.base is None:
                    why += " (the node that leads stores it again once its `millstream serve` is started again)"
            if own is not None:
                if self._mend:
                    self._objects.put_large(
                        name, (read(at, min(_PIECE_BYTES, size - at)) for at in range(0, size, _PIECE_BYTES))
                    )
                    again = self._whole(shard, base, size, self._reader_of_object(name, size))[0]
                    own, why = (own, "") if again == own else (None, "what was put in its place isn't whole, either")
                if own is not None:
                    self._found.mended.append(Mended(name, shard, base, size, was))
                    return _Next(base, own.previous_hash)
            why = f"this node can't put it back: {why}"
        except FileNotFoundError:
            why = "this node's log doesn't have it"
        facts: dict[str, Any] = {"object": name, "shard": int(shard), "base_offset": int(base)}
        self._found.damaged.append(ShipmentUnreadable(f"{was}; {why}", code="store_damaged", **facts))
        header: SegmentHeader | None = None
        with suppress(CorruptFrame, UnsupportedFormat):
            header = SegmentHeader.decode(self._reader_of_object(name, stored_bytes)(0, SEGMENT_HEADER_SIZE))
        return _Next(base, None if header is None else header.previous_hash)

    def _own(self, shard: ShardId, base: Offset, size: int, read: _Read) -> tuple[_StoredSegment | None, str]:
        """As `_whole`, for this node's file: it may belong to another log."""
        try:
            return self._whole(shard, base, size, read)
        except ReplicationError as error:
            if error.code != "other_stream":
                raise
            return None, error.message

    def _is_same(self, own: _StoredSegment, after: _Next, name: str, stored_bytes: int) -> bool:
        """Return whether a segment of this node's is proven to be the one that is, or was, stored."""
        if after.base is not None and own.end != after.base:
            return False
        if after.previous_hash is not None:
            return own.footer_hash == after.previous_hash
        footer = self._footer(stored_bytes, self._reader_of_object(name, stored_bytes))
        return footer is not None and SegmentFooter.encoded_hash(footer) == own.footer_hash

    # --- verifying -----------------------------------------------------------------------------------------------

    def _whole(self, shard: ShardId, base: Offset, size: int, read: _Read) -> tuple[_StoredSegment | None, str]:
        """Verify a sealed segment to its last byte; return it, or why it is invalid. Raises `ReplicationError` (`other_stream`)."""
        arriving = ArrivingShard(self._stream, None, shard, base, end_offset=base, previous_hash=None)
        footer = self._footer(size, read)
        try:
            if size < SEGMENT_HEADER_SIZE or footer is None:
                raise arriving.unreadable("it ends without a footer")
            arriving.begin(memoryview(read(0, SEGMENT_HEADER_SIZE)))
            assert arriving.header is not None
            previous_hash = arriving.header.previous_hash
            end = size - len(footer)
            for at in range(SEGMENT_HEADER_SIZE, end, _PIECE_BYTES):
                length = min(_PIECE_BYTES, end - at)
                data = read(at, length)
                if len(data) != length:
                    raise arriving.unreadable("it is shorter than its recorded size")
                arriving.feed(memoryview(data), [])
            arriving.finish(memoryview(footer))
        except (ShipmentUnreadable, Diverged) as error:
            return None, error.message
        return _StoredSegment(arriving.base, previous_hash, SegmentFooter.encoded_hash(footer)), ""

    def _footer(self, size: int, read: _Read) -> bytes | None:
        """Return a sealed file's footer, with the length in its last bytes; None if they have none."""
        trailer = read(max(0, size - SEGMENT_TRAILER_SIZE), SEGMENT_TRAILER_SIZE)
        if not SegmentFooter.is_trailer(trailer):
            return None
        length = SegmentFooter.size_in(trailer)
        return read(size - length, length) if length <= size - SEGMENT_HEADER_SIZE else None

    def _reader_of_object(self, name: str, size: int) -> _Read:
        def read(position: int, length: int) -> bytes:
            length = min(length, size - position)
            return bytes(self._objects.get(name, position, length) or b"") if length > 0 else b""

        return read
