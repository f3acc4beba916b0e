"""Nodes of one stream: followers have the leader's bytes, and go on through everything that happens to either."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.app.nodes import STREAM, Node, eventually, nodes

import millstream
from millstream.errors import Fenced, ReadOnly


def append(node: Node, *ids: int, acks: str | None = None) -> None:
    with millstream.open(node.home) as home:
        for one in ids:
            home.append(STREAM, "orders", [{"id": one}], acks=acks)


def test_a_follower_has_the_leaders_bytes_and_says_whom_to_write_to(tmp_path: Path) -> None:
    with nodes(tmp_path) as (a, b):
        a.start("owner")
        a.start("serve")
        append(a, 1, 2, 3)
        b.start("follow", "a")
        eventually(lambda: b.rows() == [1, 2, 3], "what was there comes", a, b)
        append(a, 4)
        eventually(lambda: b.rows() == [1, 2, 3, 4], "a single record of an idle log comes", a, b)
        eventually(lambda: b.bytes_of_log() == a.bytes_of_log(), "the bytes are the same", a, b)
        with pytest.raises(ReadOnly) as refused:
            append(b, 5)
        assert refused.value.details["leader"] == "a"
        (of_a,) = a.answer("replicas")["streams"]
        assert [one["node"] for one in of_a["followers"]] == ["b"]
        b.end("follow", signal.SIGKILL)
        append(a, 5, 6)
        b.start("follow")
        eventually(lambda: b.rows() == [1, 2, 3, 4, 5, 6], "it goes on where it was", a, b)


def test_a_promotion_beside_a_living_leader_loses_nothing(tmp_path: Path) -> None:
    with nodes(tmp_path) as (a, b):
        a.start("owner")
        a.start("serve")
        append(a, 1, 2, 3)
        b.start("serve")
        b.start("follow", "a")
        eventually(lambda: b.rows() == [1, 2, 3], "what was there comes", a, b)
        promoted = b.ask("promote")
        assert promoted.returncode == 0, promoted.stderr
        b.start("owner")
        append(b, 4)
        assert b.rows() == [1, 2, 3, 4]
        with pytest.raises(Fenced) as refused:
            append(a, 5)
        assert refused.value.details["leader"] == "b"
        a.start("follow", "b")
        eventually(lambda: a.rows() == [1, 2, 3, 4], "the old leader follows", a, b)
        eventually(lambda: b.bytes_of_log() == a.bytes_of_log(), "the bytes are the same", a, b)
