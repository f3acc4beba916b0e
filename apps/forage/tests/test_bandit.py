"""Feeds filled by the bandit: the exploring budget, the draws, and propensities against frequencies."""

import math
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_forage.bandit import Arm, Arms, Slot, Table, exploring_budget, fill

FAMILY = 1e-3
"""Chance that a correct bandit fails a comparison of frequencies, over all cells of one slot."""


@st.composite
def arms(draw: st.DrawFn) -> list[Arm]:
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    made: list[Arm] = []
    for size in sizes:
        first = sum(len(arm.items) for arm in made)
        unexplored = draw(st.booleans())
        tried = 2.0 if unexplored else 40.0
        wins, losses = draw(st.floats(0, tried)), draw(st.floats(0, tried))
        made.append(Arm(wins, losses, draw(st.integers(0, 3)), unexplored, range(first, first + size)))
    return made


def left(made: Sequence[Arm], slots: Sequence[Slot], *, unexplored: bool) -> int:
    """Return how many items the arms of one kind have left behind the slots."""
    items = sum(len(arm.items) for arm in made if arm.unexplored == unexplored)
    return items - sum(made[slot.arm].unexplored == unexplored for slot in slots)


@given(arms(), st.integers(1, 30), st.integers(0, 2**53 - 1), st.integers(1, 3))
def test_a_feed_has_distinct_items_and_as_many_as_there_are(
    made: list[Arm], limit: int, seed: int, budget: int
) -> None:
    slots = fill(made, limit=limit, seed=seed, budget=budget)
    assert len(slots) == min(limit, sum(len(arm.items) for arm in made))
    assert len({slot.item for slot in slots}) == len(slots)
    for index, arm in enumerate(made):
        taken = [slot.item for slot in slots if slot.arm == index]
        assert taken == list(arm.items[: len(taken)]), "the best items of an arm come first"
    assert all(0 < slot.propensity <= 1 for slot in slots)
    assert slots == fill(made, limit=limit, seed=seed, budget=budget)


@given(arms(), st.integers(1, 30), st.integers(0, 2**53 - 1), st.integers(1, 3))
def test_a_block_of_seven_explores_one_to_three_times_and_a_rest_at_most_three(
    made: list[Arm], limit: int, seed: int, budget: int
) -> None:
    slots = fill(made, limit=limit, seed=seed, budget=budget)
    for begin in range(0, len(slots), 7):
        block = slots[begin : begin + 7]
        exploring = sum(slot.explore for slot in block)
        unexplored = left(made, slots[:begin], unexplored=True)
        if unexplored == 0:
            assert exploring == 0
        elif left(made, slots[:begin], unexplored=False) == 0:
            assert exploring == len(block)
        elif len(block) == 7:
            assert exploring == min(budget, unexplored)
        else:
            assert 0 <= exploring <= min(3, len(block))


@given(arms(), st.integers(1, 30), st.integers(0, 2**53 - 1))
def test_an_exploring_slot_takes_one_of_the_least_shown_unexplored_arms(made: list[Arm], limit: int, seed: int) -> None:
    slots = fill(made, limit=limit, seed=seed, budget=3)
    for number, slot in enumerate(slots):
        if slot.explore:
            taken = [sum(before.arm == index for before in slots[:number]) for index in range(len(made))]
            eligible = [arm for index, arm in enumerate(made) if arm.unexplored and taken[index] < len(arm.items)]
            assert made[slot.arm].unexplored
            assert made[slot.arm].shown == min(arm.shown for arm in eligible)


def test_the_last_unexplored_items_are_kept_for_the_slots_that_explore() -> None:
    # Thompson would take the only unexplored item at once: its draw is the greatest.
    made = [Arm(1_000, 0, 0, True, [1]), Arm(0, 50, 9, False, range(2, 30))]
    for seed in range(30):
        slots = fill(made, limit=7, seed=seed, budget=3)
        assert [slot.item for slot in slots if slot.explore] == [1]


