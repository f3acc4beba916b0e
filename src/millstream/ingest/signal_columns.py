"""Columns that are signals: which weights they take, and which times of their events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.crdt.row_merge import UNITS_NS
from millstream.errors import InvalidValue

_TIME_MAX_NS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SignalFault:
    """A column of rows with values that aren't weights, or aren't times of events."""

    column: str
    at: pa.ChunkedArray
    """Whether each row has such a value."""
    reason: str

    def error(self, table: str) -> InvalidValue:
        """Return the error of a request with such a row."""
        return InvalidValue(f"column {self.column} of {table}: {self.reason}", table=table, column=self.column)


def check_weights(table: str, rows: pa.Table, signals: Mapping[str, str]) -> None:
    """Raise `InvalidValue` if a row has no event for a table's signals; see `weight_faults`."""
    for fault in weight_faults(rows, signals):
        raise fault.error(table)


def weight_faults(rows: pa.Table, signals: Mapping[str, str]) -> Iterator[SignalFault]:
    """Yield the columns in which rows have values that aren't weights, or times of events.

    Args:
        rows: in the log's types.
        signals: the table's signals, each with the column of its events' times; empty: their commit's.
    """
    for name, at in signals.items():
        for column, wrong, reason in (
            (name, _not_weights, "a weight of a signal is a number, 0 or more and finite"),
            (
                at,
                _not_times,
                "the time of a signal's event is a timestamp, or whole microseconds since 1970, up to 2262",
            ),
        ):
            place = rows.schema.get_field_index(column) if column else -1
            if place >= 0 and not pa.types.is_null(rows.schema.field(place).type):
                found = pc.fill_null(wrong(rows.column(place)), False)
                if pc.any(found).as_py():
                    yield SignalFault(column, found, reason)


def _not_weights(values: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_integer(values.type):
        return pc.less(values, pa.scalar(0, values.type))
    if pa.types.is_floating(values.type):
        return pc.or_(pc.invert(pc.is_finite(values)), pc.less(values, pa.scalar(0.0, values.type)))
    return values.is_valid()


def _not_times(values: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = values.type
    if pa.types.is_timestamp(kind):
        values = values.cast(pa.int64())
    elif not pa.types.is_integer(kind):
        return values.is_valid()
    most = _TIME_MAX_NS // UNITS_NS[kind.unit if pa.types.is_timestamp(kind) else "us"]
    below = pc.less(values, pa.scalar(0, values.type))
    if values.type.bit_width < 64:
        return below
    return pc.or_(below, pc.greater(values, pa.scalar(most, values.type)))
