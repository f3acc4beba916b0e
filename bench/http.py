"""Small writes over HTTP compared with PostgreSQL's protocol: the same rows and connections, each write durable."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import uvloop

from bench.figures import Figure, asked, compared, measures, reported, say
from bench.homes import Home
from bench.places import folder
from bench.source import DATABASE, postgres
from millstream.testing._servers.ports import free_port
from millstream.testing.postgres import EmbeddedPostgres

CONNECTIONS = 64
ROWS = 100
SECONDS = 5
_WAIT_S = 120.0
_CONFIG = '[streams.bench]\n[http]\nlisten = "127.0.0.1:{port}"\nprocesses = {processes}\n'
_ROW = [
    {
        "page": f"/products/{number % 50}",
        "customer": 100_000 + number,
        "ms": number * 1.25,
        "bought": number % 3 == 0,
        "agent": "Mozilla/5.0 (X11; Linux x86_64)",
    }
    for number in range(ROWS)
]
_BODY = b"".join(json.dumps(row).encode() + b"\n" for row in _ROW)
_TABLE = "CREATE TABLE clicks (page text, customer bigint, ms double precision, bought boolean, agent text)"
_INSERT = "INSERT INTO clicks VALUES " + ", ".join(
    f"('{row['page']}', {row['customer']}, {row['ms']}, {row['bought']}, '{row['agent']}')" for row in _ROW
)
_SCRIPT = """wrk.method = "POST"
wrk.headers["Content-Type"] = "application/x-ndjson"
wrk.body = io.open(os.getenv("BODY"), "rb"):read("*a")
"""
_ENTRY = "/v1/streams/bench/tables/clicks"
_SHAPE = f"rows of 5 columns (text, int8, float8, bool, text), {len(_BODY) // ROWS} B a row as JSON, {ROWS} a request, {CONNECTIONS} connections"


class Sender(asyncio.Protocol):
    """A connection that sends the same request again as soon as it is answered."""

    def __init__(self, request: bytes, counts: dict[bytes, int], until_s: float, ended: asyncio.Future[None]) -> None:
        self._request, self._counts, self._until_s, self._ended = request, counts, until_s, ended
        self._heard = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # uvloop's is no subclass
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._heard += data
        head, found, body = self._heard.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
        if len(body) < length:
            return
        self._heard = b""
        status = head[9:12]
        self._counts[status] = self._counts.get(status, 0) + 1
        if time.perf_counter() < self._until_s:
            self._transport.write(self._request)
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None) if error is None else self._ended.set_exception(error)


def _python_rows_s(port: int, seconds: float) -> float:
    """Run the client of machines without wrk: asyncio over uvloop, which takes a good part of a core."""
    request = (
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (_ENTRY.encode(), len(_BODY), _BODY)
    )
    counts: dict[bytes, int] = {}

    async def send() -> float:
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        ended = [loop.create_future() for _ in range(CONNECTIONS)]
        for future in ended:
            await loop.create_connection(partial(Sender, request, counts, began + seconds, future), "127.0.0.1", port)
        await asyncio.gather(*ended)
        return time.perf_counter() - began

    took_s = uvloop.run(send())
    if set(counts) != {b"200"}:
        raise RuntimeError(f"answers by status: {counts}")
    return counts[b"200"] * ROWS / took_s


def _wrk_rows_s(wrk: str, place: Path, port: int, seconds: float) -> float:
    """Run wrk, a client in C with one thread, as pgbench is."""
    body, script = place / "body", place / "post.lua"
    body.write_bytes(_BODY)
    script.write_text(_SCRIPT)
    command = [wrk, "--threads", "1", "--connections", str(CONNECTIONS), "--duration", f"{max(1, round(seconds))}s"]
    command += ["--timeout", "30s", "--script", str(script), f"http://127.0.0.1:{port}{_ENTRY}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"BODY": str(body)})
    found = re.search(r"Requests/sec: +([\d.]+)", done.stdout)
    if found is None or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise RuntimeError(f"wrk printed: {done.stdout[-1000:]}")
    return float(found[1]) * ROWS


@contextmanager
def _served(path: Path, *, processes: int = 1) -> Iterator[tuple[int, tuple[int, int]]]:
    """Run a home whose log one process writes, and another serves it, as under `run`.

    Yields the server's port, and the process ids of the writer and the server.
    """
    port = free_port()
    path.mkdir()
    (path / "millstream.toml").write_text(_CONFIG.format(port=port, processes=processes))
    home = Home(path)
    with home.running("capture", "run") as writer, home.running("serve") as server:
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                _python_rows_s(port, 0.1)
                break
            except (OSError, RuntimeError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError("the server doesn't answer") from error
                time.sleep(0.2)
        yield port, (writer.pid, server.pid)


def _insert_rows_s(server: EmbeddedPostgres, script: Path, seconds: float) -> float:
    """Run pgbench, the fastest client there is: it sends the statement's text each time."""
    command = [str(server.program("pgbench")), "--no-vacuum", "--protocol", "simple", "--file", str(script)]
    command += ["--client", str(CONNECTIONS), "--jobs", "1", "--time", str(max(1, round(seconds)))]
    done = subprocess.run([*command, server.dsn(DATABASE)], capture_output=True, text=True, check=True)
    found = re.search(r"tps = ([\d.]+) \(without", done.stdout)
    if found is None:
        raise RuntimeError(f"pgbench said: {done.stdout[-1000:]}")
    return float(found[1]) * ROWS


