"""A node's stored role in a stream: damaged or missing files, and the notes that other nodes may request."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner
from tests.app.homes import wait_for
from tests.nodes.nodes import STREAM, Node, eventually, nodes

import millstream
from millstream.cli.main import cli
from millstream.errors import (
    MillstreamError,
    ReadOnly,
    ReplicationError,
    RoleUnreadable,
    UnknownStream,
    UsageError,
)
from millstream.home.home import Home
from millstream.home.paths import PIPELINE
from millstream.leadership.node_calls import NodeState
from millstream.leadership.node_roles import VERSIONS_NAME, Roles, replication_folder
from millstream.leadership.promotion_check import hear_of_promotions, hearing_of_promotions
from millstream.model.ids import Epoch, ShardId
from millstream.model.positions import Offset, Seq
from millstream.model.replication import AckLevel, ByteEnd, Document, NodeName, follower_holder
from millstream.nodes import follower_process
from millstream.nodes.follower_process import begin_to_follow
from millstream.nodes.follower_state import FollowerState
from millstream.nodes.level_document import LEVEL, Terms
from millstream.nodes.log_shipping import Shipping
from millstream.nodes.peer_requests import answer_node, node_state
from millstream.nodes.promote import promote
from millstream.nodes.restore import restore_stream
from millstream.nodes.staleness import age_of_replica, note_age
from millstream.private_files import replace_file
from millstream.protocol.replication.node_promises import Promise, Role, RoleFact
from millstream.protocol.retention import CutOff, HolderKind
from millstream.testing.errors import coded
from millstream.workers import Worker


def home_of(node: Node) -> Home:
    home = Home(node.home, needs_source=False)
    home.prepare()
    return home


def follows(home: Home, leader: str) -> None:
    with Roles(home).changing(STREAM) as changing:
        changing.put(replace(RoleFact(role=Role.FENCED), leader=NodeName(leader)).following(NodeName(leader)))


def test_a_follower_whose_role_is_gone_doesnt_write_beside_its_leader(tmp_path: Path) -> None:
    with nodes(tmp_path) as (_, b):
        home = home_of(b)
        follows(home, "a")
        FollowerState(home, STREAM).documents((Document("sessions", 1, b""),))
        home.role_file(STREAM).unlink()
        with millstream.open(b.home) as opened, pytest.raises(RoleUnreadable) as refused:
            opened.append(STREAM, "orders", [{"id": 1}])
        assert str(home.role_file(STREAM)) in refused.value.message
        assert not Roles(home).leads_surely(STREAM)


@pytest.mark.parametrize("data", [b"", b"[1]", b'{"catalog": null}', b'{"catalog": "x"}', b"\xff"])
def test_notes_that_are_damaged_count_as_none(tmp_path: Path, data: bytes) -> None:
    with nodes(tmp_path) as (_, b):
        home = home_of(b)
        notes = FollowerState(home, STREAM)
        folder = replication_folder(home, STREAM)
        (folder / VERSIONS_NAME).write_bytes(data)
        assert notes.versions() == {}
        (folder / "age.json").write_bytes(data)
        assert age_of_replica(home, STREAM) is None
        note_age(folder, 0.0)
        facts = json.loads((folder / "age.json").read_bytes()) | {"fresh_ns": "x"}
        (folder / "age.json").write_text(json.dumps(facts))
        assert age_of_replica(home, STREAM) is None


@pytest.mark.parametrize("epoch", [0, -1, 1 << 62, 1 << 80, 1.5, True, "1", None])
def test_a_promise_that_nobody_could_keep_isnt_given(tmp_path: Path, epoch: Any) -> None:
    with nodes(tmp_path) as (a, _):
        home = home_of(a)
        with pytest.raises(UsageError):
            answer_node(home, {"op": "promise", "stream": STREAM, "epoch": epoch, "to": "b"})
        with pytest.raises(MillstreamError, check=coded("usage", "unknown_node")):
            answer_node(home, {"op": "promise", "stream": STREAM, "epoch": 1, "to": "nobody here"})
        assert Roles(home).leads(STREAM)


def test_a_promise_about_another_stream_of_the_name_is_neither_given_nor_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nodes(tmp_path) as (a, b):
        homes = home_of(a), home_of(b)
        for node in (a, b):
            with millstream.open(node.home) as opened:
                opened.append(STREAM, "orders", [{"id": 1}])
        one, two = homes
        theirs = node_state(two, STREAM)
        assert theirs.stream is not None
        assert NodeState.of_dict(theirs.as_dict()) == theirs
        asked = {"op": "promise", "stream": STREAM, "epoch": 1, "to": "b"}
        with pytest.raises(ReplicationError, check=coded("other_stream")):
            answer_node(one, asked | {"stream_id": str(theirs.stream)})
        with pytest.raises(UsageError):
            answer_node(one, asked | {"stream_id": "x"})
        promised = replace(theirs, fact=replace(theirs.fact, promise=Promise(Epoch(7), NodeName("b"))))
        monkeypatch.setattr("millstream.leadership.node_calls.state_of_node", lambda *_, **__: promised)
        assert hear_of_promotions(one, STREAM)
        monkeypatch.setattr("millstream.leadership.promotion_check._EVERY_S", 0.05)
        with structlog.testing.capture_logs() as logged, hearing_of_promotions(one) as found:
            eventually(lambda: found.get(STREAM), "it is shown", a)
            first = found[STREAM]
            eventually(lambda: found[STREAM] is not first, "it is asked again, and not logged again", a)
            assert found[STREAM]["b"].code == "other_stream"
            assert "replication.nodes" in (found[STREAM]["b"].hint or "")
        assert [line["code"] for line in logged if line["log_level"] == "error"] == ["other_stream"]
        shutil.rmtree(two.wal_folder(STREAM))
        asked_back = replace(promised, node=NodeName("a"), stream=node_state(one, STREAM).stream)
        monkeypatch.setattr("millstream.leadership.node_calls.state_of_node", lambda *_, **__: asked_back)
        assert not hear_of_promotions(two, STREAM)  # it has no log, and begins none
        own = replace(promised, stream=node_state(one, STREAM).stream)
        monkeypatch.setattr("millstream.leadership.node_calls.state_of_node", lambda *_, **__: own)
        assert not hear_of_promotions(one, STREAM)


@pytest.mark.parametrize("follower", [False, True])
def test_a_promise_tells_of_all_that_was_durable_though_a_power_cut_has_taken_the_marks_back(
    tmp_path: Path, *, follower: bool
) -> None:
    """Marks aren't fsynced with each group: a promotion that trusted them would lose groups that were acknowledged."""
    with nodes(tmp_path) as (a, _):
        home = home_of(a)
        mark = home.wal_folder(STREAM) / "00000" / "durable.mark"
        with millstream.open(a.home) as opened:
            opened.append(STREAM, "orders", [{"id": 1}])
            before = mark.read_bytes()
            opened.append(STREAM, "orders", [{"id": 2}])
            opened.append(STREAM, "orders", [{"id": 3}])
        durable = node_state(home, STREAM).group
        mark.write_bytes(before)
        assert node_state(home, STREAM).group < durable
        if follower:
            follows(home, "b")
            (replication_folder(home, STREAM) / "age.json").write_text('{"fresh_ns": 1, "boot": "the one before"}')
        told = answer_node(home, {"op": "promise", "stream": STREAM, "epoch": 1, "to": "b"})
        assert told["group"] == durable
        assert a.rows() == [1, 2, 3]


