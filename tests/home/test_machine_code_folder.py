"""The folder of machine code: shared by a user's homes, and safe from other users."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import millstream
from millstream.home.home import Home
from millstream.home.machine_code_folder import COMPILED_ROOMS, place_compiled_code


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache, and no folder in the environment."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")  # so that the end of the test puts back what was there
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def placed(home: Path) -> Path:
    """Return the folder that a new process with this home uses."""
    os.environ.pop("NUMBA_CACHE_DIR", None)
    place_compiled_code(Home(home))
    return Path(os.environ["NUMBA_CACHE_DIR"])


def test_all_homes_of_a_user_share_a_private_folder(cache: Path, tmp_path: Path) -> None:
    folder = placed(tmp_path / "a")
    assert folder == placed(tmp_path / "b")
    assert folder.is_relative_to(cache / "millstream")
    assert folder.stat().st_mode & 0o077 == 0
    assert not (tmp_path / "a").exists()


def test_a_user_without_xdg_has_it_in_the_home_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    assert placed(tmp_path / "a").is_relative_to(tmp_path / "a" / "data" / "cache")
    assert not (tmp_path / "user").exists()
    (tmp_path / "user").mkdir()
    assert placed(tmp_path / "a").is_relative_to(tmp_path / "user" / ".cache" / "millstream")
    assert not cache.exists()


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("fault", ["a file", "others write"])
def test_a_home_keeps_its_own_where_the_cache_cannot_be_used(tmp_path: Path, fault: str) -> None:
    shared = placed(tmp_path / "a")
    if fault == "a file":
        shared.rmdir()
        shared.write_text("in the way")
    else:
        shared.chmod(0o777)
    assert placed(tmp_path / "b").is_relative_to(tmp_path / "b" / "data" / "cache")


@pytest.mark.usefixtures("cache")
def test_another_users_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = placed(tmp_path / "a")
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    folder = placed(tmp_path / "b")
    assert folder != shared
    folder.rmdir()


def test_a_process_has_a_private_folder_where_nothing_can_be_written(cache: Path, tmp_path: Path) -> None:
    cache.write_text("in the way")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "data").write_text("in the way")
    folder = placed(tmp_path / "a")
    assert folder.stat().st_mode & 0o077 == 0
    folder.rmdir()


def test_a_folder_that_the_environment_names_stays(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "named"))
    place_compiled_code(Home(tmp_path / "a"))
    assert os.environ["NUMBA_CACHE_DIR"] == str(tmp_path / "named")
    assert not cache.exists()


def test_the_folders_name_is_of_all_functions_that_are_compiled() -> None:
    package = Path(millstream.__path__[0])
    compiled = {
        module.relative_to(package).parts[0]
        for module in package.rglob("*.py")
        if "millstream.codec.machine_code import" in module.read_text()
    }
    assert compiled == set(COMPILED_ROOMS)
