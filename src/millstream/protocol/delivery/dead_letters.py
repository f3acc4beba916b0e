"""Messages that are dead, and those that were dead and are delivered again."""

from __future__ import annotations

from collections.abc import Iterable

from millstream.protocol.delivery.messages import DeadLetter


class DeadLetters:
    """Dead letters by id, and by the position of their delivery.

    Args:
        dead: dead letters by id, the oldest first.
        retried: letters that wait for delivery again, or are in flight, by id.
    """

    def __init__(self, dead: dict[str, DeadLetter], retried: dict[str, DeadLetter]) -> None:
        self.dead = dead
        self.retried = retried
        self._ids = {letter.message.position: id_ for id_, letter in dead.items()}
        """Ids of messages that died in this generation, by position."""

    def at(self, position: int) -> str | None:
        """Return the id of the message that died at a position, in this generation."""
        return self._ids.get(position)

    def add(self, letter: DeadLetter) -> None:
        """Add a message that died; it is no longer retried."""
        id_ = letter.message.id
        self.retried.pop(id_, None)
        self.dead.pop(id_, None)
        self.dead[id_] = letter
        self._ids[letter.message.position] = id_

    def remove(self, id_: str) -> DeadLetter | None:
        """Remove and return a dead letter; None if there is none of this id."""
        letter = self.dead.pop(id_, None)
        if letter is not None and self._ids.get(letter.message.position) == id_:
            del self._ids[letter.message.position]
        return letter

    def wanted(self, ids: Iterable[str] | None) -> list[str]:
        """Return the given ids, or those of all dead letters."""
        return list(self.dead) if ids is None else list(ids)

    def begin_generation(self) -> None:
        """Make retried messages dead letters again; earlier deliveries no longer name one."""
        self.dead.update(self.retried)
        self.retried.clear()
        self._ids.clear()
