"""A leader's log in memory and a follower's, for tests of shipments between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.wal.truth import FOLDER, SMALL, Truth

from millstream.model.replication import Shipment
from millstream.testing.files import MemoryFiles
from millstream.wal.reader import StreamReader
from millstream.wal.replica.replica_log import ReplicaLog
from millstream.wal.replica.ship_source import ShipSource
from millstream.wal.writing.group_commit import GroupCommitter
from millstream.wal.writing.options import LogOptions

Rows = dict[tuple[int, int, int], str]


def ship(source: ShipSource, log: ReplicaLog, bytes_max: int = 20_000) -> list[Shipment]:
    """Ship everything the leader has, and return the shipments."""
    sent = []
    while (shipment := source.read(log.position(), bytes_max)) is not None:
        log.apply(shipment)
        sent.append(shipment)
    return sent


def rows(files: MemoryFiles, truth: Truth, folder: str = FOLDER) -> Rows:
    """Return the rows that readers are shown, by number."""
    reader = StreamReader(folder, files=files)
    return {} if reader.persisted_upto() < reader.first_seq() else truth.read_by_seq(reader)


@dataclass
class Pair:
    """A leader that writes, and one follower."""

    truth: Truth = field(default_factory=Truth)
    leader_files: MemoryFiles = field(default_factory=MemoryFiles)
    files: MemoryFiles = field(default_factory=MemoryFiles)
    options: LogOptions = SMALL

    def __post_init__(self) -> None:
        self.leader: GroupCommitter = self.truth.open(self.leader_files, options=self.options)
        self.source = ShipSource(FOLDER, files=self.leader_files)
        self.log = ReplicaLog.open(FOLDER, files=self.files, side_by_side=False)

    def append(self, groups: int = 1) -> None:
        """Append groups, each on both shards."""
        for _ in range(groups):
            self.truth.commit(self.leader, self.truth.ops([(1, 3), (2, 2)], [(3, 1)]))

    def ship(self, bytes_max: int = 20_000) -> list[Shipment]:
        """Ship everything the leader has."""
        return ship(self.source, self.log, bytes_max)

    def reopen_leader(self) -> None:
        """Close the leader's writer and open it again."""
        self.leader.close()
        self.leader = self.truth.open(self.leader_files, options=self.options)

    def reopen(self, files: MemoryFiles | None = None) -> ReplicaLog:
        """Open the follower's log again, over the files that a crash has left or over the same ones."""
        if files is None:
            self.log.close()
        self.files = files or self.files
        self.log = ReplicaLog.open(FOLDER, files=self.files, side_by_side=False)
        self.source.restart()
        return self.log

    def read(self) -> Rows:
        """Return the rows that readers of the follower are shown."""
        return rows(self.files, self.truth)

    def read_leader(self) -> Rows:
        """Return the rows that readers of the leader are shown."""
        return rows(self.leader_files, self.truth)
