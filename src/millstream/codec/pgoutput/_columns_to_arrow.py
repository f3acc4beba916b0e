"""Columns of texts in a buffer, to Arrow arrays of the log's types: in machine code, with single values in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

import millstream.codec.pgoutput._value_parsers as machine
from millstream.codec.pgoutput.rare_messages import Relation
from millstream.codec.pgoutput.relations import decode_text, undecodable
from millstream.model.exact_values import Inexact, array_of, parse_texts, text_parser
from millstream.model.floats import FIXED_BELOW_4, FIXED_BELOW_8, HALF_WAY_4, HALF_WAY_8
from millstream.model.records import TEXT_BY_COLUMN

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int32]

_INT_BOUNDS = {bits: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (16, 32, 64)}
_FLOATS = {
    pa.float32(): (FIXED_BELOW_4, *HALF_WAY_4),
    pa.float64(): (FIXED_BELOW_8, *HALF_WAY_8),
}


class Texts:
    """One column's texts: the place of each in the buffer, and the table that it belongs to."""

    __slots__ = ("buffer", "relation", "size", "value_at")

    def __init__(self, buffer: Bytes, value_at: Positions, size: Positions, relation: Relation) -> None:
        self.buffer = buffer
        self.value_at = value_at
        self.size = size
        self.relation = relation

    def __len__(self) -> int:
        return len(self.size)

    def text(self, row: int) -> str | None:
        """Return one text; None for NULL and for a value that wasn't sent."""
        if self.size[row] < 0:
            return None
        at = int(self.value_at[row])
        return decode_text(self.relation, self.buffer[at : at + int(self.size[row])].tobytes())

    def strings(self) -> pa.Array:
        """Return all texts as a string array; raises `TableUndecodable` if one isn't UTF-8."""
        offsets = np.empty(len(self) + 1, np.int32)
        data = np.empty(machine.measure(self.size, offsets), np.uint8)
        machine.gather(self.buffer, self.value_at, self.size, offsets, data)
        buffers = [validity(self.size >= 0), pa.py_buffer(offsets), pa.py_buffer(data)]
        if len(data) == 0 or data.max() < 128:  # the cast below costs more than a small run's column
            return pa.Array.from_buffers(pa.string(), len(self), buffers)
        try:
            return pa.Array.from_buffers(pa.binary(), len(self), buffers).cast(pa.string())  # checks, doesn't copy
        except pa.ArrowInvalid as error:
            raise undecodable(self.relation, "a value isn't UTF-8") from error


