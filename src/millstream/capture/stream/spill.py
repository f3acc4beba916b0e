"""Transactions that are too large for memory wait in files, one pair each, until they commit or abort.

A pair is `<xid>-<n>.messages`, the messages with whatever stood between them in memory, and `<xid>-<n>.bounds`, two uint32
for each: how many bytes it lies behind the one before, and its length. Files are a memory extension and nothing more: what
they hold is sent again by the source after a crash, so they are never synced, and those that a process left behind are
removed when the next one starts. The folder has the rows of tables that are copied whole too (`copied_file`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from millstream.codec.pgoutput import MessageRun
from millstream.errors import DiskFull, HomeUnwritable
from millstream.private_files import make_folder, open_private

FLUSH_BYTES: Final = 1 << 20
_PAIRS: Final = 1 << 16
RUN_BYTES: Final = 8 << 20  # what is decoded at once: its columns take about three times as much


class SpillFile:
    """One transaction's messages. One thread appends; when it's done, any thread reads, again and again."""

    def __init__(self, folder: Path, name: str) -> None:
        self._messages = folder / f"{name}.messages"
        self._bounds = folder / f"{name}.bounds"
        self._waiting: list[MessageRun] = []
        self._waiting_bytes = 0
        self.size_bytes = 0

    def append(self, messages: MessageRun) -> None:
        """Add messages; what lies between them in their buffer is kept and never read. Raises as `flush`."""
        if not len(messages):
            return
        self._waiting.append(messages)
        self._waiting_bytes += messages.span_bytes
        if self._waiting_bytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Put what waits in memory into the files.

        Raises:
            DiskFull: there is no space for it; the files are of no use any more.
            HomeUnwritable: they can't be written for another reason.
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
        """The messages in pieces of bounded size; from the start at every call."""
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
        """Remove the files; fine where there are none."""
        self._waiting = []
        self._messages.unlink(missing_ok=True)
        self._bounds.unlink(missing_ok=True)


class SpillFolder:
    """The spill files of one capture; the folder is nobody else's and is emptied when it is opened."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._numbers = itertools.count(1)
        self.clear()

    def clear(self) -> None:
        """Remove what lies there, and make the folder where it's missing; it is there all the time. Raises as `SpillFile.flush`."""
        with told(self._path):
            make_folder(self._path)
            for left in self._path.iterdir():
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                else:
                    left.unlink()

    def create(self, xid: int) -> SpillFile:
        """A new, empty file for a transaction."""
        return SpillFile(self._path, f"{xid}-{next(self._numbers)}")

    def path_for(self, name: str) -> Path:
        """Where a new file of that name may lie; it goes with the others."""
        return self._path / f"{name}-{next(self._numbers)}"

    def free_bytes(self) -> int:
        """Space that is left there."""
        return shutil.disk_usage(self._path).free


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """What the disk refuses, as an error of ours."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFull(f"no space for what is too large for memory in {path}", path=str(path)) from error
        raise HomeUnwritable(f"{error.filename or path}: {error.strerror}", path=str(path)) from error
