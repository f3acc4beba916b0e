"""`append` and `append_all` of a home, for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any, Final

from millstream.client.appends import AppendRequest, AppendSteps, HomeAppends, KnownTables
from millstream.closing import AsyncClosing
from millstream.model.steps import awaiting

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.ingest.python_rows import Rows

SMALL_ROWS: Final = 1000
"""Number of rows up to which columns are made on the loop's own thread: handing them to another takes longer."""
_SMALL_TABLES: Final = 10


class AsyncHomeAppends(AppendSteps, AsyncClosing):
    """The appends of a home. If one is cancelled, the rows may or may not be appended."""

    append = awaiting(HomeAppends.append)
    append_all = awaiting(HomeAppends.append_all)

    async def _columns(self, request: AppendRequest) -> tuple[dict[str, pa.Table], Any]:
        return await columns_of(request, self._known)


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
