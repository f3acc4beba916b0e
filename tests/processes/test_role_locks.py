"""A home whose `data/run` is moved or removed while processes run keeps its roles, and its processes are found."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import cast

import pytest
from tests.app.homes import done, make_home, run, wait_for
from tests.commands import SCRIPT, Command
from tests.refused_threads import refused_threads
from tests.serving.servers import served

from millstream.errors import HomeBusy
from millstream.processes.role_locks import Role, RoleLock, holder


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def test_a_holder_puts_its_lock_back_with_the_link_to_the_sockets(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "run"
    folder.mkdir(parents=True)
    lock = RoleLock.take(folder, "serve", what="a test")
    (folder / "sockets").symlink_to("/somewhere")
    wait_for(lambda: lock._sockets is not None)
    shutil.rmtree(folder)
    wait_for(lambda: names(folder) == ["serve.lock", "sockets"])
    assert (folder / "sockets").readlink() == Path("/somewhere")
    facts = holder(folder, "serve")
    assert (facts["pid"], facts["what"]) == (os.getpid(), "a test")
    with pytest.raises(HomeBusy):
        RoleLock.take(folder, "serve")
    lock.note(more=1)
    assert holder(folder, "serve")["more"] == 1
    lock.release()
    assert holder(folder, "serve") == {}
    RoleLock.take(folder, "serve").release()


def test_a_role_that_another_process_took_meanwhile_is_held_again_once_it_is_free(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "run"
    folder.mkdir(parents=True)
    first = RoleLock.take(folder, "serve", what="first")
    with first._moving:  # the next look comes after the other process
        shutil.rmtree(folder)
        folder.mkdir()
        second = RoleLock.take(folder, "serve", what="second")
    wait_for(lambda: first._is_taken)
    assert holder(folder, "serve")["what"] == "second"
    second.release()
    wait_for(lambda: holder(folder, "serve").get("what") == "first")
    first.release()


def test_a_removed_home_is_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "data" / "run"
    folder.mkdir(parents=True)
    lock = RoleLock.take(folder, "serve")
    shutil.rmtree(tmp_path / "home")
    assert lock._keep()
    lock.release()
    assert not (tmp_path / "home").exists()


def test_a_role_whose_thread_is_refused_is_free_again(tmp_path: Path) -> None:
    """Regression: the lock stayed, and all later takes of the same process were refused because of it."""
    with refused_threads("role-"), pytest.raises(OSError, match="no more threads"):
        RoleLock.take(tmp_path, "delivery")
    assert holder(tmp_path, "delivery") == {}
    RoleLock.take(tmp_path, "delivery", patience_s=0).release()


def test_a_lock_that_the_system_refuses_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, _how: int) -> None:
        tried.append(descriptor)
        raise OSError(errno.ENOLCK, "no locks available")

    tried: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refused)
        with pytest.raises(OSError, match="no locks"):
            RoleLock.take(tmp_path, "delivery")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(*tried)


def another(folder: Path, role: str, **facts: str) -> Command:
    """Return a process that has taken a role."""
    code = (
        "import sys, pathlib, json, time; from millstream.processes.role_locks import RoleLock;"
        "lock = RoleLock.take(pathlib.Path(sys.argv[1]), sys.argv[2], **json.loads(sys.argv[3])); time.sleep(600)"
    )
    taken = Command([code, str(folder), role, json.dumps(facts)], begins=SCRIPT)
    wait_for(lambda: holder(folder, cast("Role", role)))
    return taken


@pytest.mark.parametrize(
    ("held", "facts", "message", "hint"),
    [
        (["serve"], {}, "process {0}: `millstream serve`", "Stop process {0} by `kill {0}`"),
        (["owner", "run"], {}, "process {1}: `millstream run`", "Stop process {1} by `kill {1}`"),
        (["delivery"], {"what": "an application"}, "process {0}: an application", "Close the home in that process"),
    ],
)
def test_a_busy_home_names_the_process_to_stop(
    tmp_path: Path, held: list[str], facts: dict[str, str], message: str, hint: str
) -> None:
    """Regression: a part of `run` was named, which `run` starts again when it is killed."""
    folder = tmp_path / "data" / "run"
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as ends:
        processes = []
        for role in held:
            processes.append(another(folder, role, **facts))
            ends.callback(processes[-1].wait)
            ends.callback(processes[-1].kill)
        pids = [one.pid for one in processes]
        with pytest.raises(HomeBusy) as refused:
            RoleLock.take(folder, cast("Role", held[0]), patience_s=0.0)
    assert refused.value.message == f"{tmp_path} is in use by {message.format(*pids)}"
    assert hint.format(*pids) in refused.value.hint


def test_processes_find_a_server_whose_run_folder_was_removed(tmp_path: Path) -> None:
    """Regression: `status` showed nothing, and a second server started.

    An append failed with `shard_locked`, whose hint named `status`.
    """
    home = make_home(tmp_path / "home", "[streams.web]\n")
    row = '{"id": 1}\n'
    run(home, "append", "orders", stdin=row)
    with served(home) as server:
        pid = server.process.pid
        folder = home / "data" / "run"
        # By then the server has seen its link to the sockets.
        wait_for(lambda: time.time() - holder(folder, "serve")["since"] > 3)
        shutil.rmtree(folder)
        wait_for(lambda: f"serve (process {pid})" in done(home, "status"))
        appended = run(home, "append", "orders", stdin=row)
        assert appended.returncode == 0, appended.stderr
        second = run(home, "serve", MILLSTREAM_HTTP__LISTEN="127.0.0.1:0")
        assert second.returncode != 0
        assert "home_busy" in second.stderr
