"""The tables that a running pipeline has quarantined, which failures quarantine one, and when each is retried.

A table whose history can't be written lands nothing, and its records stay in the log, while the other tables go on.
A failure that isn't one table's ends the batch instead (`failure_of_lake`). `capture.table_states` has the
tables that can't be captured.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from millstream.catalog import Catalog
from millstream.catalog.pipeline_tables import QuarantinedTable, QuarantineFacts
from millstream.errors import EngineError, LakeUnavailable, MillstreamError, may_pass
from millstream.model.ids import TableId
from millstream.model.positions import Seq
from millstream.protocol.retention import HolderKind
from millstream.spark.executor_tasks import TableError
from millstream.spark.pipeline import PipelineConfig
from millstream.spark.unreachable_lake import LAKE_PATIENCE_S

ATTEMPTS_MAX: Final = 4
"""Number of attempts to write a table in one batch, if its error may be temporary and the lake can be reached."""
RETRY_S_MIN: Final = 30.0
RETRY_S_MAX: Final = 600.0
"""The first and the maximum pause before a quarantined table is retried. A person's repair takes minutes, and each
attempt reads up to a batch of the log."""
_REFUSED: Final = frozenset({"lake_credentials", "lake_bucket_missing", "lake_tls_differs"})
"""Refusals of an object store that are the same for all tables."""
_LAKE: Final = frozenset({LakeUnavailable.code, *LakeUnavailable.codes})
_GONE: Final = frozenset({LakeUnavailable.code, "catalog_unreachable", "lake_bucket_missing"})


def failure_of_lake(errors: Sequence[TableError], *, landed_tables: int) -> MillstreamError | None:
    """Return the error that ends a batch, if its failures aren't single tables'; None: quarantine the tables that failed.

    If the disk, the mount, the network or the keys fail, quarantining all tables wouldn't help.

    Args:
        errors: the errors of the tables that failed.
    """
    refused = next((error for error in errors if error.code in _REFUSED), None)
    all_failed = not landed_tables and all(may_pass(error.code, error.retry) or error.code in _LAKE for error in errors)
    if not errors or not (refused or all_failed):
        return None
    error = refused or errors[0]
    message = f"no table of the lake can be written: {error.message}"
    if error.code in _LAKE:
        return LakeUnavailable(message, code=error.code, hint=error.hint)
    return EngineError(message, hint=error.hint, cause=error.code)


def gives_up(errors: Iterable[TableError], *, attempts: int, failing_s: float) -> bool:
    """Return whether a batch doesn't try again to write the tables that fail with these errors."""
    is_lake_gone = any(error.code in _GONE for error in errors)
    return failing_s >= LAKE_PATIENCE_S if is_lake_gone else attempts >= ATTEMPTS_MAX


class Quarantine:
    """The quarantined tables of one run. For the thread that lands batches; any thread may read `tables`."""

    def __init__(self, config: PipelineConfig, catalog: Catalog) -> None:
        self._config = config
        self._catalog = catalog
        self._facts = QuarantineFacts(catalog, config.stream_id, config.pipeline)
        found = map(QuarantinedTable.from_fact, self._facts.all().values())
        self.tables: dict[TableId, QuarantinedTable] = {table.table_id: table for table in found}
        self._again_s: dict[TableId, float] = {}
        """When to retry each table; at once if this run hasn't yet."""
        self._pause_s: dict[TableId, float] = {}

    def add(self, table: QuarantinedTable, *, retry_at_once: bool = False) -> None:
        """Quarantine a table, durably; its records stay in the log until it is removed."""
        lacks_from = Seq(table.after + 1)
        self._catalog.set_needed_from(
            self._config.stream_id, self.holder(table.table_id), lacks_from, kind=HolderKind.BACKLOG
        )
        self._facts.put(table)
        self.tables[table.table_id] = table
        pause = min(RETRY_S_MAX, 2 * self._pause_s.get(table.table_id, RETRY_S_MIN / 2))
        self._pause_s[table.table_id] = pause
        self._again_s[table.table_id] = 0.0 if retry_at_once else time.monotonic() + pause

    def remove(self, table_id: TableId) -> None:
        """Take a table out of this run's quarantine. `let_go` follows, once a cut without the table is committed."""
        del self.tables[table_id]
        self._pause_s.pop(table_id, None)

    def let_go(self, table_id: TableId) -> None:
        """Record that a table is no longer quarantined; the log may drop the records that waited for it."""
        self._facts.drop(table_id)
        self._catalog.release(self._config.stream_id, self.holder(table_id))

    def retries_due(self) -> list[QuarantinedTable]:
        """Return the tables whose retry is due or requested."""
        if not self.tables:
            return []
        now, asked = time.monotonic(), self._facts.retries_requested()
        return [t for t in list(self.tables.values()) if t.table_id in asked or now >= self._again_s.get(t.table_id, 0)]

    def holder(self, table_id: TableId) -> str:
        """Return the name under which a table's waiting records are held in the log."""
        return f"{self._config.pipeline}/{table_id}"
