"""Random histories of partitions that come and go, captured with stops, broken logs and copies in between."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.capture.capture_stage import Stage

from millstream.errors import LogError

KEY = ["id", "day"]
DAYS = 6


class World:
    """The source's partitions, some with columns in an order of their own, below one table and a tree in it."""

    def __init__(self, stage: Stage, chance: random.Random) -> None:
        self.stage = stage
        self.chance = chance
        self.attached = dict[int, str]()
        self.loose = dict[int, list[str]]()
        self.number = 0
        stage.sql(
            "CREATE TABLE parts (id int, day int, item text, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
            "CREATE TABLE tree PARTITION OF parts FOR VALUES IN (4, 5) PARTITION BY LIST (day)",
        )

    def parent(self, day: int) -> str:
        return "tree" if day in {4, 5} else "parts"

    def step(self) -> str:
        """Return a statement, and note what it does."""
        chance = self.chance
        day = chance.randrange(DAYS)
        kind = chance.choice(
            ["write"] * 12 + ["make"] * 3 + ["attach"] * 2 + ["detach", "drop", "truncate"] * 2 + ["all", "new file"]
        )
        if kind == "make" and day not in self.attached:
            self.number += 1
            name = f"leaf_{self.number}"
            self.attached[day] = name
            return f"CREATE TABLE {name} PARTITION OF {self.parent(day)} FOR VALUES IN ({day})"
        if kind == "attach" and day not in self.attached:
            known = self.loose.get(day, [])
            if known and chance.random() < 0.6:
                name = known.pop()
                self.attached[day] = name
                return f"ALTER TABLE {self.parent(day)} ATTACH PARTITION {name} FOR VALUES IN ({day})"
            self.number += 1
            name = f"leaf_{self.number}"
            self.attached[day] = name
            return (
                f"CREATE TABLE {name} (item text, gone int, day int NOT NULL, id int NOT NULL, PRIMARY KEY (id, day));"
                f" ALTER TABLE {name} DROP gone; INSERT INTO {name} SELECT 'a', {day}, i FROM generate_series(1000, 1010) i;"
                f" ALTER TABLE {self.parent(day)} ATTACH PARTITION {name} FOR VALUES IN ({day})"
            )
        if kind == "detach" and day in self.attached:
            name = self.attached.pop(day)
            self.loose.setdefault(day, []).append(name)
            more = f"; INSERT INTO {name} (id, day, item) VALUES ({chance.randrange(2000, 9000)}, {day}, 'loose') ON CONFLICT DO NOTHING"
            return f"ALTER TABLE {self.parent(day)} DETACH PARTITION {name}" + (more if chance.random() < 0.5 else "")
        if kind == "drop" and day in self.attached:
            return f"DROP TABLE {self.attached.pop(day)}"
        if kind == "truncate" and day in self.attached:
            return f"TRUNCATE {self.attached[day]}"
        if kind == "all" and self.attached:
            return f"TRUNCATE {chance.choice(['parts', 'tree'])}"
        if kind == "new file" and day in self.attached:
            return f"CLUSTER {self.attached[day]} USING {self.attached[day]}_pkey"
        key, days = chance.randrange(30), [*self.attached]
        if not days:
            return "SELECT 1"
        day, other = chance.choice(days), chance.choice(days)
        return chance.choice(
            [
                f"INSERT INTO parts SELECT i, {day}, 'n{chance.random()}' FROM generate_series({key}, {key + 3}) i ON CONFLICT DO NOTHING",
                f"UPDATE parts SET item = 'u{chance.random()}' WHERE id % 7 = {key % 7}",
                (
                    f"UPDATE parts p SET day = {other} WHERE day = {day} AND id % 3 = {key % 3}"
                    f" AND NOT EXISTS (SELECT FROM parts q WHERE q.id = p.id AND q.day = {other})"
                ),
                f"DELETE FROM parts WHERE id = {key}",
            ]
        )

    def steps(self, count: int) -> None:
        with self.stage.connect() as connection:
            done = 0
            while done < count:
                size = self.chance.choice([1, 1, 1, 3, 8])
                statements = [self.step() for _ in range(size)]
                statements = [s for s in statements if not s.startswith("CLUSTER")] if size > 1 else statements
                if size > 1:
                    connection.execute("BEGIN; " + "; ".join(statements) + "; COMMIT")
                elif statements:
                    connection.execute(statements[0])
                done += size


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed < 2 else pytest.mark.long) for seed in range(12)])
@pytest.mark.parametrize("patterns", [("public.parts",), ("public.*",)], ids=["the table", "all tables"])
def test_partitions_come_and_go_at_random(stage: Stage, seed: int, patterns: tuple[str, ...]) -> None:
    chance = random.Random(f"{seed} {patterns}")
    world = World(stage, chance)
    stage.config = replace(stage.config, tables=patterns, chunk_rows=20)
    world.steps(30)
    stage.catch_up()
    for _ in range(6):
        running = stage.start() if chance.random() < 0.5 else None
        world.steps(chance.choice([1, 3, 10, 25]))
        if running is not None:
            if chance.random() < 0.4:
                stage.log.fails_once = True
                stage.log.fail_with = LogError("what it follows failed", code="out_of_order")
                world.steps(3)
            running.ask_to_end()
            running.wait(60)
            stage.log.fail_with = None
            assert running.ended
        if chance.random() < 0.6:
            stage.catch_up()
            compare(stage)
    stage.catch_up()
    compare(stage)


def compare(stage: Stage) -> None:
    rows = stage.log.replay(stage.table("public.parts").id)
    assert rows.get("", {}) == stage.source_rows("parts", KEY)
    for table in stage.catalog.tables(stage.catalog.stream("shop").id):
        if table.is_captured and table.name.startswith("leaf") and not is_partition(stage, table.name):
            found = stage.log.replay(table.id).get("", {})
            wanted = stage.source_rows(table.name, KEY)
            assert {frozenset(row.items()) for row in found.values()} == {
                frozenset(row.items()) for row in wanted.values()
            }


def is_partition(stage: Stage, name: str) -> bool:
    with stage.connect() as connection:
        row = connection.execute("SELECT relispartition FROM pg_class WHERE relname = %s", [name]).fetchone()
    return row is None or bool(row[0])
