import subprocess
import sys
from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.testing.oracle import (
    TableRows,
    check_order,
    check_transactions,
    check_types,
    current_rows,
    difference,
    replay_history,
    source_rows,
    table_folder,
)
from millstream.testing.oracle.history import check_records, replay_records
from millstream.testing.pytest_plugin import Database

KEYED = TableRows(("id", "v"), ("id",))
BAG = TableRows(("id", "v"), ())
SCHEMA = pa.schema(
    [
        ("v", pa.string()),
        ("id", pa.int32()),
        ("__op", pa.string()),
        ("__seq", pa.int64()),
        ("__source", pa.int32()),
        ("__commit_lsn", pa.int64()),
        ("__commit_index", pa.int64()),
        ("__xid", pa.int64()),
        ("__unchanged", pa.list_(pa.string())),
        ("__exact", pa.map_(pa.string(), pa.string())),
        ("__before", pa.map_(pa.string(), pa.string())),
        ("__partition_oid", pa.int64()),
    ]
)


def record(op: str, key: int | None = None, value: str | None = None, **extra: Any) -> dict[str, Any]:
    return {"__op": op, "id": key, "v": value, "__source": 1} | {f"__{name}": fact for name, fact in extra.items()}


def history(*records: dict[str, Any]) -> pa.Table:
    """Return records as a table, numbered as they stand, stored in another order."""
    rows = [{"__seq": n * 10, "__commit_lsn": n, "__commit_index": 0} | row for n, row in enumerate(records)]
    return pa.Table.from_pylist([{name: row.get(name) for name in SCHEMA.names} for row in rows[::-1]], SCHEMA)


def test_each_operation_does_what_it_says():
    replay = replay_records(
        history(
            record("r", 1, "copied"),
            record("c", 2, "two"),
            record("u", 2, None, unchanged=["v"]),
            record("u", 3, None, unchanged=["v"], before=[("id", "2")]),
            record("u", 1, "new"),
            record("u", 1, None),
            record("c", 4, "four"),
            record("d", 4),
            record("c", 4, "again"),
            record("u", None, "x", exact=[("id", "12345678901234567890")], before=[("id", "4")]),
        ),
        KEYED,
    )
    assert replay.violations == []
    assert replay.records == 10
    assert replay.rows.rows == {
        ("1",): ("1", None),
        ("3",): ("3", "two"),
        ("12345678901234567890",): ("12345678901234567890", "x"),
    }


def test_a_truncate_empties_and_what_comes_after_counts():
    replay = replay_records(history(record("c", 1, "a"), record("t"), record("c", 1, "b")), KEYED)
    assert (replay.rows.rows, replay.violations) == ({("1",): ("1", "b")}, [])
    replay = replay_records(history(record("c", 1, "a"), record("t"), record("c", 1, "b")), BAG)
    assert (replay.rows.bag, replay.violations) == (Counter({("1", "b"): 1}), [])


LEAVING = (
    record("r", 1, "a", partition_oid=7),
    record("r", 2, "b", partition_oid=8),
    record("c", 3, "c"),
    record("c", 4, "d", partition_oid=7),
    record("u", 4, "moved", partition_oid=8, before=[("id", "4"), ("v", "d")]),
    record("x", partition_oid=7, before=[("partition", "public.left")], commit_index=None),
    record("r", 1, "attached again", partition_oid=7),
)


@pytest.mark.parametrize("like", [KEYED, BAG], ids=["by key", "without a key"])
def test_a_leaf_partition_that_left_takes_its_rows_away(like: TableRows):
    replay = replay_records(history(*LEAVING), like)
    rows = list(replay.rows.rows.values()) or list(replay.rows.bag.elements())
    assert sorted(rows) == [("1", "attached again"), ("2", "b"), ("3", "c"), ("4", "moved")]
    assert replay.violations == []


def test_equal_rows_without_a_key_leave_with_their_leaf():
    same = [record("c", 1, "a", partition_oid=leaf) for leaf in (7, 8, 8, 7)]
    gone = record("d", 1, "a", partition_oid=8)
    left = record("x", partition_oid=7)
    assert replay_records(history(*same, gone, left), BAG).rows.bag == Counter({("1", "a"): 1})
    assert replay_records(history(*same, left, gone), BAG).rows.bag == Counter({("1", "a"): 1})


