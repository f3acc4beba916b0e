"""Run the commands of docs/how-to/source-changes-place.md, down to the lake."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.app.homes import config, done, make_home, run, wait_for
from tests.commands import Command
from tests.e2e.harness import land
from tests.servers.standby import make_standby, promote, wait_for_replay

from millstream.codec.pgoutput import HEARTBEAT_PREFIX
from millstream.testing.postgres import EmbeddedPostgres

pytestmark = pytest.mark.siege


def rows(home: Path) -> list[list[object]]:
    text = done(home, "query", "--format", "json", "SELECT id, v FROM public.t ORDER BY id")
    return [[row["id"], row["v"]] for row in json.loads(text)]


def caught_up(home: Path) -> None:
    done(home, "capture", "run", "--until-caught-up")
    assert land(home) == {}


@contextmanager
def capturing(home: Path) -> Iterator[None]:
    words = ["--home", str(home), "capture", "run"]
    with (home / "run.log").open("wb") as log, Command(words, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            finally:
                process.kill()


@pytest.mark.usefixtures("spark")
def test_a_home_follows_a_promotion_and_begins_anew_after_a_lost_slot(tmp_path: Path) -> None:
    with EmbeddedPostgres(18, fsync=False) as primary:
        with primary.connect() as connection:
            connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
            connection.execute("INSERT INTO t SELECT n, 'before' FROM generate_series(1, 5) n")
        home = make_home(tmp_path / "home", config(primary.dsn(), None, tables='["public.*"]'))
        caught_up(home)
        standby = make_standby(primary)
        try:
            with primary.connect() as connection, standby.connect() as copy, capturing(home):

                def copied() -> bool:
                    # Write a snapshot of running transactions, and WAL that moves the slot: a busy server has
                    # both anyway.
                    connection.execute(
                        f"SELECT pg_log_standby_snapshot(), pg_logical_emit_message(false, '{HEARTBEAT_PREFIX}', '')"
                    )
                    copy.execute("SELECT pg_sync_replication_slots()")
                    there = "SELECT count(*) FROM pg_replication_slots WHERE synced AND NOT temporary"
                    return copy.execute(there).fetchone() == (1,)

                wait_for(copied, seconds=120)
            with primary.connect() as connection:
                connection.execute("UPDATE t SET v = 'old primary' WHERE id = 1")
            wait_for_replay(primary, standby)
            primary.stop("immediate")
            promote(standby)
            with standby.connect() as connection:
                connection.execute("DELETE FROM t WHERE id = 5")
            make_home(home, config(standby.dsn(), None, tables='["public.*"]'))
            caught_up(home)
            assert rows(home) == [[1, "old primary"], [2, "before"], [3, "before"], [4, "before"]]
            (stream,) = json.loads(done(home, "status", "--json"))["streams"]
            assert (stream["source"]["number"], stream["source"]["timeline"]) == (2, 2)
            records = [json.loads(line) for line in done(home, "wal", "cat").splitlines()]
            assert sorted({record["source"] for record in records}) == [1, 2]
            assert "equal" in done(home, "diff")

            with standby.connect() as connection:
                connection.execute("SELECT pg_drop_replication_slot('millstream_shop')")
                connection.execute("DELETE FROM t WHERE id = 4")
            ended = run(home, "run", "--until-caught-up")
            assert ended.returncode != 0
            assert f"millstream --home {home} slot drop" in ended.stderr
            done(home, "slot", "drop", "--yes")
            caught_up(home)
            assert rows(home) == [[1, "old primary"], [2, "before"], [3, "before"]]
            assert "equal" in done(home, "diff")
        finally:
            standby.close()
