"""A pipeline that an error ended: `status`, `doctor` and the console show it until the pipeline runs again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession
from tests.app.homes import make_home
from tests.export.test_log_export import fill, home_at

from millstream.administration.doctor import examine
from millstream.app.open_home import OpenHome
from millstream.app.pipelines import StreamPipeline, first_error, noted, run_pipelines
from millstream.app.status import collect_status
from millstream.cli.main import cli
from millstream.console.html import Rendered
from millstream.console.pages import overview
from millstream.errors import DiskFull, EngineError, LakeUnavailable, MillstreamError, OffsetExpired
from millstream.home.home import Home
from millstream.model.positions import Seq
from millstream.processes.child_process import Lifeline
from millstream.processes.control_socket import ControlServer
from millstream.processes.role_locks import RoleLock
from millstream.protocol.retention import Retention, RetentionBounds
from millstream.spark.pipeline import PipelineOutcome
from millstream.testing.errors import coded
from millstream.wal.segment_deletion import drop_segments
from millstream.writers.stall_reasons import forget_given_up, note_given_up, troubles


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home whose log lacks its beginning, and whose lake is empty."""
    home = home_at(tmp_path / "home")
    fill(home)
    folder = home.wal_folder("shop")
    size = sum(path.stat().st_size for path in folder.rglob("*.wal"))
    bounds = RetentionBounds(age_s=1e9, size_bytes=size - 100_000, bytes_max=size)
    assert drop_segments(str(folder), Retention(), bounds).dropped
    return home


def ended(home: Home) -> dict[str, Any]:
    """Run the pipeline of `shop` until its error ends it; return the facts that its process would report."""
    with home.open_catalog() as catalog:
        pipeline = StreamPipeline(home, catalog, "shop", home.config.streams["shop"])
        pipeline.run(Lifeline(), lambda: None)
        return pipeline.facts()


def trouble(home: Home) -> dict[str, Any] | None:
    """Return what the status has about the pipeline of `shop`."""
    found: dict[str, Any] | None = collect_status(home)["streams"][0]["errors"].get("pipeline")
    return found


def test_a_pipeline_whose_position_was_dropped_is_shown_everywhere_after_its_process_has_ended(home: Home) -> None:
    assert trouble(home) is None
    facts = ended(home)
    shown = trouble(home)
    assert shown is not None
    assert (shown["code"], shown["gave_up"], shown["retry"]) == ("offset_expired", True, "never")
    assert "the records between are gone" in shown["message"]
    since = shown["since"]
    ended(home)
    assert (trouble(home) or {})["since"] == since, "it has stood still since the first of several same ends"

    text = CliRunner().invoke(cli, ["--home", str(home.path), "status"]).output
    assert f"pipeline has given up: offset_expired: {shown['message']} (since {since})\n    {shown['hint']}" in text
    (found,) = [one for one in examine(home, lambda _line: None) if one.check == "pipeline of shop"]
    assert (found.code, found.blocks, found.fix) == ("offset_expired", "home", shown["hint"])
    assert found.message == f"given up: {shown['message']} (since {since})"
    page = Rendered(list(overview(collect_status(home), {}))).whole
    assert "<code>offset_expired</code></strong> shop: " in page
    assert "pipeline has given up: " in page
    assert f"(since {since})" in page
    assert "<code>millstream slot drop</code>" in page
    assert [(one["part"], one["code"], one["since"]) for one in troubles(home)] == [
        ("pipeline", "offset_expired", since)
    ]

    live = {"streams": {"shop": facts}}  # its process goes on for the other streams
    with ControlServer(home, "pipeline", {"status": lambda: live}):
        assert trouble(home) == shown
        live["streams"]["shop"] = facts | {"error": None, "gave_up": False}
        assert trouble(home) == shown | {"gave_up": False}, "it was started again, and has landed nothing yet"


def test_a_pipeline_that_run_starts_again_waits_and_has_given_up_once_run_has_ended(home: Home) -> None:
    with home.open_catalog() as catalog:
        note_given_up(catalog, "shop", "pipeline", LakeUnavailable("no answer"))
    with RoleLock.take(home.run_folder, "run"):
        shown = trouble(home)
        assert shown is not None
        assert not shown["gave_up"]
        text = CliRunner().invoke(cli, ["--home", str(home.path), "status"]).output
        assert f"pipeline waits, and retries: lake_unavailable: no answer (since {shown['since']})" in text
    assert trouble(home) == shown | {"gave_up": True}


def test_an_error_before_the_pipelines_begin_is_that_of_each_stream(home: Home) -> None:
    with (
        home.open_catalog() as catalog,
        pytest.raises(EngineError, check=coded("java_missing")),
        noted(catalog, ["shop", "never_run"]),
    ):
        raise EngineError("there is no Java", code="java_missing")
    assert (trouble(home) or {})["code"] == "java_missing"


