"""A table's rows as texts, by key or as a bag, and how two such sets of rows differ."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class Unknown(Enum):
    """An undetermined value: of a record with an `unchanged` value and no earlier record."""

    VALUE = "unknown"


Text = str | None | Unknown
RowText = tuple[Text, ...]


@dataclass(frozen=True, slots=True)
class TableRows:
    """All rows of a table as text, by key; without a key, a bag of rows.

    Attributes:
        columns: names, in the source's order; a row is a tuple in this order.
        key: names of the key's columns, in its index's order; empty if there is none.
        rows: by the key's values, for a table that has a key.
        bag: how often each row occurs, for a table without one.
    """

    columns: tuple[str, ...]
    key: tuple[str, ...]
    rows: dict[RowText, RowText] = field(default_factory=dict)
    bag: Counter[RowText] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.rows) + self.bag.total()

    def key_of(self, row: RowText) -> RowText:
        """Return the key's values in a row of these columns."""
        return tuple(row[self.columns.index(name)] for name in self.key)

    def add(self, row: RowText) -> bool:
        """Add a row; return False if a row of that key existed (it's replaced)."""
        if not self.key:
            self.bag[row] += 1
            return True
        key = self.key_of(row)
        new = key not in self.rows
        self.rows[key] = row
        return new


def difference(ours: TableRows, source: TableRows, *, limit: int = 10) -> list[str]:
    """Describe how rows differ from the source's: one line per key (or row), at most `limit`; empty if equal."""
    if (ours.columns, ours.key) != (source.columns, source.key):
        return [f"columns {ours.columns} key {ours.key}, but {source.columns} key {source.key} in the source"]
    lines = []
    for key in ours.rows.keys() | source.rows.keys():
        old, new = ours.rows.get(key), source.rows.get(key)
        if old != new:
            lines.append(f"{dict(zip(ours.key, key, strict=True))}: {_compare(ours.columns, old, new)}")
    bags = ((row, ours.bag[row], source.bag[row]) for row in ours.bag.keys() | source.bag.keys())
    lines += [f"{mine} times, {theirs} in the source: {row}" for row, mine, theirs in bags if mine != theirs]
    if len(lines) > limit:
        lines[limit:] = [f"and {len(lines) - limit} more"]
    return lines


def _compare(columns: tuple[str, ...], mine: RowText | None, theirs: RowText | None) -> str:
    if mine is None:
        return "missing"
    if theirs is None:
        return f"not in the source: {mine}"
    cells = zip(columns, mine, theirs, strict=True)
    return ", ".join(f"{name} is {a!r}, {b!r} in the source" for name, a, b in cells if a != b)
