"""A replay that is killed, as a user sees it: `status`, the process's output, and the final lake."""

from __future__ import annotations

import contextlib
import csv
import io
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import MILLSTREAM, Home, wait_for

from millstream.errors import LogError
from millstream.testing.postgres import EmbeddedPostgres
from millstream.wal.reader import StreamReader

pytestmark = pytest.mark.siege

CONFIG = """[streams.shop.log]
segment_bytes = "16KiB"
[spark]
batch_bytes = "64KiB"
"""
TRANSACTIONS, ROWS = 140, 100
"""Some twenty batches: the test checks the replay, and kills it, long before its end."""


@contextmanager
def part(home: Home, name: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a part in the background; kill it at the end."""
    with log.open("wb") as stderr:
        process = subprocess.Popen([MILLSTREAM, "--home", str(home.path), name, "run"], stderr=stderr)
    try:
        yield process
    finally:
        process.kill()
        process.wait(180)


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("spark")
def test_a_replay_is_told_and_goes_on_after_a_kill(tmp_path: Path, postgres_server: EmbeddedPostgres) -> None:
    home = Home(tmp_path / "shop", postgres_server.create_database("replayed"), slot="replayed", extra_config=CONFIG)
    home.init()

    def stream() -> dict[str, Any]:
        (found,) = home.status()["streams"]
        return dict(found)

    def in_the_log() -> int:
        """Make records, each with a number."""
        with contextlib.suppress(LogError):
            return StreamReader(str(home.path / "data" / "wal" / "shop")).persisted_upto()
        return 0

    def waiting() -> int:
        return int(stream()["lag"]["lake"]["records"] or 0)

    with postgres_server.connect("replayed", autocommit=True) as connection:
        connection.execute("CREATE TABLE items (id bigint PRIMARY KEY, body text NOT NULL)")
        home.command("capture", "run", "--until-caught-up")
        with part(home, "capture", tmp_path / "capture.log") as capture:
            for number in range(TRANSACTIONS):
                connection.execute(
                    "INSERT INTO items SELECT i, md5(i::text) || md5((-i)::text) FROM generate_series(%s::bigint, %s::bigint) AS i",
                    [number * ROWS + 1, (number + 1) * ROWS],
                )
                # Each record in a commit group of its own, so that there are many segments.
                wait_for(lambda upto=(number + 1) * ROWS: in_the_log() >= upto, "a transaction in the log")
            capture.send_signal(signal.SIGTERM)
            assert capture.wait(180) == 0
        (there,) = connection.execute("SELECT count(*), md5(string_agg(body, ',' ORDER BY id)) FROM items").fetchall()
    before = stream()
    assert before["replay"] is None
    assert before["lag"]["lake"]["records"] == TRANSACTIONS * ROWS
    assert before["log"]["segments"] > 20

    first_log, second_log = tmp_path / "first.log", tmp_path / "second.log"
    told: list[dict[str, Any]] = []

    # Each status check is a process: make none while Spark starts.
    def under_way() -> bool:
        if "replay begins" not in first_log.read_text():
            return False
        replay = stream()["replay"]
        if replay is not None:
            told.append(replay)
        return bool(told) and told[-1]["records"]["done"] > 0

    with part(home, "pipeline", first_log) as process:
        wait_for(under_way, "a batch to be landed", timeout_s=500)
        shown = home.command("status")
        process.send_signal(signal.SIGKILL)
    assert "  replay: " in shown
    assert told[0]["records"]["total"] >= TRANSACTIONS * ROWS
    stopped = stream()
    assert stopped["replay"] is None, "nothing runs"
    left = waiting()
    assert 0 < left < TRANSACTIONS * ROWS, "in its midst"

    again: list[dict[str, Any]] = []

    def over() -> bool:
        if "replay begins" not in second_log.read_text():
            return False
        found = stream()
        if found["replay"] is not None:
            again.append(found["replay"])
        return not found["lag"]["lake"]["records"]

    with part(home, "pipeline", second_log) as process:
        wait_for(over, "the lake to have all of it", timeout_s=500)
        wait_for(lambda: "replay is over" in second_log.read_text(), "the last line")
        assert stream()["replay"] is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert {replay["records"]["total"] for replay in again} == {left}, "from the last cut on"
    for one in (told, again):
        done = [replay["bytes"]["done"] for replay in one]
        assert done == sorted(done)
        assert all(replay["bytes"]["done"] <= replay["bytes"]["total"] for replay in one)
    assert "replay begins" in first_log.read_text()
    assert "replay is over" not in first_log.read_text()
    assert f"records {left}" in next(line for line in second_log.read_text().splitlines() if "replay is over" in line)

    assert home.caught_up_here() == {}
    sql = "SELECT count(*) AS rows, md5(string_agg(body, ',' ORDER BY id)) AS sum FROM public.items"
    (lake,) = csv.DictReader(io.StringIO(home.command("query", sql, "--format", "csv")))
    assert (int(lake["rows"]), lake["sum"]) == there
    every = 'SELECT count(*) AS records, count(DISTINCT __seq) AS numbers FROM history."public.items"'
    (history,) = csv.DictReader(io.StringIO(home.command("query", every, "--format", "csv")))
    assert int(history["records"]) == int(history["numbers"]) == TRANSACTIONS * ROWS
