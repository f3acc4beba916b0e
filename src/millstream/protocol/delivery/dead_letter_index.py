"""Dead messages, and those delivered again, by id and position.

`consumer` decides when a message dies (`_fail`); `delivery.consumer_store` keeps it with its record.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from millstream.protocol.delivery.messages import DeadLetter, position_of

_AT_ONCE_BITS: Final = 20
"""Each millisecond has 2^20 positions for messages that died in a backfill. Positions follow the time, so that none is
given twice, even after a kill."""


class DeadLetters:
    """Dead letters by id, and by the position of their delivery.

    Args:
        dead: dead letters by id, the oldest first.
        retried: letters that wait for delivery again, or are in flight, by id.
    """

    def __init__(self, dead: dict[str, DeadLetter], retried: dict[str, DeadLetter]) -> None:
        self.dead = dead
        self.retried = retried
        self._ids = {(letter.message.position, letter.generation): id_ for id_, letter in dead.items()}
        self._least = 0
        """Lowest position given to an adopted letter, so that none is given twice, even after its letter is gone."""

    @property
    def last(self) -> int:
        """The greatest position of a letter; -1 if there is none."""
        letters = (*self.dead.values(), *self.retried.values())
        return max((letter.message.position for letter in letters), default=-1)

    def at(self, position: int, generation: int) -> str | None:
        """Return the id of the message that died at a position in a generation; None if there is none."""
        return self._ids.get((position, generation)) if self._ids else None

    def add(self, letter: DeadLetter) -> None:
        """Add a message that died; it is no longer retried. A letter of its id is no longer found where it died."""
        id_ = letter.message.id
        self.retried.pop(id_, None)
        self.remove(id_)
        self.dead[id_] = letter
        self._ids[letter.message.position, letter.generation] = id_

    def adopt(self, letter: DeadLetter, generation: int) -> DeadLetter:
        """Add a message that died in a backfill; return its letter, with a position that no record has."""
        known = (*self.dead.values(), *self.retried.values())
        least = min([self._least, *(one.message.position for one in known)])
        self._least = min(least - 1, -(letter.died << _AT_ONCE_BITS))
        own = letter._replace(message=letter.message._replace(position=self._least), generation=generation)
        self.add(own)
        return own

    def overtake(self, ids: Iterable[str]) -> list[str]:
        """Note that the groups of dead letters have newer messages; return the ids of those for which that is news."""
        news = [id_ for id_ in ids if id_ in self.dead and not self.dead[id_].is_overtaken]
        for id_ in news:
            self.dead[id_] = self.dead[id_]._replace(is_overtaken=True)
        return news

    def remove(self, id_: str) -> DeadLetter | None:
        """Remove and return a dead letter; None if there is none of this id."""
        letter = self.dead.pop(id_, None)
        if letter is not None:
            self._ids.pop((letter.message.position, letter.generation), None)
        return letter

    def wanted(self, ids: Iterable[str] | None) -> list[str]:
        """Return the given ids, or those of all dead letters."""
        return list(self.dead) if ids is None else list(ids)

    def begin_generation(self, generation: int, end: int | None) -> None:
        """Make retried messages dead letters again, and give those behind the log's end a place of their own."""
        bury_again(self.dead, self.retried, generation, end)
        self._ids.clear()


def bury_again(dead: dict[str, DeadLetter], retried: dict[str, DeadLetter], generation: int, end: int | None) -> None:
    """Move retried messages to the dead ones; a message behind `end`, if given, gets a position that no record has."""
    dead.update(retried)
    retried.clear()
    if end is None:
        return
    lost = [letter for letter in dead.values() if letter.message.position > position_of(end, 1)]
    for number, letter in enumerate(lost):
        message = letter.message._replace(position=-((generation << 32) + number) - 1)
        dead[message.id] = letter._replace(message=message)
