from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.app.homes import run
from tests.commands import Command
from tests.console.homes import followed_home
from tests.wal.plain_operations import plain_ops, plain_table

from millstream.app import status as status_module
from millstream.app.lake_sessions import _quarantined
from millstream.app.open_home import open_other
from millstream.app.status import collect_status
from millstream.app.table_requests import copy_table, retry_table
from millstream.app.table_status import fold_failures_of, quarantine_of, tables_of
from millstream.app.trouble_rules import what_to_run
from millstream.catalog import Catalog, TableState
from millstream.catalog.pipeline_tables import LastFigures, QuarantinedTable, TableFigures
from millstream.cli.main import cli
from millstream.cli.status_and_tables import _consumer_row
from millstream.errors import CatalogError, CursorExpired, UnknownTable, UsageError
from millstream.home.home import Home
from millstream.home.retention import sweep
from millstream.model.ids import ShardId, StreamId
from millstream.model.positions import Lsn, Seq
from millstream.model.schema import TableKind
from millstream.processes.control_socket import ControlServer, ask
from millstream.processes.role_locks import RoleLock
from millstream.protocol.retention import HolderKind
from millstream.serving.metrics import prometheus_text
from millstream.wal.files import RealFiles
from millstream.wal.segment_deletion import SESSIONS_HOLDER
from millstream.wal.writing.session_file import write_copy
from millstream.wal.writing.writer import LogWriter
from millstream.writers.owner import OwnedStream
from millstream.writers.stream_writer import stream_writer

CONFIG = '[streams.shop.source]\ndsn = "host=127.0.0.1 port=1"\n'


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home that has run: three records durable, two tables known, nothing landed."""
    (tmp_path / "millstream.toml").write_text(CONFIG)
    home = Home(tmp_path)
    home.prepare()
    with home.open_catalog() as catalog:
        stream = catalog.resolve_stream("shop")
        source = catalog.resolve_source(stream, 7, "shop", 1)
        catalog.move_reached(source, Lsn(0x16B374D848))
        orders = catalog.table_for(stream, source, 16384, "public", "orders", state=TableState.STREAMING)
        catalog.table_for(stream, source, 16385, "public", "Bad One", state=TableState.QUARANTINED, reason="a value")
        catalog.table_for(stream, source, 16386, "public", "log", state=TableState.HISTORY_ONLY, reason="no key")
        quarantine_of(catalog, stream).put(
            QuarantinedTable(orders.id, "public.orders", Seq(0), "somebody wrote into it", "lake", "")
        )
        _write(home, catalog.register_writer(stream)[1], stream, catalog.reservations(stream))
    return home


def _write(home: Home, epoch: Any, stream: StreamId, reservations: Any) -> None:
    table = replace(plain_table(1), name="orders", relation_oid=16384)
    with LogWriter.open(
        str(home.wal_folder("shop")), stream=stream, shards=[ShardId(0)], epoch=epoch, reservations=reservations
    ) as log:
        log.append(plain_ops({1: [(table, 3, "x")]}, shard_of={1: 0}))


def test_status_needs_no_running_process(home: Home) -> None:
    status = collect_status(home)
    assert status["problems"] == []
    (stream,) = status["streams"]
    assert (stream["name"], stream["state"], stream["writer"]["epoch"]) == ("shop", "stopped", 1)
    assert stream["source"]["reached"] == "16/B374D848"
    assert stream["tokens"]["durable"].endswith(".s3")
    assert stream["tokens"]["landed"].endswith(".s0")
    assert stream["lag"]["lake"]["records"] == 3
    assert stream["lag"]["lake"]["bytes"] > 0
    assert stream["lag"]["lake"]["seconds"] > 0
    states = {table["name"]: (table["state"], table["reason"]) for table in stream["tables"]}
    assert states == {
        "public.orders": ("quarantined", "lake: somebody wrote into it"),
        'public."Bad One"': ("quarantined", "a value"),
        "public.log": ("history_only", "no key"),
    }
    json.dumps(status)
    assert "behind; nothing lands it until" in CliRunner().invoke(cli, ["--home", str(home.path), "status"]).output
    (home.path / "millstream.toml").write_text("[streams.shop]\n")
    for is_served, state in ((False, "stopped"), (True, "nothing appended since `serve` began")):
        with RoleLock.take(home.run_folder, "serve") if is_served else nullcontext():
            shown = CliRunner().invoke(cli, ["--home", str(home.path), "status"]).output
            assert f"stream shop: {state}, writer epoch 1, no source" in shown
            assert collect_status(Home(home.path))["streams"][0]["state"] == ("running" if is_served else "stopped")


def test_a_node_tells_what_its_own_lake_has_and_not_what_the_leader_before_had_landed(home: Home) -> None:
    """Until its own pipeline had started, the node reported the landed position of the old leader's catalog."""
    config = f'{CONFIG}[replication]\nnode = "b"\nnodes = {{ a = "grpc://127.0.0.1:1", b = "grpc://127.0.0.1:2" }}\n'
    with home.open_catalog() as catalog:
        catalog.set_landed(catalog.stream("shop").id, "lake", Seq(3))
    (home.path / "millstream.toml").write_text(config)
    (stream,) = collect_status(Home(home.path))["streams"]
    assert stream["tokens"]["landed"].endswith(".s0")
    assert stream["lag"]["lake"]["records"] == 3
    lake = '[streams.shop.lake]\nformat = "postgres"\nlocation = "postgresql://nobody@127.0.0.1:1/lake"\n'
    (home.path / "millstream.toml").write_text(config + lake)
    found = collect_status(Home(home.path))
    assert any(problem.startswith("lake of shop") for problem in found["problems"])
    assert found["streams"][0]["tokens"]["landed"] is found["streams"][0]["lag"]["lake"]["records"] is None
    assert b"millstream_landed_seq{" not in prometheus_text(lambda: found)
    shown = CliRunner().invoke(cli, ["--home", str(home.path), "status"]).output
    assert "landed" not in shown
    assert "log → lake: unknown while nothing runs" in shown


