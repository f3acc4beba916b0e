"""The size of a copy's chunks, and the pause between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.capture.copying.chunk_sizes import AIM_BYTES, AIM_S, CUT_AT, ChunkSizes
from millstream.capture.copying.throttle import OPEN_BYTES_MAX, CopyRate, OpenBytes


def test_chunks_grow_up_to_what_is_configured_while_they_take_less_than_their_time() -> None:
    sizes = ChunkSizes(50_000)
    asked = []
    for _ in range(5):
        asked.append(sizes.rows())
        sizes.note(asked[-1], asked[-1] * 100, 0.2)
    assert asked == [10_000, 20_000, 40_000, 50_000, 50_000]


def test_a_slow_source_is_asked_for_as_much_as_it_reads_in_the_time() -> None:
    sizes = ChunkSizes(50_000)
    for _ in range(12):
        rows = sizes.rows()
        sizes.note(rows, rows * 100, rows / 1500)  # 1,500 rows a second
    assert 750 <= sizes.rows() <= 3000
    sizes.note(sizes.rows(), 100, 3600.0)
    for _ in range(12):
        sizes.note(sizes.rows(), 100, 3600.0)
    assert sizes.rows() == 100, "and never for less than what a round trip is worth"


@given(
    st.lists(st.tuples(st.integers(1, 50_000), st.integers(1, 10**7), st.floats(0.0, 100.0)), max_size=20),
    st.integers(1, 10**6),
)
def test_a_chunk_never_asks_for_more_rows_than_configured_nor_for_more_bytes_than_its_aim(
    chunks: list[tuple[int, int, float]], rows_max: int
) -> None:
    sizes = ChunkSizes(rows_max)
    for rows, width, seconds in chunks:
        sizes.note(rows, rows * width, seconds)
        assert 1 <= sizes.rows() <= rows_max
        assert sizes.rows() == 1 or sizes.rows() * width <= AIM_BYTES


@given(st.lists(st.tuples(st.integers(0, 10**8), st.floats(0.0, 5.0)), min_size=1, max_size=50), st.integers(1, 10**9))
def test_what_is_read_over_any_time_is_what_the_rate_allows_and_one_chunk(
    chunks: list[tuple[int, float]], rate: int
) -> None:
    pace = CopyRate(rate)
    now = 0.0
    read = 0
    for size, idle in chunks:
        now += idle + pace.wait_s(now + idle)
        assert read <= rate * now * 1.000001 + 1, "all that was read before is paid for"
        pace.note(size, now)
        read += size


def test_another_rate_counts_at_once() -> None:
    pace = CopyRate(1_000)
    pace.note(100_000, 0.0)
    assert pace.wait_s(0.0) == pytest.approx(100.0)
    pace.allow(50_000, 10.0)
    assert pace.wait_s(10.0) == pytest.approx(90_000 / 50_000)
    pace.allow(None, 10.0)
    assert pace.wait_s(10.0) == 0.0


def test_under_a_low_rate_chunks_are_small_so_that_they_come_evenly() -> None:
    assert CopyRate(None).aim_bytes(2) == AIM_BYTES
    for workers in (4, 16, 64):
        assert CopyRate(None).aim_bytes(workers) * CUT_AT * workers == OPEN_BYTES_MAX
    assert CopyRate(1 << 20).aim_bytes(4) * 4 == AIM_S * (1 << 20)
    assert CopyRate(1).aim_bytes(4) == 64 << 10


def test_workers_that_read_side_by_side_share_one_bound() -> None:
    """Regression: each worker saw only what had been read, so all of them went on at once below the bound."""
    open_bytes = OpenBytes()
    asked = OPEN_BYTES_MAX // 4
    assert [open_bytes.reserve(asked, held=asked) for _ in range(5)] == [True, True, True, False, False]
    open_bytes.release(asked)
    assert not open_bytes.reserve(asked, held=2 * asked), "what was read is held now"
    assert open_bytes.reserve(asked, held=asked)


def test_a_chunk_of_any_size_is_read_where_nothing_else_is_open() -> None:
    open_bytes = OpenBytes()
    assert open_bytes.reserve(3 * OPEN_BYTES_MAX, held=0)
    assert not open_bytes.reserve(1, held=0)
    open_bytes.release(3 * OPEN_BYTES_MAX)
    assert open_bytes.reserve(1, held=0)
