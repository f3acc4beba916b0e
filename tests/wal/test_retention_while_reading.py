"""Retention that drops a log's front during a read, before each of the read's looks at a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial

import pytest
from tests.wal.truth import FOLDER, Truth

from millstream.errors import OffsetExpired
from millstream.model.positions import Seq
from millstream.protocol.retention import HolderKind, Retention, RetentionBounds, SealedSegment
from millstream.testing.clock import ManualClock
from millstream.testing.files import MemoryFiles
from millstream.wal.backlog import Backlogs
from millstream.wal.mending.inspect import inspect, ls, stats, verify
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import drop_segments

NEEDED_FROM = 110
"""A holder's number: retention drops segments without a record from there on."""


LOOKS_MAX = 100
"""A read with more looks is tried with some of them, evenly spread."""


class DropsBeforeALook(MemoryFiles):
    """Runs retention once, before a reader's n-th look at a file or folder.

    Args:
        like: the files to begin with; none if None.
    """

    def __init__(self, like: DropsBeforeALook | None = None) -> None:
        super().__init__()
        if like is not None:
            self._folders = deepcopy(like._folders)
        self.looks = 0
        self.drops_before = 0
        """0: never."""
        self.dropped: list[SealedSegment] = []

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        self._look()
        return super().read(path, position, length)

    def size(self, path: str) -> int:
        self._look()
        return super().size(path)

    def listdir(self, path: str) -> list[str]:
        self._look()
        return super().listdir(path)

    def exists(self, path: str) -> bool:
        self._look()
        return super().exists(path)

    def _look(self) -> None:
        self.looks += 1
        if self.looks == self.drops_before:
            retention = Retention()
            retention.needs("lake/1", HolderKind.BACKLOG, Seq(NEEDED_FROM))
            bounds = RetentionBounds(0, 0, 0)
            self.dropped += drop_segments(FOLDER, retention, bounds, files=self, clock=ManualClock()).dropped


def filled() -> DropsBeforeALook:
    files, truth = DropsBeforeALook(), Truth()
    log = truth.open(files)
    for _ in range(8):
        truth.commit(log, truth.ops([(1, 12), (2, 6)], [(3, 12)]))
    return files


def numbers(reader: StreamReader) -> list[int]:
    found = reader.read_between(Seq(NEEDED_FROM - 1), reader.persisted_upto())
    return sorted(number for records in found for number in records.batch["__seq"].to_pylist())


def counted(files: MemoryFiles) -> object:
    end = StreamReader(FOLDER, files=files).persisted_upto()
    return Backlogs(FOLDER, files=files).between(Seq(NEEDED_FROM - 1), end)


def of_reader(read: Callable[[StreamReader], object]) -> Callable[[MemoryFiles], object]:
    return lambda files: read(StreamReader(FOLDER, files=files))


READS = {
    "schemas": of_reader(lambda reader: reader.schemas()),
    "schema_versions": of_reader(lambda reader: reader.schema_versions()),
    "newest_headers": of_reader(lambda reader: [h.group_last_seq for h in reader.newest_headers(Seq(10**9))]),
    "offset_beyond": of_reader(lambda reader: [reader.offset_beyond(shard, Seq(NEEDED_FROM - 1)) for shard in (0, 1)]),
    "whole_upto": of_reader(lambda reader: reader.whole_upto(Seq(NEEDED_FROM))),
    "cut": of_reader(lambda reader: reader.cut(Seq(NEEDED_FROM - 1), rows_max=60)),
    "read_between": of_reader(numbers),
    "backlog": counted,
    "verify": lambda files: verify(FOLDER, files=files).losses,
    "stats": lambda files: stats(FOLDER, files=files).losses,
    "inspect": lambda files: list(inspect(FOLDER, after=Seq(NEEDED_FROM), files=files)),
    "ls": lambda files: [found for found in ls(FOLDER, files=files) if (found.last_seq or 0) >= NEEDED_FROM],
}
"""Reads that need nothing of what retention drops."""


def after_each_drop(read: Callable[[MemoryFiles], object]) -> Iterator[Callable[[], object]]:
    """Yield the read, over and over, each time with retention before a later look."""
    whole = filled()
    undisturbed = DropsBeforeALook(whole)
    read(undisturbed)
    assert undisturbed.looks > 10
    for n in range(1, undisturbed.looks + 1, undisturbed.looks // LOOKS_MAX + 1):
        files = DropsBeforeALook(whole)
        files.drops_before = n
        yield partial(read, files)
        assert files.dropped


@pytest.mark.parametrize("name", READS)
def test_a_read_finds_the_same_whenever_retention_drops_what_it_does_not_need(name: str):
    expected = READS[name](filled())
    for read in after_each_drop(READS[name]):
        assert read() == expected


def test_numbers_of_a_moment_are_read_or_have_expired():
    answers = set()
    for read in after_each_drop(of_reader(lambda reader: reader.numbers_at(0))):
        try:
            answers.add(read())
        except OffsetExpired:
            answers.add("expired")
    assert len(answers) > 1
