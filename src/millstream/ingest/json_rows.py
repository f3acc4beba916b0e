"""Rows as JSON has them: a line each, or one text with an object or an array of objects; and their columns.

Strict, since what is read here came over a network: nothing that isn't JSON (NaN and infinities neither), objects alone, and bounds on whatever
may take more memory than its bytes show. Numbers without a point are whole: exact up to 64 bits, and refused beyond. Texts stay texts, those of times
too. Of a name that an object has twice the last counts, as JSON's readers commonly have it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from types import NoneType
from typing import Any, Final, NoReturn

import msgspec
import pyarrow as pa

from millstream.errors import InvalidBody, InvalidValue
from millstream.ingest.columns import NESTING_MAX, ROWS_BYTES_MAX, check_depth, check_names, column_of, too_large
from millstream.ingest.log_types import NOT_A_VALUE, no_value, stored
from millstream.ingest.schemas import FITTED_BYTES_MAX
from millstream.ingest.valid_rows import ValidTable, table_of_valid

ROWS_MAX: Final = 1_000_000
_VALUE_BYTES: Final = 5
"""What a value takes at the least, once all columns stand side by side."""
_OBJECT_BYTES: Final = 232
_LIST_BYTES: Final = 88
_TEXT_BYTES: Final = 60
_NUMBER_BYTES: Final = 40
"""What they take in Python, about, with the place that holds them."""
_NAMES_KEPT_MAX: Final = 64
"""Names of more columns are looked at each time: what is kept of them would be large."""

Row = dict[str, Any]

_LINES: Final = msgspec.json.Decoder(dict[str, Any])
_ROWS: Final = msgspec.json.Decoder(list[dict[str, Any]])
_ROW: Final = msgspec.json.Decoder(dict[str, Any])
_AT_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_NO_NUMBER: Final = re.compile(rb"-?(NaN|Infinity)")
_PLAIN: Final[dict[type, pa.DataType]] = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}


def held_bytes(body: bytes) -> int:
    """How much memory the rows of a body take while they are Python's, at the most."""
    return (
        len(body)
        + body.count(b"{") * _OBJECT_BYTES
        + body.count(b"[") * _LIST_BYTES
        + body.count(b'"') // 2 * _TEXT_BYTES
        + body.count(b",") * _NUMBER_BYTES
    )


def rows_of_lines(body: bytes, *, rows_max: int = ROWS_MAX) -> list[Row]:
    """The objects of a text of lines, each an object (`application/x-ndjson`); empty lines are none.

    Raises:
        InvalidBody: a line isn't a JSON object; details: line, from 1.
        RowsTooLarge: there are more rows than `rows_max`.
        InvalidValue: a number has more digits than any type holds.
    """
    try:
        rows = _LINES.decode_lines(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _refuse(body, error, lines=True)
    return _checked(rows, rows_max)


def rows_of_json(body: bytes, *, rows_max: int = ROWS_MAX) -> list[Row]:
    """The object, or the objects of the array, that a JSON text is (`application/json`). Raises as `rows_of_lines`."""
    try:
        rows = _ROWS.decode(body) if body.lstrip()[:1] == b"[" else [_ROW.decode(body)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _refuse(body, error, lines=False)
    return _checked(rows, rows_max)


def _checked(rows: list[Row], rows_max: int) -> list[Row]:
    if not rows:
        raise InvalidValue("an append needs at least one row", hint="Don't send a request where there is none.")
    if len(rows) > rows_max:
        raise too_large("its rows", len(rows), rows_max)
    return rows


def _refuse(body: bytes, error: Exception, *, lines: bool) -> NoReturn:
    """Say what is wrong with a text, and where."""
    said = str(error)
    place: int | None = None
    if isinstance(error, RecursionError):
        said = f"lists and objects lie in each other more than {NESTING_MAX} deep"
    elif (found := _AT_BYTE.search(said)) is not None:
        place = int(found[1])
    elif isinstance(error, msgspec.DecodeError) and not isinstance(error, msgspec.ValidationError):
        place = len(body)
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        if isinstance(error, UnicodeDecodeError) or place is None or wrong.start <= place:
            said, place = "it isn't UTF-8", wrong.start
    hint = ""
    # A sign is read before what it belongs to.
    if place is not None and (_NO_NUMBER.match(body, place) or _NO_NUMBER.match(body, max(0, place - 1))):
        said, hint = "NaN and infinities are no numbers in JSON", "Send null, or text; an Arrow body may have them."
    details: dict[str, Any] = {}
    where = ""
    if place is not None:
        line = body.count(b"\n", 0, place) + 1
        details = {"line": line, "byte": place}
        where = f" (line {line})" if lines else f" (byte {place})"
    raise InvalidBody(f"the body isn't rows as JSON{where}: {said}", hint=hint, **details) from error


def columns_of(rows: Sequence[Row], counts: Sequence[int] = ()) -> pa.Table:
    """Rows as `rows_of_lines` gives them, as columns in the log's types; what `table_of` makes of them, in a fraction of the time.

    Args:
        rows: of one request, or of several, one behind the other.
        counts: how many are each one's, of several.

    Raises:
        InvalidValue, RowsTooLarge: as `table_of`; and where lists of one request would be text because of another one's objects.
    """
    columns = _by_name(rows)
    found = pa.table([_column(name, values, counts) for name, values in columns.items()], names=list(columns))
    if found.nbytes > ROWS_BYTES_MAX:
        raise too_large("its rows' bytes", found.nbytes, ROWS_BYTES_MAX)
    return found


def valid_columns_of(rows: Sequence[Row]) -> ValidTable:
    """As `columns_of`, without rows whose values are of another kind than most of their column; raises as `table_of_valid`."""
    try:
        return ValidTable(columns_of(rows), range(len(rows)), ())
    except InvalidValue:
        for row in rows:
            for name, value in row.items():
                check_depth(name, [value])
        return table_of_valid(rows)


def _by_name(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Each column's values."""
    names = list(rows[0])
    # With as many names in all as if each had those of the first, no row has another one where none lacks any of these.
    if sum(map(len, rows)) == len(rows) * len(names):
        try:
            columns = {name: [*map(itemgetter(name), rows)] for name in names}
        except KeyError:
            pass
        else:
            _check(names, len(rows))
            return columns
    names = list(dict.fromkeys(chain.from_iterable(rows)))
    _check(names, len(rows))
    return {name: [row.get(name) for row in rows] for name in names}


def _check(names: Sequence[str], count: int) -> None:
    if not names:
        raise InvalidValue("the rows have no columns")
    if len(names) <= _NAMES_KEPT_MAX:
        _check_names(tuple(names))
    else:
        check_names(names)
    if count * len(names) * _VALUE_BYTES > FITTED_BYTES_MAX:
        raise too_large(
            f"{count} rows of {len(names)} columns, in bytes,", count * len(names) * _VALUE_BYTES, FITTED_BYTES_MAX
        )


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
        raise no_value(name, "a whole number has more than 64 bits; text may hold it") from error
    except NOT_A_VALUE as error:
        raise no_value(name, str(error)) from error
    check_depth(name, values)
    if len(counts) > 1:
        _check_alike(name, values, counts)
    found = stored(name, pa.chunked_array([column_of(name, values)]))
    return found.chunk(0) if found.num_chunks == 1 else found.combine_chunks()


def _check_alike(name: str, values: list[Any], counts: Sequence[int]) -> None:
    """`InvalidValue` where lists and objects are lists of some requests, and text of others."""
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
