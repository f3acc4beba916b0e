"""Duration of the commands that people wait for."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.figures import RUNS, Figure, measures, say

MILLSTREAM = str(Path(sys.executable).parent / "millstream")


@measures("help_ms")
def help_ms() -> Iterator[Figure]:
    """Measure `millstream --help`, as a whole process."""
    say("help_ms: millstream --help")
    times_ms = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run([MILLSTREAM, "--help"], check=True, capture_output=True)
        times_ms.append((time.perf_counter() - start) * 1000)
    yield Figure("help_ms", None, round(statistics.median(times_ms[1:]), 1), None, "ms", RUNS, "< 300", 0, 0)
