"""Changes of leaf partitions become their table's, in its order of columns, whichever decoder reads them."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from tests.codec import pgoutput_messages as pg
from tests.codec.pgoutput_checks import check_equal, decode
from tests.codec.pgoutput_messages import TablesByOid
from tests.codec.reference_decoder import decode_block_plain
from tests.codec.test_pgoutput_decoders import SLOW, TYPES, Table, changes

from millstream.codec.pgoutput import (
    MessageRun,
    Relation,
    RelationCache,
    StreamCommit,
    parse_message,
)
from millstream.codec.pgoutput.spilled import decode_spilled
from millstream.codec.pgoutput.transaction_decoder import decode_block
from millstream.model.operations import OPERATION_SCHEMA, WriteOps
from millstream.model.positions import Lsn

ROOT, OTHER, LEAVES = 16401, 16409, (16402, 16403, 16404)


def described(table: Table) -> Relation:
    relation = parse_message(table.relation())
    assert isinstance(relation, Relation)
    return relation


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[int, Table], dict[int, Relation]]:
    """Draw a root, leaves of it with columns in orders of their own, and a table apart."""
    kinds = draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=5))
    root = Table(ROOT, kinds, draw(st.integers(0, 2)), draw(st.sampled_from("df")))
    known = {ROOT: root, OTHER: Table(OTHER, [(23, -1)], 1, "d")}
    for oid in LEAVES:
        leaf = Table(oid, kinds, draw(st.integers(0, 2)), draw(st.sampled_from("dfi")))
        order = draw(st.permutations(range(len(kinds))) | st.just(range(len(kinds))))
        leaf.kinds = [kinds[place] for place in order]
        leaf.columns = [leaf.columns[place] for place in order]
        known[oid] = leaf
    return known, dict.fromkeys(LEAVES, described(root))


@st.composite
def leaf_changes(draw: st.DrawFn, known: dict[int, Table], xid: int | None = None) -> bytes:
    if draw(st.integers(0, 3)) == 0:
        return pg.truncate(draw(st.lists(st.sampled_from(sorted(known)), max_size=6)), xid=xid)
    return draw(changes(known, xid))


@SLOW
@given(tables(), st.data(), st.sets(st.sampled_from([ROOT])))
def test_both_decoders_agree_on_leaves_with_shuffled_columns(
    drawn: tuple[dict[int, Table], dict[int, Relation]], data: st.DataObject, aside: set[int]
):
    known, roots = drawn
    messages = [table.relation() for table in known.values()]
    for number in range(data.draw(st.integers(1, 3))):
        lsn = 100 * (number + 1)
        some = data.draw(st.lists(leaf_changes(known), max_size=8))
        messages += [pg.begin(lsn, 700 + number), *some, pg.commit(lsn, lsn + 50)]
    decode(messages, TablesByOid(roots=roots, aside=aside))


@SLOW
@given(tables(), st.data())
def test_both_decoders_agree_on_streamed_leaves(
    drawn: tuple[dict[int, Table], dict[int, Relation]], data: st.DataObject
):
    known, roots = drawn
    messages = [table.relation(xid=900) for table in known.values()]
    messages += [data.draw(leaf_changes(known, data.draw(st.sampled_from([900, 901])))) for _ in range(8)]
    results = []
    for decoder, run in ((decode_block_plain, messages), (decode_block, MessageRun.of(messages))):
        directory = TablesByOid(roots=roots)
        results.append(decoder(run, directory, RelationCache(), streamed=True, aborted={901}, first_index=0))
    assert results[0][1] == results[1][1]
    empty = pa.RecordBatch.from_pylist([], schema=OPERATION_SCHEMA)
    check_equal(WriteOps(empty, results[0][0]), WriteOps(empty, results[1][0]))


ID_ITEM = Table(ROOT, [(23, -1), (25, -1)], 1, "d")
"""A root with the columns `c0`, its key, and `c1`."""


def two_leaves() -> tuple[list[bytes], dict[int, Relation]]:
    """Return the Relation messages of the root and two leaves, of which the second has the columns in another order."""
    first, second = Table(LEAVES[0], ID_ITEM.kinds, 1, "d"), Table(LEAVES[1], ID_ITEM.kinds, 1, "d")
    second.columns = second.columns[::-1]
    roots = dict.fromkeys(LEAVES[:2], described(ID_ITEM))
    return [table.relation() for table in (ID_ITEM, first, second)], roots


def rows_of(messages: list[bytes], directory: TablesByOid | None = None) -> list[tuple[object, ...]]:
    relations, roots = two_leaves()
    run = [*relations, pg.begin(100, 7), *messages, pg.commit(100, 150)]
    ops = decode(run, directory or TablesByOid(roots=roots))
    return [
        (row["__index"], chr(row["__op"]), row["__partition_oid"], row["c0"], row["c1"], dict(row["__before"] or ()))
        for table in ops.tables
        for row in table.rows.to_pylist()
    ]


def test_a_row_that_moves_between_leaves_and_back_keeps_its_order():
    assert rows_of(
        [
            pg.insert(LEAVES[0], ["1", "x"]),
            pg.delete(LEAVES[0], old_key=["1", None]),
            pg.insert(LEAVES[1], ["x", "1"]),
            pg.update(LEAVES[1], ["y", "2"], old_key=[None, "1"]),
            pg.delete(LEAVES[1], old_key=[None, "2"]),
            pg.insert(LEAVES[0], ["2", "y"]),
            pg.insert(ROOT, ["3", "via the root"]),
        ]
    ) == [
        (0, "c", LEAVES[0], 1, "x", {}),
        (1, "d", LEAVES[0], 1, None, {}),
        (2, "c", LEAVES[1], 1, "x", {}),
        (3, "u", LEAVES[1], 2, "y", {"c0": "1"}),
        (4, "d", LEAVES[1], 2, None, {}),
        (5, "c", LEAVES[0], 2, "y", {}),
        (6, "c", None, 3, "via the root", {}),
    ]


def test_a_truncate_of_all_leaves_is_one_t_and_one_of_some_an_x_for_each():
    assert rows_of(
        [
            pg.truncate([LEAVES[1]]),
            pg.insert(LEAVES[1], ["x", "1"]),
            pg.truncate([LEAVES[0], LEAVES[1]]),
            pg.insert(LEAVES[0], ["2", "y"]),
            pg.truncate([ROOT]),
        ]
    ) == [
        (0, "x", LEAVES[1], None, None, {"partition": f"public.t{LEAVES[1]}"}),
        (1, "c", LEAVES[1], 1, "x", {}),
        (2, "t", None, None, None, {}),
        (3, "c", LEAVES[0], 2, "y", {}),
        (4, "t", None, None, None, {}),
    ]


def test_a_spilled_transaction_keeps_its_answer_to_a_truncate():
    relations, roots = two_leaves()
    directory = TablesByOid(roots=roots)
    messages = [*relations, pg.truncate([LEAVES[0], LEAVES[1]]), pg.insert(LEAVES[0], ["2", "y"])]
    commit = StreamCommit(7, 0, Lsn(100), Lsn(150), 0)
    op = decode_spilled(lambda: [MessageRun.of(messages)], directory, RelationCache(), commit, streamed=False)
    assert op is not None
    directory.roots[LEAVES[2]] = roots[LEAVES[0]]
    (piece,) = op.chunks()
    assert [chr(code) for code in piece[0].rows.column("__op").to_pylist()] == ["t", "c"]
    assert sum(op.counts.values()) == 2
