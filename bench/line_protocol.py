"""Line protocol of InfluxDB to columns, in memory, by machine code. There is no peer: a rate is reported."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Final

from bench.figures import Figure, asked, measures, repeated, reported
from millstream.ingest.line_protocol import tables_of_lines, warm

ROWS: Final = 200_000
REQUEST_ROWS: Final = 5_000
"""Batch size that InfluxDB's documentation recommends, and that is five times Telegraf's default."""
_START_NS: Final = 1_700_000_000_000_000_000
_NOW_NS: Final = 1_800_000_000_000_000_000


def requests_of(rows: int, request_rows: int = REQUEST_ROWS) -> list[bytes]:
    """Return bodies of lines as an agent writes them: 3 tags, 4 fields of 4 types, a timestamp; 120 bytes a line."""
    draw = random.Random(7)
    lines = [
        f"cpu,host=server-{n % 100:04d},rack=r{n % 17},region=eu-west-{n % 3} "
        f'count={draw.randrange(10**6)}i,idle={"true" if n % 3 else "false"},state="running {n % 7}",usage={draw.random() * 100:.6f} '
        f"{_START_NS + n * 1_000_000}"
        for n in range(rows)
    ]
    return ["\n".join(lines[at : at + request_rows]).encode() for at in range(0, rows, request_rows)]


@measures("line_protocol_parse_rows_per_s")
def parse() -> Iterator[Figure]:
    """Measure one thread, from a request's bytes to its tables."""
    rows = asked.rows or ROWS
    bodies = requests_of(rows)
    warm()
    yield reported(
        "line_protocol_parse_rows_per_s",
        repeated(lambda: _rows_s(bodies)),
        unit="rows/s",
        goal="reported",
        rows=rows,
        size_bytes=sum(len(body) for body in bodies),
        note=f"requests of {REQUEST_ROWS:,} lines of 3 tags, 4 fields (float, integer, boolean, string) and a timestamp, 120 B each; from bytes to"
        " Arrow tables, in one thread",
    )


def _rows_s(bodies: list[bytes]) -> float:
    began = time.perf_counter()
    rows = 0
    for body in bodies:
        rows += sum(len(table.lines) for table in tables_of_lines(body, precision="ns", now_ns=_NOW_NS).tables)
    return rows / (time.perf_counter() - began)
