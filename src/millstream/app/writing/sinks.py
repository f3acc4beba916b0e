"""A stream's sinks beside its log, from the configuration: opened by the first rows that go there, and again where that failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from millstream.app.config.model import BufferConfig
from millstream.app.writing.buffered import open_buffer_in
from millstream.errors import MillstreamError
from millstream.model.buffers import single_operations
from millstream.model.records import LOG_ROW_PREFIX
from millstream.routing.sinks import BufferSink, took_part

if TYPE_CHECKING:
    from millstream.app.config.model import StreamConfig
    from millstream.app.config.routing_model import SinkConfig
    from millstream.app.home import Home
    from millstream.app.opened import OpenHome
    from millstream.app.remote.client import RemoteHome
    from millstream.model.operations import WriteOps
    from millstream.ports import RecordSink

_APPEND_DEADLINE_S = 60.0


def sinks_of(home: Home, name: str, config: StreamConfig) -> dict[str, RecordSink]:
    """A stream's sinks by name; nothing is opened yet."""
    routing = config.routing
    if routing is None:
        return {}
    return {sink: LazySink(_maker(home, name, found)) for sink, found in routing.sinks.items()}


def _maker(home: Home, stream: str, config: SinkConfig) -> Callable[[], RecordSink]:
    if config.kind == "millstream":
        return lambda: OtherStream(home, config, config.name or stream)
    shared = {"location", "create", "shards", "client", "timeout", "accept_loss"}
    facts = {key: value for key, value in config.model_dump().items() if key in shared}
    buffer = BufferConfig(kind=config.kind, role="writes", **facts)
    name = config.location if config.kind == "log" else config.name or f"millstream_{stream}"
    return lambda: BufferSink(open_buffer_in(home.path, name, buffer))


class LazySink:
    """A sink that is opened when rows come: one that is away keeps nobody from opening the stream.

    Concurrency: any number of threads.
    """

    def __init__(self, make: Callable[[], RecordSink]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._sink: RecordSink | None = None

    def append(self, ops: WriteOps, *, deadline_s: float | None) -> Mapping[str, object]:
        """As `ports.RecordSink`; raises too what opening it raises."""
        with self._lock:
            if self._sink is None:
                self._sink = self._make()
            sink = self._sink
        return sink.append(ops, deadline_s=deadline_s)

    def close(self) -> None:
        """As `ports.RecordSink`."""
        with self._lock:
            sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()


class OtherStream:
    """A stream of another Millstream, behind an address or in a folder (`ports.RecordSink`): each operation is one there too."""

    def __init__(self, home: Home, config: SinkConfig, stream: str) -> None:
        self._stream = stream
        self._home: OpenHome | RemoteHome
        if "://" in config.location:
            from millstream.app.remote.client import connect

            self._home = connect(config.location, token=config.token)
        else:
            from millstream.app.opened import open as open_home

            self._home = open_home(home.path / config.location)

    def append(self, ops: WriteOps, *, deadline_s: float | None) -> Mapping[str, object]:
        """As `ports.RecordSink`. Where one operation fails, those before it are there."""
        deadline_s = _APPEND_DEADLINE_S if deadline_s is None else deadline_s
        numbers: list[dict[str, Any]] = []
        for op in single_operations(ops):
            for table in op.tables:
                rows = pa.Table.from_batches([table.rows]).select(table.rows.schema.names[len(LOG_ROW_PREFIX) :])
                named = {column: rows.column(column) for column in rows.column_names if _says_something(rows, column)}
                try:
                    appended = self._home.append(
                        self._stream, table.schema.full_name, pa.table(named), deadline_s=deadline_s
                    )
                except MillstreamError as error:
                    raise (took_part(error, numbers) if numbers else error) from error.__cause__
                numbers.append({"first": int(appended.seqs.first), "rows": appended.row_count})
        return {"stream": self._stream, "appended": numbers}

    def close(self) -> None:
        """As `ports.RecordSink`."""
        self._home.close()


def _says_something(rows: pa.Table, column: str) -> bool:
    """Whether a column has a value: one without is no column of the other stream's yet."""
    return bool(rows.column(column).null_count < rows.num_rows)
