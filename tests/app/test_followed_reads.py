"""What is read of a node that follows: within its bound of age by all who read a home, of any age by who looks at the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.app.homes import make_home, run
from tests.app.served import serving

import millstream
from millstream.app.home import Home
from millstream.app.opened import OpenHome
from millstream.app.remote.client import RemoteHome
from millstream.app.replicating.ages import note_age
from millstream.app.replicating.roles import Roles, replication_folder
from millstream.errors import InvalidQuery, ReplicaTooStale
from millstream.model.replication import NodeName
from millstream.protocol.replication.roles import Role, RoleFact

CONFIG = """
[streams.web.ingest]
schema_on_write = "create"
[replication]
node = "b"
max_staleness = "1h"
token = "${NODES_TOKEN}"
[replication.nodes]
a = "grpc://127.0.0.1:1"
b = "grpc://127.0.0.1:2"
"""


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[Path]:
    """A home that has ten rows, and follows."""
    folder = make_home(tmp_path / "b", '[streams.web.ingest]\nschema_on_write = "create"\n')
    with millstream.open(folder) as home:
        home.append("web", "t", [{"id": number} for number in range(10)])
    (folder / "millstream.toml").write_text(CONFIG)
    with Roles(Home(folder)).changing("web") as changing:
        changing.put(replace(RoleFact(role=Role.FENCED), leader=NodeName("a")).following(NodeName("a")))
    return folder


def grown(folder: Path, age_s: float | None) -> None:
    note_age(replication_folder(Home(folder), "web"), age_s)


READS: dict[str, Callable[[OpenHome | RemoteHome], object]] = {
    "token": lambda home: home.token("web"),
    "read": lambda home: list(home.read("web")),
    "read_latest": lambda home: list(home.read_latest("web", "t")),
    "query": lambda home: home.query("select 1", stream="web"),
}


def test_all_who_read_a_home_hear_that_it_is_too_old_in_the_same_words(
    follower: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown(follower, None)
    monkeypatch.setenv("NODES_TOKEN", "for who serves")
    said = set()
    with serving(follower) as url, millstream.open(follower) as here, millstream.connect(url) as there:
        for home in (here, there):
            for read in READS.values():
                with pytest.raises(ReplicaTooStale) as stale:
                    read(home)
                said.add(str(stale.value.as_dict()))
        with pytest.raises(ReplicaTooStale) as stale:
            here.check_age("web")
        assert said == {str(stale.value.as_dict())}
        assert "web is of unknown age; max_staleness is 1h" in stale.value.message
        grown(follower, 5.0)
        assert [sum(batch.num_rows for batch in home.read("web", table="t")) for home in (here, there)] == [10, 10]
        here.check_age("web")


def test_who_was_fenced_and_doesnt_follow_yet_shows_nothing_of_unknown_age(follower: Path) -> None:
    with Roles(Home(follower)).changing("web") as changing:
        changing.put(replace(changing.fact, role=Role.FENCED))
    with millstream.open(follower) as home:
        with pytest.raises(ReplicaTooStale, match="unknown age"):
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
        home.query("select * from public.t")
    assert "a (grpc://127.0.0.1:1) leads the stream" in refused.value.hint
    assert "millstream run" not in refused.value.hint
