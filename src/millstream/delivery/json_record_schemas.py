"""Schemas of records of which only the JSON is there: dead letters, newest states of keys, rows of a backfill."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from millstream.errors import MillstreamError
from millstream.model.positions import Seq
from millstream.model.schema import TableKind, TableSchema
from millstream.wal.reader import StreamReader

_FRESH_S: Final = 5.0


class RecordSchemas:
    """Finds the schemas of records in the log.

    Args:
        reader: the log, for this object alone.

    Concurrency: none.
    """

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        self._newest: dict[str | None, TableSchema] = {}
        self._read_at_s = 0.0

    def of(self, facts: Mapping[str, Any]) -> TableSchema | None:
        """Return the schema of a record's table when the record was made; if that isn't known, the table's newest.

        Args:
            facts: the record as `model.record_json` has it.
        """
        table, seq = facts["table"], facts["seq"]
        try:
            if seq is not None and seq >= self._reader.first_seq():
                for schema in self._reader.schemas_between(Seq(seq - 1), Seq(seq)).values():
                    if _name(schema) == table:
                        return schema
            if table not in self._newest or time.monotonic() > self._read_at_s + _FRESH_S:
                self._newest = {_name(schema): schema for schema in self._reader.schemas().values()}
                self._read_at_s = time.monotonic()
        except MillstreamError:  # the consumer shows it
            return self._newest.get(table)
        return self._newest.get(table)


def _name(schema: TableSchema) -> str | None:
    return None if schema.kind is TableKind.MESSAGES else schema.full_name
