"""Sums over a region's rows in the order of its log, as whole columns: running totals, and the newest named values.

A total depends on the rows and their order alone: the total of some rows, and then of those behind them, is that of
all of them, to the bit. So readers may fold a log in any steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.crdt.columns import Codes, Mask
from millstream.errors import InvalidValue

_DIGITS_MAX: Final = 38
_PLAIN_MAX: Final = 2.0**62
"""Whole numbers whose sum of absolute values is below have no total beyond 64 bits."""
_STEPS_MAX: Final = 64
"""Up to so many rows of a group are added step by step, all groups at a time; longer groups one by one."""


def unnamed(unchanged: pa.Array) -> dict[str, Mask]:
    """Return by column which of some records don't name it, from their lists of unchanged columns."""
    rows = pc.list_parent_indices(unchanged).to_numpy()
    encoded = pc.dictionary_encode(pc.list_flatten(unchanged))
    codes = np.asarray(encoded.indices)
    found: dict[str, Mask] = {}
    for code, name in enumerate(encoded.dictionary.to_pylist()):
        found[name] = np.zeros(len(unchanged), bool)
        found[name][rows[codes == code]] = True
    return found


@dataclass(frozen=True, slots=True)
class Totals:
    """The running total at each row, as of this row; null before the first value, and where it is beyond its type."""

    values: pa.Array
    beyond: Mask
    """The rows whose total is beyond the type."""

    def check(self, rows: npt.NDArray[np.int64], *, column: str, table: str | None = None) -> None:
        """Raise `InvalidValue` if the total at one of some rows is beyond its type; it names the table, if it is given."""
        if self.beyond[rows].any():
            what = "38 digits" if pa.types.is_decimal(self.values.type) else "64 bits"
            of = {} if table is None else {"table": table}
            raise InvalidValue(
                f"a total of column {column}{'' if table is None else f' of {table}'} has more than {what}",
                hint="Append an increment of the other sign, or count in a column of another name.",
                column=column,
                type=str(self.values.type),
                **of,
            )


@dataclass(frozen=True, slots=True)
class LogRuns:
    """Rows in groups, each in the order of the log."""

    order: npt.NDArray[np.int64]
    """The rows, group after group."""
    starts: npt.NDArray[np.int64]
    """For each place in `order`, where its group begins."""

    @classmethod
    def of(cls, codes: Codes) -> Self:
        """Return the runs of rows in the order of the log, by the codes of their groups."""
        order = np.argsort(codes, kind="stable")
        grouped = codes[order]
        places = np.arange(len(order))
        first = np.append(True, grouped[1:] != grouped[:-1])[: len(order)]
        return cls(order, np.maximum.accumulate(np.where(first, places, 0)) if len(order) else places)

    def last(self) -> npt.NDArray[np.int64]:
        """Return the last row of each group, in the groups' order."""
        ends = np.append(self.starts[1:] != self.starts[:-1], True)[: len(self.order)]
        found: npt.NDArray[np.int64] = self.order[ends]
        return found

    def newest(self, named: Mask) -> npt.NDArray[np.int64]:
        """Return for each row the newest row of its group until then that is named; -1 if there is none."""
        places = np.where(named[self.order], np.arange(len(self.order)), -1)
        found = np.maximum.accumulate(places) if len(places) else places
        return self._by_row(np.where(found >= self.starts, self.order[found], -1))

    def totals(self, values: pa.Array) -> Totals:
        """Return the running totals of numbers; null adds nothing."""
        ordered = values.take(pa.array(self.order))
        valid = np.asarray(ordered.is_valid())
        beyond = np.zeros(len(valid), bool)
        total: Any
        if pa.types.is_decimal(values.type):
            limit = Decimal(10) ** (_DIGITS_MAX - values.type.scale)
            total, beyond = self._exactly(ordered.to_pylist(), Decimal(0), lambda one: -limit < one < limit)
        elif pa.types.is_integer(values.type):
            numbers = ordered.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
            if float(np.abs(numbers.astype(np.float64)).sum()) < _PLAIN_MAX:
                total = self._differences(np.cumsum(numbers), numbers)
            else:
                total, beyond = self._exactly(ordered.to_pylist(), 0, lambda one: -(2**63) <= one < 2**63)
        else:
            total = self._floats(ordered.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False))
            beyond = ~np.isfinite(total)
        counts = valid.astype(np.int64)
        empty = self._differences(np.cumsum(counts), counts) == 0
        kind = pa.decimal128(_DIGITS_MAX, values.type.scale) if pa.types.is_decimal(values.type) else None
        made = pa.array(total, kind, mask=empty | beyond)
        back = self._by_row(np.arange(len(self.order)))
        return Totals(made.take(pa.array(back)), beyond[back])

    def _differences(self, sums: npt.NDArray[Any], numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return sums within groups, of sums over everything."""
        found: npt.NDArray[Any] = sums - (sums[self.starts] - numbers[self.starts])
        return found

    def _exactly(
        self, numbers: list[Any], zero: Any, fits: Callable[[Any], bool]
    ) -> tuple[npt.NDArray[np.object_], Mask]:
        """Return totals of Python's numbers, which have no limit; those that don't fit are None."""
        found = np.full(len(numbers), None, object)
        beyond = np.zeros(len(numbers), bool)
        total = zero
        with localcontext() as context:
            context.prec = 2 * _DIGITS_MAX + 4
            for place, (number, start) in enumerate(zip(numbers, self.starts.tolist(), strict=True)):
                total = zero if place == start else total
                total = total if number is None else total + number
                if fits(total):
                    found[place] = total
                else:
                    beyond[place] = True
        return found, beyond

    def _floats(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return totals that are added one after the other: rounding depends on the order."""
        total = numbers.copy()
        if not len(total):
            return total
        firsts = np.flatnonzero(self.starts == np.arange(len(total)))
        sizes = np.diff(np.append(firsts, len(total)))
        with np.errstate(over="ignore", invalid="ignore"):
            for start, size in zip(
                firsts[sizes > _STEPS_MAX].tolist(), sizes[sizes > _STEPS_MAX].tolist(), strict=True
            ):
                total[start : start + size] = np.cumsum(numbers[start : start + size])
            firsts, sizes = firsts[sizes <= _STEPS_MAX], sizes[sizes <= _STEPS_MAX]
            for step in range(1, int(sizes.max(initial=0))):
                places = firsts[sizes > step] + step
                total[places] += total[places - 1]
        return total

    def _by_row(self, ordered: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        found = np.empty_like(ordered)
        found[self.order] = ordered
        return found
