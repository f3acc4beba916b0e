"""Writes with ids in a log: appended once, through any crash, and answered with their first acknowledgement."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from errno import EIO, ENOSPC
from pathlib import Path
from uuid import UUID

import pytest
from tests.seeds import Seeds
from tests.wal.plain_operations import MemoryReservations, plain_rows, plain_table

from millstream.errors import (
    CorruptWal,
    DedupWindowExpired,
    IdempotencyKeyReused,
    MillstreamError,
    SessionExpired,
    SessionsNeedOneWriter,
)
from millstream.ingest.append_requests import operations_of
from millstream.model.ids import Epoch, RegionId, ShardId, StreamId, WriterId
from millstream.model.operations import Ack, Outcome, TableRows, WriteOps, writes_in
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.model.writes import SessionFacts, WriteId
from millstream.protocol.deduplication.known_writes import SessionLimits, Sessions
from millstream.protocol.retention import HolderKind, Retention, RetentionBounds
from millstream.testing.clock import ManualClock
from millstream.testing.errors import coded
from millstream.testing.files import Crash, FaultPlan, MemoryFiles, keep_any, lose_all
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import SESSIONS_HOLDER, Sweep, drop_segments, hold_for_sessions
from millstream.wal.writing.deduplicated_commits import DeduplicatedCommits
from millstream.wal.writing.group_commit import GroupCommitter, WriterIdentity
from millstream.wal.writing.number_sources import BlockNumbers
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.session_file import covered_upto, read_copy, session_path
from millstream.wal.writing.writer import LogWriter

FOLDER = "/wal"
STREAM = StreamId(UUID(int=5))
SHARDS = (ShardId(0), ShardId(1))
TABLE = plain_table(1)
Keep = Callable[[int], Sequence[float]]


def write(*writes: tuple[WriteId | None, int], text: str = "x") -> WriteOps:
    """Return operations of so many rows each, alternately on two shards; each row's text is its operation's id."""
    ids = [write_id for write_id, _ in writes]
    rows = [(place, i, f"{write_id}") for place, (write_id, count) in enumerate(writes) for i in range(count)]
    tables = tuple(
        TableRows(TABLE, plain_rows(TABLE, mine), shard)
        for shard in SHARDS
        if (mine := [row for place, row in enumerate(rows) if place % 2 == shard])
    )
    digests = [hash_of(text)] * len(ids)
    return WriteOps(operations_of(ids, digests), tables, is_keyed=True)


def hash_of(text: str) -> int:
    return sum(text.encode())


class Life:
    """A log's writers, one after the other, with the store of numbers that outlives them."""

    def __init__(self, *, every_bytes: int = 1, segment_bytes: int = 2500) -> None:
        self.reservations = MemoryReservations()
        self.epoch = 0
        self.every_bytes = every_bytes
        self.options = LogOptions(segment_bytes=segment_bytes, disk_used_max=1.0)
        self.clock = ManualClock()

    def open(self, files: MemoryFiles) -> tuple[GroupCommitter, DeduplicatedCommits]:
        self.epoch += 1
        self.reservations.epoch = Epoch(self.epoch)
        clock = self.clock
        committer = GroupCommitter.open(
            FOLDER,
            WriterIdentity(STREAM, RegionId(0), WriterId(1), Epoch(self.epoch)),
            SHARDS,
            numbers=BlockNumbers(self.reservations, Epoch(self.epoch)),
            files=files,
            clock=clock,
            options=self.options,
            side_by_side=False,
        )
        keyed = DeduplicatedCommits.open(
            committer,
            files,
            clock,
            FOLDER,
            STREAM,
            SessionLimits(),
            every_bytes=self.every_bytes,
            in_background=False,
        )
        return committer, keyed

    def open_with_segments(
        self, files: MemoryFiles, *, looks: bool = False
    ) -> tuple[GroupCommitter, DeduplicatedCommits]:
        """Commit writes 1 to 29 of a session, with a segment as soon as one is full.

        With `looks`, check after each write whether a copy is due.
        """
        committer, keyed = self.open(files)
        for number in range(1, 30):
            keyed.commit([write((s(number), 5))])
            committer.roll()
            if looks:
                keyed.after_group()
        return committer, keyed


