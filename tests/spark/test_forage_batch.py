"""Forage's batch side, on a real Spark: its tables agree with the engine, and its estimates with a known policy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

import millstream
from millstream_forage.bandit import Arm, fill
from millstream_forage.cli import main
from millstream_forage.clock import DAY_NS
from millstream_forage.engine import ForageEngine
from millstream_forage.tables import KINDS, SCHEMAS, STREAM, home_config

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.siege  # Spark plans dozens of small queries

NOW_NS = 1_700_000_000_000_000_000
LIKED = "sea"
ARMS = [("science", f"source {number}") for number in range(5)]
CHANCES = np.linspace(0.3, 0.7, len(ARMS))
"""The chance of a reward by arm."""
FEEDS = 399
FEEDS_OF_ONE = 3
"""Feeds of a reader. With more of them the policy hardly shows some arms, and estimates get wide."""
SLOTS = 7


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which user 1 saves one category, ignores the others, and hides an item."""
    folder = tmp_path_factory.mktemp("forage") / "home"
    with ForageEngine.open(folder, clock=lambda: NOW_NS) as engine:
        engine.seed_default_corpus()
        for seed in range(40):
            for item in engine.feed(1, 7, seed).items:
                if item.category == LIKED:
                    engine.signal(1, item.item_id, "save", impression_id=item.impression_id)
                    engine.signal(
                        1,
                        item.item_id,
                        "save",
                        impression_id=item.impression_id,
                        idempotency_key=f"{item.impression_id}",
                    )
                elif item.slot == 1:
                    engine.signal(1, item.item_id, "view", impression_id=item.impression_id)
        engine.signal_dwell(2, 5, 30_000)
        engine.hide(1, 7)
        engine.hide(1, 8)
        engine.unhide(1, 8)
    return folder


def test_the_tables_agree_with_the_engine_and_estimate_other_policies(home: Path, spark: SparkSession):
    from millstream_forage.batch import run_batch

    with ForageEngine.open(home) as engine:
        listed = engine.items(limit=1000).items
        arms = {f"{item.category}/{item.source}" for item in listed}
        liked = {arm for arm in arms if arm.startswith(f"{LIKED}/")}
        others = {arm: 1 / len(arms - liked) for arm in arms - liked}
        loved = {arm: 1 / len(liked) for arm in liked}
        landed = run_batch(spark, home, policies={"loved": loved, "others": others, "nothing": {}})
    tables = {table.name: rows_of(table.folder) for table in landed}
    assert [len(tables[table.name]) for table in landed] == [table.rows for table in landed]

    assert [row["item"] for row in tables["item_features"]] == [item.item_id for item in listed]
    for row, item in zip(tables["item_features"], listed, strict=True):
        assert {kind: row[f"{kind}s"] for kind in KINDS} == item.signals
    assert [row["item"] for row in tables["item_features"] if row["hidden_by"]] == [7]
    assert sum(row["impressions"] for row in tables["item_features"]) == 280

    first, second = tables["user_features"]
    assert (first["user"], first["feeds"], first["impressions"], first["best_category"]) == (1, 40, 280, LIKED)
    assert (second["user"], second["feeds"], second["trials"], second["mean_reward"]) == (2, 0, 1, 0.5)

    days = tables["exploring_by_day"]
    assert {str(row["day"]) for row in days} == {"2023-11-14"}
    assert sum(row["impressions"] for row in days) == 280
    assert sum(row["trials"] for row in days) == first["trials"]

    values = {row["policy"]: row for row in tables["policy_values"]}
    assert set(values) == {"uniform", "loved", "others", "nothing"}
    assert (values["nothing"]["support"], values["nothing"]["self_normalized_ips"]) == (0, None)
    # The reader saves each item of the category that the first policy shows, and reacts to few of the others.
    for estimate in ("self_normalized_ips", "doubly_robust"):
        assert values["loved"][estimate] > values["uniform"][estimate] > values["others"][estimate]
    assert values["loved"]["self_normalized_ips"] == pytest.approx(1)

    again = CliRunner().invoke(main, ["batch", "--home", str(home)])
    assert again.output.splitlines()[:3] == [
        f"{table.name}: {table.rows} rows in {table.folder}" for table in landed[:3]
    ]
    assert [row["policy"] for row in rows_of(landed[3].folder)] == ["uniform"]


