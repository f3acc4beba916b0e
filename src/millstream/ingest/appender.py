"""Appends applications' rows, as columns, to a stream: tables are made as needed, and each call is one operation.

`python_rows` and `json_rows` make the columns.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import wrap_future
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream import process_metrics
from millstream.errors import IngestError, InvalidValue, MillstreamError, RoutingError, UnknownTable
from millstream.ingest.append_requests import check_batch, operations_of, part_of, without_tables
from millstream.ingest.fit_to_schema import FITTED_BYTES_MAX, fitted, fitted_bytes
from millstream.ingest.increment_columns import NAMED, unnamed
from millstream.ingest.keep_valid_rows import Refusals, ValidPart, valid_part, without_clashes
from millstream.ingest.python_rows import too_large
from millstream.ingest.request_digests import digests_of, joined
from millstream.ingest.schema_on_write import TableRules, grown
from millstream.ingest.signal_columns import check_weights
from millstream.ingest.uninterruptible import uninterruptible
from millstream.model.ids import SchemaVersion, ShardId, SourceId, StreamId, TableId, WriterId
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.model.operations import (
    Ack,
    Appended,
    RejectedRow,
    TableAppended,
    TableRows,
    WriteOps,
    append_rows,
    one_after_another,
)
from millstream.model.positions import Seq, SeqRange, StreamToken, short_stream_id
from millstream.model.schema import TableSchema
from millstream.model.steps import run, run_async
from millstream.model.writes import AppendBatch, SessionFacts
from millstream.workers import call_in_thread

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.catalog.tables import Grow
    from millstream.ports import ApplicationLog

_SMALL_BYTES: Final = 256 << 10
"""Size in bytes up to which rows are prepared on the caller's event loop: handing them to another thread takes longer.
"""
_SMALL_ROWS: Final = 10_000
_UNFIT: Final = (InvalidValue, UnknownTable, IngestError, RoutingError)


class _Fit(NamedTuple):
    """A batch's rows as a table's columns."""

    schema: TableSchema
    columns: list[pa.Array]
    unchanged: pa.Array | None
    """The columns that each row says nothing about; None: none."""

    @classmethod
    def of(cls, schema: TableSchema, rows: pa.Table) -> _Fit:
        """Fit rows; raises as `fitted`."""
        return cls(schema, fitted(schema, rows), unnamed(schema, rows))

    def rows(self, counts: Sequence[int]) -> pa.RecordBatch:
        """Return the rows on their way into the log, by the number of rows of each operation."""
        return append_rows(self.schema, self.columns, counts, unchanged=self.unchanged)


class _Prepared(NamedTuple):
    """A batch as operations."""

    ops: WriteOps | None
    """The operations; None if none is left."""
    places: Sequence[int]
    """Each operation's request."""
    rows: Sequence[Sequence[int]]
    """The rows that the log gets of each table, for each operation."""
    refusals: Refusals


_Step: TypeAlias = Callable[[], _Prepared] | WriteOps
"""A preparation, which may take long, or operations to append."""


