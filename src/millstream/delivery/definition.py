"""The definition of a consumer: what it receives, in which groups, and how it acknowledges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, NoReturn

import pyarrow as pa

from millstream.delivery.sink_definition import SINKS, TRUSTED_SINKS, SinkDefinition
from millstream.delivery.sinks import names_with_key
from millstream.errors import DeliveryError, PositionError, RoutingError, UsageError
from millstream.model.as_of_parsing import is_token, parse_moment
from millstream.model.names import TablePatterns
from millstream.model.predicate import Predicate
from millstream.model.record_filter import row_schema
from millstream.model.schema import TableKind, TableSchema
from millstream.protocol.delivery.messages import Kind

NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}\Z")
KEY: Final = "key"
NO_GROUPS: Final = "none"
GroupBy = Literal["key", "none"] | tuple[str, ...]
"""`key`: the table's key. `none`: each message is a group of its own. Else these columns."""

_NUMBERS: Final[Mapping[str, tuple[int, int, int]]] = {
    "ack_wait_ms": (30_000, 100, 43_200_000),
    "max_deliver": (10, 0, 1000),
    "max_ack_pending": (1000, 1, 100_000),
}
"""The default, the least and the greatest value."""
_FIELDS: Final = ("name", "tables", "where", "columns", "kind", "group_by", "start", *_NUMBERS, "backfill", *SINKS)
REQUEST_FIELDS: Final = tuple(field for field in _FIELDS if field not in TRUSTED_SINKS)
"""The fields that a request may have; others are the configuration file's."""
START_HINT: Final = "Use `earliest`, `latest`, a token or a time."
LITERAL_HINT: Final = "Compare with a literal of its type."
_COLUMN: Final = re.compile(
    r"""\s*(?P<name>"(?:[^"]|"")+"|[^\s"]+)(?:\s+as\s+(?P<alias>"(?:[^"]|"")+"|[^\s"]+))?\s*\Z""", re.IGNORECASE
)


class Selection(NamedTuple):
    """The fields that select records, and their columns."""

    tables: tuple[str, ...] | None
    where: str | None
    columns: tuple[str, ...] | None


