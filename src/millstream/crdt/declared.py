"""How the columns of a table merge, as the configuration declares it, and the check that they can.

A merging table is one that applications write, with a key. Each region writes rows of its own, whole, into its own
log. One word for each column declares how the regions' values of it merge.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Self

import pyarrow as pa

from millstream.errors import ReplicationError, UsageError

_UNITS_NS: Final = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86_400 * 10**9}
_SIGNAL: Final = re.compile(r"signal\((\d{1,9})(ms|s|m|h|d)(?:, *at *= *([^()]*[^() ]) *)?\)\Z")
MINUTE_NS: Final = _UNITS_NS["m"]
HOUR_NS: Final = _UNITS_NS["h"]
WINDOWS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"1h": (MINUTE_NS, 60), "24h": (HOUR_NS, 24), "7d": (HOUR_NS, 168)}
)
"""Windows in which a signal's events are counted: the width of a bucket, and how many buckets a window has."""
INCREMENTS: Final = "(increments)"
_DIGITS_MAX: Final = 38
_INTEGERS: Final = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}


class MergeKind(StrEnum):
    """How the regions' values of a column combine."""

    LWW = "lww"
    """The value of the row that was written last, in any region."""
    G_COUNTER = "g_counter"
    """The sum of what each region has counted: the greatest value that it ever wrote."""
    PN_COUNTER = "pn_counter"
    """The sum of each region's present count: the value of its newest row."""
    UNION_SET = "union_set"
    """All values that were ever in a list."""
    OR_SET = "or_set"
    """The values in a region's newest list: a region can remove what it has added."""
    SIGNAL = "signal"
    """The sum of each region's weighted events, each halved for each half-life since it happened."""
    HIDE = "hide"
    """True if any region set it true, and none set it false at a strictly later time."""


@dataclass(frozen=True, slots=True)
class ColumnMerge:
    """The merge of one column."""

    kind: MergeKind
    half_life_ns: int = 0
    """Half-life of a signal."""
    at: str = ""
    """The column that has the time of a signal's events; empty: an event's time is its commit's."""
    increments: bool = False
    """Whether rows have what is added to a counter; otherwise they have the region's total."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the merge of its word; raise `UsageError` if the word is none."""
        match = _SIGNAL.match(text)
        if match is not None and int(match[1]) > 0:
            half_life_ns = int(match[1]) * _UNITS_NS[match[2]]
            if half_life_ns < 2**63:
                return cls(MergeKind.SIGNAL, half_life_ns, match[3] or "")
        if text in set(MergeKind) - {MergeKind.SIGNAL}:
            return cls(MergeKind(text))
        if text in {f"{kind}{INCREMENTS}" for kind in _COUNTERS}:
            return cls(MergeKind(text.removesuffix(INCREMENTS)), increments=True)
        counters = [f"{kind}{INCREMENTS}" for kind in _COUNTERS]
        words = ", ".join(sorted([*(kind.value for kind in MergeKind if kind is not MergeKind.SIGNAL), *counters]))
        raise UsageError(
            f"no column merges by {text!r}",
            hint=f"There are {words}, and signal(7d) or signal(7d, at=happened), with the half-life and the column of the events' time.",
        )

    @property
    def word(self) -> str:
        """The kind's word; of a counter that takes increments with `(increments)`."""
        return f"{self.kind}{INCREMENTS if self.increments else ''}"

    @property
    def accumulates(self) -> bool:
        """Whether the column takes events that are added up."""
        return self.increments or self.kind is MergeKind.SIGNAL


_COUNTERS: Final = (MergeKind.G_COUNTER, MergeKind.PN_COUNTER)
LAST_WRITE: Final = ColumnMerge(MergeKind.LWW)


@dataclass(frozen=True, slots=True)
class TableMerge:
    """The merge of a table."""

    columns: Mapping[str, ColumnMerge] = field(default_factory=dict)
    """Columns that don't merge by `lww`, or that were declared explicitly."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", MappingProxyType(dict(self.columns)))

    def __reduce__(self) -> tuple[object, ...]:
        return (TableMerge, (dict(self.columns),))

    @classmethod
    def parse(cls, words: Mapping[str, str]) -> Self:
        """Return the merge of each column's word; raise `UsageError` if a word is none."""
        return cls({name: ColumnMerge.parse(word) for name, word in words.items()})

    def of(self, column: str) -> ColumnMerge:
        """Return how a column merges: `lww` if it isn't declared."""
        return self.columns.get(column, LAST_WRITE)

    @property
    def accumulates(self) -> bool:
        """Whether a column takes events that are added up: then a row's state depends on all records before it."""
        return any(how.accumulates for how in self.columns.values())

    @property
    def is_partial(self) -> bool:
        """Whether a row says nothing about columns that it doesn't name, as in tables with increments."""
        return bool(self.increments)

    @property
    def increments(self) -> dict[str, str]:
        """The words of the columns that take increments, by their names."""
        return {name: how.word for name, how in self.columns.items() if how.increments}

    @property
    def mentioned(self) -> tuple[str, ...]:
        """Names of all columns that the declarations mention, those of events' times included."""
        times = (how.at for how in self.columns.values() if how.at)
        return tuple(dict.fromkeys([*self.columns, *times]))

    @property
    def signals(self) -> dict[str, str]:
        """The columns that are signals, each with the column of its events' times; empty: their commit's."""
        return {name: how.at for name, how in self.columns.items() if how.kind is MergeKind.SIGNAL}

    def named(self, columns: Sequence[str], *kinds: MergeKind) -> list[str]:
        """Return those of some columns that merge by one of these kinds."""
        return [name for name in columns if self.of(name).kind in kinds]

    def check(self, table: str, columns: pa.Schema, key: Sequence[str], *, whole: bool = True) -> None:
        """Raise an error if the table can't merge like this.

        Args:
            table: the table's name, for the error.
            columns: the table's own columns.
            key: the columns of its key.
            whole: whether these are all its columns; if not, a declared column may come later.

        Raises:
            ReplicationError (`merge_unsuitable`): the table has no key, or one that can't be ordered; or a declared column is missing, is
                in the key, or has a type that doesn't merge this way. Details: table, column.
        """
        if not key:
            raise ReplicationError(
                f"{table} has no key, so its rows can't merge",
                code="merge_unsuitable",
                hint='Give the table a key: [streams.S.keys] "schema.table" = ["id"].',
                table=table,
            )
        for name in key:
            if name in self.columns:
                raise _unsuitable(table, name, "is of the key: rows that differ in it are different rows")
            at = columns.get_field_index(name)
            if at >= 0 and (pa.types.is_floating(columns.field(at).type) or pa.types.is_nested(columns.field(at).type)):
                raise _unsuitable(table, name, f"is of the key, and {columns.field(at).type} tells no rows apart")
        for name, merge in self.columns.items():
            at = columns.get_field_index(name)
            if at < 0:
                if whole:
                    raise _unsuitable(table, name, f"isn't there; {table} has {', '.join(columns.names)}")
                continue
            if not _suits(merge, columns.field(at).type):
                raise _unsuitable(table, name, f"is {columns.field(at).type}, which can't merge by {merge.word}")
            if merge.kind is MergeKind.SIGNAL:
                _check_signal(table, name, merge, columns, whole=whole)


