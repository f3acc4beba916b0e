"""The leaf partitions that records of a stream's tables name: kept in the catalog until their `x` is durable.

A leaf is noted before its first record enters the log, and before a copy brings rows of it. A look at the source finds
leaves that are gone. Everything that they had as part of their table committed before that look, so their `x` enters
behind it. At that LSN a leaf's changes turn from one table's to another's: from its table's to those of a table of its
own or of another partitioned table, and from a table's of its own to those of the table that it was attached to.

A leaf that comes back, or goes from one table to another, may have brought rows before its `x` entered: the table that
has it now is copied again, whole.

So is a table without a key if a leaf was attached, changed and emptied before a look: nothing of it is copied, but its
changes may have removed rows that it brought. The log lacks those, and a fold would take an equal row that comes later.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Final

from millstream.capture.source_tables import PartitionFacts, SourceTable
from millstream.catalog import Catalog
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Lsn

_ORDERS_MAX: Final = 4
"""Earlier looks whose names of a leaf's columns explain its changes from before a rename."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A leaf partition that is gone, and whose `x` may enter."""

    table_id: TableId
    oid: int
    name: str
    """`schema.name`, as PostgreSQL quotes it."""
    at: Lsn
    """An LSN at or above the commit with which it left."""
    at_us: int
    """When a look found that it was gone, by the source's clock, in microseconds since 1970."""
    is_back: bool = False
    """Whether it has been attached since, and its rows are copied behind the `x`."""
    is_empty: bool = False
    """Whether it had no rows when it was found attached, so that nothing of it is copied."""


@dataclass(frozen=True, slots=True)
class Attached:
    """A leaf that was attached, and whose rows are to be copied once the stream has come to the look that found it."""

    at: Lsn
    at_us: int
    """The time of that look, by the source's clock, in microseconds since 1970."""
    by: int
    """The transaction that attached it."""
    had_changes: bool
    """Whether changes from before that are in the log: then an `x` comes before its rows. PostgreSQL didn't send what it lost
    in between."""
    is_empty: bool = False
    """Whether it had no rows at that look, so that nothing of it is copied."""
    is_bags: bool = False
    """Whether its table has no key. Changes from after it was attached count, too: they may remove rows that it brought."""

    def counts(self, xid: int) -> bool:
        """Return whether changes by a transaction, which committed before that look, are some that it had."""
        return self.is_bags or _precedes(xid, self.by)


@dataclass(frozen=True, slots=True)
class LeafColumns:
    """The names of a leaf's columns in its own order and in its table's, at one moment."""

    own: tuple[str, ...]
    table: tuple[str, ...]


