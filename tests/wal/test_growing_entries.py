"""Frames of the segment that is being written: found as one by one, and without a look at all before them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from tests.codec.test_log_segment import INT63, footers

from millstream.codec.log_frame import FrameKind
from millstream.codec.log_segment import FrameEntry, SegmentFooter, frames_after, frames_from, schemas_of
from millstream.model.ids import GroupNumber
from millstream.model.positions import Offset, Seq
from millstream.wal.growing_entries import GrowingEntries


@given(footers(), INT63)
def test_frames_are_found_as_one_by_one(footer: SegmentFooter, bound: int) -> None:
    growing = GrowingEntries()
    for entry in footer.frames:
        growing.append(entry)
    assert (list(growing), len(growing)) == (list(footer.frames), len(footer.frames))
    assert schemas_of(growing) == schemas_of(footer.frames)
    for seq in (bound, *(frame.group_last_seq for frame in footer.frames)):
        assert list(frames_after(growing, Seq(seq))) == list(frames_after(footer.frames, Seq(seq)))
    for offset in (bound, *(frame.offset + frame.count for frame in footer.frames)):
        assert list(frames_from(growing, Offset(offset))) == list(frames_from(footer.frames, Offset(offset)))


class _Watched:
    """A frame that counts the looks at it."""

    looks = 0

    def __init__(self, entry: FrameEntry) -> None:
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        _Watched.looks += 1
        return getattr(self._entry, name)


@pytest.mark.parametrize(("how", "count"), [("after", 1), ("from_offset", 2), ("schemas", 0)])
def test_a_reader_at_the_end_looks_at_no_frame_before_it(how: str, count: int) -> None:
    growing = GrowingEntries()
    for n in range(10_000):
        entry = FrameEntry(
            FrameKind.RECORDS, Offset(n), 1, 100 * n, 100, False, Seq(n), Seq(n), Seq(n), GroupNumber(n)
        )  # fmt: skip
        growing.append(_Watched(entry))  # type: ignore[arg-type]
    _Watched.looks = 0
    found = growing.schemas() if how == "schemas" else list(getattr(growing, how)(9_998))
    assert len(found) == count
    assert _Watched.looks < 10
