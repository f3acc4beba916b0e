"""A home that captures and lands a partitioned table whose leaves come and go, and a check of everything made of it.

The check compares `current`, the open versions of `scd2` and the replay of `history` with the source's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from deltalake import DeltaTable
from tests.app.landed import LandedHome
from tests.capture.partition_steps import Partitions

from millstream.home.config_mapping import lake_layout
from millstream.lake.folded.scd2_table import fold_into_versions, rebuild_versions
from millstream.testing.oracle import TableRows, current_rows, difference, replay_history, source_rows
from millstream.testing.pytest_plugin import Database
from millstream.wal.reader import StreamReader


@dataclass
class Life:
    """The table `parts` at a source, and a home that has captured it."""

    parts: Partitions
    home: LandedHome

    @classmethod
    def begun(
        cls, postgres: Database, folder: Path, rng: Random, *, keyed: bool = True, tables: str = "public.parts"
    ) -> Life:
        """Make the table and the home, and capture and land what is there."""
        parts = Partitions(postgres.connect(autocommit=True), rng, keyed)
        parts.make()
        life = cls(parts, LandedHome(folder, postgres.dsn, tables=(tables,)))
        life.home.catch_up()
        life.check()
        return life

    def close(self) -> None:
        """Close the connection to the source."""
        self.parts.source.close()

    def backlog(self, steps: int) -> None:
        for _ in range(steps):
            self.parts.step()
        self.home.catch_up()
        self.check()

    def live(self, steps: int) -> None:
        """Take steps while capture runs."""
        with self.home.running(lands=False):
            for _ in range(steps):
                self.parts.step()
                if self.parts.rng.random() < 0.5:
                    self.home.land(fold=self.parts.rng.random() < 0.5)
        self.home.catch_up()
        self.check()

    def records(self, op: str) -> list[dict[str, Any]]:
        """Return the log's records of the table with an op."""
        reader = StreamReader(str(self.home.home.wal_folder("shop")))
        batches = (
            found.batch
            for found in reader.read_between(reader.first_seq() - 1, reader.persisted_upto())  # type: ignore[arg-type]
            if found.schema.name == "parts"
        )
        return [row for batch in batches for row in batch.to_pylist() if row["__op"] == op]

    def counts(self) -> tuple[int, int, int]:
        """Return how many rows were copied, how many copies voided all rows, and how many records `x` there are."""
        voids = [row for row in self.records("t") if row["__commit_index"] is None]
        return len(self.records("r")), len(voids), len(self.records("x"))

    def check(self) -> None:
        """Compare what was made of the log with the source."""
        source = source_rows(self.parts.source, "public.parts")
        lake = self.home.home.path / "lake" / "shop"
        # Rows that were attached may change before they are copied: these changes aren't violations.
        replayed = replay_history(lake / "history" / "public.parts", source, recopied=True)
        said = f"after {dict(self.parts.steps)}"
        assert not difference(replayed.rows, source), f"history, {said}: {difference(replayed.rows, source)}"
        self.check_current(lake / "current" / "public.parts", source, said)
        if self.parts.keyed:
            self.check_versions(lake / "scd2" / "public.parts", source, said)

    @staticmethod
    def check_current(path: Path, source: TableRows, said: str) -> None:
        found = current_rows(path, source)
        assert not difference(found, source), f"current, {said}: {difference(found, source)}"

    def check_versions(self, path: Path, source: TableRows, said: str) -> None:
        reader = StreamReader(str(self.home.home.wal_folder("shop")))
        layout = lake_layout(self.home.home, "shop", self.home.home.config.streams["shop"], reader.stream_id)
        schema = next(schema for schema in self.home.schemas.values() if schema.name == "parts")
        rows = {(int(row[0] or 0), int(row[1] or 0)): row[2:4] for row in source.rows.values()}
        fold_into_versions(layout, schema, self.home.land())
        folded = versions(path)
        assert open_rows(folded) == rows, f"scd2, {said}"
        rebuild_versions(layout, schema, self.home.land())
        rebuilt = versions(path)
        assert open_rows(rebuilt) == rows, f"scd2 built again, {said}"
        # One fold of two whole copies can't tell a row that the first lacked from one that it hadn't come to.
        if self.counts()[1] == 0:
            differ = brief(set(folded) - set(rebuilt)), brief(set(rebuilt) - set(folded))
            assert rebuilt == folded, f"scd2 folded in steps and built again, {said}: {differ}"


def open_rows(found: list[tuple[Any, ...]]) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Return the values of the rows' last versions, by key."""
    return {(row[0], row[1]): row[2:4] for row in found if row[-1]}


def versions(path: Path) -> list[tuple[Any, ...]]:
    """Return the versions of all rows, in order: key, values, times, and whether it is the row's last."""
    names = ("zone", "id", "v", "big", "valid_from", "valid_to", "is_current")
    found = DeltaTable(path).to_pyarrow_table(columns=[*names, "__seq"]).sort_by("__seq").to_pylist()
    return sorted((tuple(row[name] for name in names) for row in found), key=repr)


def brief(rows: set[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return versions without their long values."""
    return sorted((*row[:3], len(row[3] or ""), *map(str, row[4:])) for row in rows)
