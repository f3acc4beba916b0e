"""The fold: the effect of a run of records on the rows of `current`. Pure, except for looking up rows of `current`.

Records are applied in order of `__seq`. The rules:

- `c`, `r` and `u` put a row at their key; the last record of a key wins, deletes included.
- `u` whose `__before` holds another key moves the row: the old key is deleted. `t` empties the table.
- `x` deletes the rows of a partition (`left_partitions`). A table that is partitioned has `__partition_oid` among
  its columns here.
- Columns named in `__unchanged` come from the row's own past: `unchanged_values`.
- In a table with columns that accumulate, records become whole rows first: `accumulating`.
- A table without a key (identity FULL) is a bag: `d` and `u` remove one row equal to the old one. Since removed
  rows always exist, only the count of each distinct row matters, and no order.

Nearly all records neither move nor leave columns out; those are folded by sorting codes of their keys. Only the
records of other keys are applied one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.lake.column_conversion import EXACT, conform, from_text, texts_of
from millstream.lake.folded.accumulating import accumulated_by
from millstream.lake.folded.left_partitions import NEVER, UNKNOWN, LeftPartitions, partitions_of
from millstream.lake.folded.unchanged_values import (
    Indexes,
    Lookup,
    RowSources,
    SequentialFold,
    fill_from_before,
    materialize,
    past_rows,
)
from millstream.lake.row_identity import Keys, concat_keys, first_of_each, key_codes, last_of_each
from millstream.model.records import PARTITION_OID
from millstream.model.schema import TableSchema


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
    left: tuple[int, ...] = ()
    """OIDs of partitions that left: earlier rows in them are deleted."""


def fold_records(tail: pa.Table, schema: TableSchema, columns: pa.Schema, lookup: Lookup) -> Folded:
    """Fold records into rows.

    Args:
        tail: history's rows (the records' own columns and the table's), any order; columns missing from it are null.
        schema: the table's latest schema: its key, its name.
        columns: the columns of `current`, in the lake's types, without `__exact`.
        lookup: called at most once, and only for rows whose past is needed.

    Raises:
        LakeError: a record leaves a column unchanged and the lake holds no earlier row of it.
        InvalidValue: a counter's total is beyond its type.
    """
    records = tail.num_rows
    run = run_of(tail, schema, columns)
    if not schema.key:
        rows, gone = _fold_bag(run)
        return Folded(rows, gone, run.truncated, records, run.left.distinct)
    run = accumulated_by(run, lookup)
    plan = plan_keyed(run)
    rows = materialize(run.values, plan, past_rows(plan, lookup))
    return Folded(rows, plan.gone, run.truncated, records, run.left.distinct)


def run_of(tail: pa.Table, schema: TableSchema, columns: pa.Schema) -> RecordRun:
    """Return the records after the last truncate, in order, with their `columns` as values."""
    tail = in_order(tail)
    ops = op_codes(tail)
    truncates = np.flatnonzero(ops == ord("t"))
    if len(truncates):
        tail = tail.slice(int(truncates[-1]) + 1)
        ops = ops[int(truncates[-1]) + 1 :]
    wanted = np.isin(ops, np.frombuffer(b"curd", np.uint8))
    left = LeftPartitions.none()
    if PARTITION_OID.name in tail.column_names:
        # Each stands between two of the records that are left.
        left = LeftPartitions.of(tail, ops, np.cumsum(wanted))
    if not wanted.all():
        tail, ops = tail.filter(pa.array(wanted)), ops[wanted]
    values = conform(tail, pa.schema([*columns, EXACT]))
    return RecordRun(tail, ops, values, schema, truncated=bool(len(truncates)), left=left)


@dataclass(frozen=True, slots=True)
class RecordRun:
    """Records after the last truncate, in order."""

    tail: pa.Table
    ops: npt.NDArray[np.uint8]
    values: pa.Table
    schema: TableSchema
    truncated: bool
    left: LeftPartitions = field(default_factory=LeftPartitions.none)
    """The partitions that leave: the records before an `x` are those below its place."""

    def ends(self) -> Indexes:
        """Return, for each record, the place at which its partition leaves next; `NEVER` if it doesn't."""
        if not len(self.left):
            return np.full(len(self.ops), NEVER, np.int64)
        return self.left.next_after(partitions_of(self.values), np.arange(len(self.ops)))

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


