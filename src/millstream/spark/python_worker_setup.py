"""Setup of every Python worker of Spark that runs our code."""

from __future__ import annotations

import gc
from functools import cache


@cache
def spare_the_collector(_job: str) -> None:
    """Exclude a job's imports from garbage collection; called after the job's first task in a process.

    A worker collects garbage after every task. Traversing modules, which never change, took as long
    as decoding a hundred thousand rows.

    Args:
        _job: each job has imports of its own.
    """
    gc.collect()
    gc.freeze()
