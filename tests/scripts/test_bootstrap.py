"""The bootstrap passes this machine's facts to uv, and reports what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def bootstrap(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_CERT"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return script("bootstrap")


def test_pip_variables_reach_uv(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://a.example https://b.example")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} {tmp_path / 'nowhere'} https://wheels.example")
    monkeypatch.setenv("PIP_CERT", "/etc/company.pem")

    environment = bootstrap.uv_environment()

    assert environment["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert environment["UV_INDEX"] == "https://a.example https://b.example"
    assert environment["UV_FIND_LINKS"] == f"{tmp_path},https://wheels.example"
    assert environment["SSL_CERT_FILE"] == "/etc/company.pem"
    assert environment["UV_SYSTEM_CERTS"] == "1"


def test_settings_come_in_the_order_that_pip_gives_them(bootstrap: ModuleType) -> None:
    listing = (
        ":env:.index-url='https://env.example'\n"
        "global.index-url='https://global.example'\n"
        "global.timeout='7'\n"
        "install.timeout='9'\n"
        "download.timeout='11'\n"
        "global.extra-index-url='https://a.example\\nhttps://b.example'\n"
    )

    settings = bootstrap.parse_pip_settings(listing, {})

    assert settings["index-url"] == "https://env.example"
    assert settings["timeout"] == "9"
    assert settings["extra-index-url"].split() == ["https://a.example", "https://b.example"]


def test_what_was_said_to_uv_wins(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://pip.example/simple")
    monkeypatch.setenv("UV_INDEX_URL", "https://uv.example/simple")

    environment = bootstrap.uv_environment()

    assert environment["UV_INDEX_URL"] == "https://uv.example/simple"
    assert "UV_DEFAULT_INDEX" not in environment


def test_an_empty_variable_is_as_good_as_none(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")

    assert not {"SSL_CERT_FILE", "UV_FIND_LINKS", "PIP_FIND_LINKS"} & set(bootstrap.uv_environment())


def test_without_a_home_downloads_stay_in_the_repository(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)

    cache = bootstrap.cache_dir({"HOME": str(tmp_path / "file")})

    assert cache == tmp_path / ".cache" / "uv"
    assert cache.is_dir()


def test_no_lock_holds_an_address() -> None:
    locks = list((ROOT / "requirements").glob("*.txt"))

    assert {lock.name for lock in locks} == {"all.txt", "build.txt", "uv.txt"}
    for lock in locks:
        text = lock.read_text()
        assert "://" not in text, lock
        assert "--hash=sha256:" in text, lock


def run_finder(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(path / "sh"), str(ROOT / "scripts" / "python"), "-c", "import sys; print(sys.version_info[:2])"],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with a shell and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sh").symlink_to(str(shutil.which("sh")))
    return folder


def test_without_python_one_sentence_says_what_to_install(bare_path: Path) -> None:
    done = run_finder(bare_path)

    assert done.returncode == 2
    assert "apt install python3-venv" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def make_python(path: Path, name: str, program: str) -> None:
    (path / name).write_text(f"#!/bin/sh\nexec {sys.executable} -c '{program}' \"$@\"\n")
    (path / name).chmod(0o755)


def test_a_python_that_cannot_install_is_passed_over(bare_path: Path) -> None:
    make_python(bare_path, "python3.12", "raise SystemExit(1)")
    (bare_path / "python3").symlink_to(sys.executable)

    done = run_finder(bare_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(sys.version_info[:2])


def test_a_python_that_was_named_is_the_only_one_tried(bare_path: Path) -> None:
    make_python(bare_path, "old", "raise SystemExit(1)")
    (bare_path / "python3").symlink_to(sys.executable)

    assert run_finder(bare_path, PYTHON=str(bare_path / "old")).returncode == 2
