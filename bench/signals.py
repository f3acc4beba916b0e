"""Signals that three regions take at once, each of them following the other two."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

import millstream
from bench.figures import Figure, asked, measures, reported, say
from bench.homes import STREAM, Home
from bench.http import Sender
from bench.places import folder
from millstream.errors import MillstreamError
from millstream.testing._servers.ports import free_port

REGIONS = (1, 2, 3)
ROWS = 100
SECONDS = 5
KEYS = 10_000
CONNECTIONS = 16
"""Connections of each region; each sends rows of its own."""
_WAIT_S = 120.0
_CONFIG = """
[streams.{stream}]
region = {region}
[streams.{stream}.log]
disk_used_max = 1.0
[streams.{stream}.keys]
"public.items" = ["id"]
[streams.{stream}.merge."public.items"]
heat = "signal(7d)"
[http]
listen = "127.0.0.1:{http}"
[flight]
listen = "127.0.0.1:{flight}"
[replication]
node = "one"
regions = {{ {others} }}
"""


def _home(place: Path, region: int, flights: dict[int, int], http: int) -> Home:
    path = place / str(region)
    path.mkdir()
    others = ", ".join(f'{other} = "grpc://127.0.0.1:{port}"' for other, port in flights.items() if other != region)
    text = _CONFIG.format(stream=STREAM, region=region, http=http, flight=flights[region], others=others)
    (path / "millstream.toml").write_text(text)
    return Home(path)


def _requests(table: str) -> list[bytes]:
    """Return a request of `ROWS` signals for each connection, of keys drawn as people look at things."""
    chance = np.random.default_rng(1)
    found = []
    for _ in range(CONNECTIONS):
        ids = np.minimum(chance.zipf(1.3, ROWS), KEYS).tolist()
        weights = chance.random(ROWS).tolist()
        body = json.dumps([{"id": one, "heat": weight} for one, weight in zip(ids, weights, strict=True)]).encode()
        head = f"POST /v1/streams/{STREAM}/tables/{table} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        found.append(head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    return found


async def _send(ports: list[int], requests: list[bytes], seconds: float) -> tuple[list[int], float]:
    """Send to all ports at once; return how many signals each took, and the duration in seconds."""
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    counts: list[dict[bytes, int]] = [{} for _ in ports]
    ended = []
    for port, count in zip(ports, counts, strict=True):
        for request in requests:
            ended.append(loop.create_future())
            await loop.create_connection(partial(Sender, request, count, began + seconds, ended[-1]), "127.0.0.1", port)
    await asyncio.gather(*ended)
    if any(set(count) != {b"200"} for count in counts):
        raise RuntimeError(f"answers by status: {counts}")
    return [count[b"200"] * ROWS for count in counts], time.perf_counter() - began


def _counted(home: Home) -> int:
    """Return how many signals of all regions a home has read; 0 until it has a log."""
    try:
        with millstream.open(home.path) as opened:
            return int(np.sum(opened.merged(STREAM, "items").column("heat__7d").to_numpy()))
    except (MillstreamError, FileNotFoundError):
        return 0


def _wait_for(homes: list[Home], count: int) -> float:
    """Wait until each home has read so many signals, and no more; return how long it took in seconds."""
    began = time.perf_counter()
    for home in homes:
        while (found := _counted(home)) != count:
            if found > count or time.perf_counter() - began > _WAIT_S:
                raise RuntimeError(f"{home.path} counts {found:,} signals of {count:,}")
            time.sleep(0.05)
    return time.perf_counter() - began


@measures("signals_per_s")
def signals() -> Iterator[Figure]:
    """Send to three regions at once, and wait after each run until all of them have read all signals, each once."""
    seconds = float(asked.seconds or SECONDS)
    flights, ports = {region: free_port() for region in REGIONS}, [free_port() for _ in REGIONS]
    requests = _requests("items")
    with folder("signals") as place, ExitStack() as running:
        homes = [_home(place, region, flights, port) for region, port in zip(REGIONS, ports, strict=True)]
        for home in homes:
            for words in (("capture", "run"), ("serve",), ("follow",)):
                running.enter_context(home.running(*words))
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                uvloop.run(_send(ports, _requests("first"), 0.0))
                break
            except (OSError, RuntimeError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError("the servers don't answer") from error
                time.sleep(0.2)
        total, rates, waits = 0, [], []
        for number in range((asked.runs or 3) + 1):
            sent, took_s = uvloop.run(_send(ports, requests, seconds))
            total += sum(sent)
            waits.append(_wait_for(homes, total))
            rates.append(sum(sent) / took_s)
            say(f"  {'warm-up' if not number else f'run {number}'}: {rates[-1]:,.0f}, then {waits[-1]:.2f} s")
    yield reported(
        "signals_per_s",
        rates[1:],
        unit="signals/s",
        goal=">= 25,000",
        rows=ROWS,
        size_bytes=len(requests[0]),
        note=f"three regions on one machine, each with a writer, a server and a follower of the other two; {ROWS} signals a request as JSON, each answered once durable, "
        f"{CONNECTIONS} connections a region, {KEYS:,} keys; after each run every region had merged all signals, each once, within {max(waits):.1f} s",
    )
