"""Rows spread over shards and partitions: each key on one shard, in order, also while shards change under load."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from tests.app.homes import done, make_home, run, wait_for
from tests.app.served import serving
from tests.commands import SCRIPT, Command, run_command

import millstream
from millstream.administration.route_explain import explain_route
from millstream.app.open_home import home_appender
from millstream.catalog.hash_ring_history import RingEras
from millstream.errors import ConfigError, PartialWrite, PositionError, RoutingError, UnknownStream, UsageError
from millstream.home.home import Home
from millstream.model.buffered_operations import ReadPause
from millstream.model.ids import ShardId
from millstream.model.operations import Appended
from millstream.model.writes import AppendBatch, WriteId
from millstream.processes.role_locks import holder
from millstream.protocol.deduplication import known_writes
from millstream.routing.hashing import key_hashes
from millstream.routing.shard_map import ShardMap
from millstream.serving.metrics import prometheus_text
from millstream.testing.errors import coded
from millstream.testing.pytest_plugin import Database
from millstream.wal.log_buffer import LogBuffer, LogBufferOptions
from millstream.wal.reader import StreamReader

WEB = """
[streams.web.log]
shards = {shards}
[streams.web.keys]
"public.clicks" = ["id"]
[streams.web.routing]
rules = [
  {{ table = 'public\\.bots', to = "devnull" }},
  {{ table = 'public\\.clicks', where = "kind = 'bot'", to = "devnull" }},
  {{ table = 'public\\.audit', to = "shard:1" }},
]
hash_ring = {{}}
[streams.web.partitions]
"public.clicks" = "{{at:%Y-%m-%d}}"
"""
DAY = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "web", WEB.format(shards=4))


def click(key: int, n: int, kind: str = "man") -> dict[str, Any]:
    return {"id": key, "n": n, "kind": kind, "at": DAY + dt.timedelta(days=n % 3)}


def shards_by_offset(home: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return every row of clicks with its shard, shard by shard."""
    reader = StreamReader(str(Home(home).wal_folder("web")))
    table = next(table for table, schema in reader.schemas().items() if schema.name == "clicks")
    found = []
    for shard in reader.shards:
        for piece in reader.read(shard, reader.first_offset(shard), tables=[table]):
            found += [(int(shard), row) for row in piece.batch.to_pylist()]
    return found


def in_read_order(home: Path) -> list[dict[str, Any]]:
    with millstream.open(home) as opened:
        return [row for batch in opened.read("web", table="clicks") for row in batch.to_pylist()]


def assert_order(rows: list[dict[str, Any]]) -> None:
    """Check that each key's rows are in append order, by position and by number."""
    last: dict[int, tuple[int, int]] = {}
    for row in rows:
        before = last.get(row["id"], (-1, -1))
        assert before < (row["n"], row["__seq"])
        assert before[1] < row["__seq"]
        last[row["id"]] = row["n"], row["__seq"]


def expected_shard(key: int, shards: int) -> int:
    ring = ShardMap.ring([ShardId(n) for n in range(shards)])
    return int(ring.shards_of(key_hashes([pa.array([key])]))[0])


def test_rows_are_spread_by_key_and_partition_and_read_whole(home: Path) -> None:
    with millstream.open(home) as opened:
        for first in range(0, 300, 100):
            opened.append(
                "web", "clicks", [click(n % 17, n, "bot" if n % 10 == 0 else "man") for n in range(first, first + 100)]
            )
        dropped = opened.append("web", "bots", [{"x": 1}])
        assert (dropped.row_count, dropped.offsets) == (0, {})
        assert list(opened.append("web", "audit", [{"x": 1}]).offsets) == [1]
    rows = in_read_order(home)
    assert sorted(row["n"] for row in rows) == [n for n in range(300) if n % 10]
    assert_order(sorted(rows, key=lambda row: row["__seq"]))
    for shard, row in shards_by_offset(home):
        assert shard == expected_shard(row["id"], 4)
    by_key = defaultdict(set)
    for shard, row in shards_by_offset(home):
        by_key[row["id"]].add(shard)
    assert {len(found) for found in by_key.values()} == {1}
    assert len({shard for found in by_key.values() for shard in found}) == 4


