"""Partition templates: which partition of its table a row belongs to.

A template is text with holes:

- `{column}` is that column's value; `{created_at:%Y-%m-%d}` a timestamp's or a date's year, month …, in UTC;
- `%Y-%m-%d` outside of braces is that of the column `time`;
- `{__table}` is the table's name, `schema.table`.

Directives are `%Y %m %d %H %M %S %j`, and `%%` is a percent sign. In values `~` stands for null, also where the table
has no such column yet, and ambiguous characters are percent-encoded: two values never make one partition. Long values
are cut, with a hash appended.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import RoutingError, UsageError
from millstream.model.schema import TableSchema
from millstream.routing.hashing import is_hashable, key_hashes

TIME_COLUMN: Final = "time"
"""The column for directives outside of braces."""
PARTITIONS_MAX: Final = 1000
"""Most partitions of one call: each is an entry of the log's directory, with numbers of its own."""
_TABLE: Final = "__table"
_VALUE_CHARS_MAX: Final = 100
_DIRECTIVES: Final = {"Y": 86400, "m": 86400, "d": 86400, "j": 86400, "H": 3600, "M": 60, "S": 1}
"""For each directive, the seconds within which it stays the same, or 86400."""
_UNITS_COUNTED_MAX: Final = 4096
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.:+ -]")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Codes: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Hole:
    column: str
    moment: str | None = None
    """The directives, for a timestamp's hole."""


@dataclass(frozen=True, slots=True)
class PartitionTemplate:
    """A valid template. Made by `parse`."""

    text: str
    _parts: tuple[str | _Hole, ...]

    @classmethod
    def parse(cls, text: str) -> PartitionTemplate:
        """Read a template; raise `UsageError` with what is wrong with it."""
        parts: list[str | _Hole] = []
        for piece in re.split(r"(\{[^{}]*\}|%.)", text):
            if piece.startswith("{"):
                parts.append(_hole(text, piece[1:-1]))
            elif piece == "%%":
                parts.append("%")
            elif piece.startswith("%") and len(piece) == 2:
                _check_directives(text, piece)
                parts.append(_Hole(TIME_COLUMN, piece))
            elif set(piece) & set("{}%"):
                raise _unreadable(text, f"{piece!r} has a brace or a percent sign that belongs to no placeholder")
            elif piece:
                parts.append(piece)
        if not text:
            raise _unreadable(text, "it is empty")
        return cls(text, tuple(_joined(parts)))

    def partitions(self, schema: TableSchema, rows: pa.RecordBatch) -> tuple[list[str], Codes]:
        """Return the partitions of some rows, in order of their names, and for each row the index of its own.

        Raises:
            RoutingError (`invalid_route`): a column's type can't be in a template, or there are more than `PARTITIONS_MAX`.
        """
        names, codes = [""], np.zeros(rows.num_rows, dtype=np.int64)
        for part in self._parts:
            if isinstance(part, str):
                names = [name + part for name in names]
            elif part.column == _TABLE:
                names = [f"{name}{schema.namespace}.{schema.name}" for name in names]
            else:
                values, of_row = _values(self.text, part, schema, rows)
                names, codes = _combined(names, codes, values, of_row)
                if len(names) > PARTITIONS_MAX:
                    raise RoutingError(
                        f"rows of {schema.full_name} belong to more than {PARTITIONS_MAX} partitions of {self.text!r} in one call",
                        code="invalid_route",
                        hint="Append the rows in several calls, or use a coarser template in [streams.S.partitions].",
                        table=schema.full_name,
                    )
        order = sorted(range(len(names)), key=names.__getitem__)
        rank = np.empty(len(names), dtype=np.int64)
        rank[order] = np.arange(len(names))
        return [names[at] for at in order], rank[codes]


def _hole(text: str, inside: str) -> _Hole:
    column, _, moment = inside.partition(":")
    if not column:
        raise _unreadable(text, "braces name no column")
    if ":" in inside:
        _check_directives(text, moment)
        if "%" not in moment:
            raise _unreadable(text, f"{moment!r} has no directive such as %Y")
    if column == _TABLE and moment:
        raise _unreadable(text, "a table's name is no moment")
    return _Hole(column, moment or None)


def _check_directives(text: str, moment: str) -> None:
    for found in re.findall(r"%(.?)", moment):
        if found != "%" and found not in _DIRECTIVES:
            allowed = " ".join(f"%{one}" for one in _DIRECTIVES)
            raise _unreadable(text, f"%{found} is none of {allowed}")


def _unreadable(text: str, what: str) -> UsageError:
    return UsageError(f"the partition template {text!r} can't be read: {what}", hint="Such as {created_at:%Y-%m-%d}")


def _joined(parts: Sequence[str | _Hole]) -> list[str | _Hole]:
    """Return the parts with adjacent directives outside of braces, and the text between them, joined into one hole."""
    made: list[str | _Hole] = []
    for at, part in enumerate(parts):
        before = made[-1] if made else None
        bare = isinstance(before, _Hole) and before.column == TIME_COLUMN and before.moment is not None
        if bare and isinstance(before, _Hole):
            if isinstance(part, _Hole) and part.column == TIME_COLUMN and part.moment is not None:
                made[-1] = _Hole(TIME_COLUMN, f"{before.moment}{part.moment}")
                continue
            behind = parts[at + 1] if at + 1 < len(parts) else None
            if isinstance(part, str) and isinstance(behind, _Hole) and behind.column == TIME_COLUMN and behind.moment:
                made[-1] = _Hole(TIME_COLUMN, f"{before.moment}{part.replace('%', '%%')}")
                continue
        made.append(part)
    return made


