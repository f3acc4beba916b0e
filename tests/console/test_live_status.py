"""The status that viewers share: taken once for all of them, and only while there are any."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from millstream.app.record_rates import Rates
from millstream.console import live_status as module
from millstream.console.html import Part, Rendered, tag
from millstream.console.live_status import Live, Snapshot, View
from millstream.console.sight import Sight
from millstream.process_metrics import LOG_RECORDS

EMPTY: dict[str, Any] = {"streams": [], "measures": {}}
VIEW = View("/", Sight(None))


class Home:
    """Counts how often its status is taken."""

    def __init__(self) -> None:
        self.taken = 0
        self.may = threading.Event()
        self.may.set()

    def collect(self) -> dict[str, Any]:
        assert self.may.wait(60)
        self.taken += 1
        return EMPTY | {"number": self.taken}


def render(view: View, snapshot: Snapshot) -> Rendered:
    return Rendered([Part("n", tag("p", f"{view.path} {snapshot.status['number']}", id="n"))])


async def until_newer(live: Live, than: int) -> None:
    async with asyncio.timeout(60):
        while (found := live.current(VIEW)) is None or found[0].status["number"] <= than:
            await live.next(within_s=60)


def test_many_callers_at_once_get_one_status() -> None:
    home = Home()

    async def look() -> None:
        live = Live(home.collect, render)
        found = await asyncio.gather(*(live.area(VIEW) for _ in range(50)))
        assert home.taken == 1
        assert len({id(area) for _, area in found}) == 1
        live.close()

    asyncio.run(look())


def test_it_is_taken_again_while_there_are_viewers_and_no_longer_afterwards(monkeypatch: Any) -> None:
    home = Home()
    monkeypatch.setattr(module, "_EVERY_S", 0.01)

    async def watch() -> None:
        live = Live(home.collect, render)
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


def test_a_status_that_hangs_leaves_the_last_one_with_its_age(monkeypatch: Any) -> None:
    home = Home()
    monkeypatch.setattr(module, "_EVERY_S", 0.01)

    async def watch() -> None:
        live = Live(home.collect, render)
        with live.watched(VIEW):
            await until_newer(live, 0)
            home.may.clear()
            found = live.current(VIEW)
            await live.next(within_s=0.05)
            assert found is not None
            later = live.current(VIEW)
            assert later is not None
            assert later[0].taken_s >= found[0].taken_s
            home.may.set()
            await until_newer(live, later[0].status["number"])
        live.close()

    asyncio.run(watch())


def test_a_status_that_fails_is_taken_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_EVERY_S", 0.01)
    home = Home()
    failures = [OSError("gone"), ValueError("bug")]

    def collect() -> dict[str, Any]:
        if failures and home.taken:
            raise failures.pop()
        return home.collect()

    async def watch() -> None:
        live = Live(collect, render)
        with live.watched(VIEW):
            await until_newer(live, 3)
        assert not failures
        live.close()

    asyncio.run(watch())


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
