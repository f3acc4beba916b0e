"""The age of merged rows while two connected regions write: how long ago a write was acknowledged that an answer lacks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import millstream
from bench.figures import Figure, asked, measures, reported, say
from bench.homes import Home
from bench.places import folder
from millstream.app.open_home import OpenHome
from millstream.client.remote_home import RemoteHome
from millstream.errors import MillstreamError
from millstream.testing._servers.ports import free_port

ITEMS: Final = 20_000
ROWS_A_REQUEST: Final = 100
REQUESTS_PER_S: Final = 25
"""Requests a second in each region."""
SECONDS: Final = 20.0
RUNS: Final = 3
_WAIT_S: Final = 60.0
_CONFIG: Final = """
[streams.bench]
region = {own}
[streams.bench.ingest]
schema_on_write = "create"
[streams.bench.keys]
"public.posts" = ["id"]
[streams.bench.merge."public.posts"]
likes = "pn_counter"
[http]
listen = "127.0.0.1:{http}"
[flight]
listen = "127.0.0.1:{flight}"
[replication]
node = "one"
regions = {{ {other} = "grpc://127.0.0.1:{other_flight}" }}
"""


class _Writer:
    """Appends to one region at a steady rate, and remembers when each request was acknowledged."""

    def __init__(self, home: OpenHome, region: int) -> None:
        self._home = home
        self._mark = -region
        self._chance = np.random.default_rng(region)
        self._stopped = threading.Event()
        self.acknowledged_s: list[float] = []
        """By request, when it was acknowledged; its number stands in the row of the region's own mark."""
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Self:
        self._append()  # one home after the other: a catalog is made by the first append
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _write(self) -> None:
        next_s = time.monotonic()
        while not self._stopped.wait(max(0.0, next_s - time.monotonic())):
            self._append()
            next_s += 1 / REQUESTS_PER_S

    def _append(self) -> None:
        self._home.append("bench", "posts", _rows(self._chance, self._mark, len(self.acknowledged_s)))
        self.acknowledged_s.append(time.monotonic())


def _rows(chance: np.random.Generator, mark: int, number: int) -> pa.Table:
    ids = chance.choice(ITEMS, ROWS_A_REQUEST - 1, replace=False)
    return pa.table(
        {
            "id": [mark, *ids.tolist()],
            "likes": chance.integers(0, 99, ROWS_A_REQUEST),
            "sent": [number] + [0] * (ROWS_A_REQUEST - 1),
        }
    )


@contextmanager
def _regions(place: Path) -> Iterator[tuple[list[Path], list[str]]]:
    """Run two regions that follow one another; yield their homes and addresses."""
    http, flight = [free_port(), free_port()], [free_port(), free_port()]
    homes = [place / "one", place / "two"]
    with ExitStack() as stack:
        for at, path in enumerate(homes):
            path.mkdir()
            numbers = {"own": at + 1, "other": 2 - at, "http": http[at]}
            text = _CONFIG.format(flight=flight[at], other_flight=flight[1 - at], **numbers)
            (path / "millstream.toml").write_text(text)
        for path in homes:
            for words in (("serve",), ("follow",)):
                stack.enter_context(Home(path).running(*words))
        yield homes, [f"http://127.0.0.1:{port}" for port in http]


@measures("merged_staleness_s")
def staleness() -> Iterator[Figure]:
    """Read one region's merged rows over HTTP, again and again, while both regions write."""
    seconds = float(asked.seconds or SECONDS)
    with folder("merged") as place, _regions(place) as (homes, addresses), ExitStack() as stack:
        opened = [stack.enter_context(millstream.open(home)) for home in homes]
        # Region 2's own writes don't count: an answer always has them.
        first = stack.enter_context(_Writer(opened[0], 1))
        stack.enter_context(_Writer(opened[1], 2))
        reader = stack.enter_context(millstream.connect(addresses[1]))
        _wait_for_the_first(reader)
        greatest, reads = [], 0
        for _ in range(asked.runs or RUNS):
            run, count = _staleness(reader, first, seconds)
            greatest.append(run)
            reads += count
            say(f"merged_staleness_s: {run:.2f} s at most, over {count} reads")
        rows = 2 * ROWS_A_REQUEST * len(first.acknowledged_s)
    yield reported(
        "merged_staleness_s",
        greatest,
        unit="s",
        goal="< 2",
        rows=rows,
        size_bytes=rows * 24,
        note=f"two connected regions on this machine, {REQUESTS_PER_S} requests of {ROWS_A_REQUEST} rows a second in each, over {ITEMS:,} items with a PN counter; a client"
        f" of region 2's server reads all merged rows, again and again, for {seconds:g} s: the greatest time since the acknowledgement of the first write in region 1 that"
        " an answer lacks, when the answer is whole",
    )


def _staleness(reader: RemoteHome, writer: _Writer, seconds: float) -> tuple[float, int]:
    """Return the greatest staleness of the answers, and their number."""
    worst, count, end_s = 0.0, 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        answer = reader.merged("bench", "posts")
        now_s = time.monotonic()
        assert [region["region"] for region in json.loads(answer.schema.metadata[b"millstream.regions"])] == [1, 2]
        place = pc.index(answer.column("id"), -1).as_py()
        lacking = writer.acknowledged_s[answer.column("sent")[place].as_py() + 1 :]
        worst = max(worst, now_s - lacking[0] if lacking else 0.0)
        count += 1
    return worst, count


def _wait_for_the_first(reader: RemoteHome) -> None:
    """Wait until region 2 has rows of region 1."""
    deadline_s = time.monotonic() + _WAIT_S

    def regions() -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = json.loads(
                reader.merged("bench", "posts").schema.metadata[b"millstream.regions"]
            )
        except MillstreamError:
            return []
        return found

    while not any(one["region"] == 1 and one["age_s"] is not None for one in regions()):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"waited {_WAIT_S:g} s for region 1's rows in region 2")
        time.sleep(0.1)
