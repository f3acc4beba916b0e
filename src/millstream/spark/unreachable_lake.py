"""A step is repeated while the lake can't be reached: with growing pauses, for a bounded time.

A batch uses the same pauses for a table that fails for a while (`spark.batch_landing`).

Requests to an object store are retried for a few seconds only (`LakeLayout.patience_s`): delta-rs holds the interpreter's
lock during some of them, and the process couldn't report or end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from millstream.backoff import Backoff
from millstream.errors import LakeUnavailable, Retry

LAKE_PATIENCE_S: Final = 300.0
"""Long enough for a store's restart or a failover; a longer outage is reported."""
_Result = TypeVar("_Result")


def pauses() -> Backoff:
    """Return the pauses between the tries of one step."""
    return Backoff(0.8, factor=4, most_s=60.0, jitter=0)


def patiently(
    step: Callable[[], _Result],
    *,
    wait: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> _Result:
    """Return a step's result; repeat the step while the lake can't be reached.

    Args:
        step: harmless to repeat.
        wait: waits so many seconds; returns true if there is no time for another try.
        clock: seconds of a clock that never goes back.

    Raises:
        LakeUnavailable: a person has to act, or it lasted for `LAKE_PATIENCE_S`.
    """
    backoff, began_s = pauses(), clock()
    while True:
        try:
            return step()
        except LakeUnavailable as error:
            is_over = error.retry is not Retry.BACKOFF or clock() - began_s >= LAKE_PATIENCE_S
            if is_over or wait(backoff.next_s()):
                raise
