"""Bounds of other users' SQL: memory, disk space for spilling, and time. Each has an error of its own.

DuckDB itself bounds its memory and its own files. A thread of the session checks the rest: the
time, and the total size of its scratch folder. A failed check stands until the session ends.
DuckDB's own interrupt ends with the interrupted statement, and a session may run others before the
requested one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from millstream.errors import LakeError, MillstreamError
from millstream.workers import Worker

_LOOKS_EVERY_S: Final = 0.1
_SPILL_WORDS: Final = ("max_temp_directory_size", "failed to offload")


@dataclass(frozen=True, slots=True)
class QueryBounds:
    """The bounds of one session."""

    memory_bytes: int
    """Memory of DuckDB in bytes; larger data spills to disk."""
    spill_bytes: int
    """Bytes on disk, in `folder`."""
    time_s: float
    """Seconds from the session's beginning to its end."""
    folder: Path
    """The folder in which it makes a folder of its own, which it removes again."""

    def settings(self) -> tuple[str, ...]:
        """Return DuckDB's settings for SET. If passed to `connect`, the second one has no effect."""
        return f"memory_limit = '{self.memory_bytes}B'", f"max_temp_directory_size = '{self.spill_bytes}B'"


class QueryWatch:
    """Ends a session's work once it exceeds its bounds.

    Args:
        bounds: None for none.
        interrupt: ends the running statement; called repeatedly.

    Concurrency: the session's thread.
    """

    def __init__(self, bounds: QueryBounds | None, scratch: str, interrupt: Callable[[], None]) -> None:
        self._bounds = bounds
        self._scratch = scratch
        self._interrupt = interrupt
        self._ended = threading.Event()
        self._failure: MillstreamError | None = None
        self._worker: Worker | None = None
        if bounds is not None:
            self._worker = Worker("millstream-query", partial(self._look, bounds)).start()

    def check(self) -> None:
        """Raise the error that the session was ended with.

        Raises:
            LakeError (`query_timeout`, `query_spill_full`): it exceeded a bound.
        """
        if self._failure is not None:
            raise self._failure

    def told(self, said: str, *, out_of_memory: bool) -> MillstreamError | None:
        """Return our error for an error of DuckDB, if the bounds caused it.

        Args:
            said: its message.
            out_of_memory: whether it is an out-of-memory error by type.
        """
        if self._failure is not None:
            return self._failure
        if self._bounds is None or not (out_of_memory or said.startswith("Out of Memory")):
            return None
        if any(word in said for word in _SPILL_WORDS):
            return self._spilled(self._bounds)
        size = self._bounds.memory_bytes
        return LakeError(
            f"the query needs more than {size} bytes of memory at once", code="query_memory_full", size_max=size
        )

    def end(self) -> None:
        """Stop checking; nothing is interrupted from here on."""
        self._ended.set()
        if self._worker is not None:
            self._worker.join()

    def _look(self, bounds: QueryBounds) -> None:
        end_s = time.monotonic() + bounds.time_s
        while not self._ended.is_set():
            if self._failure is None:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    self._failure = LakeError(
                        f"the query didn't finish within {bounds.time_s:g} s",
                        code="query_timeout",
                        time_s=bounds.time_s,
                    )
                elif _bytes_in(self._scratch) > bounds.spill_bytes:
                    self._failure = self._spilled(bounds)
                else:
                    self._ended.wait(min(left_s, _LOOKS_EVERY_S))
            if self._failure is not None:
                self._interrupt()
                self._ended.wait(_LOOKS_EVERY_S)

    @staticmethod
    def _spilled(bounds: QueryBounds) -> LakeError:
        size = bounds.spill_bytes
        return LakeError(f"the query spills more than {size} bytes to disk", code="query_spill_full", size_max=size)


def _bytes_in(folder: str) -> int:
    """Return the size of all files below a folder that is being written to."""
    size = 0
    for parent, _folders, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                size += Path(parent, file).lstat().st_size
    return size
