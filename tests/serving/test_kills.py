"""SIGKILL of the server and of the writing process, under load: acknowledged writes are there, once, and complete."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from tests.app.homes import wait_for
from tests.serving.serving_process import LINES, Served, rows_of, served, web_home

from millstream.processes.role_locks import holder, writer_role
from millstream.testing._servers.ports import free_port

pytestmark = pytest.mark.siege

SENDERS = 6
KILLS = 4


@dataclass
class Senders:
    """Threads that send writes, each until it is acknowledged, always with the same key."""

    url: str
    stop: threading.Event = field(default_factory=threading.Event)
    acknowledged: list[tuple[int, int, int, bool]] = field(default_factory=list)
    """Sender, write, the first row's number in the stream, and whether the write was there already."""
    wrong: list[str] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for who in range(SENDERS):
            thread = threading.Thread(target=self._send, args=(who,), daemon=True)
            thread.start()
            self.threads.append(thread)

    def join(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(400)
            assert not thread.is_alive()

    def _send(self, who: int) -> None:
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client:
            for number in itertools.count():
                if self.stop.is_set():
                    return
                body = b"".join(b'{"who": %d, "n": %d, "part": %d}\n' % (who, number, part) for part in range(3))
                headers = {**LINES, "idempotency-key": f"{who}-{number}"}
                deadline = time.monotonic() + 300
                while True:
                    if time.monotonic() > deadline:
                        self.wrong.append(f"{who}-{number} was never acknowledged")
                        return
                    try:
                        answer = client.post("/v1/streams/web/tables/clicks", content=body, headers=headers)
                    except httpx.TransportError:
                        self.stop.wait(0.02)
                        continue
                    if answer.status_code == 200:
                        said = answer.json()
                        self.acknowledged.append((who, number, said["first"], said["duplicate"]))
                        break
                    if answer.status_code not in {429, 500, 503}:
                        self.wrong.append(answer.text)
                        return
                    self.stop.wait(0.02)


def judge(home: Path, senders: Senders) -> None:
    """Check that each acknowledged write is there once, complete, under its acknowledged numbers.

    Each other write is there at most once.
    """
    assert senders.wrong == []
    rows = rows_of(home)
    at = {row["__seq"]: (row["who"], row["n"], row["part"]) for row in rows}
    assert set(Counter(at.values()).values()) == {1}
    assert len(at) == len(rows)
    for who, number, first, _ in senders.acknowledged:
        assert [at.get(first + part) for part in range(3)] == [(who, number, part) for part in range(3)]
    writes = Counter((who, number) for who, number, _ in at.values())
    assert set(writes.values()) == {3}
    assert {(who, number) for who, number, _, _ in senders.acknowledged} <= set(writes)


def some_more(senders: Senders) -> None:
    """Wait until each sender has gone on."""
    had = len(senders.acknowledged)
    wait_for(lambda: len(senders.acknowledged) > had + 10 * SENDERS, what=lambda: (had, len(senders.acknowledged)))


def test_a_server_that_writes_itself_is_killed_under_load(tmp_path: Path) -> None:
    home, port = web_home(tmp_path / "web"), free_port()
    senders = Senders(f"http://127.0.0.1:{port}")
    for kill in range(KILLS):
        with served(home, MILLSTREAM_HTTP__LISTEN=f"127.0.0.1:{port}") as server:
            if not kill:
                senders.start()
            some_more(senders)
            if kill < KILLS - 1:
                server.process.kill()
                server.process.wait()
            else:
                senders.join()
    judge(home, senders)


@contextmanager
def owner(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "millstream.cli", "--home", str(home), "capture", "run"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": "/nonexistent"},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(180)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_the_process_that_writes_is_killed_under_the_server(tmp_path: Path) -> None:
    home = web_home(tmp_path / "web")

    def writes(process: subprocess.Popen[bytes]) -> bool:
        return bool(holder(home / "data" / "run", writer_role(None)).get("pid") == process.pid)

    server: Served
    with served(home) as server:
        senders = Senders(server.url)
        for kill in range(KILLS):
            with owner(home) as process:
                wait_for(lambda process=process: writes(process))  # type: ignore[misc]
                if not kill:
                    senders.start()
                some_more(senders)
                if kill < KILLS - 1:
                    process.kill()
                    process.wait()
                else:
                    senders.join()
    judge(home, senders)
