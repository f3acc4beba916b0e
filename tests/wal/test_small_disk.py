"""The same promises on real file systems that run full: of memory, in a namespace of our own, and ext4 on a loop device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DISK_BYTES = 6 << 20


def run(*command: str, folder: Path) -> str:
    found = subprocess.run(command, cwd=Path.cwd(), capture_output=True, text=True, timeout=240, check=False)
    assert found.returncode == 0, f"{folder}: {found.stdout}\n{found.stderr}"
    return found.stdout


def can_unshare() -> bool:
    """Whether this user may mount something that nobody else sees."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


def test_a_disk_of_memory_that_runs_full(tmp_path: Path):
    if not can_unshare():
        pytest.skip("this user may not have mounts of its own")
    script = f'mount -t tmpfs -o size={DISK_BYTES} tmpfs "$1" && exec "$2" -m tests.wal.small_disk "$1"'
    said = run(
        "unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, "sh", str(tmp_path), sys.executable,
        folder=tmp_path,
    )  # fmt: skip
    assert said.endswith("whole\n")


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        pytest.skip("only root can mount a file as a disk")
    image, disk = tmp_path / "image", tmp_path / "disk"
    image.write_bytes(b"")
    os.truncate(image, 2 * DISK_BYTES)
    disk.mkdir()
    run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image), folder=image)
    run("mount", "-o", "loop", str(image), str(disk), folder=disk)
    yield disk
    run("umount", str(disk), folder=disk)


def test_ext4_that_runs_full(ext4: Path):
    assert run(sys.executable, "-m", "tests.wal.small_disk", str(ext4), folder=ext4).endswith("whole\n")
