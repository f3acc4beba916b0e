"""A file of the log is replaced whole or not at all, at every crash and every failure of the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.testing.files import Crash, FaultPlan, MemoryFiles, keep_any, lose_all
from millstream.wal.files import replacing

PATH = "/log/marks"
PIECES = st.lists(st.binary(min_size=1, max_size=2000), max_size=4)


def disk(content: bytes) -> MemoryFiles:
    """Return a disk that has the content, durably."""
    files = MemoryFiles()
    files.makedirs("/log")
    write(files, [content])
    return files


def write(files: MemoryFiles, pieces: Sequence[bytes]) -> None:
    with replacing(files, PATH) as file:
        position = 0
        for piece in pieces:
            file.pwrite(piece, position)
            position += len(piece)


@given(pieces=PIECES, at=st.integers(1, 12), seed=st.none() | st.integers(0, 99))
def test_a_crash_at_any_operation_leaves_the_old_content_or_the_new(pieces: list[bytes], at: int, seed: int | None):
    files = disk(b"old")
    files.plan = FaultPlan(crash_at=at)
    done = False
    with contextlib.suppress(Crash):
        write(files, pieces)
        done = True

    survivor = files.crash(lose_all if seed is None else keep_any(seed))

    assert survivor.read(PATH) in ({b"".join(pieces)} if done else {b"old", b"".join(pieces)})
    write(survivor, [b"again"])  # a leftover file is in no one's way
    assert survivor.read(PATH) == b"again"
    assert survivor.listdir("/log") == ["marks"]


@given(pieces=PIECES, at=st.integers(1, 12))
def test_a_failure_of_the_disk_reaches_the_caller_and_leaves_no_second_file(pieces: list[bytes], at: int):
    files = disk(b"old")
    files.plan = FaultPlan(fail_at=frozenset({at}))
    try:
        write(files, pieces)
    except OSError:
        assert files.read(PATH) in {b"old", b"".join(pieces)}
    else:
        assert files.read(PATH) == b"".join(pieces)
    assert files.listdir("/log") == ["marks"]


def test_an_error_of_the_writer_leaves_what_was_there():
    files = disk(b"old")
    with pytest.raises(ZeroDivisionError), replacing(files, PATH) as file:
        file.pwrite(bytes(1 // 0), 0)
    assert (files.listdir("/log"), files.read(PATH)) == (["marks"], b"old")
