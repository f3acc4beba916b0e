"""The type that Debezium gives a column: its Connect schema, and the conversions of its values.

A column's type in PostgreSQL decides. Debezium leaves out columns of types that it doesn't support;
so does this module, unless `include_unknown_datatypes` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.delivery.kafka import debezium_values as values
from millstream.delivery.kafka.debezium_options import DebeziumOptions
from millstream.delivery.kafka.debezium_values import NULL, PLACEHOLDER, Fragment
from millstream.delivery.kafka.json_columns import TEXTS, joined, quoted_column
from millstream.model.column_texts import render_column
from millstream.model.exact_values import array_elements
from millstream.model.pgtypes import DECIMAL_DIGITS_MAX, element_oid
from millstream.model.schema import Column

_PLACEHOLDER_TEXT: Final = f'"{PLACEHOLDER}"'
_PLACEHOLDER_NUMBERS: Final = "[" + ",".join(str(byte) for byte in PLACEHOLDER.encode()) + "]"
_PLACEHOLDER_UUID: Final = '["b68a35a7-17ad-35b3-af2a-ae46edb4545a"]'
"""Java's `UUID.nameUUIDFromBytes` of the placeholder."""
_DECIMAL: Final = "org.apache.kafka.connect.data.Decimal"
_FIRST_USER_OID: Final = 16384
_BITS_WITHOUT_LENGTH: Final = 2147483647
_FIXED_MIN: Final = 1e-4
"""From here on, below `_FIXED_MAX`, neither Python nor Arrow writes a float with an exponent."""
_FIXED_MAX: Final = 1e9

_OID_BY_ARROW: Final[dict[pa.DataType, int]] = {
    pa.bool_(): 16,
    pa.binary(): 17,
    pa.int64(): 20,
    pa.int16(): 21,
    pa.int32(): 23,
    pa.string(): 25,
    pa.float32(): 700,
    pa.float64(): 701,
    pa.date32(): 1082,
}
"""PostgreSQL's type for a column that an application appends."""


@dataclass(frozen=True, slots=True)
class Converter:
    """How one column is sent."""

    schema: Mapping[str, Any]
    """Connect's schema, without `optional` and `field`."""
    text: Fragment
    """Return PostgreSQL's text of a value as JSON."""
    unavailable: str = NULL
    """JSON in the place of a value that an update left unchanged and PostgreSQL didn't send."""
    fast: Callable[[pa.Array], pa.Array] | None = None
    """Return a column's values as JSON in a `TEXTS` array, null for NULL; the same as `text` of each."""

    def field(self, name: str | None, *, optional: bool) -> dict[str, Any]:
        """Return the schema of a field of this type, in Connect's order; without a name, of an array's items."""
        head = {key: self.schema[key] for key in ("type", "fields", "items") if key in self.schema}
        rest = {key: value for key, value in self.schema.items() if key not in head}
        return {**head, "optional": optional, **rest, **({} if name is None else {"field": name})}

    def column(self, array: pa.Array, column: Column) -> pa.Array:
        """Return a log column's values as JSON in a `TEXTS` array; `null` for NULL and for values in `__exact`."""
        if self.fast is not None:
            return pc.fill_null(self.fast(array), NULL)
        text = self.text
        return pa.array([NULL if value is None else text(value) for value in render_column(array, column)], TEXTS)

    def in_header(self, value: str) -> str:
        """Return a value's JSON as it stands in a header: a decimal by its digits."""
        if self.schema.get("name") != _DECIMAL or value == NULL:
            return value
        return values.digits(value, int(self.schema["parameters"]["scale"]))


def converter(column: Column, options: DebeziumOptions) -> Converter | None:
    """Return how a column is sent; None if it is left out."""
    oid, modifier, is_list = _postgres_type(column)
    element = oid if is_list else element_oid(oid)
    if element is not None:
        inner = _scalar(element, modifier, options)
        return _unknown(options) if inner is None or element in _NO_ARRAYS else _array(element, inner)
    found = _scalar(oid, modifier, options)
    return _unknown(options) if found is None else found


def _postgres_type(column: Column) -> tuple[int, int, bool]:
    """Return a column's oid, its modifier, and whether it is a list of that type: of an application's table."""
    if column.pg is not None:
        return column.pg.oid, column.pg.modifier, False
    kind, is_list = column.arrow, pa.types.is_list(column.arrow)
    if is_list:
        kind = kind.value_type
    if pa.types.is_decimal(kind):
        return 1700, (kind.precision << 16 | kind.scale) + 4, is_list
    if pa.types.is_timestamp(kind):
        return 1114 if kind.tz is None else 1184, -1, is_list
    return _OID_BY_ARROW.get(kind, 25), -1, is_list


