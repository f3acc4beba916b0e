"""Nodes of one stream: followers have the leader's bytes, and resume after anything that happens to either."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.app.homes import run
from tests.nodes.nodes import STREAM, Node, eventually, nodes

import millstream
from millstream.errors import Fenced, NotEnoughReplicas, ReadOnly
from millstream.home.home import Home
from millstream.home.paths import PIPELINE
from millstream.leadership.promotion_check import hear_of_promotions
from millstream.model.positions import Seq
from millstream.nodes.node_checks import examine_nodes
from millstream.testing._servers.ports import free_port
from millstream.testing.pytest_plugin import Database
from millstream.wal.reader import StreamReader

pytestmark = pytest.mark.siege


def append(node: Node, *ids: int, acks: str | None = None) -> None:
    with millstream.open(node.home) as home:
        for one in ids:
            home.append(STREAM, "orders", [{"id": one}], acks=acks, deadline_s=100)


def test_a_follower_has_the_leaders_bytes_and_says_whom_to_write_to(tmp_path: Path) -> None:
    with nodes(tmp_path) as (a, b):
        a.start("owner")
        a.start("serve")
        append(a, 1, 2, 3)
        eventually(a.is_there, "a answers", a)
        told = b.ask("promote")  # b has no leader to follow so far
        assert (told.returncode, "two_leaders" in told.stderr) == (1, True), told.stderr
        b.start("follow", "a")
        eventually(lambda: b.rows() == [1, 2, 3], "what was there comes", a, b)
        append(a, 4)
        eventually(lambda: b.rows() == [1, 2, 3, 4], "a single record of an idle log comes", a, b)
        eventually(lambda: b.bytes_of_log() == a.bytes_of_log(), "the bytes are the same", a, b)
        with pytest.raises(ReadOnly) as refused:
            append(b, 5)
        assert refused.value.details["leader"] == "a"
        asked = b.ask(
            "query", "--lake-only", "from public.orders"
        )  # `millstream run` on b wouldn't land the tables either
        assert re.search(r"hint: .* a\b.* leads the stream, and does", asked.stderr), asked
        (of_a,) = a.answer("replicas")["streams"]
        assert [one["node"] for one in of_a["followers"]] == ["b"]
        has_all = "  followed by b: 0 records, 0 B behind, "
        eventually(lambda: has_all in a.ask("status").stdout, "a knows what b has", a, b)
        b.end("follow", signal.SIGKILL)
        append(a, 5, 6)
        lacks = r"followed by b: apart, 2 records, \S+ \S+ behind, [\d.]+ s old"
        eventually(lambda: re.search(lacks, a.ask("status").stdout), "b is away, and falls behind", a)
        (missed,) = a.answer("status")["conditions"]
        assert (missed["kind"], missed["subject"], missed["is_alert"]) == ("follower_apart", "b", False)
        b.start("follow")
        eventually(lambda: b.rows() == [1, 2, 3, 4, 5, 6], "it goes on where it was", a, b)


def test_a_dead_follower_is_missed_also_after_the_leader_s_restart(tmp_path: Path) -> None:
    """It was nowhere: every append failed, and the leader's `/readyz` answered 200."""
    with nodes(tmp_path, acks="durable(1)") as (a, b):
        a.start("owner")
        a.start("serve")
        eventually(a.is_there, "a answers", a)
        b.start("follow", "a")
        append(a, 1)
        b.end("follow", signal.SIGKILL)
        a.end("serve")
        (a.home / "serve.log").unlink()
        a.start("serve")
        eventually(a.url, "a listens again", a)

        def ready() -> httpx.Response:
            return httpx.get(f"{a.url()}/readyz", timeout=60)

        eventually(lambda: ready().status_code == 503, "a isn't ready without a follower", a)
        assert ready().json()["detail"] == f"too few nodes follow for durable(1), the level of stream {STREAM}"
        (found,) = a.answer("replicas")["streams"]
        (missing,) = found["followers"]
        assert (missing["node"], missing["phase"], missing["records_behind"]) == ("b", "apart", None)
        (missed,) = a.answer("status")["conditions"]
        assert (missed["kind"], missed["subject"], missed["is_alert"]) == ("follower_apart", "b", True)
        gone = f'millstream_follower_connected{{follower="b",stream="{STREAM}"}} 0.0'
        assert gone in httpx.get(f"{a.url()}/metrics", timeout=60).text
        b.start("follow")
        eventually(lambda: ready().status_code == 200, "a is ready with one", a, b)
        assert a.answer("status")["conditions"] == []


