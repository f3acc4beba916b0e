"""Another stream as a sink: writes are told apart there as here, and a failure stops no more than it must."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.app.homes import wait_for
from tests.routing.rows import batch_of, ops_of, schema_of

from millstream.client.appends import HomeAppends
from millstream.errors import (
    BufferUnavailable,
    DedupWindowExpired,
    InvalidValue,
    MillstreamError,
    Overloaded,
    SessionsNeedOneWriter,
    WriterClosed,
)
from millstream.model.operations import AppendedTables, TableAppended, TableRows, WriteOps
from millstream.model.positions import Seq, StreamToken
from millstream.writers.stream_sinks import LazySink, StreamSink

KEYED = schema_of({"id": pa.int64()}, key=("id",))


class Home:
    """Another home: its prepared errors, and its rows."""

    def __init__(self) -> None:
        self.refusing: dict[int, MillstreamError] = {}
        """Errors by row."""
        self.refusing_keys: MillstreamError | None = None
        self.appended: list[tuple[int, str | None]] = []
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def append_all(
        self, stream: str, tables: dict[str, pa.Table], *, deadline_s: float, idempotency_key: str | None = None
    ) -> AppendedTables:
        assert (stream, list(tables)) == ("mirror", ["public.clicks"])
        assert deadline_s > 0
        (number,) = tables["public.clicks"].column("id").to_pylist()
        if idempotency_key is not None and self.refusing_keys is not None:
            raise self.refusing_keys
        if number in self.refusing:
            raise self.refusing[number]
        self.appended.append((number, idempotency_key))
        part = TableAppended(Seq(len(self.appended)), 1)
        return AppendedTables(StreamToken.parse("00000000.s1"), duplicate=False, tables={"public.clicks": part})


def ops(*numbers: int, **told: Any) -> WriteOps:
    """Make operations of one row each."""
    rows = batch_of(KEYED, {"id": numbers}, range(len(numbers)))
    made = ops_of([TableRows(KEYED, rows, sink="other")], count=len(numbers))
    operations = made.operations
    for name, value in told.items():
        at = operations.schema.get_field_index(name)
        field = operations.schema.field(at)
        operations = operations.set_column(at, field, pa.array([value] * len(numbers), field.type))
    return WriteOps(operations, made.tables)


@pytest.fixture
def home() -> Home:
    return Home()


def sink_of(home: Home, origin: str = "here/web") -> StreamSink:
    return StreamSink(cast("HomeAppends", home), "mirror", origin=origin)


def test_a_key_there_is_the_same_for_one_write_and_no_other_ones(home: Home) -> None:
    session = {"session": "s", "session_number": 1, "commit_end_lsn": 7}
    alike = [ops(1, **session), ops(1, **session)]
    others = [
        ops(1, **session | {"session_number": 2}), ops(1, **session | {"commit_end_lsn": 8}),
        ops(1, idempotency_key="s", commit_end_lsn=7),
    ]  # fmt: skip
    sink = sink_of(home)
    for one in [*alike, *others]:
        sink.append(one, deadline_s=None)
    sink_of(home, "elsewhere/web").append(alike[0], deadline_s=None)
    sink.append(ops(1), deadline_s=None)
    keys = [key for _, key in home.appended]
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(keys) - 1
    assert keys[-1] is None


def test_an_operation_that_cannot_be_taken_stops_no_other_one_and_a_home_that_is_away_does(home: Home) -> None:
    home.refusing = {2: InvalidValue("not that"), 4: Overloaded("too much at once")}
    told = sink_of(home).append(ops(1, 2, 3, 4, 5), deadline_s=1.0)
    assert [type(one) for one in told] == [dict, InvalidValue, dict, Overloaded, Overloaded]
    assert home.appended == [(1, None), (3, None)]


def test_a_stream_that_knows_no_keys_gets_the_rows_without_and_what_it_knows_is_there(home: Home) -> None:
    home.refusing_keys = DedupWindowExpired("it is there")
    sink = sink_of(home)
    assert sink.append(ops(1, idempotency_key="k"), deadline_s=1.0) == [
        {"stream": "mirror", "appended": [{"duplicate": True}]}
    ]
    home.refusing_keys = SessionsNeedOneWriter("several write")
    sink.append(ops(2, 3, idempotency_key="k"), deadline_s=1.0)
    assert home.appended == [(2, None), (3, None)]


def test_writes_that_find_a_sink_being_opened_wait_for_one_attempt(home: Home) -> None:
    """Each of them opened it again after the one before had failed, in turn, for the sink's whole time limit."""
    goes_on, is_back, attempts = threading.Event(), threading.Event(), []

    def make() -> StreamSink:
        attempts.append(1)
        assert goes_on.wait(60)
        if not is_back.is_set():
            raise BufferUnavailable("away")
        return sink_of(home)

    lazy = LazySink(make)
    with ThreadPoolExecutor(16) as threads:
        waiting = [threads.submit(lazy.append, ops(1), deadline_s=1.0) for _ in range(16)]
        wait_for(lambda: attempts and all(one.running() for one in waiting))
        goes_on.set()
        assert [type(one.exception(60)) for one in waiting] == [BufferUnavailable] * 16
    assert len(attempts) < 16
    is_back.set()
    assert lazy.append(ops(1), deadline_s=1.0)
    lazy.close()
    with pytest.raises(WriterClosed):
        lazy.append(ops(1), deadline_s=1.0)
    assert home.is_closed
