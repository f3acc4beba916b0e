"""When to fold which table: a rule of arithmetic, without a clock.

A fold rewrites the files of `current` that hold a changed key. The files it replaces stay on disk for as long as readers may
still use them (`keep_s`, 5 minutes). So a table whose every file is touched by each fold, folded every `t` seconds, holds
`keep_s / t` dead copies beside the live one. `disk_factor` bounds that: disk bytes over live bytes.

    removed_bytes x keep_s / t  <=  (disk_factor - 1) x live_bytes

With the defaults, a table that is rewritten whole folds every 75 s; one whose changes lie together, in proportion oftener.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millstream.lake.upkeep import KEEP_S

DISK_FACTOR: Final = 5.0
SMALL_BYTES: Final = 8 << 20
"""A table below this is folded after every batch, whatever it leaves: 5 minutes of it are a few hundred MiB at worst."""
BUSY_SHARE: Final = 0.5
"""Of the time, folding may take for one table; the rest is the batches'."""


@dataclass(frozen=True, slots=True)
class FoldHistory:
    """What the last fold of a table was: zeros where there was none in this process."""

    ended_s: float = float("-inf")
    """On a monotonic clock."""
    took_s: float = 0.0
    live_bytes: int = 0
    """Of `current` after it."""
    removed_bytes: int = 0
    """Of the files that it replaced."""


def fold_interval_s(last: FoldHistory, *, disk_factor: float = DISK_FACTOR, keep_s: float = KEEP_S) -> float:
    """The least time from the end of one fold to the start of the next."""
    rest = last.took_s * (1 / BUSY_SHARE - 1)
    if last.live_bytes < SMALL_BYTES:
        return rest
    return max(rest, keep_s * last.removed_bytes / ((disk_factor - 1) * last.live_bytes))


def fold_is_due(last: FoldHistory, now_s: float, *, disk_factor: float = DISK_FACTOR, keep_s: float = KEEP_S) -> bool:
    """Whether a table with something to fold may be folded now."""
    return now_s - last.ended_s >= fold_interval_s(last, disk_factor=disk_factor, keep_s=keep_s)
