"""Arrow rows from the network: a small body takes little memory, whatever its types, or is refused unread."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import IngestError, InvalidValue, MillstreamError
from millstream.ingest.arrow_stream_decoding import rows_of_arrow, work_bytes, written_bytes
from millstream.ingest.multi_table_append import tables_for
from millstream.ingest.nested import is_countable, pieces, python_bytes, values_in
from millstream.ingest.python_rows import table_of
from millstream.model.operations import RejectedRow
from millstream.testing.errors import code_of, coded

ROWS = 10_000
BODY_BYTES_MAX = 180_000
MEMORY_MAX = 96 << 20
_POOLS: list[pa.MemoryPool] = []
"""Keep the memory pools: an error's traceback may still hold arrays of theirs."""


def body_of(column: pa.Array) -> bytes:
    table = pa.table({"a": column})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_table(table)
    return bytes(sink.getvalue())


def within(column: pa.Array) -> pa.Array:
    """Return the column as the only field of a struct."""
    return pa.StructArray.from_arrays([column], names=["inner"])


def views(child: pa.Array, rows: int = ROWS) -> pa.Array:
    """Return lists that are each the whole child."""
    offsets, sizes = pa.array(np.zeros(rows, np.int32)), pa.array(np.full(rows, len(child), np.int32))
    return pa.ListViewArray.from_arrays(offsets, sizes, child)


def union(child: pa.Array, rows: int = ROWS) -> pa.Array:
    """Return values that are each the child's first."""
    kinds, offsets = pa.array(np.zeros(rows, np.int8)), pa.array(np.zeros(rows, np.int32))
    return pa.UnionArray.from_dense(kinds, offsets, [child])


def runs(value: pa.Array, rows: int = ROWS) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), value)


def string_views(rows: int = ROWS) -> pa.Array:
    """Return texts that share one buffer."""
    text = b"x" * 100_000
    view = np.array([(len(text), int.from_bytes(b"xxxx", "little"), 0, 0)] * rows, np.int32)
    return pa.Array.from_buffers(
        pa.string_view(), rows, [None, pa.py_buffer(view.tobytes()), pa.py_buffer(text)], null_count=0
    )


LONG = pa.array([[None] * 100_000], pa.list_(pa.null()))
TEXT = pa.array(["y" * 100_000])
SHARED: dict[str, pa.Array] = {
    "list views": within(views(pa.nulls(100_000))),
    "large list views": within(
        pa.LargeListViewArray.from_arrays(
            pa.array(np.zeros(ROWS, np.int64)), pa.array(np.full(ROWS, 100_000, np.int64)), pa.nulls(100_000)
        )
    ),
    "list views in each other": within(views(views(views(pa.nulls(1000), 1000), 1000), 1000)),
    "a union": within(union(LONG)),
    "runs": within(runs(TEXT)),
    "runs of lists": within(runs(LONG)),
    "list views in a type of somebody's": within(
        pa.ExtensionArray.from_storage(pa.opaque(pa.list_view(pa.null()), "a", "b"), views(pa.nulls(100_000)))
    ),
    "views of texts in a type of Arrow's": within(
        pa.ExtensionArray.from_storage(pa.json_(pa.string_view()), string_views())
    ),
}
MANY: dict[str, pa.Array] = {
    "runs that are the column": runs(TEXT),
    "views of texts as JSON": pa.ExtensionArray.from_storage(pa.json_(pa.string_view()), string_views()),
    "a long name in each row": pa.StructArray.from_arrays([pa.nulls(ROWS)], names=["n" * 100_000]),
    "objects without bytes": pa.FixedSizeListArray.from_arrays(within(pa.nulls(4_000_000)), 4_000_000),
    "objects in many rows": pa.StructArray.from_arrays(
        [pa.nulls(1_000_000)] * 6, names=[f"{n}" * 200 for n in range(6)]
    ),
}


