"""Reading on past damage: only damaged records are left out, on a live log, a copy, and a copy without marks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wal.truth import FOLDER, SMALL, Truth

from millstream.errors import CorruptWal
from millstream.testing.files import MemoryFiles
from millstream.wal.mending.inspect import FrameInfo, Loss, inspect, ls, stats, verify
from millstream.wal.reader import StreamReader, TableRecords
from millstream.wal.writing.options import LogOptions

Where = tuple[int, int]
"""(shard, offset)"""


def segments(files: MemoryFiles, shard: int) -> list[str]:
    return [f"{FOLDER}/{shard:05d}/{name}" for name in files.listdir(f"{FOLDER}/{shard:05d}") if name.endswith(".wal")]


def shown(files: MemoryFiles, *, without_mark: bool = False) -> tuple[dict[Where, int], list[CorruptWal]]:
    """Return what a reader that goes on past damage gives: the table's id by place, and the errors it reported."""
    told: list[CorruptWal] = []
    reader = StreamReader(FOLDER, files=files, without_mark=without_mark, on_damage=told.append)
    found: dict[Where, int] = {}
    for shard in reader.shards:
        for records in reader.read(shard, reader.first_offset(shard)):
            assert records.epoch
            for offset in records.batch.column("__offset").to_pylist():
                assert (shard, offset) not in found
                found[shard, offset] = records.schema.table_id
    between = reader.read_between(reader.first_seq() - 1, reader.persisted_upto())
    assert sum(records.batch.num_rows for records in between) == len(found)
    return found, told


def drop_marks(files: MemoryFiles) -> None:
    for shard in (0, 1):
        files.remove(f"{FOLDER}/{shard:05d}/durable.mark")


def flip(files: MemoryFiles, path: str, at: int) -> None:
    files.damage(path, at, bytes([files.read(path, at, 1)[0] ^ 0x55]))


@dataclass(frozen=True)
class Log:
    """An undamaged log."""

    files: MemoryFiles
    whole: dict[Where, int]
    frames: list[FrameInfo]


@pytest.fixture(scope="module", params=["open", "sealed", "one_segment"])
def log(request: pytest.FixtureRequest) -> Log:
    """Return a log with several tables in a frame, several frames in a segment, several segments, and two shards."""
    truth, files = Truth(), MemoryFiles()
    options = LogOptions(segment_bytes=1 << 20) if request.param == "one_segment" else SMALL
    writer = truth.open(files, options=options)
    for _ in range(6):
        truth.commit(writer, truth.ops([(1, 7), (2, 7)], [(3, 7)]))
    truth.commit(writer, truth.ops([(4, 3)]))
    if request.param == "sealed":
        writer.close()
    else:
        writer.abandon()
    whole, told = shown(files)
    assert not told
    assert len(whole) == sum(len(rows) for rows in truth.rows.values())
    return Log(files, whole, [f for f in inspect(FOLDER, files=files) if isinstance(f, FrameInfo)])


@settings(max_examples=120, deadline=None)
@given(data=st.data())
@pytest.mark.siege
def test_a_flipped_byte_costs_at_most_its_own_frames_records(data: st.DataObject, log: Log) -> None:
    pristine, whole = log.files, log.whole
    files = pristine.crash()
    shard = data.draw(st.sampled_from([0, 1]))
    path = data.draw(st.sampled_from(segments(files, shard)))
    frames = [f for f in log.frames if f.path == path]
    size = files.size(path)
    # Random damage hits heads and schemas too seldom.
    near = st.sampled_from([f.position for f in frames] or [0]).flatmap(
        lambda at: st.integers(at, min(at + 300, size - 1))
    )
    at = data.draw(st.one_of(st.integers(0, size - 1), near))
    flip(files, path, at)
    if without_mark := data.draw(st.booleans()):
        drop_marks(files)
    hit = next((f for f in frames if f.position <= at < f.position + f.length), None)
    mine = set() if hit is None else {(hit.shard, o) for o in range(hit.first_offset, hit.first_offset + hit.count)}
    if hit is not None and hit.kind == "schema":
        # If no other segment has the schema, the segment's records under it.
        of = {
            f.first_offset + n for f in frames if hit.tables[0][0] in {t[0] for t in f.tables} for n in range(f.count)
        }
        mine = {(shard, o) for o in of if whole[shard, o] == hit.tables[0][0]}
    left, told = shown(files, without_mark=without_mark)
    report = verify(FOLDER, files=files)
    is_tail = without_mark and hit is not None and hit.group == 7 and not report.losses
    if is_tail:
        # Without the mark, the last group of an open segment might never have been whole.
        lost_groups = {hit.group}
        mine = {
            (f.shard, o)
            for f in log.frames
            if f.group in lost_groups
            for o in range(f.first_offset, f.first_offset + f.count)
        }
    assert left.items() <= whole.items()
    assert set(whole) - set(left) <= mine
    if set(whole) != set(left) and not is_tail:
        assert told
        assert report.losses
        named = {
            (loss.shard, o)
            for loss in report.losses
            if loss.offset_from is not None
            for o in range(loss.offset_from, 100 if loss.offset_to is None else loss.offset_to)
        }
        assert set(whole) - set(left) <= named
    if hit is not None and hit.kind == "records" and at >= hit.position + hit.length - sum(t[3] for t in hit.tables):
        # Damage in the rows of one table: the frame's other tables are still there.
        assert len({whole[place] for place in set(whole) - set(left)}) <= 1 or is_tail
    assert report.has_marks is not without_mark
    assert ls(FOLDER, files=files)
    counted = stats(FOLDER, files=files)
    assert counted.has_marks is not without_mark
    assert counted.records <= len(whole)


