"""Bulk over Arrow Flight, each append reported when durable; the peer is a bare Flight server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from bench.figures import Figure, asked, compared, measures
from bench.homes import MILLSTREAM, wait_for
from bench.places import as_installed, folder

ROWS = 2_000_000
BATCH_ROWS = 50_000


@measures("flight_put_vs_raw", "flight_get_vs_raw")
def flight() -> Iterator[Figure]:
    """Measure both ways, through `millstream serve` in a process of its own that writes the home."""
    rows = asked.rows or ROWS
    batches = _batches(rows)
    size = sum(batch.nbytes for batch in batches)
    with folder("flight") as place, _served(place / "home") as client, _bare(place) as bare:
        numbers = count()
        yield compared(
            "flight_put_vs_raw",
            lambda: _put_rows_s(client, f"public.t{next(numbers)}", batches),
            lambda: _put_rows_s(bare, f"t{next(numbers)}", batches),
            unit="rows/s",
            goal=">= 0.6",
            rows=rows,
            size_bytes=size,
            note=f"DoPut of batches of {BATCH_ROWS} rows, each reported once it is durable, through `millstream serve` on the same machine; the peer"
            " is a bare Flight server of pyarrow in a process of its own, which writes each batch into an Arrow file and reports it after its"
            " fdatasync; one client for both",
        )
        _put_rows_s(client, "public.kept", batches)
        ticket = fl.Ticket(json.dumps({"stream": "bench", "table": "public.kept"}))
        _put_rows_s(bare, "kept", [chunk.data for chunk in client.do_get(ticket)])
        yield compared(
            "flight_get_vs_raw",
            lambda: _got_rows_s(client, ticket, rows),
            lambda: _got_rows_s(bare, fl.Ticket(b"kept"), rows),
            unit="rows/s",
            goal=">= 0.5",
            rows=rows,
            size_bytes=size,
            note="DoGet of the same rows, with the `__` columns of a record; the peer sends as many bytes: the bare server sends the same record"
            " batches from an Arrow file",
        )


def _batches(rows: int) -> list[pa.RecordBatch]:
    """Return rows of about 100 bytes."""
    random = np.random.default_rng(7)
    made = []
    for start in range(0, rows, BATCH_ROWS):
        count = min(BATCH_ROWS, rows - start)
        columns = {
            "id": pa.array(np.arange(start, start + count)),
            "at": pa.array(np.arange(start, start + count) * 1_000, pa.timestamp("us", "UTC")),
            "amount": pa.array(random.random(count)),
            "place": pa.array(random.integers(0, 1_000, count, dtype=np.int32)),
            "text": pa.array([os.urandom(30).hex() for _ in range(count)]),
        }
        made.append(pa.RecordBatch.from_pydict(columns))
    return made


@contextmanager
def _served(home: Path) -> Iterator[fl.FlightClient]:
    home.mkdir()
    (home / "millstream.toml").write_text(
        '[streams.bench]\n[http]\nlisten = "127.0.0.1:0"\n[flight]\nlisten = "127.0.0.1:0"\n'
    )
    log = home.parent / "serve.log"
    command = [MILLSTREAM, "--home", str(home), "serve", "--log-format", "json"]
    with log.open("wb") as messages:
        process = subprocess.Popen(command, stderr=messages, env=as_installed())
    try:
        wait_for("it listens", lambda: b"flight listens" in log.read_bytes(), process=process)
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        address = next(line["address"] for line in lines if line["event"] == "flight listens")
        with fl.connect(f"grpc://{address}") as client:
            yield client
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def _bare(place: Path) -> Iterator[fl.FlightClient]:
    """Run this module as the peer's process."""
    path = place / "bare"
    path.mkdir()
    command = [sys.executable, "-m", "bench.flight", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=as_installed()) as process:
        try:
            assert process.stdout is not None
            with fl.connect(f"grpc://{process.stdout.readline().strip()}") as client:
                yield client
        finally:
            process.kill()


class _Bare(fl.FlightServerBase):  # type: ignore[misc] # pyarrow ships no types
    """The least that a durable Flight server does: Arrow files, one a name, with an fdatasync a batch."""

    def __init__(self, path: Path) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._path = path

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        del context
        with (
            (self._path / descriptor.path[-1].decode()).open("wb", buffering=0) as file,
            pa.ipc.new_stream(file, reader.schema) as out,
        ):
            for chunk in reader:
                out.write_batch(chunk.data)
                os.fdatasync(file.fileno())
                writer.write(json.dumps({"rows": chunk.data.num_rows}).encode())

    def do_get(self, context: Any, ticket: Any) -> Any:
        del context
        return fl.RecordBatchStream(pa.ipc.open_stream(pa.OSFile(str(self._path / ticket.ticket.decode()))))


def _put_rows_s(client: fl.FlightClient, table: str, batches: list[pa.RecordBatch]) -> float:
    """Send the batches and wait until all are reported; return the rows a second."""
    rows: int = sum(batch.num_rows for batch in batches)
    began = time.perf_counter()
    writer, reader = client.do_put(fl.FlightDescriptor.for_path("bench", table), batches[0].schema)
    reported = 0

    def collect() -> None:
        nonlocal reported
        while (line := reader.read()) is not None:
            reported += json.loads(line.to_pybytes())["rows"]

    collecting = threading.Thread(target=collect)
    collecting.start()
    for batch in batches:
        writer.write_batch(batch)
    writer.done_writing()
    collecting.join()
    writer.close()
    if reported != rows:
        raise RuntimeError(f"{reported} of {rows} rows were reported durable")
    return rows / (time.perf_counter() - began)


def _got_rows_s(client: fl.FlightClient, ticket: fl.Ticket, rows: int) -> float:
    began = time.perf_counter()
    found = sum(chunk.data.num_rows for chunk in client.do_get(ticket))
    if found != rows:
        raise RuntimeError(f"{found} of {rows} rows came")
    return rows / (time.perf_counter() - began)


if __name__ == "__main__":
    server = _Bare(Path(sys.argv[1]))
    print(f"127.0.0.1:{server.port}", flush=True)
    server.serve()
