"""Waiting for an answer of the source doesn't keep the interpreter.

The source may be waiting for another thread of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import pq
from tests.capture.beside import Beside
from tests.capture.capture_stage import Stage

from millstream.capture.connection import next_result
from millstream.capture.copying import copy_output

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
