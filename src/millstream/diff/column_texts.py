r"""How `diff` compares a column: expressions for PostgreSQL and DuckDB that return the same text for the same value.

The text of a row is PostgreSQL's own of a record (`ROW(…)::text`), which DuckDB is made to write too;
sums over its hashes are compared range by range. It only has to be *injective*: two rows of one text are
equal. If a text differs though the value doesn't (there are such doubles), the range's rows are fetched,
and `comparable` decides by PostgreSQL's text and the text of the lake's value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Context, Decimal, InvalidOperation
from typing import Final, Literal

import pyarrow as pa

from millstream.model.names import literal, quote
from millstream.model.pgtypes import NUMERIC_OID, element_oid, numeric_precision

HASH_BITS: Final = 60
"""Bits of a row's hash: 15 hexadecimal digits, so that it is positive and no sum overflows 128 bits."""
HASH_DIGITS: Final = HASH_BITS // 4
_INTEGER_OIDS: Final = frozenset({20, 21, 23})
_INTEGERS: Final = (pa.int16(), pa.int32(), pa.int64())
_REAL_OID: Final = 700
_FLOAT_OIDS: Final = frozenset({_REAL_OID, 701})
_DIGITS: Final = Context(prec=200_000)
"""PostgreSQL's numeric has at most 131072 digits before the point and 16383 after it."""

HashName = Literal["md5", "sha256"]


@dataclass(frozen=True, slots=True)
class ComparedColumn:
    """A column that both sides have; `lake` is None if the lake doesn't know it yet."""

    name: str
    """The column's name in the lake."""
    type_oid: int
    type_modifier: int
    lake: pa.DataType | None
    named: str = ""
    """Its name at the source, if that differs (`log_names`)."""
    hashed: bool = False
    """Whether the lake has the values' hashes (`Rule.HASH`), which the source can't compute."""

    @property
    def source_name(self) -> str:
        """Return its name at the source."""
        return self.named or self.name

    @property
    def _floating(self) -> bool:
        kind = _scalar(self.lake)
        return kind is not None and pa.types.is_floating(kind)

    @property
    def _unscaled(self) -> bool:
        """Return whether the lake keeps a number's value but not its trailing zeros after the point."""
        if self.lake is None or not pa.types.is_decimal(self.lake):
            return False
        found = numeric_precision(self.type_modifier) if self.type_oid == NUMERIC_OID else None
        return found is None or max(found[1], 0) != self.lake.scale

    def source_sql(self) -> str:
        """Return the expression for PostgreSQL's text of the value in a record."""
        name = quote(self.source_name)
        if self._floating and (self.type_oid in _FLOAT_OIDS or element_oid(self.type_oid) in _FLOAT_OIDS):
            # A real's shortest digits differ from those of the same value as a double.
            array = "[]" if pa.types.is_list(self.lake) else ""
            return f"{name}::pg_catalog.float8{array}"
        if self._unscaled and self.type_oid == NUMERIC_OID:
            return f"pg_catalog.trim_scale({name})"
        return name

    def lake_sql(self, *, with_exact: bool) -> str:
        """Return the expression for the value's text in DuckDB, as PostgreSQL prints it; NULL for null."""
        if self.lake is None:
            return "NULL::VARCHAR"
        text = _duck_text(quote(self.name), self.lake)
        if with_exact and not pa.types.is_string(self.lake):
            text = f"coalesce({text}, __exact[{literal(self.name)}])"
        if self._unscaled:
            text = f"(CASE WHEN contains({text}, '.') THEN rtrim(rtrim({text}, '0'), '.') ELSE {text} END)"
        return text

    def needs_quotes(self, *, with_exact: bool) -> bool:
        """Return whether its text may contain characters that a record's text quotes."""
        if self.lake in {*_INTEGERS, pa.bool_(), None}:
            return False
        plain = pa.types.is_decimal(self.lake) or pa.types.is_date(self.lake) or pa.types.is_floating(self.lake)
        return with_exact or not plain

    def comparable(self, text: str | None, *, of_source: bool) -> str | None:
        """Return the distinguishing part of a value's text, on either side: all of it if both sides keep it."""
        if text is None:
            return None
        if self._unscaled:
            try:
                number = Decimal(text)
            except InvalidOperation:
                return text
            return format(number.normalize(_DIGITS), "f") if number.is_finite() else text
        if self.lake == pa.float64() and self.type_oid == _REAL_OID:
            import numpy as np

            with np.errstate(over="ignore"):
                return repr(float(np.float32(text)) if of_source else float(text))
        return text


