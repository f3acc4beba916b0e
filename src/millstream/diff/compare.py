"""`diff`: the lake's tables against their source, at one LSN, by key and value, while both move.

The source is read under a snapshot that sees exactly the commits below an LSN; the lake at the number up
to which the log holds just those. First sums over ranges are compared, each side computing its own. Then
the rows of ranges whose sums differ are compared, one range at a time: memory is bounded by a range,
whatever the table. Two ranges that differ have equal sums once in 2**60.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import pyarrow as pa

from millstream.app.table_status import quarantine_of
from millstream.capture.column_rules.binding import ColumnRules
from millstream.capture.copying.source_snapshot import SourceSnapshot
from millstream.capture.rewrite_detection import KnownLayouts
from millstream.capture.source_tables import check_same
from millstream.catalog import TableState
from millstream.diff.column_texts import HASH, ComparedColumn, HashName, RowTexts, ranges_for
from millstream.diff.departures import Departures
from millstream.diff.lake_side import LakeTable, row_texts
from millstream.diff.position import PositionWait, wait_for_lake
from millstream.diff.source_side import PublishedTable, Sums, TableSide, pick_hash, published_tables
from millstream.errors import LakeBehind, LakeError, LakeFilesGone, LakeTableForeign, LogError, MillstreamError
from millstream.home.config_mapping import capture_config, lake_layout
from millstream.home.home import Home
from millstream.lake.damaged_tables import certain_damage_of
from millstream.lake.query.query_session import LakeSession
from millstream.model.column_rules import Rule
from millstream.model.names import TablePatterns, parse_qualified_name, qualified_name
from millstream.model.positions import Lsn, Seq, format_lsn
from millstream.model.records import log_names
from millstream.wal.reader import StreamReader
from millstream.workers import call_in_thread

if TYPE_CHECKING:
    from millstream.catalog import Catalog, TableRow
    from millstream.lake.layout import LakeLayout
    from millstream.model.ids import StreamId, TableId

DAMAGED: Final = 3
"""Exit code of a comparison that found a difference or damage."""
RANGE_ROWS: Final = 50_000
RANGE_BYTES: Final = 16 << 20
"""Likely size of a range at most: the rows of both sides of one range are in memory at once."""

_DAMAGE: Final = frozenset({LakeTableForeign.code, LakeFilesGone.code, "lake_history_lost"})
"""Codes of errors that are themselves a finding: the table's rows can't be those that were written."""

RowText = tuple[str | None, ...]
_T = TypeVar("_T")


class Compared(StrEnum):
    """The outcome for a table."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_COMPARED = "not_compared"
    """It should have been compared: the reason says why it wasn't."""
    SKIPPED = "skipped"
    """It has no `current` to compare."""


class What(StrEnum):
    """How a key differs."""

    MISSING_IN_LAKE = "missing_in_lake"
    MISSING_IN_SOURCE = "missing_in_source"
    VALUES = "values"
    COUNT = "count"
    """For a table without a key: the numbers of equal rows differ."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that differs, its values as PostgreSQL prints them; columns with rules have hashes or a constant."""

    key: Mapping[str, str | None]
    """The key's values by name; for a table without a key, the whole row."""
    what: What
    columns: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    """By name, (the lake's, the source's) if both have the key."""
    counts: tuple[int, int] = (1, 1)
    """For a row without a key: how many the lake has, and the source."""

    def as_dict(self) -> dict[str, Any]:
        """Return the difference, JSON-able."""
        facts: dict[str, Any] = {"key": dict(self.key), "what": self.what.value}
        if self.what is What.VALUES:
            facts["columns"] = {name: {"lake": a, "source": b} for name, (a, b) in self.columns.items()}
        if self.what is What.COUNT:
            facts["rows"] = {"lake": self.counts[0], "source": self.counts[1]}
        return facts


