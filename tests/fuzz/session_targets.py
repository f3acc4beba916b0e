"""The copy of applications' sessions, as a target: see `targets`."""

from __future__ import annotations

import struct
from pathlib import Path
from uuid import UUID

from millstream.codec.checksums import crc32c
from millstream.errors import CorruptWal, IngestError
from millstream.model.ids import ShardId, StreamId
from millstream.model.operations import Ack
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.model.writes import WriteId
from millstream.protocol.deduplication.known_writes import Sessions
from millstream.testing.files import MemoryFiles
from millstream.wal.writing.session_file import covered_upto, read_copy, session_path

_GOLDEN = Path(__file__).parent.parent / "golden" / "sessions-v1.state"
_GIVEN = Ack({ShardId(0): (Offset(1), Offset(2))}, SeqRange(Seq(1), 1))


def session_seeds() -> list[bytes]:
    """Return valid copies."""
    return [_GOLDEN.read_bytes()]


def with_right_checksum(data: bytes) -> bytes:
    """Return the copy with its own checksum computed again."""
    return data if len(data) < 12 else data[:8] + struct.pack("<I", crc32c(data[12:])) + data[12:]


def decode_sessions(data: bytes) -> None:
    """Decode a copy and use its content, as a writer does."""
    files = MemoryFiles()
    files.makedirs("/w")
    file = files.create(session_path("/w"))
    file.pwrite(data, 0)
    file.close()
    covered_upto(files, "/w")
    copy = read_copy(files, "/w", StreamId(UUID(int=77)))
    assert copy is not None
    try:
        sessions = Sessions.restored(copy.state)
    except ValueError as error:
        raise CorruptWal(str(error)) from error
    for write_id in (
        *(WriteId(name, n) for name in ("a", "b", "ü", "gone", "new") for n in (1, 2, 3)),
        WriteId(key="k"),
    ):
        sessions.mark(write_id.session or "")
        try:
            if sessions.look(write_id, 7) is None:
                sessions.note(write_id, 7, _GIVEN, 5)
        except IngestError:
            continue
    assert b"".join(sessions.copied()())
