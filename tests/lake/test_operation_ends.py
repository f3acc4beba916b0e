"""Tokens inside an operation: no reader sees half of one, whichever tables, batches and files it spans.

A user took tokens from `scd2.__seq` and from `wal cat`, and `--as-of` returned counts that no committed state
ever had: half a transaction, or 1,500 of the 2,000 rows of a copied chunk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.lake.landing import append_history

from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import fold_table
from millstream.lake.history_retention import HistoryBound, drop_history
from millstream.lake.layout import LakeLayout
from millstream.lake.maintenance import MaintenanceRules, maintain_table
from millstream.lake.operation_ends import whole_upto
from millstream.lake.query.query_session import LakeSession
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema

Records = Callable[..., pa.RecordBatch]
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def lines(orders: TableSchema) -> TableSchema:
    return replace(orders, table_id=TableId(5), name="lines")


def counts(layout: LakeLayout, n: int) -> tuple[str, int, int]:
    with LakeSession(layout, as_of=Seq(n)) as session:
        sql = "SELECT (SELECT count(*) FROM public.orders) AS a, (SELECT count(*) FROM public.lines) AS b"
        (row,) = session.query(sql).to_pylist()
        return str(session.token).rpartition("s")[2], row["a"], row["b"]


def test_a_token_inside_a_transaction_shows_none_of_it_in_any_table(
    layout: LakeLayout, orders: TableSchema, lines: TableSchema, records: Records
) -> None:
    first = {"__commit_lsn": 100, "__commit_ts": NOON}
    second = {"__commit_lsn": 200, "__commit_ts": NOON}
    made = [
        (orders, [("c", 1, {"id": 1, "__commit_index": 0} | first)]),
        (lines, [("c", 2, {"id": 1, "__commit_index": 1} | first)]),
    ]
    big = [
        (orders, [("c", 3 + i, {"id": 10 + i, "__commit_index": 2 * i} | second) for i in range(4)]),
        (lines, [("c", 7 + i, {"id": 10 + i, "__commit_index": 2 * i + 1} | second) for i in range(4)]),
    ]
    # The next cut is far away, and the transaction shares its batch with others.
    last = [(orders, [("c", 11, {"id": 99, "__commit_lsn": 300, "__commit_index": 0, "__commit_ts": NOON})])]
    start = commit_cut(
        layout,
        Seq(2),
        [append_history(layout, schema, [records(schema, *rows)], Seq(2)) for schema, rows in made],
        committed_at=NOON,
    )
    assert start.number == 1
    joined = {s: [row for schema, rows in [*big, *last] if schema is s for row in rows] for s in (orders, lines)}
    landed = [append_history(layout, s, [records(s, *rows)], Seq(11)) for s, rows in joined.items()]
    commit_cut(layout, Seq(11), landed, committed_at=NOON + timedelta(minutes=1))
    assert [counts(layout, n) for n in (2, 3, 6, 7, 9)] == [("2", 1, 1)] * 5
    assert [counts(layout, n) for n in (10, 11)] == [("10", 5, 5), ("11", 6, 5)]
    with LakeSession(layout, as_of=Seq(8)) as session:
        assert session.query('SELECT max(__seq) AS n FROM history."public.orders"').to_pylist() == [{"n": 1}]
        assert str(session.moved_from).endswith(".s8")
    with LakeSession(layout, as_of=Seq(10)) as session:
        assert session.moved_from is None
    for table in (orders, lines):  # folded and dropped records can't be shown, and half of them never are
        fold_table(layout, table, Seq(11))
    drop_history(layout, lines, HistoryBound(Seq(11)))
    assert whole_upto(layout, Seq(5)) == 2


def test_a_token_inside_a_copied_chunk_shows_none_of_it(
    layout: LakeLayout, orders: TableSchema, lines: TableSchema, records: Records
) -> None:
    def chunk(first: int, count: int, second: int) -> list[tuple[str, int, dict[str, object]]]:
        facts = {"__commit_lsn": 100, "__commit_ts": NOON + timedelta(seconds=second)}
        return [("r", seq, {"id": seq} | facts) for seq in range(first, first + count)]

    marker = ("t", 9, {"__commit_lsn": 100})
    batches = [
        append_history(layout, orders, [records(orders, *chunk(1, 4, 0), *chunk(5, 4, 1))], Seq(15)),
        # Chunks of another table, at the same LSN and in the same microsecond; after the marker of a copy that
        # follows an earlier one.
        append_history(layout, lines, [records(lines, marker, *chunk(10, 3, 1), *chunk(13, 3, 2))], Seq(15)),
    ]
    commit_cut(layout, Seq(15), batches, committed_at=NOON)
    found = [int(whole_upto(layout, Seq(n))) for n in range(16)]
    assert found == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 15]


def test_a_partition_that_a_look_found_to_be_gone_is_an_operation_and_one_that_was_truncated_is_part_of_one(
    layout: LakeLayout, orders: TableSchema, records: Records
) -> None:
    schema, facts = replace(orders, partitioned=True), {"__commit_lsn": 100, "__partition_oid": 70}

    def at(second: int) -> dict[str, object]:
        return {"__commit_ts": NOON + timedelta(seconds=second)}

    batch = records(
        schema,
        *(("c", seq, {"id": seq, "__commit_index": seq} | facts | at(0)) for seq in (1, 2)),
        ("x", 3, {"__commit_index": 3} | facts | at(0)),
        ("c", 4, {"id": 4, "__commit_index": 4} | facts | at(0)),
        *(("x", seq, facts | at(seq)) for seq in (5, 6)),
        *(("r", seq, {"id": seq} | facts | at(7)) for seq in (7, 8)),
        ("c", 9, {"id": 9, "__commit_index": 0} | facts | {"__commit_lsn": 200} | at(9)),
    )
    landed, ends = append_history(layout, schema, [batch], Seq(9)), NOON + timedelta(seconds=9)
    commit_cut(layout, Seq(9), [landed], committed_at=ends, commit_ts_max=ends)
    assert [int(whole_upto(layout, Seq(n))) for n in range(10)] == [0, 0, 0, 0, 4, 5, 6, 6, 8, 9]
    with LakeSession(layout, as_of=NOON + timedelta(seconds=5, milliseconds=1)) as session:
        assert str(session.token).endswith(".s5")
        assert session.query("FROM public.orders").num_rows == 0


TABLES = 2
PIECES = st.lists(st.integers(0, 3), min_size=TABLES, max_size=TABLES).filter(any)
OPERATIONS = st.lists(st.tuples(st.sampled_from("xxrm"), PIECES, st.booleans(), st.integers(0, 2)), min_size=1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS, shared=st.booleans())
@pytest.mark.siege
def test_any_token_stands_for_the_last_whole_operation(
    tmp_path: Path,
    orders: TableSchema,
    lines: TableSchema,
    records: Records,
    operations: list[tuple[str, list[int], bool, int]],
    *,
    shared: bool,
) -> None:
    layout = LakeLayout(tempfile.mkdtemp(dir=tmp_path), "shop", StreamId(UUID(int=42)))
    schemas = (orders, lines)
    seq = 0
    ends, cuts = [0], [0]
    waiting: dict[int, list[tuple[str, int, dict[str, object]]]] = {0: [], 1: []}
    gaps: set[int] = set()
    for number, (kind, pieces, cut, gap) in enumerate(operations, 1):
        gaps |= set(range(seq + 1, seq + 1 + gap))
        seq += gap
        index = 0
        sizes = pieces if kind == "x" else [max(pieces), 0] if number % 2 else [0, max(pieces)]
        for table, count in enumerate([1, 0] if kind == "m" else sizes):
            for _ in range(count):
                seq += 1
                facts: dict[str, object] = {"id": seq, "__commit_ts": NOON + timedelta(seconds=number)}
                # Several chunks, and messages, may have one LSN; transactions never do.
                facts["__commit_lsn"] = 7 if shared and kind != "x" else 10 * number
                facts["__commit_index"] = index if kind == "x" else None
                waiting[table].append(({"x": "c"}.get(kind, kind), seq, facts))
                index += 1
        ends.append(seq)
        if cut or number == len(operations):
            landed = [
                append_history(layout, schemas[table], [records(schemas[table], *rows)], Seq(seq))
                for table, rows in waiting.items()
                if rows
            ]
            commit_cut(layout, Seq(seq), landed, committed_at=NOON + timedelta(seconds=number))
            cuts.append(seq)
            waiting = {0: [], 1: []}
    if shared:
        maintain_table(layout, "history", orders, now_ms=4 * 10**12, rules=MaintenanceRules(compact_files=2))
    for n in range(seq + 1):
        end = max(e for e in ends if e <= n)
        # Unused numbers count as part of the operation before them.
        assert whole_upto(layout, Seq(n)) in (
            {end} if n == end else {n} if set(range(end + 1, n + 1)) <= gaps else {end}
        )
