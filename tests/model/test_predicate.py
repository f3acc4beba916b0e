"""Predicates of rules mean what they mean in SQL; one that can't be parsed or compared raises an error."""

from __future__ import annotations

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import RoutingError, UsageError
from millstream.model.predicate import Predicate
from millstream.testing.errors import coded

ROWS = pa.record_batch(
    {
        "id": pa.array([1, 2, 3, None, 5], pa.int64()),
        "score": pa.array([0.5, None, 2.5, -1.0, 0.0]),
        "kind": pa.array(["bot", "man", None, "it's", "BOT"]),
        "ok": pa.array([True, False, None, True, False]),
        "amount": pa.array(["1.50", "2.00", None, "0.00", "-3.25"]).cast(pa.decimal128(10, 2)),
        "day": pa.array(["2026-01-01", "2026-01-02", None, "1969-12-31", "2026-01-01"]).cast(pa.date32()),
    }
)
LEAVES = st.sampled_from(
    [
        "id < 9999999999999999999999", "id = -9223372036854775809", "score < 18446744073709551616", "amount > -9223372036854775809",
        "id = 1", "id <> 2", "id != 2", "id < 3", "id >= 2", "score > 0.25", "score <= -1", "kind = 'bot'", "kind in ('bot', 'man')",
        "kind not in ('bot')", "kind is null", "kind is not null", "ok = true", "ok != false", "amount >= 1.5", "day = '2026-01-01'",
        "day < '1970-01-01'", "id in (1, 5)", "kind = 'it''s'", "score = 1e0",
    ]
)  # fmt: skip
WHOLE = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" and ", " or ", " AND ", " Or "]), inner).map(
            lambda p: f"({p[0]}{p[1]}{p[2]})"
        ),
        inner.map(lambda p: f"not {p}" if p.startswith("(") else f"not ({p})"),
    ),
    max_leaves=6,
)


@given(WHOLE)
def test_a_predicate_takes_the_rows_that_sql_takes(text: str) -> None:
    rows = ROWS  # noqa: F841 (DuckDB finds it by its name)
    expected = duckdb.sql(f"SELECT coalesce(({text}), false) FROM rows").fetchall()
    assert Predicate.parse(text).matches(ROWS).to_pylist() == [row[0] for row in expected]


@given(LEAVES, LEAVES, LEAVES)
def test_and_binds_more_than_or(one: str, two: str, three: str) -> None:
    plain = Predicate.parse(f"{one} or {two} and {three}").matches(ROWS)
    assert plain.equals(Predicate.parse(f"{one} or ({two} and {three})").matches(ROWS))


def test_columns_are_those_that_are_named() -> None:
    found = Predicate.parse('kind = \'x\' and (id > 1 or "Odd ""name" is null) and kind is null')
    assert found.columns == ("kind", "id", 'Odd "name')


def test_a_column_that_the_table_lacks_is_null() -> None:
    assert Predicate.parse("nothing = 1").matches(ROWS).to_pylist() == [False] * 5
    assert Predicate.parse("not nothing = 1").matches(ROWS).to_pylist() == [False] * 5
    assert Predicate.parse("nothing is null").matches(ROWS).to_pylist() == [True] * 5
    assert Predicate.parse("nothing = 1 or id = 1").matches(ROWS).to_pylist() == [True, False, False, False, False]


@pytest.mark.parametrize(
    "text",
    ["", "id", "id =", "= 1", "id = 1 id", "id = 'x", "(id = 1", "id in ()", "id in (1,)", "id is 1", "id = null", "id == 1", "and", "id = 1 and", "not", "id not 1", "id = 1;", "'a' = id"],
)  # fmt: skip
def test_what_is_no_predicate_says_where(text: str) -> None:
    with pytest.raises(UsageError, match="can't be read at") as caught:
        Predicate.parse(text)
    assert caught.value.hint


@pytest.mark.parametrize("word", [" or ", " and "])
def test_one_may_have_any_number_of_comparisons(word: str) -> None:
    assert Predicate.parse(word.join(["id = 1"] * 5000)).matches(ROWS).to_pylist() == [True] + [False] * 4


def test_a_text_without_end_is_refused_at_once() -> None:
    """A text of 100,000 comparisons took 21 s: each token copied the rest of the text."""
    with pytest.raises(UsageError, match="has 65537 characters"):
        Predicate.parse("id = 1" + " " * 65531)
    assert Predicate.parse("id = 1" + " " * 65530).columns == ("id",)


def test_one_that_is_nested_without_end_is_refused() -> None:
    with pytest.raises(UsageError, match="nested"):
        Predicate.parse("(" * 5000 + "id = 1" + ")" * 5000)
    with pytest.raises(UsageError, match="nested"):
        Predicate.parse("not " * 5000 + "id = 1")


@pytest.mark.parametrize("text", ["id = 'x'", "kind = 1", "ok = 1", "id = true", "day = 'never'", "score > 'a'"])
def test_a_literal_of_another_kind_than_its_column_is_refused_by_name(text: str) -> None:
    with pytest.raises(RoutingError, check=coded("invalid_route"), match="can't be evaluated"):
        Predicate.parse(text).matches(ROWS)
