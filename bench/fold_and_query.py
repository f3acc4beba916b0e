"""The lake's own work compared with handwritten delta-rs and DuckDB code."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from bench.figures import Figure, asked, compared, measures, say
from bench.made_lakes import ACCOUNTS, ACCOUNTS_SHAPE, Ids, Lake, clustered, records, uniform
from bench.places import folder
from millstream.lake.delta.format import DeltaFormat
from millstream.lake.history_scan import read_history
from millstream.lake.query.query_session import LakeSession
from millstream.lake.table_format import Commit, open_table
from millstream.model.positions import Seq

FOLD_ROWS = 1_000_000
CHANGES = 100_000
QUERY_ROWS = 10_000_000
HISTORY_ROWS = 100_000_000
HISTORY_CHANGES = 10_000
_ROW_BYTES = 80


@measures("fold_vs_handwritten_merge", "fold_clustered_vs_handwritten_merge")
def fold_vs_merge() -> Iterator[Figure]:
    """Bring a table of the same rows to the same state on both sides, turn by turn."""
    rows = asked.rows or FOLD_ROWS
    changes = min(CHANGES, rows // 10)
    for name, keys in (("fold_vs_handwritten_merge", uniform), ("fold_clustered_vs_handwritten_merge", clustered)):
        say(f"{name}: {changes:,} changes of {rows:,} rows")
        with folder("fold") as path:
            lake = Lake(path)
            lake.load(rows)
            peer = str(path / "merged")
            shutil.copytree(lake.current, peer)
            batches = _Changes(rows, changes, keys)
            yield compared(
                name,
                partial(_folded_rows_s, lake, partial(batches.next, "ours")),
                partial(_merged_rows_s, peer, partial(batches.next, "peer")),
                unit="rows/s",
                goal=">= 1.0" if keys is uniform else "reported",
                rows=rows,
                size_bytes=rows * _ROW_BYTES,
                note=f"changed rows a second; `current` of {rows:,} rows, {ACCOUNTS_SHAPE}; {changes:,} changed keys,"
                f" {'uniformly random' if keys is uniform else 'of one stretch of the key'}, 8 of 10 updates, 1 deletes, 1 inserts; ours is"
                " fold_table, which reads the changes from history; the peer is DeltaTable.merge of the same rows out of memory"
                " (update, delete, insert) on a copy of the table as we had built it",
            )


class _Changes:
    """Yield batch after batch of changed keys, the same for both sides; a key is deleted and inserted once."""

    def __init__(self, rows: int, count: int, keys: Callable[..., Ids]) -> None:
        self._rows, self._count, self._keys = rows, count, keys
        self._at = {"ours": itertools.count(), "peer": itertools.count()}

    def next(self, side: str) -> tuple[list[str], Ids]:
        number = next(self._at[side])
        count = self._count
        tenth = count // 10
        found = self._keys(self._rows, count - tenth, seed=number)
        new = np.arange(tenth, dtype=np.int64) + self._rows + 1 + number * tenth
        letters = np.full(count - tenth, "u")
        letters[:: len(letters) // tenth] = "d"
        return [*letters.tolist(), *["c"] * tenth], np.concatenate([found, new])


def _folded_rows_s(lake: Lake, changes: Callable[[], tuple[list[str], Ids]]) -> float:
    letters, ids = changes()
    lake.append(letters, ids)
    return len(ids) / lake.fold()


def _merged_rows_s(path: str, changes: Callable[[], tuple[list[str], Ids]]) -> float:
    letters, ids = changes()
    columns = [column.name for column in ACCOUNTS.columns]
    source = pa.Table.from_batches([records("u", ids, after=0)]).select(columns)
    source = source.append_column("deleted", pa.array(np.array(letters) == "d"))
    began_at = time.perf_counter()
    put = {name: f"s.{name}" for name in columns}
    (
        DeltaTable(path)
        .merge(source, "t.id = s.id", source_alias="s", target_alias="t")
        .when_matched_delete("s.deleted")
        .when_matched_update(put)
        .when_not_matched_insert(put, "NOT s.deleted")
        .execute()
    )
    return len(ids) / (time.perf_counter() - began_at)


@measures("query_point_vs_current_only", "query_scan_vs_current_only")
def query_vs_current() -> Iterator[Figure]:
    """Measure the tail's cost for a query."""
    rows = asked.rows or QUERY_ROWS
    tail = min(CHANGES, rows // 10)
    say(f"query_*_vs_current_only: {rows:,} rows and a tail of {tail:,}")
    with folder("query") as path:
        lake = Lake(path)
        lake.load(rows)
        for part in np.array_split(uniform(rows, tail, seed=1), 20):
            lake.append("u", part, cut=True)
        points = itertools.cycle(uniform(rows, 1000, seed=2).tolist())
        for name, sql, said in (
            ("query_point_vs_current_only", "SELECT * FROM {} WHERE id = {}", "a row by its key"),
            (
                "query_scan_vs_current_only",
                "SELECT status, count(*), sum(total), max(placed_at) FROM {} GROUP BY status",
                "an aggregate over all rows",
            ),
        ):
            yield compared(
                name,
                partial(_asked_ms, lake, sql, points),
                partial(_asked_current_ms, lake, sql, points),
                unit="ms",
                goal="<= 3",
                rows=rows,
                size_bytes=rows * _ROW_BYTES,
                note=f"{said}; `current` of {rows:,} rows, {ACCOUNTS_SHAPE}, with {tail:,} uniformly changed keys in history since its fold, in"
                " 20 commits; ours opens a LakeSession and asks it; the peer opens `current` alone with delta-rs and asks for its files"
                " with read_parquet in a new DuckDB connection",
            )


def _asked_ms(lake: Lake, sql: str, keys: Iterator[int]) -> float:
    statement = sql.format("public.accounts", next(keys))
    began_at = time.perf_counter()
    with LakeSession(lake.layout) as session:
        session.query(statement)
    return (time.perf_counter() - began_at) * 1000


def _asked_current_ms(lake: Lake, sql: str, keys: Iterator[int]) -> float:
    statement = sql.format("{}", next(keys))
    began_at = time.perf_counter()
    with duckdb.connect() as connection:
        files = DeltaTable(lake.current).file_uris()
        connection.sql(statement.format(f"read_parquet({files!r})")).to_arrow_table()
    return (time.perf_counter() - began_at) * 1000


@measures("history_cost_1m_vs_100m")
def history_cost() -> Iterator[Figure]:
    """Measure appending to history and reading its tail, with many records before it and with few."""
    large = asked.rows or HISTORY_ROWS
    small = large // 100
    changes = min(HISTORY_CHANGES, small // 10)
    say(f"history_cost_1m_vs_100m: {changes:,} changes behind {small:,} and {large:,} records")
    with folder("history") as path:
        lakes = [_grown(path / str(rows), rows, file_rows=small, changes=changes) for rows in (large, small)]
        yield compared(
            "history_cost_1m_vs_100m",
            lambda: _change_us(lakes[0], small, changes),
            lambda: _change_us(lakes[1], small, changes),
            unit="us/row",
            goal="<= 1.2",
            rows=large,
            size_bytes=large * _ROW_BYTES,
            note=f"for {changes:,} changed rows, the time of a landing (the table opened, rows converted, Parquet written, committed) and"
            f" of reading the tail since the last fold as `query` does (table opened, files chosen by statistics, 10 such batches read), a row;"
            f" history of {large:,} records beside one of {small:,}: one Parquet file of {small:,} records, written by a landing, and links"
            " to it under other names, committed with the statistics that such files would have (`seq` ascending from file to file), 20 a"
            " commit, with Delta's own checkpoints; nothing reads those files",
        )


def _grown(path: Path, rows: int, *, file_rows: int, changes: int) -> Lake:
    """Make a history of `rows` records, from one file and links to it, and ten batches of changes."""
    lake = Lake(path)
    lake.append("r", np.arange(1, file_rows + 1, dtype=np.int64))
    root = Path(lake.layout.table_path("history", ACCOUNTS))
    history = DeltaTable(str(root))
    action = pa.table(history.get_add_actions(flatten=True)).to_pylist()[0]
    numbers = itertools.count(1)
    while lake.n < rows:
        adds: list[AddAction | RemoveAction] = []
        for _ in range(min(20, (rows - lake.n) // file_rows)):
            name = f"{Path(action['path']).parent}/part-{next(numbers):05}.parquet"
            os.link(root / action["path"], root / name)
            adds.append(_added(action, name, int(lake.n), file_rows))
            lake.n = Seq(lake.n + file_rows)
        app = lake.layout.app_id("history", ACCOUNTS.table_id)
        opened = DeltaFormat().open(lake.layout, str(root), app)
        assert opened is not None
        opened.table.create_write_transaction(
            adds,
            "append",
            opened.table.schema(),
            ["__commit_month"],
            commit_properties=opened.commit_properties(Commit(lake.n)),
        )
    DeltaTable(str(root)).create_checkpoint()
    for number in range(10):
        lake.append("u", uniform(file_rows, changes, seed=number))
    return lake


def _added(action: dict[str, object], name: str, after: int, rows: int) -> AddAction:
    bounds: dict[str, dict[str, object]] = {"min": {}, "max": {}}
    for key, value in action.items():
        side, _, column = key.partition(".")
        if side in bounds and isinstance(value, int | str) and column not in {"__seq", "id", "__commit_lsn"}:
            bounds[side][column] = value
    for column in ("__seq", "id"):
        bounds["min"][column], bounds["max"][column] = after + 1, after + rows
    stats = {"numRecords": rows, "minValues": bounds["min"], "maxValues": bounds["max"], "nullCount": {}}
    month = str(action.get("partition.__commit_month") or "2026-01")
    return AddAction(
        path=name,
        size=int(str(action["size_bytes"])),
        partition_values={"__commit_month": month},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=json.dumps(stats),
    )


_seeds = itertools.count(100)


def _change_us(lake: Lake, keys: int, changes: int) -> float:
    ids = uniform(keys, changes, seed=next(_seeds))
    batch_after = Seq(lake.n - 9 * changes)
    began_at = time.perf_counter()
    lake.append("u", ids)
    opened = open_table(
        lake.layout,
        lake.layout.table_path("history", ACCOUNTS),
        lake.layout.app_id("history", ACCOUNTS.table_id),
    )
    assert opened is not None
    tail = read_history(opened, after=batch_after, upto=lake.n, table=ACCOUNTS.table_id)
    took_s = time.perf_counter() - began_at
    if tail.num_rows != 10 * changes:
        raise AssertionError(f"the tail has {tail.num_rows} records")
    return took_s * 1e6 / changes
