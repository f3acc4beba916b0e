"""Calls from a signal handler, which interrupts another call of its thread: none hangs."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import make_home, wait_for

import millstream
from millstream.errors import AppendOutcomeUnknown, HomeClosed, UsageError
from millstream.wal.writing.group_commit import GroupCommitter


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "web", "[streams.web]\n")


def in_a_process(work: Callable[[], None]) -> None:
    """Do the work in a process of its own, which fails the test if it hangs."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    ended: list[int] = []

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([status] if pid else [])
        return bool(ended)

    try:
        wait_for(has_ended, seconds=60)
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert ended == [0]


def interrupting(monkeypatch: pytest.MonkeyPatch, handler: Callable[[], Any]) -> None:
    """Have the handler called once, in the midst of the next commit group that the main thread writes."""
    commit, left = GroupCommitter.commit, [True]

    def interrupted(committer: GroupCommitter, submitted: Any) -> Any:
        if left and threading.current_thread() is threading.main_thread():
            left.pop()
            signal.raise_signal(signal.SIGUSR1)
        return commit(committer, submitted)

    signal.signal(signal.SIGUSR1, lambda *_: handler())
    monkeypatch.setattr(GroupCommitter, "commit", interrupted)


def numbers(home: Path) -> list[int]:
    with millstream.open(home) as opened:
        return [n for batch in opened.read("web", table="clicks") for n in batch.column("n").to_pylist()]


def test_a_handler_that_closes_the_home_within_an_append_has_it_closed_after_that(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the process hung, with the writer's role: it waited for its own append."""

    def work() -> None:
        opened = millstream.open(home)
        opened.append("web", "clicks", {"n": 1})
        interrupting(monkeypatch, opened.close)
        opened.append("web", "clicks", {"n": 2})
        with pytest.raises(HomeClosed):
            opened.append("web", "clicks", {"n": 3})
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("wal-writer")]

    in_a_process(work)
    assert numbers(home) == [1, 2]


def test_a_handler_that_closes_the_home_and_exits_ends_the_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(opened: millstream.OpenHome) -> None:
        opened.close()
        raise SystemExit

    def work() -> None:
        opened = millstream.open(home)
        opened.append("web", "clicks", {"n": 1})
        interrupting(monkeypatch, lambda: ends(opened))
        with pytest.raises(SystemExit):
            opened.append("web", "clicks", {"n": 2})

    in_a_process(work)
    assert numbers(home) in ([1], [1, 2])


def test_a_handlers_own_append_within_an_append_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it waited for the append that it had interrupted."""

    def work() -> None:
        refused: list[UsageError] = []
        with millstream.open(home) as opened:
            opened.append("web", "clicks", {"n": 1})

            def heeded() -> None:
                with pytest.raises(UsageError, match="interrupts an append") as caught:
                    opened.append("web", "clicks", {"n": -1})
                refused.append(caught.value)

            interrupting(monkeypatch, heeded)
            opened.append("web", "clicks", {"n": 2})
            assert refused
            interrupting(monkeypatch, lambda: opened.append("web", "clicks", {"n": -2}))
            with pytest.raises(AppendOutcomeUnknown):  # not the handler's error: nothing would seem to be appended
                opened.append("web", "clicks", {"n": 3})
            session = opened.session("web", "one")
            session.append("clicks", {"n": 4})
            interrupting(monkeypatch, lambda: opened.append("web", "clicks", {"n": -3}))
            session.append("clicks", {"n": 5})

    in_a_process(work)
    assert [n for n in numbers(home) if n != 3] == [1, 2, 4, 5]


@pytest.mark.parametrize("waits", ["consume", "follow"])
def test_a_handler_that_closes_the_home_ends_a_wait_of_its_thread(home: Path, waits: str) -> None:
    def work() -> None:
        opened = millstream.open(home)
        opened.append("web", "clicks", {"n": 1})
        opened.consumers("web").create("one", start="latest")
        signal.signal(signal.SIGALRM, lambda *_: opened.close())
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        if waits == "follow":
            assert list(opened.follow("web")) == []
        else:
            with pytest.raises(HomeClosed):
                next(opened.consume("web", "one"))

    in_a_process(work)