class Appender:
    """Takes applications' rows into one stream.

    Args:
        log: its writer, or this process's one of several; possibly with sinks.
        rules: the configured rules of tables, and of the placement of their rows.
        buffer: the name of the write buffer that `log` is, if it is one.
        hear: called before writes with a session or a key are appended: another region may have them already.

    Concurrency: any number of threads and event loops.
    """

    def __init__(
        self,
        catalog: Catalog,
        stream: StreamId,
        log: ApplicationLog,
        *,
        writer: WriterId,
        rules: TableRules,
        buffer: str | None = None,
        hear: Callable[[], None] = lambda: None,
    ) -> None:
        self._catalog = catalog
        self._stream = stream
        self._appends = process_metrics.APPEND_SECONDS.of(str(stream))
        self._log = log
        self._writer = writer
        self._rules = rules
        self._buffer = buffer
        self._hear = hear
        self._schemas: dict[tuple[str, str], TableSchema] = {}
        """The newest schema of each table that this process has seen."""

    def append_batch(self, batch: AppendBatch, *, deadline_s: float | None) -> list[Appended | MillstreamError]:
        """Append each of the batch's requests as an operation of its own, all of them in one commit group.

        Returns:
            The outcome of each request. A refused request doesn't affect the others.

        Raises:
            UsageError, InvalidValue: the batch itself is invalid.
            Overloaded, DiskFull, AppendOutcomeUnknown, WriterClosed, StaleEpoch: as `append`, for the
                whole batch.
        """

        def do(step: _Step) -> _Prepared | Ack:
            return (
                self._log.append(step, deadline_s=deadline_s, acks=batch.acks) if isinstance(step, WriteOps) else step()
            )

        return run(self._steps(batch), do)

    async def append_batch_async(
        self, batch: AppendBatch, *, deadline_s: float | None, large: asyncio.Semaphore | None = None
    ) -> list[Appended | MillstreamError]:
        """Append as `append_batch`, for a task: waits for the catalog run on other threads.

        Args:
            large: bounds how many batches are prepared on other threads at a time.
        """

        async def do(step: _Step) -> _Prepared | Ack:
            if isinstance(step, WriteOps):
                return await self._log.append_async(step, deadline_s=deadline_s, acks=batch.acks)
            if sum(table.rows.nbytes for table in batch.tables) <= _SMALL_BYTES and self._is_small(batch):
                return step()
            async with large or contextlib.nullcontext():
                return await wrap_future(call_in_thread("append-prepares", step))

        return await run_async(self._steps(batch), do)

    def _steps(self, batch: AppendBatch) -> Generator[_Step, Any, list[Appended | MillstreamError]]:
        """Append a batch; the caller does the steps: the preparation, then the append to the log."""
        began_s = time.perf_counter()
        prepared: _Prepared = yield partial(self._prepared, batch)
        ops, refusals = prepared.ops, prepared.refusals
        names = [qualified_name(*parse_qualified_name(table.table)) for table in batch.tables]
        outcomes: dict[int, Appended | MillstreamError] = dict(refusals.requests)
        acks: Sequence[Ack | MillstreamError] = ()
        if ops is not None:
            ack = yield ops
            self._appends.observe(time.perf_counter() - began_s)
            acks = ack.each or (ack.placed or ops).split_ack(ack)
        shown = self._log.shown_upto()
        for place, part, rows in zip(prepared.places, acks, prepared.rows, strict=True):
            if isinstance(part, MillstreamError):
                outcomes[place] = part
            else:
                outcomes[place] = self._appended(part, shown, place, names, rows, refusals)
        nothing = Ack({}, SeqRange(Seq(shown + 1), 0))
        for place in range(len(batch.write_ids)):
            if place not in outcomes:  # it has no rows, or none is left
                outcomes[place] = self._appended(nothing, shown, place, names, [0] * len(names), refusals)
        return [outcomes[place] for place in range(len(batch.write_ids))]

    def _appended(
        self, ack: Ack, shown: Seq, place: int, names: Sequence[str], rows: Sequence[int], refusals: Refusals
    ) -> Appended:
        """Return the result of the request at a place, of which the log has so many rows of each table."""
        tables = {}
        number = ack.seqs.first
        left_out: tuple[RejectedRow, ...] = ()
        for at, (name, count) in enumerate(zip(names, rows, strict=True)):
            rejected = refusals.rows.get((place, at), ())
            first = None if not count or ack.is_elsewhere else number
            tables[name] = TableAppended(first, count, rejected, refusals.tables.get((place, at)))
            left_out += rejected
            if self._buffer is None:  # in a buffer rows have no numbers yet
                number = Seq(number + count)
        has_numbers = ack.seqs.count and not ack.is_elsewhere
        token = self._token(ack.seqs.last if has_numbers else shown, shown)
        return Appended(token, ack.seqs, ack.offsets, ack.duplicate, left_out, self._buffer, tables)

    def session(self, name: str, *, deadline_s: float | None = None) -> SessionFacts:
        """Return the durable log's facts of a session, once they are acknowledged at the stream's level.

        Raises:
            NotEnoughReplicas: they weren't by the deadline.
            SessionsNeedOneWriter: the stream has several writers.
        """
        return self._log.session(name, deadline_s=deadline_s)

    def _is_small(self, batch: AppendBatch) -> bool:
        """Return whether `_prepared` takes only a moment: few rows, and no catalog access."""
        if batch.row_count > _SMALL_ROWS:
            return False
        try:
            return not any(self._grows(parse_qualified_name(table.table), table.rows) for table in batch.tables)
        except _UNFIT:
            return False

    def _grows(self, name: tuple[str, str], rows: pa.Table) -> bool:
        """Return whether rows make a table or columns, as far as this process knows."""
        return self._ready(name, rows) is None

    def _ready(self, name: tuple[str, str], rows: pa.Table) -> TableSchema | None:
        """Return the schema of a table that holds rows as it is; None if this process knows none that does."""
        known = self._schemas.get(name)
        is_ready = known is not None and grown(known, rows.schema, self._rules.rules_of(*name)) is known
        return known if is_ready else None

    def _prepared(self, batch: AppendBatch) -> _Prepared:
        """Return a batch's operations; new tables and columns are durable in the catalog then.

        Raises as `append_batch`.
        """
        check_batch(batch)
        refusals = Refusals()
        places: Sequence[int] = range(len(batch.write_ids))
        try:
            fits = self._fit(batch)
        except _UNFIT as error:
            if batch.keep_valid_rows:
                batch, places = self._valid(batch, refusals)
            batch, places = self._fitting_part(batch, places, error, refusals)
            # Each fits alone; a batch that is too large as a whole is its maker's responsibility.
            fits = self._fit(batch)
        while True:
            placed, refused = self._placed(batch, fits)
            if not refused:
                break
            batch, places = self._placeable_part(batch, places, refused, refusals)
            fits = self._fit(batch)
        ids = batch.write_ids
        is_keyed = any(ids)
        if is_keyed:
            self._hear()
        digests = self._digests(batch, fits) if is_keyed else None
        rows = _log_rows(placed, len(ids))
        ops = WriteOps(operations_of(ids, digests), one_after_another(placed, len(ids)), is_keyed=is_keyed)
        kept = [
            number
            for number, write_id in enumerate(ids)
            if any(table.counts[number] for table in batch.tables) or (not batch.tables and write_id is not None)
        ]
        if not kept:
            return _Prepared(None, (), (), refusals)
        return _Prepared(
            ops.select(kept), [places[number] for number in kept], [rows[number] for number in kept], refusals
        )

    @staticmethod
    def _digests(batch: AppendBatch, fits: Sequence[_Fit | None]) -> list[int]:
        """Return the digest of each request with a write id; 0 for the others."""
        of_request: list[list[int]] = [[] for _ in batch.write_ids]
        for table, fit in zip(batch.tables, fits, strict=True):
            if fit is None:
                continue
            schema, arrays = fit.schema, fit.columns
            wanted = [
                count > 0 and write_id is not None
                for count, write_id in zip(table.counts, batch.write_ids, strict=True)
            ]
            names = [column.name for column in schema.columns]
            digests = digests_of(schema.full_name, names, arrays, table.counts, wanted)
            for number, digest in enumerate(digests):
                if wanted[number]:
                    of_request[number].append(digest)
        return [joined(digests) for digests in of_request]

    def _placed(
        self, batch: AppendBatch, fits: Sequence[_Fit | None]
    ) -> tuple[list[tuple[TableRows, ...]], dict[int, MillstreamError]]:
        """Return the placement of each table's rows, or the numbers of the operations that have no place."""
        count = len(batch.write_ids)
        rows = [
            None if fit is None else (fit.schema, fit.rows(table.counts))
            for table, fit in zip(batch.tables, fits, strict=True)
        ]
        try:
            placed = [() if own is None else self._rules.place(*own) for own in rows]
        except RoutingError as error:
            if count == 1:
                return [], {0: error}
        else:
            return placed, not_one_operation(placed, batch, is_buffer=self._buffer is not None)
        # Either one of them fails or their sum does: trying each alone shows which.
        placed = [() for _ in rows]
        refused: dict[int, MillstreamError] = {}
        ends = [np.cumsum(table.counts).tolist() for table in batch.tables]
        for number in range(count):
            try:
                for at, own in enumerate(rows):
                    size = batch.tables[at].counts[number]
                    if own is not None and size:
                        placed[at] += self._rules.place(own[0], own[1].slice(ends[at][number] - size, size))
            except RoutingError as error:
                refused[number] = error
        return placed, refused or not_one_operation(placed, batch, is_buffer=self._buffer is not None)

    def _placeable_part(
        self, batch: AppendBatch, places: Sequence[int], refused: dict[int, MillstreamError], refusals: Refusals
    ) -> tuple[AppendBatch, Sequence[int]]:
        """Return a batch without the operations that have no place, or without their tables that have none."""
        dropped: dict[tuple[int, int], MillstreamError] = {}
        for number, error in refused.items():
            of_tables = self._refused_tables(part_of(batch, [number])) if batch.keep_valid_tables else {}
            dropped |= {(number, at): why for at, why in of_tables.items()}
            if not of_tables:
                refusals.requests[places[number]] = error
        refusals.tables.update({(places[number], at): error for (number, at), error in dropped.items()})
        kept = [number for number, place in enumerate(places) if place not in refusals.requests]
        return part_of(without_tables(batch, dropped.keys()), kept), [places[number] for number in kept]

    def _valid(self, batch: AppendBatch, refusals: Refusals) -> tuple[AppendBatch, Sequence[int]]:
        """Return a batch without the rows that don't fit their table, as `without_clashes` does."""
        parts: list[ValidPart | None] = []
        for table in batch.tables:
            name = parse_qualified_name(table.table)
            try:
                parts.append(valid_part(self._newest(name, table.rows), table.rows, self._rules.rules_of(*name)))
            except _UNFIT:
                parts.append(None)  # no single row's fault: each request gets its own error
        return without_clashes(batch, parts, refusals)

    def _newest(self, name: tuple[str, str], rows: pa.Table) -> TableSchema:
        """Return a table's newest schema, so far as it matters to rows; without columns if there is no such table."""
        known = self._schemas.get(name)
        if known is not None and {*rows.column_names} - {NAMED} <= {column.name for column in known.columns}:
            return known
        # Another process may have added the missing parts since.
        return self._catalog.application_schema(self._stream, *name) or TableSchema(
            TableId(0), SchemaVersion(0), SourceId(0), *name, ()
        )

    def _fitting_part(
        self, batch: AppendBatch, places: Sequence[int], why: MillstreamError, refusals: Refusals
    ) -> tuple[AppendBatch, Sequence[int]]:
        """Return a batch's fitting requests and their places, out of `places`; the others are refused."""
        if not places:
            return batch, places
        try:
            if batch.keep_valid_rows:
                self._fit(batch)
                return batch, places
        except _UNFIT as error:
            why = error
        own = Refusals()
        fitting = self._fitting(batch, range(len(places)), why, own)
        refusals.requests.update({places[number]: error for number, error in own.requests.items()})
        refusals.tables.update({(places[number], at): error for (number, at), error in own.tables.items()})
        rest = part_of(without_tables(batch, own.tables.keys()), fitting)
        return rest, [places[number] for number in fitting]

    def _fitting(self, batch: AppendBatch, places: range, why: MillstreamError, refusals: Refusals) -> list[int]:
        """Return the places of the fitting requests, if `why` reports that some don't fit.

        The others, or their tables, go to `refusals`.
        """
        if len(places) == 1:
            (place,) = places
            of_tables = self._refused_tables(part_of(batch, places)) if batch.keep_valid_tables else {}
            refusals.tables.update({(place, at): error for at, error in of_tables.items()})
            if of_tables:
                return [place]
            refusals.requests[place] = why
            return []
        fitting = []
        middle = (places.start + places.stop) // 2
        for half in (range(places.start, middle), range(middle, places.stop)):
            try:
                self._fit(part_of(batch, half))
            except _UNFIT as error:
                fitting += self._fitting(batch, half, error, refusals)
            else:
                fitting += half
        return fitting

    def _fit(self, batch: AppendBatch) -> list[_Fit | None]:
        """Return each table's schema, extended by the rows' columns, with the rows' columns in its types; None without rows.

        Unless all tables take their rows, none is made or extended.
        """
        own = [(parse_qualified_name(table.table), table.rows) for table in batch.tables]
        filled = {name: rows for name, rows in own if rows.num_rows}
        for name, rows in filled.items():
            check_weights(qualified_name(*name), rows, self._rules.rules_of(*name).signals)
        schemas = {name: ready for name, rows in filled.items() if (ready := self._ready(name, rows)) is not None}
        if len(schemas) < len(filled):
            if len(filled) > 1:
                places = [self._checked(name, rows) for name, rows in filled.items()]
                check_one_place(places, is_buffer=self._buffer is not None)
            growing = {name: self._growth(name, rows) for name, rows in filled.items() if name not in schemas}
            made = uninterruptible(lambda: self._catalog.application_tables(self._stream, growing))
            self._schemas.update(made)
            schemas |= made
        fits = [_Fit.of(schemas[name], rows) if rows.num_rows else None for name, rows in own]
        size = sum(fitted_bytes(fit.schema, rows) for fit, (_, rows) in zip(fits, own, strict=True) if fit is not None)
        if size > FITTED_BYTES_MAX:
            raise too_large("the rows of its tables, in bytes,", size, FITTED_BYTES_MAX)
        return fits

    def _checked(self, name: tuple[str, str], rows: pa.Table) -> tuple[TableRows, ...]:
        """Return where a table's rows would go; nothing is made. Raises if it can't take them."""
        rules = self._rules.rules_of(*name)
        check_weights(qualified_name(*name), rows, rules.signals)
        wanted = grown(self._newest(name, rows), rows.schema, rules)
        return self._rules.check_place(wanted, _Fit.of(wanted, rows).rows([rows.num_rows]))

    def _refused_tables(self, request: AppendBatch) -> dict[int, MillstreamError]:
        """Return the errors of a request's tables that can't take its rows, by their places."""
        refused: dict[int, MillstreamError] = {}
        for at, table in enumerate(request.tables):
            try:
                if table.rows.num_rows:
                    self._checked(parse_qualified_name(table.table), table.rows)
            except _UNFIT as error:
                refused[at] = error
        return refused

    def _growth(self, name: tuple[str, str], rows: pa.Table) -> tuple[ShardId, Grow]:
        """Return what the catalog needs to make or extend a table for rows."""
        rules = self._rules.rules_of(*name)

        def grow(newest: TableSchema) -> TableSchema:
            wanted = grown(newest, rows.schema, rules)
            fit = _Fit.of(wanted, rows)  # rows that don't fit, or can't be placed, create no table and no column
            self._rules.check_place(wanted, fit.rows([rows.num_rows]))
            return wanted

        namespace, table = name
        return self._rules.home_shard(f"{namespace}.{table}"), grow

    def _token(self, last: Seq, shown: Seq) -> StreamToken:
        if self._buffer is not None:
            return StreamToken.scalar(self._stream, Seq(0))  # the rows have no numbers yet
        if shown >= last:
            return StreamToken.scalar(self._stream, last)
        # Other writers are behind: a vector token can be read at once, and its minimum by a linear
        # reader.
        return StreamToken(short_stream_id(self._stream), Seq(shown), {self._writer: last})


