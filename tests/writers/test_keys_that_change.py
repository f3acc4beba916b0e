"""A table that gets another key: its lake holds the source's rows, folded at once, rebuilt, and as versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.app.landed import LandedHome

from millstream.administration.rebuild import rebuild_table
from millstream.home.config_mapping import lake_layout
from millstream.lake.folded.scd2_table import fold_into_versions, rebuild_versions
from millstream.lake.layout import LakeLayout
from millstream.testing.pytest_plugin import Database
from millstream.wal.reader import StreamReader

MAKE = (
    "CREATE TABLE items (id int PRIMARY KEY, code int NOT NULL, big text, note text)",
    "ALTER TABLE items ALTER big SET STORAGE EXTERNAL",
    "INSERT INTO items SELECT i, 100 + i, repeat(i::text, 4000), 'old' FROM generate_series(1, 50) i",
)
UNDER_THE_OLD_KEY = (
    "DELETE FROM items WHERE id = 3",
    "UPDATE items SET id = 900 WHERE id = 4",
    # Large values aren't sent: no reader can tell by the new key which rows had them.
    "UPDATE items SET code = 905 WHERE id = 5",
    "UPDATE items SET code = 906 WHERE id = 6; DELETE FROM items WHERE id = 6",
)
BY_CODE = "BEGIN; ALTER TABLE items DROP CONSTRAINT items_pkey; ALTER TABLE items ADD PRIMARY KEY (code); COMMIT"
UNDER_THE_NEW_KEY = (
    "UPDATE items SET note = 'new' WHERE code = 107",
    "UPDATE items SET code = 908 WHERE code = 108",
    "DELETE FROM items WHERE code = 109",
)

Row = tuple[object, ...]


def run(postgres: Database, *statements: str) -> None:
    with postgres.connect(autocommit=True) as source:
        for statement in statements:
            source.execute(statement.encode())


def of_the_source(postgres: Database) -> list[Row]:
    with postgres.connect() as source:
        return sorted(source.execute("SELECT id, code, big, note FROM items").fetchall())


def of_the_lake(home: LandedHome, view: str) -> list[Row]:
    found = DeltaTable(home.home.path / "lake" / "shop" / view / "public.items").to_pyarrow_table().to_pylist()
    live = [row for row in found if row.get("is_current", True)]
    return sorted((row["id"], row["code"], row["big"], row["note"]) for row in live)


def layout_of(home: LandedHome) -> LakeLayout:
    reader = StreamReader(str(home.home.wal_folder("shop")))
    return lake_layout(home.home, "shop", home.home.config.streams["shop"], reader.stream_id)


@pytest.mark.sampled
@pytest.mark.parametrize("folds", ["at once", "one by one"])
def test_rows_are_the_sources_folded_rebuilt_and_as_versions(postgres: Database, tmp_path: Path, folds: str) -> None:
    run(postgres, *MAKE)
    home = LandedHome(tmp_path / "shop", postgres.dsn)
    home.catch_up()
    schema = next(schema for schema in home.schemas.values() if schema.name == "items")
    layout = layout_of(home)
    fold_into_versions(layout, schema, home.land())
    run(postgres, *UNDER_THE_OLD_KEY)
    if folds == "one by one":
        home.catch_up()
        fold_into_versions(layout, schema, home.land())
    run(postgres, BY_CODE, *UNDER_THE_NEW_KEY)
    home.catch_up()
    schema = home.schemas[schema.table_id]
    assert schema.key == ("code",)
    assert of_the_lake(home, "current") == of_the_source(postgres)

    rebuild_table(home.home, "public.items")
    assert of_the_lake(home, "current") == of_the_source(postgres)

    fold_into_versions(layout, schema, home.land())
    assert of_the_lake(home, "scd2") == of_the_source(postgres)
    rebuild_versions(layout, schema, home.land())
    assert of_the_lake(home, "scd2") == of_the_source(postgres)
