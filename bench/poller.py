"""`python -m bench.poller HOME`: asks the lake again and again, as a stranger who opens it anew each time.

Prints a JSON line for each answer: the greatest number of each client that the table shows, and when the answer was there.
"""

from __future__ import annotations

import json
import sys
import time

import millstream

EVERY_S = 0.5
"""Back to back, the queries alone would keep a core busy."""
SQL = "SELECT client, max(n) AS n, count(*) AS rows FROM public.accounts GROUP BY client"


def main() -> int:
    """Until somebody ends it."""
    path = sys.argv[1]
    due = time.monotonic()
    while True:
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due + EVERY_S, time.monotonic())
        with millstream.open(path) as home:
            answer = home.query(SQL, stream="bench").to_pylist()
        at_ns = time.time_ns()
        print(json.dumps({str(row["client"]): row["n"] for row in answer} | {"at_ns": at_ns}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
