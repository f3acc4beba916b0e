"""Several writers of one stream in one folder: what readers see, in any order of writes, deaths and returns."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from uuid import UUID

import pytest
from tests.catalog.sequencing import MemorySequenceStore
from tests.seeds import Seeds
from tests.wal.plain_operations import plain_operations, plain_rows, plain_table

from millstream.errors import (
    AppendOutcomeUnknown,
    CatalogError,
    LogError,
    SequencingError,
    ShardLocked,
    StaleEpoch,
    TokenFromFuture,
    WriterClosed,
)
from millstream.model.ids import Epoch, RegionId, ShardId, SourceId, StreamId, WriterId
from millstream.model.operations import TableRows, WriteOps
from millstream.model.positions import Lsn, Seq, SeqRange, StreamToken
from millstream.model.schema import TableSchema
from millstream.protocol.sequencer import Drawn
from millstream.testing.clock import ManualClock
from millstream.testing.errors import coded
from millstream.testing.files import Crash, MemoryFiles, keep_any
from millstream.wal.layout import shard_folder
from millstream.wal.mending.inspect import stats, verify
from millstream.wal.reader import StreamReader
from millstream.wal.shard_locks import lock_shards
from millstream.wal.writing.group_commit import GroupCommitter
from millstream.wal.writing.number_sources import SharedNumbers
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.own_shards import WriterIdentity

FOLDER = "/wal/shop"
STREAM = StreamId(UUID(int=9))
TABLE = plain_table(1)


@dataclass
class Writers:
    """Up to four writers, each with two shards of its own, in one folder and on one store."""

    files: MemoryFiles = field(default_factory=MemoryFiles)
    clock: ManualClock = field(default_factory=ManualClock)
    texts: dict[int, str] = field(default_factory=dict)
    """The text under each acknowledged number."""
    open: dict[int, GroupCommitter] = field(default_factory=dict)
    attempted: set[str] = field(default_factory=set)
    count: int = 0
    pause: Callable[[int], None] = lambda _who: None
    """Called while a writer stands still: before it writes a group, and again between its fsync and its answer."""

    def __post_init__(self) -> None:
        self.store = MemorySequenceStore(self.clock)

    def start(self, who: int, *, shards: tuple[int, ...] | None = None, above: int = 0) -> GroupCommitter:
        registered = self.store.register(f"w{who}", "home", above=Epoch(above))
        numbers = SharedNumbers(self.store, registered, self.clock)
        allocate, confirm = numbers.allocate, numbers.confirm

        def allocate_and_pause(count: int) -> SeqRange:
            given = allocate(count)
            self.pause(who)
            return given

        def pause_and_confirm() -> None:
            self.pause(who)
            confirm()

        numbers.allocate = allocate_and_pause  # type: ignore[method-assign]
        numbers.confirm = pause_and_confirm  # type: ignore[method-assign]
        self.open[who] = GroupCommitter.open(
            FOLDER,
            WriterIdentity(STREAM, RegionId(0), registered.writer, registered.epoch),
            [ShardId(n) for n in (shards or (2 * who, 2 * who + 1))],
            numbers=numbers,
            files=self.files,
            clock=self.clock,
            options=LogOptions(segment_bytes=4096, disk_used_max=1.0),
            side_by_side=False,
        )
        return self.open[who]

    def append(self, who: int, rows: int = 2, *, log: GroupCommitter | None = None) -> None:
        """Commit one operation over both of a writer's shards, by its newest incarnation or an older one."""
        self.count += 1
        texts = [f"{self.count}.{n}" for n in range(2 * rows)]
        tables = [
            TableRows(
                TABLE, plain_rows(TABLE, [(0, n, texts[n]) for n in range(low, low + rows)]), shard=ShardId(shard)
            )
            for shard, low in ((2 * who, 0), (2 * who + 1, rows))
        ]
        self.attempted |= set(texts)
        ack = (log or self.open[who]).commit([WriteOps(plain_operations([self.count]), tuple(tables), {})])[0]
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
    # An append that begins after another one's answer has greater numbers, whichever writers take the two.
    assert order == sorted(order) == list(writers.texts)
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
        numbers=SharedNumbers(writers.store, taken, writers.clock),
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


