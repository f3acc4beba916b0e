"""The events of a tail, for operations of any shape: what each id promises, and what a predicate lets through."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.export.test_stretches import STREAM, groups, write
from tests.wal.plain_operations import MemoryReservations
from tests.wal.test_records_json import MESSAGES, RAW, operation, ops, pg, row, schema

from millstream.errors import InvalidValue
from millstream.export.follow_log import position_of
from millstream.model.ids import Epoch, ShardId
from millstream.model.operations import OperationKind
from millstream.model.positions import StreamToken
from millstream.model.records import Op
from millstream.model.schema import Column, ReplicaIdentity
from millstream.serving.tail.events import TailFilter, tail_events
from millstream.wal.reader import StreamReader
from millstream.wal.records_json import Cat
from millstream.wal.writing.writer import LogWriter

DRAWN = list[list[list[tuple[str, int]]]]


def events_of(folder: str, wanted: TailFilter, after: str) -> list[tuple[str, dict[str, Any]]]:
    reader = StreamReader(folder)
    found = []
    for event in tail_events(reader, "shop", wanted, position_of(reader, after), reader.persisted_upto()):
        if event:
            first, second = event.decode().removesuffix("\n\n").split("\n")
            found.append((first.removeprefix("id: "), json.loads(second.removeprefix("data: "))))
    return found


def places(events: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, int]]:
    return [(data["shard"], data["offset"]) for _, data in events]


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    groups,
    st.sampled_from([None, ["public.orders"], ["orders", 'public."Order Items"']]),
    st.sampled_from([None, "id >= 4"]),
    st.booleans(),
)
def test_resuming_at_any_event_repeats_a_begun_operation_and_nothing_else(
    drawn: DRAWN, tables: list[str] | None, where: str | None, appends: bool
) -> None:
    with TemporaryDirectory() as folder:
        operation_of = {record.id: record.operation for record in write(folder, drawn, appends=appends)}
        start = str(StreamToken.parse(f"{STREAM.hex[:8]}.s0"))
        wanted = TailFilter(tables, where)
        whole = events_of(folder, wanted, start)
        lines = [json.loads(json.dumps(line)) for line in Cat("shop", StreamReader(folder)).lines()]
        kept = [line for line in lines if where is None or line["row"]["id"] >= 4]
        if tables == ["public.orders"]:
            kept = [line for line in kept if line["table"] == "public.orders"]
        assert [data for _, data in whole] == kept  # in the order of `wal cat`
        for number, (token, data) in enumerate(whole):
            again = places(events_of(folder, wanted, token))
            own = [
                i
                for i, (_, one) in enumerate(whole)
                if operation_of[one["row"]["id"]] == operation_of[data["row"]["id"]]
            ]
            assert again == places(whole)[number + 1 if number == own[-1] else own[0] :]


@settings(max_examples=10, deadline=None)
@given(groups, st.booleans())
def test_ids_are_the_ends_of_operations(drawn: DRAWN, appends: bool) -> None:
    with TemporaryDirectory() as folder:
        write(folder, drawn, appends=appends)
        ends = [0]
        for operation_records in (records for group in drawn for records in group):
            ends.append(ends[-1] + len(operation_records))
        whole = events_of(folder, TailFilter(None, None), f"{STREAM.hex[:8]}.s0")
        expected = [
            end if number + 1 == end - before else before
            for before, end in pairwise(ends)
            for number in range(end - before)
        ]
        assert [int(token.rpartition(".s")[2]) for token, _ in whole] == expected


NOTES = schema(
    5, "notes", Column("id", pa.int64(), pg(20, "bigint")), Column("status", pa.string(), pg(25, "text")),
    Column("score", pa.decimal128(12, 2), pg(1700, "numeric")),
)  # fmt: skip


def delivered(folder: Path, where: str, records: list[dict[str, Any]], table: Any = NOTES) -> list[int]:
    """Write records, one operation, and return the indexes of those that the predicate lets through."""
    with LogWriter.open(
        str(folder), stream=STREAM, shards=[ShardId(0)], epoch=Epoch(1), reservations=MemoryReservations()
    ) as log:
        kind = OperationKind.MESSAGE if table is MESSAGES else OperationKind.TRANSACTION
        log.append(ops([operation(1, 8, kind)], (table, 0, records)))
    events = events_of(str(folder), TailFilter(None, where), f"{STREAM.hex[:8]}.s0")
    return [data["offset"] for _, data in events]


def test_a_record_on_which_the_predicate_cannot_be_evaluated_is_delivered(tmp_path: Path) -> None:
    records = [
        row(0, Op.CREATE, id=1, status="bot"),
        row(1, Op.CREATE, id=2, status="man"),
        row(2, Op.DELETE, id=2),  # without the column
        row(3, Op.UPDATE, id=3, status=None, __unchanged=["status"]),  # unchanged TOAST
        row(4, Op.UPDATE, id=3, status="man", __unchanged=["score"]),
        row(5, Op.TRUNCATE),
        row(6, Op.CREATE, id=4, status=None),
        row(7, Op.CREATE, id=5, status="man", score=None, __exact=[("score", "NaN")]),
    ]
    assert delivered(tmp_path / "one", "status = 'bot'", records) == [0, 2, 3, 5]
    assert delivered(tmp_path / "two", "id > 2", records) == [3, 4, 5, 6, 7]
    assert delivered(tmp_path / "three", "id = 1 or score > 3", records) == [0, 2, 4, 5, 7]


def test_a_delete_with_its_whole_row_is_evaluated(tmp_path: Path) -> None:
    whole = replace(NOTES, replica_identity=ReplicaIdentity.FULL, identity=("id", "status", "score"))
    records = [row(0, Op.DELETE, id=1, status="bot"), row(1, Op.DELETE, id=2, status="man")]
    assert delivered(tmp_path / "wal", "status = 'bot'", records, whole) == [0]


def test_a_table_without_the_column_has_null_there(tmp_path: Path) -> None:
    records = [row(0, Op.CREATE, id=1, status="bot"), row(1, Op.DELETE, id=1)]
    assert delivered(tmp_path / "one", "missing = 'x'", records) == []
    assert delivered(tmp_path / "two", "missing is null", records) == [0, 1]
    message = [row(0, Op.MESSAGE, prefix="p", content=b"c", transactional=False)]
    assert delivered(tmp_path / "three", "prefix = 'p'", message, MESSAGES) == [0]
    assert delivered(tmp_path / "four", "status = 'bot'", message, MESSAGES) == []


def test_a_partition_that_left_passes_every_predicate(tmp_path: Path) -> None:
    left = row(1, Op.PARTITION_LEFT, __partition_oid=16_500, __before=[("partition", "public.notes_1")])
    records = [row(0, Op.CREATE, id=1, status="man", __partition_oid=16_500), left]
    assert delivered(tmp_path, "status = 'bot'", records, replace(NOTES, partitioned=True)) == [1]


def test_records_that_could_not_be_decoded_are_delivered(tmp_path: Path) -> None:
    assert delivered(tmp_path / "wal", "status = 'bot'", [row(0, Op.CREATE, message=b"I")], RAW) == [0]


def test_a_literal_of_another_type_is_refused_where_the_table_is_known() -> None:
    with pytest.raises(InvalidValue) as refused:
        TailFilter(None, "id = 'text'").check(lambda: [NOTES])
    assert refused.value.details["column"] == "id"
    TailFilter(["other"], "id = 'text'").check(lambda: [NOTES])
    TailFilter(None, "id = 1 and missing = 'x'").check(lambda: [NOTES])
    with pytest.raises(InvalidValue):
        TailFilter(None, "id =")
