"""The checks of `doctor` on the server: settings, the right to replicate, slots, senders, and what would end capture at a failover."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from millstream.capture.config import CaptureConfig
from millstream.capture.connection import Connection, all_rows, connect_replication, first_row, one_row
from millstream.capture.slot import SlotState, read_slot
from millstream.capture.source_tables import STANDBY_VERSION_MIN, on_standby
from millstream.errors import MillstreamError

_FAILOVER_VERSION_MIN: Final = 170000
_SENDER_TIMEOUT_WARN_MS: Final = 10_000
"""Timeout below which a pause of a busy machine, or of a network that changes its route, ends the connection."""
_SETTINGS: Final = (
    "wal_level",
    "max_replication_slots",
    "max_wal_senders",
    "max_slot_wal_keep_size",
    "wal_sender_timeout",
    "hot_standby_feedback",
    "synchronized_standby_slots",
    "idle_replication_slot_timeout",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem found.

    Attributes:
        code: stable; the code of the error that it would cause, if there is one.
        message: the problem.
        blocks: `source` (nothing can be captured), `table` (one table can't), `current` (one table can, into history
            only), or `nothing` (a warning).
        table: `schema.name`, if it concerns one table.
        fix: what to do, one sentence.
        sql: statements for a DBA to run; empty if SQL doesn't fix it.
    """

    code: str
    message: str
    blocks: str
    table: str = ""
    fix: str = ""
    sql: str = ""


def check_server(connection: Connection, config: CaptureConfig) -> Iterator[Finding]:
    """Yield the problems of the server's settings and slots that stop capture, or may stop it one day."""
    rows = all_rows(connection, "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)", [list(_SETTINGS)])
    used = one_row(
        connection, "SELECT (SELECT count(*) FROM pg_replication_slots), (SELECT count(*) FROM pg_stat_replication)"
    )
    settings = {str(name): str(value) for name, value in rows}
    slot = read_slot(connection, config.slot)
    if settings.get("wal_level") != "logical":
        yield Finding(
            "wal_level_not_logical",
            f"wal_level is {settings.get('wal_level')}",
            "source",
            fix="Set wal_level to logical and restart the server.",
            sql="ALTER SYSTEM SET wal_level = 'logical'; -- then restart the server",
        )
    if slot is None and int(used[0]) >= int(settings["max_replication_slots"]):
        more = int(settings["max_replication_slots"]) + 4
        yield Finding(
            "no_free_slot",
            f"all {settings['max_replication_slots']} replication slots are in use",
            "source",
            fix="Raise max_replication_slots and restart the server, or drop an unused slot.",
            sql=f"ALTER SYSTEM SET max_replication_slots = {more}; -- then restart the server",
        )
    if int(used[1]) >= int(settings["max_wal_senders"]):
        more = int(settings["max_wal_senders"]) + 4
        yield Finding(
            "no_free_slot",
            f"all {settings['max_wal_senders']} WAL senders are in use",
            "source",
            fix="Raise max_wal_senders and restart the server.",
            sql=f"ALTER SYSTEM SET max_wal_senders = {more}; -- then restart the server",
        )
    if slot is not None and (slot.wal_status == "lost" or slot.invalidation):
        yield Finding(
            "slot_lost",
            f"the slot {slot.name} was invalidated",
            "source",
            fix="Run `millstream slot drop`; capture then copies the tables again.",
        )
    if slot is not None and (slot.held_bytes or 0) > config.slot_lag_bytes:
        yield Finding(
            "slot_holds_disk",
            f"the slot {slot.name} holds {(slot.held_bytes or 0) >> 20} MiB of WAL",
            "nothing",
            fix="Let `millstream run` catch up, or drop the slot with `millstream slot drop`.",
        )
    if settings.get("max_slot_wal_keep_size") == "-1":
        yield Finding(
            "slot_unbounded",
            "max_slot_wal_keep_size is -1: a slot without a reader may fill the server's disk",
            "nothing",
            fix="Bound it to what the disk can spare; a slot that falls further behind is lost, and tables are copied"
            " again.",
            sql="ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'; SELECT pg_reload_conf(); -- 50GB is an example",
        )
    if on_standby(connection):
        yield from _check_standby(connection, settings, slot)
    else:
        yield from _check_failover(connection, config, settings, slot)
    yield from _check_settings(settings)


