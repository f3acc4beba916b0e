"""Segments that lie in another segment's place.

No reader takes them for the segments that their names denote, and `repair` puts them back if it can.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from uuid import UUID

import pytest
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.errors import CorruptWal, LogError, MillstreamError
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.positions import Offset, Seq
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.testing.errors import coded
from millstream.wal.backlog import Backlogs
from millstream.wal.files import RealFiles
from millstream.wal.layout import shard_folder
from millstream.wal.mending.inspect import Loss, inspect, ls, stats, verify
from millstream.wal.mending.repair import AcceptedRange, plan_repair, repair
from millstream.wal.misplacement import REPLACED
from millstream.wal.reader import StreamReader
from millstream.wal.replica.ship_source import ShipSource
from millstream.wal.segment_deletion import drop_segments
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

pytestmark = pytest.mark.siege

STREAM, TWIN = StreamId(UUID(int=7)), StreamId(UUID(int=8))
SHARDS = [ShardId(0), ShardId(1)]
TABLES = [plain_table(1), plain_table(2)]
SEGMENTS = 5
"""Number of sealed segments of each shard; the last is sealed, too."""
Rows = dict[tuple[int, int], str]


def write(folder: str, stream: StreamId, text: str, reservations: MemoryReservations, epochs: range) -> None:
    for epoch in epochs:
        with LogWriter.open(
            folder,
            stream=stream,
            shards=SHARDS,
            epoch=Epoch(epoch),
            reservations=reservations,
            options=LogOptions(disk_used_max=1.0),
        ) as log:
            for number in (1, 2):
                rows = [(table, 2, f"{text} {epoch}/{number}") for table in TABLES]
                log.append(plain_ops({10 * epoch + number: rows}, shard_of={1: 0, 2: 1}))


def segments(folder: str, shard: int = 0) -> list[Path]:
    return sorted(Path(shard_folder(folder, ShardId(shard))).glob("*.wal"))


def swap(one: Path, other: Path) -> None:
    aside = one.with_suffix(".tmp")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


class Logs:
    """A log, one of another stream with the same names, and one that parts from it (a backup that was written on)."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.twin, self.parted = (str(tmp_path / name) for name in ("shop", "twin", "parted"))
        self.marks = tmp_path / "marks"
        self.marks.mkdir()
        self.reservations, parted = MemoryReservations(), MemoryReservations()
        write(self.folder, STREAM, "ours", self.reservations, range(1, 3))
        write(self.parted, STREAM, "ours", parted, range(1, 3))
        shutil.rmtree(self.parted)
        shutil.copytree(self.folder, self.parted)
        write(self.folder, STREAM, "ours", self.reservations, range(3, SEGMENTS + 1))
        write(self.parted, STREAM, "else", parted, range(3, SEGMENTS + 1))
        write(self.twin, TWIN, "twin", MemoryReservations(), range(1, SEGMENTS + 1))
        assert [path.name for path in segments(self.folder)] == [path.name for path in segments(self.twin)]
        assert [path.name for path in segments(self.folder)] == [path.name for path in segments(self.parted)]
        self.whole = rows_of(StreamReader(self.folder))

    def reopen(self) -> LogWriter:
        return LogWriter.open(
            self.folder, stream=STREAM, shards=SHARDS, epoch=Epoch(SEGMENTS + 1), reservations=self.reservations
        )


def rows_of(reader: StreamReader) -> Rows:
    """Return what reading by offset and by number gives, by shard and offset.

    Both give the same, as long as a mark has each shard's end.
    """
    found: Rows = {}
    for shard in reader.shards:
        for records in reader.read(shard, reader.first_offset(shard)):
            for row in records.batch.to_pylist():
                found[shard, row["__offset"]] = row["text"]
    between = reader.read_between(Seq(0), reader.persisted_upto())
    numbered = Counter(row["text"] for records in between for row in records.batch.to_pylist())
    assert numbered == Counter(found.values()) or (reader.lacks_marks() and numbered <= Counter(found.values()))
    return found


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def copied_over(logs: Logs) -> None:
    own = segments(logs.folder)
    shutil.copy(own[1], own[2])


