"""Sequence numbers: no way of reading loses one, whatever version the frames' headers have."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.seeds import examples
from tests.wal.plain_operations import MemoryReservations, plain_operations, plain_rows, plain_table
from tests.wal.truth import FOLDER, SHARDS, SMALL, STREAM

from millstream.errors import UsageError
from millstream.export.log_export import export_arrow
from millstream.export.log_import import import_log
from millstream.home.home import Home
from millstream.model.ids import Epoch, RegionId, ShardId, SourceId, TableId, WriterId
from millstream.model.operations import SpilledOp, TableRows, WriteOps
from millstream.model.positions import Lsn, Seq, SeqRange
from millstream.ports import Files
from millstream.testing.clock import ManualClock
from millstream.testing.files import MemoryFiles
from millstream.wal.files import RealFiles
from millstream.wal.reader import StreamReader
from millstream.wal.reading.table_records import TableRecords
from millstream.wal.writing.group_commit import GroupCommitter
from millstream.wal.writing.number_sources import BlockNumbers
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.own_shards import WriterIdentity

SHARD_OF = {1: 0, 2: 1, 3: 0}
TABLES = {number: replace(plain_table(number), relation_oid=20_000 + number) for number in SHARD_OF}

Batch = tuple[int, str | None]
"""(table, partition)"""
Operation = tuple[Batch, ...]
"""An operation: the batch of each of its records, by index."""


def groups_of(*tables: int) -> st.SearchStrategy[list[Any]]:
    """Draw commit groups: each is a list of operations that go together, or one that goes through a spill file."""
    batches = st.tuples(st.sampled_from(tables), st.sampled_from([None, "a", "b"]))
    operations = st.lists(batches, min_size=1, max_size=8).map(tuple)
    return st.lists(st.lists(operations, min_size=1, max_size=3) | operations, min_size=1, max_size=4)


lives = st.lists(groups_of(*TABLES), min_size=1, max_size=3)
"""The groups that each writer writes."""


@dataclass
class Written:
    """The contents of a log."""

    operations: dict[int, tuple[Operation, SeqRange]] = field(default_factory=dict)
    """By xid: the operation, and the numbers that it was given."""
    group_ends: list[Seq] = field(default_factory=list)

    def numbers(self) -> dict[int, list[int]]:
        return {xid: list(range(seqs.first, seqs.last + 1)) for xid, (_, seqs) in self.operations.items()}


def rows_of(found: Sequence[tuple[int, int, Operation]]) -> tuple[TableRows, ...]:
    """Return the rows of (ordinal, xid, operation), with an entry for each table and partition."""
    rows: dict[Batch, list[tuple[int, int, str]]] = {}
    for ordinal, xid, operation in found:
        for index, batch in enumerate(operation):
            rows.setdefault(batch, []).append((ordinal, index, f"{xid}"))
    return tuple(
        TableRows(TABLES[table], plain_rows(TABLES[table], some), ShardId(SHARD_OF[table]), partition)
        for (table, partition), some in rows.items()
    )


def spilled(xid: int, operation: Operation, at_once: int = 3) -> SpilledOp:
    counts: dict[tuple[ShardId, TableId], int] = {}
    for table, _ in operation:
        key = (ShardId(SHARD_OF[table]), TableId(table))
        counts[key] = counts.get(key, 0) + 1
    chunks = []
    for start in range(0, len(operation), at_once):
        chunk = rows_of([(0, xid, operation[start : start + at_once])])
        column = 1
        moved = [
            rows.rows.set_column(
                column,
                rows.rows.schema.field(column),
                pa.array([i + start for i in rows.rows.column(column).to_pylist()], pa.int64()),
            )
            for rows in chunk
        ]
        chunks.append(tuple(replace(rows, rows=batch) for rows, batch in zip(chunk, moved, strict=True)))
    return SpilledOp(plain_operations([xid]), counts, lambda: iter(chunks), {SourceId(1): Lsn(10 * xid + 8)})


def write(files: Files, folder: str, given: Sequence[Sequence[object]], *options: LogOptions) -> Written:
    """Run one writer after the other, on all shards, or on the first if their frames name no shard."""
    shards = SHARDS[:1] if any(one.frame_version == 1 for one in options) else SHARDS
    written, reservations, xid = Written(), MemoryReservations(), 0
    for epoch, (some, of_writer) in enumerate(zip(given, cycle(options), strict=False), 1):
        reservations.epoch = Epoch(epoch)
        log = GroupCommitter.open(
            folder, WriterIdentity(STREAM, RegionId(0), WriterId(1), Epoch(epoch)), shards, numbers=BlockNumbers(reservations, Epoch(epoch)),
            files=files, clock=ManualClock(), options=of_writer, side_by_side=False,
        )  # fmt: skip
        for group in some:
            together = group if isinstance(group, list) else [group]
            xids = range(xid + 1, xid + 1 + len(together))
            xid += len(together)
            if isinstance(group, list):
                tables = rows_of([(ordinal, *of) for ordinal, of in enumerate(zip(xids, group, strict=True))])
                (ack,) = log.commit([WriteOps(plain_operations(list(xids)), tables, {SourceId(1): Lsn(10 * xid + 8)})])
            else:
                (ack,) = log.commit([spilled(xid, group)])
            number = ack.seqs.first
            for each, operation in zip(xids, together, strict=True):
                written.operations[each] = (operation, SeqRange(number, len(operation)))
                number = Seq(number + len(operation))
            assert number == ack.seqs.last + 1
            written.group_ends.append(ack.seqs.last)
            log.roll()
        log.close()
    return written


def numbers_by_xid(found: Sequence[TableRecords]) -> dict[int, list[int]]:
    by_xid: dict[int, list[int]] = {}
    for records in found:
        for xid, seq in zip(*(records.batch.column(name).to_pylist() for name in ("__xid", "__seq")), strict=True):
            by_xid.setdefault(xid, []).append(seq)
    return {xid: sorted(numbers) for xid, numbers in by_xid.items()}


def decoded(reader: StreamReader) -> dict[int, dict[Batch, list[int]]]:
    """Return the numbers of each operation's batches, from frames' directories and rows."""
    found: dict[int, dict[Batch, list[int]]] = {}
    for group in reader.read_groups(Seq(reader.first_seq() - 1), reader.persisted_upto()):
        for frame in group:
            xids = frame.operations.column("xid").to_pylist()
            for part in frame.header.parts:
                schema = frame.schemas.find(part.table_id, part.schema_version)
                records = frame.as_records(schema, frame.log_rows(part.table_id, part.schema_version))
                seqs = records.column("__seq").to_pylist()
                low, high = frame.numbers_of(part.table_id, part.schema_version)
                assert low <= min(seqs)
                assert max(seqs) <= high
                assert records.column("__xid").to_pylist() == sorted(records.column("__xid").to_pylist())
                at = 0
                for entry in frame.batches.to_pylist():
                    if entry["table_id"] == part.table_id:
                        of = found.setdefault(xids[entry["operation"]], {})
                        of.setdefault((part.table_id, entry["partition"]), []).extend(seqs[at : at + entry["count"]])
                        at += entry["count"]
                assert at == len(seqs)
    return found


def judge(reader: StreamReader, written: Written) -> None:
    """Check that every number of every operation is there once, by every way of reading."""
    begin, upto = Seq(reader.first_seq() - 1), reader.persisted_upto()
    expected = written.numbers()
    by_batch = decoded(reader)
    assert {xid: sorted(n for some in of.values() for n in some) for xid, of in by_batch.items()} == expected
    for xid, (operation, _) in written.operations.items():
        hit = {batch: [i for i, other in enumerate(operation) if other == batch] for batch in operation}
        assert {batch: len(numbers) for batch, numbers in by_batch[xid].items()} == {b: len(i) for b, i in hit.items()}
        for numbers in by_batch[xid].values():
            assert numbers == sorted(numbers)
    replayed = list(reader.read_between(begin, upto))
    assert numbers_by_xid(replayed) == expected
    last: dict[int, int] = {}
    for records in replayed:
        seqs = records.batch.column("__seq").to_pylist()
        assert (seqs[0], seqs[-1], seqs) == (records.first_seq, records.last_seq, sorted(seqs))
        # Each partition has its own ranges: over the frames of one operation a table's numbers grow
        # within each partition.
        xids = records.batch.column("__xid").to_pylist()
        assert xids[0] >= last.get(records.schema.table_id, 0), (
            "numbers of a table don't grow from operation to operation"
        )
        assert xids == sorted(xids)
        last[records.schema.table_id] = xids[-1]
    spans = reader.spans(begin, upto, bytes_target=2_000)
    assert numbers_by_xid([records for span in spans for records in reader.read_span(span)]) == expected
    by_offset = [records for shard in reader.shards for records in reader.read(shard, reader.first_offset(shard))]
    assert numbers_by_xid(by_offset) == expected
    before = begin
    for end in written.group_ends:
        inside = {xid: numbers for xid, numbers in expected.items() if before < numbers[0] <= end}
        assert numbers_by_xid(list(reader.read_between(before, end))) == inside
        before = end


@given(lives, st.sampled_from([300, 1 << 20]))
@settings(max_examples=examples(60))
def test_every_number_is_there_by_every_way_of_reading(given: list[list[object]], frame_bytes: int) -> None:
    files = MemoryFiles()
    options = replace(SMALL, disk_used_max=1.0, frame_bytes_max=frame_bytes)
    written = write(files, FOLDER, given, options)
    judge(StreamReader(FOLDER, files=files), written)


@given(lives, st.sampled_from([300, 1 << 20]))
@settings(max_examples=examples(15), deadline=None)
def test_a_number_inside_an_operation_stands_for_the_last_whole_one(
    given: list[list[object]], frame_bytes: int
) -> None:
    files = MemoryFiles()
    written = write(files, FOLDER, given, replace(SMALL, disk_used_max=1.0, frame_bytes_max=frame_bytes))
    reader = StreamReader(FOLDER, files=files)
    begins = {n: seqs.first - 1 for _, seqs in written.operations.values() for n in range(seqs.first, seqs.last)}
    for seqs in (seqs for _, seqs in written.operations.values()):
        for n in {seqs.first - 1, seqs.first, seqs.first + seqs.count // 2, seqs.last - 1, seqs.last, seqs.last + 1}:
            assert reader.whole_upto(Seq(n)) == begins.get(n, n)


# --- export and import -------------------------------------------------------------------------------------------------


@given(lives)
@settings(max_examples=examples(10))
def test_every_number_is_there_after_export_and_import(given: list[list[object]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        written = write(
            RealFiles(), f"{place}/wal", given, LogOptions(segment_bytes=9_000, frame_bytes_max=300, disk_used_max=1.0)
        )
        reader = StreamReader(f"{place}/wal")
        export_arrow(reader, Path(place) / "out", stream="shop", after=Seq(0), upto=reader.persisted_upto())
        home = Home(Path(place) / "home")
        home.prepare()
        assert import_log(home, "shop", Path(place) / "out") == sum(len(of) for of, _ in written.operations.values())
        imported = StreamReader(str(home.wal_folder("shop")))
        as_imported, number = Written(group_ends=[imported.persisted_upto()]), 1
        # The home gives its own table ids.
        ids = {schema.name: schema.table_id for schema in imported.schema_versions().values()}
        for xid, (operation, _) in written.operations.items():
            there = tuple((ids[TABLES[table].name], partition) for table, partition in operation)
            as_imported.operations[xid] = (there, SeqRange(Seq(number), len(operation)))
            number += len(operation)
        judge(imported, as_imported)


# --- older headers of frames -------------------------------------------------------------------------------------------


@given(groups_of(1, 3), groups_of(1, 3), groups_of(1, 3))
@settings(max_examples=examples(15))
def test_a_log_with_headers_of_version_1_goes_on_in_version_2_and_back(
    before: list[object], during: list[object], after: list[object]
) -> None:
    """The first and the last writer stand for a program that writes only version 1."""
    files = MemoryFiles()
    versions = (1, 2, 1)
    options = [replace(SMALL, disk_used_max=1.0, frame_bytes_max=300, frame_version=version) for version in versions]
    written = write(files, FOLDER, [before, during, after], *options)
    judge(reader := StreamReader(FOLDER, files=files), written)
    frames = [frame for group in reader.read_groups(Seq(0), reader.persisted_upto()) for frame in group]
    assert [version for version, _ in groupby(frame.header.version for frame in frames)] == list(versions)


def test_headers_of_version_1_name_neither_region_nor_shard_so_others_are_refused() -> None:
    options = replace(SMALL, disk_used_max=1.0, frame_version=1)
    for region, shards in ((0, SHARDS[:2]), (1, SHARDS[:1])):
        files = MemoryFiles()
        with pytest.raises(UsageError, match="version 1"):
            GroupCommitter.open(
                FOLDER, WriterIdentity(STREAM, RegionId(region), WriterId(1), Epoch(1)), shards,
                numbers=BlockNumbers(MemoryReservations(), Epoch(1)), files=files, clock=ManualClock(), options=options,
                side_by_side=False,
            )  # fmt: skip
