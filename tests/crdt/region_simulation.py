"""Worlds of regions, drawn from seeds.

Each region writes its own log and merges its copies of the others' logs, while everything fails that
may.

    python -m tests.crdt.region_simulation FIRST COUNT

A world has two or three regions. Each region has a leader and a node next to it. The node is a few
groups behind, and is promoted when the leader is lost. Each region also has a site with the region's
log, copies of the others' logs, and the rows merged so far. Shipments are lost, doubled, delayed, and
overtake each other. Links break, clocks jump, and leaders restart. Sites merge at any moment, logs
change while they are read, and a merge may be lost before it is stored. Worlds in which no region loses
anything have mirrors as well. A mirror has no logs: it sends its vector, and gets the rows that it
lacks late, twice or never.

Invariants: a vector never goes back, except where the log was cut. Hybrid times rise in a region, and
exceed every time that the region has received. A site's merged rows are those of its logs up to its
vector, to the byte. At rest all sites have the same rows, and the plain kinds make the same rows of all
records, one by one.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
from tests.crdt.model_regions import Group, ModelLog, ModelReader, ModelTable
from tests.crdt.region_logs import HAPPENED, KEY, MERGE, PLAIN_MERGE, Said, folded, plainly_merged, region_rows
from tests.seeds import Violation, main

from millstream.crdt.hlc import HLC
from millstream.crdt.region_state import Missing, ReconciliationEngine, RegionState, Vector, behind
from millstream.errors import ReplicationError
from millstream.model.ids import Epoch, GroupNumber, RegionId
from millstream.model.positions import Seq
from millstream.model.replication import NodeName
from millstream.protocol.replication.node_promises import Lineage, Promise
from millstream.wal.truncation_check import still_says
from millstream.wal.writing.hybrid_times import GroupTimes

_BEGAN_NS = 1_700_000_000 * 10**9
_LASTS_S = 3.0
_UNPROMISED = Promise(Epoch(0), NodeName(""))


@dataclass(frozen=True)
class Shipment:
    """A shipment of a region's log to a site."""

    promise: Promise
    lineage: Lineage
    begin: int
    """Number of groups before it."""
    groups: tuple[Group, ...]