def _values(text: str, hole: _Hole, schema: TableSchema, rows: pa.RecordBatch) -> tuple[list[str], Codes]:
    """Return the texts of a hole, and for each row the index of its own."""
    if hole.column not in rows.schema.names:
        return ["~"], np.zeros(rows.num_rows, dtype=np.int64)
    column = rows.column(hole.column)
    is_moment = pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)
    if (hole.moment is not None and not is_moment) or not is_hashable(column.type):
        raise RoutingError(
            f"column {hole.column} of {schema.full_name} is {column.type}, and its partitions {text!r} take "
            + ("a moment or a date" if hole.moment is not None else "a value that rows can be told apart by"),
            code="invalid_route",
            hint="Text isn't parsed, that of a time in JSON neither: send Arrow, or a datetime from Python; or change [streams.S.partitions]."
            if pa.types.is_string(column.type)
            else "Append rows with a timestamp in that column, or name another column in [streams.S.partitions].",
            table=schema.full_name,
            column=hole.column,
        )
    if hole.moment is not None:
        return _moments(column, hole.moment)
    found = pc.dictionary_encode(column, null_encoding="encode")
    return [_spelled(value) for value in _texts(found.dictionary)], _ints(found.indices)


def _moments(column: pa.Array, moment: str) -> tuple[list[str], Codes]:
    """Do the same as `_values`: timestamps are truncated to the least unit shown, so that each is formatted once."""
    unit = min((_DIRECTIVES[d] for d in re.findall(r"%(.)", moment) if d != "%"), default=86400)
    if pa.types.is_date(column.type):
        whole, least = column.cast(pa.date32()).cast(pa.int32()).cast(pa.int64()), max(1, unit // 86400)
    else:
        whole, least = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64()), unit * 1_000_000
    unknown = None if whole.null_count == 0 else whole.is_null().to_numpy(zero_copy_only=False)
    if unknown is not None and unknown.all():
        return ["~"], np.zeros(len(whole), dtype=np.int64)
    cut = pc.fill_null(whole, pc.min(whole)).to_numpy(zero_copy_only=False) // least
    low, high = int(cut.min()), int(cut.max())
    if high - low < _UNITS_COUNTED_MAX:
        found = np.flatnonzero(np.bincount(cut - low)) + low
        codes = np.searchsorted(found, cut) if len(found) > 1 else np.zeros(len(cut), dtype=np.int64)
    else:
        found, codes = np.unique(cut, return_inverse=True)
    names = [_written(value, unit, moment) for value in found.tolist()]
    if unknown is None:
        return names, codes
    # The placeholder for nulls is one of the values: it may have no rows of its own, which `partitions` allows.
    return [*names, "~"], np.where(unknown, len(names), codes)


def _written(value: int, unit: int, moment: str) -> str:
    try:
        when = _EPOCH + timedelta(seconds=value * unit)
    except OverflowError:
        return f"~{value * unit}"  # a year beyond Python's calendar
    parts = {
        "Y": f"{when.year:04d}", "m": f"{when.month:02d}", "d": f"{when.day:02d}", "H": f"{when.hour:02d}", "M": f"{when.minute:02d}",
        "S": f"{when.second:02d}", "j": f"{when.timetuple().tm_yday:03d}", "%": "%",
    }  # fmt: skip
    return re.sub(r"%(.)", lambda found: parts[found[1]], moment)


def _texts(values: pa.Array) -> list[str | None]:
    if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        return [None if value is None else value.hex() for value in values.to_pylist()]
    if pa.types.is_boolean(values.type):
        return [None if value is None else str(value).lower() for value in values.to_pylist()]
    return [None if value is None else str(value) for value in values.to_pylist()]


def _spelled(value: str | None) -> str:
    if value is None:
        return "~"
    if len(value) > _VALUE_CHARS_MAX:
        whole = int(key_hashes([pa.array([value])])[0])
        return f"{_encoded(value[:_VALUE_CHARS_MAX])}#{whole:016x}"
    return _encoded(value)


def _encoded(value: str) -> str:
    return "".join(
        char if _PLAIN.match(char) or ord(char) > 159 else "".join(f"%{byte:02X}" for byte in char.encode())
        for char in value
    )


def _combined(names: list[str], codes: Codes, values: list[str], of_row: Codes) -> tuple[list[str], Codes]:
    """Return the combined texts of two holes; only those that rows have."""
    if len(values) == 1:
        return [name + values[0] for name in names], codes
    if len(names) == 1:
        return [names[0] + value for value in values], of_row
    pairs, found = np.unique(codes * len(values) + of_row, return_inverse=True)
    made = [names[pair // len(values)] + values[pair % len(values)] for pair in pairs.tolist()]
    return made, found.astype(np.int64)


def _ints(indices: pa.Array) -> Codes:
    return indices.cast(pa.int64()).to_numpy()  # type: ignore[no-any-return]