def _log_rows(placed: Sequence[Sequence[TableRows]], count: int) -> list[list[int]]:
    """Return, for each of that many operations, the number of its rows in the log, by table."""
    counts = np.zeros((count, len(placed)), dtype=np.int64)
    for at, entries in enumerate(placed):
        for entry in entries:
            if entry.sink is None:
                counts[:, at] += np.bincount(entry.rows.column(0).to_numpy(), minlength=count)
    rows: list[list[int]] = counts.tolist()
    return rows


_Place = tuple[str | None, ShardId | None]
"""A sink's name, or None for the log; and the shard of a write buffer."""


def check_one_place(placed: Sequence[Sequence[TableRows]], *, is_buffer: bool) -> None:
    """Raise `not_one_operation` if the tables' rows, given by table, go to different places.

    The log takes an operation whole or not at all. No two places do so together, and neither do two shards of a
    write buffer. Rows that a rule drops (`devnull`) go nowhere, and hold up no other.

    Args:
        placed: each table's entries.
        is_buffer: whether the log is a write buffer.
    """
    names = {entries[0].schema.full_name: _places_of(entries, is_buffer=is_buffer) for entries in placed if entries}
    if len(names) > 1 and not _is_one(names, is_buffer=is_buffer):
        raise _apart(names)


