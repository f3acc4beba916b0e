"""A session for tasks: it numbers its writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sized
from typing import TYPE_CHECKING, Final, Protocol

from millstream.client.protocol import APPEND_DEADLINE_S, Attempts, Numbers
from millstream.errors import MillstreamError, SessionGap, UsageError
from millstream.ingest.valid_rows import ValidTable, columns_for

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.ingest.columns import Rows
    from millstream.model.operations import Appended
    from millstream.model.writes import SessionFacts

SMALL_ROWS: Final = 1000
"""Number of rows up to which columns are made on the loop's own thread: handing them to another takes longer."""


class Appends(Protocol):
    """The calls that a session uses."""

    def append(
        self,
        stream: str,
        table: str,
        rows: Rows,
        *,
        deadline_s: float,
        session: str | None,
        number: int | None,
        keep_valid_rows: bool,
        acks: str | None,
    ) -> Awaitable[Appended]:
        """Append as `append` of a home."""
        ...

    def session_facts(self, stream: str, name: str) -> Awaitable[SessionFacts]:
        """Return as `session_facts` of a home."""
        ...


class AsyncSession:
    """A `millstream.Session` for any number of tasks of one event loop. Made by `home.session`."""

    def __init__(self, home: Appends, stream: str, name: str, next_number: int | None) -> None:
        self._home = home
        self._stream = stream
        self._numbers = Numbers(name, next_number)
        self._asking = asyncio.Lock()
        self.name: Final = name
        """The session's name in the stream."""

    def __repr__(self) -> str:
        return f"AsyncSession({self._stream!r}, {self.name!r}, next_number={self._known()})"

    def _known(self) -> int | None:
        return self._numbers.next if self._numbers.is_known else None

    @property
    def next_number(self) -> int:
        """Return the number of the next write.

        `UsageError` before `resume` or the first write, unless one was given.
        """
        if not self._numbers.is_known:
            raise UsageError("nobody has asked the log yet", hint="Ask it: await session.resume().")
        return self._numbers.next

    async def resume(self) -> int:
        """Return the next number, from the log unless one was given; raises as `millstream.Session.next_number`."""
        async with self._asking:
            if not self._numbers.is_known:
                self._numbers.begin(await self._home.session_facts(self._stream, self.name))
        return self._numbers.next

    async def append(
        self,
        table: str,
        rows: Rows,
        *,
        deadline_s: float = APPEND_DEADLINE_S,
        number: int | None = None,
        keep_valid_rows: bool = False,
        acks: str | None = None,
    ) -> Appended:
        """Append as `millstream.Session.append`.

        If it is cancelled, it may have been appended, and its number isn't reused.
        """
        valid = await valid_columns(rows, keep_valid_rows=keep_valid_rows)
        if number is None and not self._numbers.is_known:
            await self.resume()
        attempts = Attempts(deadline_s)
        while True:
            try:
                with self._numbers.one(number) as given:
                    return valid.told(
                        await self._sent(
                            table, valid.table, given, attempts, keep_valid_rows=keep_valid_rows, acks=acks
                        )
                    )
            except SessionGap as error:
                # Numbers of lost writes are used first.
                if number is not None or not self._numbers.fill(
                    await self._home.session_facts(self._stream, self.name)
                ):
                    await asyncio.sleep(attempts.nap_after(error))

    async def _sent(
        self,
        table: str,
        rows: pa.Table,
        number: int,
        attempts: Attempts,
        *,
        keep_valid_rows: bool,
        acks: str | None,
    ) -> Appended:
        while True:
            try:
                return await self._home.append(
                    self._stream,
                    table,
                    rows,
                    deadline_s=attempts.left_s,
                    session=self.name,
                    number=number,
                    keep_valid_rows=keep_valid_rows,
                    acks=acks,
                )
            except SessionGap:
                raise
            except MillstreamError as error:
                await asyncio.sleep(attempts.nap_after(error, number))


async def valid_columns(rows: Rows, *, keep_valid_rows: bool) -> ValidTable:
    """Return as `columns_for`; many rows are converted on a thread, while other tasks go on."""
    if isinstance(rows, Mapping) or (isinstance(rows, Sized) and len(rows) <= SMALL_ROWS):
        return columns_for(rows, keep_valid_rows=keep_valid_rows)
    return await asyncio.to_thread(columns_for, rows, keep_valid_rows=keep_valid_rows)
