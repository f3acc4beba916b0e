"""Values of many megabytes arrive whole, and take memory by their size, not by their number."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.app.homes import config, make_home

import millstream
from millstream.testing.pytest_plugin import Database

MIB = 1 << 20
BASE_BYTES = 512 * MIB
"""Memory that capture may take in addition to three times the largest value."""


def capture(home: Path) -> int:
    """Run `capture run --until-caught-up`; return its peak memory in bytes."""
    compiled = home / "compiled"
    if not compiled.exists():
        # Copy the machine code that exists so far; another process may be writing to that folder now.
        with suppress(shutil.Error):
            shutil.copytree(os.environ["NUMBA_CACHE_DIR"], compiled)
    with (home / "said").open("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "millstream.cli", "--home", str(home), "capture", "run", "--until-caught-up"],
            stderr=said,
            # A cache of its own: other tests' processes may write to the shared one, and compiling takes 200
            # MiB. The first capture here compiles what is missing.
            env={**os.environ, "NUMBA_CACHE_DIR": str(compiled)},
        )
        most = 0
        while process.poll() is None:
            # Don't use wait4's figure: it includes the memory that this process held when it forked the other.
            most = max(most, high_water(process.pid))
            time.sleep(0.01)  # between two reads of a peak that only rises
        said.seek(0)
        assert process.returncode == 0, said.read()
    return most


def high_water(pid: int) -> int:
    """Return a process's peak memory in bytes; 0 if the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 0 if found is None else int(found[1]) * 1024


@pytest.mark.parametrize("size", [40 * MIB, pytest.param(200 * MIB, marks=pytest.mark.soak)])
@pytest.mark.siege
def test_values_of_many_megabytes_are_captured_whole_in_bounded_memory(
    size: int, tmp_path: Path, postgres: Database
) -> None:
    home = make_home(tmp_path / "shop", config(postgres.dsn, None))
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE large (id int PRIMARY KEY, words text, bytes bytea)")
        capture(home)
        connection.execute("INSERT INTO large SELECT 1, repeat('é', %s), NULL", [size // 2])
        connection.execute("INSERT INTO large SELECT 2, NULL, decode(repeat('ab', %s), 'hex')", [size // 2])
        connection.execute(
            "INSERT INTO large SELECT i, repeat('y', %s), NULL FROM generate_series(10, 14) i", [size // 4]
        )
        connection.execute("UPDATE large SET id = id + 100 WHERE id < 3")  # unchanged values aren't sent again
    assert capture(home) < BASE_BYTES + 3 * size
    found = {}
    with millstream.open(home) as opened:
        for batch in opened.read("shop", table="large"):
            for row in batch.to_pylist():
                value = row["words"].encode() if row["bytes"] is None and row["words"] is not None else row["bytes"]
                facts = None if value is None else (len(value), hashlib.sha256(value).hexdigest())
                found[row["__op"], row["id"]] = facts
    letters = {1: "é".encode() * (size // 2), 2: b"\xab" * (size // 2)} | dict.fromkeys(
        range(10, 15), b"y" * (size // 4)
    )
    assert found == {("c", key): (len(text), hashlib.sha256(text).hexdigest()) for key, text in letters.items()} | {
        ("u", 101): None,
        ("u", 102): None,
    }
