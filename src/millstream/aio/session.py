"""A session for tasks: it numbers its writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from millstream.aio.appends import columns_of
from millstream.client.appends import APPEND_DEADLINE_S, NOTHING_KNOWN, AppendRequest, KnownTables
from millstream.client.write_session import NumberedWrites
from millstream.errors import UsageError
from millstream.model.steps import run_async

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.ingest.python_rows import Rows
    from millstream.model.operations import Appended, AppendedTables
    from millstream.model.writes import SessionFacts


class AsyncSession(NumberedWrites):
    """A `millstream.Session` for any number of tasks of one event loop. Made by `home.session`."""

    def __init__(
        self,
        append: Callable[[AppendRequest, Mapping[str, pa.Table]], Awaitable[Any]],
        facts: Callable[[str, str], Awaitable[SessionFacts]],
        stream: str,
        name: str,
        next_number: int | None,
        known: KnownTables = NOTHING_KNOWN,
    ) -> None:
        super().__init__(append, facts, stream, name, next_number, asyncio.sleep, known)
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
                self._numbers.begin(await self._facts())
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
        appended: Appended = await self._write(
            AppendRequest(self._stream, table, rows, deadline_s, self.name, number, None, keep_valid_rows, acks)
        )
        return appended

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
        appended: AppendedTables = await self._write(
            AppendRequest(self._stream, None, tables, deadline_s, self.name, number, None, keep_valid_rows, acks)
        )
        return appended

    async def _write(self, request: AppendRequest) -> Any:
        tables, rejected = await columns_of(request, self._known)
        if request.number is None and not self._numbers.is_known:
            await self.resume()
        with request.naming(rejected, tables):
            return request.result(await run_async(self._steps(request, tables), lambda call: call()), rejected)
