"""The writer's queue: groups, order, bounds, answers, and what readers see while it works."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.wal.log_writers import OTHER, TABLE, HeldSyncs, OutdatedLook, column, one, opened, small, xids
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_spilled, plain_table

from millstream.errors import (
    AppendOutcomeUnknown,
    DiskFull,
    LogError,
    Overloaded,
    ShardLocked,
    StaleEpoch,
    TokenFromFuture,
    WriterClosed,
)
from millstream.model.ids import SourceId
from millstream.model.operations import WriteOps
from millstream.model.positions import Lsn
from millstream.testing.errors import code_of, coded
from millstream.testing.files import FaultPlan, MemoryFiles
from millstream.wal.files import RealFiles
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogWriter


def test_what_waits_while_an_fsync_runs_becomes_one_group_in_order_of_the_calls():
    files = HeldSyncs()
    with opened("/wal/s", files=files) as log:
        log.append(one(1))
        files.may_sync.clear()
        first = log.submit(one(2))
        assert files.waiting.wait(60)
        rest = [log.submit(one(xid)) for xid in range(3, 40)]
        reader = StreamReader("/wal/s", files=files)
        assert xids(reader) == [1], "a reader sees what isn't durable"
        assert not first.done()
        files.may_sync.set()
        acks = [answer.result(60) for answer in (first, *rest)]
        assert [ack.seqs.first for ack in acks] == list(range(2, 40))
        assert [ack.offsets[0] for ack in acks] == [(n, n + 1) for n in range(1, 39)]
        assert log.stats().groups == 3
        assert xids(reader) == list(range(1, 40))


def test_threads_that_append_while_an_fsync_runs_share_the_next_group(monkeypatch: pytest.MonkeyPatch):
    """Regression: threads saw the lock free while it changed hands, waited for it, and made a group each."""
    files = HeldSyncs()
    with opened("/wal/s", files=files) as log, ThreadPoolExecutor(16) as threads:
        monkeypatch.setattr(log, "_writing", OutdatedLook())
        files.may_sync.clear()
        acks = [threads.submit(log.append, small(1))]
        assert files.waiting.wait(60)
        acks += [threads.submit(log.append, small(number)) for number in range(2, 17)]
        deadline = time.monotonic() + 60
        while len(log._queue._waiting) < 15 and time.monotonic() < deadline:
            time.sleep(0.001)
        files.may_sync.set()
        assert sorted(ack.result(60).seqs.first for ack in acks) == list(range(1, 17))
        assert log.stats().groups == 2


def test_a_full_queue_holds_callers_and_refuses_them_at_their_deadline():
    files = HeldSyncs()
    with opened("/wal/s", files=files, queue_bytes_max=200_000) as log:
        log.append(one(1))
        files.may_sync.clear()
        answers = [log.submit(one(2))]
        assert files.waiting.wait(60)
        with pytest.raises(Overloaded):
            answers.extend(log.submit(one(xid, "y" * 500), deadline_s=0.05) for xid in range(3, 100))
        assert log.stats().queued_bytes <= 200_000
        files.may_sync.set()
        assert [a.result(60).seqs.count for a in answers] == [1] * len(answers)
        log.append(one(1000))


def test_who_waits_for_room_is_passed_by_no_later_caller():
    """Small appends took any room as it came, so that a large one got none, for as long as they came."""
    files = HeldSyncs()
    with opened("/wal/s", files=files, queue_bytes_max=240_000) as log, ThreadPoolExecutor(2) as threads:
        files.may_sync.clear()
        answers = [log.submit(small(1))]
        assert files.waiting.wait(60)
        answers.append(log.submit(small(2, text="y" * 100_000)))
        asked = threading.Event()
        large = [
            threads.submit(log.append, small(3, text="y" * 200_000)),
            threads.submit(log.submit, small(4, text="y" * 200_000), gives_up=lambda: bool(asked.set())),
        ]
        assert asked.wait(60), "it keeps its place"
        deadline = time.monotonic() + 60
        while len(log._queue._visitors) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with pytest.raises(Overloaded):
            log.submit(small(5), deadline_s=0.05)
        with pytest.raises(Overloaded):
            asyncio.run(log.append_async(small(6), deadline_s=0.05))
        files.may_sync.set()
        assert [answer.result(60).seqs.first for answer in answers] == [1, 2]
        assert {large[0].result(60).seqs.first, large[1].result(60).result(60).seqs.first} == {3, 4}
        assert log.append(small(7)).seqs.first == 5


def test_a_queue_of_tiny_submissions_is_bounded_by_what_they_take():
    files = HeldSyncs()
    with opened("/wal/s", files=files, queue_bytes_max=100_000) as log:
        files.may_sync.clear()
        answers = [log.submit(small(1))]
        assert files.waiting.wait(60)
        with pytest.raises(Overloaded):
            answers.extend(log.submit(one(n), deadline_s=0.05) for n in range(2, 1000))
        assert len(answers) <= 100_000 / 10_000
        assert log.stats().queued_bytes <= 100_000
        files.may_sync.set()
        assert [answer.result(60).seqs.count for answer in answers] == [1] * len(answers)


def test_the_size_of_one_row_operations_is_that_of_the_memory_that_they_take():
    def rss() -> int:
        return psutil.Process().memory_info().rss

    _ = [one(xid) for xid in range(1, 200)]
    before = rss()
    held = [one(xid) for xid in range(1, 4000)]
    assert rss() - before < 1.5 * sum(ops.size_bytes for ops in held)


def test_small_appends_and_other_operations_share_groups_in_order_of_the_calls():
    files = HeldSyncs()
    with opened("/wal/s", files=files, shards=(0, 1)) as log:
        files.may_sync.clear()
        first = log.submit(small(0))
        assert files.waiting.wait(60)
        made = [
            small(1), small(2, 3), one(30), small(4, table=OTHER, shard=1), small(5),
            plain_spilled(60, [[(TABLE, 2, "a")]] * 2), small(7), one(80, table=OTHER), small(9, 2),
        ]  # fmt: skip
        rest = [log.submit(ops) for ops in made]
        files.may_sync.set()
        acks = [answer.result(60) for answer in (first, *rest)]
        assert log.stats().groups == 4
        assert log.stats().operations == 10
    assert [(ack.seqs.first, ack.seqs.count) for ack in acks] == [
        (1, 1), (2, 1), (3, 3), (6, 1), (7, 1), (8, 1), (9, 4), (13, 1), (14, 1), (15, 2),
    ]  # fmt: skip
    assert [ack.offsets for ack in acks] == [
        {0: (0, 1)}, {0: (1, 2)}, {0: (2, 5)}, {0: (5, 6)}, {1: (0, 1)}, {0: (6, 7)}, {0: (7, 11)}, {0: (11, 12)},
        {1: (1, 2)}, {0: (12, 14)},
    ]  # fmt: skip
    reader = StreamReader("/wal/s", files=files)
    assert xids(reader) == [*[None] * 5, 30, None, None, *[60] * 4, None, 80, None, None]
    assert column(reader, "id") == [0, 1, 2, 2, 2, 0, 4, 5, 0, 1, 2, 3, 7, 0, 9, 9]


def test_without_a_delay_an_operation_is_written_at_once_and_with_one_it_waits_for_company():
    for delay_s, groups in ((0.0, 2), (1.0, 1)):
        with opened("/wal/s", files=MemoryFiles(), group_commit_delay_s=delay_s) as log:
            began = time.monotonic()
            first = log.submit(small(1))
            if not delay_s:
                first.result(60)
            second = log.submit(small(2))
            assert (first.result(60).seqs.first, second.result(60).seqs.first) == (1, 2)
            assert time.monotonic() - began >= delay_s
            assert log.stats().groups == groups
            log.append(small(3))
            assert time.monotonic() - began >= 2 * delay_s, "one that finds nobody writing waits, too"


def test_a_group_that_is_full_a_queue_that_is_full_and_the_end_cut_the_delay_short():
    with opened("/wal/s", files=MemoryFiles(), group_commit_delay_s=600.0, group_bytes_max=400_000) as log:
        answers = [log.submit(small(n)) for n in range(40)]
        assert answers[0].result(60).seqs.first == 1
    assert all(answer.done() for answer in answers)
    with opened("/wal/s", files=MemoryFiles(), group_commit_delay_s=600.0, queue_bytes_max=2_500_000) as log:
        answers = [log.submit(small(n), deadline_s=10) for n in range(100)]
        waits = log.submit(small(100, text="y" * 2_000_000), deadline_s=10)
        assert not waits.done()
    assert waits.result(0).seqs.first == 101


@pytest.mark.parametrize(
    ("error", "where", "told"),
    [
        (KeyboardInterrupt, "write", KeyboardInterrupt),
        (KeyboardInterrupt, "sync", KeyboardInterrupt),
        (MemoryError, "sync", AppendOutcomeUnknown),
    ],
)
def test_an_append_broken_off_in_its_midst_leaves_its_outcome_open_and_the_log_sound(
    error: type[BaseException], where: str, told: type[BaseException]
):
    """Regression: Ctrl-C in a thread that wrote its own append left half a group.

    The next group was written after it.
    """

    class BreaksOff(MemoryFiles):
        at: str | None = None

        def write(self, node: Any, path: str, position: int, data: bytes) -> None:
            super().write(node, path, position, data)
            if self.at == "write":
                raise error

        def sync(self, node: Any, path: str) -> None:
            super().sync(node, path)
            if self.at == "sync":
                raise error

    files = BreaksOff()
    log = opened("/wal/s", files=files)
    log.append(small(1))
    files.at = where
    with pytest.raises(told):
        log.append(small(2))
    files.at = None
    with pytest.raises(WriterClosed) as refused:
        log.append(small(3))
    assert refused.value.__cause__.code == "append_outcome_unknown"
    log.close()
    assert column(StreamReader("/wal/s", files=files), "id") == [1]


def test_a_forked_childs_copy_of_the_writer_is_closed_and_the_parents_goes_on(tmp_path: Path):
    """Regression: a child that appended wrote over the parent's records, and both had been acknowledged."""
    with opened(tmp_path) as log:
        log.append(small(1))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                log.append(small(100))
                os.write(writing, b"appended")
            except WriterClosed as error:
                os.write(writing, str(error.__cause__).encode())
            finally:
                os._exit(0)
        os.close(writing)
        assert os.waitpid(child, 0)[1] == 0
        assert b"forked" in os.read(reading, 1000)
        os.close(reading)
        log.append(small(2))
        assert column(StreamReader(str(tmp_path)), "id") == [1, 2]