@dataclass(frozen=True, slots=True)
class RowTexts:
    """The expressions over a table's whole rows.

    Args:
        columns: all compared columns, the hashed ones last.
        key: names of the key's columns, as in the lake, the hashed ones last; empty for a bag of rows.
        ranges: the number of ranges of the key's hash (of the row's, for a bag) that rows are divided
            into.
        hash_name: the hash function; both sides need it.
    """

    columns: tuple[ComparedColumn, ...]
    key: tuple[str, ...]
    ranges: int
    hash_name: HashName = "md5"

    def _key_columns(self) -> list[ComparedColumn]:
        by_name = {column.name: column for column in self.columns}
        return [by_name[name] for name in self.key]

    @property
    def hashed(self) -> tuple[ComparedColumn, ...]:
        """Return the columns whose values are hashed."""
        return tuple(column for column in self.columns if column.hashed)

    @property
    def plain(self) -> tuple[ComparedColumn, ...]:
        """Return the other columns."""
        return tuple(column for column in self.columns if not column.hashed)

    @property
    def hashed_key(self) -> tuple[ComparedColumn, ...]:
        """Return the key's columns whose values are hashed."""
        return tuple(column for column in self._key_columns() if column.hashed)

    @property
    def source_ranges(self) -> bool:
        """Return whether the source can compute a row's range."""
        return not self.hashed or (bool(self.key) and not self.hashed_key)

    @property
    def _key_is_number(self) -> bool:
        found = self._key_columns()
        return len(found) == 1 and found[0].type_oid in _INTEGER_OIDS and found[0].lake in {*_INTEGERS, None}

    def source_sql(self, rows: str, *, utf8: bool) -> str:
        """Return a query for `(range, hash)` of every row, and the columns as they are.

        Args:
            rows: the text after FROM, including its condition.
            utf8: whether the hash is over the database's own bytes.
        """
        record = _record(column.source_sql() for column in self.columns)
        names = ", ".join(quote(column.source_name) for column in self.columns)
        key = self._source_key()
        # OFFSET 0 keeps the planner from repeating the text expressions wherever they are used.
        inner = f"SELECT {record}::pg_catalog.text AS {_T}, {key}::pg_catalog.text AS {_K}{', ' * bool(names)}{names} FROM {rows} OFFSET 0"
        hashed = f"SELECT {_pg_hash(_T, self.hash_name, utf8=utf8)} AS {_H}, * FROM ({inner}) q OFFSET 0"
        place = self._source_place(utf8=utf8) if self.key else f"{_H} % {self.ranges}"
        return f"SELECT {place} AS {_B}, {_H}{', ' * bool(names)}{names} FROM ({hashed}) p"

    def unhashed_sql(self, rows: str, *, utf8: bool) -> str:
        """Return a query for the parts of every row from which its range and hash are made once values are hashed.

        Returns:
            A query for the range (null unless the source can compute it), the texts of the plain columns as a record
            and of the key's plain columns, the columns to be hashed, and the plain ones.
        """
        record = _record(column.source_sql() for column in self.plain)
        key = self._source_key()
        names = "".join(f", {quote(column.source_name)}" for column in (*self.hashed, *self.plain))
        inner = f"SELECT {record}::pg_catalog.text AS {_T}, {key}::pg_catalog.text AS {_K}{names} FROM {rows} OFFSET 0"
        place = self._source_place(utf8=utf8) if self.source_ranges else "NULL::pg_catalog.int8"
        return f"SELECT {place} AS {_B}, {_T}, {_K}{names} FROM ({inner}) q"

    def _source_key(self) -> str:
        plain = [column.source_sql() for column in self._key_columns() if not column.hashed]
        return "NULL" if not self.key or self._key_is_number else _record(plain)

    def _source_place(self, *, utf8: bool) -> str:
        """Return the expression for a row's range by a key without hashed columns."""
        if self._key_is_number:
            return f"pg_catalog.abs({quote(self._key_columns()[0].source_name)}::pg_catalog.int8 % {self.ranges})"
        return f"{_pg_hash(_K, self.hash_name, utf8=utf8)} % {self.ranges}"

    def lake_sql(self, view: str, *, with_exact: bool) -> str:
        """Return the same query for DuckDB, over a view of the table's rows; with `__exact` if there is one."""
        exact = {"with_exact": with_exact}
        own = [quote(c.name) for c in self.columns if c.lake is not None] + ["__exact"] * with_exact
        texts = [f"{c.lake_sql(**exact)} AS __t{n}" for n, c in enumerate(self.columns)]
        inner = f"SELECT {', '.join([*texts, *own])} FROM {view}" if texts else f"FROM {view}"
        quoted = [
            f"{_duck_quoted(f'__t{n}') if c.needs_quotes(**exact) else f'__t{n}'} AS __c{n}"
            for n, c in enumerate(self.columns)
        ]
        inner = f"SELECT {', '.join([*quoted, *own])} FROM ({inner})" if quoted else inner
        row = _duck_record(f"__c{n}" for n in range(len(self.columns)))
        keep = "".join(f", {name}" for name in own)
        place = f"{_H} % {self.ranges}"
        if self._key_is_number:
            place = f"abs({quote(self.key[0])}::BIGINT % {self.ranges})"
        elif self.key:
            order = [column.name for column in self.columns]
            place = (
                f"{_duck_hash(_duck_record(f'__c{order.index(n)}' for n in self.key), self.hash_name)} % {self.ranges}"
            )
        hashed = f"SELECT {_duck_hash(row, self.hash_name)} AS {_H}, * FROM ({inner})"
        return f"SELECT {place} AS {_B}, {_H}{keep} FROM ({hashed})"


