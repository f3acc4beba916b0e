"""`run`: its parts' commands, and which errors of a part end it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.app.homes import config, make_home

from millstream.home.home import Home
from millstream.processes.role_locks import RoleLock, holder
from millstream.processes.run import _Conductor, part_command
from millstream.processes.supervisor import Event
from millstream.writers.stall_reasons import server_errors

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


def test_only_what_lands_forgives_a_pipeline_of_a_job_its_errors(tmp_path: Path) -> None:
    """On a full disk each of its processes lived for more than a minute, and the job never ended."""
    home = Home(make_home(tmp_path / "home", config("postgresql://nowhere/shop", None)))
    conductor = _Conductor(home, lambda _: None, until_caught_up=True)
    pipeline = conductor.supervisor.parts["pipeline"]
    for n, errors in ((5, 3), (5, 3), (6, 0), (6, 3)):
        pipeline.errors = 3
        conductor._heard(("pipeline", "progress", {"stream": "shop", "progress": {"n": n}}))
        assert pipeline.errors == errors
    conductor._heard(("pipeline", "progress", {"stream": "shop", "progress": None}))
    assert pipeline.errors == 3


def test_status_says_why_the_server_of_a_run_does_not_listen(tmp_path: Path) -> None:
    home = Home(make_home(tmp_path / "home", config("postgresql://nowhere/shop", None)))
    home.prepare()
    taken = {"code": "address_in_use", "message": "é" * 5000, "hint": "Set it.", "details": {"address": ":1"}}
    with RoleLock.take(home.run_folder, "run", writer=None) as lock:
        conductor = _Conductor(home, lambda _: None, until_caught_up=False, note=lock.note)
        conductor._heard(("serve", "died", {"exit_code": 1, "restart_in_s": 1.0, "error": taken}))
        error = server_errors(home)["serve"]
        assert (error["code"], error["hint"], error["gave_up"]) == ("address_in_use", "Set it.", False)
        assert holder(home.run_folder, "run")["pid"] == os.getpid()
        conductor._heard(("serve", "listening", {"url": "http://127.0.0.1:1/"}))
        assert server_errors(home) == {}
        conductor._heard(
            ("serve", "given_up", {"code": "unprotected", "message": "no TLS", "hint": "Listen on 127.0.0.1."})
        )
        assert server_errors(home)["serve"]["gave_up"]
    assert server_errors(home) == {}


def test_a_run_kills_no_server_that_may_still_drain(tmp_path: Path) -> None:
    server = '[http]\ndrain_delay = "1m"\ndrain_timeout = "10m"\n'
    home = Home(make_home(tmp_path / "home", config("postgresql://nowhere/shop", None) + server))
    conductor = _Conductor(home, lambda _: None, until_caught_up=False)
    assert conductor.supervisor.patience_s > 60 + 2 * 600


def test_a_part_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    home = Home(make_home(tmp_path / "home", config("postgresql://nowhere/shop", None)))
    for name in ("queue", "types", "yaml"):
        (tmp_path / f"{name}.py").write_text('raise RuntimeError("of the user")\n')
    ended = subprocess.run(part_command(home, "config", "show"), cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, "of the user" in ended.stderr) == (0, False), ended.stderr
