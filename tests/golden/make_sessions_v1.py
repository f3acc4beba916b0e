"""Write sessions-v1.state and sessions-v1.json: run once, when the format was fixed.

Run again only to add files for a new format version: old golden files stay as they are, for ever.
"""

from __future__ import annotations

import json
from pathlib import Path
from uuid import UUID

from millstream.model.ids import ShardId, StreamId
from millstream.model.operations import Ack
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.model.writes import WriteId
from millstream.protocol.deduplication.known_writes import SessionLimits, Sessions
from millstream.testing.files import MemoryFiles
from millstream.wal.writing.session_file import session_path, write_copy

STREAM = StreamId(UUID(int=77))
UPTO = Seq(4711)


def written() -> Sessions:
    """Three sessions, one with gaps, one with rows on two shards, one forgotten; and keys."""
    sessions = Sessions(SessionLimits(sessions_max=3, keys_max=2))
    for i, (name, number) in enumerate((("gone", 1), ("a", 1), ("a", 2), ("a", 5), ("ü", 1), ("b", 1))):
        shards = {ShardId(shard): (Offset(10 * i), Offset(10 * i + 1 + shard)) for shard in range(1 + (name == "ü"))}
        count = sum(end - start for start, end in shards.values())
        sessions.note(WriteId(name, number), 1000 + i, Ack(shards, SeqRange(Seq(100 * i + 1), count)), 5_000_000 + i)
    for i, key in enumerate(("gone", "k", "l")):
        given = Ack({ShardId(0): (Offset(90 + i), Offset(91 + i))}, SeqRange(Seq(900 + i), 1))
        sessions.note(WriteId(key=key), -1 if key == "l" else 7, given, 6_000_000 + i)
    return sessions


if __name__ == "__main__":
    files = MemoryFiles()
    files.makedirs("/w")
    sessions = written()
    write_copy(files, "/w", STREAM, UPTO, sessions.copied()())
    here = Path(__file__).parent
    (here / "sessions-v1.state").write_bytes(files.read(session_path("/w")))
    facts = {name: sessions.facts(name).as_dict() for name in ("a", "ü", "b", "gone", "never")}
    (here / "sessions-v1.json").write_text(json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
