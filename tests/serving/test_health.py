"""A server's status keeps its catalog open, and neither a lost catalog nor a status that hangs holds the server up."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import make_home

from millstream.app.open_home import OpenHome
from millstream.app.status import collect_status
from millstream.errors import DiskFull, MillstreamError
from millstream.home.home import Home
from millstream.serving import health as module
from millstream.serving.health import Health
from millstream.serving.metrics import prometheus_text
from millstream.testing.errors import coded


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(make_home(tmp_path / "home", "[streams.shop]\n"))
    home.prepare()
    with OpenHome(home) as opened:
        opened.append("shop", "public.orders", [{"id": 1}])
    return home


def test_a_status_waits_for_a_lost_catalog_no_longer_than_for_tokens(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A catalog that stays open waits for its server as long as for a lock: a health check would wait with it."""
    patience_s: list[float | None] = []
    open_catalog = Home.open_catalog

    def noted(self: Home, *, busy_timeout_s: float | None = None) -> object:
        patience_s.append(busy_timeout_s)
        return open_catalog(self, busy_timeout_s=busy_timeout_s)

    monkeypatch.setattr(Home, "open_catalog", noted)
    health = Health(home)
    assert health.renewed()["problems"] == []
    assert health.renewed()["problems"] == []
    health.close()
    assert patience_s == [2.0]


def test_a_server_ends_while_its_status_hangs(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, may = threading.Event(), threading.Event()

    def hanging(*_: Any) -> dict[str, Any]:
        hangs.set()
        assert may.wait(60)
        return {}

    monkeypatch.setattr(module, "collect_status", hanging)
    health = Health(home, closes_within_s=0.1)
    asking = threading.Thread(target=health.status)
    asking.start()
    try:
        assert hangs.wait(60)
        health.close()
        assert asking.is_alive()
    finally:
        may.set()
        asking.join(60)


def test_a_home_is_ready_while_one_stream_has_room(home: Home) -> None:
    """It was ready, and each write was refused: the disk was too full."""
    full = "[streams.{}.log]\ndisk_used_max = 1e-9\n"
    home.config_file.write_text(full.format("shop"))
    crowded = Home(home.path)
    with OpenHome(crowded) as opened, pytest.raises(DiskFull):
        opened.append("shop", "public.orders", [{"id": 2}])
    ready, why = Health(crowded).ready()
    assert not ready
    assert "disk_used_max" in why
    home.config_file.write_text(full.format("shop") + full.format("new") + "[streams.other]\n")
    assert Health(Home(home.path)).ready() == (True, "writes are taken")


def test_a_home_on_a_read_only_disk_is_not_ready(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ready, and each write was refused."""
    assert Health(home).ready()[0]
    may = os.access

    def read_only(path: Any, mode: int) -> bool:
        return may(path, mode) and not (mode & os.W_OK and str(path).startswith(str(home.data)))

    monkeypatch.setattr(os, "access", read_only)
    ready, why = Health(home).ready()
    assert not ready
    assert "read-only" in why


def test_while_a_status_hangs_requests_get_the_last_one_with_its_age(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request waited for the status that hung, and so did every later request."""
    hangs, may = threading.Event(), threading.Event()
    taken = collect_status(home)

    def hanging(*_: Any) -> dict[str, Any]:
        hangs.set()
        assert may.wait(60)
        return taken

    monkeypatch.setattr(module, "collect_status", hanging)
    health = Health(home, answers_within_s=0.1)
    try:
        with pytest.raises(MillstreamError, check=coded("status_hangs")):
            health.answer()
        assert hangs.is_set()
        assert health.errors() == []
        assert health.ready()[0]
        may.set()
        health.answers_within_s = 60.0
        assert health.answer()["streams"] == taken["streams"]

        may.clear()
        health.answers_within_s = 0.1
        health.keep_s = 0.0
        late = health.answer()
        assert late["streams"] == taken["streams"]
        assert (late["age_s"] > 0, late["problems"]) == (True, [])
        assert b"millstream_status_age_seconds" in prometheus_text(health.answer)
        health.hangs_after_s = 0.0
        assert "doesn't answer" in health.answer()["problems"][0]
        assert not health.healthy()[0]
        assert health.ready()[0]
    finally:
        may.set()
    health.answers_within_s = 60.0
    assert health.answer()["problems"] == []
    health.close()


def test_a_status_is_kept_for_a_while_unless_it_is_renewed(home: Home) -> None:
    health = Health(home, keep_s=3600.0)
    first = health.status()
    assert health.status() is first
    renewed = health.renewed()
    assert renewed is not first
    assert health.status() is renewed
    health.close()
