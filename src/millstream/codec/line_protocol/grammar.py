r"""InfluxDB's line protocol: the valid forms of a line, and its faults.

    measurement[,tag=value]* field=value[,field=value]* [timestamp]

- A line ends with a newline outside of a string; a carriage return before it belongs to the end.
  Blank lines, and lines whose first character other than a blank is `#`, are ignored. Blanks
  (spaces and tabs) may stand before a line and behind it, and several between its parts.
- A backslash escapes a comma or a space in a measurement, and those or an equals sign in tags and
  in fields' keys; in a string it escapes a double quote or a backslash. Before any other character
  it is literal, and the next character is read afresh: `\\,` in a tag is a backslash and an escaped
  comma, as InfluxDB reads it. A newline can't be escaped.
- A field is a float (`1`, `-.5`, `2.5e-3`), a whole number (`1i`), an unsigned one (`1u`), a string
  in double quotes, or a boolean. A float has no `+` in front, and is neither NaN nor infinite.
- An invalid line ends where it would if it were valid: at a newline outside of its strings. So the
  content of a string is never taken for a line, whatever else is invalid.

`_line_scan` finds the parts of lines by these rules, and `_values` reads the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final


class ValueKind(IntEnum):
    """The kind of a value."""

    FLOAT = 0
    INTEGER = 1
    UNSIGNED = 2
    STRING = 3
    BOOLEAN = 4
    TAG = 5


class Fault(IntEnum):
    """The fault of a line: the leftmost one."""

    NO_MEASUREMENT = 1
    NO_FIELDS = 2
    TAG_WITHOUT_KEY = 3
    TAG_WITHOUT_VALUE = 4
    TAG_WITH_EQUALS = 5
    TAG_TWICE = 6
    FIELD_WITHOUT_KEY = 7
    FIELD_WITHOUT_VALUE = 8
    NO_VALUE = 9
    NOT_FINITE = 10
    FLOAT_TOO_LARGE = 11
    INTEGER_TOO_LARGE = 12
    UNSIGNED_TOO_LARGE = 13
    STRING_WITHOUT_END = 14
    BEHIND_A_STRING = 15
    NO_TIME = 16
    TIME_TOO_FAR = 17
    BEHIND_THE_TIME = 18
    NOT_UTF8 = 19


class Refusal(IntEnum):
    """The reason to reject a valid line: a name in it, or a conflict with lines before it."""

    MEASUREMENT = 1
    COLUMN = 2
    OTHER_CASE = 3
    OTHER_KIND = 4
    TOO_MANY_COLUMNS = 5
    INFINITE = 6
    """A float that turned out too large."""
    NOT_THE_COLUMNS = 7
    """A value that its table's column, which earlier requests made, can't take."""


REASONS: Final[Mapping[Fault, str]] = {
    Fault.NO_MEASUREMENT: "it has no measurement's name",
    Fault.NO_FIELDS: "it has no fields",
    Fault.TAG_WITHOUT_KEY: "a tag has no key",
    Fault.TAG_WITHOUT_VALUE: "a tag has no value",
    Fault.TAG_WITH_EQUALS: "a tag's value has an equals sign that isn't escaped",
    Fault.TAG_TWICE: "it has a tag twice",
    Fault.FIELD_WITHOUT_KEY: "a field has no key",
    Fault.FIELD_WITHOUT_VALUE: "a field has no value",
    Fault.NO_VALUE: "a field's value is no number, no boolean and no string in double quotes",
    Fault.NOT_FINITE: "a field's value is NaN or infinite",
    Fault.FLOAT_TOO_LARGE: "a float is beyond 64 bits",
    Fault.INTEGER_TOO_LARGE: "an integer is beyond 64 bits",
    Fault.UNSIGNED_TOO_LARGE: "an unsigned integer is beyond 64 bits",
    Fault.STRING_WITHOUT_END: "a string has no end: everything that follows is part of it",
    Fault.BEHIND_A_STRING: "something follows a string that is neither a comma nor a space",
    Fault.NO_TIME: "its timestamp is no whole number",
    Fault.TIME_TOO_FAR: "its timestamp is beyond the years 1 to 9999, or beyond 64 bits",
    Fault.BEHIND_THE_TIME: "something follows its timestamp",
    Fault.NOT_UTF8: "it isn't UTF-8",
}
