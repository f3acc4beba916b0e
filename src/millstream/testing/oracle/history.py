"""A history table's records, replayed from the first, and the order of all records of a stream.

The replay applies records in the order of `__seq` by their definition, and lists everything that no
correct history can contain: a copied row that is older than earlier records, a delete of a row that never
existed.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow as pa

from millstream.testing.oracle.lake import read_delta, text_columns
from millstream.testing.oracle.table_rows import RowText, TableRows, Text, Unknown

_LEAF = "__partition_oid"
_XID_MASK = 0xFFFF_FFFF  # a record's xid has 32 bits, as in the protocol
Events = Mapping[str, Mapping[str, int]]


@dataclass(slots=True)
class Replay:
    """The result of a replay: the rows at the end, the number of records, and the violations among them."""

    rows: TableRows
    records: int = 0
    violations: list[str] = field(default_factory=list)


def replay_history(
    path: str | os.PathLike[str], like: TableRows, *, recopied: bool = False, added: Sequence[str] = ()
) -> Replay:
    """Replay a Delta history table from its first record.

    Args:
        path: the table's folder.
        like: the source's rows: they define the columns and their order, and the key.
        recopied: the table was copied more than once on purpose: a copied row may then bring back or
            change a row.
        added: columns that came later: a copied row may fill them in.
    """
    return replay_records(read_delta(path), like, recopied=recopied, added=added)


def replay_records(records: pa.Table, like: TableRows, *, recopied: bool = False, added: Sequence[str] = ()) -> Replay:
    """Replay records from an Arrow table; as `replay_history`."""
    records = records.sort_by("__seq")
    columns = zip(*text_columns(records, like.columns), strict=True)
    own = list(columns) if like.columns else [()] * len(records)
    names = ("__op", "__seq", "__unchanged", "__before")
    player = _Player(like, recopied=recopied, added=added)
    indexes = records.column("__commit_index").to_pylist() if "__commit_index" in records.column_names else own
    facts = (records.column(name).to_pylist() for name in names)
    nowhere = [None] * len(records)
    leaves = records.column(_LEAF).to_pylist() if _LEAF in records.column_names else nowhere
    for row, index, player.leaf, op, seq, unchanged, before in zip(own, indexes, leaves, *facts, strict=True):
        if op == "t" and index is None:
            player.begin_copy()
            continue
        player.play(op, seq, row, unchanged or (), None if before is None else dict(before))
    return Replay(player.rows, len(records), player.violations)


class _Player:
    """The state of a replay: the rows so far, and the keys that records have named."""

    def __init__(self, like: TableRows, *, recopied: bool, added: Sequence[str]) -> None:
        self.rows = TableRows(like.columns, like.key)
        self.violations: list[str] = []
        self._recopied = recopied
        self._added = {like.columns.index(name) for name in added}
        self._gone: set[RowText] = set()
        self._truncated = False
        self.leaf: int | None = None
        """OID of the leaf partition that the record names which is played."""
        self._leaf_of: dict[RowText, int | None] = {}
        self._leaves_of: dict[RowText, Counter[int | None]] = defaultdict(Counter)
        """By row of a table without a key, how many are in each leaf partition."""

    def play(
        self, op: str, seq: int, row: RowText, unchanged: Sequence[str], before: Mapping[str, str | None] | None
    ) -> None:
        where = f"seq {seq} ({op})"
        if op == "t":
            self._clear()
            self._truncated = True
        elif op == "c":
            self._put(where, row)
        elif op == "r":
            self._copy(where, row)
        elif op == "u":
            self._update(where, row, unchanged, before)
        elif op == "d":
            self._delete(where, row)
        elif op == "x":
            self._leave()
        else:
            self.violations.append(f"{where}: no operation of a table")

    def begin_copy(self) -> None:
        """Forget the named keys: a copy begins, and the source may have any row, which may go before it was copied."""
        self._clear()
        self._gone.clear()
        self._truncated = False

    def _clear(self) -> None:
        self.rows.rows.clear()
        self.rows.bag.clear()
        self._leaves_of.clear()

    def _put(self, where: str, row: RowText) -> None:
        if not self._add(row):
            self.violations.append(f"{where}: created where one of its key is: {row}")

    def _copy(self, where: str, row: RowText) -> None:
        old = self.rows.rows.get(self.rows.key_of(row)) if self.rows.key else None
        if old is None:
            if not self._recopied and self.rows.key and (self._truncated or self.rows.key_of(row) in self._gone):
                self.violations.append(f"{where}: copied row resurrected: {row}")
        elif not self._recopied:
            # The log's earlier records of this row are as new as the copy's view, or newer; then the copy
            # must not be here.
            pairs = enumerate(zip(old, row, strict=True))
            if any(a != b for i, (a, b) in pairs if a is not Unknown.VALUE and i not in self._added):
                self.violations.append(f"{where}: copied row {row} is not what it had become: {old}")
        self._add(row)

    def _add(self, row: RowText) -> bool:
        if self.rows.key:
            self._leaf_of[self.rows.key_of(row)] = self.leaf
        else:
            self._leaves_of[row][self.leaf] += 1
        return self.rows.add(row)

    def _leave(self) -> None:
        """Remove the rows whose newest record names the leaf partition that is gone; it may be attached again."""
        for key in [key for key in self.rows.rows if self._leaf_of[key] == self.leaf]:
            del self.rows.rows[key]
        for row in [row for row in self.rows.bag if self._leaves_of[row][self.leaf]]:
            self.rows.bag[row] -= self._leaves_of[row].pop(self.leaf)
            if not self.rows.bag[row]:
                del self.rows.bag[row]

    def _update(
        self, where: str, row: RowText, unchanged: Sequence[str], before: Mapping[str, str | None] | None
    ) -> None:
        columns = self.rows.columns
        if not self.rows.key:
            if before is None:
                self.violations.append(f"{where}: an update without its old row")
                return
            # A column that came after the old row was written isn't in it.
            old = tuple(before.get(name) for name in columns)
            self._take(where, old)
            self._add(_keep(columns, row, unchanged, old))
            return
        key = self.rows.key_of(row)
        moved = before is not None and any(name in before and before[name] != v for name, v in _zip(self.rows.key, key))
        old_key = key
        if moved:
            assert before is not None
            old_key = tuple(before.get(name, value) for name, value in _zip(self.rows.key, key))
        base = self.rows.rows.pop(old_key, None) if moved else self.rows.rows.get(old_key)
        if base is None and (self._truncated or old_key in self._gone):
            self.violations.append(f"{where}: updates a row that is gone: {old_key}")
        if moved:
            self._gone.add(old_key)
            if key in self.rows.rows:
                self.violations.append(f"{where}: moved to a key where one is: {key}")
        self._add(_keep(columns, row, unchanged, base))

    def _delete(self, where: str, row: RowText) -> None:
        if not self.rows.key:
            self._take(where, row)
            return
        key = self.rows.key_of(row)
        if self.rows.rows.pop(key, None) is None and (self._truncated or key in self._gone):
            self.violations.append(f"{where}: deleted twice: {key}")
        self._gone.add(key)

    def _take(self, where: str, row: RowText) -> None:
        if self.rows.bag[row] < 1:
            self.violations.append(f"{where}: takes away a row that isn't there: {row}")
            return
        leaves = +self._leaves_of[row]
        self._leaves_of[row][self.leaf if self.leaf in leaves else next(iter(leaves))] -= 1
        self.rows.bag[row] -= 1
        if not self.rows.bag[row]:
            del self.rows.bag[row]


def check_order(histories: Mapping[str, str | os.PathLike[str]]) -> list[str]:
    """Return the faults in the numbers of all records of a stream; empty if there are none.

    Every `seq` exists once. For each source, `(commit_lsn, commit_index)` of records that aren't a copy's
    exists once. The indices of a commit run from 0 without gaps. Order by `seq` is the order of commits,
    and inside one table also that of indices.

    Args:
        histories: by name, the folders of all history tables of the stream, `_messages` among them.
    """
    return check_records({name: _numbers(path) for name, path in histories.items()})


def check_records(tables: Mapping[str, pa.Table]) -> list[str]:
    """Check the order of records from Arrow tables; as `check_order`."""
    problems: list[str] = []
    seqs: Counter[int] = Counter()
    places: Counter[tuple[int, int, int]] = Counter()
    commits: dict[tuple[int, int], list[int]] = defaultdict(list)
    stream: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, table in tables.items():
        last: dict[int, tuple[int, int]] = {}
        for record in table.sort_by("__seq").to_pylist():
            seq, source, lsn, index = (record[f"__{c}"] for c in ("seq", "source", "commit_lsn", "commit_index"))
            seqs[seq] += 1
            if record["__op"] == "r" or (record["__op"] in "tx" and index is None):
                # A copy's own: its rows, and the truncate with which a table's second copy begins. Or a leaf partition
                # that a look at the source missed.
                continue
            stream[source].append((seq, lsn, name))
            if index is None:
                if record["__op"] != "m":
                    problems.append(f"{name} seq {seq}: no commit_index")
                continue
            places[source, lsn, index] += 1
            commits[source, lsn].append(index)
            if (lsn, index) <= last.get(source, (-1, -1)):
                problems.append(f"{name} seq {seq}: {(lsn, index)} comes after {last[source]}")
            last[source] = (lsn, index)
    problems += [f"seq {seq} is there {count} times" for seq, count in seqs.items() if count > 1]
    problems += [f"(source, lsn, index) {place} is there {n} times" for place, n in places.items() if n > 1]
    for (source, lsn), indices in commits.items():
        if len(set(indices)) != max(indices) + 1:
            missing = sorted(set(range(max(indices))) - set(indices))
            problems.append(f"commit {lsn} of source {source} lacks indices {missing[:5]} of {max(indices) + 1}")
    for source, records in stream.items():
        records.sort()
        for (_, before, _), (seq, lsn, name) in pairwise(records):
            if lsn < before:
                problems.append(f"{name} seq {seq}: commit {lsn} of source {source} comes after {before}")
    return problems


def check_transactions(
    histories: Mapping[str, str | os.PathLike[str]], expected: Iterable[tuple[int, Events]]
) -> list[str]:
    """Return which transactions are incomplete in the histories; empty if each is there exactly as it was.

    Args:
        histories: by name, the folders of history tables.
        expected: for each transaction its xid and, by a history's name and operation, how many records it
            must have left; other transactions must not be there. Copied rows don't count.
    """
    found: dict[int, Counter[tuple[str, str]]] = defaultdict(Counter)
    for name, path in histories.items():
        for record in _numbers(path).select(["__op", "__xid"]).to_pylist():
            if record["__op"] != "r" and record["__xid"] is not None:
                found[record["__xid"] & _XID_MASK][name, record["__op"]] += 1
    problems = []
    for xid, events in expected:
        wanted = Counter({(name, op): n for name, ops in events.items() if name in histories for op, n in ops.items()})
        there = found.pop(xid & _XID_MASK, Counter())
        if +wanted != there:
            problems.append(f"xid {xid}: lacks {dict(wanted - there)}, has too many {dict(there - wanted)}")
    problems += [f"xid {xid} wasn't expected: {dict(there)}" for xid, there in found.items()]
    return problems


def _numbers(path: str | os.PathLike[str]) -> pa.Table:
    names = ["__op", "__seq", "__source", "__commit_lsn", "__commit_index", "__xid"]
    return read_delta(path, columns=names)


def _keep(columns: Sequence[str], row: RowText, unchanged: Sequence[str], base: RowText | None) -> RowText:
    if not unchanged:
        return row
    old: Sequence[Text] = [Unknown.VALUE] * len(columns) if base is None else base
    return tuple(o if name in unchanged else new for name, new, o in zip(columns, row, old, strict=True))


def _zip(names: Sequence[str], values: RowText) -> Iterable[tuple[str, Any]]:
    return zip(names, values, strict=True)