def test_a_forked_child_that_lives_on_keeps_no_lock_of_the_log(tmp_path: Path):
    log = opened(tmp_path, shards=(0, 1))
    reading, writing = os.pipe()
    lives, tells = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.write(tells, b".")
        os.read(reading, 1)  # runs until the parent closes its end
        os._exit(0)
    os.read(lives, 1)
    os.close(lives)
    os.close(tells)
    log.close()
    opened(tmp_path, epoch=2, stream=StreamReader(str(tmp_path)).stream_id).close()
    os.close(writing)
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
def test_what_a_callback_of_a_future_raises_stops_nobody(error: type[BaseException]):
    """Regression: the error ended the writer's thread.

    Others in the group waited for ever, and the locks stayed taken.
    """

    def fails(_: object) -> None:
        raise error

    files = HeldSyncs()
    with opened("/wal/s", files=files) as log:
        files.may_sync.clear()
        first = log.submit(small(1))
        assert files.waiting.wait(60)
        second, third = log.submit(small(2)), log.submit(small(3))
        second.add_done_callback(fails)
        files.may_sync.set()
        assert [future.result(60).seqs.first for future in (first, second, third)] == [1, 2, 3]
        assert log.append(small(4)).seqs.first == 4
    assert column(StreamReader("/wal/s", files=files), "id") == [1, 2, 3, 4]