def retain(files: MemoryFiles) -> Sweep:
    """Run retention long after, with no other holder."""
    return drop_segments(
        FOLDER, Retention([]), RetentionBounds(0.0, 0, 1 << 40), files=files, clock=ManualClock(10**18)
    )


def shown(files: MemoryFiles) -> dict[str, list[int]]:
    """Return the numbers of the rows in the log, by their text."""
    reader = StreamReader(FOLDER, files=files)
    found: dict[str, list[int]] = {}
    for part in reader.read_between(Seq(reader.first_seq() - 1), reader.persisted_upto()):
        for text, seq in zip(*(part.batch.column(name).to_pylist() for name in ("text", "__seq")), strict=True):
            found.setdefault(text, []).append(seq)
    return {text: sorted(seqs) for text, seqs in found.items()}


def offsets_of(files: MemoryFiles) -> dict[tuple[int, int], str]:
    reader = StreamReader(FOLDER, files=files)
    found = {}
    for shard in SHARDS:
        for part in reader.read(shard, reader.first_offset(shard)):
            for offset, text in zip(*(part.batch.column(n).to_pylist() for n in ("__offset", "text")), strict=True):
                found[shard, offset] = text
    return found


def s(number: int, name: str = "s") -> WriteId:
    return WriteId(name, number)


def given(outcome: Outcome) -> Ack:
    assert not isinstance(outcome, MillstreamError)
    return replace(outcome, duplicate=False)


REPEATED = "repeated"


def kinds(ack: Ack) -> list[object]:
    """Return for each operation of an ack `REPEATED`, or the class of its outcome."""
    return [REPEATED if isinstance(one, Ack) and one.duplicate else type(one) for one in ack.each]


def test_a_write_that_is_sent_again_is_not_appended_again() -> None:
    files, life = MemoryFiles(), Life()
    committer, keyed = life.open(files)
    first, plain = keyed.commit([write((s(1), 2), (WriteId(key="k"), 3), (None, 1)), write((s(2), 1))])
    assert kinds(first) == [Ack, Ack, Ack]
    assert first.seqs.count == 6
    again, other = keyed.commit([write((s(2), 1), (s(4), 5), (s(1), 2), (s(4), 5)), write((WriteId(key="k"), 3))])
    assert kinds(again) == [REPEATED, Ack, REPEATED, REPEATED]
    assert [given(outcome) for outcome in again.each] == [
        given(plain.each[0]),
        given(again.each[1]),
        given(first.each[0]),
        given(again.each[1]),
    ]
    assert again.seqs.count == 5
    assert [given(outcome) for outcome in other.each] == [given(first.each[1])]
    assert other.seqs.count == 0
    (nothing,) = keyed.commit([write((s(1), 2))])
    assert nothing.seqs.count == 0
    assert keyed.facts("s") == SessionFacts(2, (4,))
    rows = shown(files)
    assert {text: len(seqs) for text, seqs in rows.items()} == {
        str(s(1)): 2, str(s(2)): 1, str(s(4)): 5, str(WriteId(key="k")): 3, "None": 1,
    }  # fmt: skip
    there = offsets_of(files)
    for write_id, outcome in ((s(1), first.each[0]), (WriteId(key="k"), first.each[1]), (s(4), again.each[1])):
        ack = given(outcome)
        assert rows[str(write_id)] == list(range(ack.seqs.first, ack.seqs.first + ack.seqs.count))
        assert {there[shard, o] for shard, (start, end) in ack.offsets.items() for o in range(start, end)} == {
            str(write_id)
        }
    committer.abandon()