@pytest.mark.parametrize("others_go_on", [False, True])
def test_a_stream_that_waits_for_an_operator_looks_again_while_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, others_go_on: bool
) -> None:
    monkeypatch.setattr(follower_process, "_LOOKS_AGAIN_S", 0.1)
    with nodes(tmp_path) as (_, b):
        home = home_of(b)
        follows(home, "a")
        stop, all_gave_up = threading.Event(), threading.Event()
        if not others_go_on:
            all_gave_up.set()
        stream = follower_process._FollowedStream(home, follower_process.own_copy(STREAM), stop, all_gave_up)
        tries: list[bool] = []

        def follow(*, until_caught_up: bool) -> bool:
            tries.append(until_caught_up)
            if len(tries) == 1:
                raise ReplicationError("a copy of another stream lies here", code="other_stream")
            stop.set()
            return True

        monkeypatch.setattr(stream, "_follow_or_fill", follow)
        stream.run(until_caught_up=False)
        assert len(tries) == (2 if others_go_on else 1)
        assert (stream.error is None, stream.gave_up) == (others_go_on, not others_go_on)


def test_a_role_that_is_damaged_holds_up_no_other_stream(tmp_path: Path) -> None:
    with nodes(tmp_path) as (a, b):
        for node in (a, b):
            with (node.home / "millstream.toml").open("a") as file:
                file.write('[streams.other.ingest]\nschema_on_write = "create"\n')
        a.start("serve")
        with millstream.open(a.home) as opened:
            for stream in (STREAM, "other"):
                opened.append(stream, "orders", [{"id": 1}])
        assert b.ask("follow", "a", "--until-caught-up").returncode == 0
        with millstream.open(a.home) as opened:
            for stream in (STREAM, "other"):
                opened.append(stream, "orders", [{"id": 2}])
        home_of(b).role_file(STREAM).write_bytes(b"{")
        # Start it as `run` does: a user who names a broken stream gets the error at once.
        b.start("follow", "--stream", "other")
        eventually(lambda: rows_of_other(b) == [1, 2], "the other stream comes", a, b)
        shown = {one["stream"]: one for one in b.answer("replicas")["streams"]}
        assert (shown[STREAM]["role"], shown["other"]["role"]) == (None, "follows")
        assert shown[STREAM]["error"]["code"] == "role_unreadable"
        told = b.ask("status")
        assert told.returncode == 0, told.stderr
        assert "role_unreadable" in told.stdout
        assert "follows a: up to" in told.stdout


