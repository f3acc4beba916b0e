"""Write acks-v1.acks and acks-v1.json: run once, when the format was fixed.

Run again only to add files for a new format version: old golden files stay as they are, for ever.
"""

from __future__ import annotations

import json
from pathlib import Path
from uuid import UUID

from millstream.model.ids import Epoch, GroupNumber, StreamId
from millstream.model.positions import Seq
from millstream.protocol.replication.ack_levels import Holding
from millstream.testing.files import MemoryFiles
from millstream.wal.replica.acks import AcksFile

STREAM = StreamId(UUID(int=77))

if __name__ == "__main__":
    files = MemoryFiles()
    files.makedirs("/r")
    acks = AcksFile(files, "/r/shop.acks", STREAM, Epoch(6))
    acks.tell(Holding("north", Epoch(5), GroupNumber(40), Seq(400), 1_700_000_000_000_000_000))
    acks.tell(Holding("south", Epoch(7), GroupNumber(39), Seq(390), 1_700_000_000_000_000_001))
    acks.tell(Holding("s3", Epoch(6), GroupNumber(30), Seq(300), 1_700_000_000_000_000_002, is_store=True))
    acks.tell(Holding("north", Epoch(6), GroupNumber(41), Seq(4711), 1_700_000_000_000_000_003))
    here = Path(__file__).parent
    (here / "acks-v1.acks").write_bytes(files.read("/r/shop.acks"))
    places = [[p.name, p.promised, p.group, p.persisted_upto, p.told_ns, p.is_store] for p in acks.holdings.places]
    told = {"promised": acks.holdings.promised, "places": places}
    (here / "acks-v1.json").write_text(json.dumps(told, indent=1) + "\n")
