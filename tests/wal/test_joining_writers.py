"""A writer that joins others, as readers meet it at every step: nothing is settled too soon, and no position goes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from tests.wal.test_many_writers import FOLDER, Writers

from millstream.errors import LogError
from millstream.model.ids import ShardId
from millstream.testing.files import MemoryFiles
from millstream.wal.reader import StreamReader
from millstream.wal.replica.shipping import durable_marks
from millstream.wal.shards import lock_shards


class StagedFiles(MemoryFiles):
    """Memory files in which something happens right after a path was read for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.after_read: dict[str, Callable[[], object]] = {}

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        data = super().read(path, position, length)
        happens = self.after_read.pop(path, None)
        if happens is not None:
            happens()
        return data


@dataclass
class Joining:
    """A writer of shards 2 and 3 that has appended rows 1 to 4, and one of shards 0 and 1 of which only empty marks are there."""

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
        """Numbers 5 and 6 are in flight in the joining writer, and the other one shows 7 to 10."""
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
    with pytest.raises(LogError, match="no mark that says"):
        joining.reader.persisted_upto()
