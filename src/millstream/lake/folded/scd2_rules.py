"""SCD2: the effect of a run of records on the versions of a table's rows. Pure, except for looking up open versions.

A *version* is a stretch of time over which a row held the same values, as committed transactions left it:

- Only the final effect of a transaction counts: of several changes of a row in one transaction, the last one. A
  transaction after which the row is as before begins nothing. An update that changes no value begins nothing
  either.
- A version ends when the row's next one begins, when the row is deleted or gets another key, or when the table is
  truncated. A key change begins a version under the new key.
- Times are the transactions' commit times, each raised to the greatest one before it in the table. Commit times may
  step back (clocks are set, and a transaction's time is taken before its place in the WAL), but versions of a row
  must not overlap. So two transactions may have one time; a version between them exists and has no length.
- A copied row (`r`) equal to its open version changes nothing. A different one begins a version at the moment of
  the copy.
- A copy that follows an earlier one begins with a marker (a `t` without an index in a transaction): from there on
  open versions are unconfirmed. A version that no copied row, update or deletion behind the marker confirms is
  closed at the marker's time: the row was deleted while nothing was captured.
- A partition that leaves (`x`) ends the versions of rows whose newest record names it. An open version keeps the
  partition of its row's newest record, also if that record changed no value.
- If an application adds to a column, a version whose total is beyond the column's type has null there. A run that ends
  with such a total fails, until later increments bring it back.
- An update may leave columns out whose values aren't known anywhere: while a table is copied, it may come before
  the copy of its row. Such an update begins nothing: the copied row does.

Runs end at cuts, which split no transaction, and not inside a copy that began with a marker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import LakeError
from millstream.lake.column_conversion import EXACT, conform
from millstream.lake.folded.accumulating import accumulated
from millstream.lake.folded.current_rules import RecordRun, in_order, op_codes
from millstream.lake.folded.left_partitions import NEVER, UNKNOWN, LeftPartitions, partitions_of
from millstream.lake.folded.unchanged_values import LiveRow, RowSources, materialize
from millstream.lake.row_identity import Codes, Keys, concat_keys, first_of_each, key_codes
from millstream.model.positions import Seq
from millstream.model.records import INSTANT, PARTITION_OID, RECORD_PREFIX, Op
from millstream.model.schema import TableSchema

VALID_FROM: Final = pa.field("valid_from", INSTANT, nullable=False)
VALID_TO: Final = pa.field("valid_to", INSTANT)
IS_CURRENT: Final = pa.field("is_current", pa.bool_(), nullable=False)
BEGAN_BY: Final = pa.field("__seq", pa.int64(), nullable=False)
OPEN_FOLDER: Final = f"{IS_CURRENT.name}=true"
ENDED_FOLDER: Final = f"{IS_CURRENT.name}=false"
"""The partition of ended versions; the table of versions is partitioned."""
VERSION_COLUMNS: Final = (VALID_FROM, VALID_TO, IS_CURRENT, BEGAN_BY)

Indexes = npt.NDArray[np.int64]
Times = npt.NDArray[np.int64]
"""Microseconds since 1970."""
Lookup = Callable[[Keys], pa.Table]
"""Returns open versions (the table's columns, `__exact`, `valid_from`, `__seq`), at least all those with one of the
keys."""

_UNKNOWN: Final = int(np.iinfo(np.int64).min)
_OPEN: Final = _UNKNOWN
"""In place of a time: the version hasn't ended."""
_FAR: Final = NEVER
"""In place of a time: it isn't reached."""
_ABSENT: Final = -1
"""In place of a row: the key has none."""
_OPEN_PLACE: Final = -2
"""In place of a record's index: open before the run …"""
_BEFORE: Final = -1
"""… and between that and the first record."""


@dataclass(frozen=True, slots=True)
class Versions:
    """The effect of a run of records on the versions.

    Rows have the table's columns, `__exact` and `VERSION_COLUMNS`.
    """

    closed: pa.Table
    """Versions that have ended: to append."""
    opened: pa.Table
    """Versions that have begun and not ended: to insert."""
    gone: Keys
    """Keys whose open version from before the run is to be deleted. It has ended and is among `closed`, or its row has
    another partition and it is among `opened`."""
    kept: Keys
    """Keys whose open version from before the run stays open."""
    rest_closed_us: int | None
    """If given, all open versions from before the run, except those of `gone` and `kept`, end then, µs since 1970."""
    left_us: tuple[tuple[int, int], ...]
    """By OID, the times at which partitions leave, µs since 1970: likewise for the open versions in them."""
    clock_us: int | None
    """The greatest time so far, for the next run; None if there was none."""
    records: int
    """Number of records in the run."""

    @classmethod
    def unchanged(cls, columns: pa.Schema, key: Sequence[str]) -> Self:
        """Return the effect of no record on versions with these columns and this key."""
        none = pa.schema([*columns, EXACT, *VERSION_COLUMNS]).empty_table()
        keys = Keys.of(none, key)
        return cls(none, none, keys, keys, None, (), None, 0)

    @property
    def ends_others(self) -> bool:
        """Whether open versions from before the run may end whose keys the run doesn't have."""
        return self.rest_closed_us is not None or bool(self.left_us)

    def ends_of(self, rows: pa.Table) -> pa.Array:
        """Return, for open versions that are neither of `gone` nor of `kept`, when they end; null if they don't."""
        rest = _FAR if self.rest_closed_us is None else self.rest_closed_us
        ends = np.full(rows.num_rows, rest, np.int64)
        oids = partitions_of(rows)
        for oid, time_us in self.left_us:
            ends[oids == oid] = min(rest, time_us)
        return pa.array(ends, mask=ends == _FAR).cast(INSTANT)


def fold_versions(
    tail: pa.Table,
    schema: TableSchema,
    columns: pa.Schema,
    lookup: Lookup,
    *,
    clock_us: int | None = None,
    anew: bool = False,
    whole: bool = True,
) -> Versions:
    """Fold records into versions.

    Args:
        tail: history's records (`version_inputs`), at least one, any order, whole transactions; columns missing from
            it are null.
        schema: the table's newest schema; it has a key.
        lookup: called at most once.
        clock_us: `Versions.clock_us` of the previous run; None for a table's first.
        `anew`: whether the table was dropped and created again before the first record: open versions are closed at
            its time.
        whole: False if the table's first copy continues behind the run, so that unknown values may still come.

    Raises:
        LakeError: a record leaves a column unchanged, and the lake holds no earlier row of it.
        InvalidValue: at the end of the run, a counter's total is beyond its type.
    """
    assert schema.key, "only rows with a key have versions"
    tail = in_order(tail)
    ops = op_codes(tail)
    order = _order(tail, ops, clock_us, anew=anew)
    at = np.flatnonzero(np.isin(ops, np.frombuffer(b"curd", np.uint8)))
    rows = tail.take(pa.array(at))
    run = RecordRun(rows, ops[at], conform(rows, pa.schema([*columns, EXACT])), schema, truncated=False)
    met = _meet(run, lookup, pa.schema([*columns, EXACT, VALID_FROM, BEGAN_BY]))
    run = accumulated(run, met.open_rows)
    filled, unknown = _fill(run, met, at, order)
    events = _events(run, met, at, order, unknown)
    if whole:
        _check_known(run, met, at, order, events, unknown)
    return _versions(run, met, order, events, filled)


def version_inputs(columns: pa.Schema) -> list[str]:
    """Return the columns of history that a fold reads."""
    placed = ["__op", "__seq", "__source", "__commit_lsn", "__commit_index", "__commit_ts"]
    return [*placed, "__unchanged", EXACT.name, "__before", *columns.names]


def copy_of(rows: pa.Table, after: Seq, n: Seq, moment: datetime) -> pa.Table:
    """Return rows (the table's columns and `__exact`) as records of a later copy, between two positions."""
    count = rows.num_rows + 1
    facts = {
        "__op": pa.array(["t", *["r"] * rows.num_rows]),
        "__seq": pa.array([int(after), *[int(n)] * rows.num_rows], pa.int64()),
        "__commit_ts": pa.array([moment] * count, INSTANT),
    }
    of_record = {column.name: pa.nulls(count, column.type) for column in RECORD_PREFIX} | facts
    plain = pa.schema([pa.field(column.name, column.type) for column in rows.schema])
    marker = pa.table({column.name: pa.nulls(1, column.type) for column in plain}, schema=plain)
    own = pa.concat_tables([marker, rows.cast(plain)])
    return pa.table(of_record | {name: own.column(name) for name in plain.names})


@dataclass(frozen=True, slots=True)
class _Order:
    """The places of a run's records in time, in transactions, and behind records that clear the table.

    By index in the run.
    """

    times: Times
    transactions: Indexes
    """Ascending numbers."""
    clears: Indexes
    """Indexes of truncates; `_BEFORE` if the table was created again."""
    left: LeftPartitions
    """The partitions that leave, by index."""
    markers: Indexes
    """Indexes at which a copy that follows an earlier one begins."""
    seqs: Indexes
    clock_us: int | None
    """The time of the last record; None if no record of the source had one."""

    def time_at(self, places: Indexes) -> Times:
        """Return the times of some indexes; for `_BEFORE` the first record's."""
        return self.times[np.maximum(places, 0)]


def _order(tail: pa.Table, ops: npt.NDArray[np.uint8], clock_us: int | None, *, anew: bool) -> _Order:
    index = tail.column("__commit_index")
    alone = np.asarray(index.combine_chunks().is_null())
    marker = (ops == ord("t")) & alone
    clears = np.flatnonzero((ops == ord("t")) & ~marker)
    seen = (ops == Op.PARTITION_LEFT) & alone
    own = marker | seen | (ops == ord("r"))
    starts = own.copy()
    starts[:1] = True
    starts[1:] |= own[:-1]
    for name in ("__source", "__commit_lsn"):
        column = tail.column(name).combine_chunks()
        values = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
        starts[1:] |= values[1:] != values[:-1]
        starts |= np.asarray(column.is_null())
    times, clock = _times(tail, marker, clock_us)
    return _Order(
        times=times,
        transactions=np.cumsum(starts),
        clears=np.concatenate([np.full(int(anew), _BEFORE, np.int64), clears]),
        left=LeftPartitions.of(tail, ops, np.arange(len(ops))),
        markers=np.flatnonzero(marker),
        seqs=tail.column("__seq").to_numpy(),
        clock_us=clock,
    )


def _times(tail: pa.Table, marker: npt.NDArray[np.bool_], clock_us: int | None) -> tuple[Times, int | None]:
    """Return the records' times, none below the previous one, and the last of them."""
    committed = tail.column("__commit_ts").combine_chunks()
    moments = pc.coalesce(committed.cast(INSTANT).cast(pa.int64()), pa.scalar(_UNKNOWN, pa.int64()))
    times = np.array(moments.to_numpy(zero_copy_only=False), np.int64)
    # A marker's own time is from this machine's clock, not the source's: it gets the time before it, if there is one.
    judged = np.where(marker, _UNKNOWN, times)
    judged[0] = max(int(judged[0]), _UNKNOWN if clock_us is None else clock_us)
    running = np.maximum.accumulate(judged)
    last = int(running[-1])
    told = np.where(running == _UNKNOWN, np.where(times == _UNKNOWN, 0, times), running)
    return told, None if last == _UNKNOWN else last


@dataclass(frozen=True, slots=True)
class _Met:
    """The keys of a run, and their open versions from before it."""

    new: Codes
    """The key of each record."""
    old: Codes
    """The key that each record's row had before."""
    open_codes: Codes
    open_keys: Keys
    open_rows: pa.Table


def _meet(run: RecordRun, lookup: Lookup, shape: pa.Schema) -> _Met:
    key = run.schema.key
    new_keys = Keys.of(run.values, key)
    at, old_keys = run.old(key)
    both = concat_keys(new_keys, old_keys)
    found = shape.empty_table()
    if len(both):
        codes = key_codes([both])[0]
        distinct = first_of_each(codes)
        found = conform(lookup(both.take(distinct)), shape)
    found_keys = Keys.of(found, key)
    new, old_some, open_codes = key_codes([new_keys, old_keys, found_keys])
    old = new.copy()
    old[at] = old_some
    mine = np.flatnonzero(np.isin(open_codes, np.union1d(new, old)))
    return _Met(new, old, open_codes[mine], found_keys.take(mine), found.take(pa.array(mine)))


def _fill(run: RecordRun, met: _Met, at: Indexes, order: _Order) -> tuple[dict[int, LiveRow], npt.NDArray[np.bool_]]:
    """Return the sources of records' unchanged columns, by record, and the records whose sources aren't known."""
    states: dict[int, LiveRow] = {}
    unknown = np.zeros(len(run.ops), bool)
    sparse, names = run.unchanged()
    if not len(sparse):
        return states, unknown
    left_out = dict(zip(sparse.tolist(), names, strict=True))
    walked = np.union1d(met.new[sparse], met.old[sparse])
    slow = np.flatnonzero(np.isin(met.new, walked) | np.isin(met.old, walked))
    live: dict[int, LiveRow | None] = {int(code): LiveRow(-1 - row) for row, code in enumerate(met.open_codes.tolist())}
    ends = _ends(run, met, at, order)
    cleared = np.searchsorted(order.clears, at)
    before = 0
    for record in slow.tolist():
        if cleared[record] > before:
            live, before = {}, int(cleared[record])
        key, origin = int(met.new[record]), int(met.old[record])
        if run.ops[record] == ord("d"):
            live[key] = None
            continue
        state = LiveRow(record)
        if record in left_out:
            past = live.get(origin)
            if past is not None and ends[past.base if past.base >= 0 else len(at) - 1 - past.base] < at[record]:
                past = None
            for name in left_out[record]:
                state.filled[name] = _UNKNOWN if past is None else past.filled.get(name, past.base)
            states[record] = state
            unknown[record] = _UNKNOWN in state.filled.values()
        if origin != key:
            live[origin] = None
        live[key] = state
    return states, unknown


def _ends(run: RecordRun, met: _Met, at: Indexes, order: _Order) -> Indexes:
    """Return, for each record and then each open version, the index at which its partition leaves next."""
    oids = np.concatenate([partitions_of(run.values), partitions_of(met.open_rows)])
    return order.left.next_after(oids, np.concatenate([at, np.full(len(met.open_codes), _OPEN_PLACE, np.int64)]))


@dataclass(frozen=True, slots=True)
class _Events:
    """Events of keys, by key and then in order: a row was put there, or deleted."""

    codes: Codes
    places: Indexes
    """Indexes in the run; `_BEFORE` and `_OPEN_PLACE` come before it."""
    rows: Indexes
    """Index of a record in the run's rows, or behind them of an open version from before; or `_ABSENT`."""

    @classmethod
    def sorted(cls, codes: Codes, places: Indexes, rows: Indexes) -> _Events:
        by = np.lexsort((places, codes))
        return cls(codes[by], places[by], rows[by])

    def filter(self, wanted: npt.NDArray[np.bool_]) -> _Events:
        return _Events(self.codes[wanted], self.places[wanted], self.rows[wanted])

    @property
    def first(self) -> npt.NDArray[np.bool_]:
        """Which events are their key's first."""
        first = np.ones(len(self.codes), bool)
        first[1:] = self.codes[1:] != self.codes[:-1]
        return first

    @property
    def last(self) -> npt.NDArray[np.bool_]:
        """Which events are their key's last."""
        return np.append(self.first[1:], True)[: len(self.codes)]

    @property
    def until(self) -> Indexes:
        """The place of the next event of each one's key; `NEVER` if there is none."""
        return np.where(self.last, NEVER, np.append(self.places[1:], 0)[: len(self.codes)])


def _events(run: RecordRun, met: _Met, at: Indexes, order: _Order, unknown: npt.NDArray[np.bool_]) -> _Events:
    count = len(run.ops)
    puts = np.flatnonzero((run.ops != ord("d")) & ~unknown)
    deletes = np.flatnonzero(run.ops == ord("d"))
    moved = np.flatnonzero(met.old != met.new)
    open_rows = np.arange(len(met.open_codes), dtype=np.int64)
    codes = np.concatenate([met.open_codes, met.new[puts], met.new[deletes], met.old[moved]])
    before = np.full(len(open_rows), _OPEN_PLACE, np.int64)
    places = np.concatenate([before, at[puts], at[deletes], at[moved]])
    rows = np.full(len(codes), _ABSENT, np.int64)
    rows[: len(open_rows) + len(puts)] = np.concatenate([count + open_rows, puts])
    # A record that clears the table deletes every existing row: one event behind each put, not one a key.
    behind = np.searchsorted(order.clears, places, "right")
    cleared = np.flatnonzero((rows != _ABSENT) & (behind < len(order.clears)))
    events = _Events.sorted(
        np.concatenate([codes, codes[cleared]]),
        np.concatenate([places, order.clears[behind[cleared]]]),
        np.concatenate([rows, np.full(len(cleared), _ABSENT, np.int64)]),
    )
    if len(order.left):
        events = _with_left(events, _ends(run, met, at, order))
    return events if not len(order.markers) else _with_markers(events, order, _births(run, met))


def _with_left(events: _Events, ends: Indexes) -> _Events:
    """Add deletions of rows whose partition leaves before their key's next event; `ends` is by an event's row."""
    gone = np.flatnonzero(events.rows != _ABSENT)
    places = ends[events.rows[gone]]
    leaves = places < events.until[gone]
    gone, places = gone[leaves], places[leaves]
    return _Events.sorted(
        np.concatenate([events.codes, events.codes[gone]]),
        np.concatenate([events.places, places]),
        np.concatenate([events.rows, np.full(len(gone), _ABSENT, np.int64)]),
    )


def _births(run: RecordRun, met: _Met) -> npt.NDArray[np.bool_]:
    """Return, by an event's row, whether its record shows that no row was there before."""
    births = np.zeros(len(run.ops) + len(met.open_codes), bool)
    births[: len(run.ops)] = (run.ops == ord("c")) | (met.old != met.new)
    return births


def _with_markers(events: _Events, order: _Order, births: npt.NDArray[np.bool_]) -> _Events:
    """Add deletions of rows that a copy didn't find.

    Behind the copy's marker, their key has nothing, a truncate, the end of their partition, or a new row.
    """
    markers = order.markers
    here = events.rows != _ABSENT
    marker = np.searchsorted(markers, events.places, "right")
    follower = np.append(events.rows[1:], _ABSENT)[: len(events.rows)]
    until = events.until
    emptied = np.concatenate([order.clears, order.left.places])
    reborn = events.last | np.isin(until, emptied) | ((follower != _ABSENT) & births[follower])
    missing = np.flatnonzero(here & reborn & (marker < len(markers)))
    missing = missing[markers[marker[missing]] < until[missing]]
    return _Events.sorted(
        np.concatenate([events.codes, events.codes[missing]]),
        np.concatenate([events.places, markers[marker[missing]]]),
        np.concatenate([events.rows, np.full(len(missing), _ABSENT, np.int64)]),
    )


def _check_known(
    run: RecordRun, met: _Met, at: Indexes, order: _Order, events: _Events, unknown: npt.NDArray[np.bool_]
) -> None:
    """Raise if a row exists at the end whose values are unknown.

    Records before a copy needn't be known, because the copy brings the row, which may have had another key.
    """
    settled = max([_BEFORE, *order.clears[-1:].tolist(), *order.markers[-1:].tolist()])
    for record in np.flatnonzero(unknown).tolist():
        last = int(np.searchsorted(events.codes, met.new[record], "right")) - 1
        known = last >= 0 and events.codes[last] == met.new[record] and events.places[last] > at[record]
        if known or settled > at[record]:
            continue
        facts = Keys.of(run.values, run.schema.key).take(np.array([record], np.int64)).to_table().to_pylist()[0]
        raise LakeError(
            f"an update of row {facts} leaves columns unchanged, and the lake holds no earlier state of the row"
        )


def _versions(run: RecordRun, met: _Met, order: _Order, events: _Events, filled: dict[int, LiveRow]) -> Versions:
    count = len(run.ops)
    transactions = np.concatenate([order.transactions, [_OPEN_PLACE, _BEFORE]])[events.places]
    ends = np.append((events.codes[1:] != events.codes[:-1]) | (transactions[1:] != transactions[:-1]), True)
    story = events.filter(ends[: len(events.codes)])
    rows, place_of = _rows(run, met, story.rows, filled)
    changes = _changes(story, rows, place_of)
    newest = _newest_partitions(story, changes, rows, place_of)
    story = story.filter(changes)

    # A version lasts until the next change of its key.
    began = story.rows >= 0
    until = np.full(len(story.codes), _OPEN, np.int64)
    until[:-1] = np.where(story.last[:-1], _OPEN, order.time_at(story.places[1:]))

    at = np.flatnonzero(began)
    from_before = story.rows[at] >= count
    held = story.rows[at][from_before] - count
    valid_from, seqs = order.time_at(story.places[at]), np.zeros(len(at), np.int64)
    own = np.maximum(story.places[at], 0)
    seqs[:] = order.seqs[own] if len(order.seqs) else 0
    valid_from[from_before] = met.open_rows.column(VALID_FROM.name).cast(pa.int64()).to_numpy()[held]
    seqs[from_before] = met.open_rows.column(BEGAN_BY.name).to_numpy()[held]
    until = until[at]
    ended = until != _OPEN
    made = _told(rows.take(pa.array(place_of[story.rows[at]])), valid_from, until, seqs)
    moved = np.zeros(len(at), bool)
    if newest is not None:
        oids = newest[began]
        moved = from_before & (oids != partitions_of(made))
        place = made.schema.get_field_index(PARTITION_OID.name)
        made = made.set_column(place, made.field(place), pa.array(oids, PARTITION_OID.type, mask=oids == UNKNOWN))
    went = np.zeros(len(met.open_codes), bool)
    went[held] = (ended | moved)[from_before]
    clears, markers = order.clears, order.markers
    rest = np.sort(np.concatenate([clears[:1], markers[:1]]))[:1]
    return Versions(
        closed=made.filter(pa.array(ended)),
        opened=made.filter(pa.array(~ended & (~from_before | moved))),
        gone=met.open_keys.take(np.flatnonzero(went)),
        kept=met.open_keys.take(np.flatnonzero(~went)),
        rest_closed_us=int(order.time_at(rest)[0]) if len(rest) else None,
        left_us=tuple((oid, int(order.times[place])) for oid, place in order.left.first),
        clock_us=order.clock_us,
        records=len(order.times),
    )


def _rows(run: RecordRun, met: _Met, wanted: Indexes, filled: dict[int, LiveRow]) -> tuple[pa.Table, Indexes]:
    """Return the whole rows of some events, and their indexes there, by the events' numbers."""
    count = len(run.ops)
    used = np.zeros(count, bool)
    used[wanted[(wanted >= 0) & (wanted < count)]] = True
    records = np.flatnonzero(used)
    walked = np.isin(records, np.fromiter(filled, np.int64, len(filled)))
    plan = RowSources(records[~walked], [filled[r] for r in records[walked].tolist()], None, met.open_keys)
    past = met.open_rows.select([*run.values.column_names])
    made = materialize(run.values, plan, past if len(past) else None)
    place_of = np.full(count + len(met.open_codes), -1, np.int64)
    place_of[np.concatenate([records[~walked], records[walked]])] = np.arange(len(records))
    place_of[count:] = len(records) + np.arange(len(met.open_codes))
    return pa.concat_tables([made, past]), place_of


def _changes(story: _Events, rows: pa.Table, place_of: Indexes) -> npt.NDArray[np.bool_]:
    """Return which events changed their key's row; a key's first event had no row before it."""
    before = np.where(story.first, _ABSENT, np.roll(story.rows, 1))
    differ = (story.rows >= 0) | (before >= 0)
    pairs = np.flatnonzero((story.rows >= 0) & (before >= 0))
    if len(pairs):
        one, other = place_of[story.rows[pairs]], place_of[before[pairs]]
        used = np.zeros(rows.num_rows, bool)
        used[one] = used[other] = True
        rank = np.cumsum(used) - 1
        some = rows.filter(pa.array(used))
        names = [name for name in rows.column_names if name not in {EXACT.name, PARTITION_OID.name}]
        codes = key_codes([Keys.of(some, names)], signed_zero=True)[0]
        differ[pairs] = codes[rank[one]] != codes[rank[other]]
    return differ


def _newest_partitions(
    story: _Events, changes: npt.NDArray[np.bool_], rows: pa.Table, place_of: Indexes
) -> Indexes | None:
    """Return, for each event that changes its key's row, the partition of the last record that put the row so.

    None if the table isn't partitioned.
    """
    if PARTITION_OID.name not in rows.column_names:
        return None
    puts = np.flatnonzero(story.rows != _ABSENT)
    stretch = np.cumsum(changes) - 1
    newest = np.full(int(changes.sum()), UNKNOWN, np.int64)
    newest[stretch[puts]] = partitions_of(rows)[place_of[story.rows[puts]]]
    return newest


def _told(rows: pa.Table, valid_from: Times, until: Times, seqs: Indexes) -> pa.Table:
    """Return rows with the version columns."""
    is_open = until == _OPEN
    told = [
        pa.array(valid_from).cast(INSTANT),
        pa.array(until, mask=is_open).cast(INSTANT),
        pa.array(is_open),
        pa.array(seqs),
    ]
    for field, column in zip(VERSION_COLUMNS, told, strict=True):
        rows = rows.append_column(field, column)
    return rows