def copied_over_by_the_one_behind(logs: Logs) -> None:
    own = segments(logs.folder)
    shutil.copy(own[3], own[2])


def copied_over_the_last(logs: Logs) -> None:
    own = segments(logs.folder)
    shutil.copy(own[1], own[-1])


def copied_over_the_first(logs: Logs) -> None:
    own = segments(logs.folder)
    shutil.copy(own[1], own[0])


def renamed_into_the_gap(logs: Logs) -> None:
    victim = segments(logs.folder)[2]
    victim.rename(victim.with_name(f"{int(victim.stem) + 1:020d}.wal"))


def renamed_behind_the_end(logs: Logs) -> None:
    victim = segments(logs.folder)[2]
    victim.rename(victim.with_name(f"{999:020d}.wal"))


def swapped(logs: Logs) -> None:
    own = segments(logs.folder)
    swap(own[1], own[2])


def swapped_between_shards(logs: Logs) -> None:
    swap(segments(logs.folder, 0)[2], segments(logs.folder, 1)[2])


def of_another_shard(logs: Logs) -> None:
    shutil.copy(segments(logs.folder, 1)[2], segments(logs.folder, 0)[2])


def of_a_twin(logs: Logs) -> None:
    shutil.copy(segments(logs.twin)[2], segments(logs.folder)[2])


def of_a_twin_the_last(logs: Logs) -> None:
    shutil.copy(segments(logs.twin)[-1], segments(logs.folder)[-1])


def of_a_log_that_parted(logs: Logs) -> None:
    shutil.copy(segments(logs.parted)[3], segments(logs.folder)[3])


PUT_BACK = [renamed_into_the_gap, renamed_behind_the_end, swapped, swapped_between_shards]
LOST = [
    copied_over, copied_over_by_the_one_behind, copied_over_the_last, copied_over_the_first, of_another_shard, of_a_twin,
    of_a_twin_the_last,
]  # fmt: skip
ALL = [*PUT_BACK, *LOST, of_a_log_that_parted]


@pytest.mark.parametrize("change", ALL)
def test_readers_stop_instead_of_leaving_records_out(logs: Logs, change: Callable[[Logs], None]) -> None:
    change(logs)
    reader = StreamReader(logs.folder)
    upto = reader.persisted_upto()
    with pytest.raises(CorruptWal):
        list(chain.from_iterable(reader.read(shard, Offset(0)) for shard in SHARDS))
    with pytest.raises(CorruptWal):
        list(reader.read_between(Seq(0), upto))
    with pytest.raises(CorruptWal):
        list(reader.read_groups(Seq(0), upto))
    with pytest.raises(CorruptWal):
        reader.spans(Seq(0), upto)
    with pytest.raises(CorruptWal):
        reader.cut(Seq(0), rows_max=1_000_000)
    with pytest.raises(CorruptWal):
        list(StreamReader(logs.folder, without_mark=True).read_between(Seq(0), upto))


