"""Copied rows of a partitioned table name the leaf partition that they are in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.capture.capture_stage import Stage

PARTS = (
    "CREATE TABLE parts (id int PRIMARY KEY, item text) PARTITION BY RANGE (id)",
    "CREATE TABLE low PARTITION OF parts FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE tree PARTITION OF parts FOR VALUES FROM (100) TO (200) PARTITION BY HASH (id)",
    'CREATE TABLE "Tree 1" PARTITION OF tree FOR VALUES WITH (MODULUS 2, REMAINDER 0)',
    "CREATE TABLE tree_2 PARTITION OF tree FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    r"INSERT INTO parts SELECT i, E'a\tb\\c' FROM generate_series(81, 120) i",
    "CREATE TABLE more (gone int, item text, id int NOT NULL PRIMARY KEY); ALTER TABLE more DROP gone",
    "INSERT INTO more SELECT 'm', i FROM generate_series(200, 240) i",
)
ATTACH = "ALTER TABLE parts ATTACH PARTITION more FOR VALUES FROM (200) TO (1000)"


def leaves_in_log(stage: Stage) -> dict[str, set[str | None]]:
    """Return the leaf partitions that the copied records of each id name, by OID."""
    found: dict[str, set[str | None]] = {}
    for rows, _, row in stage.log.records():
        if chr(row["__op"]) == "r":
            assert rows.schema.partitioned == (rows.schema.name == "parts")
            leaf = row["__partition_oid"]
            found.setdefault(row["id"], set()).add(None if leaf is None else str(leaf))
    return found


def leaves_at_source(stage: Stage) -> dict[str, set[str | None]]:
    with stage.connect() as connection:
        rows = connection.execute("SELECT id::text, tableoid::text FROM parts ORDER BY id").fetchall()
    return {key: {leaf} for key, leaf in rows}


@pytest.mark.parametrize("keyed", [True, False], ids=["by key", "without a key"])
def test_copied_rows_name_their_leaf_partition(stage: Stage, *, keyed: bool) -> None:
    create = PARTS[0] if keyed else PARTS[0].replace(" PRIMARY KEY", "")
    stage.sql(create, *PARTS[1:])
    if not keyed:
        stage.sql(*(f'ALTER TABLE "{t}" REPLICA IDENTITY FULL' for t in ("parts", "low", "Tree 1", "tree_2", "more")))
    stage.config = replace(stage.config, tables=("public.parts",), chunk_rows=7)
    stage.catch_up()
    assert leaves_in_log(stage) == leaves_at_source(stage)
    stage.sql(ATTACH)
    stage.catch_up()
    assert leaves_in_log(stage) == leaves_at_source(stage)
    assert len(leaves_in_log(stage)) == 81
    rows = stage.log.replay()["public.parts"]
    assert len(rows) == 81 if keyed else len(rows[None]) == 81
