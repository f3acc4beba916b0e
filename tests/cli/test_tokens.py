"""`token` as a user runs it: a token is made and shown once, listed without its secret, and revoked."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.app.homes import make_home, run
from tests.cli.in_process import command

from millstream.catalog import Catalog
from millstream.model.access import is_secret, token_parts

TWO_STREAMS = "[streams.shop]\n[streams.web]\n"


def token(home: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[bytes]:
    return command("--home", str(home), "token", *words, stdin=stdin)


def done(home: Path, *words: str) -> str:
    ended = token(home, *words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.decode()


def test_a_token_is_made_shown_once_listed_and_revoked(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home", TWO_STREAMS)
    assert json.loads(done(home, "ls", "--json")) == []
    words = ("--name", "sensors", "--stream", "shop=read,write", "--stream", "web=admin", "--expires", "30d")
    made = run(home, "token", "create", *words)
    text = made.stdout.strip()
    parts = token_parts(text)
    assert parts is not None, made.stderr
    assert "sensors: read, write on shop; admin on web, until 20" in made.stderr
    facts = json.loads(done(home, "create", "--all", "read", "--json"))
    assert token_parts(facts["token"])
    listed = json.loads(done(home, "ls", "--json"))
    assert {one["name"]: one["rights"] for one in listed} == {
        "sensors": {"shop": ["read", "write"], "web": ["admin"]},
        facts["id"]: {"*": ["read"]},
    }
    shown = done(home)
    assert "sensors" in shown
    for secret in (parts[1], facts["token"].rpartition("_")[2]):
        assert secret not in shown + json.dumps(listed)
        assert secret.encode() not in (home / "data" / "catalog.db").read_bytes()
    other = make_home(tmp_path / "other", "[streams.web]\n")
    again = ("create", "--name", "nodes", "--all", "admin", "--given")
    given = token(other, *again, stdin=f"{text}\n")
    assert (given.returncode, given.stdout) == (0, b""), given.stderr
    with Catalog(other / "data" / "catalog.db") as catalog:
        (kept,) = catalog.access_tokens()
    assert is_secret(parts[1], kept.digest)
    assert token(other, *again, stdin=text).returncode == 2
    assert token(other, *again, stdin="mst_").returncode == 2
    gone = token(home, "revoke", "sensors")
    assert (gone.returncode, gone.stdout) == (0, b"")
    assert [one["name"] for one in json.loads(done(home, "ls", "--json"))] == [facts["id"]]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["create"], "usage", "--stream S=RIGHT"),
        (["create", "--stream", "shop"], "usage", "shop=read"),
        (["create", "--stream", "shop=all"], "usage", "read, write, admin"),
        (["create", "--stream", "shpo=read"], "unknown_stream", "shop, web"),
        (["create", "--all", "read", "--expires", "soon"], "usage", "30d|7d"),
        (["create", "--all", "read", "--expires", "0s"], "usage", "30d"),
        (["create", "--all", "read", "--expires", "99999999999d"], "usage", "36500d"),
        (["revoke", "nobody"], "unknown_access_token", "token ls"),
    ],
)
def test_what_is_wrong_is_said_and_makes_nothing(tmp_path: Path, words: list[str], code: str, says: str) -> None:
    home = make_home(tmp_path / "home", TWO_STREAMS)
    ended = token(home, *words)
    assert (ended.returncode, ended.stdout) == (2, b"")
    said = ended.stderr.decode()
    assert f"error[{code}]" in said
    assert any(word in said for word in says.split("|"))
    assert json.loads(done(home, "ls", "--json")) == []