def validity(valid: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    """Return a validity bitmap; None if everything is valid."""
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def read_column(texts: Texts, kind: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Return a column as an array of its type in the log, and the texts that it can't hold exactly, by row.

    Raises:
        TableUndecodable: a value isn't UTF-8.
    """
    if pa.types.is_string(kind):
        return texts.strings(), {}
    state = np.empty(len(texts), np.uint8)
    reader = _reader(kind)
    read = None if reader is None else reader(texts, kind, state)
    if read is None:
        return parse_texts([texts.text(row) for row in range(len(texts))], kind)
    bad, data = read
    valid = state == machine.OK
    array = pa.Array.from_buffers(kind, len(texts), [validity(valid), *(pa.py_buffer(part) for part in data)])
    return (array, {}) if bad == 0 else _decide(texts, kind, array, np.flatnonzero(state == machine.BAD).tolist())


def _decide(texts: Texts, kind: pa.DataType, array: pa.Array, bad: list[int]) -> tuple[pa.Array, dict[int, str]]:
    """Let the plain parser decide about values that machine code left alone: held after all, or exact as text."""
    parse = text_parser(kind)
    exact: dict[int, str] = {}
    held: dict[int, Any] = {}
    for row in bad:
        text = texts.text(row)
        assert text is not None
        value = parse(text)
        if isinstance(value, Inexact):
            exact[row] = text
        else:
            held[row] = value
    if held:
        mask = np.zeros(len(array), np.bool_)
        mask[list(held)] = True
        array = pc.replace_with_mask(array, mask, array_of(list(held.values()), kind))
    return array, exact


Read = tuple[int, tuple[npt.NDArray[Any], ...]]
"""The number of BAD values, and the array's buffers except the validity."""


def _read_integers(texts: Texts, kind: pa.DataType, state: Bytes) -> Read:
    out = np.empty(len(texts), np.int64)
    low, high = _INT_BOUNDS[kind.bit_width]
    bad = machine.read_integers(texts.buffer, texts.value_at, texts.size, low, high, out, state)
    return bad, (out.astype(f"int{kind.bit_width}", copy=False),)


def _read_booleans(texts: Texts, _kind: pa.DataType, state: Bytes) -> Read:
    out = np.empty(len(texts), np.uint8)
    bad = machine.read_booleans(texts.buffer, texts.value_at, texts.size, out, state)
    return bad, (np.packbits(out, bitorder="little"),)


def _read_decimals(texts: Texts, kind: pa.DataType, state: Bytes) -> Read:
    out = np.empty(2 * len(texts), np.int64)
    bad = machine.read_decimals(texts.buffer, texts.value_at, texts.size, kind.precision, kind.scale, out, state)
    return bad, (out,)


def _read_dates(texts: Texts, _kind: pa.DataType, state: Bytes) -> Read:
    out = np.empty(len(texts), np.int32)
    return machine.read_dates(texts.buffer, texts.value_at, texts.size, out, state), (out,)


def _read_timestamps(texts: Texts, kind: pa.DataType, state: Bytes) -> Read:
    out = np.empty(len(texts), np.int64)
    zoned = kind.tz is not None
    return machine.read_timestamps(texts.buffer, texts.value_at, texts.size, zoned, out, state), (out,)


def _read_bytea(texts: Texts, _kind: pa.DataType, state: Bytes) -> Read:
    offsets = np.empty(len(texts) + 1, np.int32)
    data = np.empty(machine.measure_bytea(texts.buffer, texts.value_at, texts.size, offsets, state), np.uint8)
    bad = machine.read_bytea(texts.buffer, texts.value_at, offsets, data, state)
    return bad, (offsets, data)


def _read_floats(texts: Texts, kind: pa.DataType, state: Bytes) -> Read | None:
    """Return None if some text is no number: then the plain parser takes the whole column."""
    try:
        array = texts.strings().cast(kind)
    except pa.ArrowInvalid:
        return None
    shortest = array.cast(pa.string())
    _, offsets, data = shortest.buffers()
    values = np.frombuffer(array.buffers()[1], np.dtype(f"float{kind.bit_width}"), len(texts))
    bad = machine.check_floats(
        texts.buffer,
        texts.value_at,
        texts.size,
        values.astype(np.float64),
        np.frombuffer(offsets, np.int32),
        np.frombuffer(data, np.uint8) if data is not None and data.size else _NO_BYTES,
        *_FLOATS[kind],
        state,
    )
    return bad, (values,)


_NO_BYTES = np.frombuffer(b"\0", np.uint8)


def _reader(kind: pa.DataType) -> Callable[[Texts, pa.DataType, Bytes], Read | None] | None:
    if pa.types.is_integer(kind):
        return _read_integers
    if pa.types.is_decimal128(kind):
        return _read_decimals
    if pa.types.is_timestamp(kind):
        return _read_timestamps
    return _READERS.get(kind)


_READERS: dict[pa.DataType, Callable[[Texts, pa.DataType, Bytes], Read | None]] = {
    pa.bool_(): _read_booleans,
    pa.date32(): _read_dates,
    pa.binary(): _read_bytea,
    pa.float32(): _read_floats,
    pa.float64(): _read_floats,
}


def text_map(rows: int, offsets: Positions, there: npt.NDArray[np.bool_], keys: pa.Array, items: pa.Array) -> pa.Array:
    """Return an array of `TEXT_BY_COLUMN`.

    Row i's entries are `offsets[i]` to `offsets[i + 1]`; the row is null if `there` is false.
    """
    entries = pa.StructArray.from_arrays([keys, items], fields=[TEXT_BY_COLUMN.key_field, TEXT_BY_COLUMN.item_field])
    return pa.Array.from_buffers(TEXT_BY_COLUMN, rows, [validity(there), pa.py_buffer(offsets)], children=[entries])


def exact_map(rows: int, exact: list[tuple[int, int, str]], names: list[str]) -> pa.Array:
    """Return the `__exact` column of texts by (row, column number)."""
    exact.sort()
    counts = np.bincount(np.fromiter((row for row, _, _ in exact), np.int64, len(exact)), minlength=rows)
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    keys = pa.array([names[column] for _, column, _ in exact], pa.string())
    return text_map(rows, offsets, counts > 0, keys, pa.array([text for _, _, text in exact], pa.string()))
