"""The fold: the effect of a run of records on the rows of `current`. Pure, except for looking up rows of `current`.

Records are applied in order of `__seq`. The rules:

- `c`, `r` and `u` put a row at their key; the last record of a key wins, deletes included.
- `u` whose `__before` holds another key moves the row: the old key is deleted. `t` empties the table.
- Columns named in `__unchanged` come from the row's own past: its last record before this one (under its old key,
  if it moved), or, if the run holds none, from `current`.
- A table without a key (identity FULL) is a bag: `d` and `u` remove one row equal to the old one. Since removed
  rows always exist, only the count of each distinct row matters, and no order.

Nearly all records neither move nor leave columns out; those are folded by sorting codes of their keys. Only the
records of other keys are applied one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import LakeError
from millstream.lake.keys import Codes, Keys, concat_keys, first_of_each, key_codes, last_of_each
from millstream.lake.types import conform, from_text, text_maps, texts_of
from millstream.model.records import TEXT_BY_COLUMN
from millstream.model.schema import TableSchema

EXACT: Final = pa.field("__exact", TEXT_BY_COLUMN)

Indexes = npt.NDArray[np.int64]
Lookup = Callable[[Keys], pa.Table]
"""Returns rows of `current` (its columns and `__exact`), at least all those with one of the keys."""


_LOST: Final = int(np.iinfo(np.int64).min)
"""In place of a record: the value isn't known."""


@dataclass(frozen=True, slots=True)
class Folded:
    """The effect of a run of records on `current`: forget all (if `truncated`), delete, insert."""

    rows: pa.Table
    """Rows to insert, `columns` and `__exact`."""
    gone: Keys
    """Keyed: rows with these keys are deleted before `rows` are inserted (the keys of `rows` are included). Bag: each
    of these whole rows, as often as it occurs here, deletes one equal row."""
    truncated: bool
    records: int
    """Number of records folded."""


@dataclass(slots=True)
class State:
    """A live row while its records are applied: the record that wrote it, and the sources of its unchanged columns."""

    base: int
    filled: dict[str, int] = field(default_factory=dict)
    """By column: a record's index, or `-1 - k` for row `k` of those looked up in `current`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The records that become rows."""

    winners: Indexes
    """Records that are rows as they stand."""
    states: list[State]
    """Rows that were applied record by record."""
    asked: Keys | None
    """Rows of `current` that the states need, in order of their numbers."""
    gone: Keys
    """All keys of the records, once each; empty if not requested."""


def fold_records(tail: pa.Table, schema: TableSchema, columns: pa.Schema, lookup: Lookup) -> Folded:
    """Fold records into rows.

    Args:
        tail: history's rows (the records' own columns and the table's), any order; columns missing from it are null.
        schema: the table's latest schema: its key, its name.
        columns: the columns of `current`, in the lake's types, without `__exact`.
        lookup: called at most once, and only for rows whose past is needed.

    Raises:
        LakeError: a record leaves a column unchanged and the lake holds no earlier row of it.
    """
    records = tail.num_rows
    run = run_of(tail, schema, columns)
    if not schema.key:
        rows, gone = _fold_bag(run)
        return Folded(rows, gone, run.truncated, records)
    plan = plan_keyed(run)
    rows = materialize(run.values, plan, past_rows(plan, lookup))
    return Folded(rows, plan.gone, run.truncated, records)


def run_of(tail: pa.Table, schema: TableSchema, columns: pa.Schema) -> Run:
    """Return the records after the last truncate, in order, with their `columns` as values."""
    tail = in_order(tail)
    ops = op_codes(tail)
    truncates = np.flatnonzero(ops == ord("t"))
    if len(truncates):
        tail = tail.slice(int(truncates[-1]) + 1)
        ops = ops[int(truncates[-1]) + 1 :]
    wanted = np.isin(ops, np.frombuffer(b"curd", np.uint8))
    if not wanted.all():
        tail, ops = tail.filter(pa.array(wanted)), ops[wanted]
    values = conform(tail, pa.schema([*columns, EXACT]))
    return Run(tail, ops, values, schema, truncated=bool(len(truncates)))


