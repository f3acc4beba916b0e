"""The part of a consumer's machine that retries and drops dead letters."""

from __future__ import annotations

from collections.abc import Iterable

from millstream.protocol.delivery.dead_letter_index import DeadLetters
from millstream.protocol.delivery.entries import Entry
from millstream.protocol.delivery.messages import DeadLetter
from millstream.protocol.delivery.push_calls import Pushed
from millstream.protocol.delivery.state_changes import Died, Dropped, Retried
from millstream.protocol.delivery.unread_after_restart import Unread


class Lettered(Pushed):
    """Calls for dead letters. `Consumer` has the rest."""

    _letters: DeadLetters
    _unread: Unread
    _last: int

    def retry(self, ids: Iterable[str] | None = None) -> list[tuple[str, bool]]:
        """Let dead messages be delivered again, in their groups behind the messages in flight.

        Args:
            ids: their ids; None: all.

        Returns:
            Each id, and whether it was a dead letter.
        """
        self._open()
        letters, wanted = self._letters, self._letters.wanted(ids)
        found = {id_: letter for id_ in wanted if (letter := letters.remove(id_)) is not None}
        for letter in sorted(found.values(), key=lambda letter: letter.message.position, reverse=True):
            id_, position = letter.message.id, letter.message.position
            is_read = position <= self._last or self._unread.is_settled(position)
            if not is_read or position in self._pending.entries or letter.is_overtaken:
                self._changes.append(Dropped((id_,)))  # since a rewind, the log delivers it; or a newer one replaced it
            else:
                letters.retried[id_] = letter
                self._add_retried(letter)
                self._changes.append(Retried((id_,)))
        return [(id_, found.pop(id_, None) is not None) for id_ in wanted]

    def adopt(self, letter: DeadLetter) -> None:
        """Take a message that died in a backfill as a dead letter, older than all records.

        A dead letter of its id is replaced. A message of its id that is being retried stays, and the letter isn't taken.
        """
        if letter.message.id not in self._letters.retried:
            self._changes.append(Died(self._letters.adopt(letter, self._generation)))

    def drop(self, ids: Iterable[str] | None = None) -> list[tuple[str, bool]]:
        """Forget the dead letters of these ids, or all; return each id, and whether it was one."""
        known = [(id_, self._letters.remove(id_) is not None) for id_ in self._letters.wanted(ids)]
        if dropped := [id_ for id_, is_dead in known if is_dead]:
            self._changes.append(Dropped(dropped))
        return known

    def _drop_acked(self, position: int) -> None:
        if (id_ := self._letters.at(position, self._generation)) is not None:
            self._letters.remove(id_)
            self.counters.acked += 1
            self._changes.append(Dropped((id_,), 1))

    def _add_retried(self, letter: DeadLetter) -> Entry:
        entry = self._pending.add_retried(letter.message)
        entry.is_retried = True
        return entry
