"""A session for tasks: it numbers its writes."""

from __future__ import annotations

import asyncio
from typing import Any

from millstream.aio.appends import columns_of
from millstream.client.appends import AppendRequest
from millstream.client.write_session import NumberedWrites, Session
from millstream.errors import UsageError
from millstream.model.steps import awaiting


class AsyncSession(NumberedWrites):
    """A `millstream.Session` for any number of tasks of one event loop. Made by `home.session`.

    If an append is cancelled, it may have been appended, and its number isn't reused.
    """

    _sleep = staticmethod(asyncio.sleep)
    _lock = staticmethod(asyncio.Lock)
    append = awaiting(Session.append)
    append_all = awaiting(Session.append_all)

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

    async def _columns(self, request: AppendRequest) -> Any:
        return await columns_of(request, self._known)