@dataclass(frozen=True, slots=True)
class Run:
    """Records after the last truncate, in order."""

    tail: pa.Table
    ops: npt.NDArray[np.uint8]
    values: pa.Table
    schema: TableSchema
    truncated: bool

    def old(self, names: tuple[str, ...]) -> tuple[Indexes, Keys]:
        """Return the updates with an old key or row, and its `names`; a column that it lacks is as in the new row."""
        before = self.tail.column("__before").combine_chunks()
        at = np.flatnonzero((self.ops == ord("u")) & np.asarray(before.is_valid()))
        maps, here = before.take(pa.array(at)), pa.array(at)
        new = Keys.of(self.values, names).take(at)
        present = _names_in(maps)
        columns, exact = [], []
        for place, name in enumerate(names):
            has = present.get(name)
            if has is None:
                columns.append(new.columns[place])
                exact.append(new.exact[place])
                continue
            value, text = from_text(self.values.schema.field(name).type, texts_of(maps, name))
            kept = pa.nulls(len(here), pa.string()) if new.exact[place] is None else new.exact[place]
            columns.append(pc.if_else(pa.array(has), value, new.columns[place]))
            text = pc.if_else(pa.array(has), text, kept)
            exact.append(None if text.null_count == len(text) else text)
        return at, Keys(names, tuple(columns), tuple(exact))

    def unchanged(self) -> tuple[Indexes, list[list[str]]]:
        """Return the updates that leave columns out, and those columns."""
        lists = self.tail.column("__unchanged").combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
        at = np.flatnonzero((lengths > 0) & (self.ops == ord("u")))
        return at, lists.take(pa.array(at)).to_pylist() if len(at) else []


def plan_keyed(run: Run, *, gone: bool = True) -> Plan:
    """Return which of a keyed table's records become rows; `gone` is whether the records' keys are wanted."""
    key = run.schema.key
    new_keys = Keys.of(run.values, key)
    at, old_keys = run.old(key)
    new, old_some = key_codes([new_keys, old_keys])
    old = new.copy()
    old[at] = old_some
    moved = np.flatnonzero(old != new)
    sparse, names = run.unchanged()

    walked = np.union1d(np.union1d(new[moved], old[moved]), new[sparse])
    if len(walked):
        by_walk = np.isin(new, walked)
        plain, slow = np.flatnonzero(~by_walk), np.flatnonzero(by_walk)
    else:
        plain, slow = np.arange(len(new)), np.zeros(0, np.int64)
    winners = plain[last_of_each(new[plain])]
    winners = winners[run.ops[winners] != ord("d")]

    walk = _Walk(run.ops, new, old, dict(zip(sparse.tolist(), names, strict=True)), truncated=run.truncated)
    states = walk.play(slow)
    everything = np.concatenate([new, old_some]) if gone else new[:0]
    met = concat_keys(new_keys, old_keys).take(first_of_each(everything))
    return Plan(winners, states, _asked(walk, new_keys, old_keys, at), met)


@dataclass(slots=True)
class _Walk:
    """Application of records to rows whose keys move or whose columns are left out, record by record."""

    ops: npt.NDArray[np.uint8]
    new: Codes
    old: Codes
    unchanged: Mapping[int, list[str]]
    truncated: bool
    asked: dict[int, int] = field(default_factory=dict)
    """By key code, the index of the row among those looked up in `current`."""
    asked_by: list[int] = field(default_factory=list)
    """For each index, a record that needs it; after `play`, only for those that are needed at the end."""

    def play(self, records: Indexes) -> list[State]:
        """Return the rows that are live at the end, in order of their keys' first records."""
        live: dict[int, State | None] = {}
        for record in records.tolist():
            key, origin = int(self.new[record]), int(self.old[record])
            if self.ops[record] == ord("d"):
                live[key] = None
                continue
            state = State(record)
            for name in self.unchanged.get(record, ()):
                state.filled[name] = self._past(live, record, origin, name)
            if origin != key:
                live[origin] = None
            live[key] = state
        states = [state for state in live.values() if state is not None]
        self._keep_needed(states)
        return states

    def _keep_needed(self, states: list[State]) -> None:
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

    def _past(self, live: Mapping[int, State | None], record: int, origin: int, name: str) -> int:
        past = live.get(origin)
        if past is not None:
            return past.filled.get(name, past.base)
        if origin in live or self.truncated:
            return _LOST
        place = self.asked.setdefault(origin, len(self.asked))
        if place == len(self.asked_by):
            self.asked_by.append(record)
        return -1 - place


def _asked(walk: _Walk, new_keys: Keys, old_keys: Keys, at: Indexes) -> Keys | None:
    """Return the keys of the rows of `current` that the application needs."""
    if not walk.asked_by:
        return None
    positions = {int(record): len(new_keys) + place for place, record in enumerate(at)}
    records = [positions.get(record, record) for record in walk.asked_by]
    return concat_keys(new_keys, old_keys).take(np.array(records, np.int64))


