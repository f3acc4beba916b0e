"""A writer that joins others, as readers see each step: nothing is settled too soon, and no position goes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from tests.catalog.sequencing import MemorySequenceStore
from tests.wal.test_many_writers import FOLDER, STREAM, Writers

from millstream.errors import LogError
from millstream.model.ids import RegionId, ShardId, WriterId
from millstream.model.positions import Seq, StreamToken
from millstream.testing.clock import ManualClock
from millstream.testing.files import Crash, MemoryFiles
from millstream.wal.reader import StreamReader
from millstream.wal.replica.ship_source import durable_marks
from millstream.wal.shard_locks import lock_shards
from millstream.wal.writing.group_commit import GroupCommitter
from millstream.wal.writing.number_sources import SharedNumbers
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.own_shards import WriterIdentity


class StagedFiles(MemoryFiles):
    """Memory files that run a callback right after a path was first read, or a mark was moved."""

    def __init__(self) -> None:
        super().__init__()
        self.after_read: dict[str, Callable[[], object]] = {}
        self.after_move: Callable[[], object] | None = None

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        data = super().read(path, position, length)
        happens = self.after_read.pop(path, None)
        if happens is not None:
            happens()
        return data

    def write(self, node: Any, path: str, position: int, data: bytes) -> None:
        super().write(node, path, position, data)
        happens, self.after_move = self.after_move, None
        if happens is not None and path.endswith("durable.mark"):
            happens()
        self.after_move = happens


@dataclass
class Joining:
    """A writer of shards 2 and 3 that has appended rows 1 to 4, and one of shards 0 and 1 with only empty marks."""

    files: StagedFiles = field(default_factory=StagedFiles)

    def __post_init__(self) -> None:
        self.writers = Writers(files=self.files)
        self.writers.start(1)
        self.writers.append(1)
        for mark in lock_shards(self.files, FOLDER, [ShardId(0), ShardId(1)]).values():
            mark.close()
        self.reader = self.writers.reader()
        assert self.reader.persisted_upto() == 4

    def joins_and_draws(self) -> None:
        """Let the joining writer have numbers 5 and 6 in flight, while the other one shows 7 to 10."""
        joining = self.writers.start(0)
        self.given = joining._numbers.allocate(2)
        assert self.given.first == 5
        self.writers.append(1)


def test_a_mark_that_says_something_for_the_first_time_between_two_looks_is_counted() -> None:
    joining = Joining()
    joining.files.after_read = {f"{FOLDER}/00001/durable.mark": joining.joins_and_draws}
    assert joining.reader.persisted_upto() == 4
    assert joining.given.last == 6
    assert not joining.files.after_read


def test_who_ships_a_log_sees_the_marks_of_a_writer_that_joins_between_two_looks() -> None:
    joining = Joining()
    joining.files.after_read = {f"{FOLDER}/00001/durable.mark": joining.joins_and_draws}
    assert {0, 1, 2, 3} == set(durable_marks(joining.files, FOLDER))


@pytest.mark.parametrize("asks", [StreamReader.persisted_upto, StreamReader.lacks_marks])
def test_a_mark_that_comes_before_its_shards_first_frames_is_no_lost_one(
    asks: Callable[[StreamReader], object],
) -> None:
    joining = Joining()

    def joins_and_appends() -> None:
        joining.writers.start(0)
        joining.writers.append(0)

    joining.files.after_read = {f"{FOLDER}/00000/durable.mark": joins_and_appends}
    assert asks(joining.reader) in (4, False)


def test_a_mark_that_is_lost_is_still_an_error() -> None:
    joining = Joining()
    joining.writers.start(0)
    joining.writers.append(0)
    joining.files.open_write(f"{FOLDER}/00000/durable.mark").pwrite(bytes(4096), 0)
    assert joining.reader.lacks_marks()
    with pytest.raises(LogError, match="no durable mark"):
        joining.reader.persisted_upto()


class Shown(NamedTuple):
    """The marks that a reader was shown at one moment."""

    cut: Seq
    token: StreamToken


class StagedStore(MemorySequenceStore):
    """A store that runs a callback right after a step."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.after: dict[str, Callable[[], object]] = {}

    def _step(self, kind: Any, step: str, *arguments: Any, **named: Any) -> Any:
        told = super()._step(kind, step, *arguments, **named)
        happens = self.after.pop(step, None)
        if happens is not None:
            happens()
        return told


