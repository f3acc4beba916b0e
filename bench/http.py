"""Small writes over HTTP compared with PostgreSQL's protocol: the same rows and connections, each write durable."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvloop
from psycopg import pq

from bench.figures import Figure, asked, compared, measures, say
from bench.homes import Home
from bench.places import folder
from bench.source import DATABASE, postgres
from millstream.testing._servers.ports import free_port
from millstream.testing.postgres import EmbeddedPostgres

CONNECTIONS = 64
ROWS = 100
SECONDS = 5
_WAIT_S = 120.0
_CONFIG = '[streams.bench]\n[http]\nlisten = "127.0.0.1:{port}"\n'
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
_COPY = "".join("\t".join(str(value) for value in row.values()) + "\n" for row in _ROW).encode()
_SHAPE = f"rows of 5 columns (text, int8, float8, bool, text), {len(_BODY) // ROWS} B a row as JSON, {ROWS} a request, {CONNECTIONS} connections"


class _Sender(asyncio.Protocol):
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


def _http_rows_s(port: int, seconds: float) -> float:
    request = (
        b"POST /v1/streams/bench/tables/clicks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
    )
    counts: dict[bytes, int] = {}

    async def send() -> float:
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        ended = [loop.create_future() for _ in range(CONNECTIONS)]
        for future in ended:
            await loop.create_connection(partial(_Sender, request, counts, began + seconds, future), "127.0.0.1", port)
        await asyncio.gather(*ended)
        return time.perf_counter() - began

    took_s = uvloop.run(send())
    if set(counts) != {b"200"}:
        raise RuntimeError(f"answers by status: {counts}")
    return counts[b"200"] * ROWS / took_s


@contextmanager
def _served(path: Path) -> Iterator[int]:
    """Run a home whose log one process writes, and another serves it, as under `run`; yield the server's port."""
    port = free_port()
    path.mkdir()
    (path / "millstream.toml").write_text(_CONFIG.format(port=port))
    home = Home(path)
    with home.running("capture", "run"), home.running("serve"):
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                _http_rows_s(port, 0.1)
                break
            except (OSError, RuntimeError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError("nobody serves") from error
                time.sleep(0.2)
        yield port


def _insert_rows_s(server: EmbeddedPostgres, script: Path, seconds: float) -> float:
    """Run pgbench, the fastest client there is: it sends the statement's text each time."""
    command = [str(server.program("pgbench")), "--no-vacuum", "--protocol", "simple", "--file", str(script)]
    command += ["--client", str(CONNECTIONS), "--jobs", "1", "--time", str(max(1, round(seconds)))]
    done = subprocess.run([*command, server.dsn(DATABASE)], capture_output=True, text=True, check=True)
    found = re.search(r"tps = ([\d.]+) \(without", done.stdout)
    if found is None:
        raise RuntimeError(f"pgbench said: {done.stdout[-1000:]}")
    return float(found[1]) * ROWS


def _copy_rows_s(server: EmbeddedPostgres, seconds: float) -> float:
    """Run libpq alone: a COPY of the rows' text for each write, a thread a connection."""
    connections = [pq.PGconn.connect(server.dsn(DATABASE).encode()) for _ in range(CONNECTIONS)]
    counts = [0] * CONNECTIONS
    wrong: list[str] = []
    until_s = time.perf_counter() + seconds

    def send(place: int) -> None:
        connection = connections[place]
        while time.perf_counter() < until_s:
            connection.exec_(b"COPY clicks FROM STDIN")
            connection.put_copy_data(_COPY)
            connection.put_copy_end()
            while (result := connection.get_result()) is not None:
                if result.status != pq.ExecStatus.COMMAND_OK:
                    wrong.append(str(result.error_message))
                    return
            counts[place] += 1

    began = time.perf_counter()
    threads = [threading.Thread(target=send, args=(place,)) for place in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - began
    for connection in connections:
        connection.finish()
    if wrong:
        raise RuntimeError(wrong[0])
    return sum(counts) * ROWS / took_s


@measures("http_rows_100_vs_pg_insert", "http_rows_100_vs_pg_copy")
def http_rows_100() -> Iterator[Figure]:
    seconds = float(asked.seconds or SECONDS)
    with folder("http") as place, postgres(load_unsynced=False) as server, _served(place / "home") as port:
        with server.connect(DATABASE) as connection:
            connection.execute(_TABLE)
            connection.execute(f"ALTER DATABASE {DATABASE} SET synchronous_commit = on")
            connection.execute("ALTER SYSTEM SET max_connections = 200")
        server.restart()
        script = place / "insert.sql"
        script.write_text(_INSERT + ";\n")
        for name, goal, peer, how in (
            (
                "http_rows_100_vs_pg_insert",
                ">= 3",
                partial(_insert_rows_s, server, script, seconds),
                "an INSERT of 100 rows by pgbench",
            ),
            (
                "http_rows_100_vs_pg_copy",
                ">= 1.5",
                partial(_copy_rows_s, server, seconds),
                "a COPY of 100 rows by libpq, a thread a connection",
            ),
        ):
            say(f"{name}: {seconds:g} s a run")
            yield compared(
                name,
                partial(_http_rows_s, port, seconds),
                peer,
                unit="rows/s",
                goal=goal,
                rows=ROWS,
                size_bytes=len(_BODY),
                note=f"{_SHAPE}; NDJSON over HTTP, answered once durable, its client included; peer: {how}, synchronous_commit on",
            )
