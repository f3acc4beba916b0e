"""An operation on its way to the log and to sinks at once, and what is said where some took it and some didn't."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, Protocol

import structlog

from millstream.errors import MillstreamError, PartialWrite, WriterClosed
from millstream.model.appends import Submitted
from millstream.model.operations import Ack, TableRows, WriteOps
from millstream.model.positions import Seq, SeqRange
from millstream.model.replication import AckLevel
from millstream.model.writes import SessionFacts
from millstream.ports import RecordSink
from millstream.routing.sinks import TOOK

logger = structlog.get_logger("millstream.routing")

LOG: Final = "log"
"""What `PartialWrite` calls the stream's own shards."""
_THREADS_OF_A_SINK: Final = 8


class AppendingLog(Protocol):
    """What of the log's writer is needed here."""

    def append(self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None) -> Ack:
        """As `LogWriter.append`."""

    async def append_async(
        self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None
    ) -> Ack:
        """As `LogWriter.append_async`."""

    def session(self, name: str, *, deadline_s: float | None = None) -> SessionFacts:
        """As `LogWriter.session`."""

    def persisted_upto(self) -> Seq:
        """As `LogWriter.persisted_upto`."""


class Dispatcher:
    """A log that sends entries for sinks there, side by side with its own shards' part (`TableRows.sink`).

    Over the shards one operation is whole or not at all. Between the log and each sink it can't be: `PartialWrite` says which
    of them took it. A sink that may fail (`ignore_errors`) fails no write: that is counted, and logged.

    Concurrency: any number of threads and event loops.
    """

    def __init__(
        self, log: AppendingLog, sinks: Mapping[str, RecordSink], *, ignore_errors: frozenset[str] = frozenset()
    ) -> None:
        self._log = log
        self._sinks = dict(sinks)
        self._ignore_errors = ignore_errors
        self._threads = ThreadPoolExecutor(_THREADS_OF_A_SINK * max(1, len(sinks)), "routing-sink")
        self._closing = threading.Lock()
        """Held to ask sinks, and to take no more."""
        self._closed = False
        self.ignored: Counter[str] = Counter()
        """Writes that a sink failed and that went on all the same, by sink."""

    def append(self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None) -> Ack:
        """As `LogWriter.append`, and to sinks.

        Raises:
            PartialWrite: some took it and some didn't.
            WriterClosed: it was closed; nothing of it was appended.
            MillstreamError: none took it: the log's error, or that of the first sink.
        """
        local, by_sink = _apart(ops)
        if not by_sink:
            return self._log.append(ops, deadline_s=deadline_s, acks=acks)
        asked = self._ask(by_sink, deadline_s)
        outcome: Ack | MillstreamError | None = None
        if local is not None:
            try:
                outcome = self._log.append(local, deadline_s=deadline_s, acks=acks)
            except MillstreamError as error:
                outcome = error
        told = {name: _outcome(future) for name, future in asked.items()}
        return self._ack(outcome, told)

    async def append_async(
        self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None
    ) -> Ack:
        """As `append`, for a task."""
        local, by_sink = _apart(ops)
        if not by_sink:
            return await self._log.append_async(ops, deadline_s=deadline_s, acks=acks)
        asked = self._ask(by_sink, deadline_s)
        outcome: Ack | MillstreamError | None = None
        if local is not None:
            try:
                outcome = await self._log.append_async(local, deadline_s=deadline_s, acks=acks)
            except MillstreamError as error:
                outcome = error
        await asyncio.gather(*map(asyncio.wrap_future, asked.values()), return_exceptions=True)
        return self._ack(outcome, {name: _outcome(future) for name, future in asked.items()})

    def session(self, name: str, *, deadline_s: float | None = None) -> SessionFacts:
        """As `LogWriter.session`."""
        return self._log.session(name, deadline_s=deadline_s)

    def persisted_upto(self) -> Seq:
        """As `LogWriter.persisted_upto`."""
        return self._log.persisted_upto()

    def close(self) -> None:
        """Answer what is on its way, and take nothing more for sinks; they are closed, the log isn't."""
        with self._closing:
            self._closed = True
        self._threads.shutdown()
        for sink in self._sinks.values():
            sink.close()

    def _ask(
        self, by_sink: Mapping[str, WriteOps], deadline_s: float | None
    ) -> dict[str, Future[Mapping[str, object]]]:
        with self._closing:
            if self._closed:
                raise WriterClosed("the stream was closed meanwhile; nothing of it was appended")
            return {
                name: self._threads.submit(self._sinks[name].append, ops, deadline_s=deadline_s)
                for name, ops in by_sink.items()
            }

    def _ack(
        self,
        outcome: Ack | MillstreamError | None,
        told: Mapping[str, Mapping[str, object] | MillstreamError],
    ) -> Ack:
        succeeded: dict[str, Any] = {}
        failed: dict[str, MillstreamError] = {}
        for name, said in told.items():
            if not isinstance(said, MillstreamError):
                succeeded[name] = dict(said)
            elif name in self._ignore_errors:
                self.ignored[name] += 1
                logger.warning("a sink failed, and may", sink=name, code=said.code, error=said.message)
            else:
                failed[name] = said
        if isinstance(outcome, Ack):
            offsets = {str(int(shard)): list(map(int, span)) for shard, span in outcome.offsets.items()}
            succeeded[LOG] = {"first": int(outcome.seqs.first), "rows": outcome.seqs.count, "offsets": offsets}
        elif outcome is not None:
            failed = {LOG: outcome, **failed}
        if not failed:
            return outcome if isinstance(outcome, Ack) else Ack({}, SeqRange(Seq(self.persisted_upto() + 1), 0))
        in_part = [name for name, error in failed.items() if TOOK in error.details]
        if not succeeded and not in_part:
            raise next(iter(failed.values()))
        # Never the error of a sink alone that has a part of it: many of them mean that nothing was taken, and who hears them tries again.
        took = ", ".join([*succeeded, *(f"{name} (in part)" for name in in_part)])
        raise PartialWrite(
            f"{took} took the write, {', '.join(failed)} didn't: "
            + "; ".join(f"{name}: {error.message}" for name, error in failed.items()),
            succeeded=succeeded,
            failed={name: error.as_dict() for name, error in failed.items()},
        ) from next(iter(failed.values()))


def _apart(ops: Submitted) -> tuple[WriteOps | None, dict[str, WriteOps]]:
    """The log's part of operations, where it has one, and each sink's."""
    if not isinstance(ops, WriteOps) or all(table.sink is None for table in ops.tables):
        return None, {}
    by_sink: dict[str, list[TableRows]] = {}
    local = [table for table in ops.tables if table.sink is None]
    for table in ops.tables:
        if table.sink is not None:
            by_sink.setdefault(table.sink, []).append(table)
    return replace(ops, tables=tuple(local)) if local else None, {
        name: WriteOps(ops.operations, tuple(tables)) for name, tables in by_sink.items()
    }


def _outcome(future: Future[Mapping[str, object]]) -> Mapping[str, object] | MillstreamError:
    """What a sink said. Our own bugs aren't taken for its failure."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, MillstreamError):
        return error
    raise error