def test_a_vector_token_waits_for_nobody():
    writers = Writers()
    for who in (0, 1):
        writers.start(who)
    writers.append(0)
    begin = writers.reader().vector_token()
    writers.kill(0)
    for _ in range(2):
        writers.append(1)
    reader = writers.reader()
    token = reader.vector_token()
    assert (reader.persisted_upto(), str(token)) == (4, "00000000.m4~2.12")
    assert StreamToken.parse(str(token)) == token

    def between(after: StreamToken, upto: StreamToken) -> list[int]:
        return [s for r in writers.reader().read_tokens(after, upto) for s in r.batch["__seq"].to_pylist()]

    zero = StreamToken.scalar(STREAM, Seq(0))
    assert between(zero, begin) == [1, 2, 3, 4]
    assert between(begin, token) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert between(token, token) == []
    writers.start(0)
    writers.append(0)
    writers.open[1].follow()
    later = writers.reader().vector_token()
    assert begin <= token <= later
    assert between(token, later) == [13, 14, 15, 16]
    with pytest.raises(TokenFromFuture):
        between(token, StreamToken("00000000", later.minimum, {WriterId(2): Seq(later.of(WriterId(2)) + 1)}))


def test_a_vector_token_that_parts_operations_stands_for_those_in_front_of_it():
    writers = Writers()
    for who in (0, 1):
        writers.start(who)
    for who in (0, 1, 0, 1):  # 1-4, 5-8, 9-12, 13-16
        writers.append(who)
    for log in writers.open.values():
        log.follow()
    reader = writers.reader()
    short = str(reader.token()).partition(".")[0]
    for given, stands_for in (
        ("m6~1.10", "m4~1.8"),
        ("m4~1.12~2.15", "m4~1.12~2.12"),
        ("s9", "m8~2.9"),  # 9 is the first writer's: the second stands where it stood
        ("s16", "s16"),
        ("m1~2.16", "m0~2.16"),
    ):
        found = reader.whole_token(StreamToken.parse(f"{short}.{given}"))
        assert str(found) == f"{short}.{stands_for}", given


def test_a_shard_of_another_writer_is_refused():
    writers = Writers()
    writers.start(0)
    writers.append(0)
    with pytest.raises(LogError, check=coded("shard_taken")) as caught:
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


def test_a_writer_that_hangs_loses_its_shards_once_its_lease_has_run_out():
    writers = Writers()
    hung = writers.start(0)
    writers.append(0)
    with pytest.raises(ShardLocked):
        writers.start(0)
    writers.clock.advance(10.0)
    writers.start(0)
    writers.append(0)
    names = {path: writers.files.listdir(path) for path in (FOLDER, f"{FOLDER}/00000", f"{FOLDER}/00001")}
    with pytest.raises(StaleEpoch):
        writers.append(0, log=hung)
    hung.close()
    assert names == {path: writers.files.listdir(path) for path in names}
    writers.append(0)
    assert writers.read(0, writers.reader().persisted_upto()) == writers.texts
    assert len(writers.texts) == 12


@pytest.mark.parametrize(("stands", "kept"), [(1, 4), (2, 8)])
def test_a_writer_that_wakes_in_the_midst_of_a_group_answers_nobody(stands: int, kept: int):
    """The writer sleeps before the group is written, or once it is on the disk, where recovery has found it."""
    writers = Writers()
    hung = writers.start(0)
    writers.append(0)
    stops = 0

    def taken_over(who: int) -> None:
        nonlocal stops
        stops += 1
        if stops == stands:
            writers.clock.advance(10.0)
            writers.start(who)

    writers.pause = taken_over
    with pytest.raises(AppendOutcomeUnknown):
        writers.append(0, log=hung)
    writers.open[0].follow()
    assert writers.read(0, writers.reader().persisted_upto()).keys() == set(range(1, kept + 1))
    writers.append(0)
    upto = writers.reader().persisted_upto()
    assert writers.texts.items() <= writers.read(0, upto).items()