def _unknown(options: DebeziumOptions) -> Converter | None:
    if not options.include_unknown_datatypes:
        return None
    found = _binary(options)
    encode = _BINARY[options.binary_handling_mode]
    return Converter(found.schema, lambda text: encode(text.encode()), found.unavailable)


def _array(oid: int, inner: Converter) -> Converter:
    text = inner.text

    def convert(written: str) -> str:
        elements = array_elements(written)
        if elements is None and written.startswith("["):  # a lower bound other than 1
            elements = array_elements(written[written.index("=") + 1 :])
        if elements is None:  # several dimensions: Debezium has a null for each of the first
            return "[" + ",".join([NULL] * _length(written)) + "]"
        return "[" + ",".join(NULL if item is None else text(item) for item in elements) + "]"

    kind = inner.schema["type"]
    if oid == 2950:
        unavailable = _PLACEHOLDER_UUID
    elif oid in {20, 23} or (oid == 1082 and kind == "int32"):
        unavailable = _PLACEHOLDER_NUMBERS
    elif (inner.unavailable != NULL and "name" not in inner.schema) or oid in {114, 3802}:
        unavailable = f"[{inner.unavailable}]"
    else:
        unavailable = NULL
    schema = {"type": "array", "items": inner.field(None, optional=oid != 3614)}
    return Converter(schema, convert, unavailable)


def _length(written: str) -> int:
    """Return how many elements an array's text has in its first dimension."""
    depth = count = 0
    is_quoted = False
    at = written.index("=") + 1 if written.startswith("[") else 0
    while at < len(written):
        character = written[at]
        if character == "\\":
            at += 1
        elif character == '"':
            is_quoted = not is_quoted
        elif not is_quoted and character in "{}":
            count += depth == 1 and character == "{"
            depth += 1 if character == "{" else -1
        at += 1
    return count


def _named(kind: str, name: str, **parameters: str) -> dict[str, Any]:
    return {"type": kind, "name": name, "version": 1, **({"parameters": parameters} if parameters else {})}


def _connect(kind: str, name: str) -> dict[str, Any]:
    return _named(kind, f"org.apache.kafka.connect.data.{name}")


TEXT: Final = Converter({"type": "string"}, values.quoted, _PLACEHOLDER_TEXT)
"""PostgreSQL's text of any type."""


def _logical_string(name: str) -> Converter:
    return Converter(_named("string", f"io.debezium.data.{name}"), values.quoted, _PLACEHOLDER_TEXT, quoted_column)


def _cast_column(array: pa.Array) -> pa.Array:
    return array.cast(TEXTS)


def _bool_column(array: pa.Array) -> pa.Array:
    return pc.if_else(array, pa.scalar("true", TEXTS), pa.scalar("false", TEXTS))


def _double_column(array: pa.Array) -> pa.Array:
    numbers = pc.fill_null(array, 0.0).to_numpy(zero_copy_only=False)
    sizes = np.abs(numbers)
    if np.all((sizes == 0.0) | ((sizes >= _FIXED_MIN) & (sizes < _FIXED_MAX))):
        # Without an exponent, Arrow writes the digits that Python writes, but a whole number without a point.
        ends = pc.if_else(pa.array(numbers == np.floor(numbers)), pa.scalar(".0", TEXTS), pa.scalar("", TEXTS))
        return joined(array.cast(TEXTS), ends)
    number = values.number
    return pa.array([None if value is None else number(value) for value in array.to_pylist()], TEXTS)


_PLAIN: Final[dict[int, Converter]] = {
    16: Converter({"type": "boolean"}, values.boolean, fast=_bool_column),
    18: TEXT,
    19: Converter({"type": "string"}, values.quoted, _PLACEHOLDER_TEXT, quoted_column),
    20: Converter({"type": "int64"}, values.same, fast=_cast_column),
    21: Converter({"type": "int16"}, values.same, fast=_cast_column),
    22: Converter({"type": "array", "items": {"type": "int16", "optional": False}}, values.numbers),
    23: Converter({"type": "int32"}, values.same, fast=_cast_column),
    25: Converter({"type": "string"}, values.quoted, _PLACEHOLDER_TEXT, quoted_column),
    26: Converter({"type": "int64"}, values.same),
    30: Converter({"type": "array", "items": {"type": "int64", "optional": False}}, values.numbers),
    114: _logical_string("Json"),
    142: _logical_string("Xml"),
    600: Converter(
        {
            "type": "struct",
            "fields": [
                {"type": "double", "optional": False, "field": "x"},
                {"type": "double", "optional": False, "field": "y"},
                {"type": "bytes", "optional": True, "field": "wkb"},
                {"type": "int32", "optional": True, "field": "srid"},
            ],
            "name": "io.debezium.data.geometry.Point",
            "version": 1,
            "doc": "Geometry (POINT)",
        },
        values.point,
    ),
    700: Converter({"type": "float"}, values.floating),
    701: Converter({"type": "double"}, values.floating, fast=_double_column),
    1042: Converter({"type": "string"}, values.quoted, _PLACEHOLDER_TEXT, quoted_column),
    1043: Converter({"type": "string"}, values.quoted, _PLACEHOLDER_TEXT, quoted_column),
    1266: Converter(_named("string", "io.debezium.time.ZonedTime"), values.zoned_time),
    2950: _logical_string("Uuid"),
    3614: _logical_string("Tsvector"),
    3802: _logical_string("Json"),
    # inet, cidr, macaddr, macaddr8, and the ranges
    **dict.fromkeys((869, 650, 829, 774, 3904, 3926, 3906, 3908, 3910, 3912), TEXT),
}
_NO_ARRAYS: Final = frozenset({19, 142, 22, 30, 600, 790, 1186, 1560, 1562})
"""Types that Debezium supports, but arrays of which it doesn't."""

