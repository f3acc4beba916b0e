"""The result of a run: the records, indexes, operations and schema versions that the contract of records asks for.

Every run goes through both decoders (`decode` checks that they agree).
"""

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.codec import pgoutput_messages as pg
from tests.codec.pgoutput_checks import decode
from tests.codec.pgoutput_messages import TablesByOid
from tests.codec.reference_decoder import decode_plain
from tests.codec.reference_messages import UNCHANGED, decode_raw, parse_message

from millstream.codec.pgoutput import (
    HEARTBEAT_PREFIX,
    MessageRun,
    RelationCache,
    StreamCommit,
    decode_spilled,
    decode_transactions,
    warm,
)
from millstream.errors import ProtocolViolation, TableUndecodable
from millstream.model.operations import OperationKind, SpilledOp, WriteOps

ORDERS = [("id", 20, -1, True), ("note", 25, -1, False), ("total", 1700, ((12 << 16) | 2) + 4, False)]
RELATION = pg.relation(100, "public", "orders", ORDERS)
OTHER = pg.relation(200, "public", "other", [("k", 25, -1, True)])
FULL = pg.relation(300, "public", "full", [("a", 23, -1, True), ("b", 25, -1, True)], identity="f")


def transaction(lsn: int, *messages: bytes, xid: int = 700) -> list[bytes]:
    return [pg.begin(lsn, xid), *messages, pg.commit(lsn, lsn + 40)]


def rows_of(ops: WriteOps, number: int = 0) -> list[dict[str, object]]:
    rows = []
    for row in ops.tables[number].rows.to_pylist():
        row["__op"] = chr(row["__op"])
        rows.append({name: value for name, value in row.items() if value is not None})
    return rows


def test_one_insert_is_one_record_of_one_operation():
    ops = decode(transaction(1000, RELATION, pg.insert(100, ["1", "hello", "12.50"])))
    assert ops.operations.num_rows == 1
    row = ops.operations.to_pylist()[0]
    assert (row["kind"], row["source"], row["commit_lsn"], row["commit_end_lsn"], row["xid"]) == (1, 3, 1000, 1040, 700)
    assert ops.operations.column("commit_ts").cast(pa.int64()).to_pylist() == [pg.START_TS_US]
    assert ops.reached == {3: 1040}
    (row,) = rows_of(ops)
    assert str(row.pop("total")) == "12.50"
    assert row == {"__operation": 0, "__index": 0, "__op": "c", "id": 1, "note": "hello"}


def test_indexes_count_over_all_captured_tables_and_transactional_messages():
    messages = [RELATION, pg.insert(100, ["1", "a", None]), OTHER, pg.insert(200, ["x"])]
    messages += [pg.logical_message(5, "app", b"hi"), pg.logical_message(5, HEARTBEAT_PREFIX, b"")]
    messages += [FULL, pg.insert(300, ["1", "ignored"]), pg.insert(100, ["2", "b", None])]
    ops = decode(transaction(1000, *messages), TablesByOid(ignored=[300]))
    found = {table.schema.name: table.rows.column("__index").to_pylist() for table in ops.tables}
    assert found == {"orders": [0, 3], "other": [1], "_messages": [2]}


def test_every_transaction_counts_from_zero_and_one_without_captured_records_is_no_operation():
    run = transaction(1000, RELATION, pg.insert(100, ["1", "a", None]))
    run += transaction(2000, FULL, pg.insert(300, ["1", "ignored"]))
    run += transaction(3000, pg.insert(100, ["2", "b", None]), pg.insert(100, ["3", "c", None]))
    run += transaction(4000)
    ops = decode(run, TablesByOid(ignored=[300]))
    assert ops.operations.column("commit_lsn").to_pylist() == [1000, 3000]
    assert ops.tables[0].rows.column("__operation").to_pylist() == [0, 1, 1]
    assert ops.tables[0].rows.column("__index").to_pylist() == [0, 0, 1]
    assert ops.reached == {3: 4040}


def test_transactions_below_what_is_reached_are_dropped_but_their_relations_count():
    run = transaction(1000, RELATION, pg.insert(100, ["1", "a", None]))
    run += transaction(2000, pg.insert(100, ["2", "b", None]))
    ops = decode(run, after=1040)
    assert ops.operations.column("commit_lsn").to_pylist() == [2000]
    assert ops.tables[0].rows.column("id").to_pylist() == [2]
    assert decode(run, after=2040).tables == ()
    assert decode([]).reached == {}