class Region:
    """A writing region: a leader, and how much of its log the node next to it has."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.log = ModelLog(number)
        self.backed = 0
        """Number of groups that the node next to it has."""
        self.promise = _UNPROMISED
        self.lineage = Lineage()
        self.clock_off_ns = int(world.chance.uniform(-2, 2) * 10**9)
        self.lost: list[Said] = []
        self.begin()

    def now_ns(self) -> int:
        return _BEGAN_NS + int(self.world.now * 10**9) + self.clock_off_ns

    def begin(self) -> None:
        """Start a leader's process from its log. Numbers that may have been given out aren't given again."""
        last = self.log.groups[-1] if self.log.groups else None
        self.times = GroupTimes(self, 0 if last is None else last.wall_ns)
        self.reserved_to = 0 if last is None else last.reserved_to
        self.next_seq = self.reserved_to + 1

    def write(self) -> None:
        chance = self.world.chance
        heard = self.world.hear(self)
        wall_ns = self.times.next_ns()
        count = chance.choice((1, 1, 2, 3))
        if self.next_seq + count - 1 > self.reserved_to:
            self.reserved_to = self.next_seq + count - 1 + chance.randrange(4)
        said = tuple(
            Said(self.number, self.next_seq + at, wall_ns, self.world.draw_row(self.number)) for at in range(count)
        )
        self.next_seq += count
        before = self.log.groups[-1].wall_ns if self.log.groups else 0
        if wall_ns <= max(before, heard):
            raise Violation(f"region {self.number} gave {wall_ns}, and had {before} and heard {heard}")
        number = GroupNumber(len(self.log.groups) + 1)
        self.log.groups.append(Group(number, Epoch(self.promise.epoch + 1), wall_ns, said, self.reserved_to))
        if chance.random() < 0.7:
            self.backed = len(self.log.groups) - (chance.randrange(3) if self.world.loses_tails else 0)
            self.backed = max(self.backed, self.log.dropped)

    def restart(self) -> None:
        self.begin()
        self.world.count("restarts")

    def lose(self) -> None:
        """Lose the leader; the node next to it leads with the groups that it has."""
        self.backed = max(min(self.backed, len(self.log.groups)), self.log.dropped)
        self.lost += [one for group in self.log.groups[self.backed :] for one in group.said]
        self.world.count("tails lost" if len(self.log.groups) > self.backed else "promotions without loss")
        site = self.world.sites[self.number]
        if self.log.cut(self.backed):
            site.cuts[self.number] += 1
        self.promise = Promise(Epoch(self.promise.epoch + 1), NodeName(f"node-{self.promise.epoch + 1}"))
        behind = GroupNumber(self.backed)
        self.lineage = self.lineage.covered_by(behind).with_term(self.promise, behind)
        if not self.world.drops and self.world.chance.random() < 0.5:
            site.kept = None  # a node that hasn't merged anything yet; otherwise the old one is back, and was cut
        self.clock_off_ns += int(self.world.chance.uniform(-2, 2) * 10**9)
        self.begin()


@dataclass
class Copy:
    """A site's copy of another region's log."""

    log: ModelLog
    promise: Promise = _UNPROMISED
    lineage: Lineage = field(default_factory=Lineage)
    aligned_with: Lineage | None = None


class Site:
    """A site, at which a region's tables are merged."""

    def __init__(self, world: World, region: Region, others: list[int]) -> None:
        self.world = world
        self.region = region
        self.copies = {number: Copy(ModelLog(number)) for number in others}
        self.logs = {region.number: region.log} | {number: copy.log for number, copy in self.copies.items()}
        self.kept: bytes | None = None
        self.cuts: Counter[int] = Counter()
        """How often each of its logs was cut back."""
        self.cuts_kept: Counter[int] = Counter()
        """The counts of `cuts` at the time of the stored state."""
        self.is_refused = False

    def take(self, number: int, shipment: Shipment) -> None:
        """Take a shipment as a follower does: cut where the lineages part, then take exactly what follows."""
        copy = self.copies[number]
        if shipment.promise < copy.promise:
            self.world.count("fenced")
            return
        copy.promise = shipment.promise
        groups = copy.log.groups
        parted = copy.lineage.covered_by(GroupNumber(len(groups))).common_with(shipment.lineage)[1]
        if parted is not None and copy.aligned_with != shipment.lineage:
            copy.aligned_with = shipment.lineage
            if len(groups) > parted:
                copy.log.cut(parted)
                self.cuts[number] += 1
                self.world.count("copies cut")
        if shipment.begin > len(groups):
            self.world.count("gaps")
            return
        known = groups[shipment.begin : shipment.begin + len(shipment.groups)]
        if known != list(shipment.groups[: len(known)]):
            raise Violation(f"site {self.region.number}: its copy of region {number} is another history")
        if known:
            self.world.count("known already")
        groups.extend(shipment.groups[len(known) :])
        copy.lineage = shipment.lineage.covered_by(GroupNumber(len(groups)))

    def table(self, meanwhile: Callable[[], None]) -> ModelTable:
        return self.world.table_type(self.logs, self.region.number, self.kept, meanwhile, self.world.engine)

    def state(self) -> RegionState | None:
        return None if self.kept is None else self.world.plain.decode(self.kept)

    def reconcile(self, *, is_still: bool = False) -> None:
        """Merge, check the result against the logs, and store it, unless it is killed before that."""
        world, cuts, before = self.world, self.cuts.copy(), self.state()
        table = self.table((lambda: None) if is_still else world.meanwhile)
        try:
            state = table.merged_state()
        except ReplicationError as error:
            if error.code != "lost_tail_merged":
                raise
            self._check_refused(error, before)
            return
        if cuts != self.cuts:
            world.count("cut while it was read")
        elif not is_still:  # at rest all sites are compared
            self.check(state, before, cuts)
        if not is_still and world.chance.random() < 0.2:
            world.count("killed before it was kept")
            return
        self.kept = table.engine.encode(state)
        self.cuts_kept = cuts

    def check(self, state: RegionState, before: RegionState | None, cuts: Counter[int]) -> None:
        said = []
        for number, log in self.logs.items():
            upto = behind(state.vector, RegionId(number))
            was = 0 if before is None else behind(before.vector, RegionId(number))
            if upto < was and cuts[number] == self.cuts_kept[number]:
                raise Violation(f"site {self.region.number} had heard region {number} up to {was}, and now to {upto}")
            said += [one for one in log.said() if one.seq <= upto]
        if self.world.chance.random() < 0.25 and self.world.bytes_of(state.rows) != self.world.bytes_of(
            self.world.folded(said)
        ):
            raise Violation(
                f"site {self.region.number} has merged something else than its logs say: {self.world.difference(state, said)}"
            )

    def _check_refused(self, error: ReplicationError, before: RegionState | None) -> None:
        number = error.details["region"]
        world = self.world
        world.count("refused")
        rows = [] if before is None else before.rows.select(["__region", "__seq"]).to_pylist()
        lost = {one.seq for one in world.regions[number].lost}
        if not self.logs[number].dropped or not any(row["__region"] == number and row["__seq"] in lost for row in rows):
            raise Violation(f"site {self.region.number} refuses without need: {error}")
        self.is_refused = True

    def let_go(self, number: int, most: int) -> None:
        """Run retention on one of its logs, up to so many groups, by what was merged of it."""
        log, state = self.logs[number], self.state()
        heard = Seq(0) if state is None else behind(state.vector, RegionId(number))
        if state is not None and not self.world.is_heard(log, heard, state):
            heard = Seq(0)
        free = sum(group.last_seq <= heard for group in log.groups)
        if min(free, most) > log.dropped:
            log.dropped = min(free, most)
            self.world.count("dropped")


