"""Nodes of one stream with an object store: the store still has the segments that the leader has dropped."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.app.homes import run
from tests.nodes.nodes import STREAM, Node, eventually, nodes

import millstream
from millstream.errors import NotEnoughReplicas
from millstream.home.home import Home
from millstream.home.paths import PIPELINE
from millstream.model.positions import Seq
from millstream.wal.reader import StreamReader

pytestmark = pytest.mark.siege

SMALL_LOG = """[streams.shop.log]
segment_bytes = "16KiB"
retention_age = "0s"
retention_bytes = "0B"
retention_bytes_max = "64KiB"
retention_interval = "100ms"
"""


def store_in(folder: Path) -> str:
    """Return the store's line of `[replication]`."""
    return f'object_store = "{(folder / "store").as_uri()}"\n'


def append_large(node: Node, *ids: int) -> None:
    """Append rows, and return once they are in the store, too."""
    with millstream.open(node.home) as home:
        for one in ids:
            home.append(STREAM, "orders", [{"id": one, "text": secrets.token_hex(2_000)}], acks="object", deadline_s=60)


def pipeline_has_all(node: Node) -> None:
    """Advance the pipeline past everything, so that retention waits only for the other holders."""
    home = Home(node.home)
    with home.open_catalog() as catalog:
        stream = catalog.stream(STREAM).id
        catalog.set_needed_from(stream, PIPELINE, Seq(1 << 40))
        catalog.set_landed(stream, PIPELINE, Seq(1 << 40))


def keep_all(node: Node) -> None:
    """Configure the node to keep segments that its leader drops."""
    config = node.home / "millstream.toml"
    config.write_text(config.read_text().replace(SMALL_LOG, ""))


def first_seq(node: Node) -> int:
    return StreamReader(str(node.home / "data" / "wal" / STREAM)).first_seq()


@contextmanager
def appending(node: Node, first: int) -> Iterator[list[int]]:
    """Append one row after the other from that number on, until the block ends; yield the acknowledged ones."""
    done: list[int] = []
    stop = threading.Event()

    def run() -> None:
        with millstream.open(node.home) as home:
            while not stop.is_set():
                one = first + len(done)
                home.append(
                    STREAM, "orders", [{"id": one, "text": secrets.token_hex(500)}], acks="object", deadline_s=60
                )
                done.append(one)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()


def test_what_the_leader_has_dropped_a_follower_has_from_the_object_store(tmp_path: Path) -> None:
    """The stream is written to while that happens; a follower that is rebuilt has everything."""
    with nodes(tmp_path, more=store_in(tmp_path), stream=SMALL_LOG) as (a, b):
        keep_all(b)
        a.start("serve")
        append_large(a, *range(1, 6))
        pipeline_has_all(a)
        b.start("follow", "a")
        eventually(lambda: b.rows() == [1, 2, 3, 4, 5], "what was there comes", a, b)
        b.end("follow")
        first = StreamReader(str(b.home / "data" / "wal" / STREAM)).persisted_upto() + 1
        append_large(a, *range(6, 41))
        a.start("owner")
        eventually(lambda: first_seq(a) > first, "the leader drops what the follower lacks", a)
        kept = (b.home / "data" / "wal" / STREAM / "00000").stat().st_ino
        with appending(a, 41) as done:
            b.start("follow")
            eventually(lambda: len(b.rows()) > 45, "what was dropped comes, and what is new", a, b)
        everything = [*range(1, 41), *done]
        eventually(lambda: b.rows() == everything, "all of it is there", a, b)
        assert (b.home / "data" / "wal" / STREAM / "00000").stat().st_ino == kept, "its own wasn't thrown away"
        b.end("follow")
        rebuilt = b.ask("follow", "a", "--rebuild", "--until-caught-up")
        assert rebuilt.returncode == 0, rebuilt.stderr
        assert "the new one starts from file://" in rebuilt.stderr
        assert b.rows() == everything


