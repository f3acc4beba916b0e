"""`/metrics`: counters and histograms are what they are called, add up over processes, and are all documented."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.app.homes import wait_for
from tests.serving.serving_process import Served, served, web_home

import millstream
from millstream import process_metrics
from millstream.app.status import collect_status
from millstream.home.home import Home
from millstream.serving.metrics import prometheus_text

DOCS = Path(__file__).parents[2] / "docs"
PARTS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(web_home(tmp_path_factory.mktemp("web"))) as server:
        assert server.post("clicks", [{"id": 1}, {"id": 2}]).status_code == 200
        # A status from before the append is kept for a moment.
        wait_for(lambda: values(scraped(server)["millstream_log_records"], "_total", stream="web"))
        yield server


def scraped(server: Served) -> dict[str, Metric]:
    with server.client() as client:
        text = client.get("/metrics").raise_for_status().text
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family: Metric, part: str = "", **labels: str) -> dict[tuple[str, ...], float]:
    """Return the values of the samples with these labels, by their other labels' values."""
    return {
        tuple(value for label, value in sorted(sample.labels.items()) if label not in labels): sample.value
        for sample in family.samples
        if sample.name == family.name + part and labels.items() <= sample.labels.items()
    }


def test_each_metric_is_of_the_kind_that_its_name_says(server: Served) -> None:
    found = scraped(server)
    assert len(found) > 50
    for name, family in found.items():
        assert name.startswith("millstream_")
        assert family.documentation
        for sample in family.samples:
            assert sample.name in {name + part for part in PARTS[family.type]}
        if family.type == "gauge":
            assert not name.endswith(("_total", "_bucket", "_sum", "_count"))
        if family.type == "histogram":
            assert name.endswith("_seconds")
            of_series: dict[tuple[str, ...], list[tuple[float, float]]] = {}
            for sample in family.samples:
                if sample.name == f"{name}_bucket":
                    rest = tuple(value for label, value in sorted(sample.labels.items()) if label != "le")
                    of_series.setdefault(rest, []).append((float(sample.labels["le"]), sample.value))
            for series, buckets in of_series.items():
                assert buckets == sorted(buckets)
                assert [count for _, count in buckets] == sorted(count for _, count in buckets)
                assert buckets[-1] == (float("inf"), values(family, "_count")[series])


def documented() -> dict[str, str]:
    """Return the kind of each metric in the reference, by its name."""
    found: dict[str, str] = {}
    kind = ""
    for line in (DOCS / "reference" / "metrics.md").read_text().splitlines():
        cells = line.split("|")
        if len(cells) > 1 and cells[1].strip() in PARTS:
            kind = cells[1].strip()
        elif len(cells) > 1:
            found |= dict.fromkeys(re.findall(r"`(millstream_\w+)`", cells[1]), kind)
    return found


def test_the_reference_has_each_metric_under_its_kind(server: Served) -> None:
    exist = {
        name + ("_total" if family.type == "counter" else ""): family.type for name, family in scraped(server).items()
    }
    assert documented() == exist


