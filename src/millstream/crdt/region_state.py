"""Reconciliation: computes what two replicas of a merging table lack of each other, and merges it into each.

A replica's state is its region rows and a *vector*: for each region, the number up to which it has received
everything from that region. Replicas exchange vectors first; then each side sends the rows of each region that are
newer than the other's vector. A row that only one side has is kept. `plan` is the same on both sides, with sides
exchanged. `apply` joins, so it may be repeated, and in any order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.crdt.columns import codes_of, whole_column
from millstream.crdt.declared import INCREMENTS, MergeKind, TableMerge, union_of
from millstream.crdt.lattice import Sealing, StateKind, opened
from millstream.crdt.row_merge import REGION, SEQ, fold, merged, newest_event_ns, own_columns, state_schema
from millstream.errors import MergeStateUnreadable, MillstreamError, PositionError, ReplicationError
from millstream.model.ids import Epoch, GroupNumber, RegionId
from millstream.model.positions import Seq, StreamToken

Vector = Mapping[RegionId, StreamToken]
"""For each region the token of its log up to which everything was received. A region that is missing: nothing."""

_BATCH_ROWS: Final = 65_536
"""Number of rows written at a time."""
_DRY_RUN: Final = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("column", pa.string(), nullable=False),
        pa.field("local", pa.string()),
        pa.field("remote", pa.string()),
        pa.field("merged", pa.string()),
        pa.field("known_to", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class HeardEnd:
    """The last commit group received of a region's log. A log that has this group has the same groups before it."""

    seq: Seq
    """The group's last number."""
    group: GroupNumber
    epoch: Epoch
    wall_ns: int
    """Its hybrid time."""


Ends = Mapping[RegionId, HeardEnd]
"""For regions, the group at which the received part ends; a region whose end isn't known is missing."""


@dataclass(frozen=True, slots=True)
class RegionState:
    """A replica's state of one table."""

    rows: pa.Table
    """Region rows as `row_merge.fold` returns them."""
    vector: Vector = field(default_factory=dict)
    ends: Ends = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "vector", MappingProxyType(dict(sorted(self.vector.items()))))
        object.__setattr__(self, "ends", MappingProxyType(dict(sorted(self.ends.items()))))