_BINARY: Final[dict[str, Callable[[bytes], str]]] = {
    "bytes": values.base64,
    "base64": values.base64,
    "base64-url-safe": values.base64_url_safe,
    "hex": values.hexadecimal,
}


def binary_json(options: DebeziumOptions) -> Callable[[bytes], str]:
    """Return the conversion of bytes to JSON."""
    return _BINARY[options.binary_handling_mode]


def _binary(options: DebeziumOptions) -> Converter:
    encode = _BINARY[options.binary_handling_mode]

    def fast(array: pa.Array) -> pa.Array:
        return pa.array([None if value is None else encode(value) for value in array.to_pylist()], TEXTS)

    schema = {"type": "bytes" if options.binary_handling_mode == "bytes" else "string"}
    # Hexadecimal digits are no reason for Debezium to encode the placeholder.
    unavailable = _PLACEHOLDER_TEXT if options.binary_handling_mode == "hex" else encode(PLACEHOLDER.encode())
    return Converter(schema, lambda text: encode(values.bytea(text)), unavailable, fast)


def _scalar(oid: int, modifier: int, options: DebeziumOptions) -> Converter | None:
    """Return how a type that isn't an array is sent; None if Debezium doesn't support it."""
    plain = _PLAIN.get(oid)
    if plain is not None:
        return plain
    make = _MADE.get(oid)
    if make is not None:
        return make(modifier, options)
    # An enum, a domain, a composite or an extension's type: the log can't tell which.
    return TEXT if oid >= _FIRST_USER_OID else None


def _numeric(oid: int, modifier: int, mode: str) -> Converter:
    """Return how a numeric or money column is sent."""
    is_money = oid == 790
    plain: Fragment = values.money_text if is_money else values.same
    scale = 2 if is_money else (modifier - 4) & 0xFFFF if modifier >= 4 else None
    if mode == "double":
        return Converter({"type": "double"}, lambda text: values.floating(plain(text)))
    if mode == "string":
        write = values.decimal_text(scale)
        return Converter({"type": "string"}, lambda text: write(plain(text)), _PLACEHOLDER_TEXT)
    if scale is None:
        fields = [
            {"type": "int32", "optional": False, "field": "scale"},
            {"type": "bytes", "optional": False, "field": "value"},
        ]
        name = "io.debezium.data.VariableScaleDecimal"
        schema = {"type": "struct", "fields": fields, "name": name, "version": 1, "doc": "Variable scaled decimal"}
        return Converter(schema, values.variable_decimal)
    parameters = {"scale": str(scale)}
    if not is_money:
        parameters["connect.decimal.precision"] = str(((modifier - 4) >> 16) & 0xFFFF)
    write = values.decimal(scale)
    schema = {"type": "bytes", "name": _DECIMAL, "version": 1, "parameters": parameters}
    return Converter(schema, lambda text: write(plain(text)), fast=None if is_money else _decimal_column(scale))


def _decimal_column(scale: int) -> Callable[[pa.Array], pa.Array] | None:
    """Return the conversion of a column of decimals by their unscaled integers."""
    if scale > DECIMAL_DIGITS_MAX:  # a negative scale, or a column that is text
        return None

    def convert(array: pa.Array) -> pa.Array:
        if not pa.types.is_decimal128(array.type) or array.type.scale != scale:
            write = values.decimal(scale)
            texts = array.cast(pa.string()).to_pylist()
            return pa.array([None if text is None else write(text) for text in texts], TEXTS)
        data, start = memoryview(array.buffers()[1] or b""), array.offset
        numbers = [
            values.unscaled(int.from_bytes(data[i * 16 : i * 16 + 16], "little", signed=True)) if valid else None
            for i, valid in enumerate(array.is_valid().to_pylist(), start)
        ]
        return pa.array(numbers, TEXTS)

    return convert