@dataclass(frozen=True)
class Definition:
    """A valid definition, with its defaults. Made by `parse`."""

    name: str
    tables: tuple[str, ...] | None
    """Patterns; None for all tables, and logical messages."""
    where: str | None
    columns: tuple[str, ...] | None
    kind: Kind
    group_by: GroupBy
    start: str
    ack_wait_ms: int
    max_deliver: int
    max_ack_pending: int
    backfill: bool
    sink: SinkDefinition | None = None
    """The push sink; None: clients receive the messages."""

    @classmethod
    def parse(cls, body: object, *, is_trusted: bool = False) -> Definition:
        """Read a definition from a JSON value.

        Args:
            body: the value.
            is_trusted: whether it comes from the configuration file or the home's own state, where a sink may run a command
                and reach private addresses.

        Raises:
            DeliveryError (`invalid_consumer`): a field is missing, unknown, or not valid.
        """
        if not isinstance(body, Mapping):
            _refuse("a definition is an object")
        sink = SinkDefinition.parse(body, is_trusted=is_trusted)
        unknown = [str(field) for field in body if field not in _FIELDS]
        if unknown:
            known = _FIELDS if is_trusted else REQUEST_FIELDS
            _refuse(f"there is no field {unknown[0][:80]!r}", unknown[0][:80], f"Use: {', '.join(known)}.")
        name = body.get("name")
        if not isinstance(name, str) or NAME.match(name) is None:
            what = "a consumer needs a name" if name is None else f"{str(name)[:80]!r} can't name a consumer"
            _refuse(
                what,
                "name",
                "Choose a name of lower-case letters, digits, _ and -, with a letter first and at most 63 characters.",
            )
        tables = _texts(body, "tables")
        if tables is not None:
            try:
                TablePatterns.parse(tables)
            except UsageError as error:
                _refuse(error.message, "tables", error.hint)
        where = _text(body, "where", None)
        if where is not None:
            _predicate(where)
        columns = _texts(body, "columns")
        _renamed(columns)
        kind, group_by = _kind(body), _group_by(body)
        if kind is Kind.LATEST and group_by != KEY:
            _refuse(
                "a consumer of kind latest delivers the newest state of each key, so its group_by is `key`",
                "group_by",
                "Leave group_by out, or use kind `changes`.",
            )
        backfill, start = _flag(body, "backfill"), _text(body, "start", "latest")
        assert start is not None
        _check_start(start)
        if backfill and start.strip() == "earliest":
            _refuse(
                "a consumer that starts at `earliest` can't have a backfill: there are no earlier rows",
                "backfill",
                "Leave backfill out, or start at `latest`, a token or a time.",
            )
        numbers = {field: _number(body, field) for field in _NUMBERS}
        return cls(name, tables, where, columns, kind, group_by, start, backfill=backfill, sink=sink, **numbers)

    def as_dict(self, *, masked: bool = True) -> dict[str, Any]:
        """Return every field, as JSON shows it; `parse` reads it again.

        Args:
            masked: whether secrets of the sink are replaced by `***`.
        """
        return {
            "name": self.name,
            "tables": None if self.tables is None else list(self.tables),
            "where": self.where,
            "columns": None if self.columns is None else list(self.columns),
            "kind": str(self.kind),
            "group_by": self.group_by if isinstance(self.group_by, str) else list(self.group_by),
            "start": self.start,
            "ack_wait_ms": self.ack_wait_ms,
            "max_deliver": self.max_deliver,
            "max_ack_pending": self.max_ack_pending,
            "backfill": self.backfill,
            **({} if self.sink is None else self.sink.as_fields(masked=masked)),
        }

    def differences(self, other: Definition) -> list[str]:
        """Return the fields in which another definition differs; it shows no secret."""
        own, others = self.as_dict(masked=False), other.as_dict(masked=False)
        return sorted(field for field in own.keys() | others.keys() if own.get(field) != others.get(field))

    @property
    def selection(self) -> Selection:
        """The fields that select records."""
        return Selection(self.tables, self.where, self.columns)

    @cached_property
    def predicate(self) -> Predicate | None:
        """The parsed `where`."""
        return None if self.where is None else Predicate.parse(self.where)

    @cached_property
    def renamed(self) -> Mapping[str, str] | None:
        """The new name of each chosen column, in the order of the definition; None: all columns, as they are."""
        return _renamed(self.columns)

    def names_of(self, key: Iterable[str]) -> Mapping[str, str] | None:
        """Return the new name of each column in a table's records; None: all columns, as they are.

        Args:
            key: the table's key. The sink in Kafka always gets its columns: they are the messages' key.
        """
        return names_with_key(self.renamed, key) if self.keeps_rows else self.renamed

    @cached_property
    def keeps_rows(self) -> bool:
        """Whether the sink uses records in the log's form."""
        return self.sink is not None and self.sink.kind == "kafka"

    @cached_property
    def needs_texts(self) -> bool:
        """Whether the receiver gets the records' JSON; else it is made only of a record that is shown."""
        return not self.keeps_rows or (self.sink is not None and self.sink.settings["format"] == "json")

    @cached_property
    def _patterns(self) -> TablePatterns:
        return TablePatterns.parse(self.tables or ())

    def takes(self, schema: TableSchema) -> bool:
        """Return whether the consumer receives records that were written under this schema."""
        if schema.kind is TableKind.MESSAGES:
            return self.tables is None and self.kind is Kind.CHANGES
        return self._patterns.select(schema.namespace, schema.name) and not self._lacks_key(schema)

    def leaves_out(self, schema: TableSchema) -> bool:
        """Return whether the consumer would receive a table's records if the table had a key: its kind needs one."""
        return self._lacks_key(schema) and self._patterns.select(schema.namespace, schema.name)

    def _lacks_key(self, schema: TableSchema) -> bool:
        return self.kind is Kind.LATEST and schema.kind is TableKind.TABLE and not schema.key

    def check(self, schemas: Iterable[TableSchema]) -> None:
        """Check the definition against the present tables.

        Args:
            schemas: the newest schema of each table of the stream; one without columns is of a table that has no record.

        Raises:
            DeliveryError (`invalid_consumer`): no matching table has a column of `where`, `columns` or `group_by`; a
                literal of `where` is of another type than its column in every matching table that has it; a column
                of `group_by` isn't in the replica identity of a matching table; or `tables` names a table without a
                key, which a consumer of kind `latest` can't follow.
        """
        schemas = list(schemas)
        keyless = [schema.full_name for schema in schemas if self.leaves_out(schema)]
        if keyless and self.tables is not None:
            _refuse(
                f"table {keyless[0]} has no key, so a consumer of kind latest can't follow it",
                "tables",
                f'Leave it out (`"!{keyless[0]}"`), or use kind `changes`. A table of the source can be given a primary '
                "key at any time; a table that applications write, only before its first row.",
            )
        matching = [schema for schema in schemas if schema.kind is not TableKind.MESSAGES and self.takes(schema)]
        matching = [schema for schema in matching if schema.columns]
        if not matching:
            return
        columns = {column.name for schema in matching for column in schema.columns}
        grouped = () if isinstance(self.group_by, str) else self.group_by
        named = {
            "where": () if self.predicate is None else self.predicate.columns,
            "columns": tuple(self.renamed or ()),
            "group_by": grouped,
        }
        for field, names in named.items():
            missing = [name for name in names if name not in columns]
            if missing:
                tables = ", ".join(sorted(schema.full_name for schema in matching)[:10])
                _refuse(f"no matching table has a column {missing[0]!r}", field, f"Use columns of: {tables}.")
        for schema in matching:
            key_names = self.names_of(schema.key) or {}
            if len(set(key_names.values())) < len(key_names):
                _refuse(
                    f"a column gets the name of a key column of {schema.full_name}, which Kafka's messages always have",
                    "columns",
                    f"Choose another name than {', '.join(schema.key)}.",
                )
        if self.predicate is not None and (fault := literal_fault(self.predicate, matching)) is not None:
            _refuse(fault, "where", LITERAL_HINT)
        for schema in matching if grouped else ():
            own = {column.name for column in schema.columns}
            outside = [name for name in grouped if name in own and name not in schema.identity]
            if schema.identity and outside:
                _refuse(
                    f"column {outside[0]!r} of {schema.full_name} isn't in its replica identity, so old rows lack it",
                    "group_by",
                    f"Group by {', '.join(schema.identity)}, or widen the table's replica identity.",
                )


