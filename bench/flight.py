"""Bulk over Arrow Flight, each append reported when durable; the peer writes the same rows into an Arrow file."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from bench.figures import Figure, asked, compared, measures
from bench.homes import MILLSTREAM, wait_for
from bench.places import as_installed, folder

ROWS = 2_000_000
BATCH_ROWS = 50_000
_SYNC_BYTES = 16 << 20
"""Bytes between the peer's fsyncs: about one submission of ours."""


@measures("flight_put_vs_raw", "flight_get_vs_raw")
def flight() -> Iterator[Figure]:
    """Measure both ways, through `millstream serve` in a process of its own that writes the home."""
    rows = asked.rows or ROWS
    batches = _batches(rows)
    size = sum(batch.nbytes for batch in batches)
    with folder("flight") as place, _served(place / "home") as client:
        counted = iter(range(1_000))

        def put() -> float:
            began = time.perf_counter()
            assert _put(client, f"public.t{next(counted)}", batches) == rows
            return rows / (time.perf_counter() - began)

        def write() -> float:
            began = time.perf_counter()
            _write(place / "raw.arrow", batches)
            return rows / (time.perf_counter() - began)

        yield compared(
            "flight_put_vs_raw", put, write, unit="rows/s", goal=">= 0.5", rows=rows, size_bytes=size,
            note=f"DoPut of batches of {BATCH_ROWS} rows, each told of once it is durable, through `millstream serve` on the same machine; the peer writes"
            f" them into an Arrow file, with an fdatasync each {_SYNC_BYTES >> 20} MiB",
        )  # fmt: skip
        ticket = fl.Ticket(json.dumps({"stream": "bench", "table": "public.t0"}))

        def get() -> float:
            began = time.perf_counter()
            assert sum(chunk.data.num_rows for chunk in client.do_get(ticket)) == rows
            return rows / (time.perf_counter() - began)

        def read() -> float:
            began = time.perf_counter()
            with pa.OSFile(str(place / "raw.arrow")) as file, pa.ipc.open_stream(file) as reader:
                assert sum(batch.num_rows for batch in reader) == rows
            return rows / (time.perf_counter() - began)

        yield compared(
            "flight_get_vs_raw", get, read, unit="rows/s", goal="", rows=rows, size_bytes=size,
            note="DoGet of the same rows, with the columns that a record has besides; the peer reads them from the Arrow file, which holds them plain",
        )  # fmt: skip


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


def _put(client: fl.FlightClient, table: str, batches: list[pa.RecordBatch]) -> int:
    """Send the batches and wait until all are reported; return how many rows were."""
    writer, reader = client.do_put(fl.FlightDescriptor.for_path("bench", table), batches[0].schema)
    told = 0

    def hear() -> None:
        nonlocal told
        while (line := reader.read()) is not None:
            told += json.loads(line.to_pybytes())["rows"]

    hearing = threading.Thread(target=hear)
    hearing.start()
    for batch in batches:
        writer.write_batch(batch)
    writer.done_writing()
    hearing.join()
    writer.close()
    return told


def _write(file: Path, batches: list[pa.RecordBatch]) -> None:
    with file.open("wb", buffering=0) as out:
        synced = 0
        with pa.ipc.new_stream(out, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
                if out.tell() - synced >= _SYNC_BYTES:
                    os.fdatasync(out.fileno())
                    synced = out.tell()
        os.fdatasync(out.fileno())
