"""Writes that come together, in one commit group: each is looked for as if those before it were noted already, and none of them is.

Whether they come in one group or one by one must not matter: a write that repeats one of the same group is that one, and a session's mark
is where it will be. So a number is never too far ahead of numbers that stand before it in its own group.
"""

from __future__ import annotations

from typing import TypeAlias

from millstream.model.operations import Ack
from millstream.model.writes import WriteId
from millstream.protocol.sessions import Sessions

_Asked: TypeAlias = tuple[int, int]
"""A write's digest, and its place among those that were asked for."""


class AskedWrites:
    """One commit group's.

    Args:
        sessions: what is known before; it doesn't change meanwhile.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._of_sessions: dict[str, dict[int, _Asked]] = {}
        """The new ones, by session and number …"""
        self._of_keys: dict[str, _Asked] = {}
        """… and by key."""
        self._marks: dict[str, int] = {}
        """Where those sessions will be that have more than one."""

    def ask(self, write_id: WriteId, digest: int, place: int) -> Ack | int | None:
        """What a write was given before; None where it is new.

        Args:
            write_id: a session with a number, or a key.
            digest: of its rows.
            place: what it is told by, where it comes again.

        Returns:
            What it was given, or the place of the new one before it whose repetition it is.

        Raises:
            IdempotencyKeyReused, DedupWindowExpired, SessionGap, SessionExpired: as `Sessions.look`.
        """
        name, number = write_id.session, write_id.number
        if name is None or number is None:
            return self._ask_for_key(write_id, digest, place)
        others = self._of_sessions.get(name)
        if others is None:
            given = self._sessions.look(write_id, digest)
            if given is None:
                self._of_sessions[name] = {number: (digest, place)}
            return given
        first = others.get(number)
        if first is not None:
            Sessions.check_same(first[0], digest, write_id)
            return first[1]
        given = self._sessions.look(write_id, digest, mark=self._mark(name, others))
        if given is None:
            others[number] = digest, place
        return given

    def _ask_for_key(self, write_id: WriteId, digest: int, place: int) -> Ack | int | None:
        assert write_id.key is not None
        first = self._of_keys.get(write_id.key)
        if first is not None:
            Sessions.check_same(first[0], digest, write_id)
            return first[1]
        given = self._sessions.look(write_id, digest)
        if given is None:
            self._of_keys[write_id.key] = digest, place
        return given

    def _mark(self, name: str, others: dict[int, _Asked]) -> int:
        """Where a session's mark will be."""
        mark = self._marks.get(name)
        if mark is None:
            mark = self._sessions.mark(name)
        while mark + 1 in others or self._sessions.has(name, mark + 1):
            mark += 1
        self._marks[name] = mark
        return mark
