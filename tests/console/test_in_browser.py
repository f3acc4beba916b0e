"""The console in a real browser, over a real server: its pages, how they follow the home, and what hostile names do."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
import pytest
from apps.forage.tests.chromium import NAMES, Chromium, browser_path
from tests.app.homes import make_home
from tests.console.homes import COLUMN, HOSTILE, VALUE
from tests.console.test_diff_page import REPORT
from tests.serving.servers import Served, served

from millstream.catalog import TableState
from millstream.console import diff_page
from millstream.console.diff_page import Comparison
from millstream.console.html import Rendered
from millstream.errors import DiskFull, MillstreamError, SourceError
from millstream.home.home import Home
from millstream.model.access import Rights
from millstream.processes.role_locks import RoleLock
from millstream.writers.stall_reasons import forget_given_up, note_given_up

pytestmark = pytest.mark.long

TABLE: Final = f"/tables/web/{quote(HOSTILE, safe='')}"
PAGES: Final = (
    "/",
    "/tables",
    TABLE,
    "/log",
    "/log/web",
    "/query",
    "/diff",
    "/consumers",
    "/consumers/web/search",
    "/nodes",
    "/charts",
)
AXE: Final = "axe-core@4.10.3"
FIRST_VIEW_BYTES_MAX: Final = 200_000


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    program = browser_path()
    if program is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is on the PATH (Debian: apt install chromium)")
    with Chromium(program, tmp_path / "profile") as opened:
        yield opened


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the script that finds what assistive technology can't use."""
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        pytest.skip("no npm, which fetches axe-core")
    packed = subprocess.run(["npm", "pack", AXE], cwd=folder, capture_output=True, text=True)
    if packed.returncode:
        pytest.skip(f"{AXE} can't be fetched: {packed.stderr[-300:]}")
    shutil.unpack_archive(folder / packed.stdout.split()[-1], folder)
    return (folder / "package" / "axe.min.js").read_text()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    merged = '[streams.shop.keys]\n"public.orders" = ["id"]\n[streams.shop.merge."public.orders"]\ntotal = "lww"\n'
    home = make_home(tmp_path / "home", f"[streams.shop]\n{merged}[streams.web]\n")
    with served(home) as found:
        append(found, "shop", "public.orders", {"id": 1, "total": 1.5})
        append(found, "web", HOSTILE, {"id": 1, COLUMN: VALUE})
        made = httpx.post(
            f"http://{found.address}/v1/streams/web/consumers", json={"name": "search", "start": "earliest"}
        )
        assert made.status_code == 201, made.text
        # The pages show a status of up to a few seconds, which may be older than the stream.
        end_s = time.monotonic() + 60
        while httpx.get(f"http://{found.address}/consumers/web/search").status_code != 200:
            assert time.monotonic() < end_s, "the console doesn't show the consumer"
            time.sleep(0.1)
        yield found


def append(server: Served, stream: str, table: str, *rows: dict[str, Any]) -> None:
    answer = httpx.post(f"http://{server.address}/v1/streams/{stream}/tables/{quote(table, safe='')}", json=list(rows))
    assert answer.status_code == 200, answer.text


def show(browser: Chromium, server: Served, path: str, *, width: int = 1180, scheme: str = "light") -> None:
    """Open a page in a window of some width."""
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.call("Emulation.setEmulatedMedia", features=features)
    browser.open(f"http://{server.address}{path}")
    browser.until(f"document.readyState === 'complete' && location.pathname === {json.dumps(path)}")


