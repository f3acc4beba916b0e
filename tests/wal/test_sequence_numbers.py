"""Sequence numbers by table batch, by operation, or both: no way of reading loses one, and a rollback is safe."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wal.operation_numbers import Found, Refused, read_log
from tests.wal.truth import FOLDER, SHARDS, SMALL, STREAM

from millstream.codec.log_directory import Numbering
from millstream.errors import ExportUnusable
from millstream.export.log_export import export_arrow
from millstream.export.log_import import import_log
from millstream.home.home import Home
from millstream.model.ids import Epoch, RegionId, ShardId, SourceId, TableId, WriterId
from millstream.model.operations import SpilledOp, TableRows, WriteOps
from millstream.model.positions import Lsn, Seq, SeqRange
from millstream.ports import Files
from millstream.testing.clock import ManualClock
from millstream.testing.files import MemoryFiles
from millstream.testing.log import MemoryReservations, plain_operations, plain_rows, plain_table
from millstream.wal.files import RealFiles
from millstream.wal.layout import list_segments, list_shards, shard_folder
from millstream.wal.reader import StreamReader
from millstream.wal.segment_reader import TableRecords
from millstream.wal.writing.commit import GroupCommitter
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.own_shards import WriterIdentity
from millstream.wal.writing.sequence_allocator import BlockNumbers

SHARD_OF = {1: 0, 2: 1, 3: 0}
TABLES = {number: replace(plain_table(number), relation_oid=20_000 + number) for number in SHARD_OF}

Batch = tuple[int, str | None]
"""(table, partition)"""
Operation = tuple[Batch, ...]
"""An operation: the batch of each of its records, by index."""

batches = st.tuples(st.sampled_from(sorted(TABLES)), st.sampled_from([None, "a", "b"]))
operations = st.lists(batches, min_size=1, max_size=8).map(tuple)
groups = st.lists(st.lists(operations, min_size=1, max_size=3) | operations, min_size=1, max_size=4)
"""Commit groups. Each is a list of operations that go together, or one operation that goes through a spill file."""
lives = st.lists(st.tuples(st.sampled_from(Numbering), groups), min_size=1, max_size=3)
"""The groups that each writer writes, and their numbering."""


@dataclass
class Written:
    """The contents of a log."""

    operations: dict[int, tuple[Operation, SeqRange]] = field(default_factory=dict)
    """By xid: the operation, and the numbers that it was given."""
    group_ends: list[Seq] = field(default_factory=list)
    numberings: dict[int, Numbering] = field(default_factory=dict)

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


def write(
    files: Files, folder: str, given: Sequence[tuple[Numbering, Sequence[object]]], options: LogOptions
) -> Written:
    """Run one writer after the other, each under its numbering."""
    written, reservations, xid = Written(), MemoryReservations(), 0
    for epoch, (numbering, some) in enumerate(given, 1):
        reservations.epoch = Epoch(epoch)
        log = GroupCommitter.open(
            folder, WriterIdentity(STREAM, RegionId(0), WriterId(1), Epoch(epoch)), SHARDS, numbers=BlockNumbers(reservations, Epoch(epoch)),
            files=files, clock=ManualClock(), options=replace(options, numbering=numbering), side_by_side=False,
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
                written.numberings[each] = numbering
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
    for xid, (operation, seqs) in written.operations.items():
        hit = {batch: [i for i, other in enumerate(operation) if other == batch] for batch in operation}
        assert {batch: len(numbers) for batch, numbers in by_batch[xid].items()} == {b: len(i) for b, i in hit.items()}
        for batch, numbers in by_batch[xid].items():
            assert numbers == sorted(numbers)
            if written.numberings[xid] is Numbering.OPERATION:
                assert numbers == [seqs.first + index for index in hit[batch]]
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
@settings(max_examples=60)
def test_every_number_is_there_when_decoded_and_after_replay_whatever_the_frames_carry(
    given: list[tuple[Numbering, list[object]]], frame_bytes: int
) -> None:
    files = MemoryFiles()
    options = replace(SMALL, disk_used_max=1.0, frame_bytes_max=frame_bytes)
    written = write(files, FOLDER, given, options)
    judge(StreamReader(FOLDER, files=files), written)


@given(lives, st.sampled_from([300, 1 << 20]))
@settings(max_examples=15, deadline=None)
def test_a_number_inside_an_operation_stands_for_the_last_whole_one(
    given: list[tuple[Numbering, list[object]]], frame_bytes: int
) -> None:
    files = MemoryFiles()
    written = write(files, FOLDER, given, replace(SMALL, disk_used_max=1.0, frame_bytes_max=frame_bytes))
    reader = StreamReader(FOLDER, files=files)
    begins = {n: seqs.first - 1 for _, seqs in written.operations.values() for n in range(seqs.first, seqs.last)}
    for seqs in (seqs for _, seqs in written.operations.values()):
        for n in {seqs.first - 1, seqs.first, seqs.first + seqs.count // 2, seqs.last - 1, seqs.last, seqs.last + 1}:
            assert reader.whole_upto(Seq(n)) == begins.get(n, n)


def old_reading(files: MemoryFiles) -> list[Found]:
    folders = {shard: shard_folder(FOLDER, shard) for shard in list_shards(files, FOLDER)}
    # A new writer begins a segment that is still empty.
    paths = {
        folder: [s.path for s in list_segments(files, folder) if files.size(s.path) > 4096]
        for folder in folders.values()
    }
    return read_log(paths, lambda path: files.read(path, 0, files.size(path)))


@given(groups, groups, groups)
@settings(max_examples=60)
@pytest.mark.siege
def test_a_reader_of_operations_numbers_only_reads_what_is_written_in_the_transition_so_that_a_roll_back_is_safe(
    before: list[object], during: list[object], after: list[object]
) -> None:
    """The old program writes, then the new one under `both`, then the old one again.

    Each reads everything, to the same cuts.
    """
    files = MemoryFiles()
    given = [(Numbering.OPERATION, before), (Numbering.BOTH, during), (Numbering.OPERATION, after)]
    written = write(files, FOLDER, given, replace(SMALL, disk_used_max=1.0, frame_bytes_max=300))
    found = old_reading(files)
    by_xid: dict[int, list[Found]] = {}
    for record in found:
        by_xid.setdefault(record.facts["xid"], []).append(record)
    assert list(by_xid) == sorted(written.operations), "operations don't stand in their order"
    for xid, (operation, seqs) in written.operations.items():
        records = by_xid[xid]
        assert {record.operation for record in records} == {seqs.first}
        assert [(record.index, record.table, record.facts["text"]) for record in records] == [
            (index, table, f"{xid}") for index, (table, _) in enumerate(operation)
        ]
        assert [record.seq for record in records] == list(range(seqs.first, seqs.last + 1))
    reader = StreamReader(FOLDER, files=files)
    judge(reader, written)
    cut = Seq(0)
    for end in written.group_ends:  # both give the same up to the same token
        old = {(r.facts["xid"], r.table) for r in found if cut < r.seq <= end}
        new = {
            (xid, records.schema.table_id)
            for records in reader.read_between(cut, end)
            for xid in records.batch.column("__xid").to_pylist()
        }
        assert old == new
        cut = end


def test_the_same_reader_refuses_frames_whose_numbers_are_by_batch_only() -> None:
    files = MemoryFiles()
    write(files, FOLDER, [(Numbering.BATCH, [[((1, None),)]])], SMALL)
    with pytest.raises(Refused):
        old_reading(files)


def test_records_whose_indexes_have_gaps_are_refused_where_frames_carry_operations_numbers() -> None:
    gap = plain_rows(TABLES[1], [(0, 1, "x")])
    ops = WriteOps(plain_operations([1]), (TableRows(TABLES[1], gap),), {})
    for numbering in (Numbering.BOTH, Numbering.OPERATION):
        files = MemoryFiles()
        log = GroupCommitter.open(
            FOLDER, WriterIdentity(STREAM, RegionId(0), WriterId(1), Epoch(1)), SHARDS, numbers=BlockNumbers(MemoryReservations(), Epoch(1)),
            files=files, clock=ManualClock(), options=LogOptions(disk_used_max=1.0, numbering=numbering), side_by_side=False,
        )  # fmt: skip
        with pytest.raises(AssertionError):
            log.commit([ops])
        assert StreamReader(FOLDER, files=files).persisted_upto() == 0
        log.close()


# --- export and import -------------------------------------------------------------------------------------------------


def home_at(path: Path, numbering: str) -> Home:
    path.mkdir()
    log = f'[streams.shop.log]\nsequence_numbers = "{numbering}"\n'
    (path / "millstream.toml").write_text(f'[streams.shop.source]\ndsn = "host=127.0.0.1 port=1"\n{log}')
    home = Home(path)
    home.prepare()
    return home


@given(lives, st.sampled_from(["batch", "both"]))
@settings(max_examples=10)
def test_every_number_is_there_after_export_and_import(given: list[tuple[Numbering, list[object]]], under: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        written = write(
            RealFiles(), f"{place}/wal", given, LogOptions(segment_bytes=9_000, frame_bytes_max=300, disk_used_max=1.0)
        )
        reader = StreamReader(f"{place}/wal")
        export_arrow(reader, Path(place) / "out", stream="shop", after=Seq(0), upto=reader.persisted_upto())
        home = home_at(Path(place) / "home", under)
        assert import_log(home, "shop", Path(place) / "out") == sum(len(of) for of, _ in written.operations.values())
        imported = StreamReader(str(home.wal_folder("shop")))
        as_imported, number = Written(group_ends=[imported.persisted_upto()]), 1
        for xid, (operation, _) in written.operations.items():
            as_imported.operations[xid] = (operation, SeqRange(Seq(number), len(operation)))
            as_imported.numberings[xid] = Numbering(under)
            number += len(operation)
        judge(imported, as_imported)
        found = [frame for group in imported.read_groups(Seq(0), imported.persisted_upto()) for frame in group]
        assert {frame.header.numbering for frame in found} == {Numbering(under)}


def test_an_export_of_some_tables_is_not_imported_where_frames_are_to_carry_operations_numbers(tmp_path: Path) -> None:
    options = LogOptions(disk_used_max=1.0)
    write(RealFiles(), f"{tmp_path}/wal", [(Numbering.BATCH, [[((1, None), (2, None))]])], options)
    reader = StreamReader(f"{tmp_path}/wal")
    some = frozenset((TableId(2),))
    export_arrow(reader, tmp_path / "out", stream="shop", after=Seq(0), upto=reader.persisted_upto(), tables=some)
    home = home_at(tmp_path / "both", "both")
    with pytest.raises(ExportUnusable, match="sequence_numbers"):
        import_log(home, "shop", tmp_path / "out")
    assert not home.wal_folder("shop").exists()
    assert import_log(home_at(tmp_path / "batch", "batch"), "shop", tmp_path / "out") == 1
