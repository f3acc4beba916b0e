"""Nodes: the cost of waiting for a follower, a promotion's duration under load, a new follower's catch-up."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import millstream
from bench.figures import RUNS, Figure, asked, compared, interleaved, measures, reported, say
from bench.places import as_installed, folder
from bench.wal import BATCH_ROWS, ROW_BYTES, log_in, operation
from millstream.errors import MillstreamError
from millstream.testing._servers.ports import free_port
from millstream.wal.reader import StreamReader

_MILLSTREAM: Final = str(Path(sys.executable).parent / "millstream")
_STREAM: Final = "bench"
_WAIT_S: Final = 120.0
_GIB: Final = 1 << 30
_LOAD_S: Final = 2.0
"""Duration of the load before its leader is killed."""


class _Node:
    """A home, and its processes."""

    def __init__(self, path: Path, name: str, ports: dict[str, int], acks: str) -> None:
        self.name = name
        self.path = path / name
        self.path.mkdir()
        nodes = "\n".join(f'{node} = "grpc://127.0.0.1:{port}"' for node, port in ports.items())
        (self.path / "millstream.toml").write_text(
            f'[streams.{_STREAM}]\nacks = "{acks}"\n[streams.{_STREAM}.ingest]\nschema_on_write = "create"\n'
            f'[http]\nlisten = "127.0.0.1:0"\n[flight]\nlisten = "127.0.0.1:{ports[name]}"\n'
            f'[replication]\nnode = "{name}"\n[replication.nodes]\n{nodes}\n'
        )
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def wal(self) -> Path:
        return self.path / "data" / "wal" / _STREAM

    def command(self, *words: str) -> list[str]:
        return [_MILLSTREAM, "--home", str(self.path), *words]

    def start(self, *words: str) -> None:
        with (self.path / "messages.log").open("ab") as messages:
            self._processes.append(
                subprocess.Popen(self.command(*words), stdout=messages, stderr=messages, env=as_installed())
            )

    def kill(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def upto(self) -> int:
        """Return the end that the node's readers are shown; 0 if it has no log."""
        with contextlib.suppress(MillstreamError, FileNotFoundError):
            return int(StreamReader(str(self.wal)).persisted_upto())
        return 0


@contextlib.contextmanager
def _nodes(place: Path, names: str, acks: str) -> Iterator[list[_Node]]:
    ports = {name: free_port() for name in names}
    made = [_Node(place, name, ports, acks) for name in names]
    try:
        yield made
    finally:
        for node in made:
            node.kill()


