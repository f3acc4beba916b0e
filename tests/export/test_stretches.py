"""Following a log: for operations of any shape, what each token promises to a reader that resumes from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wal.plain_operations import MemoryReservations
from tests.wal.test_records_json import ITEMS, ORDERS, operation, ops, row

from millstream.errors import TokenFromFuture, UsageError
from millstream.export.follow_log import FollowedTables, follow_steps, position_of
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.positions import Seq, StreamToken
from millstream.model.records import Op
from millstream.wal.reader import StreamReader
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

STREAM = StreamId(UUID(int=7))
TABLES = {"a": ORDERS, "b": ITEMS}
SMALL = LogOptions(frame_bytes_max=200, disk_used_max=1.0)

groups = st.lists(
    st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1)), min_size=1, max_size=5), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=4,
)
"""Commit groups of operations; for each of their records, its table and its shard."""


@dataclass(frozen=True)
class Written:
    """A record as it was written."""

    table: str
    id: int
    operation: int


def write(folder: str, drawn: list[list[list[tuple[str, int]]]], *, appends: bool = False) -> list[Written]:
    """Write operations, as transactions of a source or as appends of an application."""
    written: list[Written] = []
    shards = [ShardId(0), ShardId(1)]
    with LogWriter.open(
        folder, stream=STREAM, shards=shards, epoch=Epoch(1), reservations=MemoryReservations(), options=SMALL
    ) as log:
        xid = 0
        for group in drawn:
            rows: dict[tuple[str, int], list[dict[str, object]]] = {}
            for at, records in enumerate(group):
                for index, (table, shard) in enumerate(records):
                    written.append(Written(table, len(written), xid + at))
                    rows.setdefault((table, shard), []).append(row(index, Op.CREATE, at, id=written[-1].id))
            facts = [operation(xid + at + 1, 8 * (xid + at + 1)) for at in range(len(group))]
            if appends:
                moment = facts[0]["commit_ts"]
                facts = [{"kind": 3, "source": 0, "commit_ts": moment + xid + at} for at in range(len(group))]
            log.append(ops(facts, *((TABLES[table], shard, some) for (table, shard), some in rows.items())))
            xid += len(group)
    return written


def taken(folder: str, table: str | None, after: StreamToken | None) -> list[tuple[list[int], StreamToken]]:
    """Return the ids of each batch that can be read now, with its token."""
    reader = StreamReader(folder)
    start = StreamToken.scalar(STREAM, Seq(0)) if after is None else after
    found = []
    for batch, token in follow_steps(reader, FollowedTables(table), position_of(reader, start)):
        if batch is None:
            return found
        found.append((batch.column("id").to_pylist(), token))
    raise AssertionError("it ended")


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(groups, st.sampled_from([None, "public.orders", 'public."Order Items"']), st.booleans())
def test_a_reader_that_resumes_misses_nothing_and_repeats_only_a_begun_operation(
    drawn: list[list[list[tuple[str, int]]]], table: str | None, appends: bool
) -> None:
    with TemporaryDirectory() as folder:
        written = write(folder, drawn, appends=appends)
        own = {None: "ab", "public.orders": "a"}.get(table, "b")
        wanted = {record.id: record.operation for record in written if record.table in own}
        whole = taken(folder, table, None)
        assert sorted(number for ids, _ in whole for number in ids) == sorted(wanted)
        given_ids: set[int] = set()
        for ids, token in whole:
            given_ids.update(ids)
            again = {number for rest, _ in taken(folder, table, token) for number in rest}
            assert again | given_ids == set(wanted)
            left = set(wanted) - given_ids
            # The first operation that isn't whole yet, and none before it.
            begun = min((wanted[number] for number in left), default=None)
            assert all(begun is not None and wanted[number] >= begun for number in again)
        assert all(earlier <= later for (_, earlier), (_, later) in pairwise(whole))
        if whole and not set(wanted) - given_ids:
            assert taken(folder, table, whole[-1][1]) == []


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "wal")


def test_a_token_within_an_operation_stands_for_the_last_one_before_it(folder: str) -> None:
    write(folder, [[[("a", 0)], [("a", 0), ("b", 1), ("a", 1)], [("b", 0)]]])
    reader = StreamReader(folder)
    for number, whole in ((0, 0), (1, 1), (2, 1), (3, 1), (4, 4), (5, 5)):
        assert position_of(reader, StreamToken.scalar(STREAM, Seq(number))) == whole


def test_positions_that_are_not_there_are_refused(folder: str) -> None:
    write(folder, [[[("a", 0)]]])
    reader = StreamReader(folder)
    with pytest.raises(TokenFromFuture):
        position_of(reader, StreamToken.scalar(STREAM, Seq(99)))
    with pytest.raises(UsageError):
        FollowedTables("a.b.c")
    with pytest.raises(UsageError):
        FollowedTables([])
