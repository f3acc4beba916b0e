"""The rows of a backfill are the same from the log alone, and from the lake with the log behind it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partialmethod
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.app.homes import make_home, wait_for
from tests.lake.landing import append_history
from tests.wal.test_records_json import operation, ops, pg, row, schema

from millstream.app.open_home import OpenHome
from millstream.catalog import Catalog
from millstream.delivery.backfill.row_writer import stored_backfill
from millstream.delivery.backfill.rows import OpenLake, Rows, Stopped, Wanted, tables_of, write_rows
from millstream.delivery.definition import Definition
from millstream.delivery.request_fields import ALL_ROWS
from millstream.delivery.service import StreamConsumers
from millstream.errors import LakeBehind, MillstreamError
from millstream.home.home import Home
from millstream.lake.commit_cuts import commit_cut, last_cut
from millstream.lake.folded.current_table import fold_table
from millstream.lake.history_retention import HistoryBound, drop_history
from millstream.lake.layout import LakeLayout, has_current
from millstream.lake.maintenance import maintain_table
from millstream.lake.query.query_session import LakeSession
from millstream.model.ids import SchemaVersion, ShardId, TableId
from millstream.model.positions import Seq
from millstream.model.records import Op
from millstream.model.schema import Column, ReplicaIdentity, TableSchema
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogWriter
from millstream.writers.home_consumers import surroundings

KEYS = '[streams.web]\n[streams.web.keys]\n"public.orders" = ["id"]\n'


class Trimmed(StreamReader):
    """A log that retention has trimmed."""

    first = Seq(1)

    def first_seq(self) -> Seq:
        """Return the first number that is there."""
        return self.first


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenHome]:
    with OpenHome(Home(make_home(tmp_path / "home", KEYS))) as found:
        orders = [
            {"id": n, "total": n / 4, "note": None if n % 3 else f"n{n} ü", "paid": n % 2 == 0} for n in range(20)
        ]
        found.append("web", "orders", orders)
        found.append("web", "log", [{"text": "a"}, {"text": "a"}])
        yield found


def wal_of(folder: Path) -> str:
    return str(Home(folder / "home").wal_folder("web"))


def land(layout: LakeLayout, reader: StreamReader, *, fold: bool) -> Seq:
    """Land everything that the log has."""
    cut, end = last_cut(layout), reader.persisted_upto()
    found: dict[TableId, list[Any]] = {}
    for part in reader.read_between(Seq(0) if cut is None else cut.n, end):
        found.setdefault(part.schema.table_id, []).append(part)
    landed = [append_history(layout, parts[-1].schema, [part.batch for part in parts], end) for parts in found.values()]
    if fold:
        landed += [
            fold_table(layout, parts[-1].schema, end) for parts in found.values() if has_current(parts[-1].schema)
        ]
    commit_cut(layout, end, landed, committed_at=datetime.now(UTC))
    return end


def rows_of(path: Path, wanted: Wanted, reader: StreamReader, lake: OpenLake) -> list[Any]:
    """Return the rows, without what tells their order."""
    total = write_rows(path, wanted, reader, lake, lambda: False)
    rows = Rows(path, wanted.definition)
    found = rows.read(0, 1000)
    rows.close()
    assert [row.number for row in found] == list(range(total))
    return sorted((json.loads(row.record)["row"] | {"group": row.group} for row in found), key=str)


def test_rows_are_read_in_a_folder_of_any_name_and_a_damaged_file_has_a_code(tmp_path: Path) -> None:
    """A `?` or `#` in the home's path ended the name of the file that was opened."""
    folder = tmp_path / "50% #1?a=b"
    folder.mkdir()
    with sqlite3.connect(folder / "rows") as file:
        file.execute("CREATE TABLE numbered (number, source, own, facts)")
    definition = Definition.parse({"name": "c"})
    rows = Rows(folder / "rows", definition)
    assert rows.read(0, 10) == []
    rows.close()
    (folder / "a folder").mkdir()
    with pytest.raises(MillstreamError, match="a folder"):
        Rows(folder / "a folder", definition)