def test_a_follower_lets_go_of_what_its_leader_has_let_go_of(tmp_path: Path) -> None:
    bounds = f'[streams.{STREAM}.log]\ndisk_used_max = 1.0\nretention_age = "0s"\nretention_bytes = "0B"\nretention_interval = "200ms"\n'

    def segments(node: Node) -> list[str]:
        return sorted(file.name for file in (node.home / "data" / "wal" / STREAM / "00000").glob("*.wal"))

    with nodes(tmp_path, stream=bounds) as (a, b):
        for one in (1, 2, 3):
            append(a, one)
        a.start("owner")
        a.start("serve")
        b.start("follow", "a")
        eventually(lambda: b.rows() == [1, 2, 3], "what was there comes", a, b)
        with Home(a.home).open_catalog() as catalog:
            stream = catalog.stream(STREAM).id
            catalog.set_needed_from(stream, PIPELINE, Seq(10**12))
            catalog.set_landed(stream, PIPELINE, Seq(10**12))
        append(a, 4)
        eventually(lambda: a.rows() == [4], "the leader lets go", a, b)
        append(a, 5)
        eventually(lambda: b.rows() == [4, 5], "so does the follower", a, b)
        eventually(lambda: segments(b)[0] == segments(a)[0], "of the same segments", a, b)
        b.end("follow")
        append(a, 6)
        b.start("follow")
        eventually(lambda: b.rows() == [4, 5, 6], "it goes on", a, b)


def check_what_a_follower_says(a: Node, b: Node) -> None:
    """Check the commands and addresses at which people and load balancers look."""
    status = b.answer("status")
    assert status["streams"][0]["state"] == "follows"
    assert status["streams"][0]["replication"]["following"]["records_behind"] == 0
    assert a.answer("status")["streams"][0]["replication"]["followers"][0]["node"] == "b"
    for node, other, role in ((a, "b", "follows a"), (b, "a", "leads")):
        own, its = examine_nodes(Home(node.home))
        assert (own.error, its.error) == (None, None)
        assert (its.check, its.message) == (f"node {other} of {STREAM}", f"answers, {role}, has group 3")
    eventually(lambda: a.url() and b.url(), "both listen", a, b)
    assert httpx.get(f"{a.url()}/readyz", timeout=60).status_code == 200
    unready = httpx.get(f"{b.url()}/readyz", timeout=60)
    assert (unready.status_code, unready.json()["detail"]) == (503, "a leads: writes go there")
    behind = f'millstream_replica_behind_records{{stream="{STREAM}"}} 0.0'
    eventually(lambda: behind in httpx.get(f"{b.url()}/metrics", timeout=60).text, "a scrape tells the lag", a, b)
    assert f'millstream_node_leads{{stream="{STREAM}"}} 1.0' in httpx.get(f"{a.url()}/metrics").text
    with millstream.connect(b.url()) as there, pytest.raises(ReadOnly) as refused:
        there.append(STREAM, "orders", [{"id": 9}])
    assert refused.value.details["leader"] == "a"


