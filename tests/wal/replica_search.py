"""Lives of a leader's log and its followers, drawn from a seed.

The leader appends, seals, restarts, crashes and drops segments. Shipments are cut anywhere, doubled,
lost and damaged. Followers' disks fail, are full, or lose their power at any operation.

`python -m tests.wal.replica_search FIRST COUNT` plays that many seeds and prints what it found; a seed
repeats its life exactly.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import ClassVar

from tests.seeds import main
from tests.wal.drawn_log import DrawnLog
from tests.wal.truth import FOLDER

from millstream.errors import (
    DiskFull,
    FollowerBehindRetention,
    MillstreamError,
    ReplicaGap,
    ReplicationError,
    ShipmentUnreadable,
)
from millstream.model.ids import GroupNumber, ShardId
from millstream.model.marks import DurableMark
from millstream.model.positions import Seq
from millstream.model.replication import ByteEnd, Shipment
from millstream.protocol.retention import HolderKind, Retention, RetentionBounds
from millstream.testing.files import Crash, MemoryFiles
from millstream.wal.durable_mark import read_mark
from millstream.wal.layout import list_segments, shard_folder
from millstream.wal.mending.inspect import verify
from millstream.wal.reader import StreamReader
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.replica.ship_source import ShipSource
from millstream.wal.segment_deletion import drop_segments
from millstream.wal.writing.group_commit import GroupCommitter

Rows = dict[tuple[int, int, int], str]


@dataclass
class Follower:
    """A follower, and what it has promised."""

    files: MemoryFiles = field(default_factory=MemoryFiles)
    log: ReplicaLog | None = None
    source: ShipSource | None = None
    promised: dict[ShardId, DurableMark] = field(default_factory=dict)
    """The marks that it showed at its last acknowledgement."""
    group: int = 0
    """The last group that it acknowledged."""
    last: Shipment | None = None
    seen: int = 0
    """The number up to which its readers saw everything."""


@dataclass
class ReplicaLife(DrawnLog):
    """The life of a leader and its followers, from one seed."""

    value_sizes: ClassVar[list[int]] = [8, 8, 120, 3000]

    leader: GroupCommitter | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.followers = [Follower() for _ in range(2)]
        self.hides = self.seed % 3 == 0
        """Whether readers see only what other nodes are known to hold."""
        self.held, self.held_seq = GroupNumber(0), Seq(0)
        """The last group, and the last number, that any reader was to see."""

    def play(self) -> None:
        """Play the whole life; raise `AssertionError` if a promise is broken."""
        for _ in range(self.chance.randint(10, 30)):
            if self.chance.random() < 0.5:
                self._lead()
            else:
                self._follow(self.chance.choice(self.followers))
        self._open()
        assert self.leader is not None
        self.truth.commit(self.leader, self.truth.ops([(1, 1), (2, 2)], [(3, 1)]))
        for follower in self.followers:
            self._catch_up(follower)
            self._shows_a_beginning(follower)
        self._hold(self.leader.group)
        for follower in self.followers:
            self._catch_up(follower)
            self._same_bytes(follower)
            here, first = self._read(follower.files), StreamReader(FOLDER, files=self.files).first_seq()
            numbers = {row: seq for seq, row in self.truth.seqs_seen.items()}
            assert {row: text for row, text in here.items() if numbers[row] >= first} == self._read(self.files)
            assert verify(FOLDER, files=follower.files).is_whole

    # --- the leader ------------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        self._open()
        self.chance.choice([self._append] * 5 + [self._spill, self._retain, self._wait, self._stop])()
        if self.hides and self.leader is not None:
            self._hold(GroupNumber(self.chance.randint(min(self.held, self.leader.group), self.leader.group)))

    def _hold(self, group: GroupNumber) -> None:
        """Let other nodes hold everything up to a group."""
        assert self.leader is not None
        self.held = max(self.held, group)
        if self.leader.shown is not None:
            self.leader.shown.show(self.held)
            self.held_seq = max(self.held_seq, self.leader.shown.persisted_upto)

    def _open(self) -> None:
        if self.leader is None:
            self.leader = self.truth.open(self.files, options=self._options(), clock=self.clock, hides=self.hides)
            self._hold(self.held)

    def _stop(self) -> None:
        assert self.leader is not None
        if self.chance.random() < 0.3:
            self.leader.close()
            self._count("leader closed")
        else:
            if self.chance.random() < 0.7:
                self.files.plan.crash_at = self.files.plan.operations + self.chance.randint(1, 20)
                try:
                    for _ in range(4):
                        self._append()
                except Crash:
                    self._count("leader crashed in a group")
            self.files = self.files.crash(self._kept())
            for follower in self.followers:
                follower.source = None
            self._count("leader crashed")
        self.leader = None

    def _append(self) -> None:
        assert self.leader is not None
        self.truth.commit(self.leader, *(self._ops() for _ in range(self.chance.randint(1, 3))))

    def _spill(self) -> None:
        assert self.leader is not None
        op = self.truth.spilled(*(self._pieces() for _ in range(self.chance.randint(1, 6))))
        self.truth.commit(self.leader, op)

    def _retain(self) -> None:
        assert self.leader is not None
        tracker = Retention()
        tracker.needs(
            "reader", HolderKind.BACKLOG, Seq(max(1, self.leader.persisted_upto - self.chance.randint(0, 60)))
        )
        drop_segments(FOLDER, tracker, RetentionBounds(0.0, 0, 0), files=self.files, clock=self.clock)
        self._count("retentions")

    def _wait(self) -> None:
        assert self.leader is not None
        self.clock.advance(self.chance.choice([1, 4000]))
        self.leader.roll()

    # --- followers -------------------------------------------------------------------------------------------------

    def _follow(self, follower: Follower) -> None:
        if not self._begin(follower):
            return
        if self.chance.random() < 0.4:
            self._break_within(follower.files, 30, crashes=0.7)
        if self.chance.random() < 0.1:
            follower.files.capacity_bytes = follower.files.used_bytes() + self.chance.randint(0, 9000)
        try:
            for _ in range(self.chance.randint(1, 6)):
                if not self._ship(follower):
                    break
        except Crash:
            self._count("follower crashed")
            self._end(follower)
        except ReplicationError as failed:
            if failed.code != "replica_failed":
                raise
            self._count("follower failed")
            self._end(follower)
        except DiskFull:
            self._count("follower's disk full")
        except FollowerBehindRetention:
            self._rebuild(follower)
        self._mend(follower.files)
        if follower.log is not None and self.chance.random() < 0.15:
            follower.log.close()
            follower.log = None
            self._count("follower restarted")

    def _begin(self, follower: Follower) -> bool:
        """Open the follower's log; the power may go during it."""
        if follower.log is None:
            if self.chance.random() < 0.3:
                self._break_within(follower.files, 20, crashes=0.7)
            try:
                follower.log = ReplicaLog.open(FOLDER, files=follower.files, side_by_side=False)
            except (Crash, ReplicationError):
                self._count("follower crashed in recovery")
                self._end(follower)
                return False
            finally:
                self._mend(follower.files)
            self._kept_its_promise(follower)
            if follower.source is not None:
                follower.source.restart()
        if follower.source is None:
            follower.source = ShipSource(FOLDER, files=self.files, clock=self.clock)
        return True

    def _ship(self, follower: Follower) -> bool:
        """Send one shipment, or a broken one."""
        assert follower.log is not None
        assert follower.source is not None
        what = self.chance.random()
        if what < 0.1 and follower.last is not None:
            self._count("doubled")
            before, shown = follower.log.position(), follower.log.end()
            try:
                self._apply(follower, follower.last)
            except (ReplicaGap, ShipmentUnreadable):  # a frame that was cut went with a restart, or arrived damaged
                self._count("came again")
            assert all(follower.log.position()[shard] >= end for shard, end in before.items())
            assert follower.log.end() >= shown
            return True
        shipment = follower.source.read(follower.log.position(), self.chance.choice([1, 5_000, 7_777, 60_000]))
        if shipment is None:
            return False
        if what < 0.2:
            self._damage(follower, shipment)
        elif what < 0.3:
            self._count("lost")
            self._skip(follower, shipment)
        else:
            if what < 0.6:
                shipment = self._cut(shipment)
            try:
                self._apply(follower, shipment)
                follower.last = shipment
            except (ReplicaGap, ShipmentUnreadable):
                # A piece of a frame that was damaged in transit was here.
                self._count("came again")
                follower.source.restart()
        return True

    def _apply(self, follower: Follower, shipment: Shipment) -> None:
        assert follower.log is not None
        follower.log.apply(shipment)
        self._count("shipments")
        follower.promised, follower.group = dict(follower.log.marks()), follower.log.end().group
        if self.hides:
            upto = StreamReader(FOLDER, files=follower.files).persisted_upto()
            assert upto >= follower.seen, "readers see less than before"
            follower.seen = upto
        if self.chance.random() < 0.1:
            self._shows_a_beginning(follower)

    def _cut(self, shipment: Shipment) -> Shipment:
        """Let only the beginning of a shipment arrive, cut anywhere except in a header or a footer."""
        if not shipment.parts:
            return shipment
        keep = self.chance.randrange(len(shipment.parts))
        last = shipment.parts[keep]
        if last.is_end or len(last.data) <= 4096:
            return replace(shipment, parts=shipment.parts[:keep], marks={}) if keep else shipment
        cut = replace(last, data=last.data[: self.chance.randint(4096, len(last.data))])
        self._count("cut")
        return replace(shipment, parts=(*shipment.parts[:keep], cut), marks={})

    def _skip(self, follower: Follower, shipment: Shipment) -> None:
        """Lose a shipment. The next one is refused as long as it begins beyond the log's end."""
        assert follower.log is not None
        assert follower.source is not None
        ahead = dict(follower.log.position())
        for part in shipment.parts:
            ahead[part.shard] = part.end
        if shipment.parts and not any(part.is_end for part in shipment.parts):
            following = follower.source.read(ahead, 60_000)
            if following is not None and following.parts:
                try:
                    follower.log.apply(following)
                except ReplicaGap:
                    self._count("gaps")
                except ShipmentUnreadable:
                    self._count("came again")
        follower.source.restart()

    def _damage(self, follower: Follower, shipment: Shipment) -> None:
        """Flip a byte in transit; nothing of the shipment is accepted."""
        assert follower.log is not None
        assert follower.source is not None
        follower.source.restart()
        if not shipment.parts:
            return
        place = self.chance.randrange(len(shipment.parts))
        data = bytearray(shipment.parts[place].data)
        data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
        parts = list(shipment.parts)
        parts[place] = replace(parts[place], data=bytes(data))
        before = follower.log.end()
        try:
            follower.log.apply(replace(shipment, parts=tuple(parts), marks={}))
        except DiskFull:
            raise
        except MillstreamError as error:
            if error.code == "replica_failed":
                raise
            self._count(f"damaged: {error.code}")
        assert follower.log.end() == before

    def _catch_up(self, follower: Follower) -> None:
        """Apply everything the leader has, without trouble."""
        while not self._begin(follower):
            pass
        assert follower.log is not None
        assert follower.source is not None
        follower.source.restart()
        try:
            while True:
                shipment = follower.source.read(follower.log.position(), 20_000)
                if shipment is None:
                    break
                try:
                    follower.log.apply(shipment)
                except (ReplicaGap, ShipmentUnreadable):
                    # A piece of a frame that was damaged in transit was here.
                    self._count("came again")
                    follower.source.restart()
        except FollowerBehindRetention:
            self._rebuild(follower)
            self._catch_up(follower)

    def _rebuild(self, follower: Follower) -> None:
        self._count("behind retention")
        follower.files = MemoryFiles()
        follower.log, follower.source, follower.last, follower.promised, follower.group = None, None, None, {}, 0
        follower.seen = 0

    def _end(self, follower: Follower) -> None:
        """End the process or cut the power. A reader next to it saw whole groups at that moment."""
        self._mend(follower.files)
        self._shows_a_beginning(follower)
        only_process = self.chance.random() < 0.4
        follower.files = follower.files.crash(process_only=True) if only_process else follower.files.crash(self._kept())
        follower.seen = follower.seen if only_process else 0
        follower.log = None

    # --- judging ---------------------------------------------------------------------------------------------------

    def _kept_its_promise(self, follower: Follower) -> None:
        """Check that what it acknowledged survives any crash, whatever happened to its marks."""
        assert follower.log is not None
        position = follower.log.position()
        for shard, mark in follower.promised.items():
            end = ByteEnd(mark.base_offset, 0 if mark.byte_end == 4096 else mark.byte_end)
            assert position.get(shard, ByteEnd(mark.base_offset, 0)) >= end
        assert follower.log.end().group >= follower.group

    def _shows_a_beginning(self, follower: Follower) -> None:
        """Check that a reader there sees what the leader's reader sees, up to the end of some group."""
        if not follower.files.exists(f"{FOLDER}/00000"):
            return
        reader = StreamReader(FOLDER, files=follower.files)
        upto = reader.persisted_upto()
        assert not self.hides or upto <= max(self._held_upto(follower), reader.first_seq() - 1), (
            "readers see what others needn't have"
        )
        here, there = self._read(follower.files), self._read(self.files, durable=True)
        first = StreamReader(FOLDER, files=self.files).first_seq()
        seqs = {row: seq for seq, row in self.truth.seqs_seen.items()}
        wanted = {row: text for row, text in there.items() if seqs[row] <= upto}
        assert {row: text for row, text in here.items() if seqs[row] >= first} == {
            row: text for row, text in wanted.items() if seqs[row] >= reader.first_seq()
        }
        for xid in {row[0] for row in here}:
            rows = {(table, index) for of, table, index in here if of == xid}
            assert len(rows) == len(self.truth.rows[xid]), "half an operation is shown"

    def _held_upto(self, follower: Follower) -> Seq:
        """Return the number up to which readers of a follower may see."""
        del follower
        return self.held_seq

    def _read(self, files: MemoryFiles, *, durable: bool = False) -> Rows:
        reader = StreamReader(FOLDER, files=files, durable=durable)
        if reader.persisted_upto() < reader.first_seq():
            return {}
        return self.truth.read_by_seq(reader)

    def _same_bytes(self, follower: Follower) -> None:
        for shard in (ShardId(0), ShardId(1)):
            folder = shard_folder(FOLDER, shard)
            mark = read_mark(self.files, folder)
            assert mark == read_mark(follower.files, folder)
            assert mark is not None
            for segment in list_segments(follower.files, folder):
                try:
                    theirs = self.files.read(segment.path)
                except FileNotFoundError:
                    continue  # dropped there
                whole = segment.base_offset < mark.base_offset
                assert follower.files.read(segment.path) == (theirs if whole else theirs[: mark.byte_end])


if __name__ == "__main__":
    sys.exit(main(ReplicaLife, sys.argv[1:]))
