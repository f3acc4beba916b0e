"""Duration of the commands that people wait for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.figures import Figure, measures, repeated, reported, say

MILLSTREAM = str(Path(sys.executable).parent / "millstream")


@measures("help_ms")
def help_ms() -> Iterator[Figure]:
    """Measure `millstream --help`, as a whole process."""
    say("help_ms: millstream --help")
    times_ms = repeated(_help_ms)
    yield reported("help_ms", times_ms, unit="ms", goal="< 300", rows=0, size_bytes=0, note="the whole process")


def _help_ms() -> float:
    began = time.perf_counter()
    subprocess.run([MILLSTREAM, "--help"], check=True, capture_output=True)
    return (time.perf_counter() - began) * 1000
