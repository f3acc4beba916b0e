"""Reads that go on when retention drops a segment that they have listed and don't need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from millstream.model.positions import Offset, Seq
from millstream.ports import Files
from millstream.wal.durable_mark import read_dropped

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def past_drops(files: Files, read: Callable[[], _Found]) -> _Found:
    """Return what a read of a whole log finds; begin it again if retention drops a segment during it."""
    while True:
        try:
            return read()
        except FileNotFoundError as error:
            if not is_dropped(files, error):
                raise


@contextmanager
def skipping_dropped(files: Files) -> Iterator[None]:
    """Context of looking at one segment: it ends early, without an error, if retention drops the segment."""
    try:
        yield
    except FileNotFoundError as error:
        if not is_dropped(files, error):
            raise


def is_dropped(files: Files, error: FileNotFoundError) -> bool:
    """Return whether a file is gone because it is a segment that retention has dropped."""
    dropped = read_dropped(files, str(error.filename).rpartition("/")[0])
    return dropped is not None and _is_before(error, dropped.offset)


def past_dropped_front(
    read: Callable[[], Iterator[_Item]], dropped: Callable[[], tuple[Seq, Offset]], after: Seq
) -> Iterator[_Item]:
    """Yield what a read of a shard yields; begin it again if retention drops a segment that it doesn't need.

    A read looks at the segment before that of its first record, too, which retention may drop at any moment.

    Args:
        read: begins the read.
        dropped: returns the last number dropped, and the first offset left.
        after: the read needs the numbers after this one.
    """
    while True:
        items = read()
        try:
            first = next(items, None)
        except FileNotFoundError as error:
            seq, offset = dropped()
            if seq > after or not _is_before(error, offset):
                raise
            continue
        if first is not None:
            yield first
            yield from items
        return


def _is_before(error: FileNotFoundError, offset: Offset) -> bool:
    """Return whether the file that is gone is a segment before an offset."""
    name = str(error.filename).rsplit("/", 1)[-1]
    return name.endswith(".wal") and Offset(int(name.removesuffix(".wal"))) < offset