def test_without_its_store_a_write_that_asks_for_it_fails_by_name_and_nothing_else_stops(tmp_path: Path) -> None:
    """Once the store is back, the write is in it, once."""
    store, away = tmp_path / "store", tmp_path / "away"
    with nodes(tmp_path, more=store_in(tmp_path)) as (a, b):
        a.start("serve")
        b.start("follow", "a")
        with millstream.open(a.home) as home:
            home.append(STREAM, "orders", [{"id": 1}], session="till", number=1, acks="object", deadline_s=60)
            store.rename(away)
            store.write_text("in the way")
            with pytest.raises(NotEnoughReplicas) as missing:
                home.append(STREAM, "orders", [{"id": 2}], session="till", number=2, acks="object", deadline_s=1)
            assert missing.value.details["behind"] == ["object-store"]
            home.append(STREAM, "orders", [{"id": 3}], acks="durable(1)", deadline_s=60)
            eventually(lambda: b.rows() == [1, 2, 3], "followers have it", a, b)
            (of_a,) = a.answer("replicas")["streams"]
            assert of_a["object_store"]["error"]["code"] == "store_unavailable"
            store.unlink()
            away.rename(store)
            assert home.append(
                STREAM, "orders", [{"id": 2}], session="till", number=2, acks="object", deadline_s=60
            ).duplicate
            assert a.rows() == [1, 2, 3]
        (of_a,) = a.answer("replicas")["streams"]
        assert of_a["object_store"]["error"] is None


def test_a_store_that_cant_be_used_keeps_no_follower_waiting(tmp_path: Path) -> None:
    """An unusable store is, for example, one without a configured account."""
    with nodes(tmp_path, more='object_store = "az://container/nodes"\n') as (a, b):
        a.start("serve")
        with millstream.open(a.home) as home:
            home.append(STREAM, "orders", [{"id": 1}])
        config = b.home / "millstream.toml"
        config.write_text(config.read_text().replace('object_store = "az://container/nodes"\n', ""))
        b.start("follow", "a")
        eventually(lambda: b.rows() == [1], "what was there comes", a, b)
        (of_a,) = a.answer("replicas")["streams"]
        assert of_a["object_store"]["error"]["code"] == "store_unusable"


def test_a_new_follower_needs_no_store_while_its_leader_has_everything(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with nodes(tmp_path, more=store_in(tmp_path)) as (a, b):
        a.start("serve")
        with millstream.open(a.home) as home:
            home.append(STREAM, "orders", [{"id": 1}], acks="object", deadline_s=60)
            store.rename(tmp_path / "away")
            store.write_text("in the way")
            b.start("follow", "a")
            home.append(STREAM, "orders", [{"id": 2}], acks="durable(1)", deadline_s=60)
        eventually(lambda: b.rows() == [1, 2], "all comes of the leader", a, b)


def restored(folder: Path, name: str, *words: str) -> list[int]:
    """Return the rows that a restore from the store brings."""
    url = (folder / "store").as_uri()
    done = run(folder, "restore", "--from", url, "--stream", STREAM, *words, str(folder / name))
    assert done.returncode == 0, done.stderr
    with millstream.open(folder / name) as home:
        return [row for batch in home.read(STREAM) for row in batch.column("id").to_pylist()]


def test_a_promotion_takes_what_only_the_store_has_and_one_without_the_store_sets_that_aside(tmp_path: Path) -> None:
    """The stream is of region 2, and its log lies in the store under that region."""
    store, away = tmp_path / "store", tmp_path / "away"
    with nodes(tmp_path, acks="object", more=store_in(tmp_path), stream="region = 2\n") as (a, b):

        def append(node: Node, one: int) -> None:
            with millstream.open(node.home) as home:
                home.append(STREAM, "orders", [{"id": one}], deadline_s=60)

        a.start("serve")
        append(a, 1)
        b.start("follow", "a")
        eventually(lambda: b.rows() == [1], "what was there comes", a, b)
        b.end("follow")
        append(a, 2)
        a.kill()
        (promoted,) = b.answer("promote")
        assert promoted["losses"] == []
        # It followed a leader that waited for the store, so its readers wait too, until its own `serve` has
        # checked the store after a write.
        assert b.rows(durable=True) == [1, 2], "what only the store had"
        # The same in the other direction, while the store is away.
        b.start("serve")
        append(b, 3)
        assert b.rows() == [1, 2, 3]
        a.start("follow", "b")
        eventually(lambda: a.rows() == [1, 2, 3], "the old leader follows", a, b)
        a.end("follow")
        append(b, 4)
        b.kill()
        store.rename(away)
        store.write_text("in the way")
        refused = a.ask("promote")
        assert refused.returncode == 1
        assert "store_unavailable" in refused.stderr
        (promoted,) = a.answer("promote", "--accept-loss")
        assert "the store that decides who leads doesn't answer" in promoted["losses"][0]
        store.unlink()
        away.rename(store)
        a.start("serve")
        append(a, 5)
        assert a.rows() == [1, 2, 3, 5]
        a.kill()
        assert restored(tmp_path, "restored", "--region", "2") == [1, 2, 3, 5]
        aside = str(promoted["epoch"] - 1)
        assert restored(tmp_path, "aside", "--region", "2", "--epoch", aside) == [1, 2, 3, 4]
