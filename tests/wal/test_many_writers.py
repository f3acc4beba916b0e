"""Several writers of one stream in one folder: what readers see, whatever order they write, die and come back in."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from uuid import UUID

import pytest

from millstream.errors import CatalogBusy, SequenceUnusable, ShardTaken, StaleEpoch
from millstream.model.ids import Epoch, RegionId, ShardId, StreamId
from millstream.model.operations import TableRows, WriteOps
from millstream.model.positions import Seq, StreamToken
from millstream.testing.clock import ManualClock
from millstream.testing.files import MemoryFiles
from millstream.testing.log import plain_operations, plain_rows, plain_table
from millstream.testing.sequencing import MemorySequenceStore
from millstream.wal.commit import GroupCommitter, LogOptions, WriterIdentity
from millstream.wal.inspect import stats, verify
from millstream.wal.numbers import SharedNumbers
from millstream.wal.reader import StreamReader

FOLDER = "/wal/shop"
STREAM = StreamId(UUID(int=9))
TABLE = plain_table(1)


@dataclass
class Writers:
    """Up to four writers, each with two shards of its own, in one folder and on one store."""

    files: MemoryFiles = field(default_factory=MemoryFiles)
    clock: ManualClock = field(default_factory=ManualClock)
    texts: dict[int, str] = field(default_factory=dict)
    """What each number acknowledged holds."""
    open: dict[int, GroupCommitter] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.store = MemorySequenceStore(self.clock)

    def start(self, who: int, *, shards: tuple[int, ...] | None = None, above: int = 0) -> GroupCommitter:
        registered = self.store.register(f"w{who}", "home", above=Epoch(above))
        self.open[who] = GroupCommitter.open(
            FOLDER,
            WriterIdentity(STREAM, RegionId(0), registered.writer, registered.epoch),
            [ShardId(n) for n in (shards or (2 * who, 2 * who + 1))],
            numbers=SharedNumbers(self.store, registered),
            files=self.files,
            clock=self.clock,
            options=LogOptions(segment_bytes=4096, disk_used_max=1.0),
            side_by_side=False,
        )
        return self.open[who]

    def append(self, who: int, rows: int = 2) -> None:
        """One operation over both of a writer's shards."""
        self.count += 1
        texts = [f"{self.count}.{n}" for n in range(2 * rows)]
        tables = [
            TableRows(
                TABLE, plain_rows(TABLE, [(0, n, texts[n]) for n in range(low, low + rows)]), shard=ShardId(shard)
            )
            for shard, low in ((2 * who, 0), (2 * who + 1, rows))
        ]
        ack = self.open[who].commit([WriteOps(plain_operations([self.count]), tuple(tables), {})])[0]
        for n, text in enumerate(texts):
            self.texts[ack.seqs.first + n] = text

    def kill(self, who: int) -> None:
        self.open.pop(who).abandon()

    def reader(self) -> StreamReader:
        return StreamReader(FOLDER, files=self.files)

    def read(self, after: int, upto: int) -> dict[int, str]:
        found: dict[int, str] = {}
        for records in self.reader().read_between(Seq(after), Seq(upto)):
            rows = zip(records.batch.column("__seq").to_pylist(), records.batch.column("text").to_pylist(), strict=True)
            for seq, text in rows:
                assert seq not in found
                found[seq] = text
        return found


def test_an_idle_writer_lets_readers_pass():
    writers = Writers()
    writers.start(0)
    writers.start(1)
    writers.append(0)
    assert writers.reader().persisted_upto() == 0
    writers.open[1].follow()
    assert writers.reader().persisted_upto() == 4
    assert writers.read(0, 4) == writers.texts


def test_operations_of_several_writers_stand_in_the_order_of_their_numbers():
    writers = Writers()
    for who in (0, 1, 2):
        writers.start(who)
    for who in (2, 0, 1, 1, 0, 2):
        writers.append(who)
    for log in writers.open.values():
        log.follow()
    found = writers.read(0, 24)
    assert found == writers.texts
    order = [
        seq for records in writers.reader().read_between(Seq(0), Seq(24)) for seq in records.batch["__seq"].to_pylist()
    ]
    assert order == sorted(order)
    cuts, after = [], Seq(0)
    while (cut := writers.reader().cut(after, rows_max=1)) > after:
        cuts.append(after := cut)
    assert cuts == [4, 8, 12, 16, 20, 24]
    counted = stats(FOLDER, files=writers.files)
    assert (counted.groups, counted.persisted_upto) == (6, 24)
    assert not verify(FOLDER, files=writers.files).losses


