"""Appends of a stream that writes to a buffer or reads from one, and the buffer that a configuration names."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import (
    BufferOutcomeUnknown,
    ConfigError,
    MillstreamError,
    ReplicationError,
    WriteBufferError,
    WriterClosed,
)
from millstream.ingest.appender import Appender
from millstream.model.buffers import BufferMeta
from millstream.model.operations import Appended, WriteOps
from millstream.model.positions import Offset, Seq, SeqRange, StreamToken
from millstream.model.replication import LOCAL

if TYPE_CHECKING:
    from pathlib import Path

    from millstream.catalog import Catalog
    from millstream.config.model import BufferConfig
    from millstream.home.home import Home
    from millstream.ingest.requests import PreparedBatch
    from millstream.ingest.schemas import TableRules
    from millstream.model.ids import ShardId, StreamId, WriterId
    from millstream.model.writes import AppendBatch, SessionFacts
    from millstream.ports import ApplicationLog, BufferWriting, WriteBuffer

    _Sent = list[tuple[ShardId, Future[BufferMeta]]]
    """An operation's parts, with their answers."""

ENTRY_POINTS: Final = "millstream.buffers"
_OURS: Final = ("log", "kafka", "redis")
_REPLICATION: Final = "replication.factor"


def buffer_name(stream: str, config: BufferConfig) -> str:
    """Return the name of a stream's buffer: its topic, the prefix of its keys, or its folder."""
    return config.location if config.kind == "log" else config.name or f"millstream_{stream}"


def open_buffer(home: Home, stream: str, config: BufferConfig) -> WriteBuffer:
    """Open the configured buffer; raises as the buffers do."""
    return open_buffer_in(home.path, buffer_name(stream, config), config)


def open_buffer_in(folder: Path, name: str, config: BufferConfig) -> WriteBuffer:
    """Open a buffer as `open_buffer`; relative folders start at `folder`."""
    create_shards = config.shards if config.create else None
    if config.kind == "kafka":
        from millstream.buffers.kafka import KafkaBuffer, KafkaOptions

        return KafkaBuffer(
            KafkaOptions(
                config.location,
                name,
                create_shards=create_shards,
                replication=int(config.topic.get(_REPLICATION, "-1")),
                topic_options={key: value for key, value in config.topic.items() if key != _REPLICATION},
                client_options=dict(config.client),
                timeout_s=config.timeout_s,
            )
        )
    if config.kind == "redis":
        from millstream.buffers.redis import RedisBuffer, RedisOptions

        return RedisBuffer(
            RedisOptions(
                config.location,
                name,
                create_shards=create_shards,
                accept_loss=config.accept_loss,
                timeout_s=config.timeout_s,
            )
        )
    if config.kind != "log":
        made: WriteBuffer = _factory(config.kind)(
            name=name, location=config.location, create_shards=create_shards, timeout_s=config.timeout_s
        )
        return made
    from millstream.config.quantities import duration_s
    from millstream.wal.buffer import LogBuffer, LogBufferOptions

    return LogBuffer(
        LogBufferOptions(
            str(folder / config.location),
            create_shards=create_shards,
            retention_age_s=duration_s(config.retention_age),
        )
    )


def _factory(kind: str) -> Any:
    """Return the factory for buffers of a kind that isn't built in. `ConfigError` if no package has it."""
    found = entry_points(group=ENTRY_POINTS)
    for one in found:
        if one.name == kind:
            return one.load()
    known = sorted({*_OURS, *(one.name for one in found)})
    raise ConfigError(
        f"no write buffer is of kind {kind!r}",
        hint=f"There are {', '.join(known)}; a package brings others as entry points `{ENTRY_POINTS}`.",
        known=known,
    )


