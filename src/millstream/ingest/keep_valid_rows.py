"""The rows of a request that fit their table, and why the others don't: for callers that set `keep_valid_rows`.

Columns without a clash cost only a check. In a column with clashes, numbers are compared by whole
columns; for other types the rows are found by bisection.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import IngestError, InvalidValue, MillstreamError
from millstream.ingest.append_requests import said
from millstream.ingest.fit_to_schema import fits, may_fit
from millstream.ingest.increment_columns import (
    NAMED,
    NO_INCREMENTS,
    as_increments,
    rejected_as_increments,
    takes,
    type_of,
)
from millstream.ingest.log_types import stored
from millstream.ingest.python_rows import Rows, check_names, column_of, kind_of, table_of
from millstream.ingest.schema_on_write import WriteRules, grown
from millstream.ingest.signal_columns import weight_faults
from millstream.model.operations import RejectedRow, all_rejected
from millstream.model.schema import TableSchema
from millstream.model.writes import AppendBatch

REJECTED_MAX: Final = 10_000
"""Limit of rejected rows per request: with more, all of it is refused."""
_TOLD_MAX: Final = 100
"""Limit of rows listed in the error of a request that is refused whole."""
_LOOKS_MAX: Final = 200_000
"""Limit of tries on a column's parts, at some microseconds each."""
Mask = npt.NDArray[np.bool_]


class Clash(NamedTuple):
    """The reason why a row doesn't fit."""

    code: str
    reason: str
    column: str | None

    @classmethod
    def of(cls, error: MillstreamError, column: str | None = None) -> Clash:
        """Return the clash that an error reports."""
        return cls(error.code, error.message, error.details.get("column", column))


@dataclass(frozen=True, slots=True)
class ValidPart:
    """The valid rows."""

    rows: pa.Table
    clashes: Mapping[int, Clash]
    """The invalid rows, by their places."""


def valid_part(known: TableSchema, rows: pa.Table, rules: WriteRules) -> ValidPart:
    """Return the rows that `grown` and `fitted` accept together.

    Args:
        known: the table's newest schema; without columns if it doesn't exist yet.
        rows: in the log's types.

    Raises:
        UnknownTable, IngestError (`key_changed`, `rows_too_large`), InvalidValue: it is no single row's fault.
    """
    clashes: dict[int, Clash] = {}
    rows = _weighted(known.full_name, rows, rules, clashes)
    rows = _known_columns(known, rows, rules, clashes)
    wanted = grown(known, said(rows).schema, rules)
    for column in wanted.columns:
        place = rows.schema.get_field_index(column.name)
        values = pa.nulls(rows.num_rows) if place < 0 else rows.column(place).combine_chunks()
        if column.name in wanted.key and values.null_count:
            reason = f"column {column.name} is part of the key of {wanted.full_name}, and the row has no value for it"
            _note(clashes, values.is_null(), Clash(InvalidValue.code, reason, column.name))
        if pa.types.is_null(values.type):
            continue
        if column.accumulates:
            _note_increments(clashes, values, partial(takes, wanted.full_name, column))
            continue
        if values.type == column.arrow:
            continue
        clashing = _clashing(values, partial(fits, wanted, column))
        if clashing.any():
            reason = f"{wanted.full_name}, column {column.name} ({column.arrow}) can't take this {values.type}"
            _note(clashes, pa.array(clashing), Clash(InvalidValue.code, reason, column.name))
    if not clashes:
        return ValidPart(rows, clashes)
    keep = np.ones(rows.num_rows, dtype=bool)
    keep[list(clashes)] = False
    return ValidPart(said(rows.filter(pa.array(keep))), clashes)


def _weighted(table: str, rows: pa.Table, rules: WriteRules, clashes: dict[int, Clash]) -> pa.Table:
    """Return the rows without values that are no signals' events; rows that have such values clash."""
    for fault in weight_faults(rows, rules.signals):
        _note(clashes, fault.at.combine_chunks(), Clash.of(fault.error(table)))
        place = rows.schema.get_field_index(fault.column)
        nothing = pa.scalar(None, rows.schema.field(place).type)
        rows = rows.set_column(place, fault.column, pc.if_else(fault.at, nothing, rows.column(place)))
    return said(rows) if clashes else rows


