"""Copies of an embedded PostgreSQL: a physical standby, or an independent backup, of an earlier moment if wanted.

A copy is made like any base backup, by `pg_backup_start`, the files, `pg_backup_stop`: the server runs
on. That needs no `pg_basebackup`, which the packaged servers of some versions lack.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg

from millstream.testing.postgres import EmbeddedPostgres

__all__ = ["archiving", "back_up", "make_standby", "promote", "recover_to", "wait_for_replay"]

_LEFT_OUT: Final = ("postmaster.pid", "postmaster.opts", "pg_internal.init")
_EMPTIED: Final = ("pg_replslot", "pg_dynshmem", "pg_notify", "pg_serial", "pg_snapshots", "pg_stat_tmp", "pg_subtrans")
"""As in pg_basebackup: their content means nothing in a copy."""
_WAIT_S: Final = 120.0


def back_up(
    server: EmbeddedPostgres, *, settings: Mapping[str, str] | None = None, slots: bool = False
) -> EmbeddedPostgres:
    """Return a copy of a running server, not started yet, with every row committed before the call.

    The caller closes it.

    Args:
        server: runs; the copy is made with pg_backup_start and pg_backup_stop.
        settings: of the copy, over an embedded server's own.
        slots: copy its replication slots too, as tools that copy a disk do.
    """
    copy = EmbeddedPostgres(server.installation.major, fsync=False, settings=settings)
    old = server.installation.major < 15
    try:
        with server.connect() as connection:
            start = "pg_start_backup('copy', true, false)" if old else "pg_backup_start('copy', true)"
            connection.execute(f"SELECT {start}")
            emptied = [name for name in _EMPTIED if not (slots and name == "pg_replslot")]
            _copy(server.data_dir, copy.data_dir, emptied)
            stop = "pg_stop_backup(false, false)" if old else "pg_backup_stop(false)"
            row = connection.execute(f"SELECT labelfile FROM {stop}").fetchone()
            assert row is not None
            (copy.data_dir / "backup_label").write_text(str(row[0]))
            # The WAL until the end is needed for a complete copy.
            shutil.copytree(
                server.data_dir / "pg_wal", copy.data_dir / "pg_wal", copy_function=_copy_file, dirs_exist_ok=True
            )
    except BaseException:
        copy.close()
        raise
    return copy


def _copy(data: Path, folder: Path, emptied: list[str]) -> None:
    def leave_out(where: str, names: list[str]) -> set[str]:
        inside = Path(where).relative_to(data)
        if inside.parts[:1] and inside.parts[0] in emptied:
            return set(names)
        return {name for name in names if name in _LEFT_OUT}

    shutil.copytree(data, folder, ignore=leave_out, copy_function=_copy_file)


def _copy_file(source: str, target: str) -> None:
    with contextlib.suppress(
        FileNotFoundError
    ):  # a running server deletes files at any time, and renames unfinished ones
        shutil.copyfile(source, target)


def make_standby(
    primary: EmbeddedPostgres,
    *,
    name: str = "standby",
    settings: Mapping[str, str] | None = None,
    slots: bool = False,
) -> EmbeddedPostgres:
    """Return a running hot standby that streams by the physical slot `name`, which is made; the caller closes it.

    Args:
        primary: runs; may be a standby itself.
        name: of the slot, and the standby's in `pg_stat_replication`.
        settings: of its own, over an embedded server's.
        slots: copy the primary's slots too.
    """
    with primary.connect() as connection:
        connection.execute(
            "SELECT pg_create_physical_replication_slot(%s, true) WHERE NOT EXISTS"
            " (SELECT FROM pg_replication_slots WHERE slot_name = %s)",
            [name, name],
        )
    where = f"host={primary.socket_dir} port={primary.port} user=postgres dbname=postgres application_name={name}"
    following = {"primary_conninfo": where, "primary_slot_name": name, "hot_standby_feedback": "on"}
    standby = back_up(primary, settings={**following, **(settings or {})}, slots=slots)
    (standby.data_dir / "standby.signal").touch()
    try:
        return standby.start()
    except BaseException:
        standby.close()
        raise


def promote(standby: EmbeddedPostgres) -> None:
    """Make a standby a primary on a timeline of its own; return once it is."""
    with standby.connect() as connection:
        row = connection.execute("SELECT pg_promote(true, 120)").fetchone()
    if row is None or not row[0]:
        raise TimeoutError("the standby wasn't promoted in time")


def wait_for_replay(primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
    """Return once a standby has replayed everything that its primary had flushed at the call."""
    with primary.connect() as connection:
        end = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    assert end is not None
    with standby.connect() as connection:

        def replayed() -> bool:
            row: tuple[Any, ...] | None = connection.execute(
                "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", [end[0]]
            ).fetchone()
            return row is not None and bool(row[0])

        _wait(replayed, f"{standby.data_dir} replays up to {end[0]}")


def archiving(folder: Path) -> dict[str, str]:
    """Return the settings of a server that archives its WAL in a folder it can write, for `recover_to`."""
    return {"archive_mode": "on", "archive_command": f'cp "%p" "{folder}/%f"'}


def recover_to(backup: EmbeddedPostgres, archive: Path, **target: str) -> EmbeddedPostgres:
    """Start a backup that recovers to a point in time, and goes on alone on a new timeline; return it once it does.

    Args:
        backup: from `back_up`, not started; a second recovery of one backup needs another copy.
        archive: the folder of the backed-up server's WAL.
        target: settings of the target (`recovery_target_name` …).
    """
    recovery = {"restore_command": f'cp "{archive}/%f" "%p"', "recovery_target_action": "promote", **target}
    (backup.data_dir / "recovery.signal").touch()
    backup.restart(settings=recovery)

    def recovered() -> bool:
        try:
            with backup.connect() as connection:
                row: tuple[Any, ...] | None = connection.execute("SELECT NOT pg_is_in_recovery()").fetchone()
        except psycopg.OperationalError:  # for a moment of its recovery it refuses connections
            return False
        return row is not None and bool(row[0])

    _wait(recovered, f"{backup.data_dir} is recovered")
    return backup


def _wait(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"never: {what}")
        time.sleep(0.02)