def test_every_page_fits_and_axe_finds_nothing_serious(browser: Chromium, server: Served, axe: str) -> None:
    for path in PAGES:
        for width, scheme in ((360, "dark"), (2560, "light")):
            show(browser, server, path, width=width, scheme=scheme)
            assert browser.run("document.documentElement.scrollWidth") <= width, path
            browser.run(axe + "; 0")
            found = browser.run("axe.run().then(({violations}) => violations)")
            serious = [
                (one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in {"serious", "critical"}
            ]
            assert serious == [], (path, width, scheme)
    assert browser.problems == []


def test_wide_answers_and_long_states_fit_a_narrow_window(browser: Chromium, server: Served) -> None:
    width = "document.documentElement.scrollWidth"
    show(browser, server, "/query", width=360)
    columns = ", ".join(f"'value{number}' AS a_column_with_a_long_name_{number}" for number in range(12))
    browser.run(f"document.querySelector('textarea').value = {json.dumps('SELECT ' + columns)}; 0")
    browser.click("button[value=table]")
    browser.until("document.querySelector('#answer td') !== null && document.readyState === 'complete'")
    assert browser.run(width) <= 360
    assert browser.run("(({scrollWidth, clientWidth}) => scrollWidth > clientWidth)(document.querySelector('.scroll'))")
    show(browser, server, "/diff", width=360)
    compared = Comparison("shop", "", "anna", "2026-03-01 12:00:00", state="done", report=REPORT)
    area = Rendered(list(diff_page.area(compared, may_see=True))).whole
    browser.run(f"document.getElementById('live').innerHTML = {json.dumps(area)}; 0")
    assert browser.run(width) <= 360
    right = (
        "Math.max(...[...document.querySelectorAll('article .state')].map((one) => one.getBoundingClientRect().right))"
    )
    assert 0 < browser.run(right) <= 348


def test_hostile_names_run_nothing_and_no_page_asks_another_host(browser: Chromium, server: Served) -> None:
    browser.before("window.alert = (said) => { document.documentElement.dataset.alerted = said; }")
    for path in PAGES:
        show(browser, server, path)
        browser.run("document.querySelectorAll('details').forEach((node) => { node.open = true; }); 0")
        assert browser.run("document.documentElement.dataset.alerted === undefined && !document.querySelector('img')")
        asked = browser.run("performance.getEntriesByType('resource').map(({name}) => new URL(name).origin)")
        assert set(asked) == {f"http://{server.address}"}
    show(browser, server, TABLE)
    shown = browser.run("document.body.textContent")
    assert all(text in shown for text in (HOSTILE, COLUMN, VALUE))
    assert browser.problems == []


def test_a_first_view_is_small(browser: Chromium, server: Served) -> None:
    show(browser, server, "/")
    kinds = "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
    size = browser.run(f"{kinds}.reduce((sum, {{encodedBodySize}}) => sum + encodedBodySize, 0)")
    assert 1_000 < size < FIRST_VIEW_BYTES_MAX


def test_a_page_follows_the_home_and_keeps_focus(browser: Chromium, server: Served) -> None:
    show(browser, server, "/tables")
    browser.run("window.stays = document.querySelector('tbody a'); window.stays.focus()")
    append(server, "shop", "public.customers", {"id": 1})
    browser.until("document.querySelectorAll('tbody tr').length === 3")
    assert browser.run("document.activeElement === window.stays && window.stays.isConnected")
    show(browser, server, "/")
    browser.run("window.same = document.getElementById('stream-0')")
    append(server, "shop", "public.customers", *({"id": number} for number in range(700)))
    browser.until("document.getElementById('stream-0').textContent.includes('702 records')")
    assert browser.run("window.same === document.getElementById('stream-0')")


def test_a_home_that_doesn_t_answer_is_told_from_one_that_is_idle(browser: Chromium, server: Served) -> None:
    age = "document.getElementById('age').textContent"
    show(browser, server, "/")
    browser.until(f"{age} === 'live'")
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        browser.until(f"{age}.startsWith('✖ no answer: data of ')")
        assert browser.run("document.getElementById('said').textContent") == "The home doesn't answer."
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    browser.until(f"{age} === 'live'")


class BadGateway(http.server.BaseHTTPRequestHandler):
    """A proxy whose server is gone."""

    asked = threading.Event()

    def do_GET(self) -> None:
        self.send_error(502)
        self.asked.set()

    do_HEAD = do_GET  # noqa: N815 - the name of the base class

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Log nothing."""


def test_a_page_goes_on_once_its_server_has_started_again(browser: Chromium, tmp_path: Path) -> None:
    """After one answer such as a proxy's 502 it stayed without news until it was loaded again."""
    folder = make_home(tmp_path / "home", "[streams.shop]\n")
    with served(folder) as server:
        append(server, "shop", "public.orders", {"id": 1})
        show(browser, server, "/tables")
        browser.until("document.querySelectorAll('tbody tr').length === 1")
        address = server.address
    with http.server.HTTPServer(("127.0.0.1", int(address.rpartition(":")[2])), BadGateway) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        assert BadGateway.asked.wait(60)
        proxy.shutdown()
        thread.join()
    with served(folder, MILLSTREAM_HTTP__LISTEN=address) as server:
        append(server, "shop", "public.customers", {"id": 1})
        browser.until("document.querySelectorAll('tbody tr').length === 2")
        browser.until("document.getElementById('age').textContent === 'live'")


@contextlib.contextmanager
def capture_failed(home: Home, error: MillstreamError) -> Iterator[None]:
    with home.open_catalog() as catalog:
        note_given_up(catalog, "shop", "capture", error)
        yield
        forget_given_up(catalog, "shop", "capture")


@contextlib.contextmanager
def table_quarantined(home: Home) -> Iterator[None]:
    with home.open_catalog() as catalog:
        row = catalog.find_table(catalog.stream("shop").id, "public", "orders")
        catalog.set_state(row.id, TableState.QUARANTINED, "a value can't be read")
        yield
        catalog.set_state(row.id, TableState.STREAMING, "")


def test_each_trouble_is_shown_first_with_its_code_its_hint_and_its_command(
    browser: Chromium, server: Served, tmp_path: Path
) -> None:
    home = Home(tmp_path / "home")
    states: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "source_unreachable": partial(capture_failed, home, SourceError("no answer", code="source_unreachable")),
        "slot_lost": partial(capture_failed, home, SourceError("its WAL is gone", code="slot_lost")),
        "disk_full": partial(capture_failed, home, DiskFull("no space left on device")),
        "table_quarantined": partial(table_quarantined, home),
        "pipeline_down": partial(RoleLock.take, home.run_folder, "run"),
    }
    show(browser, server, "/")
    for code, begun in states.items():
        browser.until("document.querySelector('#troubles').dataset.count === '0'")
        with begun():
            first = "document.querySelector('#live > :first-child li.trouble')"
            browser.until(f"{first}?.querySelector('strong code').textContent === {json.dumps(code)}")
            hint = browser.run(f"{first}.querySelector('.hint').textContent")
            assert len(hint) > 20, code
            assert browser.run(f"{first}.getBoundingClientRect().bottom") < 900, "in sight without scrolling"
            commands = browser.run(f"[...{first}.querySelectorAll('.hint code')].map((one) => one.textContent)")
            assert any(command.startswith("millstream ") for command in commands), code
            browser.until("document.title.startsWith('(')")
    assert browser.problems == []


