"""`doctor`: what it reports about a home, and its exit code."""

from __future__ import annotations

import errno
import json
import re
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.app.homes import make_home
from tests.cli.in_process import command

import millstream
from millstream.administration import doctor as doctors
from millstream.administration.doctor import Diagnosis, examine
from millstream.app.alerts.alert_file import Kept
from millstream.app.status import collect_status
from millstream.app.table_status import quarantine_of
from millstream.catalog import TableState
from millstream.catalog.pipeline_tables import QuarantinedTable
from millstream.errors import LakeError, LakeTableForeign, MillstreamError, SourceError, TableUndecodable
from millstream.home.config_mapping import lake_layout
from millstream.home.home import Home
from millstream.lake.commit_cuts import commit_cut
from millstream.model.ids import StreamId
from millstream.model.positions import Seq
from millstream.processes.role_locks import RoleLock
from millstream.spark.batch_targets import LakeOfFiles
from millstream.writers.stall_reasons import forget_given_up, note_given_up

CONFIG = '[streams.shop.source]\ndsn = "host=127.0.0.1 port=1"\n'


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home of three tables, one of them quarantined by capture."""
    (tmp_path / "millstream.toml").write_text(CONFIG)
    home = Home(tmp_path)
    home.prepare()
    with home.open_catalog() as catalog:
        stream = catalog.resolve_stream("shop")
        source = catalog.resolve_source(stream, 7, "shop", 1)
        catalog.table_for(stream, source, 1, "public", "orders", state=TableState.STREAMING)
        catalog.table_for(stream, source, 2, "public", "Bad One", state=TableState.QUARANTINED, reason="a value")
        catalog.table_for(stream, source, 3, "public", "log", state=TableState.HISTORY_ONLY, reason="no key")
    return home


@pytest.fixture(autouse=True)
def _no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks of Java, Spark and compiled code: other tests cover them, and they are slow."""
    for name in ("_java", "_compiled"):
        monkeypatch.setattr(doctors, name, lambda *_: "there")
    monkeypatch.setattr(doctors, "_spark", lambda: "there")
    monkeypatch.setenv("MILLSTREAM_HTTP__LISTEN", "127.0.0.1:0")  # another test may serve the default port


def tables(home: Home) -> list[Diagnosis]:
    return [found for found in examine(home, lambda _line: None) if found.check == "tables of shop"]


def doctor(home: Home, *words: str) -> tuple[int, str]:
    done = command("--home", str(home.path), "doctor", *words)
    return done.returncode, done.stdout.decode()


def test_an_unset_password_is_one_finding(home: Home) -> None:
    file = home.config_file
    file.write_text('[streams.shop.source]\ndsn = "postgresql://app:${A_PASSWORD_THAT_IS_NOT_SET}@127.0.0.1:1/shop"\n')
    found = [one for one in examine(Home(home.path), lambda _line: None) if not one.is_ok]
    assert [(one.check, one.code) for one in found if "A_PASSWORD_THAT_IS_NOT_SET" in one.message] == [
        ("configuration", "config")
    ]
    code, said = doctor(home)
    assert code != 0
    assert said.count("A_PASSWORD_THAT_IS_NOT_SET is not set") == 1


def test_a_configuration_that_names_no_stream_is_wrong(tmp_path: Path) -> None:
    """Regression: doctor found nothing wrong, and said "0 streams"."""
    (tmp_path / "millstream.toml").write_text("")
    found = next(one for one in examine(Home(tmp_path), lambda _line: None) if one.check == "configuration")
    assert (found.code, found.is_wrong) == ("config", True)
    assert "[streams.NAME]" in found.fix