def test_the_tables_are_of_all_regions_that_the_home_follows(spark: SparkSession, tmp_path: Path):
    from millstream_forage.batch import TOKEN_KEY, run_batch

    one, two = tmp_path / "one", tmp_path / "two"
    for region, home in ((1, one), (2, two)):
        home.mkdir()
        other = f'\n[replication]\nnode = "n{region}"\nregions = {{ {3 - region} = "grpc://127.0.0.1:9" }}\n'
        (home / "millstream.toml").write_text(home_config(region) + other)
    with ForageEngine.open(one, clock=lambda: NOW_NS) as engine:
        engine.seed_default_corpus()
        repeated = engine.items(limit=1).items[0].item_id
    shutil.copytree(one / "data/wal/forage", two / "data/wal/forage@1")
    with ForageEngine.open(two, clock=lambda: NOW_NS) as engine:
        engine.signal(3, repeated, "view", idempotency_key="k")
    with ForageEngine.open(one, clock=lambda: NOW_NS) as engine:
        engine.signal(3, repeated, "view", idempotency_key="k")
        shown = engine.feed(1, 7, 1).items
        engine.signal(1, shown[0].item_id, "save", impression_id=shown[0].impression_id)
        engine.hide(1, shown[5].item_id)
        engine.hide(1, shown[6].item_id)
    shutil.rmtree(two / "data/wal/forage@1")
    shutil.copytree(one / "data/wal/forage", two / "data/wal/forage@1")
    with ForageEngine.open(two, clock=lambda: NOW_NS) as engine:
        engine.signal(1, shown[0].item_id, "save", impression_id=shown[0].impression_id)
        engine.signal(1, shown[1].item_id, "share", impression_id=shown[1].impression_id)
        engine.unhide(1, shown[5].item_id)
        engine.feed(2, 7, 2)
    landed = run_batch(spark, two)
    items = {row["item"]: row for row in rows_of(landed[0].folder)}
    assert len(items) == 100
    assert sum(row["impressions"] for row in items.values()) == 14
    assert (items[shown[0].item_id]["saves"], items[shown[1].item_id]["shares"]) == (1, 1), "the repeat counts once"
    assert items[repeated]["views"] == 1, "so does the repeat under a key"
    assert [item for item, row in items.items() if row["hidden_by"]] == [shown[6].item_id]
    recorded = DeltaTable(landed[0].folder).history(1)[0]
    assert {TOKEN_KEY, "forage@1.token"} <= recorded.keys()


def test_records_that_the_engine_leaves_out_are_left_out(spark: SparkSession, tmp_path: Path):
    """An impression of propensity 0 failed the job; a weight beyond 1 raised the means."""
    from millstream_forage.batch import run_batch

    signal = {"user": 1, "item": 1, "kind": "save", "now": NOW_NS}
    with ForageEngine.open(tmp_path, clock=lambda: NOW_NS) as engine:
        # Before the engine has written the table: columns that no program has written are null.
        with millstream.open(tmp_path) as opened:
            opened.append(STREAM, "signals", [{**signal, "id": n, "weight": n - 900} for n in (901, 905)])
        engine.seed_default_corpus()
        engine.feed(1, 7, 1)
        shown = {"feed": 900, "user": 1, "item": 1, "slot": 1, "arm": "sea/x", "label": "none", "explore": False,
                 "policy": "p", "seed": 1, "limit": 7, "token": "abc.s1", "now": NOW_NS}  # fmt: skip
        with millstream.open(tmp_path) as opened:
            opened.append(STREAM, "impressions", {**shown, "id": 900, "propensity": 0.0})
        landed = run_batch(spark, tmp_path)
    (reader,) = rows_of(landed[1].folder)
    assert (reader["impressions"], reader["saves"], reader["mean_reward"]) == (7, 1, 1.0)


