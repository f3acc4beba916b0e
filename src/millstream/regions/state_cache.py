"""States of merged tables that a process holds in memory, so that a second read starts where the first ended.

A state is as good as one that is read from the beginning: what it was read from is checked at each read. Whatever
can't simply be read on is read as `RegionTable` reads it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.config.stream_checks import key_of
from millstream.crdt.region_state import Missing, ReconciliationEngine, RegionState
from millstream.model.names import parse_qualified_name, qualified_name
from millstream.regions.declared_merges import merge_of
from millstream.regions.landed_state import landed_state
from millstream.regions.merged_table import RegionTable
from millstream.regions.region_folders import region_logs
from millstream.wal.cross_region_duplicates import RepeatedWrites

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.home.home import Home

BYTES_MAX: Final = 256 << 20
"""Bytes of all rows that are held; a larger table is read each time."""

_Key = tuple[Path, str, str, int | None]


@dataclass(slots=True)
class _Held:
    """One table; its lock is held while it is read."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    table: RegionTable | None = None
    state: RegionState | None = None


class MergedStates:
    """The states of one process. Any number of threads.

    Args:
        bytes_max: limit of the bytes of all rows held; those read least recently go first.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._held: OrderedDict[_Key, _Held] = OrderedDict()
        self._repeated: dict[tuple[Path, str], RepeatedWrites] = {}
        self._lock = threading.Lock()

    def read(
        self, home: Home, stream: str, table: str, *, at_ns: int | None = None, bytes_max: int | None = None
    ) -> pa.Table:
        """Return the table; see `OpenHome.merged`, and `RegionTable` for `bytes_max`."""
        name = qualified_name(*parse_qualified_name(table))
        key = (home.path.absolute(), stream, name, bytes_max)
        with self._lock:
            held = self._held.setdefault(key, _Held())
            self._held.move_to_end(key)
            repeated = self._repeated.setdefault(key[:2], RepeatedWrites())
        with held.lock:
            try:
                engine, state = self._read(held, home, stream, name, bytes_max, repeated)
            except BaseException:
                held.table = held.state = None
                with self._lock:
                    self._held.pop(key, None)  # callers may name any number of tables that aren't there
                raise
        self._make_room()
        return engine.value(state, at_ns=at_ns)

    def _read(
        self,
        held: _Held,
        home: Home,
        stream: str,
        name: str,
        bytes_max: int | None,
        repeated: RepeatedWrites,
    ) -> tuple[ReconciliationEngine, RegionState]:
        state: RegionState | None = None
        if held.table is not None and held.state is not None and _is_as_configured(held.table, home, stream):
            state = held.table.advanced(held.state)
            if state is None:
                new = RegionTable(home, stream, name, bytes_max=bytes_max, with_kept=False, repeated=repeated)
                state = _read_on(held.state, held.table.engine, new)
                held.table = new
        if state is None:
            held.table = RegionTable(home, stream, name, bytes_max=bytes_max, repeated=repeated)
            held.table.watch()
            state = landed_state(home, stream, held.table) or held.table.merged_state()
        assert held.table is not None, "it was read by it"
        held.state = state
        return held.table.engine, state

    def _make_room(self) -> None:
        with self._lock:
            sizes = {key: held.state.rows.nbytes for key, held in self._held.items() if (held.state is not None)}
            left = sum(sizes.values())
            for key, size in sizes.items():
                if left <= self._bytes_max:
                    break
                del self._held[key]
                left -= size


def _read_on(state: RegionState, engine: ReconciliationEngine, table: RegionTable) -> RegionState | None:
    """Return the state with what follows, by new readers and in new columns; None if the logs don't continue it."""
    table.watch()
    news = table.state_after(state.vector, state.ends, known=table.known_in(state.rows))
    if news is None or table.engine != engine:
        return None
    return table.widened(engine.apply(state, Missing(news.rows, news.vector, news.ends)))


def _is_as_configured(table: RegionTable, home: Home, stream: str) -> bool:
    """Return whether a table is still read from the same logs, with the same key and merge."""
    config = home.configured(stream)
    key = None if config is None else key_of(config, table.name)
    return (
        table.folders == region_logs(home, stream, config)
        and table.engine.merge == merge_of(config, table.name)
        and (not key or key == table.engine.key)
    )
