"""One append over several tables: one operation in the log, in the order of the call, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event
from sqlalchemy.engine import Engine
from tests.app.homes import make_home

import millstream
from millstream.app.open_home import home_appender
from millstream.errors import IdempotencyKeyReused, InvalidValue, MillstreamError
from millstream.home.home import Home
from millstream.ingest.append_client import AppendClient
from millstream.ingest.multi_table_append import tables_for
from millstream.model.operations import AppendedTables
from millstream.model.writes import AppendBatch, TableBatch
from millstream.testing.errors import coded
from millstream.writers.home_appender import append_socket

WEB = '[streams.web]\n[streams.web.keys]\n"public.users" = ["id"]\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "web", WEB)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[millstream.OpenHome]:
    with millstream.open(make_home(tmp_path_factory.mktemp("shared") / "web", WEB)) as opened:
        yield opened


def table_of_metadata(schema: pa.Schema) -> str:
    (facts,) = schema.metadata.values()
    told = json.loads(facts)
    return f"{told['namespace']}.{told['name']}"


def records(home: millstream.OpenHome, after: Any = None) -> list[tuple[str, Any, Any]]:
    """Every record's table and `n`, in the order of the log."""
    found = []
    for batch in home.read("web", after=after):
        table = table_of_metadata(batch.schema)
        found += [(row["__seq"], table, row["n"], row["__commit_ts"]) for row in batch.to_pylist()]
    found.sort(key=lambda record: record[0])
    return [(table, n, moment) for _, table, n, moment in found]


def test_tables_are_one_operation_in_the_order_of_the_call(home: Path) -> None:
    with millstream.open(home) as opened:
        told = opened.append_all("web", {"b": [{"n": 1}, {"n": 2}], "public.a": [{"n": 3}], '"c"': {"n": 4}})
        assert [(name, part.first, part.rows) for name, part in told.tables.items()] == [
            ("public.b", 1, 2),
            ("public.a", 3, 1),
            ("public.c", 4, 1),
        ]
        assert (str(told.token), told.duplicate, told.row_count) == (str(opened.token("web")), False, 4)
        found = records(opened)
        assert [(table, n) for table, n, _ in found] == [
            ("public.b", 1),
            ("public.b", 2),
            ("public.a", 3),
            ("public.c", 4),
        ]
        assert len({moment for _, _, moment in found}) == 1
        # A token inside the operation stands for the one before it: none of its records is shown.
        assert AppendedTables.from_dict(told.as_dict()) == told


@pytest.mark.sampled
@pytest.mark.parametrize("group", [["a", "b"], ["b", "a"]])
def test_each_operation_of_a_commit_group_keeps_its_own_order(home: Path, group: list[str]) -> None:
    """Submissions of one commit group name the same tables in different orders."""
    with millstream.open(home) as opened:
        opened.append_all("web", {"a": [{"n": 0}], "b": [{"n": 0}]})
        appender = opened._home_appender()
        told: list[AppendedTables] = []

        def append(n: int) -> None:
            names = group if n % 2 else group[::-1]
            told.append(opened.append_all("web", {name: [{"n": n}] * 3 for name in names}))

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(append, range(1, 200)))
        assert appender is opened._home_appender()
        found = records(opened)
        for start in range(2, len(found), 6):
            op = found[start : start + 6]
            n = op[0][1]
            names = group if n % 2 else group[::-1]
            assert [(table, number) for table, number, _ in op] == [
                (f"public.{name}", n) for name in names for _ in range(3)
            ]
        for one in told:
            for name, part in one.tables.items():
                assert part.first is not None
                assert [table for table, _, _ in found[part.first - 1 : part.first + 2]] == [name] * 3