@dataclass(slots=True)
class TableDiff:
    """The outcome for one table."""

    name: str
    """`schema.table`, each part quoted where PostgreSQL would."""
    state: Compared
    reason: str = ""
    is_damaged: bool = False
    """Whether damage in the lake is why it wasn't compared: foreign rows, or files that are gone or cut short."""
    key: tuple[str, ...] = ()
    """Names of the key's columns; empty if rows have none."""
    key_is_hashed: bool = False
    """Whether a column of the key has hashes in place of its values."""
    notes: list[str] = field(default_factory=list)
    rows_source: int = 0
    rows_lake: int = 0
    different: int = 0
    """Number of keys that differ."""
    differences: list[Difference] = field(default_factory=list)
    """The first of them, up to the requested number."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome, JSON-able."""
        return {
            "table": self.name,
            "state": self.state.value,
            "reason": self.reason,
            "notes": self.notes,
            "rows": {"source": self.rows_source, "lake": self.rows_lake},
            "different": self.different,
            "listed": len(self.differences),
            "differences": [difference.as_dict() for difference in self.differences],
            "seconds": round(self.seconds, 3),
        }


@dataclass(slots=True)
class DiffReport:
    """The result of a `diff`."""

    stream: str
    stream_id: StreamId
    lsn: Lsn
    n: Seq
    tables: list[TableDiff] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Return the exit code: 0: all is equal; 1: a table couldn't be compared; 3: a table differs or is damaged."""
        states = {table.state for table in self.tables}
        if Compared.DIFFERENT in states or any(table.is_damaged for table in self.tables):
            return DAMAGED
        return 1 if Compared.NOT_COMPARED in states else 0

    def as_dict(self) -> dict[str, Any]:
        """Return the result, JSON-able."""
        states = Counter(table.state.value for table in self.tables)
        return {
            "stream": self.stream,
            "lsn": format_lsn(self.lsn),
            "n": int(self.n),
            "equal": self.exit_code == 0,
            "counts": {state.value: states[state.value] for state in Compared},
            "tables": [table.as_dict() for table in self.tables],
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a `diff`."""

    doing: str
    """`waiting for …`, `comparing` or `reading`."""
    table: str = ""
    rows: int = 0
    rows_estimate: int = 0


def diff_stream(
    home: Home,
    stream: str | None = None,
    *,
    tables: Sequence[str] = (),
    timeout_s: float = 120.0,
    limit: int = 10_000,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    on_table: Callable[[TableDiff], None] = lambda _table: None,
) -> DiffReport:
    """Compare a stream's tables in the lake with the source, at one LSN.

    Args:
        stream: its name; None if the home has only one.
        tables: `schema.table` of those to compare; all if empty.
        timeout_s: how long to wait for old transactions at the source, and for capture and lake to reach
            the snapshot.
        limit: differing keys to list for each table; more are counted.
        on_progress: called with the progress, from several threads.
        on_table: called with each table once it is done.

    Raises:
        UnknownStream, UnknownTable: there is none of that name.
        LakeBehind: the lake doesn't reach the source's position.
        SourceError: the source can't be read; the subclass says why.
    """
    name, config = home.stream_config(stream)
    capture = capture_config(home, name, config)
    with home.open_catalog() as catalog:
        stream_id = catalog.stream(name).id
        asked = [catalog.find_table(stream_id, *parse_qualified_name(table)) for table in tables]
        last = catalog.current_source(stream_id)
        if last is None:
            raise LakeBehind(f"nothing has been captured of {name} yet")
        followed = last

        try:
            before = StreamReader(str(home.wal_folder(name))).persisted_upto()
        except LogError as error:
            raise LakeBehind(f"the log of {name} can't be read: {error.message}", hint=error.hint) from error
        rules, layouts = ColumnRules(catalog, stream_id, capture.rules), KnownLayouts(catalog, stream_id, capture.rules)
        first = _States.look(catalog, stream_id)
        deadline_s = time.monotonic() + timeout_s
        waits = "waiting for the source's running transactions"
        on_progress(Progress(waits))
        layout = lake_layout(home, name, config, stream_id)
        with SourceSnapshot.take(
            capture.dsn,
            patience_s=timeout_s,
            check=lambda found: check_same(followed, found),
            on_wait=lambda transaction: on_progress(Progress(f"{waits}{transaction}")),
        ) as snapshot:
            # If the address names several servers, one server gets all queries.
            capture = replace(capture, dsn=snapshot.dsn)
            waiting = PositionWait(
                home, name, capture, catalog, layout, last.id, deadline_s, lambda doing: on_progress(Progress(doing))
            )
            n = wait_for_lake(waiting, snapshot.lsn, before=before)
            report = DiffReport(name, stream_id, snapshot.lsn, n)
            with snapshot.reading() as connection:
                published = [
                    replace(found, table=rules.applied_unbound(found.table))
                    for found in published_tables(connection, TablePatterns.parse(capture.tables), capture.publication)
                ]
                hash_name = pick_hash(connection)
            by_oid = {found.table.oid: found for found in published}
            departures = Departures(catalog, stream_id, StreamReader(str(home.wal_folder(name))), n)
            left = {
                row.id: departures.left(row.id, by_oid[row.relation_oid].table)
                for row in first.rows.values()
                if row.relation_oid in by_oid
            }
            comparison = _Comparison(
                snapshot, hash_name, limit, on_progress, layouts, capture.rules.hashed, layout, left
            )
            with _session_at(layout, n, partitions=any(left.values())) as session:
                for row in sorted(asked or first.rows.values(), key=lambda row: _size(row, by_oid)):
                    done = _compare_one(comparison, session, row, first, by_oid)
                    if done.state in {Compared.EQUAL, Compared.DIFFERENT}:
                        came = layouts.partitions_that_came(by_oid[row.relation_oid].table, row.id)
                        _check_again(catalog, stream_id, row, first, done, came)
                    report.tables.append(done)
                    on_table(done)
            if not asked:
                known = {row.relation_oid for row in first.rows.values()}
                for found in published:
                    if found.table.oid not in known:
                        table = qualified_name(found.table.namespace, found.table.name)
                        report.tables.append(TableDiff(table, Compared.NOT_COMPARED, "capture hasn't met it yet"))
                        on_table(report.tables[-1])
    return report


def _size(row: TableRow, by_oid: Mapping[int, PublishedTable]) -> int:
    """Small tables go first: the sooner a table is read, the less likely it was truncated since the snapshot."""
    found = by_oid.get(row.relation_oid)
    return 0 if found is None else found.table.size_bytes


@dataclass(frozen=True, slots=True)
class _States:
    """The tables as the catalog had them at one moment."""

    rows: Mapping[int, TableRow]
    held: Mapping[TableId, Mapping[str, Any]]

    @classmethod
    def look(cls, catalog: Catalog, stream: StreamId) -> _States:
        rows = [row for row in catalog.tables(stream) if row.is_captured]
        return cls({int(row.id): row for row in rows}, quarantine_of(catalog, stream).all())

    def is_damaged(self, row: TableRow) -> bool:
        """Whether the pipeline quarantined a table because it is damaged."""
        return self.held.get(row.id, {}).get("code") in _DAMAGE

    def obstacle(self, row: TableRow) -> str:
        """Return why a table's rows can't be compared with the source's; empty if they can."""
        held = self.held.get(row.id)
        if held is not None:
            return f"quarantined in the lake: {held.get('reason', '')}"
        known = self.rows.get(int(row.id), row)
        if known.state is TableState.STREAMING:
            return ""
        words = {TableState.COPY_REQUESTED: "still to be copied", TableState.COPYING: "still being copied"}
        return (
            f"{words.get(known.state, known.state.value.replace('_', ' '))}{': ' if known.reason else ''}{known.reason}"
        )


def _session_at(layout: Any, n: Seq, *, partitions: bool) -> LakeSession:
    """Return the lake at `n`; from `current` if the last cut is exactly there."""
    session = LakeSession(layout, partitions=partitions)
    if session.cut is None or session.cut.n == n:
        return session
    session.close()
    return LakeSession(layout, as_of=n, partitions=partitions)


def _check_again(
    catalog: Catalog, stream: StreamId, row: TableRow, first: _States, done: TableDiff, came: Sequence[str]
) -> None:
    """Check again: a copy that began in the meantime may have invalidated the compared rows.

    So may one that begins soon, of the rows of partitions that `came` and that capture hadn't noticed before.
    """
    now = _States.look(catalog, stream)
    had, have = first.rows[int(row.id)], now.rows.get(int(row.id))
    if done.state is not Compared.DIFFERENT:
        return
    reason = "" if have is not None else "it left the stream during the comparison"
    if have is not None:
        reason = now.obstacle(have) or (
            "it was copied again during the comparison" if have.copy_id != had.copy_id else ""
        )
    if not reason and came:
        reason = f"it got the partition {', '.join(came)}: capture copies the rows that came with it"
    if reason:
        done.state, done.reason = Compared.NOT_COMPARED, reason
        done.differences, done.different = [], 0


def _compare_one(
    comparison: _Comparison,
    session: LakeSession,
    row: TableRow,
    states: _States,
    by_oid: Mapping[int, PublishedTable],
) -> TableDiff:
    name = qualified_name(row.namespace, row.name)
    if not row.is_captured:
        return TableDiff(name, Compared.SKIPPED, "applications write it: the source hasn't got it")
    if row.state is TableState.HISTORY_ONLY:
        return TableDiff(name, Compared.SKIPPED, row.reason or "it has history only")
    obstacle = states.obstacle(row)
    if obstacle:
        return TableDiff(name, Compared.NOT_COMPARED, obstacle, states.is_damaged(row))
    published = by_oid.get(row.relation_oid)
    if published is None:
        return TableDiff(name, Compared.NOT_COMPARED, "the source has it no more, or the configuration leaves it out")
    if published.table.refusal is not None:
        return TableDiff(name, Compared.NOT_COMPARED, published.table.refusal.message)
    if changed := comparison.layouts.changed_rule(published.table, row.id):
        return TableDiff(name, Compared.NOT_COMPARED, f"{changed}: capture copies it again")
    began = time.monotonic()
    done = TableDiff(name, Compared.EQUAL)
    try:
        comparison.compare(session, row, published, done)
    except MillstreamError as error:
        hint = f" ({error.hint})" if error.hint else ""
        is_damaged = isinstance(error, LakeError) and _is_damage(comparison.layout, session, row, error)
        done = TableDiff(name, Compared.NOT_COMPARED, f"{error.message}{hint}", is_damaged)
    done.seconds = time.monotonic() - began
    return done


def _is_damage(layout: LakeLayout, session: LakeSession, row: TableRow, error: LakeError) -> bool:
    """Whether a table couldn't be read because it is damaged, and not because the lake can't be read at present."""
    if error.code in _DAMAGE:
        return True
    try:
        schema = session.schema_of(row.id)
        return any(certain_damage_of(layout, view, schema) is not None for view in ("current", "history"))
    except MillstreamError as also:
        return also.code in _DAMAGE


@dataclass(frozen=True, slots=True)
class _Comparison:
    snapshot: SourceSnapshot
    hash_name: HashName
    limit: int
    on_progress: Callable[[Progress], None]
    layouts: KnownLayouts
    """The layouts of the tables' rows in the log, as they were before the snapshot."""
    hashed: Callable[[bytes], bytes]
    """Returns what stands for a text in a hashed column."""
    layout: LakeLayout
    left: Mapping[TableId, frozenset[int]]
    """Partitions that the source no longer has, and whose rows the lake may have."""

    def compare(self, session: LakeSession, row: TableRow, published: PublishedTable, done: TableDiff) -> None:
        """Fill in the outcome for a table."""
        table = published.table
        lake = self._lake_table(session, row)
        types = {} if lake is None else lake.types()
        sent = table.relation.columns
        named = dict(zip([c.name for c in sent], log_names([c.name for c in sent]), strict=True))
        hashed = {c.name for c in sent if table.rules.get(c.name) is Rule.HASH}
        columns = tuple(
            ComparedColumn(
                named[c.name], c.type_oid, c.type_modifier, types.get(named[c.name]), c.name, c.name in hashed
            )
            for c in sorted(sent, key=lambda c: c.name in hashed)
        )
        if lake is not None:
            _note_columns(columns, types, done)
        ordered = sorted(table.key, key=lambda column: column.name in hashed)
        key = done.key = tuple(named.get(column.name, column.name) for column in ordered)
        done.key_is_hashed = table.key_is_hashed
        untold = [column.name for column in columns if column.name in key and column.lake is None]
        if lake is not None and untold:
            done.state = Compared.NOT_COMPARED
            done.reason = f"the lake doesn't have its key's columns yet: {', '.join(untold)}"
            return
        rows = max(table.row_estimate, 0 if lake is None else lake.count())
        ranges = ranges_for(rows, table.size_bytes, rows_max=RANGE_ROWS, bytes_max=RANGE_BYTES)
        texts = RowTexts(columns, key, ranges, self.hash_name)

        def tell(doing: str, through: int) -> None:
            self.on_progress(Progress(doing, done.name, through, max(rows, through)))

        with self.snapshot.reading() as connection:
            side = TableSide(connection, published, self.hashed)
            ours, theirs = _both(
                lambda: {} if lake is None else lake.sums(texts),
                lambda: side.sums(texts, lambda through: tell("comparing", through)),
            )
            done.rows_lake, done.rows_source = (sum(n for n, _ in sums.values()) for sums in (ours, theirs))
            differing = sorted(place for place in ours.keys() | theirs.keys() if ours.get(place) != theirs.get(place))
            if differing:
                self._read_differing(side, lake, texts, differing, done, tell)

    def _lake_table(self, session: LakeSession, row: TableRow) -> LakeTable | None:
        """Return the table in the lake; None if no record of it has ever landed, for example of an always empty one."""
        # By its id: a new name reaches the lake with the table's next record.
        name = session.name_of(row.id)
        left = self.left.get(row.id, ())
        return None if name is None else LakeTable(session, *parse_qualified_name(name), left=left)

    def _read_differing(
        self,
        side: TableSide,
        lake: LakeTable | None,
        texts: RowTexts,
        differing: Sequence[int],
        done: TableDiff,
        tell: Callable[[str, int], None],
    ) -> None:
        theirs = _ItemsByRange(_gathered(side.rows(texts, differing)))
        ours = _ItemsByRange(iter(()) if lake is None else lake.rows(texts, differing))
        through = 0
        with contextlib.closing(ours), contextlib.closing(theirs):
            for place in differing:
                mine, others = ours.at(place), theirs.at(place) or []
                through += len(others)
                tell("reading", through)
                for difference in differences_of(texts, *_unequal(mine, others, texts.columns)):
                    done.state = Compared.DIFFERENT
                    done.different += 1
                    if len(done.differences) < self.limit:
                        done.differences.append(difference)


class _ItemsByRange(Generic[_T]):
    """Items by range, ascending; some ranges have none."""

    def __init__(self, pieces: Iterator[tuple[int, _T]]) -> None:
        self._pieces = pieces
        self._next: tuple[int, _T] | None = None

    def at(self, place: int) -> _T | None:
        """Return a range's item; ranges are requested in order, and nothing is read ahead."""
        if self._next is None:
            self._next = next(self._pieces, None)
        if self._next is None or self._next[0] != place:
            return None
        found, self._next = self._next[1], None
        return found

    def close(self) -> None:
        """Stop reading."""
        if isinstance(self._pieces, Generator):
            self._pieces.close()


def _gathered(rows: Iterator[tuple[int, int, RowText]]) -> Iterator[tuple[int, list[tuple[int, RowText]]]]:
    for place, some in groupby(rows, key=lambda found: found[0]):
        yield place, [(hashed, values) for _, hashed, values in some]


def _both(lake: Callable[[], Sums], source: Callable[[], Sums]) -> tuple[Sums, Sums]:
    """Run both sides at once: each works in a process or a library of its own. The source's error goes first.

    An interruption waits for neither.
    """
    theirs = call_in_thread("diff-source", source)
    try:
        ours = lake()
    except Exception:
        theirs.result()
        raise
    return ours, theirs.result()


def _note_columns(columns: Sequence[ComparedColumn], types: Mapping[str, pa.DataType], done: TableDiff) -> None:
    untold = [column.name for column in columns if column.lake is None]
    if untold:
        done.notes.append(
            f"the lake doesn't have {', '.join(untold)} yet (it will with the table's next change): taken as null there"
        )
    sent = {column.name for column in columns}
    left = [name for name in types if name not in sent]
    if left:
        done.notes.append(f"the source doesn't send {', '.join(left)} (now): not compared")


def _unequal(
    lake: pa.Table | None, source: Sequence[tuple[int, RowText]], columns: Sequence[ComparedColumn]
) -> tuple[list[RowText], list[RowText]]:
    """Return both sides' rows without those whose hash is equally frequent on both."""
    hashes: list[int] = [] if lake is None else lake.column(HASH).to_pylist()
    ours, theirs = Counter(hashes), Counter(hashed for hashed, _ in source)
    left = [index for index, hashed in enumerate(hashes) if ours[hashed] != theirs[hashed]]
    mine = row_texts(lake.take(pa.array(left, pa.int64())), columns) if lake is not None and left else []
    return mine, [values for hashed, values in source if ours[hashed] != theirs[hashed]]


def differences_of(texts: RowTexts, lake: Sequence[RowText], source: Sequence[RowText]) -> Iterator[Difference]:
    """Yield the differences between some rows of both sides, all others being equal.

    Args:
        texts: has columns and key.
        lake: the lake's rows as PostgreSQL would print them, in the order of the columns.
    """
    names = [column.name for column in texts.columns]
    ours, theirs = _comparable(texts, lake, of_source=False), _comparable(texts, source, of_source=True)
    if not texts.key:
        rows = dict([*ours, *theirs])
        mine, others = Counter(like for like, _ in ours), Counter(like for like, _ in theirs)
        for like, row in rows.items():
            if mine[like] != others[like]:
                named = dict(zip(names, row, strict=True))
                yield Difference(named, What.COUNT, counts=(mine[like], others[like]))
        return
    place = [names.index(name) for name in texts.key]
    by_key = [{tuple(like[i] for i in place): (like, row) for like, row in side} for side in (ours, theirs)]
    for key in sorted(by_key[0].keys() | by_key[1].keys(), key=lambda key: tuple(text or "" for text in key)):
        had, have = by_key[0].get(key), by_key[1].get(key)
        _, shown = have or had or ((), ())
        named = {name: shown[i] for name, i in zip(texts.key, place, strict=True)}
        if had is None or have is None:
            yield Difference(named, What.MISSING_IN_LAKE if had is None else What.MISSING_IN_SOURCE)
        elif had[0] != have[0]:
            unlike = [i for i in range(len(names)) if had[0][i] != have[0][i]]
            yield Difference(named, What.VALUES, {names[i]: (had[1][i], have[1][i]) for i in unlike})


def _comparable(texts: RowTexts, rows: Sequence[RowText], *, of_source: bool) -> list[tuple[RowText, RowText]]:
    return [
        (tuple(c.comparable(text, of_source=of_source) for c, text in zip(texts.columns, row, strict=True)), row)
        for row in rows
    ]
