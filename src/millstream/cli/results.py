"""Rows of a query on stdout, while they come: aligned for people, CSV, JSON, or an Arrow stream.

No value is rounded. CSV distinguishes NULL (nothing) from an empty text (`""`), as PostgreSQL's COPY
does. In JSON a number that JSON readers may not hold exactly (a decimal, an integer beyond 2^53) is text. Merged rows
are an object there: their regions, and `rows`.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any, BinaryIO, Final, Literal, TextIO

import click
import pyarrow as pa
import pyarrow.compute as pc

from millstream.model.pgcolumns import JSON_INTEGER_MAX
from millstream.model.readable import readable
from millstream.model.region_ages import REGIONS_METADATA

Style = Literal["table", "csv", "json", "arrow"]
STYLES: Final[tuple[Style, ...]] = ("table", "csv", "json", "arrow")

_WIDTH_ROWS: Final = 1_000
"""A table's columns are as wide as these rows need: later ones are printed as they come."""
_NUMBERS: Final = ("int", "uint", "float", "double", "decimal", "halffloat")
_QUOTED: Final = re.compile(r'[",\r\n]')
_FLOATS: Final = {None: None, "nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_INFINITE: Final = {2**63 - 1: "infinity", 1 - 2**63: "-infinity"}
"""DuckDB's infinite timestamps, in Arrow. The lake's own columns have none: they are in `__exact`."""


def write_result(reader: pa.RecordBatchReader, style: Style, out: TextIO | None = None) -> int:
    """Print all rows; return how many.

    Args:
        reader: the rows, a batch at a time.
        style: how.
        out: stdout if None; it must have a `buffer` for `arrow`.
    """
    out = sys.stdout if out is None else out
    if style == "arrow":
        return _arrow(reader, out.buffer)
    writers: dict[str, Callable[[pa.RecordBatchReader, TextIO], int]] = {"csv": _csv, "json": _json, "table": _table}
    return writers[style](reader, out)


def _arrow(reader: pa.RecordBatchReader, out: BinaryIO) -> int:
    count = 0
    with pa.ipc.new_stream(out, reader.schema) as writer:
        for batch in reader:
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def _csv(reader: pa.RecordBatchReader, out: TextIO) -> int:
    out.write(",".join(_field(name) for name in reader.schema.names) + "\n")
    count = 0
    for batch in reader:
        out.writelines(",".join(map(_field, row)) + "\n" for row in _rows(batch))
        count += batch.num_rows
    return count


def _field(text: str | None) -> str:
    if text is None:
        return ""
    if text and not _QUOTED.search(text):
        return text
    return '"' + text.replace('"', '""') + '"'


def _json(reader: pa.RecordBatchReader, out: TextIO) -> int:
    names = [json.dumps(name, ensure_ascii=False) for name in reader.schema.names]
    regions = (reader.schema.metadata or {}).get(REGIONS_METADATA)
    out.write("[" if regions is None else f'{{"regions": {regions.decode()},\n"rows": [')
    count = 0
    for batch in reader:
        columns = [_json_values(column) for column in batch.columns]
        for row in zip(*columns, strict=True):
            facts = ", ".join(f"{name}: {value}" for name, value in zip(names, row, strict=True))
            out.write(f"{',' if count else ''}\n  {{{facts}}}")
            count += 1
    out.write("\n]" if count else "]")
    out.write("\n" if regions is None else "}\n")
    return count


def _json_values(column: pa.Array) -> Iterable[str]:
    kind = column.type
    if pa.types.is_nested(kind) or pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return (json.dumps(plain, ensure_ascii=False) for plain in _plain_values(column))
    return ("null" if text is None else json.dumps(text, ensure_ascii=False) for text in _texts(column))


def _table(reader: pa.RecordBatchReader, out: TextIO) -> int:
    names = [readable(name) for name in reader.schema.names]
    right = [str(field.type).startswith(_NUMBERS) for field in reader.schema]
    rows = (["" if text is None else readable(text) for text in row] for batch in reader for row in _rows(batch))
    first = [row for row, _ in zip(rows, range(_WIDTH_ROWS), strict=False)]
    widths = [max(len(title), *(len(row[at]) for row in first), 0) for at, title in enumerate(names)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if rightward else cell.ljust(width)
            for cell, width, rightward in zip(cells, widths, right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    if names:
        click.secho(line(names), bold=True, file=out)
    out.writelines(line(row) + "\n" for row in first)
    count = len(first)
    for row in rows:
        out.write(line(row) + "\n")
        count += 1
    return count


def _rows(batch: pa.RecordBatch) -> Iterator[tuple[str | None, ...]]:
    return zip(*(_texts(column) for column in batch.columns), strict=True) if batch.num_columns else iter(())


def _texts(column: pa.Array) -> list[str | None]:
    """Return a column's values as text."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _texts(column.dictionary_decode())
    if pa.types.is_nested(kind):
        return [None if v is None else json.dumps(v, ensure_ascii=False) for v in _plain_values(column)]
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


def _plain_values(column: pa.Array) -> Iterator[Any]:
    """Yield a column's values as JSON can express them."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        yield from _plain_values(column.dictionary_decode())
    elif pa.types.is_map(kind):
        for at in range(len(column)):
            if not column[at].is_valid:
                yield None
                continue
            # The entries of one row: `keys` and `items` of a slice are those of the whole.
            low, high = column.offsets[at].as_py(), column.offsets[at + 1].as_py()
            keys = _texts(column.keys.slice(low, high - low))
            yield dict(zip(keys, _plain_values(column.items.slice(low, high - low)), strict=True))
    elif pa.types.is_struct(kind):
        fields = [list(_plain_values(column.field(at))) for at in range(kind.num_fields)]
        names = [kind.field(at).name for at in range(kind.num_fields)]
        for at, valid in enumerate(column.is_valid().to_pylist()):
            yield {name: field[at] for name, field in zip(names, fields, strict=True)} if valid else None
    elif pa.types.is_nested(kind):
        for at in range(len(column)):
            yield list(_plain_values(column[at].values)) if column[at].is_valid else None
    elif pa.types.is_boolean(kind):
        yield from column.to_pylist()
    elif pa.types.is_integer(kind):
        for value in column.to_pylist():
            yield value if value is None or abs(value) <= JSON_INTEGER_MAX else str(value)
    elif pa.types.is_floating(kind):
        # Through the shortest text that names the value: a float32 has one of its own.
        for text in _texts(column):
            number = None if text is None else float(text)
            yield text if number is not None and not math.isfinite(number) else number
    else:
        yield from _texts(column)
