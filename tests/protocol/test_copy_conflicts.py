"""Replay of the log, at every prefix: no key ever goes back to an older version of its row.

At the end all rows are as at the source. The source is a small simulated PostgreSQL. A transaction
holds the rows that it touches until snapshots see it. Its commit record comes before that, and anything
may happen in between.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.seeds import examples

from millstream.errors import InvalidValue
from millstream.protocol.copy_conflicts import CopyTracker, Key, Snapshot, Touch, extend_xid, kept

KEYS = [f"{n:02d}" for n in range(8)]
CHUNK_ROWS = 3


@dataclass(frozen=True)
class Row:
    version: int
    toast: int | None
    """The version that last wrote the large value; None if the log never had it."""


@dataclass(frozen=True)
class Change:
    """A change of one key in the log.

    `row` is None for a deletion; `incomplete`: the large value is unchanged and unsent.
    """

    key: str
    version: int
    row: Row | None
    incomplete: bool = False


@dataclass
class Transaction:
    xid: int
    changes: list[Change] = field(default_factory=list)
    truncates: bool = False
    moved: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    lsn: int = 0


class Source:
    """Rows by key as every transaction so far left them; each snapshot sees its own part."""

    def __init__(self) -> None:
        self.wal = 1
        self.next_xid = 3
        self.latest_ended = 2
        self.running: dict[int, Transaction] = {}
        self.waiting: dict[int, Transaction] = {}
        """Transactions that are committed in the WAL, and aren't visible yet."""
        self.rows: dict[str, list[tuple[int, Row | None]]] = {}
        """By key, its versions: (xid, row)."""
        self.version = 0
        self.stream: list[Transaction] = []

    def held(self) -> set[str]:
        return {key for t in (*self.running.values(), *self.waiting.values()) for key in t.keys}

    def truncating(self) -> bool:
        return any(t.truncates for t in (*self.running.values(), *self.waiting.values()))

    def now(self, key: str) -> Row | None:
        versions = self.rows.get(key)
        return versions[-1][1] if versions else None

    def write(self, transaction: Transaction, key: str, *, keep_toast: bool) -> None:
        self.version += 1
        old = self.now(key)
        toast = old.toast if keep_toast and old is not None else self.version
        row = Row(self.version, toast)
        self.put(transaction, Change(key, self.version, row, incomplete=keep_toast and old is not None))

    def put(self, transaction: Transaction, change: Change) -> None:
        transaction.keys.add(change.key)
        transaction.changes.append(change)
        self.rows.setdefault(change.key, []).append((transaction.xid, change.row))

    def snapshot(self) -> Snapshot:
        unfinished = [*self.running, *self.waiting]
        xmax = self.latest_ended + 1
        return Snapshot(min([*unfinished, xmax]), xmax, frozenset(x for x in unfinished if x < xmax))

    def read(self) -> dict[str, Row]:
        """Return the rows that a snapshot taken now sees, by what is known of every transaction."""
        unfinished = {*self.running, *self.waiting}
        found: dict[str, Row] = {}
        for key, versions in self.rows.items():
            seen = [row for xid, row in versions if xid not in unfinished]
            if seen and seen[-1] is not None:
                found[key] = seen[-1]
        return dict(sorted(found.items()))


class Log:
    """The state that a replay of the log shows; it refuses to go back."""

    def __init__(self) -> None:
        self.state: dict[str, Row | None] = {}
        self.floor: dict[str, int] = {}

    def put(self, change: Change) -> None:
        assert change.version > self.floor.get(change.key, 0), "the stream itself goes forward"
        row = change.row
        if row is not None and change.incomplete:
            base = self.state.get(change.key)
            row = Row(row.version, None if base is None else base.toast)
        self.state[change.key], self.floor[change.key] = row, change.version

    def move(self, old: str, change: Change) -> None:
        """Change a key: the new row takes the large value from the old row."""
        base = self.state.get(old)
        assert change.row is not None
        row = Row(change.row.version, None if base is None else base.toast)
        self.state[change.key], self.floor[change.key] = row, change.version

    def copy(self, key: str, row: Row) -> None:
        assert row.version >= self.floor.get(key, 0), f"{key} goes back from {self.floor[key]} to {row}"
        self.state[key], self.floor[key] = row, row.version

    def truncate(self) -> None:
        self.state.clear()


