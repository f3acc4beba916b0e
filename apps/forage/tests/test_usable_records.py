"""Records that other programs append: what can't be folded is left out, and the engine goes on with the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import millstream
from millstream_forage.answers import as_json
from millstream_forage.engine import ForageEngine
from millstream_forage.errors import EngineFailed
from millstream_forage.folded_state import State
from millstream_forage.tables import DIMENSIONS, STREAM
from millstream_forage.usable_records import usable

VECTOR = [1.0] + [0.0] * (DIMENSIONS - 1)
ITEM: dict[str, Any] = {
    "id": 1000, "url": "https://y.example", "title": "y", "creator": "c", "category": "sea", "source": "s",
    "tags": ["a", "b"], "entities": [], "content_type": "news", "summary": "A b. C d.", "reading_time_min": 1,
    "embedding": VECTOR, "added": 0,
}  # fmt: skip
NO_ITEMS = [
    {"embedding": [1.0]},
    {"embedding": [float("nan"), *VECTOR[1:]]},
    {"embedding": [None, *VECTOR[1:]]},
    {"embedding": None},
    {"embedding": [3e38] * DIMENSIONS},
    {"embedding": [0.0] * DIMENSIONS},
    {"tags": ["a", None]},
    {"entities": [None]},
    {"category": None},
    {"title": None},
    {"url": "javascript:alert(1)"},
    {"url": "https://y.example/a b"},
    {"id": -5},
    {"id": 1 << 60},
    {"id": None},
]


def rows(table: dict[str, Any], *changes: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{**table, "__seq": n, **change} for n, change in enumerate(changes, 1)])


@pytest.mark.parametrize("change", NO_ITEMS, ids=str)
def test_an_item_that_breaks_a_rule_is_left_out_and_its_neighbours_are_not(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    found = usable("items", rows(ITEM, {"id": 1}, change, {"id": 3}))
    assert found["id"].to_pylist() == [1, 3]
    assert "1 records of items are left out" in caplog.text


def test_columns_that_nobody_wrote_are_null_or_leave_the_records_out():
    signal = {"id": 7, "user": 1, "item": 1, "kind": "save", "weight": 1.0, "now": 5}
    found = usable("signals", rows(signal, {}))
    assert found["impression"].to_pylist() == found["duration_ms"].to_pylist() == [None]
    assert usable("signals", rows({**signal, "kind": "like"}, {})).num_rows == 0
    assert usable("hides", rows({"user": 1, "target": "tag", "value": "x", "hidden": True}, {})).num_rows == 0
    assert usable("hides", rows({"user": 1, "target": "item", "value": "1"}, {})).num_rows == 0
    for value in ("x", "", "01", "-1", "1.0", "1\n", "9" * 20, "٣"):
        assert usable("hides", rows({"user": 1, "target": "item", "value": value, "hidden": True}, {})).num_rows == 0
        assert usable("hides", rows({"user": 1, "target": "source", "value": value, "hidden": True}, {})).num_rows == 1
    for weight in (-0.5, 1.5, 1e308, float("nan")):
        assert usable("signals", rows({**signal, "weight": weight}, {})).num_rows == 0
    assert usable("items", rows({name: value for name, value in ITEM.items() if name != "embedding"}, {})).num_rows == 0
    assert usable("items", rows({**ITEM, "added": "yesterday"}, {})).num_rows == 0, "a column of another type"


def test_an_engine_serves_and_opens_again_beside_items_that_can_not_be_folded(tmp_path: Path):
    with ForageEngine.open(tmp_path / "home") as engine:
        engine.seed_default_corpus()
        with millstream.open(tmp_path / "home") as home:
            home.append(STREAM, "items", {**ITEM, "embedding": [1.0]})
            home.append(STREAM, "items", {**ITEM, "id": 1001, "url": "https://z.example"})
        assert len(engine.feed(1).items) == 7
        engine.hide(1, 1001)
    with ForageEngine.open(tmp_path / "home") as engine:
        shown = {item.item_id for item in engine.feed(1, 50, preview=True).items}
        assert not shown & {1000, 1001}


def test_records_that_other_programs_append_break_no_answer(tmp_path: Path):
    """A hide of an item that is no number failed every later feed of its user."""
    signal = {"user": 1, "item": 1, "kind": "save", "now": 5}
    with ForageEngine.open(tmp_path / "home") as engine:
        engine.seed_default_corpus()
        with millstream.open(tmp_path / "home") as home:
            home.append(STREAM, "hides", {"user": 1, "target": "item", "value": "x", "hidden": True, "kind": "hide"})
            home.append(STREAM, "signals", [{**signal, "id": n, "weight": w} for n, w in ((900, 5.0), (901, 1e308))])
            home.append(STREAM, "items", {**ITEM, "tags": ["a", None]})
        assert len(engine.feed(1).items) == 7
        for answer in (engine.feed(1), engine.browse_tasks(), engine.browse_tasks(1), engine.items()):
            json.dumps(as_json(answer), allow_nan=False)


def test_signals_of_another_users_or_items_impression_count_for_nobody(tmp_path: Path):
    """The user's own signal of that kind failed from then on."""
    with ForageEngine.open(tmp_path / "home") as engine:
        engine.seed_default_corpus()
        first, second, *_ = engine.feed(1).items
        signal = {
            "user": 1,
            "item": first.item_id,
            "kind": "save",
            "weight": 1.0,
            "now": 5,
            "impression": first.impression_id,
        }
        with millstream.open(tmp_path / "home") as home:
            home.append(
                STREAM, "signals", [{**signal, "id": 900, "user": 2}, {**signal, "id": 901, "item": second.item_id}]
            )
        assert not engine.signal(1, first.item_id, "save", impression_id=first.impression_id).duplicate
        assert sum(item.signals["save"] for item in engine.items(limit=1000).items) == 1


