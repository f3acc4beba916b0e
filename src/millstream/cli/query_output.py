"""Rows of a query on stdout, while they come: aligned for people, CSV, JSON, or an Arrow stream.

No value is rounded. CSV distinguishes NULL (nothing) from an empty text (`""`), as PostgreSQL's COPY
does. In JSON a number that JSON readers may not hold exactly (a decimal, an integer beyond 2^53) is text. Merged rows
are an object there: their regions, and `rows`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO, Final, Literal, TextIO

import click
import pyarrow as pa

from millstream.model.arrow_texts import csv_field, plain_values, rows_of_texts, value_texts
from millstream.model.human_text import readable
from millstream.model.region_ages import REGIONS_METADATA

Style = Literal["table", "csv", "json", "arrow"]
STYLES: Final[tuple[Style, ...]] = ("table", "csv", "json", "arrow")

_WIDTH_ROWS: Final = 1_000
"""A table's columns are as wide as these rows need: later ones are printed as they come."""
_NUMBERS: Final = ("int", "uint", "float", "double", "decimal", "halffloat")


def write_result(reader: pa.RecordBatchReader, style: Style, out: TextIO | None = None) -> int:
    """Print all rows; return how many.

    Args:
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
    out.write(",".join(csv_field(name) for name in reader.schema.names) + "\n")
    count = 0
    for batch in reader:
        out.writelines(",".join(map(csv_field, row)) + "\n" for row in rows_of_texts(batch))
        count += batch.num_rows
    return count


def _json(reader: pa.RecordBatchReader, out: TextIO) -> int:
    names = [json.dumps(name, ensure_ascii=False) for name in _distinct(reader.schema.names)]
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


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the columns' names with a number behind each that is there already: objects have each key once."""
    found: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}_{n}" for n in itertools.count(1))
        found[name if name not in found else next(one for one in numbered if one not in found and one not in names)] = (
            None
        )
    return list(found)


def _json_values(column: pa.Array) -> Iterable[str]:
    kind = column.type
    if pa.types.is_nested(kind) or pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return (json.dumps(plain, ensure_ascii=False) for plain in plain_values(column))
    return ("null" if text is None else json.dumps(text, ensure_ascii=False) for text in value_texts(column))


def _table(reader: pa.RecordBatchReader, out: TextIO) -> int:
    names = [readable(name) for name in reader.schema.names]
    right = [str(field.type).startswith(_NUMBERS) for field in reader.schema]
    rows = (
        ["" if text is None else readable(text) for text in row] for batch in reader for row in rows_of_texts(batch)
    )
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
