"""The last cut of a lake in PostgreSQL: the position that all of its tables have reached, except those quarantined."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING

from millstream.lake.commit_cuts import Cut, decode_tables, encode_tables, merged
from millstream.lake.layout import TableCommit
from millstream.lake.postgres.target import PostgresTarget, translated
from millstream.model.ids import TableId
from millstream.model.positions import Seq

if TYPE_CHECKING:
    from millstream.lake.postgres.target import Connection


def last_cut(target: PostgresTarget) -> Cut | None:
    """Return the last cut; None before the first. Makes nothing.

    Raises:
        LakeError (`destination`): the database can't be used, or doesn't answer.
    """
    with target.connect("cut") as connection, translated(target.place):
        there = connection.execute("SELECT to_regclass('millstream_lake.cuts') IS NOT NULL").fetchone()
        return _last(connection, target) if there is not None and there[0] else None


def held_there(target: PostgresTarget) -> dict[TableId, Seq]:
    """Return the tables that the last cut left out, with each one's landed position."""
    with target.connect("cut") as connection, translated(target.place):
        row = connection.execute(
            "SELECT held::text FROM millstream_lake.cuts WHERE (stream, pipeline) = (%s, %s)", list(target.owner)
        ).fetchone()
    return {} if row is None else {TableId(int(table)): Seq(after) for table, after in json.loads(row[0]).items()}


def commit_cut(
    target: PostgresTarget,
    n: Seq,
    commits: Iterable[TableCommit],
    *,
    committed_at: datetime,
    commit_ts_max: datetime | None = None,
    held: Mapping[TableId, Seq] = MappingProxyType({}),
) -> Cut:
    """Commit that every table has everything up to `n`; return the cut, or the later one that is already there.

    Args:
        n: the end of the batch.
        commits: the results of writes since the last cut.
        committed_at: now, with a time zone.
        commit_ts_max: the greatest commit time of the batch, if it had any.
        held: tables that are quarantined, with each one's landed position. It is stored with the tables, so that a
            database restored from a backup still has it.
    """
    with target.connect("cut") as connection, translated(target.place):
        last = _last(connection, target)
        if last is not None and last.n > n:
            return last
        tables = merged({} if last is None else last.tables, commits)
        if last is not None and last.n == n:
            committed_at = last.committed_at
        times = [time for time in (commit_ts_max, None if last is None else last.commit_ts_max) if time is not None]
        cut = Cut(1 if last is None else last.number + 1, n, committed_at, max(times, default=None), tables)
        if last is not None and (last.n, last.tables) == (n, tables):
            cut = last  # only `held` may be new
        connection.execute(
            "INSERT INTO millstream_lake.cuts VALUES (%s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (stream, pipeline) DO UPDATE SET "
            "number = excluded.number, n = excluded.n, committed_at = excluded.committed_at, "
            "commit_ts_max = excluded.commit_ts_max, tables = excluded.tables, held = excluded.held WHERE cuts.n <= excluded.n",
            [
                *target.owner,
                cut.number,
                int(cut.n),
                cut.committed_at,
                cut.commit_ts_max,
                encode_tables(tables),
                json.dumps({str(table): int(after) for table, after in sorted(held.items())}),
            ],
        )
    return cut


def _last(connection: Connection, target: PostgresTarget) -> Cut | None:
    row = connection.execute(
        "SELECT number, n, committed_at, commit_ts_max, tables::text FROM millstream_lake.cuts WHERE (stream, pipeline) = (%s, %s)",
        list(target.owner),
    ).fetchone()
    return None if row is None else Cut(row[0], Seq(row[1]), row[2], row[3], decode_tables(row[4]))
