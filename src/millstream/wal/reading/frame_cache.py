"""Decoded frames that several readers of one log share: the consumers of a stream mostly read the same ones.

A frame is known by its head, whose checksums cover its rows: after a promotion other rows at the same place are another
frame. Each reader verifies the head itself; the rows were verified when they were decoded.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from millstream.model.ids import Epoch, TableId

if TYPE_CHECKING:
    from millstream.wal.reading.table_records import TableRecords

_BYTES_MAX: Final = 64 << 20
"""Some 200,000 records of a few hundred bytes: consumers that are so far apart share nothing."""

FrameKey = tuple[Epoch, bytes, frozenset[TableId]]
"""The segment's epoch, the frame's head, and the tables that were decoded."""


class DecodedFrames:
    """The records of recently read frames, with their offsets.

    Args:
        bytes_max: bytes of all of them; a frame of more than a quarter isn't kept.

    Concurrency: any number of threads. Two that miss the same frame both decode it.
    """

    def __init__(self, bytes_max: int = _BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._frames: OrderedDict[FrameKey, tuple[list[TableRecords], int]] = OrderedDict()
        """Frames and their sizes; the one that was used last comes last."""
        self._size = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the frames that are kept."""
        return self._size

    def find(self, key: FrameKey, decode: Callable[[], list[TableRecords]]) -> list[TableRecords]:
        """Return a frame's records; `decode` makes them, if they aren't kept. Raises as `decode`."""
        with self._lock:
            known = self._frames.get(key)
            if known is not None:
                self._frames.move_to_end(key)
                return known[0]
        records = decode()
        self.keep(key, records, len(key[1]) + sum(part.batch.nbytes for part in records))
        return records

    def keep(self, key: FrameKey, records: list[TableRecords], size: int) -> None:
        """Keep a frame's records, of that many bytes, for others, unless they are too large."""
        if size <= self._bytes_max // 4:
            with self._lock:
                if key not in self._frames:
                    self._frames[key] = records, size
                    self._size += size
                while self._size > self._bytes_max:
                    self._size -= self._frames.popitem(last=False)[1][1]

    def __contains__(self, key: FrameKey) -> bool:
        """Whether a frame's records are kept."""
        return key in self._frames
