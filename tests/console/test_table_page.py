"""The page of a table says of each definition which columns came, went, or have another name."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from millstream.console import table_page
from millstream.console.table_page import _changes
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.schema import Column, TableSchema


def schema(*columns: Column) -> TableSchema:
    return TableSchema(TableId(1), SchemaVersion(1), SourceId(1), "public", "t", columns, key=())


A, B = Column("a", pa.int64(), number=1), Column("b", pa.int64(), number=2)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        pytest.param([A, B], "", id="nothing"),
        pytest.param([A], " (dropped b)", id="dropped"),
        pytest.param([A, Column("c", pa.int64(), number=2)], " (renamed b to c)", id="renamed"),
        pytest.param([Column("b", pa.int64(), number=1)], " (dropped b, renamed a to b)", id="under a dropped name"),
        pytest.param([A, Column("b", pa.string(), number=2)], " (changed b)", id="another type"),
        pytest.param(
            [A, B, Column("c", pa.int64(), number=3, filled="5")], " (added c with 5 in older rows)", id="filled"
        ),
        pytest.param([A, Column("c", pa.int64())], " (added c, dropped b)", id="without numbers"),
    ],
)
def test_a_definition_says_what_changed(after: list[Column], told: str) -> None:
    assert _changes(schema(A, B), schema(*after)) == told


def test_the_live_tail_names_each_kind_of_record_as_the_table_page_does() -> None:
    """A partition that left was shown as `x`."""
    script = (Path(table_page.__file__).parent / "static" / "console.js").read_text()
    (words,) = re.findall(r"const OPS = \{(.*)\};", script)
    assert dict(re.findall(r'(\w): "([^"]*)"', words)) == table_page._OPS
