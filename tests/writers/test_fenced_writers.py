"""Named writers that lost their lease: they come back under a new epoch, unless another process has their name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import config, make_home, wait_for
from tests.wal.plain_operations import plain_ops, plain_table

from millstream.app.open_home import OpenHome, open_other
from millstream.catalog import Catalog
from millstream.errors import SequencingError, StaleEpoch
from millstream.home.home import Home
from millstream.model.ids import StreamId
from millstream.processes.child_process import Lifeline
from millstream.processes.control_socket import ask
from millstream.protocol.sequencer import WriterEntry, WriterPhase
from millstream.testing.errors import coded
from millstream.testing.pytest_plugin import Database
from millstream.writers.leased_writer import OneOfSeveral, WriterPlace, inherit, store_of
from millstream.writers.owner import run_owner

LEASE_S = 1.0


def named(postgres: Database, streams: str) -> str:
    return f'[catalog]\nurl = {json.dumps(postgres.dsn)}\n[writer]\nname = "a"\nlease = "{LEASE_S:g}s"\n{streams}'


@contextmanager
def owner(home: Home) -> Iterator[Future[dict[str, Any]]]:
    """Own the home on a thread, for the block."""
    lifeline = Lifeline()
    run = partial(run_owner, home, lifeline, open_other=open_other, on_progress=lambda _facts: None)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield running
        finally:
            lifeline.stop.set()


def entry_of(catalog: Catalog, stream: StreamId) -> WriterEntry:
    return next(entry for entry in store_of(catalog, stream, LEASE_S).writers() if entry.name == "a")


def is_open(catalog: Catalog, stream: str, above: int) -> bool:
    with suppress(StopIteration):
        entry = entry_of(catalog, catalog.resolve_stream(stream))
        return entry.phase is WriterPhase.OPEN and entry.epoch > above
    return False


def let_lease_end(home: Home, catalog: Catalog, postgres: Database, stream: str) -> int:
    """Recover the writer's shards as another writer does after the lease; return the epoch that was fenced."""
    found = catalog.stream(stream).id
    place = WriterPlace(found, str(home.wal_folder(stream)), None, LEASE_S)
    while True:
        entry = entry_of(catalog, found)
        with postgres.connect() as connection:
            connection.execute("UPDATE millstream.writers SET lease_until_us = 0")
        with suppress(SequencingError):  # it has renewed the lease
            inherit(store_of(catalog, found, LEASE_S), place, entry)
            return int(entry.epoch)


def test_a_writer_that_slept_past_its_lease_writes_again(tmp_path: Path, postgres: Database) -> None:
    """Its stream was given up until the process was restarted."""
    home = Home(make_home(tmp_path / "web", named(postgres, "[streams.web]\n")))
    with Catalog(postgres.dsn) as catalog, owner(home) as running, OpenHome(home) as opened:
        wait_for(lambda: running.done() or is_open(catalog, "web", 0))
        opened.append("web", "clicks", [{"n": 1}])
        fenced = let_lease_end(home, catalog, postgres, "web")
        wait_for(lambda: running.done() or is_open(catalog, "web", fenced))
        assert not running.done()
        opened.append("web", "clicks", [{"n": 2}])
        assert [row["n"] for batch in opened.read("web") for row in batch.to_pylist()] == [1, 2]
    assert running.result() is not None


def test_a_writer_that_slept_while_its_source_was_quiet_writes_again(tmp_path: Path, postgres: Database) -> None:
    """Capture appended nothing, so it didn't learn that the log's writer had ended."""
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
    text = config(postgres.dsn, None, tables='["public.*"]')
    home = Home(make_home(tmp_path / "shop", named(postgres, text)))
    with Catalog(postgres.dsn) as catalog, owner(home) as running, OpenHome(home) as opened:
        wait_for(lambda: running.done() or is_open(catalog, "shop", 0))
        opened.append("shop", "clicks", [{"n": 1}])
        wait_for(lambda: (ask(home, "owner", "status") or {})["streams"]["shop"]["progress"])
        fenced = let_lease_end(home, catalog, postgres, "shop")
        wait_for(lambda: running.done() or is_open(catalog, "shop", fenced))
        assert not running.done()
        opened.append("shop", "clicks", [{"n": 2}])
        assert [r["n"] for b in opened.read("shop", table="clicks") for r in b.to_pylist()] == [1, 2]
    assert running.result() is not None


def test_a_process_whose_name_another_one_took_ends_and_fences_nothing(tmp_path: Path, postgres: Database) -> None:
    home = Home(make_home(tmp_path / "web", named(postgres, "[streams.web]\n")))
    with Catalog(postgres.dsn) as catalog, owner(home) as running:
        wait_for(lambda: running.done() or is_open(catalog, "web", 0))
        stream = catalog.stream("web").id
        with OneOfSeveral.open(
            catalog, stream, str(home.wal_folder("web")), name="a", location=home.identity().id, lease_s=LEASE_S
        ) as twin:
            entry = entry_of(catalog, stream)
            with pytest.raises(SequencingError, check=coded("writer_name_taken"), match="another process"):
                running.result(timeout=120.0)
            twin.log.append(plain_ops({1: [(plain_table(900), 1, "x")]}, shard_of={900: twin.shards[0]}))
            assert entry_of(catalog, stream).epoch == entry.epoch


def test_an_application_whose_lease_ended_appends_again(tmp_path: Path, postgres: Database) -> None:
    home = Home(make_home(tmp_path / "web", named(postgres, "[streams.web]\n")))
    with Catalog(postgres.dsn) as catalog, OpenHome(home) as opened:
        opened.append("web", "clicks", [{"n": 1}])
        let_lease_end(home, catalog, postgres, "web")
        opened.append("web", "clicks", [{"n": 2}])
        assert [row["n"] for batch in opened.read("web") for row in batch.to_pylist()] == [1, 2]


def test_an_application_whose_name_another_process_took_is_refused(tmp_path: Path, postgres: Database) -> None:
    """It fenced that process with its next append, and was fenced by the one after."""
    home = Home(make_home(tmp_path / "web", named(postgres, "[streams.web]\n")))
    with Catalog(postgres.dsn) as catalog, OpenHome(home) as opened:
        opened.append("web", "clicks", [{"n": 1}])
        stream = catalog.stream("web").id
        with OneOfSeveral.open(
            catalog, stream, str(home.wal_folder("web")), name="a", location=home.identity().id, lease_s=LEASE_S
        ) as twin:

            def refused() -> str:
                with pytest.raises((SequencingError, StaleEpoch)) as caught:
                    opened.append("web", "clicks", [{"n": 2}])
                return caught.value.code

            wait_for(lambda: refused() == "writer_name_taken")
            twin.log.append(plain_ops({1: [(plain_table(900), 1, "x")]}, shard_of={900: twin.shards[0]}))
