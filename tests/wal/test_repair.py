"""Repair of damage: exactly the accepted records are gone, every reader reads the rest, and a writer goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wal.test_past_damage import drop_marks, flip, segments, shown
from tests.wal.truth import FOLDER, SMALL, STREAM, Truth

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.errors import CorruptWal, LogError, MillstreamError, ShardLocked, UsageError
from millstream.model.ids import Epoch, GroupNumber
from millstream.model.positions import Seq
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.testing.clock import ManualClock
from millstream.testing.errors import coded
from millstream.testing.files import Crash, FaultPlan, MemoryFiles, keep_any
from millstream.wal.layout import segment_path, shard_folder
from millstream.wal.mending.inspect import FrameInfo, inspect, ls, stats, verify
from millstream.wal.mending.repair import AcceptedRange, plan_repair, repair
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import drop_segments
from millstream.wal.writing.options import LogOptions

ONE = LogOptions(segment_bytes=1 << 20)


def fill(
    truth: Truth, files: MemoryFiles, options: LogOptions = SMALL, *, close: bool = False, groups: int = 6
) -> None:
    writer = truth.open(files, options=options)
    for _ in range(groups):
        truth.commit(writer, truth.ops([(1, 7), (2, 7)], [(3, 7)]))
    truth.commit(writer, truth.ops([(4, 3)]))
    (writer.close if close else writer.abandon)()


def frames_of(files: MemoryFiles, path: str, kind: str = "records") -> list[FrameInfo]:
    return [f for f in inspect(FOLDER, files=files) if isinstance(f, FrameInfo) and f.path == path and f.kind == kind]


def strict(files: MemoryFiles) -> dict[tuple[int, int], int]:
    """Return what readers that accept no damage give, by both ways of reading."""
    reader = StreamReader(FOLDER, files=files)
    found = {
        (shard, offset): records.schema.table_id
        for shard in reader.shards
        for records in reader.read(shard, reader.first_offset(shard))
        for offset in records.batch.column("__offset").to_pylist()
    }
    between = reader.read_between(reader.first_seq() - 1, reader.persisted_upto())
    assert sum(records.batch.num_rows for records in between) == len(found)
    return found


def judge_repaired(truth: Truth, files: MemoryFiles, left: dict[tuple[int, int], int]) -> None:
    """Check that the log is whole for readers, for `verify`, for a copy without marks, for a writer, and after it."""
    assert strict(files) == left
    report = verify(FOLDER, files=files)
    assert report.is_whole, report.losses
    assert not plan_repair(FOLDER, files=files).is_needed
    bare = files.crash()
    drop_marks(bare)
    assert shown(bare, without_mark=True) == (left, [])
    ends = {shard: StreamReader(FOLDER, files=files).durable_offset(shard) for shard in (0, 1)}
    persisted = StreamReader(FOLDER, files=files).persisted_upto()
    truth_left = dict(left)
    writer = truth.open(files)
    assert StreamReader(FOLDER, files=files).persisted_upto() >= persisted
    truth.commit(writer, truth.ops([(1, 2), (2, 1)]))
    writer.close()
    after = strict(files)
    assert {place: table for place, table in after.items() if place[1] < ends[place[0]]} == truth_left
    assert sorted(place for place in after if place not in truth_left) == [
        (0, ends[0]), (0, ends[0] + 1), (1, ends[1])
    ]  # fmt: skip
    truth.open(files).abandon()


def clone(truth: Truth) -> Truth:
    """Return a truth that continues separately from the same log."""
    copy = Truth(dict(truth.rows), epoch=truth.epoch)
    copy.reservations.reserve_to(truth.reservations.reserved(), epoch=Epoch(truth.epoch))
    return copy


@pytest.fixture(scope="module", params=["open", "sealed", "one_segment"])
def log(request: pytest.FixtureRequest) -> tuple[Truth, MemoryFiles, dict[str, list[int]]]:
    """Return a log's truth and files, and where the frames of each file begin."""
    truth, files = Truth(), MemoryFiles()
    fill(truth, files, ONE if request.param == "one_segment" else SMALL, close=request.param == "sealed")
    paths = segments(files, 0) + segments(files, 1)
    return truth, files, {path: [f.position for f in frames_of(files, path)] for path in paths}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.siege
