"""A sequencer's store in memory, which loses calls and replies as a real one does, and the suite for every store."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeVar

import pytest

from millstream.errors import CatalogError, MillstreamError
from millstream.model.ids import Epoch, WriterId
from millstream.model.positions import SEQ_MAX, Seq, SeqRange
from millstream.ports import Announcements, Clock, SequenceStore
from millstream.protocol.sequencer import Announcement, Drawn, Ledger, LedgerView, Registration, WriterEntry
from millstream.testing.clock import ManualClock

_NO_EPOCH: Final = Epoch(0)
_BLOCK: Final = 20
"""Numbers reserved at a time: few, so that draws often pass what is reserved."""
_Told = TypeVar("_Told")
MakeStore: TypeAlias = Callable[[float], SequenceStore]


class MemorySequenceStore:
    """`ports.SequenceStore` that outlives writers, not the process: the ledger itself, behind a lock.

    Args:
        clock: the store's.
        lease_s: how long a writer lives without a sign.

    Concurrency: any number of threads.
    """

    def __init__(self, clock: Clock | None = None, *, lease_s: float = 5.0) -> None:
        self.ledger = Ledger()
        self._unflushed = [self.ledger]
        """The ledgers that a crash may leave: the newest that is flushed, and those after it."""
        self._ceiling = Seq(0)
        self._clock = ManualClock() if clock is None else clock
        self._lease_us = round(lease_s * 1e6)
        self._lock = threading.Lock()
        self.fails: Callable[[str], str | None] = lambda _step: None
        """Called before each step with its name: `before` loses the call, `after` its reply, None neither."""

    def register(self, name: str, location: str, *, above: Epoch = _NO_EPOCH) -> Registration:
        """Register, as the port requires."""
        timed = {"now_us": self._now_us(), "lease_us": self._lease_us}
        return self._step(Registration, "register", name, location, above=above, **timed)

    def take_over(self, writer: WriterId) -> Registration:
        """Take over, as the port requires."""
        return self._step(Registration, "take_over", writer, now_us=self._now_us(), lease_us=self._lease_us)

    def recovered(self, writer: WriterId, epoch: Epoch) -> Drawn:
        """Note the recovery, as the port requires."""
        return self._step(Drawn, "recovered", writer, epoch, now_us=self._now_us(), lease_us=self._lease_us)

    def draw(self, writer: WriterId, epoch: Epoch, count: int, *, position: Seq) -> Drawn:
        """Draw numbers, as the port requires."""
        timed = {"now_us": self._now_us(), "lease_us": self._lease_us}
        return self._step(Drawn, "draw", writer, epoch, count, position=position, **timed)

    def crash(self, chance: random.Random) -> None:
        """Crash as PostgreSQL does: the newest draws may be forgotten, and numbers go on above the reserved ones."""
        with self._lock:
            kept = chance.choice(self._unflushed)
            self.ledger = replace(kept, newest=max(kept.newest, self._ceiling))
            self._unflushed = [self.ledger]

    def last(self, writer: WriterId, epoch: Epoch) -> SeqRange:
        """Return the last range, as the port requires."""
        return self._step(SeqRange, "last", writer, epoch)

    def report(self, writer: WriterId, epoch: Epoch, *, position: Seq, is_shown: bool = True) -> tuple[LedgerView, Seq]:
        """Report the position, as the port requires."""
        timed = {"now_us": self._now_us(), "lease_us": self._lease_us}
        view = self._step(LedgerView, "report", writer, epoch, position=position, is_shown=is_shown, **timed)
        return view, self.ledger.elsewhere(self.ledger.entry(writer))

    def settle(self, writer: WriterId, epoch: Epoch) -> None:
        """Settle, as the port requires."""
        self._step(type(None), "settle", writer, epoch)

    def forget(self, writer: WriterId) -> None:
        """Forget the writer, as the port requires."""
        self._step(type(None), "forget", writer, now_us=self._now_us())

    def view(self) -> LedgerView:
        """Return the view, as the port requires."""
        with self._lock:
            return self.ledger.view(self._now_us())

    def writers(self) -> Sequence[WriterEntry]:
        """Return the writers, as the port requires."""
        return self.ledger.writers

    def _now_us(self) -> int:
        return self._clock.now_ns() // 1000

    def _step(self, kind: type[_Told], step: str, *arguments: Any, **named: Any) -> _Told:
        with self._lock:
            fails = self.fails(step)
            if fails == "before":
                raise CatalogError(f"{step}: the connection was lost before it came to the store", code="catalog_busy")
            done = getattr(self.ledger, step)(*arguments, **named)
            if isinstance(done, tuple):
                self.ledger, told = done
            else:
                self.ledger, told = (done, None) if isinstance(done, Ledger) else (self.ledger, done)
            self._flush_unless(step == "draw", told)
            if fails == "after":
                raise CatalogError(f"{step}: the reply was lost", code="catalog_busy")
            assert isinstance(told, kind)
            return told

    def _flush_unless(self, is_draw: bool, told: object) -> None:
        before = self._unflushed[-1]
        self._unflushed.append(self.ledger)
        if is_draw:
            assert isinstance(told, Drawn)
            joined = any(
                now.phase is not then.phase for now, then in zip(self.ledger.writers, before.writers, strict=True)
            )
            if told.given.last <= self._ceiling and not joined and told.elsewhere == SEQ_MAX:
                return
            if told.given.last > self._ceiling:
                self._ceiling = Seq(told.given.last + _BLOCK)
        self._unflushed = [self.ledger]


class UnreliableAnnouncements:
    """`ports.Announcements` that loses, duplicates, reorders and delays received announcements."""

    def __init__(self, wrapped: Announcements, chance: random.Random, *, lost: float = 0.3) -> None:
        self._wrapped = wrapped
        self._chance = chance
        self._lost = lost
        self._under_way: list[Announcement] = []

    def tell(self, told: Announcement) -> None:
        """Send, as the port requires."""
        self._wrapped.tell(told)

    def hear(self, timeout_s: float) -> Sequence[Announcement]:
        """Receive, as the port requires; some arrive with a later call, or with several."""
        for told in self._wrapped.hear(timeout_s):
            if self._chance.random() >= self._lost:
                self._under_way += [told] * self._chance.choice([1, 1, 2, 3])
        self._chance.shuffle(self._under_way)
        count = self._chance.randrange(len(self._under_way) + 1)
        heard, self._under_way = self._under_way[:count], self._under_way[count:]
        return heard

    def close(self) -> None:
        """Close, as the port requires."""
        self._wrapped.close()


class SequenceStoreConformance:
    """The requirements for every `ports.SequenceStore`: it answers every call as the ledger does.

    A subclass provides a fixture `make`: a function of `lease_s` that returns a store of a new stream.
    """

    @pytest.mark.parametrize("lease_s", [0.0, 1e6])
    @pytest.mark.parametrize("seed", range(6))
    def test_it_answers_as_the_ledger_does(self, make: MakeStore, lease_s: float, seed: int) -> None:
        """Random steps, valid and invalid: both give the same answers, and end with the same writers."""
        chance = random.Random(seed)
        asked, model = make(lease_s), MemorySequenceStore(lease_s=lease_s)
        epochs = [Epoch(0)]
        for _ in range(80):
            steps = ["register", "take_over", "recovered", "draw", "last", "report", "settle", "forget"]
            step = chance.choices(steps, [3, 1, 5, 12, 3, 6, 1, 1])[0]
            writer = WriterId(chance.randrange(1, 4))
            epoch = chance.choice(epochs[-4:])
            newest = model.ledger.newest
            arguments: tuple[Any, ...] = {
                "register": (f"w{chance.randrange(3)}", chance.choice(["here", "here", "there"])),
                "take_over": (writer,),
                "forget": (writer,),
                "draw": (writer, epoch, chance.choice([1, 3, 100, 0])),
            }.get(step, (writer, epoch))
            named: dict[str, Any] = (
                {"position": Seq(chance.randrange(newest + 1))} if step in {"draw", "report"} else {}
            )
            if step == "report":
                named["is_shown"] = chance.random() < 0.7
            expected, found = (_outcome(store, step, arguments, named) for store in (model, asked))
            if step == "report" and not isinstance(expected, str):
                expected, found = (_plain(view, elsewhere) for view, elsewhere in (expected, found))
            if isinstance(expected, Registration) and isinstance(found, Registration):
                epochs.append(expected.epoch)
                expected, found = (replace(told, waits_us=min(1, told.waits_us)) for told in (expected, found))
            assert found == expected, (step, arguments, named)
        assert [_timeless(entry) for entry in asked.writers()] == [_timeless(entry) for entry in model.writers()]
        assert asked.view().persisted_upto <= model.view().persisted_upto

    def test_numbers_are_given_once_by_many_at_the_same_time(self, make: MakeStore) -> None:
        """Eight writers draw as fast as they can: no number is given twice, and none is left out."""
        store = make(1e6)
        given: list[SeqRange] = []

        def draw(name: str) -> None:
            mine = store.register(name, "here")
            position = store.recovered(mine.writer, mine.epoch).given.last
            for count in range(1, 30):
                got = store.draw(mine.writer, mine.epoch, count, position=position).given
                given.append(got)
                position = got.last

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(draw, [f"w{n}" for n in range(8)]))
        ends = sorted((one.first, one.last) for one in given)
        assert len(ends) == 8 * 29
        assert [first for first, _ in ends] == [1, *(last + 1 for _, last in ends[:-1])]


def _outcome(store: SequenceStore, step: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    try:
        return getattr(store, step)(*arguments, **named)
    except MillstreamError as error:
        return error.code


def _plain(view: LedgerView, elsewhere: Seq) -> tuple[object, ...]:
    return view.newest, dict(view.positions), elsewhere


def _timeless(entry: WriterEntry) -> WriterEntry:
    return replace(entry, lease_until_us=0)
