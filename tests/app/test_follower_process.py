"""`home.follow`, in every kind of home: it waits, resumes, reports tokens that aren't there, and ends when it is closed."""

from __future__ import annotations

import _thread
import asyncio
import signal
import threading
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import make_home
from tests.app.served import serving

import millstream
import millstream.aio
from millstream.errors import OffsetExpired, TokenFromFuture, UnknownStream, UsageError
from millstream.home.home import Home
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.wal.segment_deletion import drop_segments

WEB = "[streams.web]\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = make_home(tmp_path / "web", WEB)
    for number in (-1, 0):  # each process that writes begins a segment
        with millstream.open(folder) as here:
            here.append("web", "clicks", [{"n": number}])
    return folder


@pytest.fixture(params=["open", "connect"])
def opened(home: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "connect":
        with serving(home) as url, millstream.connect(url) as found:
            yield found
    else:
        with millstream.open(home) as found:
            yield found


def later(work: Any) -> threading.Timer:
    timer = threading.Timer(0.3, work)
    timer.start()
    return timer


def numbers(found: Any, count: int) -> list[list[int]]:
    return [batch.column("n").to_pylist() for batch, _ in islice(found, count)]


def test_it_waits_for_records_and_begins_now(opened: Any) -> None:
    with opened.follow("web") as changes:
        timer = later(lambda: opened.append("web", "clicks", [{"n": 1}, {"n": 2}]))
        batch, token = next(changes)
        timer.join()
        assert batch.column("n").to_pylist() == [1, 2]
        assert token == opened.token("web") == changes.token


def test_it_resumes_behind_a_token_and_waits_for_a_table_that_is_not_there(opened: Any) -> None:
    first = opened.append("web", "clicks", [{"n": 1}])
    opened.append("web", "clicks", [{"n": 2}])
    assert numbers(opened.follow("web", after=first.token), 1) == [[2]]
    with opened.follow("web", table=["late", "public.later"], after=first.token) as changes:

        def write() -> None:
            opened.append("web", "clicks", [{"n": 3}])
            opened.append("web", "late", [{"n": 4}])
            opened.append("web", "later", [{"n": 5}])

        timer = later(write)
        assert numbers(changes, 2) == [[4], [5]]
        timer.join()


def test_another_process_may_write(opened: Any, home: Path) -> None:
    with opened.follow("web") as changes, millstream.open(home) as writing:
        writing.append("web", "clicks", [{"n": 1}])
        assert numbers(changes, 1) == [[1]]


def test_tokens_that_are_not_there_are_reported_at_the_call(opened: Any, home: Path) -> None:
    stream = opened.token("web").stream
    with pytest.raises(TokenFromFuture):
        opened.follow("web", after=f"{stream}.s99999999")
    with pytest.raises(UsageError):
        opened.follow("web", table="a.b.c", after=f"{stream}.s0")
    with pytest.raises(UnknownStream):
        opened.follow("nosuch")
    folder = str(Home(home).wal_folder("web"))
    assert drop_segments(folder, Retention(), RetentionBounds(age_s=1e9, size_bytes=0, bytes_max=1 << 40)).dropped
    with pytest.raises(OffsetExpired) as expired:
        opened.follow("web", after=f"{stream}.s0")
    assert expired.value.code == "offset_expired"


def test_closing_ends_it_in_the_thread_that_waits(opened: Any) -> None:
    for end in ("changes", "home"):
        changes = opened.follow("web")
        closing = later(changes.close if end == "changes" else opened.close)
        assert list(changes) == []
        closing.join()
        assert list(changes) == []


@pytest.mark.parametrize("kind", ["open", "connect"])
def test_tasks_follow_too(home: Path, kind: str) -> None:
    async def work(there: Any, where: Path) -> None:
        async with there as it:
            token = await it.token("web")
            async with it.follow("web", after=token) as changes:
                waiting = asyncio.ensure_future(anext(changes))
                await asyncio.sleep(0.1)
                with await asyncio.to_thread(millstream.open, where) as writing:
                    await asyncio.to_thread(writing.append, "web", "clicks", [{"n": 7}])
                batch, after = await waiting
                assert batch.column("n").to_pylist() == [7]
                assert after == changes.token == await it.token("web")
            idle = it.follow("web")
            waiting_for_all = asyncio.ensure_future(everything(idle))
            await asyncio.sleep(0.1)
            await idle.close()
            assert await waiting_for_all == []
            with pytest.raises(TokenFromFuture):
                await anext(it.follow("web", after=f"{token.stream}.s99999999"))
            left = it.follow("web")
            waiting_for_all = asyncio.ensure_future(everything(left))
            await asyncio.sleep(0.1)
        assert await waiting_for_all == []

    async def everything(changes: Any) -> list[Any]:
        return [one async for one in changes]

    if kind == "open":
        asyncio.run(work(millstream.aio.open(home), home))
    else:
        with serving(home) as url:
            asyncio.run(work(millstream.aio.connect(url), home))


def test_an_interrupt_leaves_the_iteration(home: Path, request: pytest.FixtureRequest) -> None:
    # A shell's background job, such as a whole run of tests may be, ignores interrupts.
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with millstream.open(home) as here:
        changes = here.follow("web")
        timer = later(_thread.interrupt_main)
        with pytest.raises(KeyboardInterrupt), changes:
            next(changes)
        timer.join()
        assert list(changes) == []


def test_an_iteration_that_goes_on_after_a_failure_does_not_look_like_an_ended_log(home: Path) -> None:
    """Regression: it ended silently, as if its home had been closed."""

    def expires(here: Any) -> str:
        start = f"{here.token('web').stream}.s0"
        bounds = RetentionBounds(age_s=1e9, size_bytes=0, bytes_max=1 << 40)
        assert drop_segments(str(Home(home).wal_folder("web")), Retention(), bounds).dropped
        return start

    async def work(start: str) -> None:
        async with millstream.aio.open(home) as there:
            changes = there.follow("web", after=start)
            with pytest.raises(OffsetExpired):
                await anext(changes)
            with pytest.raises(UsageError, match="has ended this iteration"):
                await anext(changes)
            await changes.close()
            with pytest.raises(StopAsyncIteration):
                await anext(changes)

    with millstream.open(home) as here:
        changes = here.follow("web", after=f"{here.token('web').stream}.s0")
        start = expires(here)
        with pytest.raises(OffsetExpired):
            next(changes)
        with pytest.raises(UsageError, match="has ended this iteration"):
            next(changes)
        changes.close()
        assert list(changes) == []
    asyncio.run(work(start))
