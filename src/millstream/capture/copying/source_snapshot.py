"""A snapshot of the source at one LSN: it sees exactly the transactions whose commit record lies below it.

A temporary logical slot provides it, because only decoding knows which commits the WAL has below a position. An
ordinary snapshot omits a commit that is in the WAL and waits for a standby. The slot's snapshot is exported; an
ordinary connection imports it and exports it again, and the slot is dropped at once. So a snapshot that
is read for an hour (by `diff`) holds back no WAL, only vacuum.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Self

from psycopg import sql

from millstream.capture.connection import (
    Connection,
    connect,
    connect_replication,
    end_with_client,
    first_row,
    pinned,
    translated,
)
from millstream.capture.slot import ask_for_slot, who_is_waited_for
from millstream.capture.source_tables import SourceIdentity, identify_replication
from millstream.closing import Closing
from millstream.errors import SourceError
from millstream.model.positions import Lsn

_REPORTED_AFTER_S: Final = 4.0
"""Seconds of a wait after which it is reported; most are over before."""


class SourceSnapshot(Closing):
    """A snapshot that any number of connections can read under, until it is closed.

    Concurrency: `reading` may be called from any thread.
    """

    def __init__(self, dsn: str, anchor: Connection, name: str, lsn: Lsn) -> None:
        self.dsn: Final = dsn
        """The DSN of the one server that has it; contains secrets."""
        self._anchor = anchor
        self._name = name
        self.lsn: Final = lsn
        """The consistent point: transactions whose commit record begins below it are seen, no others."""

    @classmethod
    def take(
        cls,
        dsn: str,
        *,
        patience_s: float,
        check: Callable[[SourceIdentity], None] | None = None,
        purpose: str = "diff",
        stopped: Callable[[], bool] = lambda: False,
        on_wait: Callable[[str], None] = lambda _transaction: None,
    ) -> Self:
        """Take a snapshot; the caller closes it.

        PostgreSQL provides it once the transactions that run at this moment have ended.

        Args:
            check: called with the server's identity before anything is created there; may raise.
            purpose: the purpose in the names of slot and connections.
            stopped: called about once a second; the wait ends when it returns true.
            on_wait: called after some seconds, then ever more rarely, with the transaction that is waited for, as the
                end of a sentence.

        Raises:
            SourceError (`snapshot_waits`): a transaction is still running after `patience_s`.
            SourceError (`no_free_slot`, `wal_level_not_logical`, `source_privilege_missing`): the server refused.
        """
        with connect_replication(dsn) as replication:
            if check is not None:
                check(identify_replication(replication))
            dsn = pinned(dsn, replication)
            lsn, exported = _create_slot(replication, dsn, patience_s, purpose, stopped, on_wait)
            anchor = connect(dsn, purpose=purpose)
            try:
                _begin_under(anchor, exported)
                row = first_row(anchor, "SELECT pg_export_snapshot()")
            except BaseException:
                anchor.close()
                raise
            assert row is not None
        return cls(dsn, anchor, str(row[0]), lsn)

    def set_statement(self) -> sql.Composed:
        """Return the statement that sets it in a REPEATABLE READ transaction that has done nothing so far."""
        return sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(self._name))

    def close(self) -> None:
        """Release the snapshot."""
        self._anchor.close()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield an ordinary connection in a read-only transaction under the snapshot; both end with the block."""
        with connect(self.dsn, purpose="diff") as connection:
            end_with_client(connection)
            _begin_under(connection, self._name)
            try:
                yield connection
            except KeyboardInterrupt:
                # Another thread may wait for a long statement, which would hold up the connection's end.
                connection.cancel_safe()
                raise


def _begin_under(connection: Connection, snapshot: str) -> None:
    with translated():
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))


def _create_slot(
    replication: Connection,
    dsn: str,
    patience_s: float,
    purpose: str,
    stopped: Callable[[], bool],
    on_wait: Callable[[str], None],
) -> tuple[Lsn, str]:
    """Create the temporary slot; return its consistent point, and its snapshot's name, valid until the next command."""
    name = f"millstream_{purpose}_{os.getpid()}_{secrets.token_hex(4)}"
    command = sql.SQL("CREATE_REPLICATION_SLOT {} TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT").format(
        sql.Identifier(name)
    )

    next_report_s = _REPORTED_AFTER_S

    def meanwhile(seconds: float) -> None:
        nonlocal next_report_s
        if stopped():
            raise SourceError("the snapshot is no longer needed", code="snapshot_waits")
        if seconds >= patience_s:
            raise SourceError(
                f"after {patience_s:.0f} s the source still can't give a snapshot, which waits for running"
                f" transactions{who_is_waited_for(dsn)}",
                code="snapshot_waits",
                hint="End that transaction, or run `millstream diff` with a longer --timeout.",
            )
        if seconds >= next_report_s:
            next_report_s = 2 * seconds
            on_wait(who_is_waited_for(dsn))

    point, snapshot = ask_for_slot(replication, command.as_bytes(replication), meanwhile=meanwhile)
    if snapshot is None:
        raise SourceError("the source returned no snapshot with the slot")
    return point, snapshot