def test_one_that_is_refused_leaves_the_others_alone() -> None:
    files, life = MemoryFiles(), Life()
    committer, keyed = life.open(files)
    keyed.commit([write((s(1), 1))])
    (ack,) = keyed.commit([write((s(2), 1), (s(1), 1), (s(9, "new"), 2), (WriteId(key="k"), 1), text="other")])
    assert kinds(ack) == [Ack, IdempotencyKeyReused, Ack, Ack]
    (ack,) = keyed.commit([write((s(3), 1), (s(3), 1)), write((WriteId(key="k"), 1))][:1])
    assert kinds(ack) == [Ack, REPEATED]
    one, other = keyed.commit([write((s(4), 1)), write((s(4), 1), text="other")])
    assert isinstance(other.each[0], IdempotencyKeyReused)
    assert isinstance(one.each[0], Ack)
    committer.abandon()


def test_a_batch_may_bring_more_of_one_session_than_may_come_out_of_order() -> None:
    files, life = MemoryFiles(), Life(segment_bytes=1 << 20)
    committer, keyed = life.open(files)
    (ack,) = keyed.commit([write(*((s(number), 1) for number in range(1, 3001)))])
    assert all(isinstance(outcome, Ack) for outcome in ack.each)
    assert keyed.facts("s") == SessionFacts(3000)
    committer.abandon()


@pytest.mark.parametrize("every_bytes", [1, 1 << 30])
def test_the_next_writer_knows_what_the_log_has(every_bytes: int) -> None:
    files, life = MemoryFiles(), Life(every_bytes=every_bytes)
    told: dict[WriteId, Ack] = {}
    writes = [s(number, name) for name in ("a", "b") for number in (1, 2, 3, 5, 4, 7)] + [
        WriteId(key=str(i)) for i in range(5)
    ]
    for _ in range(3):
        committer, keyed = life.open(files)
        for write_id in writes:
            (ack,) = keyed.commit([write((write_id, 3))])
            keyed.after_group()
            committer.roll()
            assert told.setdefault(write_id, given(ack.each[0])) == given(ack.each[0])
        assert keyed.facts("a") == SessionFacts(5, (7,))
        keyed.close()
        assert covered_upto(files, FOLDER) == StreamReader(FOLDER, files=files).persisted_upto()
        if every_bytes > 1:
            files.remove(session_path(FOLDER))  # a missing copy is made from the log
    assert {text: len(seqs) for text, seqs in shown(files).items()} == {str(write_id): 3 for write_id in writes}


WRITES = [
    (s(1), 2),
    (s(2), 1),
    (s(4), 1),
    (WriteId(key="k"), 2),
    (s(3), 3),
    (s(1, "t"), 1),
    (s(5), 1),
    (WriteId(key="l"), 1),
]


def play(life: Life, files: MemoryFiles, told: dict[WriteId, Ack]) -> None:
    """Commit writes, some of them sent twice, by two writers, and record the acknowledgements in `told`."""
    committer, keyed = life.open(files)
    for i, one in enumerate(WRITES):
        batch = write(one, WRITES[i - 1]) if i else write(one)
        (ack,) = keyed.commit([batch])
        for (write_id, _), outcome in zip(filter(None, writes_in(batch.operations)), ack.each, strict=True):
            assert write_id is not None
            assert told.setdefault(write_id, given(outcome)) == given(outcome)
        committer.roll()
        keyed.after_group()
        if i == len(WRITES) // 2:
            keyed.close()
            committer, keyed = life.open(files)
    committer.abandon()


OUTCOMES: dict[str, tuple[Keep | None, int, int]] = {
    "all kept": (None, 1, 1),
    "unsynced lost": (lose_all, 2, 2),
    **{f"any subset, seed {seed}": (keep_any(seed), seed, 3) for seed in (1, 2, 3)},
}


