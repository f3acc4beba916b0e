"""When a pipeline starts its next batch, as arithmetic.

A batch pays for each table that it touches: a file, a commit and some requests, however few the records are. With a fixed
interval that is shorter than the batches, one follows the other, and a lake of many small tables gets as many files as it
can take. The adaptive rule rests as long as the last batch took. So the pipeline is busy for half of the time, a batch has
the records of twice its own length, and a table gets half of the files. The bounds keep quick batches half a second apart,
and records never wait longer than 5 s for a batch to start.

A batch that left records waiting, because it was full, is followed at once under either rule.
"""

from __future__ import annotations

from typing import Final

INTERVAL_S_MIN: Final = 0.5
"""From start to start of adaptive batches: a shorter interval costs an idle pipeline looks at the log, for little."""
PAUSE_S_MAX: Final = 5.0


def pause_s(took_s: float, interval_s: float | None) -> float:
    """Return the seconds from the end of a batch that wasn't full to the start of the next.

    Args:
        took_s: how long the batch took; next to nothing if no records waited.
        interval_s: fixed time from start to start; None: the adaptive rule.
    """
    if interval_s is not None:
        return max(0.0, interval_s - took_s)
    return min(max(took_s, INTERVAL_S_MIN - took_s), PAUSE_S_MAX)
