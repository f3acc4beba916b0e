"""The status that viewers share: taken once for all of them, and only while there are any."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from millstream.app import record_rates
from millstream.app.record_rates import Rates
from millstream.console.html import Part, Rendered, tag
from millstream.console.shared_status import Live, Snapshot, Timing, View
from millstream.console.visible_streams import VisibleStreams
from millstream.errors import MillstreamError
from millstream.process_metrics import LOG_RECORDS
from millstream.testing.errors import coded

EMPTY: dict[str, Any] = {"streams": [], "measures": {}}
VIEW = View("/", VisibleStreams(None))
PAUSE = threading.Event()


class Home:
    """Counts how often its status is taken."""

    def __init__(self) -> None:
        self.taken = 0
        self.may = threading.Event()
        self.may.set()

        self.seen: Hashable | None = None
        """The value of a look; None: it is unknown."""

    def collect(self) -> dict[str, Any]:
        assert self.may.wait(60)
        self.taken += 1
        return EMPTY | {"number": self.taken}

    def look(self) -> Hashable | None:
        return self.seen


def render(view: View, snapshot: Snapshot) -> Rendered:
    return Rendered([Part("n", tag("p", f"{view.path} {snapshot.status['number']}", id="n"))])


async def until(read: Callable[[], Awaitable[Snapshot]], wanted: Callable[[Snapshot], bool]) -> Snapshot:
    async with asyncio.timeout(60):
        while not wanted(found := await read()):
            await asyncio.to_thread(PAUSE.wait, 0.01)
    return found


async def until_newer(live: Live, than: int) -> None:
    async with asyncio.timeout(60):
        while (found := live.current(VIEW)) is None or found[0].status["number"] <= than:
            await live.next(within_s=60)


def test_many_callers_at_once_get_one_status() -> None:
    home = Home()

    async def look() -> None:
        live = Live(home.collect, render, home.look)
        found = await asyncio.gather(*(live.area(VIEW) for _ in range(50)))
        assert home.taken == 1
        assert len({id(area) for _, area in found}) == 1
        live.close()

    asyncio.run(look())


def test_it_is_taken_again_while_there_are_viewers_and_no_longer_afterwards() -> None:
    home = Home()

    async def watch() -> None:
        live = Live(home.collect, render, home.look, timing=Timing(every_s=0.01))
        with live.watched(VIEW), live.watched(VIEW):
            await until_newer(live, 3)
        running = live._running
        assert running is not None
        async with asyncio.timeout(60):
            await running
        taken = home.taken
        assert not live._views
        with live.watched(VIEW):
            await until_newer(live, taken)
        live.close()

    asyncio.run(watch())


def test_a_status_that_hangs_leaves_the_last_one_with_its_age() -> None:
    home = Home()

    async def watch() -> None:
        live = Live(home.collect, render, home.look, timing=Timing(every_s=0.01, patience_s=0.05))
        with live.watched(VIEW):
            await until_newer(live, 0)
            home.may.clear()
            await asyncio.sleep(0)
            found, _ = await live.area(VIEW)
            # A page that no viewer has open yet is made of it, too, and has its age.
            for view in (VIEW, View("/tables", VisibleStreams(None))):
                async with asyncio.timeout(60):
                    while time.monotonic() - (shown := (await live.area(view))[0]).taken_s < 0.3:
                        continue
                assert shown.taken_s >= found.taken_s
                assert view in shown.areas
            taken = shown.status["number"]
            home.may.set()
            await until_newer(live, taken)
        live.close()

    asyncio.run(watch())


def test_a_status_that_fails_is_taken_again() -> None:
    home = Home()
    failures = [OSError("gone"), ValueError("bug")]

    def collect() -> dict[str, Any]:
        if failures and home.taken:
            raise failures.pop()
        return home.collect()

    async def watch() -> None:
        live = Live(collect, render, home.look, timing=Timing(every_s=0.01))
        with live.watched(VIEW):
            await until_newer(live, 3)
        assert not failures
        live.close()

    asyncio.run(watch())


def test_a_status_that_fails_leaves_the_last_one_with_its_age_and_is_logged_once() -> None:
    home, failing = Home(), [False]

    def collect() -> dict[str, Any]:
        if failing[0]:
            raise OSError("the disk is gone")
        return home.collect()

    async def look() -> None:
        live = Live(collect, render, home.look, timing=Timing(every_s=0.01))
        first = await live.snapshot()
        failing[0] = True
        with capture_logs() as logs:
            await until(live.snapshot, lambda found: time.monotonic() - found.taken_s > 0.2)
        assert await live.snapshot() is first
        assert len(logs) == 1
        failing[0] = False
        await until(live.snapshot, lambda found: found.status["number"] == 2)
        live.close()

    asyncio.run(look())


def test_without_any_status_the_error_is_the_viewer_s() -> None:
    def collect() -> dict[str, Any]:
        raise OSError("the disk is gone")

    async def look() -> None:
        live = Live(collect, render, lambda: None)
        for _ in range(2):
            with pytest.raises(OSError, match="gone"):
                await live.area(VIEW)
        live.close()

    asyncio.run(look())


def test_the_first_page_while_a_status_hangs_shows_the_last_one_of_others_or_says_so() -> None:
    """It waited for as long as the status hung."""
    home = Home()
    home.may.clear()

    async def look() -> None:
        known = EMPTY | {"number": 0}, time.monotonic() - 60
        live = Live(
            home.collect,
            render,
            home.look,
            lambda: known,
            timing=Timing(patience_s=0.05, first_patience_s=0.1, every_s=0.01),
        )
        first, area = await live.area(VIEW)
        assert time.monotonic() - first.taken_s > 60
        assert "/ 0" in area.whole
        other = Live(
            home.collect, render, home.look, timing=Timing(patience_s=0.05, first_patience_s=0.1, every_s=0.01)
        )
        with capture_logs() as logs, other.watched(VIEW):
            for _ in range(2):
                with pytest.raises(MillstreamError, check=coded("status_hangs")):
                    await other.area(VIEW)
            for _ in range(3):
                await other.next(within_s=60)
            home.may.set()
            await until_newer(other, 0)
        assert len(logs) == 1
        await until(live.snapshot, lambda found: found.status["number"] > 0)
        live.close()
        other.close()

    asyncio.run(look())


def test_it_is_taken_only_if_something_has_changed_and_stays_current_meanwhile() -> None:
    home = Home()
    home.seen = "idle"

    async def look() -> None:
        live = Live(home.collect, render, home.look, timing=Timing(every_s=0.01, unchanged_s=60.0))
        diff = View("/diff", VisibleStreams(None))
        first, area = await live.area(VIEW)
        _, compared = await live.area(diff)
        await until(live.snapshot, lambda found: found.taken_s > first.taken_s + 0.1)
        assert home.taken == 1
        assert (await live.area(VIEW))[1] is area, "nothing is drawn again"
        assert (await live.area(diff))[1] is not compared, "a comparison goes on in the server"
        home.seen = "written"
        await until(live.snapshot, lambda found: found.status["number"] == 2)
        # A change that a look misses is shown later.
        live.timing = replace(live.timing, unchanged_s=0.05)
        await until(live.snapshot, lambda found: found.status["number"] == 3)
        live.close()

    asyncio.run(look())


def test_a_rate_falls_to_zero_though_nothing_changes_any_longer(monkeypatch: Any) -> None:
    monkeypatch.setattr(record_rates, "_WINDOW_S", 0.1)
    home = Home()
    home.seen = 0
    records = [0]

    def collect() -> dict[str, Any]:
        home.taken += 1
        return status(0, records[0]) | {"number": home.taken}

    async def look() -> None:
        live = Live(collect, render, home.look, timing=Timing(every_s=0.01, unchanged_s=60.0))
        await live.area(VIEW)
        records[0], home.seen = 1000, 1
        fast = await until(live.snapshot, lambda found: found.rates.get("shop", 0) > 0)
        _, area = await live.area(VIEW)
        slow = await until(live.snapshot, lambda found: found.rates.get("shop") == 0)
        assert fast.status is slow.status
        assert (await live.area(VIEW))[1] is not area, "the page with the rate is drawn again"
        live.close()

    asyncio.run(look())


def test_a_large_home_that_changes_all_the_time_is_taken_seldom_and_shows_its_age() -> None:
    home = Home()

    def collect() -> dict[str, Any]:
        end_s = time.thread_time() + 0.02
        while time.thread_time() < end_s:
            continue
        return home.collect()

    async def look() -> None:
        live = Live(collect, render, home.look, timing=Timing(every_s=0.01, every_s_max=0.5))
        await until(live.snapshot, lambda found: found.status["number"] >= 3)
        taken, began_s = home.taken, time.monotonic()
        oldest_s = 0.0
        while time.monotonic() < began_s + 1:
            found = await live.snapshot()
            oldest_s = max(oldest_s, time.monotonic() - found.taken_s)
            await asyncio.sleep(0.01)
        assert home.taken - taken <= 3
        assert oldest_s > 0.3
        live.close()

    asyncio.run(look())


def status(token: int, records: int | None) -> dict[str, Any]:
    series = [] if records is None else [{"labels": ["id1"], "value": records}]
    stream = {"name": "shop", "id": "id1", "tokens": {"durable": f"abc.s{token}"}}
    return {"streams": [stream], "measures": {"owner": {LOG_RECORDS.name: series}}}


def test_a_rate_is_that_of_the_writer_s_count_or_else_of_numbers() -> None:
    rates = Rates()
    assert rates.take(status(0, 0), 10.0) == {}
    assert rates.take(status(1000, 50), 11.0) == {"shop": 50.0}
    assert rates.take(status(1000, 150), 21.0) == {"shop": 10.0}, "a home whose status is taken seldom"
    assert rates.take(status(1000, 150), 60.0) == {}, "too long ago"
    # The writer was started again: its count begins at 0.
    assert rates.take(status(1000, 3), 61.0) == {}
    assert Rates().take(status(1, None), 1.0) == {}
    first, second = status(0, None), status(0, None)
    for found, count in ((first, 10), (second, 40)):
        found["streams"][0]["consumers"] = [{"name": "search", "delivered": count}]
    rates = Rates()
    assert rates.take(first, 1.0) == {}
    assert rates.take(second, 2.0) == {"shop": 0.0, "shop/search": 30.0}
    rates = Rates()
    rates.take(status(100, None), 1.0)
    assert rates.take(status(130, None), 2.0) == {"shop": 30.0}
