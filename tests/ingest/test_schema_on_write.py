"""Schema on write: a table grows by new columns as configured."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millstream.errors import MillstreamError
from millstream.ingest.python_rows import COLUMNS_MAX
from millstream.ingest.schema_on_write import SchemaOnWrite, WriteRules, grown
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.schema import Column, TableSchema
from millstream.testing.errors import coded

NEW = TableSchema(TableId(1), SchemaVersion(0), SourceId(0), "public", "clicks", ())
CREATE = WriteRules(SchemaOnWrite.CREATE)


def columns(**types: pa.DataType) -> pa.Schema:
    return pa.schema(list(types.items()))


def table(*, key: tuple[str, ...] = (), **types: pa.DataType) -> TableSchema:
    return grown(NEW, columns(**types), WriteRules(SchemaOnWrite.CREATE, key))


def test_a_table_begins_with_its_first_rows_and_gets_the_columns_that_it_lacks() -> None:
    first = table(id=pa.int64(), empty=pa.null())
    assert [column.name for column in first.columns] == ["id"]
    assert grown(first, columns(id=pa.int64(), other=pa.null()), CREATE) is first
    second = grown(first, columns(at=pa.date32(), id=pa.string()), CREATE)
    assert second.columns == (Column("id", pa.int64()), Column("at", pa.date32()))


@pytest.mark.parametrize(
    ("known", "rows", "rules", "code"),
    [
        (NEW, columns(id=pa.int64()), WriteRules(SchemaOnWrite.ADD_COLUMNS), "unknown_table"),
        (NEW, columns(id=pa.int64()), WriteRules(SchemaOnWrite.STRICT), "unknown_table"),
        (NEW, columns(id=pa.null()), CREATE, "invalid_value"),
        (NEW, columns(tags=pa.list_(pa.null())), CREATE, "invalid_value"),
        (NEW, columns(id=pa.int64()), WriteRules(SchemaOnWrite.CREATE, ("key",)), "invalid_value"),
        (NEW, columns(key=pa.list_(pa.int64())), WriteRules(SchemaOnWrite.CREATE, ("key",)), "invalid_value"),
        (table(id=pa.int64()), columns(more=pa.int64()), WriteRules(SchemaOnWrite.STRICT), "unknown_column"),
        (table(id=pa.int64()), columns(ID=pa.int64()), CREATE, "invalid_value"),
        (table(id=pa.int64()), columns(id=pa.int64()), WriteRules(SchemaOnWrite.CREATE, ("id",)), "key_changed"),
        (table(id=pa.int64(), key=("id",)), columns(id=pa.int64()), CREATE, "key_changed"),
        (
            table(**{f"c{n}": pa.int64() for n in range(COLUMNS_MAX)}),
            columns(more=pa.int64()),
            CREATE,
            "rows_too_large",
        ),
    ],
)
def test_what_a_table_may_not_become_is_refused(
    known: TableSchema, rows: pa.Schema, rules: WriteRules, code: str
) -> None:
    with pytest.raises(MillstreamError, check=coded(code)) as refused:
        grown(known, rows, rules)
    assert "clicks" in refused.value.message