def test_a_promotion_beside_a_living_leader_loses_nothing(tmp_path: Path) -> None:
    """Writers that wait for the node that is promoted, as `millstream run` does, go on through the promotion."""
    with nodes(tmp_path) as (a, b):
        b.start("follow", "a")
        for node in (a, b):
            node.start("serve")
            node.start("owner")
        append(a, 1, 2, 3)
        eventually(lambda: b.rows() == [1, 2, 3], "what was there comes", a, b)
        check_what_a_follower_says(a, b)
        promoted = b.ask("promote")
        assert promoted.returncode == 0, promoted.stderr
        append(b, 4)
        (of_b,) = b.answer("replicas")["streams"]
        assert (of_b["writes_go_to"]["node"], of_b["writes_go_to"]["here"], of_b["writes_go_to"]["epoch"]) == (
            "b",
            True,
            1,
        )
        assert [(one["epoch"], one["node"]) for one in of_b["led"]] == [(0, "a"), (1, "b")], "by the catalog that came"
        assert b.rows() == [1, 2, 3, 4]
        with pytest.raises(Fenced) as refused:
            append(a, 5)
        assert refused.value.details["leader"] == "b"
        a.start("follow", "b")
        eventually(lambda: a.rows() == [1, 2, 3, 4], "the old leader follows", a, b)
        eventually(lambda: b.bytes_of_log() == a.bytes_of_log(), "the bytes are the same", a, b)


def test_what_a_dead_leader_alone_had_takes_a_word_and_is_set_aside(tmp_path: Path) -> None:
    with nodes(tmp_path) as (a, b):
        a.start("owner")
        a.start("serve")
        append(a, 1, 2)
        b.start("serve")
        b.start("follow", "a")
        eventually(lambda: b.rows() == [1, 2], "what was there comes", a, b)
        a.end("serve", signal.SIGKILL)
        append(a, 3)
        a.kill()
        refused = b.ask("promote")
        assert refused.returncode == 1, refused.stderr
        assert "not_caught_up" in refused.stderr
        assert "a can't be asked" in refused.stderr
        promoted = b.answer("promote", "--accept-loss")
        assert "a" in promoted[0]["losses"][0]
        b.start("owner")
        append(b, 4)
        # No node has contacted it so far: it asks the others, which on a busy machine may take more than one
        # attempt.
        eventually(lambda: not hear_of_promotions(Home(a.home), STREAM), "it hears of the promotion", a, b)
        with pytest.raises(Fenced):
            append(a, 9)
        a.start("serve")
        a.start("owner")
        a.start("follow", "b")
        eventually(lambda: a.rows() == [1, 2, 4], "the old leader follows", a, b)
        (report,) = (a.home / "data" / "replication" / STREAM).glob("aside-*-report")
        lines = [json.loads(line) for line in (report / "records.jsonl").read_text().splitlines()]
        assert [line["row"]["id"] for line in lines] == [3]
        facts = json.loads((report / "report.json").read_text())
        assert (facts["records"], facts["tables"]) == (1, {"public.orders": 1})
        assert StreamReader(facts["log"]).persisted_upto() == facts["last_seq"]
        a.end("follow", signal.SIGKILL)
        (report / "report.json").unlink()  # as if it had been killed just before writing that
        a.start("follow")
        eventually((report / "report.json").exists, "the report is written by whoever follows next", a)


def test_a_write_that_followers_have_acknowledged_outlives_its_leader(tmp_path: Path) -> None:
    """A write that was sent again to the new leader, in its session, is stored once."""
    with nodes(tmp_path, acks="durable(1)") as (a, b):
        a.start("owner")
        a.start("serve")
        b.start("serve")
        b.start("follow", "a")
        with millstream.open(a.home) as home:
            session = home.session(STREAM, "till")
            for one in range(1, 21):
                session.append("orders", [{"id": one}], deadline_s=100)
        a.kill()
        b.answer("promote")
        b.start("owner")
        # The level of one follower needs both nodes: the old leader has to follow before any write is
        # acknowledged.
        a.start("serve")
        a.start("follow", "b")
        with millstream.open(b.home) as home:
            again = home.append(STREAM, "orders", [{"id": 20}], session="till", number=20, deadline_s=100)
            assert again.duplicate
            assert home.session(STREAM, "till").append("orders", [{"id": 21}], deadline_s=100).duplicate is False
        assert b.rows() == list(range(1, 22))
        eventually(lambda: a.rows() == b.rows(), "the old leader has it", a, b)


