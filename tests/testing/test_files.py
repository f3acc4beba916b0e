"""One conformance suite for the file interface, over real files and those in memory; and the state after a crash."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from millstream.ports import Files
from millstream.testing.files import Crash, FaultPlan, MemoryFiles, keep_any, lose_all
from millstream.wal.files import RealFiles


@pytest.fixture(params=["real", "memory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "real":
        return RealFiles(), str(tmp_path)
    files = MemoryFiles()
    files.makedirs("/disk")
    return files, "/disk"


def test_bytes_stand_where_they_were_written(disk: tuple[Files, str]):
    files, folder = disk
    file = files.create(f"{folder}/a")
    file.pwritev([b"one", memoryview(b"two"), b"", b"three"], 0)
    file.pwrite(b"XY", 4)
    file.pwrite(b"end", 20)
    assert file.size() == files.size(f"{folder}/a") == 23
    assert files.read(f"{folder}/a") == b"onetXYthree" + bytes(9) + b"end"
    assert files.read(f"{folder}/a", 3, 3) == b"tXY"
    assert files.read(f"{folder}/a", 20, 100) == b"end"
    assert files.read(f"{folder}/a", 99, 5) == b""
    file.truncate(3)
    assert files.read(f"{folder}/a") == b"one"
    file.allocate(100)
    assert files.size(f"{folder}/a") == 100
    file.sync()
    file.close()
    files.open_write(f"{folder}/a").close()


def test_many_buffers_are_one_write(disk: tuple[Files, str]):
    files, folder = disk
    file = files.create(f"{folder}/a")
    file.pwritev([bytes([n % 256]) * 3 for n in range(3000)], 1)
    assert files.read(f"{folder}/a", 1) == b"".join(bytes([n % 256]) * 3 for n in range(3000))
    file.close()


def test_names_come_go_and_are_listed_in_order(disk: tuple[Files, str]):
    files, folder = disk
    files.makedirs(f"{folder}/x/y")
    files.makedirs(f"{folder}/x/y")
    for name in ("b", "a", "c"):
        files.create(f"{folder}/x/{name}").close()
    assert files.listdir(f"{folder}/x") == ["a", "b", "c", "y"]
    with pytest.raises(FileExistsError):
        files.create(f"{folder}/x/a")
    files.rename(f"{folder}/x/a", f"{folder}/x/b")
    files.remove(f"{folder}/x/c")
    files.sync_dir(f"{folder}/x")
    assert files.listdir(f"{folder}/x") == ["b", "y"]
    assert files.exists(f"{folder}/x/b")
    assert not files.exists(f"{folder}/x/a")
    for call in (files.size, files.read, files.open_write, files.remove):
        with pytest.raises(FileNotFoundError):
            call(f"{folder}/x/a")
    with pytest.raises(FileNotFoundError):
        files.listdir(f"{folder}/nowhere")


def test_a_lock_is_one_holders_until_it_closes(disk: tuple[Files, str]):
    files, folder = disk
    first = files.create(f"{folder}/a")
    second = files.open_write(f"{folder}/a")
    assert first.lock()
    assert first.lock()
    assert not second.lock()
    first.close()
    assert second.lock()
    second.close()


def test_disk_usage_is_below_the_whole(disk: tuple[Files, str]):
    files, folder = disk
    used, total = files.disk_usage(folder)
    assert 0 <= used <= total


def crashed(keep: Callable[[int], Sequence[float]] | None):
    files = MemoryFiles()
    files.makedirs("/disk")
    old = files.create("/disk/old")
    old.pwrite(b"a" * 2000, 0)
    old.sync()
    files.sync_dir("/disk")
    old.pwrite(b"b" * 2000, 1000)
    files.create("/disk/new").pwrite(b"new", 0)
    return files.crash(keep)


def test_a_power_cut_keeps_what_was_synced_and_perhaps_more():
    lost = crashed(lose_all)
    assert lost.read("/disk/old") == b"a" * 2000
    assert lost.listdir("/disk") == ["old"]
    kept = crashed(None)
    assert kept.read("/disk/old") == b"a" * 1000 + b"b" * 2000
    assert kept.listdir("/disk") == ["new", "old"]
    outcomes = {crashed(keep_any(seed)).read("/disk/old") for seed in range(200)}
    assert all(content.startswith(b"a" * 1000) for content in outcomes)
    assert len(outcomes) > 20, "writes are torn at many places"
    assert any(b"\0" in content for content in outcomes), "and have holes"


def test_a_failed_fsync_forgets_that_bytes_were_unsynced():
    files = MemoryFiles(FaultPlan(fail_sync_at=frozenset({1})))
    files.makedirs("/disk")
    file = files.create("/disk/a")
    files.sync_dir("/disk")
    file.pwrite(b"data", 0)
    with pytest.raises(OSError, match="fsync failed"):
        file.sync()
    file.sync()
    assert files.read("/disk/a") == b"data"
    assert files.crash(lose_all).read("/disk/a") == b""


def test_a_full_disk_breaks_a_write_off():
    files = MemoryFiles(capacity_bytes=10)
    files.makedirs("/disk")
    file = files.create("/disk/a")
    with pytest.raises(OSError) as caught:
        file.pwrite(bytes(100), 0)
    assert caught.value.errno == errno.ENOSPC


def test_the_process_dies_at_the_operation_asked_for():
    files = MemoryFiles(FaultPlan(crash_at=2))
    files.makedirs("/disk")
    file = files.create("/disk/a")
    with pytest.raises(Crash):
        file.pwrite(b"x", 0)
    assert files.plan.log[-1] == "2 write /disk/a"
