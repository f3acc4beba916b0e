"""The processor time that an open page of the console costs a home's server."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import psutil

import millstream
from bench.figures import Figure, asked, interleaved, measures, reported, say
from bench.homes import Home, wait_for
from bench.places import folder
from millstream.testing._servers.ports import free_port

SECONDS = 15
_LARGE_SECONDS = 40
"""The status of a large home is taken every ten seconds at most."""
_SETTLED_S = 4.0
"""A server loads what a status needs with its first one."""
_CALM_S = 0.1
_APPENDS_S = 10
_ROWS = [{"id": number, "page": f"/products/{number}", "ms": number * 1.25} for number in range(100)]


@measures("console_idle_page_cpu")
def console_idle_page_cpu() -> Iterator[Figure]:
    """Measure what an open overview costs the server of a small home at rest."""
    yield _page_cpu("console_idle_page_cpu", 3, 4, SECONDS, is_loaded=False)


@measures("console_loaded_page_cpu")
def console_loaded_page_cpu() -> Iterator[Figure]:
    """Measure the same while records are appended."""
    yield _page_cpu("console_loaded_page_cpu", 3, 4, SECONDS, is_loaded=True)


@measures("console_large_home_page_cpu")
def console_large_home_page_cpu() -> Iterator[Figure]:
    """Measure the same of a large home."""
    yield _page_cpu("console_large_home_page_cpu", 100, 10, _LARGE_SECONDS, is_loaded=True)


def _page_cpu(name: str, streams: int, tables: int, seconds: float, *, is_loaded: bool) -> Figure:
    if asked.rows is not None:
        streams = min(streams, max(1, asked.rows // 2_000))
    seconds = asked.seconds or seconds
    say(f"{name}: {streams} streams with {tables} tables each")
    with ExitStack() as stack:
        path = stack.enter_context(folder("home")) / "home"
        port, server = stack.enter_context(_served(path, streams, tables))
        if is_loaded:
            stack.enter_context(_load(path))
        with_page, without = interleaved(
            partial(_cpu, port, server, seconds, 1), partial(_cpu, port, server, seconds, 0)
        )
    load = (
        f"{_APPENDS_S} appends of {len(_ROWS)} rows a second by another process" if is_loaded else "nothing is written"
    )
    return reported(
        name,
        [one - other for one, other in zip(with_page, without, strict=True)],
        unit="% of a core",
        goal="<= 2",
        rows=0,
        size_bytes=0,
        note=f"{streams} streams of {tables} tables, served by `millstream serve` while `millstream capture run` writes them; {load};"
        f" processor time of the server in {seconds} s with one viewer of the overview, minus that without",
    )


def _cpu(port: int, server: psutil.Process, seconds: float, viewers: int) -> float:
    """Return the server's processor time with some open pages, in percent of a core."""
    with ExitStack() as stack:
        for _ in range(viewers):
            stack.enter_context(_page(port))
        time.sleep(_SETTLED_S)
        began, before_s = time.monotonic(), _used_s(server)
        time.sleep(seconds)
        return 100 * (_used_s(server) - before_s) / (time.monotonic() - began)


def _used_s(server: psutil.Process) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in (server, *server.children(recursive=True)))


@contextmanager
def _page(port: int) -> Iterator[None]:
    """Open the overview as a browser does, and read its differences until the block ends."""
    pages = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    pages.request("GET", "/")
    answer = pages.getresponse()
    if answer.status != 200 or b"Overview" not in answer.read():
        raise RuntimeError(f"the overview answers {answer.status}")
    pages.close()
    events = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    events.request("GET", "/console/events?path=/")
    differences = events.getresponse()
    ticks = threading.Event()

    def read() -> None:
        while line := differences.fp.readline():
            if line.startswith(b"event: tick"):
                ticks.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    if not ticks.wait(60):
        raise RuntimeError("the page got no tick")
    try:
        yield
    finally:
        if events.sock is not None:
            events.sock.shutdown(2)
        reader.join(10)
        events.close()


@contextmanager
def _served(path: Path, streams: int, tables: int) -> Iterator[tuple[int, psutil.Process]]:
    """Make a home with applications' tables, and serve it. Yields the server's port and process."""
    port = free_port()
    path.mkdir()
    config = "".join(f"[streams.s{number:03}]\n" for number in range(streams))
    (path / "millstream.toml").write_text(f'{config}[http]\nlisten = "127.0.0.1:{port}"\n')
    with millstream.open(str(path)) as opened:
        for stream in range(streams):
            for table in range(tables):
                opened.append(f"s{stream:03}", f"public.t{table}", _ROWS[:1])
    home = Home(path)
    with home.running("capture", "run") as writer, home.running("serve") as server:
        wait_for("the home is served", lambda: _answers(port), process=server)
        assert writer.poll() is None, "the writer ended"
        process = psutil.Process(server.pid)
        wait_for("the server has compiled what it needs", lambda: _is_calm(process), process=server)
        yield port, process


def _is_calm(server: psutil.Process) -> bool:
    before_s = _used_s(server)
    time.sleep(2)
    return _used_s(server) - before_s < _CALM_S


def _answers(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/")
        return connection.getresponse().status == 200
    except OSError:
        return False


@contextmanager
def _load(path: Path) -> Iterator[None]:
    """Append to the first stream until the block ends, from this process."""
    stopping = threading.Event()

    def append() -> None:
        with millstream.open(str(path)) as home:
            while not stopping.wait(1 / _APPENDS_S):
                home.append("s000", "public.t0", _ROWS, deadline_s=60)

    worker = threading.Thread(target=append)
    worker.start()
    try:
        yield
    finally:
        stopping.set()
        worker.join()
