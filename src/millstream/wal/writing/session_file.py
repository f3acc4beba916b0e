"""`sessions.state`: a copy of the session state, so that a writer that opens reads only the end of the log.

Each copy is written whole, in parallel with appends, and replaces the previous one by a rename. It
covers the log up to `upto`; retention keeps what comes after. A missing copy is made from what the
log still has. A damaged one is an error, because it may be the only record of writes that retention
has dropped.

Layout, little-endian: `MILLSES` and a newline, CRC-32C of everything that follows, u32 version, the
stream's 16 bytes, i64 `upto`, u64 length, and as many bytes of `Sessions.copied`.
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
from millstream.wal.files import replacing
from millstream.wal.layout import SESSIONS_NAME

VERSION: Final = 1
_MAGIC: Final = b"MILLSES\n"
_HEAD: Final = struct.Struct("<8sII16sqQ")
HEAD_BYTES: Final = _HEAD.size
_CHECKED_FROM: Final = 12


class SessionCopy(NamedTuple):
    """Contents of the file."""

    upto: Seq
    """Last number of the last commit group that it covers."""
    state: bytes


def session_path(folder: str) -> str:
    """Return the path of the copy in a stream's folder."""
    return f"{folder}/{SESSIONS_NAME}"


def write_copy(files: Files, folder: str, stream: StreamId, upto: Seq, pieces: Iterable[bytes]) -> int:
    """Replace the copy, durably.

    Returns:
        Its size in bytes.

    Raises:
        OSError: the disk is full, or fails; the previous copy is still there.
    """
    state = b"".join(pieces)
    rest = _HEAD.pack(_MAGIC, 0, VERSION, stream.bytes, upto, len(state))[_CHECKED_FROM:]
    head = _MAGIC + struct.pack("<I", crc32c(rest, state)) + rest
    with replacing(files, session_path(folder)) as file:
        file.pwrite(head, 0)
        file.pwrite(state, len(head))
    return len(head) + len(state)


def read_copy(files: Files, folder: str, stream: StreamId) -> SessionCopy | None:
    """Return the copy; None if there is none.

    Raises:
        CorruptWal: it is damaged, or another stream's.
        UnsupportedFormat: a newer version wrote it.
        OSError: whether there is one can't be told.
    """
    path = session_path(folder)
    if not files.exists(path):
        return None
    data = files.read(path)
    if len(data) < _HEAD.size:
        raise _damaged(path, "it is too short")
    magic, crc, version, owner, upto, length = _HEAD.unpack_from(data)
    if magic != _MAGIC or crc != crc32c(memoryview(data)[_CHECKED_FROM:]):
        raise _damaged(path, "its checksum doesn't match")
    if version != VERSION:
        raise UnsupportedFormat(
            f"{path} has version {version}, which this Millstream can't read", hint="Upgrade this Millstream."
        )
    if owner != stream.bytes or length != len(data) - _HEAD.size:
        raise _damaged(
            path, f"it belongs to stream {UUID(bytes=owner)}" if owner != stream.bytes else "its length is wrong"
        )
    return SessionCopy(Seq(upto), data[_HEAD.size :])


def remove_copy(files: Files, folder: str) -> None:
    """Remove the copy, durably."""
    files.remove(session_path(folder))
    files.sync_dir(folder)


def covered_upto(files: Files, folder: str) -> Seq | None:
    """Return the last number that the copy covers.

    None if there is no readable copy: nothing of the log is kept for it then.
    """
    path = session_path(folder)
    return covered_in(files.read(path, 0, _HEAD.size)) if files.exists(path) else None


def covered_in(data: bytes) -> Seq | None:
    """As `covered_upto`, from a copy's first `HEAD_BYTES` bytes or more."""
    if len(data) < _HEAD.size or data[:8] != _MAGIC:
        return None
    return Seq(_HEAD.unpack_from(data)[4])


def _damaged(path: str, why: str) -> CorruptWal:
    return CorruptWal(
        f"{path}, the copy of the applications' sessions, is damaged: {why}",
        hint="Restore it from a copy of the home, or move it away: sessions and keys of writes that retention has dropped are unknown then.",
        file=path,
    )
