"""The replication slot: creates it, checks it against the log, drops it.

The rule at start: compare first. `START_REPLICATION` below a recreated slot's start succeeds silently and begins at the
slot's own position. Without the comparison this gap goes unnoticed.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import pq, sql

from millstream.capture.connection import (
    RECOPY_HINT,
    Connection,
    connect,
    first_row,
    next_result,
    translate_result,
    translated,
    wait_for,
)
from millstream.capture.source_tables import on_standby
from millstream.errors import SourceError
from millstream.model.positions import Lsn, format_lsn, parse_lsn

_COPIED_HOME_HINT: Final = (
    "Another process reads the slot. If this home is a copy of one that runs, give its stream a `slot` of its own in millstream.toml, "
    "then run `millstream slot drop` and `millstream run`, which copies every table again."
)


@dataclass(frozen=True, slots=True)
class SlotState:
    """A row of `pg_replication_slots`."""

    name: str
    plugin: str
    database: str
    active_pid: int | None
    restart: Lsn
    confirmed: Lsn
    wal_status: str
    """reserved, extended, unreserved or lost."""
    invalidation: str
    """Reason of its invalidation (16+); empty if it is valid."""
    held_bytes: int | None
    """WAL that the server keeps for it."""
    failover: bool = False
    """Whether standbys keep a copy of it (17+)."""
    synced: bool = False
    """Whether it is such a copy."""


def waits_for_standbys(connection: Connection, slot: SlotState | None) -> bool:
    """Return whether the server withholds changes from the slot until standbys have them (17+).

    For a copied slot it doesn't.
    """
    if slot is None or not slot.failover:
        return False
    row = first_row(connection, "SELECT current_setting('synchronized_standby_slots', true)")
    return bool(row and row[0])


def read_slot(connection: Connection, name: str) -> SlotState | None:
    """Return the slot's state; None if there is no slot of that name."""
    version = connection.info.server_version
    invalidation = "invalidation_reason" if version >= 170000 else "CASE WHEN conflicting THEN 'conflict' END"
    if version < 160000:
        invalidation = "NULL"
    end = "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END"
    copied = "failover, synced" if version >= 170000 else "false, false"
    query = (
        "SELECT plugin, database, active_pid, restart_lsn::text, confirmed_flush_lsn::text, wal_status,"
        f" {invalidation}, ({end} - restart_lsn)::bigint, {copied} FROM pg_replication_slots WHERE slot_name = %s"
    )
    row = first_row(connection, query, [name])
    if row is None:
        return None
    return SlotState(
        name=name,
        plugin=row[0] or "",
        database=row[1] or "",
        active_pid=row[2],
        restart=Lsn(0) if row[3] is None else parse_lsn(row[3]),
        confirmed=Lsn(0) if row[4] is None else parse_lsn(row[4]),
        wal_status=row[5] or "",
        invalidation=row[6] or "",
        held_bytes=None if row[7] is None else int(row[7]),
        failover=bool(row[8]),
        synced=bool(row[9]),
    )


def check_slot(slot: SlotState | None, *, name: str, database: str, reached: Lsn, on_standby: bool = False) -> None:
    """Check that the log can go on from a slot without a gap.

    Args:
        slot: its state on the server; None: there is none.
        reached: X, up to which the log has everything; 0 if capture has never run.

    Raises:
        SourceError (`source_on_standby`): it is a standby's copy of its primary's slot.
        SourceError (`slot_lost`): it is gone though it was used, or the server has removed WAL that it needed.
        SourceError (`slot_ahead`): its position is above X.
        SourceError (`slot_active`): another connection reads it.
        SourceError: it isn't a slot that capture could have made.
    """
    if slot is None:
        if reached == 0:
            return
        raise SourceError(
            f"this server has no slot {name}; the log has everything up to {format_lsn(reached)}",
            code="slot_lost",
            hint=RECOPY_HINT,
            slot=name,
        )
    if slot.plugin != "pgoutput" or slot.database != database:
        raise SourceError(
            f"the slot {name} has plugin {slot.plugin or 'none (physical)'} and database {slot.database or 'none'}",
            hint="Name another slot in millstream.toml: this one belongs to something else.",
            slot=name,
        )
    if slot.synced and on_standby:
        raise SourceError(
            f"the slot {name} of this standby is synchronized from its primary, so it can't be read here",
            code="source_on_standby",
            hint="Point the DSN at the primary, or name another slot in millstream.toml: one of this standby's own.",
            slot=name,
        )
    if slot.wal_status == "lost" or slot.invalidation:
        raise SourceError(
            f"the slot {name} was invalidated ({slot.invalidation or 'its WAL was removed'})",
            code="slot_lost",
            hint=RECOPY_HINT,
            slot=name,
        )
    if reached and slot.confirmed > reached:
        raise SourceError(
            f"the slot {name} has confirmed {format_lsn(slot.confirmed)}, but the log ends at {format_lsn(reached)}: it was"
            " recreated, another reader advanced it, or this home is an old copy",
            code="slot_ahead",
            hint=RECOPY_HINT if slot.active_pid is None else _COPIED_HOME_HINT,
            slot=name,
        )
    if slot.active_pid is not None:
        raise SourceError(
            f"the slot {name} is in use by the server process {slot.active_pid}",
            code="slot_active",
            hint="Stop the other reader of the slot.",
            pid=slot.active_pid,
        )