def plan_keyed(run: RecordRun, *, gone: bool = True) -> RowSources:
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
    ends = run.ends()
    winners = winners[(run.ops[winners] != ord("d")) & (ends[winners] == NEVER)]

    left_out = dict(zip(sparse.tolist(), names, strict=True))
    walk = SequentialFold(run.ops, new, old, left_out, truncated=run.truncated, ends=ends)
    states = walk.play(slow)
    everything = np.concatenate([new, old_some]) if gone else new[:0]
    met = concat_keys(new_keys, old_keys).take(first_of_each(everything))
    asked = walk.needed_rows(new_keys, old_keys, at)
    return RowSources(winners, states, asked, met, walk.asked_by, run.left)


def _fold_bag(run: RecordRun) -> tuple[pa.Table, Keys]:
    if len(run.left):
        # A row that is put or removed in a partition before it leaves concerns no later row.
        stays = run.ends() == NEVER
        kept = pa.array(stays)
        run = replace(run, tail=run.tail.filter(kept), ops=run.ops[stays], values=run.values.filter(kept))
    names = tuple(name for name in run.values.column_names if name != EXACT.name)
    at, old = run.old(names)
    sparse, left_out = run.unchanged()
    if len(sparse):
        # FULL sends the whole old row.
        run = replace(
            run, values=fill_from_before(run.values, dict(zip(sparse.tolist(), left_out, strict=True)), at, old)
        )
    rows = Keys.of(run.values, names)
    new, gone = key_codes([rows, old], signed_zero=True)
    puts = run.ops != ord("d")
    codes = np.concatenate([new, gone])
    distinct, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    steps = np.concatenate([np.where(puts, 1, -1), np.full(len(gone), -1)])
    net = np.zeros(len(distinct), np.int64)
    np.add.at(net, inverse, steps)
    both = concat_keys(rows, old)
    if PARTITION_OID.name in names:
        match_unknown(net, both.take(first))
    more, fewer = np.maximum(net, 0), np.maximum(-net, 0)
    # An inserted row must come from an inserting record, even if an old row equal to it came first.
    putting = np.full(len(distinct), -1, np.int64)
    putting[inverse[: len(new)][puts]] = np.flatnonzero(puts)
    return run.values.take(pa.array(np.repeat(putting, more))), both.take(np.repeat(first, fewer).astype(np.int64))


def match_unknown(net: Indexes, rows: Keys) -> None:
    """Let a row that was removed be one that was put, if the partition of either isn't known.

    Args:
        net: how often each row was put, less how often it was removed; written to.
    """
    oids = partitions_of(rows.to_table())
    found = key_codes([rows.without(PARTITION_OID.name)], signed_zero=True)[0]
    codes = np.unique(found, return_inverse=True)[1]
    # A row's values stand at most once with an unknown partition. That one takes from the others in their order.
    unknown = np.flatnonzero(oids == UNKNOWN)
    wanted = np.zeros(len(net), np.int64)
    wanted[codes[unknown]] = net[unknown]
    others = np.flatnonzero((oids != UNKNOWN) & (np.sign(net) * np.sign(wanted[codes]) < 0))
    others = others[np.argsort(codes[others], kind="stable")]
    its, size = codes[others], np.abs(net[others])
    before = np.cumsum(size) - size
    before -= before[np.searchsorted(its, its)]  # within the same values
    matched = np.sign(wanted[its]) * np.clip(np.abs(wanted[its]) - before, 0, size)
    net[others] += matched
    taken = np.zeros(len(net), np.int64)
    np.add.at(taken, its, matched)
    net[unknown] -= taken[codes[unknown]]


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
