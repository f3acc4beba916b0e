"""Nodes of one stream with an object store beside them: what the leader has dropped, the store still has."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.app.nodes import STREAM, Node, eventually, nodes

import millstream
from millstream.app.home import PIPELINE, Home
from millstream.model.positions import Seq
from millstream.wal.reader import StreamReader

SMALL_LOG = """[streams.shop.log]
segment_bytes = "16KiB"
retention_age = "0s"
retention_bytes = "0B"
retention_bytes_max = "64KiB"
retention_interval = "100ms"
"""


def store_in(folder: Path) -> str:
    """The line of `[replication]`."""
    return f'object_store = "{(folder / "store").as_uri()}"\n'


def append_large(node: Node, *ids: int) -> None:
    """Once they are in the store, too."""
    with millstream.open(node.home) as home:
        for one in ids:
            home.append(STREAM, "orders", [{"id": one, "text": secrets.token_hex(2_000)}], acks="object", deadline_s=60)


def pipeline_has_all(node: Node) -> None:
    """Retention waits for it alone from now on who holds something."""
    home = Home(node.home)
    with home.open_catalog() as catalog:
        stream = catalog.stream(STREAM).id
        catalog.set_needed_from(stream, PIPELINE, Seq(1 << 40))
        catalog.set_landed(stream, PIPELINE, Seq(1 << 40))


def first_seq(node: Node) -> int:
    return StreamReader(str(node.home / "data" / "wal" / STREAM)).first_seq()


@contextmanager
def appending(node: Node, first: int) -> Iterator[list[int]]:
    """Appends one after the other from that number on, until the block ends; what was acknowledged."""
    done: list[int] = []
    stop = threading.Event()

    def run() -> None:
        with millstream.open(node.home) as home:
            while not stop.is_set():
                one = first + len(done)
                home.append(STREAM, "orders", [{"id": one, "text": secrets.token_hex(500)}], deadline_s=60)
                done.append(one)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()


def test_what_the_leader_has_dropped_a_follower_has_from_the_object_store(tmp_path: Path) -> None:
    """… while the stream is written to; and whoever is built anew has all of it."""
    with nodes(tmp_path, more=store_in(tmp_path), stream=SMALL_LOG) as (a, b):
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
        assert "the new one begins with what file://" in rebuilt.stderr
        assert b.rows() == everything