def selection_of(fields: Iterable[Any]) -> Selection:
    """Return a selection of its fields as JSON has them."""
    tables, where, columns = fields
    return Selection(None if tables is None else tuple(tables), where, None if columns is None else tuple(columns))


def literal_fault(predicate: Predicate, schemas: Iterable[TableSchema]) -> str | None:
    """Return the problem if a literal is of another type than its column in every table that has one; else None."""
    fault: str | None = None
    for schema in schemas:
        if not {column.name for column in schema.columns}.isdisjoint(predicate.columns):
            try:
                predicate.matches(pa.RecordBatch.from_pylist([], schema=row_schema(schema.columns)))
            except RoutingError as error:
                fault = error.message.replace("the rule where", "the condition")
            else:
                return None
    return fault


def _predicate(text: str) -> Predicate:
    try:
        return Predicate.parse(text)
    except UsageError as error:
        _refuse(error.message, "where", error.hint)


def _renamed(columns: Iterable[str] | None) -> Mapping[str, str] | None:
    if columns is None:
        return None
    found: dict[str, str] = {}
    for text in columns:
        match = _COLUMN.match(text)
        if match is None:
            _refuse(
                f"{text[:80]!r} names no column",
                "columns",
                'Write `name`, or `name as other`: ["id", "total as amount"].',
            )
        name = _unquoted(match["name"])
        if name in found:
            _refuse(f"column {name!r} is named twice", "columns")
        found[name] = _unquoted(match["alias"] or match["name"])
    if not found:
        _refuse("columns is empty", "columns", "Name a column, or leave the field out for all of them.")
    if len(set(found.values())) < len(found):
        _refuse("two columns would have one name", "columns")
    return found


def _unquoted(text: str) -> str:
    return text[1:-1].replace('""', '"') if text.startswith('"') else text


def _kind(body: Mapping[str, Any]) -> Kind:
    value = _text(body, "kind", Kind.CHANGES)
    try:
        return Kind(str(value))
    except ValueError:
        raise _refusal(
            f"there are no consumers of kind {str(value)[:80]!r}", "kind", "Use `changes` or `latest`."
        ) from None


def _group_by(body: Mapping[str, Any]) -> GroupBy:
    value = body.get("group_by")
    if value is None or value == KEY:
        return "key"
    if value == NO_GROUPS:
        return "none"
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        if len(set(value)) < len(value):
            _refuse("a column is named twice", "group_by")
        return tuple(value)
    raise _refusal("group_by names no groups", "group_by", 'Use "key", "none" or a list of columns.')


def _text(body: Mapping[str, Any], field: str, default: str | None) -> str | None:
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, str):
        _refuse(f"{field} isn't a text", field)
    return value


def _texts(body: Mapping[str, Any], field: str) -> tuple[str, ...] | None:
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        _refuse(f"{field} isn't a list of texts", field, "Leave the field out for all of them.")
    return tuple(value)


def _flag(body: Mapping[str, Any], field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        _refuse(f"{field} is neither true nor false", field)
    return bool(value)


def _number(body: Mapping[str, Any], field: str) -> int:
    default, least, most = _NUMBERS[field]
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        _refuse(f"{field} isn't a whole number from {least} to {most}", field)
    return value


def _check_start(start: str) -> None:
    """Refuse a text that names no place in any log; whether a token is of the stream shows when the consumer is made."""
    if not start.strip():
        _refuse("start is empty", "start", START_HINT)
    try:
        if start not in ("earliest", "latest") and not is_token(start):
            parse_moment(start, now=datetime.now(UTC))
    except PositionError as error:
        _refuse(error.message, "start", START_HINT)


def _refuse(what: str, field: str | None = None, hint: str | None = None) -> NoReturn:
    raise _refusal(what, field, hint)


def _refusal(what: str, field: str | None = None, hint: str | None = None) -> DeliveryError:
    return DeliveryError(what, code="invalid_consumer", hint=hint, field=field)
