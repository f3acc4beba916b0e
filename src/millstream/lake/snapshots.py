"""Commit cuts: one row `(n, table versions)` once all tables of a batch have it, in the Delta table `_commits`.

A query reads all tables as in the last row. Each row lists all tables, including the unchanged ones that the batch
didn't touch, so that an idle table holds nothing back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import write_deltalake

from millstream.errors import LakeTableForeign
from millstream.lake.data_files import TableFiles, files_of
from millstream.lake.delta import WRITER, OpenTable, create_table, lake_errors, open_table
from millstream.lake.layout import LakeLayout, TableCommit
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.records import INSTANT

_SCHEMA: Final = pa.schema(
    [
        pa.field("number", pa.int64(), nullable=False),
        pa.field("n", pa.int64(), nullable=False),
        pa.field("committed_at", INSTANT, nullable=False),
        pa.field("commit_ts_max", INSTANT),
        pa.field("tables", pa.string(), nullable=False),
    ]
)
_COMPACT_FILES: Final = 500
"""Number of rows, one a file, after which the table's small files are compacted to one."""
_COMPACTED_BYTES: Final = 8 << 20
"""Files of this size aren't rewritten: the cost of compaction doesn't grow with the lake's age."""


@dataclass(frozen=True, slots=True)
class CutTable:
    """One table as a cut names it."""

    table_id: TableId
    name: str
    """`schema.table`, each part quoted as PostgreSQL quotes it."""
    history: int
    """Delta version of history; -1 if there is none."""
    current: int = -1
    """Delta version of `current`; -1 before its first fold."""
    current_n: Seq = Seq(0)
    """The position of `current` in that version."""
    scd2: int = -1
    """Delta version of `scd2`; -1 before its first fold, and if the lake has no such view."""
    scd2_n: Seq = Seq(0)
    """The position of `scd2` in that version."""
    history_n: Seq = Seq(0)
    """End of the last append to history."""
    since: Seq = Seq(0)
    """The number from which on the table has had the folder's name."""


@dataclass(frozen=True, slots=True)
class Cut:
    """All tables at one token."""

    number: int
    """Number of the cut, from 1; two cuts may have one n, if folds came between."""
    n: Seq
    committed_at: datetime
    commit_ts_max: datetime | None
    """The greatest commit time of this and all earlier cuts."""
    tables: Mapping[str, CutTable] = field(default_factory=dict)
    """Tables by folder name."""


def commit_cut(
    layout: LakeLayout,
    n: Seq,
    commits: Iterable[TableCommit],
    *,
    committed_at: datetime,
    commit_ts_max: datetime | None = None,
) -> Cut:
    """Commit that every table has everything up to `n`; return the cut, or the later one that is already there.

    Args:
        layout: where the lake is.
        n: the end of the batch.
        commits: the results of writes since the last cut, folds included; other tables are unchanged.
        committed_at: now, with a time zone.
        commit_ts_max: the greatest commit time of the batch, if it had any.

    Raises:
        LakeConflict: another driver committed a cut first.
    """
    commits = list(commits)
    opened = _open(layout)
    if opened is None:
        opened = create_table(
            layout,
            layout.commits_path,
            layout.commits_app_id,
            _SCHEMA,
            description=f"Which table versions stand at one position, written by Millstream (stream {layout.stream_name}).",
            bounded=("number", "n"),
        )
    last = _read_last(layout, opened)
    tables = merged({} if last is None else last.tables, commits)
    if last is not None and (last.n > n or (last.n == n and tables == last.tables)):
        return last
    times = [time for time in (commit_ts_max, None if last is None else last.commit_ts_max) if time is not None]
    cut = Cut(1 if last is None else last.number + 1, n, committed_at, max(times, default=None), tables)
    row = {
        "number": [cut.number],
        "n": [int(n)],
        "committed_at": [cut.committed_at],
        "commit_ts_max": [cut.commit_ts_max],
        "tables": [encode_tables(cut.tables)],
    }
    with lake_errors(layout.commits_path):
        write_deltalake(
            opened.table,
            pa.table(row, schema=_SCHEMA),
            mode="append",
            writer_properties=WRITER,
            commit_properties=opened.commit(n),
        )
    return cut


