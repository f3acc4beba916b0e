"""A cheap look at a home differs if its status would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.app.homes import make_home

from millstream.app.home_changes import look
from millstream.app.open_home import OpenHome
from millstream.app.status import collect_status
from millstream.home.home import Home
from millstream.model.positions import Seq
from millstream.processes.role_locks import RoleLock


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(make_home(tmp_path / "home", "[streams.shop]\n"))
    home.prepare()
    with OpenHome(home) as opened:
        opened.append("shop", "public.orders", [{"id": 1}])
    return home


def _append(home: Home) -> None:
    with OpenHome(home) as opened:
        opened.append("shop", "public.orders", [{"id": 2}])


def _land(home: Home) -> None:
    with home.open_catalog() as catalog:
        catalog.set_landed(catalog.stream("shop").id, "lake", Seq(1))


def _configure(home: Home) -> None:
    with home.config_file.open("a") as file:
        file.write("[streams.web]\n")


def _acknowledge(home: Home) -> None:
    folder = home.delivery_folder("shop")
    folder.mkdir(parents=True)
    (folder / "search.state").write_text("1")


@pytest.mark.parametrize("change", [_append, _land, _configure, _acknowledge])
def test_a_look_differs_after_a_change_alone(home: Home, change: Callable[[Home], None]) -> None:
    with home.open_catalog():  # as a server has it: the last process that closes it writes to it
        before = look(home)
        assert before is not None
        collect_status(home)
        assert look(home) == before
        change(home)
        assert look(home) != before


def test_a_look_differs_once_a_process_has_come_and_once_it_has_gone(home: Home) -> None:
    without = look(home)
    with RoleLock.take(home.run_folder, "pipeline"):
        running = look(home)
        assert running != without
    assert look(home) not in (running, None)


def test_a_catalog_in_postgresql_can_not_be_looked_at_cheaply(tmp_path: Path) -> None:
    config = '[catalog]\nurl = "host=127.0.0.1 port=1"\n[streams.shop]\n'
    assert look(Home(make_home(tmp_path / "home", config))) is None