def test_rows_without_a_key_go_one_by_one():
    whole = [("id", "1"), ("v", "a")]
    replay = replay_records(
        history(
            record("c", 1, "a"),
            record("c", 1, "a"),
            record("r", 1, "a"),
            record("d", 1, "a"),
            record("u", 2, None, unchanged=["v"], before=whole),
        ),
        BAG,
    )
    assert replay.violations == []
    assert replay.rows.bag == Counter({("1", "a"): 1, ("2", "a"): 1})


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([record("c", 1), record("c", 1)], "created where one"),
        ([record("c", 1), record("d", 1), record("d", 1)], "deleted twice"),
        ([record("c", 1), record("d", 1), record("r", 1)], "resurrected"),
        ([record("c", 1), record("t"), record("r", 1)], "resurrected"),
        ([record("c", 1, "new"), record("r", 1, "old")], "not what it had become"),
        ([record("c", 1), record("c", 2), record("u", 2, before=[("id", "1")])], "moved to a key where one is"),
        ([record("c", 1), record("d", 1), record("u", 1)], "updates a row that is gone"),
        ([record("m")], "no operation of a table"),
    ],
)
def test_what_no_history_can_contain_is_found(records: list[dict[str, Any]], said: str):
    (violation,) = replay_records(history(*records), KEYED).violations
    assert said in violation


def test_a_copied_row_may_repeat_what_the_log_says_and_fill_what_it_cannot_know():
    base = [record("c", 1, "a"), record("r", 1, "a")]
    assert replay_records(history(*base), KEYED).violations == []
    late = [record("u", 1, None, unchanged=["v"]), record("r", 1, "toast")]
    replay = replay_records(history(*late), KEYED)
    assert (replay.violations, replay.rows.rows) == ([], {("1",): ("1", "toast")})
    assert replay_records(history(late[0]), KEYED).rows.rows != {("1",): ("1", None)}
    filled = [record("c", 1, None), record("r", 1, "default")]
    assert replay_records(history(*filled), KEYED, added=["v"]).violations == []
    assert replay_records(history(*filled), KEYED, recopied=True).violations == []


def test_a_bag_does_not_give_what_it_has_not():
    replay = replay_records(history(record("d", 1, "a"), record("u", 1, "b")), BAG)
    assert ["isn't there" in replay.violations[0], "without its old row" in replay.violations[1]] == [True, True]


@given(
    st.lists(
        st.tuples(st.sampled_from("cudk"), st.integers(1, 5), st.integers(6, 10), st.text(max_size=3)), max_size=60
    )
)
def test_any_sequence_of_changes_replays_to_what_it_led_to(changes: list[tuple[str, int, int, str]]):
    rows: dict[int, str] = {}
    records = []
    for op, key, other, value in changes:
        if op == "c" and key not in rows:
            rows[key] = value
            records.append(record("c", key, value))
        elif op == "u" and key in rows:
            rows[key] = value
            records.append(record("u", key, value))
        elif op == "d" and key in rows:
            del rows[key]
            records.append(record("d", key))
        elif op == "k" and key in rows and other not in rows:
            rows[other] = rows.pop(key)
            records.append(record("u", other, None, unchanged=["v"], before=[("id", str(key))]))
    replay = replay_records(history(*records), KEYED)
    assert replay.violations == []
    assert replay.rows.rows == {(str(key),): (str(key), value) for key, value in rows.items()}


def numbered(*rows: tuple[int, int, int | None, str]) -> pa.Table:
    facts = [{"seq": s, "commit_lsn": lsn, "commit_index": i} for s, lsn, i, _ in rows]
    return history(*(record(op, 1, **fact) for fact, (*_, op) in zip(facts, rows, strict=True)))


def test_a_leaf_partition_that_a_look_missed_has_no_index():
    table = numbered((10, 5, 0, "c"), (20, 5, 1, "x"), (30, 6, None, "x"), (40, 6, 0, "c"))
    assert check_records({"public.t": table}) == []


def test_numbers_in_order_pass():
    one = numbered((1, 5, 0, "c"), (2, 5, 2, "u"), (9, 7, 0, "c"), (20, 3, None, "r"))
    other = numbered((3, 5, 1, "c"), (4, 6, None, "m"), (10, 7, 1, "t"))
    assert check_records({"one": one, "other": other}) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(1, 5, 0, "c"), (1, 5, 1, "c")], "seq 1 is there 2 times"),
        ([(1, 5, 0, "c"), (2, 5, 0, "c")], "is there 2 times"),
        ([(1, 5, 1, "c"), (2, 5, 0, "c")], "comes after (5, 1)"),
        ([(1, 5, 0, "c"), (2, 5, 2, "c")], "lacks indices [1] of 3"),
        ([(1, 6, 0, "c"), (2, 5, 0, "c")], "comes after 6"),
        ([(1, 6, None, "c")], "no commit_index"),
    ],
)
def test_numbers_out_of_order_are_found(rows: list[tuple[int, int, int | None, str]], said: str):
    assert any(said in problem for problem in check_records({"t": numbered(*rows)}))


