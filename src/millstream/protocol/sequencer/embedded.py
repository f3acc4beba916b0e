"""The embedded sequencer: one writer gives out a stream's numbers.

Rules, kept by this machine and checked by its tests:

1. A number is given at most once, over all incarnations: an incarnation begins above everything that was ever reserved,
   and gives out no number above what is reserved durably.
2. A range is *in flight* from `allocate` until `finish` (durable) or `abort` (will never be).
3. `persisted_upto` is below everything in flight, only grows, and with nothing in flight is the newest number given.

The machine does no I/O: `to_reserve` returns what has to be reserved durably before `allocate` may be called, and
`reserved` notes that this was done. Ranges end in any order; ending one costs the same however many are in flight.
"""

from __future__ import annotations

from typing import Final

from millstream.model.positions import SEQ_MAX, Seq, SeqRange
from millstream.protocol.sequencer.persisted_upto import InFlight

RESERVE_BLOCK: Final = 1_000_000
"""Numbers reserved at a time: at a million records a second the catalog is asked once a second, and a restart skips
at most this many of 2**63."""


class EmbeddedNumbers:
    """Gives out ranges of numbers and tracks up to where all are settled.

    Args:
        reserved_to: the greatest number that any incarnation may have given out; this one begins behind it.
        persisted_upto: the settled end when it began (with nothing in flight: recovery has decided everything).
        block: count of numbers to reserve at a time.

    Concurrency: none; the caller serialises.
    """

    def __init__(self, *, reserved_to: Seq, persisted_upto: Seq, block: int = RESERVE_BLOCK) -> None:
        if persisted_upto > reserved_to:
            raise AssertionError(f"{persisted_upto} is persisted, but only {reserved_to} reserved")
        self._next = reserved_to + 1
        self._reserved_to = reserved_to
        self._persisted_upto = persisted_upto
        self._block = block
        self._in_flight = InFlight()

    @property
    def reserved_to(self) -> Seq:
        """The number up to which numbers are reserved durably."""
        return self._reserved_to

    @property
    def persisted_upto(self) -> Seq:
        """The greatest n such that every number up to and including n is durable or will never be."""
        return self._persisted_upto

    @property
    def newest(self) -> Seq:
        """The greatest number given out (by this incarnation or any before)."""
        return Seq(self._next - 1)

    def to_reserve(self, count: int) -> Seq | None:
        """Return up to where to reserve before `count` numbers can be given; None if enough are reserved."""
        last = self._next + count - 1
        if last <= self._reserved_to:
            return None
        return Seq(max(last, min(self._reserved_to + self._block, SEQ_MAX)))

    def reserved(self, upto: Seq) -> None:
        """Note that numbers have been reserved durably up to there."""
        self._reserved_to = max(self._reserved_to, upto)

    def allocate(self, count: int) -> SeqRange:
        """Give the next `count` numbers, in flight from now on."""
        if count < 1:
            raise AssertionError("an empty range can't be in flight")
        if self.to_reserve(count) is not None:
            raise AssertionError("numbers must be reserved before they are given out")
        given = SeqRange(Seq(self._next), count)
        self._next += count
        self._in_flight.add(given)
        return given

    def finish(self, given: SeqRange) -> Seq:
        """End a range that is durable; return `persisted_upto`. `not_in_flight` if it isn't in flight."""
        return self._end(given)

    def abort(self, given: SeqRange) -> Seq:
        """End a range that will never be; return `persisted_upto`. `not_in_flight` if it isn't in flight."""
        return self._end(given)

    def _end(self, given: SeqRange) -> Seq:
        settled = self._in_flight.end(given)
        if settled is not None:
            self._persisted_upto = settled
        return self._persisted_upto
