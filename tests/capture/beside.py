"""Threads that run next to a test. The test fails if one of them raises, or doesn't end."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

DEADLINE_S = 180


class Beside(threading.Thread):
    """A thread that starts when it is constructed. It ends with the process, whatever it waits for."""

    def __init__(self, target: Callable[..., object], *arguments: Any) -> None:
        super().__init__(daemon=True, name=f"beside-{getattr(target, '__name__', 'test')}")
        self._work = lambda: target(*arguments)
        self.error: BaseException | None = None
        """The exception that it ended with."""
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for it
            self.error = error

    def ended(self, deadline_s: float = DEADLINE_S) -> None:
        """Return when the thread has ended; raise what it raised."""
        joined(self, self.name, deadline_s)
        if self.error is not None:
            raise self.error


def joined(thread: threading.Thread, what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return when a thread has ended; a failure reports what all threads do."""
    thread.join(deadline_s)
    assert not thread.is_alive(), f"after {deadline_s:g} s it hasn't ended: {what}\n{stacks()}"


@contextmanager
def until_done(*works: Callable[[threading.Event], object]) -> Iterator[None]:
    """Run each on its own thread, until its event reports that the block has ended.

    An error of one is raised after the block.
    """
    stop = threading.Event()
    threads = [Beside(work, stop) for work in works]
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            joined(thread, thread.name)
    for thread in threads:
        thread.ended()


def stacks() -> str:
    """Return the stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"--- thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )


def activity(dsn: str) -> str:
    """Return what a server's processes do, its slots and its prepared transactions.

    It never raises, and takes some seconds at most.
    """
    queries = (
        "SELECT pid, backend_type, datname, state, wait_event_type, wait_event, backend_xid::text, left(query, 200) FROM pg_stat_activity",
        "SELECT slot_name, active_pid, restart_lsn::text, confirmed_flush_lsn::text FROM pg_replication_slots",
        "SELECT gid, database, prepared::text FROM pg_prepared_xacts",
    )
    told = []
    try:
        with psycopg.connect(dsn, autocommit=True, connect_timeout=5, options="-c statement_timeout=5s") as connection:
            for query in queries:
                told += [str(row) for row in connection.execute(query).fetchall()]
    except psycopg.Error as error:
        told.append(f"the server doesn't say what it does: {error}")
    return "\n".join(told)


def wait_until(true: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return once the condition holds."""
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.01)
