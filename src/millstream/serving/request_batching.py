"""Batches of waiting requests: those that arrived for the same tables during the last write are made one batch.

A batch costs by its columns, not by its rows, and a commit group by its fsync: alone, requests of a few
rows would pay both for each. Each request stays an operation of its own, with its own answer. If they
can't be converted together, each is tried alone, so that an invalid one holds up no other. The batch
doesn't change a request either: resent alone, it must be the same write.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias

import pyarrow as pa
import structlog

from millstream.errors import IngestError, InvalidValue, MillstreamError, UsageError
from millstream.ingest.json_rows import Row, columns_of
from millstream.model.operations import Appended
from millstream.model.replication import AckLevel
from millstream.model.writes import AppendBatch, TableBatch, WriteId

logger = structlog.get_logger("millstream.serve")

BATCH_BYTES_MAX: Final = 4 << 20
"""Size in bytes of requests' bodies in a batch: JSON's numbers may be four times as large as columns. A
larger request is a batch of its own."""
BATCH_REQUESTS_MAX: Final = 4096
IN_FLIGHT_MAX: Final = 2
"""Batches of one table: while one is written, the next is made. With more they would be smaller."""


class AppendBatches(Protocol):
    """The call that appends a stream's batch."""

    async def __call__(self, stream: str, batch: AppendBatch, *, deadline_s: float) -> list[Appended | MillstreamError]:
        """Append within the deadline; return an outcome for each of the batch's requests."""


class BatchTarget(NamedTuple):
    """The common attributes of one batch's requests."""

    stream: str
    tables: tuple[str, ...]
    """The tables in the order of a request's rows; each request has rows in all of them."""
    deadline_s: float
    keep_valid_rows: bool
    acks: AckLevel | None = None
    keep_valid_tables: bool = False


Rows: TypeAlias = list[Row] | pa.Table
"""Rows as JSON objects, or as columns in the log's types."""


class _PendingRequest(NamedTuple):
    rows: Sequence[Rows]
    """The rows of each table."""
    size_bytes: int
    write_id: WriteId | None
    answer: asyncio.Future[Appended]


@dataclass(slots=True)
class _Queue:
    """The queue of a target."""

    waiting: deque[_PendingRequest] = field(default_factory=deque)
    in_flight: int = 0
    is_scheduled: bool = False
    """Whether the loop will begin its next batch."""