def test_an_error_of_a_stream_that_the_catalog_lacks_is_shown_also_once_it_has_it(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text("[streams.shop.source]\ndsn = 'host=127.0.0.1 port=1'\n")
    home = Home(tmp_path)
    home.prepare()
    with home.open_catalog() as catalog:
        with pytest.raises(EngineError), noted(catalog, ["shop"]):
            raise EngineError("there is no Java", code="java_missing", hint="Install one.")
        shown = trouble(home)
        assert shown is not None
        assert (shown["code"], shown["gave_up"]) == ("java_missing", True)
        assert [(one["stream"], one["code"]) for one in troubles(home)] == [("shop", "java_missing")]
        text = CliRunner().invoke(cli, ["--home", str(home.path), "status"]).output
        assert "stream shop: has never run\n  pipeline has given up: java_missing: there is no Java" in text
        catalog.resolve_stream("shop")
        assert trouble(home) == shown, "capture began next to it"
        forget_given_up(catalog, "shop", "pipeline")
    assert trouble(home) is None
    assert troubles(home) == []


def test_a_stream_that_was_given_up_does_not_keep_the_others_from_another_try(home: Home) -> None:
    """Its error was the process's, and `run` gave up all pipelines by it."""
    with home.open_catalog() as catalog:
        pipelines = [
            StreamPipeline(home, catalog, name, home.config.streams["shop"]) for name in ("one", "two", "three")
        ]
    assert first_error(pipelines) is None
    errors: list[MillstreamError | None] = [OffsetExpired("gone"), None, EngineError("Spark ended")]
    for pipeline, error in zip(pipelines, errors, strict=True):
        pipeline.error = error
    assert first_error(pipelines) is errors[2]
    assert first_error(pipelines[:2]) is errors[0]


def test_a_catalog_on_a_full_disk_gives_no_pipeline_up(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DiskFull("no space for the catalog")

    monkeypatch.setattr("millstream.spark.driver.run_pipeline", fail)
    assert not ended(home)["gave_up"]
    with RoleLock.take(home.run_folder, "run"):
        assert (trouble(home) or {})["gave_up"] is False


def test_a_stop_before_anything_has_landed_does_not_hide_it(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(home)
    outcome = PipelineOutcome(Seq(0), "t", 0, caught_up=False)
    monkeypatch.setattr("millstream.spark.driver.run_pipeline", lambda *_, **__: outcome)
    ended(home)
    assert (trouble(home) or {})["code"] == "offset_expired"


def test_an_error_that_no_restart_mends_is_kept_also_after_another_stream_has_told_all_to_stop(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifeline = Lifeline()

    def fail(*_: object, **__: object) -> None:
        lifeline.stop.set()
        raise OffsetExpired("gone")

    monkeypatch.setattr("millstream.spark.driver.run_pipeline", fail)
    with home.open_catalog() as catalog:
        StreamPipeline(home, catalog, "shop", home.config.streams["shop"]).run(lifeline, lambda: None)
    assert (trouble(home) or {})["code"] == "offset_expired"


@pytest.mark.long
def test_it_is_no_longer_shown_once_a_pipeline_with_nothing_to_land_runs(tmp_path: Path, spark: SparkSession) -> None:
    assert spark.sparkContext.version
    home = Home(make_home(tmp_path / "home", "[streams.shop]\n"))
    with OpenHome(home) as opened:
        opened.append("shop", "orders", [{"id": 1}])
    drained, stopped = Lifeline(), Lifeline()
    drained.drain.set()
    run_pipelines(home, drained, on_progress=lambda _facts: None)
    with home.open_catalog() as catalog:
        note_given_up(catalog, "shop", "pipeline", LakeUnavailable("no answer"))
    run_pipelines(home, stopped, on_progress=lambda _facts: stopped.stop.set())
    assert trouble(home) is None


@pytest.mark.long
def test_it_is_no_longer_shown_once_the_pipeline_has_landed_something(tmp_path: Path, spark: SparkSession) -> None:
    assert spark.sparkContext.version
    home = Home(make_home(tmp_path / "home", "[streams.shop]\n"))
    with OpenHome(home) as opened:
        opened.append("shop", "orders", [{"id": 1}])
    with home.open_catalog() as catalog:
        note_given_up(catalog, "shop", "pipeline", OffsetExpired("gone"))
    assert (trouble(home) or {})["code"] == "offset_expired"
    lifeline = Lifeline()
    lifeline.drain.set()
    seen: list[bool] = []
    run_pipelines(home, lifeline, on_progress=lambda _facts: seen.append(bool(troubles(home))))
    assert seen[-1] is False
    assert trouble(home) is None
