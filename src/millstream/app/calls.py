"""What a home is asked, wherever it is: on this machine (`millstream.open`) or behind an address (`millstream.connect`).

The two have the same calls with the same arguments; `millstream.aio` has them as coroutines. A test compares their signatures.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from millstream.errors import AppendOutcomeUnknown, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.ingest.columns import Rows
    from millstream.model.operations import Appended
    from millstream.model.positions import StreamToken

APPEND_DEADLINE_S: Final = 30.0
"""How long an append waits for room in the writer's queue, where its caller doesn't say."""

LATEST_ROWS_MAX: Final = 100_000

ASK_AGAIN_S: Final = 0.1
"""How long a session waits before it sends a write again of which nobody knows what became."""


@dataclass(frozen=True, slots=True)
class Latest:
    """What became of a table's rows in a stretch of the log. Done as one to a copy of the table, it is as the stretch left it."""

    emptied: bool
    """Whether all rows of before are gone: forget them first."""
    rows: pa.Table
    """One line a key: `__op` (`d`: the row is gone, `u`: it is there), `__unchanged`, `__exact`, `__before`, then the table's columns.
    Columns named in `__unchanged` are as they were in the row of this key, or of the key in `__before` where the row has moved."""
    token: StreamToken
    """Where to go on."""


class HomeCalls(Protocol):
    """A home, open. What the calls promise stands with `OpenHome`, what else may happen on the way with `RemoteHome`."""

    def __enter__(self) -> Self:
        """Give itself."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        ...

    def close(self) -> None:
        """Let go of what was opened."""
        ...

    def streams(self) -> list[str]:
        """Names of the streams that have a log."""
        ...

    def token(self, stream: str, *, vector: bool = False) -> StreamToken:
        """The newest consistent cut of a stream's log."""
        ...

    def read(
        self,
        stream: str,
        *,
        table: str | None = None,
        after: StreamToken | str | None = None,
        upto: StreamToken | str | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Records between two tokens, in order: `(after, upto]`."""
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
        """What became of a table's rows between two tokens, a stretch after the other."""
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
    ) -> Appended:
        """Append rows to a table of a stream: one operation."""
        ...

    def session(self, stream: str, name: str, *, next_number: int = 1) -> Session:
        """Writes that are numbered by themselves, so that each may be sent again."""
        ...

    def query(
        self, sql: str, *, stream: str | None = None, as_of: StreamToken | datetime | str | None = None
    ) -> pa.Table:
        """The result of SQL over a stream's lake tables."""
        ...

    def status(self) -> dict[str, Any]:
        """What `millstream status --json` prints."""
        ...


class Numbers:
    """The numbers of a session's writes: each is given once, and again only where its write was refused.

    Concurrency: any number of threads.
    """

    def __init__(self, next_number: int) -> None:
        if next_number < 1:
            raise UsageError(f"a session's writes are numbered from 1, and {next_number} was asked for")
        self._next = next_number
        self._given_back: list[int] = []
        self._lock = threading.Lock()

    @property
    def next(self) -> int:
        """The smallest number that no write of this session's has."""
        with self._lock:
            return self._given_back[0] if self._given_back else self._next

    @contextmanager
    def one(self, named: int | None) -> Iterator[int]:
        """A number for one write, or the one that is named. A write that is refused gives it back, so that the next one fills the hole."""
        if named is not None:
            yield named
            return
        with self._lock:
            if self._given_back:
                number = heapq.heappop(self._given_back)
            else:
                number, self._next = self._next, self._next + 1
        try:
            yield number
        except AppendOutcomeUnknown:
            raise  # it may be there, under this number
        except Exception:
            with self._lock:
                heapq.heappush(self._given_back, number)
            raise


class Session:
    """Writes under one name, each with a number, from 1: one that is sent again under its number isn't appended twice.

    Made by `home.session`. An application that starts anew goes on under the same name, with the number behind the last write that
    it knows to be durable; where it doesn't know, it sends that one again under its number.

    Concurrency: any number of threads.
    """

    def __init__(self, home: HomeCalls, stream: str, name: str, next_number: int) -> None:
        self._home = home
        self._stream = stream
        self._numbers = Numbers(next_number)
        self.name: Final = name
        """What it is called in the stream."""

    def __repr__(self) -> str:
        return f"Session({self._stream!r}, {self.name!r}, next_number={self.next_number})"

    @property
    def next_number(self) -> int:
        """The number of the next write."""
        return self._numbers.next

    def append(
        self,
        table: str,
        rows: Rows,
        *,
        deadline_s: float = APPEND_DEADLINE_S,
        number: int | None = None,
        keep_valid_rows: bool = False,
    ) -> Appended:
        """As `append` of the home. Where nobody knows what became of the write, it is sent again until the deadline.

        Args:
            table: as there.
            rows: as there.
            deadline_s: as there.
            number: to send again, with the same rows, what `append_outcome_unknown` said of (`details["number"]`).
            keep_valid_rows: as there.

        Raises:
            AppendOutcomeUnknown: still; details: number.
            MillstreamError: as `append` of the home. Nothing was appended, and the next write has this number.
        """
        from millstream.ingest.columns import table_of

        give_up_s = time.monotonic() + deadline_s
        columns = table_of(rows)
        with self._numbers.one(number) as given:
            while True:
                left_s = max(0.0, give_up_s - time.monotonic())
                try:
                    return self._home.append(
                        self._stream,
                        table,
                        columns,
                        deadline_s=left_s,
                        session=self.name,
                        number=given,
                        keep_valid_rows=keep_valid_rows,
                    )
                except AppendOutcomeUnknown as error:
                    if time.monotonic() + ASK_AGAIN_S >= give_up_s:
                        raise still_unknown(error, given) from error
                    time.sleep(ASK_AGAIN_S)


def still_unknown(error: AppendOutcomeUnknown, number: int) -> AppendOutcomeUnknown:
    """That a session's write may be there, with the number to send it again under."""
    return AppendOutcomeUnknown(
        f"write {number} of the session: {error.message}",
        hint=f"Send the same rows again, with number={number}: they aren't appended twice.",
        **{**error.details, "number": number},
    )
