"""Requests that wait become one batch, and each gets its own answer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import pyarrow as pa
import pytest
from tests.app.homes import make_home

from millstream.app.open_home import home_appender
from millstream.errors import AppendOutcomeUnknown, IngestError, InvalidValue, MillstreamError, Overloaded, WriterClosed
from millstream.home.home import Home
from millstream.ingest.append_requests import sole_outcome
from millstream.ingest.json_rows import CELL_BYTES
from millstream.ingest.python_rows import table_of
from millstream.model.ids import StreamId
from millstream.model.operations import FIRST_SHARD, Appended
from millstream.model.positions import Offset, Seq, SeqRange, StreamToken
from millstream.model.writes import AppendBatch, WriteId
from millstream.serving import row_writes
from millstream.serving.request_batching import BATCH_BYTES_MAX, IN_FLIGHT_MAX, BatchTarget, RequestBatches
from millstream.serving.request_bodies import Held, MemoryBudget
from millstream.serving.row_writes import Writes
from millstream.testing.errors import coded

if TYPE_CHECKING:
    from millstream.serving.access import Access

CLICKS = BatchTarget("web", ("public.clicks",), 1.0, keep_valid_rows=False)
STREAM = StreamId(uuid4())


class Log:
    """A log that numbers rows; a batch waits until it is released."""

    def __init__(self) -> None:
        self.batches: list[AppendBatch] = []
        self.going = asyncio.Event()
        self.going.set()
        self.error: MillstreamError | None = None
        self.rows_max = 1 << 30
        self._next = 1

    async def append(self, stream: str, batch: AppendBatch, *, deadline_s: float) -> list[Appended | MillstreamError]:
        assert (stream, deadline_s) == ("web", 1.0)
        self.batches.append(batch)
        await self.going.wait()
        if self.error is not None:
            raise self.error
        if batch.row_count > self.rows_max:
            raise IngestError("too many together", code="rows_too_large")
        outcomes: list[Appended | MillstreamError] = []
        for count in batch.tables[0].counts:
            token = StreamToken.scalar(STREAM, Seq(self._next + count - 1))
            offsets = {FIRST_SHARD: (Offset(self._next - 1), Offset(self._next - 1 + count))}
            outcomes.append(Appended(token, SeqRange(Seq(self._next), count), offsets))
            self._next += count
        return outcomes


def played(story: Callable[[Log, RequestBatches], Awaitable[None]]) -> None:
    async def play() -> None:
        log = Log()
        batches = RequestBatches(log.append)
        async with asyncio.timeout(30):
            await story(log, batches)
            await batches.drain()
        assert batches._queues == {}

    asyncio.run(play())


def sent(
    batches: RequestBatches, rows: list[dict[str, Any]] | pa.Table, size_bytes: int = 10
) -> asyncio.Future[Appended]:
    return batches.append(CLICKS, (rows,), size_bytes=size_bytes, write_id=None)


async def outcome(answer: asyncio.Future[Appended]) -> int | str:
    try:
        return int((await answer).seqs.first)
    except MillstreamError as error:
        return error.code


def test_what_comes_while_a_batch_is_written_is_the_next_one() -> None:
    async def story(log: Log, batches: RequestBatches) -> None:
        log.going.clear()
        answers = []
        for number in range(100):
            answers.append(sent(batches, [{"n": number}]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert len(log.batches) == IN_FLIGHT_MAX
        log.going.set()
        assert [await outcome(answer) for answer in answers] == list(range(1, 101))
        assert [len(batch.write_ids) for batch in log.batches] == [1] * IN_FLIGHT_MAX + [100 - IN_FLIGHT_MAX]

    played(story)


def test_a_batch_is_bounded_by_bytes() -> None:
    async def story(log: Log, batches: RequestBatches) -> None:
        answers = [sent(batches, [{"n": number}], BATCH_BYTES_MAX // 2) for number in range(6)]
        assert [await outcome(answer) for answer in answers] == [1, 2, 3, 4, 5, 6]
        assert [len(batch.write_ids) for batch in log.batches] == [2, 2, 2]

    played(story)


def test_a_request_that_makes_no_columns_with_others_leaves_them_alone() -> None:
    async def story(log: Log, batches: RequestBatches) -> None:
        rows: list[Any] = [[{"n": 1}], [{"n": "x"}], [{"n": 2**64}], [{"n": 2}]]
        answers = [sent(batches, of_one) for of_one in rows]
        found = [await outcome(answer) for answer in answers]
        assert found[2] == InvalidValue.code
        # Whether the table takes a row is for the log to decide.
        assert [type(one) for one in found] == [int, int, str, int]
        assert [batch.row_count for batch in log.batches] == [1, 1, 1]

    played(story)


def test_a_wide_row_goes_with_few_others() -> None:
    """Each of its columns has a value for each row of the batch: 16,000 rows and one of 1600 columns took seconds."""

    async def story(log: Log, batches: RequestBatches) -> None:
        wide = {f"c{n}": n for n in range(1600)}
        answers = [sent(batches, rows) for rows in ([{"n": 1}] * 2000, [wide], [{"n": 1}] * 600, [{"n": 1}] * 2000)]
        assert [await outcome(answer) for answer in answers] == [1, 2001, 2002, 2602]
        assert [batch.tables[0].counts for batch in log.batches] == [[2000], [1], [600, 2000]]

    played(story)


def test_requests_that_are_too_large_together_go_alone() -> None:
    async def story(log: Log, batches: RequestBatches) -> None:
        log.rows_max = 1
        answers = [sent(batches, [{"n": 1}]), sent(batches, [{"n": 2}, {"n": 3}]), sent(batches, [{"n": 4}])]
        assert [await outcome(answer) for answer in answers] == [1, "rows_too_large", 2]

    played(story)


@pytest.mark.parametrize("error", [Overloaded("full"), WriterClosed("gone"), AppendOutcomeUnknown("who knows")])
def test_what_became_of_a_batch_is_told_to_each_and_never_tried_again(error: MillstreamError) -> None:
    async def story(log: Log, batches: RequestBatches) -> None:
        log.error = error
        answers = [sent(batches, [{"n": number}]) for number in range(3)]
        assert [await outcome(answer) for answer in answers] == [error.code] * 3
        assert len(log.batches) == 1

    played(story)


def test_columns_and_objects_go_in_batches_of_their_own() -> None:
    async def story(log: Log, batches: RequestBatches) -> None:
        one, other = pa.table({"n": [1, 2]}), pa.table({"n": ["x"]})
        rows: list[Any] = [one, [{"n": 1}], one, other, [{"n": 2}]]
        found = [await outcome(answer) for answer in [sent(batches, of_one) for of_one in rows]]
        assert sorted(found) == sorted({int(one) for one in found})
        assert sorted(len(batch.write_ids) for batch in log.batches) == [1, 2, 2]

    played(story)


def test_who_stops_waiting_keeps_nothing_from_being_appended() -> None:
    async def story(log: Log, batches: RequestBatches) -> None:
        log.going.clear()
        gone, stays = sent(batches, [{"n": 1}]), sent(batches, [{"n": 2}])
        await asyncio.sleep(0)
        gone.cancel()
        log.going.set()
        assert await outcome(stays) == 2
        assert log.batches[0].row_count == 2

    played(story)


def test_a_bug_is_told_to_whoever_waits() -> None:
    async def story(log: Log, batches: RequestBatches) -> None:
        del log

        async def fails(*_: object, **__: object) -> list[Appended | MillstreamError]:
            raise ZeroDivisionError

        batches._append = fails
        with pytest.raises(ZeroDivisionError):
            await sent(batches, [{"n": 1}])

    played(story)


def test_company_changes_nothing_of_what_a_request_is(tmp_path: Path) -> None:
    """Next to another request's object, lists became text; next to others' fractions, whole numbers became fractions.

    A stored write was refused when it was sent again alone, and a write that a decimal column takes was refused
    in a group.
    """
    home = Home(make_home(tmp_path / "home", "[streams.web]\n"))
    appender = home_appender(home)
    first = AppendBatch.of_request({"t": table_of([{"of": [1], "sum": Decimal("1.5")}])})
    sole_outcome(appender.append_batch("web", first, deadline_s=5))

    async def story() -> None:
        batches = RequestBatches(appender.append_batch_async)

        def sent(table: str, rows: list[dict[str, Any]], key: str) -> asyncio.Future[Appended]:
            target = BatchTarget("web", (table,), 5.0, keep_valid_rows=False)
            return batches.append(target, (rows,), size_bytes=10, write_id=WriteId(key=key))

        for table, requests in {
            "t": [[{"of": [1]}], [{"of": {"a": 1}}], [{"sum": 2}], [{"sum": 2.5}], [{"of": [2], "sum": 3}]],
            "new": [[{"x": [1]}], [{"x": [{"a": 1}]}], [{"x": [2.5]}], [{"x": []}], [{"x": None, "y": [[1]]}]],
        }.items():
            answers = [sent(table, rows, f"{table}/{n}") for n, rows in enumerate(requests)]
            told = [await outcome(answer) for answer in answers]
            assert [isinstance(one, str) for one in told] == (
                [False, True, False, True, False] if table == "t" else [False, True, True, False, False]
            ), told
            # Each request alone has the same outcome as among the others.
            assert [await outcome(sent(table, rows, f"{table}/{n}")) for n, rows in enumerate(requests)] == told
        await batches.drain()

    try:
        asyncio.run(story())
    finally:
        appender.close()


@pytest.mark.parametrize("keep", [False, True])
def test_rows_that_name_few_of_many_columns_are_counted_and_converted_on_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keep: bool
) -> None:
    """A body of 63 KB stopped the event loop for two seconds, and took half a gigabyte that no limit counted."""
    threads: list[threading.Thread] = []

    def noted(_: object, **__: object) -> Any:
        threads.append(threading.current_thread())
        return (pa.table({}), ()) if keep else pa.table({})

    monkeypatch.setattr(row_writes, "valid_columns_of" if keep else "columns_of", noted)
    rows = [{f"c{n}": 1 for n in range(500)}, *({} for _ in range(3999))]
    body = json.dumps(rows, separators=(",", ":")).encode()
    home = Home(make_home(tmp_path / "home", "[streams.web]\n"))

    async def held_bytes(bytes_max: int) -> int:
        budget = MemoryBudget(bytes_max, 32 << 20)
        writes = Writes(home, RequestBatches(Log().append), budget, cast("Access", None))
        with Held(budget) as held:
            await writes._rows("application/json", body, held, CLICKS._replace(keep_valid_rows=keep))
            return held.size_bytes

    assert asyncio.run(held_bytes(64 << 20)) > 500 * 4000 * CELL_BYTES
    assert len(threads) == 1
    assert threading.main_thread() not in threads
    with pytest.raises(IngestError, check=coded("rows_too_large")):
        asyncio.run(held_bytes(16 << 20))
