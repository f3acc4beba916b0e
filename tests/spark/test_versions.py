"""Versions in a real pipeline equal the source's past rows, whatever is killed, deleted or switched on late."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.spark.hand_made import Change, Home, delete, insert, update
from tests.spark.lake_run import RunningPipeline, config_of, drain, eventually, follow_until_killed, rows_in

from millstream.catalog import TableState
from millstream.catalog.rebuilds import Rebuilds
from millstream.lake.commit_cuts import last_cut
from millstream.lake.layout import LakeLayout
from millstream.lake.replay import replay_range
from millstream.model.positions import Seq
from millstream.model.records import Op
from millstream.model.schema import TableSchema
from millstream.spark.session import SparkOptions

VIEWS = ("current", "history", "scd2")
START = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=1_700_000_000_000_000)
"""Origin of the times in a hand-made log."""


@dataclass
class Story:
    """A table that is changed at random, and its versions as seen after each transaction."""

    home: Home
    schema: TableSchema
    draw: random.Random = field(default_factory=lambda: random.Random(4))
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    live: dict[int, tuple[dict[str, Any], datetime]] = field(default_factory=dict)
    told: list[tuple[Any, ...]] = field(default_factory=list)

    def go_on(self, transactions: int) -> None:
        changes = [self._transaction(place) for place in range(1, transactions + 1)]
        self.home.commits([some for some in changes if some])

    def _transaction(self, place: int) -> list[Change]:
        draw = self.draw
        changes: list[Change] = []
        for _ in range(draw.randint(1, 4)):
            key = draw.randint(1, 12)
            row = {"id": key, "size": draw.randint(0, 2), "note": draw.choice(["short", "x" * 3_000])}
            if key not in self.rows:
                self.rows[key] = row
                changes.append(insert(self.schema, **row))
            elif draw.random() < 0.2:
                del self.rows[key]
                changes.append(delete(self.schema, id=key))
            elif draw.random() < 0.5:
                self.rows[key] = row | {"note": self.rows[key]["note"]}
                changes.append(Change(self.schema, Op.UPDATE, {"id": key, "size": row["size"]}, unchanged=["note"]))
            else:
                self.rows[key] = row
                changes.append(update(self.schema, **row))
        if draw.random() < 0.05:
            self.rows.clear()
            changes.append(Change(self.schema, Op.TRUNCATE))
        self._look(START + timedelta(microseconds=self.home.last_lsn + 100 * place))
        return changes

    def _look(self, moment: datetime) -> None:
        for key, (row, began) in list(self.live.items()):
            if self.rows.get(key) != row:
                self.told.append((key, row["size"], row["note"], began, moment))
                del self.live[key]
        for key, row in self.rows.items():
            self.live.setdefault(key, (row, moment))

    def check(self) -> None:
        found = rows_in(self.home.path, "scd2", "public.items")
        assert all(row["is_current"] == (row["valid_to"] is None) for row in found)
        names = ("id", "size", "note", "valid_from", "valid_to")
        told = self.told + [(key, row["size"], row["note"], began, None) for key, (row, began) in self.live.items()]
        assert sorted((tuple(row[name] for name in names) for row in found), key=str) == sorted(told, key=str)

    def check_all(self) -> None:
        """Check every view against the rows, and history and a replay of it against the log."""
        self.check()
        current = sorted(rows_in(self.home.path, "current", "public.items"), key=lambda row: row["id"])
        assert current == [self.rows[key] for key in sorted(self.rows)]
        log = self.home.log
        end = log.persisted_upto()
        numbers = [n for piece in log.read_between(Seq(0), end) for n in piece.batch.column("__seq").to_pylist()]
        assert sorted(row["__seq"] for row in rows_in(self.home.path, "history", "public.items")) == numbers
        layout = LakeLayout(str(self.home.path / "lake"), "shop", self.home.stream)
        cut = last_cut(layout)
        assert cut is not None
        again = replay_range(layout, cut, "public.items", after=Seq(0), upto=end, into=f"upto-{end}")
        assert sorted(DeltaTable(again.path).to_pyarrow_table().column("__seq").to_pylist()) == numbers


@pytest.fixture
def story(home: Home) -> Story:
    return Story(home, home.table("public.items", id=pa.int64(), size=pa.int32(), note=pa.string()))


@pytest.mark.long
def test_versions_are_kept_beside_the_rows_and_named_by_the_cut(
    home: Home, story: Story, spark_options: SparkOptions
) -> None:
    home.commit(insert(home.table("public.keyless", key=(), a=pa.int64()), a=1))
    story.go_on(30)
    config = config_of(home.path, home.stream, spark_options, views=VIEWS, batch_bytes_max=7_000)
    assert drain(config, home.catalog).quarantined == {}
    story.check()
    story.go_on(30)
    # Delta's checkpoints only speed up readers of its log: without them the commits are read.
    for checkpoint in Path(config.layout.root, "scd2").rglob("_delta_log/*checkpoint*"):
        checkpoint.unlink()
    outcome = drain(config, home.catalog)
    story.check()
    cut = last_cut(config.layout)
    assert cut is not None
    items, keyless = cut.tables["public.items"], cut.tables["public.keyless"]
    assert (items.scd2_n, items.current_n) == (outcome.n, outcome.n)
    assert (keyless.scd2, items.scd2 > 0) == (-1, True)


@pytest.mark.long
def test_a_lake_gets_its_versions_from_history_when_they_are_asked_for_later_or_lost(
    home: Home, story: Story, spark_options: SparkOptions
) -> None:
    story.go_on(20)
    drain(config_of(home.path, home.stream, spark_options), home.catalog)
    assert not (home.path / "lake" / "shop" / "scd2").exists()
    story.go_on(20)
    config = config_of(home.path, home.stream, spark_options, views=("history", "scd2"))
    drain(config, home.catalog)
    story.check()
    shutil.rmtree(home.path / "lake" / "shop" / "scd2")
    drain(config, home.catalog)
    story.check()


@pytest.mark.timeout(1800)
@pytest.mark.siege
def test_versions_are_exact_whatever_is_killed_while_they_are_folded(
    home: Home, story: Story, spark_options: SparkOptions, tmp_path: Path
) -> None:
    story.go_on(15)
    follow_until_killed(
        home.path,
        tmp_path,
        *VIEWS,
        workers=["lake.before_scd2_commit", "lake.after_scd2_commit"],
        at="pipeline.after_lake_commit",
        more=lambda: story.go_on(5),
    )
    story.go_on(15)
    drain(config_of(home.path, home.stream, spark_options, views=VIEWS, batch_bytes_max=20_000), home.catalog)
    story.check()


@pytest.mark.long
def test_a_running_pipeline_builds_anew_what_is_asked_for_beside_its_batches(
    home: Home, story: Story, spark_options: SparkOptions
) -> None:
    story.go_on(20)
    config = config_of(home.path, home.stream, spark_options, views=VIEWS)
    rebuilds = Rebuilds(home.catalog, home.stream, config.pipeline)
    folders = {view: home.path / "lake" / "shop" / view / "public.items" for view in ("current", "scd2")}
    drain(config, home.catalog)
    with RunningPipeline(config, home.catalog) as pipeline:
        # A foreign program writes to one of them, and all files of the other are deleted.
        write_deltalake(
            folders["current"], DeltaTable(folders["current"]).to_pyarrow_table().slice(0, 1), mode="append"
        )
        for file in folders["scd2"].glob("*/*.parquet"):
            file.unlink()
        story.go_on(5)
        rebuilds.ask(story.schema.table_id, ["current", "scd2"])
        eventually(lambda: rebuilds.outcome(story.schema.table_id) is not None, "the request is settled", 240)
        story.go_on(5)
        assert pipeline.finish(pipeline.drain).quarantined == {}
    told = rebuilds.outcome(story.schema.table_id)
    assert told is not None
    assert {view: (facts["state"], facts["aside"]) for view, facts in told.items()} == {
        "current": ("done", f"{folders['current']}.set-aside-1"),
        "scd2": ("done", None),
    }
    story.check()
    assert {row["id"]: row for row in rows_in(home.path, "current", "public.items")} == story.rows


def test_a_history_that_was_deleted_begins_anew_behind_the_batches_that_have_landed(
    home: Home, story: Story, spark_options: SparkOptions
) -> None:
    story.go_on(20)
    config = config_of(home.path, home.stream, spark_options)
    rebuilds = Rebuilds(home.catalog, home.stream, config.pipeline)
    drain(config, home.catalog)
    history = home.path / "lake" / "shop" / "history" / "public.items"
    for file in history.glob("*/*.parquet"):
        file.unlink()
    home.catalog.set_state(story.schema.table_id, TableState.COPY_REQUESTED)
    rebuilds.ask(story.schema.table_id, ["history"], before_copy=True)
    with RunningPipeline(config, home.catalog) as pipeline:
        eventually(lambda: rebuilds.outcome(story.schema.table_id) is not None, "the request is settled", 240)
        story.go_on(3)
        # Records that capture would write once it takes up the request.
        copied = [Change(story.schema, Op.TRUNCATE), *(insert(story.schema, **row) for row in story.rows.values())]
        home.commit(*copied)
        home.catalog.set_state(story.schema.table_id, TableState.STREAMING)
        assert pipeline.finish(pipeline.drain).quarantined == {}
    assert rebuilds.outcome(story.schema.table_id) == {"history": {"state": "done", "aside": f"{history}.set-aside-1"}}
    assert {row["id"]: row for row in rows_in(home.path, "current", "public.items")} == story.rows