@pytest.mark.sampled
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("where", [None, "paid = true and total < 4"])
def test_the_lake_and_the_log_give_the_same_rows(
    opened: OpenHome, tmp_path: Path, fold: bool, where: str | None
) -> None:
    folder = wal_of(tmp_path)
    reader, trimmed = StreamReader(folder), Trimmed(folder)
    layout = LakeLayout(str(tmp_path / "lake"), "web", reader.stream_id)

    def lake(upto: Seq) -> LakeSession:
        cut = last_cut(layout)
        if cut is None:
            raise LakeBehind("nothing has landed")
        return LakeSession(layout, as_of=Seq(min(upto, cut.n)))

    definition = Definition.parse({"name": "search", "where": where})

    def wanted() -> Wanted:
        upto = reader.persisted_upto()
        return Wanted("web", definition, None, tables_of(reader, definition), upto)

    trimmed.first = Seq(5)
    with pytest.raises(LakeBehind):
        rows_of(tmp_path / "rows", wanted(), trimmed, lake)
    trimmed.first = Seq(land(layout, reader, fold=fold) + 1)
    early = wanted()
    assert rows_of(tmp_path / "rows", early, trimmed, lake) == rows_of(tmp_path / "other", early, reader, lake)
    opened.append("web", "orders", [{"id": n, "total": 0.5, "note": "new", "paid": True} for n in (3, 4, 30)])
    late = wanted()
    found = rows_of(tmp_path / "rows", late, trimmed, lake)
    assert found == rows_of(tmp_path / "other", late, reader, lake)
    assert len([row for row in found if row.get("note") == "new"]) == 3
    land(layout, reader, fold=fold)
    # The lake is ahead of the cursor.
    assert rows_of(tmp_path / "rows", early, trimmed, lake) == rows_of(tmp_path / "other", early, reader, lake)


def test_a_backfill_ends_with_its_reason_once_its_rows_can_no_longer_be_had(opened: OpenHome, tmp_path: Path) -> None:
    """It was accepted, and its rows were tried again for ever: its position only gets older."""
    folder = wal_of(tmp_path)
    reader, trimmed = StreamReader(folder), Trimmed(folder)
    layout = LakeLayout(str(tmp_path / "lake"), "web", reader.stream_id)
    early = land(layout, reader, fold=True)
    trimmed.first = Seq(early + 1)
    definition = Definition.parse({"name": "search", "tables": ["orders"]})
    (orders,) = tables_of(reader, definition).values()
    opened_lakes = []

    def lake(upto: Seq) -> LakeSession:
        opened_lakes.append(upto)
        if len(opened_lakes) == 2:  # the rows are to be written now
            assert drop_history(layout, orders, HistoryBound(late))
            assert maintain_table(layout, "current", orders, now_ms=4 * 10**12).files_deleted
        return LakeSession(layout, as_of=upto)

    home = Home(tmp_path / "home")
    with home.open_catalog() as catalog:
        around = replace(surroundings(home, catalog, "web"), open_reader=lambda: trimmed, open_lake=lake)
        with closing(StreamConsumers(around)) as consumers:
            consumers.call("create", None, {**definition.as_dict(), "start": "latest"})
            opened.append("web", "orders", [{"id": 3, "total": 0.5, "note": "new", "paid": True}])
            late = land(layout, reader, fold=True)
            consumers.call("backfill", "search", {})
            wait_for(lambda: consumers.call("show", "search", None).body["backfill"] is None, seconds=20)
        assert opened_lakes == [early, early]
        with closing(StreamConsumers(around)) as consumers:
            shown = consumers.call("show", "search", None).body
            assert (shown["backfill"], shown["state"]) == (None, "active")
            assert "ended without its rows" in shown["error"]
            assert "its history begins after" in shown["error"]
            (message,) = consumers.call("receive", "search", {}).body["messages"]
            assert json.loads(message["record"])["row"]["id"] == 3
            with pytest.raises(LakeBehind, match="its history begins after"):
                consumers.call("backfill", "search", {})
    with pytest.raises(LakeBehind):
        stored_backfill("web", definition, trimmed, lake, early, ALL_ROWS)


@pytest.mark.usefixtures("opened")
def test_work_that_is_void_leaves_no_file(tmp_path: Path) -> None:
    reader = StreamReader(wal_of(tmp_path))
    definition = Definition.parse({"name": "search"})
    wanted = Wanted("web", definition, None, tables_of(reader, definition), reader.persisted_upto())

    def no_lake(_: Seq) -> LakeSession:
        raise LakeBehind("there is none")

    with pytest.raises(Stopped):
        write_rows(tmp_path / "rows", wanted, reader, no_lake, lambda: True)
    assert not list(tmp_path.glob("rows*"))