@pytest.mark.parametrize("change", [*PUT_BACK, *LOST])
def test_what_reads_past_damage_shows_only_records_that_lie_in_their_place(
    logs: Logs, change: Callable[[Logs], None]
) -> None:
    change(logs)
    for without_mark in (False, True):
        told: list[CorruptWal] = []
        if without_mark:
            for shard in SHARDS:
                Path(shard_folder(logs.folder, shard), "durable.mark").rename(logs.marks / str(shard))
        found = rows_of(StreamReader(logs.folder, on_damage=told.append, without_mark=without_mark))
        if without_mark:
            for shard in SHARDS:
                (logs.marks / str(shard)).rename(Path(shard_folder(logs.folder, shard), "durable.mark"))
        assert found.items() <= logs.whole.items()
        missing = logs.whole.keys() - found.keys()
        assert {4, 8} >= {len(missing)} or without_mark
        # Readers look at nothing after the mark.
        assert any("header is that of" in str(error) or "missing" in str(error) for error in told)
    report = verify(logs.folder)
    assert any("header is that of" in loss.why for loss in report.losses)
    assert not [loss for loss in report.losses if loss.why == REPLACED], "a gap is no replaced segment"
    lost = {
        (loss.shard, offset)
        for loss in report.losses
        if loss.offset_from is not None and loss.offset_to is not None
        for offset in range(loss.offset_from, loss.offset_to)
    }
    assert lost == logs.whole.keys() - rows_of(StreamReader(logs.folder, on_damage=lambda _error: None)).keys()
    assert any(isinstance(found, Loss) and "header is that of" in found.why for found in inspect(logs.folder))
    assert any("header is that of" in loss.why for loss in stats(logs.folder).losses)
    assert any(info.state == "damaged" for info in ls(logs.folder))


@pytest.mark.parametrize("change", ALL)
def test_a_leader_ships_nothing_of_it(logs: Logs, change: Callable[[Logs], None]) -> None:
    change(logs)
    places = {(shard, int(path.stem)): path for shard in SHARDS for path in segments(logs.folder, shard)}
    intact = {place: path.read_bytes() for place, path in places.items()}
    source, position = ShipSource(logs.folder), {}
    shipped: set[tuple[int, int]] = set()
    with pytest.raises(MillstreamError):  # noqa: PT012 - at which of the pieces it stops depends on the change
        for _ in range(100):
            shipment = source.read(position, 4096)
            assert shipment is not None
            shipped |= {(part.shard, part.base_offset) for part in shipment.parts}
            position = source.position_after(position)
    theirs = [b"twin", b"else"]
    assert not [place for place in shipped if any(text in intact[place] for text in theirs)]
    with pytest.raises(CorruptWal):
        ShipSource(logs.folder).read({})


@pytest.mark.parametrize("change", ALL)
def test_a_writer_starts_on_none(logs: Logs, change: Callable[[Logs], None]) -> None:
    change(logs)
    before = {path: path.read_bytes() for path in Path(logs.folder).rglob("*.wal")}
    with pytest.raises(LogError) as caught:
        logs.reopen()
    assert caught.value.code in ("corrupt_wal", "log")
    assert "another" not in str(caught.value.hint or "")
    assert {path: path.read_bytes() for path in Path(logs.folder).rglob("*.wal")} == before


@pytest.mark.parametrize("change", [copied_over_the_first, of_a_log_that_parted, of_a_twin])
def test_retention_drops_nothing_by_another_segments_footer(logs: Logs, change: Callable[[Logs], None]) -> None:
    change(logs)
    before = rows_of(StreamReader(logs.folder, on_damage=lambda _error: None))
    with pytest.raises(CorruptWal):
        drop_segments(logs.folder, Retention(), RetentionBounds(age_s=0, size_bytes=0, bytes_max=0))
    with pytest.raises(CorruptWal):
        Backlogs(logs.folder).between(Seq(0), StreamReader(logs.folder).persisted_upto())
    assert rows_of(StreamReader(logs.folder, on_damage=lambda _error: None)) == before


@pytest.mark.parametrize("change", PUT_BACK)
def test_repair_puts_back_what_has_its_place_empty(logs: Logs, change: Callable[[Logs], None]) -> None:
    pristine = {path: path.read_bytes() for shard in SHARDS for path in segments(logs.folder, shard)}
    change(logs)
    plan = plan_repair(logs.folder)
    assert plan.is_needed
    assert not plan.losses
    assert not plan.mends
    done = repair(logs.folder, [])
    assert done.moves == plan.moves
    assert done.kept_aside == []
    assert {path: path.read_bytes() for shard in SHARDS for path in segments(logs.folder, shard)} == pristine
    assert rows_of(StreamReader(logs.folder)) == logs.whole
    assert verify(logs.folder).is_whole
    assert not plan_repair(logs.folder).is_needed
    logs.reopen().close()


