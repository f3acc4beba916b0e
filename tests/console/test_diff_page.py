"""Comparisons with the source in the console: who may start one, what it shows, and what bounds it."""

from __future__ import annotations

import errno
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from tests.console.homes import Site, filled_home, site_of
from tests.console.test_actions import OWN, audit
from tests.console.test_html import Seen

from millstream.console import diff_page
from millstream.console.diff_page import Diffs
from millstream.console.html import Rendered
from millstream.console.routes import Console
from millstream.workers import Worker

DEADLINE_S: Final = 60.0
SLEEPS: Final = "import time; time.sleep(600)"
REPORT: Final[dict[str, Any]] = {
    "lsn": "0/1",
    "counts": {"equal": 0, "different": 1, "not_compared": 1, "skipped": 0},
    "tables": [
        {
            "table": "public.<orders>",
            "state": "different",
            "reason": "",
            "notes": ["<note>"],
            "rows": {"source": 7, "lake": 6},
            "different": 120,
            "listed": 3,
            "differences": [
                {"key": {"id": "<b>"}, "what": "values", "columns": {"total": {"lake": None, "source": "<i>" * 500}}},
                {"key": {"id": "2"}, "what": "missing_in_lake"},
                {"key": {"a": "1", "b": None}, "what": "count", "rows": {"lake": 1, "source": 2}},
            ],
        },
        {
            "table": "public.users",
            "state": "not_compared",
            "reason": "its columns have rules",
            "notes": [],
            "rows": {"source": 0, "lake": 0},
            "different": 0,
            "listed": 0,
            "differences": [],
        },
    ],
}


@pytest.fixture
def diffs(site: Site) -> Iterator[Diffs]:
    console = next(part for part in site.application._parts if isinstance(part, Console))
    before = console.diffs._command
    yield console.diffs
    console.diffs.stop()
    ended(console.diffs)
    console.diffs._command = before
    site.home.audit_file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("diffs")
    with site_of(filled_home(folder / "home", "[http]\ntokens_required = true\n")) as found:
        yield found


def ended(diffs: Diffs) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while diffs._process is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def until_shown(site: Site, kind: str, text: str) -> None:
    """Wait for the next status: a page's live area is at most a second old."""
    deadline_s = time.monotonic() + DEADLINE_S
    while text not in shown(site, kind):
        assert time.monotonic() < deadline_s


def command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def post(site: Site, kind: str, **fields: str) -> Any:
    return site.call("POST", "/diff", OWN | {"cookie": site.cookie(kind)}, **fields)


def shown(site: Site, kind: str) -> str:
    return site.call("GET", "/diff", {"cookie": site.cookie(kind)}).text


def test_a_comparison_is_started_noted_and_shown_escaped(site: Site, diffs: Diffs) -> None:
    diffs._command = command(f"import sys; assert sys.argv[1] == 'diff'; print({json.dumps(REPORT)!r}); sys.exit(3)")
    assert post(site, "admin", do="start", stream="shop", table=" public.orders ").status_code == 303
    ended(diffs)
    asked, done = audit(site)
    assert (asked["action"], asked["subject"], asked["token"], asked["outcome"]) == (
        ("diff", "public.orders", "admin", "asked")
    )
    assert {key: done[key] for key in asked} == asked | {"at": done["at"], "outcome": "differences"}
    assert (done["counts"]["different"], done["seconds"] > 0) == (1, True)
    page = Rendered(list(diff_page.area(diffs.last, may_see=True))).whole
    seen = Seen(page)
    text = seen.text
    assert not [name for name, _ in seen.tags if name in {"b", "i", "orders", "note"}]
    for words in (
        "id=<b>",
        "missing in lake",
        "a=1, b=NULL",
        "117 more keys differ. millstream diff --json lists them",
        "its columns have rules",
        "<note>",
    ):
        assert words in text
    assert "(1,500 characters)" in text
    assert re.search(r"begun \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC by admin", text)
    assert "Nothing was compared" in Rendered(list(diff_page.area(diffs.last, may_see=False))).whole


def test_one_runs_at_a_time_and_is_stopped(site: Site, diffs: Diffs) -> None:
    diffs._command = command(SLEEPS)
    assert post(site, "admin", do="start", stream="shop").status_code == 303
    assert "runs already" in post(site, "admin", do="start", stream="shop").text
    assert post(site, "admin", do="stop").status_code == 303
    ended(diffs)
    assert diffs.last is not None
    assert (diffs.last.state, diffs.last.report) == ("stopped", None)
    lines = audit(site)
    assert [line["outcome"] for line in lines] == ["asked", "asked", "refused", "stopped"]
    assert (lines[0]["token"], lines[-1]["stopped_by"]) == ("admin", "admin")


