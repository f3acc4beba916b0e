"""`append` and `append_all` of a home, for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any, Final

from millstream.client.appends import APPEND_DEADLINE_S, NOTHING_KNOWN, AppendRequest, KnownTables
from millstream.closing import AsyncClosing
from millstream.model.names import parse_qualified_name

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.ingest.python_rows import Rows
    from millstream.model.operations import Appended, AppendedTables

SMALL_ROWS: Final = 1000
"""Number of rows up to which columns are made on the loop's own thread: handing them to another takes longer."""
_SMALL_TABLES: Final = 10


class AsyncHomeAppends(AsyncClosing):
    """The appends of a home: both calls are `_append` of its own, once their rows are columns."""

    _known: KnownTables = NOTHING_KNOWN

    async def append(
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
        """Append as the home's blocking twin. If it is cancelled, the rows may or may not be appended."""
        parse_qualified_name(table)  # a request without a table would be one of several
        appended: Appended = await self._write(
            AppendRequest(stream, table, rows, deadline_s, session, number, idempotency_key, keep_valid_rows, acks)
        )
        return appended

    async def append_all(
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
        """Append as the home's blocking twin. If it is cancelled, the rows may or may not be appended."""
        appended: AppendedTables = await self._write(
            AppendRequest(stream, None, tables, deadline_s, session, number, idempotency_key, keep_valid_rows, acks)
        )
        return appended

    async def _write(self, request: AppendRequest) -> Any:
        tables, rejected = await columns_of(request, self._known)
        with request.naming(rejected, tables):
            return request.result(await self._append(request, tables), rejected)

    async def _append(self, request: AppendRequest, tables: Mapping[str, pa.Table]) -> Appended | AppendedTables:
        """Append a request's valid rows."""
        raise NotImplementedError


async def columns_of(request: AppendRequest, known: KnownTables) -> tuple[dict[str, pa.Table], Any]:
    """Return as `AppendRequest.columns`, while other tasks go on: many rows, and those that a look-up may decide, on a thread."""
    rows = request.rows
    if request.keep_valid_rows:
        is_small = False
    elif request.table is not None:
        is_small = _is_small(rows)
    else:
        is_small = not isinstance(rows, Mapping) or (len(rows) <= _SMALL_TABLES and all(map(_is_small, rows.values())))
    if is_small:
        return request.columns(known)
    return await asyncio.to_thread(request.columns, known)


def _is_small(rows: Rows) -> bool:
    return isinstance(rows, Mapping) or (isinstance(rows, Sized) and len(rows) <= SMALL_ROWS)
