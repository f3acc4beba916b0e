"""`sessions.state`: a copy of what `protocol.sessions` knows, so that a writer that opens needs to read the log's end only.

It is made anew as a whole, beside the writing, and replaces the one before by name. What the log has behind `upto` isn't in it; retention keeps
that. A copy that is gone is made from what the log still has; one that is damaged isn't passed over silently, since writes that retention
has dropped stand nowhere else.

Layout, little-endian: `MILLSES` and a newline, CRC-32C of all that follows, u32 version, the stream's 16 bytes, i64 `upto`, u64 length, and as
many bytes of `Sessions.copied`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple
from uuid import UUID

from millstream.codec.checksums import crc32c
from millstream.errors import CorruptWal, UnsupportedFormat
from millstream.model.ids import StreamId
from millstream.model.positions import Seq
from millstream.ports import Files
from millstream.wal.layout import SESSIONS_NAME

VERSION: Final = 1
_MAGIC: Final = b"MILLSES\n"
_HEAD: Final = struct.Struct("<8sII16sqQ")
HEAD_BYTES: Final = _HEAD.size
_CHECKED_FROM: Final = 12


class SessionCopy(NamedTuple):
    """What the file holds."""

    upto: Seq
    """The last number of the last commit group that it knows of."""
    state: bytes


def session_path(folder: str) -> str:
    """Where the copy lies in a stream's folder."""
    return f"{folder}/{SESSIONS_NAME}"


def write_copy(files: Files, folder: str, stream: StreamId, upto: Seq, pieces: Iterable[bytes]) -> int:
    """Put a copy in the place of the one before, durably.

    Returns:
        Its bytes.

    Raises:
        OSError: the disk is full, or fails; the one before is still there.
    """
    path, temporary = session_path(folder), f"{session_path(folder)}.tmp"
    state = b"".join(pieces)
    rest = _HEAD.pack(_MAGIC, 0, VERSION, stream.bytes, upto, len(state))[_CHECKED_FROM:]
    head = _MAGIC + struct.pack("<I", crc32c(rest, state)) + rest
    if files.exists(temporary):
        files.remove(temporary)
    file = files.create(temporary)
    try:
        file.pwrite(head, 0)
        file.pwrite(state, len(head))
        file.sync()
    finally:
        file.close()
    files.rename(temporary, path)
    files.sync_dir(folder)
    return len(head) + len(state)


def read_copy(files: Files, folder: str, stream: StreamId) -> SessionCopy | None:
    """The copy; None where there is none.

    Raises:
        CorruptWal: it is damaged, or another stream's.
        UnsupportedFormat: it is of a newer version.
    """
    path = session_path(folder)
    if not files.exists(path):
        return None
    data = files.read(path)
    if len(data) < _HEAD.size:
        raise _damaged(path, "it is too short")
    magic, crc, version, owner, upto, length = _HEAD.unpack_from(data)
    if magic != _MAGIC or crc != crc32c(memoryview(data)[_CHECKED_FROM:]):
        raise _damaged(path, "its checksum is another one")
    if version != VERSION:
        raise UnsupportedFormat(f"{path} is of version {version}, which is unknown", hint="Upgrade this Millstream.")
    if owner != stream.bytes or length != len(data) - _HEAD.size:
        raise _damaged(
            path, f"it is of stream {UUID(bytes=owner)}" if owner != stream.bytes else "its length is another"
        )
    return SessionCopy(Seq(upto), data[_HEAD.size :])


def remove_copy(files: Files, folder: str) -> None:
    """Take the copy away, durably."""
    files.remove(session_path(folder))
    files.sync_dir(folder)


def covered_upto(files: Files, folder: str) -> Seq | None:
    """The last number that the copy knows of; None where there is none that could be read: nothing of the log is kept for it then."""
    path = session_path(folder)
    return covered_in(files.read(path, 0, _HEAD.size)) if files.exists(path) else None


def covered_in(data: bytes) -> Seq | None:
    """As `covered_upto`, of a copy's first bytes, `HEAD_BYTES` at the least."""
    if len(data) < _HEAD.size or data[:8] != _MAGIC:
        return None
    return Seq(_HEAD.unpack_from(data)[4])


def _damaged(path: str, why: str) -> CorruptWal:
    return CorruptWal(
        f"{path}, which knows the applications' sessions, is damaged: {why}",
        hint="Restore it from a copy of the home, or move it away: sessions and keys of writes that retention has dropped are unknown then.",
        file=path,
    )