def test_behind_damage_in_a_segment_that_is_being_written_everything_is_shown(truth: Truth) -> None:
    files = MemoryFiles()
    writer = truth.open(files, options=LogOptions(segment_bytes=1 << 20))
    for _ in range(5):
        truth.commit(writer, truth.ops([(1, 4)]))
    (path,) = segments(files, 0)
    frames = [f for f in inspect(FOLDER, files=files) if isinstance(f, FrameInfo) and f.path == path and f.count]
    flip(files, path, frames[1].position + 20)
    told: list[CorruptWal] = []
    reader = StreamReader(FOLDER, files=files, on_damage=told.append)
    first = [o for r in reader.read(0, 0) for o in r.batch.column("__offset").to_pylist()]
    assert first == [0, 1, 2, 3, *range(8, 20)]
    truth.commit(writer, truth.ops([(1, 4)]))
    behind = [o for r in reader.read(0, 20) for o in r.batch.column("__offset").to_pylist()]
    assert behind == [20, 21, 22, 23]
    assert told
    bare = files.crash()
    drop_marks(bare)
    again = StreamReader(FOLDER, files=bare, without_mark=True, on_damage=told.append)
    assert sum(r.batch.num_rows for r in again.read(0, 0)) == 20
    with pytest.raises(CorruptWal):
        list(StreamReader(FOLDER, files=bare, without_mark=True).read(0, 0))


def test_a_damaged_schema_is_taken_from_another_segment_and_costs_nothing(truth: Truth) -> None:
    files = MemoryFiles()
    for _ in range(2):
        writer = truth.open(files)
        truth.commit(writer, truth.ops([(1, 2), (3, 2)]))
        writer.close()
    path = segments(files, 0)[0]
    schema = next(
        f for f in inspect(FOLDER, files=files) if isinstance(f, FrameInfo) and f.kind == "schema" and f.path == path
    )
    flip(files, path, schema.position + schema.length - 20)
    report = verify(FOLDER, files=files)
    assert [(loss.byte, loss.offset_from, loss.offset_to) for loss in report.losses] == [(schema.position, 0, 0)]
    assert report.readable[0] == [(0, 8)]
    left, told = shown(files)
    assert len(left) == 8
    assert len(told) == 2  # once for each way of reading


def test_verify_names_a_mark_that_is_missing_and_one_that_is_damaged(truth: Truth) -> None:
    files = MemoryFiles()
    writer = truth.open(files)
    truth.commit(writer, truth.ops([(1, 2), (2, 2)]))
    writer.close()
    assert verify(FOLDER, files=files).has_marks
    missing, damaged = files.crash(), files.crash()
    missing.remove(f"{FOLDER}/00001/durable.mark")
    report = verify(FOLDER, files=missing)
    assert (report.is_whole, report.unmarked) == (True, [1])
    damaged.damage(f"{FOLDER}/00000/durable.mark", 0, b"\xff" * 1500)
    report = verify(FOLDER, files=damaged)
    assert [loss.file for loss in report.losses] == [f"{FOLDER}/00000/durable.mark"]
    assert StreamReader(FOLDER, files=damaged).lacks_marks()
    assert not StreamReader(FOLDER, files=files).lacks_marks()
    truth.open(damaged).abandon()
    assert verify(FOLDER, files=damaged).is_whole


def test_what_is_being_written_is_no_damage_with_a_mark_or_without(truth: Truth) -> None:
    files = MemoryFiles()
    writer = truth.open(files, options=LogOptions(segment_bytes=1 << 20, frame_bytes_max=1500))
    truth.commit(writer, truth.ops([(1, 4)]))
    before = files.crash()
    (path,) = segments(files, 0)
    end = files.size(path)
    truth.commit(writer, truth.ops([(1, 90)], size=40))  # one group in several frames
    grown = files.read(path)
    frames = [
        f for f in inspect(FOLDER, files=files) if isinstance(f, FrameInfo) and f.path == path and f.position >= end
    ]
    assert len(frames) > 2
    # A crash kept the group's later frames but not its first.
    before.damage(path, end, bytes(frames[0].length) + grown[end + frames[0].length :])
    for marked in (True, False):
        if not marked:
            drop_marks(before)
        report = verify(FOLDER, files=before)
        assert report.is_whole, report.losses
        assert report.unfinished
        left, told = shown(before, without_mark=not marked)
        assert (len(left), told) == (4, [])


