"""A session for tasks: it numbers its writes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sized
from functools import partial
from typing import TYPE_CHECKING, Final

from millstream.client.home_calls import APPEND_DEADLINE_S
from millstream.client.write_session import Attempts, NumberedWrites
from millstream.errors import UsageError
from millstream.ingest.multi_table_append import tables_for
from millstream.ingest.valid_rows import columns_for
from millstream.model.operations import AppendedTables
from millstream.model.steps import run_async

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.aio.open_home import AsyncOpenHome
    from millstream.aio.remote_home import AsyncRemoteHome
    from millstream.ingest.rows_to_arrow import Rows
    from millstream.model.operations import Appended, RejectedRow

SMALL_ROWS: Final = 1000
"""Number of rows up to which columns are made on the loop's own thread: handing them to another takes longer."""
_SMALL_TABLES: Final = 10


class AsyncSession(NumberedWrites):
    """A `millstream.Session` for any number of tasks of one event loop. Made by `home.session`."""

    def __init__(self, home: AsyncOpenHome | AsyncRemoteHome, stream: str, name: str, next_number: int | None) -> None:
        super().__init__(home, stream, name, next_number, asyncio.sleep)
        self._asking = asyncio.Lock()

    @property
    def next_number(self) -> int:
        """Return the number of the next write.

        `UsageError` before `resume` or the first write, unless one was given.
        """
        if not self._numbers.is_known:
            raise UsageError(
                "the session's next number isn't known yet", hint="Ask the log for it: await session.resume()."
            )
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
        columns, rejected = await valid_columns(rows, keep_valid_rows=keep_valid_rows)
        if number is None and not self._numbers.is_known:
            await self.resume()
        write = partial(self._home.append, self._stream, table, columns)
        steps = self._steps(write, Attempts(deadline_s), number, keep_valid_rows=keep_valid_rows, acks=acks)
        appended: Appended = await run_async(steps, lambda call: call())
        return appended.with_rejected(rejected)

    async def append_all(
        self,
        tables: Mapping[str, Rows],
        *,
        deadline_s: float = APPEND_DEADLINE_S,
        number: int | None = None,
        keep_valid_rows: bool = False,
        acks: str | None = None,
    ) -> AppendedTables:
        """Append as `millstream.Session.append_all`.

        If it is cancelled, it may have been appended, and its number isn't reused.
        """
        kept, rejected = await valid_tables(tables, keep_valid_rows=keep_valid_rows)
        if number is None and not self._numbers.is_known:
            await self.resume()
        write = partial(self._home.append_all, self._stream, kept)
        steps = self._steps(write, Attempts(deadline_s), number, keep_valid_rows=keep_valid_rows, acks=acks)
        return AppendedTables.of(await run_async(steps, lambda call: call()), rejected)


async def valid_columns(rows: Rows, *, keep_valid_rows: bool) -> tuple[pa.Table, tuple[RejectedRow, ...]]:
    """Return as `columns_for`; many rows are converted on a thread, while other tasks go on."""
    if _is_small(rows):
        return columns_for(rows, keep_valid_rows=keep_valid_rows)
    return await asyncio.to_thread(columns_for, rows, keep_valid_rows=keep_valid_rows)


async def valid_tables(
    tables: Mapping[str, Rows], *, keep_valid_rows: bool
) -> tuple[dict[str, pa.Table], dict[str, tuple[RejectedRow, ...]]]:
    """Return as `tables_for`; many rows are converted on a thread, while other tasks go on."""
    given: object = tables
    if not isinstance(given, Mapping) or (len(given) <= _SMALL_TABLES and all(map(_is_small, given.values()))):
        return tables_for(tables, keep_valid_rows=keep_valid_rows)
    return await asyncio.to_thread(tables_for, tables, keep_valid_rows=keep_valid_rows)


def _is_small(rows: Rows) -> bool:
    return isinstance(rows, Mapping) or (isinstance(rows, Sized) and len(rows) <= SMALL_ROWS)
