"""Capture into a log of its own, as the product runs it: catalog, writer and `run_capture` in one process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from bench.source import DATABASE
from millstream.capture.config import CaptureConfig
from millstream.capture.run import run_capture
from millstream.catalog import Catalog, TableState
from millstream.errors import MillstreamError
from millstream.model.ids import SourceId, StreamId
from millstream.model.operations import FIRST_SHARD
from millstream.model.positions import Lsn, parse_lsn
from millstream.protocol.catch_up_mode import CatchUpMode
from millstream.testing.postgres import EmbeddedPostgres
from millstream.wal.writing.writer import LogWriter

STREAM = "bench"
PGOUTPUT = {"proto_version": "2", "streaming": "on", "messages": "true"}
"""The options of our connection; the peer gets the same."""
_GIVE_UP_S = 300.0


@dataclass(slots=True)
class Capture:
    """A capture that runs in a thread.

    `began_at` is when it had connected and requested the stream or the first chunk (`time.perf_counter`).
    """

    writer: LogWriter
    catalog: Catalog
    stream: StreamId
    stop: threading.Event = field(default_factory=threading.Event)
    began_at: float = 0.0
    began_cpu_s: float = 0.0
    """CPU time that the process had used by then."""
    error: BaseException | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    copied_at: float = 0.0

    def wait_until_durable(self, end: str, *, poll_s: float = 0.005) -> float:
        """Return the moment at which everything that committed below `end` was durable in the log."""
        target = parse_lsn(end)
        deadline = time.monotonic() + _GIVE_UP_S
        while max(self.writer.reached().values(), default=Lsn(0)) < target:
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{end} wasn't durable within {_GIVE_UP_S:.0f} s")
            time.sleep(poll_s)
        return time.perf_counter()

    def wait_until_copied(self) -> float:
        """Return the moment at which a table counted as copied: all its rows durable."""
        while not self.copied.wait(0.5):
            self.check()
        return self.copied_at

    def check(self) -> None:
        """Raise the error that ended the capture, if there is one."""
        if self.error is not None:
            raise self.error


@contextmanager
def captured(
    server: EmbeddedPostgres,
    path: Path,
    *,
    table: str,
    slot: str,
    copy: bool = False,
    copy_workers: int = 1,
    tcp: bool = False,
    catch_up: CatchUpMode = CatchUpMode.NEVER,
) -> Iterator[Capture]:
    """Capture one table over a slot into a new log under `path`.

    Args:
        server: the source.
        path: an empty folder.
        table: in schema `public`; its publication has its name.
        slot: the slot to read.
        copy: copy existing rows too; else the table counts as copied.
        copy_workers: connections that copy.
        tcp: over the loopback, if the server listens there.
        catch_up: whether the backlog is read in chunks; the default measures the stream.
    """
    with closing(Catalog(path / "catalog.db")) as catalog:
        stream = catalog.resolve_stream(STREAM)
        if not copy:
            _count_as_copied(server, catalog, stream, table)
        writer_id, epoch = catalog.register_writer(stream)
        writer = LogWriter.open(
            str(path / "wal"),
            stream=stream,
            shards=[FIRST_SHARD],
            epoch=epoch,
            reservations=catalog.reservations(stream),
            writer=writer_id,
        )
        config = CaptureConfig(
            stream=STREAM,
            dsn=server.dsn(DATABASE, tcp=tcp),
            tables=(f"public.{table}",),
            publication=table,
            slot=slot,
            spill_dir=str(path / "spill"),
            copy_workers=copy_workers,
            catch_up=catch_up,
        )
        with closing(writer):
            capture = Capture(writer, catalog, stream)
            thread = threading.Thread(target=_run, args=(capture, config), daemon=True)
            thread.start()
            try:
                yield capture
            finally:
                capture.stop.set()
                thread.join()


def _run(capture: Capture, config: CaptureConfig) -> None:
    def note(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if event.get("event") in {"streaming", "catching up"} and not capture.began_at:
            capture.began_cpu_s = time.process_time()
            capture.began_at = time.perf_counter()
        elif event.get("event") == "table copied":
            capture.copied_at = time.perf_counter()
            capture.copied.set()
        raise structlog.DropEvent

    structlog.configure(processors=[note], wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    try:
        run_capture(config, capture.catalog, capture.writer, stop=capture.stop)
    except (MillstreamError, AssertionError, OSError) as error:
        capture.error = error


def _count_as_copied(server: EmbeddedPostgres, catalog: Catalog, stream: StreamId, table: str) -> None:
    source = _source(server, catalog, stream)
    with server.connect(DATABASE) as connection:
        row = connection.execute("SELECT %s::regclass::oid::bigint", [f"public.{table}"]).fetchone()
    assert row is not None
    catalog.table_for(stream, source, int(row[0]), "public", table, state=TableState.STREAMING)


def _source(server: EmbeddedPostgres, catalog: Catalog, stream: StreamId) -> SourceId:
    with server.connect(DATABASE) as connection:
        row = connection.execute(
            "SELECT s.system_identifier, current_database(), c.timeline_id"
            " FROM pg_control_system() s, pg_control_checkpoint() c"
        ).fetchone()
    assert row is not None
    return catalog.resolve_source(stream, int(row[0]), str(row[1]), int(row[2]))
