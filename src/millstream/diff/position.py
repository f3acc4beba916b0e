"""The position at which log and lake hold exactly what a snapshot of the source sees, and the wait for it.

The log has transactions in the order of their commits. So a snapshot at an LSN sees exactly the records
up to some number, and that source's next transaction begins at or above the LSN.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow.compute as pc
from psycopg import sql

from millstream.capture.connection import connect, translated
from millstream.capture.publication import inserts_name
from millstream.capture.source_table_checks import reached_in_log
from millstream.codec.pgoutput import HEARTBEAT_PREFIX
from millstream.errors import LakeBehind, MillstreamError
from millstream.home.home import Home
from millstream.lake.commit_cuts import last_cut
from millstream.model.names import quote
from millstream.model.positions import Lsn, Seq, format_lsn
from millstream.processes.control_socket import ask
from millstream.processes.role_locks import runs
from millstream.wal.backlog import Backlogs
from millstream.wal.reader import StreamReader

if TYPE_CHECKING:
    from millstream.capture.config import CaptureConfig
    from millstream.catalog import Catalog
    from millstream.lake.layout import LakeLayout
    from millstream.model.ids import SourceId

_POLL_S: Final = 0.1
_BEAT_EVERY_S: Final = 5.0
_PEEK_MAX: Final = 10_000
"""Limit of messages to peek at in an unread slot: if the first ones contain no table, more aren't requested."""


@dataclass(frozen=True, slots=True)
class PositionWait:
    """The parameters of a wait."""

    home: Home
    stream: str
    capture: CaptureConfig
    catalog: Catalog
    layout: LakeLayout
    source: SourceId
    deadline_s: float
    """On the monotonic clock."""
    tell: Callable[[str], None]

    @property
    def over(self) -> bool:
        """Return whether time has run out."""
        return time.monotonic() >= self.deadline_s

    def runs(self, role: str) -> bool:
        """Return whether that part of the home runs, or is about to again."""
        return runs(self.home.run_folder, "owner" if role == "capture" else "pipeline")


def wait_for_lake(waiting: PositionWait, lsn: Lsn, *, before: Seq) -> Seq:
    """Return the number up to which the log holds exactly what a snapshot at `lsn` sees, once the lake has it all.

    Args:
        before: the log's position before the snapshot was requested.

    Raises:
        LakeBehind: no running process would bring it there, or it takes too long.
        SourceError (`slot_active`), SourceError: the slot couldn't be asked whether anything is missing.
    """
    reader = StreamReader(str(waiting.home.wal_folder(waiting.stream)))
    _wait_for_log(waiting, reader, lsn)
    n = _last_below(reader, waiting.source, lsn, before)
    waiting.tell("waiting for the lake")
    backlogs = Backlogs(str(waiting.home.wal_folder(waiting.stream)))
    while True:
        cut = last_cut(waiting.layout)
        reached = Seq(0) if cut is None else cut.n
        if reached >= n:
            return n
        if backlogs.between(reached, n).records == 0:
            return reached  # numbers that no record has
        if not waiting.runs("pipeline"):
            raise LakeBehind(f"the lake is at {reached}, the comparison needs {n}, and no pipeline runs", needs=int(n))
        if waiting.over:
            raise LakeBehind(f"the lake is at {reached}, the comparison needs {n}; time has run out", needs=int(n))
        time.sleep(_POLL_S)


def _wait_for_log(waiting: PositionWait, reader: StreamReader, lsn: Lsn) -> None:
    """Return once every transaction that committed below `lsn` is durable in the log.

    A log that was put back under a newer catalog lacks what the catalog's position and the slot take for captured.
    """
    beaten = float("-inf")
    waiting.tell("waiting for capture")
    while True:
        facts = (ask(waiting.home, "owner", "status") or {}).get("streams", {}).get(waiting.stream, {})
        durable = (facts.get("progress") or {}).get("durable", 0)
        reached = waiting.catalog.reached_in(waiting.source, reached_in_log(reader))
        if max(durable, reached) >= lsn:
            return
        if not waiting.runs("capture"):
            if reached >= waiting.catalog.reached(waiting.source) and _nothing_waits(waiting, lsn):
                return
            raise LakeBehind(
                f"the source has changes that the log hasn't, and no capture runs; it has to reach {format_lsn(lsn)}",
                needs=format_lsn(lsn),
            )
        if facts.get("gave_up"):
            error = facts.get("error") or {}
            raise LakeBehind(
                f"capture of {waiting.stream} has ended: {error.get('message', 'see its log')}",
                hint=error.get("hint") or None,
                needs=format_lsn(lsn),
            )
        if waiting.over:
            error = facts.get("error") or {}
            why = f"; capture waits: {error['message']}" if error else ""
            raise LakeBehind(
                f"capture is at {format_lsn(Lsn(durable))}, the comparison needs {format_lsn(lsn)}; time has run out{why}",
                hint=error.get("hint") or None,
                needs=format_lsn(lsn),
            )
        if time.monotonic() - beaten > _BEAT_EVERY_S:
            beaten = time.monotonic()
            _beat(waiting.capture.dsn)
        time.sleep(_POLL_S)


def _beat(dsn: str) -> None:
    """Write a little WAL at an idle source, so that its sender reports a position. Without the privilege, just wait."""
    with contextlib.suppress(MillstreamError), connect(dsn, purpose="diff") as connection, translated():
        connection.execute("SELECT pg_logical_emit_message(false, %s, '')", [HEARTBEAT_PREFIX])


def _nothing_waits(waiting: PositionWait, lsn: Lsn) -> bool:
    """Return whether the unread slot has no change of a table below `lsn` to send."""
    names = (waiting.capture.publication, inserts_name(waiting.capture.publication))
    with connect(waiting.capture.dsn, purpose="diff") as connection, translated():
        found = connection.execute("SELECT pubname FROM pg_publication WHERE pubname = ANY(%s)", [list(names)])
        there = ",".join(quote(row[0]) for row in found.fetchall())
        if (
            not there
            or connection.execute(
                "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [waiting.capture.slot]
            ).fetchone()
            is None
        ):
            return False
        row = connection.execute(
            sql.SQL(
                "SELECT count(*) FILTER (WHERE chr(get_byte(data, 0)) IN ('I', 'U', 'D', 'T')), count(*)"
                " FROM pg_logical_slot_peek_binary_changes({}, {}::pg_lsn, {}, 'proto_version', '1', 'publication_names', {})"
            ).format(*map(sql.Literal, (waiting.capture.slot, format_lsn(lsn), _PEEK_MAX, there)))
        ).fetchone()
    assert row is not None
    return bool(row[0] == 0 and row[1] < _PEEK_MAX)


def _last_below(reader: StreamReader, source: SourceId, lsn: Lsn, before: Seq) -> Seq:
    """Return the last number before the source's first transaction at or above `lsn`.

    None of those is at or below `before`.
    """
    upto = last = reader.persisted_upto()
    # All of it: a frame has its operations table by table, so the first need not have the lowest number.
    for found in reader.read_between(before, upto):
        batch = found.batch
        # Copied rows have no index: their LSN records when they were read, not their position.
        later = pc.and_(
            pc.and_(pc.equal(batch.column("__source"), source), pc.is_valid(batch.column("__commit_index"))),
            pc.greater_equal(batch.column("__commit_lsn"), lsn),
        )
        first = pc.min(batch.column("__seq").filter(later)).as_py()
        if first is not None:
            last = min(last, Seq(first - 1))
    return last
