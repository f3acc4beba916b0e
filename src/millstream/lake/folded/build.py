"""The first build of `current`, from all of a table's history, in bounded memory and in parallel parts.

A fold holds its records whole, but here they may be all rows that the source ever had. So one pass first reads the
keys of the records behind the last truncate. A sample of them gives the bounds that cut the table into parts of similar
size. Keys that moved (an update changed its row's key) are recorded, because one part doesn't have all their records.
Then each part reads the records of its range and folds them; the moved keys make a part of their own. After a table
copy, history is nearly in key order, so that a part reads little outside of its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.lake.column_conversion import EXACT
from millstream.lake.folded.current_rules import fold_records, run_of
from millstream.lake.history_scan import Held, last_truncate, scan_named
from millstream.lake.row_identity import Keys, key_codes
from millstream.lake.table_format import OpenTable
from millstream.model.positions import Seq
from millstream.model.records import Op
from millstream.model.schema import TableSchema

_SAMPLE_ROWS: Final = 200_000
_LEFT: Final = Op.PARTITION_LEFT.letter


@dataclass(frozen=True, slots=True)
class BuildPart:
    """A range of keys, or the moved ones. A value: crosses processes."""

    after: Seq
    """Records up to here are ignored: the table was truncated."""
    low: pa.Table | None
    """One row, the least key (inclusive); None: no bound."""
    high: pa.Table | None
    """One row, the exclusive upper bound; None: no bound."""
    moved: Keys | None
    """The keys that moved, which no range includes."""
    movers: bool = False
    """Whether this part is for the moved keys."""


def plan_build(
    history: OpenTable, schema: TableSchema, columns: pa.Schema, upto: Seq, *, part_bytes: int
) -> tuple[tuple[BuildPart, ...], bool]:
    """Cut a keyed table into parts, each of which fits into a certain memory.

    Args:
        upto: inclusive.

    Returns:
        The parts, in key order, and whether any of their records has a text in `__exact`.
    """
    key = list(schema.key)
    names = ["__op", "__seq", "__unchanged", EXACT.name, "__before", *key]
    truncated = last_truncate(history, upto, schema.table_id)
    seen = _KeyPass(schema, key)
    scan = scan_named(history, schema, after=truncated, upto=upto, columns=names, own=columns)
    for rows in scan.batches():
        seen.take(rows)
    size = Held.of(history, after=truncated, upto=upto, table=schema.table_id).size_bytes
    moved = seen.moved_keys()
    count = max(1, -(-size // part_bytes))
    edges: list[pa.Table | None] = [None, *seen.edges(count), None]
    parts = [BuildPart(truncated, low, high, moved) for low, high in pairwise(edges)]
    if moved is not None:
        parts.append(BuildPart(truncated, None, None, moved, movers=True))
    return tuple(parts), seen.exact


def build_rows(history: OpenTable, schema: TableSchema, columns: pa.Schema, upto: Seq, part: BuildPart) -> pa.Table:
    """Return the rows (`columns` and `__exact`) that a part of a keyed table has at `upto`, from its history alone.

    Raises:
        LakeError: a record leaves a column unchanged and history holds no earlier row of it.
    """
    names = ["__op", "__seq", "__unchanged", EXACT.name, "__before", *columns.names]
    types = history.schema()

    def wanted(name: str) -> pc.Expression | None:
        some = _coarse(part, name, types.field(name).type, columns.field(schema.key[0]).type)
        # A partition that leaves has rows of every part.
        return some | (pc.field("__op") == _LEFT) if some is not None and schema.partitioned else some

    scan = scan_named(history, schema, after=part.after, upto=upto, columns=names, own=columns, only=wanted)
    found = (rows for rows in scan.batches() if rows.num_rows)
    held = [rows.filter(pa.array(_mine(rows, part, schema.key))) for rows in found]
    nothing = pa.schema([*columns, EXACT]).empty_table()
    records = pa.concat_tables(held) if held else scan.schema.empty_table()
    return fold_records(records, schema, columns, lambda _keys: nothing).rows


class _KeyPass:
    """The results of one pass over the keys of the records behind the last truncate."""

    def __init__(self, schema: TableSchema, key: Sequence[str]) -> None:
        self._schema = schema
        self._key = list(key)
        self._sample: list[pa.Table] = []
        self._sampled = 0
        self._step = 1
        self._moved: list[pa.Table] = []
        self.exact = False

    def take(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self.exact = self.exact or rows.column(EXACT.name).null_count < rows.num_rows
        self._note_moves(rows)
        some = rows.select(self._key).take(pa.array(np.arange(0, rows.num_rows, self._step)))
        self._sample.append(some)
        self._sampled += some.num_rows
        if self._sampled > 2 * _SAMPLE_ROWS:
            # Keep every other sample, and take half as many new ones.
            whole = pa.concat_tables(self._sample)
            self._sample = [whole.take(pa.array(np.arange(0, whole.num_rows, 2)))]
            self._sampled = self._sample[0].num_rows
            self._step *= 2

    def _note_moves(self, rows: pa.Table) -> None:
        updates = rows.filter(pc.and_(pc.is_valid(rows.column("__before")), pc.equal(rows.column("__op"), "u")))
        if not updates.num_rows:
            return
        shape = pa.schema([updates.schema.field(name) for name in self._key])
        run = run_of(updates, self._schema, shape)
        at, old = run.old(tuple(self._key))
        new = Keys.of(run.values, self._key).take(at)
        one, other = key_codes([new, old])
        moved = np.flatnonzero(one != other)
        if len(moved):
            self._moved += [new.take(moved).with_texts(), old.take(moved).with_texts()]

    def moved_keys(self) -> Keys | None:
        """Return the keys that rows moved from or to."""
        return Keys.of(pa.concat_tables(self._moved), self._key) if self._moved else None

    def edges(self, count: int) -> list[pa.Table]:
        """Return the keys at which to cut, ascending; none if the key's type has no order."""
        if count < 2 or not self._sample:
            return []
        sample = pa.concat_tables(self._sample)
        try:
            order = pc.sort_indices(sample, sort_keys=[(name, "ascending") for name in self._key])
        except pa.ArrowException:
            return []
        known = sample.take(order)
        # A null sorts elsewhere here than in `_below`, and a NaN nowhere.
        plain = np.ones(known.num_rows, bool)
        for column in known.columns:
            plain &= np.asarray(pc.is_valid(column))
            if pa.types.is_floating(column.type):
                plain &= ~np.asarray(pc.fill_null(pc.is_nan(column), fill_value=False))
        known = known.filter(pa.array(plain))
        picked: list[pa.Table] = []
        for place in range(1, count):
            row = known.slice(known.num_rows * place // count, 1)
            if row.num_rows and (not picked or not row.equals(picked[-1])):
                picked.append(row)
        return picked


def _coarse(part: BuildPart, name: str, kind: pa.DataType, wanted: pa.DataType) -> pc.Expression | None:
    """Return a filter on the first key column of a part's records, for skipping in the scan; it may admit others.

    None if the column's type in history isn't the wanted one, as it may be under a name that other columns had.
    """
    column = pc.field(name)
    if pa.types.is_floating(wanted) or not kind.equals(wanted):
        return None  # no range includes a NaN, and 0 isn't -0 to a scan
    if part.movers:
        assert part.moved is not None, "the part of the moved keys has some"
        values = part.moved.columns[0]
        wanted = column.isin(values.drop_null())
        return wanted | column.is_null() if values.null_count else wanted
    found: pc.Expression | None = None
    if part.low is not None:
        found = column >= part.low.column(0)[0]
    if part.high is not None:
        below = column <= part.high.column(0)[0]
        found = below if found is None else found & below
    # A null sorts before all values, in the first part.
    return found | column.is_null() if found is not None and part.low is None else found


def _mine(rows: pa.Table, part: BuildPart, key: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Return which records are a part's."""
    keys = Keys.of(rows, key)
    left: npt.NDArray[np.bool_] = np.asarray(pc.equal(rows.column("__op"), _LEFT), bool)
    if part.moved is not None:
        have, moved = key_codes([keys, part.moved])
        among: npt.NDArray[np.bool_] = np.isin(have, moved)
        if part.movers:
            return among | left
        mine = ~among
    else:
        mine = np.ones(len(keys), bool)
    if part.low is not None:
        mine &= ~_below(keys, part.low)
    if part.high is not None:
        mine &= _below(keys, part.high)
    return mine | left


def _below(keys: Keys, edge: pa.Table) -> npt.NDArray[np.bool_]:
    """Return which keys stand before an edge; a null stands before all values."""
    below = np.zeros(len(keys), bool)
    equal = np.ones(len(keys), bool)
    for place, column in enumerate(keys.columns):
        bound = edge.column(place)[0]
        null = np.asarray(column.is_null())
        if not bound.is_valid:
            equal &= null
            continue
        less = np.asarray(pc.fill_null(pc.less(column, bound), fill_value=True))
        same = np.asarray(pc.fill_null(pc.equal(column, bound), fill_value=False))
        below |= equal & (less | null)
        equal &= same
    return below
