"""pyiceberg's catalog in an SQL database, with the moments of commits in order; see `commit_moments`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyiceberg.catalog.sql import SqlCatalog

from millstream.lake.iceberg.commit_moments import newest_moment_ms, ordered

if TYPE_CHECKING:
    from pyiceberg.table import CommitTableResponse, StagedTable, Table
    from pyiceberg.table.update import TableRequirement, TableUpdate


class OrderedSqlCatalog(SqlCatalog):
    """See the module."""

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit, as the base class."""
        return super().commit_table(table, requirements, ordered(table.metadata, updates))

    def _update_and_stage_table(self, current_table: Table | None, *rest: Any) -> StagedTable:
        staged = super()._update_and_stage_table(current_table, *rest)
        if current_table is not None:
            # A commit without a snapshot has the clock's moment.
            moment = max(staged.metadata.last_updated_ms, newest_moment_ms(current_table.metadata))
            staged.metadata = staged.metadata.model_copy(update={"last_updated_ms": moment})
        return staged