def simulated(home: Path, seed: int) -> None:
    """Write the log of feeds of Thompson sampling; each arm has enough items for a whole feed."""
    home.mkdir()
    (home / "millstream.toml").write_text(home_config())
    draws = np.random.default_rng(seed)
    per_arm = SLOTS
    items = [
        {
            "id": 1 + arm * per_arm + number,
            "url": f"https://{arm}.example/{number}",
            "title": "A title",
            "creator": "Ana Bell",
            "category": category,
            "source": source,
            "tags": ["a", "b"],
            "entities": [],
            "content_type": "news",
            "summary": "One. Two.",
            "reading_time_min": 1,
            "embedding": [1.0] + [0.0] * 63,
            "added": 0,
        }
        for arm, (category, source) in enumerate(ARMS)
        for number in range(per_arm)
    ]
    shown, signals = [], []
    wins, losses = np.zeros(len(ARMS)), np.zeros(len(ARMS))
    for feed in range(1, FEEDS + 1):
        if feed % FEEDS_OF_ONE == 1:  # another reader, who has explored every arm: each of them may get each slot
            wins, losses = np.full(len(ARMS), 2.0), np.full(len(ARMS), 2.0)
        arms = [
            Arm(wins[arm], losses[arm], 4, unexplored=False, items=range(arm * per_arm, (arm + 1) * per_arm))
            for arm in range(len(ARMS))
        ]
        for number, slot in enumerate(fill(arms, limit=SLOTS, seed=feed, budget=1), 1):
            arm = slot.item // per_arm
            reward = float(draws.random() < CHANCES[arm])
            impression = len(shown) + 1
            shown.append(
                {
                    "id": impression,
                    "feed": feed,
                    "user": feed // FEEDS_OF_ONE,
                    "item": slot.item + 1,
                    "slot": number,
                    "arm": "/".join(ARMS[arm]),
                    "label": "none",
                    "explore": slot.explore,
                    "propensity": slot.propensity,
                    "policy": "thompson",
                    "seed": feed,
                    "limit": SLOTS,
                    "token": "0123abcd.s1",
                    "now": feed * DAY_NS // 100,
                }
            )
            wins[arm] += reward
            losses[arm] += 1 - reward
            if reward:
                signals.append(
                    {
                        "id": len(signals) + 1,
                        "user": feed // FEEDS_OF_ONE,
                        "item": slot.item + 1,
                        "kind": "save",
                        "weight": 1.0,
                        "impression": impression,
                        "now": feed * DAY_NS // 100,
                    }
                )
    tables = {"items": items, "impressions": shown, "signals": signals}
    with millstream.open(home) as opened:
        for name, rows in tables.items():
            opened.append_all(STREAM, {name: pa.Table.from_pylist(rows, schema=SCHEMAS[name])})


def test_estimates_agree_with_the_truth_of_a_simulator(spark: SparkSession, tmp_path: Path):
    from millstream_forage.batch import TOKEN_KEY, run_batch

    simulated(tmp_path / "home", 7)
    names = ["/".join(arm) for arm in ARMS]
    falling = np.arange(len(ARMS), 0, -1, dtype=float)
    policies = {
        "uniform": dict.fromkeys(names, 1 / len(names)),
        "worst first": dict(zip(names, (falling / falling.sum()).tolist(), strict=True)),
        "best arms": dict.fromkeys(names[-2:], 1 / 2),
        "half elsewhere": {names[0]: 0.5},
    }
    landed = run_batch(spark, tmp_path / "home", policies={name: policies[name] for name in list(policies)[1:]})
    values = {row["policy"]: row for row in rows_of(landed[3].folder)}
    for name, policy in policies.items():
        truth, found = sum(chance * CHANCES[names.index(arm)] for arm, chance in policy.items()), values[name]
        assert abs(found["ips"] - truth) < 4 * found["ips_error"], name
        assert abs(found["doubly_robust"] - truth) < 4 * found["doubly_robust_error"], name
        assert found["doubly_robust_error"] < found["ips_error"] < 0.05, name
        assert found["support"] == pytest.approx(sum(policy.values()), abs=0.1), name
    with millstream.open(tmp_path / "home") as opened:
        token = str(opened.token(STREAM))
    assert {DeltaTable(table.folder).history(1)[0][TOKEN_KEY] for table in landed} == {token}


def test_a_home_without_readers_lands_its_items(spark: SparkSession, tmp_path: Path):
    from millstream_forage.batch import run_batch

    with ForageEngine.open(tmp_path / "home") as engine:
        engine.seed_default_corpus()
    assert [table.rows for table in run_batch(spark, tmp_path / "home")] == [100, 0, 0, 0]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a table of the lake, by their first column."""
    rows = DeltaTable(folder).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: next(iter(row.values())))
