"""Rows from JSON, and their columns: one object per line, or one text with an object or an array of objects.

The parser is strict, since the input came over a network: only valid JSON (no NaN, no infinities), only
objects, and limits on whatever may take more memory than its bytes suggest. Numbers without a point are
integers: exact up to 64 bits, and refused beyond. Texts stay texts, also those of times. If an object has
a name twice, the last one counts, as is common.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from types import NoneType
from typing import Any, Final, NoReturn

import msgspec
import pyarrow as pa

from millstream.errors import HttpError, InvalidValue
from millstream.ingest.fit_to_schema import FITTED_BYTES_MAX
from millstream.ingest.increment_columns import with_named
from millstream.ingest.keep_valid_rows import table_of_valid
from millstream.ingest.log_types import NOT_A_VALUE, no_value, stored, too_long_number
from millstream.ingest.python_rows import (
    COLUMNS_MAX,
    NESTING_MAX,
    ROWS_BYTES_MAX,
    check_depth,
    check_names,
    column_of,
    too_large,
)
from millstream.model.operations import RejectedRow

ROWS_MAX: Final = 1_000_000
CELLS_MAX: Final = 1 << 20
"""Number of values in columns that one thread may make while others wait: about 0.1 s. Rows have fewer values than columns
if each has other names."""
CELL_BYTES: Final = 16
"""Upper bound of the size in bytes of a missing value while columns are made: in a list, and in the column."""
_VALUE_BYTES: Final = 5
"""Smallest size in bytes of a value, once all columns are materialized."""
_CELLS_AT_MOST: Final = FITTED_BYTES_MAX // _VALUE_BYTES
_OBJECT_BYTES: Final = 232
_LIST_BYTES: Final = 88
_TEXT_BYTES: Final = 60
_NUMBER_BYTES: Final = 40
"""Approximate size in bytes of numbers in Python, with their reference."""
_NAMES_KEPT_MAX: Final = 64
"""Limit of cached names: a larger cache would take much memory, so names of more columns are checked each time."""

Row = dict[str, Any]


class _TableName(str):
    """A table's name in a body: a type of its own, so that the decoder reports each occurrence."""

    __slots__ = ()


class _Tables(msgspec.Struct, forbid_unknown_fields=True):
    tables: dict[_TableName, list[Row] | str] = {}


_UNKNOWN_FIELD: Final = "Object contains unknown field"
_LINES: Final = msgspec.json.Decoder(dict[str, Any])
_ROWS: Final = msgspec.json.Decoder(list[dict[str, Any]])
_ROW: Final = msgspec.json.Decoder(dict[str, Any])
_AT_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_NO_NUMBER: Final = re.compile(rb"-?(NaN|Infinity)")
_PLAIN: Final[dict[type, pa.DataType]] = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


def held_bytes(body: bytes) -> int:
    """Return an upper bound of the memory that a body's rows take as Python's objects."""
    return (
        len(body)
        + body.count(b"{") * _OBJECT_BYTES
        + body.count(b"[") * _LIST_BYTES
        + body.count(b'"') // 2 * _TEXT_BYTES
        + body.count(b",") * _NUMBER_BYTES
    )


def cell_count(rows: Sequence[Row]) -> int:
    """Return an upper bound of the number of values, also missing ones, of the rows as columns; it is exact above `CELLS_MAX`."""
    cells = len(rows) * min(sum(map(len, rows)), COLUMNS_MAX)
    if cells > CELLS_MAX:
        cells = len(rows) * min(len(set(chain.from_iterable(rows))), COLUMNS_MAX)
    return cells


