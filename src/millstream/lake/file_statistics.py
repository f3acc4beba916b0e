"""The lowest and greatest values of a file's columns for Delta's statistics: exact, so no file is skipped wrongly.

delta-rs (1.6) truncates timestamps to milliseconds and rounds decimals to doubles. Readers then skip files that
hold the values they look for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

_TEXT_BOUND_MAX: Final = 256
"""Maximum characters of a text's bound; longer texts are cut to a bound that still holds."""
_LAST_CODE: Final = 0x10FFFF
_SURROGATES: Final = 0xD800
_SURROGATES_END: Final = 0xE000


class ColumnBounds:
    """The lowest and greatest values of some columns, over batches."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        self._fields = list(fields)
        self._low: dict[str, Any] = {}
        self._high: dict[str, Any] = {}
        self._nulls: dict[str, int] = {f.name: 0 for f in fields}

    def note(self, batch: pa.RecordBatch) -> None:
        """Include a batch's values."""
        for name in self._nulls:
            self._nulls[name] += batch.column(name).null_count
        for one in self._fields:
            values = batch.column(one.name)
            found = pc.min_max(values).as_py()
            if found["min"] is None:
                continue
            low, high = self._low.get(one.name), self._high.get(one.name)
            self._low[one.name] = found["min"] if low is None else min(low, found["min"], key=_order)
            self._high[one.name] = found["max"] if high is None else max(high, found["max"], key=_order)

    def stats(self, rows: int) -> str:
        """Return Delta's statistics of a file of so many rows, as JSON."""
        known = [f for f in self._fields if f.name in self._low]
        low = {f.name: bound_of(self._low[f.name], greatest=False) for f in known}
        high = {f.name: bound_of(self._high[f.name], greatest=True) for f in known}
        nulls = _text(self._nulls)
        return f'{{"numRecords":{rows},"minValues":{_json(low)},"maxValues":{_json(high)},"nullCount":{nulls}}}'


def _json(facts: Mapping[str, Any]) -> str:
    """Return an object as JSON; decimals keep all of their digits, which `json` doesn't support."""
    values = (format(v, "f") if isinstance(v, Decimal) else _text(v) for v in facts.values())
    return "{" + ",".join(f"{_text(name)}:{value}" for name, value in zip(facts, values, strict=True)) + "}"


def _text(value: Any) -> str:
    """Return JSON without escapes: delta-rs (1.6) misreads some escaped characters beyond U+FFFF."""
    return json.dumps(value, ensure_ascii=False)


def _order(value: Any) -> Any:
    """Return a sort key that orders texts by their bytes, which is Delta's order."""
    return value.encode() if isinstance(value, str) else value


def boundable(columns: pa.Schema, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of some columns whose values all have exact bounds in Delta's statistics.

    A NaN and an infinity have none.
    """
    # The property that lists them can't represent these two characters.
    return tuple(name for name in names if _has_bounds(columns.field(name).type) and not set(name) & {",", "`"})


def _has_bounds(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_string(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_date(kind)
        or pa.types.is_decimal(kind)
    )


def bound_of(value: Any, *, greatest: bool) -> Any:
    """Return a bound as Delta's JSON has it; cut texts are lowered or raised."""
    if isinstance(value, str) and len(value) > _TEXT_BOUND_MAX:
        return _raised(value) if greatest else value[:_TEXT_BOUND_MAX]
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return text if value.tzinfo is None else text + "Z"
    if isinstance(value, date):
        return value.isoformat()
    return value


def _raised(text: str) -> str:
    """Return a shorter text above a long one; the text itself if there is none.

    It is the text's beginning, with its last character that has a successor raised.
    """
    for end in range(_TEXT_BOUND_MAX, 0, -1):
        code = ord(text[end - 1]) + 1
        if code <= _LAST_CODE:
            return text[: end - 1] + chr(_SURROGATES_END if _SURROGATES <= code < _SURROGATES_END else code)
    return text