def test_messages_outside_transactions_are_operations_of_their_own_and_heartbeats_only_move_the_position():
    run = transaction(1000, RELATION, pg.insert(100, ["1", "a", None]))
    run.append(pg.logical_message(1060, "app", b"\xff\x00", transactional=False))
    run.append(pg.logical_message(1100, HEARTBEAT_PREFIX, b"", transactional=False))
    ops = decode(run)
    assert ops.operations.column("kind").to_pylist() == [OperationKind.TRANSACTION, OperationKind.MESSAGE]
    assert ops.operations.to_pylist()[1]["commit_lsn"] == 1060
    assert ops.operations.to_pylist()[1]["commit_ts"] is None
    assert ops.reached == {3: 1100}
    assert rows_of(ops, 1) == [
        {"__operation": 1, "__index": 0, "__op": "m", "prefix": "app", "content": b"\xff\x00", "transactional": False}
    ]
    # The message's LSN is its record's end: a position there has reached it, but the previous
    # transaction's end hasn't.
    assert decode(run, after=1040).operations.column("commit_lsn").to_pylist() == [1060]
    assert decode(run, after=1060).operations.num_rows == 0


def test_a_key_change_is_one_update_that_says_the_old_key_alone():
    change = pg.update(100, ["2", "a", "1.00"], old_key=["1", None, None])
    (row,) = rows_of(decode(transaction(1000, RELATION, change)))
    assert (row["__op"], row["id"], row["__before"]) == ("u", 2, [("id", "1")])


def test_under_full_the_old_row_comes_whole_nulls_and_all():
    change = pg.update(300, ["1", "new"], old_row=["1", None])
    removal = pg.delete(300, old_row=["1", "new"])
    rows = rows_of(decode(transaction(1000, FULL, change, removal)))
    assert rows[0]["__before"] == [("a", "1"), ("b", None)]
    assert rows[1] == {"__operation": 0, "__index": 1, "__op": "d", "a": 1, "b": "new"}


def test_a_delete_holds_the_key_and_nothing_before():
    (row,) = rows_of(decode(transaction(1000, RELATION, pg.delete(100, old_key=["7", None, None]))))
    assert row == {"__operation": 0, "__index": 0, "__op": "d", "id": 7}


def test_an_unchanged_toast_value_is_null_and_named():
    (row,) = rows_of(decode(transaction(1000, RELATION, pg.update(100, ["1", UNCHANGED, "1.00"]))))
    assert row["__unchanged"] == ["note"]
    assert "note" not in row


def test_an_unchanged_value_that_the_old_key_or_row_has_is_that_one():
    """PostgreSQL sends a key stored out of line in the old key alone; it became NULL, and so all such rows one."""
    pages = [("url", 25, -1, True), ("note", 25, -1, False), ("hits", 20, -1, False)]
    relation = pg.relation(400, "public", "pages", pages)
    change = pg.update(400, [UNCHANGED, UNCHANGED, "2"], old_key=["long", "not sent", None])
    (row,) = rows_of(decode(transaction(1000, relation, change)))
    assert (row["url"], row["hits"], row["__unchanged"], row["__before"]) == ("long", 2, ["note"], [("url", "long")])
    wide = pg.update(300, ["2", UNCHANGED], old_row=["1", "wide"])
    lost = pg.update(300, ["2", UNCHANGED], old_row=["1", UNCHANGED])
    rows = rows_of(decode(transaction(2000, FULL, wide, pg.update(300, ["3", UNCHANGED]), lost)))
    assert [(row.get("b"), row.get("__unchanged")) for row in rows] == [("wide", None), (None, ["b"]), (None, ["b"])]


def test_a_truncate_of_several_tables_is_a_record_for_each():
    ops = decode(transaction(1000, RELATION, OTHER, FULL, pg.truncate([100, 300, 200])), TablesByOid(ignored=[300]))
    assert [
        (t.schema.name, rows_of(ops, n)[0]["__op"], rows_of(ops, n)[0]["__index"]) for n, t in enumerate(ops.tables)
    ] == [
        ("orders", "t", 0),
        ("other", "t", 1),
    ]