def expressions() -> list[str]:
    """Return the expressions of the dashboard, and those that the guide has as alerts."""
    dashboard = json.loads((DOCS / "how-to" / "grafana.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    alerts = re.findall(r"^\| `(.+?)` \| ", (DOCS / "how-to" / "watch-it.md").read_text(), re.MULTILINE)
    assert len(shown) > 20
    assert len(alerts) > 15
    return [*shown, *(alert.replace("\\|", "|") for alert in alerts)]


def test_the_dashboard_and_the_alerts_ask_for_series_that_exist(server: Served) -> None:
    found = scraped(server)
    kinds = {name + part: family.type for name, family in found.items() for part in PARTS[family.type]}
    labels = {name: {label for sample in family.samples for label in sample.labels} for name, family in found.items()}
    for expression in expressions():
        for name, matchers, window in re.findall(r"(millstream_\w+)(\{[^}]*\})?(\[\w+\])?", expression):
            assert name in kinds, expression
            # A rate of a gauge, and a plain comparison of a counter, mean nothing.
            assert (kinds[name] == "gauge") == (not window), expression
            known = labels.get(name) or labels.get(name.rpartition("_")[0])
            if known:
                assert set(re.findall(r"(\w+)=", matchers)) <= known, expression


def test_what_is_appended_and_asked_over_http_is_counted_and_timed(server: Served) -> None:
    found = scraped(server)
    assert values(found["millstream_log_records"], "_total", stream="web") == {("serve",): 2.0}
    assert values(found["millstream_log_operations"], "_total", stream="web") == {("serve",): 1.0}
    (written,) = values(found["millstream_log_written_bytes"], "_total", stream="web").values()
    assert 0 < written < 10_000
    for name in ("append", "log_commit", "log_fsync"):
        family = found[f"millstream_{name}_seconds"]
        assert values(family, "_count", stream="web") == {("serve",): 1.0}
        (total,) = values(family, "_sum", stream="web").values()
        assert 0 < total < 60
    rows = {"process": "serve", "method": "POST", "route": "/v1/streams/{stream}/tables/{table}"}
    assert values(found["millstream_http_request_seconds"], "_count", **rows) == {("200",): 1.0}


def test_an_unknown_path_or_method_makes_no_series_of_its_own(server: Served) -> None:
    with server.client() as client:
        assert client.request("PROPFIND", "/coffee").status_code in {404, 405}
        assert client.get("/no/such/path").status_code == 404

    def counted() -> dict[tuple[str, ...], float]:
        # Without the process; sorted by label: method, route, status.
        return values(scraped(server)["millstream_http_request_seconds"], "_count", process="serve")

    wait_for(lambda: ("GET", "other", "404") in counted())
    found = counted()
    assert {method for method, _, _ in found} == {"GET", "POST", "other"}
    assert not any("coffee" in route or "such" in route for _, route, _ in found)


@pytest.mark.long
def test_each_process_has_series_of_its_own_that_never_fall(tmp_path: Path) -> None:
    """A sum over processes fell when one of them ended, which `rate()` takes for a restart."""
    folder = web_home(tmp_path)
    home = Home(folder)
    seen: dict[tuple[str, ...], list[float]] = {}

    def look() -> None:
        families = text_string_to_metric_families(prometheus_text(lambda: collect_status(home)).decode())
        (family,) = (family for family in families if family.name == "millstream_log_records")
        for labels, value in values(family, "_total", stream="web").items():
            seen.setdefault(labels, []).append(value)

    with millstream.open(folder) as opened:
        before = _records_here(home) or 0
        opened.append("web", "clicks", [{"id": 1}])
        look()
        with served(folder) as server:  # it appends through this process
            server.post("clicks", [{"id": 2}])
            look()
    with millstream.open(folder) as opened:  # the log is opened again, in this process
        opened.append("web", "clicks", [{"id": 3}])
        look()
    with served(folder) as server:
        server.post("clicks", [{"id": 4}, {"id": 5}])
        look()
    assert seen == {("append",): [before + 1, before + 2, before + 3], ("serve",): [2.0]}


def _records_here(home: Home) -> float | None:
    """Return what this process has counted for the home's stream."""
    with home.open_catalog() as catalog:
        label = str(catalog.resolve_stream("web"))
    return next((one["value"] for one in process_metrics.LOG_RECORDS.series() if one["labels"] == [label]), None)


def test_the_series_of_another_homes_stream_are_left_out() -> None:
    measured = {"owner": {"millstream_log_records_total": [{"labels": ["2"], "value": 7}]}}
    status: dict[str, Any] = {"streams": [], "problems": [], "processes": {}, "measures": measured}
    status["resources"] = {"memory_bytes": {"serve": 5}, "disk_free_bytes": 7, "disk_size_bytes": None}
    assert b"millstream_log_records_total{" not in prometheus_text(lambda: status)


def test_a_counter_only_grows() -> None:
    counter = process_metrics.Counter("millstream_things_total", "Things.", "stream")
    counter.of("a").add(2)
    with pytest.raises(AssertionError):
        counter.of("a").add(-1)
    assert counter.series() == [{"labels": ["a"], "value": 2}]


def test_a_duration_is_counted_in_the_first_bucket_that_holds_it() -> None:
    histogram = process_metrics.Histogram("millstream_work_seconds", "Work.", bounds_s=(0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        histogram.of().observe(seconds)
    assert histogram.series() == [{"labels": [], "counts": [2, 1, 1], "sum_s": pytest.approx(7.65)}]


def test_a_forked_child_starts_with_nothing() -> None:
    process_metrics.LOG_RECORDS.of("parent").add(1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, json.dumps(process_metrics.all_series()).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    assert os.read(read, 1 << 16) == b"{}"
    os.close(read)
