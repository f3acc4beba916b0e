"""Both ways of reading COPY give the same text, and leave the connection usable."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from tests.capture.capture_stage import Stage

from millstream.capture.connection import connect
from millstream.capture.copying import _text_scan, copy_output
from millstream.errors import MillstreamError, SourceError

ROWS = (
    "SELECT i, CASE WHEN i % 97 = 0 THEN repeat('x', 400000) ELSE repeat('y', i % 50) END FROM generate_series(1, {}) i"
)


def test_rows_of_all_sizes_come_whole(stage: Stage) -> None:
    query = f"COPY ({ROWS.format(2000)}) TO STDOUT".encode()
    with connect(stage.dsn, purpose="test") as connection:
        plain = copy_output._ByLibpq(connection.pgconn, query).next(1 << 30)
        assert plain.whole
        for _ in range(3):
            ours = copy_output.copy_out(connection, query, bytes_max=1 << 30)
            assert ours.row_count == plain.row_count == 2000
            assert ours.whole
            assert ours.messages.tobytes() == plain.messages.tobytes()
            assert ours.size_bytes == sum(len(line) + 1 for line in plain.lines())
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_reading_stops_at_its_bound_with_whole_rows(stage: Stage) -> None:
    query = f"COPY ({ROWS.format(50000)}) TO STDOUT".encode()
    with connect(stage.dsn, purpose="test") as connection:
        found = copy_output.copy_out(connection, query, bytes_max=1 << 20)
        assert not found.whole
        assert found.size_bytes >= 1 << 20
        assert_whole(found)
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_all_rows_come_in_pieces_of_whole_rows(stage: Stage) -> None:
    query = f"COPY ({ROWS.format(20000)}) TO STDOUT".encode()
    with connect(stage.dsn, purpose="test") as connection:
        all_of_it = copy_output.copy_out(connection, query, bytes_max=1 << 30)
        pieces = list(copy_output.copy_pieces(connection, query, piece_bytes=lambda: 1 << 20))
        assert b"".join(piece.messages.tobytes() for piece in pieces) == all_of_it.messages.tobytes()
        assert sum(piece.row_count for piece in pieces) == 20000
        assert [piece.whole for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        for piece in pieces:
            assert_whole(piece)
            assert piece.size_bytes < (1 << 20) + 400_100
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
        assert found.lines() == [b""]


def assert_whole(piece: copy_output.CopyText) -> None:
    lines = piece.lines()
    assert len(lines) == piece.row_count
    assert copy_output.as_messages(lines).tobytes() == piece.messages.tobytes()


def test_notices_between_rows_and_settings_that_change_are_passed_over(stage: Stage) -> None:
    stage.sql(
        "CREATE FUNCTION heard(n int) RETURNS int LANGUAGE plpgsql AS $$ BEGIN"
        " IF n % 100 = 0 THEN RAISE NOTICE 'row %', n; PERFORM set_config('application_name', 'n' || n, false); END IF;"
        " RETURN n; END $$"
    )
    with connect(stage.dsn, purpose="test") as connection:
        query = b"COPY (SELECT public.heard(i) FROM generate_series(1, 30000) i) TO STDOUT"
        found = copy_output.copy_out(connection, query, bytes_max=1 << 20)
        assert found.lines() == [b"%d" % n for n in range(1, 30001)]
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_session_that_is_ended_during_its_rows_counts_as_unreachable(stage: Stage) -> None:
    query = b"COPY (SELECT i, repeat('x', 100) FROM generate_series(1, 10000000) i) TO STDOUT"
    with connect(stage.dsn, purpose="test") as connection, stage.connect() as other:
        pieces = copy_output.copy_pieces(connection, query, piece_bytes=lambda: 1 << 20)
        next(pieces)
        other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
        with pytest.raises(SourceError) as caught:
            list(pieces)
        assert caught.value.code == "source_unreachable"


def scanned(text: bytes, width: int, rows: int) -> tuple[int, int]:
    value_at, size = np.empty((width, rows), np.int32), np.empty((width, rows), np.int32)
    fault, found = _text_scan.scan_rows(copy_output.as_messages(text.split(b"\n")[:-1]), width, value_at, size)
    return int(fault), int(found)


def test_values_are_found_and_their_escapes_removed() -> None:
    line = b"\t".join([rb"\\b\f\n\r\t\v", b"", rb"\N", b"plain", rb"tail\\"])
    messages = copy_output.as_messages([line, line])
    value_at, size = np.empty((5, 2), np.int32), np.empty((5, 2), np.int32)
    assert _text_scan.scan_rows(messages, 5, value_at, size) == (_text_scan.FINE, 2)
    for row in range(2):
        texts = [
            None if length < 0 else messages[at : at + length].tobytes()
            for at, length in zip(value_at[:, row], size[:, row], strict=True)
        ]
        assert texts == [b"\\b\f\n\r\t\v", b"", None, b"plain", b"tail\\"]


def test_a_row_that_isnt_its_message_is_a_fault() -> None:
    value_at, size = np.empty((2, 3), np.int32), np.empty((2, 3), np.int32)
    row = b"d\0\0\0\x08a\tb\n"
    for data, fault in [
        (row[:-1], _text_scan.UNFINISHED),
        (row + row[:4], _text_scan.UNFINISHED),
        (b"d\0\0\0\x08a\tb\\", _text_scan.UNFINISHED),
        (b"d\0\0\0\x09a\tb\\\n", _text_scan.UNFINISHED),
        (b"d\0\0\0\x0aa\tb\nc\n", _text_scan.WRONG_WIDTH),
        (b"d\xff\xff\xff\xffa\tb\n", _text_scan.UNFINISHED),
        (b"c" + row[1:], _text_scan.UNFINISHED),
        (row * 4, _text_scan.TOO_MANY),
    ]:
        assert _text_scan.scan_rows(np.frombuffer(bytearray(data), np.uint8), 2, value_at, size)[0] == fault, data


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