def test_many_threads_append_and_each_gets_its_own_range(tmp_path: Path):
    acks = {}

    def run(caller: int, log: LogWriter) -> None:
        for n in range(20):
            xid = caller * 100 + n + 1
            acks[xid] = log.append(plain_ops({xid: [(TABLE, 2, f"{xid}"), (OTHER, 1, f"{xid}")]}, shard_of={2: 1}))

    with opened(tmp_path / "s", shards=(0, 1)) as log:
        threads = [threading.Thread(target=run, args=(caller, log)) for caller in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    numbers = sorted(n for ack in acks.values() for n in range(ack.seqs.first, ack.seqs.last + 1))
    assert numbers == list(range(1, 8 * 20 * 3 + 1))
    reader = StreamReader(str(tmp_path / "s"))
    for shard, rows in ((0, 2), (1, 1)):
        of_offset = {}
        for records in reader.read(shard, 0):
            of_offset |= dict(zip(*(records.batch.column(c).to_pylist() for c in ("__offset", "__xid")), strict=True))
        for xid, ack in acks.items():
            assert [of_offset[o] for o in range(*ack.offsets[shard])] == [xid] * rows


def test_a_closed_writer_takes_no_more_and_has_written_what_waited(tmp_path: Path):
    log = opened(tmp_path / "s")
    answers = [log.submit(one(xid)) for xid in range(1, 50)]
    log.close()
    assert all(answer.result(0) for answer in answers)
    with pytest.raises(WriterClosed):
        log.submit(one(50))
    assert xids(StreamReader(str(tmp_path / "s"))) == list(range(1, 50))


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path):
    with opened(tmp_path / "s"), pytest.raises(ShardLocked):
        opened(tmp_path / "s", epoch=2)


