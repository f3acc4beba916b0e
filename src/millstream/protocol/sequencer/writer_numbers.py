"""One writer incarnation's numbers: what is in flight, and the position that follows from it."""

from __future__ import annotations

from millstream.model.ids import Epoch, WriterId
from millstream.model.positions import NO_NUMBERS, Seq, SeqRange
from millstream.protocol.sequencer.persisted_upto import InFlight


class WriterNumbers:
    """Ranges from the request until they are durable or never will be.

    A range is asked for (`asks`), and then given (`given`) or refused (`refused`). If the reply is lost it stays
    asked for, and the store is asked for the newest range that it gave to this incarnation (`resolved`).

    Args:
        writer: the writer's number.
        epoch: epoch of this incarnation.
        floor: a number drawn when the earlier incarnations were fenced and their log was recovered.

    Concurrency: none; the caller serialises. Ending a range costs the same however many are in flight.
    """

    def __init__(self, writer: WriterId, epoch: Epoch, floor: Seq) -> None:
        self.writer = writer
        self.epoch = epoch
        self._position = floor
        """With something in flight: below the first of it. Else the newest number known."""
        self._newest = floor
        self._last = NO_NUMBERS
        self._asked = False
        self._in_flight = InFlight()

    @property
    def position(self) -> Seq:
        """The number up to which all numbers of this writer are settled."""
        return self._position

    @property
    def newest(self) -> Seq:
        """The newest number that this writer knows to have been given to anyone."""
        return self._newest

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight, nor asked for with an unknown outcome: only then may it follow the newest."""
        return not len(self._in_flight) and not self._asked

    def asks(self) -> Seq:
        """Note that a range is about to be asked for; return the position to send with it, which stands from now on."""
        if self._asked:
            raise AssertionError("one range at a time is asked for")
        self._asked = True
        return self._position

    def given(self, given: SeqRange) -> None:
        """Note the reply: the range is in flight from now on."""
        self._asked = False
        self._last = given
        self._newest = max(self._newest, given.last)
        if not len(self._in_flight):
            # No number of this writer lies between its position and the range.
            self._position = Seq(max(self._position, given.first - 1))
        self._in_flight.add(given)

    def refused(self) -> None:
        """Note that the store is known to have given nothing."""
        self._asked = False

    def resolved(self, last: SeqRange) -> SeqRange | None:
        """Return the range whose reply was lost, in flight from now on, if the store gave one; else None.

        Args:
            last: the newest range that the store gave to this incarnation.
        """
        if last.first <= self._position or last.last <= self._last.last:
            # An older range; or one given so late that this writer has passed it: it will never be.
            self._asked = False
            return None
        self.given(last)
        return last

    def finish(self, given: SeqRange) -> Seq:
        """End a range that is durable and readable; return the position. `not_in_flight` if it isn't in flight."""
        return self._end(given)

    def abort(self, given: SeqRange) -> Seq:
        """End a range that will never be; return the position. `not_in_flight` if it isn't in flight."""
        return self._end(given)

    def _end(self, given: SeqRange) -> Seq:
        self._in_flight.end(given)
        first = self._in_flight.first
        if first is not None:
            self._position = Seq(first - 1)
        elif self._asked:
            # Every range given has ended, and the one asked for lies above them.
            self._position = self._last.last
        else:
            self._position = self._newest
        return self._position

    def observe(self, newest: Seq) -> Seq:
        """Note up to where the store has given numbers, to any writer; return the position.

        With nothing in flight and nothing asked for the position follows. Numbers given to this writer from now on
        are above it. A draw of its own that it gave up on, and that was executed late, is below and will never be.
        """
        self._newest = max(self._newest, newest)
        if self.is_idle:
            self._position = self._newest
        return self._position