class Mirror:
    """A site that has merged rows, and no logs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = RegionState(self.world.rows([]))
        self.kept = self.world.plain.encode(self.state)

    def take(self, asked: Vector, answer: bytes) -> None:
        """Merge an answer, which holds what was lacking at the vector `asked`.

        A mirror that was killed since may have less than that vector.
        """
        found = self.world.plain.decode(answer)
        assert found is not None
        if self.world.checks_asked and any(behind(self.state.vector, r) < token.linear() for r, token in asked.items()):
            self.world.count("answers that came too late")
            return
        vector = self.state.vector
        self.state = self.world.engine.apply(self.state, Missing(found.rows, found.vector))
        if any(behind(self.state.vector, region) < token.linear() for region, token in vector.items()):
            raise Violation("a mirror's vector went back")

    def keep(self) -> None:
        self.kept = self.world.plain.encode(self.state)

    def kill(self) -> None:
        found = self.world.plain.decode(self.kept)
        assert found is not None
        self.state = found
        self.world.count("mirrors killed")


class World:
    """See the module."""

    table_type: ClassVar[type[ModelTable]] = ModelTable
    engine_type: ClassVar[type[ReconciliationEngine]] = ReconciliationEngine
    checks_asked: ClassVar[bool] = True
    hears: ClassVar[bool] = True

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.merge = MERGE if seed % 3 else PLAIN_MERGE
        self.plain = ReconciliationEngine(KEY, self.merge, "public.posts")
        self.engine = self.engine_type(KEY, self.merge, "public.posts")
        self.counts: Counter[str] = Counter()
        self.now = 0.0
        self._queue: list[tuple[float, int, bool, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._is_within = False
        kind = self.chance.choice(("mirrors", "tails", "tails", "tails and retention"))
        self.loses_tails = kind != "mirrors"
        self.drops = kind == "tails and retention"
        self.fault_rate = self.chance.choice((0.0, 0.1, 0.3))
        self.cut_until: dict[frozenset[int], float] = {}
        self.views: Counter[int] = Counter()
        self.regions = {number: Region(self, number) for number in range(self.chance.choice((2, 2, 2, 3)))}
        self.sites = {
            number: Site(self, region, [other for other in self.regions if other != number])
            for number, region in self.regions.items()
        }
        self.mirrors = [] if self.loses_tails else [Mirror(self) for _ in range(2)]

    # --- what happens --------------------------------------------------------------------------------------------------

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def at(self, delay_s: float, call: Callable[[], None], *, quick: bool = True) -> None:
        """Schedule a call. A quick one may also run while a site reads."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._numbers), quick, call))

    def every(self, mean_s: float, call: Callable[[], None], *, quick: bool = True) -> None:
        def again() -> None:
            if self.now < _LASTS_S:
                call()
                self.at(self.chance.expovariate(1 / mean_s), again, quick=quick)

        self.at(self.chance.expovariate(1 / mean_s), again, quick=quick)

    def meanwhile(self) -> None:
        """Let something else happen while a log is read, if chance has it so."""
        if self._is_within or self.chance.random() > 0.1:
            return
        self._is_within = True
        while self._queue and self._queue[0][2] and self.chance.random() < 0.8:
            self._next()
        self._is_within = False

    def _next(self) -> None:
        at, _, _, call = heapq.heappop(self._queue)
        self.now = max(self.now, at)
        call()

    def draw_row(self, region: int) -> dict[str, Any]:
        chance = self.chance
        self.views[region] += chance.randrange(3)

        def maybe(value: Any) -> Any:
            return None if chance.random() < 0.3 else value

        return {
            "id": chance.choice((0, 0, 1, None)),
            "part": chance.choice(("", "a")),
            "title": maybe(chance.choice("abc")),
            "ratio": maybe(chance.choice((0.5, -0.0))),
            "views": maybe(self.views[region]),
            "likes": maybe(chance.randrange(-9, 9)),
            "paid": maybe(Decimal(chance.randrange(-999, 999)).scaleb(-2)),
            "weight": maybe(chance.choice((0.1, 0.2, 1e16, -1e16))),
            "tags": maybe(chance.sample(("x", "y", "z"), chance.randrange(3))),
            "seen": maybe(chance.sample((1, 2, 3), chance.randrange(3))),
            "heat": (heat := maybe(chance.uniform(0, 8))),
            "happened": None if heat is None else HAPPENED[int(heat * 1000) % len(HAPPENED)],
            "hidden": maybe(chance.random() < 0.5),
        }

    def hear(self, region: Region) -> int:
        """Let a region's leader take in the other regions' times before it writes, as its site has them.

        Return the greatest time that wasn't refused.
        """
        heard = 0
        for number, copy in self.sites[region.number].copies.items():
            if copy.log.groups:
                last = copy.log.groups[-1]
                try:
                    if self.hears:
                        region.times.hear(HLC(last.wall_ns, last.last_seq, number), f"region {number}")
                    elif last.wall_ns - region.now_ns() > 60 * 10**9:
                        continue
                except ReplicationError as error:
                    if error.code != "clock_skew":
                        raise
                    self.count("clocks that weren't heard")
                    continue
                heard = max(heard, last.wall_ns)
        return heard

    def jump(self) -> None:
        region = self.chance.choice(list(self.regions.values()))
        region.clock_off_ns += int(self.chance.choice((-900_000, -70, -3, -0.5, 0.5, 3, 70, 900_000)) * 10**9)
        self.count("clock jumps")

    def partition(self) -> None:
        pair = frozenset(self.chance.sample(sorted(self.regions), 2))
        self.cut_until[pair] = self.now + self.chance.uniform(0.2, 1.5)
        self.count("lines cut")

    def ship(self, site: Site, number: int, *, surely: bool = False) -> None:
        region, copy = self.regions[number], site.copies[number]
        begin = len(copy.log.groups)
        if copy.promise < region.promise:
            begin = min(begin, self.chance.randint(0, begin), region.lineage.last.behind)
        begin = max(begin, region.log.dropped)
        if not surely and self.chance.random() < 0.2:
            begin = max(0, begin - self.chance.randrange(3))
        count = 1_000_000 if surely else self.chance.randint(0, 4)
        shipment = Shipment(region.promise, region.lineage, begin, tuple(region.log.groups[begin : begin + count]))
        if surely:
            site.take(number, shipment)
        elif self.now >= self.cut_until.get(frozenset((number, site.region.number)), 0.0):
            self.send(lambda: site.take(number, shipment))

    def send(self, call: Callable[[], None]) -> None:
        """Send over a line that loses, doubles and delays."""
        fate = self.chance.random()
        if fate < self.fault_rate / 3:
            self.count("lost")
            return
        self.at(self.chance.choice((0.005, 0.02, 0.5 if fate < self.fault_rate else 0.02)), call)
        if self.fault_rate / 3 <= fate < self.fault_rate * 2 / 3:
            self.count("doubled")
            self.at(self.chance.uniform(0.0, 0.5), call)

    def ask(self, mirror: Mirror) -> None:
        """Send a mirror's vector to a site or to the other mirror.

        A site answers with its state, or straight from a log.
        """
        chance, asked = self.chance, mirror.state.vector
        site = chance.choice(list(self.sites.values()))
        kind = chance.random()
        if kind < 0.3:
            number = chance.choice(list(site.logs))
            # Sums need a log from its beginning, or the rows before the records.
            after = Seq(0) if self.merge.accumulates else behind(asked, RegionId(number))
            found = site.table(lambda: None).state_of(RegionId(number), after)
        elif kind < 0.6:
            other = chance.choice(self.mirrors)
            found = other.state
        else:
            found = site.state() or RegionState(self.rows([]))
        missing = self.plain.missing(found, asked)
        answer = self.plain.encode(RegionState(missing.rows, missing.vector))
        self.count("asked")
        self.send(lambda: mirror.take(asked, answer))

    def reconcile(self, site: Site) -> None:
        if not site.is_refused:
            site.reconcile()

    def is_heard(self, log: ModelLog, heard: Seq, state: RegionState) -> bool:
        """Return whether retention may use what was merged of a log."""
        reader: Any = ModelReader(log, lambda: None)
        return still_says(reader, heard, state.ends.get(RegionId(log.region)))

    def retain(self) -> None:
        for number, region in self.regions.items():
            copies = [site.copies[number] for site in self.sites.values() if number in site.copies]
            taken = [len(copy.log.groups) if copy.promise == region.promise else 0 for copy in copies]
            self.sites[number].let_go(number, min([region.backed, *taken]))
            for site in self.sites.values():
                if site is not self.sites[number]:
                    site.let_go(number, region.log.dropped)

    # --- the whole world ----------------------------------------------------------------------------------------------

    def play(self) -> None:
        for region in self.regions.values():
            self.every(0.3, region.write)
            self.every(3.0, region.restart)
            if self.loses_tails:
                self.every(2.5, region.lose)
        self.every(2.0, self.jump)
        self.every(2.0, self.partition)
        for site in self.sites.values():
            for number in site.copies:
                self.every(0.15, partial(self.ship, site, number))
            self.every(1.5, partial(self.reconcile, site), quick=False)
        for mirror in self.mirrors:
            self.every(0.4, partial(self.ask, mirror), quick=False)
            self.every(1.0, mirror.keep)
            self.every(1.5, mirror.kill)
        if self.drops:
            self.every(0.5, self.retain)
        while self._queue:
            self._next()
        self.rest()

    def rest(self) -> None:
        """Deliver everything, and let every site and mirror merge once more."""
        for region in self.regions.values():
            region.write()
        for site in self.sites.values():
            for number in site.copies:
                for _ in range(2):  # the first round may only cut
                    self.ship(site, number, surely=True)
                if site.logs[number].groups != self.regions[number].log.groups:
                    raise Violation(f"at rest site {site.region.number} has another log of region {number}")
        said = [one for region in self.regions.values() for one in region.log.said()]
        expected = plainly_merged(said, merge=self.merge)
        for site in self.sites.values():
            if not site.is_refused:
                site.reconcile(is_still=True)
        ends = {f"site {s.region.number}": s.state() for s in self.sites.values() if not s.is_refused}
        for which, mirror in enumerate(self.mirrors):
            for found in list(ends.values())[: len(self.sites)]:
                assert found is not None
                missing = self.plain.missing(found, mirror.state.vector)
                mirror.take(mirror.state.vector, self.plain.encode(RegionState(missing.rows, missing.vector)))
            ends[f"mirror {which}"] = mirror.state
        wanted = self.folded(said)
        for name, state in ends.items():
            if state is None:
                continue
            if self.bytes_of(state.rows) != self.bytes_of(wanted):
                raise Violation(f"at rest {name} has other rows: {self.difference(state, said)}")
        seen = self.plain.value(RegionState(wanted)).to_pylist()
        if json.dumps(seen, default=repr) != json.dumps(expected, default=repr):
            raise Violation(f"the rows make {seen}, and the plain kinds {expected}")

    def rows(self, said: list[Said]) -> pa.Table:
        return region_rows(said, self.merge)

    def folded(self, said: list[Said]) -> pa.Table:
        return folded(said, self.merge)

    def bytes_of(self, rows: pa.Table) -> bytes:
        return self.plain.encode(RegionState(rows))

    def difference(self, state: RegionState, said: list[Said]) -> str:
        ours, wanted = (
            [(row["__region"], row["__seq"], row["id"], row["part"]) for row in rows.to_pylist()]
            for rows in (state.rows, self.folded(said))
        )
        return (
            f"{sorted(set(ours) - set(wanted), key=repr)} too many, {sorted(set(wanted) - set(ours), key=repr)} missing"
        )


if __name__ == "__main__":
    sys.exit(main(World, sys.argv[1:]))
