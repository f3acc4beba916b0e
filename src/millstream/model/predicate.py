"""Conditions on rows (`where` of rules, consumers and tails): a small part of SQL over a row's columns.

`status = 'bot' and (score >= 0.5 or country in ('de', 'fr')) and not note is null`

Comparisons are of a column and a literal: `=`, `!=`, `<>`, `<`, `<=`, `>`, `>=`, `in (…)`, `not in (…)`, `is null`,
`is not null`. They are joined by `and`, `or`, `not` and parentheses. Literals are numbers, 'text' (a quote in it
doubled), true and false. Names are quoted by `"…"` where necessary. As in SQL, a comparison with null is unknown, and
only true matches. A column that the table lacks is null in all rows.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import RoutingError, UsageError

_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)
      | (?P<text>'(?:[^']|'')*')
      | (?P<quoted>"(?:[^"]|"")+")
      | (?P<word>[A-Za-z_]\w*)
      | (?P<mark><>|!=|<=|>=|=|<|>|\(|\)|,)
    )""",
    re.VERBOSE,
)
_COMPARED: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "=": pc.equal, "!=": pc.not_equal, "<>": pc.not_equal, "<": pc.less, "<=": pc.less_equal, ">": pc.greater, ">=": pc.greater_equal,
}  # fmt: skip
_IN_PYTHON: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq, "!=": operator.ne, "<>": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
NUMERIC_TEXT: Final[Mapping[bytes, bytes]] = {b"millstream.text": b"numeric"}
"""Metadata of a field with PostgreSQL's texts of numerics, which Arrow has no type for: numbers are compared with them."""
_WIDEST: Final = pa.decimal256(76, 38)
_KEYWORDS: Final = frozenset({"and", "or", "not", "in", "is", "null", "true", "false"})
_DEPTH_MAX: Final = 100
_TEXT_MAX: Final = 64 << 10
"""Number of characters of a predicate."""
_SHOWN_MAX: Final = 500
"""Characters of a predicate in a message."""
_INT64: Final = range(-(1 << 63), 1 << 63)

Rows: TypeAlias = pa.RecordBatch
_Test: TypeAlias = Callable[[Rows], Any]


@dataclass(frozen=True)
class Predicate:
    """A valid predicate. Made by `parse`."""

    text: str
    columns: tuple[str, ...]
    """The columns that it names, each once."""
    _test: _Test

    @classmethod
    def parse(cls, text: str) -> Predicate:
        """Read a predicate of at most 65,536 characters; raise `UsageError` with the position of an error."""
        if len(text) > _TEXT_MAX:
            raise UsageError(
                f"the predicate {_shown(text)} has {len(text)} characters, of at most {_TEXT_MAX}",
                hint="Shorten the condition, or select on another column.",
            )
        reader = _PredicateParser(text)
        test = reader.whole()
        return cls(text, tuple(dict.fromkeys(reader.columns)), test)

    def matches(self, rows: pa.RecordBatch) -> pa.BooleanArray:
        """Return for each row whether the predicate is true.

        Raises:
            RoutingError (`invalid_route`): a literal isn't of its column's type; nothing is known about any row.
        """
        found = self._test(rows)
        if isinstance(found, pa.Scalar):
            found = pa.repeat(found, rows.num_rows)
        return pc.fill_null(found, fill_value=False)


