"""A source that refuses for a while: capture retries, reports the cause, and goes on once the cause is fixed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.app.homes import config, make_home, run, wait_for
from tests.app.served import serving
from tests.commands import Command

from millstream.app.status import collect_status
from millstream.home.home import Home
from millstream.serving.metrics import prometheus_text
from millstream.testing.postgres import EmbeddedPostgres

HBA = "local all miller scram-sha-256"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    settings = {"wal_level": "replica", "max_wal_senders": "4"}
    with EmbeddedPostgres(18, data_dir=tmp_path / "source", settings=settings, hba=[HBA], fsync=False) as made:
        sql(
            made,
            "CREATE ROLE miller LOGIN REPLICATION PASSWORD 'first'",
            "CREATE SCHEMA shop AUTHORIZATION miller",
            "GRANT CREATE ON DATABASE postgres TO miller",
            "CREATE TABLE shop.orders (id bigint PRIMARY KEY)",
            "ALTER TABLE shop.orders OWNER TO miller",
            "INSERT INTO shop.orders VALUES (0)",
        )
        yield made


def sql(server: EmbeddedPostgres, *statements: str) -> None:
    with server.connect() as connection:
        for statement in statements:
            connection.execute(statement)


def capture_error(home: Path) -> dict[str, Any] | None:
    (stream,) = collect_status(Home(home))["streams"]
    return stream.get("errors", {}).get("capture")  # type: ignore[no-any-return]


def captured(home: Path) -> list[int]:
    """Compare without repetitions: a table that returns to its publication is copied again."""
    records = [json.loads(line) for line in run(home, "wal", "cat").stdout.splitlines()]
    return sorted({record["row"]["id"] for record in records if record["op"] in {"c", "r"}})


def end_connections(server: EmbeddedPostgres) -> None:
    sql(server, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'miller'")


@pytest.mark.long
def test_causes_at_the_source_are_tried_again_and_told_until_they_are_mended(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    dsn = server.dsn(user="miller", password="first")
    home = make_home(tmp_path / "home", config(dsn, None, tables='["shop.*"]'))
    with Command(
        ["--home", str(home), "capture", "run"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as command:
        try:
            waits_for(home, command, "wal_level_not_logical")
            server.restart(settings={"wal_level": "logical"})
            goes_on(home, command, [0])

            sql(server, "ALTER ROLE miller NOREPLICATION")
            end_connections(server)
            waits_for(home, command, "source_privilege_missing")
            sql(server, "ALTER ROLE miller REPLICATION", "INSERT INTO shop.orders VALUES (1)")
            goes_on(home, command, [0, 1])

            sql(server, "ALTER ROLE miller PASSWORD 'second'")
            end_connections(server)
            waits_for(home, command, "source_authentication_failed")
            sql(server, "ALTER ROLE miller PASSWORD 'first'", "INSERT INTO shop.orders VALUES (2)")
            goes_on(home, command, [0, 1, 2])

            sql(server, "ALTER ROLE miller NOLOGIN")
            end_connections(server)
            waits_for(home, command, "source_authentication_failed")
            sql(server, "ALTER ROLE miller LOGIN")
            goes_on(home, command, [0, 1, 2])

            sql(server, "DROP PUBLICATION millstream_shop", "REVOKE CREATE ON DATABASE postgres FROM miller")
            end_connections(server)
            waits_for(home, command, "publication_missing")
            sql(server, "GRANT CREATE ON DATABASE postgres TO miller")
            goes_on(home, command, [0, 1, 2])

            server.stop()
            waits_for(home, command, "source_unreachable")
            server.start()
            goes_on(home, command, [0, 1, 2])
        finally:
            command.terminate()
    assert command.returncode == 0


def waits_for(home: Path, command: Command, code: str) -> None:
    """Capture reports that it waits for the source, in every place, with a hint; and it stays."""
    wait_for(lambda: (capture_error(home) or {}).get("code") == code, seconds=300, what=lambda: capture_error(home))
    error = capture_error(home)
    assert error is not None
    assert (error["gave_up"], command.poll()) == (False, None)
    assert error["hint"]
    shown = run(home, "status").stdout
    assert f"capture waits, and retries: {code}: " in shown
    assert error["hint"].replace("`millstream ", f"`millstream --home {home} ") in shown
    labels = next(
        line
        for line in prometheus_text(lambda: collect_status(Home(home))).decode().splitlines()
        if line.startswith("millstream_stream_error{")
    )
    assert f'code="{code}"' in labels
    assert 'gave_up="false"' in labels


def goes_on(home: Path, command: Command, ids: list[int]) -> None:
    wait_for(
        lambda: capture_error(home) is None and captured(home) == ids,
        seconds=300,
        what=lambda: (capture_error(home), captured(home)),
    )
    assert command.poll() is None
    assert "tries again" not in run(home, "status").stdout


@pytest.mark.long
def test_what_a_person_must_decide_ends_capture_and_stays_told_until_it_is_decided(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    server.restart(settings={"wal_level": "logical"})
    home = make_home(tmp_path / "home", config(server.dsn(), None, tables='["shop.*"]'))
    assert run(home, "capture", "run", "--until-caught-up").returncode == 0
    sql(server, "SELECT pg_drop_replication_slot('millstream_shop')")
    doctor = run(home, "doctor", "--json")
    assert doctor.returncode == 3
    wrong = [one["code"] for one in json.loads(doctor.stdout)["findings"] if one["blocks"] == "source"]
    assert wrong == ["slot_lost"]
    done = run(home, "capture", "run")
    assert done.returncode == 1
    assert "error[slot_lost]" in done.stderr
    error = capture_error(home)
    assert error is not None
    assert (error["code"], error["gave_up"]) == ("slot_lost", True)
    shown = run(home, "status").stdout
    assert "capture has given up: slot_lost: " in shown
    assert error["hint"].replace("`millstream ", f"`millstream --home {home} ") in shown

    assert run(home, "slot", "drop", "--yes").returncode == 0
    assert capture_error(home) is None
    assert run(home, "capture", "run", "--until-caught-up").returncode == 0
    assert capture_error(home) is None


def test_readiness_and_health_name_the_cause(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home", config("host=127.0.0.1 port=1", None))
    with (
        Command(
            ["--home", str(home), "capture", "run"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as command,
        serving(home) as url,
    ):
        try:
            wait_for(lambda: capture_error(home) is not None)
            wait_for(lambda: httpx.get(f"{url}/readyz").status_code == 200)
            for path in ("readyz", "healthz"):
                (waiting,) = httpx.get(f"{url}/{path}").json()["errors"]
                assert (waiting["stream"], waiting["part"], waiting["code"], waiting["gave_up"]) == (
                    "shop", "capture", "source_unreachable", False,
                )  # fmt: skip
                assert waiting["message"]
                assert waiting["hint"]
        finally:
            command.terminate()
