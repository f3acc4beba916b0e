"""Writes of applications as they hand them over: what tells one from another, and requests in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa

from millstream.model.replication import AckLevel


@dataclass(frozen=True, slots=True)
class WriteId:
    """What tells an application's write apart from others, so that a retry is known for the same write and gets the first one's answer.

    Either a session with the write's number in it, from 1, or a key of the caller's making.
    """

    session: str | None = None
    number: int | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What a log has of a session."""

    mark: int
    """All writes up to it are in the log; 0 where there is none."""
    above: tuple[int, ...] = ()
    """Numbers of those above it that are."""
    expired: bool = False
    """Whether it was forgotten: nothing more is taken of it."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able facts."""
        return {"mark": self.mark, "above": list(self.above), "expired": self.expired}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """The value that `as_dict` told of."""
        return cls(int(facts["mark"]), tuple(int(number) for number in facts["above"]), bool(facts["expired"]))


@dataclass(frozen=True, slots=True)
class AppendBatch:
    """Requests' rows of one table, one request behind the other, as columns: each request is an operation of its own."""

    table: str
    """`schema.table`, quoted where it must be; without a schema it is of `public`."""
    rows: pa.Table
    """In the log's types, as `ingest.columns.table_of` gives them."""
    counts: Sequence[int]
    """How many of the rows are each request's: at least one each, all of them together."""
    write_ids: Sequence[WriteId | None]
    """Each request's."""
    keep_valid_rows: bool = False
    """Whether rows that have no place in the table are left out and named (`Appended.rejected`); else they refuse their request."""
    acks: AckLevel | None = None
    """Where they have to be before they are acknowledged; None: where the stream says, which is the least."""


@dataclass(frozen=True, slots=True)
class WriteKeys:
    """What tells the operations of a `WriteOps` apart from others, by their places."""

    ids: Sequence[WriteId | None]
    digests: Sequence[int]
    """Of each one's rows; at least 0."""
    counts: Sequence[int]
    """Each one's rows, over all tables."""