def last_cut(layout: LakeLayout) -> Cut | None:
    """Return the last cut; None before the first.

    Raises:
        LakeTableForeign: another program wrote into `_commits`.
    """
    opened = _open(layout)
    return None if opened is None else _read_last(layout, opened)


def cut_at(layout: LakeLayout, n: Seq) -> Cut | None:
    """Return the last cut at or below a position; None if the lake (or what is kept of it) begins after it."""
    opened = _open(layout)
    return None if opened is None or opened.n is None else _last_where(layout, opened, "n", int(n))


def cut_from(layout: LakeLayout, n: Seq) -> Cut | None:
    """Return the first cut at or above a position; None if the lake hasn't reached it."""
    opened = _open(layout)
    if opened is None or opened.n is None:
        return None
    best: tuple[int, str] | None = None
    reached = int(n)
    files = [file for file in files_of(opened, "n") if file.high is None or file.high >= n]
    for file in sorted(files, key=lambda file: file.low or 0):
        # Several cuts may be at one position, each in a file of its own.
        if best is not None and file.low is not None and file.low > reached:
            break
        for batch in TableFiles(layout, opened.path).batches(file.path, ["number", "n"]):
            here = pc.greater_equal(batch.column("n"), int(n))
            number = pc.min(batch.column("number").filter(here)).as_py()
            if number is not None and (best is None or number < best[0]):
                best, reached = (number, file.path), pc.min(batch.column("n").filter(here)).as_py()
    return None if best is None else _row(layout, opened, *best)


def cut_at_time(layout: LakeLayout, at: datetime) -> Cut | None:
    """Return the last cut that holds nothing committed at the source after `at`; None if every cut does.

    A cut's time is the greatest commit time of it and all before it, because single times aren't monotone. Cuts
    before the first commit, of copied rows only, count by their landing time.
    """
    opened = _open(layout)
    return None if opened is None or opened.n is None else _last_where(layout, opened, "commit_ts_max", at)


def first_cut(layout: LakeLayout) -> Cut | None:
    """Return the earliest cut that is still there."""
    return cut_from(layout, Seq(0))


def cuts_between(layout: LakeLayout, after: Seq, upto: Seq) -> list[Seq]:
    """Return the positions of all cuts in `(after, upto]`, ascending."""
    opened = _open(layout)
    if opened is None:
        return []
    with lake_errors(opened.path):
        files = opened.table.to_pyarrow_dataset(file_pruning_predicate=f"n > {int(after)} AND n <= {int(upto)}")
        found = files.to_table(columns=["n"], filter=(pc.field("n") > int(after)) & (pc.field("n") <= int(upto)))
    return sorted({Seq(n) for n in found.column("n").to_pylist()})


def compact_cuts(layout: LakeLayout, *, files: int = _COMPACT_FILES) -> None:
    """Compact `_commits`' small files to one, if there are many."""
    opened = _open(layout)
    if opened is not None and len(opened.table.file_uris()) >= files:
        with lake_errors(layout.commits_path):
            opened.table.optimize.compact(
                target_size=_COMPACTED_BYTES, writer_properties=WRITER, commit_properties=opened.upkeep()
            )


def merged(tables: Mapping[str, CutTable], commits: Iterable[TableCommit]) -> dict[str, CutTable]:
    """Return the tables' state after some commits, in any order.

    Positions never go back; a rebuilt table's versions do.

    A name belongs to the table that took it over last, and a table is at its latest name, whatever late writes come
    under earlier names.
    """
    result = dict(tables)
    for commit in sorted(commits, key=lambda commit: commit.view != "history"):
        if commit.version < 0:
            continue  # nothing was written, and nothing was there
        had = result.get(commit.folder)
        if commit.view == "history":
            others = [f for f, t in result.items() if t.table_id == commit.table_id and f != commit.folder]
            if any(result[folder].since > commit.since for folder in others):
                continue
            for folder in others:
                del result[folder]  # renamed at the source
            if had is None or had.table_id != commit.table_id:
                if had is not None and (had.since, had.table_id) > (commit.since, commit.table_id):
                    continue
                had = CutTable(commit.table_id, commit.name, -1 if had is None else had.history)
        elif had is None or had.table_id != commit.table_id:
            continue  # folded under a name that it no longer has
        if commit.view == "history":
            if commit.n >= had.history_n:
                newer = commit.n > had.history_n
                version = commit.version if newer else max(had.history, commit.version)
                had = replace(had, history=version, history_n=commit.n)
        elif commit.view == "scd2":
            if commit.n >= had.scd2_n:
                had = replace(had, scd2=commit.version, scd2_n=commit.n)
        elif commit.n >= had.current_n:
            had = replace(had, current=commit.version, current_n=commit.n)
        result[commit.folder] = replace(had, name=commit.name, since=max(had.since, commit.since))
    return result


