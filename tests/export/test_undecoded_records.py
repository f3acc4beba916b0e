"""Readers of one table, at records of it that nothing has decoded: they were captured while it was quarantined."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest
from tests.wal.plain_operations import MemoryReservations
from tests.wal.test_records_json import ITEMS, RAW, operation, ops, row

from millstream.errors import MillstreamError
from millstream.export.follow_log import FollowedTables, follow_steps, position_of
from millstream.export.record_reading import read_records
from millstream.model.ids import Epoch, SchemaVersion, ShardId, StreamId
from millstream.model.positions import Seq, StreamToken
from millstream.model.records import Op
from millstream.testing.errors import coded
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogWriter

STREAM = StreamId(UUID(int=7))
ASIDE = replace(RAW, table_id=ITEMS.table_id, version=SchemaVersion(2), name=ITEMS.name)
AGAIN = replace(ITEMS, version=SchemaVersion(3))
OTHER = replace(ITEMS, table_id=RAW.table_id, name="other")
NAME = ITEMS.full_name


@pytest.fixture
def log(tmp_path: Path) -> Iterator[StreamReader]:
    """Yield a log: two decoded records, three raw ones in two operations, the second with another table's, and one."""
    folder = str(tmp_path / "wal")
    made = LogWriter.open(folder, stream=STREAM, shards=[ShardId(0)], epoch=Epoch(1), reservations=MemoryReservations())
    with closing(made) as writer:
        writer.append(ops([operation(1, 8)], (ITEMS, 0, [row(0, Op.CREATE, id=1), row(1, Op.CREATE, id=2)])))
        others = (OTHER, 0, [row(0, Op.CREATE, id=7), row(2, Op.CREATE, 1, id=8), row(3, Op.CREATE, 1, id=9)])
        raw = [row(1, Op.CREATE, message=b"I"), row(0, Op.CREATE, 1, message=b"I"), row(1, Op.UPDATE, 1, message=b"U")]
        writer.append(ops([operation(2, 16), operation(3, 24)], (ASIDE, 0, raw), others))
        writer.append(ops([operation(4, 32)], (AGAIN, 0, [row(0, Op.CREATE, id=3)])))
        yield StreamReader(folder)


def token(seq: int) -> str:
    return str(StreamToken.scalar(STREAM, Seq(seq)))


def ids(batches: Iterator[pa.RecordBatch], found: list[int]) -> None:
    for batch in batches:
        found += batch["id"].to_pylist()


def followed(log: StreamReader, table: str | None, after: str) -> Iterator[tuple[pa.RecordBatch, str]]:
    for batch, at in follow_steps(log, FollowedTables(table), position_of(log, after)):
        if batch is None:
            return
        yield batch, str(at)


def test_a_read_of_the_table_ends_there_and_goes_on_behind(log: StreamReader) -> None:
    found: list[int] = []
    with pytest.raises(MillstreamError, check=coded("table_quarantined")) as raised:
        ids(read_records(log, table=NAME), found)
    assert found == [1, 2]
    assert raised.value.details == {"table": NAME, "before": token(2), "behind": token(8)}
    ids(read_records(log, table=NAME, upto=token(2)), found)
    ids(read_records(log, table=NAME, after=token(8)), found)
    assert found == [1, 2, 1, 2, 3]


def test_a_read_that_ends_among_them_names_the_end_of_what_it_reads(log: StreamReader) -> None:
    with pytest.raises(MillstreamError, check=coded("table_quarantined")) as raised:
        list(read_records(log, table=NAME, after=token(2), upto=token(4)))
    assert (raised.value.details["before"], raised.value.details["behind"]) == (token(2), token(4))


def test_a_read_between_vector_tokens_ends_there(log: StreamReader) -> None:
    short = token(0).partition(".")[0]
    found: list[int] = []
    with pytest.raises(MillstreamError, check=coded("table_quarantined")) as raised:
        ids(read_records(log, table=NAME, upto=f"{short}.m2~1.9"), found)
    assert found == [1, 2]
    behind = raised.value.details["behind"]
    assert behind == f"{short}.m2~1.8"
    ids(read_records(log, table=NAME, after=behind), found)
    assert found == [1, 2, 3]


def test_a_follower_of_the_table_ends_there_and_goes_on_behind(log: StreamReader) -> None:
    found: list[tuple[list[int], str]] = []
    with pytest.raises(MillstreamError, check=coded("table_quarantined")) as raised:
        found.extend((batch["id"].to_pylist(), at) for batch, at in followed(log, NAME, token(0)))
    assert found == [([1, 2], token(2))]
    assert raised.value.details == {"table": NAME, "before": token(2), "behind": token(8)}
    assert [batch["id"].to_pylist() for batch, _ in followed(log, NAME, token(8))] == [[3]]


def test_readers_of_all_tables_get_them(log: StreamReader) -> None:
    whole = list(read_records(log))
    assert sum(batch.num_rows for batch in whole if "message" in batch.schema.names) == 3
    assert [batch.num_rows for batch, _ in followed(log, None, token(0))] == [batch.num_rows for batch in whole]
