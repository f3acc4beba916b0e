"""The requirements for every catalog, in any database: one suite for all backends.

Subclass it in a test module and provide the place for a new, empty catalog:

    class TestOurs(CatalogConformance):
        @pytest.fixture
        def place(self, tmp_path):
            return tmp_path / "catalog.db"  # or the address of an empty PostgreSQL database

`CatalogConformance` tests the promises of single calls; `catalog_races.CatalogRaces`, used the same way,
lets calls race.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final
from uuid import uuid4

import pyarrow as pa
import pytest
from sqlalchemy import select, text

from millstream.catalog import Catalog, ChunkState, CopyChunk, HomeIdentity, TableState, migrations, sql_tables
from millstream.catalog.database import REVISION
from millstream.catalog.sql_tables import metadata
from millstream.errors import (
    AccessError,
    CatalogError,
    CursorExpired,
    FollowerBehindRetention,
    IngestError,
    InvalidValue,
    StaleEpoch,
    UnknownStream,
    UnknownTable,
    UsageError,
)
from millstream.model.access import EVERYTHING, Rights, is_secret, token_parts
from millstream.model.ids import Epoch, SchemaVersion, ShardId, SourceId, StreamId, TableId, WriterId
from millstream.model.positions import Lsn, Offset, Seq
from millstream.model.replication import ByteEnd
from millstream.model.schema import Column, PgType, TableSchema
from millstream.protocol.retention import CutOff, HolderKind
from millstream.testing.errors import coded

__all__ = ["CatalogConformance", "Place", "WithCatalog", "example_schema"]

Place = str | Path
"""A file (SQLite), or the address of a database (PostgreSQL)."""
_LSN_MAX: Final = 2**63 - 1
_ONE_COLUMN_MORE: Final = """
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade():
    op.add_column("streams", sa.Column("mood", sa.Text, nullable=False, server_default="calm"))
