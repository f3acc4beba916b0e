"""`durable.mark`: how far a shard is durable, published by its writer to every other process.

The writer moves the mark after a group's last fsync, never before; a reader trusts the mark and
never a file's length. The mark file isn't fsynced each time. Its content was true when written, so
an older mark (after a power cut) only shows less.

With several shards, a writer first moves the positions of all marks (with the new group number and
the old `persisted_upto`), then `persisted_upto` of all. `stream_cut` finds what all of them show,
in whatever state a reader meets them. That includes the state after a power cut, with one shard's
new mark and another's old one. With several writers in a folder, an idle writer's mark moves too.
The mark of a writer that left shows that it has nothing in flight.

Layout: a slot every 512 bytes. Each has a counter and a CRC; the newest valid slot counts. There
are three areas:

- The area *durable* is the writer's. Slot 0 is written at the open and fsynced, slots 1 and 2 in
  turn after each group, so that neither a torn write nor a power cut leaves no valid slot.
- The area *shown* is also the writer's, with slots like those. If other machines must hold records
  before anyone may read them, readers go by it (`read_readable`). Recovery, the writer and
  replication go by what is durable (`read_mark`).
- The area *dropped* is retention's: two slots in turn, each fsynced before any file is removed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from millstream.codec.checksums import crc32c
from millstream.errors import CorruptWal, LogError, UnreadableBytes
from millstream.model.ids import Epoch, GroupNumber, ShardId, StreamId, WriterId
from millstream.model.marks import DroppedMark, DurableMark, ShownMark
from millstream.model.positions import Offset, Seq
from millstream.ports import Files, WritableFile
from millstream.wal.files import create_temporary, put_in_place
from millstream.wal.layout import MARK_NAME

MARK_SIZE: Final = 4096
_DURABLE: Final = (0, 512, 1024)
_SHOWN: Final = (1536, 3072, 3584)
_DROPPED: Final = (2048, 2560)
_MAGIC: Final = b"MILLMRK\n"
_PREFIX: Final = struct.Struct("<8sIHHQ")
"""magic, crc, version, shards, counter"""
_DURABLE_FIELDS: Final = struct.Struct("<16siqqqqqqq")
_SHARED_FIELDS: Final = struct.Struct("<q?")
"""Added by version 2: the first writer elsewhere, and whether this one is settled."""
_SHOWN_FIELDS: Final = struct.Struct("<16siqqqqqqqq?B")
"""All fields of a durable slot, including version 2's, and whether readers must go by it: one of
the three values below.
"""
_NOT_REQUIRED, _REQUIRED, _REQUIRED_BY_ONE = range(3)
_DROPPED_FIELDS: Final = struct.Struct("<qq")
_PLAIN: Final = {_DURABLE: _DURABLE_FIELDS.size, _SHOWN: _SHOWN_FIELDS.size, _DROPPED: _DROPPED_FIELDS.size}
"""Bytes of an area's slots after the prefix, in version 1."""
_UNREADABLE: Final = b"\xff" * MARK_SIZE
"""Stand-in for a mark on an unreadable page: a damaged mark."""
_ALONE: Final = 1
_SHARED: Final = 2
"""Versions: for a writer that owns its stream, and for one of several."""


