"""When a table is folded: the bound on dead bytes, as arithmetic."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from millstream.lake.maintenance import KEEP_S
from millstream.spark.fold_schedule import (
    DISK_FACTOR,
    FOLD_INTERVAL_S,
    SMALL_BYTES,
    FoldHistory,
    fold_interval_s,
    fold_is_due,
)


def test_a_table_that_was_never_folded_is_due() -> None:
    assert fold_is_due(FoldHistory(), 0.0)


def test_a_large_table_that_is_rewritten_whole_folds_every_100_seconds() -> None:
    last = FoldHistory(ended_s=100.0, took_s=3.0, live_bytes=100 << 20, removed_bytes=100 << 20)

    assert fold_interval_s(last) == 301 / 3
    assert not fold_is_due(last, 200.0)
    assert fold_is_due(last, 200.5)


def test_a_small_table_folds_every_30_seconds_or_as_often_as_is_asked_for() -> None:
    last = FoldHistory(0.0, 0.05, SMALL_BYTES - 1, SMALL_BYTES - 1)

    assert fold_interval_s(last) == FOLD_INTERVAL_S == 30.0
    assert fold_interval_s(last, least_s=0.0) == 0.05
    assert not fold_is_due(last, 29.9)
    assert fold_is_due(last, 30.0)


def test_a_table_of_a_few_mebibytes_keeps_its_disk_factor() -> None:
    assert fold_interval_s(FoldHistory(0.0, 0.05, 3 << 20, 3 << 20), least_s=0.0) == 301 / 3


def test_a_fold_of_little_of_a_large_table_waits_for_the_interval_too() -> None:
    assert fold_interval_s(FoldHistory(0.0, 0.2, 1 << 30, 1 << 20)) == 30.0


@given(
    live=st.integers(SMALL_BYTES, 1 << 40),
    share=st.floats(0, 1),
    takes=st.lists(st.floats(0.001, 60), min_size=2, max_size=50),
)
def test_folds_keep_disk_bytes_within_the_factor_whatever_each_takes(
    live: int, share: float, takes: list[float]
) -> None:
    removed = int(live * share)
    now, replaced = 0.0, list[float]()
    for last, took in pairwise(takes):
        now += fold_interval_s(FoldHistory(0.0, last, live, removed))
        # Replaced files go before a fold begins, once they are KEEP_S old; disk use peaks just before that
        # fold's commit.
        replaced = [at for at in replaced if at > now - KEEP_S]
        assert live + removed + removed * len(replaced) <= DISK_FACTOR * live
        now += took
        replaced.append(now)