def _open(layout: LakeLayout) -> OpenTable | None:
    return open_table(layout, layout.commits_path, layout.commits_app_id)


def _last_where(layout: LakeLayout, opened: OpenTable, column: str, bound: Any) -> Cut | None:
    """Return the cut of the greatest number whose `column` isn't above `bound`; it grows with the number.

    Three narrow columns of few files are read: the files with the greatest numbers first, until one has such a cut.
    """
    lows = {file.path: file.low for file in files_of(opened, column)}
    best: tuple[int, str] | None = None
    for file in sorted(files_of(opened, "number"), key=lambda file: -(file.high or 0)):
        if best is not None and (file.high or 0) < best[0]:
            break
        if lows[file.path] is not None and lows[file.path] > bound and column == "n":
            continue
        for batch in TableFiles(layout, opened.path).batches(file.path, ["number", "committed_at", column]):
            values = batch.column(column)
            if column != "n":
                values = pc.coalesce(values, batch.column("committed_at"))
            fits = batch.column("number").filter(pc.less_equal(values, pa.scalar(bound, values.type)))
            number = pc.max(fits).as_py()
            if number is not None and (best is None or number > best[0]):
                best = (number, file.path)
    return None if best is None else _row(layout, opened, *best)


def _row(layout: LakeLayout, opened: OpenTable, number: int, path: str) -> Cut:
    """Return one cut from its file."""
    for batch in TableFiles(layout, opened.path).batches(path, _SCHEMA.names, rows=1024, least=("number", number)):
        found = batch.filter(pc.equal(batch.column("number"), number))
        if found.num_rows:
            return _decode(found.to_pylist()[0])
    raise LakeTableForeign(f"cut {number} disappeared from {opened.path}", path=opened.path)


def _read_last(layout: LakeLayout, opened: OpenTable) -> Cut | None:
    if opened.n is None:
        return None
    rows: list[dict[str, Any]] = []
    for file in files_of(opened, "n"):
        if file.high is None or file.high >= opened.n:
            for batch in TableFiles(layout, opened.path).batches(file.path, _SCHEMA.names, least=("n", int(opened.n))):
                rows += batch.filter(pc.equal(batch.column("n"), int(opened.n))).to_pylist()
    if not rows:
        raise LakeTableForeign(
            f"the cut at {opened.n} disappeared from {opened.path}", path=opened.path, version=opened.version
        )
    return _decode(max(rows, key=lambda row: int(row["number"])))


def encode_tables(tables: Mapping[str, CutTable]) -> str:
    """Return a cut's tables as text."""
    facts = {}
    for folder, t in sorted(tables.items()):
        numbers = (t.history, t.current, t.current_n, t.scd2, t.scd2_n, t.history_n, t.since)
        facts[folder] = [int(t.table_id), t.name, *map(int, numbers)]
    return json.dumps(facts, separators=(",", ":"), ensure_ascii=False)


def decode_tables(text: str) -> dict[str, CutTable]:
    """Parse the tables of such a text."""
    return {
        folder: CutTable(TableId(table_id), name, *numbers)
        for folder, (table_id, name, *numbers) in json.loads(text).items()
    }


def _decode(row: Mapping[str, Any]) -> Cut:
    tables = decode_tables(row["tables"])
    return Cut(row["number"], Seq(row["n"]), row["committed_at"], row["commit_ts_max"], tables)
