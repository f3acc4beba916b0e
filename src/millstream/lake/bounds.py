"""The lowest and greatest values of a file's columns, as Delta's statistics have them: exact, so that no reader skips a file wrongly.

delta-rs (1.6) cuts timestamps to milliseconds and decimals to doubles, and readers then skip files that hold what they look for.
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
"""Characters of a text's bound; longer ones are cut to a bound that still holds."""
_LAST_CODE: Final = 0x10FFFF
_SURROGATES: Final = 0xD800
_SURROGATES_END: Final = 0xE000


class Bounds:
    """The lowest and greatest values of some columns, over batches."""

    def __init__(self, fields: Sequence[pa.Field]) -> None:
        self._fields = list(fields)
        self._low: dict[str, Any] = {}
        self._high: dict[str, Any] = {}
        self._nulls: dict[str, int] = {f.name: 0 for f in fields}

    def note(self, batch: pa.RecordBatch) -> None:
        """Take a batch's values in."""
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
        """Delta's statistics of a file of so many rows, JSON."""
        known = [f for f in self._fields if f.name in self._low]
        low = {f.name: bound_of(self._low[f.name], greatest=False) for f in known}
        high = {f.name: bound_of(self._high[f.name], greatest=True) for f in known}
        nulls = _text(self._nulls)
        return f'{{"numRecords":{rows},"minValues":{_json(low)},"maxValues":{_json(high)},"nullCount":{nulls}}}'


def _json(facts: Mapping[str, Any]) -> str:
    """An object as JSON; decimals keep all of their digits, which `json` can't be told."""
    values = (format(v, "f") if isinstance(v, Decimal) else _text(v) for v in facts.values())
    return "{" + ",".join(f"{_text(name)}:{value}" for name, value in zip(facts, values, strict=True)) + "}"


def _text(value: Any) -> str:
    """JSON without escapes: delta-rs (1.6) takes some characters beyond U+FFFF for others where they are escaped."""
    return json.dumps(value, ensure_ascii=False)


def _order(value: Any) -> Any:
    """Texts in the order of their bytes, which is Delta's."""
    return value.encode() if isinstance(value, str) else value


def boundable(columns: pa.Schema, names: Sequence[str]) -> tuple[str, ...]:
    """Those of some columns whose values all have exact bounds in Delta's statistics (a NaN and an infinity have none)."""
    # The property that lists them has no way to write these two characters.
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
    """A bound as Delta's JSON has it; cut texts are lowered or raised."""
    if isinstance(value, str) and len(value) > _TEXT_BOUND_MAX:
        return _raised(value) if greatest else value[:_TEXT_BOUND_MAX]
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
        return text if value.tzinfo is None else text + "Z"
    if isinstance(value, date):
        return value.isoformat()
    return value


def _raised(text: str) -> str:
    """A shorter text above a long one: its beginning, with the last character that has a next one raised; itself where none has."""
    for end in range(_TEXT_BOUND_MAX, 0, -1):
        code = ord(text[end - 1]) + 1
        if code <= _LAST_CODE:
            return text[: end - 1] + chr(_SURROGATES_END if _SURROGATES <= code < _SURROGATES_END else code)
    return text
