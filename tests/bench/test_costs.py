"""The cost of a command counts all its processes: CPU time, memory, and bytes that go to the disk."""

from __future__ import annotations

import sys

import pytest
from bench.costs import run_watched
from bench.places import folder

MIB = 1 << 20
_PARENT = """
import os, subprocess, sys, time
held = bytearray(100 << 20)
held[::4096] = b"x" * len(held[::4096])
while time.process_time() < 1.0:
    pass
with open(sys.argv[1], "wb") as file:
    file.write(os.urandom(10 << 20))
    os.fsync(file.fileno())
time.sleep(0.5)
if len(sys.argv) == 4:
    subprocess.run([sys.executable, "-c", sys.argv[3], sys.argv[2]], check=True)
"""


def test_a_cost_counts_the_processes_of_a_command_and_what_they_started() -> None:
    with folder("costs") as path:
        took_s, cost = run_watched([sys.executable, "-c", _PARENT, str(path / "1"), str(path / "2"), _PARENT], 10)

    assert cost.rows == 10
    assert took_s >= 3
    assert 1.5 <= cost.cpu_s <= took_s * 2
    assert 200 * MIB <= cost.peak_bytes < 400 * MIB
    assert 20 * MIB <= cost.written_bytes < 30 * MIB


def test_a_command_that_fails_shows_its_messages() -> None:
    with pytest.raises(RuntimeError, match="no such table"):
        run_watched([sys.executable, "-c", "import sys; sys.exit('no such table')"], 1)
