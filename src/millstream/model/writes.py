"""Writes of applications as they submit them: the ids of writes, and requests in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import pyarrow as pa

from millstream.model.replication import AckLevel

NO_DIGEST: Final = -1
"""Digest of a write whose rows weren't summed: any rows count as the same."""


@dataclass(frozen=True, slots=True)
class WriteId:
    """The identity of an application's write: a retry with the same id is recognised and gets the first answer.

    It is a session with the write's number in it, from 1, or a key that the caller makes.
    """

    session: str | None = None
    number: int | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A session's state in the log."""

    mark: int
    """All writes up to it are in the log; 0 if there is none."""
    above: tuple[int, ...] = ()
    """Numbers above the mark that are in the log."""
    expired: bool = False
    """Whether the session was forgotten, so that no more of its writes are accepted."""

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able facts."""
        return {"mark": self.mark, "above": list(self.above), "expired": self.expired}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """Return the value that `as_dict` was called on."""
        return cls(int(facts["mark"]), tuple(int(number) for number in facts["above"]), bool(facts["expired"]))


@dataclass(frozen=True, slots=True)
class TableBatch:
    """The rows of a batch's requests for one table, in the order of the requests, as columns."""

    table: str
    """`schema.table`, quoted if it must be; without a schema it is in `public`."""
    rows: pa.Table
    """Rows in the log's types, as `ingest.python_rows.table_of` returns them."""
    counts: Sequence[int]
    """Number of rows of each request, together all rows."""


@dataclass(frozen=True, slots=True)
class AppendBatch:
    """Requests for the same tables, in sequence; each request is one operation, with its rows table by table."""

    tables: Sequence[TableBatch]
    """The tables in the order of each request's rows. Requests have at least one row in each; without tables
    they have no rows."""
    write_ids: Sequence[WriteId | None]
    """Each request's write id."""
    keep_valid_rows: bool = False
    """Whether invalid rows are left out and named (`TableAppended.rejected`); otherwise they reject their request."""
    acks: AckLevel | None = None
    """Where the rows have to be before they are acknowledged; None: the stream's level, which is the minimum."""
    keep_valid_tables: bool = False
    """Whether a table that can't take its rows is left out, with its error (`TableAppended.refused`); otherwise it
    rejects the request. Needs `keep_valid_rows`."""

    @classmethod
    def of_table(
        cls,
        table: str,
        rows: pa.Table,
        counts: Sequence[int],
        write_ids: Sequence[WriteId | None],
        *,
        keep_valid_rows: bool = False,
        acks: AckLevel | None = None,
    ) -> Self:
        """Return a batch of requests for one table."""
        return cls((TableBatch(table, rows, counts),), write_ids, keep_valid_rows, acks)

    @classmethod
    def of_request(
        cls,
        tables: Mapping[str, pa.Table],
        write_id: WriteId | None = None,
        *,
        keep_valid_rows: bool = False,
        acks: AckLevel | None = None,
    ) -> Self:
        """Return a batch of one request, with its rows by table."""
        parts = [TableBatch(name, rows, (rows.num_rows,)) for name, rows in tables.items()]
        return cls(parts, (write_id,), keep_valid_rows, acks)

    @property
    def row_count(self) -> int:
        """Rows of all requests in all tables."""
        return sum(table.rows.num_rows for table in self.tables)
