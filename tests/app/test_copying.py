"""Table copies as a user sees them: progress, rate limit, pause, kill, and bounded memory."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import config, done, make_home, run, wait_for
from tests.app.test_large_values import MIB, capture
from tests.capture.serial_history import History
from tests.commands import Command

import millstream
from millstream.app.status import collect_status
from millstream.home.home import Home
from millstream.serving.metrics import prometheus_text
from millstream.testing.pytest_plugin import Database

ROWS = 4000
COPY_BYTES = 448 * MIB
"""Memory that capture may take; some 280 MiB of it is the base that capture takes for any work."""
MANY_ROWS = 40_000
"""Rows for over two minutes at 256 KiB/s: commands and checks during the copy are slow on a slow machine."""
FILL = """CREATE TABLE slow (id int PRIMARY KEY, body text);
    INSERT INTO slow SELECT i, repeat(md5(i::text), 32) FROM generate_series(1, {}) i; ANALYZE slow"""


@contextmanager
def capturing(home: Path) -> Iterator[Command]:
    with Command(
        ["--home", str(home), "capture", "run"], stderr=subprocess.DEVNULL, env={**os.environ, "HOME": "/nonexistent"}
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(180)


def table(home: Path, name: str) -> dict[str, Any]:
    found = collect_status(Home(home))["streams"][0].get("tables", ())
    return next((one for one in found if one["name"] == name), {"state": None, "copy": None})


def copied(home: Path, name: str) -> int:
    return int((table(home, name)["copy"] or {"rows": 0})["rows"])


@pytest.mark.siege
def test_a_copy_is_told_held_back_paused_and_let_go_while_it_runs(tmp_path: Path, postgres: Database) -> None:
    with postgres.connect() as connection:
        connection.execute(FILL.format(MANY_ROWS))
    home = make_home(tmp_path / "shop", config(postgres.dsn, None) + 'copy_rate = "256KiB"\n')
    with capturing(home):
        wait_for(lambda: copied(home, "public.slow") > 300, what=lambda: table(home, "public.slow"))
        first = table(home, "public.slow")
        copy = first["copy"]
        assert first["state"] == "copying"
        assert (copy["state"], copy["rows_estimate"]) == ("reading", MANY_ROWS)
        assert copy["bytes"] == pytest.approx(copy["rows"] * 1030, rel=0.02)
        assert copy["bytes_per_s"] < 600_000, "about as fast as it is allowed to"
        assert copy["eta_s"] == pytest.approx((MANY_ROWS - copy["rows"]) / copy["rows_per_s"], rel=0.1)
        shown = done(home, "tables")
        assert re.search(
            r"public\.slow +copying +0 +[\d,]+ of about 40,000 rows, [\d.]+ [KM]iB, [\d.]+ KiB/s, about .+ left", shown
        )
        text = prometheus_text(lambda: collect_status(Home(home))).decode()
        for metric in ("rows", "rows_estimate", "bytes", "rows_per_second", "bytes_per_second", "eta_seconds"):
            assert re.search(rf'millstream_table_copy_{metric}{{stream="shop",table="public.slow"}} [1-9]', text), (
                metric
            )

        done(home, "tables", "pause", "public.slow")
        wait_for(lambda: (table(home, "public.slow")["copy"] or {}).get("state") == "paused")
        assert table(home, "public.slow")["state"] == "paused"
        assert "no copy to pause" not in run(home, "tables", "pause", "public.slow").stderr, (
            "said again it's no mistake"
        )
        done(home, "tables", "resume", "public.slow")
        assert run(home, "tables", "resume", "public.slow").returncode == 2
        stood = copied(home, "public.slow")
        wait_for(lambda: copied(home, "public.slow") > stood)
        # At the old rate the rest takes more than two minutes.
        (home / "millstream.toml").write_text(config(postgres.dsn, None) + 'copy_rate = "1TiB"\n')
        wait_for(lambda: table(home, "public.slow")["state"] == "streaming", seconds=60)
    assert "millstream_table_copy_rows{" not in prometheus_text(lambda: collect_status(Home(home))).decode()


@pytest.mark.long
def test_captured_records_are_counted_and_their_commits_timed(tmp_path: Path, postgres: Database) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE few (id int PRIMARY KEY); INSERT INTO few SELECT generate_series(1, 10)")
    home = make_home(tmp_path / "shop", config(postgres.dsn, None))

    def counted() -> dict[str, float]:
        text = prometheus_text(lambda: collect_status(Home(home))).decode()
        found = re.findall(r'^millstream_(\w+)\{process="owner",stream="shop"\} (\S+)$', text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    with capturing(home):
        wait_for(lambda: counted().get("captured_records_total") == 10, what=counted)
        commits = counted()["capture_commit_seconds_count"]
        with postgres.connect() as connection:
            connection.execute("INSERT INTO few VALUES (11), (12)")
        wait_for(lambda: counted()["captured_records_total"] == 12, what=counted)
        found = counted()
    assert found["capture_commit_seconds_count"] > commits >= 1
    assert found["log_records_total"] == 12
    assert found["log_fsync_seconds_count"] >= found["log_commit_seconds_count"] >= 2


@pytest.mark.long
def test_a_job_does_not_wait_for_a_paused_copy_and_says_so(tmp_path: Path, postgres: Database) -> None:
    with postgres.connect() as connection:
        connection.execute(FILL.format(ROWS))
        connection.execute("CREATE TABLE other (id int PRIMARY KEY); INSERT INTO other VALUES (1)")
    home = make_home(tmp_path / "shop", config(postgres.dsn, None))
    done(home, "capture", "run", "--until-caught-up")
    done(home, "tables", "copy", "public.slow")
    done(home, "tables", "pause", "public.slow")
    ended = run(home, "capture", "run", "--until-caught-up")
    assert ended.returncode == 1
    assert "copy_paused" in ended.stderr
    assert "shop: public.slow: its copy is paused" in ended.stderr
    done(home, "tables", "resume", "public.slow")
    done(home, "capture", "run", "--until-caught-up")
    assert table(home, "public.slow")["state"] == "streaming"


@pytest.mark.long
def test_a_job_names_a_table_whose_copy_is_held_and_its_command(tmp_path: Path, postgres: Database) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE large (id int PRIMARY KEY, body text)")
        connection.execute("INSERT INTO large SELECT i, repeat('x', 100) FROM generate_series(1, 200) i")
    home = make_home(tmp_path / "shop", config(postgres.dsn, None) + 'copy_again_above = "8KiB"\n')
    done(home, "capture", "run", "--until-caught-up")
    with postgres.connect() as connection:
        connection.execute("ALTER TABLE large ADD note float DEFAULT random()")
    ended = run(home, "capture", "run", "--until-caught-up")
    assert ended.returncode == 1
    assert "copy_held" in ended.stderr
    assert "shop: public.large: column note was added, and the rows were rewritten" in ended.stderr
    assert table(home, "public.large")["state"] == "copy_held"
    done(home, "tables", "copy", "public.large")
    done(home, "capture", "run", "--until-caught-up")
    assert table(home, "public.large")["state"] == "streaming"


@pytest.mark.parametrize("workers", [2, 12])
@pytest.mark.siege
def test_wide_rows_are_copied_in_bounded_memory(workers: int, tmp_path: Path, postgres: Database) -> None:
    """If chunks were counted in rows, a chunk would have fifty thousand of them; workers share the memory limit."""
    # A log on a slow disk, with writes that wait for it, isn't the subject here.
    tables = [f"wide{number}" for number in range(workers // 2)]  # one worker reads a range of a table
    extra = f'copy_workers = {workers}\n[streams.shop.log]\nqueue_bytes = "16MiB"\n'
    home = make_home(tmp_path / "shop", config(postgres.dsn, None, tables='["public.wide*"]') + extra)
    other = make_home(tmp_path / "other", config(postgres.dsn, None, stream="other", tables='["public.small"]'))
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE small (id int PRIMARY KEY, body text); INSERT INTO small VALUES (1, 'a')")
        for table in tables:
            connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, body text)")
            connection.execute(f"ALTER TABLE {table} ALTER body SET STORAGE EXTERNAL")
            connection.execute(
                f"INSERT INTO {table} SELECT i, repeat(chr(65 + i %% 26), %s) FROM generate_series(1, %s) i",
                [MIB, 300 // len(tables)],
            )
            connection.execute(f"ANALYZE {table}")
    capture(other)  # compiling takes 200 MiB
    (home / "compiled").symlink_to(other / "compiled")
    assert capture(home) < COPY_BYTES
    with millstream.open(home) as opened:
        batches = [batch for table in tables for batch in opened.read("shop", table=table)]
        found = [row for batch in batches for row in batch.to_pylist()]
    assert {row["__op"] for row in found} == {"r"}
    assert [len(row["body"]) for row in found] == [MIB] * 300


@pytest.mark.siege
def test_a_copy_that_is_killed_at_any_chunk_ends_exact(tmp_path: Path, postgres: Database) -> None:
    chance = random.Random(3)
    history = History(chance, keys=700)
    with postgres.connect() as connection:
        history.begin(connection, 600)
        home = make_home(tmp_path / "shop", config(postgres.dsn, None) + "copy_chunk_rows = 25\n")
        kills = 0
        while True:
            point = chance.choice(["copy_chunk_read", "copy_chunk_durable", "before_confirm"])
            for _ in range(20):
                history.step(connection)
            failpoint = f"capture.{point}:{chance.randrange(2, 5)}"
            ended = run(home, "capture", "run", "--until-caught-up", MILLSTREAM_FAILPOINTS=failpoint)
            if ended.returncode == 0:
                break
            assert ended.returncode == -signal.SIGKILL, ended.stderr
            kills += 1
    assert kills > 3
    shown: dict[tuple[str, str], str] = {}
    newest: dict[tuple[str, str], int] = {}
    gone: dict[tuple[str, str], int] = {}
    with millstream.open(home) as opened:
        for row in (row for batch in opened.read("shop", table="rows_") for row in batch.to_pylist()):
            key, before = (row["b"], str(row["a"])), dict(row["__before"] or ())
            old = (before.get("b", key[0]), before.get("a", key[1]))
            if row["__op"] == "t":
                shown.clear()
                continue
            if row["__op"] == "d" or old != key:
                gone[old] = newest.get(old, -1)
                shown.pop(old, None)
            if row["__op"] != "d":
                assert row["version"] > gone.get(key, -1), f"{key} came back as it was"
                assert row["version"] >= newest.get(key, -1), f"{key} went back"
                shown[key] = str(row["version"])
                newest[key] = row["version"]
    assert shown == history.states[-1]
