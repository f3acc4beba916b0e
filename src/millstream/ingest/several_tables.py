"""The rows of one operation over several tables: as columns, as a batch, and its result by table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from millstream.errors import InvalidValue
from millstream.ingest.columns import ROWS_BYTES_MAX, Rows, too_large
from millstream.ingest.increments import NO_INCREMENTS, as_increments
from millstream.ingest.requests import check_tables
from millstream.ingest.valid_rows import ValidTable, columns_for, refusal_of_all
from millstream.model.operations import AppendedTables, TableAppended
from millstream.model.writes import AppendBatch, TableBatch

if TYPE_CHECKING:
    from millstream.model.operations import Appended
    from millstream.model.replication import AckLevel
    from millstream.model.writes import WriteId


@dataclass(frozen=True, slots=True)
class TablesOfRows:
    """The rows of one operation by the full name of their table, as columns, without the invalid ones."""

    tables: Mapping[str, ValidTable]

    @property
    def kept(self) -> Mapping[str, pa.Table]:
        """The rows of the tables that have any."""
        return {name: valid.table for name, valid in self.tables.items() if valid.table.num_rows}

    def batch(self, write_id: WriteId | None, *, keep_valid_rows: bool, acks: AckLevel | None) -> AppendBatch:
        """Return the operation as a batch of one."""
        tables = [TableBatch(name, rows, (rows.num_rows,)) for name, rows in self.kept.items()]
        return AppendBatch(tables, (write_id,), keep_valid_rows, acks)

    def told(self, appended: Appended | AppendedTables) -> AppendedTables:
        """Return the result of appending `kept`: by all tables, with rejected rows named by their places among all rows."""
        tables = {}
        for name, valid in self.tables.items():
            part = appended.tables.get(name) or TableAppended(None, 0)
            tables[name] = TableAppended(part.first, part.rows, valid.all_rejected(part.rejected))
        return AppendedTables(appended.token, appended.duplicate, tables)


def tables_for(
    tables: Mapping[str, Any],
    *,
    keep_valid_rows: bool,
    make: Callable[[Any], ValidTable] | None = None,
    accumulates: Callable[[str], Mapping[str, str]] = lambda _table: NO_INCREMENTS,
) -> TablesOfRows:
    """Return the rows of several tables as columns.

    Args:
        tables: each table's rows, as `table_of` takes them; possibly none.
        keep_valid_rows: as `columns_for`. A table may then be left without rows, unless all are.
        make: makes a table's rows columns, instead of `columns_for`.
        accumulates: returns the words of a table's columns that take increments, by its full name.

    Raises:
        UsageError: a text is no table's name.
        InvalidValue: two texts name one table; as `columns_for`, details: table; or no valid row is left.
        RowsTooLarge: the tables are too many, or their rows take more than `ROWS_BYTES_MAX`.
    """
    if not isinstance(tables, Mapping):
        raise InvalidValue(
            f"the rows of several tables are a mapping of tables to rows, not {type(tables).__name__}",
            hint="Pass {table: rows}.",
        )
    if make is None:

        def make(rows: Rows) -> ValidTable:
            return columns_for(rows, keep_valid_rows=keep_valid_rows, may_be_empty=keep_valid_rows)

    found: dict[str, ValidTable] = {}
    for name, rows in zip(check_tables(list(tables)), tables.values(), strict=True):
        try:
            found[name] = _columns(rows, make).of_increments(accumulates(name))
        except InvalidValue as error:
            error.details.setdefault("table", name)
            raise as_increments(error, accumulates(name)) from error
    size = sum(valid.table.nbytes for valid in found.values())
    if size > ROWS_BYTES_MAX:
        raise too_large("its rows' bytes", size, ROWS_BYTES_MAX)
    rejected = [(name, row) for name, valid in found.items() for row in valid.rejected]
    if rejected and not any(valid.table.num_rows for valid in found.values()):
        raise refusal_of_all([row for _, row in rejected], [name for name, _ in rejected])
    return TablesOfRows(found)


def _columns(rows: Any, make: Callable[[Any], ValidTable]) -> ValidTable:
    if isinstance(rows, Iterable) and not isinstance(rows, Sized | Mapping) and not hasattr(rows, "__arrow_c_stream__"):
        rows = list(rows)
    if isinstance(rows, Sized) and not isinstance(rows, Mapping | str | bytes) and len(rows) == 0:
        return ValidTable(pa.table({}), (), ())
    return make(rows)