def test_a_dead_writer_holds_readers_until_its_log_is_recovered_for_it():
    writers = Writers()
    writers.start(0)
    writers.start(1)
    writers.append(0)
    writers.open[1].follow()
    writers.kill(0)
    writers.append(1)
    writers.open[1].follow()
    assert writers.reader().persisted_upto() == 4
    writers.clock.advance(10.0)
    taken = writers.store.take_over(writers.store.writers()[0].writer)
    log = GroupCommitter.open(
        FOLDER,
        WriterIdentity(STREAM, RegionId(0), taken.writer, taken.epoch),
        [],
        numbers=SharedNumbers(writers.store, taken),
        files=writers.files,
        clock=writers.clock,
        options=LogOptions(disk_used_max=1.0),
        side_by_side=False,
    )
    log.close()
    assert writers.reader().persisted_upto() == 8
    assert writers.read(0, 8) == writers.texts
    assert writers.store.view().persisted_upto == 8


def test_a_copied_folder_without_marks_has_all_that_every_writer_wrote():
    writers = Writers()
    writers.start(0)
    writers.start(1)
    for who in (0, 1, 1, 0, 0):
        writers.append(who)
    copied = StreamReader(FOLDER, files=writers.files, without_mark=True)
    assert copied.persisted_upto() == 20
    assert sum(records.batch.num_rows for records in copied.read_between(Seq(0), Seq(20))) == 20


def test_one_writers_torn_group_takes_nothing_from_another():
    writers = Writers()
    writers.start(0)
    writers.start(1)
    writers.append(0)
    writers.append(1)
    # A part of a group on one of its two shards, as a crash leaves it.
    whole = writers.files.read(_last(writers, 1))
    writers.append(0)
    writers.kill(0)
    path = _last(writers, 1)
    torn = writers.files.read(path)[: len(whole) + 40]
    file = writers.files.open_write(path)
    file.truncate(len(torn))
    file.close()
    copied = StreamReader(FOLDER, files=writers.files, without_mark=True)
    found = {s for r in copied.read_between(Seq(0), copied.persisted_upto()) for s in r.batch["__seq"].to_pylist()}
    assert found == set(range(1, 9))


def _last(writers: Writers, shard: int) -> str:
    folder = f"{FOLDER}/{shard:05d}"
    names = [name for name in writers.files.listdir(folder) if name.endswith(".wal")]
    return f"{folder}/{names[-1]}"


def test_a_shard_of_another_writer_is_refused():
    writers = Writers()
    writers.start(0)
    writers.append(0)
    with pytest.raises(ShardTaken) as caught:
        writers.start(1, shards=(1, 2))
    assert caught.value.details == {"shard": 1, "writer": 1}


def test_a_fenced_writer_takes_no_number_and_shows_nothing_more():
    writers = Writers()
    writers.start(0)
    writers.append(0)
    writers.clock.advance(10.0)
    writers.store.take_over(writers.store.writers()[0].writer)
    with pytest.raises(StaleEpoch):
        writers.append(0)
    assert isinstance(writers.open[0].failure, StaleEpoch)
    assert writers.reader().persisted_upto() == 4


def test_a_store_that_is_older_than_the_log_gives_no_number():
    writers = Writers()
    writers.start(0)
    writers.append(0)
    writers.kill(0)
    writers.store = MemorySequenceStore(writers.clock)
    with pytest.raises(StaleEpoch):
        writers.start(0)
    with pytest.raises(SequenceUnusable) as caught:
        writers.start(0, above=1)
    assert caught.value.details == {"log": 4, "store": 0}


