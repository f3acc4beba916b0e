"""A catalog on a disk without a free byte: told as what it is, and well again with the space."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.wal.small_disk import fill
from tests.wal.test_small_disk import can_unshare

from millstream.catalog import Catalog
from millstream.errors import DiskFull


def write(file: Path) -> None:
    with Catalog(file) as catalog:
        for number in range(1000):
            catalog.put_fact("scope", f"key {number}", "x" * 1000)


def play(disk: Path) -> None:
    """Open and write, with space, without, and with it again."""
    file, ballast = disk / "catalog.db", disk / "ballast"
    with Catalog(file) as catalog:
        stream = catalog.resolve_stream("shop")
    fill(ballast)
    for name in (file, disk / "another.db"):
        with pytest.raises(DiskFull):
            write(name)
    ballast.unlink()
    with Catalog(file) as catalog:
        assert catalog.stream("shop").id == stream
        catalog.put_fact("scope", "key", 1)


def test_a_full_disk_is_told_as_one(tmp_path: Path):
    if not can_unshare():
        pytest.skip("this user may not have mounts of its own")
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -m tests.catalog.test_full_disk "$1"'
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        script,
        "sh",
        str(tmp_path),
        sys.executable,
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr


if __name__ == "__main__":
    play(Path(sys.argv[1]))
