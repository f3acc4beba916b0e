"""Unchanged values: columns that an update leaves out, filled in from the row's own past.

PostgreSQL doesn't send a TOAST value that an update didn't change; the record names such columns in `__unchanged`. Their
values come from the row's last record before this one (under its old key, if it moved), or, if the run holds none,
from `current`. Rows with such columns, and rows whose keys move, are applied record by record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import LakeError
from millstream.lake.column_conversion import EXACT, conform, text_maps, texts_of
from millstream.lake.folded.left_partitions import NEVER, LeftPartitions, partitions_of
from millstream.lake.row_identity import Codes, Keys, concat_keys, key_codes

Indexes = npt.NDArray[np.int64]
Lookup = Callable[[Keys], pa.Table]
"""Returns rows of `current` (its columns and `__exact`), at least all those with one of the keys."""


_LOST: Final = int(np.iinfo(np.int64).min)
"""In place of a record: the value isn't known."""


@dataclass(slots=True)
class LiveRow:
    """A live row while its records are applied: the record that wrote it, and the sources of its unchanged columns."""

    base: int
    filled: dict[str, int] = field(default_factory=dict)
    """By column: a record's index, or `-1 - k` for row `k` of those looked up in `current`."""


@dataclass(frozen=True, slots=True)
class RowSources:
    """The records that become rows."""

    winners: Indexes
    """Records that are rows as they stand."""
    states: list[LiveRow]
    """Rows that were applied record by record."""
    asked: Keys | None
    """Rows of `current` that the states need, in order of their numbers."""
    gone: Keys
    """All keys of the records, once each; empty if not requested."""
    asked_by: list[int] = field(default_factory=list)
    """For each of `asked`, the record that needs it."""
    left: LeftPartitions = field(default_factory=LeftPartitions.none)
    """The partitions that leave in the run."""


@dataclass(slots=True)
class SequentialFold:
    """Application of records to rows whose keys move or whose columns are left out, record by record."""

    ops: npt.NDArray[np.uint8]
    new: Codes
    old: Codes
    unchanged: Mapping[int, list[str]]
    truncated: bool
    ends: Indexes
    """For each record, the place at which its partition leaves next (`LeftPartitions.next_after`)."""
    asked: dict[int, int] = field(default_factory=dict)
    """By key code, the index of the row among those looked up in `current`."""
    asked_by: list[int] = field(default_factory=list)
    """For each index, a record that needs it; after `play`, only for those that are needed at the end."""

    def play(self, records: Indexes) -> list[LiveRow]:
        """Return the rows that are live at the end, in order of their keys' first records."""
        live: dict[int, LiveRow | None] = {}
        for record in records.tolist():
            key, origin = int(self.new[record]), int(self.old[record])
            if self.ops[record] == ord("d"):
                live[key] = None
                continue
            state = LiveRow(record)
            for name in self.unchanged.get(record, ()):
                state.filled[name] = self._past(live, record, origin, name)
            if origin != key:
                live[origin] = None
            live[key] = state
        states = [state for state in live.values() if state is not None and self.ends[state.base] == NEVER]
        self._keep_needed(states)
        return states

    def _keep_needed(self, states: list[LiveRow]) -> None:
        """Look up only what a row at the end needs.

        While a table is copied, an update may come before the copy of its row. Columns that it leaves out are
        unknown then, and aren't needed once the copied row is there.
        """
        lost = next((state for state in states if _LOST in state.filled.values()), None)
        if lost is not None:
            column = next(name for name, at in lost.filled.items() if at == _LOST)
            raise LakeError(
                f"record {lost.base} of this run leaves column {column} unchanged, and the row it changes was deleted "
                "before it",
                column=column,
            )
        needed = sorted({-1 - at for state in states for at in state.filled.values() if at < 0})
        place_of = {-1 - old: -1 - new for new, old in enumerate(needed)}
        for state in states:
            state.filled = {name: place_of.get(at, at) for name, at in state.filled.items()}
        self.asked_by = [self.asked_by[place] for place in needed]

    def _past(self, live: Mapping[int, LiveRow | None], record: int, origin: int, name: str) -> int:
        past = live.get(origin)
        if past is not None and self.ends[past.base] > record:
            return past.filled.get(name, past.base)
        if origin in live or self.truncated:
            return _LOST
        place = self.asked.setdefault(origin, len(self.asked))
        if place == len(self.asked_by):
            self.asked_by.append(record)
        return -1 - place

    def needed_rows(self, new_keys: Keys, old_keys: Keys, at: Indexes) -> Keys | None:
        """Return the keys of the rows of `current` that the application needs; None if it needs none.

        Args:
            old_keys: the keys before, of the records `at`.
            at: the records that have one.
        """
        if not self.asked_by:
            return None
        positions = {int(record): len(new_keys) + place for place, record in enumerate(at)}
        records = [positions.get(record, record) for record in self.asked_by]
        return concat_keys(new_keys, old_keys).take(np.array(records, np.int64))