def test_what_a_column_cannot_hold_is_null_and_exact():
    ops = decode(transaction(1000, RELATION, pg.insert(100, ["1", "NaN", "NaN"]), pg.insert(100, ["2", "", "1.00"])))
    first, second = rows_of(ops)
    assert first["__exact"] == [("total", "NaN")]
    assert "total" not in first
    assert "__exact" not in second
    assert second["note"] == ""


def test_a_relation_message_in_mid_run_starts_a_schema_version():
    wider = pg.relation(100, "public", "orders", [*ORDERS, ("extra", 25, -1, False)])
    run = transaction(1000, RELATION, pg.insert(100, ["1", "a", None]))
    run += transaction(2000, RELATION, pg.insert(100, ["2", "b", None]))
    run += transaction(3000, wider, pg.insert(100, ["3", "c", None, "x"]))
    run += transaction(4000, RELATION, pg.insert(100, ["4", "d", None]))
    ops = decode(run)
    assert [(t.schema.version, t.rows.column("id").to_pylist()) for t in ops.tables] == [
        (1, [1, 2]),
        (2, [3]),
        (1, [4]),
    ]


def test_types_that_are_not_built_in_get_their_names_from_type_messages():
    relation = pg.relation(100, "public", "t", [("m", 99999, -1, False)])
    ops = decode(transaction(1000, pg.type_(99999, "public", "Mood"), relation, pg.insert(100, ["sad"])))
    column = ops.tables[0].schema.columns[0]
    assert column.pg.name == 'public."Mood"'
    assert ops.tables[0].rows.column("m").to_pylist() == ["sad"]


def test_a_table_without_columns_has_rows_all_the_same():
    ops = decode(transaction(1000, pg.relation(100, "public", "t", []), pg.insert(100, []), pg.insert(100, [])))
    assert ops.row_count == 2


def test_a_table_quarantined_comes_raw_and_can_be_decoded_from_its_rows_alone():
    change = pg.update(100, ["2", "a", "1.00"], old_key=["1", None, None])
    ops = decode(transaction(1000, RELATION, change, OTHER, pg.insert(200, ["k"])), TablesByOid(aside=[100]))
    (row,) = rows_of(ops)
    assert row["__op"] == "u"
    assert "__before" not in row
    assert decode_raw(row["message"]) == (parse_message(RELATION), parse_message(change))
    assert rows_of(ops, 1)[0]["k"] == "k"


@pytest.mark.parametrize("decoder", [decode_plain, lambda run, *rest: decode_transactions(MessageRun.of(run), *rest)])
def test_a_table_that_cannot_be_decoded_is_named_and_the_same_run_decodes_without_it(decoder: Callable[..., WriteOps]):
    bad = pg.insert(100, ["1", b"\xff\xfe", None])
    wider = pg.relation(200, "public", "other", [("k", 25, -1, True), ("l", 25, -1, False)])
    cache = RelationCache()
    decoder(transaction(500, RELATION, OTHER, pg.insert(200, ["x"])), TablesByOid(), cache)
    run = transaction(1000, pg.insert(200, ["y"]), bad, wider, pg.insert(200, ["z", "zz"]))
    with pytest.raises(TableUndecodable) as caught:
        decoder(run, TablesByOid(), cache)
    assert caught.value.details["table"] == "public.orders"
    assert caught.value.details["relation_oid"] == 100
    ops = decoder(run, TablesByOid(aside=[100]), cache)
    assert [t.rows.num_rows for t in ops.tables] == [1, 1, 1]


def test_a_row_of_another_width_sets_its_table_aside():
    with pytest.raises(TableUndecodable):
        decode_transactions(
            MessageRun.of(transaction(1000, RELATION, pg.insert(100, ["1"]))), TablesByOid(), RelationCache()
        )


@pytest.mark.parametrize(
    "run",
    [
        [pg.begin(1, 1)],
        [pg.commit(1, 2)],
        [pg.begin(1, 1), pg.begin(2, 2)],
        [pg.insert(100, ["1"])],
        transaction(1000, pg.insert(12345, ["1"])),
        transaction(1000, pg.logical_message(1, "p", b"", transactional=False)),
        [pg.logical_message(1, "p", b"", transactional=True)],
        [b""],
        [b"E"],
        transaction(1000, RELATION, b"I" + struct.pack(">I", 100) + b"N\x00\x03b\x00\x00\x00\x01xnn"),
    ],
)
def test_what_is_no_run_is_a_violation_of_the_protocol(run: list[bytes]):
    for decoder, given in ((decode_plain, run), (decode_transactions, MessageRun.of(run))):
        with pytest.raises(ProtocolViolation):
            decoder(given, TablesByOid(), RelationCache())