def test_the_landed_position_is_never_ahead_of_the_durable_one(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records became durable and landed between the two reads, and `status` showed an impossible order."""
    durable = status_module._durable

    def durable_before_more(*arguments: Any) -> Seq | None:
        found = durable(*arguments)
        with home.open_catalog() as catalog:
            stream = catalog.stream("shop").id
            _write(home, catalog.register_writer(stream)[1], stream, catalog.reservations(stream))
        return found

    def all_landed(home: Home, catalog: Catalog, *_arguments: Any) -> Seq | None:
        return durable(home, catalog, "shop", [])

    monkeypatch.setattr(status_module, "_durable", durable_before_more)
    monkeypatch.setattr(status_module, "_landed", all_landed)
    tokens = collect_status(home)["streams"][0]["tokens"]
    durable_n, landed_n = (int(tokens[key].partition(".s")[2]) for key in ("durable", "landed"))
    assert 0 < landed_n <= durable_n


def test_what_cannot_be_read_is_a_problem_and_the_rest_is_shown(home: Home) -> None:
    (home.path / "millstream.toml").write_text("[streams")
    mark = home.wal_folder("shop") / "00000" / "durable.mark"
    mark.write_bytes(b"\xff" * mark.stat().st_size)
    status = collect_status(Home(home.path))
    assert any("configuration" in problem for problem in status["problems"])
    assert [stream["name"] for stream in status["streams"]] == ["shop"]


def test_without_its_catalog_a_stream_is_shown_from_its_log(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only or full disk the catalog can't be opened, and the status had nothing but that problem."""

    def refused(*_: object, **__: object) -> Any:
        raise CatalogError("catalog.db: unable to open database file")

    monkeypatch.setattr(Home, "open_catalog", refused)
    status = collect_status(home)
    assert status["problems"] == ["catalog.db: unable to open database file"]
    (stream,) = status["streams"]
    assert (stream["state"], stream["tokens"]["durable"][-3:]) == ("unknown", ".s3")
    assert {table["state"] for table in stream["tables"]} == {"unknown"}
    shown = CliRunner().invoke(cli, ["--home", str(home.path), "status"])
    assert stream["tokens"]["durable"] in shown.stdout
    assert "writer epoch" not in shown.stdout, "the catalog has it"


@pytest.mark.parametrize("text", ["[streams", "[alerts]\nslot_lag = 'much'\n", None])
def test_conditions_are_judged_by_the_default_bounds_if_the_configuration_cannot_be_read(
    home: Home, text: str | None
) -> None:
    """Status showed no condition, so that a probe of it saw a home without troubles."""
    wanted = collect_status(home)["conditions"]
    file = home.path / "millstream.toml"
    file.unlink()
    file.mkdir() if text is None else file.write_text(text)
    home.delivery_folder("shop").mkdir(parents=True, exist_ok=True)
    status = collect_status(Home(home.path))
    assert any("configuration" in problem for problem in status["problems"])
    assert [one["kind"] for one in wanted] == ["table_quarantined"] * 2
    assert status["conditions"] == wanted
    shown = CliRunner().invoke(cli, ["--home", str(home.path), "status", "--json"])
    assert json.loads(shown.stdout)["conditions"] == wanted


def test_metrics_tell_what_status_tells(home: Home) -> None:
    text = prometheus_text(lambda: collect_status(home)).decode()
    assert 'millstream_lag_records{stage="lake",stream="shop"} 3.0' in text
    assert 'millstream_tables{state="quarantined",stream="shop"} 2.0' in text
    assert 'millstream_up{part="owner"} 0.0' in text
    assert 'millstream_durable_seq{stream="shop"} 3.0' in text


def test_a_running_pipeline_tells_of_each_table(home: Home) -> None:
    table = {
        "table_id": 3, "name": "public.log", "rows": 40, "history_n": 40, "current_n": 30, "fold_lag_s": 12.5,
        "fold_lag_records": 10, "rows_per_s": 1.5, "live_bytes": 2_000, "disk_bytes": 5_000,
        "changed_us": 1_772_366_400_123_456,
    }  # fmt: skip
    with home.open_catalog() as catalog:
        table["table_id"] = next(int(row.id) for row in catalog.tables(catalog.stream("shop").id) if row.name == "log")
    live = {"streams": {"shop": {"progress": {"tables": [table], "quarantined": {}}}}}
    with ControlServer(home, "pipeline", {"status": lambda: live}):
        status = collect_status(home)
        text = prometheus_text(lambda: collect_status(home)).decode()
        shown = CliRunner().invoke(cli, ["--home", str(home.path), "status"]).output
    (stream,) = status["streams"]
    assert stream["lag"]["fold"] == {"records": 10, "seconds": 12.5}
    (log,) = (t for t in stream["tables"] if t["name"] == "public.log")
    assert log["last_change"] == "2026-03-01T12:00:00.123+00:00"
    assert (log["rows_per_s"], log["fold_lag_records"], log["disk_factor"]) == (1.5, 10, 2.5)
    assert 'millstream_table_disk_factor{stream="shop",table="public.log"} 2.5' in text
    assert 'millstream_table_fold_lag_seconds{stream="shop",table="public.log"} 12.5' in text
    (line,) = (line for line in shown.splitlines() if "public.log" in line)
    assert line.split() == ["public.log", "history_only", "2", "12.5", "s,", "10", "records", "2.5", "no", "key"]


def test_what_is_not_known_is_left_out_and_never_a_dash(home: Home) -> None:
    """If a source is ahead, only the bytes are known: the line was "- records, 5 B, - behind"."""
    live = {"streams": {"shop": {"progress": {"source_end": 9, "durable": 4}}}}

    def shown() -> list[str]:
        return [
            line.strip() for line in CliRunner().invoke(cli, ["--home", str(home.path), "status"]).output.splitlines()
        ]

    with ControlServer(home, "owner", {"status": lambda: live}):
        assert "source → log: 5 B behind" in shown()
        live["streams"]["shop"]["progress"]["durable"] = 9
        assert "source → log: nothing waits" in shown()
    mark = home.wal_folder("shop") / "00000" / "durable.mark"
    mark.write_bytes(b"\xff" * mark.stat().st_size)
    assert any(line.startswith("durable not known") for line in shown())
    assert not any(word in {"-", "None"} for line in shown() for word in line.split())


def test_a_replay_is_told_while_it_lasts(home: Home) -> None:
    replay = {
        "segments": {"done": 3, "total": 12}, "records": {"done": 4_000, "total": 16_000},
        "bytes": {"done": 1 << 20, "total": 4 << 20}, "eta_s": 90.0, "seconds": 30.0,
    }  # fmt: skip
    progress: dict[str, Any] = {"tables": [], "quarantined": {}, "replay": replay}
    live = {"streams": {"shop": {"progress": progress}}}
    with ControlServer(home, "pipeline", {"status": lambda: live}):
        (stream,) = collect_status(home)["streams"]
        text = prometheus_text(lambda: collect_status(home)).decode()
        shown = CliRunner().invoke(cli, ["--home", str(home.path), "status"]).output
        progress["replay"] = None
        (after,) = collect_status(home)["streams"]
        text_after = prometheus_text(lambda: collect_status(home)).decode()
    assert stream["replay"] == replay
    assert 'millstream_replay_segments{state="left",stream="shop"} 9.0' in text
    assert 'millstream_replay_records{state="done",stream="shop"} 4000.0' in text
    assert 'millstream_replay_bytes{state="left",stream="shop"} 3.145728e+06' in text
    assert 'millstream_replay_eta_seconds{stream="shop"} 90.0' in text
    assert 'millstream_replay_elapsed_seconds{stream="shop"} 30.0' in text
    words = "  replay: 3 of 12 segments, 4,000 of 16,000 records, 1.0 MiB of 4.0 MiB landed, about 2 min left"
    assert words in shown.splitlines()
    assert after["replay"] is None
    assert "millstream_replay_bytes{" not in text_after


def test_a_running_part_tells_what_only_it_knows(home: Home) -> None:
    progress = {"source_end": 900, "durable": 400, "copies": {"public.log": {"rows": 9}}}
    progress |= {"mode": "catching up", "slot_holds_bytes": 7000, "source_spilled_bytes": 30}
    live = {"streams": {"shop": {"progress": progress}}}
    with ControlServer(home, "owner", {"status": lambda: live}):
        assert ask(home, "owner", "status") == live
        assert ask(home, "owner", "nothing") == {"error": "no such call"}
        (stream,) = collect_status(home)["streams"]
        assert stream["state"] == "running"
        assert stream["lag"]["capture"]["bytes"] == 500
        assert (stream["source"]["mode"], stream["source"]["slot_holds_bytes"]) == ("catching up", 7000)
        text = prometheus_text(lambda: collect_status(home)).decode()
        assert 'millstream_catching_up{stream="shop"} 1.0' in text
        assert 'millstream_slot_held_bytes{stream="shop"} 7000.0' in text
        assert 'millstream_slot_spilled_bytes_total{stream="shop"} 30.0' in text
        assert {t["name"]: t["copy"] for t in stream["tables"]}["public.log"] == {"rows": 9}
    assert ask(home, "owner", "status") is None
    folder = home.socket_folder()
    assert folder is not None
    folder.rmdir()


def test_the_last_change_of_a_table_is_shown_without_a_running_pipeline(home: Home) -> None:
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        log = catalog.find_table(stream, "public", "log").id
        LastFigures(catalog, stream, "lake").put({log: TableFigures(1, None, None, 1_000_000)})
        shown = {table["name"]: table["last_change"] for table in tables_of(catalog, stream, {}, {})}
    assert shown["public.log"] == "1970-01-01T00:00:01.000+00:00"
    assert shown["public.orders"] is None


def test_a_tables_last_figures_are_shown_without_a_running_pipeline(home: Home) -> None:
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        log = catalog.find_table(stream, "public", "log").id
        LastFigures(catalog, stream, "lake").put({log: TableFigures(9, 100, None)})
        shown = {table["name"]: table["last_figures"] for table in tables_of(catalog, stream, {}, {})}
        facts = {
            "fold_lag_s": 0.0,
            "fold_lag_records": 0,
            "rows": 1,
            "rows_per_s": 1.0,
            "live_bytes": 5,
            "disk_bytes": 6,
        }
        landing = {"tables": [{"table_id": int(log), **facts}]}
        live = {table["name"]: table for table in tables_of(catalog, stream, {}, landing)}
    assert shown["public.orders"] is None
    as_of = datetime.fromisoformat(shown["public.log"].pop("as_of"))
    assert abs((datetime.now(UTC) - as_of).total_seconds()) < 600
    assert shown["public.log"] == {"landed_rows": 9, "live_bytes": 100, "disk_bytes": None}
    assert (live["public.log"]["last_figures"], live["public.log"]["live_bytes"]) == (None, 5)


def test_a_consumers_row_has_its_redeliveries() -> None:
    counts = {"in_flight": 1, "dead": 2, "redelivered": 3456, "acked": 4}
    facts = {"name": "search", "state": "active", "lag": {"records": 0}, "backfill": None, "error": None}
    assert _consumer_row({**facts, **counts}) == ["  search", "active", "none", "1", "2", "3,456", "4", ""]
    collecting = {"tables": ["public.orders"], "rows": 0, "of": None}
    assert _consumer_row({**facts, **counts, "backfill": collecting})[1] == "active, backfill collects its rows"


def test_a_table_is_retried_where_it_was_set_aside(home: Home) -> None:
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        assert "copy" in retry_table(catalog, stream, 'public."Bad One"')
        assert catalog.find_table(stream, "public", "Bad One").state is TableState.COPY_REQUESTED
        assert "pipeline" in retry_table(catalog, stream, "orders")
        (fact,) = quarantine_of(catalog, stream).all().values()
        assert (fact["reason"], fact["retry"]) == ("somebody wrote into it", True)
        with pytest.raises(UsageError, match="not quarantined"):
            retry_table(catalog, stream, "public.log")
        with pytest.raises(UnknownTable):
            retry_table(catalog, stream, "_messages")
        source = catalog.sources(stream)[0].id
        messages = catalog.table_for(
            stream, source, 0, "", "_messages", kind=TableKind.MESSAGES, state=TableState.STREAMING
        )
        held = QuarantinedTable(messages.id, "_messages", Seq(0), "somebody wrote into it", "lake", "")
        quarantine_of(catalog, stream).put(held)
        assert "pipeline" in retry_table(catalog, stream, "_messages")
        with pytest.raises(UnknownTable):
            retry_table(catalog, stream, "public.nothing")
        with pytest.raises(UnknownTable, match=r"no table sales\.orders") as caught:
            retry_table(catalog, stream, "sales.orders")
        assert caught.value.hint == "Name its schema too: public.orders."


def test_a_table_that_only_its_fold_holds_back_is_shown_with_the_folds_own_hint(home: Home) -> None:
    """Its error was known to the running pipeline alone, and `tables retry` said that the table is streaming."""
    reason, hint = "a total of column n of public.log has more than 64 bits", "Append an increment of the other sign."
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        log = catalog.find_table(stream, "public", "log")
        fold_failures_of(catalog, stream).put(log.id, code="invalid_value", reason=reason, hint=hint)
        (shown,) = (t for t in tables_of(catalog, stream, {}, {}) if t["name"] == "public.log")
        assert (shown["state"], shown["reason"], what_to_run(shown)) == ("quarantined", f"lake: {reason}", hint)
        assert "tries its fold again" in retry_table(catalog, stream, "public.log")
        # Its records land, and queries read them.
        assert _quarantined(home, stream).keys() == {"public.orders", 'public."Bad One"'}
        fold_failures_of(catalog, stream).drop(log.id)
        (shown,) = (t for t in tables_of(catalog, stream, {}, {}) if t["name"] == "public.log")
        assert (shown["state"], shown["reason"]) == ("history_only", "no key")


def test_a_table_that_was_dropped_at_the_source_and_waits_in_the_lake_is_shown_and_can_be_tried_again(
    home: Home,
) -> None:
    """It holds the log until the lake has its records; `status` didn't name the table, and it couldn't be retried."""
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        source = catalog.sources(stream)[0].id
        dropped = catalog.find_table(stream, "public", "orders")
        catalog.set_needed_from(stream, f"lake/{dropped.id}", Seq(1), kind=HolderKind.BACKLOG)
        catalog.set_state(dropped.id, TableState.GONE, "it was dropped")
        again = catalog.table_for(stream, source, 20_000, "public", "orders", state=TableState.STREAMING)
        shown = {
            t["id"]: (t["state"], t["reason"])
            for t in tables_of(catalog, stream, {}, {})
            if t["name"] == "public.orders"
        }
        assert shown == {
            int(dropped.id): ("quarantined", "lake: somebody wrote into it"),
            int(again.id): ("streaming", ""),
        }
        assert "from where it stopped" in retry_table(catalog, stream, "public.orders")
        assert quarantine_of(catalog, stream).retries_requested() == {dropped.id}
        assert catalog.table(again.id).state is TableState.STREAMING
        # The lake has the missing records: the table no longer holds the log.
        quarantine_of(catalog, stream).drop(dropped.id)
        assert [t["id"] for t in tables_of(catalog, stream, {}, {}) if t["name"] == "public.orders"] == [int(again.id)]


def test_a_table_is_copied_again_only_where_it_has_a_key(home: Home) -> None:
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        copy_table(catalog, stream, "public.orders")
        assert catalog.find_table(stream, "public", "orders").state is TableState.COPY_REQUESTED
        with pytest.raises(UsageError, match="no key"):
            copy_table(catalog, stream, "public.log")
        assert len(tables_of(catalog, stream, {}, {})) == 3


def test_retention_drops_nothing_that_the_pipeline_lacks(home: Home) -> None:
    (home.path / "millstream.toml").write_text(
        CONFIG + "[streams.shop.log]\nretention_age = '0s'\nretention_bytes = '0B'\n"
    )
    home = Home(home.path)
    with home.open_catalog() as catalog, ExitStack() as stack:
        owned = OwnedStream(home, catalog, "shop", home.config.streams["shop"], open_other)
        stream = catalog.stream("shop").id
        segments = home.wal_folder("shop") / "00000"
        for _ in range(2):
            _write(home, catalog.register_writer(stream)[1], stream, catalog.reservations(stream))
        owned.writer = stack.enter_context(stream_writer(home, catalog, "shop", owned.config, open_other))
        before = len(list(segments.glob("*.wal")))
        owned.drop_old_segments()
        assert len(list(segments.glob("*.wal"))) == before
        catalog.set_needed_from(stream, "lake", Seq(4))
        owned.drop_old_segments()
        assert len(list(segments.glob("*.wal"))) == before, "it hasn't landed"
        catalog.set_landed(stream, "lake", Seq(4))
        owned.drop_old_segments()
        assert len(list(segments.glob("*.wal"))) == before - 1


def test_the_oldest_segment_is_told_with_who_needs_it_and_a_consumer_that_falls_behind_is_cut_off(home: Home) -> None:
    def configure(log: str) -> tuple[Home, dict[str, Any], str]:
        (home.path / "millstream.toml").write_text(f"{CONFIG}[streams.shop.log]\nretention_age = '0s'\n{log}")
        configured = Home(home.path)
        status = collect_status(configured)
        return configured, status["streams"][0]["log"], prometheus_text(lambda: status).decode()

    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        for _ in range(2):
            _write(home, catalog.register_writer(stream)[1], stream, catalog.reservations(stream))
        catalog.set_needed_from(stream, "lake", Seq(1000))
        catalog.set_landed(stream, "lake", Seq(1000))
        catalog.set_needed_from(stream, "mail", Seq(2), kind=HolderKind.CONSUMER)
        roomy, log, text = configure("retention_bytes = '1MiB'")
        assert log["retention"] == {"age_s": 0.0, "bytes": 1 << 20, "bytes_max": 2 << 20}
        assert (log["oldest"]["segment"], log["oldest"]["needed_by"]) == (0, ["mail"])
        assert log["oldest"]["seconds"] >= 0
        assert log["held"]["mail"]["kind"] == "consumer"
        assert 'millstream_log_oldest_needed_by{holder="mail",stream="shop"} 1.0' in text
        assert 'millstream_log_oldest_segment{shard="0",stream="shop"} 0.0' in text
        assert 'millstream_log_held_bytes{holder="mail",kind="consumer",stream="shop"}' in text
        assert 'millstream_log_retention_bytes_max{stream="shop"} 2.097152e+06' in text
        folder = home.wal_folder("shop")
        assert not sweep(catalog, "shop", stream, folder, roomy.config.streams["shop"].log).dropped

        tight, _, _ = configure("retention_bytes = '0B'\nretention_bytes_max = '1B'")
        assert sweep(catalog, "shop", stream, folder, tight.config.streams["shop"].log).dropped
        with pytest.raises(CursorExpired, match="consumer mail"):
            catalog.set_needed_from(stream, "mail", Seq(3), kind=HolderKind.CONSUMER)
    _, log, text = configure("")
    assert log["cut_off"] == {"mail": {"kind": "consumer", "first": 4}}
    assert "mail" not in log["held"]
    assert log["first_seq"] > 3
    assert log["oldest"] is None or log["oldest"]["segment"] > 0
    assert 'millstream_log_cut_off{holder="mail",kind="consumer",stream="shop"} 1.0' in text
    shown = CliRunner().invoke(cli, ["--home", str(home.path), "status"]).output
    assert "consumer_cut_off: consumer mail was cut off" in shown


def test_a_segment_that_the_logs_own_sessions_need_is_shown(home: Home) -> None:
    """`status` ended in a KeyError once the log was larger or older than retention allows."""
    (home.path / "millstream.toml").write_text(
        f"{CONFIG}[streams.shop.log]\nretention_age = '0s'\nretention_bytes = '0B'\n"
    )
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        _write(home, catalog.register_writer(stream)[1], stream, catalog.reservations(stream))
    write_copy(RealFiles(), str(home.wal_folder("shop")), stream, Seq(0), ())
    (found,) = collect_status(home)["streams"]
    assert found["log"]["oldest"]["needed_by"] == ["lake", SESSIONS_HOLDER]
    shown = CliRunner().invoke(cli, ["--home", str(home.path), "status"])
    assert shown.exit_code == 0, shown.output
    assert "retention waits" in shown.output
    assert "the writer, which hasn't copied" in shown.output


def test_a_pipeline_that_never_ran_is_told_to_hold_everything(home: Home) -> None:
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        for _ in range(2):
            _write(home, catalog.register_writer(stream)[1], stream, catalog.reservations(stream))
    status = collect_status(home)
    log = status["streams"][0]["log"]
    assert log["oldest"]["needed_by"] == list(log["held"]) == ["lake"]
    assert (log["held"]["lake"]["kind"], log["held"]["lake"]["from"]) == ("pipeline", 1)
    assert log["held"]["lake"]["bytes"] > 0
    assert log["held"]["lake"]["seconds"] > 0
    text = prometheus_text(lambda: status).decode()
    assert 'millstream_log_held_seconds{holder="lake",kind="pipeline",stream="shop"}' in text
    command = ["--home", str(home.path), "status"]
    assert "retention waits" not in CliRunner().invoke(cli, command).output
    (home.path / "millstream.toml").write_text(f"{CONFIG}[streams.shop.log]\nretention_age = '0s'\n")
    shown = CliRunner().invoke(cli, command).output
    assert "which needs all of the log until `millstream run` has landed it" in shown


def test_who_keeps_how_much_of_the_log_is_told(home: Home) -> None:
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        catalog.set_needed_from(stream, "lake", Seq(4))
        catalog.set_needed_from(stream, "lake/1", Seq(1), kind=HolderKind.BACKLOG)
    status = collect_status(home)
    log = status["streams"][0]["log"]
    assert log["first_seq"] == 1
    assert log["held"]["lake"] == {"kind": "pipeline", "from": 4, "bytes": 0, "seconds": None}
    assert (log["held"]["lake/1"]["from"], log["held"]["lake/1"]["bytes"] > 0) == (1, True)
    assert log["held"]["lake/1"]["seconds"] > 0
    text = prometheus_text(lambda: status).decode()
    assert 'millstream_log_held_bytes{holder="lake",kind="pipeline",stream="shop"} 0.0' in text
    assert 'millstream_log_held_seconds{holder="lake/1",kind="backlog",stream="shop"}' in text
    assert 'millstream_log_first_seq{stream="shop"} 1.0' in text


def test_a_lost_catalog_takes_the_stream_and_a_higher_epoch_over_from_the_log(home: Home) -> None:
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
    for file in home.data.glob("catalog.db*"):
        file.unlink()
    with home.open_catalog() as catalog:
        with stream_writer(home, catalog, "shop", home.config.streams["shop"], open_other) as writer:
            assert writer.stream == catalog.stream("shop").id == stream
        assert catalog.writers(stream)[0].epoch == 2


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_serve_answers_and_ends_at_a_signal(home: Home) -> None:
    words = ["--home", str(home.path), "serve", "--log-format", "json"]
    environ = {**os.environ, "MILLSTREAM_HTTP__LISTEN": "127.0.0.1:0"}
    server = Command(words, stderr=subprocess.PIPE, text=True, env=environ)
    assert server.stderr is not None
    try:
        address = json.loads(server.stderr.readline())["address"]
        taken = run(home.path, "serve", "--log-format", "json", MILLSTREAM_HTTP__LISTEN=address)
        assert "error[home_busy]" in taken.stderr
        assert get(address, "/status")[0] == 200
        assert get(address, "/healthz")[0] == 503  # nothing captures
        assert 'millstream_lag_records{stage="lake",stream="shop"} 3.0' in get(address, "/metrics")[1]
    finally:
        server.send_signal(signal.SIGTERM)
        _, rest = server.communicate(timeout=120)
    assert server.returncode == 0, rest


def test_an_address_that_is_taken_is_a_typed_error(home: Home) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(home.path, "serve", MILLSTREAM_HTTP__LISTEN=f"127.0.0.1:{port}")
    assert done.returncode == 1
    assert "error[address_in_use]" in done.stderr
    assert "requests to it reach another process, not this home" in " ".join(done.stderr.split())


def test_each_view_that_a_table_has_in_the_lake_is_told_with_its_path(home: Home) -> None:
    folder = home.path / "lake" / "shop" / "history" / "public.log"
    folder.mkdir(parents=True)
    (stream,) = collect_status(home)["streams"]
    (log,) = (table for table in stream["tables"] if table["name"] == "public.log")
    assert log["paths"] == {"history": str(folder)}
    shown = CliRunner().invoke(cli, ["--home", str(home.path), "tables"]).output
    assert f"public.log: {folder}" in shown


def test_options_of_tables_count_for_its_commands(home: Home) -> None:
    def tables(*words: str) -> Any:
        return CliRunner().invoke(cli, ["--home", str(home.path), "tables", *words])

    assert json.loads(tables("--json", "ls").stdout) == json.loads(tables("ls", "--json").stdout)
    for words in (("--stream", "other", "ls"), ("--stream", "other", "copy", "public.orders")):
        ended = tables(*words)
        assert ended.exit_code != 0
        assert "other" in str(ended.exception)


def _keys(facts: Any) -> Any:
    return {key: _keys(value) for key, value in facts.items()} if isinstance(facts, dict) else None


def test_a_node_that_has_never_led_has_the_facts_of_its_log(tmp_path: Path) -> None:
    """Its catalog lacks the stream, or there is none: id, tokens, log and tables were missing."""
    home = followed_home(tmp_path)
    assert not home.has_catalog()
    found = collect_status(home)
    (stream,) = found["streams"]
    (leads, _) = collect_status(Home(tmp_path / "a"))["streams"]
    assert (stream["state"], stream["id"]) == ("follows", leads["id"])
    assert stream["tokens"] == {"durable": leads["tokens"]["durable"], "landed": None}
    assert [(table["name"], table["state"]) for table in stream["tables"]] == [("public.orders", "follows")]
    assert (stream["log"]["segments"], stream["log"]["first_seq"]) == (1, 1)
    log = leads["log"] | {"held": {}, "oldest": None, "retention": None}
    assert _keys(stream) == _keys({**leads, "replication": stream["replication"], "writer": None, "log": log})
    assert _keys(stream["tables"][0]) == _keys(leads["tables"][0] | {"paths": {}})
    assert found["problems"] == []
    assert "millstream_log_segments" in prometheus_text(lambda: found).decode()
    told = run(home.path, "status").stdout
    assert "stream shop: follows\n" in told
    assert "durable" in told
    assert "public.orders" in run(home.path, "tables").stdout
    home.open_catalog().close()
    assert collect_status(home)["streams"][0]["id"] == leads["id"]
