"""A snapshot returns what single reads return, and takes as many statements whatever the home has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from millstream.app.repeated_status import StatusCache
from millstream.app.status import collect_status
from millstream.catalog import Catalog, HomeIdentity, TableState
from millstream.catalog.hash_ring_history import RingEra, RingEras
from millstream.catalog.lake_state import lake_state
from millstream.catalog.pipeline_tables import (
    FoldFailures,
    LastFigures,
    QuarantinedTable,
    QuarantineFacts,
    TableFigures,
)
from millstream.catalog.shared_sequence import PostgresSequenceStore
from millstream.catalog.snapshot import CatalogSnapshot, NamesByFingerprint
from millstream.home.home import Home
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.positions import Lsn, Offset, Seq
from millstream.model.replication import ByteEnd
from millstream.protocol.retention import CutOff, HolderKind
from millstream.testing import EmbeddedPostgres
from millstream.testing.catalog import example_schema
from millstream.testing.pytest_plugin import Database

PIPELINE = "lake"
NORTH, SOUTH = HomeIdentity("n", "north:/shop"), HomeIdentity("s", "south:/shop")


@contextlib.contextmanager
def statements() -> Iterator[list[str]]:
    """Collect the statements that any catalog of this process sends."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def fill(catalog: Catalog, name: str) -> StreamId:
    """Make a stream with something of everything that a status reads."""
    stream = catalog.resolve_stream(name)
    catalog.register_writer(stream, "b")
    catalog.register_writer(stream, "a")
    first = catalog.follow_source(stream, 2**64 - 1, name, 1, reached=Lsn(7), history=())
    later = catalog.follow_source(stream, 2**64 - 1, name, 2, reached=Lsn(9), history=[(1, Lsn(8))], before=first)
    catalog.resolve_source(stream, 3, name, 1)
    for number, table in enumerate(("orders", "Orders", "left", "new")):
        row = catalog.table_for(stream, later, 100 + number, "public", table)
        if table != "new":
            catalog.put_schema(stream, replace(example_schema(row.id, later, "id"), name=table))
            catalog.put_schema(stream, replace(example_schema(row.id, later, "id", "x"), name=table))
    orders, other, left, new = (catalog.find_table(stream, "public", t).id for t in ("orders", "Orders", "left", "new"))
    catalog.set_state(left, TableState.GONE, "dropped", details={"cause": "drop"})
    catalog.pause_copy(stream, new)
    QuarantineFacts(catalog, stream, PIPELINE).put(QuarantinedTable(orders, "public.orders", Seq(3), "é", "lake", "h"))
    FoldFailures(catalog, stream, PIPELINE).put(other, code="lake", reason="r", hint="h")
    LastFigures(catalog, stream, PIPELINE).put(
        {orders: TableFigures(1, 2, 3, 5), other: TableFigures(1, None, None, 6)}
    )
    RingEras(catalog, stream).begin(RingEra(1, 4, 64, ("id",), {}, Seq(0)))
    catalog.set_needed_from(stream, PIPELINE, Seq(4))
    catalog.set_landed(stream, PIPELINE, Seq(5))
    catalog.set_needed_from(stream, "mail", Seq(2), kind=HolderKind.CONSUMER)
    catalog.cut_off(stream, CutOff("mail", HolderKind.CONSUMER, Seq(2), Seq(4)))
    where = {ShardId(0): ByteEnd(Offset(10), 5000)}
    catalog.set_needed_from(stream, "Copy", Seq(3), kind=HolderKind.FOLLOWER, position=where)
    for scope, fact, value in (
        (f"pipeline/{stream}", "lake_state", "lake_unavailable"),
        (f"capture/{stream}", "slot_dropped", True),
        (f"capture/{stream}/raw_values", str(orders), {"columns": [], "since_us": 1}),
        (f"retention/{stream}", "moved_us", 12),
        (f"capture/{name}", "given_up", {"code": "x", "message": "it is gone"}),
        (f"pipeline/{name}", "given_up", None),
        (f"capture/{stream}/layout", "1", "not part of a snapshot"),
    ):
        catalog.put_fact(scope, fact, value)
    return stream