def _known_columns(known: TableSchema, rows: pa.Table, rules: WriteRules, clashes: dict[int, Clash]) -> pa.Table:
    """Return the rows without columns that the table lacks and can't get; rows that have values there clash."""
    have = {column.name for column in known.columns}
    for field in rows.schema:
        if field.name in have or field.name == NAMED or pa.types.is_null(field.type):
            continue
        try:
            if field.name in rules.accumulates:
                type_of(known.full_name, field.name, field.type, rules.accumulates[field.name])
            if known.columns:
                grown(known, pa.schema([field]), rules)
            elif pa.types.is_list(field.type) and pa.types.is_null(field.type.value_type):
                raise InvalidValue(f"column {field.name} is new, and its lists are all empty", column=field.name)
        except (InvalidValue, IngestError) as error:
            if error.code == "rows_too_large":
                raise
            place = rows.schema.get_field_index(field.name)
            _note(clashes, rows.column(place).combine_chunks().is_valid(), Clash.of(error, field.name))
            rows = rows.set_column(place, field.name, pa.nulls(rows.num_rows))
    return rows


def _note_increments(
    clashes: dict[int, Clash], values: pa.Array, why_not: Callable[[pa.Array], InvalidValue | None]
) -> None:
    """Record the rows whose increments a column doesn't take, each with its own error."""
    for row in np.flatnonzero(_clashing(values, lambda some: why_not(some) is None)).tolist():
        error = why_not(values.slice(row, 1))
        if error is not None:
            clashes.setdefault(row, Clash.of(error))


def _note(clashes: dict[int, Clash], found: pa.Array, clash: Clash) -> None:
    """Record a row's first clash."""
    for row in np.flatnonzero(found.to_numpy(zero_copy_only=False)).tolist():
        clashes.setdefault(row, clash)


def _clashing(values: pa.Array, takes: Callable[[pa.Array], bool]) -> Mask:
    """Return which values can't be taken. Nulls can."""
    found = np.zeros(len(values), dtype=bool)
    if takes(values):
        return found
    if not takes(values.slice(0, 0)):
        # No value of this type fits.
        return np.asarray(values.is_valid().to_numpy(zero_copy_only=False))
    looks = 0
    parts = [(0, len(values))]
    while parts:
        start, end = parts.pop()
        looks += 1
        if looks > _LOOKS_MAX:
            raise InvalidValue("too many values of a column aren't of its type")
        if takes(values.slice(start, end - start)):
            continue
        if end - start == 1:
            found[start] = True
        else:
            middle = (start + end) // 2
            parts += [(start, middle), (middle, end)]
    return found


@dataclass(slots=True)
class Refusals:
    """The parts of a batch that aren't appended, by the places of requests and of tables in it."""

    requests: dict[int, MillstreamError] = dataclasses.field(default_factory=dict)
    tables: dict[tuple[int, int], MillstreamError] = dataclasses.field(default_factory=dict)
    """Tables that took no row of a request that keeps those of the others."""
    rows: dict[tuple[int, int], tuple[RejectedRow, ...]] = dataclasses.field(default_factory=dict)


def without_clashes(
    batch: AppendBatch, parts: Sequence[ValidPart | None], refusals: Refusals
) -> tuple[AppendBatch, list[int]]:
    """Return a batch's valid rows, and the places of the requests that are left.

    Args:
        parts: each table's valid rows; None: all of them.
        refusals: gets the rejected rows, and the requests with no rows left, or too many rejected.
    """
    gone: dict[tuple[int, int], list[RejectedRow]] = {}
    for number, (table, part) in enumerate(zip(batch.tables, parts, strict=True)):
        ends = np.cumsum(table.counts)
        for row, clash in sorted(part.clashes.items()) if part is not None else ():
            request = int(np.searchsorted(ends, row, side="right"))
            in_request = row - int(ends[request]) + table.counts[request]
            gone.setdefault((request, number), []).append(RejectedRow(in_request, *clash))
    of_request: dict[int, list[int]] = {}
    for request, number in sorted(gone):
        of_request.setdefault(request, []).append(number)
    refused: set[tuple[int, int]] = set()
    for request, numbers in of_request.items():
        if batch.keep_valid_tables:
            for number in numbers:
                rows = gone[request, number]
                if len(rows) > REJECTED_MAX:
                    refusals.tables[request, number] = _refusal(rows, batch.tables[number].counts[request])
                    refused.add((request, number))
            continue
        rows = [row for number in numbers for row in gone[request, number]]
        count = sum(table.counts[request] for table in batch.tables)
        if len(rows) > REJECTED_MAX or len(rows) == count:
            names = [batch.tables[number].table for number in numbers for _ in gone[request, number]]
            refusals.requests[request] = _refusal(rows, count, names if len(batch.tables) > 1 else ())
    places = [place for place in range(len(batch.write_ids)) if place not in refusals.requests]
    refusals.rows |= {
        at: tuple(rows) for at, rows in gone.items() if at[0] not in refusals.requests and at not in refused
    }
    tables = []
    for number, (table, part) in enumerate(zip(batch.tables, parts, strict=True)):
        left = [count - len(gone.get((place, number), ())) for place, count in enumerate(table.counts)]
        kept = [0 if place in refusals.requests or (place, number) in refused else n for place, n in enumerate(left)]
        rows_left = table.rows if part is None else part.rows
        if kept != left:
            keep = np.repeat([one == other for one, other in zip(kept, left, strict=True)], left)
            rows_left = said(rows_left.filter(pa.array(keep)))
        tables.append(replace(table, rows=rows_left, counts=[kept[place] for place in places]))
    rest = replace(batch, tables=tables, write_ids=[batch.write_ids[place] for place in places])
    return rest, places


