"""The rows of one operation over several tables, as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from functools import partial
from typing import Any

import pyarrow as pa

from millstream.errors import InvalidValue
from millstream.ingest.append_requests import check_tables
from millstream.ingest.fit_to_schema import ColumnsOf, no_columns, types_of
from millstream.ingest.increment_columns import NO_INCREMENTS, as_increments, rejected_as_increments
from millstream.ingest.keep_valid_rows import columns_for, refusal_of_all
from millstream.ingest.python_rows import ROWS_BYTES_MAX, Rows, too_large
from millstream.model.operations import RejectedRow


def tables_for(
    tables: Mapping[str, Any],
    *,
    keep_valid_rows: bool,
    make: Callable[[Any, str], tuple[pa.Table, tuple[RejectedRow, ...]]] | None = None,
    accumulates: Callable[[str], Mapping[str, str]] = lambda _table: NO_INCREMENTS,
    columns_of: ColumnsOf = no_columns,
) -> tuple[dict[str, pa.Table], dict[str, tuple[RejectedRow, ...]]]:
    """Return the valid rows of the tables that have any, as columns, and each table's rejected rows; by full names.

    Args:
        tables: each table's rows, as `table_of` takes them; possibly none.
        keep_valid_rows: as `columns_for`. A table may then be left without rows, unless all are.
        make: makes rows of a table, by its full name, columns, instead of `columns_for`.
        accumulates: returns the words of a table's columns that take increments, by its full name.
        columns_of: returns the columns of a table, which decide the kinds of its rows' values.

    Raises:
        UsageError: a text is no table's name.
        InvalidValue: two texts name one table; as `columns_for`, details: table; or no valid row is left.
        IngestError (`rows_too_large`): the tables are too many, or their rows take more than `ROWS_BYTES_MAX`.
    """
    if not isinstance(tables, Mapping):
        raise InvalidValue(
            f"the rows of several tables are a mapping of tables to rows, not {type(tables).__name__}",
            hint="Pass {table: rows}.",
        )
    if make is None:

        def make(rows: Rows, table: str) -> tuple[pa.Table, tuple[RejectedRow, ...]]:
            types = partial(types_of, columns_of, table)
            return columns_for(rows, keep_valid_rows=keep_valid_rows, may_be_empty=keep_valid_rows, types=types)

    kept: dict[str, pa.Table] = {}
    rejected: dict[str, tuple[RejectedRow, ...]] = {}
    size = 0
    for name, rows in zip(check_tables(list(tables)), tables.values(), strict=True):
        try:
            columns, left_out = _columns(rows, name, make)
        except InvalidValue as error:
            error.details.setdefault("table", name)
            raise as_increments(error, accumulates(name)) from error
        rejected[name] = rejected_as_increments(left_out, accumulates(name)) if left_out else ()
        if columns.num_rows:
            kept[name] = columns
            size += columns.nbytes
        if size > ROWS_BYTES_MAX:  # before the next table's rows take as much
            raise too_large("its rows' bytes", size, ROWS_BYTES_MAX)
    gone = [(name, row) for name, left_out in rejected.items() for row in left_out]
    if gone and not kept:
        raise refusal_of_all([row for _, row in gone], [name for name, _ in gone])
    return kept, rejected


def _columns(
    rows: Any, table: str, make: Callable[[Any, str], tuple[pa.Table, tuple[RejectedRow, ...]]]
) -> tuple[pa.Table, tuple[RejectedRow, ...]]:
    if isinstance(rows, Iterable) and not isinstance(rows, Sized | Mapping) and not hasattr(rows, "__arrow_c_stream__"):
        rows = list(rows)
    if isinstance(rows, Sized) and not isinstance(rows, Mapping | str | bytes) and len(rows) == 0:
        return pa.table({}), ()
    return make(rows, table)