def _wait_until(holds: Any, what: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {_WAIT_S:g} s for {what}")
        time.sleep(0.01)


@measures("ack_durable1_ms")
def acknowledged() -> Iterator[Figure]:
    """Append rows of 100 bytes one by one in one thread, each once the one before is acknowledged."""
    count = asked.rows or 300
    row = {"id": 1, "body": "x" * ROW_BYTES}
    with folder("acks") as place, _nodes(place, "ab", "local") as (a, b):
        a.start("capture", "run")
        a.start("serve")
        with millstream.open(a.path) as home:
            _wait_until(lambda: _appends(home, row), "the leader")
            b.start("follow", "a")
            _wait_until(lambda: b.upto() and b.upto() == a.upto(), "the follower")

            def run(level: str) -> float:
                times = []
                for _ in range(count):
                    began = time.perf_counter()
                    home.append(_STREAM, "rows", [row], acks=level, deadline_s=60)
                    times.append(time.perf_counter() - began)
                return 1e3 * statistics.median(times)

            ours, peer = interleaved(lambda: run("durable(1)"), lambda: run("local"))
    yield reported(
        "ack_durable1_ms",
        ours,
        peer,
        unit="ms",
        goal="reported",
        rows=count,
        size_bytes=count * ROW_BYTES,
        note=f"{count} appends of one row, one after the other, through the owner's socket; durable(1): on a follower of this machine, too; peer: local",
    )


def _appends(home: Any, row: dict[str, object]) -> bool:
    try:
        home.append(_STREAM, "rows", [row], deadline_s=5)
    except MillstreamError:
        return False
    return True


@measures("promotion_s")
def promotion() -> Iterator[Figure]:
    """Measure from SIGKILL of a leader under load to the first row that the promoted node has acknowledged."""
    times: list[float] = []
    for number in range(asked.runs or RUNS):
        with folder("promotion") as place, _nodes(place, "abc", "durable(1)") as (a, b, c):
            for node in (a, b, c):
                node.start("serve")
            for node in (b, c):
                node.start("follow", "a")
            a.start("capture", "run")
            stop, loads = threading.Event(), []
            with millstream.open(a.path) as home:
                _wait_until(lambda home=home: _appends(home, {"id": 0}), "the leader")
                for one in range(4):
                    load = threading.Thread(target=_load, args=(home, stop, one), daemon=True)
                    load.start()
                    loads.append(load)
                b.start("capture", "run")
                _wait_until(lambda b=b: b.upto() > 0, "the follower")
                time.sleep(_LOAD_S)
                began = time.perf_counter()
                a.kill()
                subprocess.run(b.command("promote"), check=True, capture_output=True, env=as_installed())
                stop.set()
                with millstream.open(b.path) as there:
                    _wait_until(lambda there=there: _appends(there, {"id": 1}), "the promoted node")
                times.append(time.perf_counter() - began)
                for load in loads:
                    load.join(60)
        say(f"  run {number + 1}: {times[-1]:.2f} s")
    yield reported(
        "promotion_s",
        times,
        unit="s",
        goal="< 10",
        rows=0,
        size_bytes=0,
        note="three nodes on one machine, acks = durable(1), four threads appending; from SIGKILL of the leader over `millstream promote` to the first row acknowledged by the new one",
    )


def _load(home: Any, stop: threading.Event, one: int) -> None:
    while not stop.is_set():
        with contextlib.suppress(MillstreamError):
            home.append(_STREAM, "rows", [{"id": one, "body": "x" * ROW_BYTES}] * 100, deadline_s=1)


@measures("catch_up_1gib_s")
def catch_up() -> Iterator[Figure]:
    """Measure a new follower of a log of 1 GiB, until it shows all of it; the peer copies the files and fsyncs each."""
    wanted = (asked.rows or _GIB // ROW_BYTES) * ROW_BYTES
    with folder("catch-up") as place, _nodes(place, "a", "local") as (a,):
        made = place / "made"
        with log_in(made) as writer:
            values = [[os.urandom(ROW_BYTES) for _ in range(BATCH_ROWS)] for _ in range(20)]
            for number in range(wanted // (ROW_BYTES * BATCH_ROWS)):
                writer.append(operation(values[number % len(values)]))
        a.wal.parent.mkdir(parents=True)
        shutil.move(made / "wal", a.wal)
        size = sum(file.stat().st_size for file in a.wal.rglob("*.wal"))
        say(f"catch_up_1gib_s: {size >> 20} MiB")
        a.start("serve")
        end = a.upto()
        port = json.dumps(f"grpc://127.0.0.1:{_port_of(a)}")

        starts_s: list[float] = []

        def ours() -> float:
            with folder("follower") as there:
                config = (a.path / "millstream.toml").read_text().replace('node = "a"', 'node = "b"')
                (there / "millstream.toml").write_text(config)
                whole_s = _followed_s(there)
                assert int(StreamReader(str(there / "data" / "wal" / _STREAM)).persisted_upto()) == end
                starts_s.append(_followed_s(there))
                return whole_s - starts_s[-1]

        def peer() -> float:
            with folder("copied") as there:
                began = time.perf_counter()
                for file in sorted(a.wal.rglob("*.wal")):
                    target = there / file.name
                    shutil.copyfile(file, target)
                    with target.open("rb") as copied:
                        os.fsync(copied.fileno())
                return time.perf_counter() - began

        # The leader's configuration has to name its followers.
        config = a.path / "millstream.toml"
        config.write_text(config.read_text() + f"b = {port}\n")
        a.kill()
        a.start("serve")
        _wait_until(lambda: _listens(_port_of(a)), "the leader")
        figure = compared(
            "catch_up_1gib_s",
            ours,
            peer,
            unit="s",
            goal="<= 2.2",
            rows=wanted // ROW_BYTES,
            size_bytes=size,
            note="",
        )
        yield replace(
            figure,
            note="`millstream follow --until-caught-up` over loopback, from its start to its end, less the same command once it is caught up, which is"
            f" the start of the process, its connection and its end ({statistics.median(starts_s):.2f} s at the median); the peer copies the same files and fsyncs"
            " them, in a process that runs",
        )


def _followed_s(home: Path) -> float:
    """Return the duration of the whole command."""
    began = time.perf_counter()
    command = [_MILLSTREAM, "--home", str(home), "follow", "a", "--until-caught-up"]
    subprocess.run(command, check=True, capture_output=True, env=as_installed())
    return time.perf_counter() - began


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _port_of(node: _Node) -> int:
    for line in (node.path / "millstream.toml").read_text().splitlines():
        if line.startswith(f'{node.name} = "grpc'):
            return int(line.rpartition(":")[2].rstrip('"'))
    raise RuntimeError("the node has no address")