def test_a_table_that_capture_quarantined_is_wrong_with_the_command_to_run(home: Home) -> None:
    (found,) = tables(home)
    assert (found.code, found.blocks, found.table) == ("table_quarantined", "table", 'public."Bad One"')
    assert found.message == 'public."Bad One" is quarantined: a value'
    assert found.fix == "Mend the cause, then run `millstream tables retry 'public.\"Bad One\"'`."
    told = json.loads(doctor(home, "--json")[1])
    assert not told["healthy"]
    assert {"check": "tables of shop", "code": "table_quarantined"}.items() <= _of(told, "tables of shop").items()
    (home.path / "millstream.toml").write_text(CONFIG + CONFIG.replace("shop", "other"))
    assert "--stream shop" in tables(Home(home.path))[0].fix


def test_a_taken_address_is_a_note_unless_the_home_itself_is_served(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def addresses() -> list[tuple[str, str, str]]:
        found = examine(Home(home.path), lambda _line: None)
        return [(one.check, one.code, one.blocks) for one in found if "listen" in one.check]

    home.config_file.write_text("[streams.shop]\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MILLSTREAM_HTTP__LISTEN", f"127.0.0.1:{taken.getsockname()[1]}")
        assert addresses() == [("[http] listen", "address_in_use", "nothing")]
        with RoleLock.take(home.run_folder, "serve"):
            assert addresses() == []
    assert addresses() == [("[http] listen", "ok", "nothing")]


def test_a_table_quarantined_alone_makes_the_exit_code(home: Home) -> None:
    (home.path / "millstream.toml").write_text("[streams.shop]\n")  # there is no source that could answer
    assert doctor(home)[0] == 3
    with home.open_catalog() as catalog:
        bad = catalog.find_table(catalog.stream("shop").id, "public", "Bad One")
        catalog.set_state(bad.id, TableState.STREAMING)
    assert doctor(home)[0] == 0


def test_it_ends_with_a_count_and_quiet_leaves_out_what_is_right(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    (home.path / "millstream.toml").write_text("[streams.shop]\n")
    told = json.loads(doctor(home, "--json")[1])["findings"]
    *lines, last = doctor(home)[1].splitlines()
    assert last == f"{len(told)} checks: {len(told) - 1} right, 0 notes, 1 wrong"
    assert sum(line.startswith("ok ") for line in lines) == len(told) - 1

    code, said = doctor(home, "--quiet")
    assert code == 3
    assert [line.split()[0] for line in said.splitlines()] == ["wrong", "Mend"]
    with home.open_catalog() as catalog:
        bad = catalog.find_table(catalog.stream("shop").id, "public", "Bad One")
        catalog.set_state(bad.id, TableState.STREAMING)
    assert doctor(home, "--quiet") == (0, "")
    note = Diagnosis("home", "some_note", "worth a word")
    monkeypatch.setattr(doctors, "_tables", lambda *_: iter([note]))
    assert doctor(home, "--quiet") == (0, "note    home: worth a word\n")
    assert doctor(home)[1].endswith(f"{len(told)} checks: {len(told) - 1} right, 1 note, 0 wrong\n")


def test_a_table_that_the_lake_quarantined_is_wrong_with_its_own_hint(home: Home) -> None:
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        orders = catalog.find_table(stream, "public", "orders")
        quarantine_of(catalog, stream).put(
            QuarantinedTable(orders.id, "public.orders", Seq(0), "a file is gone", "lake", "Rebuild it.")
        )
    bad, lake = sorted(tables(home), key=lambda found: found.table)
    assert bad.table == 'public."Bad One"'
    assert (lake.message, lake.fix) == ("public.orders is quarantined: lake: a file is gone", "Rebuild it.")


def test_status_tables_and_doctor_tell_what_to_run_for_a_table_that_capture_quarantined(home: Home) -> None:
    command_of = "run `millstream {}tables retry 'public.\"Bad One\"'`."
    retry = command_of.format(f"--home {home.path} ")
    for words in (("tables",), ("tables", "ls"), ("status",)):
        done = command("--home", str(home.path), *words)
        assert f'public."Bad One": Mend the cause, then {retry}' in done.stderr.decode(), words
    with home.open_catalog() as catalog:
        bad = catalog.find_table(catalog.stream("shop").id, "public", "Bad One")
        catalog.set_state(bad.id, TableState.QUARANTINED, "its copy failed", details={"hint": "Grant SELECT."})
    done = command("--home", str(home.path), "tables")
    assert f'public."Bad One": Grant SELECT. Then {retry}' in done.stderr.decode()
    told = json.loads(command("--home", str(home.path), "tables", "--json").stdout)
    assert {table["name"]: table["hint"] for table in told}['public."Bad One"'] == "Grant SELECT."
    assert tables(home)[0].fix == f"Grant SELECT. Then {command_of.format('')}"


def test_a_key_or_a_merge_that_a_table_with_rows_was_not_written_by_is_wrong(tmp_path: Path) -> None:
    """It was found by the first append of a run alone."""
    (tmp_path / "millstream.toml").write_text("[streams.shop]\n")
    with millstream.open(tmp_path) as opened:
        opened.append("shop", "clicks", [{"id": 1, "n": 1}])
        opened.append("shop", "other", [{"id": 1}])
    assert [one.code for one in tables(Home(tmp_path))] == ["ok"]
    (tmp_path / "millstream.toml").write_text('[streams.shop.keys]\nclicks = ["id"]\n')
    (found,) = tables(Home(tmp_path))
    assert (found.code, found.blocks, found.table) == ("key_changed", "table", "public.clicks")
    assert "Remove the table's key" in found.fix
    (condition,) = collect_status(Home(tmp_path))["conditions"]
    assert (condition["kind"], condition["subject"]) == ("key_changed", "public.clicks")
    assert "Remove the table's key" in condition["hint"]


def test_a_table_without_a_key_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README calls it normal, and it ended the command with 3."""
    (tmp_path / "millstream.toml").write_text(CONFIG)
    found = Diagnosis("source of shop", "replica_identity_unusable", "into history only", "current", "Give it a key.")
    monkeypatch.setattr(doctors, "_source", lambda *_: iter([found]))
    done = command("--home", str(tmp_path), "doctor")
    assert done.returncode == 0
    assert "note    source of shop: into history only" in done.stdout.decode()


def test_a_log_that_no_reader_and_no_writer_takes_is_wrong(tmp_path: Path) -> None:
    """Every append and read failed, and doctor found nothing."""
    (tmp_path / "millstream.toml").write_text("[streams.shop]\n")

    def of_log() -> Diagnosis:
        (found,) = [one for one in examine(Home(tmp_path), lambda _line: None) if one.check == "log of shop"]
        return found

    assert of_log().message == "there is none yet"
    with millstream.open(tmp_path) as opened:
        opened.append("shop", "clicks", [{"id": 1}])
    assert of_log().message == "it can be read, from number 1 to 1"
    for name in ("00001", "00000/notes.txt"):
        file = Home(tmp_path).wal_folder("shop") / name
        file.touch()
        found = of_log()
        assert (found.code, found.blocks) == ("unexpected_file", "home")
        file.unlink()
    file.touch()
    told = json.loads(command("--home", str(tmp_path), "status", "--json").stdout)
    assert len(told["problems"]) == len(set(told["problems"]))


def test_an_error_of_the_disk_is_told_as_everywhere(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system", "/srv/lake")

    monkeypatch.setattr(doctors, "check_lake", refused)
    (found,) = [one for one in examine(home, lambda _line: None) if one.check == "lake of shop"]
    assert (found.code, found.message) == ("home_unwritable", "/srv/lake: Read-only file system")


@pytest.mark.parametrize("place", ["lake", "lake/shop"])
def test_a_file_in_the_place_of_the_lake_is_wrong_and_ends_the_pipeline(home: Home, place: str) -> None:
    """In the place of the stream's folder, doctor found nothing, and the pipeline tried for five minutes to write there."""
    (home.path / place).parent.mkdir(exist_ok=True)
    (home.path / place).touch()
    (found,) = [one for one in examine(home, lambda _line: None) if one.check == "lake of shop"]
    assert (found.code, found.message) == ("io_failed", f"{home.path / place}: Not a directory")
    assert found.is_wrong
    layout = lake_layout(home, "shop", home.config.streams["shop"], StreamId(UUID(int=1)))
    with pytest.raises(NotADirectoryError):
        LakeOfFiles(layout).begin([], [])


def test_a_folder_that_this_user_may_not_look_into_ends_no_other_check(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Home, name: str) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", f"/srv/regions/{name}")

    monkeypatch.setattr(Home, "regions_on_disk", refused)
    found = {one.check: one for one in examine(home, lambda _line: None)}
    assert found["stream shop"].message == "/srv/regions/shop: Permission denied"
    assert "alerts" in found


def test_without_such_tables_nothing_is_wrong_with_them(home: Home, tmp_path: Path) -> None:
    with home.open_catalog() as catalog:
        bad = catalog.find_table(catalog.stream("shop").id, "public", "Bad One")
        catalog.set_state(bad.id, TableState.STREAMING)
    assert [(found.code, found.message) for found in tables(home)] == [("ok", "none of 3 is quarantined")]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "millstream.toml").write_text(CONFIG)
    assert [found.code for found in tables(Home(tmp_path / "new"))] == ["ok"], "before the first run"
    assert not Home(tmp_path / "new").has_catalog(), "nothing is made"


def test_a_consumer_s_sink_that_no_package_has_is_a_note_with_the_entry_point_to_install(home: Home) -> None:
    sink = '[streams.shop.consumers.copy.sink]\nkind = "nowhere"\npath = "s3cret"\n'
    (home.path / "millstream.toml").write_text(f"[streams.shop]\n{sink}")
    found = _of(json.loads(doctor(home, "--json")[1]), "sink of consumer copy of shop")
    assert (found["code"], found["blocks"]) == ("invalid_consumer", "nothing")
    assert found["message"] == "no push sink is of kind 'nowhere'"
    assert "install a package with an entry point of millstream.push_sinks" in found["fix"]
    assert "s3cret" not in doctor(home)[1]


def test_a_consumer_s_sink_that_refuses_its_settings_is_a_note(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_sink.py").write_text(
        "from millstream.errors import DeliveryError\n"
        "class Sink:\n"
        "    def close(self):\n"
        "        pass\n"
        "def open_odd(settings, *, stream, consumer):\n"
        "    if 'path' not in settings:\n"
        "        raise DeliveryError('path is missing', code='invalid_consumer', hint='Set path.')\n"
        "    return Sink()\n"
    )
    package = tmp_path / "odd_sink-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: odd_sink\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[millstream.push_sinks]\nodd = odd_sink:open_odd\n")
    monkeypatch.syspath_prepend(tmp_path)
    sink = '[streams.shop.consumers.copy.sink]\nkind = "odd"\n'
    (home.path / "millstream.toml").write_text(f"[streams.shop]\n{sink}")
    found = _of(json.loads(doctor(home, "--json")[1]), "sink of consumer copy of shop")
    assert (found["message"], found["fix"]) == ("path is missing", "Set path.")
    (home.path / "millstream.toml").write_text(f'[streams.shop]\n{sink}path = "here"\n')
    findings = json.loads(doctor(home, "--json")[1])["findings"]
    assert not [found for found in findings if found["check"].startswith("sink of")]


