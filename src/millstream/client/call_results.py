"""Results and bounds of a home's calls, wherever it is: on this machine (`OpenHome`) or behind an address (`RemoteHome`).

The two have the same calls with the same arguments; `millstream.aio` has them as coroutines. A test
compares their signatures.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.model.positions import StreamToken

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
