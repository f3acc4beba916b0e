"""Parts of a log that belong to another user, and names of something other than the log's files.

They give typed errors, never a crash.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from tests.reachable import reachable_folder
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.cli.main import _report
from millstream.errors import DiskFull, LogError, MillstreamError
from millstream.home.home import Home
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.positions import Seq
from millstream.testing.errors import code_of, coded
from millstream.wal.files import error_of_os
from millstream.wal.layout import shard_folder
from millstream.wal.mending.inspect import verify
from millstream.wal.mending.repair import plan_repair
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogWriter

STREAM = StreamId(UUID(int=7))
NOBODY = 65534
AS_ANOTHER = """
import json, os, sys
from uuid import UUID
import millstream.cli.wal, millstream.wal.mending.repair, millstream.app.open_home
from millstream.errors import MillstreamError
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.positions import Seq
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table
from millstream.wal.mending.inspect import verify
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogWriter

if os.getuid() == 0:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
folder, found = sys.argv[1], {}

def read():
    reader = StreamReader(folder)
    return sum(part.batch.num_rows for part in reader.read_between(Seq(0), reader.persisted_upto()))

def write():
    reservations = MemoryReservations()
    reservations.epoch = Epoch(9)
    LogWriter.open(folder, stream=StreamId(UUID(int=7)), shards=[ShardId(0)], epoch=Epoch(9), reservations=reservations).close()

for name, call in (("read", read), ("verify", lambda: verify(folder).is_whole), ("write", write)):
    try:
        found[name] = call()
    except MillstreamError as error:
        found[name] = {"code": error.code, **error.details}
print(json.dumps(found))
"""


def write_log(folder: str, epochs: range = range(1, 3)) -> MemoryReservations:
    reservations = MemoryReservations()
    for epoch in epochs:
        with LogWriter.open(
            folder, stream=STREAM, shards=[ShardId(0)], epoch=Epoch(epoch), reservations=reservations
        ) as log:
            log.append(plain_ops({epoch: [(plain_table(1), 2, "a")]}))
    return reservations


@pytest.fixture
def shared() -> Iterator[str]:
    """Yield a log that another user can reach; that user owns it if this one is root."""
    top = Path(tempfile.mkdtemp(prefix="millstream-test-", dir=reachable_folder()))
    top.chmod(0o755)
    folder = top / "shop"
    write_log(str(folder))
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    yield str(folder)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(top)


def take_away(path: Path, mode: int) -> None:
    """Give a path to another user: to root, or if the test isn't root, to no one."""
    if os.getuid() == 0:
        os.chown(path, 0, 0)
    path.chmod(mode)


def as_another(folder: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER, folder], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("part", ["segment", "shard", "mark"])
def test_a_part_that_this_user_may_not_read_is_named(shared: str, part: str) -> None:
    shard = Path(shard_folder(shared, ShardId(0)))
    path = {"segment": min(shard.glob("*.wal")), "shard": shard, "mark": shard / "durable.mark"}[part]
    take_away(path, 0o000)
    found = as_another(shared)
    for call in ("read", "verify"):
        assert isinstance(found[call], dict), found
        assert found[call]["code"] == "home_unreadable"
        assert str(found[call]["path"]).startswith(str(path))
    assert isinstance(found["write"], dict)
    assert found["write"]["code"] == "home_unreadable"


@pytest.mark.sampled
@pytest.mark.parametrize("part", ["mark", "shard"])
def test_a_part_that_this_user_may_not_write_is_named(shared: str, part: str) -> None:
    shard = Path(shard_folder(shared, ShardId(0)))
    path = {"shard": shard, "mark": shard / "durable.mark"}[part]
    take_away(path, 0o555 if part == "shard" else 0o444)
    found = as_another(shared)
    assert found["read"] == 4
    assert found["verify"] is True
    assert isinstance(found["write"], dict), found
    assert found["write"]["code"] == "home_unwritable"
    assert str(found["write"]["path"]).startswith(str(path))


def test_the_systems_errors_are_told_with_path_and_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = error_of_os(OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path / "x")))
    assert isinstance(broken, MillstreamError)
    assert broken.code == "io_failed"
    assert broken.details == {"path": str(tmp_path / "x"), "errno": "EIO"}
    assert str(tmp_path / "x") in broken.message
    assert isinstance(error_of_os(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x")), DiskFull)
    assert code_of(error_of_os(PermissionError(errno.EACCES, "denied", str(tmp_path / "x")))) == "home_unwritable"
    assert code_of(error_of_os(OSError(errno.EROFS, "read-only", str(tmp_path / "a" / "x")))) == "home_unwritable"
    assert (
        error_of_os(FileNotFoundError(errno.ENOENT, "no such file", "/no/x")).hint
        == "Check the path, or name another one."
    )
    assert error_of_os(OSError("no number at all")).details == {"path": None, "errno": None}
    assert _report(OSError(errno.EIO, os.strerror(errno.EIO), "/mnt/x"), debug=False) == 1
    told = capsys.readouterr().err
    assert "error[io_failed]: /mnt/x: Input/output error" in told
    assert "bug" not in told
    assert (
        MillstreamError("x", code="home_unreadable").exit_code == MillstreamError("x", code="io_failed").exit_code == 1
    )


def a_folder_like_a_segment(folder: Path) -> Path:
    (path := folder / "00000" / f"{1:020d}.wal").mkdir()
    return path


def a_folder_like_a_segment_behind_the_end(folder: Path) -> Path:
    (path := folder / "00000" / f"{999:020d}.wal").mkdir()
    return path


def a_file_like_a_shard(folder: Path) -> Path:
    (path := folder / "00001").write_text("not a folder")
    return path


@pytest.mark.parametrize(
    "change", [a_folder_like_a_segment, a_folder_like_a_segment_behind_the_end, a_file_like_a_shard]
)
def test_a_name_that_stands_for_something_else_is_unexpected(tmp_path: Path, change: Callable[[Path], Path]) -> None:
    folder = tmp_path / "shop"
    reservations = write_log(str(folder))
    path = change(folder)
    report = verify(str(folder))
    assert [loss.file for loss in report.losses] == [str(path)]
    assert "isn't the log's" in report.losses[0].why
    assert report.records == 4
    with pytest.raises(LogError, check=coded("unexpected_file")) as caught:
        LogWriter.open(str(folder), stream=STREAM, shards=[ShardId(0)], epoch=Epoch(5), reservations=reservations)
    assert caught.value.details["file"] == str(path)
    with pytest.raises(LogError, check=coded("unexpected_file")):
        plan_repair(str(folder))
    if change is not a_folder_like_a_segment_behind_the_end:  # where no reader looks
        reader = StreamReader(str(folder))
        with pytest.raises(LogError, check=coded("unexpected_file")):
            list(reader.read_between(Seq(0), reader.persisted_upto()))


def test_lost_and_found_of_a_disk_of_its_own_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "wal" / "shop"
    reservations = write_log(str(folder))
    for place in (folder.parent, folder, folder / "00000"):
        (place / "lost+found").mkdir(mode=0o700)
    (folder.parent / "Not a stream").mkdir()
    assert Home(tmp_path).streams_on_disk() == ["shop"]
    assert Home(tmp_path).pick_stream(None) == "shop"
    assert verify(str(folder)).is_whole
    reader = StreamReader(str(folder))
    assert sum(part.batch.num_rows for part in reader.read_between(Seq(0), reader.persisted_upto())) == 4
    LogWriter.open(str(folder), stream=STREAM, shards=[ShardId(0)], epoch=Epoch(5), reservations=reservations).close()