class MarkFile:
    """A shard's mark, open for moving. One process per shard holds its lock; retention moves only its own area."""

    def __init__(self, file: WritableFile, data: bytes) -> None:
        self.file = file
        self.take_counters(data)

    def take_counters(self, data: bytes) -> None:
        """Go on from the newest slots of the mark's bytes."""
        self._durable_counter = _newest(data, _DURABLE).counter
        self._shown_counter = _newest(data, _SHOWN).counter
        self._dropped_counter = _newest(data, _DROPPED).counter

    @classmethod
    def open(cls, files: Files, shard_dir: str) -> MarkFile:
        """Open the shard's mark, or make an empty one (durable by name)."""
        path = f"{shard_dir}/{MARK_NAME}"
        is_there = files.exists(path)
        file = files.open_write(path) if is_there else files.create(path)
        try:
            if is_there:
                return cls(file, files.read(path))
            file.pwrite(bytes(MARK_SIZE), 0)
            file.sync()
            files.sync_dir(shard_dir)
        except BaseException:
            file.close()
            raise
        return cls(file, b"")

    @classmethod
    def replace(cls, files: Files, shard_dir: str) -> MarkFile:
        """Replace the shard's mark by a locked copy: a process that holds the old one writes where no one reads."""
        path = f"{shard_dir}/{MARK_NAME}"
        data = files.read(path, 0, MARK_SIZE).ljust(MARK_SIZE, b"\0")
        file = create_temporary(files, path)
        try:
            file.lock()
            file.pwrite(data, 0)
            put_in_place(files, file, path)
        except BaseException:
            file.close()
            raise
        return cls(file, data)

    def move(self, mark: DurableMark, *, anchor: bool = False) -> None:
        """Show a new position; an anchor also survives a power cut, at the cost of an fsync."""
        self._durable_counter += 1
        fields = _DURABLE_FIELDS.pack(
            mark.stream.bytes, mark.writer, mark.epoch, mark.base_offset, mark.byte_end, mark.durable_offset, mark.group,
            mark.persisted_upto, mark.reserved_to,
        )  # fmt: skip
        version = _ALONE
        if mark.elsewhere is not None:
            version, fields = _SHARED, fields + _SHARED_FIELDS.pack(mark.elsewhere, mark.is_settled)
        slot = _DURABLE[0 if anchor else 1 + self._durable_counter % 2]
        self._write(slot, self._durable_counter, fields, mark.shards, version)
        if anchor:
            self.file.sync()

    def move_shown(self, shown: ShownMark, *, anchor: bool = False) -> None:
        """Show readers another position, or set whether they go by it at all; an anchor as in `move`.

        A thread other than that of `move` may call it, one at a time.
        """
        if anchor:
            self.file.sync()  # if power fails during the slot's own write, an earlier slot survives
        self._shown_counter += 1
        mark = shown.mark
        elsewhere = -1 if mark.elsewhere is None else mark.elsewhere
        required = _NOT_REQUIRED
        if shown.required:
            required = _REQUIRED_BY_ONE if shown.by_one else _REQUIRED
        fields = _SHOWN_FIELDS.pack(
            mark.stream.bytes, mark.writer, mark.epoch, mark.base_offset, mark.byte_end, mark.durable_offset, mark.group,
            mark.persisted_upto, mark.reserved_to, elsewhere, mark.is_settled, required,
        )  # fmt: skip
        slot = _SHOWN[0 if anchor else 1 + self._shown_counter % 2]
        self._write(slot, self._shown_counter, fields, mark.shards)
        if anchor:
            self.file.sync()

    def move_dropped(self, mark: DroppedMark) -> None:
        """Record durably what is about to be dropped."""
        self._dropped_counter += 1
        self._write(
            _DROPPED[self._dropped_counter % 2], self._dropped_counter, _DROPPED_FIELDS.pack(mark.seq, mark.offset)
        )
        self.file.sync()

    def close(self) -> None:
        """Close the file, which releases its lock."""
        self.file.close()

    def _write(self, position: int, counter: int, fields: bytes, shards: int = 0, version: int = _ALONE) -> None:
        rest = _PREFIX.pack(_MAGIC, 0, version, shards, counter)[12:] + fields
        slot = _MAGIC + struct.pack("<I", crc32c(rest)) + rest
        self.file.pwrite(slot, position)


def missing_shards(folder: str, there: Sequence[ShardId], marks: Iterable[DurableMark]) -> CorruptWal | None:
    """Return the error if marks count more shards than have folders; None if all are there."""
    told: dict[WriterId, int] = {}
    for mark in marks:
        told[mark.writer] = max(mark.shards, told.get(mark.writer, 0))
    if sum(told.values()) <= len(there):
        return None
    names = ", ".join(f"{shard:05d}" for shard in there)
    return CorruptWal(
        f"shards are missing in {folder}: the log has {sum(told.values())}, the folder has {names}; the records of the others can't be read",
        code="log_missing",
        file=folder,
    )


def read_mark(files: Files, shard_dir: str) -> DurableMark | None:
    """Return the shard's durable position; None if there is no mark, or no valid one.

    Raises:
        LogError: the mark is of a newer version.
    """
    return _durable_in(_read(files, shard_dir))


def read_shown(files: Files, shard_dir: str) -> ShownMark | None:
    """Return how far readers may read, as last shown; None if it never was. Raises as `read_mark`."""
    return _shown_in(_read(files, shard_dir))


