"""Frames decoded as a run give what they give one by one, and an error names the damaged frame."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.seeds import examples
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.errors import CorruptWal, OffsetExpired
from millstream.model.ids import ShardId
from millstream.model.operations import TableRows
from millstream.model.positions import Seq
from millstream.testing.files import MemoryFiles
from millstream.wal.layout import list_segments, shard_folder
from millstream.wal.reader import StreamReader
from millstream.wal.reading.frame_runs import run_records, runs_of
from millstream.wal.reading.segment_reader import frames_in, span_source
from millstream.wal.reading.table_records import TableRecords
from millstream.wal.writing.writer import LogOptions, LogWriter

FOLDER = "/wal/s"
TABLES = [plain_table(1), plain_table(2), plain_table(2, version=2), plain_table(3)]
SHARDS = {3: 1}


def filled(groups: list[list[tuple[int, int]]], **options: Any) -> MemoryFiles:
    """Return a log with these groups; a group lists its transactions' pieces as (table, row count)."""
    files = MemoryFiles()
    log = LogWriter.open(
        FOLDER,
        stream=uuid4(),
        shards=(0, 1),
        epoch=1,
        reservations=MemoryReservations(),
        files=files,
        options=LogOptions(**{"segment_bytes": 64 << 10, "disk_used_max": 1.0, **options}),
    )
    for xid, pieces in enumerate(groups, 1):
        rows = [(TABLES[which], count, f"{xid} {which}") for which, count in pieces]
        transactions = {2 * xid: rows[: len(rows) // 2], 2 * xid + 1: rows[len(rows) // 2 :]}
        ops = plain_ops({number: some for number, some in transactions.items() if some}, shard_of=SHARDS)
        log.append(replace(ops, tables=tuple(part for table in ops.tables for part in partitions(table))))
    log.close()
    return files


def partitions(table: TableRows) -> list[TableRows]:
    """Return table 1's rows on two partitions, alternately."""
    if table.schema.table_id != 1 or table.rows.num_rows == 1:
        return [table]
    places = pa.array(range(table.rows.num_rows))
    turns = [places.filter(pa.array([place % 2 == turn for place in places.to_pylist()])) for turn in (0, 1)]
    return [replace(table, rows=table.rows.take(turn), partition=f"p{n}") for n, turn in enumerate(turns)]


def rows_of(pieces: list[TableRecords]) -> list[dict[str, Any]]:
    """Return the rows in the order of arrival."""
    return [
        {"table": piece.schema.name, "version": piece.schema.version, "operation": operation, **row}
        for piece in pieces
        for row, operation in zip(piece.batch.to_pylist(), piece.operation_seq.to_pylist(), strict=True)
    ]


def by_table(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in rows:
        found[row["table"]].append(row)
    return dict(found)


def no_damage(error: CorruptWal) -> None:
    raise AssertionError(error)


def upto_damage(pieces: Iterator[TableRecords]) -> tuple[list[int], CorruptWal]:
    given: list[int] = []
    try:
        for piece in pieces:
            given += piece.batch.column("__seq").to_pylist()
    except CorruptWal as error:
        return given, error
    raise AssertionError("nothing was said of the damage")


GROUPS = st.lists(
    st.lists(st.tuples(st.integers(0, len(TABLES) - 1), st.integers(1, 3)), min_size=1, max_size=5),
    min_size=1,
    max_size=20,
)


@settings(max_examples=examples(60), deadline=None)
@given(
    groups=GROUPS,
    data=st.data(),
    frame_bytes_max=st.sampled_from([100, 300, 1 << 20]),
    segment_bytes=st.sampled_from([6000, 64 << 10]),
    offsets=st.booleans(),
)
def test_runs_give_what_frames_give(
    groups: Any, data: st.DataObject, frame_bytes_max: int, segment_bytes: int, offsets: bool
):
    files = filled(groups, frame_bytes_max=frame_bytes_max, segment_bytes=segment_bytes)
    reader = StreamReader(FOLDER, files=files)
    one_by_one = StreamReader(FOLDER, files=files, on_damage=no_damage)
    end = int(reader.persisted_upto())
    after = Seq(data.draw(st.integers(0, end)))
    upto = Seq(data.draw(st.integers(after, end)))
    table = data.draw(st.sampled_from([None, 1, 2, 3]))
    runs = list(reader.read_between(after, upto, table=table, offsets=offsets))
    frames = list(one_by_one.read_between(after, upto, table=table, offsets=offsets))
    assert rows_of(runs) == rows_of(frames)
    assert len(runs) <= len(frames)
    for piece in runs:
        numbers = piece.batch.column("__seq").to_pylist()
        assert (piece.first_seq, piece.last_seq) == (numbers[0], numbers[-1]) == (min(numbers), max(numbers))

    spans = reader.spans(after, upto, bytes_target=data.draw(st.sampled_from([2000, 1 << 20])))
    tables = None if table is None else [table]
    spanned = [piece for span in spans for piece in reader.read_span(span, tables=tables)]
    found = by_table(rows_of(spanned))
    assert found == by_table(rows_of(list(reader.read_between(after, upto, table=table))))
    some = frozenset({"__op", "text"})
    picked = [piece for span in spans for piece in reader.read_span(span, tables=tables, columns=some)]
    assert [row["text"] for row in rows_of(picked)] == [row["text"] for row in rows_of(spanned)]


def test_frames_of_one_table_come_as_one_piece_and_others_part_them():
    files = filled([[(0, 1)]] * 40 + [[(1, 1)]] + [[(0, 1)]] * 10, segment_bytes=1 << 20)
    reader = StreamReader(FOLDER, files=files)
    pieces = list(reader.read_between(Seq(0), reader.persisted_upto()))
    assert [(piece.schema.name, piece.batch.num_rows) for piece in pieces] == [
        ("table1", 40), ("table2", 1), ("table1", 10)
    ]  # fmt: skip
    (span,) = reader.spans(Seq(0), reader.persisted_upto())
    assert [piece.batch.num_rows for piece in reader.read_span(span)] == [50, 1]


def test_what_stands_in_front_of_a_damaged_frame_is_given_and_the_frame_is_named():
    files = filled([[(0, 1)]] * 30, segment_bytes=1 << 20)
    reader = StreamReader(FOLDER, files=files)
    (span,) = reader.spans(Seq(0), reader.persisted_upto())
    positions = [e.position for _, e in reader._index(0).from_seq(Seq(19), reader.extent.marks()[0][0])]
    for distance in (3, -5):  # its own head, and the payload before it
        at = positions[0] + distance
        before = files.read(span.path, at, 1)
        files.damage(span.path, at, bytes([before[0] ^ 1]))
        for read in (lambda: reader.read_between(Seq(0), Seq(30)), lambda: reader.read_span(span)):
            given, error = upto_damage(read())
            whole = 19 if distance > 0 else 18
            assert given == list(range(1, whole + 1))
            assert error.details["offset_from"] == whole
        files.damage(span.path, at, before)
    assert sum(piece.batch.num_rows for piece in reader.read_span(span)) == 30


def segments(files: MemoryFiles) -> list[str]:
    return [segment.path for segment in list_segments(files, shard_folder(FOLDER, ShardId(0)))]


def reopened(files: MemoryFiles, epoch: int) -> LogWriter:
    return LogWriter.open(
        FOLDER, stream=StreamReader(FOLDER, files=files).stream_id, shards=(0, 1), epoch=epoch,
        reservations=MemoryReservations(), files=files, options=LogOptions(segment_bytes=6000, disk_used_max=1.0),
    )  # fmt: skip


def test_a_run_goes_on_over_segments_up_to_the_next_epoch():
    files = filled([[(0, 1), (1, 1)]] * 40, segment_bytes=6000)
    assert len(segments(files)) > 4
    reader = StreamReader(FOLDER, files=files)
    read = [(piece.batch.num_rows, piece.epoch) for piece in reader.read_between(Seq(0), Seq(80), table=1)]
    assert read == [(40, 1)]
    log = reopened(files, epoch=2)
    log.append(plain_ops({99: [(TABLES[0], 3, "x")]}))
    log.close()
    pieces = reader.read_between(Seq(0), reader.persisted_upto(), table=1)
    assert [(piece.batch.num_rows, piece.epoch) for piece in pieces] == [(40, 1), (3, 2)]


def test_places_of_frames_say_what_retention_dropped_amid_the_look():
    """The missing file's own error was no error of the log, so that the look at a consumer's lag failed as a bug would."""
    files = filled([[(0, 1), (1, 1)]] * 40, segment_bytes=6000)
    places = StreamReader(FOLDER, files=files).frames_between(Seq(0), Seq(80))
    next(places)
    files.remove(segments(files)[2])
    with pytest.raises(OffsetExpired):
        list(places)


def test_what_stands_in_the_segments_before_damage_is_given():
    files = filled([[(0, 1), (1, 1)]] * 40, segment_bytes=6000)
    reader = StreamReader(FOLDER, files=files)
    (piece,) = reader.read_between(Seq(0), Seq(80), table=1)
    whole = piece.batch.column("__seq").to_pylist()
    paths = segments(files)
    firsts = {
        segment.path: entry.first_seq for _, segment, entry in reversed(list(reader.frames_between(Seq(0), Seq(80))))
    }
    for at in (8, 4096 + 8, -20):  # header, first frame's head, footer
        path = paths[2]
        place = at % len(files.read(path))
        before = files.read(path, place, 1)
        files.damage(path, place, bytes([before[0] ^ 1]))
        given, error = upto_damage(StreamReader(FOLDER, files=files).read_between(Seq(0), Seq(80), table=1))
        first_missing = (
            paths[1] if at == -20 else path
        )  # the next footer is read before a segment's last frame is given
        assert given == [seq for seq in whole if seq < firsts[first_missing]]
        assert error.details["file"] == path
        files.damage(path, place, before)


def test_a_schema_that_differs_between_segments_is_each_segments_own():
    """Only a replaced file has one: the frames are then decoded each with its own segment's schemas."""
    files = filled([[(0, 1), (1, 1)]] * 12, segment_bytes=6000)
    reader = StreamReader(FOLDER, files=files)
    spans = reader.spans(Seq(0), reader.persisted_upto())
    first, second = (span_source(files, span) for span in spans[:2])
    key = (TABLES[0].table_id, TABLES[0].version)
    second.schemas.tables[key] = replace(second.schemas.tables[key], name="other")
    frames = [
        (source, frame) for source, span in ((first, spans[0]), (second, spans[1])) for frame in frames_in(source, span)
    ]
    (run,) = runs_of(frames, None)
    pieces = list(run_records(run, None, None, frozenset([key[0]])))
    assert {piece.schema.name for piece in pieces} == {"table1", "other"}


def test_a_run_is_bounded_by_bytes():
    files = filled([[(0, 3000)]] * 30, segment_bytes=64 << 20)
    reader = StreamReader(FOLDER, files=files)
    pieces = list(reader.read_between(Seq(0), reader.persisted_upto()))
    assert 1 < len(pieces) < 30
    assert pa.concat_arrays([piece.batch.column("__seq") for piece in pieces]).to_pylist() == list(range(1, 90_001))


def test_an_operation_on_two_partitions_that_goes_on_over_frames_keeps_the_frames_order():
    files = filled([[(1, 3), (0, 3)]], frame_bytes_max=100)
    reader = StreamReader(FOLDER, files=files)
    pieces = list(reader.read_between(Seq(0), reader.persisted_upto()))
    assert [piece.batch.column("__seq").to_pylist() for piece in pieces] == [[1, 2, 3], [4, 6], [5]]