def refusal_of_all(gone: Sequence[RejectedRow], tables: Sequence[str]) -> InvalidValue:
    """Return the error of a request over several tables that has no valid row; `tables` names each row's table."""
    return _refusal(gone, len(gone), tables)


@contextmanager
def naming(
    before: Sequence[RejectedRow] | Mapping[str, Sequence[RejectedRow]], tables: Iterable[str]
) -> Iterator[None]:
    """Name the rows that were left out before as well, if a request's other rows are refused in the block.

    Args:
        before: those rows; of a request over several tables, by the tables' full names.
        tables: the tables that have other rows.
    """
    try:
        yield
    except InvalidValue as error:
        later = error.details.get("rejected")
        is_several = isinstance(before, Mapping)
        first, *_ = tables
        of_table = before if isinstance(before, Mapping) else {first: before}
        if later is None or not any(of_table.values()):
            raise
        of_writer: dict[str, list[RejectedRow]] = {table: [] for table in of_table}
        for row in later:  # the rows of a sole table don't name it
            of_writer[row.get("table", first)].append(RejectedRow.from_dict(row))
        all_of = [
            {"table": table, **row.as_dict()} if is_several else row.as_dict()
            for table, rows in of_table.items()
            for row in all_rejected(rows, of_writer[table])
        ]
        error.details["rejected"] = all_of[:_TOLD_MAX]
        raise


def _refusal(gone: Sequence[RejectedRow], count: int, tables: Sequence[str] = ()) -> InvalidValue:
    """Return the error of a request whose rows are refused; `tables` names each one's table, if there are several."""
    many = "none of its rows fits" if len(gone) == count else f"{len(gone)} of its {count} rows don't fit"
    told = [row.as_dict() for row in gone[:_TOLD_MAX]]
    codes = {row.code for row in gone}
    return InvalidValue(
        f"{many} the table: {gone[0].reason}",
        hint="Mend the rows that the details name."
        if len(gone) <= REJECTED_MAX
        else "Mend them, or send them in several calls.",
        code=gone[0].code if len(codes) == 1 and codes <= InvalidValue.codes.keys() else None,
        column=gone[0].column,
        rejected=[{"table": table, **row} for table, row in zip(tables, told, strict=False)] if tables else told,
    )


# --- rows as dicts -------------------------------------------------------------------------------------------------


def columns_for(
    rows: Rows,
    *,
    keep_valid_rows: bool,
    may_be_empty: bool = False,
    accumulates: Callable[[], Mapping[str, str]] = lambda: NO_INCREMENTS,
    types: Callable[[], Mapping[str, pa.DataType]] = dict,
) -> tuple[pa.Table, tuple[RejectedRow, ...]]:
    """Return `table_of_valid` if `keep_valid_rows` is set, otherwise `table_of` and no rejected row.

    Args:
        keep_valid_rows: whether rows that don't fit are left out.
        accumulates: returns the words of the columns that take increments, as far as they are known here.
    """
    try:
        if keep_valid_rows:
            table, rejected = table_of_valid(rows, may_be_empty=may_be_empty, types=types)
            return table, rejected_as_increments(rejected, accumulates()) if rejected else ()
        return table_of(rows), ()
    except InvalidValue as error:
        raise as_increments(error, accumulates()) from error