def test_any_damage_is_repaired_by_what_the_plan_says_and_by_nothing_less(
    data: st.DataObject, log: tuple[Truth, MemoryFiles, dict[str, list[int]]]
) -> None:
    """Bytes are changed in several places, files are cut short, files are removed."""
    truth, pristine, begin = log
    files = pristine.crash()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(segments(files, 0) + segments(files, 1)))
        size = files.size(path)
        match data.draw(st.sampled_from(["flip", "flip", "flip", "zero", "cut", "gone"])):
            case "flip" if size:
                near = [position for position in begin[path] if position < size] or [0]
                start = data.draw(st.sampled_from([0, *near]))
                at = data.draw(st.integers(start, size - 1 if start == 0 else min(start + 200, size - 1)))
                flip(files, path, at)
            case "zero" if size:
                at = data.draw(st.integers(0, size - 1))
                files.damage(path, at, bytes(min(size - at, data.draw(st.integers(1, 9000)))))
            case "cut":
                files.open_write(path).truncate(data.draw(st.integers(0, size)))
            case "gone" if len(segments(files, 0)) > 1 and len(segments(files, 1)) > 1:
                files.remove(path)
            case _:
                pass
    left, _ = shown(files)
    plan = plan_repair(FOLDER, files=files)
    before = {path: files.read(path) for shard in (0, 1) for path in segments(files, shard)}
    wanted = plan.ranges()
    for place in range(len(wanted)):
        with pytest.raises(LogError, check=coded("loss_not_accepted")):
            repair(FOLDER, [*wanted[:place], *wanted[place + 1 :]], files=files)
    assert before == {path: files.read(path) for shard in (0, 1) for path in segments(files, shard)}
    done = repair(FOLDER, wanted, files=files, clock=ManualClock())
    assert [(loss.file, loss.byte) for loss in done.losses] == [(loss.file, loss.byte) for loss in plan.losses]
    accepted = verify(FOLDER, files=files).accepted
    assert bool(accepted) == bool(plan.losses)
    kept = b"".join(files.read(name) for name in done.kept_aside)
    for loss in plan.losses:
        cut = before.get(loss.file, b"")[loss.byte : loss.byte_to]
        assert cut in kept
    judge_repaired(clone(truth), files, left)


def test_only_the_hurt_tables_rows_go_and_positions_stay(truth: Truth) -> None:
    files = MemoryFiles()
    fill(truth, files, ONE, close=True)
    (path,) = segments(files, 0)[:1]
    before = frames_of(files, path)
    frame = before[2]
    assert len(frame.tables) == 2
    flip(files, path, frame.position + frame.length - 10)  # in the rows of the second
    reader = StreamReader(FOLDER, files=files)
    spans = reader.spans(0, reader.persisted_upto(), bytes_target=1)
    plan = plan_repair(FOLDER, files=files)
    (loss,) = plan.losses
    assert (loss.tables, loss.offset_from, loss.offset_to) == (
        (frame.tables[1][0],),
        frame.first_offset,
        frame.first_offset + frame.count,
    )
    hurt = verify(FOLDER, files=files)
    assert hurt.readable_in_part == {0: [(loss.offset_from, loss.offset_to)]}
    repair(FOLDER, plan.ranges(), files=files)
    left = strict(files)
    assert hurt.records == verify(FOLDER, files=files).records == stats(FOLDER, files=files).records == len(left)
    gone = {o for o in range(frame.first_offset, frame.first_offset + frame.count) if (0, o) not in left}
    assert len(gone) == frame.tables[1][2]
    assert [(f.position, f.length) for f in frames_of(files, path) if f.position != frame.position][:2] == [
        (f.position, f.length) for f in before[:2]
    ]
    assert [f.position for f in frames_of(files, path)][3:] == [f.position for f in before[3:]]
    # A reader that holds earlier positions continues.
    assert sum(r.batch.num_rows for span in spans for r in StreamReader(FOLDER, files=files).read_span(span)) == len(
        left
    )
    ((found),) = verify(FOLDER, files=files).accepted
    assert found.tables == (frame.tables[1][0],)


def test_what_readers_werent_shown_stays_hidden_through_a_repair(truth: Truth) -> None:
    files = MemoryFiles()
    writer = truth.open(files, options=ONE, hides=True)
    for _ in range(4):
        truth.commit(writer, truth.ops([(1, 3), (2, 3)]))
    assert writer.shown is not None
    writer.shown.show(GroupNumber(2))
    writer.abandon()
    (path,) = segments(files, 0)
    frame = frames_of(files, path)[0]
    flip(files, path, frame.position + frame.length - 10)
    repair(FOLDER, plan_repair(FOLDER, files=files).ranges(), files=files)
    assert len(strict(files)) == 12 - frame.count
    reader = StreamReader(FOLDER, files=files, durable=True)
    found = reader.read_between(Seq(0), reader.persisted_upto())
    assert sum(records.batch.num_rows for records in found) == 24 - frame.count
    writer = truth.open(files, options=ONE, hides=True)
    assert len(strict(files)) == 12 - frame.count
    assert writer.shown is not None
    writer.shown.show(GroupNumber(4))
    assert len(strict(files)) == 24 - frame.count
    writer.close()