def test_the_tail_shows_records_as_they_come_and_why_it_can_t(browser: Chromium, server: Served) -> None:
    show(browser, server, "/log/web")
    note = "document.querySelector('#tail p').textContent"
    browser.run("document.querySelector('#tail [name=where]').value = 'id ='")
    browser.click("#tail button")
    browser.until(f"{note}.startsWith('invalid_value: ')")
    browser.problems.clear()  # the refused request
    browser.run("document.querySelector('#tail [name=where]').value = 'id >= 5'")
    browser.click("#tail button")
    browser.until(f"{note} === 'Waiting for records.'")
    server_says = "document.querySelectorAll('#tail li').length"
    number = 0
    while not browser.run(server_says):  # the tail begins when the server has taken its request
        number += 5
        append(server, "web", HOSTILE, {"id": 1}, {"id": number, COLUMN: VALUE})
    browser.click("#tail li summary")
    browser.until("document.querySelector('#tail li table') !== null")
    row = browser.run("document.querySelector('#tail li table').textContent")
    assert "BeforeAfter" in row
    assert COLUMN in row
    assert VALUE in row
    assert "where" not in browser.run("document.querySelector('#tail ol').textContent")
    browser.click("#tail button")
    browser.until(f"{note} === 'Stopped.'")
    assert browser.problems == []


def test_a_chart_shows_its_numbers_by_pointer_and_by_keyboard(browser: Chromium, server: Served) -> None:
    show(browser, server, "/charts")
    browser.until("document.querySelector('#chart-disk')?.textContent.includes('log')")
    shown = "document.querySelector('#chart-disk output').textContent"
    cells = "document.querySelector('#numbers tbody tr').textContent"
    browser.run("document.querySelector('#chart-disk .plot').focus()")
    browser.press("ArrowLeft")
    browser.until(f"{shown}.includes(': log ')")
    size = browser.run(shown).partition(": log ")[2].partition(",")[0]
    assert size in browser.run(cells)
    browser.press("Tab")
    browser.until(f"{shown} === ''")
    box = browser.run("(({x, y}) => [x, y])(document.querySelector('#chart-disk .plot').getBoundingClientRect())")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 20, y=box[1] + 20)
    browser.until(f"{shown}.includes(': log ')")
    assert browser.problems == []


