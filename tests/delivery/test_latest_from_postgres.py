"""A consumer of kind `latest` of a real table: large values that updates leave out, key changes, deletes and TRUNCATE."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.capture.capture_stage import Stage, make_config
from tests.delivery.test_latest import Table
from tests.delivery.test_record_reader import read_all, reader_of

from millstream.catalog import Catalog
from millstream.delivery.records.record_messages import KnownRow, Origin, merged
from millstream.model.ids import SchemaVersion, ShardId, SourceId, TableId
from millstream.model.schema import Column, TableSchema
from millstream.protocol.delivery import LatestConsumer, Limits, Message, State
from millstream.testing.postgres import EmbeddedPostgres
from millstream.wal.writing.writer import LogWriter

SETUP = (
    "create table public.notes (id bigint primary key, paid boolean, body text)",
    "alter table public.notes alter body set storage external",
    "insert into public.notes select n, true, repeat(n::text, 5000) from generate_series(1, 4) n",
)
CHANGES = (
    "update public.notes set paid = false where id <= 2",
    "update public.notes set id = 12, body = 'short' where id = 2",
    "delete from public.notes where id = 3",
    "insert into public.notes values (5, null, repeat('five', 5000))",
    "update public.notes set paid = true where id = 5",
)
LARGE = {1: "1" * 5000, 4: "4" * 5000, 5: "five" * 5000}


def merge(older: Message, newer: Message) -> Message:
    assert isinstance(older.origin, Origin)
    assert isinstance(newer.origin, Origin)
    if not newer.origin.is_partial:
        return newer
    record = older.origin.update or older.origin.record
    assert record is not None
    return merged(KnownRow(record, older.origin.schema), newer, newer.origin)


def received(consumer: LatestConsumer, folder: Path, **fields: Any) -> list[dict[str, Any]]:
    """Return the records of all messages, which are acknowledged."""
    messages, upto = read_all(reader_of(folder, kind="latest", **fields), consumer.read_upto)
    consumer.offer(messages, upto)
    answer = consumer.receive(0, 100)
    consumer.ack([delivery.delivery_id for delivery in answer])
    return [json.loads(delivery.message.origin.record) for delivery in answer]


def test_a_copy_of_a_table_is_kept_by_its_newest_rows(postgres_server: EmbeddedPostgres, tmp_path: Path) -> None:
    name = f"latest_{os.getpid()}"
    dsn = postgres_server.create_database(name)
    with ExitStack() as stack:
        stack.callback(postgres_server.drop_database, name)
        catalog = stack.enter_context(Catalog(tmp_path / "catalog.db"))
        stream = catalog.resolve_stream("shop")
        _, epoch = catalog.register_writer(stream)
        writer = LogWriter.open(
            str(tmp_path / "wal"),
            stream=stream,
            shards=[ShardId(0)],
            epoch=epoch,
            reservations=catalog.reservations(stream),
        )
        log: Any = stack.enter_context(writer)
        stage = Stage(dsn, tmp_path, catalog, make_config(dsn, tmp_path, name), log)
        stage.sql(*SETUP)
        stage.catch_up()
        early, late, matching = (LatestConsumer(Limits(), State.begin(0), run=1, merge=merge) for _ in range(3))
        table = Table()
        for record in received(early, tmp_path):
            table.apply(record["op"], record["row"], record["unchanged"])
        stage.sql(*CHANGES)
        stage.catch_up()
        changed = received(early, tmp_path)
        for record in changed:
            table.apply(record["op"], record["row"], record["unchanged"])
        whole = received(late, tmp_path)
        paid = received(matching, tmp_path, where="paid = true")
        stage.sql("truncate public.notes")
        stage.catch_up()
        (truncate,) = received(late, tmp_path)
    first = next(record for record in changed if record["row"]["id"] == 1)
    assert (first["unchanged"], "body" in first["row"]) == (["body"], False)
    rows = {
        1: {"id": 1, "paid": "f", "body": LARGE[1]},
        4: {"id": 4, "paid": "t", "body": LARGE[4]},
        5: {"id": 5, "paid": "t", "body": LARGE[5]},
        12: {"id": 12, "paid": "f", "body": "short"},
    }
    assert table.rows == rows
    # The large values of undelivered records come with the newest ones; deletes win.
    assert {record["row"]["id"]: record["row"] for record in whole if record["op"] == "u"} == rows
    assert sorted(record["row"]["id"] for record in whole if record["op"] == "d") == [2, 3]
    assert {record["row"]["id"]: record["op"] for record in paid} == {1: "d", 2: "d", 3: "d", 4: "u", 5: "u", 12: "d"}
    assert truncate["op"] == "t"


def test_a_value_left_unchanged_is_completed_from_its_own_column_alone() -> None:
    older, newer = (
        TableSchema(
            TableId(1),
            SchemaVersion(version),
            SourceId(1),
            "public",
            "t",
            tuple(Column(name, pa.string(), number=number) for number, name in enumerate(names, 1)),
        )
        for version, names in enumerate((("id", "a", "b", "c"), ("id", "b", "a", "c")))
    )
    known = {"op": "u", "row": {"id": "1", "a": "A", "b": "B", "c": "C"}, "unchanged": [], "exact": {}}
    update = {"op": "u", "row": {"id": "1", "b": "x"}, "unchanged": ["a", "c"], "exact": {}}
    origin = Origin("g", json.dumps(update), is_partial=True, schema=newer)
    message = Message(0, 0, "id", ("g",), 1, barrier=False, size=1, origin=origin)
    for schema, row, unchanged in ((newer, {"a": "A", "b": "x", "c": "C"}, []), (older, {"b": "x", "c": "C"}, ["a"])):
        whole = merged(KnownRow(json.dumps(known), schema), message, origin).origin
        assert isinstance(whole, Origin)
        assert whole.record is not None
        found = json.loads(whole.record)
        assert (found["row"], found["unchanged"]) == ({"id": "1", **row}, unchanged)
