"""Timelines: where two histories of one system part, and whether the log can go on with the server that answers.

A promoted standby, or a restored backup, writes on under a new timeline. Below the LSN at which that branched off,
the WAL is the same under either number. The log can go on with the new timeline if everything that the log has lies
below that LSN. Otherwise it mustn't: it has changes that this history lacks, and lacks those that this history has
instead.

Two standbys that were promoted separately may both call their timeline 2. So the branch points count, not the
timelines' numbers. Two timelines that branched off at the same LSN can't be told apart; PostgreSQL can't do that
either.
"""

from __future__ import annotations

import re
from typing import Final

from psycopg import errors

from millstream.capture.connection import Connection, connect_replication, one_row, translated
from millstream.capture.source_tables import SourceIdentity, check_same
from millstream.catalog import SourceRow
from millstream.errors import SourceError
from millstream.model.positions import Lsn, format_lsn, parse_lsn

History = tuple[tuple[int, Lsn], ...]
"""The earlier timelines, oldest first, each with the LSN at which it was left."""

_LINE: Final = re.compile(r"\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)(?:\s.*)?\Z")
_END: Final = Lsn(1 << 63)
"""End of a timeline that goes on."""

BRANCH_HINT: Final = (
    "Point the DSN back to the server that the log followed. If that is gone, or was set back on purpose: `millstream slot "
    "drop`; the next `millstream run` makes a new slot on this server and copies every table again."
)


def parse_history(text: str) -> History:
    """Read a timeline's history file.

    Raises:
        SourceError: the text isn't a history file.
    """
    found: list[tuple[int, Lsn]] = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts = _LINE.match(line)
        if parts is None or (found and (int(parts[1]) <= found[-1][0] or parse_lsn(parts[2]) < found[-1][1])):
            raise SourceError(
                f"the history of the source's timeline can't be read: {line.strip()[:100]!r}",
                hint="Look at the newest .history file in the server's pg_wal folder: it may be damaged.",
            )
        found.append((int(parts[1]), parse_lsn(parts[2])))
    return tuple(found)


def shared_upto(ours: tuple[int, History | None], theirs: tuple[int, History]) -> Lsn | None:
    """Return the LSN up to which two timelines are the same WAL; 0: nowhere. None: they are the same timeline.

    Args:
        ours: a timeline's number and history; without a history, timelines of one number count as the same.
        theirs: the other timeline's.
    """
    (mine, before), (other, other_before) = ours, theirs
    other_line = (*other_before, (other, _END))
    if before is None:
        upto = next((end for timeline, end in other_line if timeline == mine), Lsn(0))
        return None if upto == _END else upto
    upto = Lsn(0)
    for (timeline, end), (another, other_end) in zip((*before, (mine, _END)), other_line, strict=False):
        if timeline != another:
            return upto
        upto = min(end, other_end)
        if end != other_end:
            return upto
    return None


def read_history(replication: Connection, timeline: int) -> History | None:
    """Return the history of the server's timeline, over a replication connection; None if it has no file of it."""
    if timeline == 1:
        return ()
    with translated():
        try:
            row = replication.execute(f"TIMELINE_HISTORY {timeline:d}".encode()).fetchone()
        except errors.UndefinedFile:
            return None
    assert row is not None
    content = row[1]
    return parse_history(content.decode("utf-8", "replace") if isinstance(content, bytes) else str(content))


class TimelineWatch:
    """Detects, over a replication connection of its own, when a standby has changed to another timeline.

    A stream from a standby goes on through a promotion, its own or its primary's, without notice. If `check` passes,
    everything received before the call is of the session's timeline: a standby sends what it has replayed, and
    timelines only grow.

    Not thread-safe.
    """

    def __init__(self, dsn: str, identity: SourceIdentity) -> None:
        self._connection = connect_replication(dsn)
        self._identity = identity

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def check(self) -> None:
        """Raise `source_switched` if the server is on another timeline than the session; a round trip each time."""
        row = one_row(self._connection, "IDENTIFY_SYSTEM")
        if (int(row[0]), int(row[1])) != (self._identity.system_identifier, self._identity.timeline):
            raise SourceError(
                f"the standby is on timeline {row[1]} now, this session on {self._identity.timeline}",
                code="source_switched",
            )


def follows(
    followed: SourceRow, ours: History | None, found: SourceIdentity, theirs: History | None, *, reached: Lsn
) -> bool:
    """Check that the log can go on with a history without a gap; return whether it is a new branch.

    Args:
        followed: the source that the log has.
        ours: the history of its timeline.
        theirs: the history of that server's timeline.

    Raises:
        SourceError (`source_replaced`): it is another system or database, or it branched off below `reached`, or the branch point is unknown.
    """
    if (followed.system_identifier, followed.database) != (found.system_identifier, found.database):
        check_same(followed, found)
    same_number = followed.timeline == found.timeline
    if theirs is None:
        if same_number:
            return False
        raise SourceError(
            f"the source is on timeline {found.timeline}, the log follows timeline {followed.timeline}, and the server has no"
            f" history of its own ({found.timeline:08X}.history): so the point at which it branched off is unknown",
            code="source_replaced",
            hint=f"Put that file back into the server's pg_wal folder (an archive has it). {BRANCH_HINT}",
        )
    upto = shared_upto((followed.timeline, ours), (found.timeline, theirs))
    if upto is None:
        return False
    if upto >= reached:
        return True
    where = f"branched off at {format_lsn(upto)}" if upto else "has nothing in common with that"
    raise SourceError(
        f"the source is on {'another ' if same_number else ''}timeline {found.timeline}; the log follows timeline"
        f" {followed.timeline} and has changes up to {format_lsn(reached)}, but this one {where}: it lacks the log's later changes",
        code="source_replaced",
        hint=BRANCH_HINT,
        branched_off=format_lsn(upto),
        reached=format_lsn(reached),
    )
