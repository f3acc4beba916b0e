"""Whether the rows of several tables can be one operation: all go to the log, or all to the same sinks.

The log takes an operation whole or not at all. No two places do so together, and neither do two shards of a write
buffer. Rows that a rule drops (`devnull`) go nowhere, and hold up no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from millstream.errors import MillstreamError, RoutingError
from millstream.model.ids import ShardId
from millstream.model.operations import TableRows
from millstream.model.writes import AppendBatch

_Place = tuple[str | None, ShardId | None]
"""A sink's name, or None for the log; and the shard of a write buffer."""


def check_one_place(placed: Sequence[Sequence[TableRows]], *, is_buffer: bool) -> None:
    """Raise `not_one_operation` if the tables' rows, given by table, go to different places.

    Args:
        placed: each table's entries.
        is_buffer: whether the log is a write buffer.
    """
    names = {entries[0].schema.full_name: _places_of(entries, is_buffer=is_buffer) for entries in placed if entries}
    if len(names) > 1 and not _is_one(names, is_buffer=is_buffer):
        raise _apart(names)


def not_one_operation(
    placed: Sequence[Sequence[TableRows]], batch: AppendBatch, *, is_buffer: bool
) -> dict[int, MillstreamError]:
    """Return the errors of the operations whose tables go to different places, by their numbers."""
    entries = [entries for entries in placed if entries]
    if len(entries) < 2:
        return {}
    places = {str(at): _places_of(own, is_buffer=is_buffer) for at, own in enumerate(entries)}
    if _is_one(places, is_buffer=is_buffer) and all(len(own) == 1 for own in places.values()):
        return {}
    count = len(batch.write_ids)
    has: list[dict[_Place, npt.NDArray[np.bool_]]] = []
    for own in entries:
        of_table: dict[_Place, npt.NDArray[np.bool_]] = {}
        for entry in own:
            place = _place_of(entry, is_buffer=is_buffer)
            in_operation = np.bincount(entry.rows.column(0).to_numpy(), minlength=count) > 0
            of_table[place] = of_table[place] | in_operation if place in of_table else in_operation
        has.append(of_table)
    refused: dict[int, MillstreamError] = {}
    for number in range(count):
        names = {
            own[0].schema.full_name: frozenset(place for place, there in of_table.items() if there[number])
            for own, of_table in zip(entries, has, strict=True)
        }
        names = {name: places for name, places in names.items() if places}
        if len(names) > 1 and not _is_one(names, is_buffer=is_buffer):
            refused[number] = _apart(names)
    return refused


def _place_of(entry: TableRows, *, is_buffer: bool) -> _Place:
    return entry.sink, entry.shard if is_buffer and entry.sink is None else None


def _places_of(entries: Sequence[TableRows], *, is_buffer: bool) -> frozenset[_Place]:
    return frozenset(_place_of(entry, is_buffer=is_buffer) for entry in entries if entry.rows.num_rows)


def _is_one(places: Mapping[str, frozenset[_Place]], *, is_buffer: bool) -> bool:
    """Return whether tables go to the same places, and to one shard of a buffer."""
    whole = frozenset().union(*places.values())
    return all(own == whole for own in places.values()) and not (is_buffer and len(whole) > 1)


def _apart(places: Mapping[str, frozenset[_Place]]) -> RoutingError:
    told = "; ".join(
        f"{name} to {' and '.join(sorted(_spoken(*place) for place in own))}" for name, own in places.items()
    )
    return RoutingError(
        f"the rows of {len(places)} tables can't be one operation, because they go to different places: {told[:1000]}",
        code="not_one_operation",
        tables=list(places),
    )


def _spoken(sink: str | None, shard: ShardId | None) -> str:
    if sink is not None:
        return f"sink {sink}"
    return "the log" if shard is None else f"shard {int(shard)} of the write buffer"
