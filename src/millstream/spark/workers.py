"""What holds in every Python worker of Spark's that runs our code."""

from __future__ import annotations

import gc
from functools import cache


@cache
def spare_the_collector(_job: str) -> None:
    """Take what a job has imported out of the garbage collector's sight; called behind the job's first task in a process.

    A worker collects garbage behind every task that it ran. To look through modules, which never change, took that as long as
    decoding a hundred thousand rows.

    Args:
        _job: each one imports something of its own.
    """
    gc.collect()
    gc.freeze()
