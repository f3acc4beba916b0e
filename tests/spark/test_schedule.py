"""When a table is folded: the bound on dead bytes, as arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.lake.upkeep import KEEP_S
from millstream.spark.schedule import (
    DISK_FACTOR,
    SMALL_BYTES,
    FoldHistory,
    fold_interval_s,
    fold_is_due,
)


def test_a_table_that_was_never_folded_is_due() -> None:
    assert fold_is_due(FoldHistory(), 0.0)


def test_a_large_table_that_is_rewritten_whole_folds_every_75_seconds() -> None:
    last = FoldHistory(ended_s=100.0, took_s=3.0, live_bytes=100 << 20, removed_bytes=100 << 20)

    assert fold_interval_s(last) == 76.0 - 3.0
    assert not fold_is_due(last, 172.9)
    assert fold_is_due(last, 173.0)


def test_a_small_table_waits_no_longer_than_its_last_fold_took() -> None:
    assert fold_interval_s(FoldHistory(0.0, 0.05, SMALL_BYTES - 1, SMALL_BYTES - 1)) == 0.05


@given(
    live=st.integers(SMALL_BYTES, 1 << 40),
    share=st.floats(0, 1),
    took=st.floats(0.001, 60),
)
def test_steady_folds_keep_disk_bytes_within_the_factor(live: int, share: float, took: float) -> None:
    removed = int(live * share)
    period = fold_interval_s(FoldHistory(0.0, took, live, removed)) + took
    # What was replaced goes before a fold begins, once it is KEEP_S old; the most lies there just before that fold's commit.
    replaced = [-period * number for number in range(1, int(KEEP_S / period) + 3)]
    there = sum(removed for at in replaced if at > -took - KEEP_S)

    assert live + removed + there <= DISK_FACTOR * live