def read_marks(files: Files, shard_dir: str) -> tuple[DurableMark | None, ShownMark | None]:
    """Return both marks, as of one moment. Raises as `read_mark`."""
    data = _read(files, shard_dir)
    return _durable_in(data), _shown_in(data)


def read_readable(files: Files, shard_dir: str) -> DurableMark | None:
    """Return how far readers may read: the shown position if that is required, else the durable one.

    None and raises as `read_mark`.
    """
    data = _read(files, shard_dir)
    shown = _shown_in(data)
    return _durable_in(data) if shown is None or not shown.required else shown.mark


def _durable_in(data: bytes) -> DurableMark | None:
    slot = _newest(data, _DURABLE)
    if slot.fields is None:
        return None
    stream, writer, epoch, base, byte_end, offset, group, persisted, reserved = _DURABLE_FIELDS.unpack_from(slot.fields)
    elsewhere, settled = None, False
    if len(slot.fields) > _DURABLE_FIELDS.size:
        elsewhere, settled = _SHARED_FIELDS.unpack_from(slot.fields, _DURABLE_FIELDS.size)
    return DurableMark(
        StreamId(UUID(bytes=stream)), WriterId(writer), Epoch(epoch), Offset(base), byte_end, Offset(offset), GroupNumber(group),
        Seq(persisted), Seq(reserved), slot.shards, elsewhere, settled,
    )  # fmt: skip


def _shown_in(data: bytes) -> ShownMark | None:
    slot = _newest(data, _SHOWN)
    if slot.fields is None:
        return None
    stream, writer, epoch, base, byte_end, offset, group, persisted, reserved, elsewhere, settled, required = (
        _SHOWN_FIELDS.unpack(slot.fields)
    )
    mark = DurableMark(
        StreamId(UUID(bytes=stream)), WriterId(writer), Epoch(epoch), Offset(base), byte_end, Offset(offset), GroupNumber(group),
        Seq(persisted), Seq(reserved), slot.shards, None if elsewhere < 0 else Seq(elsewhere), settled,
    )  # fmt: skip
    return ShownMark(mark, required != _NOT_REQUIRED, required == _REQUIRED_BY_ONE)


def is_mark_damaged(files: Files, shard_dir: str) -> bool:
    """Return whether the writer's slots hold something, but no valid slot."""
    data = _read(files, shard_dir)
    return _newest(data, _DURABLE).fields is None and any(data[: _DROPPED[0]])


def read_dropped(files: Files, shard_dir: str) -> DroppedMark | None:
    """Return what retention has dropped; None if it never dropped anything."""
    fields = _newest(_read(files, shard_dir), _DROPPED).fields
    if fields is None:
        return None
    seq, offset = _DROPPED_FIELDS.unpack_from(fields)
    return DroppedMark(Seq(seq), Offset(offset))


def _read(files: Files, shard_dir: str) -> bytes:
    try:
        return files.read(f"{shard_dir}/{MARK_NAME}", 0, MARK_SIZE)
    except UnreadableBytes:
        return _UNREADABLE
    except FileNotFoundError:
        return b""


class _Slot(NamedTuple):
    counter: int = 0
    shards: int = 0
    fields: bytes | None = None


def _newest(data: bytes, slots: tuple[int, ...]) -> _Slot:
    """Return the newest valid slot."""
    plain = _PLAIN[slots]
    best = _Slot()
    for start in slots:
        head = data[start : start + _PREFIX.size]
        if len(head) < _PREFIX.size:
            continue
        magic, crc, version, shards, counter = _PREFIX.unpack(head)
        size = plain + (_SHARED_FIELDS.size if version == _SHARED and slots is _DURABLE else 0)
        slot = data[start : start + _PREFIX.size + size]
        if len(slot) < _PREFIX.size + size or magic != _MAGIC or crc != crc32c(slot[12:]) or counter <= best.counter:
            continue
        if version not in ((_ALONE, _SHARED) if slots is _DURABLE else (_ALONE,)):
            raise LogError(
                f"the mark file has version {version}, which this Millstream can't read",
                hint="Upgrade this Millstream.",
            )
        best = _Slot(counter, shards, slot[_PREFIX.size :])
    return best
