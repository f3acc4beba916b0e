"""The files of merged tables' states, `data/regions/<stream>/<table>.state`, and the positions that they are as of."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from millstream.config.stream_checks import key_of
from millstream.crdt.region_state import Ends, Vector, heard_in
from millstream.errors import MergeStateUnreadable, MillstreamError
from millstream.model.ids import RegionId, region_log_name
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.model.positions import StreamToken, short_stream_id
from millstream.regions.declared_merges import merge_of
from millstream.wal.reader import StreamReader
from millstream.wal.truncation_check import still_says

if TYPE_CHECKING:
    from millstream.config.model import StreamConfig
    from millstream.home.home import Home
    from millstream.home.paths import HomePaths


def merge_file(home: HomePaths, stream: str, table: str) -> Path:
    """Return the file of a table's merged state; `UsageError` if the text is no table's name."""
    name = qualified_name(*parse_qualified_name(table))
    return home.data / "regions" / stream / f"{quote(name, safe='')}.state"


def mapped(file: Path) -> memoryview:
    """Map a file into memory: the kept state is replaced, never overwritten. `FileNotFoundError` if there is none."""
    with file.open("rb") as opened:
        if not os.fstat(opened.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))


class KeptVectors:
    """The positions in the regions' logs up to which a home's merged tables are kept.

    Each file is read once, and again when it has changed; not for several threads.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._known: dict[Path, tuple[tuple[int, int, int], tuple[Vector, Ends]]] = {}

    def of(self, stream: str, config: StreamConfig, table: str, region: RegionId) -> StreamToken | None:
        """Return the kept position of a region's log; None without usable state, or if the log was cut back since."""
        vector, ends = self._kept(stream, config, table)
        token = vector.get(region)
        if token is None:
            return None
        name = stream if region == config.region else region_log_name(stream, region)
        try:
            reader = StreamReader(str(self._home.wal_folder(name)))
            # Nothing was taken of a log that was recreated.
            is_this = token.stream == short_stream_id(reader.stream_id)
            return token if is_this and still_says(reader, token.linear(), ends.get(region)) else None
        except (MillstreamError, OSError):
            return None

    def _kept(self, stream: str, config: StreamConfig, table: str) -> tuple[Vector, Ends]:
        file = merge_file(self._home, stream, table)
        try:
            stat = file.stat()
            seen = stat.st_ino, stat.st_mtime_ns, stat.st_size
            known = self._known.get(file)
            if known is None or known[0] != seen:
                found = heard_in(mapped(file), key_of(config, table), merge_of(config, table))
                known = self._known[file] = seen, found or ({}, {})
        except (FileNotFoundError, MergeStateUnreadable):
            return {}, {}
        return known[1]
