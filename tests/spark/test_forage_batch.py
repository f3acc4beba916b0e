"""Forage's batch side, on a real Spark: its tables agree with the engine, and its estimates with a known policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from millstream_forage.engine import ForageEngine
from millstream_forage.tables import KINDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW_NS = 1_700_000_000_000_000_000
LIKED = "sea"


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
        landed = run_batch(spark, home, policies={"loved": loved, "others": others})
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
    assert set(values) == {"uniform", "loved", "others"}
    # The reader saves each item of the category that the first policy shows, and reacts to few of the others.
    for estimate in ("self_normalized_ips", "doubly_robust"):
        assert values["loved"][estimate] > values["uniform"][estimate] > values["others"][estimate]
    assert values["loved"]["self_normalized_ips"] == pytest.approx(1)

    again = run_batch(spark, home)
    assert [table.rows for table in again][:3] == [table.rows for table in landed][:3]
    assert [row["policy"] for row in rows_of(again[3].folder)] == ["uniform"]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a table of the lake, by their first column."""
    rows = DeltaTable(folder).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: next(iter(row.values())))
