"""A system that lets a process have no more threads."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from millstream.workers import Worker


@contextmanager
def refused_threads(*names: str) -> Iterator[None]:
    """Refuse threads whose names begin so, as the system does at its limit, until the block ends."""
    start = Worker.start

    def refused(worker: Worker) -> Worker:
        if worker.name.startswith(names):
            raise OSError(errno.EAGAIN, "no more threads can be started")
        return start(worker)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Worker, "start", refused)
        yield
