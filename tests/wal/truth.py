"""A log in memory whose truth is known: what was attempted, what was acknowledged, and so what it may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_spilled, plain_table

from millstream.model.ids import Epoch, RegionId, ShardId, StreamId, WriterId
from millstream.model.operations import Ack, SpilledOp, WriteOps
from millstream.testing.clock import ManualClock
from millstream.testing.files import MemoryFiles
from millstream.wal.reader import StreamReader
from millstream.wal.writing.group_commit import GroupCommitter
from millstream.wal.writing.number_sources import BlockNumbers
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.own_shards import WriterIdentity

FOLDER = "/wal/shop"
STREAM = StreamId(UUID("5f0c21aa-0000-4000-8000-000000000001"))
SHARDS = (ShardId(0), ShardId(1))
TABLES = {number: plain_table(number) for number in (1, 2, 3)}
WIDER = plain_table(1, version=2)
SHARD_OF = {1: 0, 2: 1, 3: 0}
SMALL = LogOptions(segment_bytes=9_000, frame_bytes_max=1500, queue_bytes_max=20_000, group_bytes_max=20_000)

Pieces = Sequence[tuple[int, int]]
"""(table, row count) …"""


@dataclass
class Truth:
    """Everything known of a log, over all its writers."""

    rows: dict[int, dict[tuple[int, int], str]] = field(default_factory=dict)
    """By xid: text by (table, index)."""
    attempted: list[int] = field(default_factory=list)
    acknowledged: dict[int, Ack] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    """Reported as failed: must never be there."""
    reservations: MemoryReservations = field(default_factory=MemoryReservations)
    epoch: int = 0
    seqs_seen: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Row (xid, table, index) by number."""

    def open(
        self,
        files: MemoryFiles,
        *,
        options: LogOptions = SMALL,
        clock: ManualClock | None = None,
        hides: bool = False,
    ) -> GroupCommitter:
        self.epoch += 1
        self.reservations.epoch = Epoch(self.epoch)
        return GroupCommitter.open(
            FOLDER,
            WriterIdentity(STREAM, RegionId(0), WriterId(1), Epoch(self.epoch)),
            SHARDS,
            numbers=BlockNumbers(self.reservations, Epoch(self.epoch)),
            files=files,
            clock=clock or ManualClock(),
            options=options,
            side_by_side=False,
            hides=hides,
        )

    def ops(self, *operations: Pieces, size: int = 8) -> WriteOps:
        """Return whole transactions, each of (table, row count) pieces."""
        made: dict[int, list[tuple[object, int, str]]] = {}
        for pieces in operations:
            xid = self._next_xid(pieces, size)
            made[xid] = [(WIDER if t == 4 else TABLES[t], n, f"{xid}".ljust(size, ".")) for t, n in pieces]
        return plain_ops(made, shard_of=SHARD_OF)  # type: ignore[arg-type]

    def spilled(self, *chunks: Pieces) -> SpilledOp:
        """Return one transaction in chunks."""
        xid = self._next_xid([piece for chunk in chunks for piece in chunk], 8)
        text = f"{xid}".ljust(8, ".")
        return plain_spilled(xid, [[(TABLES[t], n, text) for t, n in chunk] for chunk in chunks], shard_of=SHARD_OF)

    def commit(self, log: GroupCommitter, *group: WriteOps | SpilledOp) -> list[Ack]:
        """Commit a group and record the outcome; then roll as the writer would."""
        xids = [self._xids(ops) for ops in group]
        self.attempted += [xid for some in xids for xid in some]
        acks = log.commit(group)
        for some, ack in zip(xids, acks, strict=True):
            for xid in some:
                self.acknowledged[xid] = ack
        log.roll()
        return acks

    def _xids(self, ops: WriteOps | SpilledOp) -> list[int]:
        batch = ops.operation if isinstance(ops, SpilledOp) else ops.operations
        return list(batch.column("xid").to_pylist())

    def _next_xid(self, pieces: Pieces, size: int) -> int:
        xid = len(self.rows) + 1
        rows: dict[tuple[int, int], str] = {}
        for table, count in pieces:
            for _ in range(count):
                rows[1 if table == 4 else table, len(rows)] = f"{xid}".ljust(size, ".")
        self.rows[xid] = rows
        return xid

    # --- judging ---------------------------------------------------------------------------------------------------

    def shown(self, files: MemoryFiles, *, without_mark: bool = False, durable: bool = False) -> list[int]:
        """Return the xids that a reader finds, after checking that each is whole, right, and numbered as it must be."""
        by_seq = self.read_by_seq(StreamReader(FOLDER, files=files, without_mark=without_mark, durable=durable))
        found: dict[int, dict[tuple[int, int], str]] = {}
        for (xid, table, index), text in by_seq.items():
            found.setdefault(xid, {})[table, index] = text
        for xid, rows in found.items():
            assert rows == self.rows[xid], f"transaction {xid} isn't whole"
        return sorted(found)

    def judge(self, files: MemoryFiles, *, seen: Sequence[int] = ()) -> list[int]:
        """Check every invariant of a recovered log, and return the xids in it."""
        shown = self.shown(files, durable=True)
        assert set(self.acknowledged) <= set(shown), "what was acknowledged is lost"
        assert set(seen) <= set(shown), "what a reader has seen is lost"
        assert not self.refused & set(shown), "what was refused is there"
        assert set(shown) <= set(self.attempted)
        return shown

    def judge_every_way_of_reading(self, files: MemoryFiles) -> None:
        """Check that the log shows the same by number, by offset, and without marks."""
        shown = self.shown(files)
        assert shown == self.shown(files, without_mark=True)
        reader = StreamReader(FOLDER, files=files)
        assert self._read_by_offset(reader) == self.read_by_seq(reader)

    def _read_by_offset(self, reader: StreamReader) -> dict[tuple[int, int, int], str]:
        found: dict[tuple[int, int, int], str] = {}
        for shard in reader.shards:
            offsets: list[int] = []
            keys: dict[int, tuple[int, int]] = {}
            for records in reader.read(shard, reader.first_offset(shard)):
                for row in records.batch.to_pylist():
                    key = (row["__xid"], records.schema.table_id, row["__commit_index"])
                    assert key not in found, f"{key} stands there twice"
                    found[key] = row["text"]
                    offsets.append(row["__offset"])
                    keys[row["__offset"]] = (row["__xid"], row["__commit_index"])
                    self._same_number(row["__seq"], key)
            assert sorted(offsets) == list(range(reader.first_offset(shard), reader.durable_offset(shard)))
            in_order = [keys[offset] for offset in sorted(keys)]
            assert in_order == sorted(in_order), "offsets don't follow operations and indexes"
        return found

    def read_by_seq(self, reader: StreamReader) -> dict[tuple[int, int, int], str]:
        """Return the texts by (xid, table, index)."""
        found: dict[tuple[int, int, int], str] = {}
        after, upto = reader.first_seq() - 1, reader.persisted_upto()
        last_of_table: dict[int, int] = {}
        for records in reader.read_between(after, upto):
            for row in records.batch.to_pylist():
                key = (row["__xid"], records.schema.table_id, row["__commit_index"])
                found[key] = row["text"]
                self._same_number(row["__seq"], key)
                assert row["__seq"] > last_of_table.get(records.schema.table_id, 0)
                last_of_table[records.schema.table_id] = row["__seq"]
        return found

    def _same_number(self, seq: int, row: tuple[int, int, int]) -> None:
        assert self.seqs_seen.setdefault(seq, row) == row, f"number {seq} was given twice"
