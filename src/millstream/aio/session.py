"""A session's writes, numbered by themselves, for tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sized
from typing import TYPE_CHECKING, Final, Protocol

from millstream.app.calls import APPEND_DEADLINE_S, ASK_AGAIN_S, Numbers, still_unknown
from millstream.errors import AppendOutcomeUnknown
from millstream.ingest.columns import table_of

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.ingest.columns import Rows
    from millstream.model.operations import Appended

SMALL_ROWS: Final = 1000
"""Rows up to here are made columns on the loop's own thread: handing them to another takes longer."""


class Appends(Protocol):
    """What a session goes through."""

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
    ) -> Awaitable[Appended]:
        """As `append` of a home."""
        ...


class AsyncSession:
    """As `millstream.Session`, for any number of tasks of one event loop. Made by `home.session`."""

    def __init__(self, home: Appends, stream: str, name: str, next_number: int) -> None:
        self._home = home
        self._stream = stream
        self._numbers = Numbers(next_number)
        self.name: Final = name
        """What it is called in the stream."""

    def __repr__(self) -> str:
        return f"AsyncSession({self._stream!r}, {self.name!r}, next_number={self.next_number})"

    @property
    def next_number(self) -> int:
        """The number of the next write."""
        return self._numbers.next

    async def append(
        self,
        table: str,
        rows: Rows,
        *,
        deadline_s: float = APPEND_DEADLINE_S,
        number: int | None = None,
        keep_valid_rows: bool = False,
    ) -> Appended:
        """As `millstream.Session.append`. Cancelled, it may have been appended, and its number isn't given again."""
        give_up_s = time.monotonic() + deadline_s
        columns = await columns_of(rows)
        with self._numbers.one(number) as given:
            while True:
                try:
                    return await self._home.append(
                        self._stream,
                        table,
                        columns,
                        deadline_s=max(0.0, give_up_s - time.monotonic()),
                        session=self.name,
                        number=given,
                        keep_valid_rows=keep_valid_rows,
                    )
                except AppendOutcomeUnknown as error:
                    if time.monotonic() + ASK_AGAIN_S >= give_up_s:
                        raise still_unknown(error, given) from error
                    await asyncio.sleep(ASK_AGAIN_S)


async def columns_of(rows: Rows) -> pa.Table:
    """As `table_of`; many rows are made columns on a thread, while other tasks go on."""
    if isinstance(rows, Mapping) or (isinstance(rows, Sized) and len(rows) <= SMALL_ROWS):
        return table_of(rows)
    return await asyncio.to_thread(table_of, rows)
