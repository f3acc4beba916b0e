"""A stream that leaves the configuration leaves a slot at its source, which is named until it is dropped."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import done, make_home, run

SHOP = "[streams.shop.source]\ndsn = {dsn!r}\nslot = '{slot}'\n"
CAPTURE = ("capture", "run", "--until-caught-up")


@pytest.fixture
def shop(postgres: Any, tmp_path: Path) -> Path:
    """Return a home that has captured a table."""
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY); INSERT INTO orders VALUES (1)")
    home = make_home(tmp_path / "home", SHOP.format(dsn=postgres.dsn, slot=postgres.name))
    done(home, *CAPTURE)
    return home


def edit(home: Path, old: str, new: str) -> None:
    file = home / "millstream.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def left(home: Path) -> list[dict[str, Any]]:
    conditions = json.loads(done(home, "status", "--json"))["conditions"]
    return [condition for condition in conditions if condition["kind"] == "slot_left"]


def at_source(postgres: Any) -> tuple[set[str], set[str]]:
    """Return the names of the database's slots, and of its publications."""
    slots = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    with postgres.connect() as connection:
        found = [connection.execute(query).fetchall() for query in (slots, "SELECT pubname FROM pg_publication")]
    return {name for (name,) in found[0]}, {name for (name,) in found[1]}


def test_a_renamed_stream_leaves_a_slot_that_is_named_until_its_command_drops_it(postgres: Any, shop: Path) -> None:
    """It was left without a word, kept its source's WAL for ever, and no command dropped it."""
    assert left(shop) == []
    edit(shop, "streams.shop", "streams.store")
    edit(shop, f"'{postgres.name}'", f"'{postgres.name}_b'")
    (condition,) = left(shop)
    assert (condition["stream"], condition["subject"]) == ("shop", postgres.name)
    assert postgres.name in condition["message"]
    assert condition["is_alert"]
    found = re.search(r"`millstream (slot drop .*?)`", condition["hint"])
    assert found is not None
    assert condition["message"] in run(shop, "doctor", "--quiet").stdout
    started = run(shop, *CAPTURE)
    assert started.returncode == 0, started.stderr
    assert "slot_left: " in started.stderr
    assert found[1] in started.stderr

    done(shop, *shlex.split(found[1]), "--yes")
    store = {"millstream_store", "millstream_store_inserts"}
    assert at_source(postgres) == ({f"{postgres.name}_b"}, store)
    assert json.loads(done(shop, "status", "--json"))["conditions"] == []
    assert len(done(shop, "wal", "cat", "--stream", "shop").splitlines()) == 1, "the log keeps its records"
    assert "slot_left" not in run(shop, *CAPTURE).stderr

    edit(shop, "streams.store", "streams.shop")
    assert [one["stream"] for one in left(shop)] == [], "another stream has its slot now"
    edit(shop, f"'{postgres.name}_b'", f"'{postgres.name}'")
    done(shop, *CAPTURE)
    assert [one["stream"] for one in left(shop)] == ["store"]
    records = [json.loads(line) for line in done(shop, "wal", "cat", "--stream", "shop").splitlines()]
    assert [record["row"]["id"] for record in records if record["op"] == "r"] == [1, 1], "it is copied again"


def test_a_stream_that_is_given_another_slot_leaves_the_old_one(postgres: Any, shop: Path) -> None:
    edit(shop, f"'{postgres.name}'", f"'{postgres.name}_b'")
    done(shop, "slot", "drop", "--yes")  # as the refused start says
    done(shop, *CAPTURE)
    (condition,) = left(shop)
    assert (condition["stream"], condition["subject"]) == ("shop", postgres.name)
    done(shop, "slot", "drop", "--slot", postgres.name, "--yes")
    slots, publications = at_source(postgres)
    assert slots == {f"{postgres.name}_b"}
    assert publications == {"millstream_shop", "millstream_shop_inserts"}, "the stream goes on with them"
    assert left(shop) == []
    with postgres.connect() as connection:
        connection.execute("INSERT INTO orders VALUES (2)")
    done(shop, *CAPTURE)
    records = [json.loads(line) for line in done(shop, "wal", "cat").splitlines()]
    assert [record["row"]["id"] for record in records if record["op"] == "c"] == [2]


def test_a_left_slot_of_a_source_that_no_stream_has_is_dropped_by_its_address(postgres: Any, shop: Path) -> None:
    with postgres.connect() as connection:
        connection.execute("COMMENT ON PUBLICATION millstream_shop IS 'ours, says the DBA'")
    (shop / "millstream.toml").write_text("[streams.web]\n")
    drop = ("slot", "drop", "--stream", "shop", "--yes")
    refused = run(shop, *drop)
    assert refused.returncode == 2
    assert "--source DSN" in refused.stderr
    elsewhere = run(shop, *drop, "--source", postgres.dsn.replace(postgres.name, "postgres"))
    assert elsewhere.returncode == 2
    assert "another database" in elsewhere.stderr
    assert at_source(postgres)[0] == {postgres.name}
    dropped = run(
        shop, *drop, "--source", postgres.dsn.replace(postgres.name, "${SHOP_DATABASE}"), SHOP_DATABASE=postgres.name
    )
    assert dropped.returncode == 0, dropped.stderr
    assert at_source(postgres) == (set(), {"millstream_shop"})
    assert 'DROP PUBLICATION IF EXISTS "millstream_shop";' in dropped.stderr
    assert left(shop) == []
