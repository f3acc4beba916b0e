"""Centroids of what a user liked, and the labels that follow from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream_forage.embedding import DIMENSIONS, Floats
from millstream_forage.taste import HALF_LIFE_NS, Liked, label, shares, target_shares, taste


def axis(*components: tuple[int, float]) -> Floats:
    """Return the unit vector with these components."""
    vector = np.zeros(DIMENSIONS)
    for index, value in components:
        vector[index] = value
    return vector / np.linalg.norm(vector)


VECTORS = {number: axis((number % 12, 1.0), (12 + number, 0.3)) for number in range(48)}
"""Four items each of twelve subjects: near within a subject, at right angles between two."""


@given(st.lists(st.tuples(st.integers(0, 47), st.integers(1, 4), st.floats(0.3, 9)), unique_by=lambda entry: entry[0]))
def test_there_are_at_most_eight_centroids_and_no_signal_is_lost(entries: list[tuple[int, int, float]]) -> None:
    liked = [Liked(item, signals, weight, 10**18) for item, signals, weight in entries]
    found = taste(liked, VECTORS)
    assert len(found.centroids) == len(found.signals) <= 8
    assert sum(found.signals) == sum(entry.signals for entry in liked)
    assert np.allclose(np.linalg.norm(found.centroids, axis=1), 1)
    backwards = taste(reversed(liked), VECTORS)
    assert backwards.signals == found.signals, "the order of signals doesn't matter"
    assert np.array_equal(backwards.centroids, found.centroids)


def test_near_items_share_a_centroid_and_far_ones_do_not() -> None:
    found = taste([Liked(0, 1, 1, 0), Liked(12, 1, 1, 0), Liked(1, 1, 1, 0)], VECTORS)
    assert found.signals == (2, 1)
    assert found.similarities(np.array([VECTORS[24], VECTORS[13]])).tolist() == [
        pytest.approx(0.93, abs=0.02),
        0,  # its centroid has one signal only
    ]


def test_two_signals_of_one_item_confirm_it() -> None:
    assert len(taste([Liked(0, 2, 1.3, 0)], VECTORS).confirmed) == 1
    assert len(taste([Liked(0, 1, 1, 0)], VECTORS).confirmed) == 0


def test_newer_signals_weigh_more_by_the_half_life() -> None:
    old, new = Liked(0, 1, 1, 0), Liked(12, 1, 1, 3 * HALF_LIFE_NS)
    centroid = taste([old, new], VECTORS).centroids[0]
    assert centroid[24] / centroid[12] == pytest.approx(8)


def test_a_cluster_that_drifts_apart_falls_into_two() -> None:
    vectors = {1: axis((0, 1)), 2: axis((0, 1), (1, 1.5)), 3: axis((0, 1), (2, 1.5)), 4: axis((2, 1)), 5: axis((1, 1))}
    together = taste([Liked(item, 1, 1, 0) for item in (1, 2, 3)], vectors)
    assert together.signals == (3,)
    apart = taste([Liked(item, 1, 1, 0) for item in (1, 2, 3, 4, 5)], vectors)
    assert sorted(apart.signals) == [1, 2, 2]


def test_nothing_liked_is_near_nothing() -> None:
    found = taste([], {})
    assert found.similarities(np.array([VECTORS[0]])).tolist() == [0]


def test_items_that_cancel_out_are_near_nothing() -> None:
    vectors = VECTORS | {number + 100: -vector for number, vector in VECTORS.items() if number < 12}
    found = taste([Liked(item, 1, 1, 0) for item in vectors if item % 100 < 12], vectors)
    assert sum(found.signals) == 24
    assert np.isfinite(found.centroids).all()


def test_shares_are_parts_of_one_and_targets_begin_equal() -> None:
    assert shares({"food": 3, "sea": 1, "gone": 7}, ["food", "music", "sea"]) == {"food": 0.75, "music": 0, "sea": 0.25}
    assert shares({}, ["food"]) == {"food": 0}
    assert target_shares({}, ["food", "music", "sea"]) == dict.fromkeys(["food", "music", "sea"], 0.333333333)
    assert target_shares({"food": 2}, ["food", "music"]) == {"food": 0.75, "music": 0.25}


def test_a_label_is_a_match_first_then_by_shares() -> None:
    assert label(0.35, 0.0, 0.5) == "match"
    assert label(0.349999999, 0.0, 0.5) == "exploring"
    assert label(0.0, 0.5, 0.5) == "none"
    assert label(0.35, 0.5, 0.5, threshold=0.4) == "none"