@pytest.mark.long
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_crash_at_any_operation_appends_no_write_twice_and_loses_none(outcome: str, seeds: Seeds) -> None:
    keep, first, step = OUTCOMES[outcome]
    step *= seeds.count(1, quick=4)
    whole = MemoryFiles()
    play(Life(), whole, {})
    for at in range(first, whole.plan.operations + 1, step):
        life, told = Life(), dict[WriteId, Ack]()
        files = MemoryFiles(FaultPlan(crash_at=at))
        with pytest.raises(Crash):
            play(life, files, told)
        files = files.crash(keep)
        committer, keyed = life.open(files)
        chance = random.Random(at)
        for one in chance.sample(WRITES, len(WRITES)):
            (ack,) = keyed.commit([write(one)])
            if one[0] in told:
                assert ack.each == (replace(told[one[0]], duplicate=True),), (at, one)
        rows = shown(files)
        assert {text: len(seqs) for text, seqs in rows.items()} == {str(one): count for one, count in WRITES}, at
        for write_id, ack in told.items():
            assert rows[str(write_id)] == list(range(ack.seqs.first, ack.seqs.first + ack.seqs.count)), at
        committer.abandon()


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["sync", "write", "any"])
def test_after_a_failed_disk_the_next_writer_tells_what_is_there(kind: str) -> None:
    for at in range(1, 60):
        life, told = Life(), dict[WriteId, Ack]()
        fails = frozenset({at})
        plan = {
            "sync": FaultPlan(fail_sync_at=fails),
            "write": FaultPlan(fail_write_at=fails),
            "any": FaultPlan(fail_at=fails),
        }[kind]
        files = MemoryFiles(plan)
        try:
            play(life, files, told)
        except (MillstreamError, OSError):
            files = files.crash(None)
        else:
            files.plan = FaultPlan()
        committer, keyed = life.open(files)
        for one in WRITES:
            (ack,) = keyed.commit([write(one)])
            if one[0] in told:
                assert ack.each == (replace(told[one[0]], duplicate=True),), (at, one)
        assert {text: len(seqs) for text, seqs in shown(files).items()} == {str(one): count for one, count in WRITES}
        committer.abandon()


def test_retention_keeps_what_the_copy_lacks() -> None:
    files, life = MemoryFiles(), Life(every_bytes=1 << 30)
    committer, keyed = life.open_with_segments(files)
    copied = covered_upto(files, FOLDER)
    assert copied == 0
    swept = retain(files)
    assert swept.dropped == ()
    keyed.close()
    swept = retain(files)
    assert swept.dropped
    committer, keyed = life.open(files)
    (ack,) = keyed.commit([write((s(29), 5), (s(30), 1))])
    assert kinds(ack) == [REPEATED, Ack]
    committer.abandon()
    assert not HolderKind.SESSIONS.can_be_cut_off


def test_a_quiet_stream_lets_retention_have_what_was_sealed_by_its_age() -> None:
    """Regression: copies were made only each 64 MiB of log.

    A stream of some rows an hour dropped nothing for years.
    """
    files, life = MemoryFiles(), Life(every_bytes=1 << 30, segment_bytes=1 << 20)
    committer, keyed = life.open(files)
    for hour in range(1, 4):
        keyed.commit([write((s(hour), 5))])
        life.clock.advance(life.options.segment_age_s)
        committer.roll()
        keyed.after_group()
        assert covered_upto(files, FOLDER) == committer.persisted_upto
    keyed.commit([write((s(4), 5))])
    keyed.after_group()
    assert covered_upto(files, FOLDER) == committer.persisted_upto - 5, "nothing was sealed behind the last copy"
    swept = retain(files)
    assert {segment.last_seq for segment in swept.dropped} == {5, 10, 15}
    committer.abandon()


def test_what_retention_keeps_for_the_copy_alone_goes_once_it_is_asked_for() -> None:
    """Regression: segments that could be dropped at once stayed for an hour."""
    files, life = MemoryFiles(), Life(every_bytes=1 << 30)
    committer, keyed = life.open_with_segments(files, looks=True)
    swept = retain(files)
    assert (swept.dropped, swept.kept.needed_by) == ((), (SESSIONS_HOLDER,))
    keyed.copy_for_retention()
    swept = retain(files)
    assert len(swept.dropped) > 2
    assert swept.kept.needed_by == ()
    before = read_copy(files, FOLDER, STREAM)
    keyed.copy_for_retention()
    assert read_copy(files, FOLDER, STREAM) == before
    committer.abandon()


