"""The state of a merged table in the lake (`lake.folded.merged`), for readers that begin with it, and its rebuild.

A fold commits the state with its position, so a reader needs only the records after that from the logs. The state is as
good as the kept one (`regions.state_files`), and mostly newer: it is folded as often as `current`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from millstream.crdt.region_state import Missing, RegionState
from millstream.errors import LakeConflict, LakeFilesGone, LakeTableForeign, LakeUnavailable, MillstreamError
from millstream.home.config_mapping import lake_layout
from millstream.model.names import parse_qualified_name
from millstream.regions.merged_table import RegionTable

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.lake.folded.merged import MergedPlace
    from millstream.lake.layout import LakeLayout

_TRIES_MAX: Final = 5
_PAUSE_S: Final = 0.2


def place_of(layout: LakeLayout, table: RegionTable) -> MergedPlace:
    """Return the place of a table's merged view in the lake."""
    from millstream.lake.folded.merged import MergedPlace
    from millstream.lake.layout import folder_name, folder_of

    own = table.own_schema
    folder = folder_name(*parse_qualified_name(table.name)) if own is None else folder_of(own)
    return MergedPlace(layout, folder, table.name)


def landed_state(home: Home, stream: str, table: RegionTable) -> RegionState | None:
    """Return the state in the lake with what the logs have after it.

    None if the lake has no view `merged`, or can't be read, or the logs don't continue its state.

    Raises:
        LakeError (`query_memory_full`): see `RegionTable`.
    """
    config = home.configured(stream)
    if config is None or config.lake.format == "postgres" or "merged" not in config.lake.shown:
        return None
    # Imported here: homes without this view read their logs without the lake's modules.
    from millstream.lake.folded.merged import MergedFold

    try:
        fold = MergedFold(
            place_of(lake_layout(home, stream, config, table.stream_id), table), table.engine, table.columns
        )
        received = fold.received
        if received is None or (table.bytes_max is not None and fold.state_bytes > table.bytes_max):
            return None
        known = fold.known if table.engine.merge.accumulates else None
        news = table.state_after(received.vector, received.ends, known=known)
        state = None if news is None else fold.state
    except MillstreamError:
        return None  # the logs and the kept state have the same rows
    if news is None or state is None:
        return None
    found = table.widened(table.engine.apply(state, Missing(news.rows, news.vector, news.ends)))
    table.check_fits(found)
    return found


def rebuild_landed(home: Home, stream: str, layout: LakeLayout, name: str) -> tuple[int, str | None]:
    """Build a table's merged view again from the kept state and the logs, in place of whatever the lake has.

    A pipeline may fold the table at the same time: one of the two then begins again.

    Returns:
        The number of rows, and the new path of a folder that was moved away because it couldn't be read.

    Raises:
        UnknownTable: no region has the table.
        LakeConflict: other folds were faster at every try.
        MillstreamError: as `RegionTable.merged_state`, or the lake can't be written.
    """
    from millstream.lake.damaged_tables import set_aside
    from millstream.lake.folded.merged import MERGED, REGIONS, MergedFold

    aside: str | None = None
    for left in reversed(range(_TRIES_MAX)):
        table = RegionTable(home, stream, name)
        place = place_of(layout, table)
        try:
            fold = MergedFold(place, table.engine, table.columns)
        except (LakeFilesGone, LakeTableForeign, LakeUnavailable):
            set_aside(place.layout, place.path(REGIONS))
            aside = set_aside(place.layout, place.path(MERGED)) or aside
            fold = MergedFold(place, table.engine, table.columns)
        try:
            return fold.replace(table.merged_state()).keys, aside
        except LakeConflict:
            if not left:
                raise
            time.sleep(_PAUSE_S)
    raise AssertionError("the last try returns or raises")