def test_what_can_be_read_is_not_dropped_unsaid(truth: Truth) -> None:
    files = MemoryFiles()
    fill(truth, files, ONE, close=True)
    path = segments(files, 0)[0]
    frames = frames_of(files, path)
    flip(files, path, frames[1].position + 20)
    (lost,) = plan_repair(FOLDER, files=files).ranges()
    before = files.read(path)
    for wide in ((lost.start - 1, lost.end), (lost.start, lost.end + 1), (0, 10**6)):
        with pytest.raises(LogError, check=coded("loss_not_accepted"), match="can be read"):
            repair(FOLDER, [AcceptedRange(*wide, 0)], files=files)
    with pytest.raises(LogError, check=coded("loss_not_accepted"), match="cuts through"):
        repair(FOLDER, [AcceptedRange(lost.start - 1, lost.end, 0)], files=files, drop_readable=True)
    with pytest.raises(LogError, check=coded("loss_not_accepted"), match="lacks a shard"):
        repair(FOLDER, [AcceptedRange(lost.start, lost.end)], files=files)
    repaired = files.crash()
    repair(FOLDER, [lost], files=repaired)
    with pytest.raises(LogError, check=coded("loss_not_accepted"), match="nothing is lost in 1:900-903"):
        repair(FOLDER, [AcceptedRange(900, 903, 1)], files=repaired)
    assert files.read(path) == before
    whole = AcceptedRange(frames[0].first_offset, frames[1].first_offset + frames[1].count, 0)
    done = repair(FOLDER, [whole], files=files, drop_readable=True)
    assert len(done.losses) == 2
    assert min(offset for shard, offset in strict(files) if shard == 0) == whole.end
    judge_repaired(truth, files, strict(files))


def test_numbers_name_a_loss_as_well_as_offsets(truth: Truth) -> None:
    files = MemoryFiles()
    fill(truth, files, ONE, close=True)
    path = segments(files, 0)[0]
    frame = frames_of(files, path)[1]
    flip(files, path, frame.position + 20)
    # Numbers between those of the frame belong to the other shard's records of the same transactions.
    with pytest.raises(LogError, check=coded("loss_not_accepted"), match="can be read"):
        repair(FOLDER, [AcceptedRange.parse("seq:1-10000")], files=files)
    with pytest.raises(LogError, check=coded("loss_not_accepted")):
        repair(FOLDER, [AcceptedRange.parse(f"seq:{frame.first_seq}-{frame.last_seq - 1}")], files=files)
    alone = MemoryFiles()
    lone = Truth()
    writer = lone.open(alone, options=ONE)
    for _ in range(3):
        lone.commit(writer, lone.ops([(1, 5)]))
    writer.close()
    path = segments(alone, 0)[0]
    frame = frames_of(alone, path)[1]
    flip(alone, path, frame.position + 20)
    repair(FOLDER, [AcceptedRange.parse(f"seq:{frame.first_seq}-{frame.last_seq}")], files=alone)
    assert [offset for _, offset in strict(alone)] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


