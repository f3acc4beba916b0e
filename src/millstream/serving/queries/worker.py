"""The process that runs callers' queries: started by the server, which may kill it at any time without loss.

It reads requests from its standard input and answers on its standard output (see `worker_pool`). It
ends when its input ends: with its server.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import resource
import signal
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa

from millstream.app.lake_sessions import open_lake
from millstream.errors import LakeError, MillstreamError
from millstream.lake.query.query_limits import QueryBounds
from millstream.model.query_reasons import REASONS_METADATA
from millstream.model.region_ages import regions_as_json
from millstream.serving.queries.frames import Frame, QueryRequest, WorkerStart, write_frame
from millstream.serving.row_streams import as_stream, in_pieces
from millstream.workers import Worker

_IDLE_S: Final = 300.0
"""How long a worker waits for a request before it ends: it holds some 200 MB."""
_ROOM_BYTES: Final = 512 << 20
"""Memory in addition to DuckDB's own: plans, batches in transit, tables that are merged over others."""
_STACK_BYTES: Final = 16 << 20
"""Room for the stacks of one DuckDB thread and one pyarrow thread."""
_TEXT_MAX: Final = 16 << 10
"""Characters of an error's message, hint or detail: an SQL function can put any value into DuckDB's message."""
_KEPT_PART: Final = 0.5
"""A worker ends once it keeps this share of its room: allocators don't return everything, and the next query needs it.
"""


def main() -> None:
    """Serve requests until the input ends."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    # Everything that prints, prints to stderr.
    os.dup2(2, 1)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the server decides when this process ends
        signal.signal(number, signal.SIG_IGN)
    start: WorkerStart = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the server that started this process
    # Any SQL may crash it, and its memory holds tables and the home's configuration.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # when memory runs out, the kernel ends a query before the server
        Path("/proc/self/oom_score_adj").write_text("500")
    _warm()
    begun_bytes = _data_bytes()
    room = _ROOM_BYTES + 2 * start.memory_bytes + _STACK_BYTES * (os.cpu_count() or 1)
    if begun_bytes:
        limit = begun_bytes + room
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    requests: queue.SimpleQueue[QueryRequest] = queue.SimpleQueue()
    Worker("requests", partial(_listen, requests)).start()
    frame = Frame.READY
    while frame is Frame.READY:
        try:
            request = requests.get(timeout=_IDLE_S)
        except queue.Empty:
            break
        write_frame(out, Frame.TAKEN)
        _answer(start, request, out)
        frame = Frame.READY if _data_bytes() - begun_bytes < room * _KEPT_PART else Frame.LEAVES
        write_frame(out, frame)
    # Skips the interpreter's shutdown, which waits for threads and makes DuckDB report objects that
    # outlive it.
    os._exit(0)


def _listen(requests: queue.SimpleQueue[QueryRequest]) -> None:
    while True:
        try:
            requests.put(pickle.load(sys.stdin.buffer))  # noqa: S301 - as above
        except EOFError:
            os._exit(0)


def _answer(start: WorkerStart, request: QueryRequest, out: BinaryIO) -> None:
    bounds = QueryBounds(start.memory_bytes, start.spill_bytes, request.time_s, Path(request.folder))
    try:
        with open_lake(
            start.home, request.stream, as_of=request.as_of, lake_only=request.lake_only, bounds=bounds
        ) as lake:
            reader = lake.stream(request.sql)
            write_frame(out, Frame.TOKEN, str(lake.token).encode())
            if lake.regions:
                write_frame(out, Frame.REGIONS, regions_as_json(lake.regions).encode())
            if reasons := (reader.schema.metadata or {}).get(REASONS_METADATA):
                write_frame(out, Frame.REASONS, reasons)
            for part in in_pieces(reader) if request.in_pieces else as_stream(reader):
                write_frame(out, Frame.PART, part)
    except MillstreamError as error:
        write_frame(out, Frame.ERROR, json.dumps(_shortened(error.as_dict()), default=str).encode())
    except BrokenPipeError:
        os._exit(0)
    except (MemoryError, pa.ArrowMemoryError):
        size = start.memory_bytes
        full = LakeError(
            f"the query needs more than {size} bytes of memory at once", code="query_memory_full", size_max=size
        )
        write_frame(out, Frame.ERROR, json.dumps(full.as_dict()).encode())
    except BaseException:  # noqa: BLE001 - told by the server
        traceback.print_exc()
        os._exit(1)


def _shortened(facts: dict[str, Any]) -> dict[str, Any]:
    """Return an error's facts, with each text within `_TEXT_MAX`: the server and the caller hold them whole."""
    return {
        name: _shortened(fact)
        if isinstance(fact, dict)
        else f"{fact[:_TEXT_MAX]} …"
        if isinstance(fact, str) and len(fact) > _TEXT_MAX
        else fact
        for name, fact in facts.items()
    }


def _warm() -> None:
    """Import and start what every query needs, so that its memory is in use before the rest is limited."""
    import deltalake  # noqa: F401
    import duckdb
    import fsspec  # noqa: F401

    with duckdb.connect(":memory:") as connection:
        connection.sql("SELECT sum(r) FROM range(1000000) t(r)").fetchall()
    pa.allocate_buffer(1 << 20)  # pyarrow's allocator reserves a gigabyte of addresses


def _data_bytes() -> int:
    """Return the process's private writable memory, as Linux's RLIMIT_DATA counts it; 0 if unavailable."""
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main()