def test_after_a_failed_fsync_what_waited_was_not_written_and_says_so():
    files = HeldSyncs()
    log = opened("/wal/s", files=files)
    log.append(one(1))
    files.plan = FaultPlan(fail_sync_at=frozenset({1}))
    files.may_sync.clear()
    first = log.submit(one(2))
    assert files.waiting.wait(60)
    second = log.submit(one(3))
    files.may_sync.set()
    assert first.exception(60).code == "append_outcome_unknown"
    assert second.exception(60).code == "writer_closed"
    with pytest.raises(WriterClosed):
        log.append(one(4))
    assert log.failure() is not None
    log.close()
    assert xids(StreamReader("/wal/s", files=files)) == [1]


def test_a_fenced_writer_takes_no_number_and_no_more_appends():
    reservations = MemoryReservations()
    log = opened("/wal/s", files=MemoryFiles(), reservations=reservations)
    reservations.epoch = 2
    with pytest.raises(StaleEpoch):
        log.append(one(1))
    with pytest.raises(WriterClosed):
        log.append(one(1))
    log.close()


def test_a_full_disk_is_an_answer_and_not_the_end():
    files = MemoryFiles()
    with opened("/wal/s", files=files, disk_used_max=0.5) as log:
        files.capacity_bytes = files.used_bytes()
        with pytest.raises(DiskFull):
            log.append(one(1))
        files.capacity_bytes = 1 << 40
        assert log.append(one(2)).offsets == {0: (0, 1)}


def test_what_follows_an_append_that_failed_is_refused_however_it_comes():
    """Space returns between two groups.

    If the second alone entered, the log would claim to have reached what it lacks.
    """
    source, files = SourceId(1), HeldSyncs()

    def transaction(number: int) -> WriteOps:
        behind = {source: Lsn(number - 1)} if number > 1 else {}
        return replace(one(number), reached={source: Lsn(number)}, behind=behind)

    def other(number: int) -> WriteOps:
        return replace(one(number), reached={})

    with opened("/wal/s", files=files, disk_used_max=0.5) as log:
        log.append(transaction(1))
        files.may_sync.clear()
        running = log.submit(other(100))
        assert files.waiting.wait(60)
        files.capacity_bytes = files.used_bytes()
        waiting = [log.submit(transaction(2)), log.submit(transaction(3))]
        files.may_sync.set()
        running.result()
        assert [type(future.exception()) for future in waiting] == [DiskFull, DiskFull]
        files.capacity_bytes = 1 << 40
        for ops in (transaction(3), transaction(4)):
            with pytest.raises(LogError, check=coded("out_of_order")):
                log.append(ops)
            assert code_of(log.submit(ops).exception()) == "out_of_order"
        assert log.reached() == {source: Lsn(1)}
        files.may_sync.clear()
        files.waiting.clear()
        running = log.submit(other(101))
        assert files.waiting.wait(60)
        mixed = [log.submit(ops) for ops in (transaction(4), transaction(2), transaction(3), other(102))]
        files.may_sync.set()
        assert code_of(mixed[0].exception()) == "out_of_order"
        assert [future.result().seqs.count for future in mixed[1:]] == [1, 1, 1]
        assert log.reached() == {source: Lsn(3)}
    assert xids(StreamReader("/wal/s", files=files)) == [1, 100, 101, 2, 3, 102]


