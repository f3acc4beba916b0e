"""`python -m bench.poller HOME [query|current]`: query the lake repeatedly; open it again each time.

Prints a JSON line for each answer: the greatest number of each client among the table's first million keys,
the time of the answer, and its duration.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Literal

import duckdb
from deltalake import DeltaTable

import millstream

EVERY_S = 0.5
"""Seconds between queries: back to back they would keep a core busy."""
KEYS = 1_000_000
"""Keys that are queried. On a table ten times as large, queries over all of it would be most of the load."""
SQL = f"SELECT client, max(n) AS n, count(*) AS rows FROM {{}} WHERE id <= {KEYS} GROUP BY client"
View = Literal["query", "current"]


def _query(path: str) -> list[dict[str, Any]]:
    with millstream.open(path) as home:
        rows: list[dict[str, Any]] = home.query(SQL.format("public.accounts"), stream="bench").to_pylist()
        return rows


def _current(path: str) -> list[dict[str, Any]]:
    table = DeltaTable(str(Path(path) / "lake" / "bench" / "current" / "public.accounts"))
    with duckdb.connect() as connection:
        connection.register("accounts", table.to_pyarrow_dataset())
        rows: list[dict[str, Any]] = connection.sql(SQL.format("accounts")).to_arrow_table().to_pylist()
        return rows


def main() -> int:
    """Query until the process is ended."""
    path = sys.argv[1]
    ask = _current if sys.argv[2:] == ["current"] else _query
    due = time.monotonic()
    while True:
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due + EVERY_S, time.monotonic())
        began = time.monotonic()
        answer = ask(path)
        facts = {"at_ns": time.time_ns(), "took_ms": round((time.monotonic() - began) * 1000)}
        print(json.dumps({str(row["client"]): row["n"] for row in answer} | facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
