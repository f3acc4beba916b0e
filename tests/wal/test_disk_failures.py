"""A full disk, a failed write, a failed fsync: the errors that callers get, and what a restart finds."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.wal.log_writers import column, opened, small
from tests.wal.truth import SMALL, Truth

from millstream.errors import AppendOutcomeUnknown, DiskFull, MillstreamError, WriterClosed
from millstream.model.operations import TableRows
from millstream.testing.errors import coded
from millstream.testing.files import FaultPlan, MemoryFiles, keep_any, lose_all
from millstream.wal.reader import StreamReader


def test_after_a_failed_fsync_the_writer_is_poisoned_and_its_tail_stays_unreadable():
    for failing in range(1, 60):
        truth = Truth()
        files = MemoryFiles()
        log = truth.open(files)
        files.plan = FaultPlan(fail_sync_at=frozenset({failing}))
        told_unknown = None
        try:
            for _ in range(6):
                truth.commit(log, truth.ops([(1, 3), (2, 3)], [(3, 20)]))
                if log.failure is not None:  # sealing failed: the group before it was durable
                    break
        except AppendOutcomeUnknown as error:
            told_unknown = error
        else:
            if log.failure is None:
                break  # more fsyncs than there are
        before = truth.shown(files)
        assert set(before) == set(truth.acknowledged)
        with pytest.raises(WriterClosed):
            log.commit([truth.ops([(1, 1)])])
        log.close()
        for keep in (None, lose_all, keep_any(failing)):
            survivor = files.crash(keep)
            truth.open(survivor).abandon()
            assert truth.judge(survivor, seen=before) in (before, truth.attempted), told_unknown
    else:
        raise AssertionError("no run came to its end")


def test_a_disk_that_cannot_look_at_the_folder_costs_that_append_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Regression: the log was called missing."""

    def broken(path: str, **_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    with opened(tmp_path) as log:
        log.append(small(1))
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", broken)
            with pytest.raises(MillstreamError, check=coded("io_failed")):
                log.append(small(2))
        log.append(small(3))
    assert column(StreamReader(str(tmp_path)), "id") == [1, 3]


def test_a_failed_write_that_is_not_for_space_poisons_too(truth: Truth):
    files = MemoryFiles()
    log = truth.open(files)
    truth.commit(log, truth.ops([(1, 1)]))
    files.plan.fail_write_at = frozenset({files.plan.writes + 1})
    with pytest.raises(AppendOutcomeUnknown) as caught:
        truth.commit(log, truth.ops([(1, 1), (2, 1)]))
    assert caught.value.__cause__.errno == errno.EIO
    with pytest.raises(WriterClosed):
        truth.commit(log, truth.ops([(1, 1)]))
    log.abandon()
    truth.open(files).abandon()
    assert truth.judge(files) == [1]


def test_a_full_disk_refuses_whole_groups_and_appends_resume_when_there_is_space():
    for spare_bytes in range(0, 9_000, 450):
        truth = Truth()
        files = MemoryFiles()
        log = truth.open(files, options=replace(SMALL, disk_used_max=1.0))
        truth.commit(log, truth.ops([(1, 2), (2, 2)]))
        files.capacity_bytes = files.used_bytes() + spare_bytes
        refused = truth.ops([(1, 30), (2, 30)], size=120)
        with pytest.raises(DiskFull):
            truth.commit(log, refused)
        truth.refused.add(2)
        assert truth.judge(files) == [1]
        files.capacity_bytes = 1 << 40
        truth.commit(log, truth.ops([(2, 1), (3, 1)]))
        truth.judge(files)
        survivor = files.crash(keep_any(spare_bytes))
        truth.open(survivor).abandon()
        assert truth.judge(survivor) == [1, 3]


def test_above_disk_used_max_appends_are_refused_and_reads_go_on(truth: Truth):
    files = MemoryFiles()
    log = truth.open(files)
    truth.commit(log, truth.ops([(1, 2)]))
    files.capacity_bytes = files.used_bytes() * 100 // 95
    with pytest.raises(DiskFull) as caught:
        truth.commit(log, truth.ops([(1, 1)]))
    assert caught.value.retry == "operator"
    assert truth.judge(files) == [1]
    files.capacity_bytes = files.used_bytes() * 3
    truth.commit(log, truth.ops([(1, 1)]))
    assert truth.judge(files) == [1, 3]


def test_recovery_needs_no_free_space_thanks_to_its_spare(truth: Truth):
    files = MemoryFiles()
    log = truth.open(files)
    truth.commit(log, truth.ops([(1, 2), (2, 2)]))
    truth.commit(log, truth.ops([(1, 3)]))
    survivor = files.crash(lose_all)
    survivor.capacity_bytes = survivor.used_bytes()
    truth.open(survivor)
    assert truth.judge(survivor) == [1, 2]


def test_a_log_that_ended_sealed_begins_its_next_segment_in_the_spare(truth: Truth):
    files = MemoryFiles()
    log = truth.open(files)
    truth.commit(log, truth.ops([(1, 2), (2, 2)]))
    log.close()
    for _ in range(3):
        files = files.crash(lose_all)
        files.capacity_bytes = files.used_bytes()
        truth.open(files).close()
        assert truth.judge(files) == [1]
    files.capacity_bytes = 1 << 40
    truth.commit(truth.open(files), truth.ops([(1, 2)]))
    assert truth.judge(files) == [1, 2]


def test_without_a_spare_and_without_space_the_log_stays_readable(truth: Truth):
    files = MemoryFiles()
    log = truth.open(files)
    truth.commit(log, truth.ops([(1, 2), (2, 2)]))
    files.remove("/wal/shop/00000/recovery.spare")
    files.remove("/wal/shop/00001/recovery.spare")
    log.abandon()
    files.capacity_bytes = files.used_bytes()
    with pytest.raises(DiskFull):
        truth.open(files)
    assert truth.judge(files) == [1]
    files.capacity_bytes = 1 << 40
    truth.open(files)
    assert truth.judge(files) == [1]


def test_a_spilled_operation_that_does_not_fit_leaves_nothing(truth: Truth):
    files = MemoryFiles()
    log = truth.open(files)
    files.capacity_bytes = files.used_bytes() * 2
    with pytest.raises(DiskFull):
        truth.commit(log, truth.spilled(*[[(1, 40), (2, 40)] for _ in range(40)]))
    truth.refused.add(1)
    files.capacity_bytes = 1 << 40
    truth.commit(log, truth.ops([(1, 1)]))
    assert truth.judge(files) == [2]


def test_rows_that_cannot_be_read_fail_their_caller_only(truth: Truth):
    def torn() -> Iterator[tuple[TableRows, ...]]:
        yield ()
        raise OSError(errno.EIO, "the spill file is gone")

    files = MemoryFiles()
    log = truth.open(files)
    spilled = truth.spilled([(1, 2)])
    broken = type(spilled)(spilled.operation, spilled.counts, torn, spilled.reached)
    with pytest.raises(OSError, match="spill file"):
        truth.commit(log, broken)
    assert log.failure is None
    truth.commit(log, truth.ops([(1, 1)]))
    assert truth.judge(files) == [2]
