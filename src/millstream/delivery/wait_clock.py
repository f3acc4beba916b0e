"""The clock by which consumers' messages wait: the wall clock, except that it never goes back.

Waits are kept in the wall clock's time, so that they pass while no process runs. If the clock is set back during a run,
the time goes on from where it was: otherwise messages in flight would stay so for as long as the clock was set back.
`protocol.delivery.Consumer` does the same for a clock that was set back between two runs.
"""

from __future__ import annotations

import time

from millstream.wal.files import SystemClock

_CLOCK = SystemClock()
_ahead_ns = 0
"""Greatest time by which the wall clock was ahead of the one that counts from the machine's start."""


def now_ms() -> int:
    """Return the time in ms since 1970. Any thread."""
    global _ahead_ns  # noqa: PLW0603 - one clock for all consumers of the process
    since_boot_ns = _CLOCK.monotonic_ns()
    ahead_ns = time.time_ns() - since_boot_ns
    _ahead_ns = max(_ahead_ns, ahead_ns)
    return (since_boot_ns + _ahead_ns) // 1_000_000
