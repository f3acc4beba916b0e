"""Commit cuts: one row `(n, table versions)` once all tables of a batch have it, in the lake's table `_commits`.

A query reads all tables as in the last row. A row stands for all tables, including the unchanged ones that the batch
didn't touch, so that an idle table holds nothing back.

A *full* row lists all tables. Any other row lists those that differ from the last full row before it, its `base`, so
that any cut is two look-ups by number. A row is full if the rows since the last full one would otherwise be larger
than a full one: a lake with few tables has full rows only, and with 1,000 tables of which one changes at a time a row
has 6 KB on average, not 140.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from threading import Lock
from types import MappingProxyType
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import LakeTableForeign
from millstream.lake.data_files import TableFiles, new_name
from millstream.lake.layout import LakeLayout, TableCommit
from millstream.lake.store_errors import lake_errors
from millstream.lake.table_format import Commit, NewTable, OpenTable, create_table, format_of, open_table
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.model.records import INSTANT

CUT_SCHEMA: Final = pa.schema(
    [
        pa.field("number", pa.int64(), nullable=False),
        pa.field("n", pa.int64(), nullable=False),
        pa.field("committed_at", INSTANT, nullable=False),
        pa.field("commit_ts_max", INSTANT),
        pa.field("base", pa.int64(), nullable=False),
        pa.field("tables", pa.string(), nullable=False),
    ]
)
_TEXT: Final = "tables"
_HELD: Final = "~held"
"""The key of the quarantined tables among folders, which have a dot in their names or begin with `_`."""
_STATE: Final = "state"
_WITH_SNAPSHOTS: Final = pa.schema(
    [
        *(field for field in CUT_SCHEMA if field.name != _TEXT),
        pa.field(_TEXT, pa.map_(pa.string(), pa.int64()), nullable=False),
        pa.field(_STATE, pa.string(), nullable=False),
    ]
)
"""For a format in which other programs open a version by its snapshot's id: `tables` has these, by table, and `state` is the
text."""
CUT_BOUNDS: Final = ("number", "n", "committed_at", "commit_ts_max", "base")
"""The columns with bounds in every file."""
_ROWS_MAX: Final = 8
_rows: Final[dict[tuple[str, str, int], dict[str, Any]]] = {}
"""Rows that were read or written last, by the table's address, the file and the number; of 1,000 tables, each has 140 KB."""
_rows_lock: Final = Lock()


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
    """When the lake had everything up to `n`; never before the log's groups up to there were written."""
    commit_ts_max: datetime | None
    """The greatest commit time of this and all earlier cuts."""
    tables: Mapping[str, CutTable] = field(default_factory=dict)
    """Tables by folder name."""
    held: Mapping[TableId, Seq] = field(default_factory=dict)
    """Tables that were quarantined, with each one's landed position. A lake in PostgreSQL has them apart."""


def cut_schema(layout: LakeLayout) -> pa.Schema:
    """Return the columns of the table of cuts, with the tables' snapshots if other programs need these."""
    return _WITH_SNAPSHOTS if format_of(layout).names_snapshots else CUT_SCHEMA


def text_column(layout: LakeLayout) -> str:
    """Return the column of a cut's tables as text."""
    return _STATE if format_of(layout).names_snapshots else _TEXT


