"""The calls of a home, wherever it is: on this machine (`millstream.open`) or behind an address (`millstream.connect`).

The two have the same calls with the same arguments; `millstream.aio` has them as coroutines. A test
compares their signatures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from millstream.client.appends import HomeAppends

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.client.consumers import Consumers, Consumption
    from millstream.client.following import Following
    from millstream.client.write_session import Session
    from millstream.model.positions import StreamToken
    from millstream.model.writes import SessionFacts

FILLED: Final = b"millstream.filled"
"""Key in the metadata of the rows' schema: `Latest.filled` as JSON."""
LEFT: Final = b"millstream.left"
"""The same of `Latest.left`."""
SERVER_DEADLINE_S_MAX: Final = 60.0
"""How long a request to a server may wait for room: its caller may retry."""
LATEST_ROWS_MAX: Final = 100_000
CONSUMED_AT_ONCE: Final = 100
"""How many messages of a consumer are fetched at once by default."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The changes of a table's rows in a range of the log.

    Applied as one to a copy of the table, they give its state at the end.
    """

    emptied: bool
    """Whether all earlier rows are gone: delete them first."""
    rows: pa.Table
    """One row per key: `__op` (`d`: the row is gone, `u`: it exists), `__unchanged`, `__exact`, `__before`, of a
    partitioned table `__partition_oid`, then the table's columns. Columns named in `__unchanged` are as they were in the row of this key, or
    of the key in `__before` if the row has moved."""
    token: StreamToken
    """The position to continue from."""

    @property
    def filled(self) -> dict[str, str]:
        """The values that rows from before a column have in it, by the column's name, as PostgreSQL's texts.

        The source added such a column with a constant default. If a copy lacks it, the copy's rows get this value; `rows` have
        their own.
        """
        said: dict[str, str] = json.loads((self.rows.schema.metadata or {}).get(FILLED, b"{}"))
        return said

    @property
    def left(self) -> tuple[int, ...]:
        """OIDs of partitions that left the table: delete the earlier rows with this `__partition_oid` first."""
        return tuple(json.loads((self.rows.schema.metadata or {}).get(LEFT, b"[]")))


class HomeCalls(HomeAppends, Protocol):
    """An open home. `OpenHome` documents what the calls promise, `RemoteHome` the errors of the connection."""

    def __enter__(self) -> Self:
        """Return itself."""
        ...

    def __exit__(self, *_: object) -> None:
        """Close it."""
        ...

    def close(self) -> None:
        """Close everything that was opened."""
        ...

    def streams(self) -> list[str]:
        """Return the names of the streams that have a log."""
        ...

    def token(self, stream: str, *, vector: bool = False) -> StreamToken:
        """Return the newest consistent cut of a stream's log."""
        ...

    def read(
        self,
        stream: str,
        *,
        table: str | None = None,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Read records between two tokens, in order: `(after, upto]`."""
        ...

    def follow(
        self,
        stream: str,
        *,
        table: str | Sequence[str] | None = None,
        after: StreamToken | str | None = None,
    ) -> Following:
        """Yield a stream's records as they come, each batch with a token to resume from."""
        ...

    def read_latest(
        self,
        stream: str,
        table: str,
        *,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
        rows_max: int = LATEST_ROWS_MAX,
    ) -> Iterator[Latest]:
        """Read the changes of a table's rows between two tokens, one range after the other."""
        ...

    def merged(self, stream: str, table: str, *, at: datetime | str | None = None) -> pa.Table:
        """Return a table that several regions write, merged from all of them."""
        ...

    def session(self, stream: str, name: str | None = None, *, next_number: int | None = None) -> Session:
        """Return a session: it numbers writes, so that each may be resent."""
        ...

    def session_facts(self, stream: str, name: str) -> SessionFacts:
        """Return the stream's log's facts of a session."""
        ...

    def consumers(self, stream: str) -> Consumers:
        """Return the calls that make, show and steer the consumers of a stream."""
        ...

    def consume(
        self, stream: str, name: str, *, batch_size: int = CONSUMED_AT_ONCE, wait_s: float | None = None
    ) -> Consumption:
        """Receive from a consumer."""
        ...

    def query(
        self,
        sql: str,
        *,
        stream: str | None = None,
        as_of: StreamToken | datetime | str | None = None,
        lake_only: bool = False,
    ) -> pa.Table:
        """Return the result of SQL over a stream's lake tables."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the output of `millstream status --json`."""
        ...