def _check_settings(settings: Mapping[str, str]) -> Iterator[Finding]:
    timeout_ms = int(settings["wal_sender_timeout"])
    if 0 < timeout_ms < _SENDER_TIMEOUT_WARN_MS:
        yield Finding(
            "wal_sender_timeout_short",
            f"wal_sender_timeout is {timeout_ms} ms: a network pause of that length ends the stream, which then restarts",
            "nothing",
            fix="Set it to 30 s or more.",
            sql="ALTER SYSTEM SET wal_sender_timeout = '60s'; SELECT pg_reload_conf();",
        )
    if settings.get("idle_replication_slot_timeout", "0") != "0":
        yield Finding(
            "slot_times_out",
            f"idle_replication_slot_timeout is {settings['idle_replication_slot_timeout']} s: while `millstream run` is down for"
            " longer, the slot is invalidated, and every table is copied again",
            "nothing",
            fix="Set it to 0, or to longer than capture will ever be down.",
            sql="ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_reload_conf();",
        )


def _check_standby(connection: Connection, settings: Mapping[str, str], slot: SlotState | None) -> Iterator[Finding]:
    """Yield the problems of a source that is a standby."""
    version = connection.info.server_version
    if version < STANDBY_VERSION_MIN:
        yield Finding(
            "source_on_standby",
            f"the source is a standby of PostgreSQL {version // 10000}, which can't decode its WAL (16 and newer can)",
            "source",
            fix="Point the DSN at the primary.",
        )
        return
    if slot is not None and slot.synced:
        yield Finding(
            "source_on_standby",
            f"the slot {slot.name} of this standby is synchronized from its primary, so it can't be read here",
            "source",
            fix="Point the DSN at the primary, or name another slot in millstream.toml: one of this standby's own.",
        )
    if settings.get("hot_standby_feedback") == "off":
        yield Finding(
            "standby_without_feedback",
            "hot_standby_feedback is off: the primary's vacuum invalidates this standby's slot, and every table is copied again",
            "nothing",
            fix="Set it on the standby, and let it stream by a physical slot of its own.",
            sql="ALTER SYSTEM SET hot_standby_feedback = on; SELECT pg_reload_conf();",
        )


def _check_failover(
    connection: Connection, config: CaptureConfig, settings: Mapping[str, str], slot: SlotState | None
) -> Iterator[Finding]:
    """Yield what would end capture when a standby of a primary is promoted."""
    rows = all_rows(
        connection,
        "SELECT slot_name FROM pg_replication_slots WHERE slot_type = 'physical' AND NOT temporary ORDER BY 1",
    )
    row = first_row(connection, "SELECT count(*) FROM pg_stat_replication WHERE application_name !~ '^millstream '")
    standbys = [str(found[0]) for found in rows]
    if not standbys and (row is None or not row[0]):
        return
    if connection.info.server_version < _FAILOVER_VERSION_MIN:
        yield Finding(
            "slot_not_on_standbys",
            "the server has standbys, and PostgreSQL synchronizes slots to them only from version 17 on: after a promotion, every table is"
            " copied again",
            "nothing",
            fix="Have the tool that promotes keep the slot on the standbys (Patroni's permanent slots, pg_failover_slots).",
        )
        return
    if slot is not None and not slot.failover and config.failover:
        name = sql.Identifier(slot.name).as_string(connection)
        yield Finding(
            "slot_without_failover",
            f"the server has standbys, and the slot {slot.name} isn't synchronized to them: after a promotion, every table"
            " is copied again",
            "nothing",
            fix="Stop `millstream run`, then run over a replication connection (psql 'dbname=… replication=database'):"
            f" ALTER_REPLICATION_SLOT {name} (FAILOVER true); and set sync_replication_slots = on, with a dbname in"
            " primary_conninfo, on the standbys.",
        )
    elif config.failover and not settings.get("synchronized_standby_slots"):
        names = ", ".join(standbys)
        yield Finding(
            "log_ahead_of_standbys",
            "synchronized_standby_slots is empty: the log may have changes that a promoted standby lacks, and capture can't continue then",
            "nothing",
            fix="Name the physical slots of the standbys that may be promoted: capture then gets only changes that these standbys have.",
            sql=f"ALTER SYSTEM SET synchronized_standby_slots = {sql.Literal(names).as_string(connection)}; SELECT pg_reload_conf();"
            if names
            else "",
        )


def check_replication(connection: Connection, config: CaptureConfig) -> list[Finding]:
    """Return what keeps the role from streaming changes: the right, or a connection that the server refuses."""
    try:
        connect_replication(config.dsn).close()
    except MillstreamError as error:
        if error.code != "source_privilege_missing":
            return [Finding(error.code, error.message, "source", fix=error.hint)]
        role = sql.Identifier(connection.info.user).as_string(connection)
        fix = "Have a superuser let the role stream changes."
        return [Finding(error.code, error.message, "source", fix=fix, sql=f"ALTER ROLE {role} REPLICATION;")]
    return []