@dataclass(frozen=True, slots=True)
class Missing:
    """Rows that one side lacks, and the vector that it has at least once it has them."""

    rows: pa.Table
    vector: Vector
    ends: Ends = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The rows that each side gets."""

    to_local: Missing
    to_remote: Missing

    @property
    def is_empty(self) -> bool:
        """Whether both sides hold the same already."""
        return not (self.to_local.rows.num_rows or self.to_remote.rows.num_rows)

    def turned(self) -> MergePlan:
        """Return the same plan as the other side makes it."""
        return MergePlan(self.to_remote, self.to_local)


@dataclass(frozen=True, slots=True)
class ReconciliationEngine:
    """Reconciles replicas of one table. Pure: any number of callers."""

    key: tuple[str, ...]
    merge: TableMerge
    table: str = "a table"
    """The table's name, for errors."""
    range_rows: int = 262_144
    """Number of rows joined at a time, unless one value of the key's first column has more: a join needs more memory
    than its rows."""

    def plan(self, local: RegionState, remote: RegionState) -> MergePlan:
        """Return what each side lacks of the other.

        Raises:
            ReplicationError (`other_stream`): the sides have received from two different logs of one region.
            ReplicationError (`merge_unsuitable`): a column has types that no one type holds.
        """
        return MergePlan(
            to_local=self.missing(remote, local.vector),
            to_remote=self.missing(local, remote.vector),
        )

    def missing(self, state: RegionState, vector: Vector) -> Missing:
        """Return the part of a state that a side with that vector lacks."""
        held = _greatest(self.table, state.vector, vector)
        regions = whole_column(state.rows.column(REGION.name)).to_numpy()
        seqs = whole_column(state.rows.column(SEQ.name)).to_numpy()
        known = np.zeros(len(seqs), np.int64)
        for region, token in vector.items():
            known[regions == int(region)] = int(token.linear())
        lacks = seqs > known
        # Don't copy the rows if all of them are lacking.
        rows = state.rows if lacks.all() else state.rows.filter(pa.array(lacks))
        return Missing(rows, held, state.ends)

    def apply(self, state: RegionState, missing: Missing) -> RegionState:
        """Return the state joined with what it lacked; a repetition changes nothing."""
        vector = _greatest(self.table, state.vector, missing.vector)
        ends = _latest(state.ends, missing.ends)
        if not missing.rows.num_rows:
            return RegionState(state.rows, vector, ends)
        if not state.rows.num_rows and state.rows.schema.equals(missing.rows.schema):
            return RegionState(missing.rows, vector, ends)
        schema = state_schema(
            union_of(self.table, [own_columns(state.rows.schema), own_columns(missing.rows.schema)]), self.merge
        )
        ranges = self._ranges([widened(rows, schema) for rows in (state.rows, missing.rows)])
        joined = [fold(pa.concat_tables(parts), self.key, self.merge) for parts in ranges]
        return RegionState(pa.concat_tables(joined), vector, ends)

    def _ranges(self, sides: list[pa.Table]) -> Iterator[list[pa.Table]]:
        """Yield region rows of two sides in ranges of keys, in order: no key is in two of them."""
        count = sum(side.num_rows for side in sides) // self.range_rows
        firsts = [side.column(self.key[0]) for side in sides]
        if not count or not all(_is_ascending(first) for first in firsts):
            yield sides
            return
        longest = max(firsts, key=len)
        begin = [0] * len(sides)
        for step in range(1, count + 1):
            value = longest[step * len(longest) // (count + 1)]
            if not value.is_valid:
                break
            end = [_below(first, value) for first in firsts]
            if end > begin:
                yield [side.slice(a, b - a) for side, a, b in zip(sides, begin, end, strict=True)]
                begin = end
        yield [side.slice(a) for side, a in zip(sides, begin, strict=True)]

    def without(self, state: RegionState, region: RegionId, lost: npt.NDArray[np.bool_]) -> RegionState:
        """Return the state as if nothing had been received from a region, without some of its rows.

        Args:
            state: the state before.
            region: the region whose log has changed.
            lost: for each of the state's rows, whether it is removed.
        """
        vector = {one: token for one, token in state.vector.items() if one != region}
        ends = {one: end for one, end in state.ends.items() if one != region}
        return RegionState(state.rows.filter(pa.array(~lost)), vector, ends)

    def value(self, state: RegionState, *, at_ns: int | None = None) -> pa.Table:
        """Return the table that readers see; see `row_merge.merged`."""
        return merged(state.rows, self.key, self.merge, at_ns=at_ns)

    def dry_run(
        self, local: RegionState, remote: RegionState, *, rows_max: int = 10_000, joined: RegionState | None = None
    ) -> pa.Table:
        """Return what reconciling changes: a row for each value that the sides don't share, or that merging changes.

        Args:
            local: one side.
            remote: the other.
            rows_max: limit of the rows.
            joined: the state of both together, if it isn't just their join: it subtracts what both have.

        Returns:
            `key`, `column`, the values as `local` and `remote` have them now and as both will (`merged`), and which
            side has the row (`known_to`: `local`, `remote`, `both`). Rows are ordered by key, then column, at most
            `rows_max` of them. Signals are taken as of one moment.
        """
        joined = joined or self.apply(local, self.plan(local, remote).to_local)
        at_ns = newest_event_ns(joined.rows, self.merge)
        target = joined.rows.schema
        sides = [self.value(RegionState(widened(state.rows, target)), at_ns=at_ns) for state in (local, remote, joined)]
        return self._differences(*sides, rows_max=rows_max)

    def _differences(self, local: pa.Table, remote: pa.Table, both: pa.Table, *, rows_max: int) -> pa.Table:
        sides = (local, remote, both)
        lengths = np.cumsum([side.num_rows for side in sides])[:-1]
        together = [whole_column(pa.concat_tables([s.select([name]) for s in sides]).column(0)) for name in self.key]
        codes = np.split(codes_of(together), lengths) if len(together[0]) else [np.zeros(0, np.int64)] * 3
        # Rows of `both` are all keys, in order.
        places = [np.searchsorted(codes[2], side) for side in codes[:2]]
        at = []
        for place in places:
            index = np.full(both.num_rows, -1, np.int64)
            index[place] = np.arange(len(place))
            at.append(pa.array(index, mask=index < 0))
        names = [name for name in both.column_names if name not in self.key]
        results = [whole_column(both.column(name)) for name in names]
        shown = [
            [whole_column(side.column(name)).take(index) for name in names]
            for side, index in zip(sides, at, strict=False)
        ]
        unknown = [np.asarray(index.is_null()) for index in at]
        changed = [
            ~_equal(shown[0][which], result) | ~_equal(shown[1][which], result) for which, result in enumerate(results)
        ]
        found = np.column_stack([np.zeros((both.num_rows, 0), bool), *changed])
        if names:  # a row that only one side has is listed, even if it has nothing but its key
            found[:, 0] |= (unknown[0] | unknown[1]) & ~found.any(axis=1)
        rows, places_of = (axis[:rows_max] for axis in np.nonzero(found))
        keys = [
            ", ".join(f"{name}={value}" for name, value in key.items())
            for key in both.select(list(self.key)).take(pa.array(rows)).to_pylist()
        ]
        columns: dict[str, list[str | None]] = {"key": [*keys], "column": [names[which] for which in places_of]}
        for title, values in (("local", shown[0]), ("remote", shown[1]), ("merged", results)):
            told: list[str | None] = [None] * len(rows)
            for which, column in enumerate(values):
                lines = np.flatnonzero(places_of == which)
                for at_line, value in zip(lines.tolist(), column.take(pa.array(rows[lines])).to_pylist(), strict=True):
                    told[at_line] = None if value is None else str(value)
            columns[title] = told
        columns["known_to"] = [
            "remote" if not_here else "local" if not_there else "both"
            for not_here, not_there in zip(unknown[0][rows].tolist(), unknown[1][rows].tolist(), strict=True)
        ]
        return pa.table(columns, schema=_DRY_RUN)

    # --- states on disk ------------------------------------------------------------------------------------------------

    def encode(self, state: RegionState) -> bytes:
        """Return a state's bytes: its vector as JSON after its length, then its rows as an Arrow IPC stream."""
        pieces: list[bytes] = []
        self.write(state, pieces.append)
        return b"".join(pieces)

    def write(self, state: RegionState, write: Callable[[bytes], object]) -> None:
        """Write the bytes of `encode` piece by piece: apart from the state itself few of them are in memory."""
        head = self.head(state)
        sealing = Sealing(StateKind.TABLE, write)
        sealing.write(len(head).to_bytes(4, "big") + head)
        with pa.ipc.new_stream(pa.PythonFile(sealing, "w"), state.rows.schema) as stream:
            for begin in range(0, max(state.rows.num_rows, 1), _BATCH_ROWS):
                stream.write_table(state.rows.slice(begin, _BATCH_ROWS).combine_chunks())
        sealing.end()

    def head(self, state: RegionState) -> bytes:
        """Return the JSON in front of a state's rows: what was received, and how the table merges."""
        vector = {str(region): str(token) for region, token in state.vector.items()}
        ends = {str(region): [end.seq, end.group, end.epoch, end.wall_ns] for region, end in state.ends.items()}
        facts = {"vector": vector, "ends": ends, "key": self.key, "merge": _words(self.merge)}
        return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()

    def received(self, head: bytes, rows: pa.Table) -> RegionState | None:
        """Return the state of a `head` and some of its rows; None and errors as `decode`."""
        heard = _received(*_parsed(head), self.key, self.merge)
        return None if heard is None else RegionState(rows, *heard)

    def merges_as(self, head: bytes) -> bool:
        """Return whether each column merges as it did when a `head` was made."""
        return bool(_parsed(head)[0].get("merge") == _words(self.merge))

    def keys_in(self, state: RegionState) -> int:
        """Return the number of rows that `value` returns."""
        columns = [whole_column(state.rows.column(name)) for name in self.key]
        return int(codes_of(columns).max()) + 1 if state.rows.num_rows else 0

    def decode(self, data: bytes | memoryview) -> RegionState | None:
        """Return the state of its bytes, with rows that lie in these bytes.

        Returns None if the state has another key, or keeps for a column something else than the present merge does.

        Raises:
            MergeStateUnreadable: the bytes are damaged.
        """
        heard, rows = _parted(data, self.key, self.merge)
        if heard is None:
            return None
        try:
            return RegionState(pa.ipc.open_stream(pa.py_buffer(rows)).read_all(), *heard)
        except (ValueError, pa.ArrowException) as error:
            raise MergeStateUnreadable(f"the bytes of a table's state make no sense: {error}") from error


def heard_in(data: bytes | memoryview, key: tuple[str, ...], merge: TableMerge) -> tuple[Vector, Ends] | None:
    """Return up to where a state of these bytes has received the regions, and by which groups.

    Returns None and raises as `ReconciliationEngine.decode` does.
    """
    return _parted(data, key, merge)[0]


def vector_of(data: bytes | memoryview) -> Vector:
    """Return a state's vector, whatever the merge of its columns. `MergeStateUnreadable` if the bytes are damaged."""
    return _head_of(data)[1]


def _parted(
    data: bytes | memoryview, key: tuple[str, ...], merge: TableMerge
) -> tuple[tuple[Vector, Ends] | None, memoryview]:
    """Return the vector and ends, and the bytes of the rows; None and those bytes if key or merge differ."""
    head, vector, rows = _head_of(data)
    heard = _received(head, vector, key, merge)
    return (None, memoryview(b"")) if heard is None else (heard, rows)


def _received(
    head: dict[str, Any], vector: Vector, key: tuple[str, ...], merge: TableMerge
) -> tuple[Vector, Ends] | None:
    """Return the vector and ends in a head; None if key or merge differ."""
    try:
        is_other = tuple(head["key"]) != key or _remembered(head["merge"]) != _remembered(_words(merge))
        ends = {
            RegionId(int(region)): HeardEnd(Seq(int(seq)), GroupNumber(int(group)), Epoch(int(epoch)), int(wall_ns))
            for region, (seq, group, epoch, wall_ns) in head.get("ends", {}).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise MergeStateUnreadable(f"the bytes of a table's state make no sense: {error}") from error
    return None if is_other else (vector, ends)


def table_in(data: bytes | memoryview) -> tuple[tuple[str, ...], pa.Schema]:
    """Return the key and the columns of a state's table. `MergeStateUnreadable` if the bytes are damaged."""
    head, _, rows = _head_of(data)
    try:
        key = tuple(str(name) for name in head["key"])
        return key, own_columns(pa.ipc.open_stream(pa.py_buffer(rows)).schema)
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise MergeStateUnreadable(f"the bytes of a table's state make no sense: {error}") from error


def _head_of(data: bytes | memoryview) -> tuple[dict[str, Any], Vector, memoryview]:
    """Return the head in front of a state's rows, its vector, and the rows' bytes."""
    body = opened(StateKind.TABLE, data)
    size = int.from_bytes(body[:4], "big")
    return *_parsed(bytes(body[4 : 4 + size])), body[4 + size :]


def _parsed(text: bytes) -> tuple[dict[str, Any], Vector]:
    """Return a head and its vector. `MergeStateUnreadable` if it is damaged."""
    try:
        head = json.loads(text)
        vector = {RegionId(int(region)): StreamToken.parse(token) for region, token in head["vector"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, PositionError) as error:
        raise MergeStateUnreadable(f"the bytes of a table's state make no sense: {error}") from error
    return head, vector


def _remembered(words: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return the merge of each column whose state is more than its newest value.

    The merges of others may change freely.
    """
    return {name: list(how) for name, how in words.items() if how[0] in _REMEMBERING or how[0].endswith(INCREMENTS)}


_REMEMBERING: Final = frozenset({MergeKind.G_COUNTER, MergeKind.UNION_SET, MergeKind.HIDE, MergeKind.SIGNAL})


def widened(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return region rows in the columns of another version; a column that they lack is null, or the empty state."""
    columns = []
    for one in schema:
        at = rows.schema.get_field_index(one.name)
        if at >= 0:
            column = rows.column(at)
            columns.append(column if column.type.equals(one.type) else column.cast(one.type))
        elif not one.nullable:
            columns.append(pa.chunked_array([pa.array(np.zeros(rows.num_rows, np.int64))], one.type))
        else:
            columns.append(pa.chunked_array([pa.nulls(rows.num_rows, one.type)], one.type))
    return pa.table(columns, schema=schema)


def _greatest(table: str, one: Vector, other: Vector) -> Vector:
    """Return each region's later token. `ReplicationError` (`other_stream`) if a region has two logs: an operator's error, not the data's."""
    found = dict(one)
    for region, token in other.items():
        held = found.get(region)
        try:
            found[region] = token if held is None else held.join(token)
        except MillstreamError as error:
            raise ReplicationError(
                f"{table}: region {region} has two logs, {held} and {token}",
                code="other_stream",
                hint="Run `millstream reconcile`: it drops what was merged from the earlier log, and keeps the other regions' rows.",
                region=int(region),
            ) from error
    return dict(sorted(found.items()))


def _latest(one: Ends, other: Ends) -> Ends:
    """Return each region's later end."""
    return {
        region: max((ends[region] for ends in (one, other) if region in ends), key=lambda end: (end.seq, end.group))
        for region in one.keys() | other.keys()
    }


def _is_ascending(column: pa.ChunkedArray) -> bool:
    """Return whether values are in order, nulls last. Values that don't compare (NaN) aren't."""
    valid = column.drop_null()
    if len(column) < 2 or column.slice(len(valid)).null_count != column.null_count:
        return len(column) < 2
    return bool(pc.all(pc.less_equal(valid.slice(0, len(valid) - 1), valid.slice(1))).as_py())


def _below(column: pa.ChunkedArray, value: pa.Scalar) -> int:
    """Return how many values of an ascending column are less than `value`."""
    least, most = 0, len(column) - column.null_count
    while least < most:
        middle = (least + most) // 2
        if pc.less(column[middle], value).as_py():
            least = middle + 1
        else:
            most = middle
    return least


def behind(vector: Vector, region: RegionId) -> Seq:
    """Return the number up to which a vector has received a region."""
    token = vector.get(region)
    return Seq(0) if token is None else token.linear()


def _equal(one: pa.Array, other: pa.Array) -> npt.NDArray[np.bool_]:
    """Return a mask of equal values; two nulls are equal, and two NaNs."""
    if pa.types.is_list(one.type):
        return _equal_lists(one, other)
    same = pc.fill_null(pc.equal(one, other), False)
    same = pc.or_(same, pc.and_(pc.is_null(one, nan_is_null=True), pc.is_null(other, nan_is_null=True)))
    return np.asarray(pc.and_(same, pc.equal(pc.is_null(one), pc.is_null(other))))


def _equal_lists(one: pa.Array, other: pa.Array) -> npt.NDArray[np.bool_]:
    same = _equal(pc.list_value_length(one), pc.list_value_length(other))
    at = np.flatnonzero(same & np.asarray(one.is_valid()))
    here, there = one.take(pa.array(at)), other.take(pa.array(at))
    items = _equal(pc.list_flatten(here), pc.list_flatten(there))
    same[at[pc.list_parent_indices(here).to_numpy()[~items]]] = False
    return same


def _words(merge: TableMerge) -> dict[str, list[Any]]:
    return {name: [how.word, how.half_life_ns, how.at] for name, how in sorted(merge.columns.items())}
