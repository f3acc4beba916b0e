"""Applications' rows as columns in the log's types: from dicts, and from everything that supports Arrow's C interface.

No conversion that could change a value is guessed: values of several kinds in one column are refused. A
value without its own type in the log (a time of day, a nested value) becomes text, as JSON if it is
nested.
"""

from __future__ import annotations

import datetime as dt
import weakref
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any, Final, Literal, Protocol, TypeAlias, cast
from uuid import UUID

import numpy as np
import pyarrow as pa

from millstream.errors import IngestError, InvalidValue
from millstream.ingest.increment_columns import NAMED, with_named, without_named
from millstream.ingest.log_types import NOT_A_VALUE, json_of, no_value, stored, text_of, too_long_number
from millstream.ingest.nested import TextRoom
from millstream.model.names import NAME_BYTES_MAX, name_fault
from millstream.model.pgtypes import DECIMAL_DIGITS_MAX
from millstream.model.records import RESERVED_COLUMNS

COLUMNS_MAX: Final = 1600
"""Limit of columns, as in a PostgreSQL table."""
NESTING_MAX: Final = 100
"""Limit of nesting of lists and objects in a value."""
ROWS_BYTES_MAX: Final = 64 << 20
"""Size in bytes of one call's rows: it is in memory whole, here and in the writer."""
_DECIMAL_SCALE: Final = 9
"""Digits after the point in a column that begins with Python's decimals, which don't declare a scale."""
_NUMBERS: Final = frozenset({int, float})
_KINDS: Final = (bool, int, float, str, bytes, dt.datetime, dt.date, dt.time, Decimal, UUID, list, tuple, dict)
"""Python types of values; a subtype precedes its base."""
_JSON_KINDS: Final = frozenset({list, tuple, dict})
_TEXTS: Final = frozenset({dt.time, UUID})
"""Types without a type in the log, and with one spelling."""


class ArrowStream(Protocol):
    """Provider of Arrow data: tables and batches of pyarrow, frames of polars and pandas, results of DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return a capsule with an ArrowArrayStream."""


class ArrowArray(Protocol):
    """Provider of one record batch."""

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """Return capsules with an ArrowSchema and an ArrowArray."""


Rows: TypeAlias = Mapping[str, Any] | Iterable[Mapping[str, Any]] | ArrowStream | ArrowArray
"""One row, several, or a frame."""


_MADE: Final[weakref.WeakValueDictionary[int, pa.Table]] = weakref.WeakValueDictionary()
"""Tables that `table_of` has returned, by identity: a session makes columns of its rows, and then calls its home with them."""


def table_of(rows: Rows) -> pa.Table:
    """Return rows as columns in the log's types; a column that has only nulls has Arrow's null type.

    Args:
        rows: a dict or an iterable of them, with null for a column that a row lacks; a pyarrow table or
            batch; a frame of polars; a frame of pandas (named index levels become columns, and NaN is
            null); anything else with `__arrow_c_stream__`.

    Raises:
        InvalidValue: a value has no type in the log, or a column has values of several kinds; details:
            column.
        IngestError (`rows_too_large`): the rows take more than `ROWS_BYTES_MAX`, also as text, or have more columns than
            `COLUMNS_MAX`, or a name is too long.
    """
    if isinstance(rows, pa.Table) and _MADE.get(id(rows)) is rows:
        return rows
    table, named = without_named(_arrow(rows))
    check_names(table.column_names)
    if table.nbytes > ROWS_BYTES_MAX:
        raise too_large("its rows' bytes", table.nbytes, ROWS_BYTES_MAX)
    room = TextRoom(ROWS_BYTES_MAX)
    columns = [stored(name, column, room) for name, column in zip(table.column_names, table.columns, strict=True)]
    found = pa.table(columns, names=table.column_names)
    if named is not None:
        found = found.append_column(NAMED, named)
    _MADE[id(found)] = found
    return found


