"""The node that a stream's writes go to: by this node's role, and by the leaders that the catalog has noted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import make_home, run

import millstream
from millstream.administration.route_explain import explain_route
from millstream.app.status import collect_status
from millstream.catalog.leaders import StreamLeaders
from millstream.errors import CatalogError, Fenced, ReadOnly
from millstream.home.home import Home
from millstream.leadership.known_leaders import leaders_of, note_leaders
from millstream.leadership.node_roles import Roles
from millstream.model.ids import Epoch, GroupNumber, StreamId
from millstream.model.replication import NodeName
from millstream.nodes.replicas import list_replicas
from millstream.protocol.replication.leader_map import Leadership
from millstream.protocol.replication.node_promises import Promise, Role, RoleFact

A, B, C = NodeName("a"), NodeName("b"), NodeName("c")
CONFIG = """
[streams.shop.log]
disk_used_max = 1.0
[streams.shop.ingest]
schema_on_write = "create"
[replication]
node = "{}"
[replication.nodes]
a = "grpc://127.0.0.1:1"
b = "grpc://127.0.0.1:2"
c = "grpc://127.0.0.1:3"
"""


def promise(epoch: int, node: NodeName) -> Promise:
    return Promise(Epoch(epoch), node)


def put(home: Home, fact: RoleFact) -> None:
    with Roles(home).changing("shop") as changing:
        changing.put(fact)
    note_leaders(home, "shop")


def stream_of(home: Home) -> StreamId:
    with home.open_catalog() as catalog:
        return catalog.stream("shop").id


def noted(home: Home) -> list[tuple[int, str]]:
    with home.open_catalog() as catalog:
        known = StreamLeaders(catalog, stream_of(home)).map().leaderships
    return [(int(one.since.epoch), str(one.node)) for one in known]


def told(home: Home) -> tuple[str, str, int, bool]:
    """Return where writes go, after checking that every command and status reports the same."""
    asked: list[dict[str, Any]] = [
        explain_route(home, None, "orders", None)["leader"],
        list_replicas(home)["streams"][0]["writes_go_to"],
        collect_status(home)["streams"][0]["replication"]["writes_go_to"],
    ]
    assert asked[0] == asked[1] == asked[2]
    return asked[0]["node"], asked[0]["address"], asked[0]["epoch"], asked[0]["here"]


def test_who_leads_is_told_through_all_that_becomes_of_a_node(tmp_path: Path) -> None:
    home = Home(make_home(tmp_path / "a", CONFIG.format("a")))
    with millstream.open(home.path) as opened:
        opened.append("shop", "orders", {"id": 1})
    put(home, RoleFact())
    assert told(home) == ("a", "grpc://127.0.0.1:1", 0, True)
    # It promises itself to b. No leader is noted, since b may yet fail, but writers are sent to b.
    fenced = RoleFact().heard_of(promise(1, B))
    put(home, fenced)
    assert told(home) == ("b", "grpc://127.0.0.1:2", 1, False)
    assert noted(home) == [(0, "a")]
    with pytest.raises(Fenced, match=r"b .*was promoted"), millstream.open(home.path) as opened:
        opened.append("shop", "orders", {"id": 2})
    # It follows b, and learns that b has led since.
    follows = fenced.following(B)
    put(home, RoleFact(Role.FOLLOWS, follows.promise, B, follows.lineage.with_term(promise(1, B), GroupNumber(1))))
    assert noted(home) == [(0, "a"), (1, "b")]
    with pytest.raises(ReadOnly) as refused, millstream.open(home.path) as opened:
        opened.append("shop", "orders", {"id": 2})
    assert (refused.value.details["leader"], refused.value.details["epoch"]) == told(home)[0:3:2]
    words = run(home.path, "route", "explain", "orders").stdout
    assert "is written at b (grpc://127.0.0.1:2), which leads with epoch 1" in words
    # Then it is promoted itself.
    with Roles(home).changing("shop") as changing:
        changing.put(changing.fact.candidate_for(promise(2, A)).promoted(GroupNumber(1)))
    note_leaders(home, "shop")
    assert told(home) == ("a", "grpc://127.0.0.1:1", 2, True)
    assert noted(home) == [(0, "a"), (1, "b"), (2, "a")]
    led = list_replicas(home)["streams"][0]["led"]
    assert [(one["epoch"], one["node"]) for one in led] == noted(home)


def test_a_newer_leader_in_a_shared_catalog_is_told_and_changes_no_role(tmp_path: Path) -> None:
    home = Home(make_home(tmp_path / "a", CONFIG.format("a")))
    with millstream.open(home.path) as opened:
        opened.append("shop", "orders", {"id": 1})
    put(home, RoleFact())
    with home.open_catalog() as catalog:
        leaders = StreamLeaders(catalog, stream_of(home))
        leaders.note([Leadership(promise(2, C), C, GroupNumber(1))])
        leaders.note([Leadership(promise(1, B), B, GroupNumber(1)), Leadership(promise(2, C), A)])
        assert leaders.map().newest == Leadership(promise(2, C), C, GroupNumber(1)), "it never goes back, nor changes"
    assert told(home) == ("c", "grpc://127.0.0.1:3", 2, False)
    assert "c leads shop since epoch 2; this node wasn't informed of it" in run(home.path, "replicas").stderr
    assert Roles(home).leads("shop"), "its role is its own"
    note_leaders(home, "shop")
    assert noted(home) == [(0, "a"), (1, "b"), (2, "c")]


def test_without_a_catalog_the_role_says_it_and_damage_there_stops_nothing(tmp_path: Path) -> None:
    home = Home(make_home(tmp_path / "a", CONFIG.format("a")))
    with millstream.open(home.path) as opened:
        opened.append("shop", "orders", {"id": 1})
    with home.open_catalog() as catalog:
        stream = stream_of(home)
        catalog.put_fact(f"leaders/{stream}", "one b", {"node": "b"})
        with pytest.raises(CatalogError, match="leaders makes no sense"):
            StreamLeaders(catalog, stream).map()
    put(home, RoleFact(Role.FOLLOWS, promise(3, B), B))
    newest = leaders_of(home, "shop").newest
    assert newest is not None
    assert (newest.node, newest.since) == (B, promise(3, B))
    for file in home.data.glob("catalog.db*"):
        file.unlink()
    note_leaders(home, "shop")
    assert not home.has_catalog(), "a follower's home gets none for this"
    assert leaders_of(home, "shop").newest == newest
    (home.path / "millstream.toml").write_text(CONFIG.format("a").partition("[replication]")[0])
    shutil.rmtree(home.data / "replication")
    alone = json.loads(run(home.path, "route", "explain", "orders", "--json").stdout)
    assert alone["leader"] is None
