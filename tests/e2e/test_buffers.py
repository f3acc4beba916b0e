"""One home writes to a buffer, another takes it into its log: all rows, in order, exactly once, despite kills."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import done, make_home, run, wait_for
from tests.commands import Command

import millstream
from millstream.errors import WriteBufferError
from millstream.home.home import Home
from millstream.testing.errors import coded
from millstream.testing.kafka import EmbeddedKafka
from millstream.testing.redis import EmbeddedRedis
from millstream.writers.write_buffers import open_buffer

pytestmark = pytest.mark.siege

_numbers = itertools.count(1)
APPENDS = 150
KILLS = 3


def home_with(folder: Path, role: str, kind: str, location: str, name: str) -> Path:
    return make_home(
        folder,
        f'[streams.shop.buffer]\nkind = "{kind}"\nrole = "{role}"\nlocation = {json.dumps(location)}\nname = "{name}"\n'
        f"create = {'true' if role == 'writes' else 'false'}\nshards = 2\n"
        '[streams.shop.log]\nshards = 2\n[streams.shop.shards]\n"public.visits" = 1\n[streams.shop.keys]\nvisits = ["id"]\n',
    )


def said_by(home: Path) -> Path:
    """Return the file with the output of a home's owners."""
    return home.parent / f"{home.name}-owner.log"


@contextmanager
def owner(home: Path) -> Iterator[Command]:
    """The process that writes the home's streams."""
    with said_by(home).open("ab") as output:
        process = Command(
            ["--home", str(home), "capture", "run"],
            env={**os.environ, "HOME": "/nonexistent"},
            stdin=subprocess.DEVNULL,
            stderr=output,
            stdout=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def records(home: Path, table: str) -> list[dict[str, Any]]:
    lines = run(home, "wal", "cat", "--format", "ndjson", "--table", table).stdout.splitlines()
    return [json.loads(line)["row"] for line in lines]


def wait_until_there(home: Path, rows: int) -> None:
    wait_for(
        lambda: len(records(home, "clicks")) >= rows,
        seconds=300,
        what=lambda: f"{len(records(home, 'clicks'))} of {rows} rows have come; {said_by(home).read_text()[-4000:]}",
    )


def said_of(home: Path) -> bool:
    """Return whether `status` reports the progress of each shard of the buffer."""
    told = json.loads(run(home, "status", "--json").stdout)["streams"][0]
    assert told["source"]["database"] is None
    return sorted((told["buffer"] or {}).get("shards", ())) == ["0", "1"]


def follow_through_kills(tmp_path: Path, kind: str, location: str) -> None:
    name = f"travels{next(_numbers)}"
    north = home_with(tmp_path / "north", "writes", kind, location, name)
    south = home_with(tmp_path / "south", "reads", kind, location, name)
    answers: list[millstream.Appended] = []

    def write() -> None:
        with millstream.open(north) as home:
            for number in range(APPENDS):
                rows = [{"number": number, "piece": piece} for piece in range(3)]
                answers.append(home.append("shop", "clicks", rows))
                answers.append(home.append("shop", "visits", {"id": number % 7, "seen": number}))

    writer = threading.Thread(target=write)
    writer.start()
    wait_for(lambda: answers)
    for kill in range(1, KILLS + 1):
        with owner(south) as process:
            wanted = kill * APPENDS // (KILLS + 1)
            wait_until_there(south, wanted)
            wait_for(lambda: said_of(south))
            process.send_signal(signal.SIGKILL)
            process.wait()
    writer.join()
    assert {answer.buffer for answer in answers} == {location if kind == "log" else name}
    assert {tuple(answer.offsets) for answer in answers} == {(0,), (1,)}
    done(south, "capture", "run", "--until-caught-up")
    clicks = [{"number": number, "piece": piece} for number in range(APPENDS) for piece in range(3)]
    visits = [{"id": number % 7, "seen": number} for number in range(APPENDS)]
    for _ in range(2):
        assert records(south, "clicks") == clicks
        assert records(south, "visits") == visits
        done(south, "capture", "run", "--until-caught-up")
    assert records(north, "clicks") == []
    with millstream.open(south) as home, pytest.raises(WriteBufferError, check=coded("stream_reads_buffer")):
        home.append("shop", "clicks", {"number": 0, "piece": 0})


def route_into_another_home(tmp_path: Path, kind: str, location: str) -> None:
    """Rows that a rule sends to log and sink are once in the reading home's log, also if they are resent."""
    name = f"routed{next(_numbers)}"
    north = make_home(
        tmp_path / "north",
        '[streams.shop.keys]\n"public.clicks" = ["id"]\n[streams.shop.routing]\n'
        'rules = [{ table = \'public\\.clicks\', to = ["shard:0", "events"] }, { to = "events" }]\n'
        f'[streams.shop.routing.sinks.events]\nkind = "{kind}"\nlocation = {json.dumps(location)}\nname = "{name}"\n'
        "create = true\nshards = 2\n",
    )
    south = make_home(
        tmp_path / "south",
        f'[streams.shop.buffer]\nkind = "{kind}"\nrole = "reads"\nlocation = {json.dumps(location)}\nname = "{name}"\n',
    )
    clicks = [{"id": number % 7, "n": number} for number in range(40)]

    for _ in range(2):
        with millstream.open(north) as home:
            for _ in range(2):
                home.append("shop", "clicks", clicks[:20], idempotency_key="first")
                home.append("shop", "visits", {"n": 1}, session="s", number=1)
    with millstream.open(north) as home:
        home.append("shop", "clicks", clicks[20:])
        assert [row["n"] for batch in home.read("shop") for row in batch.to_pylist()] == list(range(40))
    config = Home(south).config.streams["shop"].buffer
    assert config is not None
    with open_buffer(Home(south), "shop", config) as buffer:
        assert all(buffer.reader(shard).end_offset() > 0 for shard in buffer.shards())
    done(south, "capture", "run", "--until-caught-up")
    with millstream.open(south) as home:
        there, visits = (
            [row for batch in home.read("shop", table=table) for row in batch.to_pylist()]
            for table in ("clicks", "visits")
        )
    assert sorted(row["n"] for row in there) == list(range(40))
    for key in range(7):
        assert [row["n"] for row in there if row["id"] == key] == [row["n"] for row in clicks if row["id"] == key]
    assert [row["n"] for row in visits] == [1]


def test_a_rule_sends_rows_through_kafka_into_another_home(tmp_path: Path, kafka_server: EmbeddedKafka) -> None:
    route_into_another_home(tmp_path, "kafka", kafka_server.servers)


def test_a_rule_sends_rows_through_redis_into_another_home(tmp_path: Path, redis_server: EmbeddedRedis) -> None:
    route_into_another_home(tmp_path, "redis", redis_server.url)


def test_from_kafka_into_another_home(tmp_path: Path, kafka_server: EmbeddedKafka) -> None:
    follow_through_kills(tmp_path, "kafka", kafka_server.servers)


def test_from_redis_into_another_home(tmp_path: Path, redis_server: EmbeddedRedis) -> None:
    follow_through_kills(tmp_path, "redis", redis_server.url)


def test_from_log_files_into_another_home(tmp_path: Path) -> None:
    follow_through_kills(tmp_path, "log", str(tmp_path / "buffer"))