@pytest.mark.parametrize("change", LOST)
def test_repair_sets_aside_what_was_copied_over_another_one_and_ends(
    logs: Logs, change: Callable[[Logs], None]
) -> None:
    change(logs)
    foreign = [loss.file for loss in verify(logs.folder).losses if "header is that of" in loss.why]
    content = [Path(file).read_bytes() for file in foreign]
    left = rows_of(StreamReader(logs.folder, on_damage=lambda _error: None))
    plan = plan_repair(logs.folder)
    with pytest.raises(LogError, check=coded("loss_not_accepted")):
        repair(logs.folder, [])
    done = repair(logs.folder, plan.ranges())
    assert [Path(file).read_bytes() for file in done.kept_aside] == content
    assert all(file.endswith(".torn") for file in done.kept_aside)
    assert rows_of(StreamReader(logs.folder)) == left
    assert verify(logs.folder).is_whole
    assert not plan_repair(logs.folder).is_needed
    assert repair(logs.folder, []).kept_aside == []
    logs.reopen().close()
    assert rows_of(StreamReader(logs.folder)) == left


def test_repair_that_was_cut_short_between_two_renames_goes_on(logs: Logs) -> None:
    one, other = segments(logs.folder)[1:3]
    one.rename(other.with_name(f"{other.stem}-misplaced.torn"))
    plan = plan_repair(logs.folder)
    assert [move.target for move in plan.moves] == [str(one)]
    assert not plan.losses
    repair(logs.folder, [])
    assert rows_of(StreamReader(logs.folder)) == logs.whole


def test_repair_puts_nothing_back_that_the_chain_disagrees_with(logs: Logs) -> None:
    own, parted = segments(logs.folder)[3], segments(logs.parted)[3]
    own.unlink()
    shutil.copy(parted, own.with_name(f"{999:020d}.wal"))
    plan = plan_repair(logs.folder)
    assert [move.target for move in plan.moves] == [None]
    assert [str(found) for found in plan.ranges()] == ["0:12-16"]
    repair(logs.folder, [AcceptedRange.parse("0:12-16")])
    assert not plan_repair(logs.folder).is_needed
    assert "else" not in "".join(rows_of(StreamReader(logs.folder)).values())


def test_reading_beside_it_goes_on(logs: Logs) -> None:
    """A misplaced segment stops no reader of what lies before it or after it."""
    whole = StreamReader(logs.folder)
    starts = [int(path.stem) for path in segments(logs.folder)]
    number_at = {
        row["__offset"]: row["__seq"]
        for records in whole.read(SHARDS[0], Offset(0))
        for row in records.batch.to_pylist()
    }
    of_a_twin(logs)
    reader = StreamReader(logs.folder)
    front = list(reader.read(SHARDS[0], Offset(0), upto=Offset(starts[2])))
    assert sum(records.batch.num_rows for records in front) == starts[2]
    behind = list(reader.read(SHARDS[0], Offset(starts[3])))
    assert sum(records.batch.num_rows for records in behind) == reader.durable_offset(SHARDS[0]) - starts[3]
    upto = reader.persisted_upto()
    for offset in range(starts[4], max(number_at)):
        assert list(reader.read_between(Seq(number_at[offset]), upto))


def test_headers_are_read_once_a_segment(logs: Logs) -> None:
    class Counting(RealFiles):
        headers = 0

        def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
            self.headers += path.endswith(".wal") and position == 0 and length == SEGMENT_HEADER_SIZE
            return super().read(path, position, length)

    files = Counting()
    reader = StreamReader(logs.folder, files=files)
    upto = reader.persisted_upto()
    for _ in range(5):
        reader.cut(Seq(0), rows_max=1_000_000)
        reader.spans(Seq(0), upto)
    assert files.headers <= len(SHARDS) * (SEGMENTS + 1)
