"""The writes of applications that other regions' logs have, as far as these logs were received.

An application that got no answer from one region may repeat its write in another. Once that region has received the
first one's log, it answers the repetition as a duplicate. Such an answer has no numbers: the rows stand in another log.

Each region has a state of its own, so that a log that was cut back is read again without touching the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from millstream.errors import SessionExpired, SessionGap
from millstream.model.ids import RegionId
from millstream.model.operations import Ack
from millstream.model.positions import Seq, SeqRange
from millstream.model.writes import SessionFacts, WriteId
from millstream.protocol.deduplication.known_writes import SessionLimits, Sessions


@dataclass(slots=True)
class _Received:
    sessions: Sessions
    place: object = None


@dataclass(slots=True)
class OtherRegions:
    """The writes of other regions. Not thread-safe, as `Sessions`.

    Args:
        limits: when sessions and keys are forgotten.
    """

    limits: SessionLimits | None = None
    _of: dict[RegionId, _Received] = field(default_factory=dict)

    def place(self, region: RegionId) -> object:
        """Return where the received part of a region's log ends, as it was noted; None if nothing was received."""
        found = self._of.get(region)
        return None if found is None else found.place

    def note(self, region: RegionId, writes: Iterable[tuple[WriteId, int, Ack, int]], place: object) -> None:
        """Note a region's next writes.

        Args:
            region: the region.
            writes: each one's id, digest, result there, and time in microseconds since 1970.
            place: where the part of its log that was read so far ends; the method `place` returns it.
        """
        received = self._of.setdefault(region, _Received(Sessions(self.limits)))
        for write_id, digest, given, now_us in writes:
            received.sessions.note(write_id, digest, Ack({}, SeqRange(Seq(0), given.seqs.count)), now_us)
        received.place = place

    def forget(self, region: RegionId) -> None:
        """Forget what was received of a region: its log was cut back, or recreated."""
        self._of.pop(region, None)

    def look(self, write_id: WriteId, digest: int) -> Ack | None:
        """Return the result of a write that another region has; None if none is known to have it.

        Raises:
            IdempotencyKeyReused, DedupWindowExpired: as `Sessions.look`.
            SessionExpired: a region has forgotten the session, and may have the write.
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

    def mark(self, session: str) -> int:
        """Return the number up to which a region has all writes of a session; the greatest of all regions'."""
        return max((received.sessions.mark(session) for received in self._of.values()), default=0)

    def facts(self, session: str, own: SessionFacts) -> SessionFacts:
        """Return the facts of a session in all regions' logs together."""
        known = [own, *(received.sessions.facts(session) for received in self._of.values())]
        mark = max(facts.mark for facts in known)
        above = {number for facts in known for number in facts.above if number > mark}
        while mark + 1 in above:
            mark += 1
            above.discard(mark)
        return SessionFacts(mark, tuple(sorted(above)), any(facts.expired for facts in known))