def test_lake_tables_on_disk_are_judged_against_their_source(postgres: Database, tmp_path: Path):
    with postgres.connect() as connection:
        connection.execute(
            "CREATE TABLE t (id int PRIMARY KEY, n numeric(5,2), x numeric, d date, w timestamptz, s int2[], e text)"
        )
        connection.execute(
            "INSERT INTO t VALUES (1, 1.5, 1.500, '2024-02-29', '2024-02-29 12:00:00.5+01', '{1,NULL}', '')"
        )
        connection.execute("INSERT INTO t VALUES (2, 'NaN', 'NaN', 'infinity', '-infinity', '[0:1]={1,2}', NULL)")
        source = source_rows(connection, "public.t")
        schema = pa.schema(
            [
                ("id", pa.int32()),
                ("n", pa.decimal128(5, 2)),
                ("x", pa.string()),
                ("d", pa.date32()),
                ("w", pa.timestamp("us", tz="UTC")),
                ("s", pa.list_(pa.int16())),
                ("e", pa.string()),
                ("__exact", pa.map_(pa.string(), pa.string())),
            ]
        )
        moment = datetime(2024, 2, 29, 11, 0, 0, 500_000, tzinfo=UTC)
        exact = {"n": "NaN", "d": "infinity", "w": "-infinity", "s": "[0:1]={1,2}"}
        rows = [
            {"id": 1, "n": Decimal("1.50"), "x": "1.500", "d": date(2024, 2, 29), "w": moment, "s": [1, None], "e": ""},
            {"id": 2, "x": "NaN", "__exact": list(exact.items())},
        ]
        view = tmp_path / "current"
        deltalake.write_deltalake(view / "public.~c3~9c~20x", pa.Table.from_pylist(rows, schema))
        path = table_folder(view, "public", "Ü x")
        assert difference(current_rows(path, source), source) == []
        assert check_types(path, connection, "t") == []
        connection.execute("ALTER TABLE t ALTER n TYPE numeric(6,2), ALTER s TYPE int4[]")
        assert len(check_types(path, connection, "t")) == 2
    with pytest.raises(FileNotFoundError, match="0 folders"):
        table_folder(view, "public", "other")
    with pytest.raises(KeyError):
        current_rows(path, TableRows(("id", "missing"), ("id",)))
    deltalake.write_deltalake(path, pa.Table.from_pylist(rows[:1], schema), mode="append")
    with pytest.raises(AssertionError, match="two rows of key"):
        current_rows(path, source)
    assert len(current_rows(path, source, version=0)) == 2


def test_histories_on_disk_are_replayed_and_counted(tmp_path: Path):
    records = [record("c", 1, "a", xid=2**32 + 7), record("u", 1, "b", xid=8), record("r", 2, "z")]
    deltalake.write_deltalake(tmp_path, history(*records))
    replay = replay_history(tmp_path, KEYED)
    assert (len(replay.rows), replay.violations) == (2, [])
    paths = {"public.t": tmp_path}
    assert check_order(paths) == []
    good = [(7, {"public.t": {"c": 1}, "not.captured": {"c": 5}}), (8, {"public.t": {"u": 1}}), (9, {})]
    assert check_transactions(paths, good) == []
    assert check_transactions(paths, good[:1]) == ["xid 8 wasn't expected: {('public.t', 'u'): 1}"]
    assert "lacks {('public.t', 'd'): 2}" in check_transactions(paths, [*good[:2], (10, {"public.t": {"d": 2}})])[0]


def test_the_oracle_shares_no_code_with_what_it_judges():
    code = "import sys, millstream.testing.oracle; print([n for n in sys.modules if n.startswith('millstream')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = eval(done.stdout)
    allowed = {"millstream", "millstream.testing", "millstream.testing.oracle"}
    assert {m for m in modules if not m.startswith("millstream.testing.oracle.")} == allowed


def test_behind_the_beginning_of_a_copy_rows_may_go_that_were_not_copied_yet():
    again = [record("c", 1, "a"), record("d", 1), record("c", 1, "b"), record("t", commit_index=None), record("d", 1)]
    replay = replay_records(history(*again, record("r", 2, "x")), KEYED)
    assert (replay.rows.rows, replay.violations) == ({("2",): ("2", "x")}, [])
