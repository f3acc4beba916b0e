"""Lag as `status` shows it: of the log behind the source, of the lake behind the log, and what is held of the log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import LogError
from millstream.home.paths import HomePaths
from millstream.model.positions import Seq

if TYPE_CHECKING:
    from millstream.wal.backlog import Backlog, Backlogs

_FRAMES_MAX: Final = 1_000_000
"""Number of frames in the kept indexes of all logs together: some 160 MB."""


def capture_lag(progress: dict[str, Any]) -> dict[str, Any]:
    """Return the source's lead over the log; known only while capture runs."""
    if not progress:
        return {"records": None, "bytes": None, "seconds": None}
    behind = max(0, progress.get("source_end", 0) - progress.get("durable", 0))
    return {"records": 0 if behind == 0 else None, "bytes": behind, "seconds": 0.0 if behind == 0 else None}


def backlog_counter(
    home: HomePaths, name: str, durable: Seq | None, backlogs: dict[str, Backlogs], problems: list[str]
) -> Callable[[Seq], Backlog | None]:
    """Return a function that counts what the log has after a number; None if it can't be read."""
    from millstream.wal.backlog import Backlogs

    folder = str(home.wal_folder(name))
    own = backlogs.setdefault(folder, Backlogs(folder))

    def counted(after: Seq) -> Backlog | None:
        try:
            return None if durable is None else own.between(after, durable)
        except (LogError, OSError) as error:
            backlogs.pop(folder, None)  # read again from the beginning next time
            problems.append(f"log of {name}: {error}")
            return None

    return counted


def trim(backlogs: dict[str, Backlogs]) -> None:
    """Forget the largest indexes until the others together are small enough to keep."""
    sizes = {folder: own.frames_kept for folder, own in backlogs.items()}
    for folder in sorted(sizes, key=lambda folder: -sizes[folder]):
        if sum(sizes.values()) <= _FRAMES_MAX:
            return
        del backlogs[folder], sizes[folder]


def lake_lag(waiting: Backlog | None) -> dict[str, Any]:
    """Return the log's lead over the lake."""
    if waiting is None:
        return {"records": None, "bytes": None, "seconds": None}
    seconds = 0.0 if waiting.records == 0 else _age_s(waiting)
    return {"records": waiting.records, "bytes": waiting.size_bytes, "seconds": seconds}


def held_log(needed_from: Seq, waiting: Backlog | None) -> dict[str, Any]:
    """Return how much of the log lies from a number on."""
    if waiting is None:
        return {"from": int(needed_from), "bytes": None, "seconds": None}
    return {"from": int(needed_from), "bytes": waiting.size_bytes, "seconds": _age_s(waiting)}


def _age_s(waiting: Backlog) -> float | None:
    """Return the age of its oldest record."""
    oldest = waiting.oldest_commit_us
    return None if oldest is None else max(0.0, time.time() - oldest / 1e6)
