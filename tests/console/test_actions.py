"""Actions in the console: who may, what asks first, what happens, and what the audit log says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import wait_for
from tests.console.homes import HOSTILE, VALUE, Site, filled_home, site_of
from tests.console.test_html import Seen

from millstream.catalog import TableState
from millstream.console import actions
from millstream.console.routes import _REFUSED_NOTED_MAX, _REFUSED_WITHIN_S, Console
from millstream.model.access import Rights

OWN = {"origin": "http://127.0.0.1:8787"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp("actions")
    with site_of(filled_home(folder / "home", "[http]\ntokens_required = true\n")) as found:
        yield found


@pytest.fixture
def site(opened: Site) -> Iterator[Site]:
    call = opened.application.consumers.of_home.call
    call("shop", "create", None, {"name": "search", "start": "earliest"})
    yield opened
    call("shop", "delete", "search")
    opened.home.audit_file.unlink(missing_ok=True)


def act(site: Site, kind: str, action: str, **fields: str) -> Any:
    form = {"action": action, "stream": "shop", "subject": "search"} | fields
    return site.call("POST", "/console/act", OWN | {"cookie": site.cookie(kind)}, **form)


def audit(site: Site) -> list[dict[str, Any]]:
    file = site.home.audit_file
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def state(site: Site) -> str:
    return str(site.application.consumers.of_home.call("shop", "show", "search").body["state"])


def test_an_action_is_done_and_noted_with_the_token_s_name(site: Site) -> None:
    cookie = {"cookie": site.cookie("admin")}
    page = Seen(site.call("GET", "/consumers/shop/search", cookie).text)
    assert [a["value"] for n, a in page.tags if n == "input" and a["name"] == "action"] == ["pause", "rewind"]
    done = act(site, "admin", "pause")
    assert done.status_code == 200, done.text
    assert state(site) == "paused"
    assert [(line["token"], line["action"], line["subject"], line["outcome"]) for line in audit(site)] == [
        ("admin", "pause", "search", "asked"),
        ("admin", "pause", "search", "done"),
    ]
    assert site.home.audit_file.stat().st_mode & 0o077 == 0
    assert act(site, "admin", "resume").status_code == 200
    assert state(site) == "active"


@pytest.mark.parametrize(
    ("state", "offered"),
    [
        ("streaming", []),
        ("copy_held", []),
        ("quarantined", ["retry"]),
        ("copying", ["pause_copy"]),
        ("copy_requested", ["pause_copy"]),
        ("paused", ["resume_copy"]),
    ],
)
def test_another_copy_is_offered_of_tables_that_have_a_source(state: str, offered: list[str]) -> None:
    """It was offered on tables that applications write, where it is always refused, and in too few states on others."""
    assert actions.offered_on_table({"state": state, "captured": True}) == [*offered, "copy"]
    assert actions.offered_on_table({"state": state, "captured": False}) == offered
    for other in ("history_only", "gone", "follows"):
        assert actions.offered_on_table({"state": other, "captured": True}) == []


@pytest.mark.parametrize("kind", ["all", "shop", "write"])
def test_who_lacks_the_right_sees_no_buttons_and_does_nothing(site: Site, kind: str) -> None:
    if kind != "write":  # it can't log in
        assert "Pause" not in site.call("GET", "/consumers/shop/search", {"cookie": site.cookie(kind)}).text
        assert act(site, kind, "pause").status_code == 403
    header = {"authorization": f"Bearer {site.tokens[kind]}"}
    form = {"action": "pause", "stream": "shop", "subject": "search"}
    assert site.call("POST", "/console/act", OWN | header, **form).status_code == 403
    assert state(site) == "active"
    refused = [(line["action"], line["subject"], line["outcome"], line["code"]) for line in audit(site)]
    assert refused == [("pause", "search", "refused", "forbidden")] * (0 if kind == "write" else 2)


def test_a_refused_action_is_noted_shortly(site: Site) -> None:
    assert act(site, "shop", "x" * 5000).status_code == 403
    (line,) = audit(site)
    assert (line["outcome"], line["action"]) == ("refused", "x" * 200)


def test_refused_actions_fill_no_disk(site: Site) -> None:
    """Any token that reads could have lines written for ever."""
    console = next(part for part in site.application._parts if isinstance(part, Console))
    console._refused_s.clear()
    headers, form = OWN | {"cookie": site.cookie("shop")}, {"action": "pause", "stream": "shop", "subject": "search"}
    for _ in range(_REFUSED_NOTED_MAX + 5):
        assert site.call("POST", "/console/act", headers, **form).status_code == 403
    assert len(audit(site)) == _REFUSED_NOTED_MAX
    assert act(site, "admin", "pause").status_code == 200
    assert [line["outcome"] for line in audit(site)][-2:] == ["asked", "done"]
    console._refused_s[0] -= _REFUSED_WITHIN_S
    assert act(site, "shop", "resume").status_code == 403
    assert audit(site)[-1]["outcome"] == "refused"
    console._refused_s.clear()


def test_the_right_is_that_of_the_action_s_own_stream(site: Site) -> None:
    with site.home.open_catalog() as catalog:
        site.tokens["web"] = catalog.create_access_token(Rights.parse(["web=admin", "shop=read"]), name="web")[1]
    assert "Pause" not in site.call("GET", "/consumers/shop/search", {"cookie": site.cookie("web")}).text
    assert act(site, "web", "pause").status_code == 403
    assert state(site) == "active"


def test_another_page_s_form_does_nothing(site: Site) -> None:
    cookie, form = site.cookie("admin"), {"action": "pause", "stream": "shop", "subject": "search"}
    for headers in ({}, {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:3000"}):
        answer = site.call("POST", "/console/act", headers | {"cookie": cookie}, **form)
        assert answer.status_code in {303, 403}, headers
    # With the token itself, a program that names no page is no form of ours either.
    header = {"authorization": f"Bearer {site.tokens['admin']}"}
    assert site.call("POST", "/console/act", header, **form).status_code == 403
    assert site.call("GET", "/console/act?action=pause&stream=shop&subject=search", {"cookie": cookie}).status_code in {
        404,
        405,
    }
    assert state(site) == "active"
    assert audit(site) == []


@pytest.mark.parametrize("name", [name for name, action in actions.ACTIONS.items() if action.warning])
def test_what_destroys_asks_first(site: Site, name: str) -> None:
    asked = act(site, "admin", name, text="latest")
    assert asked.status_code == 200
    seen = Seen(asked.text)
    assert "Are you sure?" in seen.text
    assert actions.ACTIONS[name].warning in seen.text
    assert audit(site) == []
    fields = {a["name"]: a["value"] for n, a in seen.tags if n == "input" and a.get("type") == "hidden"}
    assert (fields["confirmed"], fields["action"], fields["text"]) == ("yes", name, "latest")


def test_a_confirmed_rewind_moves_the_cursor_and_a_wrong_one_says_why(site: Site) -> None:
    call = site.application.consumers.of_home.call
    first = call("shop", "show", "search").body["cursor"]
    assert act(site, "admin", "rewind", text="latest", confirmed="yes").status_code == 200
    assert call("shop", "show", "search").body["cursor"] != first
    refused = act(site, "admin", "rewind", text="<b>", confirmed="yes")
    assert refused.status_code >= 400
    assert not [name for name, _ in Seen(refused.text).tags if name == "b"]
    assert [line["outcome"] for line in audit(site)] == ["asked", "done", "asked", "refused"]
    assert audit(site)[-1]["text"] == "<b>"


def test_dead_letters_are_retried_and_dropped(site: Site) -> None:
    call = site.application.consumers.of_home.call
    call("shop", "create", None, {"name": "once", "start": "earliest", "max_deliver": 1, "group_by": "none"})
    messages = call("shop", "receive", "once", {"batch_size": 2, "wait_for_ms": 5000}).body["messages"]
    call("shop", "nack", "once", {"ack_ids": [one["ack_id"] for one in messages]})
    assert call("shop", "show", "once").body["dead"] == 2
    assert act(site, "admin", "drop_dead", subject="once", confirmed="yes").status_code == 200
    assert call("shop", "show", "once").body["dead"] == 0


def test_one_dead_letter_is_shown_retried_and_dropped_alone(site: Site) -> None:
    call = site.application.consumers.of_home.call
    settings = {"start": "earliest", "max_deliver": 1, "group_by": "none", "tables": [HOSTILE]}
    call("web", "create", None, {"name": "one", **settings})
    messages = call("web", "receive", "one", {"batch_size": 2, "wait_for_ms": 5000}).body["messages"]
    call("web", "nack", "one", {"ack_ids": [one["ack_id"] for one in messages]})
    (letter,) = call("web", "dead", "one").body["dead"]

    def shown() -> Seen:
        return Seen(site.call("GET", "/consumers/web/one", {"cookie": site.cookie("admin")}).text)

    wait_for(lambda: letter["id"] in shown().text)  # a status may be of the second before
    seen = shown()
    assert VALUE.replace('"', '\\"') in seen.text
    assert not [name for name, _ in seen.tags if name == "img"]
    assert letter["id"] not in site.call("GET", "/consumers/web/one", {"cookie": site.cookie("all")}).text
    asked = {"stream": "web", "subject": "one", "text": letter["id"]}
    # A form without a letter's name was taken for all letters.
    act(site, "admin", "drop_letter", **asked | {"text": ""}, confirmed="yes")
    assert call("web", "show", "one").body["dead"] == 1
    assert f"{letter['id']}: retried" in act(site, "admin", "retry_letter", **asked).text
    messages = call("web", "receive", "one", {"batch_size": 2, "wait_for_ms": 5000}).body["messages"]
    call("web", "nack", "one", {"ack_ids": [one["ack_id"] for one in messages]})
    assert "Are you sure?" in act(site, "admin", "drop_letter", **asked).text
    assert f"{letter['id']}: dropped" in act(site, "admin", "drop_letter", **asked, confirmed="yes").text
    assert f"{letter['id']}: unknown" in act(site, "admin", "drop_letter", **asked, confirmed="yes").text
    assert audit(site)[-1]["text"] == letter["id"]
    call("web", "delete", "one")


def test_a_quarantined_table_is_tried_again(site: Site) -> None:
    with site.home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        row = catalog.find_table(stream, "public", "orders")
        refused = act(site, "admin", "retry", subject="public.orders")
        assert "is not quarantined" in refused.text
        assert refused.status_code == 400
        catalog.set_state(row.id, TableState.QUARANTINED, "bad")
        assert act(site, "admin", "retry", subject="public.orders").status_code == 200
        assert catalog.table(row.id).state is TableState.COPY_REQUESTED
    assert act(site, "admin", "retry", subject="public.<b>").status_code == 404
    assert act(site, "admin", "explode").status_code == 400


def test_an_action_that_can_t_be_noted_isn_t_done(site: Site) -> None:
    site.home.audit_file.mkdir()
    answer = act(site, "admin", "pause")
    site.home.audit_file.rmdir()
    assert (answer.status_code, "audit_unwritable" in answer.text) == (403, True)
    assert state(site) == "active"


def test_without_tokens_the_console_only_reads(tmp_path: Path) -> None:
    with site_of(filled_home(tmp_path / "home")) as site:
        site.application.consumers.of_home.call("shop", "create", None, {"name": "search"})
        assert "Pause" not in site.get("/consumers/shop/search").text
        form = {"action": "pause", "stream": "shop", "subject": "search"}
        assert site.call("POST", "/console/act", OWN, **form).status_code == 403
        assert state(site) == "active"