@contextmanager
def measured(most: int) -> Iterator[None]:
    """Check that the block takes at most so much memory, Python's and Arrow's together."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    _POOLS.append(pool)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield
    finally:
        took = tracemalloc.get_traced_memory()[1] + (pool.max_memory() or 0)
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert took <= most, f"{took >> 20} MiB"


@pytest.mark.parametrize("what", SHARED)
def test_nested_types_that_use_a_value_many_times_are_refused(what: str) -> None:
    """A list view in a struct counted as its own length: 180 kB took more than a gigabyte."""
    body = body_of(SHARED[what])
    assert len(body) < BODY_BYTES_MAX
    with measured(MEMORY_MAX), pytest.raises(InvalidValue, match="may use a value many times") as caught:
        rows_of_arrow(body)
    assert caught.value.details["column"] == "a"
    with pytest.raises(InvalidValue):
        written_bytes(pa.record_batch({"a": SHARED[what]}))


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.long) if what == "objects in many rows" else what for what in MANY]
)
def test_a_small_body_takes_some_tens_of_megabytes_at_most(what: str) -> None:
    body = body_of(MANY[what])
    assert len(body) < BODY_BYTES_MAX
    with measured(MEMORY_MAX), pytest.raises(IngestError, check=coded("rows_too_large")):
        rows_of_arrow(body)


def test_columns_that_are_within_bounds_one_by_one_are_counted_together() -> None:
    shared = pa.array(["y" * 5000]).dictionary_encode().take(pa.array([0] * ROWS))
    table = pa.table({f"c{n}": shared for n in range(3)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    with (
        measured(MEMORY_MAX),
        pytest.raises(IngestError, check=coded("rows_too_large"), match="its columns, written out"),
    ):
        rows_of_arrow(bytes(sink.getvalue()))
    assert rows_of_arrow(body_of(shared)).num_rows == ROWS


def test_types_that_arrow_gets_in_later_versions_are_refused_when_they_are_nested() -> None:
    for kind in (
        pa.list_view(pa.int8()),
        pa.sparse_union([pa.field("a", pa.int8())]),
        pa.run_end_encoded(pa.int32(), pa.int8()),
    ):
        assert not is_countable(kind, 100)
        assert not is_countable(pa.list_(kind), 100)
    assert is_countable(pa.map_(pa.string(), pa.list_(pa.struct([("a", pa.uuid())]))), 4)
    assert not is_countable(pa.list_(pa.list_(pa.int8())), 1)


@given(
    rows=st.lists(
        st.one_of(st.none(), st.lists(st.one_of(st.none(), st.lists(st.integers(0, 99), max_size=4)), max_size=4)),
        max_size=30,
    ),
    start=st.integers(0, 5),
    count=st.integers(0, 30),
)
def test_every_value_of_lists_is_counted_and_weighed(rows: list[Any], start: int, count: int) -> None:
    array = pa.array(rows, pa.list_(pa.list_(pa.int64())))
    expected = [0 if row is None else sum(1 + len(inner or ()) for inner in row) for row in rows]
    assert values_in(array) == len(rows) + sum(expected)
    cut = array.slice(start, count)
    sizes = python_bytes(cut)
    assert [int(size) for size in np.broadcast_to(sizes, len(cut))] == [
        80 + sum(80 + 112 * len(inner or ()) for inner in row or ()) for row in rows[start : start + count]
    ]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([{"a": [1, 2], "b": "x" * n} for n in range(100)]),
        pa.array(
            [[("k" * n, {"v": [None] * n})] for n in range(60)],
            pa.map_(pa.string(), pa.struct([("v", pa.list_(pa.null()))])),
        ),
        pa.array([[[n] * 2] * 3 for n in range(100)], pa.list_(pa.list_(pa.int64(), 2), 3)),
        pa.array([["a" * n, None] for n in range(100)], pa.list_(pa.string(), 2)),
        pa.array([[{"a": n}] * (n % 7) for n in range(100)], pa.large_list(pa.struct([("a", pa.int16())]))),
    ],
    ids=lambda array: str(array.type),
)
def test_weights_are_above_what_the_values_take(array: pa.Array) -> None:
    cut = array.slice(3)
    sizes = np.broadcast_to(python_bytes(cut), len(cut))
    tracemalloc.start()
    values = cut.to_pylist()
    took = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(values) == len(sizes)
    assert took <= sizes.sum() + 8 * len(sizes)


def test_pieces_are_the_column_again_and_bounded() -> None:
    array = pa.array([[{"a": n}] * (n % 100) for n in range(20_000)])
    column = pa.chunked_array([array.slice(0, 7), array.slice(7, 0), array.slice(7)])
    found = list(pieces(column))
    assert pa.chunked_array(found).equals(column)
    assert len(found) > 10
    assert all(int(np.sum(python_bytes(piece))) <= 8 << 20 for piece in found)
    mixed = pa.chunked_array(
        [pa.array([{"a": "x"}] * 1000).cast(pa.struct([("a", pa.dictionary(pa.int8(), pa.string()))]))]
    )
    assert pa.chunked_array(list(pieces(mixed))).equals(mixed)


def test_many_nested_rows_become_what_they_were() -> None:
    rows = [{"a": {"n": n, "tags": ["x"] * (n % 5)}} for n in range(20_000)]
    (column,) = table_of(pa.Table.from_pylist(rows)).columns
    assert column[7].as_py() == '{"n":7,"tags":["x","x"]}'
    assert (len(column), column.null_count) == (20_000, 0)


def test_what_a_call_writes_as_text_is_bounded_over_its_columns() -> None:
    row = {"note": "x" * 1000}
    table = pa.table({f"c{n}": pa.array([row] * 7000) for n in range(10)})
    assert table.nbytes > 60 << 20
    with pytest.raises(MillstreamError) as caught:
        table_of(table)
    assert code_of(caught.value) == "rows_too_large"


def test_rows_of_several_tables_are_counted_before_all_of_them_are_there() -> None:
    """Each table within its bound was decoded before they were added up: 130 kB took two gigabytes."""
    table = pa.table({f"c{n}": pa.nulls(300_000).cast(pa.int64()).fill_null(0) for n in range(20)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_table(table)
    body = bytes(sink.getvalue())
    assert len(body) < BODY_BYTES_MAX
    made: list[str] = []

    def make(rows: bytes, name: str) -> tuple[pa.Table, tuple[RejectedRow, ...]]:
        made.append(name)
        return rows_of_arrow(rows), ()

    with pytest.raises(IngestError, check=coded("rows_too_large")):
        tables_for({f"t{n}": body for n in range(10)}, keep_valid_rows=False, make=make)
    assert len(made) == 2


def test_the_work_of_a_body_is_known_before_it_is_decoded() -> None:
    flat, nested = pa.array([0] * 1000), pa.StructArray.from_arrays([pa.nulls(ROWS)], names=["x"])
    assert work_bytes(body_of(flat)) < 16 << 10
    assert work_bytes(body_of(pa.nulls(ROWS).cast(pa.int64()))) >= 8 * ROWS
    assert len(body_of(nested)) < 1 << 10
    assert work_bytes(body_of(nested)) > 100 * ROWS
