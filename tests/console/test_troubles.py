"""The troubles of a home, as the overview lists them: each state with its code and what to do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.console.homes import filled_home
from tests.console.test_html import Seen

from millstream.app.alerts.observations import Observations
from millstream.app.status import collect_status
from millstream.app.trouble_rules import Bounds, Condition, Kind, judge
from millstream.config.alerts_model import AlertsConfig
from millstream.console import log_page, pages, table_page
from millstream.console.html import Piece, Rendered
from millstream.console.troubles import troubles_of
from millstream.console.visible_streams import VisibleStreams
from millstream.errors import AccessError
from millstream.model.access import EVERYTHING, Rights
from millstream.serving.access import Caller
from millstream.testing.errors import coded

Change = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return collect_status(filled_home(tmp_path_factory.mktemp("well") / "home"))


def error(code: str) -> dict[str, Any]:
    return {
        "code": code,
        "message": "<it fails>",
        "hint": "Run `this`.",
        "gave_up": True,
        "since": "2026-03-01T12:00:00.000+00:00",
    }


def node(**facts: Any) -> dict[str, Any]:
    its = {
        "stream": "shop",
        "role": "follows",
        "leader": "b",
        "following": None,
        "followers": [],
        "too_few_followers": False,
        "other_streams": {},
        "error": None,
    }
    return its | {"age_s": 3.0, "persisted_upto": 7, "object_store": None} | facts


def quarantine(_: dict[str, Any], stream: dict[str, Any]) -> None:
    stream["tables"][0] |= {"state": "quarantined", "reason": "<bad>", "hint": ""}


def driver_dead(status: dict[str, Any], stream: dict[str, Any]) -> None:
    status["processes"] |= {"run": 1, "pipeline": None}
    stream["lag"]["lake"]["records"] = 5


def expired(_: dict[str, Any], stream: dict[str, Any]) -> None:
    facts = {"name": "one", "state": "expired", "behind": 3, "location": "x", "epoch": 1, "position": 2, "number": 1}
    stream["writers"] = [facts]


STATES: dict[str, Change] = {
    "source_unreachable": lambda _, stream: stream["errors"].update(capture=error("source_unreachable")),
    "slot_lost": lambda _, stream: stream["errors"].update(capture=error("slot_lost")),
    "disk_full": lambda _, stream: stream["errors"].update(capture=error("disk_full")),
    "lake_failed": lambda _, stream: stream["errors"].update(pipeline=error("lake_failed")),
    "slot_dropped": lambda _, stream: stream["source"].update(slot_dropped=True),
    "slot_left": lambda _, stream: stream["source"].update(
        left=[{"slot": "millstream_old", "publication": "millstream_old", "source": "db:5432/shop"}]
    ),
    "table_quarantined": quarantine,
    "key_changed": lambda _, stream: stream["tables"][0].update(refused=error("key_changed")),
    "pipeline_down": driver_dead,
    "server_down": lambda status, _: status.update(errors={"serve": error("unprotected")}),
    "lake_waits": lambda _, stream: stream["tables"][0].update(reason="lake: tried again: <no answer>"),
    "writer_expired": expired,
    "problem": lambda status, _: status["problems"].append("the log can't be read"),
    "other_stream": lambda _, stream: stream.update(
        replication=node(role="leads", other_streams={"b": {"message": "b has another", "hint": "Run `this`."}})
    ),
    "fenced": lambda _, stream: stream.update(replication=node(role="fenced")),
    "not_following": lambda _, stream: stream.update(replication=node()),
    "store_unavailable": lambda _, stream: stream.update(
        replication=node(role="leads", object_store={"error": error("store_unavailable"), "group": 1})
    ),
    "diverged": lambda _, stream: stream.update(replication=node(following={"error": error("diverged")})),
    "follower_cut_off": lambda _, stream: stream["log"]["cut_off"].update(f={"kind": "follower", "first": 4}),
    "follower_apart": lambda _, stream: stream.update(
        replication=node(
            role="leads",
            followers=[{"node": "b", "phase": "apart", "counts": True, "records_behind": None, "lag_s": None}],
        )
    ),
    "alerts": lambda status, _: status.update(
        alerts={"error": "refused", "receiver": "pager", "failing_since": "2026-01-01"}
    ),
}


def areas(status: dict[str, Any]) -> list[list[Piece]]:
    lists = [pages.overview(status, {}), pages.tables(status), pages.consumers(status, {}), pages.nodes(status)]
    of_log = [log_page.logs(status), log_page.area(status, "shop"), table_page.area(status, "shop", "public.orders")]
    return [list(pieces) for pieces in (*lists, *of_log)]


@pytest.mark.parametrize("code", STATES)
def test_each_trouble_comes_first_with_its_code_and_its_hint(well: dict[str, Any], code: str) -> None:
    status = copy.deepcopy(well)
    status["streams"][0].update(source=status["streams"][0]["source"] | {"configured": True})
    assert troubles_of(status) == []
    STATES[code](status, status["streams"][0])
    judged = judge(status, Observations(15.0), Bounds.of(AlertsConfig()), 1000.0)
    status["conditions"] = [condition.as_dict() for condition in judged]
    (trouble,) = troubles_of(status)
    assert trouble.code == code
    assert trouble.hint
    assert trouble.message
    first, *_ = pages.overview(status, {})
    seen = Seen(Rendered([first]).whole)
    assert "1 trouble" in seen.text
    assert trouble.code in seen.text
    assert trouble.message in seen.text
    for pieces in areas(status):
        html = Rendered(pieces).whole
        assert "<it" not in html
        assert "<bad" not in html


@pytest.mark.parametrize(
    ("running", "configured", "told"), [(None, True, True), (7, True, False), (None, False, False)]
)
def test_a_home_at_rest_says_so(well: dict[str, Any], running: int | None, configured: bool, told: bool) -> None:
    status = copy.deepcopy(well)
    status["processes"] = dict.fromkeys(status["processes"], running) | {"serve": 5}
    status["streams"][0]["source"]["configured"] = configured
    text = Seen(Rendered(list(pages.overview(status, {}))).whole).text
    assert ("isn't running" in text) is told


def test_the_page_of_nodes_shows_a_store_s_error_as_the_others(well: dict[str, Any]) -> None:
    """It was shown as Python writes a dict."""
    status = copy.deepcopy(well)
    STATES["store_unavailable"](status, status["streams"][0])
    text = Seen(Rendered(list(pages.nodes(status))).whole).text
    assert "store_unavailable <it fails> Run this." in text
    assert "gave_up" not in text


def test_a_stream_s_own_error_isn_t_repeated_as_a_condition(well: dict[str, Any]) -> None:
    status = copy.deepcopy(well)
    condition = Condition(Kind.CAPTURE_STALLED, "shop", "shop", "m", "h").as_dict()
    stalled = Condition(Kind.REPLICATION_STALLED, "shop", "shop", "m", "h").as_dict()
    status["conditions"] = [condition, condition | {"stream": "web"}, stalled]
    status["streams"][0]["errors"]["capture"] = error("slot_lost")
    status["streams"][0]["replication"] = node(following={"error": error("diverged")})
    assert [(one.code, one.stream) for one in troubles_of(status)] == [
        ("slot_lost", "shop"),
        ("diverged", "shop"),
        ("capture_stalled", "web"),
    ]


def test_tables_in_trouble_come_first(well: dict[str, Any]) -> None:
    status = copy.deepcopy(well)
    web = next(one for one in status["streams"] if one["name"] == "web")
    web["tables"][1] |= {"state": "quarantined", "reason": "bad", "last_change": "2026-03-01T12:00:00.123+00:00"}
    web["tables"][0] |= {"state": "copying", "copy": {"rows": 5, "rows_estimate": 10, "eta_s": 3.0}}
    seen = Seen(Rendered(list(pages.tables(status))).whole)
    states = [text for text in ("quarantined", "copying", "streaming") if text in seen.text]
    assert states == sorted(states, key=seen.text.index)
    assert "5 of about 10 rows, about 3.0 s left" in seen.text
    assert "millstream tables retry" in seen.text
    assert "2026-03-01 12:00:00" in seen.text


def test_a_consumers_redeliveries_and_rate_are_shown(well: dict[str, Any]) -> None:
    status = copy.deepcopy(well)
    lag = {"records": 0, "bytes": 0, "seconds": 0.0}
    counts = {"in_flight": 1, "dead": 2, "delivered": 3000, "redelivered": 4567, "acked": 8}
    facts = {"tables": None, "where": None, "cursor": "x.s1", "state": "active", "lag": lag, "error": None}
    status["streams"][0]["consumers"] = [{"name": "search", **counts, **facts}]
    stream = status["streams"][0]["name"]
    rates = {f"{stream}/search": 1234.4}
    for pieces in (pages.consumers(status, rates), pages.consumer(status, stream, "search", rates)):
        seen = Seen(Rendered(list(pieces)).whole).text
        assert "4,567" in seen
        assert "1,234" in seen
        assert "Acknowledged" in seen
        assert "Messages/s" in seen


def test_streams_that_never_ran_have_pages(well: dict[str, Any]) -> None:
    status = copy.deepcopy(well)
    never = {"name": "new", "id": None, "state": "never run", "replication": None, "consumers": [], "regions": []}
    status["streams"].append(never)
    for pieces in areas(status):
        assert Rendered(pieces).whole
    assert "never run" in Rendered(list(pages.overview(status, {}))).whole


def test_a_sight_is_what_the_rights_say_and_hides_the_rest(well: dict[str, Any]) -> None:
    status = copy.deepcopy(well)
    status["problems"] = ["web's log"]
    status["conditions"] = [{"kind": "x", "stream": "web", "subject": "s", "message": "m", "hint": "h"}]
    names = ("shop", "web")
    assert VisibleStreams.of(Caller(None, EVERYTHING), iter(names)).part_of(status) is status
    shop = VisibleStreams.of(Caller("a", Rights.parse(["shop=read"])), iter(names))
    assert "web" not in json.dumps({key: value for key, value in shop.part_of(status).items() if key != "home"})
    for rights in (["shop=write"], ["other=read"]):
        with pytest.raises(AccessError, check=coded("forbidden")):
            VisibleStreams.of(Caller("a", Rights.parse(rights)), iter(names))


def test_a_thousand_tables_cost_little_when_one_changes(well: dict[str, Any]) -> None:
    status = copy.deepcopy(well)
    table = status["streams"][0]["tables"][0]
    status["streams"][0]["tables"] = [table | {"name": f"public.t{n}", "id": n} for n in range(1000)]
    before = Rendered(list(pages.tables(status)))
    status["streams"][0]["tables"][500]["rows_per_s"] = 7.0
    after = Rendered(list(pages.tables(status)))
    assert list(after.since(before)["parts"]) == ["t-shop-500"]
    assert len(json.dumps(after.since(before))) < 1_000
