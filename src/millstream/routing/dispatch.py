"""Dispatch of operations to the log and to sinks, and the answer if only some of them took an operation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from millstream.errors import MillstreamError, PartialWrite, WriterClosed
from millstream.model.operations import Ack, Outcome, Repeated, Submitted, WriteOps, writes_in
from millstream.model.positions import Seq, SeqRange
from millstream.model.replication import AckLevel
from millstream.model.writes import SessionFacts
from millstream.ports import ApplicationLog, RecordSink, SinkOutcome
from millstream.routing.deliveries import Deliveries, Delivery
from millstream.routing.sinks import TOOK

logger = structlog.get_logger("millstream.routing")

LOG: Final = "log"
"""Name of the stream's own shards in `PartialWrite`."""
_THREADS_OF_A_SINK: Final = 8
_CLOSES_WITHIN_S: Final = 10.0
"""Time that operations in flight may take before the sinks are closed anyway."""


class Dispatcher:
    """A log that sends entries for sinks there (`TableRows.sink`), once it has the part for its own shards.

    Over the shards an operation is whole or not at all, and an operation that the log refuses goes nowhere. Between
    the log and sinks that can't be guaranteed: an operation that one took in part or whole, and another didn't, fails
    with `PartialWrite`. No other operation does. A repeated write isn't sent to a sink that is known to have it
    (`Deliveries`), only to those that lack it. A sink that may fail (`ignore_errors`) fails no write: its failures
    are counted, and logged.

    Concurrency: any number of threads and event loops.
    """

    def __init__(
        self,
        log: ApplicationLog,
        sinks: Mapping[str, RecordSink],
        *,
        ignore_errors: frozenset[str] = frozenset(),
        count_ignored: Callable[[str], None] = lambda _sink: None,
    ) -> None:
        self._log = log
        self._sinks = dict(sinks)
        self._ignore_errors = ignore_errors
        self._count_ignored = count_ignored
        self._deliveries = Deliveries()
        self._threads = ThreadPoolExecutor(_THREADS_OF_A_SINK * max(1, len(sinks)), "routing-sink")
        self._changed = threading.Condition()
        """Held to change the next two attributes."""
        self._closed = False
        self._under_way = 0
        self._tasks: set[asyncio.Task[Ack]] = set()

    def append(self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None) -> Ack:
        """Do the same as `LogWriter.append`, and send to sinks. `Ack.each` has the outcome of each of several operations.

        Raises:
            PartialWrite: a single operation was taken by some and not by others.
            WriterClosed: this object was closed; nothing was appended.
            MillstreamError: the log's error, for all operations; or a single operation's, if none took it.
        """
        routed = _routed(ops)
        if routed is None:
            return self._log.append(ops, deadline_s=deadline_s, acks=acks)
        with self._taking():
            if routed.local is not None:
                routed.logged(self._log.append(routed.local, deadline_s=deadline_s, acks=acks))
            wait(self._send(routed, deadline_s))
            self._settle(routed)
            note = routed.note()
            if note is not None:
                with suppress(MillstreamError):
                    self._log.append(note, deadline_s=deadline_s)
            return self._ack(routed)

    async def append_async(
        self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None
    ) -> Ack:
        """Do the same as `append`, for a task.

        If it is cancelled, it gets no answer; what the log took still goes to the sinks.
        """
        routed = _routed(ops)
        if routed is None:
            return await self._log.append_async(ops, deadline_s=deadline_s, acks=acks)
        task = asyncio.get_running_loop().create_task(self._append_async(routed, deadline_s, acks))
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return await asyncio.shield(task)

    async def _append_async(self, routed: _Routed, deadline_s: float | None, acks: AckLevel | None) -> Ack:
        with self._taking():
            if routed.local is not None:
                routed.logged(await self._log.append_async(routed.local, deadline_s=deadline_s, acks=acks))
            outcomes = self._send(routed, deadline_s)
            waiting = [asyncio.wrap_future(outcome) for outcome in outcomes if not outcome.done()]
            await asyncio.gather(*waiting, return_exceptions=True)
            self._settle(routed)
            note = routed.note()
            if note is not None:
                with suppress(MillstreamError):
                    await self._log.append_async(note, deadline_s=deadline_s)
            return self._ack(routed)

    def _end_task(self, task: asyncio.Task[Ack]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marked as retrieved: the caller may be gone

    def session(self, name: str, *, deadline_s: float | None = None) -> SessionFacts:
        """Return the same as `LogWriter.session`."""
        return self._log.session(name, deadline_s=deadline_s)

    def shown_upto(self) -> Seq:
        """Return the same as `LogWriter.persisted_upto`."""
        return self._log.shown_upto()

    def close(self) -> None:
        """Answer operations in flight, and take no more for sinks; the sinks are closed, the log isn't."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way, _CLOSES_WITHIN_S)
        self._threads.shutdown()
        for sink in self._sinks.values():
            sink.close()

    @contextmanager
    def _taking(self) -> Iterator[None]:
        with self._changed:
            if self._closed:
                raise WriterClosed("the stream was closed meanwhile; nothing of it was appended")
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    # --- to sinks --------------------------------------------------------------------------------------------------

    def _send(self, routed: _Routed, deadline_s: float | None) -> list[Future[SinkOutcome]]:
        """Send each sink the operations that the log hasn't refused and the sink isn't known to have.

        Return all their outcomes.
        """
        for sink, share in routed.shares.items():
            new: dict[int, Delivery] = {}
            for place, number in enumerate(share.numbers):
                if isinstance(routed.each[number], MillstreamError):
                    continue
                delivery = self._deliveries.begin(sink, routed.writes[number])
                routed.told[number][sink] = delivery.outcome
                if delivery.is_new:
                    new[place] = delivery
            if not new:
                continue
            part = share.ops.select(list(new))
            try:
                self._threads.submit(self._deliver, sink, part, list(new.values()), deadline_s)
            except RuntimeError:  # closed: operations in flight took too long
                self._end(
                    list(new.values()), [WriterClosed("the stream was closed; the sink was given nothing")] * len(new)
                )
        return [outcome for told in routed.told for outcome in told.values()]

    def _deliver(self, sink: str, ops: WriteOps, deliveries: Sequence[Delivery], deadline_s: float | None) -> None:
        outcomes: Sequence[SinkOutcome | BaseException]
        try:
            outcomes = self._sinks[sink].append(ops, deadline_s=deadline_s)
            assert len(outcomes) == len(deliveries), "a sink says of each operation what became of it"
        except BaseException as error:  # noqa: BLE001 (whoever waits raises it)
            outcomes = [error] * len(deliveries)
        self._end(deliveries, outcomes)

    def _end(self, deliveries: Sequence[Delivery], outcomes: Sequence[SinkOutcome | BaseException]) -> None:
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            self._deliveries.end(delivery, outcome)

    # --- answers ---------------------------------------------------------------------------------------------------

    def _settle(self, routed: _Routed) -> None:
        """Set the outcome of each operation, once all its sinks have answered."""
        ignored: dict[str, MillstreamError] = {}
        for number, told in enumerate(routed.told):
            failed: dict[str, MillstreamError] = {}
            succeeded: dict[str, Any] = {}
            for sink, future in told.items():
                said = future.result()
                if not isinstance(said, MillstreamError):
                    succeeded[sink] = dict(said)
                elif sink in self._ignore_errors:
                    self._count_ignored(sink)
                    ignored[sink] = said
                else:
                    failed[sink] = said
            if failed:
                routed.each[number] = _failure(routed.each[number], succeeded, failed)
        for sink, error in ignored.items():
            logger.warning("a sink failed, and may", sink=sink, code=error.code, error=error.message)

    def _ack(self, routed: _Routed) -> Ack:
        nothing = Ack({}, SeqRange(Seq(self.shown_upto() + 1), 0))
        each = tuple(nothing if outcome is None else outcome for outcome in routed.each)
        if len(each) == 1 and isinstance(each[0], MillstreamError):
            raise each[0]
        return replace(routed.ack or nothing, each=each, placed=None)


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of operations that goes to one sink."""

    numbers: Sequence[int]
    """Numbers of these operations, in order."""
    ops: WriteOps
    """Only these operations."""


class _Routed:
    """Operations of which some rows go to sinks."""

    def __init__(self, ops: WriteOps, shares: Mapping[str, _Share], rows_in_log: Sequence[int]) -> None:
        self.ops = ops
        self.writes = writes_in(ops.operations) if ops.is_keyed else [None] * ops.operations.num_rows
        self.shares = shares
        self._rows_in_log = rows_in_log
        elsewhere = {number for share in shares.values() for number in share.numbers}
        self._beside = [number for number in sorted(elsewhere) if not rows_in_log[number]]
        """Operations that have no row in the log, and some in a sink."""
        self._logged = [number for number in range(len(rows_in_log)) if rows_in_log[number] or number not in elsewhere]
        tables = tuple(table for table in ops.tables if table.sink is None)
        self.local = replace(ops, tables=tables).select(self._logged) if self._logged else None
        """The part that the log gets first."""
        self.ack: Ack | None = None
        """The log's answer to that part."""
        self.each: list[Outcome | None] = [None] * len(rows_in_log)
        """Outcome of each operation; None: it is in the log with no row."""
        self.told: list[dict[str, Future[SinkOutcome]]] = [{} for _ in rows_in_log]
        """For each operation the outcomes by sink."""

    def logged(self, ack: Ack) -> None:
        """Note that the log has its part, except what it refuses."""
        assert self.local is not None
        self.ack = ack
        parts = ack.each or (ack.placed or self.local).split_ack(ack)
        for number, part in zip(self._logged, parts, strict=True):
            self.each[number] = part

    def note(self) -> WriteOps | None:
        """Return operations to note in the log: they have an identity, and sinks have taken all their rows.

        Otherwise the log would wait for their numbers. It gets them last, because operations that it knows count as
        taken.
        """
        taken = [number for number in self._beside if self.each[number] is None and self.writes[number] is not None]
        return replace(self.ops, tables=()).select(taken) if taken else None


def _routed(ops: Submitted) -> _Routed | None:
    """Return the operations split by destination; None if all go to the log."""
    if not isinstance(ops, WriteOps):
        return None
    shares = {}
    for sink in dict.fromkeys(table.sink for table in ops.tables if table.sink is not None):
        numbers = [number for number, count in enumerate(ops.rows_by_operation(sink=sink)) if count]
        own = tuple(table for table in ops.tables if table.sink == sink)
        shares[sink] = _Share(numbers, replace(ops, tables=own).select(numbers))
    return _Routed(ops, shares, ops.rows_by_operation()) if shares else None


def _failure(
    logged: Outcome | None, succeeded: dict[str, Any], failed: Mapping[str, MillstreamError]
) -> MillstreamError:
    """Return the error for an operation that some sinks failed: never one sink's error if a part was taken."""
    in_log = logged.given if isinstance(logged, Repeated) else logged
    if isinstance(in_log, Ack) and in_log.seqs.count:
        offsets = {str(int(shard)): list(map(int, span)) for shard, span in in_log.offsets.items()}
        succeeded[LOG] = {"first": int(in_log.seqs.first), "rows": in_log.seqs.count, "offsets": offsets}
    in_part = [name for name, error in failed.items() if TOOK in error.details]
    if not succeeded and not in_part:
        return next(iter(failed.values()))
    # Many errors of sinks mean that nothing was taken, and callers retry them.
    took = ", ".join([*succeeded, *(f"{name} (in part)" for name in in_part)])
    error = PartialWrite(
        f"{took} took the write, {', '.join(failed)} didn't: "
        + "; ".join(f"{name}: {error.message}" for name, error in failed.items()),
        succeeded=succeeded,
        failed={name: error.as_dict() for name, error in failed.items()},
    )
    error.__cause__ = next(iter(failed.values()))
    return error