def test_xlogdata_headers_are_skipped():
    run = [b"w" + bytes(24) + message for message in transaction(1000, RELATION, pg.insert(100, ["1", "a", None]))]
    ops = decode_transactions(MessageRun.of(run, header_bytes=25), TablesByOid(), RelationCache())
    assert ops.row_count == 1


# --- streamed transactions -------------------------------------------------------------------------------------------


def spilled(messages: list[bytes], size: int, **options: object) -> SpilledOp | None:
    def read() -> Iterator[MessageRun]:
        for start in range(0, len(messages), size):
            yield MessageRun.of(messages[start : start + size])

    commit = StreamCommit(900, 0, 5000, 5040, pg.START_TS_US)
    return decode_spilled(read, TablesByOid(), RelationCache(), commit, **options)


STREAMED = [
    pg.relation(100, "public", "orders", ORDERS, xid=900),
    *[pg.insert(100, [str(n), f"row {n}", None], xid=900 if n % 3 else 901) for n in range(20)],
    pg.truncate([100], xid=902),
    pg.logical_message(7, "app", b"x", xid=900),
]


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_spilled_transaction_comes_in_pieces_that_continue_and_can_be_read_again(size: int):
    op = spilled(STREAMED, size, aborted={901})
    assert op.operation.to_pylist()[0]["commit_lsn"] == 5000
    assert op.reached == {3: 5040}
    for _ in range(2):
        ids, indexes = [], []
        for tables in op.chunks():
            for table in tables:
                indexes += table.rows.column("__index").to_pylist()
                assert set(table.rows.column("__operation").to_pylist()) == {0}
                if table.schema.name == "orders":
                    ids += [i for i in table.rows.column("id").to_pylist() if i is not None]
        assert ids == [n for n in range(20) if n % 3]
        assert sorted(indexes) == list(range(15))
    assert op.counts == {(0, 100): 14, (0, 1): 1}
    assert op.row_count == 15


def test_a_spilled_transaction_of_which_nothing_is_left_is_none():
    assert spilled(STREAMED, 5, aborted={900, 901, 902}) is None


def test_an_ordinary_transaction_may_be_spilled_and_leaves_its_relations_behind():
    cache = RelationCache()
    commit = StreamCommit(900, 0, 5000, 5040, pg.START_TS_US)
    messages = [RELATION, pg.insert(100, ["1", "a", None])]
    op = decode_spilled(lambda: iter([MessageRun.of(messages)]), TablesByOid(), cache, commit, streamed=False)
    assert op.row_count == 1
    assert cache.get(100).name == "orders"


def test_relations_of_a_streamed_transaction_get_into_force_at_its_commit_unless_newer_ones_came():
    old, new = parse_message(RELATION), parse_message(pg.relation(100, "public", "renamed", ORDERS))
    cache = RelationCache()
    cache.note_streamed(900, old)
    with pytest.raises(ProtocolViolation):
        cache.get(100)
    cache.add(new)
    cache.commit_streamed(900)
    assert cache.get(100) == new
    cache.note_streamed(901, old)
    cache.commit_streamed(901)
    assert cache.get(100) == old
    cache.note_streamed(902, new)
    cache.abort_streamed(902)
    cache.commit_streamed(902)
    assert cache.get(100) == old


# --- machine code ----------------------------------------------------------------------------------------------------


def test_the_package_does_not_import_numba_until_it_decodes():
    code = "import sys, millstream.codec.pgoutput; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0


@pytest.mark.siege
def test_machine_code_is_made_where_nothing_can_be_kept(tmp_path: Path):
    """numba looks for a cache folder while it decorates.

    It would fail there for a read-only package and HOME.
    """
    code = """
import sys
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []  # as where nothing is writable
from millstream.codec.pgoutput import (warm,)
warm()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=600, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()


def test_warm_compiles_what_runs_need():
    warm()
