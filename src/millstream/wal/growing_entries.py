"""The frames of a segment that is being written, as far as a reader has come to see them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import overload

from millstream.codec.log_frame import FrameKind
from millstream.codec.log_segment import FrameEntry, IndexedEntries, SchemaPlace, schemas_of
from millstream.model.positions import Offset, Seq


class GrowingEntries(IndexedEntries):
    """Frames in their order. A reader at the end finds its place by bisection: the segment may have 100,000 before it."""

    __slots__ = ("_entries", "_group_ends", "_record_ends", "_schemas")

    def __init__(self) -> None:
        self._entries: list[FrameEntry] = []
        self._group_ends: list[int] = []
        """For each frame the greatest end of a group so far."""
        self._record_ends: list[int] = []
        """For each frame the end of the offsets so far."""
        self._schemas: list[SchemaPlace] = []

    def append(self, entry: FrameEntry) -> None:
        """Add the frame that follows."""
        group_end, record_end = entry.group_last_seq, entry.offset + entry.count
        if self._entries:
            group_end, record_end = Seq(max(group_end, self._group_ends[-1])), max(record_end, self._record_ends[-1])
        self._entries.append(entry)
        self._group_ends.append(group_end)
        self._record_ends.append(record_end)
        self._schemas += schemas_of((entry,))

    def after(self, after: Seq) -> Iterator[FrameEntry]:
        """See `IndexedEntries`."""
        following = self._from(bisect_right(self._group_ends, after))
        return (entry for entry in following if entry.group_last_seq > after and entry.kind is not FrameKind.SCHEMA)

    def from_offset(self, offset: Offset) -> Iterator[FrameEntry]:
        """See `IndexedEntries`."""
        following = self._from(bisect_right(self._record_ends, offset))
        return (entry for entry in following if entry.count and entry.offset + entry.count > offset)

    def schemas(self) -> list[SchemaPlace]:
        """See `IndexedEntries`."""
        return list(self._schemas)

    def _from(self, place: int) -> Iterator[FrameEntry]:
        entries = self._entries
        return map(entries.__getitem__, range(place, len(entries)))

    def __iter__(self) -> Iterator[FrameEntry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, place: int) -> FrameEntry: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[FrameEntry]: ...
    def __getitem__(self, place: int | slice) -> FrameEntry | Sequence[FrameEntry]:
        return self._entries[place]