@dataclass
class Chunk:
    ticket: int
    lsn: int
    rows: dict[str, Row]
    after: str
    upto: str
    asked: tuple[Key, ...] = ()


class Copier:
    """The coordinator's part of a copy, as `capture.copying.table_copies` plays it, with one range."""

    def __init__(self, source: Source, log: Log) -> None:
        self.source, self.log = source, log
        self.tracker = CopyTracker()
        self.bound = 0
        self.read_after = ""
        self.all_read = False
        self.open: list[Chunk] = []
        self.asked: list[tuple[Key, ...]] = []
        self.passed = 0

    def log_transaction(self, transaction: Transaction) -> None:
        incomplete = {(c.key,) for c in transaction.changes if c.incomplete} | {(k,) for k in transaction.moved}
        touch = Touch(
            transaction.xid & 0xFFFFFFFF,
            frozenset() if transaction.truncates else frozenset((key,) for key in transaction.keys),
            frozenset(incomplete),
            everything=transaction.truncates,
        )
        self.tracker.touch(touch)
        if transaction.moved:
            self.asked.append(tuple((key,) for key in sorted(transaction.moved)))
        self.passed = transaction.lsn

    def may_read(self) -> bool:
        return self.source.snapshot().xmin >= self.bound and not self.source.truncating()

    def read(self) -> None:
        asked = self.asked.pop() if self.asked else ()
        if not asked and (self.all_read or len([c for c in self.open if not c.asked]) >= 2):
            return
        ticket = self.tracker.begin()
        snapshot = self.source.snapshot()
        found = self.source.read()
        self.tracker.take(ticket, snapshot)
        if asked:
            rows = {key: row for key, row in found.items() if (key,) in asked}
            self.open.append(Chunk(ticket, self.source.wal, rows, "", "", asked))
            return
        rest = [key for key in found if key > self.read_after]
        taken = rest[:CHUNK_ROWS]
        self.all_read = len(rest) <= CHUNK_ROWS
        upto = "~" if self.all_read else taken[-1]
        rows = {key: found[key] for key in taken}
        self.open.append(Chunk(ticket, self.source.wal, rows, self.read_after, upto))
        self.read_after = upto

    def enter(self) -> None:
        for chunk in list(self.open):
            if chunk not in self.open or chunk.lsn > self.passed:
                continue
            verdict = self.tracker.judge(chunk.ticket, chunk.asked)
            if verdict.again:
                self.go_back(chunk)
                continue
            self.tracker.end(chunk.ticket)
            self.open.remove(chunk)
            mask, dropped = kept([(key,) for key in chunk.rows], verdict)
            for (key, row), enters in zip(chunk.rows.items(), mask, strict=True):
                if enters:
                    self.log.copy(key, row)
            again = verdict.reread | dropped if chunk.asked else dropped
            if again:
                self.asked.append(tuple(sorted(again)))

    def go_back(self, chunk: Chunk) -> None:
        if chunk.asked:
            self.tracker.end(chunk.ticket)
            self.open.remove(chunk)
            self.asked.append(chunk.asked)
            return
        for other in [c for c in self.open if not c.asked and c.after >= chunk.after]:
            self.tracker.end(other.ticket)
            self.open.remove(other)
        self.read_after, self.all_read = chunk.after, False

    @property
    def done(self) -> bool:
        return self.all_read and not self.open and not self.asked


