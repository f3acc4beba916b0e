"""A home's folders and files are private to its owner, whatever the umask; a group with access keeps it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.app.homes import make_home

import millstream
from millstream.administration.doctor import Diagnosis, examine
from millstream.home.home import Home

CONFIG = "[streams.shop]\n[streams.shop.log]\nshards = 2\n"


@pytest.fixture(params=[0o022, 0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Return the modes of a folder and of everything below it, except links."""
    found = [folder, *folder.rglob("*")]
    return {str(path): stat.S_IMODE(path.lstat().st_mode) for path in found if not path.is_symlink()}


def write(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append("shop", "orders", {"name": "a"}, idempotency_key=os.urandom(4).hex())
        assert {"data/catalog.db-wal", "data/catalog.db-shm"} <= {
            str(path.relative_to(home)) for path in (home / "data").iterdir()
        }
        assert not [place for place, mode in modes(home / "data").items() if mode & 0o007], "nobody else's, ever"


@pytest.mark.usefixtures("umask")
def test_all_that_is_written_is_the_owners_alone(tmp_path: Path) -> None:
    home = make_home(tmp_path / "shop", CONFIG)
    write(home)
    open_ones = {place: oct(mode) for place, mode in modes(home / "data").items() if mode & 0o077}
    assert not open_ones


@pytest.mark.usefixtures("umask")
def test_a_group_that_was_let_in_may_read_what_comes_later(tmp_path: Path) -> None:
    home = make_home(tmp_path / "shop", CONFIG)
    write(home)
    for place in [home / "data", *(home / "data").rglob("*")]:
        if not place.is_symlink():
            place.chmod(0o750 if place.is_dir() else 0o640)
    write(home)
    found = modes(home / "data")
    assert {place: oct(mode) for place, mode in found.items() if not mode & 0o040 or mode & 0o027} == {}


def privacy(home: Path) -> Diagnosis:
    return next(one for one in examine(Home(home), lambda _: None) if one.check == "privacy")


def test_a_home_of_before_is_named_by_doctor_and_its_mode_is_left_alone(tmp_path: Path) -> None:
    home = make_home(tmp_path / "shop", CONFIG)
    (home / "data").mkdir()
    (home / "data").chmod(0o755)
    Home(home).prepare()
    told = privacy(home)
    assert (told.code, told.blocks) == ("open_to_others", "nothing")
    assert f"chmod -R go= {home / 'data'}" in told.fix
    assert stat.S_IMODE((home / "data").stat().st_mode) == 0o755
    (home / "data").chmod(0o700)
    told = privacy(home)
    assert told.is_ok


def test_a_configuration_with_a_password_is_named_too(tmp_path: Path) -> None:
    home = make_home(tmp_path / "shop", '[streams.shop.source]\ndsn = "postgresql://app:secret@127.0.0.1:1/shop"\n')
    Home(home).prepare()
    for mode, code in ((0o644, "open_to_others"), (0o600, "ok")):
        (home / "millstream.toml").chmod(mode)
        told = privacy(home)
        assert told.code == code
        assert "secret" not in told.message + told.fix