def test_a_writer_whose_lease_ran_out_while_nobody_took_over_answers():
    writers = Writers()
    writers.start(0)
    writers.pause = lambda _who: writers.clock.advance(10.0)
    writers.append(0)
    assert writers.read(0, writers.reader().persisted_upto()) == writers.texts


def test_a_writer_that_wakes_when_a_segment_is_due_begins_none():
    writers = Writers()
    hung = writers.start(0)
    for _ in range(12):
        writers.append(0)
    writers.clock.advance(10.0)
    writers.start(0)
    names = {path: writers.files.listdir(path) for path in (f"{FOLDER}/00000", f"{FOLDER}/00001")}
    hung.roll()
    assert isinstance(hung.failure, StaleEpoch)
    assert names == {path: writers.files.listdir(path) for path in names}


def test_while_a_writer_hangs_with_the_folder_in_its_hands_others_say_so():
    writers = Writers(clock=ManualClock(sleeping_advances=True))
    writers.start(0)
    lock = writers.files.open_write(f"{FOLDER}/.lock")
    assert lock.lock()
    with pytest.raises(ShardLocked, match=r"\.lock"):
        writers.start(1)
    lock.close()
    writers.start(1)


def forgotten_at_the_end_of_its_third_group(*, seals: bool = False) -> tuple[Writers, dict[int, str]]:
    """Return two writers, and what readers are to see for ever.

    Writer 2 has a fourth group that it told no other process of.
    """
    writers = Writers()
    writers.start(0)
    writers.start(1)
    for _ in range(3):
        writers.append(1)
    writers.open[1].follow()
    kept = dict(writers.texts)
    writers.append(1)
    if seals:
        writers.clock.advance(3600.0 * 2)
        writers.open[1].roll()
    known = len(writers.texts)
    writers.append(0)
    kept |= dict(list(writers.texts.items())[known:])
    writers.kill(1)
    writers.clock.advance(60.0)
    writers.store.forget(WriterId(2))
    assert len(writers.texts) == len(kept) + 4
    return writers, kept


def all_there_is(writers: Writers) -> dict[int, str]:
    for log in writers.open.values():
        log.follow()
    return writers.read(0, writers.reader().persisted_upto())


@pytest.mark.parametrize("seals", [False, True])
def test_what_a_forgotten_writer_left_is_set_aside_when_it_comes_back(seals: bool):
    writers, kept = forgotten_at_the_end_of_its_third_group(seals=seals)
    writers.start(1)
    assert all_there_is(writers) == kept
    folders = [shard_folder(FOLDER, ShardId(shard)) for shard in (2, 3)]
    aside = [[name for name in writers.files.listdir(folder) if name.endswith(".torn")] for folder in folders]
    assert [len(names) for names in aside] == [1, 1]
    assert verify(FOLDER, files=writers.files).is_whole
    known = len(writers.texts)
    writers.append(1)
    kept |= dict(list(writers.texts.items())[known:])
    writers.kill(1)
    writers.start(1)
    assert all_there_is(writers) == kept


@pytest.mark.long
def test_a_crash_while_a_forgotten_writers_records_are_set_aside_changes_nothing_of_it():
    for at in range(1, 200):
        writers, kept = forgotten_at_the_end_of_its_third_group()
        writers.files.plan.operations, writers.files.plan.crash_at = 0, at
        try:
            writers.start(1)
            break
        except Crash:
            writers.files = writers.files.crash(keep_any(at))
        writers.start(0)
        writers.start(1)
        assert all_there_is(writers) == kept
        assert verify(FOLDER, files=writers.files).is_whole
    else:
        raise AssertionError("a start takes more operations than were tried")


def test_a_forgotten_writer_whose_log_is_damaged_is_told_to_mend_it_first():
    writers, _ = forgotten_at_the_end_of_its_third_group(seals=True)
    folder = shard_folder(FOLDER, ShardId(2))
    first = min(name for name in writers.files.listdir(folder) if name.endswith(".wal"))
    writers.files.damage(f"{folder}/{first}", 4096 + 200, b"????")
    with pytest.raises(LogError, check=coded("loss_not_accepted"), match="forgotten"):
        writers.start(1)
    writers.append(0)  # stops no other writer


