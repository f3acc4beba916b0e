"""If the embedded catalog is removed or replaced, a running process ends and reports why."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
from tests.app.homes import make_home, wait_for
from tests.serving.serving_process import served

from millstream.errors import CatalogError
from millstream.home.home import Home
from millstream.processes.catalog_watch import watched_catalog
from millstream.processes.child_process import Lifeline
from millstream.testing.errors import coded


def has_open(pid: int, file: Path) -> bool:
    """Return whether a process has a file open."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if entry.readlink() == file.resolve():
                return True
    return False


@pytest.mark.long
def test_an_idle_server_whose_catalog_is_replaced_ends_with_the_error(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home", '[streams.web]\n[http]\nlisten = "127.0.0.1:0"\n')
    Home(home).prepare()
    Home(home).open_catalog().close()
    wal = home / "data" / "catalog.db-wal"
    with served(home) as server:
        wait_for(lambda: wal.exists() and has_open(server.process.pid, wal), what=lambda: server.said)
        wal.rename(tmp_path / "wal")
        assert server.process.wait(60) == 1
    # Replaced, if a sample of the home's figures was taken in between: it opens the catalog.
    assert re.search(r"catalog\.db-wal was (removed|replaced)", str(server.said)), server.said
    assert any(line.get("code") == "catalog_replaced" for line in server.said), server.said


def test_the_watch_ends_the_process_once_it_has_seen_the_catalog(tmp_path: Path) -> None:
    """The catalog may be created after the process has started."""
    home = Home(make_home(tmp_path / "home", "[streams.web]\n"))
    home.prepare()
    lifeline = Lifeline()

    def run() -> None:
        with lifeline.held(), watched_catalog(home, lifeline), home.open_catalog() as catalog:
            catalog.resolve_stream("web")
            # The watch runs once a second.
            assert not lifeline.stop.wait(2.5)
            home.catalog_file.rename(tmp_path / "aside")
            assert lifeline.stop.wait(60)

    with pytest.raises(CatalogError, check=coded("catalog_replaced"), match=r"catalog\.db was removed"):
        run()


def test_a_process_that_ends_in_order_ends_without_an_error(tmp_path: Path) -> None:
    home = Home(make_home(tmp_path / "home", "[streams.web]\n"))
    home.prepare()
    lifeline = Lifeline()
    with lifeline.held(), watched_catalog(home, lifeline), home.open_catalog() as catalog:
        catalog.resolve_stream("web")
        assert not lifeline.stop.wait(1.5)
