"""The tightest retention under SIGKILL: a pipeline that is killed around the lake's commit finds what it lacks.

`retention_age` is 0 and retention runs ten times a second, so a segment that isn't needed is gone before
anything else happens.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from tests.e2e.harness import Home, wait_for

from millstream.testing.postgres import EmbeddedPostgres

pytestmark = pytest.mark.siege

POINTS = {
    "pipeline.after_lake_commit": "the lake has the batch; the catalog doesn't know",
    "pipeline.after_catalog": "the catalog knows too",
}
LOG = """[streams.shop.log]
segment_bytes = "16KiB"
retention_age = "0s"
retention_interval = "100ms"
[spark]
batch_bytes = "128KiB"
"""
ROWS = 200


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("spark")
def test_nothing_is_lost_or_doubled_and_the_log_is_freed_whenever_the_pipeline_dies_behind_a_commit(
    tmp_path: Path, postgres_server: EmbeddedPostgres
) -> None:
    home = Home(tmp_path / "shop", postgres_server.create_database("tight"), slot="tight", extra_config=LOG)
    home.init()
    witnesses = tmp_path / "witnesses"
    witnesses.mkdir()
    for point in POINTS:
        (witnesses / point).touch()
    written = 0
    with postgres_server.connect("tight", autocommit=True) as connection:
        connection.execute("CREATE TABLE items (id bigint PRIMARY KEY, body text NOT NULL)")

        def write(transactions: int) -> None:
            nonlocal written
            for _ in range(transactions):
                connection.execute(
                    "INSERT INTO items SELECT i, md5(i::text) || md5((-i)::text) FROM generate_series(%s::bigint, %s::bigint) AS i",
                    [written + 1, written + ROWS],
                )
                written += ROWS

        def landed() -> bool:
            log = home.status()["streams"][0]
            return bool(log["tokens"]["durable"]) and log["tokens"]["durable"] == log["tokens"]["landed"]

        with home.running(failpoints=",".join(POINTS), witnesses=witnesses) as run:
            write(10)
            wait_for(
                lambda: home.lake("history", "public.items").exists() and landed(), "the first rows", timeout_s=400
            )
            for point in POINTS:
                (witnesses / point).unlink()
                write(20)
                wait_for((witnesses / point).exists, f"a kill at {point}", timeout_s=300)
                write(5)
                wait_for(landed, "what was written to land after the kill", timeout_s=400)
            assert run.process.poll() is None, f"run ended:\n{run.output()[-4000:]}"
            assert "offset_expired" not in run.output()
            # Two small batches more: the segments before them are no longer needed.
            for _ in range(2):
                write(1)
                wait_for(landed, "the last rows", timeout_s=300)
            wait_for(lambda: home.status()["streams"][0]["log"]["segments"] <= 4, "the log to be freed", timeout_s=400)
            log = home.status()["streams"][0]["log"]
            assert log["first_seq"] > written - 10 * ROWS
            assert set(log["held"]) == {"lake"}
            assert log["held"]["lake"]["bytes"] < 256 << 10
        assert home.caught_up_here() == {}
        (there,) = connection.execute("SELECT count(*), md5(string_agg(body, ',' ORDER BY id)) FROM items").fetchall()
    assert there[0] == written
    sql = "SELECT count(*) AS rows, md5(string_agg(body, ',' ORDER BY id)) AS sum FROM public.items"
    (lake,) = csv.DictReader(io.StringIO(home.command("query", sql, "--format", "csv")))
    assert (int(lake["rows"]), lake["sum"]) == there
    every = 'SELECT count(*) AS records, count(DISTINCT __seq) AS numbers FROM history."public.items"'
    (history,) = csv.DictReader(io.StringIO(home.command("query", every, "--format", "csv")))
    assert (int(history["records"]), int(history["numbers"])) == (written, written)
