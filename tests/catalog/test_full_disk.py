"""A catalog on a disk without a free byte: the error names the cause, and space makes the catalog work again."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
from tests.wal.small_disk import fill
from tests.wal.test_small_disk import on_a_disk_of_memory

from millstream.catalog import Catalog
from millstream.errors import DiskFull

INODES = 40


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


def play_without_inodes(disk: Path) -> None:
    """Open and write on a disk that has space, and no inode for another file; then with inodes again."""
    file = disk / "catalog.db"
    with Catalog(file) as catalog:
        stream = catalog.resolve_stream("shop")
    made: list[Path] = []
    with contextlib.suppress(OSError):
        while True:
            made.append(disk / f"empty {len(made)}")
            made[-1].touch()
    for name in (file, disk / "another.db"):
        with pytest.raises(DiskFull):
            write(name)
    for empty in made:
        empty.unlink(missing_ok=True)
    with Catalog(file) as catalog:
        assert catalog.stream("shop").id == stream
        catalog.put_fact("scope", "key", 1)


def test_a_disk_without_inodes_is_told_as_a_full_one(tmp_path: Path):
    """It was told as a file that can't be opened, and capture gave up in place of waiting."""
    on_a_disk_of_memory(tmp_path, 4 << 20, "tests.catalog.test_full_disk", inodes=INODES)


def test_a_full_disk_is_told_as_one(tmp_path: Path):
    on_a_disk_of_memory(tmp_path, 1 << 20, "tests.catalog.test_full_disk")


if __name__ == "__main__":
    disk = Path(sys.argv[1])
    (play_without_inodes if os.statvfs(disk).f_files == INODES else play)(disk)
