"""`millstream reconcile`: merges the tables of a stream that several regions write, or shows what that would change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from millstream.errors import ReplicationError, UsageError
from millstream.model.ids import RegionId
from millstream.processes.role_locks import LOCK_PATIENCE_S, RoleLock
from millstream.regions.merged_table import Reconciled, RegionTable

if TYPE_CHECKING:
    from millstream.home.home import Home


@dataclass(frozen=True, slots=True)
class ReconciledTable:
    """The outcome for a table, actual or expected."""

    name: str
    regions: int
    """Number of regions' logs that the home has."""
    rows: int = 0
    """Number of rows that the regions have together."""
    taken: tuple[Reconciled, ...] = ()
    differences: Mapping[RegionId, pa.Table] = field(default_factory=dict)
    """In a dry run: by other region, `ReconciliationEngine.dry_run` of this region's log with the other's."""

    unwritten: tuple[str, ...] = ()
    """Columns that the configuration merges and no region has."""

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome, JSON-able."""
        return {
            "table": self.name,
            "regions": self.regions,
            "unwritten": list(self.unwritten),
            "rows": self.rows,
            "taken": [one.as_dict() for one in self.taken],
            "differences": {str(int(region)): lines.to_pylist() for region, lines in self.differences.items()},
        }


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The outcome for a stream's tables."""

    stream: str
    is_dry_run: bool
    tables: tuple[ReconciledTable, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome, JSON-able."""
        return {
            "stream": self.stream,
            "dry_run": self.is_dry_run,
            "tables": [table.as_dict() for table in self.tables],
        }


def reconcile_stream(
    home: Home,
    stream: str | None,
    tables: Sequence[str] = (),
    *,
    dry_run: bool = False,
    limit: int = 1000,
    bytes_max: int | None = None,
    patience_s: float = LOCK_PATIENCE_S,
) -> Reconciliation:
    """Merge the tables of a stream's regions, and keep the outcome.

    Args:
        tables: their names; none: those that the configuration merges.
        dry_run: keep nothing, and report the differences between the home's own region and each other one
            instead.
        limit: lines of a dry run, per table and region.
        patience_s: how long to wait for another process that reconciles here.

    Raises:
        LakeError (`query_memory_full`): a table is larger than `bytes_max`.
        UsageError: no table is named, and the configuration merges none.
        UnknownStream, UnknownTable, ReplicationError (`merge_unsuitable`, `other_region`, `other_stream`), OffsetExpired,
        MergeStateUnreadable: see `OpenHome.merged`; tables already done stay so.
        ReplicationError (`lost_tail_merged`): as those, but all other tables are done.
        HomeBusy: another process reconciles here.
    """
    if not dry_run:
        # The process that began first would overwrite the other's state with less, and retention has
        # already gone by the other's.
        home.prepare()
        with RoleLock.take(home.run_folder, "reconcile", patience_s=patience_s):
            return _reconciled(home, stream, tables, bytes_max=bytes_max)
    return _reconciled(home, stream, tables, rows_max=limit, bytes_max=bytes_max)


def _reconciled(
    home: Home,
    stream: str | None,
    tables: Sequence[str],
    *,
    rows_max: int | None = None,
    bytes_max: int | None = None,
) -> Reconciliation:
    """Reconcile as `reconcile_stream`; a dry run if `rows_max` is given."""
    name = home.pick_stream(stream)
    config = home.configured(name)
    names = tuple(tables) or tuple(sorted(config.merge if config is not None else ()))
    if not names:
        raise UsageError(
            f"stream {name} merges no table",
            hint=f'Set how a table merges, [streams.{name}.merge."public.posts"], or name one, which then merges by lww.',
        )
    found = []
    failed: ReplicationError | None = None
    for one in names:
        table = RegionTable(home, name, one, bytes_max=bytes_max)
        regions = len(table.regions)
        if rows_max is not None:
            (_, local), *others = table.states_apart().items()
            differences = {
                other: table.engine.dry_run(local, remote, rows_max=rows_max, joined=table.together(local, remote))
                for other, remote in others
            }
            found.append(ReconciledTable(table.name, regions, differences=differences, unwritten=table.unwritten))
            continue
        taken: list[Reconciled] = []
        try:
            state = table.merged_state(take=taken)
        except ReplicationError as error:
            if error.code != "lost_tail_merged":
                raise
            failed = failed or error
            continue
        table.keep(state)
        rows = table.engine.keys_in(state)
        found.append(ReconciledTable(table.name, regions, rows, tuple(taken), unwritten=table.unwritten))
    if failed is not None:
        raise failed
    return Reconciliation(name, rows_max is not None, tuple(found))
