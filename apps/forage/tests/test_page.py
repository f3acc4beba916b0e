"""Forage's page in a real browser: each test looks at the page, acts on it, and reads the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from apps.forage.tests.bodies import ITEM
from apps.forage.tests.chromium import DEADLINE_S, NAMES, Chromium, browser_path
from apps.forage.tests.memory_home import MemoryHome, SetClock, engine_on, seeded_home

from millstream import Guard
from millstream_forage.application import Application
from millstream_forage.engine import ForageEngine
from millstream_forage.server import bound
from millstream_forage.tables import home_config

CARDS = "document.querySelectorAll('#feed > li').length"
ITEMS = "[...document.querySelectorAll('#feed > li')].map((node) => Number(node.dataset.item))"
SAID = "document.getElementById('said').textContent"
FACTS = "document.getElementById('feed-facts').textContent"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    program = browser_path()
    if program is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is on the PATH (Debian: apt install chromium)")
    with Chromium(program, tmp_path / "profile") as opened:
        yield opened
        assert opened.problems == []


@pytest.fixture
def home() -> MemoryHome:
    return seeded_home()


@pytest.fixture
def engine(home: MemoryHome) -> Iterator[ForageEngine]:
    with engine_on(home, SetClock()) as opened:
        yield opened


@contextmanager
def served(engine: ForageEngine, folder: Path) -> Iterator[str]:
    """Serve an engine from a thread of its own; yield its address."""
    (folder / "millstream.toml").write_text(home_config())
    guard, listener = Guard(folder), bound(0)
    server = uvicorn.Server(uvicorn.Config(Application(engine, guard), lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        guard.close()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def wait_for_feed(browser: Chromium, home: MemoryHome, number: int) -> None:
    """Wait until the page shows a feed: from then on it replaces no card on its own."""
    wait_for(lambda: home.rows("impressions")[-1]["feed"] == number)
    browser.until(f"{FACTS}.endsWith('token {home.rows('impressions')[-1]['token']}')")


def test_the_page_shows_seven_items_and_the_mouse_saves_and_skips(
    browser: Chromium, home: MemoryHome, engine: ForageEngine, tmp_path: Path
) -> None:
    with served(engine, tmp_path) as address:
        # The test asks for the poll itself, so everything else happens at once, or never.
        browser.before("window.setInterval = (poll, every) => { window.poll = poll; window.every = every; return 0; }")
        browser.open(f"{address}/?user=3")
        browser.until(f"{CARDS} === 7")
        shown = {row["item"]: row for row in home.rows("impressions")}
        assert browser.run(ITEMS) == list(shown)
        card = browser.run("document.querySelector('#feed > li').innerText")
        for text in (
            "exploring",
            "new ground",
            "You have reacted to little of",
            "(from 0.35)",
            "(target ",
            "Propensity",
        ):
            assert text in card
        saved = browser.run(ITEMS)[1]
        browser.click("#feed > li:nth-child(2) [data-action=save]")
        browser.until(f"{SAID}.startsWith('Saved')")
        (signal,) = home.rows("signals")
        assert (signal["item"], signal["kind"], signal["impression"]) == (saved, "save", shown[saved]["id"])
        wait_for_feed(browser, home, 2)
        skipped = browser.run(ITEMS)[0]
        browser.run(
            "window.back = 0; new MutationObserver(() => {"
            f" if (window.left && {ITEMS}.includes({skipped})) window.back += 1;"
            f" if (!{ITEMS}.includes({skipped})) window.left = true;"
            "}).observe(document.getElementById('feed'), {childList: true})"
        )
        browser.click("#feed > li:first-child [data-action=skip]")
        browser.until(f"{SAID}.startsWith('Skipped')")
        # Another process adds an item: the page's poll shows a new feed, without a signal.
        wait_for_feed(browser, home, 3)
        before = browser.run(FACTS)
        assert browser.run("window.every") == 5000
        engine.add_item(ITEM)
        browser.run("window.poll()")
        browser.until(f"{FACTS} !== {before!r}")
        assert browser.run("[window.left, window.back]") == [True, 0]
        assert browser.run(CARDS) == 7


def test_the_keyboard_alone_is_enough(
    browser: Chromium, home: MemoryHome, engine: ForageEngine, tmp_path: Path
) -> None:
    with served(engine, tmp_path) as address:
        browser.open(f"{address}/")
        browser.until(f"{CARDS} === 7")
        names = browser.nodes()
        for role in ("button", "link", "textbox", "heading", "list"):
            assert [name for found, name in names if found == role and not name.strip()] == [], role
        assert sum(role == "heading" for role, _ in names) == 8
        items = browser.run(ITEMS)
        browser.press("j")
        browser.press("j")
        assert browser.run("document.activeElement.closest('li').dataset.item") == str(items[1])
        browser.press("x")
        browser.until(f"{SAID}.startsWith('Skipped')")
        wait_for(lambda: home.rows("signals")[-1:] != [] and home.rows("signals")[-1]["item"] == items[1])
        browser.until("document.activeElement.closest('#feed > li') !== null")
        browser.press("u")
        browser.until(f"{SAID} === 'It may be shown again.'")
        assert [row["kind"] for row in home.rows("hides")] == ["skip", "unhide"]
        wait_for_feed(browser, home, 3)
        # Without the page's own keys: the tabulator reaches every button, and Enter presses it.
        while browser.run("document.activeElement.dataset.action") != "hide":
            browser.press("Tab")
        item = browser.run("Number(document.activeElement.closest('li').dataset.item)")
        browser.press("Enter")
        browser.until(f"{SAID}.startsWith('Hid')")
        assert home.rows("hides")[-1]["value"] == str(item)
        wait_for_feed(browser, home, 4)
        assert item not in browser.run(ITEMS)
        browser.press("j")
        browser.until("document.activeElement.closest('#feed > li') !== null")
        creator = browser.run("document.activeElement.closest('li').querySelector('.creator').textContent")
        browser.press("b")
        browser.until(f"{SAID} === 'Blocked ' + {creator!r} + '.'")
        browser.until(f"{CARDS} === 7")
        assert creator not in browser.run("[...document.querySelectorAll('.creator')].map((node) => node.textContent)")


def test_a_failed_action_brings_its_card_back_and_stays_explained(
    browser: Chromium, home: MemoryHome, engine: ForageEngine, tmp_path: Path
) -> None:
    """The next feed took the reason away at once; and while the server was gone, a second skip raised a TypeError."""
    fails = (
        "window.real ??= window.fetch; window.fetch = (path, ...rest) =>"
        " {0} ? Promise.reject(new TypeError('down')) : real(path, ...rest)"
    )
    problem = "document.getElementById('problem').textContent"
    with served(engine, tmp_path) as address:
        browser.before("window.setInterval = () => 0")  # the test asks for each feed
        browser.open(f"{address}/")
        browser.until(f"{CARDS} === 7")
        items = browser.run(ITEMS)
        browser.run(fails.replace("{0}", "path === '/signal'"))
        browser.click("#feed > li:first-child [data-action=skip]")
        browser.until(f"{problem} === 'down' && {CARDS} === 7")
        browser.run("refresh()")
        assert (browser.run(problem), browser.run(ITEMS)) == ("down", items)
        browser.run(fails.replace("{0}", "true"))
        for left in (6, 5):
            browser.click("#feed > li:first-child [data-action=skip]")
            browser.until(f"{CARDS} === {left} && {problem}.includes('The server can')")
        browser.run(fails.replace("{0}", "false"))
        browser.run("refresh()")
        assert browser.run(problem) == ""
        assert browser.run(ITEMS) == items
        assert home.rows("signals") == []


def test_opening_an_item_is_a_view_and_coming_back_a_dwell(
    browser: Chromium, home: MemoryHome, engine: ForageEngine, tmp_path: Path
) -> None:
    with served(engine, tmp_path) as address:
        browser.open(f"{address}/")
        browser.until(f"{CARDS} === 7")
        opened = browser.run(ITEMS)[0]
        # The item's own address is in no one's network.
        browser.run("document.querySelector('#feed h2 a').href = 'about:blank'")
        browser.click("#feed > li:first-child h2 a")
        wait_for(lambda: [row["kind"] for row in home.rows("signals")] == ["view"])
        wait_for_feed(browser, home, 2)
        browser.call("Page.bringToFront")
        browser.run("document.dispatchEvent(new Event('visibilitychange'))")
        wait_for(lambda: [row["kind"] for row in home.rows("signals")] == ["view", "dwell"])
        view, dwell = home.rows("signals")
        assert view["item"] == dwell["item"] == opened
        assert view["impression"] == dwell["impression"] == home.rows("impressions")[0]["id"]
        assert dwell["duration_ms"] >= 0
        wait_for_feed(browser, home, 3)
        hidden = browser.run(ITEMS)[0]
        browser.click("#feed > li:first-child [data-action=hide]")
        browser.until(f"{SAID}.startsWith('Hid')")
        assert [(row["value"], row["kind"]) for row in home.rows("hides")] == [(str(hidden), "hide")]
        assert hidden not in browser.run(ITEMS)