class Play:
    """One random history."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.source, self.log = Source(), Log()
        self.source.next_xid = chance.choice([3, 2**32 - 5, 2**33 + 2**31 - 3])
        self.source.latest_ended = self.source.next_xid - 1
        self.copier: Copier | None = None
        self.logged = 0

    def run(self) -> None:
        for _ in range(self.chance.randrange(20)):
            self.change_something()
        for _ in range(self.chance.randrange(10)):
            self.log_next()
        # The copier remembers nothing of what was logged up to here, and the log's rows of it are
        # void.
        self.log.truncate()
        self.copier = Copier(self.source, self.log)
        # Above every id given out, as a running transaction holds a lock on its own id.
        self.copier.bound = self.source.next_xid
        self.copier.passed = self.source.stream[self.logged - 1].lsn if self.logged else 0
        for _ in range(self.chance.randrange(10, 120)):
            self.step()
        for _ in range(500):
            if self.copier.done and not self.source.running and not self.source.waiting:
                break
            self.finish_something()
        else:
            raise AssertionError("the copy never ends")
        while self.log_next():
            continue
        everything = self.source.read()
        assert {key: row for key, row in self.log.state.items() if row is not None} == everything

    def step(self) -> None:
        assert self.copier is not None
        self.chance.choice(
            [self.change_something, self.change_something, self.log_next, self.read, self.copier.enter]
        )()

    def finish_something(self) -> None:
        assert self.copier is not None
        source = self.source
        for transaction in list(source.running.values()):
            self.commit(transaction)
        for transaction in list(source.waiting.values()):
            self.show(transaction)
        while self.log_next():
            continue
        self.copier.passed = source.wal
        self.read()
        self.copier.enter()

    def read(self) -> None:
        assert self.copier is not None
        if self.copier.may_read():
            self.copier.read()

    def change_something(self) -> None:
        source, chance = self.source, self.chance
        what = chance.randrange(10)
        if what == 0 and source.waiting:
            self.show(chance.choice(list(source.waiting.values())))
        elif what <= 2 and source.running:
            self.commit(chance.choice(list(source.running.values())))
        elif what <= 4 and len(source.running) < 4:
            source.running[source.next_xid] = Transaction(source.next_xid)
            source.next_xid += 1
        elif source.running and not source.truncating():
            self.write(chance.choice(list(source.running.values())))

    def write(self, transaction: Transaction) -> None:
        source, chance = self.source, self.chance
        free = [key for key in KEYS if key not in source.held() - transaction.keys]
        fresh = [key for key in free if key not in transaction.keys]
        if chance.randrange(6) == 0 and source.held() <= transaction.keys:
            transaction.truncates = True
            transaction.changes.clear()
            transaction.moved.clear()
            transaction.keys = set(KEYS)
            for key in KEYS:
                if source.now(key) is not None:
                    source.version += 1
                    source.rows[key].append((transaction.xid, None))
        elif len(fresh) >= 2 and chance.randrange(4) == 0:
            self.move(transaction, *chance.sample(fresh, 2))
        elif fresh:
            key = chance.choice(fresh)
            if source.now(key) is not None and chance.randrange(4) == 0:
                source.version += 1
                source.put(transaction, Change(key, source.version, None))
            else:
                source.write(transaction, key, keep_toast=bool(chance.randrange(2)))

    def move(self, transaction: Transaction, old: str, new: str) -> None:
        source = self.source
        row = source.now(old)
        if row is None or source.now(new) is not None:
            return
        source.version += 1
        source.put(transaction, Change(old, source.version, None))
        source.version += 1
        transaction.keys.add(new)
        transaction.moved.add(new)
        moved = Row(source.version, row.toast)
        transaction.changes.append(Change(new, source.version, moved))
        source.rows.setdefault(new, []).append((transaction.xid, moved))

    def commit(self, transaction: Transaction) -> None:
        """Write the commit record; no snapshot sees it yet."""
        source = self.source
        del source.running[transaction.xid]
        source.waiting[transaction.xid] = transaction
        source.wal += 1
        transaction.lsn = source.wal
        source.stream.append(transaction)

    def show(self, transaction: Transaction) -> None:
        del self.source.waiting[transaction.xid]
        self.source.latest_ended = max(self.source.latest_ended, transaction.xid)

    def log_next(self) -> bool:
        if self.logged == len(self.source.stream):
            return False
        transaction = self.source.stream[self.logged]
        self.logged += 1
        if self.copier is not None:
            self.copier.log_transaction(transaction)
        if transaction.truncates:
            self.log.truncate()
        changes = transaction.changes
        before: dict[str, Row | None] = dict(self.log.state)
        for change in changes:
            if change.key in transaction.moved and change.row is not None:
                old = changes[changes.index(change) - 1].key
                self.log.state[old] = before.get(old)
                self.log.move(old, change)
                self.log.state[old] = None
            else:
                self.log.put(change)
        return True


@settings(max_examples=examples(400))
@given(st.randoms(use_true_random=False))
def test_a_copy_beside_changes_is_exact_at_every_prefix_of_the_log(chance: random.Random) -> None:
    Play(chance).run()


@pytest.mark.parametrize("seed", range(300))
def test_a_copy_beside_changes_is_exact_in_many_histories(seed: int) -> None:
    Play(random.Random(seed)).run()


def test_a_snapshot_reads_as_postgresql_prints_it() -> None:
    snapshot = Snapshot.parse("10:20:10,14")

    assert [snapshot.sees(xid) for xid in (9, 10, 13, 14, 19, 20)] == [True, False, True, False, True, False]
    assert Snapshot.parse("7:7:").sees(6)
    with pytest.raises(InvalidValue):
        Snapshot.parse("7:7")


@given(st.integers(2**31, 2**60), st.integers(-(2**31) + 1, 2**31 - 1))
def test_an_id_of_32_bits_means_the_nearest_one(near: int, distance: int) -> None:
    assert extend_xid((near + distance) & 0xFFFFFFFF, near) == near + distance


def test_touches_that_every_later_snapshot_sees_are_forgotten() -> None:
    tracker = CopyTracker()
    first = tracker.begin()
    tracker.take(first, Snapshot(10, 10))
    tracker.touch(Touch(11, frozenset({("a",)})))
    second = tracker.begin()
    tracker.end(first)
    assert len(tracker._touches) == 1
    tracker.take(second, Snapshot(12, 12))
    tracker.end(second)
    assert len(tracker._touches) == 0


def test_what_touches_the_whole_table_unseen_has_a_chunk_read_again() -> None:
    tracker = CopyTracker()
    ticket = tracker.begin()
    tracker.take(ticket, Snapshot(10, 12, frozenset({10})))
    tracker.touch(Touch(11, frozenset(), everything=True))
    assert not tracker.judge(ticket).again
    tracker.touch(Touch(10, frozenset(), everything=True))
    assert tracker.judge(ticket).again


def test_a_key_asked_for_by_name_is_asked_for_again_where_its_row_is_not_seen() -> None:
    tracker = CopyTracker()
    ticket = tracker.begin()
    tracker.take(ticket, Snapshot(10, 10))
    tracker.touch(Touch(10, frozenset({("a",), ("b",)}), frozenset({("a",), ("b",)})))

    assert tracker.judge(ticket, [("a",), ("c",)]).reread == {("a",)}
    assert kept([("a",), ("c",)], tracker.judge(ticket)) == ([False, True], frozenset({("a",)}))


def test_what_all_snapshots_see_is_not_remembered() -> None:
    """However long the backlog is while a chunk waits for it."""
    tracker = CopyTracker()
    tracker.touch(Touch(10, frozenset({("a",)})))
    assert len(tracker._touches) == 1, "before it is known who runs, everything counts"
    tracker.settle(100)
    ticket = tracker.begin()
    tracker.take(ticket, Snapshot(xmin=150, xmax=160, running=frozenset({150, 155})))
    for xid in range(50, 200):
        tracker.touch(Touch(xid, frozenset({(str(xid),)})))
    assert len(tracker._touches) == 50
    assert tracker.judge(ticket).drop == {(str(xid),) for xid in (150, 155, *range(160, 200))}
