"""A stream's sinks next to its log, from the configuration.

The first rows for a sink open it; a failed open is retried.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import pyarrow as pa

from millstream.config.model import BufferConfig
from millstream.errors import DedupWindowExpired, MillstreamError, Retry, SessionsNeedOneWriter, WriterClosed
from millstream.model.operations import writes_in
from millstream.model.records import log_row_prefix
from millstream.routing.sinks import BufferSink
from millstream.writers.write_buffers import buffer_name, open_buffer_in

if TYPE_CHECKING:
    from millstream.client.appends import HomeAppends
    from millstream.config.model import StreamConfig
    from millstream.config.routing_model import SinkConfig
    from millstream.home.home import Home
    from millstream.model.operations import AppendedTables, WriteOps
    from millstream.ports import RecordSink, SinkOutcome

OpenOther: TypeAlias = "Callable[[Path | str, str | None], HomeAppends]"
"""Opens a home in a folder, or the one at an address with a token. It is handed in: the code that opens
homes also writes them."""

_APPEND_DEADLINE_S: Final = 60.0


def sinks_of(home: Home, name: str, config: StreamConfig, open_other: OpenOther) -> dict[str, RecordSink]:
    """Return a stream's sinks by name; nothing is opened yet."""
    routing = config.routing
    if routing is None:
        return {}
    return {sink: LazySink(_maker(home, name, found, open_other)) for sink, found in routing.sinks.items()}


def _maker(home: Home, stream: str, config: SinkConfig, open_other: OpenOther) -> Callable[[], RecordSink]:
    if config.kind == "millstream":
        place = config.location if "://" in config.location else home.path / config.location
        origin = f"{home.identity().id}/{stream}"
        return lambda: StreamSink(open_other(place, config.token), config.name or stream, origin=origin)
    shared = {"location", "create", "shards", "client", "timeout", "accept_loss"}
    facts = {key: value for key, value in config.model_dump().items() if key in shared}
    buffer = BufferConfig(kind=config.kind, role="writes", **facts)
    return lambda: BufferSink(open_buffer_in(home.path, buffer_name(stream, config), buffer))


class LazySink:
    """A sink that is opened when rows come: an unavailable sink doesn't prevent the stream from opening.

    Concurrency: any number of threads.
    """

    def __init__(self, make: Callable[[], RecordSink]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._opened: Future[RecordSink] | None = None
        """The sink, or the attempt to open it that is under way."""
        self._is_closed = False

    def append(self, ops: WriteOps, *, deadline_s: float | None) -> Sequence[SinkOutcome]:
        """Append as `ports.RecordSink`; also raises the errors of opening the sink, and `WriterClosed` once it is closed."""
        return self._sink().append(ops, deadline_s=deadline_s)

    def _sink(self) -> RecordSink:
        """Return the sink. Callers that come while it is being opened wait for that attempt, and share its failure."""
        mine: Future[RecordSink] = Future()
        with self._lock:
            if self._is_closed:
                raise WriterClosed("the sink was closed; it was given nothing")
            opened = self._opened
            if opened is None:
                self._opened = mine
        if opened is not None:
            return opened.result()
        try:
            mine.set_result(self._make())
        except BaseException as error:
            with self._lock:
                self._opened = None
            mine.set_exception(error)
            raise
        return mine.result()

    def close(self) -> None:
        """Close as `ports.RecordSink`, after an attempt to open it that is under way."""
        with self._lock:
            opened, self._opened, self._is_closed = self._opened, None, True
        if opened is not None and opened.exception() is None:
            opened.result().close()


class StreamSink:
    """A stream of another Millstream (`ports.RecordSink`): each operation is one there, with the same identity.

    Args:
        origin: distinguishes this stream from others that send there.
    """

    def __init__(self, home: HomeAppends, stream: str, *, origin: str) -> None:
        self._home = home
        self._stream = stream
        self._origin = origin
        self._knows_keys = True
        """Whether the other stream can recognize repeated writes: one with several writers can't."""

    def append(self, ops: WriteOps, *, deadline_s: float | None) -> Sequence[SinkOutcome]:
        """Append as `ports.RecordSink`. After an operation that failed through no fault of its own, none is tried."""
        outcomes: list[SinkOutcome] = []
        stopped: MillstreamError | None = None
        for op in ops.split():
            outcome = stopped or self._append(op, _APPEND_DEADLINE_S if deadline_s is None else deadline_s)
            if isinstance(outcome, MillstreamError) and outcome.retry is not Retry.NEVER:
                stopped = outcome
            outcomes.append(outcome)
        return outcomes

    def _append(self, op: WriteOps, deadline_s: float) -> SinkOutcome:
        tables: dict[str, list[pa.Table]] = {}
        for table in op.tables:
            own = table.rows.schema.names[len(log_row_prefix(table.schema)) :]
            rows = pa.Table.from_batches([table.rows]).select(own)
            named = {column: rows.column(column) for column in rows.column_names if _says_something(rows, column)}
            tables.setdefault(table.schema.full_name, []).append(pa.table(named) if named else rows)
        try:
            appended = self._append_rows(
                {name: pa.concat_tables(rows, promote_options="default") for name, rows in tables.items()},
                self._key_of(op),
                deadline_s,
            )
        except MillstreamError as error:
            return error
        if appended is None:
            return {"stream": self._stream, "appended": [{"duplicate": True}]}
        parts = [{"first": part.first, "rows": part.rows} for part in appended.tables.values()]
        return {"stream": self._stream, "appended": parts}

    def _append_rows(self, tables: dict[str, pa.Table], key: str | None, deadline_s: float) -> AppendedTables | None:
        if key is not None and self._knows_keys:
            try:
                return self._home.append_all(self._stream, tables, deadline_s=deadline_s, idempotency_key=key)
            except SessionsNeedOneWriter:
                self._knows_keys = False
            except DedupWindowExpired:
                return None  # it is there, but its position is no longer known
        return self._home.append_all(self._stream, tables, deadline_s=deadline_s)

    def _key_of(self, op: WriteOps) -> str | None:
        """Return a key that is the same on each resend and unique to the operation; None if nothing identifies it."""
        (write,) = writes_in(op.operations)
        if write is None:
            return None
        write_id, digest = write
        told = (self._origin, write_id.session, write_id.number, write_id.key, digest)
        return f"routed-{blake2b(repr(told).encode(), digest_size=20).hexdigest()}"

    def close(self) -> None:
        """Close as `ports.RecordSink`."""
        self._home.close()


def _says_something(rows: pa.Table, column: str) -> bool:
    """Return whether a column has a value: a column without one isn't created in the other stream yet."""
    return bool(rows.column(column).null_count < rows.num_rows)