def rows_of_other(node: Node) -> list[int]:
    with millstream.open(node.home) as home:
        return [row for batch in home.read("other") for row in batch.column("id").to_pylist()]


def test_a_promotion_goes_by_the_level_and_the_nodes_that_the_leader_acknowledged_with(tmp_path: Path) -> None:
    """A leader of three nodes acknowledged with one of two followers; the other is configured for two nodes."""
    with nodes(tmp_path, "abc", acks="durable(2)") as (_, _, c):
        home = home_of(c)
        follows(home, "a")
        notes = FollowerState(home, STREAM)
        own = Terms.configured(home, STREAM)
        for said in (
            replace(own, level=AckLevel.parse("durable(1)")).document().data,
            replace(own, nodes=own.nodes | {NodeName("d")}).document().data,
            b"damaged",
        ):
            notes.documents((Document(LEVEL, 1, said),))
            with pytest.raises(ReplicationError, check=coded("not_caught_up")):
                promote(home, STREAM)
            assert Roles(home).of(STREAM).role is Role.FOLLOWS
        notes.documents((Document(LEVEL, 2, own.document().data),))
        assert promote(home, STREAM).epoch == 1


def test_a_promoted_node_holds_its_log_for_followers_whatever_they_acknowledged_to_an_earlier_leader(
    tmp_path: Path,
) -> None:
    """They may have set that aside under another leader since. One that was cut off holds nothing, as before."""
    with nodes(tmp_path) as (a, _):
        with millstream.open(a.home) as opened:
            opened.append(STREAM, "orders", [{"id": 1}])
        home = home_of(a)
        with Roles(home).changing(STREAM) as changing:
            changing.put(changing.fact.heard_of(Promise(Epoch(1), NodeName("b"))))
        ends = {ShardId(0): ByteEnd(Offset(1), 100)}
        with home.open_catalog() as catalog:
            stream = catalog.resolve_stream(STREAM)
            for name in ("b", "c"):
                holder = follower_holder(NodeName(name))
                catalog.set_needed_from(stream, holder, Seq(7), kind=HolderKind.FOLLOWER, position=ends)
            catalog.cut_off(stream, CutOff(holder, HolderKind.FOLLOWER, Seq(7), Seq(9)))
            catalog.set_needed_from(stream, PIPELINE, Seq(7))
        assert promote(home, STREAM, accept_loss=True).epoch == 2
        with home.open_catalog() as catalog:
            assert catalog.needed_from(stream) == {PIPELINE: 7, "follower b": 0}
            assert {one.name: one.position for one in catalog.pipelines(stream)}["follower b"] is None


