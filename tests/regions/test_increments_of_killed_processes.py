"""Processes of a region that add at once and are killed: the total is the sum of their increments, each once."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.app.homes import wait_for
from tests.regions.test_sessions_of_regions import CONFIG
from tests.regions.two_homes import made

import millstream

ADDS = """
import sys
import millstream

home, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with millstream.open(home) as opened:
    session = opened.session("shop", name)
    while opened.session_facts("shop", name).mark < count:
        session.append("posts", {"id": 1, "likes": 1}, deadline_s=60)
"""
COUNT = 150


def total(home: Path) -> int:
    """Return the running total as a reader of the log sees it now."""
    with millstream.open(home) as opened:
        try:
            rows = [row for some in opened.read_latest("shop", "posts") for row in some.rows.to_pylist()]
        except millstream.errors.MillstreamError:  # nothing was written so far
            return 0
    return int(rows[-1]["likes"]) if rows else 0


@pytest.mark.siege
def test_increments_of_processes_that_are_killed_sum_exactly(tmp_path: Path) -> None:
    home, chance = made(tmp_path / "one", 1, CONFIG), random.Random(7)
    names = ("a", "b")

    def started(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", ADDS, str(home), name, str(COUNT)], stderr=subprocess.DEVNULL)

    running = {name: started(name) for name in names}
    try:
        for goal in (20, 60, 110):
            wait_for(lambda goal=goal: total(home) >= goal or all(one.poll() is not None for one in running.values()))
            name = chance.choice(names)
            running[name].send_signal(signal.SIGKILL)
            running[name].wait()
            running[name] = started(name)

        def are_done() -> bool:
            for name, one in running.items():
                if one.poll() not in {None, 0}:  # its writer was killed under it: its session says what is missing
                    running[name] = started(name)
            return all(one.poll() == 0 for one in running.values())

        wait_for(are_done)
    finally:
        for one in running.values():
            one.kill()
            one.wait()
    assert total(home) == len(names) * COUNT
