from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from tests.app.homes import run
from tests.commands import Command
from tests.wal.plain_operations import plain_ops, plain_table

import millstream
from millstream.errors import PositionError, TokenFromFuture, UnknownStream, UnknownTable, UsageError
from millstream.home.home import Home
from millstream.model.ids import ShardId
from millstream.testing.errors import coded
from millstream.wal.writing.writer import LogWriter

TABLES = {1: plain_table(1, "orders"), 2: plain_table(2, "items")}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "millstream.toml").write_text('[streams.shop.source]\ndsn = "host=127.0.0.1 port=1"\n')
    Home(tmp_path).prepare()
    append(tmp_path, 1)
    return tmp_path


def append(home: Path, *xids: int) -> None:
    with Home(home).open_catalog() as catalog:
        stream = catalog.resolve_stream("shop")
        with LogWriter.open(
            str(Home(home).wal_folder("shop")),
            stream=stream,
            shards=[ShardId(0)],
            epoch=catalog.register_writer(stream)[1],
            reservations=catalog.reservations(stream),
        ) as log:
            for xid in xids:
                log.append(plain_ops({xid: [(TABLES[1], 2, "a"), (TABLES[2], 1, "b")]}, shard_of={1: 0, 2: 0}))


def names(batches: list[pa.RecordBatch]) -> list[int]:
    return sorted(xid for batch in batches for xid in batch.column("__xid").to_pylist())


def test_a_home_gives_records_between_tokens(home: Path) -> None:
    with millstream.open(home) as opened:
        assert opened.streams() == ["shop"]
        before = opened.token("shop")
        assert names(list(opened.read("shop"))) == [1, 1, 1]
        append(home, 2, 3)
        assert names(list(opened.read("shop", after=before))) == [2, 2, 2, 3, 3, 3]
        assert names(list(opened.read("shop", after=str(before), table="public.items"))) == [2, 3]
        assert names(list(opened.read("shop", upto=before, table="orders"))) == [1, 1]
        numbers = [n for batch in opened.read("shop", after=before) for n in batch.column("__seq").to_pylist()]
        second, third = (f"{before.stream}.s{sorted(numbers)[at]}" for at in (1, 3))
        assert names(list(opened.read("shop", after=second, upto=third))) == [2, 2, 2]
        assert opened.status()["streams"][0]["name"] == "shop"
        with pytest.raises(UnknownStream):
            opened.token("clicks")
        with pytest.raises(UnknownTable):
            list(opened.read("shop", table="public.nothing"))
        with pytest.raises(PositionError, check=coded("invalid_token")):
            list(opened.read("shop", after="00000000.s1"))


@pytest.mark.parametrize("bound", ["after", "upto"])
def test_the_latest_of_rows_at_a_token_from_the_future_is_refused(tmp_path: Path, bound: str) -> None:
    """A copy resumed at a token of a log that had been restored.

    It got no error, and lacked the records up to that token.
    """
    Home(tmp_path).path.joinpath("millstream.toml").write_text('[streams.clicks.keys]\n"public.clicks" = ["id"]\n')
    with millstream.open(tmp_path) as opened:
        ack = opened.append("clicks", "clicks", [{"id": 1}])
        future = str(ack.token).replace(".s1", ".s1000")
        with pytest.raises(TokenFromFuture):
            list(opened.read_latest("clicks", "public.clicks", **{bound: future}))


def test_a_home_gives_the_latest_of_rows_a_stretch_after_the_other(tmp_path: Path) -> None:
    Home(tmp_path).path.joinpath("millstream.toml").write_text('[streams.clicks.keys]\n"public.clicks" = ["id"]\n')
    with millstream.open(tmp_path) as opened:
        for n in range(6):
            opened.append("clicks", "clicks", [{"id": n % 2, "n": n}, {"id": 10 + n, "n": n}])
        (whole,) = opened.read_latest("clicks", "public.clicks")
        assert {row["id"]: row["n"] for row in whole.rows.to_pylist()} == {0: 4, 1: 5} | {10 + n: n for n in range(6)}
        copy: dict[int, int] = {}
        stretches = 0
        for stretch in opened.read_latest("clicks", "public.clicks", rows_max=4):
            copy |= {row["id"]: row["n"] for row in stretch.rows.to_pylist()}
            stretches += 1
        assert copy == {row["id"]: row["n"] for row in whole.rows.to_pylist()}
        assert stretches == 3
        assert list(opened.read_latest("clicks", "public.clicks", after=stretch.token)) == []
        opened.append("clicks", "clicks", [{"id": 1, "n": 99}])
        (more,) = opened.read_latest("clicks", "public.clicks", after=str(stretch.token))
        assert [(row["__op"], row["id"], row["n"]) for row in more.rows.to_pylist()] == [("u", 1, 99)]


