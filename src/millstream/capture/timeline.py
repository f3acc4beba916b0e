"""Timelines: where two histories of one system part, and whether the log can go on with the one that answers.

A promoted standby, or a restored backup, writes on under a new timeline. What lies below the place where that branched off is
the same WAL under either number. So the log goes on with it if all that it has lies below, and must not otherwise: it has
changes then that this history hasn't, and lacks those which this history has instead.

Two standbys that were promoted apart may both call their timeline 2: what counts is where timelines branched off, not their
numbers. Two that did so at the same place can't be told apart; nobody else tells them apart either.
"""

from __future__ import annotations

import re
from typing import Final

from psycopg import errors

from millstream.capture.connection import connect_replication, translated
from millstream.capture.source import Connection, Identity, check_same
from millstream.catalog import SourceRow
from millstream.errors import SourceError, SourceReplaced, SourceSwitched
from millstream.model.positions import Lsn, format_lsn, parse_lsn

History = tuple[tuple[int, Lsn], ...]
"""The timelines before one, oldest first, each with the LSN at which it was left."""

_LINE: Final = re.compile(r"\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)(?:\s.*)?\Z")
_END: Final = Lsn(1 << 63)
"""Where a timeline ends that goes on."""

BRANCH_HINT: Final = (
    "Point the DSN back to the server that the log followed. If that is gone, or was set back on purpose: `millstream slot "
    "drop`; the next `millstream run` makes a new slot on this server and copies every table again."
)


def parse_history(text: str) -> History:
    """Read a timeline's history file.

    Raises:
        SourceError: it isn't one.
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
    """Up to where two timelines are the same WAL; 0: nowhere. None: they are the same timeline.

    Args:
        ours: a timeline's number and history; where that isn't known, timelines of one number are taken for the same.
        theirs: the other's.
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
    """The history of the server's timeline, over a replication connection; None where the server has no file of it."""
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
    """Tells, over a replication connection of its own, when a standby has gone over to another timeline.

    A stream from a standby goes on through a promotion, its own or its primary's, without a word. What came before `check` was
    called is of the session's timeline if `check` passes: a standby sends what it has replayed, and timelines only grow.

    Not for several threads.
    """

    def __init__(self, dsn: str, identity: Identity) -> None:
        self._connection = connect_replication(dsn)
        self._identity = identity

    def close(self) -> None:
        """Let the connection go."""
        self._connection.close()

    def check(self) -> None:
        """`SourceSwitched` once the server is on another timeline than the session; a round trip each time."""
        with translated():
            row = self._connection.execute("IDENTIFY_SYSTEM").fetchone()
        assert row is not None
        if (int(row[0]), int(row[1])) != (self._identity.system_identifier, self._identity.timeline):
            raise SourceSwitched(f"the standby is on timeline {row[1]} now, this session on {self._identity.timeline}")


def follows(
    followed: SourceRow, ours: History | None, found: Identity, theirs: History | None, *, reached: Lsn
) -> bool:
    """Let a history pass with which the log goes on without a gap; whether it is a new branch.

    Args:
        followed: the source that the log has.
        ours: the history of its timeline.
        found: who answers.
        theirs: the history of its timeline.
        reached: X, up to which the log has everything.

    Raises:
        SourceReplaced: it is another system or database, or it branched off below X, or nobody knows where.
    """
    if (followed.system_identifier, followed.database) != (found.system_identifier, found.database):
        check_same(followed, found)
    same_number = followed.timeline == found.timeline
    if theirs is None:
        if same_number:
            return False
        raise SourceReplaced(
            f"the source is on timeline {found.timeline}, the log follows timeline {followed.timeline}, and the server has no"
            f" history of its own ({found.timeline:08X}.history): where it branched off can't be told",
            hint=f"Put that file back into the server's pg_wal folder (an archive has it). {BRANCH_HINT}",
        )
    upto = shared_upto((followed.timeline, ours), (found.timeline, theirs))
    if upto is None:
        return False
    if upto >= reached:
        return True
    where = f"branched off at {format_lsn(upto)}" if upto else "has nothing in common with that"
    raise SourceReplaced(
        f"the source is on {'another ' if same_number else ''}timeline {found.timeline}; the log follows timeline"
        f" {followed.timeline} and has changes up to {format_lsn(reached)}, but this one {where}: it lacks what the log has above",
        hint=BRANCH_HINT,
        branched_off=format_lsn(upto),
        reached=format_lsn(reached),
    )
