"""The hybrid clock: it moves forward whatever the wall clock does, and stays above every time received.

A wrong clock elsewhere never carries it off.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.crdt.hlc import DRIFT_MAX_NS, ENCODED_SIZE, HLC, next_wall_ns
from millstream.errors import InvalidValue, MergeStateUnreadable, ReplicationError
from millstream.testing.errors import coded

TIMES = st.builds(HLC, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1))


@given(st.lists(st.tuples(st.integers(0, 100), st.none() | st.integers(0, 100)), min_size=1, max_size=30))
def test_times_of_a_node_grow_over_clocks_that_go_back_and_restarts_and_pass_what_it_hears(
    steps: list[tuple[int, int | None]],
) -> None:
    last, logical_walls = HLC(0, 0, 1), 0
    for now, heard in steps:
        # A restart: only the persisted part of the clock is left.
        before = HLC.decode(last.encode())
        remote = None if heard is None else HLC(heard, heard % 3, 2)
        last = before.tick(now) if remote is None else before.observe(remote, now)
        assert last > before
        assert last.node == 1
        assert remote is None or last > remote
        logical_walls = max(logical_walls, now, heard or 0)
        assert last.wall_ns == logical_walls


@given(TIMES, TIMES)
def test_the_order_of_the_bytes_is_that_of_the_times(a: HLC, b: HLC) -> None:
    assert (a.encode() < b.encode()) == (a < b)
    assert len(a.encode()) == ENCODED_SIZE
    assert HLC.decode(a.encode()) == a


def test_a_clock_that_is_too_far_ahead_is_refused_by_its_name() -> None:
    own = HLC(50, 0, 1)
    with pytest.raises(ReplicationError, check=coded("clock_skew"), match=r"region 2 is 60\.0 s ahead") as caught:
        own.observe(HLC(51 + DRIFT_MAX_NS, 0, 2), 50)
    assert caught.value.details["node"] == "region 2"
    with pytest.raises(ReplicationError, check=coded("clock_skew"), match="oslo"):
        own.observe(HLC(200, 0, 2), 50, name="oslo", drift_max_ns=100)
    assert own.observe(HLC(50 + DRIFT_MAX_NS, 7, 2), 50) == HLC(50 + DRIFT_MAX_NS, 8, 1)


def test_the_logical_part_carries_over_and_groups_of_a_log_are_apart_by_their_wall_alone() -> None:
    assert HLC(9, 2**63 - 1, 1).tick(5) == HLC(10, 0, 1)
    assert next_wall_ns(9, 5) == 10
    assert next_wall_ns(9, 12) == 12


def test_no_time_has_numbers_out_of_range_or_other_bytes() -> None:
    for bad in ({"wall_ns": -1}, {"wall_ns": 1, "logical": 2**63}, {"wall_ns": 1, "node": 2**32}):
        with pytest.raises(InvalidValue):
            HLC(**bad)
    for data in (b"", b"\xff" * ENCODED_SIZE, b"\0" * (ENCODED_SIZE + 1)):
        with pytest.raises(MergeStateUnreadable):
            HLC.decode(data)