def test_without_items_the_feed_is_empty() -> None:
    assert fill([], limit=7, seed=1, budget=1) == []
    assert fill([Arm(0, 0, 0, True, [])], limit=7, seed=1, budget=1) == []


def test_a_seed_gives_these_items_with_every_build_of_numpy_and_scipy() -> None:
    made = [
        Arm(0, 0, 0, True, [1, 2, 3]),
        Arm(0.3, 1.2, 2, True, [4, 5, 6]),
        Arm(4.5, 9.25, 20, False, [7, 8, 9]),
        Arm(7.125, 3.5, 15, False, [10, 11, 12]),
    ]
    slots = fill(made, limit=9, seed=2026, budget=2)
    assert [(slot.item, slot.explore) for slot in slots] == GOLDEN_ITEMS
    assert [slot.propensity for slot in slots] == pytest.approx(GOLDEN_PROPENSITIES, rel=1e-9)


GOLDEN_ITEMS = [
    (1, True),
    (10, False),
    (2, True),
    (3, False),
    (4, False),
    (11, False),
    (12, False),
    (5, True),
    (7, False),
]
GOLDEN_PROPENSITIES = [
    0.521278098742,
    0.447834306085,
    0.463831470591,
    0.329789338239,
    0.16024595457,
    0.802430187681,
    0.802430187681,
    0.751521910831,
    0.496956178339,
]


def test_the_budget_grows_with_the_hit_rate_of_exploring() -> None:
    assert exploring_budget(0, 0) == 2
    assert exploring_budget(0, 40) == 1
    assert exploring_budget(8, 40) == 2
    assert exploring_budget(40, 40) == 3


@pytest.mark.parametrize("seeds", [300, pytest.param(20_000, marks=pytest.mark.siege)])
def test_frequencies_over_seeds_agree_with_the_propensities(seeds: int) -> None:
    made = [
        Arm(0, 0, 1, True, [1, 2]),
        Arm(0.25, 0.5, 1, True, [3, 4]),
        Arm(2.5, 3.25, 9, False, [5, 6]),
        Arm(5.0, 11.5, 9, False, [7, 8]),
    ]
    limit, budget = 7, 2
    # Per slot and arm: how often the arm stood there, minus the sum of its chances; and the variance of that.
    excess: dict[tuple[int, int], float] = defaultdict(float)
    variance: dict[tuple[int, int], float] = defaultdict(float)
    chances: dict[tuple[tuple[int, bool], ...], list[float]] = {}
    for seed in range(seeds):
        slots = fill(made, limit=limit, seed=seed, budget=budget)
        history: tuple[tuple[int, bool], ...] = ()
        for number, slot in enumerate(slots):
            if history not in chances:
                chances[history] = chances_after(made, history, limit, budget)
            for arm, chance in enumerate(chances[history]):
                excess[number, arm] += (slot.arm == arm) - chance
                variance[number, arm] += chance * (1 - chance)
            assert slot.propensity == chances[history][slot.arm]
            history += ((slot.arm, slot.explore),)
    # Each slot is a family of its own, by Šidák's correction; the normal quantile is an upper bound.
    bound = math.sqrt(2 * math.log(2 * len(made) / FAMILY))
    for cell, difference in excess.items():
        assert abs(difference) <= bound * math.sqrt(variance[cell]) + 1, cell


def chances_after(made: Sequence[Arm], history: tuple[tuple[int, bool], ...], limit: int, budget: int) -> list[float]:
    """Return the chance of each arm to get the slot after those of `history`, all within one block."""
    table = Table(Arms.of(made))
    exploring = table.exploring_slots(limit, budget)
    for arm, explore in history:
        table.take(arm)
        exploring -= explore
    found = [table.propensity(arm, exploring, limit - len(history)) for arm in range(len(made))]
    assert sum(found) == pytest.approx(1, abs=1e-9)
    return found