@pytest.mark.parametrize("lost", ["before", "after"])
def test_a_draw_whose_reply_is_lost_is_asked_after_and_nothing_is_given_twice(lost: str):
    writers = Writers()
    writers.start(0)
    failures = iter(["before"] if lost == "before" else ["after"])
    writers.store.fails = lambda step: next(failures, None) if step == "draw" else None
    writers.append(0)
    writers.append(0)
    writers.open[0].follow()
    assert writers.reader().persisted_upto() == 8
    assert writers.read(0, 8) == writers.texts


def test_a_store_that_is_away_refuses_appends_and_wedges_nothing():
    writers = Writers()
    writers.start(0)
    writers.start(1)
    writers.store.fails = lambda step: "after" if step == "draw" else "before" if step == "last" else None
    with pytest.raises(CatalogBusy):
        writers.append(0)
    writers.store.fails = lambda _step: None
    writers.texts.clear()
    writers.append(0)
    for log in writers.open.values():
        log.follow()
    assert writers.reader().persisted_upto() == writers.store.view().newest
    assert writers.read(0, writers.reader().persisted_upto()) == writers.texts


def test_writers_in_another_folder_hold_linear_readers_here():
    writers = Writers()
    writers.start(0)
    elsewhere = writers.store.register("far", "another machine")
    writers.store.recovered(elsewhere.writer, elsewhere.epoch)
    given = writers.store.draw(elsewhere.writer, elsewhere.epoch, 3, position=Seq(0)).given
    writers.append(0)
    assert writers.reader().persisted_upto() == 0
    writers.store.report(elsewhere.writer, elsewhere.epoch, position=given.last)
    writers.open[0].follow()
    assert writers.reader().persisted_upto() == 3
    writers.store.settle(elsewhere.writer, elsewhere.epoch)
    writers.open[0].follow()
    assert writers.reader().persisted_upto() == 7


@pytest.mark.parametrize("seed", range(40))
def test_readers_see_every_record_once_and_in_order_whatever_happens(seed: int):
    chance = random.Random(seed)
    writers = Writers()
    seen: dict[int, str] = {}
    upto = Seq(0)
    tokens: list[tuple[Seq, Seq, dict[int, str]]] = []
    writers.store.fails = lambda _step: chance.choices(["before", "after", None], [2, 2, 30])[0]
    for _ in range(60):
        who = chance.randrange(4)
        step = chance.choices(["append", "follow", "start", "kill", "close", "read"], [10, 6, 5, 1, 1, 6])[0]
        try:
            if step == "start" and who not in writers.open:
                writers.start(who)
            elif step not in {"start", "read"} and who in writers.open:
                if step == "append":
                    writers.append(who, chance.randrange(1, 4))
                elif step == "follow":
                    writers.open[who].follow()
                elif step == "kill":
                    writers.kill(who)
                else:
                    writers.open.pop(who).close()
            elif step == "read":
                cut = writers.reader().persisted_upto()
                assert cut >= upto
                found = writers.read(upto, cut)
                assert not seen.keys() & found.keys()
                seen |= found
                tokens.append((upto, cut, found))
                upto = cut
        except CatalogBusy:
            continue
        writers.clock.advance(0.2)
    writers.store.fails = lambda _step: None
    for who in range(4):
        if who not in writers.open:
            writers.start(who)
    for _ in range(2):
        for log in writers.open.values():
            log.follow()
    cut = writers.reader().persisted_upto()
    assert cut == writers.store.view().newest
    seen |= writers.read(upto, cut)
    assert seen == writers.texts
    for after, before, found in tokens:
        assert writers.read(after, before) == found
    assert str(StreamToken.scalar(STREAM, cut)).endswith(f"s{cut}")


def test_marks_of_several_writers_say_so_to_readers_that_know_of_one_only():
    writers = Writers()
    log = writers.start(0)
    assert _versions(writers) == {2}
    writers.append(0)
    log.close()
    assert _versions(writers) == {2}


def _versions(writers: Writers) -> set[int]:
    """Of the slots that were written."""
    data = writers.files.read(f"{FOLDER}/00000/durable.mark")
    slots = [data[start : start + 16] for start in (0, 512, 1024)]
    return {int.from_bytes(slot[12:14], "little") for slot in slots if any(slot)}
