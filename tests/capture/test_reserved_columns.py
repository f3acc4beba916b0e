"""A table with a column named like one of Millstream's own is set aside by name; the others go on."""

from __future__ import annotations

import pytest

from millstream.codec.pgoutput.messages import Relation, parse_message
from millstream.codec.pgoutput.relations import table_schema
from millstream.errors import TableUndecodable
from millstream.model.ids import SourceId
from millstream.model.records import LOG_ROW_PREFIX, OPERATION_ORDINAL, RECORD_PREFIX
from millstream.testing.pgoutput import relation

NAMES = {field.name for field in (*LOG_ROW_PREFIX, *RECORD_PREFIX, OPERATION_ORDINAL)}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_column_of_a_reserved_name_is_refused_with_the_table(name: str) -> None:
    clashing = parse_message(relation(7, "public", "op", [("id", 23, -1, True), (name, 25, -1, False)]))
    assert isinstance(clashing, Relation)
    with pytest.raises(TableUndecodable, match=name) as caught:
        table_schema(clashing, source=SourceId(1))
    assert caught.value.details["relation_oid"] == 7
