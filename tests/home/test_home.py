from __future__ import annotations

import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.errors import CatalogError, HomeBusy, MillstreamError, UnknownStream, UsageError
from millstream.home.home import Home
from millstream.home.home_format import FORMAT
from millstream.processes.role_locks import RoleLock, holder
from millstream.testing.errors import coded


def make(folder: Path) -> Home:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "millstream.toml").write_text("")
    return Home(folder)


def test_a_home_is_the_named_one_else_the_variables_else_the_nearest_upward(tmp_path: Path) -> None:
    named, variable, above = (make(tmp_path / name) for name in ("named", "variable", "above"))
    inside = above.path / "a" / "b"
    inside.mkdir(parents=True)
    environ = {"MILLSTREAM_HOME": str(variable.path)}
    assert Home.find(named.path, environ=environ, start=inside) == named
    assert Home.find(environ=environ, start=inside) == variable
    assert Home.find(environ={}, start=inside) == above


@pytest.mark.parametrize("where", ["missing", "empty"])
def test_a_named_folder_that_is_no_home_is_not_replaced_by_another(tmp_path: Path, where: str) -> None:
    make(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, check=coded("home_not_found")):
        Home.find(tmp_path / where, environ={}, start=tmp_path)


def test_what_is_no_path_is_no_home(tmp_path: Path) -> None:
    not_a_path: Any = 5
    with pytest.raises(UsageError, match="path must be the path of a home, not int"):
        millstream.open(not_a_path)
    assert Home.find(make(tmp_path).path, environ={}).path == tmp_path


def test_a_copied_log_without_a_configuration_can_be_named(tmp_path: Path) -> None:
    for name in ("shop", "shop.aside-20260101"):
        (tmp_path / "data" / "wal" / name).mkdir(parents=True)
    home = Home.find(tmp_path)
    assert home.streams_on_disk() == ["shop"] == [home.pick_stream(None)]
    with pytest.raises(UnknownStream):
        home.pick_stream("clicks")


def test_a_copied_log_is_found_from_its_own_folder_and_not_from_below(tmp_path: Path) -> None:
    make(tmp_path)
    copied = tmp_path / "copied"
    (copied / "data" / "wal" / "shop").mkdir(parents=True)
    assert Home.find(environ={}, start=copied) == Home(copied)
    assert Home.find(environ={}, start=copied / "data") == Home(tmp_path)


def test_who_names_the_log_of_one_stream_is_told_where_it_belongs(tmp_path: Path) -> None:
    (tmp_path / "00000").mkdir()
    (tmp_path / "00000" / f"{0:020}.wal").write_bytes(b"")
    with pytest.raises(UsageError, check=coded("home_not_found"), match="the log of one stream") as caught:
        Home.find(tmp_path)
    assert "DIR/data/wal/STREAM" in caught.value.hint


def test_one_of_several_streams_has_to_be_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "data" / "wal" / name).mkdir(parents=True)
    with pytest.raises(UnknownStream, match="several"):
        Home(tmp_path).pick_stream(None)
    with pytest.raises(UnknownStream, match="no stream yet"):
        Home(tmp_path / "elsewhere").pick_stream(None)


def test_a_home_of_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    home = make(tmp_path)
    home.prepare()
    file = home.data / "home.json"
    assert json.loads(file.read_text())["format"] == FORMAT
    home.check_format()
    file.write_text(json.dumps({"format": FORMAT + 1}))
    for call in (home.check_format, home.prepare):
        with pytest.raises(UsageError, check=coded("home_too_new")) as caught:
            call()
        assert caught.value.details == {"found": FORMAT + 1, "known": FORMAT}
    file.write_text("{")
    with pytest.raises(CatalogError, match=r"home\.json"):
        home.check_format()


def test_a_home_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    # A file in a folder's place stops root as well; mode bits don't.
    home = make(tmp_path)
    (tmp_path / "data").write_text("in the way")
    with pytest.raises(MillstreamError, check=coded("home_unwritable", "catalog")):
        home.prepare()


