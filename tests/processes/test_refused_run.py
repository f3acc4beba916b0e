"""`run` without an end: a configuration that capture refuses at its start ends it, a later error of capture doesn't."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.app.homes import config, make_home

from millstream.home.home import Home
from millstream.processes.run import _Conductor
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
