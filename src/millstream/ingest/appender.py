"""Appends applications' rows to a stream: tables and columns are made as needed, and each call is one operation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import wrap_future
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa

from millstream import process_metrics
from millstream.errors import IngestError, InvalidValue, MillstreamError, RoutingError, UnknownTable
from millstream.ingest.digests import digests_of
from millstream.ingest.requests import check_batch, operations_of, rows_of, said
from millstream.ingest.schemas import TableRules, fitted, grown
from millstream.ingest.uninterruptible import uninterruptible
from millstream.ingest.valid_rows import valid_part, without_clashes
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId, WriterId
from millstream.model.names import parse_qualified_name
from millstream.model.operations import Ack, Appended, RejectedRow, TableRows, WriteOps, append_rows
from millstream.model.positions import Seq, StreamToken, short_stream_id
from millstream.model.schema import TableSchema
from millstream.model.steps import run, run_async
from millstream.model.writes import AppendBatch, SessionFacts
from millstream.workers import call_in_thread

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.ports import ApplicationLog

_SMALL_BYTES: Final = 64 << 10
"""Size in bytes up to which rows are prepared on the caller's event loop: handing them to another thread takes longer.
"""
_SMALL_ROWS: Final = 10_000
_Prepared: TypeAlias = tuple[
    WriteOps | None, Sequence[int], dict[int, MillstreamError], dict[int, tuple[RejectedRow, ...]]
]
"""A batch's operations, if any is left, each one's request, the errors of refused requests, and the rows that
were left out, both by the request's place."""
_Step: TypeAlias = Callable[[], _Prepared] | WriteOps
"""A preparation, which may take long, or operations to append."""


