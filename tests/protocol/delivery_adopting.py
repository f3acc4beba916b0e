"""Worlds of a consumer that takes dead letters from elsewhere: the rows of a backfill that died, also twice under one id.

python -m tests.protocol.delivery_adopting FIRST COUNT
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar

from tests.mutations import Mutation
from tests.protocol.delivery_reference import Reference
from tests.protocol.delivery_world import BARRIER_TABLE, World
from tests.seeds import main

from millstream.protocol.delivery import Consumer, Message
from millstream.protocol.delivery.dead_letter_index import DeadLetters
from millstream.protocol.delivery.messages import DeadLetter


class AdoptingReference(Reference):
    """The same by brute force."""

    def adopt(self, message: Message) -> None:
        if any(item.message.id == message.id for item in self.items):
            return
        self.buried = {at: id_ for at, id_ in self.buried.items() if id_ != message.id}
        self.dead.pop(message.id, None)
        self.dead[message.id] = message
        self.buried[message.position] = message.id  # a kill may undo its retry: an older delivery names it then


class AdoptingWorld(World):
    """A world in which letters come from elsewhere, too."""

    reference_type: ClassVar[type[Reference]] = AdoptingReference
    reference: AdoptingReference

    def actions(self) -> list[tuple[str, Callable[[], None]]]:
        return [*super().actions(), *[("adopt", self.adopt)] * 4, *[("letters", self.letters)] * 2]

    def kill(self) -> None:
        super().kill()
        self.now += 1  # what dies after a restart dies later

    def adopt(self) -> None:
        table = BARRIER_TABLE + 1 + self.pick(2)
        row = self.pick(3)
        message = Message(0, 0, f"shop-b{table}-{row}", (f"{table}:{row}",), table, False, 10 + self.pick(40))
        if message.id in self.consumer.dead:
            self.counts["adopted again"] += 1
        if message.id in self.consumer.retried:
            self.counts["adopted while it is retried"] += 1
        self.consumer.adopt(DeadLetter(message, 1 + self.pick(3), "no", self.now, 0))
        letter = self.consumer.dead.get(message.id)
        self.reference.adopt(message if letter is None else letter.message)
        if not self.pick(4):
            self.poison.add(message.id)


# --- defects ---------------------------------------------------------------------------------------------------------


class OldPlaces(DeadLetters):
    def add(self, letter: DeadLetter) -> None:
        places = dict(self._ids)
        super().add(letter)
        self._ids = {**places, **self._ids}


class AReplacedLetterIsNamedByItsOldPlace(AdoptingWorld):
    """A letter that another one of its id replaced is still found where it died."""

    found_by = 182

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def adopt(self, letter: DeadLetter) -> None:
            self._letters.__class__ = OldPlaces
            super().adopt(letter)


class ARetriedMessageDiesElsewhere(AdoptingWorld):
    """A letter is taken although its message is being delivered again."""

    found_by = 5

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def adopt(self, letter: DeadLetter) -> None:
            retried = dict(self._letters.retried)
            self._letters.retried.clear()
            super().adopt(letter)
            self._letters.retried.update({id_: one for id_, one in retried.items() if id_ not in self._letters.dead})


class AdoptionsAreForgotten(AdoptingWorld):
    """A letter from elsewhere isn't stored."""

    found_by = 1

    class consumer_type(Consumer):  # noqa: N801 - the attribute's name
        def adopt(self, letter: DeadLetter) -> None:
            count = len(self._changes)
            super().adopt(letter)
            del self._changes[count:]


ADOPTED: tuple[type[Mutation], ...] = (
    AReplacedLetterIsNamedByItsOldPlace, ARetriedMessageDiesElsewhere, AdoptionsAreForgotten,
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(AdoptingWorld, sys.argv[1:]))
