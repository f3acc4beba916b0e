"""The schedule of folds: a rule of arithmetic, without a clock.

A fold rewrites the files of `current` that hold a changed key. Readers may still use the replaced
files, so these stay on disk for `keep_s` (5 minutes). Before each fold, those that are older are deleted.
So while a fold writes, a table whose every file is touched holds the live copy, the copy being
written, and one for each fold of the last `keep_s`. `disk_factor` bounds that: disk bytes over live
bytes. With r = removed / live bytes of a fold and n folds' files still there:

    1 + r + n r  <=  disk_factor - 0.1 for the table's log,
    and n folds ago was longer than keep_s before this one began

With the defaults, a table that is rewritten whole folds 100 s after its last fold; a table with
clustered changes folds proportionally more often. No table folds more often than every
`FOLD_INTERVAL_S`: each fold writes at least a data file, a commit and a cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millstream.lake.maintenance import KEEP_S

DISK_FACTOR: Final = 5.0
FOLD_INTERVAL_S: Final = 30.0
"""The minimum time from one fold of a table to the next. Queries don't wait for folds, because they
also read the records behind the last one."""
SMALL_BYTES: Final = 1 << 20
"""The disk factor of a table below this isn't bounded: 5 minutes of its folds are 10 MiB at worst."""
BUSY_SHARE: Final = 0.5
"""Share of the time that folding may take for one table; the rest is for batches."""


_LOG_SHARE: Final = 0.1
"""Approximate bytes of a table's `_delta_log` over its live bytes, which also count."""
_CLOCK_S: Final = 1.0
"""Allowance for commit times, which come from another clock than the one for folds."""


@dataclass(frozen=True, slots=True)
class FoldHistory:
    """Facts of a table's last fold: zeros if there was none in this process."""

    ended_s: float = float("-inf")
    """End of the fold, on a monotonic clock."""
    took_s: float = 0.0
    live_bytes: int = 0
    """Size in bytes of `current` after the fold."""
    removed_bytes: int = 0
    """Size in bytes of the files that the fold replaced."""


def fold_interval_s(
    last: FoldHistory,
    *,
    least_s: float = FOLD_INTERVAL_S,
    disk_factor: float = DISK_FACTOR,
    keep_s: float = KEEP_S,
) -> float:
    """Return the minimum time from the end of one fold to the start of the next, at least `least_s`."""
    rest = max(least_s, last.took_s * (1 / BUSY_SHARE - 1))
    if last.live_bytes < SMALL_BYTES or not last.removed_bytes:
        return rest
    copies = max(1, int((disk_factor - _LOG_SHARE - 1) * last.live_bytes / last.removed_bytes))
    # However long folds take, this many waits between them are together longer than `keep_s`.
    return max(rest, (keep_s + _CLOCK_S) / copies)


def fold_is_due(
    last: FoldHistory,
    now_s: float,
    *,
    least_s: float = FOLD_INTERVAL_S,
    disk_factor: float = DISK_FACTOR,
    keep_s: float = KEEP_S,
) -> bool:
    """Whether a table with something to fold may be folded now."""
    return now_s - last.ended_s >= fold_interval_s(last, least_s=least_s, disk_factor=disk_factor, keep_s=keep_s)
