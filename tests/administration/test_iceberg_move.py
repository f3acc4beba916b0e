"""A lake of Iceberg tables moves to another place, or follows its home: every version can be read there, and landing goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from tests.administration.test_lake_move import ids, location_of
from tests.app.homes import run
from tests.app.landed import LandedHome

from millstream import open as millstream_open
from millstream.administration.initialize import make_home
from millstream.administration.lake_move import move_lake
from millstream.errors import LakeConflict, LakeError, UsageError
from millstream.home.home import Home
from millstream.lake.iceberg.moving import IcebergMove
from millstream.model.positions import StreamToken
from millstream.testing.errors import coded
from millstream.testing.pytest_plugin import Database
from millstream.testing.s3 import EmbeddedS3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    with EmbeddedS3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def landed(postgres: Database, tmp_path: Path) -> LandedHome:
    """Return a home with rows 1 to 5, of which two were changed after a first landing, and one deleted."""
    path = tmp_path / "shop"
    with postgres.connect() as source:
        source.execute("CREATE TABLE items (id int PRIMARY KEY, note text)")
        source.execute("INSERT INTO items SELECT i, 'old' FROM generate_series(1, 6) i")
    make_home(path, stream="shop", source=postgres.dsn, tables=("public.*",), lake_format="iceberg")
    home = LandedHome(path, None)
    home.catch_up()
    with postgres.connect() as source:
        source.execute("UPDATE items SET note = 'new' WHERE id < 3")
        source.execute("DELETE FROM items WHERE id = 6")
    home.catch_up()
    return home


def addresses(path: Path) -> set[str]:
    """Return the addresses of all files that the catalog's tables name, in all their snapshots."""
    catalog = SqlCatalog("millstream", uri=f"sqlite:///{path}/data/iceberg.db")
    found = set()
    for namespace in catalog.list_namespaces():
        for name in catalog.list_tables(namespace):
            table = catalog.load_table(name)
            found |= {table.location(), table.metadata_location}
            found |= {entry.metadata_file for entry in table.metadata.metadata_log}
            for snapshot in table.snapshots():
                found |= {snapshot.manifest_list}
                for manifest in snapshot.manifests(table.io):
                    entries = manifest.fetch_manifest_entry(table.io, discard_deleted=False)
                    found |= {manifest.manifest_path, *(entry.data_file.file_path for entry in entries)}
    return found


def first_token(landed: LandedHome) -> StreamToken:
    """Return the position of the lake's first cut."""
    catalog = SqlCatalog("millstream", uri=f"sqlite:///{landed.home.path}/data/iceberg.db")
    cuts = catalog.load_table("shop._commits").scan().to_arrow()
    with landed.home.open_catalog() as known:
        return StreamToken.scalar(known.stream("shop").id, min(cuts.column("n").to_pylist()))


def check(path: Path, first: StreamToken, postgres: Database) -> None:
    """Check that the lake has all rows, also as of the first cut, and that landing goes on."""
    assert ids(path) == [1, 2, 3, 4, 5]
    with millstream_open(path) as home:
        notes = home.query("SELECT note FROM public.items", as_of=first).to_pylist()
        assert notes == [{"note": "old"}] * 6
    with postgres.connect() as source:
        source.execute("INSERT INTO items VALUES (7, 'later')")
    again = LandedHome(path, None)
    again.catch_up()
    assert ids(path) == [1, 2, 3, 4, 5, 7]


def test_an_iceberg_lake_is_moved_with_all_its_versions(landed: LandedHome, postgres: Database, tmp_path: Path) -> None:
    """It was refused."""
    path, place, first = landed.home.path, tmp_path / "new place", first_token(landed)
    old = {file: file.read_bytes() for file in (path / "lake").rglob("*") if file.is_file()}
    done = run(path, "pipeline", "move", str(place))
    assert done.returncode == 0, done.stderr
    assert f"rm -r {path / 'lake' / 'shop'}" in done.stderr
    assert location_of(path) == str(place)
    assert {file: file.read_bytes() for file in (path / "lake").rglob("*") if file.is_file()} == old
    shutil.rmtree(path / "lake")
    assert {name for name in addresses(path) if not name.startswith(f"file://{place}/shop/")} == set()
    check(path, first, postgres)
    with pytest.raises(UsageError, match="already"):
        move_lake(Home(path), str(place))


