"""Reading the log for one consumer: its tables' records in commit order, those that `where` matches, as messages.

A message's position is a number of its operation's range, though not always its record's own: numbers go from table to
table within an operation, and messages go in commit order. So the operation's numbers are given to its messages in that
order; those of a group of several frames by their offsets (`large_groups`). On a log of several shards, the records of a
transaction are in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.delivery.definition import NO_GROUPS, Definition, Selection
from millstream.delivery.records.gathered_frames import PIECE_FRAMES, PIECE_ROWS, Frames
from millstream.delivery.records.groups import groups_of
from millstream.delivery.records.large_groups import LargeGroup, LargeGroups
from millstream.delivery.records.latest import OLD
from millstream.delivery.records.record_messages import BARRIERS, KnownRow, Origin, newest_messages, row_of, size_of
from millstream.delivery.records.record_texts import record_texts
from millstream.delivery.records.where_filter import selected
from millstream.delivery.sinks import LoggedRow
from millstream.errors import CorruptWal, MillstreamError
from millstream.lake.filled_columns import filled_records
from millstream.model.ids import Epoch, SchemaVersion, ShardId, TableId
from millstream.model.positions import Offset, Seq
from millstream.model.records import PARTITION_OID, Op
from millstream.model.schema import TableKind, TableSchema
from millstream.protocol.delivery.messages import Kind, Message, position_of
from millstream.wal.reader import StreamReader, TableRecords
from millstream.wal.reading.table_records import filtered, joined
from millstream.wal.records_json import indexes_of, merge_shards, operations_of, table_lines

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Key = tuple[str, int | None]
"""The group of a message of kind `latest`, and the partition of its row; see `Message.leaf`."""
Emptied = tuple[int, int | None]
"""A table that was truncated, with None, or with the partition of it that left."""


_as_message: Final[Callable[[Iterable[Any]], Message]] = partial(tuple.__new__, Message)
_as_origin: Final[Callable[[Iterable[Any]], Origin]] = partial(tuple.__new__, Origin)
_as_row: Final[Callable[[Iterable[Any]], LoggedRow]] = partial(tuple.__new__, LoggedRow)
"""Return a tuple of all its fields; the class takes twice the time."""


class _Item(msgspec.Struct, gc=False):
    """A record on its way: with the keys by which shards are merged, and its message if the consumer receives it."""

    operation_seq: Seq
    index: int
    operation: tuple[Any, ...]
    seq: int
    """A number of the operation's range."""
    end: int
    """The greatest number of the operation's records that were read with this one."""
    message: tuple[Any, ...] | None
    """The fields of its message behind `position` and `before`."""
    second: tuple[Any, ...] | None = None
    """Those of the new key's message, if a change of a key gives two."""


class Earlier(NamedTuple):
    """An earlier selection. Messages that were delivered keep their positions, which depend on the tables."""

    upto: int
    """The `seq` at the end of the last operation whose records are counted by the earlier tables."""
    known_upto: int
    """The `seq` of the last record that was delivered or settled; the definition after this one selects the next ones."""
    selection: Selection


class _Piece(NamedTuple):
    """Some records, in order."""

    operation: tuple[Any, ...] | None
    """That of the first records, if they may belong to the last operation of the piece before."""
    items: list[_Item]


class _Numbers(NamedTuple):
    """Numbers of the records of a part, by row."""

    offsets: Ints
    seqs: Ints
    ends: Ints
    operations: Ints
    """The first number of each record's operation; of a large group, that of the group."""

    def of_rows(self, rows: slice | Bools) -> _Numbers:
        return _Numbers(*(array[rows] for array in self))


class _Kept(NamedTuple):
    """The records of a part that a definition selects."""

    records: TableRecords
    numbers: _Numbers
    is_gone: Bools
    """Whether a record's row is gone for the consumer; see `selected`."""
    definition: Definition


