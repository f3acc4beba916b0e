"""Reads of a node that follows: readers of a home get data within its age bound, and readers of the log of any age."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.aio.everywhere import WAYS, a_home
from tests.app.homes import make_home, run
from tests.app.served import serving
from tests.serving.tail_client import refusal, tailing

import millstream
from millstream.app.open_home import OpenHome
from millstream.client.remote_home import RemoteHome
from millstream.errors import InvalidQuery, ReplicationError
from millstream.home.home import Home
from millstream.leadership.node_roles import Roles, replication_folder
from millstream.model.replication import NodeName
from millstream.nodes.staleness import note_age
from millstream.protocol.replication.node_promises import Role, RoleFact
from millstream.testing.errors import coded

STREAM = """
[streams.web]
region = 1
[streams.web.ingest]
schema_on_write = "create"
[streams.web.keys]
t = ["id"]
"""
CONFIG = f"""{STREAM}
[replication]
node = "b"
max_staleness = "1h"
token = "${{NODES_TOKEN}}"
regions = {{ 2 = "grpc://127.0.0.1:3" }}
[replication.nodes]
a = "grpc://127.0.0.1:1"
b = "grpc://127.0.0.1:2"
"""


@pytest.fixture
def follower(tmp_path: Path) -> Path:
    """A home that has ten rows, and follows."""
    folder = written(tmp_path / "b", STREAM)
    (folder / "millstream.toml").write_text(CONFIG)
    with Roles(Home(folder)).changing("web") as changing:
        changing.put(replace(RoleFact(role=Role.FENCED), leader=NodeName("a")).following(NodeName("a")))
    return folder


def written(folder: Path, config: str) -> Path:
    make_home(folder, config)
    with millstream.open(folder) as home:
        home.append("web", "t", [{"id": number} for number in range(10)])
    return folder


def grown(folder: Path, age_s: float | None, log: str = "web") -> None:
    ages = replication_folder(Home(folder), log)
    ages.mkdir(exist_ok=True)
    note_age(ages, age_s)


def test_changes_are_followed_on_a_node_that_follows(follower: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODES_TOKEN", "secret")
    grown(follower, 1.0)
    with serving(follower) as url, tailing(url) as live:
        assert live.response.status_code == 200
        with a_home("open", follower) as home, a_home("connect", url) as remote:
            start = f"{home.token('web').stream}.s0"
            for place in (home, remote):
                with place.follow("web", after=start) as changes:
                    assert next(changes)[0].column("id").to_pylist() == list(range(10))
        with tailing(url, after=start) as events:
            assert [event.data["row"]["id"] for event in events.take(10)] == list(range(10))
        grown(follower, 7200.0)
        assert refusal(url, after=start) == (503, "replica_too_stale")
        with millstream.open(follower) as home, pytest.raises(ReplicationError, check=coded("replica_too_stale")):
            home.follow("web")


READS: dict[str, Callable[[OpenHome | RemoteHome], object]] = {
    "token": lambda home: home.token("web"),
    "read": lambda home: list(home.read("web")),
    "read_latest": lambda home: list(home.read_latest("web", "t")),
    "query": lambda home: home.query("select 1", stream="web"),
    "merged": lambda home: home.merged("web", "t"),
}


@pytest.mark.long
def test_all_who_read_a_home_hear_that_it_is_too_old_in_the_same_words(
    follower: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown(follower, None)
    monkeypatch.setenv("NODES_TOKEN", "for who serves")
    said = set()
    with serving(follower) as url, millstream.open(follower) as here, millstream.connect(url) as there:
        for home in (here, there):
            for read in READS.values():
                with pytest.raises(ReplicationError, check=coded("replica_too_stale")) as stale:
                    read(home)
                said.add(str(stale.value.as_dict()))
        with pytest.raises(ReplicationError, check=coded("replica_too_stale")) as stale:
            here.check_age("web")
        assert said == {str(stale.value.as_dict())}
        assert "web is of unknown age; max_staleness is 1h" in stale.value.message
        grown(follower, 5.0)
        assert [sum(batch.num_rows for batch in home.read("web", table="t")) for home in (here, there)] == [10, 10]
        here.check_age("web")


def test_what_is_merged_is_as_new_as_the_oldest_region_by_every_client(
    follower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODES_TOKEN", "for who serves")
    with Roles(Home(follower)).changing("web") as changing:
        changing.put(replace(changing.fact, role=Role.LEADS))
    other = written(tmp_path / "c", STREAM.replace("region = 1", "region = 2"))
    with serving(follower) as url:

        def refused(words: str) -> None:
            for way in WAYS:
                with a_home(way, url if way.endswith("connect") else follower) as home:
                    with pytest.raises(ReplicationError, check=coded("replica_too_stale"), match=words) as stale:
                        home.merged("web", "t")
                    assert stale.value.details["stream"] == "web@2"
                    home.token("web")

        refused("web@2 is of unknown age; max_staleness is 1h")  # region 2's log has never come
        shutil.copytree(other / "data/wal/web", follower / "data/wal/web@2")
        grown(follower, 7200.0, "web@2")
        refused(r"web@2 is 7\d{3}\.\d s old")
        with (
            millstream.open(follower) as home,
            pytest.raises(ReplicationError, check=coded("replica_too_stale"), match="web@2"),
        ):
            home.token("web@2")
        grown(follower, 5.0, "web@2")
        for way in WAYS:
            with a_home(way, url if way.endswith("connect") else follower) as home:
                assert home.merged("web", "t").num_rows == 10


def test_who_was_fenced_and_doesnt_follow_yet_shows_nothing_of_unknown_age(follower: Path) -> None:
    with Roles(Home(follower)).changing("web") as changing:
        changing.put(replace(changing.fact, role=Role.FENCED))
    with millstream.open(follower) as home:
        with pytest.raises(ReplicationError, check=coded("replica_too_stale"), match="unknown age"):
            home.token("web")
        with Roles(Home(follower)).changing("web") as changing:
            changing.put(replace(changing.fact, role=Role.LEADS))
        assert home.token("web").linear() == 10


def test_the_log_itself_is_looked_at_whatever_its_age(follower: Path, tmp_path: Path) -> None:
    grown(follower, 7200.0)
    found = run(follower, "wal", "cat")
    assert (found.returncode, found.stdout.count("\n")) == (0, 10), found.stderr
    assert run(follower, "wal", "export", "--output", str(tmp_path / "out"), "--format", "arrow").returncode == 0
    (follower / "millstream.toml").rename(tmp_path / "millstream.toml")
    with millstream.open(follower) as copied:
        assert sum(batch.num_rows for batch in copied.read("web")) == 10, "nobody says how old a copied folder may be"


def test_who_asks_for_tables_where_none_land_is_told_where_they_do(follower: Path) -> None:
    grown(follower, 0.0)
    with millstream.open(follower) as home, pytest.raises(InvalidQuery) as refused:
        home.query("select * from public.t", lake_only=True)
    assert "a (grpc://127.0.0.1:1) leads the stream" in refused.value.hint
    assert "millstream run" not in refused.value.hint


def test_a_followers_copy_of_the_log_answers_before_anything_has_landed_where_it_can_be_read(follower: Path) -> None:
    grown(follower, 0.0)
    with millstream.open(follower) as home:
        assert home.query('SELECT count(*) AS n FROM history."public.t"').to_pylist() == [{"n": 10}]
        assert home.lake().token == home.token("web")