def test_a_bad_row_refuses_all_tables_and_makes_none(home: Path) -> None:
    with millstream.open(home) as opened:
        with pytest.raises(InvalidValue):
            opened.append_all("web", {"new": [{"n": 1}], "users": [{"n": 1}]})  # a user has no key
        opened.append_all("web", {"users": [{"id": 1, "n": 1}]})
        with pytest.raises(InvalidValue):
            opened.append_all("web", {"new": [{"n": 1}], "users": [{"id": 2, "n": "x"}]})
        assert [(table, n) for table, n, _ in records(opened)] == [("public.users", 1)]
        assert "public.new" not in str(opened.status())


def test_new_tables_of_one_call_take_one_commit_of_the_catalog(home: Path) -> None:
    """200 of them took 200, and held up the stream's other appends for 41 s on a slow disk."""
    commits: list[object] = []

    def note(connection: object) -> None:
        commits.append(connection)

    with millstream.open(home) as opened:
        opened.append_all("web", {"first": [{"n": 0}]})
        event.listen(Engine, "commit", note)
        try:
            opened.append_all("web", {f"t{number}": [{"n": number}] for number in range(200)})
        finally:
            event.remove(Engine, "commit", note)
        assert len(commits) < 20, "the writer has a few of its own"
        opened.append_all("web", {"t0": [{"n": 1}], "t1": [{"m": 1}], "more": [{"n": 1}]})
        assert len(opened.status()["streams"][0]["tables"]) == 202


