"""Waiting for an answer of the source doesn't keep the interpreter.

The source may be waiting for another thread of this process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import pq
from tests.capture.beside import Beside
from tests.capture.capture_stage import Stage

from millstream.capture.connection import connect_replication, next_result
from millstream.capture.copying import copy_output
from millstream.capture.slot import create_slot

Connection = psycopg.Connection[Any]


def by_result(waiting: Connection) -> bytes | None:
    waiting.pgconn.send_query(b"SELECT pg_advisory_lock(7)::text, 'had'")
    result = next_result(waiting.pgconn)
    assert result is not None
    assert result.status == pq.ExecStatus.TUPLES_OK, result.error_message
    assert next_result(waiting.pgconn) is None
    return result.get_value(0, 1)


def by_rows(waiting: Connection) -> bytes:
    """Read through libpq, as an encrypted connection does."""
    query = b"COPY (SELECT pg_advisory_lock(7)::text, 'had') TO STDOUT"
    rows = copy_output._ByLibpq(waiting.pgconn, query).next(1 << 20)
    assert rows.whole
    return rows.lines()[0].split()[-1]


@pytest.mark.parametrize("wait", [by_result, by_rows])
def test_a_thread_of_ours_that_the_answer_waits_for_goes_on(
    stage: Stage, wait: Callable[[Connection], bytes | None]
) -> None:
    waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    # If the wait kept the interpreter, the statement would be canceled in the end, and the test fail.
    with stage.connect() as holding, stage.connect() as waiting:
        waiting.execute("SET statement_timeout = '30s'")
        holding.execute("SELECT pg_advisory_lock(7)")

        def let_go() -> None:
            while holding.execute(waits).fetchone() == (0,):
                continue
            holding.execute("SELECT pg_advisory_unlock(7)")

        beside = Beside(let_go)
        assert wait(waiting) == b"had"
        beside.ended()


def test_a_slot_is_created_over_a_connection_whose_descriptor_is_large(stage: Stage) -> None:
    """`select` refuses numbers from 1024 on, which a process with many open segments and clients reaches."""
    with contextlib.ExitStack() as stack:
        while stack.enter_context(Path(os.devnull).open()).fileno() < 1024:
            pass
        running = stack.enter_context(stage.connect(autocommit=False))
        running.execute("SELECT pg_current_xact_id()")  # the slot waits for its end
        replication = stack.enter_context(connect_replication(stage.dsn))
        assert replication.pgconn.socket >= 1024

        def end_it(_waited_s: float) -> None:
            running.rollback()

        assert create_slot(replication, stage.config.slot, failover=False, meanwhile=end_it) > 0