def test_commands_read_a_log_of_several_partitions_and_shards(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append("web", "clicks", [click(n % 5, n) for n in range(30)])
        token = opened.token("web")
        opened.append("web", "clicks", [click(n % 5, n) for n in range(30, 60)])
        behind = [row["n"] for batch in opened.read("web", table="clicks", after=token) for row in batch.to_pylist()]
        assert sorted(behind) == list(range(30, 60))
        inside = [
            row["n"]
            for batch in opened.read("web", table="clicks", upto=f"{token.stream}.s45")
            for row in batch.to_pylist()
        ]
        assert sorted(inside) == list(range(30))
    lines = [
        json.loads(line)
        for line in done(home, "wal", "cat", "--format", "ndjson", "--table", "public.clicks").splitlines()
    ]
    assert sorted(line["row"]["n"] for line in lines) == list(range(60))
    last: dict[int, int] = {}
    for line in lines:
        assert last.get(line["row"]["id"], -1) < line["row"]["n"]
        last[line["row"]["id"]] = line["row"]["n"]
    assert "all is well" in done(home, "wal", "verify")
    assert "public.clicks" in done(home, "wal", "inspect")
    told = json.loads(done(home, "wal", "stats", "--partitions", "--json"))["partitions"]
    by_partition = {one["partition"]: one for one in told}
    assert {name: one["records"] for name, one in by_partition.items()} == {
        "2026-01-01": 20,
        "2026-01-02": 20,
        "2026-01-03": 20,
    }
    for line in lines:
        own = by_partition[line["row"]["at"][:10]]
        assert own["first_seq"] <= line["seq"] <= own["last_seq"]
    assert "2026-01-02" in done(home, "wal", "stats", "--partitions")


def test_rows_that_nothing_takes_are_refused_and_the_others_stay(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append("web", "clicks", [click(1, 1)])
        with pytest.raises(RoutingError, check=coded("no_route_matches"), match=r"public\.other"):
            opened.append("web", "other", [{"x": 1}])
        opened.append("web", "clicks", [click(1, 2)])
    assert [row["n"] for row in in_read_order(home)] == [1, 2]


def test_rows_that_have_nowhere_to_go_make_no_table_and_no_column(home: Path) -> None:
    """In a table partitioned by time, a first time sent as text would make the column text for good."""
    with millstream.open(home) as opened:
        for _ in range(2):
            with pytest.raises(RoutingError, check=coded("invalid_route"), match="is string") as caught:
                opened.append("web", "clicks", [click(1, 1) | {"at": "2026-01-01"}])
            assert "datetime" in (caught.value.hint or "")
        with pytest.raises(RoutingError, check=coded("no_route_matches")):
            opened.append("web", "other", [{"x": 1}])
        opened.append("web", "clicks", [click(1, 1)])
    assert [row["n"] for row in in_read_order(home)] == [1]
    with Home(home).open_catalog() as catalog:
        (stream,) = catalog.streams()
        assert [schema.name for schema in catalog.latest_schemas(stream.id).values()] == ["clicks"]


def test_the_ring_stays_as_it_is_recorded_when_the_configuration_names_more_shards(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append("web", "clicks", [click(key, 0) for key in range(40)])
    (home / "millstream.toml").write_text(WEB.format(shards=7))
    with millstream.open(home) as opened:
        opened.append("web", "clicks", [click(key, 1) for key in range(40)])
    assert {expected_shard(row["id"], 4) for _, row in shards_by_offset(home)} == {0, 1, 2, 3}
    assert all(shard == expected_shard(row["id"], 4) for shard, row in shards_by_offset(home))
    # Other settings of the ring take effect at a cut of their own.
    (home / "millstream.toml").write_text(
        WEB.format(shards=7).replace("hash_ring = {}", "hash_ring = { virtual_nodes = 16 }")
    )
    with millstream.open(home) as opened:
        cut = opened.token("web")
        opened.append("web", "clicks", [click(1, 2)])
    (status,) = json.loads(done(home, "status", "--json"))["streams"]
    assert [(era["era"], era["shards"], era["virtual_nodes"]) for era in status["ring"]] == [(1, 4, 128), (2, 4, 16)]
    assert status["ring"][1]["token"] == str(cut)


class Load:
    """Threads that append, each rows of its own keys, one request after the other."""

    def __init__(self, home: Path, threads: int = 4) -> None:
        self.stop = threading.Event()
        self.appended = [0] * threads
        self.failed: list[Exception] = []
        self._home = home
        self._threads = [threading.Thread(target=self._run, args=(n, threads)) for n in range(threads)]

    def _run(self, number: int, of: int) -> None:
        try:
            with millstream.open(self._home) as opened:
                while not self.stop.is_set():
                    first = self.appended[number]
                    opened.append("web", "clicks", [click(number + of * (n % 25), n) for n in range(first, first + 20)])
                    self.appended[number] = first + 20
        except Exception as error:  # noqa: BLE001 (the test's thread says it)
            self.failed.append(error)

    def more(self, rows: int = 200) -> None:
        """Wait until each has appended that many more."""
        before = list(self.appended)
        wait_for(
            lambda: self.failed or all(now >= then + rows for now, then in zip(self.appended, before, strict=True))
        )
        assert not self.failed

    @contextmanager
    def running(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            for thread in self._threads:
                thread.join()
        assert not self.failed


def assert_lies_as_recorded(home: Path) -> None:
    """Check that each row lies on the shard that the ring in force at its number assigns."""
    with Home(home).open_catalog() as catalog:
        eras = RingEras(catalog, catalog.stream("web").id).all()
    for shard, row in shards_by_offset(home):
        era = [era for era in eras if era.cut < row["__seq"]][-1]
        assert shard == expected_shard(row["id"], era.shards)


def test_two_changes_at_once_come_one_after_the_other(home: Path) -> None:
    """Both took the same number for their ring."""
    changer = home_appender(Home(home))
    try:
        changer.reshard("web", 5)
        with ThreadPoolExecutor(2) as pool:
            told = list(pool.map(partial(changer.reshard, "web"), (6, 7)))
    finally:
        changer.close()
    assert sorted((one["era"], one["changed"]) for one in told) in ([(3, True), (4, True)], [(3, True), (3, True)])
    with Home(home).open_catalog() as catalog:
        eras = [era.number for era in RingEras(catalog, catalog.stream("web").id).all()]
    assert eras == list(range(1, len(eras) + 1))


@pytest.mark.siege
def test_each_keys_order_is_kept_over_two_changes_of_the_shards_under_load(home: Path) -> None:
    seen: list[dict[str, Any]] = []
    with Load(home).running() as load, millstream.open(home) as looking:
        load.more()
        changer = home_appender(Home(home))
        reached = None
        try:
            for shards in (7, 2):
                told = changer.reshard("web", shards)
                assert (told["changed"], told["shards"]) == (True, shards)
                load.more()
                # A reader that resumes from its position sees the same across the cut, although shards have
                # been added since.
                upto = looking.token("web")
                piece = looking.read("web", table="clicks", after=reached, upto=upto)
                seen += [row for batch in piece for row in batch.to_pylist()]
                reached = upto
        finally:
            changer.close()
    assert_order(seen)
    assert [row["__seq"] for row in seen] == [row["__seq"] for row in in_read_order(home)[: len(seen)]]
    rows = in_read_order(home)
    assert len(rows) == sum(load.appended)
    assert_order(rows)
    assert_lies_as_recorded(home)
    (status,) = json.loads(done(home, "status", "--json"))["streams"]
    assert [era["shards"] for era in status["ring"]] == [4, 7, 2]
    lines = [json.loads(line)["row"] for line in done(home, "wal", "cat", "--format", "ndjson").splitlines()]
    last: dict[int, int] = {}
    for row in lines:
        assert last.get(row["id"], -1) < row["n"]
        last[row["id"]] = row["n"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "point", ["routing.shards_made", "routing.recorded", "routing.in_force", "wal.before_fsync:3", "wal.after_fsync:3"]
)
def test_a_crash_amid_a_change_leaves_one_ring_in_force_and_every_row_where_it_says(home: Path, point: str) -> None:
    with millstream.open(home) as opened:
        opened.append("web", "clicks", [click(n % 20, n) for n in range(100)])
    script = (
        "import sys, threading, millstream, datetime as dt\n"
        "from millstream.home.home import Home\n"
        "from millstream.app.open_home import home_appender\n"
        "from tests.writers.test_stream_routing import click\n"
        "opened = millstream.open(sys.argv[1])\n"
        "def load():\n"
        "    for n in range(100, 4000, 20):\n"
        "        opened.append('web', 'clicks', [click(k % 20, k) for k in range(n, n + 20)])\n"
        "        print(f'{n + 20}\\n', end='', flush=True)\n"
        "threading.Thread(target=load, daemon=True).start()\n"
        "opened._home_appender().reshard('web', 6)\n"
        "load()\n"
    )
    ended = run_command(
        [script, str(home)], timeout=300, env={**os.environ, "MILLSTREAM_FAILPOINTS": point}, begins=SCRIPT
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    acknowledged = max([100, *map(int, ended.stdout.split())])
    with Home(home).open_catalog() as catalog:
        eras = [era.shards for era in RingEras(catalog, catalog.stream("web").id).all()]
    if point == "routing.shards_made":
        assert eras == [4]
    elif point.startswith("routing"):
        assert eras == [4, 6]
    assert eras in ([4], [4, 6])
    with millstream.open(home) as opened:
        for n in range(100_000, 100_100):
            opened.append("web", "clicks", [click(n % 20, n)])
        # A second call succeeds, whether it completes the change or finds it complete.
        assert opened._home_appender().reshard("web", 6)["shards"] == 6
        opened.append("web", "clicks", [click(n % 20, n) for n in range(100_100, 100_200)])
    rows = in_read_order(home)
    lacking = sorted({*range(acknowledged), *range(100_000, 100_200)} - {row["n"] for row in rows})
    assert not lacking, (acknowledged, eras, ended.stdout)
    assert_lies_as_recorded(home)
    by_key = defaultdict(list)
    for row in rows:
        by_key[row["id"]].append(row["__seq"])
    assert all(seqs == sorted(seqs) for seqs in by_key.values())


def test_what_sinks_take_is_counted_where_an_application_writes(home: Path) -> None:
    """Without `run`, no process was asked for the counts: a server alone dropped rows that its metrics didn't have."""
    with serving(home) as url, httpx.Client(base_url=url, timeout=60) as client:
        for row in ({"x": 1}, {"x": 2}):
            assert client.post("/v1/streams/web/tables/bots", json=row).status_code == 200
        for status in (json.loads(done(home, "status", "--json")), client.get("/status").json()):
            assert status["streams"][0]["sinks"] == {"devnull": {"rows": 2, "ignored_errors": 0}}
        assert (
            'millstream_sink_rows_total{process="append",sink="devnull",stream="web"} 2.0'
            in client.get("/metrics").text
        )
    assert json.loads(done(home, "status", "--json"))["streams"][0]["sinks"] == {}


@pytest.mark.long
def test_the_process_that_runs_the_home_changes_it_for_a_command(home: Path) -> None:
    started = Command(
        ["--home", str(home), "capture", "run"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: holder(home / "data" / "run", "owner").get("pid") == started.pid)
        with Load(home, threads=2).running() as load:
            load.more(40)
            told = json.loads(done(home, "reshard", "--shards", "5", "--json"))
            assert (told["before"], told["shards"], told["changed"]) == (4, 5, True)
            load.more(40)
            again = json.loads(done(home, "reshard", "--shards", "5", "--json"))
            assert (again["changed"], again["token"]) == (False, told["token"])
            with millstream.open(home) as opened:
                opened.append("web", "bots", [{"x": 1}, {"x": 2}])
            status = json.loads(done(home, "status", "--json"))
            assert status["streams"][0]["sinks"] == {"devnull": {"rows": 2, "ignored_errors": 0}}
            metrics = prometheus_text(lambda: status).decode()
            assert 'millstream_sink_rows_total{process="owner",sink="devnull",stream="web"} 2.0' in metrics
            refused = run(home, "reshard", "--shards", "1")
            assert refused.returncode == 1
            assert "shard:1" not in refused.stdout
            assert "audit" in refused.stderr
    finally:
        started.terminate()
        started.communicate(timeout=300)
    assert_order(in_read_order(home))
    assert_lies_as_recorded(home)


def test_what_cant_be_changed_is_refused_by_name(home: Path, tmp_path: Path) -> None:
    plain = make_home(tmp_path / "plain", "[streams.web]\n")
    for folder, shards, match in (
        (home, 0, "1 to 1024"),
        (home, 1025, "1 to 1024"),
        (home, 1, "rule 3"),
        (plain, 4, "nothing spreads its rows"),
    ):
        appender = home_appender(Home(folder))
        try:
            with pytest.raises(RoutingError, check=coded("reshard_refused"), match=match) as caught:
                appender.reshard("web", shards)
            assert caught.value.details == {"stream": "web"}
            with pytest.raises(UnknownStream):
                appender.reshard("nothing", 4)
        finally:
            appender.close()


def test_explain_says_what_takes_a_row_and_where_it_goes(home: Path) -> None:
    found = explain_route(Home(home), None, "public.clicks", {"id": 5, "kind": "man", "at": DAY})
    assert (found["shard"], found["partition"], found["sinks"]) == (expected_shard(5, 4), "2026-01-01", [])
    assert found["tried"] == [
        {"rule": None, "why": "no rule takes it: the hash ring over id", "where": None, "to": "ring"}
    ]
    bot = explain_route(Home(home), "web", "clicks", {"id": 5, "kind": "bot", "at": DAY})
    assert (bot["shard"], bot["sinks"], bot["tried"][0]["rule"]) == (None, ["devnull"], 2)
    with millstream.open(home) as opened:
        appended = opened.append("web", "clicks", [click(5, 0)])
    assert list(appended.offsets) == [found["shard"]]
    with pytest.raises(RoutingError, check=coded("no_route_matches")):
        explain_route(Home(home), "web", "other", {"x": 1})
    assert explain_route(Home(home), "web", "other", None)["tried"] == []
    told = done(home, "route", "explain", "clicks")
    assert "kind = 'bot'" in told
    assert "devnull" in told
    assert json.loads(done(home, "route", "explain", "public.audit", '{"x": 1}', "--json"))["shard"] == 1


@pytest.mark.long
def test_explain_says_where_a_row_lies_by_its_moments_and_by_the_ring_of_then(home: Path) -> None:
    keys = range(40)
    with millstream.open(home) as opened:
        opened.append("web", "clicks", [click(key, 0) for key in keys])
        before = str(opened.token("web"))
        opened._home_appender().reshard("web", 7)
        opened.append("web", "clicks", [click(key, 1) for key in keys])
        after = str(opened.token("web"))
    lies: dict[int, dict[int, int]] = {0: {}, 1: {}}
    for shard, row in shards_by_offset(home):
        lies[row["n"]][row["id"]] = shard
    assert lies[0] != lies[1]
    at = {"at": DAY}
    for n, tokens in ((0, [before]), (1, [after, None])):
        for token in tokens:
            found = [explain_route(Home(home), "web", "clicks", {"id": key}, moments=at, as_of=token) for key in keys]
            assert {key: one["shard"] for key, one in zip(keys, found, strict=True)} == lies[n]
            assert {(one["partition"], one["shards"], one["era"]) for one in found} == {
                ("2026-01-01", 4 + 3 * n, 1 + n)
            }
    words = (
        "route",
        "explain",
        "clicks",
        '{"id": 7}',
        "--moment",
        "at=2026-01-02T23:00-05:00",
        "--as-of",
        "now",
        "--json",
    )
    told = json.loads(done(home, *words))
    assert (told["partition"], told["shard"]) == ("2026-01-03", lies[1][7])
    for as_of in ("2020-01-01", f"{before.partition('.')[0]}.s0"):
        with pytest.raises(UsageError, match="no hash ring was in force"):
            explain_route(Home(home), "web", "clicks", {"id": 1}, moments=at, as_of=as_of)
    with pytest.raises(PositionError, check=coded("invalid_time")):
        explain_route(Home(home), "web", "clicks", {"id": 1}, moments=at, as_of="noon")


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ('routing = { rules = [{ to = "shard:9" }] }', "routing.rules[0].to", "shards 0 to 0"),
        ('routing = { rules = [{ table = "(", to = "devnull" }] }', "routing.rules[0].table", "regular expression"),
        ('routing = { rules = [{ where = "a =", to = "devnull" }] }', "routing.rules[0].where", "can't be read"),
        ('routing = { rules = [{ to = "ring" }] }', "routing.rules[0].to", "no ring"),
        ('routing = { rules = [{ to = "kafka" }] }', "routing.rules[0].to", "no sink kafka"),
        ('routing = { rules = [{ to = ["shard:0", "devnull"] }] }', "routing.rules[0].to", "stands alone"),
        ('routing = { rules = [{ where = "a = 1" }] }', "routing.rules[0].to", "is required"),
        ("routing = {}", "routing", "needs rules"),
        ('routing = { to = "shard:0", hash_ring = {} }', "routing.to", "never be asked"),
        ('routing = { hash_ring = { columns = ["a", "a"] } }', "routing.hash_ring.columns", "once"),
        (
            'routing = { hash_ring = { columns_of = { "a.b.c" = ["x"] } } }',
            'routing.hash_ring.columns_of."a.b.c"',
            "a.b.c",
        ),
        ("routing = { hash_ring = { nodes = 1 } }", "routing.hash_ring.nodes", "virtual_nodes"),
        ('partitions = { clicks = "%q" }', "partitions.clicks", "none of"),
        (
            'source = { dsn = "postgresql://h/d", tables = ["public.orders"] }\npartitions = { "public.orders" = "%Y" }',
            'partitions."public.orders"',
            "is captured",
        ),
        (
            'source = { dsn = "postgresql://h/d", tables = ["public.orders"] }\nrouting = { hash_ring = { columns_of = { orders = ["id"] } } }',
            "routing.hash_ring.columns_of.orders",
            "is captured",
        ),
    ],
)
def test_what_is_wrong_in_the_configuration_names_file_and_key(tmp_path: Path, text: str, key: str, says: str) -> None:
    home = make_home(tmp_path / "web", f"[streams.web]\n{text}\n")
    with pytest.raises(ConfigError, match=r"millstream\.toml:[23]") as caught:
        _ = Home(home).config
    assert caught.value.details["key"] == f"streams.web.{key}"
    assert says in caught.value.message


def test_a_ring_over_another_column_than_the_keys_is_refused_when_rows_come(tmp_path: Path) -> None:
    text = WEB.format(shards=2).replace("hash_ring = {}", 'hash_ring = { columns = ["kind"] }')
    home = make_home(tmp_path / "web", text)
    with (
        millstream.open(home) as opened,
        pytest.raises(RoutingError, check=coded("invalid_route"), match="several shards"),
    ):
        opened.append("web", "clicks", [click(1, 1)])


def test_hashing_over_several_writers_is_refused_by_name(tmp_path: Path, postgres: Database) -> None:
    text = WEB.format(shards=2) + f'[writer]\nname = "one"\n[catalog]\nurl = {json.dumps(postgres.dsn)}\n'
    home = make_home(tmp_path / "web", text)
    with millstream.open(home) as opened, pytest.raises(ConfigError, match="several writers"):
        opened.append("web", "clicks", [click(1, 1)])


SINKS = """
[streams.web.keys]
"public.clicks" = ["id"]
[streams.web.routing]
rules = [
  { table = 'public\\.clicks', to = ["ring", "copies", "other"] },
  { table = 'public\\.elsewhere', to = "other" },
  { table = 'public\\.maybe', to = ["shard:0", "away"] },
]
hash_ring = {}
IGNORED
[streams.web.routing.sinks.copies]
kind = "log"
location = "copies"
create = true
shards = 2
[streams.web.routing.sinks.other]
kind = "millstream"
location = "../other"
name = "mirror"
[streams.web.routing.sinks.away]
kind = "log"
location = "nowhere"
"""


def test_rows_go_to_sinks_beside_the_log_and_what_failed_is_told(tmp_path: Path) -> None:
    other = make_home(tmp_path / "other", "[streams.mirror]\n")
    home = make_home(tmp_path / "web", SINKS.replace("IGNORED", ""))
    with millstream.open(home) as opened:
        appended = opened.append("web", "clicks", [{"id": n % 3, "n": n} for n in range(30)])
        assert appended.row_count == 30
        elsewhere = opened.append("web", "elsewhere", [{"x": 1}, {"x": 2}])
        assert (elsewhere.row_count, elsewhere.offsets) == (0, {})
        with pytest.raises(PartialWrite, match="away") as caught:
            opened.append("web", "maybe", [{"x": 1}])
        said = caught.value.details
        assert said["succeeded"]["log"]["rows"] == 1
        assert said["failed"]["away"]["code"] == "buffer_missing"
    with millstream.open(other) as opened:
        mirrored = [row for batch in opened.read("mirror", table="clicks") for row in batch.to_pylist()]
        assert [(row["id"], row["n"]) for row in mirrored] == [(n % 3, n) for n in range(30)]
        assert [row["x"] for batch in opened.read("mirror", table="elsewhere") for row in batch.to_pylist()] == [1, 2]
    assert len(list((home / "copies").glob("0000?/*/*.wal"))) >= 2
    (home / "millstream.toml").write_text(SINKS.replace("IGNORED", 'ignore_errors = ["away"]'))
    with millstream.open(home) as opened:
        assert opened.append("web", "maybe", [{"x": 2}]).row_count == 1


def test_a_write_that_is_sent_again_reaches_sinks_once_where_that_can_be_known(tmp_path: Path) -> None:
    """Sinks got it again at each try.

    A stream remembers it for ever; a buffer's readers do, and the sender's process.
    """
    other = make_home(tmp_path / "other", "[streams.mirror]\n")
    home = make_home(tmp_path / "web", SINKS.replace("IGNORED", ""))
    rows = [{"id": n, "n": n} for n in range(3)]
    for _ in range(2):
        with millstream.open(home) as opened:
            for _ in range(2):
                opened.append("web", "clicks", rows, idempotency_key="k")
                opened.append("web", "clicks", rows, session="s", number=1)
                opened.append("web", "elsewhere", rows, idempotency_key="beside")
    buffer = LogBuffer(LogBufferOptions(str(home / "copies")))
    found = [buffer.reader(shard) for shard in buffer.shards()]
    copied = []
    for reader in found:
        while not isinstance(item := reader.read(), ReadPause):
            copied += [n for table in item.op.tables for n in table.rows.column("n").to_pylist()]
    buffer.close()
    assert sorted(copied) == sorted([0, 1, 2] * 2 * 2)  # once a process and write
    with millstream.open(other) as opened:
        mirrored = [row["n"] for batch in opened.read("mirror", table="clicks") for row in batch.to_pylist()]
        beside = [row["n"] for batch in opened.read("mirror", table="elsewhere") for row in batch.to_pylist()]
    assert (mirrored, beside) == ([0, 1, 2] * 2, [0, 1, 2])


def test_numbers_of_writes_that_go_beside_the_log_are_known_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log didn't know them, and refused numbers too far above; a stream with sinks couldn't return a session."""
    monkeypatch.setattr(known_writes, "AHEAD_MAX", 2)
    make_home(tmp_path / "other", "[streams.mirror]\n")
    home = make_home(tmp_path / "web", SINKS.replace("IGNORED", ""))
    for start in (1, 7):
        with millstream.open(home) as opened:
            for number in range(start, start + 6):
                opened.append(
                    "web", "elsewhere" if number % 6 else "clicks", {"id": number}, session="s", number=number
                )
            assert opened.session_facts("web", "s").mark == start + 5


def test_requests_of_a_batch_are_refused_one_by_one(home: Path) -> None:
    """A row without a route fails only its own request; numbers and offsets count only the rows in the log."""
    bad = 'routing = { rules = [{ where = "kind = \'bot\'", to = "devnull" }, { where = "kind = \'man\'", to = "shard:1" }] }\nlog = { shards = 2 }\n'
    (home / "millstream.toml").write_text(f"[streams.web]\n{bad}")
    kinds = ["man", "bot", "man", "cat", "man", "bot"]
    batch = AppendBatch.of_table(
        "clicks",
        pa.table({"kind": kinds, "n": list(range(6))}),
        (2, 2, 1, 1),
        [None, WriteId(key="a"), WriteId(key="b"), None],
    )
    appender = home_appender(Home(home))
    try:
        first, refused, third, dropped = appender.append_batch("web", batch, deadline_s=10)
        assert isinstance(refused, RoutingError)
        assert refused.code == "no_route_matches"
        assert isinstance(first, Appended)
        assert isinstance(third, Appended)
        assert isinstance(dropped, Appended)
        assert (first.row_count, third.row_count, dropped.row_count) == (1, 1, 0)
        assert (first.offsets, third.offsets) == ({1: (0, 1)}, {1: (1, 2)})
        assert (int(third.seqs.first), third.duplicate) == (int(first.seqs.first) + 1, False)
        alone = AppendBatch.of_table("clicks", pa.table({"kind": ["man"], "n": [4]}), (1,), [WriteId(key="b")])
        (again,) = appender.append_batch("web", alone, deadline_s=10)
        assert isinstance(again, Appended)
        assert (again.duplicate, again.seqs, dict(again.offsets)) == (True, third.seqs, dict(third.offsets))
    finally:
        appender.close()
    assert [row["n"] for row in in_read_order(home)] == [0, 4]


def test_retries_are_known_across_a_change_of_the_shards(home: Path) -> None:
    rows = [click(n % 7, n) for n in range(40)]
    with millstream.open(home) as opened:
        first = opened.append("web", "clicks", rows, idempotency_key="once")
        opened._home_appender().reshard("web", 6)
        again = opened.append("web", "clicks", rows, idempotency_key="once")
    assert (again.duplicate, again.seqs, dict(again.offsets)) == (True, first.seqs, dict(first.offsets))
    with millstream.open(home) as opened:
        assert opened.append("web", "clicks", rows, idempotency_key="once").duplicate
    assert len(in_read_order(home)) == 40


def test_an_export_keeps_each_keys_order_over_its_partitions(home: Path, tmp_path: Path) -> None:
    with millstream.open(home) as opened:
        for first in range(0, 300, 60):
            opened.append("web", "clicks", [click(n * n % 13, n) for n in range(first, first + 60)])
    done(home, "wal", "export", "--format", "arrow", "--output", str(tmp_path / "export"))
    other = make_home(tmp_path / "other", WEB.format(shards=4))
    done(other, "wal", "import", str(tmp_path / "export"), "--stream", "web")
    there = sorted(in_read_order(other), key=lambda row: row["__seq"])
    assert_order(there)
    assert sorted(row["n"] for row in there) == list(range(300))
    told = [
        {
            p["partition"]: p["records"]
            for p in json.loads(done(one, "wal", "stats", "--partitions", "--json"))["partitions"]
        }
        for one in (home, other)
    ]
    assert told[0] == told[1] == dict.fromkeys(("2026-01-01", "2026-01-02", "2026-01-03"), 100)