def _of(told: dict[str, Any], check: str) -> dict[str, Any]:
    return next(found for found in told["findings"] if found["check"] == check)


@pytest.mark.parametrize(
    ("part", "error", "blocks", "code"),
    [
        ("capture", SourceError("the slot is ahead", code="slot_ahead"), "source", 3),
        ("capture", TableUndecodable("a row"), "nothing", 0),
        ("pipeline", LakeError("the log has other records", code="lake_of_another_log"), "home", 3),
        ("pipeline", LakeTableForeign("it is another's", code="lake_of_another_stream"), "home", 3),
    ],
)
def test_a_part_that_gave_up_is_told_and_wrong_while_somebody_must_decide(
    home: Home, part: str, error: MillstreamError, blocks: str, code: int
) -> None:
    (home.path / "millstream.toml").write_text("[streams.shop]\n")  # there is no source that could answer
    with home.open_catalog() as catalog:
        catalog.set_state(catalog.find_table(catalog.stream("shop").id, "public", "Bad One").id, TableState.STREAMING)
        note_given_up(catalog, "shop", part, error)
    (found,) = [found for found in examine(home, lambda _line: None) if found.check == f"{part} of shop"]
    assert (found.code, found.blocks) == (error.code, blocks)
    assert re.fullmatch(rf"given up: {re.escape(error.message)} \(since \d{{4}}-\S+\)", found.message)
    assert found.fix == error.hint
    assert doctor(home)[0] == code
    with home.open_catalog() as catalog:
        forget_given_up(catalog, "shop", part)
    assert doctor(home)[0] == 0


