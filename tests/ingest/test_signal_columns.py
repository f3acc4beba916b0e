"""Columns that are signals: weights and times that are refused, in each way of writing, and those that are taken."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.app.homes import make_home

import millstream
from millstream.app.open_home import OpenHome
from millstream.errors import InvalidValue

SHOP = """
[streams.shop]
[streams.shop.log]
disk_used_max = 1.0
[streams.shop.keys]
"public.posts" = ["id"]
[streams.shop.merge."posts"]
heat = "signal(1d)"
glow = "signal(7d, at=happened)"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenHome]:
    folder = tmp_path_factory.mktemp("weights") / "shop"
    make_home(folder, SHOP)
    with millstream.open(folder) as opened:
        yield opened


@pytest.mark.parametrize("weight", [-1, -0.5, float("nan"), float("inf"), "3", True, [1.0], Decimal("1.5")])
def test_what_is_no_weight_is_refused_with_its_request_or_its_row_alone(home: OpenHome, weight: Any) -> None:
    for rows in ([{"id": 1, "heat": weight}], [{"id": 1, "heat": None}, {"id": 2, "heat": weight}]):
        with pytest.raises(InvalidValue) as caught:
            home.append("shop", "posts", rows)
        assert caught.value.code == "invalid_value"
    done = home.append("shop", "posts", [{"id": 3, "heat": 1.5}, {"id": 4, "heat": weight}], keep_valid_rows=True)
    assert [(row.row, row.code, row.column) for row in done.rejected] == [(1, "invalid_value", "heat")]


@pytest.mark.parametrize("moment", [-1, 2**63 - 1, "soon", 1.5, datetime(1969, 12, 31, tzinfo=UTC)])
def test_what_is_no_time_of_an_event_is_refused(home: OpenHome, moment: Any) -> None:
    with pytest.raises(InvalidValue, match="happened"):
        home.append("shop", "posts", {"id": 1, "glow": 1.0, "happened": moment})


def test_weights_and_times_of_all_suitable_types_are_taken(home: OpenHome) -> None:
    day_us = 86_400 * 10**6
    home.append("shop", "posts", {"id": 10, "heat": 2, "glow": 4, "happened": day_us})
    home.append("shop", "posts", pa.table({"id": [10], "heat": pa.array([0.5], pa.float32()), "happened": [None]}))
    home.append("shop", "posts", {"id": 10, "heat": 0, "glow": 0.25, "happened": 8 * day_us})
    row = {one["id"]: one for one in home.merged("shop", "posts").to_pylist()}[10]
    assert row["heat"] == pytest.approx(2.5, rel=1e-3)
    assert (row["heat__1h"], row["glow__7d"]) == (3, 0)
    at = datetime(1970, 1, 9, tzinfo=UTC)
    row = {one["id"]: one for one in home.merged("shop", "posts", at=at).to_pylist()}[10]
    assert (row["glow"], row["glow__7d"]) == (2.25, 1)


def test_merged_rows_are_read_as_of_any_year(home: OpenHome) -> None:
    home.append("shop", "posts", {"id": 20, "glow": 4.0, "happened": 86_400 * 10**6})
    for year, expected in ((1, (4.0, 1)), (2263, (0.0, 0)), (9999, (0.0, 0))):
        found = home.merged("shop", "posts", at=datetime(year, 1, 1, tzinfo=UTC)).to_pylist()
        assert [(row["glow"], row["glow__7d"]) for row in found if row["id"] == 20] == [expected]