def test_a_spilled_operation_is_a_group_of_its_own_and_visible_whole(tmp_path: Path):
    with opened(tmp_path / "s", shards=(0, 1), segment_bytes=4096) as log:
        answers = [
            log.submit(one(1)),
            log.submit(plain_spilled(2, [[(TABLE, 50, "a"), (OTHER, 20, "b")]] * 5, shard_of={2: 1})),
            log.submit(one(3)),
        ]
        assert [a.result(60).seqs.count for a in answers] == [1, 350, 1]
        reader = StreamReader(str(tmp_path / "s"))
        assert reader.cut(1, rows_max=10) == 351, "a bound never splits an operation"
        found = list(reader.read_between(1, 351, offsets=True))
        assert sum(r.batch.num_rows for r in found) == 350
        index = sorted(i for r in found for i in r.batch.column("__commit_index").to_pylist())
        assert index == list(range(350))


def test_spans_cover_a_range_exactly_whatever_their_size(tmp_path: Path):
    with opened(tmp_path / "s", shards=(0, 1), segment_bytes=8192) as log:
        for xid in range(1, 60):
            log.append(plain_ops({xid: [(TABLE, 3, "a"), (OTHER, 2, "b")]}, shard_of={2: 1}))
        reader = StreamReader(str(tmp_path / "s"))
        for after, upto in ((0, 295), (7, 133), (10, 10), (100, 101), (294, 295)):
            for bytes_target in (1, 5000, 1 << 30):
                spans = reader.spans(after, upto, bytes_target=bytes_target)
                seqs = [s.as_py() for span in spans for r in reader.read_span(span) for s in r.batch.column("__seq")]
                assert sorted(seqs) == list(range(after + 1, upto + 1))
            between = [s.as_py() for r in reader.read_between(after, upto, table=2) for s in r.batch.column("__seq")]
            assert between == [n for n in range(after + 1, upto + 1) if (n - 1) % 5 >= 3]
        with pytest.raises(TokenFromFuture):
            reader.spans(0, 296)
        cuts, at = [], 0
        while (following := reader.cut(at, rows_max=12)) != at:
            cuts.append(following - at)
            at = following
        assert (set(cuts[:-1]), sum(cuts)) == ({10}, 295)


def test_one_tables_reading_costs_its_own_bytes_not_the_logs(tmp_path: Path):
    class Counted(RealFiles):
        read_bytes = 0

        def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
            data = super().read(path, position, length)
            self.read_bytes += len(data)
            return data

    many = [plain_table(number) for number in range(1, 101)]
    with opened(tmp_path / "s") as log:
        log.append(plain_ops({1: [(table, 200, "some text " * 20) for table in many]}))
        files = Counted()
        reader = StreamReader(str(tmp_path / "s"), files=files)
        upto = reader.cut(0, rows_max=1)  # and the index of frames is known
        files.read_bytes = 0
        assert sum(r.batch.num_rows for r in reader.read_between(0, upto, table=57)) == 200
        one_table = files.read_bytes
        files.read_bytes = 0
        assert sum(r.batch.num_rows for r in reader.read_between(0, upto)) == 20_000
        assert one_table < files.read_bytes / 5


def test_waiting_ends_when_something_comes_or_at_the_deadline(tmp_path: Path):
    with opened(tmp_path / "s") as log:
        reader = StreamReader(str(tmp_path / "s"))
        assert not reader.wait_beyond(0, 0.02)
        threading.Timer(0.05, lambda: log.submit(one(1))).start()
        assert reader.wait_beyond(0, 20)
        assert reader.schemas() == {1: TABLE}


def test_the_reader_needs_the_core_install_only():
    import subprocess
    import sys

    code = (
        "import sys, millstream.wal.reader, millstream.wal.mending.inspect; "
        "print([m for m in ('numba', 'sqlalchemy', 'psycopg', 'pydantic', 'deltalake', 'duckdb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