def past_rows(plan: Plan, lookup: Lookup) -> pa.Table | None:
    """Return the rows of `current` that a plan needs, in its order.

    Raises:
        LakeError: one of them is missing.
    """
    if plan.asked is None:
        return None
    found = lookup(plan.asked)
    asked, have = key_codes([plan.asked, Keys.of(found, plan.asked.names)])
    row_of = {int(code): row for row, code in enumerate(have)}
    missing = [place for place, code in enumerate(asked.tolist()) if code not in row_of]
    if missing:
        facts = plan.asked.take(np.array(missing[:1], np.int64)).to_table().to_pylist()[0]
        raise LakeError(
            f"an update of row {facts} leaves columns unchanged, and the lake holds no earlier state of the row"
        )
    return found.take(pa.array([row_of[int(code)] for code in asked], pa.int64()))


def materialize(values: pa.Table, plan: Plan, past: pa.Table | None) -> pa.Table:
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


def _fold_bag(run: Run) -> tuple[pa.Table, Keys]:
    names = tuple(name for name in run.values.column_names if name != EXACT.name)
    at, old = run.old(names)
    run = _fill_from_before(run, at, old)
    rows = Keys.of(run.values, names)
    new, gone = key_codes([rows, old], signed_zero=True)
    puts = run.ops != ord("d")
    codes = np.concatenate([new, gone])
    distinct, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    steps = np.concatenate([np.where(puts, 1, -1), np.full(len(gone), -1)])
    net = np.zeros(len(distinct), np.int64)
    np.add.at(net, inverse, steps)
    more, fewer = np.maximum(net, 0), np.maximum(-net, 0)
    both = concat_keys(rows, old)
    # An inserted row must come from an inserting record, even if an old row equal to it came first.
    putting = np.full(len(distinct), -1, np.int64)
    putting[inverse[: len(new)][puts]] = np.flatnonzero(puts)
    return run.values.take(pa.array(np.repeat(putting, more))), both.take(np.repeat(first, fewer).astype(np.int64))


def _fill_from_before(run: Run, at: Indexes, old: Keys) -> Run:
    """Fill in unchanged columns of a bag's updates: FULL sends the whole old row."""
    sparse, names = run.unchanged()
    if not len(sparse):
        return run
    place_of = {int(record): place for place, record in enumerate(at)}
    count = run.values.num_rows
    maps = run.values.column(EXACT.name).combine_chunks()
    columns, texts = [], []
    for place, name in enumerate(old.names):
        where = np.arange(count)
        for record, left_out in zip(sparse.tolist(), names, strict=True):
            if name in left_out and record in place_of:
                where[record] = count + place_of[record]
        column = run.values.column(name).combine_chunks()
        kept = pa.nulls(len(old), pa.string()) if old.exact[place] is None else old.exact[place]
        columns.append(pa.concat_arrays([column, old.columns[place]]).take(pa.array(where)))
        texts.append(pa.concat_arrays([texts_of(maps, name), kept]).take(pa.array(where)))
    values = pa.table([*columns, text_maps(old.names, texts, count)], schema=run.values.schema)
    return Run(run.tail, run.ops, values, run.schema, run.truncated)


def in_order(tail: pa.Table) -> pa.Table:
    """Return records in order of `__seq`."""
    seqs = tail.column("__seq").to_numpy()
    if len(seqs) < 2 or bool(np.all(seqs[1:] > seqs[:-1])):
        return tail
    return tail.take(pa.array(np.argsort(seqs, kind="stable")))


def op_codes(tail: pa.Table) -> npt.NDArray[np.uint8]:
    """Return the records' ops, as their letters' ASCII codes."""
    encoded = pc.dictionary_encode(tail.column("__op").combine_chunks())
    letters = np.array([ord(op) for op in encoded.dictionary.to_pylist()], np.uint8)
    return letters[np.asarray(encoded.indices)] if len(letters) else np.zeros(0, np.uint8)


def _names_in(maps: pa.Array) -> dict[str, npt.NDArray[np.bool_]]:
    """Return, by column, which of the maps have an entry for it (even null)."""
    offsets = np.asarray(maps.offsets)
    rows = np.repeat(np.arange(len(maps)), np.diff(offsets))
    encoded = pc.dictionary_encode(
        maps.keys.slice(int(offsets[0]), int(offsets[-1] - offsets[0])) if len(maps) else maps.keys
    )
    codes = np.asarray(encoded.indices)
    present: dict[str, npt.NDArray[np.bool_]] = {}
    for code, name in enumerate(encoded.dictionary.to_pylist()):
        has = np.zeros(len(maps), bool)
        has[rows[codes == code]] = True
        present[name] = has
    return present