class RequestBatches:
    """Appends requests' rows in batches. For one event loop."""

    def __init__(self, append: AppendBatches) -> None:
        self._append = append
        self._queues: dict[BatchTarget, _Queue] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def append(
        self, target: BatchTarget, rows: Sequence[Rows], *, size_bytes: int, write_id: WriteId | None
    ) -> asyncio.Future[Appended]:
        """Append a request's rows; return the outcome. A cancelled caller doesn't prevent the append.

        Args:
            rows: the rows of each of the target's tables, at least one in each.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Appended] = loop.create_future()
        queue = self._queues.get(target)
        if queue is None:
            queue = self._queues[target] = _Queue()
        queue.waiting.append(_PendingRequest(rows, size_bytes, write_id, answer))
        self._schedule(loop, target, queue)
        return answer

    async def drain(self) -> None:
        """Return once nothing is in flight."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _schedule(self, loop: asyncio.AbstractEventLoop, target: BatchTarget, queue: _Queue) -> None:
        if queue.waiting and queue.in_flight < IN_FLIGHT_MAX and not queue.is_scheduled:
            queue.is_scheduled = True
            loop.call_soon(self._begin, target, queue)  # requests that are already there come with it

    def _begin(self, target: BatchTarget, queue: _Queue) -> None:
        queue.is_scheduled = False
        requests = _taken(queue.waiting)
        queue.in_flight += 1
        task = asyncio.get_running_loop().create_task(self._run(target, queue, requests))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, target: BatchTarget, queue: _Queue, requests: list[_PendingRequest]) -> None:
        try:
            for alike in _apart(requests):
                await self._append_all(target, alike)
        except BaseException as error:  # a bug of ours, or the server's end: the waiting callers must get it
            for request in requests:
                _fail(request, error)
            if not isinstance(error, Exception):
                raise
            logger.exception("a batch of appends failed", stream=target.stream, tables=target.tables[:10])
        finally:
            queue.in_flight -= 1
            if queue.waiting:
                self._schedule(asyncio.get_running_loop(), target, queue)
            elif not queue.in_flight and not queue.is_scheduled:
                self._queues.pop(target, None)

    async def _append_all(self, target: BatchTarget, requests: list[_PendingRequest]) -> None:
        """Append requests whose rows are of one kind together; each alone, or in halves, if that isn't possible."""
        try:
            rows = [_joined([request.rows[at] for request in requests]) for at in range(len(target.tables))]
        except MillstreamError as error:
            if isinstance(error, IngestError) and len(requests) > 1:  # too many values together
                half = len(requests) // 2
                await self._append_all(target, requests[:half])
                await self._append_all(target, requests[half:])
            else:
                await self._append_each(target, requests, error)
            return
        tables = [
            TableBatch(table, of_table, [_count(request.rows[at]) for request in requests])
            for at, (table, of_table) in enumerate(zip(target.tables, rows, strict=True))
        ]
        batch = AppendBatch(
            tables,
            [request.write_id for request in requests],
            keep_valid_rows=target.keep_valid_rows,
            acks=target.acks,
            keep_valid_tables=target.keep_valid_tables,
        )
        try:
            outcomes: Sequence[Appended | MillstreamError] = await self._append(
                target.stream, batch, deadline_s=target.deadline_s
            )
        except (IngestError, InvalidValue, UsageError) as error:
            # An error of the whole batch: together they may be too large.
            await self._append_each(target, requests, error)
            return
        except MillstreamError as error:
            outcomes = [error] * len(requests)
        for request, outcome in zip(requests, outcomes, strict=True):
            if isinstance(outcome, Appended):
                if not request.answer.done():
                    request.answer.set_result(outcome)
            elif isinstance(outcome, InvalidValue) and len(requests) > 1 and _is_other_alone(request, rows):
                await self._append_all(target, [request])
            else:
                _fail(request, outcome)

    async def _append_each(self, target: BatchTarget, requests: list[_PendingRequest], error: MillstreamError) -> None:
        """Append requests that can't be appended together, each alone; one that fails alone is refused."""
        if len(requests) == 1:
            _fail(requests[0], error)
            return
        for request in requests:
            await self._append_all(target, [request])


def _taken(waiting: deque[_PendingRequest]) -> list[_PendingRequest]:
    """Return the next batch's requests, in order."""
    requests = [waiting.popleft()]
    size = requests[0].size_bytes
    while waiting and len(requests) < BATCH_REQUESTS_MAX and size + waiting[0].size_bytes <= BATCH_BYTES_MAX:
        size += waiting[0].size_bytes
        requests.append(waiting.popleft())
    return requests


def _apart(requests: list[_PendingRequest]) -> list[list[_PendingRequest]]:
    """Group requests by the kind of their rows in each table: JSON's together, and columns of one schema."""
    kinds: dict[tuple[pa.Schema | None, ...], list[_PendingRequest]] = {}
    for request in requests:
        kind = tuple(None if isinstance(rows, list) else rows.schema for rows in request.rows)
        kinds.setdefault(kind, []).append(request)
    return list(kinds.values())


def _joined(parts: Sequence[Rows]) -> pa.Table:
    """Return the rows of several requests for one table, which are of one kind."""
    first = parts[0]
    if not isinstance(first, list):
        return first if len(parts) == 1 else pa.concat_tables(parts)
    rows: list[Row] = first
    if len(parts) > 1:
        rows = [row for part in parts for row in part]
    return columns_of(rows, [_count(part) for part in parts])


def _is_other_alone(request: _PendingRequest, together: Sequence[pa.Table]) -> bool:
    """Return whether a request's columns alone have other types: integers that others' values turn into fractions."""
    return any(_differs(rows, whole) for rows, whole in zip(request.rows, together, strict=True))


def _differs(rows: Rows, together: pa.Table) -> bool:
    if not isinstance(rows, list):
        return False
    try:
        alone = columns_of(rows).schema
    except MillstreamError:
        return False
    return any(field.type not in {pa.null(), together.schema.field(field.name).type} for field in alone)


def _count(rows: Rows) -> int:
    return len(rows) if isinstance(rows, list) else int(rows.num_rows)


def _fail(request: _PendingRequest, error: BaseException) -> None:
    if request.answer.done():
        return
    if isinstance(error, Exception):
        request.answer.set_exception(error)
    else:
        request.answer.cancel()
