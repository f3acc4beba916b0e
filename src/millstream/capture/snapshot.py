"""A snapshot of the source at one LSN: it sees exactly the transactions whose commit record lies below it.

A temporary logical slot gives it, for only decoding knows which commits the WAL has below a position; an ordinary snapshot
omits a commit that is in the WAL and waits for a standby. The slot's snapshot is exported, an ordinary connection takes it over
and exports it again, and the slot goes at once: what is compared for an hour holds back no WAL, only vacuum.
"""

from __future__ import annotations

import os
import secrets
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Self

from psycopg import pq, sql

from millstream.capture.connection import connect, connect_replication, translate_result, translated
from millstream.capture.source import Connection, Identity, identify_replication
from millstream.errors import SnapshotWaits, SourceError
from millstream.model.positions import Lsn, parse_lsn

_POLL_S: Final = 1.0


class SourceSnapshot:
    """A snapshot that any number of connections can read under, until it is closed.

    Concurrency: `reading` may be called from any thread.
    """

    def __init__(self, dsn: str, anchor: Connection, name: str, lsn: Lsn) -> None:
        self._dsn = dsn
        self._anchor = anchor
        self._name = name
        self.lsn: Final = lsn
        """The consistent point: transactions whose commit record begins below it are seen, no others."""

    @classmethod
    def take(cls, dsn: str, *, patience_s: float, check: Callable[[Identity], None] | None = None) -> Self:
        """Take a snapshot; the caller closes it.

        PostgreSQL gives it once the transactions that run at this moment have ended.

        Args:
            dsn: the source.
            patience_s: how long to wait for them.
            check: given whose WAL answers, before anything is made there; may raise.

        Raises:
            SnapshotWaits: a transaction is still running after `patience_s`.
            NoFreeSlot, WalLevelNotLogical, SourcePrivilegeMissing: as they say.
        """
        with connect_replication(dsn) as replication:
            if check is not None:
                check(identify_replication(replication))
            lsn, exported = _create_slot(replication, dsn, patience_s)
            anchor = connect(dsn, purpose="diff")
            try:
                _begin_under(anchor, exported)
                with translated():
                    row = anchor.execute("SELECT pg_export_snapshot()").fetchone()
            except BaseException:
                anchor.close()
                raise
            assert row is not None
        return cls(dsn, anchor, str(row[0]), lsn)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the snapshot go."""
        self._anchor.close()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """An ordinary connection in a read-only transaction under the snapshot; it ends with the block, and its locks with it."""
        with connect(self._dsn, purpose="diff") as connection:
            _begin_under(connection, self._name)
            yield connection


def _begin_under(connection: Connection, snapshot: str) -> None:
    with translated():
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))


def _create_slot(replication: Connection, dsn: str, patience_s: float) -> tuple[Lsn, str]:
    """Make the temporary slot; its consistent point, and its snapshot's name, which is good until the next command."""
    name = f"millstream_diff_{os.getpid()}_{secrets.token_hex(4)}"
    command = sql.SQL("CREATE_REPLICATION_SLOT {} TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT").format(
        sql.Identifier(name)
    )
    pgconn = replication.pgconn
    deadline = time.monotonic() + patience_s
    with translated():
        pgconn.send_query(command.as_bytes(replication))
        while True:
            pgconn.consume_input()
            if not pgconn.is_busy():
                break
            left = deadline - time.monotonic()
            if left <= 0:
                raise SnapshotWaits(
                    f"after {patience_s:.0f} s the source still runs transactions that a snapshot has to wait for{_who(dsn)}",
                    hint="Have that transaction ended, or give `diff` a longer --timeout.",
                )
            select.select([pgconn.socket], [], [], min(left, _POLL_S))
        result = pgconn.get_result()
        while pgconn.get_result() is not None:
            pass
    assert result is not None
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise translate_result(result)
    point, snapshot = result.get_value(0, 1), result.get_value(0, 2)
    if point is None or snapshot is None:
        raise SourceError("the source gave no snapshot with its slot")
    return parse_lsn(point.decode()), snapshot.decode()


def _who(dsn: str) -> str:
    """The transaction that has run for longest, in words; empty where none is seen."""
    with connect(dsn, purpose="diff") as control, translated():
        row = control.execute(
            "SELECT pid, usename, application_name, extract(epoch FROM clock_timestamp() - xact_start)::bigint"
            " FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start LIMIT 1"
        ).fetchone()
        if row is not None:
            return f" (process {row[0]}, role {row[1]}, application {row[2] or '-'}, for {row[3]} s)"
        prepared = control.execute("SELECT gid, database FROM pg_prepared_xacts ORDER BY prepared LIMIT 1").fetchone()
    return "" if prepared is None else f" (the prepared transaction {prepared[0]} in database {prepared[1]})"
