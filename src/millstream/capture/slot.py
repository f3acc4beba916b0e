"""The replication slot: made, checked against what the log has, dropped.

The rule at start: compare first. `START_REPLICATION` below a recreated slot's start succeeds silently and begins at the
slot's own position; whoever doesn't look has a gap that nobody ever hears of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq, sql

from millstream.capture.connection import RECOPY_HINT, connect, translate_result, translated
from millstream.capture.source import Connection
from millstream.errors import SlotActive, SlotAhead, SlotLost, SourceError
from millstream.model.positions import Lsn, format_lsn, parse_lsn


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
    """Why it was invalidated (16+); empty where it wasn't."""
    held_bytes: int | None
    """WAL that the server keeps for it."""


def read_slot(connection: Connection, name: str) -> SlotState | None:
    """The slot's state; None where there is no slot of that name."""
    version = connection.info.server_version
    invalidation = "invalidation_reason" if version >= 170000 else "CASE WHEN conflicting THEN 'conflict' END"
    if version < 160000:
        invalidation = "NULL"
    end = "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END"
    query = (
        "SELECT plugin, database, active_pid, restart_lsn::text, confirmed_flush_lsn::text, wal_status,"
        f" {invalidation}, ({end} - restart_lsn)::bigint FROM pg_replication_slots WHERE slot_name = %s"
    )
    with translated():
        row = connection.execute(query, [name]).fetchone()
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
    )


def check_slot(slot: SlotState | None, *, name: str, database: str, reached: Lsn) -> None:
    """Let a slot pass from which the log can go on without a gap.

    Args:
        slot: as the server has it; None: there is none.
        name: the slot's name.
        database: ours.
        reached: X, up to which the log has everything; 0 where capture has never run.

    Raises:
        SlotLost: it is gone though it was used, or the server has dropped WAL that it needed.
        SlotAhead: it stands above X.
        SlotActive: another connection reads it.
        SourceError: it isn't a slot that capture could have made.
    """
    if slot is None:
        if reached == 0:
            return
        raise SlotLost(
            f"the slot {name} is gone; the log has everything up to {format_lsn(reached)}", hint=RECOPY_HINT, slot=name
        )
    if slot.plugin != "pgoutput" or slot.database != database:
        raise SourceError(
            f"the slot {name} is one of plugin {slot.plugin or 'none (physical)'} in database {slot.database or 'none'}",
            hint="Name another slot in millstream.toml: this one belongs to something else.",
            slot=name,
        )
    if slot.wal_status == "lost" or slot.invalidation:
        raise SlotLost(
            f"the slot {name} was invalidated ({slot.invalidation or 'its WAL was removed'})",
            hint=RECOPY_HINT,
            slot=name,
        )
    if reached and slot.confirmed > reached:
        raise SlotAhead(
            f"the slot {name} stands at {format_lsn(slot.confirmed)}, the log has only up to {format_lsn(reached)}: it was"
            " recreated, or somebody else read from it",
            hint=RECOPY_HINT,
            slot=name,
        )
    if slot.active_pid is not None:
        raise SlotActive(
            f"the slot {name} is in use by the server process {slot.active_pid}",
            hint="Stop the other reader; it is tried again until then.",
            pid=slot.active_pid,
        )


def create_slot(connection: Connection, name: str) -> Lsn:
    """Make the slot over a replication connection; return where it begins: later commits are all sent.

    Waits for transactions that are running to end (PostgreSQL needs a moment at which it knows them all).

    Raises:
        NoFreeSlot, WalLevelNotLogical, SourcePrivilegeMissing: as they say.
    """
    statement = sql.SQL("CREATE_REPLICATION_SLOT {} LOGICAL pgoutput NOEXPORT_SNAPSHOT").format(sql.Identifier(name))
    with translated():
        result = connection.pgconn.exec_(statement.as_bytes(connection))
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise translate_result(result)
    consistent_point = result.get_value(0, 1)
    assert consistent_point is not None
    return parse_lsn(consistent_point.decode())


def drop_slot_of(dsn: str, name: str) -> int | None:
    """Drop a slot; give back the bytes of WAL that it held, None where there was no such slot.

    Raises:
        SlotActive: it is in use: stop the `run` that reads it first.
    """
    with connect(dsn, purpose="slot drop") as connection:
        slot = read_slot(connection, name)
        if slot is None:
            return None
        if slot.active_pid is not None:
            raise SlotActive(
                f"the slot {name} is in use by the server process {slot.active_pid}",
                hint="Stop the `millstream run` that reads it, then drop it.",
                pid=slot.active_pid,
            )
        with translated():
            connection.execute("SELECT pg_drop_replication_slot(%s)", [name])
        return slot.held_bytes or 0


def setting_ms(connection: psycopg.Connection[tuple[Any, ...]], name: str) -> int:
    """A server setting in milliseconds, as `pg_settings` has it."""
    with translated():
        row = connection.execute(f"SELECT setting FROM pg_settings WHERE name = '{name}'").fetchone()
    return 0 if row is None else int(row[0])