def commit_cut(
    layout: LakeLayout,
    n: Seq,
    commits: Iterable[TableCommit],
    *,
    committed_at: datetime,
    commit_ts_max: datetime | None = None,
    held: Mapping[TableId, Seq] | None = None,
) -> Cut:
    """Commit that every table has everything up to `n`; return the cut, or the later one that is already there.

    Args:
        n: the end of the batch.
        commits: the results of writes since the last cut, folds included; other tables are unchanged.
        committed_at: now, with a time zone; a later cut at one position has the first one's.
        commit_ts_max: the greatest commit time of the batch, if it had any.
        held: tables that are quarantined, with each one's landed position: a lake that is put back later still says what it
            lacks. None: those of the last cut.

    Raises:
        LakeConflict: another driver committed a cut first.
    """
    commits = list(commits)
    opened = open_table(layout, layout.commits_path, layout.commits_app_id, lands=True)
    if opened is None:
        opened = create_table(
            layout,
            layout.commits_path,
            layout.commits_app_id,
            NewTable(
                cut_schema(layout),
                description=f"Which table versions stand at one position, written by Millstream (stream {layout.stream_name}).",
                bounded=CUT_BOUNDS,
            ),
        )
    found = _read_last(layout, opened)
    last = None if found is None else found.cut
    tables = merged({} if last is None else last.tables, commits)
    if held is None:
        held = {} if last is None else last.held
    if last is not None and (last.n > n or (last.n == n and (tables, held) == (last.tables, last.held))):
        return last
    if last is not None and last.n == n:
        committed_at = last.committed_at
    times = [time for time in (commit_ts_max, None if last is None else last.commit_ts_max) if time is not None]
    cut = Cut(1 if last is None else last.number + 1, n, committed_at, max(times, default=None), tables, held)
    base, text = cut.number, ""
    if found is not None:
        text = _changes(found.full, cut)
        base = found.base
    if found is None or len(text) * (cut.number - base) >= found.full_bytes:
        base, text = cut.number, encode_tables(tables, held)
    row: dict[str, list[Any]] = {
        "number": [cut.number],
        "n": [int(n)],
        "committed_at": [cut.committed_at],
        "commit_ts_max": [cut.commit_ts_max],
        "base": [base],
        _TEXT: [text],
    }
    shape = cut_schema(layout)
    if shape is not CUT_SCHEMA:
        before = {} if found is None or base == cut.number else found.full
        changed = {folder: table for folder, table in tables.items() if before.get(folder) != table}
        ids = format_of(layout).snapshot_ids(layout, _versions(layout, changed))
        row = {**row, _STATE: [text], _TEXT: [list(ids.items())]}
    files = TableFiles(layout, opened.path, CUT_BOUNDS)
    written = files.write(pa.table(row, schema=shape), shape, new_name())
    opened.swap(Commit(n), add=[written])
    _remember(opened.path, written.path, {name: values[0] for name, values in row.items() if name in _columns(layout)})
    return cut


def last_cut(layout: LakeLayout) -> Cut | None:
    """Return the last cut; None before the first.

    Raises:
        LakeTableForeign: another program wrote into `_commits`.
    """
    opened = _open(layout)
    found = None if opened is None else _read_last(layout, opened)
    return None if found is None else found.cut


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
    files = [file for file in cut_files(opened) if file.n[1] >= n]
    for file in sorted(files, key=lambda file: file.n[0]):
        # Several cuts may be at one position, each in a file of its own.
        if best is not None and file.n[0] > reached:
            break
        for batch in TableFiles(layout, opened.path).batches(file.path, ["number", "n"]):
            here = pc.greater_equal(batch.column("n"), int(n))
            number = pc.min(batch.column("number").filter(here)).as_py()
            if number is not None and (best is None or number < best[0]):
                best, reached = (number, file.path), pc.min(batch.column("n").filter(here)).as_py()
    return None if best is None else _row(layout, opened, best[0]).cut


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
        files = opened.dataset(("n", int(after), int(upto)))
        found = files.to_table(columns=["n"], filter=(pc.field("n") > int(after)) & (pc.field("n") <= int(upto)))
    return sorted({Seq(n) for n in found.column("n").to_pylist()})


@dataclass(frozen=True, slots=True)
class CutFile:
    """A live file of `_commits`, with the least and the greatest values that its log has of it."""

    path: str
    rows: int
    size_bytes: int
    number: tuple[int, int]
    n: tuple[int, int]
    committed_at: tuple[datetime, datetime]
    commit_ts_from: datetime | None
    """The least `commit_ts_max`; None if a row has none."""
    base_from: int
    """The least `base`: of the file's first row, which may refer to an earlier file."""


def cut_files(opened: OpenTable) -> list[CutFile]:
    """Return the live files of `_commits`, by their least numbers."""
    actions = opened.files()
    if "min.number" not in actions.column_names:
        return []
    found = []
    for row in actions.sort_by("min.number").to_pylist():
        bounds = {name: (row[f"min.{name}"], row[f"max.{name}"]) for name in ("number", "n", "committed_at")}
        times = None if row["null_count.commit_ts_max"] else row.get("min.commit_ts_max")
        found.append(
            CutFile(
                row["path"],
                row["num_records"],
                row["size_bytes"],
                **bounds,
                commit_ts_from=times,
                base_from=row["min.base"],
            )
        )
    return found