@pytest.mark.long
def test_it_goes_into_a_store_and_back(
    landed: LandedHome, postgres: Database, store: EmbeddedS3, tmp_path: Path
) -> None:
    path, file, first = landed.home.path, landed.home.config_file, first_token(landed)
    options = "".join(f"{name} = {json.dumps(value)}\n" for name, value in store.lake_options.items())
    file.write_text(file.read_text() + f"\n[streams.shop.lake.storage_options]\n{options}")
    move_lake(Home(path), f"{store.url}/moved")
    shutil.rmtree(path / "lake")
    check(path, first, postgres)
    move_lake(Home(path), str(tmp_path / "back"))
    assert ids(path) == [1, 2, 3, 4, 5, 7]


@pytest.mark.sampled
@pytest.mark.parametrize("point", ["lake_move.copied", "lake_move.unmarked", "lake_move.switched"])
def test_a_move_that_is_killed_loses_nothing(
    landed: LandedHome, postgres: Database, tmp_path: Path, point: str
) -> None:
    path, place, first = landed.home.path, tmp_path / "new", first_token(landed)
    assert run(path, "pipeline", "move", str(place), MILLSTREAM_FAILPOINTS=point).returncode < 0
    assert location_of(path) != str(place)
    if point == "lake_move.switched":
        with pytest.raises(LakeError, check=coded("lake_moved")):
            ids(path)
        with pytest.raises(LakeError, check=coded("lake_moved"), match=str(place)):
            move_lake(Home(path), str(tmp_path / "other"))
    else:
        assert ids(path) == [1, 2, 3, 4, 5]
    if point == "lake_move.unmarked":
        with pytest.raises(LakeError, check=coded("lake_table_exists")):
            move_lake(Home(path), str(place))
        shutil.rmtree(place)
    move_lake(Home(path), str(place))
    assert location_of(path) == str(place)
    shutil.rmtree(path / "lake")
    check(path, first, postgres)


def test_the_lake_of_a_home_that_was_moved_gets_its_new_addresses(
    landed: LandedHome, postgres: Database, tmp_path: Path
) -> None:
    """Nothing but moving it back helped."""
    first = first_token(landed)
    path = tmp_path / "elsewhere"
    landed.home.path.rename(path)
    with pytest.raises(LakeError, check=coded("lake_moved")):
        ids(path)
    before = Home(path).config_file.read_text()
    done = run(path, "pipeline", "move", location_of(path))
    assert done.returncode == 0, done.stderr
    assert Home(path).config_file.read_text() == before
    assert {name for name in addresses(path) if not name.startswith(f"file://{path}/lake/shop/")} == set()
    check(path, first, postgres)


def test_the_lake_of_a_home_that_was_moved_can_move_further(
    landed: LandedHome, postgres: Database, tmp_path: Path
) -> None:
    first, path = first_token(landed), tmp_path / "elsewhere"
    landed.home.path.rename(path)
    move_lake(Home(path), str(tmp_path / "new"))
    shutil.rmtree(path / "lake")
    check(path, first, postgres)


def test_a_place_that_no_table_can_have_is_refused(landed: LandedHome, tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="its path holds %"):
        move_lake(Home(landed.home.path), str(tmp_path / "a#b"))
    assert ids(landed.home.path) == [1, 2, 3, 4, 5]


def test_a_commit_of_another_program_stops_the_move(
    landed: LandedHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = landed.home.path, landed.home.config_file.read_bytes()
    write = IcebergMove.write

    def disturbed(move: IcebergMove) -> None:
        write(move)
        catalog = SqlCatalog("millstream", uri=f"sqlite:///{path}/data/iceberg.db")
        with catalog.load_table("shop_current.public__items").transaction() as transaction:
            transaction.set_properties({"another": "program's"})

    monkeypatch.setattr(IcebergMove, "write", disturbed)
    with pytest.raises(LakeConflict, match="another program changed shop_current"):
        move_lake(Home(path), str(tmp_path / "new"))
    assert landed.home.config_file.read_bytes() == before
    assert ids(path) == [1, 2, 3, 4, 5]
    monkeypatch.undo()
    move_lake(Home(path), str(tmp_path / "new"))
    assert ids(path) == [1, 2, 3, 4, 5]


def test_the_tables_of_a_catalogs_server_are_not_moved(landed: LandedHome, tmp_path: Path) -> None:
    file = landed.home.config_file
    text = file.read_text() + '\n[streams.shop.lake.catalog]\ntype = "rest"\nuri = "http://127.0.0.1:9"\n'
    file.write_text(text)
    with pytest.raises(LakeError, check=coded("lake_format_unsupported")) as caught:
        move_lake(Home(landed.home.path), str(tmp_path / "new"))
    assert "register_table" in caught.value.hint
    assert file.read_text() == text
