"""TLS and client certificates with a real server: accepted clients, refused settings, and renewal during calls."""

from __future__ import annotations

import datetime as dt
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from tests.app.homes import done, make_home, run, wait_for
from tests.serving.servers import Authority, served

from millstream.errors import AccessError
from millstream.home.home import Home
from millstream.serving.bind_check import check_protected, is_loopback
from millstream.serving.tls_files import Certificates, Renewal
from millstream.testing.errors import coded

CERTIFICATE = "MILLSTREAM_HTTP__TLS_CERTIFICATE"
KEY = "MILLSTREAM_HTTP__TLS_KEY"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    folder = tmp_path / "pki"
    folder.mkdir()
    return Authority(folder)


def test_a_home_is_served_with_tls_and_tokens_and_certificates_stand_for_tokens(
    tmp_path: Path, authority: Authority
) -> None:
    others = tmp_path / "others"
    others.mkdir()
    stranger = Authority(others)
    certificate, key = authority.issue("server")
    text = f"""
[streams.shop]
[http]
listen = "0.0.0.0:0"
tokens_required = true
tls_certificate = "{certificate}"
tls_key = "{key}"
client_ca = "{authority.file}"
[http.clients]
"grafana.example.com" = "grafana"
"plain" = "grafana"
"""
    home = make_home(tmp_path / "home", text)
    done(home, "token", "create", "--name", "grafana", "--all", "read")
    sensor = done(home, "token", "create", "--name", "sensor", "--stream", "shop=write").strip()
    named = authority.client(authority.issue("named", ["grafana.example.com", "b.example.com"], common_name="x"))
    common = authority.client(authority.issue("common", [], common_name="plain"))
    unknown = authority.client(authority.issue("unknown", ["loader.example.com"]))
    with served(home, MILLSTREAM_HTTP__LISTEN="0.0.0.0:0") as server:
        port = server.address.rpartition(":")[2]

        def status(context: ssl.SSLContext, **headers: str) -> int:
            with httpx.Client(verify=context, timeout=60) as client:
                return client.get(f"https://127.0.0.1:{port}/status", headers=headers).status_code

        assert status(named) == status(common) == 200
        assert status(unknown) == 401
        assert status(named, Authorization=f"Bearer {sensor}") == 403
        assert status(named, Authorization="Bearer mst_wrong") == 401
        for context in (authority.client(), stranger_to(authority, stranger)):
            with pytest.raises((httpx.HTTPError, ssl.SSLError)):
                status(context)
        done(home, "token", "revoke", "grafana")
        wait_for(lambda: status(named) == 401)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/status", timeout=60)
    assert sensor.rpartition("_")[2] not in repr(server.said)


def stranger_to(authority: Authority, stranger: Authority) -> ssl.SSLContext:
    """Return a client that trusts the server, with a certificate of a known name from an unknown authority."""
    return authority.client(stranger.issue("named", ["grafana.example.com"]))


def test_a_renewed_certificate_is_taken_while_it_runs_and_a_broken_one_is_not(
    tmp_path: Path, authority: Authority
) -> None:
    home = make_home(tmp_path / "home", "[streams.shop]\n")
    certificate, key = authority.issue("server")
    first = certificate.read_bytes()
    with served(home, **{CERTIFICATE: str(certificate), KEY: str(key)}) as server:
        host, _, port = server.address.rpartition(":")

        def seen() -> str:
            return ssl.get_server_certificate((host, int(port)))

        assert seen().strip() in first.decode()
        other, other_key = authority.issue("other")
        other.replace(certificate)  # doesn't match its key yet, as while an operator copies one after the other
        wait_for(lambda: any("can't be used" in event for event in server.events()))
        assert seen().strip() in first.decode()
        renewed = certificate.read_text()
        other_key.replace(key)
        wait_for(lambda: seen().strip() in renewed)


@pytest.mark.long
def test_other_authorities_of_clients_are_taken_while_it_runs(tmp_path: Path, authority: Authority) -> None:
    """A removed authority's clients were accepted until the server was restarted."""
    (tmp_path / "second").mkdir()
    second = Authority(tmp_path / "second")
    certificate, key = authority.issue("server")
    clients = tmp_path / "clients.pem"
    clients.write_bytes(authority.file.read_bytes())
    home = make_home(tmp_path / "home", f"[streams.shop]\n[http]\nclient_ca = '{clients}'\n")
    with served(home, **{CERTIFICATE: str(certificate), KEY: str(key)}) as server:

        def is_heard(shown: Authority) -> bool:
            try:
                context = authority.client(shown.issue("client", ["loader.example.com"]))
                return httpx.get(f"https://{server.address}/readyz", verify=context, timeout=60).status_code == 200
            except httpx.RequestError:
                return False

        assert (is_heard(authority), is_heard(second)) == (True, False)
        clients.write_text("nothing")
        wait_for(lambda: any("can't be used" in event for event in server.events()), seconds=60)
        assert (is_heard(authority), is_heard(second)) == (True, False)
        clients.write_bytes(second.file.read_bytes())
        wait_for(lambda: is_heard(second), seconds=60)
        assert not is_heard(authority)