@pytest.mark.parametrize("where", [None, "grade = 5"])
def test_rows_of_the_lake_have_their_names_of_then_and_later_columns_defaults(
    tmp_path: Path, where: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lake was behind a rename: its rows got nulls in the renamed column. Its rows come in several batches."""
    monkeypatch.setattr(LakeSession, "stream", partialmethod(LakeSession.stream, batch_rows=2))
    key = Column("id", pa.int64(), pg(20, "bigint"), number=1)
    text = Column("note", pa.string(), pg(25, "text"), number=2)
    grade = Column("grade", pa.int32(), pg(23, "integer"), number=3, filled="5")
    before = schema(5, "orders", key, text)
    after = replace(before, version=SchemaVersion(2), columns=(key, replace(text, name="remark"), grade))
    with Catalog(tmp_path / "catalog.db") as catalog:
        stream = catalog.resolve_stream("web")
        _, epoch = catalog.register_writer(stream)
        with LogWriter.open(
            str(tmp_path / "wal"),
            stream=stream,
            shards=[ShardId(0)],
            epoch=epoch,
            reservations=catalog.reservations(stream),
        ) as log:
            log.append(
                ops(
                    [operation(1, 0x1000)],
                    (before, 0, [row(index, Op.CREATE, id=index, note=f"n{index}") for index in range(3)]),
                )
            )
            reader = Trimmed(str(tmp_path / "wal"))
            layout = LakeLayout(str(tmp_path / "lake"), "web", reader.stream_id)
            reader.first = Seq(land(layout, reader, fold=True) + 1)
            log.append(ops([operation(2, 0x1100)], (before, 0, [row(0, Op.CREATE, id=8, note="n8")])))
            log.append(ops([operation(3, 0x1200)], (after, 0, [row(0, Op.CREATE, id=9, remark="n9")])))
    definition = Definition.parse({"name": "search", "where": where})
    wanted = Wanted("web", definition, None, tables_of(reader, definition), reader.persisted_upto())
    rows = rows_of(tmp_path / "rows", wanted, reader, lambda _: LakeSession(layout))
    told = [(found["id"], found["remark"], found["grade"]) for found in rows]
    older = [(0, "n0", 5), (1, "n1", 5), (2, "n2", 5), (8, "n8", 5)]
    assert told == (older if where else [*older, (9, "n9", None)])


def test_rows_of_an_idle_table_have_a_later_columns_default(tmp_path: Path) -> None:
    """No record has the column, only a definition."""
    key = Column("id", pa.int64(), pg(20, "bigint"), number=1)
    grade = Column("grade", pa.int32(), pg(23, "integer"), number=2, filled="5")
    before = schema(5, "orders", key)
    after = replace(before, version=SchemaVersion(2), columns=(key, grade))
    with Catalog(tmp_path / "catalog.db") as catalog:
        stream = catalog.resolve_stream("web")
        _, epoch = catalog.register_writer(stream)
        with LogWriter.open(
            str(tmp_path / "wal"),
            stream=stream,
            shards=[ShardId(0)],
            epoch=epoch,
            reservations=catalog.reservations(stream),
        ) as log:
            log.append(ops([operation(1, 0x1000)], (before, 0, [row(0, Op.CREATE, id=1)])))
            log.append(ops([operation(2, 0x1100)], (after.as_definition(), 0, [row(0, Op.DEFINITION)])))
    reader = StreamReader(str(tmp_path / "wal"))
    definition = Definition.parse({"name": "search"})
    wanted = Wanted("web", definition, None, tables_of(reader, definition), reader.persisted_upto())
    rows = rows_of(tmp_path / "rows", wanted, reader, lambda _: pytest.fail("the log has all rows"))
    assert [(found["id"], found["grade"]) for found in rows] == [(1, 5)]


@pytest.mark.parametrize("kind", ["keyed", "bag", "records"])
@pytest.mark.parametrize("landed", ["nothing", "records", "rows", "everything"])
def test_rows_of_a_partition_that_left_are_gone_and_others_name_their_partition(
    tmp_path: Path, landed: str, kind: str
) -> None:
    identity = {"keyed": ReplicaIdentity.DEFAULT, "bag": ReplicaIdentity.FULL, "records": ReplicaIdentity.NOTHING}[kind]
    leafy = replace(
        schema(5, "orders", Column("id", pa.int64(), pg(20, "bigint"))),
        key=("id",) if kind == "keyed" else (),
        identity=() if kind == "records" else ("id",),
        replica_identity=identity,
        partitioned=True,
    )

    def change(index: int, op: Op, id_: int, leaf: int | None) -> dict[str, Any]:
        return row(index, op, id=id_, __partition_oid=leaf)

    def left(index: int, leaf: int) -> dict[str, Any]:
        return row(index, Op.PARTITION_LEFT, __partition_oid=leaf, __before=[("partition", f"public.orders_{leaf}")])

    first = [change(0, Op.CREATE, 8, 11), row(1, Op.TRUNCATE), change(2, Op.CREATE, 9, 13), left(3, 13)]
    first += [change(4 + number, Op.CREATE, number, leaf) for number, leaf in enumerate((11, 11, 12, None, 13))]
    moved = [change(0, Op.DELETE, 0, 11), change(1, Op.CREATE, 0, 12), change(2, Op.DELETE, 2, 12)]
    moved += [change(3, Op.CREATE, 2, 11), change(4, Op.DELETE, 3, 12)]
    if kind == "records":
        moved = [change(1, Op.CREATE, 5, 12)]
    moved += [left(6, 11), change(7, Op.CREATE, 6, 11)]
    expected = {0: 12, 4: 13, 6: 11} if kind != "records" else {2: 12, 3: None, 4: 13, 5: 12, 6: 11}
    found = backfilled(tmp_path, leafy, [first, moved], LANDINGS[landed])
    assert {one["row"]["id"]: one["partition_oid"] for one in found} == expected


@pytest.mark.parametrize("landings", [(None, None, None), (True, False, None), (True, None, None), (True, True, None)])
def test_a_row_without_a_key_is_deleted_in_its_own_partition(tmp_path: Path, landings: tuple[bool | None, ...]) -> None:
    """A detached partition had an equal row, which went in its place. So the deleted one was left."""
    columns = (Column("id", pa.int64(), pg(20, "bigint")), Column("half", pa.float64(), pg(701, "double precision")))
    full = replace(schema(5, "orders", *columns), key=(), identity=("id", "half"), partitioned=True)
    full = replace(full, replica_identity=ReplicaIdentity.FULL)

    def change(index: int, op: Op, id_: int, leaf: int | None, **more: Any) -> dict[str, Any]:
        return row(index, op, id=id_, half=0.5, __partition_oid=leaf, **more)

    before = [change(n, Op.CREATE, id_, 11) for n, id_ in enumerate((1, 1, 2, 3))]
    before += [change(4, Op.CREATE, 4, None)]
    before += [change(5 + n, Op.CREATE, id_, 12) for n, id_ in enumerate((1, 2, 3, 3))]
    deleted = [change(0, Op.DELETE, 1, 12), change(1, Op.DELETE, 3, 12), change(2, Op.DELETE, 4, 12)]
    deleted += [change(3, Op.UPDATE, 5, 12, __before=[("id", "2"), ("half", "0.5")])]
    left = [row(0, Op.PARTITION_LEFT, __partition_oid=11, __before=[("partition", "public.orders_1")])]
    found = backfilled(tmp_path, full, [before, deleted, left], landings)
    assert sorted((one["row"]["id"], one["partition_oid"]) for one in found) == [(3, 12), (5, 12)]


LANDINGS = {
    "nothing": (None, None),
    "records": (False, None),
    "rows": (True, None),
    "everything": (None, False),
}


def backfilled(
    tmp_path: Path, table: TableSchema, parts: list[list[dict[str, Any]]], landings: tuple[bool | None, ...]
) -> list[Any]:
    """Return the records of a backfill of a table.

    Args:
        tmp_path: a folder.
        table: the table.
        parts: its records, an operation each.
        landings: for each part, whether the log up to it lands, folded or not. The log has what follows the last landing.
    """
    reader, trimmed = StreamReader(str(tmp_path / "wal")), Trimmed(str(tmp_path / "wal"))
    with Catalog(tmp_path / "catalog.db") as catalog:
        stream = catalog.resolve_stream("web")
        _, epoch = catalog.register_writer(stream)
        layout = LakeLayout(str(tmp_path / "lake"), "web", stream)
        with LogWriter.open(
            str(tmp_path / "wal"),
            stream=stream,
            shards=[ShardId(0)],
            epoch=epoch,
            reservations=catalog.reservations(stream),
        ) as log:
            for number, (part, fold) in enumerate(zip(parts, landings, strict=True), 1):
                log.append(ops([operation(number, 0x1000 * number)], (table, 0, part)))
                if fold is not None:
                    trimmed.first = Seq(land(layout, reader, fold=fold) + 1)
    definition = Definition.parse({"name": "search"})
    wanted = Wanted("web", definition, None, tables_of(reader, definition), reader.persisted_upto())

    def lake(upto: Seq) -> LakeSession:
        cut = last_cut(layout)
        assert cut is not None
        return LakeSession(layout, as_of=Seq(min(upto, cut.n)), partitions=True)

    total = write_rows(tmp_path / "rows", wanted, trimmed, lake, lambda: False)
    found = [json.loads(one.record) for one in Rows(tmp_path / "rows", definition).read(0, 20)]
    assert total == len(found)
    return found
