"""The writes of applications that other regions' logs have, as far as these logs were received.

An application that got no answer from one region may repeat its write in another. Once that region has received the
first one's log, it answers the repetition as a duplicate. Such an answer has no numbers: the rows stand in another log.

Each region has a state of its own, so that a log that was cut back is read again without touching the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from millstream.errors import SessionExpired, SessionGap
from millstream.model.ids import RegionId
from millstream.model.operations import Ack
from millstream.model.positions import Seq, SeqRange
from millstream.model.writes import SessionFacts, WriteId
from millstream.protocol.deduplication.known_writes import SessionLimits, Sessions

_NEVER_US: Final = 2**62


@dataclass(slots=True)
class _Received:
    sessions: Sessions
    is_cut: bool
    place: object = None


@dataclass(slots=True)
class OtherRegions:
    """The writes of other regions. Not thread-safe, as `Sessions`.

    Args:
        limits: how many sessions and keys are kept of each region. Age doesn't count: a session may have gone on in
            another region since.
    """

    limits: SessionLimits | None = None
    _of: dict[RegionId, _Received] = field(default_factory=dict)

    def place(self, region: RegionId) -> object:
        """Return where the received part of a region's log ends, as it was noted; None if nothing was received."""
        found = self._of.get(region)
        return None if found is None else found.place

    def note(
        self, region: RegionId, writes: Iterable[tuple[WriteId, int, Ack, int]], place: object, *, is_cut: bool = False
    ) -> None:
        """Note a region's next writes.

        Args:
            region: the region.
            writes: each one's id, digest, result there, and time in microseconds since 1970.
            place: where the part of its log that was read so far ends; the method `place` returns it.
            is_cut: at the region's first call: whether its log lacks its beginning.
        """
        received = self._of.get(region)
        if received is None:
            limits = replace(self.limits or SessionLimits(), age_us=_NEVER_US)
            received = self._of[region] = _Received(Sessions(limits), is_cut)
        for write_id, digest, given, now_us in writes:
            if received.is_cut and write_id.session is not None and write_id.number is not None:
                received.sessions.note_begin(write_id.session, write_id.number)
            received.sessions.note(write_id, digest, Ack({}, SeqRange(Seq(0), given.seqs.count)), now_us)
        received.place = place

    def forget(self, region: RegionId) -> None:
        """Forget what was received of a region: its log was cut back, or recreated."""
        self._of.pop(region, None)

    def look(self, write_id: WriteId, digest: int) -> Ack | None:
        """Return the result of a write that another region has; None if none is known to have it.

        Raises:
            IdempotencyKeyReused, DedupWindowExpired: as `Sessions.look`.
            SessionExpired: a region may have the write: it has forgotten the session.
        """
        for received in self._of.values():
            try:
                found = received.sessions.look(write_id, digest)
            except SessionGap:
                continue
            except SessionExpired:
                if write_id.session is not None and received.sessions.facts(write_id.session).expired:
                    raise
                continue
            if found is not None:
                return found
        return None

    def mark(self, session: str, own: Sessions) -> int:
        """Return the number up to which the own log and the regions' have all writes of a session together."""
        mark = own.mark(session)
        if not self._of:
            return mark
        known = [own, *(received.sessions for received in self._of.values())]
        mark = max(sessions.mark(session) for sessions in known)
        while any(sessions.has(session, mark + 1) for sessions in known):
            mark += 1
        return mark

    def has(self, session: str, number: int) -> bool:
        """Return whether a region's write of a session above its mark there is known."""
        return any(received.sessions.has(session, number) for received in self._of.values())

    def check_begin(self, write_id: WriteId, own: Sessions, mark: int) -> None:
        """Raise `SessionExpired` if a log that was lost, or hasn't come, may have a write that no log here has.

        Args:
            write_id: the write.
            own: the own log's sessions.
            mark: the session's, as of the method `mark`.
        """
        name = write_id.session
        if name is not None and self._lacks_begin(name, own, mark):
            raise SessionExpired(
                f"session {name} has writes in a region's log, or a part of one, that isn't here: it is unknown whether "
                f"write {write_id.number} is among them",
                session=name,
                number=write_id.number,
            )

    def _lacks_begin(self, name: str, own: Sessions, mark: int) -> bool:
        return own.begin(name) > mark + 1 or any(
            received.sessions.begin(name) > mark + 1 for received in self._of.values()
        )

    def facts(self, session: str, own: Sessions) -> SessionFacts:
        """Return the facts of a session in all regions' logs together."""
        known = [own.facts(session), *(received.sessions.facts(session) for received in self._of.values())]
        mark = max(facts.mark for facts in known)
        above = {number for facts in known for number in facts.above if number > mark}
        while mark + 1 in above:
            mark += 1
            above.discard(mark)
        return SessionFacts(
            mark,
            tuple(sorted(above)),
            any(facts.expired for facts in known) or self._lacks_begin(session, own, mark),
        )