def _versions(layout: LakeLayout, tables: Mapping[str, CutTable]) -> dict[str, int]:
    """Return the versions that a cut names, by the tables' folders."""
    found = {}
    for folder, table in tables.items():
        for view, version in (("history", table.history), ("current", table.current), ("scd2", table.scd2)):
            if version > 0:
                found[f"{layout.root}/{view}/{folder}"] = version
    return found


def merged(tables: Mapping[str, CutTable], commits: Iterable[TableCommit]) -> dict[str, CutTable]:
    """Return the tables' state after some commits, in any order.

    Positions never go back; a rebuilt table's versions do.

    A name belongs to the table that took it over last, and a table is at its latest name, whatever late writes come
    under earlier names.
    """
    result = dict(tables)
    folders: dict[TableId, set[str]] = {}
    for folder, table in tables.items():
        folders.setdefault(table.table_id, set()).add(folder)
    for commit in sorted(commits, key=lambda commit: commit.view != "history"):
        if commit.version < 0:
            continue  # nothing was written, and nothing was there
        had = result.get(commit.folder)
        if commit.view == "history":
            had = _taken_over(result, folders, commit)
        elif had is not None and had.table_id != commit.table_id:
            had = None  # folded under a name that it no longer has
        if had is None:
            continue
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


def _taken_over(result: dict[str, CutTable], folders: dict[TableId, set[str]], commit: TableCommit) -> CutTable | None:
    """Return the entry of a commit to history, whose folder is the table's from then on; None if it comes too late.

    Args:
        result: entries by folder; those of the table's earlier names are removed.
        folders: the same, by table.
        commit: to history.
    """
    had = result.get(commit.folder)
    mine = folders.setdefault(commit.table_id, set())
    others = mine - {commit.folder}
    if any(result[folder].since > commit.since for folder in others):
        return None
    for folder in others:
        del result[folder]  # renamed at the source
        mine.remove(folder)
    if had is not None and had.table_id == commit.table_id:
        return had
    if had is not None and (had.since, had.table_id) > (commit.since, commit.table_id):
        return None
    if had is not None:
        folders[had.table_id].discard(commit.folder)
    mine.add(commit.folder)
    return CutTable(commit.table_id, commit.name, -1 if had is None else had.history)


def _open(layout: LakeLayout) -> OpenTable | None:
    return open_table(layout, layout.commits_path, layout.commits_app_id)


def _last_where(
    layout: LakeLayout, opened: OpenTable, column: Literal["n", "commit_ts_max"], bound: int | datetime
) -> Cut | None:
    """Return the cut of the greatest number whose `column` isn't above `bound`; it grows with the number.

    Three narrow columns of one file are read as a rule: files whose bounds are above are skipped.
    """
    best: int | None = None
    for file in sorted(cut_files(opened), key=lambda file: -file.number[1]):
        if best is not None and file.number[1] < best:
            break
        low: Any = file.n[0] if column == "n" else file.commit_ts_from
        if low is not None and low > bound:
            continue
        for batch in TableFiles(layout, opened.path).batches(file.path, ["number", "committed_at", column]):
            values = batch.column(column)
            if column != "n":
                values = pc.coalesce(values, batch.column("committed_at"))
            fits = batch.column("number").filter(pc.less_equal(values, pa.scalar(bound, values.type)))
            number = pc.max(fits).as_py()
            if number is not None and (best is None or number > best):
                best = number
    return None if best is None else _row(layout, opened, best).cut


@dataclass(frozen=True, slots=True)
class _Row:
    """A cut with what its row builds on."""

    cut: Cut
    base: int
    """The number of the last full row."""
    full: Mapping[str, CutTable]
    """The tables of that row."""
    full_bytes: int
    """Size in characters of that row's text."""