def _date(mode: str) -> Converter:
    if mode == "isostring":
        schema = _named("string", "io.debezium.time.IsoDate")
        return Converter(schema, lambda text: f'"{values.iso_date(values.date_days(text))}Z"')

    def fast(array: pa.Array) -> pa.Array:
        return _cast_column(array.cast(pa.int32()))

    schema = _connect("int32", "Date") if mode == "connect" else _named("int32", "io.debezium.time.Date")
    return Converter(schema, lambda text: str(values.date_days(text)), fast=fast)


def _time(modifier: int, mode: str) -> Converter:
    if mode == "isostring":
        schema = _named("string", "io.debezium.time.IsoTime")
        return Converter(schema, lambda text: f'"{values.iso_time(values.time_us(text))}Z"')
    if mode == "connect" or (mode == "adaptive" and 0 <= modifier <= 3):
        schema = _connect("int32", "Time") if mode == "connect" else _named("int32", "io.debezium.time.Time")
        return Converter(schema, lambda text: str(values.time_us(text) // 1000))
    if mode == "nanoseconds":
        schema = _named("int64", "io.debezium.time.NanoTime")
        return Converter(schema, lambda text: str(values.time_us(text) * 1000))
    return Converter(_named("int64", "io.debezium.time.MicroTime"), lambda text: str(values.time_us(text)))


def _timestamp(modifier: int, mode: str) -> Converter:
    if mode == "isostring":
        schema = _named("string", "io.debezium.time.IsoTimestamp")
        return Converter(schema, lambda text: f'"{values.iso_timestamp(values.timestamp_us(text))}"')
    if mode == "connect" or (mode.startswith("adaptive") and 0 <= modifier <= 3):
        schema = _connect("int64", "Timestamp") if mode == "connect" else _named("int64", "io.debezium.time.Timestamp")
        return Converter(schema, lambda text: str(values.timestamp_us(text) // 1000), fast=_milliseconds)
    if mode == "nanoseconds":
        schema = _named("int64", "io.debezium.time.NanoTimestamp")
        return Converter(schema, lambda text: values.wrapped(values.timestamp_us(text) * 1000))
    schema = _named("int64", "io.debezium.time.MicroTimestamp")
    return Converter(schema, lambda text: values.wrapped(values.timestamp_us(text)), fast=_microseconds)


def _microseconds(array: pa.Array) -> pa.Array:
    return _cast_column(array.cast(pa.int64()))


def _milliseconds(array: pa.Array) -> pa.Array:
    micros = array.cast(pa.int64()).to_pylist()  # Arrow's division rounds towards zero
    return pa.array([None if value is None else str(value // 1000) for value in micros], TEXTS)


def _zoned_timestamp(modifier: int, options: DebeziumOptions) -> Converter:  # noqa: ARG001 — as all of `_MADE`
    schema = _named("string", "io.debezium.time.ZonedTimestamp")
    digits = 6 if modifier < 0 else modifier

    def fast(array: pa.Array) -> pa.Array:
        texts = array.cast(pa.timestamp("us")).cast(TEXTS)  # always six digits behind the point
        texts = pc.utf8_slice_codeunits(texts, 0, 20 + digits if digits else 19)
        return joined('"', pc.replace_substring(texts, " ", "T"), 'Z"')

    return Converter(schema, values.zoned_timestamp(digits), fast=fast)


def _interval(modifier: int, options: DebeziumOptions) -> Converter:  # noqa: ARG001 — as all of `_MADE`
    if options.interval_handling_mode == "string":
        return Converter(_named("string", "io.debezium.time.Interval"), values.interval_text)
    return Converter(_named("int64", "io.debezium.time.MicroDuration"), values.interval_us)


def _bits(modifier: int, options: DebeziumOptions) -> Converter:  # noqa: ARG001 — as all of `_MADE`
    if modifier == 1:
        return Converter({"type": "boolean"}, values.bit)
    length = modifier if modifier > 0 else _BITS_WITHOUT_LENGTH
    return Converter(_named("bytes", "io.debezium.data.Bits", length=str(length)), values.bits)


_MADE: Final[dict[int, Callable[[int, DebeziumOptions], Converter]]] = {
    17: lambda _, options: _binary(options),
    790: lambda modifier, options: _numeric(790, modifier, options.decimal_handling_mode),
    1082: lambda _, options: _date(options.time_precision_mode),
    1083: lambda modifier, options: _time(modifier, options.time_precision_mode),
    1114: lambda modifier, options: _timestamp(modifier, options.time_precision_mode),
    1184: _zoned_timestamp,
    1186: _interval,
    1560: _bits,
    1562: _bits,
    1700: lambda modifier, options: _numeric(1700, modifier, options.decimal_handling_mode),
}
"""Types whose form depends on the modifier or on the options."""