def table_of_valid(
    rows: Rows, *, may_be_empty: bool = False, types: Callable[[], Mapping[str, pa.DataType]] = dict
) -> tuple[pa.Table, tuple[RejectedRow, ...]]:
    """Return as `table_of`, but leave out rows with a value of another kind than its column; return those, too.

    The table's column decides the kind, and most values that of a new column.

    Args:
        may_be_empty: whether no row may be left.
        types: returns the types of the table's columns by their names, as far as they are known here. It is called
            only if values are of several kinds.

    Raises:
        InvalidValue: no row is left, more than `REJECTED_MAX` don't fit, or it is no single row's fault.
        IngestError (`rows_too_large`): as `table_of`.
    """
    if isinstance(rows, Mapping):
        rows = [rows]
    of_dicts = (
        isinstance(rows, Iterable)
        and not hasattr(rows, "__arrow_c_stream__")
        and not hasattr(rows, "__arrow_c_array__")
    )
    if not of_dicts:
        return table_of(rows), ()
    listed: list[Any] = list(rows)  # type: ignore[arg-type]
    try:
        return table_of(listed), ()
    except InvalidValue:
        pass
    clashes: dict[int, Clash] = {}
    for place, row in enumerate(listed):
        if not isinstance(row, Mapping):
            clashes[place] = Clash(InvalidValue.code, f"a row is a dict, not {type(row).__name__}", None)
        elif not row:
            clashes[place] = Clash(InvalidValue.code, "the row has no columns", None)
        elif not all(isinstance(name, str) for name in row):
            clashes[place] = Clash(InvalidValue.code, "a column's name is a string", None)
    names = dict.fromkeys(name for place, row in enumerate(listed) if place not in clashes for name in row)
    check_names(list(names))
    columns = types()
    for name in names:
        values = [row.get(name) if place not in clashes else None for place, row in enumerate(listed)]
        clashes |= dict(_clashing_values(name, values, columns.get(name)))
    rejected = tuple(RejectedRow(place, *clash) for place, clash in sorted(clashes.items()))
    kept = [row for place, row in enumerate(listed) if place not in clashes]
    if len(rejected) > REJECTED_MAX or not (kept or may_be_empty):
        raise _refusal(rejected, len(listed))
    return table_of(kept) if kept else pa.table({}), rejected


def _clashing_values(name: str, values: list[Any], column: pa.DataType | None) -> list[tuple[int, Clash]]:
    """Return the values that prevent a column from being made, by place; `column` is its type in the table."""
    if _why_not(name, values) is None:
        return []
    holds_objects = any(isinstance(value, Mapping) for value in values)
    kinds = [None if value is None else _kind(value, holds_objects=holds_objects) for value in values]
    # The most frequent kind that the table's column takes, or that is supported at all; the first among equals.
    first = dict(reversed(list(zip(kinds, values, strict=True))))
    order = [kind for kind, _ in Counter(kind for kind in kinds if kind is not None).most_common()]
    supported = [kind for kind in order if _why_not(name, [first[kind]]) is None] or order[:1]
    taken = [kind for kind in supported if column is not None and _takes(column, name, first[kind])]
    most = (taken or supported)[0]
    wanted = f"the table's is {column}" if taken else f"most are {most}"
    found = []
    kept: list[tuple[int, Any]] = []
    for place, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        if kind is None:
            continue
        if kind == most:
            kept.append((place, value))
        else:
            reason = f"column {name} has values of several kinds: {wanted}, this one is {kind}"
            found.append((place, Clash(InvalidValue.code, reason, name)))
    parts = [(0, len(kept))]
    while parts:
        start, end = parts.pop()
        error = _why_not(name, [value for _, value in kept[start:end]])
        if error is None:
            continue
        if end - start == 1:
            found.append((kept[start][0], Clash.of(error, name)))
        else:
            middle = (start + end) // 2
            parts += [(start, middle), (middle, end)]
    return found


def _takes(column: pa.DataType, name: str, value: Any) -> bool:
    """Return whether a table's column may take a value, by its type."""
    return may_fit(stored(name, pa.chunked_array([column_of(name, [value])])).type, column)


def _why_not(name: str, values: list[Any]) -> InvalidValue | None:
    try:
        column_of(name, values)
    except InvalidValue as error:
        return error
    return None


def _kind(value: Any, *, holds_objects: bool) -> str:
    """Return the common kind of a column's values."""
    kind = kind_of(value)
    if kind in {int, float}:
        return "numbers"
    if kind in {list, tuple, dict}:
        if holds_objects or any(isinstance(item, list | tuple | dict) for item in value):
            return "objects"
        inner = sorted({_kind(item, holds_objects=False) for item in value if item is not None})
        return f"lists of {', '.join(inner)}" if inner else "lists"
    if hasattr(value, "tzinfo") and kind.__name__ == "datetime":
        return "times without a zone" if value.tzinfo is None else "times with a zone"
    return kind.__name__
