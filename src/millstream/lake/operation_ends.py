"""The ends of operations, determined from the lake itself: for tokens that a person took from a record's `__seq`.

A cut splits no operation by construction. Between two cuts, histories show which records belong to one operation.
Those of a transaction share source and commit LSN, those of a copied chunk also the moment of its snapshot. An
operation's numbers are contiguous and never cross a cut. So only one batch has to be read, however old it is and
whatever the log still has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import MillstreamError
from millstream.lake.commit_cuts import Cut, CutTable, cut_at, cut_from
from millstream.lake.data_files import LiveFile, TableFiles, files_of
from millstream.lake.layout import LakeLayout
from millstream.lake.table_format import open_table
from millstream.model.positions import Seq
from millstream.model.records import Op

_SEQ: Final = "__seq"
_COLUMNS: Final = (_SEQ, "__op", "__source", "__commit_lsn", "__commit_index", "__commit_ts")


def whole_upto(layout: LakeLayout, n: Seq) -> Seq:
    """Return the greatest position at or below `n` that no operation spans: `n`, or the start of its operation.

    Args:
        n: at or below the last cut.

    Raises:
        LakeTableForeign: another program wrote into `_commits`.
    """
    below, above = cut_at(layout, n), cut_from(layout, n)
    if above is None or above.n == n or (below is not None and below.n == n):
        return n
    stretch = _Stretch.open(layout, Seq(0) if below is None else below.n, above)
    operation = stretch.operation_behind(n)
    return n if operation is None else stretch.last_before(operation, n)


def upto_moment(layout: LakeLayout, cut: Cut | None, above: Cut, moment: datetime) -> Seq:
    """Return the end of the last operation before the first one between two cuts that committed after a moment.

    Args:
        cut: the last one that holds nothing committed after the moment; None for the lake's beginning.
        above: the next one with more records.
        moment: with a time zone.
    """
    below = Seq(0) if cut is None else cut.n
    first = _Stretch.open(layout, below, above).first_after(moment)
    return below if first is None else max(below, whole_upto(layout, Seq(first - 1)))


@dataclass(frozen=True, slots=True)
class _OperationFacts:
    """The common facts of an operation's records."""

    source: int
    lsn: int | None
    """None for rows that an application appended."""
    at: datetime | None
    chunk_of: str | None
    """The folder of the table that it copies; None for a transaction or an append."""

    @classmethod
    def of(cls, folder: str, batch: pa.RecordBatch, row: int) -> Self | None:
        """Return the operation of a record; None if the record is alone in it."""
        op, source, lsn, index, at = (batch.column(name)[row].as_py() for name in _COLUMNS[1:])
        alone = op == Op.MESSAGE.letter if index is None else False
        if alone or (lsn is None and (index is None or at is None)):
            return None
        return cls(source, lsn, at, folder if index is None else None)

    def has(self, folder: str, batch: pa.RecordBatch) -> pa.Array:
        """Return which records belong to it."""
        lsn, at = batch.column("__commit_lsn"), batch.column("__commit_ts")
        mine = pc.equal(batch.column("__source"), self.source)
        mine = pc.and_(mine, pc.is_null(lsn) if self.lsn is None else pc.fill_null(pc.equal(lsn, self.lsn), False))
        numbered = pc.is_valid(batch.column("__commit_index"))
        if self.chunk_of is None:
            mine = pc.and_(mine, numbered)
            return pc.and_(mine, self._at(at)) if self.lsn is None else mine
        if folder != self.chunk_of:
            return pa.array([False] * len(batch))
        # A copy may begin with a marker, which has no time.
        marker = pc.and_(pc.equal(batch.column("__op"), Op.TRUNCATE.letter), pc.is_null(at))
        return pc.and_(pc.and_(mine, pc.invert(numbered)), pc.or_(self._at(at), marker))

    def _at(self, times: pa.Array) -> pa.Array:
        if self.at is None:
            return pc.is_null(times)
        return pc.fill_null(pc.equal(times, pa.scalar(self.at, times.type)), False)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The records between two consecutive cuts, of all readable tables."""

    after: Seq
    tables: list[tuple[str, TableFiles, list[LiveFile]]]
    """By folder, the files that hold some."""

    @classmethod
    def open(cls, layout: LakeLayout, after: Seq, above: Cut) -> Self:
        tables = []
        for folder, table in above.tables.items():
            files = [
                file
                for file in _files(layout, folder, table)
                if file.low is None or (file.high > after and file.low <= above.n)
            ]
            if files:
                tables.append((folder, TableFiles(layout, f"{layout.root}/history/{folder}"), files))
        return cls(after, tables)

    def operation_behind(self, n: Seq) -> _OperationFacts | None:
        """Return the operation of the first record above `n`; None if there is none, or it is alone."""
        first: int | None = None
        found: _OperationFacts | None = None
        for folder, batch in self._batches(Seq(n + 1), None):
            seqs = batch.column(_SEQ)
            low = pc.min(seqs.filter(pc.greater(seqs, int(n)))).as_py()
            if low is not None and (first is None or low < first):
                first, found = low, _OperationFacts.of(folder, batch, pc.index(seqs, low).as_py())
        return found

    def first_after(self, moment: datetime) -> Seq | None:
        """Return the first record that committed after a moment; None if none did."""
        first: int | None = None
        for _, batch in self._batches(Seq(self.after + 1), None):
            seqs, times = batch.column(_SEQ), batch.column("__commit_ts")
            later = pc.and_(pc.greater(times, pa.scalar(moment, times.type)), pc.greater(seqs, int(self.after)))
            found = pc.min(seqs.filter(later)).as_py()
            first = found if first is None or (found is not None and found < first) else first
        return None if first is None else Seq(first)

    def last_before(self, operation: _OperationFacts, n: Seq) -> Seq:
        """Return `n` if no record of the operation lies at or below it; else the last record before the operation."""
        parted, last = False, int(self.after)
        for folder, batch in self._batches(Seq(self.after + 1), n):
            seqs = batch.column(_SEQ)
            inside = pc.and_(pc.greater(seqs, int(self.after)), pc.less_equal(seqs, int(n)))
            mine = operation.has(folder, batch)
            parted = parted or pc.any(pc.and_(inside, mine)).as_py() is True
            last = max(last, pc.max(seqs.filter(pc.and_(inside, pc.invert(mine)))).as_py() or 0)
        return Seq(last) if parted else n

    def _batches(self, low: Seq, high: Seq | None) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield files' records around `[low, high]`, with their folder."""
        for folder, files, found in self.tables:
            for file in found:
                if file.low is None or (file.high >= low and (high is None or file.low <= high)):
                    for batch in files.batches(file.path, _COLUMNS, least=(_SEQ, int(low))):
                        yield folder, batch


def _files(layout: LakeLayout, folder: str, table: CutTable) -> list[LiveFile]:
    """Return the files of a table's history; none if it can't be read, because then no query shows it."""
    try:
        opened = open_table(layout, f"{layout.root}/history/{folder}", layout.app_id("history", table.table_id))
        return [] if opened is None else files_of(opened, _SEQ)
    except MillstreamError:
        return []