def window_columns(signal: str) -> tuple[str, ...]:
    """Return the columns of merged rows that count a signal's events in its windows."""
    return tuple(f"{signal}__{window}" for window in WINDOWS)


def _check_signal(table: str, name: str, merge: ColumnMerge, columns: pa.Schema, *, whole: bool) -> None:
    for taken in window_columns(name):
        if taken in columns.names:
            raise _unsuitable(table, taken, f"has the name under which merged rows count the events of {name}")
    at = columns.get_field_index(merge.at)
    if at < 0:
        if whole and merge.at:
            raise _unsuitable(table, merge.at, f"isn't there, and {name} takes its events' time from it")
    elif not (pa.types.is_timestamp(columns.field(at).type) or pa.types.is_integer(columns.field(at).type)):
        raise _unsuitable(
            table, merge.at, f"is {columns.field(at).type}, neither a timestamp nor whole microseconds since 1970"
        )


def union_of(table: str, schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the columns of several regions' or versions' tables, in the narrowest types that hold all values.

    Raises:
        ReplicationError (`merge_unsuitable`): a column has types that no one type holds.
    """
    types: dict[str, pa.DataType] = {}
    for schema in schemas:
        for one in schema:
            known = types.get(one.name, one.type)
            wide = _widest(known, one.type)
            if wide is None:
                raise _unsuitable(table, one.name, f"is {known} in one region and {one.type} in another")
            types[one.name] = wide
    return pa.schema(list(types.items()))


def _widest(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if one.equals(other):
        return one
    for narrow, wide in ((one, other), (other, one)):
        if narrow in _INTEGERS:
            if wide in _INTEGERS and _INTEGERS[narrow] < _INTEGERS[wide]:
                return wide
            if pa.types.is_decimal(wide) and wide.precision - wide.scale >= _INTEGERS[narrow]:
                return wide
        if pa.types.is_float32(narrow) and pa.types.is_float64(wide):
            return wide
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        scale = max(one.scale, other.scale)
        precision = max(one.precision - one.scale, other.precision - other.scale) + scale
        return pa.decimal128(precision, scale) if precision <= _DIGITS_MAX else None
    if pa.types.is_list(one) and pa.types.is_list(other):
        items = _widest(one.value_type, other.value_type)
        return None if items is None else pa.list_(items)
    return None


_WHOLE: Final = (pa.types.is_integer,)
_EXACT: Final = (*_WHOLE, pa.types.is_decimal)
_SUITS: Final[Mapping[MergeKind, tuple[Callable[[pa.DataType], bool], ...]]] = {
    MergeKind.G_COUNTER: _EXACT,
    MergeKind.PN_COUNTER: (*_EXACT, pa.types.is_floating),
    MergeKind.SIGNAL: (*_WHOLE, pa.types.is_floating),
    MergeKind.HIDE: (pa.types.is_boolean,),
}
_ITEMS: Final[tuple[Callable[[pa.DataType], bool], ...]] = (
    *_WHOLE, pa.types.is_string, pa.types.is_binary, pa.types.is_boolean, pa.types.is_date, pa.types.is_timestamp,
)  # fmt: skip


def _suits(merge: ColumnMerge, column: pa.DataType) -> bool:
    # A region's total of increments never falls, even if the increments are floats.
    kind = MergeKind.PN_COUNTER if merge.increments else merge.kind
    if kind is MergeKind.LWW:
        return True
    if kind in {MergeKind.UNION_SET, MergeKind.OR_SET}:
        return bool(pa.types.is_list(column)) and any(fits(column.value_type) for fits in _ITEMS)
    return any(fits(column) for fits in _SUITS[kind])


def _unsuitable(table: str, column: str, why: str) -> ReplicationError:
    return ReplicationError(f"{table}.{column} {why}", code="merge_unsuitable", table=table, column=column)
