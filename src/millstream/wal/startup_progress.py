"""Progress of a slow start, in the process's log: how much of a log was read so far, and for how long."""

from __future__ import annotations

from typing import Any, Final, cast

import structlog

from millstream.ports import Clock, Files

logger = structlog.get_logger("millstream.wal")

_SLOW_NS: Final = 2 * 10**9
"""Time before the first line: most starts end earlier, without a line."""
_EVERY_NS: Final = 10 * 10**9


class StartupProgress:
    """One step of a start: logged once it takes longer than two seconds, then every ten seconds, and when it ends.

    Used by one thread. It looks at the time whenever the step reads a file.

    Args:
        step: the step, as a noun phrase.
    """

    def __init__(self, step: str, clock: Clock, folder: str) -> None:
        self._step, self._clock, self._folder = step, clock, folder
        self._began_ns = clock.monotonic_ns()
        self._due_ns = self._began_ns + _SLOW_NS
        self._segments = set[str]()
        self._bytes = 0

    def over(self, files: Files) -> Files:
        """Return a file system that counts what is read of segments."""
        return cast(Files, _CountedFiles(files, self))

    def read(self, path: str, size: int) -> None:
        """Count bytes read of a file; log if a line is due."""
        if path.endswith(".wal"):
            self._segments.add(path)
            self._bytes += size
        if self._clock.monotonic_ns() > self._due_ns:
            self._due_ns = self._clock.monotonic_ns() + _EVERY_NS
            self._log(f"{self._step} goes on")

    def end(self) -> None:
        """Log the totals if the step was slow."""
        if self._clock.monotonic_ns() > self._began_ns + _SLOW_NS:
            self._log(f"{self._step} is done")

    def _log(self, event: str) -> None:
        seconds = round((self._clock.monotonic_ns() - self._began_ns) / 1e9, 1)
        logger.info(event, folder=self._folder, segments=len(self._segments), bytes=self._bytes, seconds=seconds)


class _CountedFiles:
    """`ports.Files` of another one, with its reads counted."""

    def __init__(self, files: Files, progress: StartupProgress) -> None:
        self._files, self._progress = files, progress

    def read(self, path: str, position: int = 0, length: int | None = None) -> bytes:
        data = self._files.read(path, position, length)
        self._progress.read(path, len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)
