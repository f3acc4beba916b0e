"""Defects that a search has to find: each is a world with one thing done wrongly, and a seed that finds it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar, Protocol

from tests.seeds import Drawn


class Mutation(Drawn, Protocol):
    """A kind of worlds, drawn from seeds, with a defect."""

    found_by: ClassVar[int]
    """A seed that finds the defect."""

    def __init__(self, seed: int) -> None: ...


def noticed(mutation: type[Mutation], seed: int) -> str | None:
    """Return how a seed's world breaks a promise, or None.

    A mutation that fails otherwise shows nothing, and raises.
    """
    try:
        mutation(seed).play()
    except AssertionError as error:
        return str(error) or repr(error)
    return None


def check_found(mutation: type[Mutation]) -> None:
    """Check that the mutation's seed still finds the defect."""
    assert noticed(mutation, mutation.found_by), (
        f"a seed that finds it: python -m {mutation.__module__} {mutation.__name__}"
    )


def main(mutations: Sequence[type[Mutation]], seeds_max: int, arguments: list[str]) -> int:
    """Print which of the first seeds finds each defect, or each of those named; return 1 if one is never found."""
    missed = 0
    for mutation in mutations:
        if arguments and mutation.__name__ not in arguments:
            continue
        found = next(((seed, said) for seed in range(1, seeds_max + 1) if (said := noticed(mutation, seed))), None)
        missed += not found
        sys.stdout.write(f"{mutation.__name__}: {found or 'not found'}\n")
        sys.stdout.flush()
    return 1 if missed else 0