@pytest.mark.parametrize("right", ["read", "write"])
def test_a_home_of_another_user_is_a_typed_error(tmp_path: Path, right: str) -> None:
    """Run as root without its rights, in a process of its own: mode bits don't stop root.

    Each command said that home.json was damaged, and to restore it.
    """
    home = make(tmp_path)
    if right == "read":
        home.prepare()
        home.data.chmod(0o000)
    else:
        tmp_path.chmod(0o500)
    child = os.fork()
    if not child:  # a fork has everything imported: the other user may not be able to read this Python
        code = 1
        try:
            if os.getuid() == 0:
                # Without the capability to bypass mode bits, root is an ordinary owner of its files.
                without_rights()
            try:
                home.prepare()
            except MillstreamError as error:
                code = int(error.code != {"read": "home_unreadable", "write": "home_unwritable"}[right])
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (tmp_path if right == "write" else home.data).chmod(0o700)
    home.prepare()


def without_rights() -> None:
    """Drop, for good, root's capabilities, with which it bypasses mode bits. Root stays the owner of its files."""
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def test_sockets_have_a_short_private_folder_that_the_home_links_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    deep = make(tmp_path / ("d" * 60) / ("e" * 60))
    deep.prepare()
    assert deep.socket_folder() is None
    folder = deep.make_socket_folder()
    assert deep.socket_folder() == folder == deep.make_socket_folder()
    assert len(str(folder)) < 90
    assert folder.stat().st_mode & 0o077 == 0
    other = make(tmp_path / "other")
    other.prepare()
    assert other.make_socket_folder() != folder
    folder.rmdir()


def test_threads_that_open_a_home_at_once_share_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for number in range(20):
        home = make(tmp_path / f"home{number}")
        home.prepare()
        together = threading.Barrier(4)

        def opened(home: Home = home, together: threading.Barrier = together) -> Path:
            together.wait(60)
            return home.make_socket_folder()

        with ThreadPoolExecutor(4) as pool:
            folders = {future.result() for future in [pool.submit(opened) for _ in range(4)]}
        assert folders == {home.socket_folder()}
        assert [path.name for path in home.run_folder.iterdir() if "sockets" in path.name] == ["sockets"]


def test_a_copy_that_followed_links_gets_a_link_in_place_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    home = make(tmp_path / "home")
    home.prepare()
    (home.make_socket_folder() / "old").touch()
    copy = Home(tmp_path / "copy")
    shutil.copytree(home.path, copy.path)
    assert (copy.run_folder / "sockets" / "old").is_file()
    with ThreadPoolExecutor(4) as pool:
        folders = {future.result() for future in [pool.submit(copy.make_socket_folder) for _ in range(4)]}
    assert folders == {copy.socket_folder()} != {home.socket_folder()}
    assert [path.name for path in copy.run_folder.iterdir() if "sockets" in path.name] == ["sockets"]
    assert (home.run_folder / "sockets" / "old").is_file(), "the home's own sockets stay"


def test_a_link_that_can_not_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    home = make(tmp_path / "home")
    with pytest.raises(MillstreamError, match="run/sockets: No such file") as caught:
        home.make_socket_folder()
    assert caught.value.code == "home_unwritable"
    assert "TMPDIR" not in caught.value.hint


def test_a_role_is_had_by_one_process_and_freed_by_its_death(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from millstream.processes.role_locks import RoleLock;"
        "lock = RoleLock.take(pathlib.Path(sys.argv[1]), 'run'); print('taken', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "taken\n"
    assert holder(tmp_path, "run")["pid"] == child.pid
    with pytest.raises(HomeBusy) as caught:
        RoleLock.take(tmp_path, "run", patience_s=0)
    assert caught.value.details["pid"] == child.pid
    RoleLock.take(tmp_path, "owner").release()
    child.kill()
    child.wait(180)
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()
    with RoleLock.take(tmp_path, "run"):
        assert holder(tmp_path, "run")["pid"] == os.getpid()
    assert holder(tmp_path, "run") == {}