def test_a_folder_that_is_no_home_or_a_newer_one_is_not_opened(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, check=coded("home_not_found")):
        millstream.open(tmp_path / "nowhere")
    (home / "data" / "home.json").write_text('{"format": 2}')
    with pytest.raises(UsageError, check=coded("home_too_new")):
        millstream.open(home)


CORE_ONLY = """
import sys
for name in ("sqlalchemy", "alembic", "pydantic", "pydantic_settings", "rich", "structlog", "fastapi", "httptools", "uvloop", "psycopg", "numba",
             "prometheus_client", "duckdb", "deltalake", "pyspark", "msgspec"):
    sys.modules[name] = None
from millstream.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("words", [["cat"], ["ls", "--json"], ["inspect"], ["verify"], ["stats"]])
def test_the_core_alone_reads_a_log(home: Path, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CORE_ONLY, "--home", str(home), "wal", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_follow_prints_what_is_appended_and_ends_at_its_limit(home: Path) -> None:
    words = ["--home", str(home), "wal", "cat", "--follow", "--limit", "6"]
    environ = {**os.environ, "HOME": "/nonexistent"}
    follower = Command(words, stdout=subprocess.PIPE, text=True, env=environ)
    assert follower.stdout is not None
    first = [json.loads(follower.stdout.readline()) for _ in range(3)]
    assert [line["xid"] for line in first] == [1, 1, 1]
    append(home, 2)
    rest, _ = follower.communicate(timeout=300)
    assert [json.loads(line)["xid"] for line in rest.splitlines()] == [2, 2, 2]
    assert follower.returncode == 0


def test_a_table_that_only_the_catalog_knows_has_no_records_yet(home: Path) -> None:
    with Home(home).open_catalog() as catalog:
        stream = catalog.resolve_stream("shop")
        source = catalog.resolve_source(stream, 7, "shop", 1)
        for oid, name in enumerate(("orders", "items", "Empty"), 16400):  # the log's tables have the ids 1 and 2
            catalog.table_for(stream, source, oid, "public", name)
    with millstream.open(home) as opened:
        assert list(opened.read("shop", table='public."Empty"')) == []
    for words in (["cat"], ["inspect"]):
        ended = run(home, "wal", *words, "--table", 'public."Empty"')
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    ended = run(home, "wal", "cat", "--table", "public.empty")
    assert ended.returncode == 2
    assert "error[unknown_table]" in ended.stderr


def test_damage_is_reported_and_exits_with_3(home: Path) -> None:
    append(home, 2)
    (segment, *_) = sorted((home / "data" / "wal" / "shop" / "00000").glob("*.wal"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    verified = run(home, "wal", "verify", "--json")
    assert verified.returncode == 3
    found = json.loads(verified.stdout)
    assert not found["whole"]
    assert found["losses"]
    read = run(home, "wal", "cat")
    assert (read.returncode, read.stderr.count("damaged: ")) == (3, 1)
    # The damage is in the header: all frames are readable without it.
    assert [json.loads(line)["xid"] for line in read.stdout.splitlines()] == [1, 1, 1, 2, 2, 2]


def test_a_damaged_log_is_repaired_by_the_command_that_the_dry_run_prints(home: Path) -> None:
    append(home, 2)
    (segment, *_) = sorted((home / "data" / "wal" / "shop" / "00000").glob("*.wal"))
    data = bytearray(segment.read_bytes())
    frames = run(home, "wal", "inspect", "--json").stdout
    records = next(
        f for f in map(json.loads, frames.splitlines()) if f["kind"] == "records" and f["path"] == str(segment)
    )
    data[records["position"] + 40] ^= 0xFF
    segment.write_bytes(data)
    refused = run(home, "wal", "repair")
    assert (refused.returncode, "error[loss_not_accepted]" in refused.stderr) == (3, True)
    dry = run(home, "wal", "repair", "--dry-run", "--json")
    assert (dry.returncode, json.loads(dry.stdout)["accept"]) == (3, ["0:0-3"])
    done = run(home, "wal", "repair", "--accept-loss", "0:0-3")
    assert done.returncode == 0, done.stderr
    assert "the cut bytes are in" in done.stderr
    verified = run(home, "wal", "verify")
    assert (verified.returncode, "nothing is lost except accepted losses" in verified.stdout) == (0, True)
    append(home, 3)
    assert names(list(millstream.open(home).read("shop"))) == [2, 2, 2, 3, 3, 3]


def test_a_home_that_is_not_there_is_told_by_the_argument(tmp_path: Path) -> None:
    with pytest.raises(UsageError, check=coded("home_not_found")) as caught:
        millstream.open(tmp_path / "none")
    assert "--home" not in str(caught.value) + caught.value.hint