def rows_of_lines(body: bytes, *, rows_max: int = ROWS_MAX) -> list[Row]:
    """Return the objects of a text with one object per line (`application/x-ndjson`); empty lines are skipped.

    Raises:
        HttpError (`invalid_body`): a line isn't a JSON object; details: line, from 1.
        IngestError (`rows_too_large`): there are more rows than `rows_max`.
        InvalidValue: a number has more digits than any type holds.
    """
    try:
        rows = _LINES.decode_lines(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _refuse(body, error, lines=True)
    return _checked(rows, rows_max)


def rows_of_json(body: bytes, *, rows_max: int = ROWS_MAX) -> list[Row]:
    """Return the object, or the array's objects, of a JSON text (`application/json`). Raises as `rows_of_lines`."""
    try:
        rows = _ROWS.decode(body) if body.lstrip()[:1] == b"[" else [_ROW.decode(body)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _refuse(body, error, lines=False)
    return _checked(rows, rows_max)


def tables_of_json(body: bytes, *, rows_max: int = ROWS_MAX) -> dict[str, list[Row] | str]:
    """Return the rows of each table of a JSON text `{"tables": {table: rows}}`; an empty text has none.

    Rows are an array of objects, or an Arrow IPC stream as base64.

    Raises:
        HttpError (`invalid_body`): it isn't such a text.
        InvalidValue: it has other fields, or names a table twice.
        IngestError (`rows_too_large`): there are more rows than `rows_max`.
    """
    names: list[str] = []

    def note(_kind: type, name: str) -> Any:
        names.append(name)
        return _TableName(name)

    if not body.strip():
        return {}
    try:
        found = msgspec.json.Decoder(_Tables, dec_hook=note).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if str(error).startswith(_UNKNOWN_FIELD):
            raise InvalidValue(f"the body has more than tables: {error}", hint='Send {"tables": {…}}.') from error
        _refuse(body, error, lines=False)
    if len(names) != len(found.tables):
        twice = next((name for name, count in Counter(names).items() if count > 1), names[0])
        raise InvalidValue(
            f"the body names table {twice} twice, or has several objects of tables",
            hint="Put all rows of a table into one array.",
            table=twice,
        )
    total = sum(len(rows) for rows in found.tables.values() if not isinstance(rows, str))
    if total > rows_max:
        raise too_large("its rows", total, rows_max)
    return {str(name): rows for name, rows in found.tables.items()}


def _checked(rows: list[Row], rows_max: int) -> list[Row]:
    if not rows:
        raise InvalidValue("an append needs at least one row", hint="Don't send a request without rows.")
    if len(rows) > rows_max:
        raise too_large("its rows", len(rows), rows_max)
    return rows


def _refuse(body: bytes, error: Exception, *, lines: bool) -> NoReturn:
    """Raise the error of a text, with its place."""
    said = str(error)
    place: int | None = None
    if isinstance(error, RecursionError):
        said = f"lists and objects are nested more than {NESTING_MAX} deep"
    elif (found := _AT_BYTE.search(said)) is not None:
        place = int(found[1])
    elif isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError):
        place = len(body)
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        if isinstance(error, UnicodeDecodeError) or place is None or wrong.start <= place:
            said, place = "it isn't UTF-8", wrong.start
    hint: str | None = None
    # A sign is read before the word after it.
    if place is not None and (_NO_NUMBER.match(body, place) or _NO_NUMBER.match(body, max(0, place - 1))):
        said, hint = "NaN and infinities are no numbers in JSON", "Send null, or text; an Arrow body may have them."
    details: dict[str, Any] = {}
    where = ""
    if place is not None:
        line = body.count(b"\n", 0, place) + 1
        details = {"line": line, "byte": place}
        where = f" (line {line})" if lines else f" (byte {place})"
    raise HttpError(f"the body isn't rows as JSON{where}: {said}", code="invalid_body", hint=hint, **details) from error


def columns_of(rows: Sequence[Row], counts: Sequence[int] = ()) -> pa.Table:
    """Return the rows of `rows_of_lines` as columns in the log's types: as `table_of`, in a fraction of the time.

    Args:
        rows: of one request, or of several, one after the other.
        counts: each request's number of rows, if there are several.

    Raises:
        InvalidValue, IngestError (`rows_too_large`): as `table_of`; if one request's lists would become text because of
            another's objects; and if several requests have more than `CELLS_MAX` values together.
    """
    columns = _by_name(rows, CELLS_MAX if len(counts) > 1 else _CELLS_AT_MOST)
    found = pa.table([_column(name, values, counts) for name, values in columns.items()], names=list(columns))
    size_bytes = found.get_total_buffer_size()  # no column is a slice, and `nbytes` takes 9 µs of a request's 90
    if size_bytes > ROWS_BYTES_MAX:
        raise too_large("its rows' bytes", size_bytes, ROWS_BYTES_MAX)
    return with_named(found, rows)


def valid_columns_of(
    rows: Sequence[Row], *, may_be_empty: bool = False, types: Callable[[], Mapping[str, pa.DataType]] = dict
) -> tuple[pa.Table, tuple[RejectedRow, ...]]:
    """Return as `columns_of`, without rows whose values differ in kind from their column; and those.

    Raises as `table_of_valid`.
    """
    try:
        return columns_of(rows), ()
    except InvalidValue:
        for row in rows:
            for name, value in row.items():
                check_depth(name, [value])
        return table_of_valid(rows, may_be_empty=may_be_empty, types=types)


def _by_name(rows: Sequence[Row], cells_max: int) -> dict[str, list[Any]]:
    """Return each column's values."""
    names = list(rows[0])
    # If the total of names is as if each row had the first row's names, no row has another name unless
    # one lacks a name.
    if sum(map(len, rows)) == len(rows) * len(names):
        _check(names, len(rows), cells_max)
        with suppress(KeyError):
            return {name: [*map(itemgetter(name), rows)] for name in names}
    names = list(dict.fromkeys(chain.from_iterable(rows)))
    _check(names, len(rows), cells_max)
    return {name: [row.get(name) for row in rows] for name in names}


def _check(names: Sequence[str], count: int, cells_max: int) -> None:
    if not names:
        raise InvalidValue("the rows have no columns")
    if len(names) <= _NAMES_KEPT_MAX:
        _check_names(tuple(names))
    else:
        check_names(names)
    if count * len(names) > cells_max:
        size, size_max = count * len(names) * _VALUE_BYTES, cells_max * _VALUE_BYTES
        raise too_large(f"{count} rows of {len(names)} columns, in bytes,", size, size_max)


@lru_cache(maxsize=256)
def _check_names(names: tuple[str, ...]) -> None:
    check_names(names)


def _column(name: str, values: list[Any], counts: Sequence[int]) -> pa.Array:
    kinds = set(map(type, values))
    kinds.discard(NoneType)
    if not kinds:
        return pa.nulls(len(values))
    try:
        if len(kinds) == 1:
            (kind,) = kinds
            if (plain := _PLAIN.get(kind)) is not None:
                return pa.array(values, plain)
        elif kinds == {int, float}:
            return pa.array(values)
    except OverflowError as error:
        raise too_long_number(name) from error
    except NOT_A_VALUE as error:
        raise no_value(name, str(error)) from error
    check_depth(name, values)
    if len(counts) > 1:
        _check_alike(name, values, counts)
    found = stored(name, pa.chunked_array([column_of(name, values)]))
    return found.chunk(0) if found.num_chunks == 1 else found.combine_chunks()


def _check_alike(name: str, values: list[Any], counts: Sequence[int]) -> None:
    """Raise `InvalidValue` if lists and objects are lists in some requests and text in others."""
    start = 0
    kinds: set[bool] = set()
    for count in counts:
        nested = [value for value in values[start : start + count] if isinstance(value, list | dict)]
        start += count
        if nested:
            kinds.add(any(map(_is_text, nested)))
    if len(kinds) > 1:
        raise no_value(name, "it has lists and objects")


def _is_text(value: list[Any] | Row) -> bool:
    return isinstance(value, dict) or any(isinstance(item, list | dict) for item in value)
