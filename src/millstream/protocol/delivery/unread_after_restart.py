"""The part of a restart's state that speaks of messages which weren't offered again so far."""

from __future__ import annotations

from dataclasses import replace

from millstream.protocol.delivery.messages import DeliveryId, Status, position_of
from millstream.protocol.delivery.state import Fact, State
from millstream.protocol.delivery.state_changes import Extended, Returned, Settled


class Unread:
    """The facts about messages that the log is still to be read for.

    Args:
        state: the state. It is changed.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.restore_upto = max(
            (position for position, fact in state.facts.items() if fact.deadline), default=position_of(state.cursor, 1)
        )
        """The last position in flight."""
        self.upto = max(state.upto, max(state.settled, default=0), max(state.facts, default=0))
        """The greatest position of which anything is known."""

    def is_settled(self, position: int) -> bool:
        """Whether a message is settled."""
        state = self._state
        return position not in state.open if position <= state.upto else position in state.settled

    def is_acked(self, position: int) -> bool:
        """Whether a message was acknowledged before it was offered again."""
        return position in self._state.unread

    def take(self, position: int) -> Fact | None:
        """Return the deliveries of a message that is offered now; None if it has none."""
        return self._state.facts.pop(position, None)

    def find(self, delivery: DeliveryId) -> Status:
        """Return `ACKED` if a delivery counts, else why not."""
        if self.is_settled(delivery.position):
            return Status.ALREADY_ACKED
        fact = self._state.facts.get(delivery.position)
        if fact is not None and (delivery.run, delivery.answer) < (fact.run, fact.answer):
            return Status.SUPERSEDED
        return Status.ACKED

    def apply(self, change: Settled | Returned | Extended) -> None:
        """Apply the effect of an ack, a nack or an extension."""
        self._state.apply(change)
        self.upto = max(self.upto, *change.positions)
        if isinstance(change, Extended):
            self.restore_upto = max(self.restore_upto, *change.positions)

    def read(self, last: int) -> None:
        """Note up to which position the log was read: if that is all, forget everything."""
        state = self._state
        if last >= self.upto and (state.open or state.settled or state.facts):
            state.open, state.settled, state.unread, state.facts = set(), set(), set(), {}

    def behind(self, last: int) -> State:
        """Return what is known of the messages behind a position; its `upto` is at least there."""
        state, upto = self._state, max(last, self._state.upto)
        return State(
            upto=upto,
            open={position for position in state.open if position > last},
            settled={position for position in state.settled if position > upto},
            unread={position for position in state.unread if position > last},
            facts={position: replace(fact) for position, fact in state.facts.items() if position > last},
        )
