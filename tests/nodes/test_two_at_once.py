"""Two promotions at one moment: one wins, the other fails, and acknowledged writes are there exactly once."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.app.gated import Gated
from tests.nodes.nodes import STREAM, Node, eventually, free_port, nodes

import millstream
from millstream.errors import NodeNameTaken, NotEnoughReplicas
from millstream.home.home import Home
from millstream.leadership.node_roles import Roles
from millstream.nodes.node_checks import examine_nodes
from millstream.nodes.replicas import list_replicas
from millstream.protocol.replication.node_promises import Role, RoleFact
from millstream.testing.pytest_plugin import Database

pytestmark = pytest.mark.siege

SOAK_MINUTES = float(os.environ.get("MILLSTREAM_SOAK_MINUTES", "60"))
WAYS = "promises", "store", "postgresql"
"""Ways to decide: other nodes' promises, a claim in an object store, or promises of nodes that share a catalog."""


def fact_of(node: Node) -> RoleFact:
    return Roles(Home(node.home, needs_source=False)).of(STREAM)


@contextlib.contextmanager
def followed(folder: Path, way: str, postgres: Database) -> Iterator[tuple[Node, Node, Node]]:
    """A leader, and two nodes that follow it."""
    (folder / "store").mkdir()
    url = (folder / "store").as_uri()
    acks, more = ("object", f'object_store = "{url}"\n') if way == "store" else ("durable(1)", "")
    with contextlib.ExitStack() as stack:
        catalog = ""
        if way == "postgresql":
            name = f"{postgres.name}_{folder.name}"
            catalog = f'[catalog]\nurl = "{postgres.server.create_database(name)}"\n'
            stack.callback(postgres.server.drop_database, name)
        a, b, c = stack.enter_context(nodes(folder, "abc", acks=acks, more=more, stream=catalog))
        for node in (a, b, c):
            node.start("serve")
        for node in (b, c):
            node.start("follow", "a")
        with millstream.open(a.home) as home:
            for one in range(1, 11):
                home.append(STREAM, "orders", [{"id": one}], session="till", number=one, deadline_s=100)
        yield a, b, c


def promote_at_once(*homes: Path, apart_s: float = 0.0) -> list[tuple[int, str]]:
    """Run `millstream promote` at each node, in this order; return the outcomes."""
    gated = [Gated(home, "promote") for home in homes]
    try:
        for one in gated:
            one.release()
            if one is gated[0]:
                threading.Event().wait(apart_s)
        return [one.wait() for one in gated]
    finally:
        for one in gated:
            one.kill()


def check_one_leads(ended: list[tuple[Node, tuple[int, str]]], *, at_once: bool) -> tuple[Node, Node]:
    """Check that the winner leads, has everything, and goes on, and that the other node follows it. Return the two."""
    told = "\n".join(f"{node.name}: {done}" for node, done in ended)
    won = [node for node, done in ended if done[0] == 0]
    leads = [node for node, _ in ended if fact_of(node).role is Role.LEADS]
    assert len(leads) == 1, told
    (leader,) = leads
    for node, (code, said) in ended:
        assert code == 0 or "promotion_lost" in said, told
        assert code == 0 or node is not leader, told
    if len(won) > 1:
        # Then one came after the other: the later one has outbid the number that the earlier one had noted by
        # then.
        assert not at_once, told
        terms = fact_of(leader).lineage.terms
        assert {term.promise.node for term in terms[1:]} == {node.name for node in won}, told
    (other,) = [node for node, _ in ended if node is not leader]
    with millstream.open(leader.home) as home:
        again = home.append(STREAM, "orders", [{"id": 10}], session="till", number=10, deadline_s=100)
        assert again.duplicate
        home.append(STREAM, "orders", [{"id": 11}], session="till", number=11, deadline_s=100)
    assert leader.rows() == list(range(1, 12))
    eventually(lambda: other.rows() == leader.rows(), f"{other.name} follows", leader, other)
    return leader, other


@pytest.mark.parametrize("way", WAYS[:2])
def test_of_two_promotions_at_one_moment_one_wins(tmp_path: Path, postgres: Database, way: str) -> None:
    (tmp_path / "play").mkdir()
    with followed(tmp_path / "play", way, postgres) as (a, b, c):
        a.kill()
        ended = promote_at_once(b.home, c.home)
        check_one_leads(list(zip((b, c), ended, strict=True)), at_once=True)