class _PredicateParser:
    """A recursive descent parser: one method for each level of precedence."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._at = 0
        self._depth = 0
        self.columns: list[str] = []

    def whole(self) -> _Test:
        test = self._either()
        if self._at < len(self._tokens):
            raise self._wrong("nothing more is expected")
        return test

    def _either(self) -> _Test:
        tests = [self._both()]
        while self._took("or"):
            tests.append(self._both())
        return _joined(pc.or_kleene, tests)

    def _both(self) -> _Test:
        tests = [self._one()]
        while self._took("and"):
            tests.append(self._one())
        return _joined(pc.and_kleene, tests)

    def _one(self) -> _Test:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise self._wrong("it is nested too deeply")
        try:
            if self._took("not"):
                inner = self._one()
                return lambda rows: pc.invert(inner(rows))
            if self._took("("):
                test = self._either()
                self._expect(")")
                return test
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> _Test:
        column = self._name()
        if self._took("is"):
            negated = self._took("not")
            self._expect("null")
            return lambda rows: _is_null(rows, column, negated=negated)
        negated = self._took("not")
        if self._took("in"):
            self._expect("(")
            values = [self._literal()]
            while self._took(","):
                values.append(self._literal())
            self._expect(")")
            test = self._any_of(column, values)
            return (lambda rows: pc.invert(test(rows))) if negated else test
        kind, word = self._next()
        if negated or kind != "mark" or word not in _COMPARED:
            self._at -= 1
            raise self._wrong("a comparison is expected, such as = or `in (…)`")
        value = self._literal()
        return self._compared(column, word, value)

    def _any_of(self, column: str, values: list[Any]) -> _Test:
        return _joined(pc.or_kleene, [self._compared(column, "=", value) for value in values])

    def _compared(self, column: str, mark: str, value: Any) -> _Test:
        def test(rows: pa.RecordBatch) -> Any:
            if column not in rows.schema.names:
                return pa.scalar(None, pa.bool_())
            own = rows.column(column)
            if _is_number(value) and dict(NUMERIC_TEXT).items() <= (rows.schema.field(column).metadata or {}).items():
                return _numerics_compared(own, mark, value)
            try:
                return _COMPARED[mark](own, _literal_of(value, own.type))
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise RoutingError(
                    f"`{self._text[:_SHOWN_MAX]}` can't be evaluated: column {column} is {own.type}, and {value!r} isn't a value of that type",
                    code="invalid_route",
                    column=column,
                ) from error

        return test

    def _name(self) -> str:
        kind, word = self._next()
        if kind == "quoted":
            word = word[1:-1].replace('""', '"')
        elif kind != "word" or word.lower() in _KEYWORDS:
            self._at -= 1
            raise self._wrong("a column is expected")
        self.columns.append(word)
        return word

    def _literal(self) -> Any:
        kind, word = self._next()
        if kind == "text":
            return word[1:-1].replace("''", "'")
        if kind == "number":
            return int(word) if re.fullmatch(r"[-+]?\d{1,30}", word) else float(word)
        if kind == "word" and word.lower() in {"true", "false"}:
            return word.lower() == "true"
        self._at -= 1
        raise self._wrong("a number, 'text', true or false is expected")

    def _next(self) -> tuple[str, str]:
        if self._at >= len(self._tokens):
            self._at += 1
            return "end", ""
        self._at += 1
        return self._tokens[self._at - 1][:2]

    def _took(self, word: str) -> bool:
        if self._at < len(self._tokens):
            kind, found, _ = self._tokens[self._at]
            if kind in {"word", "mark"} and found.lower() == word:
                self._at += 1
                return True
        return False

    def _expect(self, word: str) -> None:
        if not self._took(word):
            raise self._wrong(f"{word} is expected")

    def _wrong(self, what: str) -> UsageError:
        place = self._tokens[self._at][2] if self._at < len(self._tokens) else len(self._text)
        found = self._text[place : place + 20] or "its end"
        return UsageError(
            f"the predicate {_shown(self._text)} can't be read at {found!r}: {what}",
            hint="Such as: status = 'bot' and score > 0.5",
        )


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…")


def _tokens(text: str) -> list[tuple[str, str, int]]:
    found = []
    at, end = 0, len(text.rstrip())
    while at < end:
        token = _TOKEN.match(text, at)
        if token is None:
            raise UsageError(
                f"the predicate {_shown(text)} can't be read at {text[at:].strip()[:20]!r}",
                hint="Such as: status = 'bot' and score > 0.5",
            )
        kind = str(token.lastgroup)
        found.append((kind, token[kind], token.start(kind)))
        at = token.end()
    return found


def _literal_of(value: Any, kind: pa.DataType) -> pa.Scalar:
    """Return a literal as a value of the column's type.

    `ArrowException`, `TypeError`, `ValueError` if there is none.
    """
    t = pa.types
    if isinstance(value, bool) != t.is_boolean(kind):
        raise TypeError("of another kind")
    if _is_number(value) and not (t.is_integer(kind) or t.is_floating(kind) or t.is_decimal(kind)):
        raise TypeError("of another kind")
    if isinstance(value, str) and (t.is_integer(kind) or t.is_floating(kind)):
        raise TypeError("of another kind")
    if _is_number(value):
        return pa.scalar(Decimal(value) if isinstance(value, int) and value not in _INT64 else value)
    if isinstance(value, str) and not (t.is_string(kind) or t.is_large_string(kind)):
        return pa.scalar(value).cast(kind)
    return pa.scalar(value, kind)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numerics_compared(texts: pa.Array, mark: str, value: float) -> Any:
    """Compare PostgreSQL's texts of numerics with a number, exactly. As there, NaN is greater than all."""
    wanted = Decimal(repr(value))
    try:
        return _COMPARED[mark](texts.cast(_WIDEST), pa.scalar(wanted, _WIDEST))
    except pa.ArrowException:  # one of them isn't finite, or has more digits
        compared = _IN_PYTHON[mark]
        return pa.array(
            [None if text is None else compared(_order(text), (0, wanted)) for text in texts.to_pylist()], pa.bool_()
        )


def _order(text: str) -> tuple[int, Decimal]:
    return (1, Decimal(0)) if text == "NaN" else (0, Decimal(text))


def _is_null(rows: pa.RecordBatch, column: str, *, negated: bool) -> Any:
    if column not in rows.schema.names:
        return pa.scalar(not negated)
    return pc.is_valid(rows.column(column)) if negated else pc.is_null(rows.column(column))


def _joined(how: Callable[[Any, Any], Any], tests: Sequence[_Test]) -> _Test:
    return lambda rows: reduce(how, (test(rows) for test in tests))
