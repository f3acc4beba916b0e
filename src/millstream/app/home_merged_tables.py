"""Tables that several regions write, read from a home's logs, with the regions and the age of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from millstream.app.log_readers import tables_named
from millstream.export.record_reading import latest_stretches
from millstream.model.region_ages import RegionAge, with_regions

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.client.call_results import Latest
    from millstream.home.home import Home
    from millstream.model.positions import Seq, StreamToken
    from millstream.regions.state_cache import MergedStates
    from millstream.wal.reader import StreamReader

FOLDED_TIMES: Final = 4
"""Folding takes this many times the memory of its input: of a range's records, or of a merging table's rows."""


class HomeMergedTables:
    """The `MergedTables` of a home's stream. Modules that merge are imported at the first call: few queries need them.

    Args:
        bytes_max: limit in bytes of what one table's read holds at once; None for no limit.
    """

    def __init__(self, home: Home, stream: str, *, bytes_max: int | None = None) -> None:
        self._home = home
        self._stream = stream
        self._bytes_max = bytes_max

    def names(self) -> Sequence[str]:
        """Return the tables whose merge is declared and that a region has written."""
        from millstream.regions.declared_merges import declared_tables

        return declared_tables(self._home, self._stream)

    def columns(self, table: str) -> pa.Schema:
        """Return the columns of a table's merged rows; raises as `OpenHome.merged`."""
        from millstream.regions.merged_table import RegionTable

        found = RegionTable(self._home, self._stream, table)
        return found.engine.value(found.empty).schema

    def rows(self, table: str, *, at_ns: int | None = None) -> tuple[pa.Table, Sequence[RegionAge]]:
        """Return a table's merged rows, and the regions; raises as `OpenHome.merged`."""
        from millstream.nodes.staleness import ages_of_regions, check_ages

        check_ages(self._home, self._stream)
        ages = ages_of_regions(self._home, self._stream)  # before the read: what is read is no older
        return _states().read(self._home, self._stream, table, at_ns=at_ns, bytes_max=self._bytes_max), ages


@cache
def _states() -> MergedStates:
    """Return the states that this process holds: one for all threads of a server, which open the home one by one."""
    from millstream.regions.state_cache import MergedStates

    return MergedStates()


def merged_rows(home: Home, stream: str, table: str, *, at_ns: int | None, bytes_max: int | None) -> pa.Table:
    """Return a table's merged rows, with the regions in the metadata of its schema; raises as `OpenHome.merged`."""
    rows, ages = HomeMergedTables(home, stream, bytes_max=bytes_max).rows(table, at_ns=at_ns)
    return rows.replace_schema_metadata(with_regions(rows.schema.metadata, ages))


def latest_with_totals(
    home: Home,
    stream: str,
    table: str,
    reader: StreamReader,
    after: StreamToken | str | None,
    upto: StreamToken | str | None,
    rows_max: int,
    bytes_max: int | None,
) -> Iterator[Latest]:
    """Read as `latest_stretches`; totals whose records retention has dropped are those that `reconcile` has kept."""

    def kept() -> tuple[Seq, pa.Table] | None:
        from millstream.export.net_changes import as_latest
        from millstream.regions.merged_table import RegionTable

        found = RegionTable(home, stream, table, bytes_max=bytes_max).kept_rows()
        return None if found is None else (found[0], as_latest(found[1]))

    yield from latest_stretches(
        reader,
        table,
        after=after,
        upto=upto,
        rows_max=rows_max,
        bytes_max=bytes_max,
        kept=kept,
        known=partial(tables_named, home, stream, table),
    )