@pytest.mark.soak
def test_soak_of_two_promotions(tmp_path: Path, postgres: Database) -> None:
    """Start the second one a moment after the first, in either order; MILLSTREAM_SOAK_SEED repeats one."""
    wanted = os.environ.get("MILLSTREAM_SOAK_SEED")
    until_s = time.monotonic() + 60 * SOAK_MINUTES
    plays = 0
    while not plays or (wanted is None and time.monotonic() < until_s):
        seed = int(wanted) if wanted else random.SystemRandom().randrange(10**9)
        rng = random.Random(seed)
        way, apart_s, turned = (
            rng.choice(WAYS),
            rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, 1.5))),
            rng.random(),
        )
        alive = rng.random() < 0.4
        print(f"MILLSTREAM_SOAK_SEED={seed} repeats it: {way}, {apart_s:.3f} s apart, a alive: {alive}", flush=True)  # noqa: T201 - seeds are told
        folder = tmp_path / str(plays)
        folder.mkdir()
        with followed(folder, way, postgres) as (a, b, c):
            if not alive:
                a.kill()
            first, second = (b, c) if turned < 0.5 else (c, b)
            ended = promote_at_once(first.home, second.home, apart_s=apart_s)
            print([code for code, _ in ended], flush=True)  # noqa: T201 - counts are told
            leader, other = check_one_leads(list(zip((first, second), ended, strict=True)), at_once=False)
            if not alive:
                a.start("serve")
            a.start("follow", leader.name)
            eventually(lambda a=a, leader=leader: a.rows() == leader.rows(), "a follows", a, leader, other)
        plays += 1


def test_of_two_homes_of_one_name_one_is_followed_by_its_leader_and_promised_to(tmp_path: Path) -> None:
    """A home that was copied whole, and serves somewhere else."""
    with nodes(tmp_path, "abc", acks="durable(1)") as (a, b, c):
        for node in (a, b, c):
            node.start("serve")
        b.start("follow", "a")
        with millstream.open(a.home) as home:
            home.append(STREAM, "orders", [{"id": 1}], deadline_s=100)
        copy = Node(tmp_path / "copy", "b", {"b": free_port()}, acks="durable(1)")
        config = (b.home / "millstream.toml").read_text()
        (copy.home / "millstream.toml").write_text(config)
        b.end("follow")
        shutil.copytree(b.home / "data", copy.home / "data", ignore=shutil.ignore_patterns("run"))
        b.start("follow", "a")
        eventually(lambda: error_of_following(b) is None, "it follows", a, b)
        copy.start("follow")
        eventually(lambda: error_of_following(copy) == "node_name_taken", "the copy is refused", a, copy)
        with millstream.open(a.home) as home:
            home.append(STREAM, "orders", [{"id": 2}], deadline_s=100)
        assert b.rows() == [1, 2]
        assert error_of_following(b) is None
        for home, is_taken in ((b, False), (copy, True)):
            own = next(examine_nodes(Home(home.home)))
            assert isinstance(own.error, NodeNameTaken) == is_taken, own
        b.end("follow")
        eventually(lambda: copy.rows() == [1, 2], "once the other one has gone it is taken", a, copy)
        copy.end("follow")
        c.start("follow", "a")
        eventually(lambda: c.rows() == [1, 2], "c has it", a, c)
        a.kill()
        ended = promote_at_once(b.home, copy.home)
        assert sorted(code for code, _ in ended) == [0, 1], ended
        assert sum("node_name_taken" in said for _, said in ended) == 1, ended
        roles = [fact_of(node) for node in (b, copy)]
        assert sorted(fact.role for fact in roles) == [Role.FOLLOWS, Role.LEADS]
        (leads,) = [fact for fact in roles if fact.role is Role.LEADS]
        assert fact_of(c).claimant == leads.claimant


def test_what_a_follower_has_of_a_copy_of_its_leader_counts_for_no_acknowledgement(tmp_path: Path) -> None:
    """A leader's home was copied, and both led in turn: the original counted what the copy had written."""
    with nodes(tmp_path, "ab", acks="durable(1)") as (a, b):
        for node in (a, b):
            node.start("serve")
        b.start("follow", "a")
        with millstream.open(a.home) as home:
            home.append(STREAM, "orders", [{"id": 1}], deadline_s=100)
        a.end("serve")
        shutil.copytree(a.home, tmp_path / "copy", ignore=shutil.ignore_patterns("run", "*.log"))
        original = tmp_path / "original"
        a.home.rename(original)
        (tmp_path / "copy").rename(a.home)
        a.start("serve")
        with millstream.open(a.home) as home:
            home.append(STREAM, "orders", [{"id": 2}], deadline_s=100)
        assert b.rows() == [1, 2]
        a.end("serve")
        shutil.rmtree(a.home)
        original.rename(a.home)
        a.start("serve")
        with millstream.open(a.home) as home, pytest.raises(NotEnoughReplicas):
            home.append(STREAM, "orders", [{"id": 3}], deadline_s=20)
        assert a.rows() == [1], "readers see what b has"
        eventually(lambda: "error[diverged]" in b.log("follow"), "b says why", a, b)


def error_of_following(node: Node) -> str | None:
    (stream,) = list_replicas(Home(node.home))["streams"]
    following = stream["following"] or {}
    if following.get("phase") != "following" and not following.get("error"):
        return "nothing yet"
    return None if following["error"] is None else str(following["error"]["code"])