def test_setting_a_forgotten_writers_records_aside_is_done_once_however_often_its_start_fails():
    writers, kept = forgotten_at_the_end_of_its_third_group()
    recovered = writers.store.recovered
    writers.store.recovered = _fails  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(CatalogError, check=coded("catalog_busy")):
            writers.start(1)
        writers.clock.advance(10.0)
    writers.store.recovered = recovered  # type: ignore[method-assign]
    writers.start(1)
    assert all_there_is(writers) == kept
    aside = [name for name in writers.files.listdir(shard_folder(FOLDER, ShardId(2))) if name.endswith(".torn")]
    assert len(aside) == 1


def _fails(*_: object) -> Drawn:
    raise CatalogError("the catalog is away for a moment", code="catalog_busy")


@pytest.mark.parametrize("fresh", [False, True])
def test_a_source_is_asked_again_for_what_was_set_aside(fresh: bool):
    """The last group may also have brought a schema, whose frame names that group."""
    source = SourceId(1)

    def capture(lsn: int, table: TableSchema) -> None:
        writers.count += 1
        rows = plain_rows(table, [(0, 0, f"{writers.count}")])
        tables = tuple(TableRows(table, rows, shard=ShardId(shard)) for shard in (2, 3))
        writers.open[1].commit([WriteOps(plain_operations([writers.count]), tables, {source: Lsn(lsn)})])

    writers = Writers()
    writers.start(0)
    writers.start(1)
    capture(100, TABLE)
    writers.open[1].follow()
    capture(200, plain_table(2) if fresh else TABLE)
    writers.kill(1)
    writers.clock.advance(60.0)
    writers.store.forget(WriterId(2))
    assert writers.start(1).reached == {source: 100}


def test_a_store_whose_clock_steps_makes_nobody_acknowledge_what_was_taken_over():
    writers = Writers()
    theirs = ManualClock()
    writers.store = MemorySequenceStore(theirs)
    hung = writers.start(0)
    writers.append(0)
    pauses = iter([True])

    def steps(_: int) -> None:
        if next(pauses, False):
            theirs.advance(10.0)
            writers.start(0)

    writers.pause = steps
    with pytest.raises(AppendOutcomeUnknown, match="has taken its shards"):
        writers.append(0, log=hung)
    writers.open[0].follow()
    assert writers.read(0, writers.reader().persisted_upto()).items() >= writers.texts.items()


def test_who_stopped_holds_nobody_up_by_what_it_had_seen_of_other_folders():
    writers = Writers()
    writers.start(0)
    writers.start(1)
    far = writers.store.register("far", "another machine")
    writers.store.recovered(far.writer, far.epoch)
    given = writers.store.draw(far.writer, far.epoch, 3, position=Seq(0)).given
    for log in writers.open.values():
        log.follow()
    writers.open.pop(1).close()
    writers.append(0)
    writers.store.report(far.writer, far.epoch, position=given.last)
    writers.store.settle(far.writer, far.epoch)
    writers.open[0].follow()
    assert writers.reader().persisted_upto() == writers.store.view().persisted_upto == 7
    writers.open.pop(0).close()
    assert writers.reader().persisted_upto() == 7


def test_a_store_that_is_older_than_another_writers_log_gives_no_number():
    writers = Writers()
    for who in (0, 1):
        writers.start(who)
        writers.append(who)
    writers.open.pop(1).close()
    backup = writers.store.ledger
    writers.append(0)
    writers.open.pop(0).close()
    writers.store.ledger = backup
    writers.clock.advance(60.0)
    with pytest.raises(
        SequencingError,
        check=coded("sequence_unusable"),
        match="numbers up to 12, but the catalog has allocated numbers only up to 8",
    ):
        writers.start(1)