@dataclass(slots=True)
class _Leaves:
    """The leaves of one table, as the catalog keeps them."""

    live: dict[int, str] = field(default_factory=dict)
    """Names by OID of leaves that records may name; also of some that are gone, which no look has found so far."""
    waiting: dict[int, tuple[str, Lsn, int]] = field(default_factory=dict)
    """Name, LSN and time of leaves that a look found gone, and whose `x` isn't durable."""
    left: set[int] = field(default_factory=set)
    """Leaves whose `x` is durable. Their tables may exist still, and come back."""
    arrived: dict[int, Lsn] = field(default_factory=dict)
    """Leaves that were captured as other tables' until an LSN."""
    attached: dict[int, Attached] = field(default_factory=dict)
    first: dict[int, int | None] = field(default_factory=dict)
    """The transactions of the first records of leaves that no look has shown; None until it is known."""
    orders: dict[int, tuple[LeafColumns, ...]] = field(default_factory=dict)
    """Leaves whose columns have another order than their table's: as the last looks found them, the newest first."""
    is_whole: bool = False
    """Whether every row that the log has of the table names its leaf."""
    read_by_leaves: bool = False
    """Whether the last look found that the source sends the table's changes under its leaves' OIDs."""
    setting: str = ""
    """The text of `sent_by_leaves` for the table at the last look; empty if it had none."""

    @classmethod
    def loaded(cls, facts: Mapping[str, Any]) -> _Leaves:
        def by_oid(key: str) -> list[tuple[int, Any]]:
            return [(int(oid), value) for oid, value in facts[key].items()]

        return cls(
            live=dict(by_oid("live")),
            waiting={oid: (name, Lsn(at), at_us) for oid, (name, at, at_us) in by_oid("waiting")},
            left=set(facts["left"]),
            arrived={oid: Lsn(at) for oid, at in by_oid("arrived")},
            attached={oid: Attached(Lsn(at), *more) for oid, (at, *more) in by_oid("attached")},
            first=dict(by_oid("first")),
            orders={oid: tuple(LeafColumns(tuple(o), tuple(t)) for o, t in found) for oid, found in by_oid("orders")},
            is_whole=facts["is_whole"],
            read_by_leaves=facts["read_by_leaves"],
            setting=facts["setting"],
        )

    def stored(self) -> dict[str, Any]:
        return {
            "live": {str(oid): name for oid, name in sorted(self.live.items())},
            "waiting": {str(oid): [name, int(at), at_us] for oid, (name, at, at_us) in sorted(self.waiting.items())},
            "left": sorted(self.left),
            "arrived": {str(oid): int(at) for oid, at in sorted(self.arrived.items())},
            "attached": {
                str(oid): [int(one.at), one.at_us, one.by, one.had_changes, one.is_empty, one.is_bags]
                for oid, one in sorted(self.attached.items())
            },
            "first": {str(oid): xid for oid, xid in sorted(self.first.items())},
            "orders": {
                str(oid): [[list(one.own), list(one.table)] for one in found]
                for oid, found in sorted(self.orders.items())
            },
            "is_whole": self.is_whole,
            "read_by_leaves": self.read_by_leaves,
            "setting": self.setting,
        }


