"""Logs of regions in memory, in place of those that `regions.RegionTable` reads from disk.

They grow, are cut back, and lose their beginnings, at any moment of a read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from tests.crdt.region_logs import COLUMNS, Said, stream_of

from millstream.crdt.region_state import ReconciliationEngine, RegionState, Vector
from millstream.errors import OffsetExpired, TokenFromFuture
from millstream.model.ids import Epoch, GroupNumber, RegionId, StreamId, TableId
from millstream.model.positions import Seq, StreamToken
from millstream.regions.merged_table import RegionTable

TABLE = TableId(1)
_RECORDS = pa.schema([("__op", pa.string()), ("__seq", pa.int64()), *COLUMNS])


@dataclass(frozen=True)
class Group:
    """A commit group."""

    number: GroupNumber
    epoch: Epoch
    wall_ns: int
    said: tuple[Said, ...]
    reserved_to: int
    """A leader that continues after this group gives numbers above this one."""

    @property
    def first_seq(self) -> int:
        return self.said[0].seq

    @property
    def last_seq(self) -> int:
        return self.said[-1].seq


def records(groups: list[Group], after: int, upto: int) -> SimpleNamespace:
    """Return the rows and times of consecutive groups of one epoch in the form of `read_between`."""
    said = [one for group in groups for one in group.said if after < one.seq <= upto]
    rows = pa.Table.from_pylist([{"__op": "c", "__seq": one.seq, **one.row} for one in said], schema=_RECORDS)
    times = pa.array([one.wall_ns for one in said], pa.int64())
    return SimpleNamespace(
        schema=SimpleNamespace(table_id=TABLE),
        batch=rows,
        hybrid_ns=times,
        region=RegionId(said[0].region),
        epoch=groups[0].epoch,
    )


@dataclass
class ModelLog:
    """One log of a region: its own, or a copy. Groups are numbered from 1 on."""

    region: int
    groups: list[Group] = field(default_factory=list)
    dropped: int = 0
    """How many of the first groups retention has dropped.

    They are kept here to compute what is expected, and aren't shown.
    """

    @property
    def upto(self) -> int:
        return self.groups[-1].last_seq if self.groups else 0

    @property
    def first_seq(self) -> int:
        return self.groups[self.dropped - 1].last_seq + 1 if self.dropped else 1

    def cut(self, behind: int) -> int:
        """Keep the groups up to a number; return how many records were cut."""
        assert behind >= self.dropped, "what is common is longer than what was dropped"
        gone = self.groups[behind:]
        del self.groups[behind:]
        return sum(len(group.said) for group in gone)

    def said(self) -> list[Said]:
        """Return all records, those of dropped groups included."""
        return [one for group in self.groups for one in group.said]


class ModelReader:
    """A stand-in for `StreamReader`. Between any two of its answers the world may go on."""

    def __init__(self, log: ModelLog, meanwhile: Callable[[], None]) -> None:
        self._log = log
        self._meanwhile = meanwhile

    @property
    def stream_id(self) -> StreamId:
        return stream_of(self._log.region)

    def persisted_upto(self) -> Seq:
        self._meanwhile()
        return Seq(self._log.upto)

    def first_seq(self) -> Seq:
        return Seq(self._log.first_seq)

    def token(self) -> StreamToken:
        return StreamToken.scalar(self.stream_id, self.persisted_upto())

    def _between(self, after: Seq, upto: Seq) -> list[Group]:
        self._meanwhile()
        if after < self._log.first_seq - 1:
            raise OffsetExpired("dropped", first=self._log.first_seq)
        if max(after, upto) > self._log.upto:
            raise TokenFromFuture("beyond what the log shows")
        shown = self._log.groups[self._log.dropped :]
        return [group for group in shown if group.first_seq <= upto and group.last_seq > after]

    def read_between(self, after: Seq, upto: Seq, *, table: TableId | None) -> Iterator[SimpleNamespace]:
        assert table == TABLE
        found = self._between(after, upto)
        for groups in filter(None, (found[:3], found[3:])):
            for _, some in groupby(groups, key=lambda group: group.epoch):
                yield records(list(some), after, upto)
            self._meanwhile()

    def read_groups(self, after: Seq, upto: Seq) -> Iterator[list[SimpleNamespace]]:
        for group in self._between(after, upto):
            header = SimpleNamespace(
                group_last_seq=Seq(group.last_seq), group=group.number, epoch=group.epoch, hybrid_time=group.wall_ns
            )
            yield [SimpleNamespace(header=header)]


class ModelTable(RegionTable):
    """A site's table, whose logs and stored state lie in memory."""

    def __init__(
        self,
        logs: dict[int, ModelLog],
        own: int,
        kept: bytes | None,
        meanwhile: Callable[[], None],
        engine: ReconciliationEngine,
    ) -> None:
        self._logs = logs
        self._meanwhile = meanwhile
        self._bytes = kept
        self._own = RegionId(own)
        self._file = Path("kept")
        self.bytes_max = None
        self.name = "public.posts"
        self.columns = COLUMNS
        self.engine = engine
        order = [own, *(region for region in logs if region != own)]
        self._readers = {RegionId(region): self._open(RegionId(region)) for region in order}
        self._ids = {region: {TABLE} for region in self._readers}
        self._known_upto = dict.fromkeys(self._readers, Seq(1 << 62))  # the schema is always known

    def _open(self, region: RegionId) -> Any:
        return ModelReader(self._logs[region], self._meanwhile)

    def _kept(self) -> RegionState | None:
        return None if self._bytes is None else self.engine.decode(self._bytes)

    def _without_repeats(self, before: Vector, state: RegionState) -> RegionState:
        """Return the state: the writes of these logs have no ids."""
        del before
        return state

    def _check_can_begin_anew(self) -> None:
        assert self._bytes is None