def test_numbers_that_go_back_are_refused():
    writers = Writers()
    log = writers.start(0)
    writers.append(0)
    writers.store.ledger = replace(writers.store.ledger, newest=Seq(1))
    with pytest.raises(
        SequencingError, check=coded("sequence_unusable"), match="though it had allocated numbers up to 4"
    ):
        writers.append(0)
    assert log.failure is None
    writers.store.ledger = replace(writers.store.ledger, newest=Seq(4))
    writers.append(0)
    log.follow()
    assert writers.read(0, 8) == writers.texts


def test_a_sign_given_while_a_group_is_written_keeps_the_lease():
    writers = Writers()
    log = writers.start(0)

    def lasts(_: int) -> None:
        for _ in range(4):
            writers.clock.advance(4.0)  # of a lease of 5 s
            view = log.sign()
            assert view is not None
            assert not view.expired
            with pytest.raises(SequencingError, check=coded("writer_alive")):
                writers.store.take_over(WriterId(1))

    writers.pause = lasts
    writers.append(0)
    log.follow()
    assert writers.read(0, 4) == writers.texts


def test_who_was_not_fenced_keeps_its_locks():
    writers = Writers()
    writers.start(0)
    writers.open[0].close()
    held = lock_shards(writers.files, FOLDER, [ShardId(0)])
    with pytest.raises(ShardLocked):
        writers.start(0)
    held[ShardId(0)].close()
    writers.start(0)


def test_a_store_that_is_older_than_the_log_gives_no_number():
    writers = Writers()
    writers.start(0)
    writers.append(0)
    writers.kill(0)
    writers.store = MemorySequenceStore(writers.clock)
    with pytest.raises(StaleEpoch):
        writers.start(0)
    with pytest.raises(SequencingError, check=coded("sequence_unusable")) as caught:
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


def test_a_draw_whose_reply_is_lost_counts_a_writer_that_joined_before_it():
    # Its position came with the lost reply: readers passed it, and the joining writer's marks took the stream back.
    writers = Writers()
    writers.start(0)
    joining = writers.store.register("w1", "home")
    writers.store.recovered(joining.writer, joining.epoch)
    fails = iter(["after"])
    writers.store.fails = lambda step: next(fails, None) if step == "draw" else None
    writers.append(0)
    assert writers.reader().persisted_upto() == 0
    assert writers.texts


def test_a_store_that_is_away_refuses_appends_and_wedges_nothing():
    writers = Writers()
    writers.start(0)
    writers.start(1)
    writers.store.fails = lambda step: "after" if step == "draw" else "before" if step == "last" else None
    with pytest.raises(CatalogError, check=coded("catalog_busy")):
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