def test_files_that_are_written_again_as_they_were_renew_nothing(tmp_path: Path, authority: Authority) -> None:
    """A tool that rewrites unchanged files at every run made Flight restart its listener, and end its calls."""
    certificate, key = authority.issue("server")
    certificates = Certificates(certificate, key, authority.file)
    renewal = Renewal(certificates, certificates.server_context())
    for file in (certificate, key, authority.file):
        (tmp_path / "again").write_bytes(file.read_bytes())
        (tmp_path / "again").replace(file)
        assert not renewal.look()
    other, other_key = authority.issue("other")
    other.replace(certificate)
    assert not renewal.look(), "it isn't its key's yet"
    other_key.replace(key)
    assert renewal.look()
    assert not renewal.look()


def test_files_that_vanish_between_two_reads_are_looked_at_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that looks at them ended, and no later certificate was taken."""
    certificate, key = authority.issue("server")
    certificates = Certificates(certificate, key, None)
    renewal = Renewal(certificates, certificates.server_context())
    other, other_key = authority.issue("other")
    other.replace(certificate)
    other_key.replace(key)

    def vanishes(_: Certificates, __: ssl.SSLContext) -> None:
        raise FileNotFoundError(2, "No such file", str(certificate))

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Certificates, "renew", vanishes)
        assert not renewal.look()
    assert renewal.look()
    assert not renewal.look()


def moment(days: int) -> dt.datetime:
    return dt.datetime.now(dt.UTC) + dt.timedelta(days=days)


def test_what_can_not_be_used_is_said_with_the_file_s_name(tmp_path: Path, authority: Authority) -> None:
    good, key = authority.issue("good")
    other, other_key = authority.issue("other")
    expired = authority.issue("expired", not_before=moment(-9), not_after=moment(-1))
    early = authority.issue("early", not_before=moment(2), not_after=moment(9))
    junk = tmp_path / "junk.pem"
    junk.write_text("-----BEGIN CERTIFICATE-----\nnothing\n")
    locked = tmp_path / "locked.key"
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x"))
    locked.write_bytes(plain.private_bytes(*form))
    for files, at_fault, says in (
        (Certificates(tmp_path / "none.pem", key), tmp_path / "none.pem", "No such file"),
        (Certificates(good, tmp_path / "none.key"), tmp_path / "none.key", "No such file"),
        (Certificates(good, other_key), other_key, f"isn't the key of {good}"),
        (Certificates(*expired), expired[0], "has expired"),
        (Certificates(*early), early[0], "not yet valid"),
        (Certificates(junk, key), junk, "no certificate and key"),
        (Certificates(good, locked), locked, "passphrase"),
        (Certificates(good, key, junk), junk, "no certificates that can be read"),
        (Certificates(good, key, tmp_path / "none.ca"), tmp_path / "none.ca", "No such file"),
    ):
        with pytest.raises(AccessError, check=coded("certificate_unusable"), match=says) as caught:
            files.server_context()
        assert caught.value.details["file"] == str(at_fault)
    assert Certificates(other, other_key, authority.file).server_context().verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("listen", "extra", "missing"),
    [
        ("0.0.0.0:0", "", ["tls_certificate", "tls_key", "tokens_required"]),
        (":0", "", ["tls_certificate", "tls_key", "tokens_required"]),
        ("[::]:0", "", ["tls_certificate", "tls_key", "tokens_required"]),
        ("0.0.0.0:0", "tokens_required = true\n", ["tls_certificate", "tls_key"]),
        ("0.0.0.0:0", "tls_certificate = 'a'\ntls_key = 'b'\n", ["tokens_required"]),
    ],
)
def test_nothing_listens_for_other_machines_without_tls_and_tokens(
    tmp_path: Path, listen: str, extra: str, missing: list[str]
) -> None:
    http = Home(make_home(tmp_path / "home", f"[streams.shop]\n[http]\nlisten = '{listen}'\n{extra}")).config.http
    with pytest.raises(AccessError, check=coded("unprotected")) as refused:
        check_protected("http", http.address, http)
    hint = refused.value.hint
    assert [name for name in ("tls_certificate", "tls_key", "tokens_required") if name in hint] == missing


def test_a_server_that_would_is_refused_at_its_start(tmp_path: Path) -> None:
    ended = run(make_home(tmp_path / "home", "[streams.shop]\n[http]\nlisten = ':0'\n"), "serve")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "error[unprotected]" in ended.stderr
    assert "hint: Set tls_certificate, tls_key, tokens_required = true in [http]" in ended.stderr


def test_this_machine_s_own_addresses_are_told_from_others() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.0.2.1", "nothing.invalid", "")] == [False] * 5