def facts_of(catalog: Catalog, stream: StreamId, name: str) -> dict[str, Any]:
    """Return everything that a status reads of a stream, and more."""
    scopes = [f"{kind}/{of}" for of in (stream, name) for kind in ("capture", "pipeline")]
    scopes += [f"retention/{stream}", f"capture/{stream}/raw_values", f"capture/{stream}/layout", "capture/never"]
    ledger = catalog.shared_ledger(stream)
    return {
        "stream": catalog.stream(name),
        "writers": catalog.writers(stream),
        "ledger": None if ledger is None else ledger[0],
        "sources": (catalog.sources(stream), catalog.all_sources(stream)),
        "current": (catalog.current_source(stream), catalog.source_history(stream)),
        "tables": (catalog.tables(stream), catalog.tables(stream, gone=True), catalog.states(stream)),
        "found": catalog.find_table(stream, "public", "Orders"),
        "names": catalog.newest_names(stream),
        "paused": catalog.paused_copies(stream),
        "pipelines": (catalog.pipelines(stream), catalog.needed_from(stream), catalog.landed(stream, PIPELINE)),
        "quarantined": QuarantineFacts(catalog, stream, PIPELINE).all(),
        "failures": FoldFailures(catalog, stream, PIPELINE).all(),
        "figures": LastFigures(catalog, stream, PIPELINE).all(),
        "eras": RingEras(catalog, stream).all(),
        "lake": lake_state(catalog, stream),
        "facts": {scope: catalog.facts(scope) for scope in scopes},
        "fact": [catalog.fact(scope, "given_up", "none") for scope in scopes],
    }


class Snapshots:
    """The promises of a snapshot, over any backend. Subclasses have the place for a new catalog."""

    def test_it_returns_what_single_reads_return(self, place: str | Path) -> None:
        with Catalog(place) as catalog:
            streams = {name: fill(catalog, name) for name in ("shop", "clicks")}
            empty = catalog.resolve_stream("empty")
            catalog.put_fact("capture/never", "given_up", {"code": "y"})
            snapshot = CatalogSnapshot(catalog, pipeline=PIPELINE, names=["never"])
            assert snapshot.streams() == catalog.streams()
            for name, stream in streams.items():
                assert facts_of(snapshot, stream, name) == facts_of(catalog, stream, name)
            for read in (
                "writers",
                "sources",
                "current_source",
                "tables",
                "pipelines",
                "newest_names",
                "paused_copies",
            ):
                assert getattr(snapshot, read)(empty) == getattr(catalog, read)(empty)

    def test_it_shows_one_moment(self, place: str | Path) -> None:
        with Catalog(place) as catalog:
            stream = fill(catalog, "shop")
            before = facts_of(catalog, stream, "shop")
            snapshot = CatalogSnapshot(catalog, pipeline=PIPELINE)
            catalog.set_landed(stream, PIPELINE, Seq(50))
            catalog.put_fact(f"capture/{stream}", "slot_dropped", value=False)
            catalog.set_state(catalog.find_table(stream, "public", "new").id, TableState.STREAMING)
            catalog.resolve_stream("later")
            assert [row.name for row in snapshot.streams()] == ["shop"]
            assert facts_of(snapshot, stream, "shop") == before

    def test_nothing_of_other_homes_is_read(self, place: str | Path) -> None:
        with Catalog(place, home=NORTH) as north, Catalog(place, home=SOUTH) as south:
            mine, others = fill(north, "shop"), fill(south, "clicks")
            snapshot = CatalogSnapshot(north, pipeline=PIPELINE)
            assert [row.id for row in snapshot.streams()] == [mine]
            assert facts_of(snapshot, mine, "shop") == facts_of(north, mine, "shop")
            assert snapshot.tables(others) == snapshot.pipelines(others) == snapshot.writers(others) == []
            read = repr({name: value for name, value in vars(snapshot).items() if name != "_database"})
            assert str(mine) in read
            assert str(others) not in read
            assert "clicks" not in read

    def test_the_number_of_statements_does_not_depend_on_streams_and_tables(self, place: str | Path) -> None:
        with Catalog(place) as catalog:
            counts = []
            for name in ("one", "two", "three"):
                fill(catalog, name)
                with statements() as sent:
                    snapshot = CatalogSnapshot(catalog, pipeline=PIPELINE)
                    for row in snapshot.streams():
                        facts_of(snapshot, row.id, row.name)
                # Two scopes of `facts_of` aren't in a snapshot.
                counts.append(len([text for text in sent if "SELECT" in text and "facts.scope = " not in text]))
            assert counts[0] == counts[1] == counts[2] <= 12

    def test_schemas_are_decoded_once(self, place: str | Path) -> None:
        with Catalog(place) as catalog:
            stream = fill(catalog, "shop")
            known: NamesByFingerprint = {}
            names = CatalogSnapshot(catalog, pipeline=PIPELINE, known_names=known).newest_names(stream)
            assert sorted(known.values()) == sorted(names.values())
            with statements() as sent:
                again = CatalogSnapshot(catalog, pipeline=PIPELINE, known_names=known)
            assert again.newest_names(stream) == names
            assert not [text for text in sent if "arrow" in text]
            # A renamed table has a new schema, and the old name goes.
            table = catalog.find_table(stream, "public", "orders").id
            source = catalog.find_table(stream, "public", "orders").source
            catalog.put_schema(stream, replace(example_schema(table, source, "id"), name="bills"))
            renamed = CatalogSnapshot(catalog, pipeline=PIPELINE, known_names=known).newest_names(stream)
            assert renamed == catalog.newest_names(stream)
            assert renamed[table].name == "bills"
            assert "orders" not in {name.name for name in known.values()}