def test_segments_that_fill_up_within_the_hour_make_no_copy_each() -> None:
    files, life = MemoryFiles(), Life(every_bytes=1 << 30)
    committer, _ = life.open_with_segments(files, looks=True)
    assert committer.counts.segments_sealed > 2
    assert covered_upto(files, FOLDER) == 0
    committer.abandon()


def test_without_its_copy_a_session_of_which_retention_dropped_a_part_is_forgotten() -> None:
    """Regression: the session's numbers counted as far ahead of a mark of 0.

    They were kept one by one, until there were too many for a copy.
    """
    files, life = MemoryFiles(), Life(every_bytes=1 << 30)
    _, keyed = life.open_with_segments(files)
    keyed.commit([write((s(30), 1), (s(1, "begun later"), 1), (WriteId(key="k"), 1))])
    keyed.close()
    assert retain(files).dropped
    files.remove(session_path(FOLDER))
    for _ in range(2):
        _, keyed = life.open(files)
        assert keyed.facts("s") == SessionFacts(0, expired=True)
        (ack,) = keyed.commit([write((s(31), 1), (s(1, "begun later"), 1), (WriteId(key="k"), 1))])
        assert kinds(ack) == [SessionExpired, REPEATED, REPEATED]
        keyed.close()


def test_a_copy_that_knows_more_than_the_log_is_gone_before_the_log_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: without space for a new copy, the old one counted as the log's own once the log had grown as far.

    The copy then held writes that aren't in the log.
    """
    files, life = MemoryFiles(), Life()
    committer, keyed = life.open(files)
    keyed.commit([write((s(1), 1))])
    earlier = files.crash(None)
    keyed.commit([write((s(2), 1))])
    keyed.close()
    copy = files.read(session_path(FOLDER))
    earlier.remove(session_path(FOLDER))
    file = earlier.create(session_path(FOLDER))
    file.pwrite(copy, 0)
    file.sync()
    file.close()

    def full(*_: object) -> int:
        raise OSError(ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr("millstream.wal.writing.deduplicated_commits.write_copy", full)
        committer, keyed = life.open(earlier)
        keyed.commit([write((s(1, "other"), 9))])
        committer.abandon()
    committer, keyed = life.open(earlier)
    assert keyed.facts("s") == SessionFacts(1)
    assert isinstance(keyed.commit([write((s(2), 1))])[0].each[0], Ack)
    committer.abandon()


def test_without_a_copy_each_group_tries_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if the first copy found no space, retention dropped what only the log knew."""
    files, life = MemoryFiles(), Life(every_bytes=1 << 30)

    def full(*_: object) -> int:
        raise OSError(ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr("millstream.wal.writing.deduplicated_commits.write_copy", full)
        committer, keyed = life.open(files)
        keyed.commit([write((s(1), 1))])
        keyed.after_group()
        assert covered_upto(files, FOLDER) is None
    for number in (2, 3):
        keyed.commit([write((s(number), 1))])
        keyed.after_group()
    assert covered_upto(files, FOLDER) == 2
    committer.abandon()


def test_a_damaged_copy_is_told_and_no_other_streams_is_taken() -> None:
    files, life = MemoryFiles(), Life()
    _, keyed = life.open(files)
    keyed.commit([write((s(1), 5))])
    keyed.close()
    with pytest.raises(CorruptWal):
        read_copy(files, FOLDER, StreamId(UUID(int=6)))
    size = files.size(session_path(FOLDER))
    for at in range(size):
        other = files.crash(None)
        byte = other.read(session_path(FOLDER), at, 1)[0]
        other.damage(session_path(FOLDER), at, bytes([byte ^ 0x10]))
        with pytest.raises(MillstreamError):
            read_copy(other, FOLDER, STREAM)


def test_a_copy_that_the_disk_cannot_look_at_is_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the writer began without the keys that only the copy had, and replaced it."""
    reservations, stat = MemoryReservations(), os.stat

    def open_it(epoch: int) -> LogWriter:
        options = LogOptions(segment_bytes=1, disk_used_max=1.0)
        return LogWriter.open(
            str(tmp_path), stream=STREAM, shards=SHARDS, epoch=Epoch(epoch), reservations=reservations,
            options=options, sessions=SessionLimits(),
        )  # fmt: skip

    def broken(path: str, *rest: object, **named: object) -> os.stat_result:
        if path == str(copy):
            raise OSError(EIO, "Input/output error", path)
        return stat(path, *rest, **named)  # type: ignore[arg-type]

    copy = Path(session_path(str(tmp_path)))
    with open_it(1) as log:
        log.append(write((WriteId(key="k"), 1), (s(1), 1)))
        log.append(write((s(2), 1), (s(3), 1)))
    before = copy.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", broken)
        with pytest.raises(MillstreamError, check=coded("io_failed")):
            open_it(2)
        with pytest.raises(OSError, match="Input/output error"):
            hold_for_sessions(str(tmp_path), Retention([]))
    assert copy.read_bytes() == before
    assert drop_segments(str(tmp_path), Retention([]), RetentionBounds(0.0, 0, 0)).dropped
    with open_it(3) as log:
        assert kinds(log.append(write((WriteId(key="k"), 1)))) == [REPEATED]


def test_a_writer_among_several_takes_no_writes_with_sessions() -> None:
    files = MemoryFiles()
    with LogWriter.open(
        FOLDER, stream=STREAM, shards=SHARDS, epoch=Epoch(1), reservations=MemoryReservations(), files=files
    ) as log:
        with pytest.raises(SessionsNeedOneWriter):
            log.append(write((s(1), 1)))
        with pytest.raises(SessionsNeedOneWriter):
            log.session("s")


def test_rows_stay_with_their_operation_where_others_are_left_out() -> None:
    files, life = MemoryFiles(), Life(segment_bytes=1 << 20)
    committer, keyed = life.open(files)
    chance = random.Random(7)
    for _ in range(30):
        batch = write(*((s(1, f"{number}"), number % 4 + 1) for number in chance.sample(range(1, 60), 10)))
        keyed.commit([batch])
    rows, there = shown(files), offsets_of(files)
    assert all(len(seqs) == int(text.split("'")[1]) % 4 + 1 for text, seqs in rows.items())
    for number in range(1, 60):
        if str(s(1, f"{number}")) in rows:
            (ack,) = keyed.commit([write((s(1, f"{number}"), number % 4 + 1))])
            repeated = given(ack.each[0])
            assert sum(end - start for start, end in repeated.offsets.values()) == repeated.seqs.count
            texts = {there[shard, Offset(o)] for shard, (a, b) in repeated.offsets.items() for o in range(a, b)}
            assert texts == {str(s(1, f"{number}"))}
    committer.abandon()


def test_a_copy_of_version_1_is_read_for_ever() -> None:
    golden = Path(__file__).parent.parent / "golden"
    files = MemoryFiles()
    files.makedirs(FOLDER)
    file = files.create(session_path(FOLDER))
    file.pwrite((golden / "sessions-v1.state").read_bytes(), 0)
    file.close()
    copy = read_copy(files, FOLDER, StreamId(UUID(int=77)))
    assert copy is not None
    assert copy.upto == covered_upto(files, FOLDER) == 4711
    sessions = Sessions.restored(copy.state)
    facts = json.loads((golden / "sessions-v1.json").read_text())
    assert {name: sessions.facts(name).as_dict() for name in facts} == facts
    given = Ack({ShardId(0): (Offset(40), Offset(41)), ShardId(1): (Offset(40), Offset(42))}, SeqRange(Seq(401), 3))
    assert sessions.look(s(1, "ü"), 1004) == given
    assert sessions.look(WriteId(key="l"), 123) == Ack({ShardId(0): (Offset(92), Offset(93))}, SeqRange(Seq(902), 1))
    with pytest.raises(IdempotencyKeyReused):
        sessions.look(s(5, "a"), 1)
    with pytest.raises(SessionExpired):
        sessions.look(s(1, "gone"), 1000)
    with pytest.raises(DedupWindowExpired):
        sessions.look(WriteId(key="gone"), 7)
    assert b"".join(sessions.copied()()) == copy.state