def test_a_query_is_asked_by_the_keyboard(browser: Chromium, server: Served) -> None:
    show(browser, server, "/query")
    browser.run("document.querySelector('textarea').focus()")
    browser.call("Input.insertText", text="SELECT 40 + 2 AS answer, '<img src=x>' AS h")
    while browser.run("document.activeElement.value") != "table":
        browser.press("Tab")
    browser.press("Enter")
    browser.until("document.querySelector('#answer td')?.textContent === '42'")
    assert browser.run("document.querySelector('textarea').value").startswith("SELECT 40 + 2")
    assert browser.problems == []


def test_names_are_completed_by_the_keyboard_and_the_pointer(browser: Chromium, server: Served) -> None:
    show(browser, server, "/query")
    sql = "document.querySelector('textarea').value"
    shown = "[...document.querySelectorAll('#names li')].map((item) => item.textContent).join()"
    browser.run("document.querySelector('textarea').focus()")
    browser.call("Input.insertText", text="SELECT count(*) FROM or")
    browser.until(f"{shown} === 'public.orders'")
    browser.press("ArrowDown")
    assert browser.run(
        "document.getElementById(document.activeElement.getAttribute('aria-activedescendant')).ariaSelected"
    )
    browser.press("Enter")
    browser.until(f"{sql} === 'SELECT count(*) FROM public.orders'")
    browser.call("Input.insertText", text=" WHERE t")
    browser.until(f"{shown}.startsWith('total')")
    browser.click("#names li")
    browser.until(f"{sql} === 'SELECT count(*) FROM public.orders WHERE total'")
    browser.call("Input.insertText", text=' UNION SELECT 1 FROM history."pub')
    browser.until(f"{shown} === 'history.\"public.orders\"'")
    browser.click("#names li")
    browser.until(f"{sql}.endsWith('FROM history.\"public.orders\"')")
    browser.call("Input.insertText", text=' UNION SELECT 1 FROM merged."pub')
    browser.until(f"{shown} === 'merged.\"public.orders\"'")
    browser.click("#names li")
    browser.until(f"{sql}.endsWith('FROM merged.\"public.orders\"')")
    browser.run("document.querySelector('textarea').value = ''; document.querySelector('textarea').focus()")
    browser.call("Input.insertText", text='SELECT count(*) FROM history."public.orders"')
    browser.call("Input.insertText", text=" AS h JOIN public.orders o ON o.i")
    browser.until(f"{shown} === 'o.id'")
    browser.call("Input.insertText", text="d = h.t")
    browser.until(f"{shown} === 'h.total'")
    browser.run("document.querySelector('textarea').value = ''; document.querySelector('textarea').focus()")
    browser.call("Input.insertText", text="SELECT count(*) FROM public.orders WHERE total")
    browser.run(
        "document.querySelector('select[name=stream]').value = 'web'; document.querySelector('textarea').focus()"
    )
    browser.call("Input.insertText", text=" AND <")
    browser.call("Input.insertText", text=" img")
    browser.until(f"{shown}.includes('onerror=alert')")
    assert browser.run("document.querySelector('img') === null")
    browser.press("Tab")
    browser.until("document.getElementById('names').hidden")
    browser.run("document.querySelector('button[value=table]').click()")
    browser.until(
        "document.querySelector('#main .trouble') !== null && document.querySelector('li[data-columns]') !== null"
    )


def test_a_token_logs_in_and_out(browser: Chromium, tmp_path: Path) -> None:
    folder = make_home(tmp_path / "home", "[streams.shop]\n[http]\ntokens_required = true\n")
    home = Home(folder)
    home.prepare()
    with home.open_catalog() as catalog:
        token = catalog.create_access_token(Rights.parse(["*=read"]), name="anna")[1]

    def log_in() -> None:
        browser.until("location.pathname === '/console/login' && document.readyState === 'complete'")
        browser.run("document.getElementById('token').focus()")
        browser.call("Input.insertText", text=token)
        browser.press("Enter")
        browser.until("location.pathname === '/consumers' && document.readyState === 'complete'")
        browser.until("document.getElementById('age').textContent === 'live'")

    with served(folder) as server:
        browser.open(f"http://{server.address}/consumers")
        log_in()
        address = server.address
    # Its sessions end with the server: an open page leads to the login, and not to a home that doesn't answer.
    with served(folder, MILLSTREAM_HTTP__LISTEN=address) as server:
        log_in()
        browser.problems.clear()  # requests that the server refused, or didn't answer
        assert browser.run("document.cookie") == "", "scripts read no session"
        browser.click(".logout button")
        browser.until("location.pathname === '/console/login'")
        browser.open(f"http://{server.address}/")
        browser.until("location.pathname === '/console/login' && document.readyState === 'complete'")
        assert browser.problems == []