def _arrow(rows: Rows) -> pa.Table:
    """Return the rows as Arrow data; the conversions that other libraries would do with loss are done here."""
    if isinstance(rows, Mapping):
        return _of_dicts([rows])
    try:
        if isinstance(rows, pa.Table):
            found = rows
        elif hasattr(rows, "__arrow_c_stream__"):
            found = _of_frame(cast("ArrowStream", rows))
        elif hasattr(rows, "__arrow_c_array__"):
            found = pa.table(pa.record_batch(rows))
        elif isinstance(rows, Iterable):
            return _of_dicts(list(rows))
        else:
            raise InvalidValue(
                f"rows are dicts or a frame (Arrow, pandas, polars), not {type(rows).__name__}",
                hint="Collect a lazy frame first.",
            )
        # Validate text too: invalid UTF-8 could never be read again.
        found.validate(full=True)
    except (*NOT_A_VALUE, AttributeError) as error:
        raise InvalidValue(
            f"{type(rows).__name__} can't be made columns: {error}", hint="Hand over a table: rows with named columns."
        ) from error
    return found


def _of_frame(rows: ArrowStream) -> pa.Table:
    """Return a frame's columns.

    Pandas keeps Python's objects if it has no type for them: they are converted as from dicts.
    """
    module = type(rows).__module__.partition(".")[0]
    frame: Any = rows
    if module == "polars" and any(str(kind) == "Object" for kind in frame.dtypes):
        raise InvalidValue("a polars column of Python's objects has no type", hint="Cast it, or hand over dicts.")
    if module != "pandas":
        return pa.table(rows)
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    names = [str(name) for name in frame.columns]
    check_names(names)
    plain = [frame.iloc[:, place].dtype != object for place in range(len(names))]
    typed = pa.Table.from_pandas(frame.loc[:, plain], preserve_index=False)
    columns = iter(typed.columns)
    missing = frame.isna()
    return pa.table(
        [
            next(columns)
            if is_plain
            else column_of(
                name,
                [
                    None if is_missing else value
                    for value, is_missing in zip(frame.iloc[:, place], missing.iloc[:, place], strict=True)
                ],
            )
            for place, (name, is_plain) in enumerate(zip(names, plain, strict=True))
        ],
        names=names,
    )


def _of_dicts(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    names: dict[str, None] = {}
    for row in rows:
        if not isinstance(row, Mapping):
            raise InvalidValue(f"a row is a dict, not {type(row).__name__}")
        names.update(dict.fromkeys(row))
    for name in names:
        if not isinstance(name, str):
            raise InvalidValue(f"a column's name is a string, not {type(name).__name__}")
    if rows and not names:
        raise InvalidValue("the rows have no columns")
    check_names(list(names))
    if NAMED in names:
        raise _reserved(NAMED)
    found = pa.table({name: column_of(name, [row.get(name) for row in rows]) for name in names})
    return with_named(found, rows)


def column_of(name: str, values: list[Any]) -> pa.Array:
    """Return Python's values as a column; values of several kinds raise `InvalidValue`."""
    kinds = _check_one_kind(name, values)
    if kinds & _JSON_KINDS:
        check_depth(name, values)
    try:
        if dict in kinds or any(_is_nested(value) for value in values):
            return pa.array([None if value is None else json_of(value) for value in values], pa.string())
        inner = [item for value in values if isinstance(value, list | tuple) for item in value]
        kinds_inside = _check_one_kind(name, inner)
        if kinds & _TEXTS:
            return pa.array([None if value is None else text_of(value) for value in values], pa.string())
        if kinds_inside & _TEXTS:
            lists = [value and [None if item is None else text_of(item) for item in value] for value in values]
            return pa.array(lists, pa.list_(pa.string()))
        for value in (*values, *inner):
            if isinstance(value, Decimal) and not value.is_finite():
                raise no_value(name, f"{value} is no decimal number: the log's decimals are finite")
        found = pa.array(values)
        if Decimal in kinds:
            return found.cast(_roomy(found.type))
    except OverflowError as error:
        raise too_long_number(name) from error
    except NOT_A_VALUE as error:
        raise no_value(name, str(error)) from error
    return found


def _check_one_kind(name: str, values: Iterable[Any]) -> set[type]:
    """Return the kind of the values; several kinds only if mixing them loses nothing."""
    kinds = {kind_of(value) for value in values if value is not None}
    if len(kinds) > 1 and not kinds <= _NUMBERS and not kinds <= _JSON_KINDS:
        raise no_value(name, f"it has values of several kinds: {', '.join(sorted(kind.__name__ for kind in kinds))}")
    moments = [value for value in values if isinstance(value, dt.datetime)]
    if len({value.tzinfo is None for value in moments}) > 1:
        raise no_value(name, "some of its times have a zone and some have none")
    if any(getattr(value, "nanosecond", 0) for value in moments):
        raise no_value(name, "a time has nanoseconds that aren't whole microseconds")
    return kinds


def kind_of(value: object) -> type:
    """Return a value's kind: the first kind that it is an instance of, so that a subclass counts as its base."""
    if isinstance(value, np.generic):
        value = value.item()
    return next((kind for kind in _KINDS if isinstance(value, kind)), type(value))


def _is_nested(value: object) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, list | tuple | dict) for item in value)


