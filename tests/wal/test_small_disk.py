"""The same promises on real file systems that run full: tmpfs in our own namespace, and ext4 on a loop device."""

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
    found = subprocess.run(command, cwd=Path.cwd(), capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, f"{folder}: {found.stdout}\n{found.stderr}"
    return found.stdout


# The mount is in a namespace of our own: no other process sees it, and it ends with the process.
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")


def on_a_disk_of_memory(folder: Path, size: int, module: str, *, inodes: int = 0) -> str:
    """Return the output of a module that runs with a disk of `size` bytes mounted on the folder, its one argument.

    `inodes`: how many the disk has; 0: as many as the system gives it.
    """
    if (
        shutil.which("unshare") is None
        or subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this user may not have mounts of its own")
    options = f"size={size},nr_inodes={inodes}" if inodes else f"size={size}"
    script = f'mount -t tmpfs -o {options} tmpfs "$1" && exec "$2" -m {module} "$1"'
    return run(*UNSHARE, "sh", "-c", script, "sh", str(folder), sys.executable, folder=folder)


@pytest.mark.siege
def test_a_disk_of_memory_that_runs_full(tmp_path: Path):
    assert on_a_disk_of_memory(tmp_path, DISK_BYTES, "tests.wal.small_disk").endswith("whole\n")


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    if shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        pytest.skip("there is no mkfs.ext4, or no loop device to mount a file as a disk")
    image, disk = tmp_path / "image", tmp_path / "disk"
    image.write_bytes(b"")
    os.truncate(image, 2 * DISK_BYTES)
    disk.mkdir()
    run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image), folder=image)
    run("mount", "-o", "loop", str(image), str(disk), folder=disk)
    yield disk
    run("umount", str(disk), folder=disk)


@pytest.mark.as_root  # only root can mount a file
@pytest.mark.siege
def test_ext4_that_runs_full(ext4: Path):
    assert run(sys.executable, "-m", "tests.wal.small_disk", str(ext4), folder=ext4).endswith("whole\n")
