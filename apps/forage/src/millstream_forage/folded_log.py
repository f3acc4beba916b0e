"""The log and its fold: what is appended is durable and folded once the call returns.

Rows that this process appended are folded as they are, unless another process's records stand between them. Everything
else is read from the log. Both give the same state, because the state depends on records alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millstream import AppendedTables, OpenHome, StreamToken
from millstream.errors import AppendOutcomeUnknown, UnknownTable
from millstream_forage.errors import EngineFailed
from millstream_forage.state import State
from millstream_forage.tables import SCHEMAS, STREAM


class FoldedLog:
    """A home's log with its state. One caller at a time."""

    def __init__(self, home: OpenHome) -> None:
        """Fold the log, and begin it if there is none.

        Args:
            home: an open home with the stream.

        Raises:
            OffsetExpired: a part of the log is gone. Its records decide what is hidden, so nothing goes without them.
            MillstreamError: the log can't be read or written.
        """
        self._home: Final = home
        self._failed = False
        self._closed = False
        self.state: Final = State()
        self.at: StreamToken = home.append_all(STREAM, {}).token
        """The token up to which the log is folded."""
        self._fold_everything()

    @property
    def path(self) -> Path:
        """The home's folder."""
        return self._home.path

    def close(self) -> None:
        """Take no more calls."""
        self._closed = True

    def catch_up(self) -> None:
        """Fold what other processes have appended.

        Raises:
            EngineFailed: the log is closed, or the outcome of an earlier append is unknown.
        """
        if self._closed:
            raise EngineFailed("the engine is closed")
        if self._failed:
            raise EngineFailed("the outcome of an append is unknown")
        token = self._home.token(STREAM)
        if token != self.at:
            self._fold_upto(token)

    def append(self, rows: Mapping[str, list[dict[str, Any]]]) -> None:
        """Append rows of several tables as one operation, and fold them once they are durable.

        Raises:
            AppendOutcomeUnknown: they may or may not be durable. From then on `catch_up` fails: a new fold of the log
                has the outcome.
            MillstreamError: nothing was appended.
        """
        tables = {name: pa.RecordBatch.from_pylist(part, schema=SCHEMAS[name]) for name, part in rows.items() if part}
        if not tables:
            return
        try:
            ack = self._home.append_all(STREAM, {name: pa.table(batch) for name, batch in tables.items()})
        except AppendOutcomeUnknown:
            self._failed = True
            raise
        if not self._fold_own(tables, ack):
            self._fold_upto(ack.token)

    def _fold_own(self, tables: Mapping[str, pa.RecordBatch], ack: AppendedTables) -> bool:
        """Fold rows that this engine appended without reading them; False if others stand between."""
        seq = int(self.at.minimum) + 1
        numbers = {}
        for name, batch in tables.items():
            if ack.tables[f"public.{name}"].first != seq:
                return False
            numbers[name] = np.arange(seq, seq + batch.num_rows)
            seq += batch.num_rows
        if ack.token.minimum != seq - 1 or ack.token.ahead:
            return False
        for name, batch in tables.items():
            self.state.apply(name, batch.append_column("__seq", pa.array(numbers[name])))
        self.at = ack.token
        return True

    def _fold_upto(self, token: StreamToken) -> None:
        for batch in self._home.read(STREAM, after=self.at, upto=token):
            self.state.apply(table_of(batch), batch)
        self.at = token

    def _fold_everything(self) -> None:
        """Fold the log table by table: whole tables fold much faster than the small batches of its order."""
        begin = f"{self.at.stream}.s0"
        for table in SCHEMAS:
            try:
                for batch in self._home.read(STREAM, table=table, after=begin, upto=self.at):
                    self.state.apply(table, batch)
            except UnknownTable:
                continue  # nothing was appended to it yet


def table_of(batch: pa.RecordBatch) -> str:
    """Return the name of the table that a batch of the log is of."""
    return str(json.loads(batch.schema.metadata[b"millstream.table"])["name"])