def lake_tables(path: Path) -> Diagnosis:
    return next(one for one in examine(Home(path), lambda _line: None) if one.check == "tables in the lake of shop")


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_lake_of_another_stream_is_found_before_the_first_run(tmp_path: Path, kind: str) -> None:
    catalog = f"catalog = {{ uri = 'sqlite:///{tmp_path}/lakes.db' }}\n" if kind == "iceberg" else ""
    text = f"[streams.shop.lake]\nlocation = '{tmp_path}/lake'\nformat = '{kind}'\n{catalog}"
    homes = [make_home(tmp_path / name, text) for name in ("a", "b")]
    assert [lake_tables(path).message for path in homes] == ["there are none yet"] * 2
    home = Home(homes[0])
    with home.open_catalog() as opened:
        layout = lake_layout(home, "shop", home.config.streams["shop"], opened.resolve_stream("shop"))
        commit_cut(layout, Seq(1), [], committed_at=datetime.now(UTC))
    assert lake_tables(homes[0]).message == "they are this stream's"
    found = lake_tables(homes[1])
    assert (found.code, found.blocks) == ("lake_of_another_stream", "home")
    assert "give the stream another name" in found.fix
    with Home(homes[1]).open_catalog() as opened:
        opened.resolve_stream("shop")
    assert lake_tables(homes[1]) == found
    nodes = "[replication]\nnode = 'b'\nnodes = { a = 'grpc://127.0.0.1:1', b = 'grpc://127.0.0.1:2' }\n"
    follower = make_home(tmp_path / "c", text + nodes)
    assert lake_tables(follower).message == "looked at once this node has the stream's log"


