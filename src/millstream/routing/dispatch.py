"""Dispatch of operations to the log and to sinks, and the answer if only some of them took an operation."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import structlog

from millstream.errors import AppendOutcomeUnknown, MillstreamError, Overloaded, PartialWrite, WriterClosed
from millstream.model.operations import Ack, Outcome, Submitted, WriteOps, writes_in
from millstream.model.positions import Seq, SeqRange
from millstream.model.replication import AckLevel
from millstream.model.steps import run, run_async
from millstream.model.writes import SessionFacts, WriteId
from millstream.ports import ApplicationLog, RecordSink, SinkOutcome
from millstream.routing.sinks import TOOK, end_of, left_s
from millstream.wal.files import error_of_os
from millstream.workers import Crew, call_apart

logger = structlog.get_logger("millstream.routing")

LOG: Final = "log"
"""Name of the stream's own shards in `PartialWrite`."""
_THREADS_OF_A_SINK: Final = 8
_CLOSES_WITHIN_S: Final = 10.0
"""Time that operations in flight may take before the sinks are closed anyway; and as much for the sinks' end."""

_Step: TypeAlias = tuple[WriteOps, AckLevel | None] | list[Future[SinkOutcome]]
"""Operations for the log to append at a level, or outcomes of sinks to wait for."""


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
        self._threads = Crew("routing-sink", _THREADS_OF_A_SINK * max(1, len(sinks)))
        self._changed = threading.Condition()
        """Held to change the next four attributes."""
        self._closed = False
        self._under_way = 0
        self._on_way: dict[SinkDelivery, bool] = {}
        """The deliveries without an outcome, and whether the sink has got each."""
        self._is_over = False
        """Whether the deliveries on their way were given up: nothing more goes to a sink."""
        self._tasks: set[asyncio.Task[Ack]] = set()

    def append(self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None) -> Ack:
        """Do the same as `LogWriter.append`, and send to sinks. `Ack.each` has the outcome of each of several operations.

        Raises:
            PartialWrite: a single operation was taken by some and not by others.
            WriterClosed: this object was closed; nothing was appended.
            MillstreamError: the log's error, for all operations; or a single operation's, if none took it.
        """
        if not isinstance(ops, WriteOps) or not _sinks_of(ops):
            return self._log.append(ops, deadline_s=deadline_s, acks=acks)

        def do(step: _Step) -> Ack | None:
            if isinstance(step, list):
                wait(step)
                return None
            return self._log.append(step[0], deadline_s=deadline_s, acks=step[1])

        return run(self._steps(ops, deadline_s, acks), do)

    async def append_async(
        self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None
    ) -> Ack:
        """Do the same as `append`, for a task.

        If it is cancelled, it gets no answer; what the log took still goes to the sinks.
        """
        if not isinstance(ops, WriteOps) or not _sinks_of(ops):
            return await self._log.append_async(ops, deadline_s=deadline_s, acks=acks)

        async def do(step: _Step) -> Ack | None:
            if isinstance(step, list):
                waiting = [asyncio.wrap_future(outcome) for outcome in step if not outcome.done()]
                if waiting:
                    # Unlike `gather`, it leaves the deliveries alone if the loop ends and cancels this task.
                    await asyncio.wait(waiting)
                return None
            return await self._log.append_async(step[0], deadline_s=deadline_s, acks=step[1])

        task = asyncio.get_running_loop().create_task(run_async(self._steps(ops, deadline_s, acks), do))
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return await asyncio.shield(task)

    def _steps(
        self, ops: WriteOps, deadline_s: float | None, acks: AckLevel | None
    ) -> Generator[_Step, Ack | None, Ack]:
        """Append operations of which some rows go to sinks; the steps are done by the caller."""
        in_log = ops.rows_by_operation()
        in_sinks = {sink: ops.rows_by_operation(sink=sink) for sink in _sinks_of(ops)}
        beside = [n for n, count in enumerate(in_log) if not count and any(counts[n] for counts in in_sinks.values())]
        """Operations that have no row in the log, and some in a sink."""
        logged = [number for number in range(len(in_log)) if number not in set(beside)]
        each: list[Outcome | None] = [None] * len(in_log)
        """Outcome of each operation; None: the log has no row of it."""
        writes = writes_in(ops.operations) if ops.is_keyed else [None] * len(in_log)
        ack: Ack | None = None
        with self._taking():
            if logged:
                own = tuple(table for table in ops.tables if table.sink is None)
                local = replace(ops, tables=own).select(logged)
                ack = yield local, acks
                assert ack is not None
                for number, part in zip(logged, ack.each or (ack.placed or local).split_ack(ack), strict=True):
                    each[number] = part
            told = self._send(ops, in_sinks, each, writes, deadline_s)
            yield [outcome for of_sinks in told for outcome in of_sinks.values()]
            self._settle(each, told)
            # The log waits for the numbers of writes that sinks alone have. It gets them last, because writes that
            # it knows count as taken.
            taken = [number for number in beside if each[number] is None and writes[number] is not None]
            if taken:
                with suppress(MillstreamError):
                    yield replace(ops, tables=()).select(taken), None
            return self._ack(ack, each)

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
        """Answer operations in flight, and take no more for sinks; the sinks are closed, the log isn't.

        A sink that hangs is left behind. Its operations fail, though it may take what it has got.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way, _CLOSES_WITHIN_S)
            left, self._on_way, self._is_over = self._on_way, {}, True
        for delivery, is_begun in left.items():
            self._deliveries.end(delivery, _gave_no_answer() if is_begun else _was_given_nothing())
        self._threads.close()
        closing = {call_apart("routing-sink-end", sink.close): name for name, sink in self._sinks.items()}
        closed, hanging = wait(closing, _CLOSES_WITHIN_S)
        for sink_end in hanging:
            logger.warning("a sink hangs, and isn't waited for", sink=closing[sink_end])
        for sink_end in closed:
            sink_end.result()

    @contextmanager
    def _taking(self) -> Iterator[None]:
        with self._changed:
            if self._closed:
                raise WriterClosed("the stream was closed; none of these rows were appended")
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    # --- to sinks --------------------------------------------------------------------------------------------------

    def _send(
        self,
        ops: WriteOps,
        in_sinks: Mapping[str, Sequence[int]],
        each: Sequence[Outcome | None],
        writes: Sequence[tuple[WriteId, int] | None],
        deadline_s: float | None,
    ) -> list[dict[str, Future[SinkOutcome]]]:
        """Send each sink the operations that the log hasn't refused and the sink isn't known to have.

        Return the outcomes of each operation, by sink.
        """
        told: list[dict[str, Future[SinkOutcome]]] = [{} for _ in each]
        end_s = end_of(deadline_s)
        for sink, counts in in_sinks.items():
            new: dict[int, SinkDelivery] = {}
            for number, count in enumerate(counts):
                if not count or isinstance(each[number], MillstreamError):
                    continue
                delivery = self._deliveries.begin(sink, writes[number])
                told[number][sink] = delivery.outcome
                if delivery.is_new:
                    new[number] = delivery
            if not new:
                continue
            own = tuple(table for table in ops.tables if table.sink == sink)
            part = replace(ops, tables=own).select(list(new))
            with self._changed:
                self._on_way |= dict.fromkeys(new.values(), False)
                is_over = self._is_over  # operations in flight took too long
            if is_over:
                self._end(list(new.values()), [_was_given_nothing()] * len(new))
                continue
            try:
                self._threads.submit(partial(self._deliver, sink, part, list(new.values()), end_s))
            except OSError as error:
                self._end(list(new.values()), [error] * len(new))
        return told

    def _deliver(self, sink: str, ops: WriteOps, deliveries: Sequence[SinkDelivery], end_s: float | None) -> None:
        outcomes: Sequence[SinkOutcome | BaseException]
        in_time_s = left_s(end_s)
        if in_time_s == 0:
            self._end(deliveries, [_came_too_late(sink)] * len(deliveries))
            return
        with self._changed:
            if self._is_over:
                return
            self._on_way |= dict.fromkeys(deliveries, True)
        try:
            outcomes = self._sinks[sink].append(ops, deadline_s=in_time_s)
            assert len(outcomes) == len(deliveries), "a sink returns an outcome for each operation"
        except BaseException as error:  # noqa: BLE001 (whoever waits raises it)
            outcomes = [error] * len(deliveries)
        self._end(deliveries, outcomes)

    def _end(self, deliveries: Sequence[SinkDelivery], outcomes: Sequence[SinkOutcome | BaseException]) -> None:
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            with self._changed:
                is_awaited = self._on_way.pop(delivery, None) is not None
            if is_awaited:
                # As the system's own, it would say that nothing was done, though the log may have the operation.
                told = error_of_os(outcome) if isinstance(outcome, OSError) else outcome
                self._deliveries.end(delivery, told)

    # --- answers ---------------------------------------------------------------------------------------------------

    def _settle(self, each: list[Outcome | None], told: Sequence[Mapping[str, Future[SinkOutcome]]]) -> None:
        """Set the outcome of each operation, once all its sinks have answered."""
        ignored: dict[str, MillstreamError] = {}
        for number, of_sinks in enumerate(told):
            failed: dict[str, MillstreamError] = {}
            succeeded: dict[str, Any] = {}
            for sink, future in of_sinks.items():
                said = future.result()
                if not isinstance(said, MillstreamError):
                    succeeded[sink] = dict(said)
                elif sink in self._ignore_errors:
                    self._count_ignored(sink)
                    ignored[sink] = said
                else:
                    failed[sink] = said
            if failed:
                each[number] = _failure(each[number], succeeded, failed)
        for sink, error in ignored.items():
            logger.warning("a sink failed, and may", sink=sink, code=error.code, error=error.message)

    def _ack(self, ack: Ack | None, each: Sequence[Outcome | None]) -> Ack:
        nothing = Ack({}, SeqRange(Seq(self.shown_upto() + 1), 0))
        outcomes = tuple(nothing if outcome is None else outcome for outcome in each)
        if len(outcomes) == 1 and isinstance(outcomes[0], MillstreamError):
            raise outcomes[0]
        return replace(ack or nothing, each=outcomes, placed=None)


def _gave_no_answer() -> MillstreamError:
    return AppendOutcomeUnknown(
        "the stream was closed before the sink answered: it may or may not have the rows",
        hint="Look at the sink, or send the rows again under their idempotency key or session.",
    )


def _was_given_nothing() -> MillstreamError:
    return WriterClosed("the stream was closed; the sink was given nothing")


def _came_too_late(sink: str) -> MillstreamError:
    return Overloaded(f"sink {sink} was busy with earlier writes until the deadline; it was given nothing")


def _sinks_of(ops: WriteOps) -> list[str]:
    """Return the names of the sinks that rows go to."""
    return list(dict.fromkeys(table.sink for table in ops.tables if table.sink is not None))


def _failure(
    logged: Outcome | None, succeeded: dict[str, Any], failed: Mapping[str, MillstreamError]
) -> MillstreamError:
    """Return the error for an operation that some sinks failed: never one sink's error if a part was taken."""
    if isinstance(logged, Ack) and logged.seqs.count:
        offsets = {str(int(shard)): list(map(int, span)) for shard, span in logged.offsets.items()}
        succeeded[LOG] = {"first": int(logged.seqs.first), "rows": logged.seqs.count, "offsets": offsets}
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