class KnownLeaves:
    """The leaf partitions of one stream's tables. Any thread."""

    def __init__(self, catalog: Catalog, stream: StreamId) -> None:
        self._catalog = catalog
        self._scope = f"capture/{stream}/leaves"
        self._lock = threading.RLock()
        facts = catalog.facts(self._scope)
        self._tables = {TableId(int(id_)): _Leaves.loaded(value) for id_, value in facts.items()}
        self._stored = {TableId(int(id_)): value for id_, value in facts.items()}
        self._waiting = {id_ for id_, found in self._tables.items() if found.waiting or found.attached}
        self._passed = Lsn(0)
        self._table_of: dict[int, TableId] = {}
        self._turns: dict[int, Lsn] = {}
        """By OID of a leaf, the LSN at which its changes become another table's."""
        self._entered: set[int] = set()
        """Leaves whose `x` was submitted, and isn't durable."""
        self._entered_back: set[int] = set()
        """The same, of leaves that were attached since."""
        self.first_xids: dict[int, int] = {}
        """By OID, the transaction of the first record that came of a leaf in this session."""
        self.met: set[int] = set()
        """Leaves in the records that are being decoded, if they aren't in `first_xids`."""
        self.late_leaves = 0
        """How often records of a leaf came that the source no longer has, and that no look had found gone."""
        self.looked_for = 0
        """The same, up to the beginning of the last look."""
        self._notes = 0
        self._looked = threading.Condition(self._lock)
        self._shown_notes = 0
        """The notes that the last look began with."""
        self._noted: dict[int, int] = {}
        """By OID of a leaf that isn't of a look, how often leaves had been noted by then."""
        self._via_root: set[TableId] = set()
        """Tables of which records without a leaf may have entered the log in this session."""
        self._assign({oid for found in self._tables.values() for oid in {**found.live, **found.waiting}})

    def _assign(self, oids: Iterable[int]) -> None:
        """Settle which table's changes those of some leaves are, now that the stream has passed an LSN."""
        wanted = {*oids}
        leaving: dict[int, list[tuple[TableId, Lsn]]] = {}
        living: dict[int, list[tuple[TableId, Lsn]]] = {}
        for id_, table in self._tables.items() if wanted else ():
            for oid in table.waiting.keys() & wanted:
                leaving.setdefault(oid, []).append((id_, table.waiting[oid][1]))
            for oid in table.live.keys() & wanted:
                living.setdefault(oid, []).append((id_, table.arrived.get(oid, Lsn(0))))
        for oid in wanted:
            until, since = leaving.get(oid, []), living.get(oid, [])
            turns = [at for _, at in until + since if at > self._passed]
            owners = [id_ for id_, at in until if at > self._passed]
            owners += [id_ for id_, at in since if at <= self._passed]
            if turns:
                self._turns[oid] = min(turns)
            else:
                self._turns.pop(oid, None)
            if owners:
                self._table_of[oid] = owners[0]
            else:
                self._table_of.pop(oid, None)

    def passed(self, lsn: Lsn) -> None:
        """Note that everything that committed at or below `lsn` has been submitted."""
        if not self._turns:
            self._passed = lsn
            return
        with self._lock:
            self._passed = lsn
            self._assign([oid for oid, at in self._turns.items() if at <= lsn])

    def table_of(self, oid: int) -> TableId | None:
        """Return the table that a leaf's changes belong to; None if they belong to none, or to a table of its own."""
        return self._table_of.get(oid)

    def orders(self, oid: int) -> tuple[LeafColumns, ...]:
        """Return the columns that a leaf had at the last looks, the newest first, if it has another order than its table."""
        id_ = self._table_of.get(oid)
        return () if id_ is None else self._tables[id_].orders.get(oid, ())

    def note_record(self, id_: TableId, oid: int, name: str, order: LeafColumns | None, *, is_there: bool) -> None:
        """Note a leaf whose changes are a table's from here on, whatever a look has found of it before.

        Args:
            oid: the leaf.
            order: its columns, if they have another order than the table's.
            is_there: whether the source has the leaf still; if not, another look has to find it gone.
        """
        with self._lock:
            found = self._tables.setdefault(id_, _Leaves())
            # One that waits came back, or changes that began before it left are late: it needs another look, and another `x`.
            found.live[oid] = name
            found.first[oid] = self.first_xids.get(oid)
            self._notes += 1
            self._noted[oid] = self._notes
            if order is not None:
                found.orders[oid] = (order,)
            if not is_there:
                self.late_leaves += 1
            self._assign([oid])
            self._store(id_)

    def note_first(self, oid: int, xid: int, committed: Lsn) -> None:
        """Note the transaction of the first record of a leaf, which is about to enter the log, and the LSN of its commit.

        A transaction that began before the leaf was attached may write to it after that, too.
        """
        with self._lock:
            self.first_xids[oid] = xid
            for id_, found in self._tables.items():
                one = found.attached.get(oid)
                if one is None and oid not in found.first:
                    continue
                if found.first.get(oid, xid) is None:
                    found.first[oid] = xid
                if one is not None and committed <= one.at and one.counts(xid):
                    found.attached[oid] = replace(one, had_changes=True)
                self._store(id_)

    def note_attached(
        self, id_: TableId, table: SourceTable, attached: Iterable[PartitionFacts], *, at: Lsn, at_us: int
    ) -> None:
        """Note leaves of a table that were attached, and whose rows are to be copied, if this look is the first to find them.

        Args:
            attached: the leaves: each was attached itself, or the partition that it is below.
            at: an LSN at or above every change that the look shows.
            at_us: the time then, by the source's clock, in microseconds since 1970.
        """
        trees = [part.attached_by for part in table.partitions if not part.leaf and not part.born]
        above = reduce(lambda one, other: other if _precedes(one, other) else one, trees) if trees else None
        with self._lock:
            found = self._tables.setdefault(id_, _Leaves())
            for part in attached:
                is_new = part.oid not in found.live or part.oid in self._noted or part.oid in found.first
                by = above if part.born else part.attached_by
                if is_new and by is not None:
                    first = found.first.get(part.oid) or self.first_xids.get(part.oid)
                    one = Attached(at, at_us, by, False, is_empty=not part.size_bytes, is_bags=not table.key)
                    found.attached[part.oid] = replace(one, had_changes=first is not None and one.counts(first))
            self._store(id_)

    def note_copied(self, id_: TableId, table: SourceTable) -> None:
        """Note that rows of a table, as it was when they were read, are about to enter the log."""
        if not table.partitioned:
            return
        with self._lock:
            found = self._tables.setdefault(id_, _Leaves())
            known = {*found.live, *found.waiting, *found.left}  # one that came back is the next look's
            new = {oid: name for oid, name in live_leaves(table).items() if oid not in known}
            if new:
                found.live |= new
                found.orders |= {oid: (order,) for oid, order in orders_of(table).items() if oid in new}
                self._notes += 1
                self._noted |= dict.fromkeys(new, self._notes)
                self._assign(new)
                self._store(id_)

    def note_rows_without(self, id_: TableId) -> None:
        """Note that rows which don't name their leaf are about to enter the log."""
        if id_ in self._via_root and not self.is_whole(id_):
            return
        with self._lock:
            self._via_root.add(id_)
            if id_ in self._tables and self._tables[id_].is_whole:
                self._tables[id_].is_whole = False
                self._store(id_)

    def begin_copy(self, id_: TableId, table: SourceTable, *, voids: bool) -> None:
        """Note that a copy of the whole table begins, and whether the log's earlier records of it no longer count."""
        if not table.partitioned:
            return
        with self._lock:
            if voids:
                self._via_root.discard(id_)
            self._tables.setdefault(id_, _Leaves()).is_whole = id_ not in self._via_root
            self._store(id_)

    def is_whole(self, id_: TableId) -> bool:
        """Return whether every row that the log has of a table names its leaf."""
        found = self._tables.get(id_)
        return found is not None and found.is_whole

    def was_read_by_leaves(self, id_: TableId) -> bool:
        """Return whether the last look found that a table's changes come under its leaves' OIDs."""
        found = self._tables.get(id_)
        return found is not None and found.read_by_leaves

    def was_always_read_by_leaves(self, id_: TableId, setting: str | None) -> bool:
        """Return whether a table's changes have come under its leaves' OIDs since before the last look.

        Args:
            setting: the text of `sent_by_leaves` for the table now; None if it has none.
        """
        found = self._tables.get(id_)
        return found is not None and found.read_by_leaves and found.setting == setting

    def leaves(self, id_: TableId) -> frozenset[int]:
        """Return the OIDs of the leaves that a table has, and of those that left and whose `x` isn't durable."""
        with self._lock:
            found = self._tables.get(id_, _Leaves())
            return frozenset({*found.live, *found.waiting})

    def are_all(self, id_: TableId, leaves: Collection[int]) -> bool:
        """Return whether these are all leaves that records of a table may name."""
        return id_ in self._tables and self.leaves(id_) <= {*leaves}

    def returned(self, id_: TableId, table: SourceTable) -> list[str]:
        """Return the names of leaves that came back after they had left, or from another partitioned table."""
        with self._lock:
            found = self._tables.get(id_, _Leaves())
            others = [one for other, one in self._tables.items() if other != id_]
            return [
                name
                for oid, name in live_leaves(table).items()
                if oid in found.left
                or oid in found.waiting
                or (oid not in found.live and any(oid in one.live or oid in one.waiting for one in others))
            ]

    def begin_look(self) -> int:
        """Return what a look needs that begins now: leaves that are noted during it may be newer than its facts."""
        return self._notes

    def end_look(self, begun: int, late_leaves: int) -> None:
        """Note the end of a look, with what `begin_look` and `late_leaves` were at its beginning."""
        with self._looked:
            self._shown_notes, self.looked_for = begun, late_leaves
            self._looked.notify_all()

    def wait_for_look(self, within_s: float) -> bool:
        """Wait until a look is over that has shown all leaves noted so far; return whether it came in time."""
        with self._looked:
            wanted = self._notes
            return self._looked.wait_for(lambda: self._shown_notes >= wanted, within_s)

    def look(
        self,
        id_: TableId,
        table: SourceTable,
        *,
        at: Lsn,
        at_us: int,
        begun: int,
        by_leaves: bool,
        setting: str = "",
        own: Collection[int],
        gone_for_good: Collection[int],
    ) -> None:
        """Take a look's facts of a table; leaves that are gone wait for their `x`, if the source sends them apart.

        Args:
            at: an LSN at or above every change that they show.
            at_us: the time then, by the source's clock, in microseconds since 1970.
            begun: as `begin_look` returned it.
            by_leaves: whether the source sends the table's changes under its leaves' OIDs.
            setting: the text of `sent_by_leaves` for the table; empty if it has none.
            own: OIDs of all captured tables.
            gone_for_good: OIDs of which no table exists.
        """
        with self._lock:
            if id_ not in self._tables and not table.partitioned:
                return
            found = self._tables.setdefault(id_, _Leaves())
            live = live_leaves(table)
            newer = {o: name for o, name in found.live.items() if o not in live and self._noted.get(o, 0) > begun}
            gone = {oid: name for oid, name in found.live.items() if oid not in live and oid not in newer}
            others = [one for other, one in self._tables.items() if other != id_]
            for oid in live.keys() - found.live.keys():
                if oid in own or any(oid in one.live or oid in one.waiting for one in others):
                    found.arrived[oid] = at
            found.arrived = {oid: lsn for oid, lsn in found.arrived.items() if oid in live}
            if by_leaves or found.read_by_leaves:  # the stream may still have changes of them under their own OIDs
                found.waiting |= {oid: (name, at, at_us) for oid, name in gone.items()}
                self._entered -= gone.keys()
            found.waiting = {oid: one for oid, one in found.waiting.items() if oid not in live}
            found.left -= {*live, *gone_for_good}
            found.attached = {oid: one for oid, one in found.attached.items() if oid in live}
            found.live = live | newer
            for oid in (*live, *gone):
                self._noted.pop(oid, None)
                found.first.pop(oid, None)
            kept = {oid: one for oid, one in found.orders.items() if oid in found.waiting or oid in newer}
            for oid, now in orders_of(table).items():
                kept[oid] = (now, *(one for one in found.orders.get(oid, ()) if one != now))[:_ORDERS_MAX]
            found.orders = kept
            found.read_by_leaves, found.setting = by_leaves, setting
            self._entered -= live.keys()
            self._assign([*found.live, *gone, *found.waiting])
            self._store(id_)

    @property
    def detached(self) -> frozenset[int]:
        """OIDs of leaves whose `x` is durable, and whose tables may exist."""
        with self._lock:
            return frozenset().union(*(found.left for found in self._tables.values()))

    @property
    def are_waiting(self) -> bool:
        """Whether the `x` of a leaf isn't durable."""
        return bool(self._waiting)

    def wait_beyond(self, lsn: Lsn) -> bool:
        """Return whether the `x` of a leaf has to wait until the stream is beyond an LSN."""
        if not self._waiting:
            return False
        with self._lock:
            tables = [self._tables[id_] for id_ in self._waiting]
            ends = [at for found in tables for _, at, _ in found.waiting.values()]
            return any(at > lsn for at in ends + [one.at for found in tables for one in found.attached.values()])

    @property
    def live(self) -> frozenset[int]:
        """OIDs of leaves that were in their tables at the last look, or whose records have come since."""
        with self._lock:
            return frozenset().union(*(found.live for found in self._tables.values()))

    @property
    def held(self) -> frozenset[int]:
        """OIDs of leaves whose changes may be those of their tables, also of leaves that left while their `x` isn't durable."""
        with self._lock:
            return frozenset().union(*({*found.live, *found.waiting} for found in self._tables.values()))

    def ready(self, busy: Collection[TableId]) -> list[Departure]:
        """Return the departures that may enter now: the stream has passed them.

        Args:
            busy: tables of which rows may have been read at the source that haven't entered.
        """
        if not self._waiting and not self._turns:
            return []
        with self._lock:
            self._assign([oid for oid, at in self._turns.items() if at <= self._passed])
            found = [
                Departure(id_, oid, name, at, at_us)
                for id_ in self._waiting
                if id_ not in busy
                for oid, (name, at, at_us) in self._tables[id_].waiting.items()
                if at <= self._passed and oid not in self._entered
            ]
            self._entered |= {one.oid for one in found}
            return found + self._ready_back()

    def _ready_back(self) -> list[Departure]:
        """Return the departures of leaves that have been attached since: no copy that has begun has rows of them."""
        ready = []
        for id_ in [*self._waiting]:
            found = self._tables[id_]
            for oid, one in [*found.attached.items()]:
                if one.at > self._passed or oid in self._entered_back:
                    continue
                name = found.live.get(oid, "")
                departure = Departure(id_, oid, name, one.at, one.at_us, is_back=True, is_empty=one.is_empty)
                if one.had_changes:
                    self._entered_back.add(oid)
                    ready.append(departure)
                else:
                    self.durable(departure)
        return ready

    def durable(self, one: Departure) -> None:
        """Note that the `x` of a leaf is durable in the log."""
        with self._lock:
            found = self._tables.get(one.table_id)
            if found is not None and one.is_back:
                self._entered_back.discard(one.oid)
                if one.oid in found.attached and found.attached[one.oid].at == one.at:
                    del found.attached[one.oid]
                self._store(one.table_id)
            elif found is not None and found.waiting.get(one.oid) == (one.name, one.at, one.at_us):
                self._entered.discard(one.oid)
                del found.waiting[one.oid]
                found.left.add(one.oid)
                found.orders.pop(one.oid, None)
                self._assign([one.oid])
                self._store(one.table_id)

    def forget(self, id_: TableId) -> None:
        """Delete what is recorded of a table that is gone."""
        with self._lock:
            found = self._tables.pop(id_, None)
            if found is not None:
                self._waiting.discard(id_)
                self._assign({**found.live, **found.waiting})
                self._stored.pop(id_, None)
                self._catalog.drop_fact(self._scope, str(id_))

    def _store(self, id_: TableId) -> None:
        if self._tables[id_].waiting or self._tables[id_].attached:
            self._waiting.add(id_)
        else:
            self._waiting.discard(id_)
        value = self._tables[id_].stored()
        if self._stored.get(id_) != value:
            self._catalog.put_fact(self._scope, str(id_), value)
            self._stored[id_] = value


def _precedes(xid: int, other: int) -> bool:
    """Return whether a transaction's id was given before another's: ids begin again after 2³²."""
    return (other - xid) % 2**32 < 2**31 and xid % 2**32 != other


def live_leaves(table: SourceTable) -> dict[int, str]:
    """Return the names of a table's leaf partitions by OID."""
    return {part.oid: part.name for part in table.partitions if part.leaf}


def orders_of(table: SourceTable) -> dict[int, LeafColumns]:
    """Return the columns of those leaf partitions that have them in another order than the table."""
    names = tuple(column.name for column in table.layout)
    return {p.oid: LeafColumns(p.columns, names) for p in table.partitions if p.leaf and p.columns}