def test_a_comparison_that_lacks_a_thread_keeps_no_other_from_its_turn(
    site: Site, diffs: Diffs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process went on without a bound, and every other was refused as long as the server ran."""

    def refused(_: Worker) -> Worker:
        raise OSError(errno.EAGAIN, "no more threads can be started")

    diffs.last, diffs._command = None, command(SLEEPS)
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "start", refused)
        with pytest.raises(OSError, match="no more threads"):
            diffs.start("admin", "shop", "")
    assert (diffs.last, diffs._process) == (None, None)
    assert SLEEPS not in [word for child in psutil.Process().children() for word in child.cmdline()]
    assert post(site, "admin", do="start", stream="shop").status_code == 303
    assert post(site, "admin", do="stop").status_code == 303


def test_a_stop_starts_nothing_if_nothing_was_compared(site: Site, diffs: Diffs) -> None:
    diffs.last, diffs._command = None, command(SLEEPS)
    assert post(site, "admin", do="stop", stream="shop").status_code == 303
    assert (diffs.last, diffs._process, site.home.audit_file.exists()) == (None, None, False)


@pytest.mark.parametrize(
    ("counts", "outcome"),
    [
        ({"equal": 2, "different": 0, "not_compared": 0}, "equal"),
        ({"equal": 2, "different": 0, "not_compared": 1}, "not_compared"),
        (None, "failed"),
    ],
)
def test_the_audit_log_has_each_comparison_s_end(
    site: Site, diffs: Diffs, counts: dict[str, int] | None, outcome: str
) -> None:
    answer = "" if counts is None else json.dumps(REPORT | {"counts": counts})
    diffs._command = command(f"import sys; print({answer!r}); print('<why>', file=sys.stderr)")
    assert post(site, "admin", do="start", stream="shop").status_code == 303
    ended(diffs)
    asked, done = audit(site)
    assert (asked["outcome"], done["outcome"]) == ("asked", outcome)
    assert (done.get("message"), done.get("counts")) == ("<why>" if counts is None else None, counts)


def test_a_comparison_that_has_ended_is_stopped_by_nothing(diffs: Diffs) -> None:
    diffs._command = command(f"print({json.dumps(REPORT)!r})")
    diffs.start("admin", "shop", "", lambda _one: diffs.stop())
    ended(diffs)
    assert diffs.last is not None
    assert diffs.last.state == "done"


@pytest.mark.parametrize("kind", ["all", "shop"])
def test_who_lacks_the_right_starts_and_stops_none(site: Site, diffs: Diffs, kind: str) -> None:
    assert "needs a token" in shown(site, kind)
    assert post(site, kind, do="start", stream="shop").status_code == 403
    diffs._command = command(SLEEPS)
    diffs.start("admin", "web", "")
    assert post(site, kind, do="stop").status_code == 403
    assert diffs._process is not None
    if kind == "all":
        until_shown(site, kind, "stream web")
    assert ("stream web" in shown(site, kind)) == (kind == "all")
    assert [(line["action"], line["outcome"]) for line in audit(site)] == [("diff", "refused")] * 2


def test_a_server_s_end_ends_a_comparison_and_notes_it(site: Site, diffs: Diffs) -> None:
    diffs._command = command(SLEEPS)
    assert post(site, "admin", do="start", stream="shop").status_code == 303
    diffs.close()
    asked, stopped = audit(site)
    assert (asked["outcome"], stopped["outcome"], "stopped_by" in stopped) == ("asked", "stopped", False)


def test_its_time_and_its_answer_are_bounded(diffs: Diffs, monkeypatch: Any) -> None:
    monkeypatch.setattr(diff_page, "_ANSWER_BYTES_MAX", 1000)
    diffs._command = command(f"print('x' * 100_000, flush=True); {SLEEPS}")
    diffs.start("admin", "shop", "")
    ended(diffs)
    assert diffs.last is not None
    assert diffs.last.state == "stopped"
    diffs._command, diffs.time_max_s = command(SLEEPS), 0.0
    diffs.start("admin", "shop", "")
    ended(diffs)
    assert diffs.last.state == "stopped"
    diffs.time_max_s = diff_page.TIME_MAX_S


def test_why_it_failed_is_shown(diffs: Diffs) -> None:
    diffs.start("admin", "shop", "--repair")
    ended(diffs)
    assert diffs.last is not None
    assert diffs.last.state == "failed"
    assert "source" in diffs.last.said, "the command's own words"


def test_a_name_that_no_table_has_is_refused_and_noted(site: Site, diffs: Diffs) -> None:
    answer = post(site, "admin", do="start", stream="shop", table="public.a\0b")
    assert (answer.status_code, diffs._process) == (400, None)
    assert [line["outcome"] for line in audit(site)] == ["asked", "refused"]


def test_a_stream_that_is_not_there_starts_nothing(site: Site, diffs: Diffs) -> None:
    answer = post(site, "admin", do="start", stream="nothing")
    assert answer.status_code in {403, 404}
    assert diffs._process is None
