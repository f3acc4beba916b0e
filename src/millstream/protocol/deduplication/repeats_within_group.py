"""Lookup of the writes of one commit group: each as if the earlier ones were noted already, though none is.

The result is the same whether writes come in one group or one by one: a write that repeats an earlier one of its
group gets that one's result, and a session's mark counts its group's writes. So a number is never too far ahead of
numbers before it in its group.
"""

from __future__ import annotations

from typing import TypeAlias

from millstream.errors import DedupWindowExpired, SessionExpired, SessionGap
from millstream.model.operations import Ack
from millstream.model.writes import WriteId
from millstream.protocol.deduplication.known_writes import Sessions
from millstream.protocol.deduplication.other_regions import OtherRegions

_Asked: TypeAlias = tuple[int, int]
"""A write's digest, and its place among the writes of the group."""


class GroupLookup:
    """The writes of one commit group.

    Args:
        sessions: the state before the group; it mustn't change during the lookup.
        others: the writes of other regions, likewise.
    """

    def __init__(self, sessions: Sessions, others: OtherRegions | None = None) -> None:
        self._sessions = sessions
        self._others = OtherRegions() if others is None else others
        self._of_sessions: dict[str, dict[int, _Asked]] = {}
        """New writes by session and number …"""
        self._of_keys: dict[str, _Asked] = {}
        """… and by key."""
        self._marks: dict[str, int] = {}
        """Future marks of those sessions that have more than one write."""

    def ask(self, write_id: WriteId, digest: int, place: int) -> Ack | int | None:
        """Look up a write; return its earlier result, or None if it is new.

        Args:
            write_id: a session with a number, or a key.
            digest: digest of its rows.
            place: value to return if the same write comes again.

        Returns:
            The earlier result, or the place of the earlier new write that it repeats.

        Raises:
            IdempotencyKeyReused, DedupWindowExpired, SessionGap, SessionExpired: as `Sessions.look`.
        """
        name, number = write_id.session, write_id.number
        if name is None or number is None:
            return self._ask_for_key(write_id, digest, place)
        group = self._of_sessions.get(name)
        if group is None:
            mark = self._others.mark(name, self._sessions)
            try:
                given = self._look(write_id, digest, mark if mark > self._sessions.mark(name) else None)
            except SessionGap:
                self._others.check_begin(write_id, self._sessions, mark)
                raise
            if given is None:
                self._others.check_begin(write_id, self._sessions, mark)
                self._of_sessions[name] = {number: (digest, place)}
            return given
        first = group.get(number)
        if first is not None:
            Sessions.check_same(first[0], digest, write_id)
            return first[1]
        given = self._look(write_id, digest, self._mark(name, group))
        if given is None:
            group[number] = digest, place
        return given

    def _look(self, write_id: WriteId, digest: int, mark: int | None = None) -> Ack | None:
        """Look up a write in the own log, then in those of other regions; raises as `ask`."""
        try:
            given = self._sessions.look(write_id, digest, mark=mark)
        except (DedupWindowExpired, SessionExpired, SessionGap):
            given = self._others.look(write_id, digest)
            if given is None:
                raise
            return given
        return self._others.look(write_id, digest) if given is None else given

    def _ask_for_key(self, write_id: WriteId, digest: int, place: int) -> Ack | int | None:
        assert write_id.key is not None
        first = self._of_keys.get(write_id.key)
        if first is not None:
            Sessions.check_same(first[0], digest, write_id)
            return first[1]
        given = self._look(write_id, digest)
        if given is None:
            self._of_keys[write_id.key] = digest, place
        return given

    def _mark(self, name: str, group: dict[int, _Asked]) -> int:
        """Return a session's mark after the group."""
        mark = self._marks.get(name)
        if mark is None:
            mark = self._others.mark(name, self._sessions)
        while mark + 1 in group or self._sessions.has(name, mark + 1) or self._others.has(name, mark + 1):
            mark += 1
        self._marks[name] = mark
        return mark
