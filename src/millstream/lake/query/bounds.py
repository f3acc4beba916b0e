"""What SQL that others send may take: memory, room on the disk beside it, and time. Each has an error of its own.

DuckDB holds its memory and its own files within bounds by itself. What it has none for is looked at from a thread of the session's: the time,
and what lies in its scratch folder altogether. What was found stands until the session ends: DuckDB forgets an interrupt with the statement that
it ended, and a session may have others before the one that was asked for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millstream.errors import MillstreamError, QueryMemoryFull, QuerySpillFull, QueryTimeout

_LOOKS_EVERY_S: Final = 0.1
_SPILL_WORDS: Final = ("max_temp_directory_size", "failed to offload")


@dataclass(frozen=True, slots=True)
class QueryBounds:
    """What one session may take."""

    memory_bytes: int
    """Of DuckDB; what doesn't fit goes to the disk."""
    spill_bytes: int
    """On the disk, in `folder`."""
    time_s: float
    """From its beginning to its end."""
    folder: Path
    """Where it makes a folder of its own, which it takes away again."""

    def settings(self) -> tuple[str, ...]:
        """What to SET in DuckDB. Given with `connect`, the second one is without effect."""
        return f"memory_limit = '{self.memory_bytes}B'", f"max_temp_directory_size = '{self.spill_bytes}B'"


class Watch:
    """Ends what a session does once it has taken what it may, or was given up.

    Args:
        bounds: None for none.
        scratch: the session's folder.
        interrupt: ends the statement that runs; called again and again.

    Concurrency: `give_up` from any thread, the others from the session's.
    """

    def __init__(self, bounds: QueryBounds | None, scratch: str, interrupt: Callable[[], None]) -> None:
        self._bounds = bounds
        self._scratch = scratch
        self._interrupt = interrupt
        self._ended = threading.Event()
        self._changed = threading.Event()
        self._failure: MillstreamError | None = None
        self._thread: threading.Thread | None = None
        if bounds is not None:
            self._thread = threading.Thread(target=self._look, args=(bounds,), name="millstream-query", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raise what the session was ended for.

        Raises:
            QueryTimeout, QuerySpillFull: it took what it may.
            MillstreamError: what it was given up with.
        """
        if self._failure is not None:
            raise self._failure

    def told(self, said: str, *, out_of_memory: bool) -> MillstreamError | None:
        """What an error of DuckDB's is in our words, where it comes of the bounds.

        Args:
            said: its message.
            out_of_memory: whether it says that of itself.
        """
        if self._failure is not None:
            return self._failure
        if self._bounds is None or not (out_of_memory or said.startswith("Out of Memory")):
            return None
        if any(word in said for word in _SPILL_WORDS):
            return self._spilled(self._bounds)
        size = self._bounds.memory_bytes
        return QueryMemoryFull(f"the query needs more than {size} bytes of memory at once", size_max=size)

    def give_up(self, error: MillstreamError) -> None:
        """End what the session does, now and from here on: it raises the error. Nothing happens in a session without bounds."""
        self._failure = self._failure or error
        self._changed.set()

    def end(self) -> None:
        """Look no more; nothing is interrupted from here on."""
        self._ended.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self, bounds: QueryBounds) -> None:
        end_s = time.monotonic() + bounds.time_s
        while not self._ended.is_set():
            if self._failure is None:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    self._failure = QueryTimeout(
                        f"the query wasn't done within {bounds.time_s:g} s", time_s=bounds.time_s
                    )
                elif _bytes_in(self._scratch) > bounds.spill_bytes:
                    self._failure = self._spilled(bounds)
                else:
                    self._changed.wait(min(left_s, _LOOKS_EVERY_S))
            if self._failure is not None:
                self._interrupt()
                self._ended.wait(_LOOKS_EVERY_S)

    @staticmethod
    def _spilled(bounds: QueryBounds) -> QuerySpillFull:
        size = bounds.spill_bytes
        return QuerySpillFull(f"the query puts more than {size} bytes aside on the disk", size_max=size)


def _bytes_in(folder: str) -> int:
    """The size of all files below a folder that is being written to."""
    size = 0
    for parent, _folders, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                size += Path(parent, file).lstat().st_size
    return size