def past_rows(plan: RowSources, lookup: Lookup) -> pa.Table | None:
    """Return the rows of `current` that a plan needs, in its order.

    Raises:
        LakeError: one of them is missing.
    """
    if plan.asked is None:
        return None
    found = lookup(plan.asked)
    asked, have = key_codes([plan.asked, Keys.of(found, plan.asked.names)])
    row_of = {int(code): row for row, code in enumerate(have)}
    if len(plan.left):
        # An update can't have a past in a partition that left before it.
        ends = plan.left.next_after(partitions_of(found), np.full(len(have), -1, np.int64))
        by = dict(zip(asked.tolist(), plan.asked_by, strict=True))
        row_of = {code: row for code, row in row_of.items() if ends[row] > by.get(code, -1)}
    missing = [place for place, code in enumerate(asked.tolist()) if code not in row_of]
    if missing:
        facts = plan.asked.take(np.array(missing[:1], np.int64)).to_table().to_pylist()[0]
        raise LakeError(
            f"an update of row {facts} leaves columns unchanged, and the lake holds no earlier state of the row"
        )
    return found.take(pa.array([row_of[int(code)] for code in asked], pa.int64()))


def materialize(values: pa.Table, plan: RowSources, past: pa.Table | None) -> pa.Table:
    """Return rows of a plan's records, with unchanged columns taken from their sources.

    Args:
        values: the rows that the plan's indexes refer to: columns and `__exact`.
        plan: which of them.
        past: the result of `past_rows`.
    """
    winners, states = plan.winners, plan.states
    bases = np.concatenate([winners, np.array([state.base for state in states], np.int64)])
    if all(not state.filled for state in states):
        return values.take(pa.array(bases))
    count = values.num_rows
    sources = values if past is None else pa.concat_tables([values, conform(past, values.schema)])
    maps = sources.column(EXACT.name).combine_chunks()
    any_exact = maps.null_count < len(maps)
    columns, texts = [], []
    names = [name for name in values.column_names if name != EXACT.name]
    for name in names:
        where = bases.copy()
        for row, state in enumerate(states, len(winners)):
            at = state.filled.get(name)
            if at is not None:
                where[row] = at if at >= 0 else count - 1 - at
        columns.append(sources.column(name).take(pa.array(where)))
        if any_exact:
            texts.append(texts_of(maps, name).take(pa.array(where)))
    exact = text_maps(names, texts, len(bases)) if any_exact else pa.nulls(len(bases), EXACT.type)
    return pa.table([*columns, exact], schema=values.schema)


def fill_from_before(values: pa.Table, left_out: Mapping[int, list[str]], at: Indexes, old: Keys) -> pa.Table:
    """Fill in the unchanged columns of a bag's updates from their old rows, which were sent whole.

    Args:
        left_out: the unchanged columns of records, by the record's index.
        at: the records that have an old row.
    """
    place_of = {int(record): place for place, record in enumerate(at)}
    count = values.num_rows
    maps = values.column(EXACT.name).combine_chunks()
    columns, texts = [], []
    for place, name in enumerate(old.names):
        where = np.arange(count)
        for record, names in left_out.items():
            if name in names and record in place_of:
                where[record] = count + place_of[record]
        column = values.column(name).combine_chunks()
        kept = pa.nulls(len(old), pa.string()) if old.exact[place] is None else old.exact[place]
        columns.append(pa.concat_arrays([column, old.columns[place]]).take(pa.array(where)))
        texts.append(pa.concat_arrays([texts_of(maps, name), kept]).take(pa.array(where)))
    return pa.table([*columns, text_maps(old.names, texts, count)], schema=values.schema)