class TestSqlite(Snapshots):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path / "data" / "catalog.db"


@pytest.mark.siege
class TestPostgres(Snapshots):
    @pytest.fixture
    def place(self, postgres: Database) -> str:
        return postgres.dsn


@pytest.fixture(scope="module")
def oldest() -> Iterator[EmbeddedPostgres]:
    """Yield a server of the oldest version that supports a catalog."""
    with EmbeddedPostgres(14, fsync=False) as server:
        yield server


class TestOldestPostgres(Snapshots):
    @pytest.fixture
    def place(self, oldest: EmbeddedPostgres, request: pytest.FixtureRequest) -> str:
        return oldest.create_database(request.node.name[:60])

    def test_writers_that_share_a_stream_are_in_it(self, place: str) -> None:
        with Catalog(place) as catalog:
            stream = catalog.resolve_stream("shop")
            store = PostgresSequenceStore(catalog.database, stream)
            with contextlib.closing(store):
                writer = store.register("a", "north").writer
                store.recovered(writer, Epoch(1))
                store.draw(writer, Epoch(1), 10, position=Seq(0))
                with statements() as sent:
                    found = CatalogSnapshot(catalog, pipeline=PIPELINE).shared_ledger(stream)
                seen = catalog.shared_ledger(stream)
            assert found is not None
            assert seen is not None
            assert found[0] == seen[0]
            assert found[0].newest >= 10
            assert found[1] <= seen[1]
            assert found[0].view(found[1]) == store.view()
            assert len([text for text in sent if "writers" in text]) == 1


def test_a_status_takes_as_many_reads_of_the_catalog_with_many_streams_as_with_one(tmp_path: Path) -> None:
    counts = []
    for streams in (1, 5):
        folder = tmp_path / str(streams)
        folder.mkdir()
        names = [f"s{number}" for number in range(streams)]
        (folder / "millstream.toml").write_text("".join(f"[streams.{name}]\n" for name in names))
        home = Home(folder)
        home.prepare()
        with home.open_catalog() as catalog:
            for name in names:
                fill(catalog, name)
        cache = StatusCache()
        collect_status(home, cache)
        with statements() as sent:
            status = collect_status(home, cache)
        assert [len(stream["tables"]) for stream in status["streams"]] == [3] * streams
        assert all(stream["tables"][0]["last_change"] for stream in status["streams"])
        counts.append(len([text for text in sent if text.lstrip().startswith("SELECT")]))
    assert counts[0] == counts[1]
