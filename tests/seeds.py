"""Searches: lives and worlds drawn from seeds, played one after the other; a seed always repeats the same one."""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hypothesis import settings


class Violation(AssertionError):
    """A promise was broken; its message has all the facts."""


class Drawn(Protocol):
    """A world or life that is drawn from a seed."""

    counts: Counter[str]
    """Number of each kind of event."""

    def play(self) -> None:
        """Play all of it. Raises if a promise is broken."""


@dataclass(frozen=True, slots=True)
class Seeds:
    """The seeds of one run of the tests."""

    drawn: int
    """The number that this run draws from; 0 plays the kept seeds."""
    is_quick: bool
    """Whether `make test` runs, which plays fewer of them."""

    def kept_or_new(self, kept: int) -> int:
        """Return a seed: the kept one, or one that differs from run to run."""
        return kept + self.drawn

    def kept_and_new(self, kept: int) -> list[int]:
        """Return the kept seed, and a second one if this run draws any: for searches of few seeds."""
        return [kept, kept + self.drawn] if self.drawn else [kept]

    def count(self, whole: int, *, quick: int) -> int:
        """Return how many seeds, rounds or examples to play."""
        return quick if self.is_quick else whole


def examples(whole: int) -> int:
    """Return how many examples a test draws that sets a number of its own: in `make test` a quarter, as others do."""
    return max(4, whole // 4) if settings.get_current_profile_name() == "quick" else whole


def search(
    draw: Callable[[int], Drawn], first: int, count: int, *, until: int = 1
) -> tuple[dict[int, str], Counter[str]]:
    """Play that many seeds; return the broken promises by seed, and event counts.

    Stop once `until` promises are broken.
    """
    broken: dict[int, str] = {}
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        one = draw(seed)
        try:
            one.play()
        except Exception as error:  # noqa: BLE001 - whatever breaks is found
            broken[seed] = str(error) if isinstance(error, Violation) else traceback.format_exc()
        counts += one.counts
        counts["seeds"] += 1
        if len(broken) >= until:
            break
    return broken, counts


def main(draw: Callable[[int], Drawn], arguments: list[str]) -> int:
    """Play `FIRST COUNT`, and print the outcome; return 1 if a seed broke a promise."""
    first, count = int(arguments[0]), int(arguments[1])
    began = time.monotonic()
    broken, counts = search(draw, first, count, until=5)
    for seed, what in broken.items():
        sys.stdout.write(f"seed {seed}: {what}\n")
    sys.stdout.write(
        f"{counts['seeds']} seeds, {len(broken)} broken, {time.monotonic() - began:.1f} s; {dict(counts.most_common())}\n"
    )
    return 1 if broken else 0
