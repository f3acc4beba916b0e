"""Damage that no crash explains: recovery refuses, readers name it, `verify` lists what is lost and what isn't."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.seeds import examples
from tests.wal.truth import Truth

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.errors import CorruptWal, LogError, MillstreamError, StaleEpoch
from millstream.model.positions import Seq
from millstream.testing.errors import coded
from millstream.testing.files import MemoryFiles
from millstream.wal.mending import inspect as inspecting
from millstream.wal.mending.inspect import Loss, inspect, ls, stats, verify
from millstream.wal.reader import StreamReader
from millstream.wal.writing.options import LogOptions

FOLDER = "/wal/shop"


def filled(truth: Truth, files: MemoryFiles, *, close: bool = True, groups: int = 5):
    log = truth.open(files)
    for _ in range(groups):
        truth.commit(log, truth.ops([(1, 12), (2, 12)], [(3, 12)]))
    if close:
        log.close()
    else:
        log.abandon()


def segments(files: MemoryFiles, shard: int = 0):
    return [f"{FOLDER}/{shard:05d}/{name}" for name in files.listdir(f"{FOLDER}/{shard:05d}") if name.endswith(".wal")]


def test_a_log_without_damage_verifies_whole(truth: Truth):
    files = MemoryFiles()
    filled(truth, files)
    report = verify(FOLDER, files=files)
    assert report.is_whole
    assert report.has_marks
    assert not report.unfinished
    assert report.records == 5 * 36
    assert report.readable == {0: [(0, 120)], 1: [(0, 60)]}
    counted = stats(FOLDER, files=files)
    assert {table.name: table.records for table in counted.tables.values()} == {
        "public.table1": 60,
        "public.table2": 60,
        "public.table3": 60,
    }
    assert (counted.groups, counted.persisted_upto) == (5, 180)


def test_a_segment_that_begins_during_a_look_is_no_loss(truth: Truth, monkeypatch: pytest.MonkeyPatch):
    """Its mark was read behind the list of segments, and lay beyond the last of them."""
    files = MemoryFiles()
    filled(truth, files)
    split = inspecting.split_misplaced

    def late(*listed: Any) -> Any:
        monkeypatch.setattr(inspecting, "split_misplaced", split)
        filled(truth, files, groups=20)
        return split(*listed)

    for look in (stats, verify):
        monkeypatch.setattr(inspecting, "split_misplaced", late)
        assert not look(FOLDER, files=files).losses
        assert inspecting.split_misplaced is split


def test_files_that_begin_with_a_dot_are_nobodys(truth: Truth):
    files = MemoryFiles()
    filled(truth, files)
    for name in (".DS_Store", "._00000", "00000/.DS_Store", f"00000/._{0:020}.wal", "00001/.nfs0001"):
        files.create(f"{FOLDER}/{name}")
    assert verify(FOLDER, files=files).is_whole
    truth.open(files).close()
    truth.judge(files)


def test_of_a_range_the_frames_that_overlap_it_are_listed_and_the_schemas_that_they_need(truth: Truth):
    files = MemoryFiles()
    filled(truth, files)
    every = [f for f in inspect(FOLDER, files=files) if not isinstance(f, Loss)]
    some = [f for f in inspect(FOLDER, after=Seq(40), upto=Seq(41), files=files) if not isinstance(f, Loss)]
    wanted = [f for f in every if f.kind == "records" and f.first_seq <= 41 and f.last_seq > 40]
    assert wanted
    assert [f for f in some if f.kind == "records"] == wanted
    schemas = [f for f in some if f.kind == "schema"]
    assert {(f.path, *f.tables[0][:2]) for f in schemas} <= {(f.path, *t[:2]) for f in wanted for t in f.tables}
    assert len(some) < len(every) / 2
    beyond = [f for f in inspect(FOLDER, after=Seq(180), files=files) if not isinstance(f, Loss)]
    assert beyond == []


@pytest.mark.parametrize("close", [True, False])
def test_a_flipped_bit_in_an_earlier_group_is_damage_and_named(truth: Truth, *, close: bool):
    files = MemoryFiles()
    filled(truth, files, close=close)
    path = segments(files)[-2] if len(segments(files)) > 1 and close else segments(files)[0]
    at = SEGMENT_HEADER_SIZE + 1500
    files.damage(path, at, bytes([files.read(path, at, 1)[0] ^ 1]))
    report = verify(FOLDER, files=files)
    assert not report.is_whole
    assert {loss.file for loss in report.losses} == {path}
    reader = StreamReader(FOLDER, files=files)
    with pytest.raises(CorruptWal) as caught:
        list(reader.read_between(0, reader.persisted_upto()))
    assert caught.value.details["file"] == path
    assert any(isinstance(found, Loss) for found in inspect(FOLDER, files=files))
    assert ls(FOLDER, files=files)


def test_a_reader_that_is_told_of_damage_leaves_out_only_what_is_damaged(truth: Truth):
    files = MemoryFiles()
    filled(truth, files)
    path = segments(files)[1]
    at = files.size(path) - 200  # in the footer: the reader finds its frames without it
    files.damage(path, at, b"\xff" * 8)
    told: list[CorruptWal] = []
    reader = StreamReader(FOLDER, files=files, on_damage=told.append)
    whole = {s for records in reader.read_between(0, 180) for s in records.batch.column("__seq").to_pylist()}
    assert whole == set(range(1, 181))
    assert [error.details["file"] for error in told] == [path]
    frame = next(f for f in inspect(FOLDER, files=files) if not isinstance(f, Loss) and f.path == path and f.count)
    files.damage(path, frame.position + 60, b"\xff" * 8)
    told.clear()
    reader = StreamReader(FOLDER, files=files, on_damage=told.append)
    left = {s for records in reader.read_between(0, 180) for s in records.batch.column("__seq").to_pylist()}
    assert whole - left
    assert len(whole - left) <= frame.count
    by_offset = sum(records.batch.num_rows for records in reader.read(0, 0))
    assert by_offset == 120 - frame.count
    assert told


def test_damage_in_the_tail_behind_which_a_later_group_stands_stops_recovery(truth: Truth):
    files = MemoryFiles()
    log = truth.open(files, options=LogOptions(segment_bytes=1 << 16))
    for _ in range(3):
        truth.commit(log, truth.ops([(1, 1), (2, 1)]))
    log.abandon()
    files.remove(f"{FOLDER}/00000/durable.mark")  # the mark alone would show it
    path = segments(files)[-1]
    before = files.read(path)
    files.damage(path, SEGMENT_HEADER_SIZE + 1300, b"\xff\xff")
    with pytest.raises(CorruptWal, match="isn't whole, though group") as caught:
        truth.open(files)
    assert caught.value.details["file"] == path
    assert len(files.read(path)) == len(before), "recovery touched a damaged log"


def test_a_group_missing_on_a_shard_while_another_shard_has_later_ones_is_damage(truth: Truth):
    files = MemoryFiles()
    log = truth.open(files, options=LogOptions(segment_bytes=1 << 16))
    truth.commit(log, truth.ops([(1, 1)]))
    truth.commit(log, truth.ops([(1, 1)]))
    truth.commit(log, truth.ops([(2, 1)]))
    log.abandon()
    path = segments(files)[-1]
    file = files.open_write(path)
    file.truncate(files.size(path) - 300)
    files.remove(f"{FOLDER}/00000/durable.mark")
    files.remove(f"{FOLDER}/00001/durable.mark")
    with pytest.raises(CorruptWal, match="group 2 is missing"):
        truth.open(files)


def test_a_tail_that_lost_what_the_mark_had_shown_is_damage(truth: Truth):
    files = MemoryFiles()
    log = truth.open(files)
    truth.commit(log, truth.ops([(1, 2)]))
    log.abandon()
    path = segments(files)[-1]
    files.open_write(path).truncate(SEGMENT_HEADER_SIZE + 8)
    with pytest.raises(CorruptWal):
        truth.open(files)
    assert not verify(FOLDER, files=files).is_whole


def test_a_missing_segment_is_damage(truth: Truth):
    files = MemoryFiles()
    filled(truth, files)
    for place in (0, 1):
        survivor = files.crash()
        survivor.remove(segments(survivor)[place])
        with pytest.raises(CorruptWal):
            truth.open(survivor)
        assert any("missing" in loss.why for loss in verify(FOLDER, files=survivor).losses)


def test_another_streams_log_a_newer_epoch_and_a_foreign_file_are_refused_by_name(truth: Truth):
    files = MemoryFiles()
    filled(truth, files)
    stale = Truth()
    with pytest.raises(StaleEpoch):
        stale.open(files)
    files.create(f"{FOLDER}/00000/notes.txt")
    with pytest.raises(LogError, check=coded("unexpected_file"), match=r"notes\.txt"):
        truth.open(files)
    ((shard, found), *others) = [(loss.shard, loss) for loss in verify(FOLDER, files=files).losses]
    assert (shard, found.file, others) == (0, f"{FOLDER}/00000/notes.txt", [])
    assert found.file not in found.why
    assert verify(FOLDER, files=files).records == 5 * 36
    files.remove(f"{FOLDER}/00000/notes.txt")
    truth.open(files).abandon()
    truth.judge(files)


def test_what_is_cut_off_is_kept_aside(truth: Truth):
    files = MemoryFiles()
    log = truth.open(files)
    truth.commit(log, truth.ops([(1, 2)]))
    log.abandon()
    path = segments(files)[-1]
    end = files.size(path)
    files.damage(path, end, b"torn bytes")
    truth.open(files)
    torn = [name for name in files.listdir(f"{FOLDER}/00000") if name.endswith(".torn")]
    assert [files.read(f"{FOLDER}/00000/{name}") for name in torn] == [b"torn bytes"]
    assert truth.judge(files) == [1]


@settings(max_examples=examples(60))
@given(data=st.data())
def test_any_changed_or_cut_byte_is_a_typed_error_or_changes_nothing(
    data: st.DataObject, damaged_log: tuple[Truth, MemoryFiles]
):
    truth, pristine = damaged_log
    files = pristine.crash()
    path = data.draw(st.sampled_from(segments(files, 0) + segments(files, 1)))
    size = files.size(path)
    at = data.draw(st.integers(0, size - 1))
    if data.draw(st.booleans()):
        files.damage(path, at, bytes([files.read(path, at, 1)[0] ^ data.draw(st.integers(1, 255))]))
    else:
        files.open_write(path).truncate(at)
    verify(FOLDER, files=files)
    ls(FOLDER, files=files)
    stats(FOLDER, files=files)
    try:
        shown = truth.shown(files)
    except LogError:
        shown = None
    else:
        assert set(truth.acknowledged) <= set(shown)
    try:
        truth.open(files).abandon()
    except MillstreamError:
        return
    try:
        assert set(truth.acknowledged) <= set(truth.shown(files))
    except CorruptWal:
        return  # an earlier, sealed segment: readers read its frames, recovery doesn't


@pytest.fixture(scope="module")
def damaged_log():
    truth = Truth()
    files = MemoryFiles()
    filled(truth, files, close=False)
    return truth, files
