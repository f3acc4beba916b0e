"""A catalog on a disk without a free byte: the error names the cause, and space makes the catalog work again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.wal.small_disk import fill
from tests.wal.test_small_disk import on_a_disk_of_memory

from millstream.catalog import Catalog
from millstream.errors import DiskFull


def write(file: Path) -> None:
    with Catalog(file) as catalog:
        for number in range(1000):
            catalog.put_fact("scope", f"key {number}", "x" * 1000)


def play(disk: Path) -> None:
    """Open and write: with space, without space, and with space again."""
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
    on_a_disk_of_memory(tmp_path, 1 << 20, "tests.catalog.test_full_disk")


if __name__ == "__main__":
    play(Path(sys.argv[1]))
