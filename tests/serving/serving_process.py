"""`millstream serve` as a process of its own, on a free port, and the rows that it made durable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.app.homes import make_home, wait_for
from tests.commands import Command

import millstream
from millstream.errors import UnknownStream, UnknownTable

LINES = {"content-type": "application/x-ndjson"}


@dataclass
class Served:
    """A running server."""

    home: Path
    process: Command
    said: list[dict[str, Any]] = field(default_factory=list)
    """Its log, as lines arrive."""

    @property
    def address(self) -> tuple[str, int]:
        said = next(line["address"] for line in self.said if line.get("event") == "listening")
        host, _, port = said.rpartition(":")
        return host, int(port)

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://{host}:{port}"

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def post(self, table: str, rows: list[dict[str, Any]], **headers: str) -> httpx.Response:
        """Append rows as lines of JSON."""
        body = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        with self.client() as client:
            return client.post(f"/v1/streams/web/tables/{table}", content=body, headers={**LINES, **headers})

    def rows(self, table: str = "clicks") -> list[dict[str, Any]]:
        """Return the log's rows of a table, in order."""
        return rows_of(self.home, table)


def rows_of(home: Path, table: str = "clicks", stream: str = "web") -> list[dict[str, Any]]:
    with millstream.open(home) as opened:
        try:
            return [row for batch in opened.read(stream, table=table) for row in batch.to_pylist()]
        except (UnknownStream, UnknownTable):
            return []


def web_home(folder: Path, http: str = "", more: str = "") -> Path:
    """Make a home with a stream that applications write."""
    return make_home(folder, f'[streams.web]\n{more}\n[http]\nlisten = "127.0.0.1:0"\n{http}\n')


@contextmanager
def served(home: Path, **environ: str) -> Iterator[Served]:
    """Run a server, ready once it listens; at the block's end terminate it, and kill it if it doesn't end."""
    process = Command(
        ("--home", str(home), "serve", "--log-format", "json"),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "HOME": "/nonexistent", **environ},
    )  # fmt: skip
    found = Served(home, process)
    listening = threading.Event()

    def hear() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            try:
                said = json.loads(line)
            except ValueError:
                said = {"event": "", "text": line}
            found.said.append(said)
            if said.get("event") == "listening":
                listening.set()

    listener = threading.Thread(target=hear, daemon=True)
    listener.start()
    try:
        wait_for(lambda: listening.is_set() or process.poll() is not None, what=lambda: found.said)
        assert listening.is_set(), found.said
        yield found
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(180)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        listener.join(180)
        assert process.stderr is not None
        process.stderr.close()
