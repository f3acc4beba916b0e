"""Forage: regret over simulated readers, and the latency of feeds, of signals, and of a start."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import millstream
from bench.figures import Figure, asked, measures, repeated, reported, say
from bench.places import folder
from bench.simulated_readers import FEEDS, SEEDS, SLOTS, Greedy, PolicyOf, Thompson, Uniform, World, regrets
from millstream_forage.corpus import default_corpus
from millstream_forage.engine import ForageEngine
from millstream_forage.tables import DIMENSIONS, IMPRESSIONS, ITEMS, SIGNALS, STREAM, arm_name, home_config

Numbers: TypeAlias = npt.NDArray[np.int64]

FEED_ITEMS = 100_000
START_ITEMS, START_SIGNALS = 1_000_000, 300_000
CATEGORIES, SOURCES = 8, 12
"""96 arms."""
USERS = 1_000
FEEDS_MEASURED = 500
ITEMS_AN_APPEND = 20_000
NOW_NS = 1_767_225_600 * 10**9


@measures("forage_regret_vs_uniform", "forage_regret_vs_greedy")
def forage_regret() -> Iterator[Figure]:
    """Measure the regret of Forage's policy, and of two others, over the same readers."""
    seeds, feeds = (SEEDS, FEEDS) if asked.rows is None else (2, max(8, min(FEEDS, asked.rows // 500)))
    world = World.of([(item.category, item.source) for item in default_corpus()])

    def total(make: PolicyOf) -> npt.NDArray[np.float64]:
        return np.array([regrets(make, world, seed, feeds=feeds) for seed in range(seeds)])

    say(f"forage_regret: {seeds} readers, {feeds} feeds of {SLOTS} each, three policies")
    ours = total(Thompson)
    first, *_, last = np.split(ours, 4, axis=1)
    for name, make, goal in (("uniform", Uniform, "<= 0.5"), ("greedy", Greedy, "<= 0.9")):
        theirs = total(make)
        ratios = ours.sum(axis=1) / theirs.sum(axis=1)
        yield reported(
            f"forage_regret_vs_{name}",
            [float(ours.sum()) / seeds],
            [float(theirs.sum()) / seeds],
            unit="rewards a reader",
            goal=goal,
            rows=seeds * feeds * SLOTS,
            size_bytes=0,
            note=f"mean regret of {seeds} simulated readers over {feeds} feeds of {SLOTS} of the default corpus, {len(world.items)} arms, the clock fixed;"
            f" ratios of single readers from {ratios.min():.3f} to {ratios.max():.3f};"
            f" the last quarter's regret is {last.sum() / first.sum():.3f} of the first's (goal: <= 0.5)",
        )


@measures("forage_feed_ms", "forage_signal_to_feed_ms")
def forage_feeds() -> Iterator[Figure]:
    """Measure feeds of seven from many items, and how long a signal takes until the next feed reflects it."""
    items = FEED_ITEMS if asked.rows is None else asked.rows
    signals = items * START_SIGNALS // START_ITEMS
    size = f"{items:,} items in {CATEGORIES * SOURCES} arms, {signals:,} signals of {USERS:,} users, one process; each append has its fsync"
    with folder("forage") as path:
        fill_home(path / "home", items, signals)
        draws = np.random.default_rng(1)
        with ForageEngine.open(path / "home", clock=lambda: NOW_NS) as engine:

            def feed_ms() -> float:
                """Show a feed to some user."""
                user, seed = int(draws.integers(USERS)), int(draws.integers(1 << 53))
                began = time.perf_counter()
                feed = engine.feed(user, SLOTS, seed=seed)
                took_ms = (time.perf_counter() - began) * 1e3
                assert len(feed.items) == SLOTS
                return took_ms

            def signal_to_feed_ms() -> float:
                """Skip the first item of a user's feed, and look for it in the next one."""
                user = int(draws.integers(USERS))
                item = engine.feed(user, SLOTS).items[0]
                began = time.perf_counter()
                engine.signal(user, item.item_id, "skip", impression_id=item.impression_id)
                feed = engine.feed(user, SLOTS)
                took_ms = (time.perf_counter() - began) * 1e3
                assert item.item_id not in {shown.item_id for shown in feed.items}
                return took_ms

            yield percentiles(
                "forage_feed_ms",
                feed_ms,
                goal="p99 < 20",
                rows=items,
                note=f"a feed of {SLOTS} by `ForageEngine.feed` until its impressions are durable, of users drawn uniformly; {size}",
            )
            yield percentiles(
                "forage_signal_to_feed_ms",
                signal_to_feed_ms,
                goal="p99 < 100",
                rows=items,
                note=f"from the call of `signal` (a skip) to the return of the user's next feed, which has the item no more; {size}",
            )


def percentiles(name: str, measure: Callable[[], float], *, goal: str, rows: int, note: str) -> Figure:
    """Return the figure of calls: the 50th and the 99th percentile of each run."""
    calls = FEEDS_MEASURED if asked.rows is None else 20
    high: list[float] = []

    def run() -> float:
        took = np.sort([measure() for _ in range(calls)])
        high.append(float(took[int(calls * 0.99) - 1]))
        return float(np.median(took))

    median = repeated(run)
    note += f"; {calls} calls a run"
    return reported(name, median, unit="ms", goal=goal, rows=rows, size_bytes=0, note=note, p99=high[1:])


@measures("forage_start_s")
def forage_start() -> Iterator[Figure]:
    """Measure the start of an engine whose predecessor was killed, up to its first feed."""
    items = START_ITEMS if asked.rows is None else asked.rows
    signals = items * START_SIGNALS // START_ITEMS
    with folder("forage") as path:
        home = path / "home"
        fill_home(home, items, signals)
        peaks_mib: list[float] = []

        def started_s() -> float:
            """Start a process, which is killed after its first feed."""
            began = time.perf_counter()
            with subprocess.Popen(
                [sys.executable, "-m", "bench.forage", str(home)], stdout=subprocess.PIPE, text=True
            ) as process:
                assert process.stdout is not None
                shown, hidden, peak_kib = process.stdout.readline().split()
                took_s = time.perf_counter() - began
                process.kill()
            assert (shown, hidden) == (str(SLOTS), "0")
            peaks_mib.append(int(peak_kib) / 1024)
            return took_s

        yield reported(
            "forage_start_s",
            repeated(started_s, runs=3, warm_up=False),
            unit="s",
            goal="< 30",
            rows=items,
            size_bytes=sum(file.stat().st_size for file in home.rglob("*") if file.is_file()),
            note=f"from the start of a process to its first feed of {SLOTS}, which has no item that the user hid; the process before it was killed;"
            f" a log of {items:,} items, {signals:,} signals and as many impressions of {USERS:,} users; at most {max(peaks_mib):,.0f} MiB resident",
        )


def fill_home(home: Path, items: int, signals: int) -> None:
    """Make a home of so many items and signals. User 0 has hidden half of a feed; those stand in a file next to the home."""
    say(f"forage: a home of {items:,} items and {signals:,} signals")
    draws = np.random.default_rng(0)
    home.mkdir()
    (home / "millstream.toml").write_text(home_config())
    with millstream.open(home) as opened:
        for first in range(1, items + 1, ITEMS_AN_APPEND):
            rows = item_rows(np.arange(first, min(first + ITEMS_AN_APPEND, items + 1)), draws)
            opened.append(STREAM, "items", rows)
        token = str(opened.token(STREAM))
        for first in range(1, signals + 1, ITEMS_AN_APPEND):
            ids = np.arange(first, min(first + ITEMS_AN_APPEND, signals + 1))
            opened.append_all(STREAM, signal_rows(ids, draws.integers(1, items + 1, len(ids)), token, draws))
    with ForageEngine.open(home, clock=lambda: NOW_NS) as engine:
        hidden = [item.item_id for item in engine.feed(0, 50).items[::2]]
        for item in hidden:
            engine.hide(0, item)
    home.with_suffix(".hidden").write_text("\n".join(map(str, hidden)))


def arm_of(items: Numbers) -> tuple[Numbers, Numbers]:
    """Return the category and the source of items, as numbers."""
    arms = items * 2_654_435_761 % (CATEGORIES * SOURCES)
    return arms % CATEGORIES, arms // CATEGORIES


def item_rows(ids: Numbers, draws: np.random.Generator) -> pa.Table:
    """Return items with these ids. Vectors of a category are near each other."""
    categories, sources = arm_of(ids)
    # Eight corners of the space, and noise around them.
    vectors = draws.normal(scale=0.12, size=(len(ids), DIMENSIONS)) + np.eye(DIMENSIONS)[categories]
    vectors /= np.linalg.norm(vectors, axis=1)[:, None]
    columns = {
        "id": ids,
        "url": [f"https://items.example/{number}" for number in ids],
        "title": [f"Title of item {number}" for number in ids],
        "creator": [f"creator {number % 5_000}" for number in ids],
        "category": [f"category {number}" for number in categories],
        "source": [f"source {number}" for number in sources],
        "tags": [["first", "second"]] * len(ids),
        "entities": [[]] * len(ids),
        "content_type": ["news"] * len(ids),
        "summary": ["A sentence about this item. Another sentence, which is a little longer."] * len(ids),
        "reading_time_min": np.full(len(ids), 5),
        "embedding": list(vectors.astype(np.float32)),
        "added": np.full(len(ids), NOW_NS),
    }
    return pa.table(columns, schema=ITEMS)


def signal_rows(ids: Numbers, items: Numbers, token: str, draws: np.random.Generator) -> dict[str, pa.Table]:
    """Return impressions of items, each with a signal: mostly dwells, some saves."""
    users = draws.integers(USERS, size=len(ids))
    categories, sources = arm_of(items)
    saves = draws.random(len(ids)) < 0.2
    durations_ms = draws.integers(1, 60_000, len(ids))
    common = {"id": ids, "user": users, "item": items, "now": np.full(len(ids), NOW_NS)}
    impressions = common | {
        "feed": ids,
        "slot": np.ones(len(ids), np.int64),
        "arm": [
            arm_name(f"category {category}", f"source {source}")
            for category, source in zip(categories, sources, strict=True)
        ],
        "label": ["none"] * len(ids),
        "explore": np.zeros(len(ids), np.bool_),
        "propensity": np.full(len(ids), 0.1),
        "policy": ["made up"] * len(ids),
        "seed": ids,
        "limit": np.ones(len(ids), np.int64),
        "token": [token] * len(ids),
    }
    signals = common | {
        "kind": np.where(saves, "save", "dwell").tolist(),
        "weight": np.where(saves, 1.0, durations_ms / 60_000),
        "duration_ms": pa.array(durations_ms, mask=saves),
        "impression": ids,
        "idempotency_key": pa.nulls(len(ids), pa.string()),
    }
    return {
        "impressions": pa.table({name: impressions[name] for name in IMPRESSIONS.names}, schema=IMPRESSIONS),
        "signals": pa.table({name: signals[name] for name in SIGNALS.names}, schema=SIGNALS),
    }


def show_and_wait(home: Path) -> None:
    """Print the size of user 0's feed, how many of its items are hidden, and the peak memory; wait to be killed."""
    hidden = {int(item) for item in home.with_suffix(".hidden").read_text().split()}
    with ForageEngine.open(home, clock=lambda: NOW_NS) as engine:
        shown = engine.feed(0, SLOTS, seed=1, preview=True).items
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(len(shown), len(hidden & {item.item_id for item in shown}), peak_kib, flush=True)
        signal.pause()


if __name__ == "__main__":
    show_and_wait(Path(sys.argv[1]))
