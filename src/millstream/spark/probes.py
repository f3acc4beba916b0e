"""Probes of an executor: which Python it has, whether it reads the log, whether it writes the lake. Runs in Spark's workers."""

from __future__ import annotations

import platform
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import millstream
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.errors import EngineError, MillstreamError
from millstream.lake.data_files import probe_storage
from millstream.lake.layout import LakeLayout
from millstream.lake.table_format import open_table
from millstream.model.ids import ShardId, StreamId
from millstream.model.positions import Offset, Seq
from millstream.wal.flight_log import FlightLog
from millstream.wal.layout import segment_path, shard_folder
from millstream.wal.reader import LogSpan, StreamReader


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    """One executor's Python, and its clock."""

    host: str
    python: str
    millstream: str
    clock_s: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class LogProbe:
    """One way to a log, to be tried."""

    folder: str
    stream: StreamId
    shard: ShardId
    base: Offset
    """The first offset of a segment that exists."""
    flight: FlightLog | None = None
    """None: the folder itself."""


@dataclass(frozen=True, slots=True)
class LakeProbe:
    """A lake, to be written to."""

    layout: LakeLayout
    witness: Path | None = None
    """In a lake in a folder: a file there that the driver has made."""


def executor_facts(_number: int) -> ExecutorFacts:
    """Return this executor's facts."""
    return ExecutorFacts(socket.gethostname(), platform.python_version(), millstream.__version__, time.time())


def read_log(probe: LogProbe) -> MillstreamError | None:
    """Return the reason why the log can't be read this way; None if it can."""
    if probe.flight is None:
        try:
            reader = StreamReader(probe.folder)
            if reader.stream_id == probe.stream:
                Path(segment_path(shard_folder(probe.folder, probe.shard), probe.base)).open("rb").close()
                return None
            reason = "it is another stream's log"
        except (MillstreamError, OSError) as error:
            reason = str(error)
        return EngineError(f"{socket.gethostname()} can't read {probe.folder}: {reason}", code="log_unreachable")
    path = segment_path(shard_folder(probe.folder, probe.shard), probe.base)
    end = SEGMENT_HEADER_SIZE
    try:
        probe.flight.reader([LogSpan(probe.shard, path, end, end, Seq(0), Seq(0), (), probe.stream)])
    except MillstreamError as error:
        return error
    return None


def write_lake(probe: LakeProbe) -> MillstreamError | None:
    """Return the reason why the lake can't be written, or its catalog can't be reached; None if both can."""
    host = socket.gethostname()
    try:
        if probe.layout.catalog:  # a role may load tables, and not list namespaces
            open_table(probe.layout, probe.layout.commits_path, probe.layout.commits_app_id)
        if probe.witness is None:
            probe_storage(probe.layout)
            return None
    except MillstreamError as error:
        return type(error)(f"{host}: {error.message}", code=error.code, hint=error.hint, **error.details)
    try:
        if probe.witness.is_file():
            own = probe.witness.with_name(f".millstream-probe-{secrets.token_hex(8)}")
            own.touch()
            own.unlink()
            return None
        reason = "it isn't the driver's folder"
    except OSError as error:
        reason = str(error.strerror)
    return EngineError(f"{host} can't write the lake in {probe.witness.parent}: {reason}", code="lake_unreachable")