class _Found:
    """Records that were found in one or several frames, and aren't messages so far."""

    def __init__(self) -> None:
        self.operation: tuple[Any, ...] | None = None
        """See `_Piece`."""
        self.frames = 0
        self.kept: list[_Kept] = []
        self.unkept: list[tuple[int, _Item]] = []
        """Offsets and records that are left out."""

    @property
    def is_enough(self) -> bool:
        """Whether they are worth the cost of a batch, or took long to find."""
        rows = sum(one.records.batch.num_rows for one in self.kept)
        return rows >= PIECE_ROWS or self.frames >= PIECE_FRAMES


class Step(NamedTuple):
    """Some messages, and how far they were read."""

    messages: list[Message]
    upto: int
    """The `seq` at the end of the last operation that was read whole."""
    seen: int
    """The greatest `seq` of the records that were read."""


class ConsumerReader:
    """Reads the log for one consumer.

    Args:
        stream: the stream's name, for ids and records.
        reader: the log; no other thread may use it at the same time.
        definition: the consumer's.
        earlier: the consumer's earlier selections, the oldest first.

    Concurrency: none; the caller serialises.
    """

    def __init__(
        self, stream: str, reader: StreamReader, definition: Definition, earlier: Iterable[Earlier] = ()
    ) -> None:
        self._stream = stream
        self._reader = reader
        self._newest = self._definition = definition
        """The definition whose tables count the records that are being read is `_definition`."""
        self._earlier = [(one, replace(definition, **one.selection._asdict())) for one in earlier]
        self._known: dict[tuple[TableId, SchemaVersion], bool] = {}
        """Whether the consumer receives records of this table and schema version."""
        self._seen = set[tuple[TableId, SchemaVersion]]()
        """Schemas of which `_told` knows."""
        self._told: dict[TableId, TableSchema] = {}
        """For kind latest, the newest read schema of each table that has defaults of columns in older rows."""
        self._steps: Iterator[Step] | None = None
        self.quarantined: set[TableId] = set()
        """Tables of which undecoded records were read."""
        self._left_out: dict[TableId, str] | None = None
        """Names of the tables that `left_out` returns, from its first call on."""

    def restart(self) -> None:
        """Forget the place in the log: the next `read` says where to begin."""
        self._steps = None

    def forget_earlier(self) -> None:
        """Read by the newest definition alone: no earlier delivery counts."""
        self._earlier = []
        self.restart()

    def read(self, after: int) -> Step | None:
        """Return the next messages; None if there is nothing more to read now.

        Args:
            after: the `seq` to begin behind, in the first call and after `restart`.

        Raises:
            OffsetExpired: retention has dropped what follows.
            CorruptWal, LogTruncated: as `StreamReader`.
        """
        if self._steps is None:
            upto = self._reader.persisted_upto()
            if upto <= after:
                return None
            self._reader.extent.check_range(Seq(after), upto, upto)
            self._steps = self._read_by_definitions(Seq(after), upto)
        try:
            step = next(self._steps, None)
        except BaseException:
            self._steps = None
            raise
        if step is None:
            self._steps = None
        return step

    def _read_by_definitions(self, after: Seq, upto: Seq) -> Iterator[Step]:
        for earlier, definition in self._earlier:
            if after < earlier.upto:
                self._use(definition)
                end = Seq(min(earlier.upto, upto))
                yield from self._read(after, end)
                after = end
        if after < upto:
            self._use(self._newest)
            yield from self._read(after, upto)

    def _use(self, definition: Definition) -> None:
        if self._definition is not definition:
            self._definition, self._known = definition, {}

    def _read(self, after: Seq, upto: Seq) -> Iterator[Step]:
        wanted = self._wanted(after, upto)
        if wanted is not None and not wanted:
            yield Step([], int(upto), int(upto))
            return
        if self._definition.kind is Kind.LATEST:
            self._learn_defaults(after, upto)
        shards = self._reader.shards
        if len(shards) == 1:
            pieces: Iterator[_Piece] = self._shard(shards[0], after, upto, wanted, alone=True)
        else:
            streams: list[Iterator[_Item]] = [
                (item for piece in self._shard(shard, after, upto, wanted, alone=False) for item in piece.items)
                for shard in shards
            ]
            pieces = map(_renumbered, _operations(merge_shards(streams)))
        operation, newest, before, done = None, int(after), int(after), int(after)
        piece = next(pieces, None)
        while piece is not None:
            messages = []
            for item in piece.items:
                if item.operation != operation:
                    operation, done, before = item.operation, newest, max(newest, int(item.operation_seq) - 1)
                newest = max(newest, item.end)
                if item.message is not None:
                    messages.append(_as_message((position_of(item.seq), before, *item.message)))
                    if item.second is not None:
                        messages.append(_as_message((position_of(item.seq, 1), before, *item.second)))
            try:
                piece = next(pieces, None)
            except CorruptWal:
                yield Step(messages, done, newest)
                raise
            if piece is not None and piece.operation != operation:
                done = newest
            yield Step(messages, int(upto) if piece is None else done, newest)
        yield Step([], int(upto), int(upto))

    def _wanted(self, after: Seq, upto: Seq) -> frozenset[TableId] | None:
        """Return the tables of which the consumer may receive records of `(after, upto]`; None for all."""
        if self._definition.tables is None:
            return None
        self.takes_of(after, upto)
        return frozenset(table for (table, _), is_taken in self._known.items() if is_taken)

    def _learn_defaults(self, after: Seq, upto: Seq) -> None:
        for key, told in self._reader.schemas_between(after, upto, self._seen, definitions=True).items():
            self._seen.add(key)
            schema = told.defined()
            table, version = schema.table_id, schema.version
            has_defaults = any(column.filled is not None for column in schema.columns)
            if has_defaults and (table not in self._told or self._told[table].version < version):
                self._told[table] = schema

    def takes_of(self, after: Seq, upto: Seq) -> Callable[[TableId, SchemaVersion], bool]:
        """Return whether the consumer receives records of `(after, upto]` of a table and schema version."""
        for key, schema in self._reader.schemas_between(after, upto, self._known).items():
            self._known[key] = self._takes(schema)
        return lambda table, version: self._known[table, version]

    def newer(self, after: int, upto: int, keys: Container[Key]) -> Iterator[tuple[set[Key], set[Emptied]]]:
        """Look for newer messages of keys, without making them: yield a frame's findings.

        Args:
            after: the `seq` behind which the log is read.
            upto: the `seq` up to which it is read.
            keys: the keys.

        Yields:
            Those of which there are messages that leave no column unchanged, and what was truncated or left.

        Raises:
            OffsetExpired, CorruptWal, LogTruncated: as `read`.
        """
        wanted = self._wanted(Seq(after), Seq(upto))
        for shard in () if self._earlier else self._reader.shards:
            start = self._reader.offset_beyond(shard, Seq(after))
            for part in self._reader.read(shard, start, tables=wanted, numbers=(Seq(after), Seq(upto))):
                yield _complete_keys(self._newest, part, keys)

    def row_between(self, older: Message, newer: Message) -> KnownRow | None:
        """Return the row that a key had before its newer message, though no message tells of it, as an update.

        A row that is inserted again behind an undelivered `d`, and doesn't match `where`, gives no message; an update
        may then leave columns unchanged in it.

        Args:
            older: the undelivered message of a key.
            newer: a later one of the same key.

        Returns:
            None if the key had no row there, or if the two lie on different shards.

        Raises:
            OffsetExpired, CorruptWal: as `read`.
        """
        (shard, begin), (other, end) = _place(older.id), _place(newer.id)
        if shard != other or newer.table is None:
            return None
        (group,), found = newer.groups, None
        for part in self._reader.read(ShardId(shard), Offset(begin), tables=[TableId(newer.table)], upto=Offset(end)):
            names = groups_of(part.schema, part.batch, self._newest.group_by, ())
            for kept in filtered(part, np.array([group in own for own in names])):
                lines = table_lines(kept, stream=self._stream)
                for line, own in zip(lines, (own for own in names if group in own), strict=True):
                    found = row_of(line, own, group, self._newest)
        return found

    def left_out(self) -> list[str]:
        """Return the names of tables that the consumer leaves out, since its kind needs a key."""
        if self._left_out is None:
            self._left_out = {}
            if self._newest.kind is Kind.LATEST:
                with suppress(MillstreamError):  # nothing has been written so far; reading reports the rest
                    for schema in self._reader.schemas().values():
                        self._takes(schema)
        return sorted(self._left_out.values())

    def _takes(self, schema: TableSchema) -> bool:
        takes = self._definition.takes(schema)
        if self._left_out is not None:
            if self._newest.leaves_out(schema):
                self._left_out[schema.table_id] = schema.full_name
            else:
                self._left_out.pop(schema.table_id, None)
        return takes

    def _shard(
        self, shard: ShardId, after: Seq, upto: Seq, wanted: frozenset[TableId] | None, *, alone: bool
    ) -> Iterator[_Piece]:
        """Yield a shard's records, frame by frame. If the shard is alone, several frames with only what is received."""
        large = LargeGroups(self._reader, after, upto) if alone else None
        start = self._reader.offset_beyond(shard, after) if large is None else large.begin
        if start is None:
            return
        frames = Frames()
        found = _Found()
        damaged: CorruptWal | None = None
        try:
            for part in self._reader.read(shard, start, tables=wanted, numbers=(after, upto)):
                if frames.are_whole_before(part) and (not alone or frames.are_enough):
                    self._add(frames, found, large)
                    frames = Frames()
                    if not alone or found.is_enough:
                        yield self._piece(found, alone=alone)
                        found = _Found()
                frames.append(part)
        except CorruptWal as error:
            damaged = error
            frames.drop_from(Offset(int(error.details.get("offset_from", 0))))
        if frames.parts:
            self._add(frames, found, large)
        if found.frames:
            yield self._piece(found, alone=alone)
        if damaged is not None:
            raise damaged

    def _add(self, frames: Frames, found: _Found, large: LargeGroups | None) -> None:
        """Add the records of some frames that are received; of one frame, unless the shard is alone: then `large` is given."""
        parts = [part for part in frames.by_table() if self._takes(part.schema)]
        numbers, groups, first = _numbers(parts), list[LargeGroup](), frames.parts[0].frame_offset
        if large is not None:
            groups = list(large.within(first, Offset(int(numbers.offsets.max(initial=first)) + 1)))
            numbers = _in_order(numbers, groups)
        if not found.frames:
            found.operation = next(((group.first_seq,) for group in groups if group.begin <= first), None)
        found.frames += frames.count
        alone, begin = large is not None, 0
        for part in parts:
            end = begin + part.batch.num_rows
            of_part = numbers.of_rows(slice(begin, end))
            if part.schema.kind is TableKind.RAW:
                self.quarantined.add(part.schema.table_id)
            left_out = np.ones(part.batch.num_rows, dtype=bool)
            for definition, among in self._selecting(of_part.seqs, alone=alone):
                keep, is_gone = selected(definition, part.schema, part.batch)
                keep &= among
                left_out &= ~keep
                for kept in filtered(part, keep):
                    gone_rows = np.zeros(kept.batch.num_rows, dtype=bool) if is_gone is None else is_gone[keep]
                    found.kept.append(_Kept(kept, of_part.of_rows(keep), gone_rows, definition))
            if not alone:
                found.unkept += _unkept(part, of_part, left_out)
            begin = end

    def _piece(self, found: _Found, *, alone: bool) -> _Piece:
        items = found.unkept
        for kept in _joined(found.kept):
            items += self._part(kept, alone=alone)
        items.sort(key=_first)
        return _Piece(found.operation, [item for _, item in items])

    def _selecting(self, seqs: Ints, *, alone: bool) -> Iterator[tuple[Definition, Bools]]:
        """Yield each definition that selects some of these records, and which records."""
        left = np.ones(len(seqs), dtype=bool)
        for earlier, definition in self._earlier:
            # On several shards a message may have another number of its operation: operations are whole.
            among = left & (seqs <= (earlier.known_upto if alone else earlier.upto))
            if among.any():
                yield definition, among
                left &= ~among
        if left.any():
            yield self._newest, left

    def _part(self, found: _Kept, *, alone: bool) -> Iterable[tuple[int, _Item]]:
        kept, definition, schema = found.records, found.definition, found.records.schema
        prefix = f"{self._stream}-{int(kept.shard)}-{int(kept.epoch)}-"
        offsets, seqs, ends, firsts = (array.tolist() for array in found.numbers)
        ids = [f"{prefix}{offset}" for offset in offsets]
        groups = groups_of(schema, kept.batch, definition.group_by, ids)
        moments = kept.batch.column("__commit_ts").cast(pa.int64()).to_pylist()
        own = (firsts, repeat(-1), zip(firsts)) if alone else (firsts, indexes_of(kept), operations_of(kept))
        if definition.kind is Kind.LATEST and schema.kind is TableKind.TABLE:
            if (newest := self._told.get(schema.table_id)) is not None:
                schema, batch = filled_records(schema, kept.batch, newest)
                kept = replace(kept, schema=schema, batch=batch)
            rows = zip(
                table_lines(kept, stream=self._stream), ids, groups, moments, found.is_gone.tolist(), strict=True
            )
            pairs = [newest_messages(*row[:4], definition, is_gone=row[4]) for row in rows]
            halves = [first[2:] for first, _ in pairs]
            seconds = [None if second is None else second[2:] for _, second in pairs]
            return zip(offsets, map(_Item, *own, seqs, ends, halves, seconds), strict=True)
        return zip(offsets, map(_Item, *own, seqs, ends, self._messages(found, ids, groups, moments)), strict=True)

    def _messages(
        self, found: _Kept, ids: list[str], groups: list[tuple[str, ...]], moments: list[int | None]
    ) -> Iterator[tuple[Any, ...]]:
        """Return each record's message, without its position; see `_Item`."""
        kept, definition, schema = found.records, found.definition, found.records.schema
        batch, count = kept.batch, kept.batch.num_rows
        texts_of = partial(
            record_texts,
            schema,
            stream=self._stream,
            shard=kept.shard,
            epoch=kept.epoch,
            renamed=definition.names_of(schema.key),
        )
        texts: Iterable[str | None] = repeat(None)
        sizes: Iterable[int] = repeat(batch.nbytes // count)
        logged: Iterable[LoggedRow | None] = repeat(None)
        if definition.keeps_rows:
            logged = map(_as_row, zip(repeat(schema), repeat(batch), range(count), repeat(texts_of), strict=False))
        if definition.needs_texts:
            known = texts_of(batch)
            texts, sizes = known, map(size_of, known)
        names = [own[0] if own else None for own in groups]
        constants = repeat(None), repeat(False)
        origins = map(_as_origin, zip(names, texts, moments, *constants, logged, repeat(None), strict=False))
        ops = batch.column("__op").to_pylist()
        barriers = [True] * count if schema.kind is TableKind.RAW else [op in BARRIERS for op in ops]
        is_free = definition.group_by == NO_GROUPS
        held = [() if is_free or is_barrier else own for own, is_barrier in zip(groups, barriers, strict=True)]
        table = None if schema.kind is TableKind.MESSAGES else int(schema.table_id)
        return zip(ids, held, repeat(table), barriers, sizes, origins, repeat(False), repeat(None), strict=False)


def _place(id_: str) -> tuple[int, int]:
    """Return the shard and the offset that a message's id names."""
    _, shard, _, offset = id_.removesuffix(OLD).rsplit("-", 3)
    return int(shard), int(offset)


def _complete_keys(definition: Definition, part: TableRecords, keys: Container[Key]) -> tuple[set[Key], set[Emptied]]:
    """Return the keys of some that have a record in a part that leaves no column unchanged, and what was truncated."""
    schema, found, truncated = part.schema, set[Key](), set[Emptied]()
    if schema.kind is not TableKind.TABLE or not definition.takes(schema):
        return found, truncated
    keep, _ = selected(definition, schema, part.batch)
    for kept in filtered(part, keep):
        partial = kept.batch.column("__unchanged").is_valid().to_pylist()
        ops = kept.batch.column("__op").to_pylist()
        leaves = kept.batch.column(PARTITION_OID.name).to_pylist() if schema.partitioned else [None] * len(ops)
        names = groups_of(schema, kept.batch, definition.group_by, ())
        for op, leaf, own, is_partial in zip(ops, leaves, names, partial, strict=True):
            if op in BARRIERS:
                truncated.add((int(schema.table_id), leaf if op == Op.PARTITION_LEFT.letter else None))
            # The old key of a change of a key is deleted, whatever the new row lacks.
            found.update((name, leaf) for name in own[is_partial:] if (name, leaf) in keys)
    return found, truncated


def _joined(kept: list[_Kept]) -> Iterator[_Kept]:
    """Join the records of several frames that one definition selects from one table: each batch has its cost."""
    tables: dict[tuple[TableId, SchemaVersion, Epoch, int], list[_Kept]] = {}
    for one in kept:
        key = one.records.schema.table_id, one.records.schema.version, one.records.epoch, id(one.definition)
        tables.setdefault(key, []).append(one)
    for some in tables.values():
        first = some[0]
        if len(some) == 1:
            yield first
            continue
        records = joined([one.records for one in some])
        numbers = _Numbers(*map(np.concatenate, zip(*(one.numbers for one in some), strict=True)))
        yield _Kept(records, numbers, np.concatenate([one.is_gone for one in some]), first.definition)


def _numbers(parts: Iterable[TableRecords]) -> _Numbers:
    """Return the numbers of some parts' records, one part after the other."""
    none: list[Ints] = [np.empty(0, dtype=np.int64)]
    offsets, numbers = (
        np.concatenate([*none, *(part.batch.column(name).to_numpy() for part in parts)])
        for name in ("__offset", "__seq")
    )
    operations = np.concatenate([*none, *(part.operation_seq.to_numpy() for part in parts)])
    firsts, places = np.unique(operations, return_inverse=True)
    last = np.zeros(len(firsts), dtype=np.int64)
    np.maximum.at(last, places, numbers)
    return _Numbers(offsets, numbers, last[places], operations)


def _in_order(numbers: _Numbers, large: Iterable[LargeGroup]) -> _Numbers:
    """Give the numbers of each operation's records, and of each large group's, to them in the order of their offsets.

    Operations stand one after the other in offsets as in numbers, so both orders have the same operations.
    """
    offsets, seqs, ends, operations = numbers
    seqs[np.argsort(offsets, kind="stable")] = np.sort(seqs)
    for group in large:
        own = (offsets >= group.begin) & (offsets < group.end)
        seqs[own], ends[own], operations[own] = offsets[own] + group.shift, group.last_seq, group.first_seq
    return numbers


def _unkept(part: TableRecords, numbers: _Numbers, left_out: Bools) -> Iterator[tuple[int, _Item]]:
    """Yield records that `where` leaves out: their numbers are their operation's, too."""
    for rest in filtered(part, left_out):
        of_rows = [array[left_out].tolist() for array in numbers]
        for offset, number, end, first, index, operation in zip(
            *of_rows, indexes_of(rest), operations_of(rest), strict=True
        ):
            yield offset, _Item(Seq(first), index, operation, number, end, None)


def _operations(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """Group merged records by operation.

    The parts of an application's operation on several shards have no name in common. Where their numbers interleave,
    they are one; elsewhere they may as well be several.
    """
    found: list[_Item] = []
    end = 0
    for item in items:
        if found and item.operation != found[-1].operation and item.operation_seq > end:
            yield found
            found = []
        found.append(item)
        end = max(end, item.end)
    if found:
        yield found


def _renumbered(items: list[_Item]) -> _Piece:
    """Give the numbers of an operation's records to them in their order."""
    numbers = sorted(item.seq for item in items)
    first, end, operation = min(item.operation_seq for item in items), numbers[-1], items[0].operation
    return _Piece(
        operation,
        [
            _Item(first, item.index, operation, number, end, item.message, item.second)
            for item, number in zip(items, numbers, strict=True)
        ],
    )


def _first(found: tuple[int, _Item]) -> int:
    return found[0]
