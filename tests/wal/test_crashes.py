"""Every crash of append, seal and recovery: the process or the machine dies at each operation on the disk.

The disk keeps nothing of the unsynced writes and names, everything (a process kill), or any subset,
torn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import chain

import pytest
from tests.wal.log_writers import OTHER, column, small
from tests.wal.truth import FOLDER, Truth

from millstream.testing.files import Crash, FaultPlan, MemoryFiles, keep_any, lose_all
from millstream.wal.reader import StreamReader

Keep = Callable[[int], Sequence[float]]

OUTCOMES: dict[str, tuple[Keep | None, int, int]] = {
    "all kept": (None, 1, 2),
    "unsynced lost": (lose_all, 2, 2),
    **{f"any subset, seed {seed}": (keep_any(seed), seed, 3) for seed in (1, 2, 3)},
}
"""The writes that the disk keeps, the first operation at which it dies, and the step to the next one."""


def play(truth: Truth, files: MemoryFiles):
    """Write groups on one shard, on both, in several frames, spilled; seal by size and by close; open a new writer."""
    log = truth.open(files)
    truth.commit(log, truth.ops([(1, 2)], [(2, 1)], [(1, 1), (2, 2), (1, 1)]))
    truth.commit(log, truth.ops([(2, 3)]))
    truth.commit(log, truth.ops([(1, 24), (2, 20), (3, 4)]), truth.ops([(4, 2)]))
    truth.commit(log, truth.spilled([(1, 5), (2, 3)], [(1, 4)], [(2, 2), (3, 2)]))
    truth.commit(log, truth.ops([(3, 1)], [(4, 1)]))
    log.close()
    log = truth.open(files)
    truth.commit(log, truth.ops([(1, 1), (2, 1)]))
    truth.commit(log, truth.ops([(2, 1)]))
    log.abandon()


def crashed(truth: Truth, at: int):
    """Return the disk as the system sees it when the process dies at an operation; None if it finishes first."""
    files = MemoryFiles(FaultPlan(crash_at=at))
    try:
        play(truth, files)
    except Crash:
        return files
    return None


@pytest.fixture(scope="module")
def operations():
    """Return how many operations the play takes."""
    truth = Truth()
    files = MemoryFiles()
    play(truth, files)
    assert truth.shown(files) == truth.attempted
    return files.plan.operations


@pytest.mark.sampled
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_crash_at_any_operation_loses_nothing_acknowledged_and_splits_no_operation(outcome: str, operations: int):
    keep, first, step = OUTCOMES[outcome]
    for at in range(first, operations + 1, step):
        truth = Truth()
        died = crashed(truth, at)
        assert died is not None
        seen = truth.shown(died)
        files = died.crash(keep)
        log = truth.open(files)
        there = truth.judge(files, seen=seen)
        truth.commit(log, truth.ops([(1, 1), (2, 2)], [(3, 1)]))
        log.close()
        assert truth.judge(files, seen=there)[: len(there)] == there
        if at % 8 == 0:
            truth.judge_every_way_of_reading(files)


def recovers_at_last(truth: Truth, files: MemoryFiles, seen: list[int], keep: Keep | None) -> bool:
    """Recover; return whether recovery finished. If it died, recover what the disk kept, and check that."""
    try:
        truth.open(files)
    except Crash:
        seen = sorted({*seen, *truth.shown(files)})
    else:
        return True
    files = files.crash(keep)
    truth.open(files).abandon()
    truth.judge(files, seen=seen)
    return False


def recovery_dies_at_each_operation(truth: Truth, found: Callable[[], MemoryFiles], seen: list[int], keep: Keep | None):
    """Let recovery die at each of its operations, until it finishes.

    Args:
        truth: the record of the log that died.
        found: returns the disk as recovery finds it, fresh each time.
        seen: xids that readers saw before.
        keep: which writes the disk keeps that recovery hasn't synced.
    """
    for at in range(1, 80):
        files = found()
        files.plan.crash_at = at
        if recovers_at_last(deepcopy(truth), files, seen, keep):
            return
    raise AssertionError("recovery takes more operations than were tried")


@pytest.mark.sampled
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_crash_at_any_operation_of_recovery_changes_nothing_of_its_outcome(outcome: str, operations: int):
    keep, first, _ = OUTCOMES[outcome]
    for at in range(10 + first, operations + 1, 47):
        truth = Truth()
        died = crashed(truth, at)
        assert died is not None
        recovery_dies_at_each_operation(truth, partial(died.crash, keep), truth.shown(died), keep)


@pytest.mark.long
@pytest.mark.parametrize("outcome", ["unsynced lost", "any subset, seed 1"])
def test_what_a_recovery_that_died_had_found_is_there_though_the_machine_dies_too(outcome: str):
    """A writer is killed within a group on both shards.

    Recovery finds in memory what isn't on the disk, and then the power goes.
    """

    def killed(at: int | None) -> tuple[Truth, MemoryFiles, tuple[int, int]]:
        truth, files = Truth(), MemoryFiles()
        log = truth.open(files)
        truth.commit(log, truth.ops([(1, 2), (2, 1)]))
        begins = files.plan.operations
        files.plan.crash_at = at
        with suppress(Crash):
            truth.commit(log, truth.ops([(1, 1), (2, 2)]))
        return truth, files, (begins, files.plan.operations)

    first, last = killed(None)[2]
    for at in range(first + 1, last + 1, 2):
        truth, died, _ = killed(at)
        found = partial(died.crash, process_only=True)
        recovery_dies_at_each_operation(truth, found, truth.shown(died), OUTCOMES[outcome][0])


def test_recovering_again_finds_the_same(operations: int):
    for at in range(3, operations + 1, 7):
        truth = Truth()
        died = crashed(truth, at)
        files = died.crash(keep_any(at))
        truth.open(files).abandon()
        once = truth.judge(files)
        for keep in (None, lose_all):
            files = files.crash(keep)
            truth.open(files).abandon()
            assert truth.judge(files, seen=once) == once


@pytest.mark.sampled
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_crash_while_small_appends_are_written_loses_none_acknowledged_and_splits_no_group(outcome: str):
    """Groups lie on shard 0, and on both, with a roll in between. An append has as many rows as its number says."""
    keep, first, _ = OUTCOMES[outcome]
    of_both = [small(4, 4), small(5, 5, table=OTHER, shard=1), small(6, 6)]
    groups = [
        [small(1)],
        [small(2, 2), small(3, 3)],
        of_both,
        [small(number, number, text="z" * 200) for number in (7, 8, 9)],
    ]
    rows = [[number for op in group for number in op.tables[0].rows.column("id").to_pylist()] for group in groups]
    for at in range(first, 200, 3):
        truth = Truth()
        files = MemoryFiles(FaultPlan(crash_at=at))
        acknowledged = 0
        try:
            log = truth.open(files)
            for group in groups:
                log.commit(group)
                acknowledged += 1
                log.roll()
            log.close()
        except Crash:
            survivor = files.crash(keep)
        else:
            break
        log = truth.open(survivor)
        there = column(StreamReader(FOLDER, files=survivor), "id")
        shown = [count for count in range(len(rows) + 1) if there == list(chain.from_iterable(rows[:count]))]
        assert shown, f"{there} is no whole number of groups"
        assert shown[0] >= acknowledged
        (ack,) = log.commit([small(10)])
        assert ack.seqs.count == 1
        assert column(StreamReader(FOLDER, files=survivor), "id") == [*there, 10]
        log.abandon()
    else:
        raise AssertionError("it takes more operations than were tried")
