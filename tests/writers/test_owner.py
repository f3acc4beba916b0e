"""The owner with sources that can't be reached: an error for each, while the other streams go on."""

from __future__ import annotations

import json
from pathlib import Path

from tests.app.homes import run

from millstream.testing.pytest_plugin import Database


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
