"""Take the console's pictures of the documentation: a real shop at work, seen in a real browser.

It needs Chromium on the PATH (Debian: apt install chromium) and about three minutes. Everything else is the test kit's: a
PostgreSQL with a shop that stays open, `millstream run`, two consumers with three dead letters, and a table whose column
changed its type. The pages show what these did, with one exception: the charts' past hour is made up, because
a picture shouldn't take an hour. Its last samples are the shop's own.

    python -m scripts.screenshots    write docs/how-to/console{,-charts,-log}.png
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any, Final

import httpx
from apps.forage.tests.chromium import NAMES, Chromium, browser_path
from tests.app.homes import wait_for

import millstream
from millstream.home.figure_ring import PERIODS, FigureRing
from millstream.home.home import Home
from millstream.serving.chart_history import OF_HOME, OF_STREAM
from millstream.testing._servers.ports import free_port
from millstream.testing.postgres import EmbeddedPostgres
from millstream.testing.workloads.shop import ShopWorkload
from millstream.workers import Worker

PICTURES: Final = Path(__file__).resolve().parent.parent / "docs" / "how-to"
WIDTH: Final = 1180
PATIENCE_S: Final = 180.0
TRANSACTIONS_PER_S: Final = 40.0
AT_WORK_S: Final = 75.0
"""Time that the shop stays open before the pictures: five samples of the figures."""
BEFORE: Final = (
    "ALTER TABLE public.orders REPLICA IDENTITY FULL",  # the log's picture shows rows before and after
    "CREATE TABLE public.bookings (id integer PRIMARY KEY, at timestamptz NOT NULL, guests integer NOT NULL)",
    "INSERT INTO public.bookings SELECT id, now() + id * interval '1 hour', 1 + id % 6 FROM generate_series(1, 400) AS id",
)
DURING: Final = "ALTER TABLE public.bookings ALTER at TYPE date", "UPDATE public.bookings SET guests = guests + 1"
CONSUMERS: Final = """
[streams.shop.consumers.search]
tables = ["public.products"]
max_deliver = 1
[streams.shop.consumers.invoices]
tables = ["public.orders"]
"""
DEAD: Final = frozenset({3, 11, 20})  # messages that the search refuses, by their number


def draw_hour(home: Home) -> None:
    """Make up the figures of an hour, with a burst of writes in it and a short gap."""
    stream = FigureRing(home.figures_folder / "stream-shop.ring", OF_STREAM)
    own = FigureRing(home.figures_folder / "home.ring", OF_HOME)
    step_s, samples = PERIODS["hour"].step_s, PERIODS["hour"].samples
    free = float(shutil.disk_usage(home.path).free)
    for number in (*range(60), *range(66, samples)):
        at_s = time.time() - step_s * (samples - number)
        burst, after = (math.exp(-(((number - peak) / width) ** 2)) for peak, width in ((150, 9), (154, 11)))
        some = 1 + 0.1 * math.sin(number * number)
        stream.add(
            at_s,
            (
                270 * some + 2_400 * burst,
                0.0041 * some + 0.0019 * burst,
                0.05 if burst > 0.5 else 0.025,
                1.9 * some + 27 * after,
                150 * some + 31_000 * after,
                3_900 * some + 52_000 * after,
                9_000 * some + 1_200_000 * burst,
                (3 + number / 40) * 1e6,
                (4 + number / 30) * 1e6,
            ),
        )
        own.add(at_s, (1.45e9 + 2e7 * some + 2e8 * after, free))
    stream.close()
    own.close()


def consume(address: str, name: str, refused: Iterator[bool]) -> bool:
    """Take up to a hundred messages, and refuse those for which `refused` is true."""
    with millstream.connect(address) as home, home.consume("shop", name, wait_s=1) as messages:
        for message in islice(messages, 100):  # while the shop is open, they never end
            if next(refused):
                message.nack()
    return True


@contextmanager
def shop_at_work(folder: Path) -> Iterator[str]:
    """Keep a shop, its home and its consumers going; yield the address of the console."""
    home = Home(folder / "shop")
    command = [sys.executable, "-m", "millstream.cli"]
    listen = f"127.0.0.1:{free_port()}"
    address = f"http://{listen}"
    with EmbeddedPostgres() as server:
        dsn = server.create_database("shop")
        with server.connect("shop", autocommit=True) as connection:
            shop = ShopWorkload()
            shop.setup(connection)
            for statement in BEFORE:
                connection.execute(statement)
            init = [*command, "init", str(home.path), "--stream", "shop", "--source", dsn, "--tables", "public.*"]
            subprocess.run(init, check=True, stdout=subprocess.DEVNULL)
            with (home.path / "millstream.toml").open("a") as file:
                file.write(f'{CONSUMERS}[http]\nlisten = "{listen}"\n')
            draw_hour(home)
            with (folder / "run.log").open("wb") as log:
                run = subprocess.Popen([*command, "--home", str(home.path), "run"], stdout=log, stderr=log)
            try:
                wait_for(lambda: bookings(address).get("landed_rows"), seconds=PATIENCE_S)
                with (
                    Worker("shop", lambda: shop.run(connection, seconds=1, tx_per_second=TRANSACTIONS_PER_S) != []),
                    Worker("search", partial(consume, address, "search", map(DEAD.__contains__, count()))),
                    Worker("invoices", partial(consume, address, "invoices", repeat(False))),
                ):
                    with server.connect("shop", autocommit=True) as other:
                        for statement in DURING:
                            other.execute(statement)
                    wait_for(lambda: bookings(address)["state"] == "quarantined", seconds=PATIENCE_S)
                    time.sleep(AT_WORK_S)
                    yield address
            finally:
                run.send_signal(signal.SIGTERM)
                run.wait(PATIENCE_S)


def bookings(address: str) -> dict[str, Any]:
    """Return the status of the table of bookings; empty while there is none."""
    try:
        streams = httpx.get(f"{address}/status").json()["streams"]
    except httpx.TransportError:
        return {}
    return next((one for stream in streams for one in stream["tables"] if one["name"] == "public.bookings"), {})


def show(browser: Chromium, address: str, path: str, *, height: int, scheme: str = "light") -> None:
    """Open a page in a window of some size."""
    browser.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=1, mobile=False)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(address + path)
    browser.until(
        f"document.readyState === 'complete' && location.pathname === {json.dumps(path)}"
        " && document.getElementById('age')?.textContent === 'live'"
    )


def take(browser: Chromium, address: str) -> None:
    """Take the pictures."""
    show(browser, address, "/", height=535)
    browser.until("!document.getElementById('live').textContent.includes('…')")
    browser.screenshot(PICTURES / "console.png")

    show(browser, address, "/charts/hour/shop", height=884)
    place = "(({x, y, width}) => [x + 0.6 * width, y + 20])(document.querySelector('#chart-throughput .plot').getBoundingClientRect())"
    x, y = browser.run(place)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.until("document.querySelector('#chart-throughput output').textContent !== ''")
    browser.screenshot(PICTURES / "console-charts.png")

    show(browser, address, "/log/shop", height=860, scheme="dark")
    browser.run("document.querySelector('#tail select').value = 'public.orders'")
    browser.click("#tail button")
    update = "[...document.querySelectorAll('#tail summary')].findIndex((one) => one.textContent.startsWith('update'))"
    browser.until(f"document.querySelectorAll('#tail li').length > 20 && {update} >= 0 && {update} < 4")
    browser.click("#tail button")
    browser.run(f"document.querySelectorAll('#tail summary')[{update}].click()")
    browser.until("document.querySelector('#tail li table') !== null")
    browser.run("document.getElementById('tail').scrollIntoView()")
    browser.screenshot(PICTURES / "console-log.png")


def main() -> None:
    """Take the pictures, or say what is missing for them."""
    program = browser_path()
    if program is None:
        sys.exit(f"There is no Chromium: none of {', '.join(NAMES)} is on the PATH (Debian: apt install chromium).")
    with (
        tempfile.TemporaryDirectory() as folder,
        shop_at_work(Path(folder)) as address,
        Chromium(program, Path(folder) / "profile") as browser,
    ):
        take(browser, address)


if __name__ == "__main__":
    main()
