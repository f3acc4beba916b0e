"""`persisted_upto`: the number up to which every number is durable, or will never be.

- For one writer and its own numbers: `InFlight`, used by `embedded` (the only writer) and `writer_numbers` (one of several).
- For all writers at one moment, as the store shows them: `LedgerView`.
- For readers: `stream_cut`, from the marks of all shards and all writers. A commit group's records lie in several
  shards, whose marks move one after the other. Readers stop at the cut that all of them show, so that they never see a
  part of a group or of a transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from millstream.errors import SequencingError
from millstream.model.ids import ShardId, WriterId
from millstream.model.marks import DurableMark
from millstream.model.positions import SEQ_MAX, Seq, SeqRange


class InFlight:
    """Ranges in the order in which they were given. Ending one costs the same however many there are."""

    def __init__(self) -> None:
        self._given: deque[SeqRange] = deque()
        """Ranges from the oldest open one; some of the later ones may have ended."""
        self._open: set[SeqRange] = set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def first(self) -> Seq | None:
        """The lowest number in flight; None if there is none."""
        return self._given[0].first if self._given else None

    def add(self, given: SeqRange) -> None:
        """Add a range that is in flight from now on; its numbers are above every number given before."""
        self._given.append(given)
        self._open.add(given)

    def end(self, given: SeqRange) -> Seq | None:
        """End a range that is settled.

        Returns:
            The last number before the first in flight now, if this range was the oldest; else None.

        Raises:
            SequencingError (`not_in_flight`): it was never added, or has ended before.
        """
        if given not in self._open:
            raise SequencingError(
                f"numbers {given.first} to {given.last} are not in flight here",
                code="not_in_flight",
                first=int(given.first),
                count=given.count,
            )
        self._open.remove(given)
        settled = None
        while self._given and self._given[0] not in self._open:
            settled = self._given.popleft().last
        return settled


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The store's state at one moment."""

    newest: Seq
    """Every writer that isn't in `positions` is given numbers above it only."""
    positions: Mapping[WriterId, Seq]
    """Positions of all writers; a settled one has the newest number, because none of its numbers is undecided."""
    expired: frozenset[WriterId] = frozenset()
    """Writers that aren't settled and whose lease has run out."""

    @property
    def persisted_upto(self) -> Seq:
        """The number up to which every number is durable and readable, or never will be."""
        return min(self.positions.values(), default=self.newest)


def common_cut(marks: Iterable[DurableMark]) -> Seq:
    """Return the greatest number up to which every mark of one writer shows everything; 0 without marks."""
    marks = list(marks)
    covered = min((mark.group for mark in marks), default=0)
    return Seq(max((mark.persisted_upto for mark in marks if mark.group == covered), default=0))


def left_behind(marks: Mapping[ShardId, DurableMark]) -> Iterator[tuple[ShardId, DurableMark]]:
    """Yield the marks of each writer's oldest group that show a lower number than that group's others, with that number.

    A kill between two moves leaves them so. They have to move before any position does: once a mark
    shows the next group, the number is taken from those that still show the oldest one.
    """
    for writer, cut in writer_cuts(marks.values()).items():
        own = {shard: mark for shard, mark in marks.items() if mark.writer == writer}
        oldest = min(mark.group for mark in own.values())
        for shard, mark in own.items():
            if mark.group == oldest and mark.persisted_upto < cut:
                yield shard, replace(mark, persisted_upto=cut)


def stream_cut(marks: Iterable[DurableMark]) -> Seq:
    """Return the greatest number up to which the marks of all of a stream's writers show everything.

    0 without marks.
    """
    by_writer = _by_writer(marks)
    cuts = _cuts(by_writer)
    living = [writer for writer, own in by_writer.items() if not all(mark.is_settled for mark in own)]
    # If no writer lives, the last to stop has seen most: the other marks' positions of other
    # folders are outdated.
    asked = living or [writer for writer, cut in cuts.items() if cut == max(cuts.values())]
    elsewhere = [_elsewhere(by_writer[writer]) for writer in asked]
    here = min((cuts[writer] for writer in asked), default=Seq(0))
    return min(here, (min if living else max)(elsewhere, default=SEQ_MAX))


def _elsewhere(own: Sequence[DurableMark]) -> Seq:
    return min((mark.elsewhere for mark in own if mark.elsewhere is not None), default=SEQ_MAX)


def writer_cuts(marks: Iterable[DurableMark]) -> dict[WriterId, Seq]:
    """Return, for each writer, the greatest number up to which all its marks show everything of its own."""
    return _cuts(_by_writer(marks))


def _cuts(by_writer: Mapping[WriterId, Sequence[DurableMark]]) -> dict[WriterId, Seq]:
    return {writer: common_cut(own) for writer, own in by_writer.items()}


def _by_writer(marks: Iterable[DurableMark]) -> dict[WriterId, list[DurableMark]]:
    found: dict[WriterId, list[DurableMark]] = {}
    for mark in marks:
        found.setdefault(mark.writer, []).append(mark)
    return found
