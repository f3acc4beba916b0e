"""The owner with sources that can't be reached: an error for each, while the other streams go on."""

from __future__ import annotations

import errno
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tests.app.homes import make_home, run, wait_for

from millstream.app.open_home import OpenHome, open_other
from millstream.errors import AppendOutcomeUnknown
from millstream.home.home import Home
from millstream.processes.child_process import Lifeline
from millstream.processes.role_locks import holder
from millstream.testing.pytest_plugin import Database
from millstream.wal.writing.segment import OpenSegment
from millstream.writers.owner import run_owner


def write_config(home: Path, **streams: str) -> None:
    sections = (f"[streams.{name}.source]\ndsn = {json.dumps(dsn)}\n" for name, dsn in streams.items())
    (home / "millstream.toml").write_text("".join(sections))


def test_one_stream_that_cannot_be_captured_stops_no_other(tmp_path: Path, postgres: Database) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        connection.execute("INSERT INTO orders SELECT generate_series(1, 20)")
    write_config(tmp_path, good=postgres.dsn, bad=postgres.dsn.replace(postgres.name, "no_such_database"))
    done = run(tmp_path, "capture", "run", "--until-caught-up")
    assert done.returncode == 1
    assert "error[source_database_missing]" in done.stderr
    assert "Traceback" not in done.stderr
    lines = run(tmp_path, "wal", "cat", "--stream", "good").stdout.splitlines()
    assert [json.loads(line)["row"]["id"] for line in lines] == list(range(1, 21))
    tables = json.loads(run(tmp_path, "tables", "--json").stdout)
    assert [(t["stream"], t["name"], t["state"]) for t in tables] == [("good", "public.orders", "streaming")]


def test_a_server_that_is_not_there_fails_a_job_with_its_own_error(tmp_path: Path) -> None:
    write_config(tmp_path, shop="host=127.0.0.1 port=1")
    done = run(tmp_path, "capture", "run", "--until-caught-up")
    assert done.returncode == 1
    assert "error[source_unreachable]" in done.stderr


def test_a_stream_of_applications_is_opened_again_after_a_failed_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still until a restart, and status called it running."""
    home, lifeline = Home(make_home(tmp_path / "web", "[streams.web]\n")), Lifeline()
    fails, sync = threading.Event(), OpenSegment.sync

    def failing(segment: OpenSegment) -> None:
        if fails.is_set():
            fails.clear()
            raise OSError(errno.EIO, "Input/output error")
        sync(segment)

    monkeypatch.setattr(OpenSegment, "sync", failing)
    owner = partial(run_owner, home, lifeline, open_other=open_other, on_progress=lambda _facts: None)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(owner)
        try:
            wait_for(lambda: running.done() or holder(home.run_folder, "owner"))
            with OpenHome(home) as opened:
                opened.append("web", "clicks", [{"n": 1}])
                fails.set()
                with pytest.raises(AppendOutcomeUnknown):
                    opened.append("web", "clicks", [{"n": 2}])
                opened.append("web", "clicks", [{"n": 3}])
                rows = [row["n"] for batch in opened.read("web") for row in batch.to_pylist()]
        finally:
            lifeline.stop.set()
    assert running.result() is not None
    assert rows[0] == 1
    assert rows[-1] == 3
