"""The commands that a demo runs, and those that it offers at its end, which work in any folder."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from millstream.administration.demo import DemoReport, _millstream


def test_the_next_commands_of_a_demo_run_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "a demo", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "millstream.toml").write_text("[streams.shop.source]\ndsn = 'host=127.0.0.1 port=1'\n")
    monkeypatch.chdir(tmp_path)
    lines = DemoReport(home).lines()
    words = shlex.split(next(line for line in lines if line.endswith(" status")))
    done = subprocess.run(words, cwd=elsewhere, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{home}: nothing runs")


def test_a_demo_makes_its_home_and_runs_commands_in_it(tmp_path: Path) -> None:
    _millstream(tmp_path, "init", str(tmp_path), "--stream", "shop")
    assert (tmp_path / "millstream.toml").exists()
    _millstream(tmp_path, "config", "show")
    assert "[streams.shop" in (tmp_path / "run.log").read_text()