WRITES_KNOWN_MAX: Final = 1 << 16
"""Most writes remembered over all sinks, the latest ones: some 200 bytes each."""


@dataclass(frozen=True, slots=True)
class SinkDelivery:
    """One operation in flight to one sink."""

    write: bytes | None
    """Identity of the write at the sink; None if it has none."""
    outcome: Future[SinkOutcome]
    """The outcome of the delivery."""
    is_new: bool = True
    """Whether to send it to the sink; otherwise it is there, or in flight."""


class Deliveries:
    """Remembers which writes sinks have taken, and which are in flight to them.

    It lives as long as the process writes the stream: after that, the next process sends repeated writes to sinks
    again.

    Concurrency: any number of threads.
    """

    def __init__(self, *, writes_max: int = WRITES_KNOWN_MAX) -> None:
        self._writes_max = writes_max
        self._lock = threading.Lock()
        self._taken: OrderedDict[bytes, None] = OrderedDict()
        """Writes that were taken, longest unasked first."""
        self._on_way: dict[bytes, Future[SinkOutcome]] = {}

    def begin(self, sink: str, write: tuple[WriteId, int] | None) -> SinkDelivery:
        """Begin the delivery of an operation to a sink. If it `is_new`, the caller calls `end`, in any case.

        Args:
            write: identity of the operation, if it has one, and digest of its rows. Other rows under the
                same identity are another write.
        """
        if write is None:
            return SinkDelivery(None, Future())
        write_id, digest = write
        told = repr((sink, write_id.session, write_id.number, write_id.key, digest))
        key = blake2b(told.encode(), digest_size=16).digest()
        with self._lock:
            if key in self._taken:
                self._taken.move_to_end(key)
                outcome: Future[SinkOutcome] = Future()
                outcome.set_result({"duplicate": True})
                return SinkDelivery(key, outcome, is_new=False)
            if key in self._on_way:
                return SinkDelivery(key, self._on_way[key], is_new=False)
            self._on_way[key] = Future()
            return SinkDelivery(key, self._on_way[key])

    def end(self, delivery: SinkDelivery, outcome: SinkOutcome | BaseException) -> None:
        """Set the outcome of a delivery, for all its waiters. An exception outside our tree is raised there."""
        if delivery.write is not None:
            with self._lock:
                del self._on_way[delivery.write]
                if not isinstance(outcome, BaseException):
                    self._taken[delivery.write] = None
                    if len(self._taken) > self._writes_max:
                        self._taken.popitem(last=False)
        if isinstance(outcome, BaseException) and not isinstance(outcome, MillstreamError):
            delivery.outcome.set_exception(outcome)
        else:
            delivery.outcome.set_result(outcome)