_T, _K, _H, _B = "__diff_text", "__diff_key", "__diff_hash", "__diff_range"
RANGE: Final = _B
HASH: Final = _H


def ranges_for(rows: int, size_bytes: int, *, rows_max: int, bytes_max: int) -> int:
    """Return the number of ranges for a table, so that one is likely to have no more than these rows and bytes."""
    return max(1, -(-rows // rows_max), -(-size_bytes // bytes_max))


def _scalar(kind: pa.DataType | None) -> pa.DataType | None:
    return kind.value_type if kind is not None and pa.types.is_list(kind) else kind


def _record(parts: Iterable[str]) -> str:
    return f"ROW({', '.join(parts)})"


def _pg_hash(text: str, name: HashName, *, utf8: bool) -> str:
    as_bytes = text if utf8 and name == "md5" else f"pg_catalog.convert_to({text}, 'UTF8')"
    digits = (
        f"pg_catalog.md5({as_bytes})" if name == "md5" else f"pg_catalog.encode(pg_catalog.sha256({as_bytes}), 'hex')"
    )
    return f"('x' || pg_catalog.left({digits}, {HASH_DIGITS}))::pg_catalog.bit({HASH_BITS})::pg_catalog.int8"


def _duck_hash(text: str, name: HashName) -> str:
    return f"('0x' || left({name}({text}), {HASH_DIGITS}))::BIGINT"


def _duck_record(parts: Iterable[str]) -> str:
    # A null in `||` makes all null; coalesce is what leaves nothing between two commas.
    joined = " || ',' || ".join(f"coalesce({part}, '')" for part in parts)
    return f"('(' || {joined} || ')')" if joined else "'()'"


# record_out in rowtypes.c quotes a value that is empty or holds one of these, and doubles quotes and backslashes.
_RECORD_QUOTED: Final = "'[\"\\\\(), \\t\\n\\r\\x0B\\f]'"
# array_out quotes an element that is empty, reads NULL, or holds one of these, and puts a backslash before quotes and backslashes.
_ARRAY_QUOTED: Final = "'[{}\",\\\\ \\t\\n\\r\\x0B\\f]'"


def _duck_quoted(text: str) -> str:
    doubled = f"'\"' || replace(replace({text}, '\\', '\\\\'), '\"', '\"\"') || '\"'"
    return f"CASE WHEN {text} = '' OR regexp_matches({text}, {_RECORD_QUOTED}) THEN {doubled} ELSE {text} END"


def _duck_text(value: str, kind: pa.DataType) -> str:
    """Return the expression for PostgreSQL's text of a DuckDB value of a lake type; NULL for null."""
    if pa.types.is_list(kind):
        return _duck_array(value, kind.value_type)
    if pa.types.is_boolean(kind):
        return f"CASE {value} WHEN true THEN 't' WHEN false THEN 'f' END"
    if pa.types.is_floating(kind):
        return _duck_double(value)
    if pa.types.is_timestamp(kind):
        # Through microseconds: the printed text doesn't depend on a time zone then.
        zone = "" if kind.tz is None else " || '+00'"
        return f"(make_timestamp(epoch_us({value}))::VARCHAR{zone})"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return f"('\\x' || lower(hex({value})))"
    return value if _is_text(kind) else f"{value}::VARCHAR"


def _duck_array(value: str, kind: pa.DataType) -> str:
    element = _duck_text("x", kind)
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind)):
        escaped = f"'\"' || replace(replace({element}, '\\', '\\\\'), '\"', '\\\"') || '\"'"
        special = f"{element} = '' OR lower({element}) = 'null' OR regexp_matches({element}, {_ARRAY_QUOTED})"
        element = f"CASE WHEN {special} THEN {escaped} ELSE {element} END"
    # array_to_string leaves no element out, and returns NULL for none.
    joined = (
        f"array_to_string(list_transform({value}, lambda x: CASE WHEN x IS NULL THEN 'NULL' ELSE {element} END), ',')"
    )
    return f"CASE WHEN {value} IS NULL THEN NULL ELSE '{{' || coalesce({joined}, '') || '}}' END"


def _duck_double(value: str) -> str:
    """Return the shortest digits, as PostgreSQL.

    DuckDB adds a point to integers, and an exponent from 1e16 on, not 1e15.
    """
    double = f"{value}::DOUBLE"
    text = f"({double})::VARCHAR"
    digits = f"rtrim(replace({text}, '.', ''), '0')"
    return (
        f"CASE WHEN isnan({double}) THEN 'NaN' WHEN isinf({double}) THEN CASE WHEN {double} > 0 THEN 'Infinity' ELSE '-Infinity' END"
        f" WHEN abs({double}) >= 1e15 AND abs({double}) < 1e16"
        f" THEN regexp_replace({digits}, '^(-?[0-9])([0-9]+)$', '\\1.\\2') || 'e+15'"
        f" WHEN ends_with({text}, '.0') THEN left({text}, -2) ELSE {text} END"
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view())
