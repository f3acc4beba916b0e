"""Back up and restore a home with the very commands of docs/how-to/back-up-and-restore.md."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.app.homes import config, done, make_home, run

from millstream.testing.pytest_plugin import Database

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "how-to" / "back-up-and-restore.md"


def by_the_page(word: str, folder: Path) -> None:
    """Run the page's command that contains the word, in a folder that holds the home `shop`."""
    commands = [line.removeprefix("$ ") for line in PAGE.read_text().splitlines() if line.startswith("$ ")]
    command = next(command for command in commands if word in command)
    subprocess.run(["sh", "-c", command], cwd=folder, check=True)


def ids(home: Path) -> list[int]:
    records = map(json.loads, done(home, "wal", "cat").splitlines())
    return sorted({record["row"]["id"] for record in records if record["row"] is not None})


def test_a_restored_home_has_what_it_had_and_goes_on(tmp_path: Path) -> None:
    home = make_home(tmp_path / "shop", '[streams.shop.keys]\n"public.clicks" = ["id"]\n')
    assert run(home, "append", "clicks", stdin='{"id": 1}\n{"id": 2}\n').returncode == 0
    assert ids(home) == [1, 2]
    by_the_page("--create", tmp_path)
    run(home, "append", "clicks", stdin='{"id": 3}\n')
    by_the_page("--extract", tmp_path)
    restored = tmp_path / "restored" / "shop"
    assert "all is well" in done(restored, "wal", "verify")
    assert ids(restored) == [1, 2]
    assert run(restored, "append", "clicks", stdin='{"id": 4}\n').returncode == 0
    assert ids(restored) == [1, 2, 4]


@pytest.mark.siege
def test_a_captured_stream_that_was_restored_says_what_it_lacks_and_is_copied_again(
    tmp_path: Path, postgres: Database
) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
        connection.execute("INSERT INTO orders SELECT generate_series(1, 20)")
    home = make_home(tmp_path / "shop", config(postgres.dsn, None))
    done(home, "capture", "run", "--until-caught-up")
    by_the_page("--create", tmp_path)
    with postgres.connect() as connection:
        connection.execute("INSERT INTO orders SELECT generate_series(21, 40)")
    done(home, "capture", "run", "--until-caught-up")
    by_the_page("--extract", tmp_path)
    restored = tmp_path / "restored" / "shop"
    ended = run(restored, "capture", "run", "--until-caught-up")
    assert ended.returncode == 1
    assert "slot_ahead" in ended.stderr
    assert ids(restored) == list(range(1, 21))
    done(restored, "slot", "drop", "--yes")
    done(restored, "capture", "run", "--until-caught-up")
    assert ids(restored) == list(range(1, 41))