class AppenderToBuffer(Appender):
    """An appender whose operations go into a write buffer instead of the log; its answers have the same form.

    An answer's offsets are the buffer's: for each shard, the operation's offset and the one after it.
    Sequence numbers are assigned when a reader takes the operation into a log.

    Args:
        catalog: as in `Appender`.
        stream: as in `Appender`.
        log: as in `Appender`; nothing of the stream's is written to it.
        writer: as in `Appender`.
        rules: as in `Appender`.
        buffer: takes the operations.
        buffer_name: what it is called.

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
        buffer: BufferWriting,
        buffer_name: str,
    ) -> None:
        super().__init__(catalog, stream, log, writer=writer, rules=rules)
        self._buffer = buffer
        self._buffer_name = buffer_name
        self._start: Final = StreamToken.scalar(stream, Seq(0))

    def session(self, name: str, *, deadline_s: float | None = None) -> SessionFacts:  # noqa: ARG002 (as the appender's)
        """Always raise `sessions_not_known`.

        A session that was told "nothing yet" would restart with numbers it has already used.
        """
        raise WriteBufferError(
            f"what session {name} wrote lies in write buffer {self._buffer_name}, and how far it is isn't known here",
            code="sessions_not_known",
            session=name,
            buffer=self._buffer_name,
        )

    def append_batch(self, batch: AppendBatch, *, deadline_s: float | None) -> list[Appended | MillstreamError]:
        """Append as `Appender.append_batch`; the offsets are the buffer's.

        Raises the buffer's errors: `BufferUnavailable`, `BufferOutcomeUnknown` ….
        """
        give_up_s = _give_up_s(deadline_s)
        prepared = self.prepare(batch)
        self._check_level(prepared)
        return self._answers(prepared, self._send_all(prepared, deadline_s), give_up_s)

    async def append_prepared(
        self, prepared: PreparedBatch, *, deadline_s: float | None
    ) -> list[Appended | MillstreamError]:
        """Append as `append_batch`, with the result of `prepare`; `append_batch_async` ends here too.

        One thread hands the operations over, and no thread waits for the answers.
        """
        give_up_s = _give_up_s(deadline_s)
        self._check_level(prepared)
        sent = await asyncio.to_thread(self._send_all, prepared, deadline_s)
        waiting = [asyncio.wrap_future(future) for parts in sent for _, future in parts if not future.done()]
        if waiting:
            answers = asyncio.gather(*waiting, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(answers), _left_s(give_up_s))
        return self._answers(prepared, sent, give_up_s)

    def _check_level(self, prepared: PreparedBatch) -> None:
        """Raise `ack_level_unavailable` if the batch asks for more than that the buffer has the rows."""
        if prepared.acks is not None and prepared.acks != LOCAL:
            raise ReplicationError(
                f"the rows go to write buffer {self._buffer_name}, which has other guarantees than {prepared.acks}; nothing was appended",
                code="ack_level_unavailable",
                level=str(prepared.acks),
                buffer=self._buffer_name,
            )

    def _send_all(self, prepared: PreparedBatch, deadline_s: float | None) -> list[_Sent]:
        """Hand each operation of a batch to the buffer."""
        if prepared.ops is None:
            return []
        return [self._send(op, deadline_s) for op in prepared.ops.split()]

    def _answers(
        self, prepared: PreparedBatch, sent: Sequence[_Sent], give_up_s: float | None
    ) -> list[Appended | MillstreamError]:
        """Return the result of each request; waits for missing answers.

        `WriterClosed` if the buffer was closed before all of them.
        """
        outcomes: dict[int, Appended | MillstreamError] = dict(prepared.errors)
        counts = [] if prepared.ops is None else prepared.ops.rows_by_operation()
        for place, count, parts in zip(prepared.places, counts, sent, strict=True):
            found = self._answer(count, parts, give_up_s)
            if isinstance(found, Appended):
                found = replace(found, rejected=prepared.rejected.get(place, ()))
            outcomes[place] = found
        sent_ones = [outcomes[place] for place in prepared.places]
        if sent_ones and all(isinstance(outcome, WriterClosed) for outcome in sent_ones):
            # Raise the log's error, so that the holder of this appender requests another one.
            raise WriterClosed(f"write buffer {self._buffer_name} was closed; nothing was stored")
        return [outcomes[place] for place in range(prepared.requests)]

    def _send(self, op: WriteOps, deadline_s: float | None) -> _Sent:
        """Hand an operation's parts to the buffer. A part that it refuses is a failed future."""
        parts: _Sent = []
        for shard, part in op.by_shard().items():
            try:
                future = self._buffer.submit(shard, part, deadline_s=deadline_s)
            except MillstreamError as error:
                future = Future()
                future.set_exception(error)
            parts.append((shard, future))
        return parts

    def _answer(self, count: int, parts: _Sent, give_up_s: float | None) -> Appended | MillstreamError:
        stored: dict[ShardId, tuple[Offset, Offset]] = {}
        failed: dict[ShardId, MillstreamError] = {}
        for shard, future in parts:
            try:
                meta = future.result(_left_s(give_up_s))
                stored[shard] = Offset(meta.offset), Offset(meta.offset + 1)
            except TimeoutError:
                failed[shard] = BufferOutcomeUnknown(
                    f"write buffer {self._buffer_name} didn't say in time whether it has the rows",
                    buffer=self._buffer_name,
                    shard=int(shard),
                )
            except MillstreamError as error:
                failed[shard] = error
        if not failed:
            return Appended(self._start, SeqRange(Seq(0), count), stored, buffer=self._buffer_name)
        first = next(iter(failed.values()))
        if not stored:
            return first
        return BufferOutcomeUnknown(
            f"write buffer {self._buffer_name} has the rows of shards {sorted(stored)}, and not all of {sorted(failed)}: {first.message}",
            buffer=self._buffer_name,
            shards={str(shard): error.code for shard, error in failed.items()},
        )


def _give_up_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else time.monotonic() + deadline_s


def _left_s(give_up_s: float | None) -> float | None:
    return None if give_up_s is None else max(0.0, give_up_s - time.monotonic())


class AppenderOfReader(Appender):
    """The appender of a stream that reads from a write buffer: it refuses appends, and names the buffer."""

    def __init__(
        self,
        catalog: Catalog,
        stream: StreamId,
        log: ApplicationLog,
        *,
        writer: WriterId,
        rules: TableRules,
        buffer_name: str,
        stream_name: str,
    ) -> None:
        super().__init__(catalog, stream, log, writer=writer, rules=rules)
        self._buffer_name = buffer_name
        self._stream_name = stream_name

    def prepare(self, batch: AppendBatch) -> PreparedBatch:
        """Always raise `stream_reads_buffer`."""
        raise WriteBufferError(
            f"stream {self._stream_name} takes its rows from write buffer {self._buffer_name}; {batch.table} can't be appended to it",
            code="stream_reads_buffer",
            stream=self._stream_name,
            buffer=self._buffer_name,
        )