def test_doctor_reports_conditions_and_alerts_that_no_receiver_takes(home: Home) -> None:
    def found(*checks: str) -> dict[str, Diagnosis]:
        return {one.check: one for one in examine(Home(home.path), lambda _line: None) if one.check in checks}

    assert found("alerts")["alerts"].message == "none are sent: [alerts] has no url"
    with home.open_catalog() as catalog:
        note_given_up(catalog, "shop", "capture", SourceError("the slot is gone", code="slot_lost", hint="Drop it."))
    url = 'url = "http://127.0.0.1:1/secret-path"\n'
    home.config_file.write_text(f"{CONFIG}[alerts]\n{url}")
    assert found("alerts")["alerts"].is_ok
    kept = Kept.empty(Home(home.path).config.alerts)
    kept.failing = {"since": 0.0, "error": "127.0.0.1 port 1 can't be reached: Connection refused"}
    kept.write(home)
    both = found("alerts", "conditions of shop")
    assert (both["alerts"].code, both["alerts"].blocks) == ("alerts_undelivered", "nothing")
    assert "can't be reached" in both["alerts"].message
    assert "secret-path" not in both["alerts"].message
    stalled = both["conditions of shop"]
    assert (stalled.code, stalled.message, stalled.fix) == (
        "capture_stalled",
        "capture has given up: the slot is gone",
        "Drop it.",
    )