def test_a_disk_that_fails_under_a_role_is_no_bug(tmp_path: Path) -> None:
    with nodes(tmp_path) as (_, b):
        home = home_of(b)
        follows(home, "a")
        file = home.role_file(STREAM)
        data = file.read_bytes()
        file.unlink()
        file.mkdir()
        with pytest.raises(MillstreamError):
            Roles(home).of(STREAM)
        file.rmdir()
        replace_file(file, data)
        assert Roles(home).of(STREAM).role is Role.FOLLOWS


def test_a_copy_is_neither_mended_by_itself_nor_imported_into(tmp_path: Path) -> None:
    """With bytes that differ from the leader's, or a log of its own, the node would stop at the next message."""
    with nodes(tmp_path) as (a, b):
        with millstream.open(a.home) as opened:
            opened.append(STREAM, "orders", [{"id": 1}])
        exported = tmp_path / "exported"
        called = CliRunner().invoke(
            cli, ["--home", str(a.home), "wal", "export", "--format", "arrow", "-o", str(exported)]
        )
        assert called.exit_code == 0, called.output
        home = home_of(b)
        shutil.copytree(a.home / "data" / "wal" / STREAM, b.home / "data" / "wal" / STREAM)
        follows(home, "a")
        for words in (["wal", "repair"], ["wal", "import", str(exported)]):
            refused = CliRunner().invoke(cli, ["--home", str(b.home), *words])
            assert isinstance(refused.exception, ReadOnly), refused.output
        assert CliRunner().invoke(cli, ["--home", str(b.home), "wal", "repair", "--dry-run"]).exit_code == 0
        with Roles(home).changing(STREAM) as changing:
            changing.put(changing.fact.candidate_for(Promise(Epoch(1), NodeName("b"))))
        mended = CliRunner().invoke(cli, ["--home", str(b.home), "wal", "repair"])
        assert mended.exit_code == 0, "where no leader is left, there is nobody to take it from anew"


def test_a_node_alone_and_a_store_that_was_mistyped_say_what_to_look_at(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text(f'[streams.{STREAM}]\n[replication]\nnode = "a"\n')
    with pytest.raises(UsageError) as nobody:
        begin_to_follow(Home(tmp_path), None, [])
    assert "[replication.nodes]" in nobody.value.hint
    with pytest.raises(UnknownStream) as nothing:
        restore_stream(f"file://{tmp_path}/nowhere", STREAM, tmp_path / "restored")
    assert "object_store" in nothing.value.hint
    assert not (tmp_path / "restored").exists()


def test_other_nodes_are_asked_again_after_a_thread_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that asks ended with it: this node heard of no promotion from then on."""
    start, refused, asked = threading.Thread.start, [True], threading.Event()

    def begun(thread: threading.Thread) -> None:
        if thread.name.startswith("ask-nodes_"):
            if refused:
                refused.clear()
                raise RuntimeError("can't start new thread")
            asked.set()
        start(thread)

    with nodes(tmp_path) as (a, _), monkeypatch.context() as patched:
        patched.setattr("millstream.leadership.promotion_check._EVERY_S", 0.05)
        patched.setattr(threading.Thread, "start", begun)
        with hearing_of_promotions(home_of(a)):
            assert asked.wait(30.0)


@pytest.mark.parametrize("thread", ["ship-accept-", "archive-"])
def test_shipping_that_could_not_begin_leaves_no_thread_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    """The shipper's first threads stayed, and took followers away from the next one's."""
    start, refused = Worker.start, [thread]

    def begun(worker: Worker) -> Worker:
        if refused and worker.name.startswith(refused[0]):
            raise OSError(errno.EAGAIN, f"no more threads can be started for {refused.pop()}")
        return start(worker)

    def threads() -> list[str]:
        return sorted(one.name for one in threading.enumerate() if one.name.startswith(("ship-", "archive-")))

    monkeypatch.setattr(Worker, "start", begun)
    with nodes(tmp_path, more=f'object_store = "{(tmp_path / "store").as_uri()}"\n') as (a, _):
        home = home_of(a)
        home.wal_folder(STREAM).mkdir(parents=True)
        shipping = Shipping(home)
        shipping.start()
        try:
            expected = [f"{name}-{STREAM}" for name in ("archive", "ship-accept", "ship", "ship-watch")]
            wait_for(lambda: not refused and threads() == expected, seconds=15.0, what=threads)
        finally:
            shipping.end()
        assert threads() == []