def _row(layout: LakeLayout, opened: OpenTable, number: int) -> _Row:
    """Return one cut: its row, and the full row that it builds on."""
    row = _raw_row(layout, opened, number)
    column = text_column(layout)
    text = row[column] if row["base"] == number else _raw_row(layout, opened, row["base"])[column]
    full, held = _decoded(text)
    tables = full
    if row["base"] != number:
        changes = json.loads(row[column])
        held = _held(changes)
        gone = {folder for folder, facts in changes.items() if facts is None}
        tables = {folder: table for folder, table in full.items() if folder not in gone}
        tables |= {folder: _table(facts) for folder, facts in changes.items() if facts is not None}
    cut = Cut(row["number"], Seq(row["n"]), row["committed_at"], row["commit_ts_max"], tables, held)
    return _Row(cut, row["base"], full, len(text))


def _raw_row(layout: LakeLayout, opened: OpenTable, number: int) -> dict[str, Any]:
    for file in cut_files(opened):
        if not file.number[0] <= number <= file.number[1]:
            continue
        with _rows_lock:
            known = _rows.get((opened.path, file.path, number))
        if known is not None:
            _remember(opened.path, file.path, known)
            return known
        columns = _columns(layout)
        for batch in TableFiles(layout, opened.path).batches(file.path, columns, rows=1024, least=("number", number)):
            found = batch.filter(pc.equal(batch.column("number"), number))
            if found.num_rows:
                row: dict[str, Any] = found.to_pylist()[0]
                _remember(opened.path, file.path, row)
                return row
    raise LakeTableForeign(f"cut {number} disappeared from {opened.path}", path=opened.path, version=opened.version)


def _columns(layout: LakeLayout) -> list[str]:
    return [*CUT_BOUNDS, text_column(layout)]


def _remember(path: str, file: str, row: dict[str, Any]) -> None:
    """Keep a row in memory, by the name of its file, which no other file ever has: the next cut builds on it."""
    with _rows_lock:
        _rows.pop((path, file, row["number"]), None)  # the longest unused stands first
        _rows[(path, file, row["number"])] = row
        while len(_rows) > _ROWS_MAX:
            del _rows[next(iter(_rows))]


def _read_last(layout: LakeLayout, opened: OpenTable) -> _Row | None:
    if opened.n is None:
        return None
    number = max((file.number[1] for file in cut_files(opened)), default=0)
    row = _row(layout, opened, number)
    if row.cut.n != opened.n:
        raise LakeTableForeign(
            f"the cut at {opened.n} disappeared from {opened.path}", path=opened.path, version=opened.version
        )
    return row


def encode_tables(tables: Mapping[str, CutTable], held: Mapping[TableId, Seq] = MappingProxyType({})) -> str:
    """Return a cut's tables as text, with those that are quarantined."""
    return _text({folder: _facts(table) for folder, table in sorted(tables.items())} | _held_facts(held))


def decode_tables(text: str) -> Mapping[str, CutTable]:
    """Parse the tables of such a text."""
    return _decoded(text)[0]


@lru_cache(maxsize=4)
def _decoded(text: str) -> tuple[Mapping[str, CutTable], Mapping[TableId, Seq]]:
    """Parse such a text. The last texts are remembered: successive cuts have one full row in common."""
    found = json.loads(text)
    held = _held(found)
    return {folder: _table(facts) for folder, facts in found.items()}, held


def _held(facts: dict[str, Any]) -> Mapping[TableId, Seq]:
    """Take the quarantined tables out of a parsed text."""
    return {TableId(int(table)): Seq(after) for table, after in facts.pop(_HELD, {}).items()}


def _held_facts(held: Mapping[TableId, Seq]) -> dict[str, Any]:
    return {_HELD: {str(int(table)): int(after) for table, after in sorted(held.items())}} if held else {}


def _changes(full: Mapping[str, CutTable], cut: Cut) -> str:
    """Return the tables that differ from those of a full row, with those that are quarantined.

    A table that is no longer there is null.
    """
    changed: dict[str, Any] = {f: _facts(t) for f, t in cut.tables.items() if full.get(f) != t}
    return _text(changed | dict.fromkeys(full.keys() - cut.tables.keys()) | _held_facts(cut.held))


def _text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, separators=(",", ":"), ensure_ascii=False)


def _facts(t: CutTable) -> list[int | str]:
    numbers = (t.history, t.current, t.current_n, t.scd2, t.scd2_n, t.history_n, t.since)
    return [int(t.table_id), t.name, *map(int, numbers)]


def _table(facts: list[Any]) -> CutTable:
    table_id, name, *numbers = facts
    return CutTable(TableId(table_id), name, *numbers)