def test_valid_rows_are_kept_and_the_others_are_named_by_table(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append_all("web", {"users": [{"id": 1, "n": 1}], "b": [{"n": 1}]})
        rows = {
            "users": [{"id": 2, "n": 2}, {"id": None, "n": 3}],
            "b": [{"n": "x"}, {"n": "y"}],
            "c": [{"n": 4}, {"n": "z"}],
        }
        told = opened.append_all("web", rows, keep_valid_rows=True)
        assert {
            name: (part.first, part.rows, [row.row for row in part.rejected]) for name, part in told.tables.items()
        } == {
            "public.users": (3, 1, [1]),
            "public.b": (None, 0, [0, 1]),
            "public.c": (4, 1, [1]),
        }
        with pytest.raises(InvalidValue) as refused:
            opened.append_all("web", {"users": [{"id": None, "n": 2}], "b": [{"n": "x"}]}, keep_valid_rows=True)
        assert [row["table"] for row in refused.value.details["rejected"]] == ["public.users", "public.b"]
        assert len(records(opened)) == 4


def test_a_call_without_rows_gets_the_newest_token(home: Path) -> None:
    with millstream.open(home) as opened:
        told = opened.append_all("web", {"b": [{"n": 1}]})
        for tables in ({}, {"b": []}, {"b": iter([]), "c": pa.table({"n": pa.array([], pa.int64())})}):
            empty = opened.append_all("web", tables)
            assert (empty.token, empty.duplicate, empty.row_count) == (told.token, False, 0)
            assert [part.first for part in empty.tables.values()] == [None] * len(tables)
        mixed = opened.append_all("web", {"a": [], "b": [{"n": 2}]})
        assert [(part.first, part.rows) for part in mixed.tables.values()] == [(None, 0), (2, 1)]
        session = opened.session("web", "s")
        assert session.append_all({}).row_count == 0
        session.append_all({"b": [{"n": 3}]})
        assert opened.session_facts("web", "s").mark == 2


@pytest.mark.parametrize(
    ("tables", "error"),
    [
        ({"a": [{"n": 1}], "public.a": [{"n": 2}]}, "invalid_value"),
        ({"a": [], "A": [{"n": 2}]}, "invalid_value"),
        ({"a": [{"n": 1}], "b": [{}]}, "invalid_value"),
        ({"a": [{"n": 1}], "b": 7}, "invalid_value"),
        ({"a": [{"n": 1}], "b": "text"}, "invalid_value"),
        ([("a", [{"n": 1}])], "invalid_value"),
        ({"a": [{"n": 1}], "a.b.c": [{"n": 1}]}, "usage"),
        ({"a": [{"n": 1}], "": [{"n": 1}]}, "usage"),
        ({f"t{n}": [{"n": 1}] for n in range(1001)}, "rows_too_large"),
        ({name: pa.table({"n": ["x" * (9 << 20)] * 4}) for name in "ab"}, "rows_too_large"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_call_appends_nothing(shared: millstream.OpenHome, tables: Any, error: str) -> None:
    before = shared.append_all("web", {"warm": [{"n": 1}]})
    with pytest.raises(MillstreamError, check=coded(error)):
        shared.append_all("web", tables)
    assert shared.token("web") == before.token


def test_a_repeated_write_gets_its_first_result_and_other_rows_are_refused(home: Path) -> None:
    with millstream.open(home) as opened:
        rows = {"b": [{"n": 1}, {"n": 2}], "a": [{"n": 3}]}
        told = opened.append_all("web", rows, idempotency_key="k")
        again = opened.append_all("web", rows, idempotency_key="k")
        assert (again.duplicate, again.tables) == (True, told.tables)
        for other in ({"b": [{"n": 1}, {"n": 2}], "a": [{"n": 4}]}, {"b": rows["b"]}, {"a": rows["a"], "b": rows["b"]}):
            with pytest.raises(IdempotencyKeyReused):
                opened.append_all("web", other, idempotency_key="k")
        one = opened.append("web", "b", {"n": 9}, session="s", number=1)
        same = opened.append_all("web", {"public.b": [{"n": 9}]}, session="s", number=1)
        assert (same.duplicate, same.tables["public.b"].first) == (True, one.seqs.first)
        assert len(records(opened)) == 4


def test_tables_of_different_places_are_not_one_operation(tmp_path: Path) -> None:
    routing = """
[streams.web.routing]
rules = [{ table = "public.copied", to = ["shard:0", "copy"] }, { table = "public.gone", to = "devnull" }, { table = ".*", to = "shard:0" }]
[streams.web.routing.sinks.copy]
kind = "log"
location = "copied"
create = true
"""
    with millstream.open(make_home(tmp_path / "web", f"[streams.web]\n{routing}")) as opened:
        with pytest.raises(MillstreamError) as refused:
            opened.append_all("web", {"copied": [{"n": 1}], "kept": [{"n": 2}]})
        assert (refused.value.code, refused.value.details["tables"]) == (
            "not_one_operation",
            ["public.copied", "public.kept"],
        )
        assert opened.streams() == [] or not records(opened)
        told = opened.append_all("web", {"gone": [{"n": 1}], "kept": [{"n": 2}], "other": [{"n": 3}]})
        assert [(part.first, part.rows) for part in told.tables.values()] == [(None, 0), (1, 1), (2, 1)]
        with pytest.raises(MillstreamError, check=lambda error: error.code == "not_one_operation"):  # type: ignore[attr-defined]
            opened.append_all("web", {"copied": [{"n": 1}], "kept": [{"n": 2}]})
        assert [n for _, n, _ in records(opened)] == [2, 3]


def test_rows_that_a_rule_drops_leave_the_order_of_the_others(tmp_path: Path) -> None:
    routing = """
[streams.web]
log = { shards = 2 }
[streams.web.routing]
rules = [{ where = "n < 0", to = "devnull" }, { table = "public.c", to = "shard:1" }, { table = ".*", to = "shard:0" }]
"""
    with millstream.open(make_home(tmp_path / "web", routing)) as opened:
        rows = {"a": [{"n": 1}, {"n": -1}, {"n": 2}], "b": [{"n": -1}, {"n": 3}], "c": [{"n": 4}], "d": [{"n": 5}]}
        told = opened.append_all("web", rows)
        assert [(part.first, part.rows) for part in told.tables.values()] == [(1, 2), (3, 1), (4, 1), (5, 1)]
        assert [n for _, n, _ in records(opened)] == [1, 2, 3, 4, 5]
        index = {row["n"]: row["__commit_index"] for batch in opened.read("web") for row in batch.to_pylist()}
        assert sorted(index, key=lambda n: index[n]) == [1, 2, 3, 4, 5]


def test_requests_of_a_batch_over_several_tables_are_refused_one_by_one(home: Path) -> None:
    with millstream.open(home) as opened:
        opened.append_all("web", {"users": [{"id": 0, "n": 0}], "b": [{"n": 0}]})
        users = pa.table({"id": [1, None, 3, 4], "n": [1, 2, 3, 4]})
        others = pa.table({"n": [1, 1, 2, 3, 4]})
        batch = AppendBatch(
            (TableBatch("users", users, [1, 1, 1, 1]), TableBatch("b", others, [2, 1, 1, 1])), [None] * 4
        )
        outcomes = opened._home_appender().append_batch("web", batch, deadline_s=10)
        assert [isinstance(outcome, MillstreamError) for outcome in outcomes] == [False, True, False, False]
        assert [(table.removeprefix("public."), n) for table, n, _ in records(opened)[2:]] == [
            ("users", 1), ("b", 1), ("b", 1), ("users", 3), ("b", 3), ("users", 4), ("b", 4),
        ]  # fmt: skip


def test_another_stream_gets_them_as_one_operation(tmp_path: Path) -> None:
    mirror = make_home(tmp_path / "mirror", "[streams.web]\n")
    routing = """
[streams.web.routing]
rules = [{ table = ".*", to = ["shard:0", "mirror"] }]
[streams.web.routing.sinks.mirror]
kind = "millstream"
location = "../mirror"
"""
    with millstream.open(make_home(tmp_path / "web", f"[streams.web]\n{routing}")) as opened:
        for _ in range(2):
            opened.append_all("web", {"b": [{"n": 1}, {"n": 2}], "a": [{"n": 3}]}, idempotency_key="k")
    with millstream.open(mirror) as opened:
        found = records(opened)
    assert [(table, n) for table, n, _ in found] == [("public.b", 1), ("public.b", 2), ("public.a", 3)]
    assert len({moment for _, _, moment in found}) == 1


def test_another_process_that_writes_takes_them_as_one_operation(home: Path) -> None:
    appender = home_appender(Home(home))
    try:
        rows = {"b": [{"n": 1}], "users": [{"id": 1, "n": 2}, {"id": None, "n": 3}]}
        kept, rejected = tables_for(rows, keep_valid_rows=True)
        first, _ = tables_for({"b": [{"n": 0}]}, keep_valid_rows=False)
        appender.append_batch(
            "web", AppendBatch.of_request(first, None, keep_valid_rows=False, acks=None), deadline_s=5
        )
        client = AppendClient(append_socket(Home(home), None))
        (outcome,) = client.append_batch(
            "web", AppendBatch.of_request(kept, None, keep_valid_rows=True, acks=None), deadline_s=5
        )
        assert not isinstance(outcome, MillstreamError)
        told = AppendedTables.of(outcome, rejected)
        assert {name: (part.first, part.rows, len(part.rejected)) for name, part in told.tables.items()} == {
            "public.b": (2, 1, 0),
            "public.users": (3, 1, 1),
        }
        (empty,) = client.append_batch(
            "web", AppendBatch.of_request({}, None, keep_valid_rows=False, acks=None), deadline_s=5
        )
        assert not isinstance(empty, MillstreamError)
        assert empty.token == told.token
        client.close()
    finally:
        appender.close()


_NAMES = ["a", "b", "c", "d"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(_NAMES), st.integers(0, 4)), min_size=1, max_size=5), st.randoms())
def test_a_replay_has_the_records_in_the_order_of_the_calls(
    shared: millstream.OpenHome, calls: list[dict[str, int]], random: Any
) -> None:
    expected: list[tuple[str, int]] = []
    before = shared.append_all("web", {"warm": [{"n": 1}]}).token
    for call in calls:
        names = list(call)
        random.shuffle(names)
        tables = {}
        for name in names:
            rows = [random.randrange(1000) for _ in range(call[name])]
            tables[name] = [{"n": n} for n in rows]
            expected += [(f"public.{name}", n) for n in rows]
        shared.append_all("web", tables)
    assert [(table, n) for table, n, _ in records(shared, before)] == expected
