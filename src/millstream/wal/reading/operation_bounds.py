"""Positions that split no operation, by the directories of the frames around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from millstream.codec.log_frame import RecordsFrame
from millstream.codec.log_records import first_seqs
from millstream.model.positions import Seq


def whole_before(
    n: Seq, first: Seq, end: Seq, groups_between: Callable[[Seq, Seq], Iterable[Sequence[RecordsFrame]]]
) -> Seq:
    """Return the greatest position at or below `n` that splits no operation.

    Args:
        n: any number.
        first: below it nothing is left to read.
        end: from it on nothing is durable.
        groups_between: returns the frames of each commit group with numbers in (after, upto].
    """
    while first <= n < end:
        groups = list(groups_between(Seq(n - 1), Seq(n + 1)))
        here, behind = _operation_with(groups, n), _operation_with(groups, Seq(n + 1))
        if here is None or behind is None or here[0] != behind[0]:
            return n
        n = Seq(here[1] - 1)
    return n


def _operation_with(groups: Sequence[Sequence[RecordsFrame]], seq: Seq) -> tuple[object, int] | None:
    """Return an identity of a number's operation, and the first number by which a frame knows the operation."""
    best: tuple[object, int] | None = None
    for frame in (frame for group in groups for frame in group):
        if not frame.header.first_seq <= seq <= frame.header.last_seq:
            continue
        # Operations' numbers follow one another, so it is the last operation that begins at or
        # before the number.
        firsts = first_seqs(frame.operations, frame.batches)
        begun = np.where(firsts <= seq, firsts, -1)
        place = int(begun.argmax())
        if begun[place] >= 0 and (best is None or begun[place] > best[1]):
            facts = frame.operations.slice(place, 1).to_pylist()
            best = (int(frame.header.group_last_seq), facts), int(begun[place])
    return best