class Appender:
    """Takes applications' rows into one stream.

    Args:
        catalog: has the tables.
        stream: the stream.
        log: its writer, or this process's one of several; possibly with sinks.
        writer: that writer's number.
        rules: the configured rules of tables, and of the placement of their rows.
        buffer: the name of the write buffer that `log` is, if it is one.

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
    ) -> None:
        self._catalog = catalog
        self._stream = stream
        self._appends = process_metrics.APPEND_SECONDS.of(str(stream))
        self._log = log
        self._writer = writer
        self._rules = rules
        self._buffer = buffer
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
            batch: as `append_batch`.
            deadline_s: as `append_batch`.
            large: bounds how many batches are prepared on other threads at a time.
        """

        async def do(step: _Step) -> _Prepared | Ack:
            if isinstance(step, WriteOps):
                return await self._log.append_async(step, deadline_s=deadline_s, acks=batch.acks)
            if batch.rows.nbytes <= _SMALL_BYTES and self._is_small(batch):
                return step()
            async with large or contextlib.nullcontext():
                return await wrap_future(call_in_thread("append-prepares", step))

        return await run_async(self._steps(batch), do)

    def _steps(self, batch: AppendBatch) -> Generator[_Step, Any, list[Appended | MillstreamError]]:
        """Append a batch; the caller does the steps: the preparation, then the append to the log."""
        began_s = time.perf_counter()
        ops, places, errors, rejected = yield partial(self._prepared, batch)
        outcomes: dict[int, Appended | MillstreamError] = errors
        if ops is not None:
            ack = yield ops
            self._appends.observe(time.perf_counter() - began_s)
            shown = self._log.shown_upto()
            for place, part in zip(places, ack.each or (ack.placed or ops).split_ack(ack), strict=True):
                if isinstance(part, MillstreamError):
                    outcomes[place] = part
                    continue
                token, left_out = self._token(part.seqs.last, shown), rejected.get(place, ())
                outcomes[place] = Appended(token, part.seqs, part.offsets, part.duplicate, left_out, self._buffer)
        return [outcomes[place] for place in range(len(batch.counts))]

    def session(self, name: str, *, deadline_s: float | None = None) -> SessionFacts:
        """Return the durable log's facts of a session, once they are acknowledged at the stream's level.

        Raises:
            NotEnoughReplicas: they weren't by the deadline.
            SessionsNeedOneWriter: the stream has several writers.
        """
        return self._log.session(name, deadline_s=deadline_s)

    def _is_small(self, batch: AppendBatch) -> bool:
        """Return whether `_prepared` takes only a moment: few rows, and no catalog access."""
        name = parse_qualified_name(batch.table)
        known = self._schemas.get(name)
        if known is None or batch.rows.num_rows > _SMALL_ROWS:
            return False
        try:
            return grown(known, batch.rows.schema, self._rules.rules_of(*name)) is known
        except (InvalidValue, UnknownTable, IngestError, RoutingError):
            return False

    def _prepared(self, batch: AppendBatch) -> _Prepared:
        """Return a batch's operations; new tables and columns are durable in the catalog then.

        Raises as `append_batch`.
        """
        check_batch(batch)
        name = parse_qualified_name(batch.table)
        errors: dict[int, MillstreamError] = {}
        rejected: dict[int, tuple[RejectedRow, ...]] = {}
        places: Sequence[int] = range(len(batch.counts))
        try:
            known, arrays = self._fit(name, batch.rows)
        except (InvalidValue, UnknownTable, IngestError, RoutingError) as error:
            left: AppendBatch | None = batch
            if batch.keep_valid_rows:
                left, places, rejected = self._valid(name, batch, errors)
            if left is not None:
                left, places = self._fitting_part(name, left, places, error, errors)
            if left is None:
                return None, (), errors, {}
            batch = left
            # Each fits alone; a batch that is too large as a whole is its maker's responsibility.
            known, arrays = self._fit(name, batch.rows)
        while True:
            placed, refused = self._placed(known, append_rows(known, arrays, batch.counts), batch.counts)
            if not refused:
                break
            errors |= {places[number]: error for number, error in refused.items()}
            kept = [number for number in range(len(batch.counts)) if number not in refused]
            if not kept:
                return None, (), errors, {}
            batch, places = _part_of(batch, kept), [places[number] for number in kept]
            known, arrays = self._fit(name, batch.rows)
        ids, counts = batch.write_ids, batch.counts
        digests = None
        if any(ids):
            names = [column.name for column in known.columns]
            digests = digests_of(known.full_name, names, arrays, counts, [one is not None for one in ids])
        ops = WriteOps(operations_of(ids, digests), placed, is_keyed=digests is not None)
        return ops, places, errors, rejected

    def _placed(
        self, schema: TableSchema, rows: pa.RecordBatch, counts: Sequence[int]
    ) -> tuple[tuple[TableRows, ...], dict[int, MillstreamError]]:
        """Return the placement of operations' rows, or the numbers of those without a place."""
        try:
            return self._rules.place(schema, rows), {}
        except RoutingError as error:
            if len(counts) == 1:
                return (), {0: error}
        # Either one of them fails or their sum does: trying each alone shows which.
        placed: list[TableRows] = []
        refused: dict[int, MillstreamError] = {}
        start = 0
        for number, count in enumerate(counts):
            try:
                placed += self._rules.place(schema, rows.slice(start, count))
            except RoutingError as error:
                refused[number] = error
            start += count
        return tuple(placed), refused

    def _valid(
        self, name: tuple[str, str], batch: AppendBatch, errors: dict[int, MillstreamError]
    ) -> tuple[AppendBatch | None, Sequence[int], dict[int, tuple[RejectedRow, ...]]]:
        """Return a batch without the rows that don't fit the table, as `without_clashes` does."""
        rules = self._rules.rules_of(*name)
        known = self._schemas.get(name)
        try:
            if known is None or not {*batch.rows.column_names} <= {column.name for column in known.columns}:
                # Another process may have added the missing parts since.
                known = self._catalog.application_schema(self._stream, *name) or TableSchema(
                    TableId(0), SchemaVersion(0), SourceId(0), *name, ()
                )
            part = valid_part(known, batch.rows, rules)
        except (InvalidValue, UnknownTable, IngestError, RoutingError):
            return batch, range(len(batch.counts)), {}  # no single row's fault: each request gets its own error
        return without_clashes(batch, part, errors)

    def _fitting_part(
        self,
        name: tuple[str, str],
        batch: AppendBatch,
        places: Sequence[int],
        why: MillstreamError,
        errors: dict[int, MillstreamError],
    ) -> tuple[AppendBatch | None, Sequence[int]]:
        """Return a batch's fitting requests and their places, out of `places`; other errors go to `errors`."""
        own: dict[int, MillstreamError] = {}
        try:
            if batch.keep_valid_rows:
                self._fit(name, batch.rows)
                return batch, places
        except (InvalidValue, UnknownTable, IngestError, RoutingError) as error:
            why = error
        fitting = self._fitting(name, batch, range(len(batch.counts)), why, own)
        errors.update({places[place]: error for place, error in own.items()})
        if not fitting:
            return None, ()
        return _part_of(batch, fitting), [places[place] for place in fitting]

    def _fitting(
        self,
        name: tuple[str, str],
        batch: AppendBatch,
        places: range,
        why: MillstreamError,
        errors: dict[int, MillstreamError],
    ) -> list[int]:
        """Return the places of the fitting requests, if `why` reports that some don't fit.

        The others' errors go to `errors`.
        """
        if len(places) == 1:
            errors[places.start] = why
            return []
        fitting = []
        middle = (places.start + places.stop) // 2
        for half in (range(places.start, middle), range(middle, places.stop)):
            try:
                self._fit(name, said(rows_of(batch, half)))
            except (InvalidValue, UnknownTable, IngestError, RoutingError) as error:
                fitting += self._fitting(name, batch, half, error, errors)
            else:
                fitting += half
        return fitting

    def _fit(self, name: tuple[str, str], rows: pa.Table) -> tuple[TableSchema, list[pa.Array]]:
        """Return the table's schema, extended by the rows' columns, and the rows' columns in its types."""
        namespace, table = name
        rules = self._rules.rules_of(namespace, table)
        shard = self._rules.home_shard(f"{namespace}.{table}")
        known = self._schemas.get(name)
        if known is None or grown(known, rows.schema, rules) is not known:

            def grow(newest: TableSchema) -> TableSchema:
                wanted = grown(newest, rows.schema, rules)
                arrays = fitted(wanted, rows)  # rows that don't fit, or can't be placed, create no table and no column
                self._rules.check_place(wanted, append_rows(wanted, arrays, [rows.num_rows]))
                return wanted

            known = uninterruptible(
                lambda: self._catalog.application_table(self._stream, namespace, table, shard=shard, grow=grow)
            )
            self._schemas[name] = known
        return known, fitted(known, rows)

    def _token(self, last: Seq, shown: Seq) -> StreamToken:
        if self._buffer is not None:
            return StreamToken.scalar(self._stream, Seq(0))  # the rows have no numbers yet
        if shown >= last:
            return StreamToken.scalar(self._stream, last)
        # Other writers are behind: a vector token can be read at once, and its minimum by a linear
        # reader.
        return StreamToken(short_stream_id(self._stream), Seq(shown), {self._writer: last})


def _part_of(batch: AppendBatch, places: Sequence[int]) -> AppendBatch:
    """Return some of a batch's requests, with the columns in which they have values."""
    counts = [batch.counts[place] for place in places]
    ids = [batch.write_ids[place] for place in places]
    return replace(batch, rows=said(rows_of(batch, places)), counts=counts, write_ids=ids)
