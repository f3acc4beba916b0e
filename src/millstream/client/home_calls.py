"""The calls of a home, wherever it is: on this machine (`millstream.open`) or behind an address (`millstream.connect`).

The two have the same calls with the same arguments; `millstream.aio` has them as coroutines. A test
compares their signatures.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from millstream.errors import (
    UsageError,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.client.consumers import Consumers, Consumption
    from millstream.client.following import Following
    from millstream.client.write_session import Session
    from millstream.ingest.rows_to_arrow import Rows
    from millstream.model.operations import Appended, AppendedTables
    from millstream.model.positions import StreamToken
    from millstream.model.writes import SessionFacts

APPEND_DEADLINE_S: Final = 30.0
"""How long an append waits for room in the writer's queue by default."""
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
    """One row per key: `__op` (`d`: the row is gone, `u`: it exists), `__unchanged`, `__exact`, `__before`,
    then the table's columns. Columns named in `__unchanged` are as they were in the row of this key, or
    of the key in `__before` if the row has moved."""
    token: StreamToken
    """The position to continue from."""


class HomeCalls(Protocol):
    """An open home. `OpenHome` documents what the calls promise, `RemoteHome` the errors of the connection."""

    def __enter__(self) -> Self:
        """Return itself."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def merged(self, stream: str, table: str, *, at: datetime | None = None) -> pa.Table:
        """Return a table that several regions write, merged from all of them."""
        ...

    def append(
        self,
        stream: str,
        table: str,
        rows: Rows,
        *,
        deadline_s: float = APPEND_DEADLINE_S,
        session: str | None = None,
        number: int | None = None,
        idempotency_key: str | None = None,
        keep_valid_rows: bool = False,
        acks: str | None = None,
    ) -> Appended:
        """Append rows to a table of a stream: one operation."""
        ...

    def append_all(
        self,
        stream: str,
        tables: Mapping[str, Rows],
        *,
        deadline_s: float = APPEND_DEADLINE_S,
        session: str | None = None,
        number: int | None = None,
        idempotency_key: str | None = None,
        keep_valid_rows: bool = False,
        acks: str | None = None,
    ) -> AppendedTables:
        """Append rows to several tables of a stream as one operation."""
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


def check_deadline(deadline_s: float) -> float:
    """Return the deadline itself, in seconds from now; `UsageError` if it is invalid."""
    said: object = deadline_s
    is_number = isinstance(said, int | float) and not isinstance(said, bool)
    if not is_number or not 0 <= deadline_s <= threading.TIMEOUT_MAX:
        raise UsageError(
            f"deadline_s={deadline_s!r} is no time to wait",
            hint=f"Pass a number of seconds, 0 or more; the default is {APPEND_DEADLINE_S:g}.",
        )
    return deadline_s
