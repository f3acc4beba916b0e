"""`python -m bench.poller HOME [query|current]`: query the lake back to back, until the process is ended.

Prints a JSON line for each answer: the greatest number of each client among the table's first million keys,
the time of the answer, and its duration.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import duckdb
from deltalake import DeltaTable

import millstream

KEYS = 1_000_000
"""Keys that are queried. On a table ten times as large, queries over all of it would be most of the load."""
SQL = f"SELECT client, max(n) AS n, count(*) AS rows FROM {{}} WHERE id <= {KEYS} GROUP BY client"
View = Literal["query", "current"]


def _answers(path: str, view: View) -> Iterator[list[dict[str, Any]]]:
    if view == "current":
        current = str(Path(path) / "lake" / "bench" / "current" / "public.accounts")
        while True:
            with duckdb.connect() as connection:
                connection.register("accounts", DeltaTable(current).to_pyarrow_dataset())
                yield connection.sql(SQL.format("accounts")).to_arrow_table().to_pylist()
    with millstream.open(path) as home:
        while True:
            yield home.query(SQL.format("public.accounts"), stream="bench").to_pylist()


def main() -> int:
    """Query until the process is ended."""
    began = time.monotonic()
    for answer in _answers(sys.argv[1], "current" if sys.argv[2:] == ["current"] else "query"):
        facts = {"at_ns": time.time_ns(), "took_ms": round((time.monotonic() - began) * 1000)}
        print(json.dumps({str(row["client"]): row["n"] for row in answer} | facts), flush=True)
        began = time.monotonic()
    return 0


if __name__ == "__main__":
    sys.exit(main())