"""


def example_schema(table: TableId, source: SourceId, *names: str) -> TableSchema:
    """Return a schema with columns of these names, the first of them its key."""
    columns = tuple(Column(name, pa.int64(), PgType(20, -1, "bigint")) for name in names)
    return TableSchema(table, SchemaVersion(0), source, "public", "orders", columns, names[:1], names[:1])


def _with_columns(newest: TableSchema, *names: str) -> TableSchema:
    have = {column.name for column in newest.columns}
    added = tuple(Column(name, pa.int64()) for name in names if name not in have)
    return replace(newest, columns=(*newest.columns, *added)) if added else newest


class WithCatalog:
    """The fixtures of both suites."""

    @pytest.fixture
    def place(self) -> Place:
        """Return the place for a new catalog: a path or an address. Subclasses override it."""
        raise NotImplementedError

    @pytest.fixture
    def catalog(self, place: Place) -> Iterator[Catalog]:
        """Yield a new catalog."""
        with Catalog(place) as catalog:
            yield catalog

    @pytest.fixture
    def stream(self, catalog: Catalog) -> StreamId:
        """Return a stream in it."""
        return catalog.resolve_stream("shop")

    @pytest.fixture
    def source(self, catalog: Catalog, stream: StreamId) -> SourceId:
        """Return a source of the stream."""
        return catalog.resolve_source(stream, 2**64 - 1, "shop", 1)


class CatalogConformance(WithCatalog):
    """The promises of single calls."""

    def test_a_stream_keeps_its_id_and_adopts_the_one_of_a_log_whose_catalog_was_lost(self, catalog: Catalog) -> None:
        """An id is a log's; one of another log, or under another name, is refused."""
        first = catalog.resolve_stream("shop")
        assert catalog.resolve_stream("shop") == first == catalog.stream("shop").id
        of_log = StreamId(uuid4())
        assert catalog.resolve_stream("clicks", found=of_log) == of_log
        with pytest.raises(CatalogError, match="has the id"):
            catalog.resolve_stream("shop", found=of_log)
        with pytest.raises(CatalogError, match="is stream clicks"):
            catalog.resolve_stream("visits", found=of_log)
        with pytest.raises(UnknownStream):
            catalog.stream("nobody")
        assert [row.name for row in catalog.streams()] == ["clicks", "shop"]

    def test_homes_see_their_own_streams_and_share_no_name(self, place: Place) -> None:
        """Each home that shares a catalog has its own streams; a second one of a name gets an error with both."""
        north, south = HomeIdentity("n", "north:/shop"), HomeIdentity("s", "south:/shop")
        with Catalog(place, home=north) as first, Catalog(place, home=south) as second:
            stream = first.resolve_stream("shop")
            clicks = second.resolve_stream("clicks")
            for found in (None, StreamId(uuid4())):
                with pytest.raises(CatalogError, match=r"south:/shop|has the id") as caught:
                    second.resolve_stream("shop", found=found)
                assert str(stream) in caught.value.message
                assert "north:/shop" in caught.value.message
            assert [row.name for row in first.streams()] == ["shop"]
            assert [row.name for row in second.streams()] == ["clicks"]
            with pytest.raises(UnknownStream):
                second.stream("shop")
            first.put_fact(f"lake/{stream}", "1", "north's")
            assert second.facts(f"lake/{clicks}") == {}
        moved = HomeIdentity("n", "west:/shop")
        with Catalog(place, home=moved) as catalog:
            assert catalog.resolve_stream("shop") == stream
        # Its home.json was lost; its log is there.
        with Catalog(place, home=HomeIdentity("x", "north:/shop")) as catalog:
            assert catalog.resolve_stream("shop", found=stream) == stream
            assert [row.id for row in catalog.streams()] == [stream]

    def test_a_writer_keeps_its_id_and_gets_a_higher_epoch_each_time(self, catalog: Catalog, stream: StreamId) -> None:
        """An epoch is above every earlier one in the stream, and above the log's."""
        assert catalog.register_writer(stream, "a") == (WriterId(1), Epoch(1))
        assert catalog.register_writer(stream, "b") == (WriterId(2), Epoch(2))
        assert catalog.register_writer(stream, "a") == (WriterId(1), Epoch(3))
        assert [(w.name, w.epoch) for w in catalog.writers(stream)] == [("a", 3), ("b", 2)]
        assert catalog.register_writer(stream, "b", above=Epoch(9)) == (WriterId(2), Epoch(10))
        with pytest.raises(UnknownStream):
            catalog.register_writer(StreamId(uuid4()))

    def test_reservations_only_grow_and_a_fenced_writer_reserves_nothing(
        self, catalog: Catalog, stream: StreamId
    ) -> None:
        """A reservation is never taken back."""
        _, old = catalog.register_writer(stream)
        reservations = catalog.reservations(stream)
        reservations.reserve_to(Seq(_LSN_MAX - 9), epoch=old)
        reservations.reserve_to(Seq(10), epoch=old)
        assert reservations.reserved() == _LSN_MAX - 9
        _, new = catalog.register_writer(stream)
        with pytest.raises(StaleEpoch):
            reservations.reserve_to(Seq(_LSN_MAX), epoch=old)
        assert reservations.reserved() == _LSN_MAX - 9
        reservations.reserve_to(Seq(_LSN_MAX), epoch=new)
        assert reservations.reserved() == _LSN_MAX

    def test_a_position_is_the_greatest_it_was_moved_to(
        self, catalog: Catalog, stream: StreamId, source: SourceId
    ) -> None:
        """For a source and for a pipeline."""
        moves = [5, 3, 5, 2**40, 7, _LSN_MAX, 0]
        for count, lsn in enumerate(moves, 1):
            assert catalog.move_reached(source, Lsn(lsn)) == max(moves[:count]) == catalog.reached(source)
            catalog.set_needed_from(stream, "lake", Seq(lsn))
            catalog.set_landed(stream, "lake", Seq(lsn))
        assert catalog.needed_from(stream) == {"lake": _LSN_MAX}
        assert catalog.landed(stream, "lake") == _LSN_MAX
        assert [s.system_identifier for s in catalog.sources(stream)] == [2**64 - 1]
        with pytest.raises(CatalogError, match="no source"):
            catalog.reached(SourceId(999))
        with pytest.raises(CatalogError, match="no source"):
            catalog.move_reached(SourceId(999), Lsn(1))

    def test_a_stream_follows_one_source_at_a_time_from_where_the_log_stands(
        self, catalog: Catalog, stream: StreamId, source: SourceId
    ) -> None:
        """A new timeline never passes for a source without captured records, and an old one may come back."""
        current = catalog.current_source(stream)
        assert current is not None
        assert (current.id, catalog.source_history(stream)) == (source, None)
        catalog.move_reached(source, Lsn(70))
        history = ((1, Lsn(80)),)
        second = catalog.follow_source(stream, 2**64 - 1, "shop", 2, reached=Lsn(70), history=history)
        current = catalog.current_source(stream)
        assert current is not None
        assert (current.id, current.timeline, current.reached) == (second, 2, 70)
        assert catalog.source_history(stream) == history
        assert (catalog.reached(source), catalog.reached(second)) == (70, 70)
        assert catalog.follow_source(stream, 2**64 - 1, "shop", 1, reached=Lsn(60), history=()) == source
        current = catalog.current_source(stream)
        assert current is not None
        assert (current.id, current.reached, catalog.source_history(stream)) == (source, 70, ())
        other = catalog.resolve_stream("clicks")
        assert catalog.current_source(other) is None

    def test_a_position_counts_only_for_a_log_that_has_what_it_was_stored_for(
        self, catalog: Catalog, source: SourceId
    ) -> None:
        """A log that was cut back or put back lacked changes below it, which capture skipped silently."""
        assert catalog.reached_in(source, {}) == 0
        catalog.move_reached(source, Lsn(50))
        assert catalog.reached_in(source, {}) == 50, "of a slot that began there"
        catalog.move_reached(source, Lsn(90), log_had=Lsn(70))
        catalog.move_reached(source, Lsn(80), log_had=Lsn(75))  # a lower position
        catalog.move_reached(source, Lsn(90))
        for log, reached in ((95, 95), (80, 90), (70, 90), (69, 69), (0, 1)):
            assert catalog.reached_in(source, {source: Lsn(log)}) == reached, log
        assert catalog.reached_in(source, {}) == 1, "capture has run: this isn't a first start"
        catalog.move_reached(source, Lsn(90), log_had=Lsn(90))
        assert catalog.reached_in(source, {source: Lsn(89)}) == 89
        catalog.set_back_reached(source, {source: Lsn(60)})
        assert catalog.reached(source) == catalog.reached_in(source, {source: Lsn(60)}) == 60
        assert catalog.reached_in(source, {source: Lsn(59)}) == 59

    def test_a_position_on_a_new_timeline_counts_for_the_same_logs_until_the_log_has_some_of_it(
        self, catalog: Catalog, stream: StreamId, source: SourceId
    ) -> None:
        """It began with the earlier timeline's position, and with what a log needs for that."""

        def follow(timeline: int, before: SourceId | None, log: int = 0) -> SourceId:
            here = {source: Lsn(log)} if log else {}
            return catalog.follow_source(
                stream,
                2**64 - 1,
                "shop",
                timeline,
                reached=Lsn(90 if before else 0),
                history=(),
                before=before,
                log=here,
            )

        catalog.move_reached(source, Lsn(90), log_had=Lsn(70))
        second = follow(2, source, 80)
        assert [catalog.reached_in(second, {source: Lsn(log)}) for log in (80, 79)] == [90, 79]
        third = follow(3, second, 80)
        assert [catalog.reached_in(third, {source: Lsn(log)}) for log in (80, 79)] == [90, 79]
        catalog.move_reached(third, Lsn(200), log_had=Lsn(150))
        assert catalog.reached_in(third, {source: Lsn(80), third: Lsn(150)}) == 200
        assert catalog.reached_in(third, {source: Lsn(80)}) == 1
        assert follow(3, None) == third
        assert catalog.reached_in(third, {}) == 200, "begun again, whatever the log has"

    def test_a_table_survives_rename_and_a_new_timeline_but_not_drop_and_recreate(
        self, catalog: Catalog, stream: StreamId, source: SourceId
    ) -> None:
        """A relation is identified by its OID within a database, and its id is never reused."""
        first = catalog.table_for(stream, source, 2**32 - 1, "public", "orders")
        promoted = catalog.resolve_source(stream, 2**64 - 1, "shop", 2)
        assert promoted != source
        renamed = catalog.table_for(stream, promoted, 2**32 - 1, "sales", "order")
        assert (renamed.id, renamed.namespace, renamed.name) == (first.id, "sales", "order")
        other_database = catalog.resolve_source(stream, 2**64 - 1, "other", 1)
        assert catalog.table_for(stream, other_database, 2**32 - 1, "public", "orders").id != first.id
        catalog.set_state(first.id, TableState.GONE, "dropped")
        again = catalog.table_for(stream, source, 2**32 - 1, "sales", "order")
        assert again.id not in {first.id, renamed.id}
        assert first.id not in {t.id for t in catalog.tables(stream)}
        assert first.id in {t.id for t in catalog.tables(stream, gone=True)}

    def test_a_table_that_applications_write_is_made_with_its_first_columns_and_grows(
        self, catalog: Catalog, stream: StreamId
    ) -> None:
        """A failure in the middle of it makes nothing; a call without changes makes no new version."""

        def put(name: str, *columns: str) -> TableSchema:
            return catalog.application_table(
                stream, "public", name, shard=ShardId(1), grow=lambda newest: _with_columns(newest, *columns)
            )

        first = put("clicks", "id")
        assert (first.version, first.source, first.full_name) == (1, 0, "public.clicks")
        assert put("clicks", "id") == first
        second = put("clicks", "page")
        assert ([c.name for c in second.columns], second.version) == (["id", "page"], 2)
        row = catalog.find_table(stream, "public", "clicks")
        assert (row.is_captured, row.state, row.shard) == (False, TableState.STREAMING, 1)

        def fail(_: TableSchema) -> TableSchema:
            raise InvalidValue("nothing fits")

        with pytest.raises(InvalidValue):
            catalog.application_table(stream, "public", "others", shard=ShardId(0), grow=fail)
        assert [t.name for t in catalog.tables(stream)] == ["clicks"]
        with pytest.raises(InvalidValue, match="one name"):
            put("Clicks", "id")

    def test_a_name_is_an_applications_or_a_captured_tables(
        self, catalog: Catalog, stream: StreamId, source: SourceId
    ) -> None:
        """The first one has the name: the other is refused, or quarantined with the reason."""

        def write(name: str) -> TableSchema:
            return catalog.application_table(
                stream, "public", name, shard=ShardId(0), grow=lambda newest: _with_columns(newest, "id")
            )

        orders = catalog.table_for(stream, source, 1, "public", "orders")
        with pytest.raises(IngestError, check=coded("table_captured")):
            write("orders")
        clicks = write("clicks")
        later = catalog.table_for(stream, source, 2, "public", "clicks", state=TableState.COPY_REQUESTED)
        assert (later.state, "applications write" in later.reason) == (TableState.QUARANTINED, True)
        catalog.set_state(orders.id, TableState.STREAMING)
        assert catalog.table_for(stream, source, 1, "public", "sales").state is TableState.STREAMING
        renamed = catalog.table_for(stream, source, 1, "public", "clicks")
        assert (renamed.id, renamed.state) == (orders.id, TableState.QUARANTINED)
        assert write("clicks") == clicks
        catalog.set_state(later.id, TableState.COPY_REQUESTED, "retried")
        known = catalog.table_for(stream, source, 2, "public", "clicks")
        assert known.state is TableState.COPY_REQUESTED, "a table that is there keeps its state"

    def test_names_of_any_kind_come_back_sorted_by_code_point(
        self, catalog: Catalog, stream: StreamId, source: SourceId
    ) -> None:
        """The database's collation doesn't matter."""
        names = [
            "Zebra",
            "apple",
            "_under",
            "Äpfel",
            "ein 'Name'",
            'with "quotes"',
            "%s:x",
            "\U0001f600",
            "ep\u0301e\u0301e",
        ]
        for number, name in enumerate(names):
            catalog.table_for(stream, source, number + 1, "Schéma", name)
        assert [t.name for t in catalog.tables(stream)] == sorted(names)
        assert catalog.find_table(stream, "Schéma", "%s:x").relation_oid == 7
        for name in ("lake/Z", "lake/a", "lake/_"):
            catalog.set_needed_from(stream, name, Seq(1))
        assert [p.name for p in catalog.pipelines(stream)] == ["lake/Z", "lake/_", "lake/a"]

    def test_a_state_is_compared_and_set(self, catalog: Catalog, stream: StreamId, source: SourceId) -> None:
        """The call returns whether it was set."""
        table = catalog.table_for(stream, source, 16400, "public", "orders")
        assert table.state is TableState.COPY_REQUESTED
        assert catalog.set_state(table.id, "copying", copy_id="c1", only_from=[TableState.COPY_REQUESTED])
        assert not catalog.set_state(table.id, "streaming", only_from=[TableState.QUARANTINED])
        assert catalog.set_state(table.id, "quarantined", "bad value: 'a\0b'", details={"column": "total\0"})
        found = catalog.find_table(stream, "public", "orders")
        assert (found.state, found.details, found.copy_id) == (TableState.QUARANTINED, {"column": "total\0"}, "c1")
        assert found.reason.startswith("bad value: 'a")
        assert found == catalog.table(table.id)
        with pytest.raises(UnknownTable):
            catalog.find_table(stream, "public", "nothing")

    def test_a_copy_is_paused_while_there_is_one_whatever_state_it_passes_through(
        self, catalog: Catalog, stream: StreamId, source: SourceId
    ) -> None:
        """A pause is lifted once."""
        table = catalog.table_for(stream, source, 16400, "public", "orders").id
        assert catalog.pause_copy(stream, table)
        assert catalog.pause_copy(stream, table), "said twice it's no mistake"
        catalog.set_state(table, TableState.COPYING, copy_id="c1")
        assert catalog.paused_copies(stream) == {table}
        assert (catalog.resume_copy(stream, table), catalog.resume_copy(stream, table)) == (True, False)
        assert catalog.paused_copies(stream) == frozenset()
        catalog.set_state(table, TableState.STREAMING)
        assert not catalog.pause_copy(stream, table)
        assert catalog.paused_copies(stream) == frozenset()

    def test_the_same_facts_are_the_same_schema_version(
        self, catalog: Catalog, stream: StreamId, source: SourceId
    ) -> None:
        """Other facts are the next version."""
        table = catalog.table_for(stream, source, 16400, "public", "orders").id
        one = catalog.put_schema(stream, example_schema(table, source, "id"))
        two = catalog.put_schema(stream, example_schema(table, source, "id", "total"))
        assert (one.version, two.version) == (1, 2)
        assert catalog.latest_schemas(stream) == {table: two}
        assert catalog.put_schema(stream, example_schema(table, source, "id")) == one
        assert catalog.latest_schemas(stream) == {table: one}
        assert catalog.schemas(stream) == {(table, 1): one, (table, 2): two}
        with pytest.raises(UnknownTable):
            catalog.put_schema(StreamId(uuid4()), example_schema(table, source, "id"))

    def test_chunks_are_written_all_or_none_and_come_back_as_they_were(
        self, catalog: Catalog, stream: StreamId, source: SourceId
    ) -> None:
        """New and existing ones, in one call."""
        table = catalog.table_for(stream, source, 16400, "public", "orders").id
        chunks = [CopyChunk(table, "c1", 1, None, "[5]"), CopyChunk(table, "c1", 2, "[5]", None, facts={"x": [1]})]
        catalog.put_chunks(chunks)
        assert catalog.chunks(table, "c1") == chunks
        read = CopyChunk(table, "c1", 1, None, "[5]", ChunkState.READ, "10:20:", Lsn(_LSN_MAX), 2**40, 2**41)
        catalog.put_chunks([read])
        assert catalog.chunks(table, "c1") == [read, chunks[1]]
        with pytest.raises(CatalogError):
            catalog.put_chunks([CopyChunk(table, "c1", 1), CopyChunk(TableId(999), "c1", 1)])
        assert catalog.chunks(table, "c1") == [read, chunks[1]]
        catalog.put_chunks([CopyChunk(table, "c2", n, f"[{n}]", f"[{n + 1}]") for n in range(1500)])
        assert [c.number for c in catalog.chunks(table, "c2")] == list(range(1500))
        catalog.drop_chunks(table)
        assert catalog.chunks(table, "c1") == catalog.chunks(table, "c2") == []

    def test_a_holder_that_is_released_holds_nothing(self, catalog: Catalog, stream: StreamId) -> None:
        """The others go on."""
        catalog.set_needed_from(stream, "lake", Seq(5))
        catalog.set_needed_from(stream, "table:1", Seq(3))
        catalog.release(stream, "table:1")
        assert catalog.needed_from(stream) == {"lake": 5}

    def test_who_was_cut_off_holds_nothing_and_is_told_so_until_it_is_released(
        self, catalog: Catalog, stream: StreamId
    ) -> None:
        """Each kind of holder gets its own error, as often as it asks."""
        catalog.set_needed_from(stream, "lake", Seq(50))
        for name, kind in (("mail", HolderKind.CONSUMER), ("copy", HolderKind.FOLLOWER)):
            catalog.set_needed_from(stream, name, Seq(5), kind=kind)
            assert catalog.cut_off(stream, CutOff(name, kind, Seq(5), Seq(31)))
        assert catalog.needed_from(stream) == {"lake": 50}
        for _ in range(2):
            with pytest.raises(CursorExpired, match="consumer mail") as caught:
                catalog.set_needed_from(stream, "mail", Seq(40), kind=HolderKind.CONSUMER)
            assert caught.value.details == {"holder": "mail", "needed_from": 5, "first": 31}
            with pytest.raises(FollowerBehindRetention, match="follower copy"):
                catalog.set_needed_from(stream, "copy", Seq(40), kind=HolderKind.FOLLOWER)
            with pytest.raises(FollowerBehindRetention, match="follower copy"):
                catalog.set_landed(stream, "copy", Seq(40))
        assert {p.name: (p.kind, p.cut_off_at) for p in catalog.pipelines(stream)} == {
            "lake": (HolderKind.PIPELINE, None),
            "mail": (HolderKind.CONSUMER, 31),
            "copy": (HolderKind.FOLLOWER, 31),
        }
        catalog.release(stream, "mail")
        catalog.set_needed_from(stream, "mail", Seq(31), kind=HolderKind.CONSUMER)
        assert catalog.needed_from(stream) == {"lake": 50, "mail": 31}

    def test_who_came_on_in_time_is_not_cut_off(self, catalog: Catalog, stream: StreamId) -> None:
        """Nor is a holder that never registered."""
        gone = CutOff("mail", HolderKind.CONSUMER, Seq(5), Seq(31))
        assert not catalog.cut_off(stream, gone)
        catalog.set_needed_from(stream, "mail", Seq(5), kind=HolderKind.CONSUMER)
        catalog.set_needed_from(stream, "mail", Seq(6), kind=HolderKind.CONSUMER)
        assert not catalog.cut_off(stream, gone)
        assert catalog.needed_from(stream) == {"mail": 6}

    def test_a_follower_holds_by_where_it_stands_on_each_shard_as_it_said_last(
        self, catalog: Catalog, stream: StreamId
    ) -> None:
        """It isn't cut off once its position has changed."""
        early, late = (
            {ShardId(0): ByteEnd(Offset(10), 5000), ShardId(1): ByteEnd(Offset(base), place)}
            for base, place in ((7, 4200), (9, 0))
        )
        for position in (early, late):
            catalog.set_needed_from(stream, "copy", Seq(20), kind=HolderKind.FOLLOWER, position=position)
            assert [(p.needed_from, p.position) for p in catalog.pipelines(stream)] == [(20, position)]
        catalog.set_needed_from(stream, "copy", Seq(3), kind=HolderKind.FOLLOWER)
        assert [(p.needed_from, p.position) for p in catalog.pipelines(stream)] == [(20, late)]
        assert not catalog.cut_off(stream, CutOff("copy", HolderKind.FOLLOWER, Seq(20), Seq(8), early))
        assert catalog.cut_off(stream, CutOff("copy", HolderKind.FOLLOWER, Seq(20), Seq(8), late))

    def test_facts_are_kept_by_scope(self, catalog: Catalog) -> None:
        """Any JSON-able value, also one that is large or full of odd characters."""
        catalog.put_fact("a", "x", {"n": 1})
        catalog.put_fact("a", "x", [1, None, "\0", "é\U0001f600", "y" * 3_000_000])
        catalog.put_fact("b", "x", "other")
        for value in ("first", "second"):
            catalog.add_fact("b", "once", value)
        assert catalog.fact("b", "once") == "first"
        catalog.drop_fact("b", "once")
        assert catalog.fact("a", "x")[:4] == [1, None, "\0", "é\U0001f600"]
        assert len(catalog.fact("a", "x")[4]) == 3_000_000
        assert catalog.facts("b") == {"x": "other"}
        catalog.drop_fact("a", "x")
        assert catalog.fact("a", "x", "none") == "none"

    def test_what_raises_has_changed_nothing(self, catalog: Catalog) -> None:
        """A transaction is undone whole when its block raises, by whatever."""
        catalog.put_fact("a", "x", 1)

        def broken() -> None:
            with catalog.database.write() as connection:
                connection.execute(text("UPDATE facts SET value = '2'"))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            broken()
        assert catalog.fact("a", "x") == 1
        with catalog.database.read() as first, Catalog(self._same(catalog)) as other:
            seen = first.execute(text("SELECT value FROM facts")).scalar()
            other.put_fact("a", "x", 3)
            assert first.execute(text("SELECT value FROM facts")).scalar() == seen
        assert catalog.fact("a", "x") == 3

    def test_of_a_token_the_hash_is_kept_and_its_text_is_given_once(self, catalog: Catalog) -> None:
        """With its rights and its expiry; it can be revoked by name or by id."""
        rights = Rights.parse(["shop=read", "shop=write", "*=admin"])
        made, held = catalog.create_access_token(rights, name="grafana", expires_us=5)
        other, _ = catalog.create_access_token(Rights.parse(["shop=write"]))
        assert other.name == other.id
        parts = token_parts(held)
        assert parts is not None
        assert parts[0] == made.id
        assert is_secret(parts[1], made.digest)
        assert {one.name: one for one in catalog.access_tokens()} == {"grafana": made, other.id: other}
        with catalog.database.read() as connection:
            kept = connection.execute(select(sql_tables.access_tokens)).all()
        assert parts[1] not in repr(kept) + repr(made)
        with pytest.raises(AccessError, check=coded("access_token_exists")):
            catalog.create_access_token(rights, name="grafana")
        with pytest.raises(UsageError):
            catalog.create_access_token(rights, name="no spaces")
        assert catalog.revoke_access_token("grafana") == made
        assert catalog.revoke_access_token(other.id) == other
        assert catalog.access_tokens() == []
        with pytest.raises(AccessError, check=coded("unknown_access_token")):
            catalog.revoke_access_token("grafana")
        catalog.create_access_token(rights, name="grafana")

    def test_a_home_has_tokens_of_its_own(self, place: Place) -> None:
        """If several homes share a catalog, no home accepts another's token."""
        with (
            Catalog(place, home=HomeIdentity("one", "a:/one")) as one,
            Catalog(place, home=HomeIdentity("two", "b:/two")) as two,
        ):
            made, _ = one.create_access_token(EVERYTHING, name="ops")
            two.create_access_token(EVERYTHING, name="ops")
            assert one.access_tokens() == [made]
            with pytest.raises(AccessError, check=coded("unknown_access_token")):
                two.revoke_access_token(made.id)

    def test_homes_may_know_one_token_each_with_rights_of_its_own(self, place: Place) -> None:
        """Revoking it in one home doesn't affect the other."""
        with (
            Catalog(place, home=HomeIdentity("one", "a:/one")) as one,
            Catalog(place, home=HomeIdentity("two", "b:/two")) as two,
        ):
            made, held = one.create_access_token(EVERYTHING, name="nodes")
            given, _ = two.create_access_token(Rights.parse(["shop=read"]), name="others", given=held)
            assert (given.id, given.digest) == (made.id, made.digest)
            assert two.access_tokens() == [given]
            with pytest.raises(AccessError, check=coded("access_token_exists")):
                two.create_access_token(EVERYTHING, name="again", given=held)
            assert one.revoke_access_token("nodes") == made
            assert two.access_tokens() == [given]

    def test_a_later_migration_keeps_the_content_and_shuts_out_older_code(self, place: Place, tmp_path: Path) -> None:
        """It runs after the ones that the catalog has."""
        scripts = tmp_path / "migrations"
        shutil.copytree(Path(migrations.__file__).parent, scripts)
        (scripts / "versions" / "0002_one_column_more.py").write_text(_ONE_COLUMN_MORE)
        with Catalog(place) as catalog:
            stream = catalog.resolve_stream("shop")
            with catalog.database.write() as connection:
                migrations.upgrade(connection, scripts)
            with catalog.database.read() as connection:
                assert connection.execute(text("SELECT id, mood FROM streams")).all() == [(str(stream), "calm")]
        with pytest.raises(CatalogError, check=coded("catalog_too_new")) as caught:
            Catalog(place)
        assert caught.value.details["found"] == "0002"

    def test_a_newer_schema_is_refused_and_left_alone(self, place: Place) -> None:
        """By its version number."""
        with Catalog(place) as catalog, catalog.database.write() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        for _ in range(2):
            with pytest.raises(CatalogError, check=coded("catalog_too_new")) as caught:
                Catalog(place)
            assert caught.value.details["found"] == "9999"

    def test_the_migrations_make_the_tables_that_the_code_expects(self, catalog: Catalog) -> None:
        """Alembic finds nothing to add, to remove or to change, and the newest migration is the required revision."""
        from alembic.autogenerate import compare_metadata
        from alembic.migration import MigrationContext
        from alembic.script import ScriptDirectory

        def is_ours(name: str | None, kind: str, _: object) -> bool:
            # PostgreSQL's functions that draw numbers use these two, and no code does.
            return kind != "table" or name not in {"number_ceilings", "number_servers"}

        with catalog.database.read() as connection:
            context = MigrationContext.configure(connection, opts={"include_name": is_ours})
            assert compare_metadata(context, metadata) == []
        assert ScriptDirectory(str(Path(migrations.__file__).parent)).get_current_head() == REVISION

    @staticmethod
    def _same(catalog: Catalog) -> Place:
        address = catalog.database.address
        return Path(catalog.database.place) if address is None else address
