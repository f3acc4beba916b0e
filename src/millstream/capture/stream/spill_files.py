"""Transactions that are too large for memory wait in files, one pair each, until they commit or abort.

A pair is `<xid>-<n>.messages`, the messages and the bytes between them in memory, and `<xid>-<n>.bounds`, two uint32
for each message: the gap before it in bytes, and its length. Files only extend memory. After a crash the source sends
their contents again, so they are never synced, and the next process removes files that are left at its start. The
folder also has the rows of tables that are copied whole (`copied_file`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from millstream.capture.config import free_bytes_of
from millstream.codec.pgoutput import MessageRun
from millstream.errors import DiskFull, MillstreamError
from millstream.private_files import make_folder, open_private

FLUSH_BYTES: Final = 1 << 20
_PAIRS: Final = 1 << 16
RUN_BYTES: Final = 8 << 20  # decoded at a time: the columns take about three times as much


class SpillFile:
    """One transaction's messages. One thread appends; when it's done, any thread may read, repeatedly."""

    def __init__(self, folder: Path, name: str) -> None:
        self._messages = folder / f"{name}.messages"
        self._bounds = folder / f"{name}.bounds"
        self._waiting: list[MessageRun] = []
        self._waiting_bytes = 0
        self.size_bytes = 0

    def append(self, messages: MessageRun) -> None:
        """Add messages; bytes between them in their buffer are written and never read. Raises as `flush`."""
        if not len(messages):
            return
        self._waiting.append(messages)
        self._waiting_bytes += messages.span_bytes
        if self._waiting_bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write waiting messages to the files.

        Raises:
            DiskFull: there is no space for them; the files are no longer usable.
            MillstreamError (`home_unwritable`): they can't be written for another reason.
        """
        if not self._waiting:
            return
        with (
            told(self._messages),
            open(self._messages, "ab", opener=open_private) as messages,
            open(self._bounds, "ab", opener=open_private) as bounds,
        ):
            for run in self._waiting:
                pairs = np.empty((len(run), 2), dtype=np.uint32)
                pairs[0, 0] = 0
                pairs[1:, 0] = run.starts[1:] - run.ends[:-1]
                pairs[:, 1] = run.ends - run.starts
                messages.write(run.buffer[run.starts[0] : run.ends[-1]].data)
                bounds.write(pairs.data)
        self.size_bytes += self._waiting_bytes
        self._waiting = []
        self._waiting_bytes = 0

    def runs(self) -> Iterator[MessageRun]:
        """Yield the messages in runs of bounded size; from the start at every call."""
        assert not self._waiting, "flush before reading"
        if not self._bounds.exists():
            return
        with self._messages.open("rb") as messages, self._bounds.open("rb") as bounds:
            while some := bounds.read(_PAIRS * 8):
                pairs: npt.NDArray[np.int64] = np.frombuffer(some, dtype=np.uint32).reshape(-1, 2).astype(np.int64)
                ends = np.cumsum(pairs.sum(axis=1))
                starts = ends - pairs[:, 1]
                first = 0
                while first < len(ends):
                    begin = int(ends[first - 1]) if first else 0
                    last = max(first + 1, int(np.searchsorted(ends, begin + RUN_BYTES, side="right")))
                    data = messages.read(int(ends[last - 1]) - begin)
                    buffer = np.frombuffer(data, dtype=np.uint8)
                    yield MessageRun(buffer, starts[first:last] - begin, ends[first:last] - begin)
                    first = last

    def remove(self) -> None:
        """Remove the files, if there are any."""
        self._waiting = []
        self._messages.unlink(missing_ok=True)
        self._bounds.unlink(missing_ok=True)


class SpillFolder:
    """The spill files of one capture, which alone uses the folder, and empties it when it is opened.

    Args:
        free_bytes: returns the free space of the disk of a folder.
    """

    def __init__(self, path: str, free_bytes: Callable[[Path], int] = free_bytes_of) -> None:
        self._path = Path(path)
        self._free_bytes = free_bytes
        self._numbers = itertools.count(1)
        self.clear()

    def clear(self) -> None:
        """Remove all files from the folder, and create it if it is missing. Raises as `SpillFile.flush`."""
        with told(self._path):
            make_folder(self._path)
            for left in self._path.iterdir():
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink()

    def create(self, xid: int) -> SpillFile:
        """Return a new, empty file for a transaction."""
        return SpillFile(self._path, f"{xid}-{next(self._numbers)}")

    def path_for(self, name: str) -> Path:
        """Return the path for a new file of that name; it is removed with the others."""
        return self._path / f"{name}-{next(self._numbers)}"

    def free_bytes(self) -> int:
        """Return the free space of its disk."""
        return self._free_bytes(self._path)


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Translate the disk's errors raised within the block."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFull(f"no disk space in {path} for data that exceeds memory", path=str(path)) from error
        raise MillstreamError(
            f"{error.filename or path}: {error.strerror}", code="home_unwritable", path=str(path)
        ) from error
