"""The number of ranges that a copied table is cut into, and the sampled keys at which it is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from millstream.capture.copying.key_ranges import Range, cuts_among, part_count


def test_only_a_table_of_more_than_a_few_chunks_is_cut_a_range_for_each_worker() -> None:
    assert part_count(4_000, 0, chunk_rows=1_000, workers=3) == 1
    assert part_count(4_001, 0, chunk_rows=1_000, workers=3) == 3
    assert part_count(-1, 200 * 4_001, chunk_rows=1_000, workers=3) == 3, "never analyzed: its size counts"


def test_cuts_share_the_sample_evenly() -> None:
    sample = [(f"{n:03}",) for n in range(90)]
    assert cuts_among(sample, 3) == [("030",), ("060",)]
    assert cuts_among(sample, 1) == []
    assert cuts_among([], 3) == []
    assert cuts_among([("1",)], 3) == [], "nothing lies below the only key"


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 8))
def test_cuts_are_keys_of_the_sample_that_grow_and_leave_no_gap(values: list[int], parts: int) -> None:
    sample = [(f"{value:02}",) for value in sorted(values)]
    cuts = cuts_among(sample, parts)
    assert len(cuts) < parts
    assert set(cuts) <= set(sample)
    assert all(low < high for low, high in pairwise(cuts))
    ranges = Range.cut_at(cuts)
    assert [ranges[0].after, ranges[-1].upto] == [None, None]
    assert all(left.upto == right.after for left, right in pairwise(ranges))