def _roomy(kind: pa.DataType) -> pa.DataType:
    """Return a decimal type with room for later values, too."""
    return pa.decimal128(DECIMAL_DIGITS_MAX, max(_DECIMAL_SCALE, kind.scale))


def check_names(names: Sequence[str]) -> None:
    """Refuse invalid column names, or too many of them: `InvalidValue`, `IngestError` (`rows_too_large`)."""
    if len(names) > COLUMNS_MAX:
        raise too_large("its columns", len(names), COLUMNS_MAX)
    seen: dict[str, str] = {}
    for name in names:
        check_name(name, "column")
        if name.lower() in RESERVED_COLUMNS or name.lower() == NAMED:
            raise _reserved(name)
        other = seen.get(name.lower())
        if other is not None:
            raise InvalidValue(f"columns {other} and {name} have one name in a lake table", column=name)
        seen[name.lower()] = name


def _reserved(name: str) -> InvalidValue:
    return InvalidValue(
        f"{name} is a name that Millstream keeps for itself",
        hint="Rename the column.",
        column=name,
    )


def check_name(name: str, what: Literal["table", "schema", "column"]) -> None:
    """Refuse an invalid name: `InvalidValue`, or `IngestError` (`rows_too_large`) if it is too long."""
    fault = name_fault(name)
    if fault is None:
        return
    size = len(name.encode(errors="replace"))
    if size > NAME_BYTES_MAX:
        raise too_large(f"the bytes of the {what}'s name {name[:20]}…", size, NAME_BYTES_MAX)
    raise InvalidValue(
        f"a {what} can't have the name {name!r}: it {fault}", **{what: name.encode(errors="backslashreplace").decode()}
    )


def check_depth(name: str, values: Sequence[Any]) -> None:
    """Raise `InvalidValue` if a value's lists and objects nest deeper than `NESTING_MAX`."""
    if not all(_is_within(value, NESTING_MAX) for value in values):
        raise no_value(name, f"lists and objects are nested more than {NESTING_MAX} deep")


def _is_within(value: object, depth: int) -> bool:
    """Return whether a value's lists and objects nest no deeper than that."""
    level = [value] if isinstance(value, list | tuple | dict) else []
    while level:
        if not depth:
            return False
        depth -= 1
        inner = chain.from_iterable(held.values() if isinstance(held, dict) else held for held in level)
        level = [held for held in inner if isinstance(held, list | tuple | dict)]
    return True


def too_large(what: str, size: int, size_max: int) -> IngestError:
    """Return the error for an exceeded limit."""
    return IngestError(
        f"an append is too large: {what} are {size}, of at most {size_max}",
        code="rows_too_large",
        hint="Append it in several calls." if size_max >= ROWS_BYTES_MAX else "",
        what=what,
        size=size,
        size_max=size_max,
    )
