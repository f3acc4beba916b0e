"""Values of Arrow columns as text, for people and for CSV. No value is rounded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.model.column_texts import JSON_INTEGER_MAX

_QUOTED: Final = re.compile(r'[",\r\n]')
_FLOATS: Final = {None: None, "nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_INFINITE: Final = {2**63 - 1: "infinity", 1 - 2**63: "-infinity"}
"""DuckDB's infinite timestamps, in Arrow. The lake's own columns have none: they are in `__exact`."""


def csv_field(text: str | None) -> str:
    """Return a field of CSV: nothing for NULL, `""` for an empty text."""
    if text is None:
        return ""
    if text and not _QUOTED.search(text):
        return text
    return '"' + text.replace('"', '""') + '"'


def rows_of_texts(batch: pa.RecordBatch) -> Iterator[tuple[str | None, ...]]:
    """Return the rows of a batch, as texts."""
    return zip(*(value_texts(column) for column in batch.columns), strict=True) if batch.num_columns else iter(())


def value_texts(column: pa.Array) -> list[str | None]:
    """Return a column's values as text."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return value_texts(column.dictionary_decode())
    if pa.types.is_nested(kind):
        return [None if v is None else json.dumps(v, ensure_ascii=False) for v in plain_values(column)]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return [None if v is None else "\\x" + v.hex() for v in column.to_pylist()]
    if pa.types.is_decimal(kind):
        return [None if v is None else format(v, "f") for v in column.to_pylist()]
    if pa.types.is_interval(kind):
        return [
            None if v is None else f"{v.months} mons {v.days} days {(Decimal(v.nanoseconds) / 10**9):f} s"
            for v in column.to_pylist()
        ]
    if pa.types.is_duration(kind):
        return [None if v is None else f"{v} {kind.unit}" for v in column.cast(pa.int64()).to_pylist()]
    if pa.types.is_timestamp(kind):
        return _instants(column)
    texts: list[str | None] = pc.cast(column, pa.string()).to_pylist()
    if pa.types.is_time(kind):
        return [None if text is None else _short(text) for text in texts]
    if pa.types.is_floating(kind):
        return [_FLOATS.get(text, text) for text in texts]
    return texts


def _instants(column: pa.Array) -> list[str | None]:
    """Return times in UTC, with `+00:00` if the type has a zone: all of ours are stored in UTC."""
    kind = column.type
    zone = "" if kind.tz is None else "+00:00"
    texts = pc.cast(column.cast(pa.int64()).cast(pa.timestamp(kind.unit)), pa.string()).to_pylist()
    numbers = column.cast(pa.int64()).to_pylist()
    return [
        None if text is None else _INFINITE.get(number) or _short(text) + zone
        for text, number in zip(texts, numbers, strict=True)
    ]


def _short(text: str) -> str:
    """Return a time without a zero fraction."""
    whole, point, fraction = text.partition(".")
    return whole if not fraction.strip("0") else whole + point + fraction


def plain_values(column: pa.Array) -> Iterator[Any]:
    """Yield a column's values as JSON can express them."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        yield from plain_values(column.dictionary_decode())
    elif pa.types.is_map(kind):
        for at in range(len(column)):
            if not column[at].is_valid:
                yield None
                continue
            # The entries of one row: `keys` and `items` of a slice are those of the whole.
            low, high = column.offsets[at].as_py(), column.offsets[at + 1].as_py()
            keys = value_texts(column.keys.slice(low, high - low))
            yield dict(zip(keys, plain_values(column.items.slice(low, high - low)), strict=True))
    elif pa.types.is_struct(kind):
        fields = [list(plain_values(column.field(at))) for at in range(kind.num_fields)]
        names = [kind.field(at).name for at in range(kind.num_fields)]
        for at, valid in enumerate(column.is_valid().to_pylist()):
            yield {name: field[at] for name, field in zip(names, fields, strict=True)} if valid else None
    elif pa.types.is_nested(kind):
        for at in range(len(column)):
            yield list(plain_values(column[at].values)) if column[at].is_valid else None
    elif pa.types.is_boolean(kind):
        yield from column.to_pylist()
    elif pa.types.is_integer(kind):
        for value in column.to_pylist():
            yield value if value is None or abs(value) <= JSON_INTEGER_MAX else str(value)
    elif pa.types.is_floating(kind):
        # Through the shortest text that names the value: a float32 has one of its own.
        for text in value_texts(column):
            number = None if text is None else float(text)
            yield text if number is not None and not math.isfinite(number) else number
    else:
        yield from value_texts(column)
