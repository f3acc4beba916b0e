"""The columns of tables that applications write, as the catalog has them now.

Rows become columns before a stream's writer fits them to their table. Where values of several kinds meet, the table's
column decides which of them stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from millstream.errors import UnknownStream
from millstream.model.names import parse_qualified_name

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.home.home import Home


def column_types(home: Home, stream: str, tables: Collection[str]) -> Mapping[str, Mapping[str, pa.DataType]]:
    """Return the types of the columns of a stream's tables, by the tables' names; those that exist.

    Columns that take increments are left out: they take other values than their own type's.

    Raises:
        ConfigError, CatalogError: as `Home.open_catalog`.
        UsageError: a text is no table's name.
    """
    found = {}
    with home.open_catalog() as catalog:
        try:
            number = catalog.stream(stream).id
        except UnknownStream:  # nothing was written to it yet
            return {}
        for table in tables:
            schema = catalog.application_schema(number, *parse_qualified_name(table))
            if schema is not None:
                found[table] = {column.name: column.arrow for column in schema.columns if not column.accumulates}
    return found