@dataclass
class Chance:
    """Writers that may fail in any way at any time, with a reader next to them."""

    seed: int
    writers: Writers = field(default_factory=Writers)
    hung: list[tuple[int, GroupCommitter]] = field(default_factory=list)
    """Incarnations that stand still, with their locks held."""
    seen: dict[int, str] = field(default_factory=dict)
    upto: Seq = Seq(0)
    cuts: list[tuple[Seq, Seq, dict[int, str]]] = field(default_factory=list)
    token: StreamToken = field(default_factory=lambda: StreamToken.scalar(STREAM, Seq(0)))
    heard: dict[int, str] = field(default_factory=dict)
    """Texts that a vector reader has read, by number."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.writers.store.fails = lambda _step: self.random.choices(["before", "after", None], [2, 2, 30])[0]
        self.writers.pause = self.pause

    def pause(self, who: int) -> None:
        """Let time pass while a writer stands still; another often takes its place."""
        if self.random.random() < 0.1:
            self.writers.clock.advance(self.random.choice([1.0, 10.0]))
            with suppress(CatalogError, ShardLocked, StaleEpoch):
                self.writers.start(who)

    def step(self) -> None:
        """Let one thing happen."""
        who = self.random.randrange(4)
        log = self.writers.open.get(who)
        weights = {self.start: 5, self.hang: 2, self.wake: 3, self.read: 6, self.use: 22, self.crash: 2}
        happens = self.random.choices(list(weights), list(weights.values()))[0]
        try:
            happens(who, log)
        except (CatalogError, ShardLocked):
            return
        except (StaleEpoch, AppendOutcomeUnknown, WriterClosed):
            if log is not None and log.failure is not None and self.writers.open.get(who) is log:
                self.writers.kill(who)
        self.writers.clock.advance(0.2)

    def start(self, who: int, log: GroupCommitter | None) -> None:
        if log is None:
            self.writers.start(who)

    def hang(self, who: int, log: GroupCommitter | None) -> None:
        if log is not None:
            self.hung.append((who, self.writers.open.pop(who)))
            self.writers.clock.advance(self.random.choice([0.5, 8.0]))

    def wake(self, _who: int, _log: GroupCommitter | None) -> None:
        """Let a hung incarnation act as if nothing had happened."""
        if not self.hung:
            return
        who, old = self.hung.pop(self.random.randrange(len(self.hung)))
        does = self.random.choice([lambda: self.writers.append(who, log=old), old.roll, old.follow, old.close])
        if does != old.close:
            self.hung.append((who, old))
        does()

    def use(self, who: int, log: GroupCommitter | None) -> None:
        if log is None:
            return
        steps = [
            lambda: self.writers.append(who, self.random.randrange(1, 4)),
            log.follow,
            log.roll,
            lambda: self.writers.kill(who),
            lambda: self.writers.open.pop(who).close(),
        ]
        self.random.choices(steps, [10, 6, 3, 1, 1])[0]()

    def crash(self, *_: object) -> None:
        """Let the store crash, and forget draws that it didn't flush."""
        self.writers.store.crash(self.random)

    def read(self, *_: object) -> None:
        cut = self.writers.reader().persisted_upto()
        assert cut >= self.upto
        found = self.writers.read(self.upto, cut)
        assert not self.seen.keys() & found.keys()
        self.seen |= found
        self.cuts.append((self.upto, cut, found))
        self.upto = cut
        self.read_on()

    def read_on(self) -> None:
        """Read the same as a vector reader, which learns of everything sooner."""
        reader = self.writers.reader()
        if not self.writers.count:
            return
        token = reader.vector_token()
        assert self.token <= token
        for records in reader.read_tokens(self.token, token):
            rows = zip(records.batch["__seq"].to_pylist(), records.batch["text"].to_pylist(), strict=True)
            for seq, text in rows:
                assert seq not in self.heard
                self.heard[seq] = text
        self.token = token
        assert self.seen.items() <= self.heard.items()


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(n, marks=pytest.mark.long) for n in range(20, 80))])
def test_readers_see_every_record_once_and_in_order_whatever_happens(seed: int, seeds: Seeds):
    chance = Chance(seeds.kept_or_new(seed))
    writers = chance.writers
    for _ in range(60):
        chance.step()
    writers.store.fails, writers.pause = lambda _step: None, lambda _who: None
    writers.open.clear()  # every incarnation hangs from now on
    writers.clock.advance(10.0)
    for who in range(4):
        writers.start(who)
    for _ in range(2):
        for log in writers.open.values():
            log.follow()
    chance.read()
    assert chance.upto == writers.store.view().newest
    assert chance.heard == chance.seen
    assert writers.texts.items() <= chance.seen.items(), "what was acknowledged is there"
    assert len(set(chance.seen.values())) == len(chance.seen), "nothing is there twice"
    assert set(chance.seen.values()) <= writers.attempted
    for after, before, found in chance.cuts:
        assert writers.read(after, before) == found
    assert not verify(FOLDER, files=writers.files).losses
    assert str(StreamToken.scalar(STREAM, chance.upto)).endswith(f"s{chance.upto}")


def test_marks_of_several_writers_say_so_to_readers_that_know_of_one_only():
    writers = Writers()
    log = writers.start(0)
    assert _versions(writers) == {2}
    writers.append(0)
    log.close()
    assert _versions(writers) == {2}


def _versions(writers: Writers) -> set[int]:
    """Return the versions of the slots that were written."""
    data = writers.files.read(f"{FOLDER}/00000/durable.mark")
    slots = [data[start : start + 16] for start in (0, 512, 1024)]
    return {int.from_bytes(slot[12:14], "little") for slot in slots if any(slot)}
