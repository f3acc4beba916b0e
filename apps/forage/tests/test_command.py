"""`millstream-forage` as a process: its exit codes, its home, and exports next to a running server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from apps.forage.tests.bodies import ENTRY
from click.testing import CliRunner

from millstream_forage.cli import main, policies_of
from millstream_forage.errors import InvalidField

COMMAND = [sys.executable, "-c", "from millstream_forage.cli import main; main()"]
NOW = "2026-03-01T12:00:00Z"
NOW_NS = 1_772_366_400_000_000_000


@contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server; yield its process and address. It is killed at the end if it still runs."""
    environment = os.environ | {"FORAGE_NOW": NOW}
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *arguments], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on http://127.0.0.1:"), line
            yield process, line.split()[-1]
        finally:
            process.kill()


def run(*arguments: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and its output."""
    done = CliRunner().invoke(main, arguments)
    return done.exit_code, done.output


@pytest.mark.long
def test_a_killed_server_gives_the_same_preview_and_exports_work_next_to_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    path = "/feed?user=1&seed=5&preview=true"
    with served("--home", str(home)) as (process, address):
        feed = httpx.get(f"{address}/feed?user=1&seed=4").json()
        assert feed["now"] == NOW_NS
        chosen, skipped = feed["items"][:2]
        for item, kind in ((chosen, "save"), (skipped, "skip")):
            body = {"user_id": 1, "item_id": item["item_id"], "impression_id": item["impression_id"]}
            assert httpx.post(f"{address}/signal", json=body | {"signal_type": kind}).status_code == 200
        preview = httpx.get(address + path).content
        code, output = run("serve", "--home", str(home), "--port", address.rsplit(":", 1)[1])
        assert (code, "error[home_busy]" in output) == (1, True)
        code, output = run("export", "--home", str(home), "--since", NOW, "--with-impressions")
        assert code == 0
        saved, _ = map(json.loads, output.splitlines())
        assert saved == {
            "entity_id": chosen["item_id"],
            "signal_type": "save",
            "weight": 1.0,
            "timestamp_ns": NOW_NS,
            "user_id": 1,
            "slot": 1,
            "propensity": chosen["propensity"],
            "policy": feed["policy"],
        }
        process.kill()
    with served("--home", str(home), "--no-corpus") as (process, address):
        assert httpx.get(address + path).content == preview
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    code, output = run("export", "--home", str(home), "--until", str(NOW_NS + 1), "--pairs", "--limit", "2")
    pairs = [json.loads(line) for line in output.splitlines()]
    assert [(pair["chosen"], pair["reason"]) for pair in pairs] == [
        (chosen["item_id"], "skip"),
        (chosen["item_id"], "ignored"),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--home", "h", "--ephemeral"],
        ["serve", "--port", "65536"],
        ["export", "--home", "h"],
        ["export", "--since", "0"],
        ["export", "--home", "h", "--since", "yesterday"],
        ["export", "--home", "h", "--since", "5", "--until", "5"],
        ["export", "--home", "h", "--since", "5", "--kind", "like"],
        ["export", "--home", "h", "--since", "5", "--limit", "0"],
        ["export", "--home", "h", "--since", "5", "--user", "-1"],
        ["export", "--home", "h", "--since", "5", "--pairs", "--with-impressions"],
    ],
)
def test_a_wrong_use_is_2(arguments: list[str]) -> None:
    code, output = run(*arguments)
    assert (code, "Error: " in output) == (2, True)


def test_a_wrong_moment_in_the_environment_is_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORAGE_NOW", "soon")
    code, output = run("serve", "--ephemeral")
    assert (code, "FORAGE_NOW" in output) == (2, True)


def test_errors_are_1_with_their_code(tmp_path: Path) -> None:
    code, output = run("export", "--home", str(tmp_path), "--since", "0")
    assert (code, "error[home_not_found]" in output) == (1, True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        code, output = run("serve", "--home", str(tmp_path), "--port", str(taken.getsockname()[1]))
    assert (code, "error[address_in_use]" in output) == (1, True)


def test_sources_are_read_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "items.json").write_text(json.dumps([ENTRY, ENTRY | {"url": "https://tides.example/5", "words": 0}]))
    sources = tmp_path / "sources.toml"
    sources.write_text('[[sources]]\nname = "Tides"\njson = "items.json"\ncategory = "sea"\n')
    code, output = run("discover", str(sources), "--home", str(tmp_path / "home"))
    assert (code, output.splitlines()[-1]) == (0, "added 1, known 0, refused 1")
    assert "refused https://tides.example/5 of Tides: " in output
    with sources.open("a") as more:
        more.write('[[sources]]\nname = "Gone"\njson = "gone.json"\ncategory = "sea"\n')
    code, output = run("discover", str(sources), "--home", str(tmp_path / "home"))
    assert (code, output.splitlines()[-1]) == (1, "added 0, known 1, refused 2")
    assert f"can't read Gone: {tmp_path / 'gone.json'}: No such file" in output
    code, output = run("discover", str(tmp_path / "none.toml"), "--home", str(tmp_path / "home"))
    assert (code, "error[registry_unreadable]" in output) == (1, True)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"a": 1}',
        '{"a": {"sea/Tides": "x"}}',
        '{"a": {"sea/Tides": 2}}',
        pytest.param("[" * 10**5, id="deep"),
    ],
)
def test_policies_that_do_not_fit_are_refused_before_spark_starts(tmp_path: Path, text: str) -> None:
    (tmp_path / "policies.json").write_text(text)
    with pytest.raises(InvalidField, match="policies"):
        policies_of(tmp_path / "policies.json")
    with pytest.raises(InvalidField, match="can't be read"):
        policies_of(tmp_path)


def test_the_batch_side_names_the_extra_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    code, output = run("batch", "--home", str(tmp_path))
    assert (code, "error[spark_missing]" in output, "millstream-forage[spark]" in output) == (1, True, True)
