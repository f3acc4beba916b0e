"""`run`: its parts' commands, and which errors of a part end it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.app.homes import config, make_home

from millstream.home.home import Home
from millstream.processes.run import _Conductor, part_command
from millstream.processes.supervisor import Event

REFUSED: Event = ("capture", "given_up", {"code": "unknown_column", "exit_code": 2})


@pytest.mark.parametrize(
    ("events", "ends"),
    [
        pytest.param([REFUSED], True, id="refused at the start"),
        pytest.param([("capture", "progress", {"stream": "shop"}), REFUSED], False, id="refused later"),
        pytest.param([("capture", "given_up", {"code": "slot_lost", "exit_code": 1})], False, id="another error"),
    ],
)
def test_a_refused_configuration_ends_the_run(tmp_path: Path, events: list[Event], *, ends: bool) -> None:
    told: list[Event] = []
    home = Home(make_home(tmp_path / "home", config("postgresql://nowhere/shop", None)))
    conductor = _Conductor(home, told.append, until_caught_up=False)
    for event in events:
        conductor._heard(event)
    parts = conductor.supervisor.parts
    assert [parts[name].over for name in ("pipeline", "serve")] == [ends, ends]
    assert bool(told[-1][2].get("ends_run")) is ends


def test_a_part_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    home = Home(make_home(tmp_path / "home", config("postgresql://nowhere/shop", None)))
    for name in ("queue", "types", "yaml"):
        (tmp_path / f"{name}.py").write_text('raise RuntimeError("of the user")\n')
    ended = subprocess.run(part_command(home, "config", "show"), cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, "of the user" in ended.stderr) == (0, False), ended.stderr
