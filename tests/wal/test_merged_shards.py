"""Rows of one table on several shards: every way of reading gives them in the order of their numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest
from tests.wal.log_writers import small
from tests.wal.plain_operations import MemoryReservations, plain_operations, plain_rows, plain_table

from millstream.export.record_reading import read_records
from millstream.model.ids import ShardId, StreamId
from millstream.model.operations import TableRows, WriteOps
from millstream.model.positions import Seq, StreamToken
from millstream.wal.reader import StreamReader
from millstream.wal.records_json import Cat
from millstream.wal.writing.writer import LogOptions, LogWriter

STREAM = StreamId(UUID(int=7))
TABLE, OTHER = plain_table(1), plain_table(2)
SHARDS = 4
THREADS, CALLS = 8, 60


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> StreamReader:
    """Yield a log to which eight threads appended at once: rows of two tables, on four shards."""
    folder = str(tmp_path_factory.mktemp("wal") / "shop")
    writer = LogWriter.open(
        folder,
        stream=STREAM,
        shards=range(SHARDS),
        epoch=1,
        reservations=MemoryReservations(),
        options=LogOptions(disk_used_max=1.0, segment_bytes=200_000),
    )

    def append(who: int) -> None:
        for number in range(CALLS):
            shard, beside = ShardId((who + number) % SHARDS), ShardId((who + number + 1) % SHARDS)
            if number % 10 == 9:
                tables = [
                    TableRows(table, plain_rows(table, [(0, n, "both") for n in (low, low + 1)]), shard=where)
                    for table, where, low in (
                        (TABLE, shard, 0),
                        (TABLE, beside, 2),
                        (OTHER, shard, 4),
                        (OTHER, beside, 6),
                    )
                ]
                writer.append(WriteOps(plain_operations([1000 * who + number]), tuple(tables), {}))
            else:
                table = TABLE if number % 3 else OTHER
                writer.append(small(number, 1 + number % 3, text=f"{who}", table=table, shard=shard))

    threads = [threading.Thread(target=append, args=(who,)) for who in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    return StreamReader(folder)


def between(log: StreamReader) -> list[tuple[int, int]]:
    found = log.read_between(Seq(0), log.persisted_upto())
    return [(int(part.schema.table_id), seq) for part in found for seq in part.batch["__seq"].to_pylist()]


def of_one_table(log: StreamReader) -> list[tuple[int, int]]:
    return [
        (int(table.table_id), seq)
        for table in (TABLE, OTHER)
        for part in log.read_between(Seq(0), log.persisted_upto(), table=table.table_id)
        for seq in part.batch["__seq"].to_pylist()
    ]


def by_tokens(log: StreamReader) -> list[tuple[int, int]]:
    found = log.read_tokens(StreamToken.scalar(STREAM, Seq(0)), log.vector_token())
    return [(int(part.schema.table_id), seq) for part in found for seq in part.batch["__seq"].to_pylist()]


def past_damage(log: StreamReader) -> list[tuple[int, int]]:
    return between(StreamReader(log._folder, on_damage=pytest.fail))


def without_marks(log: StreamReader) -> list[tuple[int, int]]:
    return between(StreamReader(log._folder, without_mark=True))


def as_calls_do(log: StreamReader) -> list[tuple[int, int]]:
    return [
        (int(table.table_id), seq)
        for table in (TABLE, OTHER)
        for batch in read_records(log, table=table.full_name)
        for seq in batch["__seq"].to_pylist()
    ]


def by_cat(log: StreamReader) -> list[tuple[int, int]]:
    return [(int(line.schema.table_id), line.facts["seq"]) for line in Cat("shop", log).records()]


READS = [between, of_one_table, by_tokens, past_damage, without_marks, as_calls_do, by_cat]


@pytest.mark.sampled
@pytest.mark.parametrize("read", READS)
def test_numbers_of_one_table_only_grow(
    log: StreamReader, read: Callable[[StreamReader], list[tuple[int, int]]]
) -> None:
    found = read(log)
    assert sorted(found) == sorted(by_cat(log))
    assert len(found) == len({*found}) == THREADS * (CALLS * 9 // 10 * 2 + CALLS // 10 * 8)
    for table in (TABLE, OTHER):
        numbers = [seq for of, seq in found if of == table.table_id]
        assert len(numbers) > 100
        assert all(a < b for a, b in pairwise(numbers))


def test_a_merged_piece_is_what_its_shards_have(log: StreamReader) -> None:
    of_shards = {
        row["__seq"]: (row, operation)
        for shard in log.shards
        for part in log.read(shard, log.first_offset(shard))
        for row, operation in zip(
            part.batch.drop_columns("__offset").to_pylist(), part.operation_seq.to_pylist(), strict=True
        )
    }
    for part in log.read_between(Seq(0), log.persisted_upto()):
        rows = part.batch.to_pylist()
        assert (part.first_seq, part.last_seq) == (rows[0]["__seq"], rows[-1]["__seq"])
        assert len(part.hybrid_ns) == len(rows)
        for row, operation in zip(rows, part.operation_seq.to_pylist(), strict=True):
            assert of_shards.pop(row["__seq"]) == (row, operation)
    assert not of_shards


def test_versions_of_a_schema_are_told_apart_in_what_is_merged(tmp_path: Path) -> None:
    older, newer = plain_table(1), plain_table(1, version=2)
    with LogWriter.open(
        str(tmp_path / "shop"),
        stream=STREAM,
        shards=range(2),
        epoch=1,
        reservations=MemoryReservations(),
        options=LogOptions(disk_used_max=1.0),
    ) as writer:
        rows = [
            TableRows(table, plain_rows(table, [(number, 0, str(number))]), shard=ShardId(number % 2))
            for number, table in enumerate([older, newer, newer, older])
        ]
        writer.append(WriteOps(plain_operations([1, 2, 3, 4]), tuple(rows), {}))
    reader = StreamReader(str(tmp_path / "shop"))
    found = list(reader.read_between(Seq(0), Seq(4)))
    assert [seq for part in found for seq in part.batch["__seq"].to_pylist()] == [1, 2, 3, 4]
    assert [part.schema.version for part in found for _ in range(part.batch.num_rows)] == [1, 2, 2, 1]
