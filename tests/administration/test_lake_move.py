"""A lake moves to another place: whole, compared, and named there in one step."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import run
from tests.app.landed import LandedHome

from millstream import open as millstream_open
from millstream.administration import lake_move
from millstream.administration.lake_move import move_lake
from millstream.errors import HomeBusy, LakeError, UsageError
from millstream.home.home import Home
from millstream.processes.role_locks import RoleLock
from millstream.testing.pytest_plugin import Database
from millstream.testing.s3 import EmbeddedS3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedS3]:
    with EmbeddedS3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def landed(postgres: Database, tmp_path: Path) -> LandedHome:
    with postgres.connect() as source:
        source.execute("CREATE TABLE items (id int PRIMARY KEY, note text)")
        source.execute("INSERT INTO items SELECT i, 'old' FROM generate_series(1, 5) i")
    home = LandedHome(tmp_path / "shop", postgres.dsn)
    home.catch_up()
    return home


def ids(path: Path) -> list[int]:
    with millstream_open(path) as home:
        return sorted(row["id"] for row in home.query("SELECT id FROM public.items", lake_only=True).to_pylist())


def location_of(path: Path) -> str:
    return Home(path).config.streams["shop"].lake.location


@pytest.mark.long
def test_a_lake_goes_into_a_store_and_back_and_landing_goes_on(
    landed: LandedHome, postgres: Database, store: EmbeddedS3, tmp_path: Path
) -> None:
    path, file = landed.home.path, landed.home.config_file
    options = "".join(f"{name} = {json.dumps(value)}\n" for name, value in store.lake_options.items())
    file.write_text(file.read_text() + f"\n[streams.shop.lake.storage_options]\n{options}")
    lines = file.read_text().splitlines()
    done = run(path, "pipeline", "move", f"{store.url}/moved")
    assert done.returncode == 0, done.stderr
    assert f"rm -r {path / 'lake' / 'shop'}" in done.stderr
    assert location_of(path) == f"{store.url}/moved"
    changed = [one for one, other in zip(lines, file.read_text().splitlines(), strict=True) if one != other]
    assert len(changed) == 1
    shutil.rmtree(path / "lake")
    assert ids(path) == [1, 2, 3, 4, 5]
    with postgres.connect() as source:
        source.execute("INSERT INTO items VALUES (6, 'new')")
    moved = LandedHome(path, None)
    moved.catch_up()
    assert ids(path) == [1, 2, 3, 4, 5, 6]
    back = move_lake(Home(path), str(tmp_path / "back"))
    assert (back.old, back.new) == (f"{store.url}/moved/shop", str(tmp_path / "back" / "shop"))
    assert ids(path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_a_move_that_is_killed_leaves_the_old_lake_and_can_be_repeated(landed: LandedHome, tmp_path: Path) -> None:
    path, place = landed.home.path, tmp_path / "new place"
    before = landed.home.config_file.read_bytes()
    assert run(path, "pipeline", "move", str(place), MILLSTREAM_FAILPOINTS="lake_move.copied").returncode < 0
    assert landed.home.config_file.read_bytes() == before
    assert ids(path) == [1, 2, 3, 4, 5]
    (place / "shop" / "left").write_text("over")
    moved = move_lake(Home(path), str(place))
    assert location_of(path) == str(place)
    assert not (place / "shop" / "left").exists()
    assert moved.files == sum(one.is_file() for one in (place / "shop").rglob("*"))
    assert ids(path) == [1, 2, 3, 4, 5]
    with pytest.raises(UsageError, match="already"):
        move_lake(Home(path), str(place))


def test_nothing_is_overwritten_and_nothing_lands_meanwhile(landed: LandedHome, tmp_path: Path) -> None:
    path, place = landed.home.path, tmp_path / "taken"
    (place / "shop").mkdir(parents=True)
    (place / "shop" / "file").write_text("another's")
    before = landed.home.config_file.read_bytes()
    with pytest.raises(LakeError) as caught:
        move_lake(Home(path), str(place))
    assert caught.value.code == "lake_table_exists"
    assert [one.name for one in (place / "shop").iterdir()] == ["file"]
    with RoleLock.take(landed.home.run_folder, "pipeline"), pytest.raises(HomeBusy):
        move_lake(Home(path), str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()
    assert landed.home.config_file.read_bytes() == before


@pytest.mark.parametrize("place", ["lake/shop", "lake/shop/current"])
def test_a_lake_does_not_move_into_itself(landed: LandedHome, place: str) -> None:
    path = landed.home.path
    before = sorted(path.joinpath("lake").rglob("*"))
    with pytest.raises(UsageError):
        move_lake(Home(path), str(path / place))
    assert sorted(path.joinpath("lake").rglob("*")) == before


def test_a_lake_is_unmarked_before_it_is_named(landed: LandedHome, tmp_path: Path) -> None:
    """A later move to its place would have taken the mark for that of an unfinished one, and deleted the lake."""
    path, place = landed.home.path, tmp_path / "new"
    assert run(path, "pipeline", "move", str(place), MILLSTREAM_FAILPOINTS="lake_move.unmarked").returncode < 0
    assert location_of(path) != str(place)
    with pytest.raises(LakeError) as caught:
        move_lake(Home(path), str(place))
    assert caught.value.code == "lake_table_exists"
    assert ids(path) == [1, 2, 3, 4, 5]


def test_the_configuration_keeps_its_mode_its_link_and_what_was_edited_meanwhile(
    landed: LandedHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit made while files were copied was lost, a group could no longer read the file, and a link became a file."""
    path, named, file = landed.home.path, landed.home.config_file, tmp_path / "managed.toml"
    named.rename(file)
    file.chmod(0o640)
    named.symlink_to(file)
    copy_files = lake_move._copy_files

    def edited(*words: Any) -> tuple[int, int]:
        copied = copy_files(*words)
        file.write_text(file.read_text() + "# edited\n")
        return copied

    monkeypatch.setattr(lake_move, "_copy_files", edited)
    move_lake(Home(path), str(tmp_path / "new"))
    assert location_of(path) == str(tmp_path / "new")
    assert named.is_symlink()
    assert "# edited" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert ids(path) == [1, 2, 3, 4, 5]
