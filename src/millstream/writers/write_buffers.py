"""Appends of a stream that writes to a buffer or reads from one, and the buffer that a configuration names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
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
from millstream.model.ids import default_name
from millstream.model.operations import Ack, Submitted, WriteOps
from millstream.model.positions import Offset, Seq, SeqRange
from millstream.model.replication import LOCAL
from millstream.routing.sinks import Sent, end_of, left_s, send_parts

if TYPE_CHECKING:
    from pathlib import Path

    from millstream.config.model import BufferConfig, StreamConfig
    from millstream.config.routing_model import SinkConfig
    from millstream.home.paths import HomePaths
    from millstream.ingest.schema_on_write import WriteRules
    from millstream.model.ids import ShardId
    from millstream.model.replication import AckLevel
    from millstream.model.writes import SessionFacts
    from millstream.ports import BufferWriting, WriteBuffer


ENTRY_POINTS: Final = "millstream.buffers"
_OURS: Final = ("log", "kafka", "redis")
_REPLICATION: Final = "replication.factor"


def buffer_name(stream: str, config: BufferConfig | SinkConfig) -> str:
    """Return the name of a stream's buffer, or of a sink that is one: its topic, the prefix of its keys, or its folder."""
    return config.location if config.kind == "log" else config.name or default_name(stream)


def buffer_of(stream: str, config: StreamConfig) -> str | None:
    """Return the name of a stream's buffer; None if it has none."""
    return None if config.buffer is None else buffer_name(stream, config.buffer)


def open_buffer(home: HomePaths, stream: str, config: BufferConfig) -> WriteBuffer:
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
    from millstream.model.durations import duration_s
    from millstream.wal.log_buffer import LogBuffer, LogBufferOptions

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
        hint=f"Use one of {', '.join(known)}, or install a package with an entry point `{ENTRY_POINTS}`.",
        known=known,
    )


class BufferDestination:
    """A write buffer as the destination of applications' appends (`ports.ApplicationLog`), instead of the log.

    An ack's offsets are the buffer's: for each shard, the operation's offset and the one after it.
    Sequence numbers are assigned when a reader takes the operation into a log.

    Concurrency: any number of threads and event loops.
    """

    def __init__(self, buffer: BufferWriting, name: str) -> None:
        self._buffer = buffer
        self._name = name

    def session(self, name: str, *, deadline_s: float | None = None) -> SessionFacts:  # noqa: ARG002 (as the appender's)
        """Always raise `sessions_not_known`.

        A session that was told "nothing yet" would restart with numbers it has already used.
        """
        raise WriteBufferError(
            f"what session {name} wrote lies in write buffer {self._name}, and how far it is isn't known here",
            code="sessions_not_known",
            session=name,
            buffer=self._name,
        )

    def shown_upto(self) -> Seq:
        """Return 0: the rows have no numbers yet."""
        return Seq(0)

    def append(self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None) -> Ack:
        """Append as `ports.ApplicationLog`; `Ack.each` has the outcome of each operation.

        Raises the buffer's errors: `BufferUnavailable`, `BufferOutcomeUnknown` ….
        """
        end_s = end_of(deadline_s)
        return self._ack(self._send_all(ops, end_s, acks), end_s)

    async def append_async(
        self, ops: Submitted, *, deadline_s: float | None = None, acks: AckLevel | None = None
    ) -> Ack:
        """Append as `append`: one thread hands the operations over, and no thread waits for the answers."""
        end_s = end_of(deadline_s)
        sent = await asyncio.to_thread(self._send_all, ops, end_s, acks)
        waiting = [asyncio.wrap_future(future) for _, parts in sent for _, future in parts if not future.done()]
        if waiting:
            answers = asyncio.gather(*waiting, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(answers), left_s(end_s))
        return self._ack(sent, end_s)

    def _send_all(self, ops: Submitted, end_s: float | None, acks: AckLevel | None) -> list[tuple[int, Sent]]:
        """Hand each operation to the buffer; return its row count and its parts.

        `ack_level_unavailable` if more is asked for than that the buffer has the rows.
        """
        assert isinstance(ops, WriteOps), "applications' operations are in memory"
        if acks is not None and acks != LOCAL:
            raise ReplicationError(
                f"the rows go to write buffer {self._name}, which has other guarantees than {acks}; nothing was appended",
                code="ack_level_unavailable",
                level=str(acks),
                buffer=self._name,
            )
        return [(op.row_count, send_parts(self._buffer, op, end_s)) for op in ops.split()]

    def _ack(self, sent: Sequence[tuple[int, Sent]], end_s: float | None) -> Ack:
        """Return the outcome of each operation; waits for missing answers.

        `WriterClosed` if the buffer was closed before all of them.
        """
        each = tuple(self._answer(count, parts, end_s) for count, parts in sent)
        if all(isinstance(outcome, WriterClosed) for outcome in each):
            # Raise the log's error, so that the holder of this destination requests another one.
            raise WriterClosed(f"write buffer {self._name} was closed; nothing was stored")
        return Ack({}, SeqRange(Seq(0), 0), each=each)

    def _answer(self, count: int, parts: Sent, end_s: float | None) -> Ack | MillstreamError:
        stored: dict[ShardId, tuple[Offset, Offset]] = {}
        failed: dict[ShardId, MillstreamError] = {}
        for shard, future in parts:
            try:
                meta = future.result(left_s(end_s))
                stored[shard] = Offset(meta.offset), Offset(meta.offset + 1)
            except TimeoutError:
                failed[shard] = BufferOutcomeUnknown(
                    f"write buffer {self._name} didn't confirm in time whether it has the rows",
                    buffer=self._name,
                    shard=int(shard),
                )
            except MillstreamError as error:
                failed[shard] = error
        if not failed:
            return Ack(stored, SeqRange(Seq(0), count))
        first = next(iter(failed.values()))
        if not stored:
            return first
        return BufferOutcomeUnknown(
            f"write buffer {self._name} has the rows of shards {sorted(stored)}, and not all of {sorted(failed)}: {first.message}",
            buffer=self._name,
            shards={str(shard): error.code for shard, error in failed.items()},
        )


def refuses_appends(stream: str, buffer: str) -> Callable[[str, str], WriteRules]:
    """Return the rules of tables of a stream that reads from a write buffer: they refuse appends, and name the buffer."""

    def rules_of(namespace: str, table: str) -> WriteRules:
        raise WriteBufferError(
            f"stream {stream} takes its rows from write buffer {buffer}; {namespace}.{table} can't be appended to it",
            code="stream_reads_buffer",
            stream=stream,
            buffer=buffer,
        )

    return rules_of
