"""Messages decoded together give the rows that each of them gives."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.seeds import examples

from millstream.codec.arrow_ipc import ColumnPicker, decode_batch, encode_batch
from millstream.errors import CorruptFrame

SCHEMA = pa.schema(
    [
        pa.field("n", pa.int64(), nullable=False),
        pa.field("small", pa.uint8()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("text", pa.string()),
        pa.field("flag", pa.bool_()),
    ]
)
ROWS = st.fixed_dictionaries(
    {
        "n": st.integers(0, 9),
        "small": st.none() | st.integers(0, 255),
        "at": st.none() | st.integers(0, 9),
        "text": st.none() | st.sampled_from(["", "a", "bc"]),
        "flag": st.none() | st.booleans(),
    }
)
BATCHES = st.lists(st.lists(ROWS, max_size=3), min_size=1, max_size=4)
ALIKE = st.integers(1, 3).flatmap(
    lambda rows: st.lists(
        st.lists(st.integers(0, 99), min_size=rows, max_size=rows).map(
            lambda numbers: [{"n": n, "small": n, "at": n, "text": None, "flag": None} for n in numbers]
        ),
        min_size=2,
        max_size=4,
    )
)


@settings(max_examples=examples(600))
@given(BATCHES | ALIKE, st.sampled_from([None, ("n",), ("at", "small")]))
def test_messages_decoded_together_give_the_rows_of_each(
    batches: list[list[dict[str, object]]], names: tuple[str, ...] | None
) -> None:
    messages = [encode_batch(pa.RecordBatch.from_pylist(rows, SCHEMA)).to_pybytes() for rows in batches]
    joined, counts = ColumnPicker(SCHEMA, names).decode_all([memoryview(message) for message in messages])
    joined.validate(full=True)
    each = [decode_batch(message, SCHEMA).select(names or SCHEMA.names) for message in messages]
    assert joined.to_pylist() == [row for batch in each for row in batch.to_pylist()]
    assert counts == [len(rows) for rows in batches]


@pytest.mark.parametrize("rows", [1, 2000], ids=["plain", "compressed"])
def test_messages_of_one_shape_and_any_size_are_decoded(rows: int) -> None:
    batches = [pa.RecordBatch.from_pylist([{"n": which}] * rows, SCHEMA) for which in range(3)]
    joined, counts = ColumnPicker(SCHEMA, None).decode_all([encode_batch(batch).to_pybytes() for batch in batches])
    assert joined.column("n").to_pylist() == [which for which in range(3) for _ in range(rows)]
    assert counts == [rows] * 3


def test_a_bitmap_that_contradicts_its_count_is_refused_in_any_message() -> None:
    batch = pa.RecordBatch.from_pylist([{"n": 1}], SCHEMA)
    message = encode_batch(batch).to_pybytes()
    forged = []
    for at in range(8 + int.from_bytes(message[4:8], "little"), len(message)):
        other = bytearray(message)
        other[at] ^= 1
        try:
            decode_batch(bytes(other), SCHEMA)
        except CorruptFrame:
            forged.append(bytes(other))
    assert forged
    for damaged in forged:
        with pytest.raises(CorruptFrame):
            ColumnPicker(SCHEMA, None).decode_all([message, damaged])