def other_writer_goes_on() -> tuple[Writers, StagedStore, Callable[[], Shown]]:
    """Return a writer that has appended, its store, and a callback.

    The callback makes the writer append once more, and shows the result to a new reader.
    """
    writers = Writers(files=StagedFiles())
    writers.store = store = StagedStore(writers.clock)
    writers.start(1)
    writers.append(1)

    def goes_on() -> Shown:
        writers.append(1)
        writers.open[1].follow()
        reader = writers.reader()
        return Shown(reader.persisted_upto(), reader.vector_token())

    return writers, store, goes_on


@pytest.mark.parametrize("step", ["register", "recovered", "report"])
@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
def test_no_reader_sees_a_position_go_back_while_a_writer_joins(step: str, again: bool) -> None:
    writers, store, goes_on = other_writer_goes_on()
    if again:
        writers.start(0)
        writers.append(0)
        writers.open.pop(0).close()
    seen = [goes_on()]
    store.after[step] = lambda: seen.append(goes_on())
    writers.start(0)
    assert not store.after
    reader = writers.reader()
    seen.append(Shown(reader.persisted_upto(), reader.vector_token()))
    seen.append(goes_on())
    writers.append(0)
    seen.append(goes_on())
    for before, after in pairwise(seen):
        assert before.cut <= after.cut
        assert before.token <= after.token
    assert writers.read(0, seen[-1].cut) == {n: t for n, t in writers.texts.items() if n <= seen[-1].cut}


@pytest.mark.parametrize("ends", ["close", "kill"])
def test_no_reader_sees_a_position_go_back_while_a_writers_marks_are_moved_one_by_one(ends: str) -> None:
    writers, _, goes_on = other_writer_goes_on()
    assert isinstance(writers.files, StagedFiles)
    seen = [goes_on()]
    writers.files.after_move = lambda: seen.append(goes_on())
    for _ in range(3):
        log = writers.start(0)
        writers.append(0)
        if ends == "close":
            log.close()
        else:
            writers.kill(0)
            writers.clock.advance(10.0)
    assert len(seen) > 20
    assert all(before.cut <= after.cut and before.token <= after.token for before, after in pairwise(seen))
    assert writers.read(0, seen[-1].cut) == {n: t for n, t in writers.texts.items() if n <= seen[-1].cut}


def test_a_writer_that_stands_still_while_it_joins_delays_no_vector_reader_and_is_recovered_once_its_lease_is_over() -> (
    None
):
    writers, store, goes_on = other_writer_goes_on()
    seen: list[Shown] = []

    def stalls() -> None:
        seen.append(goes_on())
        raise Crash

    store.after["recovered"] = stalls
    with pytest.raises(Crash):
        writers.start(0)
    assert seen[0].cut == 4
    assert seen[0].token.of(WriterId(1)) == 8
    writers.clock.advance(10.0)
    seen.append(goes_on())
    taken = store.take_over(WriterId(2))
    GroupCommitter.open(
        FOLDER,
        WriterIdentity(STREAM, RegionId(0), taken.writer, taken.epoch),
        [],
        numbers=SharedNumbers(store, taken, writers.clock),
        files=writers.files,
        clock=writers.clock,
        options=LogOptions(disk_used_max=1.0),
        side_by_side=False,
    ).close()
    seen.append(goes_on())
    assert [shown.cut for shown in seen] == [4, 4, 16]
    assert all(before.token <= after.token for before, after in pairwise(seen))


@pytest.mark.parametrize("lost", ["before", "after"])
def test_a_catalog_that_is_away_when_a_writer_has_joined_stops_neither_it_nor_readers(lost: str) -> None:
    writers, store, goes_on = other_writer_goes_on()
    store.fails = lambda step: lost if step == "report" else None
    writers.start(0)
    store.fails = lambda _step: None
    writers.append(0)
    writers.open[0].follow()
    assert goes_on().cut == 8
    writers.open[0].follow()
    assert goes_on().cut == 12