def _cpu_s(process: int) -> float:
    """Return the CPU time that a process has used, all threads."""
    times = psutil.Process(process).cpu_times()
    return float(times.user + times.system)


@measures("http_rows_100_vs_pg_insert", "http_owner_cpu_share")
def http_rows_100() -> Iterator[Figure]:
    """Measure requests of 100 rows; the peer is a multi-row INSERT by pgbench."""
    seconds = float(asked.seconds or SECONDS)
    wrk = shutil.which("wrk")
    with folder("http") as place, postgres(load_unsynced=False) as server, _served(place / "home") as (port, pids):
        with server.connect(DATABASE) as connection:
            connection.execute(_TABLE)
            connection.execute(f"ALTER DATABASE {DATABASE} SET synchronous_commit = on")
            connection.execute("ALTER SYSTEM SET max_connections = 200")
        server.restart()
        script = place / "insert.sql"
        script.write_text(_INSERT + ";\n")
        shares: list[float] = []

        def ours() -> float:
            before = [_cpu_s(process) for process in pids]
            rows_s = _wrk_rows_s(wrk, place, port, seconds) if wrk else _python_rows_s(port, seconds)
            writer, serve = (_cpu_s(process) - used_s for process, used_s in zip(pids, before, strict=True))
            shares.append(100 * writer / (writer + serve))
            return rows_s

        say(f"http_rows_100_vs_pg_insert: {seconds:g} s a run, by {wrk or 'a client in Python: install wrk'}")
        client = (
            "wrk, one thread" if wrk else "A CLIENT IN PYTHON, since wrk isn't installed: not the documented figure"
        )
        yield compared(
            "http_rows_100_vs_pg_insert",
            ours,
            partial(_insert_rows_s, server, script, seconds),
            unit="rows/s",
            goal=">= 1.5",
            rows=ROWS,
            size_bytes=len(_BODY),
            note=f"{_SHAPE}; NDJSON over HTTP, each request answered once durable; client: {client}; the peer is an INSERT of as many rows by pgbench, one"
            " thread, simple protocol, synchronous_commit on; both clients send one constant text, which each server parses every time",
        )
        yield reported(
            "http_owner_cpu_share",
            shares[1:],
            unit="%",
            goal="<= 15",
            rows=ROWS,
            size_bytes=len(_BODY),
            note="CPU time of the process that writes the log, of its own and that of the server's process together, in the same runs",
        )


@measures("http_2_processes_vs_1")
def http_processes() -> Iterator[Figure]:
    """Measure the same requests with two server processes; the peer is one."""
    seconds = float(asked.seconds or SECONDS)
    wrk = shutil.which("wrk")
    with (
        folder("http") as place,
        _served(place / "two", processes=2) as (two, _),
        _served(place / "one") as (one, _),
    ):

        def rows_s(port: int) -> float:
            return _wrk_rows_s(wrk, place, port, seconds) if wrk else _python_rows_s(port, seconds)

        yield compared(
            "http_2_processes_vs_1",
            partial(rows_s, two),
            partial(rows_s, one),
            unit="rows/s",
            goal="",
            rows=ROWS,
            size_bytes=len(_BODY),
            note=f"{_SHAPE}; [http] processes = 2; the peer is a home with one server process",
        )