def test_what_an_engine_wrote_itself_is_read_again_whatever_its_clock_and_its_items(tmp_path: Path):
    def before_1970() -> int:
        return -5

    item = {name: ITEM[name] for name in ("title", "creator", "category", "source", "tags", "entities", "summary")}
    with ForageEngine.open(tmp_path / "home", clock=before_1970) as engine:
        added = engine.add_item({**item, "url": "HTTPS://Y.example", "content_type": "news", "words": 100}).item_id
        feed = engine.feed(1, seed=1)
        engine.signal(1, added, "save", impression_id=feed.items[0].impression_id)
        last = engine.feed(1, seed=2, preview=True)
    with ForageEngine.open(tmp_path / "home", clock=before_1970) as engine:
        assert as_json(engine.feed(1, seed=2, preview=True)) == as_json(last)
        assert engine.feed(1, preview=True).items


@pytest.mark.parametrize("token", ["ddd679d8.s5", "ddd679d8.m1024~2.1311"])
def test_an_impression_of_any_token_is_folded(token: str):
    shown = {"id": 1, "feed": 1, "user": 1, "item": 1, "slot": 1, "arm": "a/b", "label": "x", "explore": True,
             "propensity": 0.5, "policy": "p", "seed": 1, "limit": 7, "token": token, "now": -5}  # fmt: skip
    assert (
        usable(
            "impressions", rows(shown, {}, {"token": "?"}, {"propensity": float("inf")}, {"propensity": 0.0})
        ).num_rows
        == 1
    )


def test_a_fold_that_failed_half_way_answers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with ForageEngine.open(tmp_path / "home") as engine:
        engine.seed_default_corpus()
        with millstream.open(tmp_path / "home") as home:
            home.append(STREAM, "items", ITEM)
        with monkeypatch.context() as patch:
            patch.setattr(State, "apply", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                engine.feed(1)
        with pytest.raises(EngineFailed, match="closed"):
            engine.feed(1)
    with ForageEngine.open(tmp_path / "home") as engine:
        assert len(engine.feed(1).items) == 7
