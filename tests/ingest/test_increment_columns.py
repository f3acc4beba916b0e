"""Columns that take increments: which values they accept in each way of writing, and what rows don't name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.app.homes import make_home

import millstream
from millstream.app.open_home import OpenHome
from millstream.errors import IngestError, InvalidValue
from millstream.testing.errors import coded

SHOP = """
[streams.shop]
[streams.shop.log]
disk_used_max = 1.0
[streams.shop.keys]
"public.posts" = ["id"]
"public.visits" = ["id"]
[streams.shop.merge."visits"]
heat = "signal(1d)"
[streams.shop.merge."posts"]
likes = "{likes}"
stock = "g_counter(increments)"
score = "pn_counter(increments)"
"""


def made(folder: Path, likes: str = "pn_counter(increments)") -> Path:
    return make_home(folder, SHOP.format(likes=likes))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[OpenHome]:
    made(tmp_path / "shop")
    with millstream.open(tmp_path / "shop") as opened:
        yield opened


def records(home: OpenHome) -> list[dict[str, Any]]:
    return [row for batch in home.read("shop", table="posts") for row in batch.to_pylist()]


def test_a_row_lists_the_columns_that_it_does_not_name(home: OpenHome) -> None:
    home.append("shop", "posts", [{"id": 1, "likes": 3, "title": "a"}, {"id": 2, "title": None}, {"id": 3}])
    home.append("shop", "posts", pa.table({"id": [1, 2], "likes": [4, None]}))
    home.append("shop", "posts", {"id": 1, "likes": 1, "title": "b", "stock": 2})
    assert [(row["id"], row["likes"], row["__unchanged"]) for row in records(home)] == [
        (1, 3, None),
        (2, None, ["likes"]),
        (3, None, ["likes", "title"]),
        (1, 4, ["title"]),
        (2, None, ["title"]),
        (1, 1, None),
    ]


def test_rows_of_a_table_without_increments_name_all_columns(home: OpenHome) -> None:
    home.append("shop", "notes", [{"id": 1, "text": "a"}, {"id": 2}])
    assert [row["__unchanged"] for batch in home.read("shop", table="notes") for row in batch.to_pylist()] == [None] * 2


def test_a_column_of_whole_numbers_takes_nothing_else(home: OpenHome) -> None:
    home.append("shop", "posts", {"id": 1, "likes": 1})
    for value in (True, "x", "3", 1.5, {"by": 1}, [1], b"1", 2**70, float("nan")):
        with pytest.raises(InvalidValue, check=coded("increment_unsuitable"), match="likes"):
            home.append("shop", "posts", {"id": 1, "likes": value})
        rows = [{"id": 1, "likes": 2}, {"id": 2, "likes": value}]
        with pytest.raises(InvalidValue, check=coded("increment_unsuitable"), match="likes"):
            home.append("shop", "posts", rows)
        appended = home.append("shop", "posts", rows, keep_valid_rows=True)
        assert [(row.row, row.code, row.column) for row in appended.rejected] == [(1, "increment_unsuitable", "likes")]
    assert [row["likes"] for row in records(home)] == [1, *[2] * 9]


def test_a_session_refuses_increments_by_the_code_of_the_home_s_appends(home: OpenHome) -> None:
    session = home.session("shop")
    session.append("posts", {"id": 1, "likes": 1})
    rows = [{"id": 1, "likes": 2}, {"id": 2, "likes": "x"}]
    with pytest.raises(InvalidValue, check=coded("increment_unsuitable"), match="likes"):
        session.append("posts", rows)
    appended = session.append("posts", rows, keep_valid_rows=True)
    assert [(row.row, row.code) for row in appended.rejected] == [(1, "increment_unsuitable")]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"by": 1}, 'the object {"by":1} is no'),
        ([[1]], "the list [[1]] is no"),
        ("many", "the text 'many' is no"),
        ("x" * 99, f"the text '{'x' * 40}…' is no"),
        (float("nan"), "NaN and infinities can't be added"),
        (Decimal("NaN"), "NaN is no decimal number"),
        (Decimal("-Infinity"), "-Infinity is no decimal number"),
    ],
)
@pytest.mark.parametrize("first", [1, 0.5, Decimal("0.5")])
def test_a_refusal_names_the_value_that_came(home: OpenHome, first: object, value: object, reason: str) -> None:
    home.append("shop", "posts", {"id": 1, "score": first})
    with pytest.raises(InvalidValue, check=coded("increment_unsuitable"), match=re.escape(reason)):
        home.append("shop", "posts", {"id": 1, "score": value})
    if isinstance(value, Decimal):
        with pytest.raises(InvalidValue, check=coded("invalid_value"), match=re.escape(reason)):
            home.append("shop", "notes", {"id": 1, "sizes": [value, value]})


@pytest.mark.parametrize("first", [0.5, "0.5", Decimal("0.5")])
def test_other_columns_take_numbers_and_decimal_text(home: OpenHome, first: object) -> None:
    home.append("shop", "posts", {"id": 1, "score": first})
    for value in (True, "x", "nan", "0x1", "", float("inf"), float("nan"), {"by": 1}):
        with pytest.raises(InvalidValue, check=coded("increment_unsuitable"), match="score"):
            home.append("shop", "posts", {"id": 1, "score": value})
    home.append("shop", "posts", {"id": 1, "score": "2.25"})
    home.append("shop", "posts", {"id": 1, "score": 3})
    home.append("shop", "posts", {"id": 1, "score": 0.1})
    assert [row["score"] for row in records(home)] == [
        type(records(home)[0]["score"])(n) for n in ("0.5", "2.25", "3", "0.1")
    ]


def test_a_new_table_refuses_the_rows_alone_that_cannot_begin_a_counter(home: OpenHome) -> None:
    rows = [{"id": 1, "likes": "many"}, {"id": 2, "title": "a"}]
    with pytest.raises(InvalidValue, check=coded("increment_unsuitable"), match="likes"):
        home.append("shop", "posts", rows)
    appended = home.append("shop", "posts", rows, keep_valid_rows=True)
    assert [(row.row, row.code) for row in appended.rejected] == [(0, "increment_unsuitable")]
    assert [row["id"] for row in records(home)] == [2]


def test_a_grow_only_counter_refuses_negative_increments(home: OpenHome) -> None:
    rows = [{"id": 1, "stock": 2}, {"id": 2, "stock": -1}]
    with pytest.raises(InvalidValue, check=coded("counter_grows_only"), match="stock"):
        home.append("shop", "posts", rows)
    appended = home.append("shop", "posts", rows, keep_valid_rows=True)
    assert [(row.row, row.code) for row in appended.rejected] == [(1, "counter_grows_only")]
    assert [row["stock"] for row in records(home)] == [2]


@pytest.mark.parametrize(("before", "after"), [("pn_counter(increments)", "pn_counter"), ("lww", "pn_counter(increments)"), ("g_counter(increments)", "pn_counter(increments)")])  # fmt: skip
def test_a_changed_form_of_a_column_that_has_rows_is_refused(tmp_path: Path, before: str, after: str) -> None:
    folder = made(tmp_path / "shop", before)
    with millstream.open(folder) as home:
        home.append("shop", "posts", {"id": 1, "likes": 3})
    (folder / "millstream.toml").write_text(SHOP.format(likes=after))
    with millstream.open(folder) as home:
        for row in ({"id": 1, "likes": 3}, {"id": 1}):
            with pytest.raises(IngestError, match="likes") as caught:
                home.append("shop", "posts", row)
            assert caught.value.code == "merge_changed"
        home.append("shop", "others", {"id": 1})
        assert len(records(home)) == 1
        with pytest.raises(IngestError, match="likes"):
            home.merged("shop", "posts")


def test_text_is_proposed_for_a_long_number_only_if_the_column_may_hold_it(home: OpenHome) -> None:
    for long in (2**64, -(2**70)):
        with pytest.raises(InvalidValue) as caught:
            home.append("shop", "posts", {"id": 1, "likes": long})
        assert caught.value.code == "increment_unsuitable"
        assert "text" not in f"{caught.value.message} {caught.value.hint}"
    with pytest.raises(InvalidValue, match="64 bits") as caught:
        home.append("shop", "posts", {"id": 1, "title": 2**64})
    assert "text" in (caught.value.hint or "")


def test_the_name_of_the_bitmap_is_no_columns(home: OpenHome) -> None:
    for rows in (
        {"id": 1, "__named": 1},
        pa.table({"id": [1], "__named": [1]}),
        pa.table({"id": [1], "__Named": ["a"]}),
    ):
        with pytest.raises(InvalidValue, match="__"):
            home.append("shop", "posts", rows)


def test_the_latest_rows_have_the_totals_of_all_records_before(home: OpenHome) -> None:
    first = home.append("shop", "posts", [{"id": 1, "likes": 3, "title": "a"}, {"id": 2, "likes": 1}])
    home.append(
        "shop", "posts", [{"id": 1, "likes": 4}, {"id": 1, "likes": None, "title": "b"}, {"id": 3, "title": "c"}]
    )

    def latest(**options: Any) -> list[tuple[int, int | None, str | None]]:
        found = [row for some in home.read_latest("shop", "posts", **options) for row in some.rows.to_pylist()]
        return sorted((row["id"], row["likes"], row["title"]) for row in found)

    assert latest() == [(1, 7, "b"), (2, 1, None), (3, None, "c")]
    assert latest(after=first.token) == [(1, 7, "b"), (3, None, "c")]
    assert latest(upto=first.token) == [(1, 3, "a"), (2, 1, None)]
    home.append("shop", "posts", {"id": 1, "likes": 2**63 - 1})
    with pytest.raises(InvalidValue, match="64 bits"):
        latest()
