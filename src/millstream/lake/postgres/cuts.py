"""The last cut of a lake in PostgreSQL: as far as all of its tables that aren't set aside have got."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType

from millstream.lake.commits import Cut, decode_tables, encode_tables, merged
from millstream.lake.layout import TableCommit
from millstream.lake.postgres.layout import prepare
from millstream.lake.postgres.target import PostgresTarget, translated
from millstream.model.ids import TableId
from millstream.model.positions import Seq


def last_cut(target: PostgresTarget) -> Cut | None:
    """The last cut; None before the first. Makes nothing.

    Raises:
        DestinationError: the database can't be used, or doesn't answer.
    """
    with target.connect("cut") as connection, translated(target.place):
        there = connection.execute("SELECT to_regclass('millstream_lake.cuts') IS NOT NULL").fetchone()
        if there is None or not there[0]:
            return None
        row = connection.execute(
            "SELECT number, n, committed_at, commit_ts_max, tables::text FROM millstream_lake.cuts WHERE (stream, pipeline) = (%s, %s)",
            list(target.owner),
        ).fetchone()
    return None if row is None else Cut(row[0], Seq(row[1]), row[2], row[3], decode_tables(row[4]))


def held_there(target: PostgresTarget) -> dict[TableId, Seq]:
    """Tables that were set aside at the last cut, with how far each was landed."""
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
    """Commit that every table has everything up to `n`; returns the cut, or the later one that is there already.

    Args:
        target: where.
        n: what the batch ends at.
        commits: what writes since the last cut returned.
        committed_at: now, with a time zone.
        commit_ts_max: the greatest commit time of the batch, where it had any.
        held: tables that are set aside, with how far each was landed. It lies beside what it is true of: restored from a backup, the
            database still knows.
    """
    commits = list(commits)
    with target.connect("cut") as connection:
        prepare(connection, target.place)
        last = last_cut(target)
        tables = merged({} if last is None else last.tables, commits)
        facts = json.dumps({str(table): int(after) for table, after in sorted(held.items())})
        if last is not None and last.n > n:
            return last
        if last is not None and last.n == n and tables == last.tables:
            with translated(target.place):
                connection.execute(
                    "UPDATE millstream_lake.cuts SET held = %s WHERE (stream, pipeline) = (%s, %s)",
                    [facts, *target.owner],
                )
            return last
        times = [time for time in (commit_ts_max, None if last is None else last.commit_ts_max) if time is not None]
        cut = Cut(1 if last is None else last.number + 1, n, committed_at, max(times, default=None), tables)
        with translated(target.place):
            connection.execute(
                "INSERT INTO millstream_lake.cuts VALUES (%s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (stream, pipeline) DO UPDATE SET "
                "number = excluded.number, n = excluded.n, committed_at = excluded.committed_at, "
                "commit_ts_max = excluded.commit_ts_max, tables = excluded.tables, held = excluded.held WHERE cuts.n <= excluded.n",
                [*target.owner, cut.number, int(n), committed_at, cut.commit_ts_max, encode_tables(tables), facts],
            )
    return cut
