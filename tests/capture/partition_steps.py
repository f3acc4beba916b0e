"""Steps of a partitioned table, `parts`, whose leaf partitions come, leave and return while its rows change and move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import psycopg

ZONES = range(6)
TREE = 5
"""A zone whose rows are in leaves below a partition of its own."""
KEYED = "PRIMARY KEY (zone, id)"
COLUMNS = "zone int NOT NULL, id int NOT NULL, v text, big text"
SHUFFLED = "big text, gone int, id int NOT NULL, v text, zone int NOT NULL"


@dataclass
class Partitions:
    """The table at a source, and what is known of its partitions.

    Args:
        source: commits each statement on its own.
        rng: draws the steps.
        keyed: whether it has a primary key; otherwise its replica identity is FULL.
    """

    source: psycopg.Connection[Any]
    rng: Random
    keyed: bool = True
    attached: dict[int, str] = field(default_factory=dict)
    """By zone, the name of its partition."""
    loose: list[tuple[int, str]] = field(default_factory=list)
    """Tables that aren't partitions now, with the zone of their rows."""
    brought: set[str] = field(default_factory=set)
    """Tables that were attached, perhaps with rows, as an `x` names them."""
    steps: Counter[str] = field(default_factory=Counter)
    ids: int = 0
    names: int = 0

    def make(self, *, rows: int = 6) -> None:
        """Make the table with some leaves, and so many rows in each."""
        self.run(
            f"CREATE TABLE parts ({COLUMNS}{', ' + KEYED if self.keyed else ''}) PARTITION BY LIST (zone)",
            "ALTER TABLE parts ALTER big SET STORAGE EXTERNAL",
            *self.identity("parts"),
        )
        for zone in (0, 1, 2, TREE):
            self.run(*self.creation(zone), self.rows_for(zone, rows))

    def run(self, *statements: str) -> None:
        for statement in statements:
            # A TRUNCATE of two leaves locks them in another order than a reader of their table does.
            while True:
                with suppress(psycopg.errors.DeadlockDetected):
                    self.source.execute(statement.encode())
                    break
                self.source.rollback()
                if self.source.execute("SELECT bool_or(inhdetachpending) FROM pg_inherits").fetchone() == (True,):
                    statement = statement.replace("CONCURRENTLY", "FINALIZE")  # noqa: PLW2901 - the rest of it

    # --- statements ------------------------------------------------------------------------------------------------

    def fresh_name(self, zone: int) -> str:
        self.names += 1
        return f"leaf_{zone}_{self.names}"

    def creation(self, zone: int, name: str | None = None) -> list[str]:
        """Return what makes a partition for a zone, which it has from now on."""
        name = self.attached[zone] = name or self.fresh_name(zone)
        made = f"CREATE TABLE {name} PARTITION OF parts FOR VALUES IN ({zone})"
        if zone != TREE:
            return [made, *self.identity(name)]
        below = [
            f"CREATE TABLE {name}_{at} PARTITION OF {name} FOR VALUES WITH (MODULUS 2, REMAINDER {at})" for at in (0, 1)
        ]
        whole = [*self.identity(name), *self.identity(f"{name}_0"), *self.identity(f"{name}_1")]
        return [f"{made} PARTITION BY HASH (id)", *below, *whole]

    def identity(self, name: str) -> list[str]:
        return [] if self.keyed else [f"ALTER TABLE {name} REPLICA IDENTITY FULL"]

    def rows_for(self, zone: int, count: int, into: str = "parts") -> str:
        first = self.ids + 1
        self.ids += count
        return (
            f"INSERT INTO {into} (zone, id, v, big) SELECT {zone}, i, 'v' || i, repeat(md5(i::text), 90)"
            f" FROM generate_series({first}, {self.ids}) i"
        )

    def new_loose(self, zone: int, *, count: int) -> tuple[str, list[str]]:
        """Return the name of a table with rows of a zone, its columns in another order, and what makes it."""
        name = self.fresh_name(zone)
        key = f", {KEYED}" if self.keyed else ""
        made = [f"CREATE TABLE {name} ({SHUFFLED}{key})", f"ALTER TABLE {name} DROP gone", *self.identity(name)]
        return name, [*made, self.rows_for(zone, count, name)]

    def attach(self, zone: int, name: str) -> str:
        self.attached[zone] = name
        self.brought.add(f"public.{name}")
        return f"ALTER TABLE parts ATTACH PARTITION {name} FOR VALUES IN ({zone})"

    def detach(self, zone: int) -> str:
        name = self.attached.pop(zone)
        self.loose.append((zone, name))
        return f"ALTER TABLE parts DETACH PARTITION {name}"

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Change rows or partitions at random."""
        self.change() if self.rng.random() < 0.5 else self.define()

    def change(self) -> None:
        """Change rows in one transaction: also a row that moves to another leaf and back."""
        if not self.attached:
            return
        statements = []
        for _ in range(self.rng.randint(1, 4)):
            zone, other = (self.rng.choice(list(self.attached)) for _ in range(2))
            part = f"id % 5 = {self.rng.randrange(5)}"
            statements += self.rng.choice([
                [self.rows_for(zone, 3)],
                [f"UPDATE parts SET v = v || '!' WHERE {part}"],
                [f"UPDATE parts SET zone = {other} WHERE zone = {zone} AND {part}"],
                [f"UPDATE parts SET zone = {z}, v = v || '~' WHERE zone = {y} AND {part} AND id % 2 = 0"
                 for y, z in ((zone, other), (other, zone))],
                [f"DELETE FROM parts WHERE zone = {zone} AND {part}"],
                [f"UPDATE parts SET big = repeat(v, 500) WHERE zone = {zone} AND {part}"],
            ])  # fmt: skip
        self.steps["change"] += 1
        self.run(self.one_transaction(*statements))

    @staticmethod
    def one_transaction(*statements: str) -> str:
        return "; ".join(["BEGIN", *statements, "COMMIT"])

    def define(self, kind: str | None = None) -> str:
        """Change partitions; return how."""
        kinds: dict[str, Callable[[], None]] = {
            name.removeprefix("do_"): getattr(self, name) for name in dir(self) if name.startswith("do_")
        }
        some = [name for name in kinds if self.can(name)]
        kind = kind or self.rng.choice(some)
        self.steps[kind] += 1
        kinds[kind]()
        return kind

    def can(self, kind: str) -> bool:
        free = [zone for zone in ZONES if zone not in self.attached]
        if kind in {"create", "attach_new", "come_and_go"}:
            return bool(free)
        if kind == "attach_again":
            return any(zone in free for zone, _ in self.loose)
        if kind in {"change_loose", "drop_loose"}:
            return bool(self.loose)
        return len(self.attached) > 1 and (kind == "detach" or any(zone != TREE for zone in self.attached))

    def zone(self, *, tree: bool = True) -> int:
        return self.rng.choice([zone for zone in self.attached if tree or zone != TREE])

    def free_zone(self) -> int:
        return self.rng.choice([zone for zone in ZONES if zone not in self.attached])

    def do_create(self) -> None:
        zone = self.free_zone()
        self.run(*self.creation(zone), *([self.rows_for(zone, 4)] * self.rng.randint(0, 1)))

    def do_attach_new(self) -> None:
        zone = self.free_zone()
        name, made = self.new_loose(zone, count=5)
        self.run(*made, self.attach(zone, name))

    def do_attach_again(self) -> None:
        zone, name = self.rng.choice([pair for pair in self.loose if pair[0] not in self.attached])
        self.loose.remove((zone, name))
        self.run(self.attach(zone, name))

    def do_detach(self) -> None:
        self.run(self.detach(self.zone()) + self.rng.choice(["", " CONCURRENTLY"]))

    def do_drop(self) -> None:
        self.run(f"DROP TABLE {self.attached.pop(self.zone())}")

    def do_truncate(self) -> None:
        self.run(f"TRUNCATE {self.attached[self.zone()]}")

    def do_truncate_two(self) -> None:
        one, other = self.zone(), self.zone()
        names = {self.attached[one], self.attached[other]}
        self.run(f"TRUNCATE {', '.join(sorted(names))}")

    def do_truncate_all(self) -> None:
        self.run("TRUNCATE parts")

    def do_truncate_and_fill(self) -> None:
        zone = self.zone()
        name = self.attached[zone]
        self.run(self.one_transaction(self.rows_for(zone, 2), f"TRUNCATE {name}", self.rows_for(zone, 3)))

    def do_drop_and_create(self) -> None:
        """Make a leaf of the same name in the transaction that dropped it."""
        zone = self.zone(tree=False)
        name = self.attached.pop(zone)
        self.run(self.one_transaction(f"DROP TABLE {name}", *self.creation(zone, name), self.rows_for(zone, 3)))

    def do_return(self) -> None:
        """Attach a leaf again in the transaction that detached and changed it."""
        zone = self.zone(tree=False)
        detached = self.detach(zone)
        _, name = self.loose.pop()
        self.run(self.one_transaction(detached, self.rows_for(zone, 2, name), self.attach(zone, name)))

    def do_come_and_go(self) -> None:
        zone = self.free_zone()
        made = [*self.creation(zone), self.rows_for(zone, 2)]
        name = self.attached.pop(zone)
        self.run(self.one_transaction(*made, f"TRUNCATE {name}", f"DROP TABLE {name}"))

    def do_change_loose(self) -> None:
        zone, name = self.rng.choice(self.loose)
        self.run(self.rows_for(zone, 2, name), f"UPDATE {name} SET v = v || '?' WHERE id % 3 = 0")

    def do_drop_loose(self) -> None:
        self.run(f"DROP TABLE {self.loose.pop(self.rng.randrange(len(self.loose)))[1]}")

    def do_vacuum_full(self) -> None:
        self.run(f"VACUUM FULL {self.attached[self.zone(tree=False)]}")
