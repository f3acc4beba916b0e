"""Both ways of reading COPY give the same text, and leave the connection usable."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from tests.capture.capture_stage import Stage

from millstream.capture.connection import connect
from millstream.capture.copying import _text_scan, copy_output
from millstream.errors import MillstreamError

ROWS = (
    "SELECT i, CASE WHEN i % 97 = 0 THEN repeat('x', 400000) ELSE repeat('y', i % 50) END FROM generate_series(1, {}) i"
)


def test_rows_of_all_sizes_come_whole(stage: Stage) -> None:
    query = f"COPY ({ROWS.format(2000)}) TO STDOUT".encode()
    with connect(stage.dsn, purpose="test") as connection:
        connection.pgconn.send_query(query)
        plain = copy_output._ByLibpq(connection.pgconn).next(1 << 30)
        copy_output._finish(connection.pgconn)
        for _ in range(3):
            ours = copy_output.copy_out(connection, query, bytes_max=1 << 30)
            assert ours.row_count == plain.row_count == 2000
            assert ours.whole
            assert ours.text.tobytes() == plain.text.tobytes()
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_reading_stops_at_its_bound_with_whole_rows(stage: Stage) -> None:
    query = f"COPY ({ROWS.format(50000)}) TO STDOUT".encode()
    with connect(stage.dsn, purpose="test") as connection:
        found = copy_output.copy_out(connection, query, bytes_max=1 << 20)
        assert not found.whole
        assert found.text.tobytes().count(b"\n") == found.row_count
        assert found.text.tobytes().endswith(b"\n")
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_all_rows_come_in_pieces_of_whole_rows(stage: Stage) -> None:
    query = f"COPY ({ROWS.format(20000)}) TO STDOUT".encode()
    with connect(stage.dsn, purpose="test") as connection:
        all_of_it = copy_output.copy_out(connection, query, bytes_max=1 << 30)
        pieces = list(copy_output.copy_pieces(connection, query, piece_bytes=lambda: 1 << 20))
        assert b"".join(piece.text.tobytes() for piece in pieces) == all_of_it.text.tobytes()
        assert sum(piece.row_count for piece in pieces) == 20000
        assert [piece.whole for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        for piece in pieces:
            assert piece.text.tobytes().count(b"\n") == piece.row_count
            assert len(piece.text) < (1 << 20) + 400_100
        with closing(copy_output.copy_pieces(connection, query, piece_bytes=lambda: 1 << 20)) as some:
            assert not next(some).whole
            next(some)
        assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1/0) TO STDOUT",
        "COPY nothing TO STDOUT",
        "COPY (SELECT 1/(3-i) FROM generate_series(1, 9) i) TO STDOUT",
    ],
)
def test_what_postgresql_refuses_is_an_error_and_the_connection_goes_on(stage: Stage, query: str) -> None:
    with connect(stage.dsn, purpose="test") as connection:
        with pytest.raises(MillstreamError):
            copy_output.copy_out(connection, query.encode(), bytes_max=1 << 20)
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_no_rows_and_rows_without_columns(stage: Stage) -> None:
    with connect(stage.dsn, purpose="test") as connection:
        assert copy_output.copy_out(connection, b"COPY (SELECT 1 WHERE false) TO STDOUT", bytes_max=1).row_count == 0
        found = copy_output.copy_out(connection, b"COPY (SELECT) TO STDOUT", bytes_max=1 << 20)
        assert (found.row_count, found.text.tobytes()) == (1, b"\n")


def scanned(text: bytes, width: int, rows: int) -> tuple[int, int]:
    value_at, size = np.empty((width, rows), np.int32), np.empty((width, rows), np.int32)
    fault, found = _text_scan.scan_rows(np.frombuffer(bytearray(text), np.uint8), width, value_at, size)
    return int(fault), int(found)


def test_a_row_without_columns_is_an_empty_line() -> None:
    assert scanned(b"\n\n", 0, 2) == (_text_scan.FINE, 2)
    assert scanned(b"\n\n", 0, 1) == (_text_scan.TOO_MANY, 1)
    for other in (b"x\n", b"\t\n", b"\\N\n"):
        assert scanned(other, 0, 2) == (_text_scan.WRONG_WIDTH, 0)
    assert scanned(b"\n", 1, 1) == (_text_scan.FINE, 1)
    assert scanned(b"\t\n", 1, 1) == (_text_scan.WRONG_WIDTH, 0)


def test_a_table_without_columns_is_copied_and_followed(stage: Stage) -> None:
    stage.sql("CREATE TABLE bare ()", "ALTER TABLE bare REPLICA IDENTITY FULL", "INSERT INTO bare DEFAULT VALUES")
    assert not stage.catch_up().quarantined
    stage.sql("INSERT INTO bare DEFAULT VALUES")
    assert not stage.catch_up().quarantined
    rows: Any = stage.log.replay()["public.bare"][None]
    assert rows == [{}, {}]
