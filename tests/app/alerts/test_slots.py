"""Alerts about a real slot: one that holds WAL, and one that nothing reads after its process was killed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.app.alerts.receiving import SECRET, told
from tests.app.homes import config, make_home, wait_for
from tests.commands import Command
from tests.delivery.receivers import Receiver
from tests.serving.serving_process import served

from millstream.app.status import collect_status
from millstream.home.home import Home
from millstream.testing.pytest_plugin import Database


@contextmanager
def capturing(home: Path) -> Iterator[Command]:
    """Capture in a process of its own, which is killed at the end."""
    with Command(["--home", str(home), "capture", "run"], stdout=subprocess.DEVNULL) as command:
        try:
            yield command
        finally:
            command.kill()


def test_a_slot_that_holds_wal_then_one_that_nothing_reads(postgres: Database, tmp_path: Path) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
    slot = f"millstream_{postgres.name}"[:63]
    with Receiver() as receiver:
        alerts = (
            f'[alerts]\nurl = "{receiver.url}"\nsecret = "{SECRET}"\nlook_every = "100ms"\nslot_lag = "64KiB"\n'
            'stalled_after = "1500ms"\n[http]\nlisten = "127.0.0.1:0"\n'
        )
        source = f'slot = {json.dumps(slot)}\nheartbeat_interval = "200ms"\n'
        home = make_home(tmp_path / "home", f"{config(postgres.dsn, None)}{source}{alerts}")

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
                wait_for(lambda: "slot_lag" in [one["kind"] for one in collect_status(Home(home))["conditions"]])
        with served(home):  # another process of the home goes on with the alerts
            wait_until_told("alert.firing", "slot_inactive")
            with capturing(home):
                wait_until_told("alert.resolved", "slot_inactive")
        assert told(receiver).count(("alert.firing", "slot_lag", slot)) == 1
