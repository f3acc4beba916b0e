"""Connections have the encryption and the server verification that the DSN asks for.

Passwords come from where libpq finds them, and show nowhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from tests.capture.beside import wait_until
from tests.capture.capture_stage import Stage, make_config

from millstream.capture.connection import connect, describe_dsn, pinned
from millstream.catalog import Catalog, TableState
from millstream.config.model import SourceConfig, StreamConfig
from millstream.errors import MillstreamError, Retry
from millstream.testing.errors import code_of
from millstream.testing.postgres import EmbeddedPostgres

pytestmark = pytest.mark.siege

CERTIFICATES = Path(__file__).parent / "certificates"
SECRET = "s3cr&t /pa%s"
HBA = (
    "hostnossl all by_password 127.0.0.1/32 reject",
    "hostssl all by_password 127.0.0.1/32 scram-sha-256",
    "hostssl all certified 127.0.0.1/32 cert",
)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """A server with a certificate for `localhost`. The packaged 18 is built without TLS, 17 with."""
    with EmbeddedPostgres(17, fsync=False, tcp=True, hba=HBA) as made:
        owner = made.data_dir.stat()
        for name in ("server.crt", "server.key", "ca.crt"):
            target = made.data_dir / name
            shutil.copy(CERTIFICATES / name, target)
            target.chmod(0o600)
            os.chown(target, owner.st_uid, owner.st_gid)
        made.restart(settings={"ssl": "on", "ssl_ca_file": "ca.crt"})
        with made.connect() as connection:
            for role in ("by_password", "certified"):
                connection.execute(f"CREATE ROLE {role} LOGIN REPLICATION SUPERUSER")
            connection.execute(f"ALTER ROLE by_password PASSWORD '{SECRET}'")
        yield made


@pytest.fixture
def stage(server: EmbeddedPostgres, tmp_path: Path) -> Iterator[Stage]:
    name = f"tls_{os.getpid()}_{threading.get_ident() % 9973}"
    server.create_database(name)
    catalog = Catalog(tmp_path / "catalog.db")
    catalog.resolve_stream("shop")
    made = Stage(server.dsn(name), tmp_path, catalog, make_config(server.dsn(name), tmp_path, name))
    made.sql("CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1)")
    yield made
    for running in made.running:
        running.end()
    made.log.close()
    catalog.close()
    server.drop_database(name)


def tls(server: EmbeddedPostgres, stage: Stage, role: str, host: str = "localhost", **parameters: str) -> str:
    facts = {"hostaddr": "127.0.0.1", "sslrootcert": str(CERTIFICATES / "ca.crt"), "sslmode": "verify-full"}
    password = f":{quote(SECRET, safe='')}" if role == "by_password" else ""
    return f"postgresql://{role}{password}@{host}:{server.port}/{stage.config.slot}?{urlencode(facts | parameters)}"


def key_of(folder: Path) -> dict[str, str]:
    """Return the client's certificate, and its key as libpq requires it: readable only by its owner."""
    key = folder / "client.key"
    shutil.copy(CERTIFICATES / "client.key", key)
    key.chmod(0o600)
    return {"sslcert": str(CERTIFICATES / "client.crt"), "sslkey": str(key)}


def refused(stage: Stage, dsn: str) -> MillstreamError:
    with pytest.raises(MillstreamError) as found:
        replace(stage, config=replace(stage.config, dsn=dsn)).catch_up()
    assert found.value.hint
    for shown in (str(found.value), repr(found.value), repr(found.value.as_dict())):
        assert SECRET not in shown
        assert quote(SECRET, safe="") not in shown
    return found.value


def test_every_connection_of_a_capture_is_encrypted_and_sure_of_its_server(
    server: EmbeddedPostgres, stage: Stage
) -> None:
    stage.config = replace(stage.config, dsn=tls(server, stage, "by_password"))
    running = stage.start()
    wait_until(lambda: running.ended or stage.state("public.orders") is TableState.STREAMING, "it is copied")
    with server.connect() as connection:
        rows = connection.execute(
            "SELECT application_name, ssl FROM pg_stat_activity JOIN pg_stat_ssl USING (pid) WHERE usename = 'by_password'"
        ).fetchall()
    assert {"millstream stream", "millstream control", "millstream watch"} <= {row[0] for row in rows}
    assert all(row[1] for row in rows)
    running.stop()
    assert stage.log.replay()["public.orders"] == {("1",): {"id": "1"}}


def test_a_server_that_is_not_whom_it_says_is_refused(server: EmbeddedPostgres, stage: Stage, tmp_path: Path) -> None:
    for wrong in (
        tls(server, stage, "by_password", sslrootcert=str(CERTIFICATES / "other-ca.crt")),
        tls(server, stage, "by_password", "elsewhere.example"),
        tls(server, stage, "by_password", sslrootcert=str(tmp_path / "missing.crt")),
        server.dsn(stage.config.slot, sslmode="require", host="127.0.0.1", port=str(server.port)).replace(
            "sslmode=require", f"sslmode=verify-ca&sslrootcert={CERTIFICATES / 'other-ca.crt'}"
        ),
    ):
        error = refused(stage, wrong)
        assert code_of(error) == "source_tls_failed", error
        assert error.retry is Retry.OPERATOR
    assert (
        code_of(refused(stage, tls(server, stage, "by_password", sslmode="disable"))) == "source_authentication_failed"
    )


