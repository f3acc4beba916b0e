"""Tasks for an agent that discovers items, from the reactions to those that are there."""

from __future__ import annotations

from typing import Final

import numpy as np

from millstream_forage.answers import BrowseTasks, Topic
from millstream_forage.clock import MINUTE_NS
from millstream_forage.columns import Ints
from millstream_forage.folded_state import State

INTERVAL_MINUTES: Final = 30
LIMIT_PER_TOPIC: Final = 5
TAG_HINTS_MAX: Final = 10
HINTING_SIGNALS: Final = 1000
"""Newest positive signals that tags are taken from."""


def browse_tasks(state: State, user: int | None, now_ns: int) -> BrowseTasks:
    """Return the tasks: topics by what is liked, and what there is little of.

    A topic's priority is half the mean reward of its signals (0.5 if it has none), and half the part by which the
    category has fewer items than the largest.

    Args:
        user: whose signals; None: all users'.
    """
    since_ns = None if state.heartbeat_ns is None else max(0, now_ns - state.heartbeat_ns)
    return BrowseTasks(
        should_run=since_ns is None or since_ns >= INTERVAL_MINUTES * MINUTE_NS,
        interval_minutes=INTERVAL_MINUTES,
        topics=topics(state, user),
        limit_per_topic=LIMIT_PER_TOPIC,
        tag_hints=tag_hints(state, user),
    )


def topics(state: State, user: int | None) -> list[Topic]:
    """Return a topic for each category, by falling priority, then by name."""
    arms = state.items.arm_names
    rows = counting_signals(state, user)
    of_arms = state.items.arms.values[state.signals.items.values[rows]]
    rewards = np.bincount(of_arms, state.signals.weights.values[rows], minlength=len(arms)).tolist()
    counts = np.bincount(of_arms, minlength=len(arms)).tolist()
    sizes = state.items.arm_sizes.tolist()
    by_category: dict[str, list[int]] = {}
    for arm, (category, _) in enumerate(arms):
        by_category.setdefault(category, []).append(arm)
    largest = max((sum(sizes[arm] for arm in members) for members in by_category.values()), default=0)
    found = []
    for category, members in by_category.items():
        reward = (sum(rewards[arm] for arm in members) + 1) / (sum(counts[arm] for arm in members) + 2)
        scarcity = 1 - sum(sizes[arm] for arm in members) / largest
        found.append(Topic(category, round((reward + scarcity) / 2, 6), sorted({arms[arm][1] for arm in members})))
    return sorted(found, key=lambda topic: (-topic.priority, topic.name))


def tag_hints(state: State, user: int | None) -> list[str]:
    """Return the tags of items that got positive signals, those with the greatest rewards first."""
    rows = counting_signals(state, user)
    rows = rows[state.signals.weights.values[rows] > 0][-HINTING_SIGNALS:]
    weights: dict[str, float] = {}
    for item, weight in zip(
        state.signals.items.values[rows].tolist(), state.signals.weights.values[rows].tolist(), strict=True
    ):
        for tag in state.items.rest.row(item)["tags"]:
            weights[tag] = weights.get(tag, 0) + weight
    return sorted(weights, key=lambda tag: (-weights[tag], tag))[:TAG_HINTS_MAX]


def counting_signals(state: State, user: int | None) -> Ints:
    """Return the rows of the signals that count, in order."""
    if user is None:
        return np.flatnonzero(state.signals.counts.values)
    rows = state.signals.by_user.rows(user)
    counting: Ints = rows[state.signals.counts.values[rows]]
    return counting
