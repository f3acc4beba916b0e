"""Transactions that are too large for memory wait in files, one pair each, until they commit or abort.

A pair is `<xid>-<n>.messages`, the messages one after the other, and `<xid>-<n>.lengths`, their lengths (uint32). Files are a
memory extension and nothing more: what they hold is sent again by the source after a crash, so they are never synced, and
those that a process left behind are removed when the next one starts.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from millstream.codec.pgoutput import MessageRun

FLUSH_BYTES: Final = 1 << 20
RUN_BYTES: Final = 8 << 20  # what is decoded at once: its columns take about three times as much

Payload = bytes | memoryview
"""A message as libpq gave it: a view of memory that libpq allocated for it."""


class SpillFile:
    """One transaction's messages. One thread appends; when it's done, any thread reads, again and again."""

    def __init__(self, folder: Path, name: str, header_bytes: int) -> None:
        self._messages = folder / f"{name}.messages"
        self._lengths = folder / f"{name}.lengths"
        self._header_bytes = header_bytes
        self._waiting: list[Payload] = []
        self._waiting_bytes = 0
        self.size_bytes = 0

    def append(self, payload: Payload) -> None:
        """Add a message, its header included."""
        self._waiting.append(payload)
        self._waiting_bytes += len(payload)
        if self._waiting_bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Put what waits in memory into the files."""
        if not self._waiting:
            return
        lengths = np.fromiter(map(len, self._waiting), dtype=np.uint32, count=len(self._waiting))
        with self._messages.open("ab") as messages, self._lengths.open("ab") as file:
            messages.write(b"".join(self._waiting))
            file.write(lengths.tobytes())
        self.size_bytes += self._waiting_bytes
        self._waiting = []
        self._waiting_bytes = 0

    def runs(self) -> Iterator[MessageRun]:
        """The messages in pieces of bounded size; from the start at every call."""
        assert not self._waiting, "flush before reading"
        if not self._lengths.exists():
            return
        lengths: npt.NDArray[np.int64] = np.fromfile(self._lengths, dtype=np.uint32).astype(np.int64)
        ends = np.cumsum(lengths)
        first = 0
        with self._messages.open("rb") as messages:
            while first < len(ends):
                begin = int(ends[first - 1]) if first else 0
                last = max(first + 1, int(np.searchsorted(ends, begin + RUN_BYTES, side="right")))
                data = messages.read(int(ends[last - 1]) - begin)
                own_ends = ends[first:last] - begin
                own_starts = own_ends - lengths[first:last] + self._header_bytes
                yield MessageRun(np.frombuffer(data, dtype=np.uint8), own_starts, own_ends)
                first = last

    def remove(self) -> None:
        """Remove the files; fine where there are none."""
        self._waiting = []
        self._messages.unlink(missing_ok=True)
        self._lengths.unlink(missing_ok=True)


class SpillFolder:
    """The spill files of one capture; the folder is nobody else's and is emptied when it is opened."""

    def __init__(self, path: str, *, header_bytes: int) -> None:
        self._path = Path(path)
        self._header_bytes = header_bytes
        self._numbers = itertools.count(1)
        self.clear()

    def clear(self) -> None:
        """Remove what lies there, and make the folder where it's missing."""
        if self._path.exists():
            shutil.rmtree(self._path)
        self._path.mkdir(parents=True)

    def create(self, xid: int) -> SpillFile:
        """A new, empty file for a transaction."""
        return SpillFile(self._path, f"{xid}-{next(self._numbers)}", self._header_bytes)
