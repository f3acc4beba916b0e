"""Processes that may open no more files for a while: they answer by a code, lose nothing, and go on afterwards."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.app.homes import wait_for
from tests.serving.serving_process import rows_of, served, web_home
from tests.writers.test_home_appender import process, writes

import millstream
from millstream.home.home import Home
from millstream.serving import server


@contextmanager
def no_more_files(pid: int) -> Iterator[None]:
    """Let a process open no file beyond those that it has open."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    has = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    lowest = next(number for number in itertools.count() if number not in has)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return web_home(tmp_path / "web")


def test_an_owner_that_may_open_no_more_files_goes_on(home: Path) -> None:
    """It ended, with all its streams: several times a second it looks for logs of other regions."""
    with process(home, "capture", "run") as owner, millstream.open(home) as opened:
        wait_for(lambda: writes(home, owner.pid))
        opened.append("web", "clicks", {"n": 0}, deadline_s=60)
        with no_more_files(owner.pid):
            until_s = time.monotonic() + 1.0
            for n in itertools.count(1):
                opened.append("web", "clicks", {"n": n}, deadline_s=60)
                if time.monotonic() > until_s:
                    break
        opened.append("web", "clicks", {"n": n + 1}, deadline_s=60)
        assert owner.poll() is None
    assert [row["n"] for row in rows_of(home)] == list(range(n + 2))


def test_a_request_that_needs_a_file_is_told_the_limit_and_may_be_repeated(home: Path) -> None:
    consumer = "/v1/streams/web/consumers"
    with served(home) as running, running.client() as client:
        assert running.post("clicks", [{"n": 1}, {"n": 2}]).status_code == 200
        client.post(consumer, json={"name": "late", "start": "earliest"}).raise_for_status()
        with no_more_files(running.process.pid):
            refused = client.post(f"{consumer}/late/receive", json={})
            assert (refused.status_code, refused.json()["code"]) == (503, "system_limit")
            assert "ulimit -n" in refused.json()["hint"]
        messages = client.post(f"{consumer}/late/receive", json={}).raise_for_status().json()["messages"]
        assert [(each["record"]["row"]["n"], each["deliveries"]) for each in messages] == [(1, 1), (2, 1)]


def test_connections_leave_half_of_the_files_for_the_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.connection_bounds(Home(home)).connections_max == 10_000
    monkeypatch.setattr(server, "raise_open_files", lambda: 64)
    assert server.connection_bounds(Home(home)).connections_max == 32