def not_one_operation(
    placed: Sequence[Sequence[TableRows]], batch: AppendBatch, *, is_buffer: bool
) -> dict[int, MillstreamError]:
    """Return the errors of the operations whose tables go to different places, by their numbers."""
    entries = [entries for entries in placed if entries]
    if len(entries) < 2:
        return {}
    places = {str(at): _places_of(own, is_buffer=is_buffer) for at, own in enumerate(entries)}
    if _is_one(places, is_buffer=is_buffer) and all(len(own) == 1 for own in places.values()):
        return {}
    count = len(batch.write_ids)
    has: list[dict[_Place, npt.NDArray[np.bool_]]] = []
    for own in entries:
        of_table: dict[_Place, npt.NDArray[np.bool_]] = {}
        for entry in own:
            place = _place_of(entry, is_buffer=is_buffer)
            in_operation = np.bincount(entry.rows.column(0).to_numpy(), minlength=count) > 0
            of_table[place] = of_table[place] | in_operation if place in of_table else in_operation
        has.append(of_table)
    refused: dict[int, MillstreamError] = {}
    for number in range(count):
        names = {
            own[0].schema.full_name: frozenset(place for place, there in of_table.items() if there[number])
            for own, of_table in zip(entries, has, strict=True)
        }
        names = {name: places for name, places in names.items() if places}
        if len(names) > 1 and not _is_one(names, is_buffer=is_buffer):
            refused[number] = _apart(names)
    return refused


