"""`durable.mark`: how far a shard is durable, told by its writer to every other process.

The writer moves the mark after a group's last fsync, never before; a reader believes the mark and never a file's length.
The file is never fsynced on the way: what it says was true when it was written, so an older mark (after a power cut)
only shows less. With several shards the writer first moves the positions of all, then `persisted_upto` of all: a reader
that has learned n from one mark finds every row up to n below every shard's position.

Layout: two areas of two slots each, a slot every 512 bytes. A slot is written whole, the older of its pair, so that a
torn write leaves the other one; counter and CRC tell which is which. The area *durable* is the writer's, the area
*dropped* is retention's (that one is fsynced, before any file goes).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from millstream.codec.checksums import crc32c
from millstream.errors import LogError
from millstream.model.ids import Epoch, GroupNumber, StreamId
from millstream.model.positions import Offset, Seq
from millstream.ports import Files, WritableFile
from millstream.wal.layout import MARK_NAME

MARK_SIZE: Final = 2048
_SLOT: Final = 512
_DURABLE_AT: Final = 0
_DROPPED_AT: Final = 1024
_MAGIC: Final = b"MILLMRK\n"
_PREFIX: Final = struct.Struct("<8sIHHQ")
"""magic, crc, version, unused, counter"""
_DURABLE: Final = struct.Struct("<16sqqqqqqq")
_DROPPED: Final = struct.Struct("<qq")
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class DurableMark:
    """What a shard's writer says."""

    stream: StreamId
    epoch: Epoch
    base_offset: Offset
    """The segment that is being written."""
    byte_end: int
    """Exclusive end of the durable bytes in it; all segments before it are durable whole."""
    durable_offset: Offset
    """Exclusive end of the durable offsets of the shard."""
    group: GroupNumber
    """The last group durable on all shards of the writer."""
    persisted_upto: Seq
    """Every number up to it, on all shards, is durable or will never be."""
    reserved_to: Seq
    """Numbers up to it may have been given out."""


@dataclass(frozen=True, slots=True)
class DroppedMark:
    """What retention has dropped from a shard's front."""

    seq: Seq
    """Last number of the last commit group that was dropped; reading may begin behind it."""
    offset: Offset
    """The first offset that is still there."""


class MarkFile:
    """A shard's mark, open for moving. One process a shard, that of the lock; retention moves only its own area."""

    def __init__(self, file: WritableFile, counters: tuple[int, int]) -> None:
        self.file = file
        self._durable_counter, self._dropped_counter = counters

    @classmethod
    def open(cls, files: Files, shard_dir: str) -> MarkFile:
        """Open the shard's mark, or make an empty one (durable by name)."""
        path = f"{shard_dir}/{MARK_NAME}"
        if files.exists(path):
            data = files.read(path)
            return cls(files.open_write(path), (_newest(data, _DURABLE_AT)[0], _newest(data, _DROPPED_AT)[0]))
        file = files.create(path)
        file.pwrite(bytes(MARK_SIZE), 0)
        file.sync()
        files.sync_dir(shard_dir)
        return cls(file, (0, 0))

    def move(self, mark: DurableMark) -> None:
        """Show a new position."""
        self._durable_counter += 1
        fields = _DURABLE.pack(
            mark.stream.bytes, mark.epoch, mark.base_offset, mark.byte_end, mark.durable_offset, mark.group,
            mark.persisted_upto, mark.reserved_to,
        )  # fmt: skip
        self._write(_DURABLE_AT, self._durable_counter, fields)

    def move_dropped(self, mark: DroppedMark) -> None:
        """Say durably what is about to be dropped."""
        self._dropped_counter += 1
        self._write(_DROPPED_AT, self._dropped_counter, _DROPPED.pack(mark.seq, mark.offset))
        self.file.sync()

    def close(self) -> None:
        """Close the file, and with it give up its lock."""
        self.file.close()

    def _write(self, area: int, counter: int, fields: bytes) -> None:
        rest = _PREFIX.pack(_MAGIC, 0, _VERSION, 0, counter)[12:] + fields
        slot = _MAGIC + struct.pack("<I", crc32c(rest)) + rest
        self.file.pwrite(slot, area + _SLOT * (counter % 2))


def read_mark(files: Files, shard_dir: str) -> DurableMark | None:
    """The shard's durable position; None where no mark, or none that holds, is there.

    Raises:
        LogError: the mark is of a newer version.
    """
    _, fields = _newest(_read(files, shard_dir), _DURABLE_AT)
    if fields is None:
        return None
    stream, epoch, base, byte_end, offset, group, persisted, reserved = _DURABLE.unpack_from(fields)
    return DurableMark(
        StreamId(UUID(bytes=stream)), Epoch(epoch), Offset(base), byte_end, Offset(offset), GroupNumber(group),
        Seq(persisted), Seq(reserved),
    )  # fmt: skip


def read_dropped(files: Files, shard_dir: str) -> DroppedMark | None:
    """What retention has dropped; None where it never did."""
    _, fields = _newest(_read(files, shard_dir), _DROPPED_AT)
    if fields is None:
        return None
    seq, offset = _DROPPED.unpack_from(fields)
    return DroppedMark(Seq(seq), Offset(offset))


def _read(files: Files, shard_dir: str) -> bytes:
    try:
        return files.read(f"{shard_dir}/{MARK_NAME}", 0, MARK_SIZE)
    except FileNotFoundError:
        return b""


def _newest(data: bytes, area: int) -> tuple[int, bytes | None]:
    """Counter and fields of the newest slot of an area that holds."""
    length = _PREFIX.size + (_DURABLE if area == _DURABLE_AT else _DROPPED).size
    best: tuple[int, bytes | None] = (0, None)
    for start in (area, area + _SLOT):
        slot = data[start : start + length]
        if len(slot) < length:
            continue
        magic, crc, version, _, counter = _PREFIX.unpack_from(slot)
        if magic != _MAGIC or crc != crc32c(slot[12:]) or counter <= best[0]:
            continue
        if version != _VERSION:
            raise LogError(f"the mark file is of version {version}, which is unknown", hint="Upgrade this Millstream.")
        best = (counter, slot[_PREFIX.size :])
    return best
