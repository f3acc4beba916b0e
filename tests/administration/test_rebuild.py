"""Rebuild tables from history and from the source, and replay ranges: as commands, with nothing else running."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest
from deltalake import DeltaTable, write_deltalake
from tests.app.homes import run
from tests.app.landed import LandedHome

from millstream import open as millstream_open
from millstream.administration.rebuild import await_outcome, rebuild_table, replay_table
from millstream.app.table_status import quarantine_of
from millstream.catalog.rebuilds import RebuildRequest, Rebuilds
from millstream.errors import HomeBusy, LakeBehind, LakeError, PositionError, UnknownTable, UsageError
from millstream.home.home import Home
from millstream.model.ids import StreamId, TableId
from millstream.testing.errors import coded
from millstream.testing.pytest_plugin import Database

TABLES = (
    "CREATE TABLE items (id int PRIMARY KEY, note text)",
    "INSERT INTO items SELECT i, 'old' FROM generate_series(1, 50) i",
    "CREATE TABLE keyless (a int)",
    "INSERT INTO keyless VALUES (1)",
)


@pytest.fixture
def home(postgres: Database, tmp_path: Path) -> LandedHome:
    with postgres.connect() as source:
        for statement in TABLES:
            source.execute(statement)
    home = LandedHome(tmp_path / "shop", postgres.dsn)
    home.catch_up()
    with postgres.connect() as source:
        source.execute(
            "UPDATE items SET note = 'new' WHERE id <= 5; DELETE FROM items WHERE id = 50; INSERT INTO keyless VALUES (2)"
        )
    home.catch_up()
    return home


def millstream(home: LandedHome, *words: str) -> subprocess.CompletedProcess[str]:
    return run(home.home.path, *words)


def folder(home: LandedHome, view: str) -> Path:
    return home.home.path / "lake" / "shop" / view / "public.items"


def rows(home: LandedHome) -> dict[int, str]:
    found = DeltaTable(folder(home, "current")).to_pyarrow_table().to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row["note"] for row in found}


EXPECTED = {n: "new" if n <= 5 else "old" for n in range(1, 50)}


def test_a_table_that_somebody_else_wrote_into_is_built_anew_from_its_history(home: LandedHome) -> None:
    write_deltalake(folder(home, "current"), DeltaTable(folder(home, "current")).to_pyarrow_table(), mode="append")
    done = millstream(home, "pipeline", "rebuild", "public.items", "--json")
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)
    assert told == {"view": "current", "rows": 49, "set_aside": f"{folder(home, 'current')}.set-aside-1"}
    assert rows(home) == EXPECTED
    assert "is built" in done.stderr
    asked = millstream(home, "query", "select count(*) n from public.items", "--format", "csv")
    assert asked.stdout.split() == ["n", "49"]


@pytest.mark.sampled
@pytest.mark.parametrize("damage", ["files", "folder"])
def test_a_damaged_history_sends_to_the_source_and_begins_anew_there(
    home: LandedHome, postgres: Database, damage: str
) -> None:
    with millstream_open(home.home.path) as opened:
        newest = opened.lake().token
    if damage == "folder":
        shutil.rmtree(folder(home, "history"))
    else:
        for file in folder(home, "history").glob("*/*.parquet"):
            file.unlink()
    done = millstream(home, "pipeline", "rebuild", "public.items")
    assert done.returncode == 1
    assert "--from source" in done.stderr
    with postgres.connect() as source:
        source.execute("DELETE FROM items WHERE id = 7")
    done = millstream(home, "pipeline", "rebuild", "public.items", "--from", "source")
    assert done.returncode == 0, done.stderr
    assert (f"{folder(home, 'history')}.set-aside-1" in done.stderr) == (damage == "files")
    assert rows(home) == EXPECTED, "the table stays as it was until the copy is whole"
    home.catch_up()
    assert rows(home) == {n: note for n, note in EXPECTED.items() if n != 7}
    with pytest.raises(LakeError, check=coded("lake_history_lost"), match="have been dropped"):
        rebuild_table(home.home, "public.items")
    with (
        millstream_open(home.home.path) as opened,
        pytest.raises(PositionError, check=coded("beyond_retention"), match=str(newest)) as caught,
    ):
        opened.query("FROM public.items", as_of=f"{newest.stream}.s{newest.minimum - 1}")
    assert "the history was restarted then" in caught.value.hint
    assert "history_retention" not in caught.value.hint


@pytest.mark.long
def test_a_table_that_is_rebuilt_from_the_source_says_so_until_its_copy_has_landed(
    home: LandedHome, postgres: Database
) -> None:
    """The command failed: the table's past was beyond retention, although the caller hadn't asked for it."""
    with postgres.connect() as source:
        source.execute("UPDATE items SET note = 'newer' WHERE id = 9")
    home.capture()
    home.land(fold=False)  # rows that the old table lacks go with the old history
    for file in folder(home, "history").glob("*/*.parquet"):
        file.unlink()
    done = millstream(home, "pipeline", "rebuild", "public.items", "--from", "source")
    assert done.returncode == 0, done.stderr
    with millstream_open(home.home.path) as opened:
        assert opened.query("SELECT 1 AS n").to_pylist() == [{"n": 1}]
        with pytest.raises(
            LakeBehind, match=r"public\.items is being rebuilt from its source: it is copy requested"
        ) as caught:
            opened.query("FROM items")
        assert "millstream tables" in caught.value.hint
    home.catch_up()
    with millstream_open(home.home.path) as opened:
        assert opened.query("SELECT count(*) AS n FROM items").to_pylist() == [{"n": 49}]


def test_what_can_not_be_rebuilt_is_said_by_name(home: LandedHome) -> None:
    with pytest.raises(UnknownTable):
        rebuild_table(home.home, "public.nothing")
    with pytest.raises(UsageError, match="history only"):
        rebuild_table(home.home, "public.keyless")
    with pytest.raises(UsageError, match="no scd2"):
        rebuild_table(home.home, "public.items", views=["scd2"])
    with home.home.open_catalog() as catalog:
        assert quarantine_of(catalog, catalog.stream("shop").id).all() == {}


def test_an_error_of_the_work_is_told_to_whoever_asked(home: LandedHome, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise LakeError("the disk is full", hint="Make room.")

    monkeypatch.setattr("millstream.lake.damaged_tables.rebuild_view", full)
    with pytest.raises(LakeError, match="the disk is full") as caught:
        rebuild_table(home.home, "public.items")
    assert caught.value.hint == "Make room."
    monkeypatch.undo()
    assert [view.rows for view in rebuild_table(home.home, "public.items")] == [49]


@pytest.mark.long
def test_a_range_of_time_becomes_a_table(home: LandedHome, postgres: Database) -> None:
    between = datetime.now(UTC).isoformat()
    with postgres.connect() as source:
        source.execute("DELETE FROM items WHERE id <= 3")
    home.catch_up()
    done = millstream(home, "pipeline", "replay", "public.items", "--from", between, "--into", "deleted")
    assert done.returncode == 0, done.stderr
    path = home.home.path / "lake" / "shop" / "replays" / "deleted"
    found = DeltaTable(path).to_pyarrow_table()
    assert sorted(found.column("id").to_pylist()) == [1, 2, 3]
    assert set(found.column("__op").to_pylist()) == {"d"}
    again = millstream(home, "pipeline", "replay", "public.items", "--from", between, "--into", "deleted", "--json")
    assert json.loads(again.stdout)["already"] is True
    other = millstream(home, "pipeline", "replay", "public.items", "--into", "deleted")
    assert (other.returncode, "another table" in other.stderr) == (1, True)
    whole = replay_table(home.home, "public.items", begin=None, end=between, into="before")
    assert whole.rows == 50 + 5 + 1


@pytest.mark.long
def test_no_token_shows_or_replays_half_an_operation(home: LandedHome, postgres: Database) -> None:
    with postgres.connect() as source:
        source.execute(
            "INSERT INTO items SELECT i, 'more' FROM generate_series(101, 120) i; INSERT INTO keyless VALUES (3)"
        )
        source.execute("INSERT INTO items VALUES (121, 'last')")
    home.catch_up()
    # From the table without a key: its inserts.
    committed = {(0, 0), (50, 0), (49, 1), (69, 2), (70, 2)}
    names = {"public.items": "public.items", "public.keyless": 'history."public.keyless"'}
    with millstream_open(home.home.path) as opened:
        end = opened.lake().token
        seqs = 'FROM history."public.items" SELECT __seq UNION FROM history."public.keyless" SELECT __seq ORDER BY 1'
        numbers = opened.query(seqs).column(0).to_pylist()
        shown = set()
        for n in [*numbers[5::10], *numbers[-2:]]:
            with opened.lake(as_of=f"{end.stream}.s{n}") as lake:
                sql = ", ".join(f'(SELECT count(*) FROM {names[t]}) AS "{t}"' for t in lake.tables)
                counts = lake.query(f"SELECT {sql}").to_pylist()[0] if sql else {}
            shown.add(tuple(counts.get(name, 0) for name in names))
    assert shown <= committed
    assert shown >= {(50, 0), (49, 1), (70, 2)}
    inside = replay_table(home.home, "public.items", begin=None, end=f"{end.stream}.s{numbers[-5]}", into="inside")
    assert inside.rows == 50 + 5 + 1


@pytest.mark.parametrize("other", ["took the outcome", "replaced the request"])
def test_a_call_whose_request_another_one_ended_is_told_and_waits_no_longer(tmp_path: Path, other: str) -> None:
    table = TableId(1)
    (tmp_path / "millstream.toml").write_text("[streams.shop]\n")
    home = Home(tmp_path)
    home.prepare()
    with home.open_catalog() as catalog:
        requests = Rebuilds(catalog, StreamId(uuid4()), "shop")
        requests.ask(table, ["current"])

        def perform(_: RebuildRequest) -> None:
            if other == "replaced the request":
                requests.ask(table, ["scd2"])
                requests.settle(table, "scd2", {"state": "done", "aside": None})
            else:
                requests.forget(table)

        with pytest.raises(HomeBusy, match="another call"):
            await_outcome(home, requests, table, ["current"], perform, lambda _: None)
        theirs = requests.outcome(table)
        assert theirs is not None
        assert list(theirs) == (["scd2"] if other == "replaced the request" else [])
