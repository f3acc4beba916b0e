"""Alerts about a real slot: one that holds WAL, and one that nothing reads after its process was killed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.app.alerts.receiving import SECRET, told
from tests.app.homes import config, make_home, wait_for
from tests.commands import Command
from tests.delivery.receivers import Receiver
from tests.serving.serving_process import served

from millstream.app.alerts.alert_sender import Watch
from millstream.app.status import collect_status
from millstream.delivery.sinks import ACCEPTED, Outcome
from millstream.home.home import Home
from millstream.testing.pytest_plugin import Database


@pytest.fixture
def slot(postgres: Database) -> str:
    return f"millstream_{postgres.name}"[:63]


def home_of(folder: Path, postgres: Database, slot: str, alerts: str) -> Home:
    source = f'slot = {json.dumps(slot)}\nheartbeat_interval = "200ms"\n'
    return Home(make_home(folder / "home", f"{config(postgres.dsn, None)}{source}[alerts]\n{alerts}"))


@pytest.mark.long
def test_the_slot_of_a_stream_that_nothing_captures(postgres: Database, slot: str, tmp_path: Path) -> None:
    home = home_of(tmp_path, postgres, slot, 'url = "http://127.0.0.1:1/"\nslot_lag = "1MiB"\n')
    home.prepare()
    with home.open_catalog() as catalog:
        catalog.resolve_source(catalog.resolve_stream("shop"), 7, postgres.name, 1)
    sent: list[tuple[str, str]] = []
    now_s = [1_750_000_000.0]

    def post(_id: str, body: bytes) -> Outcome:
        notice = json.loads(body)
        assert notice["data"]["subject"] == slot
        sent.append((notice["type"], notice["data"]["condition"]))
        return ACCEPTED

    watch = Watch(home, home.config.alerts, post, now_s=lambda: now_s[0])

    def look(times: int) -> list[tuple[str, str]]:
        sent.clear()
        for _ in range(times):
            now_s[0] += 50
            watch.look()
        return sent

    with postgres.connect() as connection:
        assert look(3) == []  # there is no slot
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        assert look(12) == []
        assert look(1) == [("alert.firing", "slot_inactive")]
        connection.execute("SELECT pg_logical_emit_message(true, 'x', repeat('x', 3000000))")
        assert look(1) == [("alert.firing", "slot_lag")]
        connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])
        assert look(4) == [("alert.resolved", "slot_inactive"), ("alert.resolved", "slot_lag")]
    watch.close()


@contextmanager
def capturing(home: Home) -> Iterator[Command]:
    """Capture in a process of its own, which is killed at the end."""
    with Command(["--home", str(home.path), "capture", "run"], stdout=subprocess.DEVNULL) as command:
        try:
            yield command
        finally:
            command.kill()


@pytest.mark.siege
def test_serve_goes_on_with_the_alerts_of_a_capture_that_was_killed(
    postgres: Database, slot: str, tmp_path: Path
) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
    with Receiver() as receiver:
        alerts = (
            f'url = "{receiver.url}"\nsecret = "{SECRET}"\nlook_every = "100ms"\nslot_lag = "64KiB"\n'
            'stalled_after = "1500ms"\n[http]\nlisten = "127.0.0.1:0"\n'
        )
        home = home_of(tmp_path, postgres, slot, alerts)

        def wait_until_told(kind: str, condition: str) -> None:
            wait_for(lambda: (kind, condition, slot) in told(receiver), seconds=60, what=lambda: told(receiver))

        with capturing(home), postgres.connect() as open_one, postgres.connect() as connection:
            reads = (
                "SELECT FROM pg_replication_slots WHERE slot_name = %s AND active AND confirmed_flush_lsn IS NOT NULL"
            )
            wait_for(lambda: connection.execute(reads, [slot]).rowcount)
            with open_one.transaction(force_rollback=True):  # the slot keeps the WAL since its begin
                open_one.execute("INSERT INTO orders VALUES (1)")
                connection.execute("INSERT INTO orders SELECT generate_series(100, 5100)")
                wait_until_told("alert.firing", "slot_lag")
                wait_for(lambda: "slot_lag" in [one["kind"] for one in collect_status(home)["conditions"]])
        with served(home.path):
            wait_until_told("alert.firing", "slot_inactive")
            with capturing(home):
                wait_until_told("alert.resolved", "slot_inactive")
        ids = [request.headers["webhook-id"] for request in receiver.requests]
        assert len(ids) == len(set(ids))  # no process sent what another one had sent