def test_a_client_certificate_lets_in_and_a_missing_one_does_not(
    server: EmbeddedPostgres, stage: Stage, tmp_path: Path
) -> None:
    key = key_of(tmp_path)
    assert code_of(refused(stage, tls(server, stage, "certified"))) == "source_tls_failed"
    Path(key["sslkey"]).chmod(0o644)
    assert code_of(refused(stage, tls(server, stage, "certified", **key))) == "source_tls_failed", (
        "others may read the key"
    )
    Path(key["sslkey"]).chmod(0o600)
    stage.config = replace(stage.config, dsn=tls(server, stage, "certified", **key))
    assert stage.catch_up().caught_up


def test_where_an_address_was_pinned_to_one_server_the_rest_of_it_stays(server: EmbeddedPostgres, stage: Stage) -> None:
    several = tls(server, stage, "by_password", "localhost", target_session_attrs="read-write")
    with connect(several, purpose="test") as connection:
        once = pinned(several, connection)
    assert describe_dsn(once) == describe_dsn(several)
    with connect(once, purpose="test") as connection:
        assert connection.info.get_parameters()["sslmode"] == "verify-full"


class Way:
    """A way to give a password, by the configuration and the environment."""

    def __init__(self, dsn: str, **environ: str) -> None:
        self.dsn, self.environ = dsn, environ


def ways(server: EmbeddedPostgres, stage: Stage, folder: Path, password: str) -> dict[str, Way]:
    plain = f"postgresql://by_password@127.0.0.1:{server.port}/{stage.config.slot}?sslmode=require"
    pgpass, service = folder / "pgpass", folder / "service.conf"
    pgpass.write_text(f"127.0.0.1:{server.port}:*:by_password:{password.replace(':', chr(92) + ':')}\n")
    pgpass.chmod(0o600)
    service.write_text(
        f"[shop]\nhost=127.0.0.1\nport={server.port}\nuser=by_password\ndbname={stage.config.slot}\n"
        f"sslmode=require\npassword={password}\n"
    )
    return {
        "in the DSN": Way(plain.replace("by_password@", f"by_password:{quote(password, safe='')}@")),
        "by a variable": Way(plain.replace("by_password@", "by_password:${SHOP_PASSWORD}@"), SHOP_PASSWORD=password),
        "in a pgpass file": Way(plain, PGPASSFILE=str(pgpass)),
        "by a service": Way("service=shop", PGSERVICEFILE=str(service)),
        "by PGPASSWORD": Way(plain, PGPASSWORD=password),
    }


def command(home: Path, way: Way, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millstream.cli", "--home", str(home), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HOME": "/nonexistent", "MILLSTREAM_LOG_LEVEL": "debug", **way.environ},
    )


@pytest.mark.parametrize("which", ["in the DSN", "by a variable", "in a pgpass file", "by a service", "by PGPASSWORD"])
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_a_password_works_from_wherever_it_comes_and_is_shown_nowhere(
    server: EmbeddedPostgres, stage: Stage, tmp_path: Path, which: str, right: bool
) -> None:
    password = SECRET if right else "wr0ng&/pw"
    way = ways(server, stage, tmp_path, password)[which]
    home = tmp_path / "home"
    home.mkdir()
    (home / "millstream.toml").write_text(
        f"[streams.shop.source]\ndsn = '{way.dsn}'\nslot = '{stage.config.slot}_h'\n[streams.shop.lake]\nlocation = 'lake'\n"
    )
    told = []
    commands = [("config", "show"), ("slot", "drop", "--yes")]
    # The slower ones run once each: what they show doesn't depend on the password's source.
    if which == "by a variable":
        commands += [("doctor", "--sql"), ("status", "--json"), ("diff",)]
    for words in commands:
        ended = command(home, way, *words)
        told.append((words, ended.returncode, ended.stdout + ended.stderr))
    if not right and which in {"in the DSN", "by a service"}:
        ended = command(home, way, "run", "--until-caught-up", "--log-format", "json")
        told.append((("run",), ended.returncode, ended.stdout + ended.stderr))
        assert "source_authentication_failed" in ended.stdout + ended.stderr
    by_words = {words[0]: (code, text) for words, code, text in told}
    assert (by_words["slot"][0] == 0) is right, by_words["slot"]
    for words, _, text in told:
        for secret in (password, quote(password, safe=""), repr(password)[1:-1]):
            assert secret not in text, (words, text)
    if which != "in the DSN":
        kept = [path for path in home.rglob("*") if path.is_file() and password.encode() in path.read_bytes()]
        assert kept == []


def test_a_password_that_changes_in_its_file_is_read_at_the_next_connection(
    server: EmbeddedPostgres, stage: Stage, tmp_path: Path
) -> None:
    """One in the DSN is not, and the hint said nothing of a restart."""

    def change_to(password: str) -> None:
        with server.connect() as connection:
            connection.execute(f"ALTER ROLE by_password PASSWORD '{password}'")

    by_file = f"{ways(server, stage, tmp_path, SECRET)['in a pgpass file'].dsn}&passfile={tmp_path / 'pgpass'}"
    stage.config = replace(stage.config, dsn=by_file)
    assert stage.catch_up().caught_up
    change_to("the next")
    try:
        for dsn in (by_file, tls(server, stage, "by_password")):
            assert "restart Millstream" in refused(stage, dsn).hint
        ways(server, stage, tmp_path, "the next")
        assert stage.catch_up().caught_up
    finally:
        change_to(SECRET)


def test_a_configuration_shows_no_secret_when_it_is_printed() -> None:
    source = SourceConfig(dsn=f"postgresql://app:{quote(SECRET, safe='')}@h/db")
    assert "tables" in repr(source)
    for shown in (
        repr(source),
        str(source),
        repr(StreamConfig(source=source)),
        repr(make_config(source.dsn, Path(), "s")),
    ):
        assert SECRET not in shown
        assert quote(SECRET, safe="") not in shown