def test_a_follower_shows_what_the_level_holds_for_and_that_also_where_nothing_else_comes(tmp_path: Path) -> None:
    with nodes(tmp_path, "abc", acks="durable(2)") as (a, b, c):
        a.start("owner")
        a.start("serve")
        b.start("follow", "a")
        with millstream.open(a.home) as home, pytest.raises(NotEnoughReplicas):
            home.append(STREAM, "orders", [{"id": 1}], deadline_s=1)
        eventually(lambda: b.bytes_of_log() == a.bytes_of_log() != {}, "the bytes come", a, b)
        assert b.rows() == a.rows() == []
        c.start("follow", "a")
        for node in (a, b, c):
            eventually(lambda node=node: node.rows() == [1], "what two followers have is shown everywhere", a, b, c)


def test_a_stream_comes_back_from_an_object_store_alone(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    (tmp_path / "store").mkdir()
    with nodes(tmp_path, "a", acks="object", more=f'object_store = "{store}"\n') as (a,):
        a.start("owner")
        a.start("serve")
        append(a, 1, 2)
        with millstream.open(a.home) as home:
            token = str(home.token(STREAM))
        append(a, 3)
        a.kill()
        shutil.rmtree(a.home)
        for folder, more, there in (("all", (), [1, 2, 3]), ("then", ("--at", token), [1, 2])):
            done = run(tmp_path, "restore", "--from", store, "--stream", STREAM, *more, str(tmp_path / folder))
            assert done.returncode == 0, done.stderr
            with millstream.open(tmp_path / folder) as home:
                assert [row for batch in home.read(STREAM) for row in batch.column("id").to_pylist()] == there
                home.append(STREAM, "orders", [{"id": 9}])
                assert [row for batch in home.read(STREAM) for row in batch.column("id").to_pylist()] == [*there, 9]


def test_capture_goes_on_from_the_node_that_was_promoted(tmp_path: Path, postgres: Database) -> None:
    slot = f"nodes_{os.getpid()}"
    source = f'[streams.{STREAM}.source]\ndsn = {json.dumps(postgres.dsn)}\nslot = "{slot}"\n'
    with (
        postgres.connect() as connection,
        nodes(tmp_path, "abc", acks="durable(1)", stream=source) as (a, b, c),
    ):
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        connection.execute("INSERT INTO orders SELECT generate_series(1, 100)")
        for node in (a, b, c):
            node.start("serve")
        for node in (b, c):
            node.start("follow", "a")
        a.start("owner")
        eventually(lambda: sorted(b.rows()) == list(range(1, 101)), "the copy comes", a, b, c)
        for one in range(101, 121):
            connection.execute(f"INSERT INTO orders VALUES ({one})")
        confirmed = (
            f"SELECT confirmed_flush_lsn >= pg_current_wal_lsn() FROM pg_replication_slots WHERE slot_name = '{slot}'"
        )
        eventually(lambda: connection.execute(confirmed).fetchone() == (True,), "the slot is confirmed", a, b, c)
        eventually(lambda: b.tables_that_came() == {"orders": "streaming"}, "b knows that the copy is done", a, b, c)
        a.kill()
        for one in range(121, 141):
            connection.execute(f"INSERT INTO orders VALUES ({one})")
        b.answer("promote")
        b.start("owner")
        everything = list(range(1, 141))
        eventually(lambda: sorted(b.rows()) == everything, "capture goes on", b, c)
        eventually(lambda: sorted(c.rows()) == everything, "the other one follows the new leader", b, c)
        for part in ("owner", "serve"):
            a.start(part)
        a.start("follow", "b")
        eventually(lambda: sorted(a.rows()) == everything, "the old leader follows", a, b, c)
        eventually(lambda: a.bytes_of_log() == b.bytes_of_log() == c.bytes_of_log(), "all have the same bytes", a, b, c)


def test_regions_follow_one_another_and_read_what_both_have_written(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    keys = f'[streams.{STREAM}.keys]\n"public.posts" = ["id"]\n[streams.{STREAM}.merge."public.posts"]\nlikes = "pn_counter"\n'
    homes = [
        Node(
            tmp_path / f"region{own}",
            "a",
            {"a": ports[own - 1]},
            more=f'regions = {{ {other} = "grpc://127.0.0.1:{ports[other - 1]}" }}\n',
            stream=f"region = {own}\n{keys}",
        )
        for own, other in ((1, 2), (2, 1))
    ]
    try:
        for node, likes in zip(homes, (5, 3), strict=True):
            with millstream.open(node.home) as home:
                home.append(STREAM, "posts", {"id": 7, "likes": likes})
            node.start("serve")
            node.start("follow")

        def likes_at(node: Node) -> list[int]:
            with millstream.open(node.home) as home:
                return list(home.merged(STREAM, "posts").column("likes").to_pylist())

        for node in homes:
            eventually(lambda node=node: likes_at(node) == [8], "what both regions have counted", *homes)
        with millstream.open(homes[0].home) as home:
            home.append(STREAM, "posts", {"id": 7, "likes": 6})
        for node in homes:
            eventually(lambda node=node: likes_at(node) == [9], "what one of them counts on", *homes)
        own, copy = homes[0].answer("replicas")["streams"]
        assert [one["node"] for one in own["followers"]] == ["region-2"]
        assert (copy["stream"], copy["role"], copy["leader"]) == (f"{STREAM}@2", "follows", "region-2")
        assert "  shop@2 follows region-2: up to " in homes[0].ask("status").stdout

        def held() -> dict[str, Any]:
            (told,) = homes[0].answer("status")["streams"]
            return dict(told["log"]["held"])

        eventually(lambda: "follower region-2" in held(), "its leader keeps what it may need", *homes)
        assert held()["follower region-2"]["kind"] == "follower"
    finally:
        for node in homes:
            node.kill()


def test_an_application_that_writes_lets_go_where_another_node_is_promoted(tmp_path: Path) -> None:
    """No other process of its home runs that could notice the promotion."""
    with nodes(tmp_path) as (a, b):
        a.start("serve")
        with millstream.open(a.home) as home:
            home.append(STREAM, "orders", [{"id": 1}])
            b.start("serve")
            b.start("follow", "a")
            eventually(lambda: b.rows() == [1], "what was there comes", a, b)
            promoted = b.ask("promote")
            assert promoted.returncode == 0, promoted.stderr
            with pytest.raises(Fenced):
                home.append(STREAM, "orders", [{"id": 2}])
        append(b, 3)
        assert b.rows() == [1, 3]


def test_a_follower_that_has_less_than_another_takes_that_before_it_leads(tmp_path: Path) -> None:
    with nodes(tmp_path, "abc", acks="durable(1)") as (a, b, c):
        for node in (a, b, c):
            node.start("serve")
        for node in (b, c):
            node.start("follow", "a")
        with millstream.open(a.home) as home:
            home.append(STREAM, "orders", [{"id": 1}], deadline_s=100)
        eventually(lambda: b.rows() == c.rows() == [1], "what was there comes", a, b, c)
        c.end("follow", signal.SIGKILL)
        with millstream.open(a.home) as home:
            # A table that the future leader has never seen.
            home.append(STREAM, "others", [{"id": 2}], deadline_s=100)
        a.kill()
        assert c.rows() == [1]
        promoted = c.ask("promote")
        assert promoted.returncode == 0, promoted.stderr
        assert c.rows() == [1, 2]
        b.end("follow")
        b.start("follow")
        with millstream.open(c.home) as home:
            home.append(STREAM, "others", [{"id": 3}], deadline_s=100)
        eventually(lambda: b.rows() == [1, 2, 3], "the other one follows the new leader", b, c)