@pytest.mark.parametrize("text", ["", "5", "5-", "a-b", "seq:1", "0:0:1-2", "-1-2"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        AcceptedRange.parse(text)


@pytest.mark.parametrize("text", ["5-9", "1:5-9", "seq:5-9"])
def test_a_range_reads_as_it_was_written(text: str) -> None:
    assert str(AcceptedRange.parse(text)) == text


def test_damage_that_costs_no_record_needs_no_accepting(truth: Truth) -> None:
    files = MemoryFiles()
    for _ in range(2):
        writer = truth.open(files)
        truth.commit(writer, truth.ops([(1, 2), (3, 2)]))
        writer.close()
    pristine = strict(files)
    first, second = segments(files, 0)[:2]
    schema = frames_of(files, first, "schema")[0]
    flip(files, first, schema.position + 3)
    flip(files, first, 50)  # its header
    flip(files, first, files.size(first) - 80)  # its footer
    flip(files, second, 60)
    plan = plan_repair(FOLDER, files=files)
    assert not plan.losses
    assert len(plan.mends) == 4
    with pytest.raises(CorruptWal):
        strict(files)
    done = repair(FOLDER, [], files=files)
    assert len(done.kept_aside) == 4
    assert not verify(FOLDER, files=files).accepted
    judge_repaired(truth, files, pristine)


def test_a_writer_that_runs_is_left_alone_and_a_whole_log_too(truth: Truth) -> None:
    files = MemoryFiles()
    writer = truth.open(files)
    truth.commit(writer, truth.ops([(1, 2)]))
    with pytest.raises(ShardLocked):
        repair(FOLDER, [], files=files)
    writer.close()
    before = {path: files.read(path) for path in segments(files, 0)}
    assert not repair(FOLDER, [], files=files).is_needed
    assert {path: files.read(path) for path in segments(files, 0)} == before


@pytest.mark.long
def test_a_repair_may_crash_anywhere_and_be_repeated(truth: Truth) -> None:
    pristine = MemoryFiles()
    fill(truth, pristine, groups=4)
    for shard in (0, 1):
        path = segments(pristine, shard)[0]
        flip(pristine, path, frames_of(pristine, path)[0].position + 20)
    pristine.remove(segments(pristine, 0)[1])
    left, _ = shown(pristine)
    wanted = plan_repair(FOLDER, files=pristine).ranges()
    crashes = 0
    for at in range(1, 400):
        files = pristine.crash()
        files.plan = FaultPlan(crash_at=at)
        try:
            repair(FOLDER, wanted, files=files)
        except Crash:
            crashes += 1
        else:
            break
        after = files.crash(keep_any(at))
        repair(FOLDER, wanted, files=after)
        assert strict(after) == left
        assert verify(FOLDER, files=after).is_whole
        truth_after = clone(truth)
        truth_after.open(after).abandon()
    assert crashes > 10


def test_retention_and_the_other_tools_pass_over_what_was_lost(truth: Truth) -> None:
    files, clock = MemoryFiles(), ManualClock()
    writer = truth.open(files, clock=clock)
    for _ in range(6):
        truth.commit(writer, truth.ops([(1, 12), (2, 6)], [(3, 12)]))
        clock.advance(10)
    writer.close()
    path = segments(files, 0)[1]
    files.remove(path)
    repair(FOLDER, plan_repair(FOLDER, files=files).ranges(), files=files)
    assert len(ls(FOLDER, files=files)) == len(segments(files, 0)) + len(segments(files, 1))
    counted = stats(FOLDER, files=files)
    assert [loss.why for loss in counted.accepted] == ["segments are missing here"]
    assert counted.records == len(strict(files))
    assert {f.kind for f in inspect(FOLDER, files=files) if isinstance(f, FrameInfo)} == {"schema", "records", "loss"}
    dropped = drop_segments(FOLDER, Retention(), RetentionBounds(0, 0, 0), files=files, clock=clock).dropped
    assert path in {segment_path(shard_folder(FOLDER, s.shard), s.base_offset) for s in dropped}
    truth.open(files).abandon()
    assert StreamReader(FOLDER, files=files).stream_id == STREAM


def test_a_folder_of_which_nothing_says_whose_it_is_is_refused(truth: Truth) -> None:
    files = MemoryFiles()
    writer = truth.open(files, options=ONE)
    truth.commit(writer, truth.ops([(1, 2)]))
    writer.abandon()
    drop_marks(files)
    for shard in (0, 1):
        for path in segments(files, shard):
            files.damage(path, 0, b"\xff" * SEGMENT_HEADER_SIZE)
    with pytest.raises(MillstreamError, match="name no stream"):
        plan_repair(FOLDER, files=files)


def test_a_lost_header_is_made_again_from_its_frames() -> None:
    truth, files = Truth(), MemoryFiles()
    fill(truth, files, replace(SMALL, segment_bytes=3_000))
    before = truth.read_by_seq(StreamReader(FOLDER, files=files))
    lost = [segments(files, 0)[1], segments(files, 1)[0]]
    for path in lost:
        flip(files, path, 30)
    whole, told = shown(files)
    assert told
    assert len(whole) == len(before)
    repair(FOLDER, [], files=files)
    assert truth.read_by_seq(StreamReader(FOLDER, files=files)) == before
    assert verify(FOLDER, files=files).is_whole