def _place_of(entry: TableRows, *, is_buffer: bool) -> _Place:
    return entry.sink, entry.shard if is_buffer and entry.sink is None else None


def _places_of(entries: Sequence[TableRows], *, is_buffer: bool) -> frozenset[_Place]:
    return frozenset(_place_of(entry, is_buffer=is_buffer) for entry in entries if entry.rows.num_rows)


def _is_one(places: Mapping[str, frozenset[_Place]], *, is_buffer: bool) -> bool:
    """Return whether tables go to the same places, and to one shard of a buffer."""
    whole = frozenset().union(*places.values())
    return all(own == whole for own in places.values()) and not (is_buffer and len(whole) > 1)


def _apart(places: Mapping[str, frozenset[_Place]]) -> RoutingError:
    told = "; ".join(
        f"{name} to {' and '.join(sorted(_spoken(*place) for place in own))}" for name, own in places.items()
    )
    return RoutingError(
        f"the rows of {len(places)} tables can't be one operation, because they go to different places: {told[:1000]}",
        code="not_one_operation",
        tables=list(places),
    )


def _spoken(sink: str | None, shard: ShardId | None) -> str:
    if sink is not None:
        return f"sink {sink}"
    return "the log" if shard is None else f"shard {int(shard)} of the write buffer"
