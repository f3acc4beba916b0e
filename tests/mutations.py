"""Defects that a search has to find: each a world in which something is done wrongly, and a seed that notices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar, Protocol

from tests.seeds import Drawn


class Mutation(Drawn, Protocol):
    """A kind of worlds, drawn from seeds, with a defect."""

    found_by: ClassVar[int]
    """A seed that notices."""

    def __init__(self, seed: int) -> None: ...


def noticed(mutation: type[Mutation], seed: int) -> str | None:
    """What that seed says of the defect, if anything: a promise has to be broken. A mutation that fails otherwise shows nothing, and raises."""
    try:
        mutation(seed).play()
    except AssertionError as error:
        return str(error) or repr(error)
    return None


def check_found(mutation: type[Mutation]) -> None:
    """Its seed has to notice it still."""
    assert noticed(mutation, mutation.found_by), (
        f"a seed that finds it: python -m {mutation.__module__} {mutation.__name__}"
    )


def main(mutations: Sequence[type[Mutation]], seeds_max: int, arguments: list[str]) -> int:
    """Say which of the first seeds finds each defect, or those that are named; 1 where none does."""
    missed = 0
    for mutation in mutations:
        if arguments and mutation.__name__ not in arguments:
            continue
        found = next(((seed, said) for seed in range(1, seeds_max + 1) if (said := noticed(mutation, seed))), None)
        missed += not found
        sys.stdout.write(f"{mutation.__name__}: {found or 'not found'}\n")
        sys.stdout.flush()
    return 1 if missed else 0
