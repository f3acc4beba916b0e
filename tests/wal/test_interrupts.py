"""Ctrl-C and unexpected failures at the places between a writer's steps: nothing hangs, and nothing acknowledged is lost."""

from __future__ import annotations

import dis
import errno
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import UUID

import pytest
from tests.refused_threads import refused_threads
from tests.wal.log_writers import Others, column, opened, small
from tests.wal.plain_operations import MemoryReservations
from tests.wal.test_many_writers import FOLDER, Writers

from millstream.errors import MillstreamError, WriterClosed
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.replication import AckLevel
from millstream.testing.errors import coded
from millstream.testing.files import FaultPlan, MemoryFile, MemoryFiles
from millstream.wal.reader import StreamReader
from millstream.wal.shard_locks import lock_follower, lock_shards
from millstream.wal.writing.group_commit import GroupCommitter
from millstream.wal.writing.writer import LogOptions, LogWriter

_INTERRUPTED = ("writing/writer.py", "writing/group_commit_queue.py", "writing/waiters.py", "threading.py")
"""The code that queues and locks. Below it, `GroupCommitter.uninterrupted` poisons the writer."""


class CtrlC:
    """Raises KeyboardInterrupt once, at the n-th of the places where CPython looks for signals, in this thread's calls."""

    def __init__(self, at: int) -> None:
        self._left = at
        self._last: dict[FrameType, str] = {}
        self.came = False

    def __call__(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        frame.f_trace_opcodes = True
        if frame.f_back is not None and self._last.get(frame.f_back, "").startswith("CALL"):
            self._last[frame.f_back] = "a call of Python's"  # CPython looks for signals at its beginning only
        self._last[frame] = "RESUME"
        return self._step if frame.f_code.co_filename.endswith(_INTERRUPTED) else None

    def _step(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "opcode":
            last = self._last.get(frame, "")
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if last.startswith("CALL") or last in {"RESUME", "JUMP_BACKWARD"}:
                self._left -= 1
                if not self._left:
                    self.came = True
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self._step


@pytest.mark.parametrize("delay_s", [0.0, 0.0005], ids=["writes alone", "queues"])
def test_ctrl_c_at_any_place_of_an_append_leaves_a_log_that_goes_on_or_says_why_not(delay_s: float):
    """Regression: right after a lock was taken, or in the midst of a wake-up, it left all later appends, and `close`, waiting."""
    place = 0
    while _broken_off_at(place := place + 1, delay_s):
        pass
    assert place > 10


def _broken_off_at(place: int, delay_s: float) -> bool:
    """Return whether an append has so many places."""
    files, reservations, stream = MemoryFiles(), MemoryReservations(), StreamId(UUID(int=7))
    log = opened("/wal/s", files=files, reservations=reservations, stream=stream, group_commit_delay_s=delay_s)
    log.append(small(1))
    ctrl_c, known = CtrlC(place), [1]
    sys.settrace(ctrl_c)
    try:
        log.append(small(2))
        known.append(2)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    pool = ThreadPoolExecutor(1)
    try:
        pool.submit(log.append, small(3)).result(20)
        known.append(3)
    except WriterClosed:
        pass
    pool.submit(log.close).result(20)
    with opened("/wal/s", files=files, reservations=reservations, stream=stream, epoch=2) as again:
        again.append(small(4))
    found = Counter(column(StreamReader("/wal/s", files=files), "id"))
    assert {*known, 4} <= set(found)
    assert set(found.values()) == {1}
    return ctrl_c.came


def test_a_failure_before_a_group_has_its_time_leaves_no_number_in_flight():
    """Regression: the numbers were drawn before, and stayed undecided: readers stood still while appends were acknowledged."""

    def broken() -> None:
        raise MemoryError

    files = MemoryFiles()
    with opened("/wal/s", files=files) as log:
        log.hear_before_groups(broken)
        with pytest.raises(MemoryError):
            log.append(small(1))
        log.hear_before_groups(lambda: None)
        assert log.append(small(2)).seqs.last <= log.persisted_upto()
        assert column(StreamReader("/wal/s", files=files), "id") == [2]


@pytest.mark.parametrize("delay_s", [0.0, 0.0005], ids=["writes alone", "queues"])
def test_a_failure_between_two_groups_takes_no_ack_away_and_ends_the_writer(
    delay_s: float, monkeypatch: pytest.MonkeyPatch
):
    """Regression: the durable append failed with it; or the writing thread ended, and the writer called itself well."""

    def broken(_committer: GroupCommitter) -> None:
        raise RuntimeError("can't start new thread")

    files, stream = MemoryFiles(), StreamId(UUID(int=7))
    log = opened("/wal/s", files=files, stream=stream, group_commit_delay_s=delay_s)
    monkeypatch.setattr(GroupCommitter, "roll", broken)
    log.append(small(1))
    with pytest.raises(WriterClosed) as refused:
        log.append(small(2))
    assert isinstance(refused.value.__cause__, MillstreamError)
    assert log.failure() is not None
    log.close()
    monkeypatch.undo()
    with opened("/wal/s", files=files, stream=stream, epoch=2) as again:
        again.append(small(3))
    assert column(StreamReader("/wal/s", files=files), "id") == [1, 3]


class CountedFiles(MemoryFiles):
    """Memory files that know how many of them are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[MemoryFile] = set()

    def create(self, path: str) -> MemoryFile:
        return self._counted(super().create(path))

    def open_write(self, path: str) -> MemoryFile:
        return self._counted(super().open_write(path))

    def _counted(self, file: MemoryFile) -> MemoryFile:
        close = file.close

        def closed() -> None:
            self.open.discard(file)
            close()

        file.close = closed  # type: ignore[method-assign]
        self.open.add(file)
        return file


def test_an_open_that_fails_leaves_no_file_open_and_says_what_failed():
    """Regression: each try on a full disk left the segments of the first shards open; a broken disk ended the owner."""
    files, reservations, stream = CountedFiles(), MemoryReservations(), StreamId(UUID(int=7))

    def open_it(epoch: int) -> None:
        with opened("/wal/s", files=files, shards=(0, 1), reservations=reservations, stream=stream, epoch=epoch) as log:
            log.append(small(epoch))

    open_it(1)
    at, code = 0, "io_failed"
    while code == "io_failed":
        files.plan = FaultPlan(fail_at=frozenset({at := at + 1}))
        with pytest.raises(MillstreamError) as failed:
            open_it(at + 1)
        code = failed.value.code
        assert not files.open
    assert code == "append_outcome_unknown"  # by then it was open
    assert at > 20


def test_a_first_open_that_fails_leaves_no_file_open():
    """Regression: a mark that couldn't be made was left open."""
    at, code = 0, "io_failed"
    while code == "io_failed":
        files = CountedFiles()
        files.plan = FaultPlan(fail_at=frozenset({at := at + 1}))
        with pytest.raises(MillstreamError) as failed, opened("/wal/s", files=files) as log:
            log.append(small(1))
        code = failed.value.code
        assert not files.open
    assert at > 10


@pytest.mark.parametrize(
    ("lock", "of", "refused"),
    [
        (lambda files: lock_shards(files, FOLDER, [ShardId(0)]), CountedFiles, "read"),
        (lambda files: lock_shards(files, FOLDER, [ShardId(0)]), MemoryFile, "lock"),
        (lambda files: lock_follower(files, FOLDER), MemoryFile, "lock"),
    ],
    ids=["a mark's bytes", "a mark's lock", "a follower's lock"],
)
def test_a_lock_that_the_system_refuses_leaves_no_file_open(
    lock: Callable[[CountedFiles], object], of: type, refused: str, monkeypatch: pytest.MonkeyPatch
):
    """Regression: each try left one."""

    def broken(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    files = CountedFiles()
    files.makedirs(FOLDER)
    lock_shards(files, FOLDER, [ShardId(0)])[ShardId(0)].close()
    monkeypatch.setattr(of, refused, broken)
    with pytest.raises(OSError, match="no locks"):
        lock(files)
    assert not files.open


@pytest.mark.parametrize("refused", ["wal-writer-", "wal-levels"])
@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "on disk"])
def test_a_writer_whose_thread_is_refused_releases_its_shards(tmp_path: Path, refused: str, *, in_memory: bool):
    """Regression: the process held the locks until its end, so its next tries met another writer: itself."""
    files, reservations = CountedFiles() if in_memory else None, MemoryReservations()

    def open_it(epoch: int) -> LogWriter:
        return LogWriter.open(
            str(tmp_path),
            stream=StreamId(UUID(int=7)),
            shards=[ShardId(0), ShardId(1)],
            epoch=Epoch(epoch),
            reservations=reservations,
            files=files,
            options=LogOptions(disk_used_max=1.0, acks=AckLevel.parse("durable(1)"), acks_patience_s=0.0),
            high_water=Others(),
        )

    before = set(threading.enumerate())
    with refused_threads(refused), pytest.raises(MillstreamError, check=coded("system_limit")):
        open_it(1)
    assert files is None or not files.open
    assert set(threading.enumerate()) <= before
    open_it(2).close()


def test_a_writer_that_cannot_say_that_it_goes_releases_its_shards():
    """Regression: the locks stayed until the process ended, and it couldn't open the log again."""
    writers = Writers()
    log = writers.start(0)
    writers.append(0)
    writers.files.plan = FaultPlan(fail_sync_at=frozenset({3}))  # behind the footers of its two shards
    log.close()
    assert writers.files.plan.syncs == 3
    for mark in lock_shards(writers.files, FOLDER, [ShardId(0), ShardId(1)]).values():
        mark.close()