def test_records_behind_a_damaged_segment_header_keep_their_epoch() -> None:
    truth, files = Truth(), MemoryFiles()
    for _ in range(3):
        writer = truth.open(files)
        truth.commit(writer, truth.ops([(1, 4)], [(2, 3)]))
        writer.close()

    def epochs() -> list[tuple[int, int]]:
        told: list[CorruptWal] = []
        reader = StreamReader(FOLDER, files=files, on_damage=told.append)
        between = reader.read_between(reader.first_seq() - 1, reader.persisted_upto())
        return sorted((row["__seq"], records.epoch) for records in between for row in records.batch.to_pylist())

    whole = epochs()
    assert {epoch for _, epoch in whole} == {1, 2, 3}
    for path in segments(files, 0):
        flip(files, path, 30)
    assert epochs() == whole


Range = tuple[int, int, int | None]


def told_by(errors: list[CorruptWal]) -> set[Range]:
    """Return the ranges of records that a reader reports as left out."""
    ranges = {(int(e.details["byte"]), int(e.details["offset_from"]), e.details["offset_to"]) for e in errors}
    return {of for of in ranges if of[1] != of[2]}


def named_by(losses: list[Loss]) -> set[Range]:
    """Return the ranges that `verify` and the other tools name."""
    return {(of.byte, of.offset_from, of.offset_to) for of in losses if of.offset_from not in (None, of.offset_to)}


@pytest.mark.sampled
@pytest.mark.parametrize("hit", ["head", "directory", "payload", "segment header", "footer", "schema", "tail"])
@pytest.mark.parametrize("state", ["open", "sealed", "closed"])
def test_readers_name_the_range_that_verify_names(truth: Truth, state: str, hit: str) -> None:
    """Regression: a reader reported everything after a bad frame as unreadable, and then showed it."""
    files = MemoryFiles()
    writer = truth.open(files, options=SMALL if state == "sealed" else LogOptions(segment_bytes=1 << 20))
    for _ in range(12):
        truth.commit(writer, truth.ops([(1, 4)], [(2, 3)]))
    if state == "closed":
        writer.close()
    else:
        writer.abandon()
    path = segments(files, 0)[0]
    every = [f for f in inspect(FOLDER, files=files) if isinstance(f, FrameInfo) and f.path == path]
    frames = [f for f in every if f.count]
    frame = frames[-1] if hit == "tail" else frames[len(frames) // 2]
    payload = sum(table[3] for table in frame.tables)
    schema = next(f for f in every if f.kind == "schema")
    at = {
        "head": frame.position + 20,
        "directory": frame.position + frame.length - payload - 10,
        "payload": frame.position + frame.length - 10,
        "segment header": 30,
        "footer": every[-1].position + every[-1].length + 30,
        "schema": schema.position + schema.length - 20,
        "tail": frame.position + 20,
    }[hit]
    if at >= files.size(path):
        assert (state, hit) == ("open", "footer"), "an open segment has none"
        return
    flip(files, path, at)
    report = verify(FOLDER, files=files)
    left, told = shown(files)
    assert told_by(told) == named_by(report.losses)
    lost = {(0, o) for _, start, end in told_by(told) for o in range(start, end or 0)}
    assert len(left) == 12 * 7 - len(lost)
    assert not lost & left.keys()
    if hit in ("head", "directory", "payload", "tail"):
        assert named_by(report.losses) == {(frame.position, frame.first_offset, frame.first_offset + frame.count)}
    if hit != "payload":
        assert named_by(stats(FOLDER, files=files).losses) == (named_by(report.losses) if hit != "schema" else set())
        assert (stats(FOLDER, files=files).losses == []) == (hit == "schema" or report.is_whole)
    if hit == "footer" and state == "closed":
        return  # the marks show what lies before it
    # A strict reader stops there, and names the same range.
    reader = StreamReader(FOLDER, files=files)
    for read in (reader.read(0, 0), reader.read_between(0, reader.persisted_upto()), spans(reader)):
        with pytest.raises(CorruptWal) as caught:
            list(read)
        # For a schema that no other frame holds, the reader names the place; `verify` names every
        # record under it.
        assert told_by([caught.value]) == (set() if hit == "schema" else named_by(report.losses))


def spans(reader: StreamReader) -> Iterator[TableRecords]:
    for span in reader.spans(0, reader.persisted_upto()):
        yield from reader.read_span(span)