def create_slot(
    connection: Connection, name: str, *, failover: bool, meanwhile: Callable[[float], None] = lambda _seconds: None
) -> Lsn:
    """Create the slot over a replication connection; return where it begins: all later commits are sent.

    Waits for running transactions to end (PostgreSQL needs a moment at which it knows them all).

    `connection` is a replication connection. With `failover`, standbys that sync slots keep a copy of the slot (17+, on a
    primary). `meanwhile` is called about once a second with the seconds waited; an exception from it ends the wait,
    without a slot.

    Raises:
        SourceError (`no_free_slot`, `wal_level_not_logical`, `source_privilege_missing`): the server refused.
    """
    options = "(SNAPSHOT 'nothing', FAILOVER true)" if failover else "NOEXPORT_SNAPSHOT"
    statement = sql.SQL("CREATE_REPLICATION_SLOT {} LOGICAL pgoutput " + options).format(sql.Identifier(name))
    return ask_for_slot(connection, statement.as_bytes(connection), meanwhile=meanwhile)[0]


def ask_for_slot(
    replication: Connection, command: bytes, *, meanwhile: Callable[[float], None]
) -> tuple[Lsn, str | None]:
    """Run a CREATE_REPLICATION_SLOT that may take long; return its consistent point and exported snapshot, if any.

    `meanwhile` is called about once a second with the seconds waited. If it raises, the command is cancelled, and the
    connection closed.
    """
    pgconn = replication.pgconn
    began = time.monotonic()
    with translated():
        pgconn.send_query(command)
        try:
            while True:
                pgconn.consume_input()
                if not pgconn.is_busy():
                    break
                meanwhile(time.monotonic() - began)
                wait_for(pgconn, select.POLLIN)
        except BaseException:
            with contextlib.suppress(psycopg.Error):
                pgconn.get_cancel().cancel()
            replication.close()  # its answer is never read
            raise
        result = next_result(pgconn)
        while next_result(pgconn) is not None:
            pass
    if result is None or result.status != pq.ExecStatus.TUPLES_OK:
        raise (
            SourceError("the connection was lost", code="source_unreachable")
            if result is None
            else translate_result(result)
        )
    point, snapshot = result.get_value(0, 1), result.get_value(0, 2)
    if point is None:
        raise SourceError("the source returned no position with the slot")
    return parse_lsn(point.decode()), None if snapshot is None else snapshot.decode()


STANDBY_WAITS: Final = (
    "a standby needs its primary's list of running transactions: the primary sends it within a busy quarter of a minute,"
    " or on `SELECT pg_log_standby_snapshot()` (16 and newer)"
)


def who_is_waited_for(dsn: str) -> str:
    """Return the transaction that has run for longest and delays the slot, as the end of a sentence."""
    with connect(dsn, purpose="control") as control, translated():
        if on_standby(control):
            return f": {STANDBY_WAITS}"
        row = control.execute(
            "SELECT pid, usename, application_name, extract(epoch FROM clock_timestamp() - xact_start)::bigint"
            " FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start LIMIT 1"
        ).fetchone()
        if row is not None:
            return f" (process {row[0]}, role {row[1]}, application {row[2] or 'not named'}, for {row[3]} s)"
        prepared = control.execute("SELECT gid, database FROM pg_prepared_xacts ORDER BY prepared LIMIT 1").fetchone()
    return "" if prepared is None else f" (the prepared transaction {prepared[0]} in database {prepared[1]})"


def drop_slot_of(dsn: str, name: str) -> int | None:
    """Drop a slot; return the bytes of WAL that it held, None if there was no such slot.

    Raises:
        SourceError (`slot_active`): it is in use; stop the `run` that reads it first.
    """
    with connect(dsn, purpose="slot drop") as connection:
        slot = read_slot(connection, name)
        if slot is None:
            return None
        if slot.active_pid is not None:
            raise SourceError(
                f"the slot {name} is in use by the server process {slot.active_pid}",
                code="slot_active",
                hint="Stop the `millstream run` that reads it, then drop it.",
                pid=slot.active_pid,
            )
        with translated():
            connection.execute("SELECT pg_drop_replication_slot(%s)", [name])
        return slot.held_bytes or 0


def sender_timeout_ms(connection: Connection) -> int:
    """Return the server's `wal_sender_timeout` in milliseconds."""
    row = first_row(connection, "SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'")
    return 0 if row is None else int(row[0])
