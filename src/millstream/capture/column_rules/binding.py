"""The rules of a stream's columns, bound to the source's tables: which column of a row is left out, hashed or redacted.

A rule names a column, and is bound to the number that PostgreSQL has given the column, which never changes. Bindings
are kept in the catalog. So a rule holds after a rename of the column or the table, and also for a column that is added
later under one of the names. The OIDs of a table's partitions are kept, too: a partition that is detached still has the
values, and goes on under the rules. The catalog keeps numbers and names, never values.

A Relation message of the stream has names and no numbers, and may be older than the catalogs. `numbers_of` finds the
numbers. Columns are sent in the order of their numbers, and a column that exists today existed whenever one with a
higher number did. So the message is explained by today's columns, as far as they existed, and some of those that were
dropped since.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from millstream.capture.source_tables import AttributeFacts, SourceTable
from millstream.catalog import Catalog
from millstream.codec.pgoutput import Relation, RelationColumn
from millstream.errors import ConfigError, UnknownTable
from millstream.model.column_rules import Rule, SourceRules
from millstream.model.ids import StreamId
from millstream.model.names import qualified_name
from millstream.model.schema import ReplicaIdentity

TEXT_OID: Final = 25
RULES: Final = "rules"
"""Cause in a quarantined table's details: its rules can't be applied."""
_WAYS_MAX: Final = 2000
"""Explanations of a Relation message that are tried; a table with more of them counts as unclear."""


def rules_scope(stream: StreamId) -> str:
    """Return the scope of the catalog's facts about bound rules; a fact's name is the OID of a table."""
    return f"capture/{stream}/rules"


@dataclass(slots=True)
class _Binding:
    """The catalog's facts about a table with rules."""

    tables: set[str] = field(default_factory=set)
    """Names that the table and the partitioned tables above it had, as the configuration may write them."""
    columns: dict[int, set[str]] = field(default_factory=dict)
    """Names that each column with a rule had, by its number."""
    layout: list[list[Any]] = field(default_factory=list)
    """Number, name and type of each column, when last seen."""
    partitions: set[int] | None = None
    """OIDs of all partitions that were seen below the table; None if it isn't partitioned."""

    @classmethod
    def loaded(cls, facts: Mapping[str, Any]) -> _Binding:
        columns = {int(number): set(names) for number, names in facts["columns"].items()}
        partitions = facts.get("partitions")
        return cls(set(facts["tables"]), columns, facts["layout"], None if partitions is None else set(partitions))

    def copy(self) -> _Binding:
        columns = {n: set(names) for n, names in self.columns.items()}
        return _Binding(
            set(self.tables), columns, self.layout, None if self.partitions is None else set(self.partitions)
        )

    def aliases(self, column: str) -> set[str]:
        """Return the name of a rule's column in the configuration, with the other names that columns with the rule had."""
        return {column}.union(*(names for names in self.columns.values() if column in names))

    def stored(self) -> dict[str, Any]:
        columns = {str(number): sorted(names) for number, names in sorted(self.columns.items())}
        partitions = None if self.partitions is None else sorted(self.partitions)
        return {"tables": sorted(self.tables), "columns": columns, "layout": self.layout, "partitions": partitions}


@dataclass(frozen=True, slots=True)
class BoundRules:
    """The rules of one table, by what identifies its columns."""

    by_number: Mapping[int, Rule]
    by_name: Mapping[str, Rule]

    def of(self, number: int, name: str) -> Rule | None:
        """Return the rule of a column."""
        return self.by_number.get(number) or self.by_name.get(name)


class ColumnRules:
    """The rules of one stream, bound to its tables. Any thread.

    Args:
        catalog: keeps the bindings; None before the stream's first run, for `check` alone.
    """

    def __init__(self, catalog: Catalog | None, stream: StreamId, rules: SourceRules) -> None:
        self.rules: Final = rules
        self._catalog = catalog
        self._stream = stream
        self._scope = rules_scope(stream)
        self._lock = threading.RLock()
        bound = {} if catalog is None else catalog.facts(self._scope)
        self._bindings = {int(oid): _Binding.loaded(facts) for oid, facts in bound.items()}

    def __bool__(self) -> bool:
        return bool(self.rules)

    def concern(self, oid: int, namespace: str, name: str) -> bool:
        """Return whether a table has rules."""
        return bool(self._asked(oid, {qualified_name(namespace, name)}))

    @property
    def has_bound(self) -> bool:
        """Whether a table has or had rules."""
        return bool(self._bindings)

    def had_rules(self, relation: Relation) -> bool:
        """Return whether a table had rules, or was a partition of one that had, and has none any longer."""
        known = relation.oid in self._bindings or any(
            relation.oid in (binding.partitions or ()) for binding in list(self._bindings.values())
        )
        return known and not self.concern(relation.oid, relation.namespace, relation.name)

    def check(self, tables: Iterable[SourceTable]) -> None:
        """Check all rules against the source's tables before anything is stored.

        Raises:
            UnknownTable: a rule is for a table that isn't captured.
            ConfigError: `rule_not_captured`, `unknown_column`, `key_not_excludable` or `rule_clash`.
        """
        found = list(tables)
        known = {name for table in found for name in (self._binding(table.oid).tables | _names(table))}
        rows = [] if self._catalog is None else self._catalog.tables(self._stream)
        written = {(row.namespace, row.name) for row in rows if row.source == 0}
        for namespace, name in self.rules.tables:
            full = qualified_name(namespace, name)
            if full in known:
                continue
            if (namespace, name) in written:
                raise ConfigError(f"applications write the table {full}, which has rules", code="rule_not_captured")
            raise UnknownTable(
                f"[streams.S.tables] names {full}, which isn't a table that the stream captures",
                hint="Correct the name in [streams.S.tables], or add the table to `tables` of the stream's source.",
                table=full,
            )
        named = {qualified_name(*name) for name in self.rules.tables}
        for table in found:
            # A detached partition has its root's rules. If they don't fit, it is quarantined, and stops no other table.
            if named & (self._binding(table.oid).tables | _names(table)):
                self._bind(table, self._binding(table.oid).copy())

    def applied(self, table: SourceTable) -> SourceTable:
        """Return a table with its rules applied, and bind them; with `refusal` set if they can't be applied."""
        with self._lock:
            before = self._binding(table.oid)
            ruled, binding = self._applied(table, before.copy())
            if ruled.refusal is None and binding.stored() != before.stored():
                self._store(table.oid, binding)
        return ruled

    def _store(self, oid: int, binding: _Binding) -> None:
        assert self._catalog is not None, "a stream that runs has a catalog"
        self._catalog.put_fact(self._scope, str(oid), binding.stored())
        self._bindings[oid] = binding

    def are_as_in(self, table: SourceTable) -> bool:
        """Return whether the columns of a table that `applied` returned have the same rules still."""
        if not self or not self._asked(table.oid, _names(table)):
            return not table.rules
        numbers = {column.name: column.number for column in table.layout}
        with self._lock:
            try:
                bound = self._bind(table, self._binding(table.oid).copy())
            except ConfigError:
                return False
        columns = table.relation.columns
        return all(bound.of(numbers[c.name], c.name) is table.rules.get(c.name) for c in columns)

    def applied_unbound(self, table: SourceTable) -> SourceTable:
        """Return a table as `applied` does, and store nothing."""
        with self._lock:
            return self._applied(table, self._binding(table.oid).copy())[0]

    def _applied(self, table: SourceTable, binding: _Binding) -> tuple[SourceTable, _Binding]:
        if not self or not self._asked(table.oid, _names(table)):
            return table, binding
        try:
            return with_rules(table, self._bind(table, binding), self.rules.masked), binding
        except ConfigError as error:
            return replace(table, refusal=error, relation=replace(table.relation, columns=())), binding

    def rules_of(
        self, relation: Relation, look: Callable[[int], tuple[SourceTable, int] | None]
    ) -> tuple[Rule | None, ...] | None:
        """Return the rule of each column of a Relation message; None if the table has no rules.

        Args:
            look: reads a table's present definition by its OID, with the greatest column number that it ever had.

        Raises:
            ConfigError: the rules can't be applied, or the message's columns can't be identified (`layout_unclear`).
        """
        if not self:
            return None
        # Also at a repeated message, which may say that the table has become a partition of one with rules.
        found = look(relation.oid)
        if not self._asked(relation.oid, {relation.qualified_name} | (set() if found is None else _names(found[0]))):
            return None
        with self._lock:
            binding = self._binding(relation.oid)
            seen = binding.layout
            if found is not None:
                table, numbers_max = found
                self.applied(table)
                bound = self._bind(table, self._binding(relation.oid).copy())
                ways = list(explanations(relation.columns, table, numbers_max))
            else:
                bound = self._of_gone(relation, binding)
                ways = []
            names = [column.name for column in relation.columns]
            types = [column.type_oid for column in relation.columns]
            if [[name, type_] for _, name, type_ in seen] == [[n, t] for n, t in zip(names, types, strict=True)]:
                ways = [tuple(number for number, *_ in seen)]
            decided = {tuple(map(bound.of, way, names)) for way in ways}
            if len(decided) != 1 or (found is not None and not self._bind_shown(found[0], names, ways, bound)):
                raise ConfigError(
                    f"the columns of table {relation.qualified_name} in the stream can't be told apart: it was changed too "
                    "much since",
                    code="layout_unclear",
                    table=relation.qualified_name,
                )
        return next(iter(decided))

    def _bind_shown(
        self, table: SourceTable, names: Sequence[str], ways: Sequence[tuple[int, ...]], bound: BoundRules
    ) -> bool:
        """Bind the rules that columns of a message have by name alone to the columns: they may have other names by now.

        Return False if a column of today may be one of these, or may not.

        Raises:
            ConfigError: a column has two rules then, or one that its key can't have.
        """
        unbound = {column.number for column in table.layout} - bound.by_number.keys()
        binding = self._binding(table.oid).copy()
        asked, is_new = self._asked(table.oid, _names(table)), False
        for name, numbers in zip(names, map(set, zip(*ways, strict=True)), strict=True):
            if name not in bound.by_name or not numbers & unbound:
                continue
            if len(numbers) > 1:
                return False
            configured = {column for column in asked if name in binding.aliases(column)}
            binding.columns.setdefault(numbers.pop(), set()).update({name, *configured})
            is_new = True
        if is_new:
            self._bind(table, binding)
            self._store(table.oid, binding)
        return True

    def _binding(self, oid: int) -> _Binding:
        return self._bindings.get(oid) or _Binding()

    def _asked(self, oid: int, names: set[str]) -> dict[str, Rule]:
        """Return the rules that the configuration has for a table, under its present names and earlier ones.

        A partition has its root's rules, also after it was detached, and if a publication sends it under its own name.
        """
        if not self.rules:
            return {}
        names = self._binding(oid).tables | names
        for binding in list(self._bindings.values()):
            if oid in (binding.partitions or ()):
                names |= binding.tables
        found: dict[str, Rule] = {}
        for (asked_namespace, asked_name), columns in self.rules.tables.items():
            if qualified_name(asked_namespace, asked_name) in names:
                found |= columns
        return found

    def _bind(self, table: SourceTable, binding: _Binding) -> BoundRules:
        """Return a table's rules by number and name; note numbers and names in the binding."""
        asked = self._asked(table.oid, _names(table))
        by_number: dict[int, Rule] = {}
        by_name: dict[str, Rule] = {}
        for column, rule in asked.items():
            had = binding.aliases(column)
            numbers = {c.number for c in table.layout if c.name in had}
            numbers |= {number for number, names in binding.columns.items() if column in names}
            if not numbers:
                raise ConfigError(
                    f"table {table.full_name} never had the column {column}, for which there is a rule",
                    code="unknown_column",
                    table=table.full_name,
                    column=column,
                )
            for number in numbers:
                names = binding.columns.setdefault(number, set())
                names |= {column, *(c.name for c in table.layout if c.number == number)}
                if by_number.setdefault(number, rule) is not rule:
                    raise _clash(table, names)
                for name in names:
                    if by_name.setdefault(name, rule) is not rule:
                        raise _clash(table, names)
        bound = BoundRules(by_number, by_name)
        if asked:
            binding.tables |= _names(table)
            if table.partitioned:
                binding.partitions = (binding.partitions or set()) | {p.oid for p in table.partitions}
            binding.layout = [[c.number, c.name, c.type_oid] for c in _sent(table)]
            check_key(table, bound)
        return bound

    def _of_gone(self, relation: Relation, binding: _Binding) -> BoundRules:
        """Return the rules of a table that was dropped since the stream's message."""
        asked = self._asked(relation.oid, {relation.qualified_name})
        numbered = {
            number: rule for number, names in binding.columns.items() for name, rule in asked.items() if name in names
        }
        return BoundRules(numbered, asked)


def _names(table: SourceTable) -> set[str]:
    """Return the names whose rules a table has: its own, and those of the partitioned tables above it."""
    return {table.full_name, *(qualified_name(*ancestor) for ancestor in table.ancestors)}


def with_rules(table: SourceTable, bound: BoundRules, masked: Callable[[Rule, str], str | None]) -> SourceTable:
    """Return a table whose relation has the columns that the log gets, and whose layout has no value that it doesn't."""
    numbers = {column.name: column.number for column in table.layout}
    rules = {c.name: rule for c in table.relation.columns if (rule := bound.of(numbers[c.name], c.name)) is not None}
    columns = masked_columns(table.relation.columns, [rules.get(c.name) for c in table.relation.columns])
    layout = tuple(
        column
        if column.missing is None or (rule := bound.of(column.number, column.name)) is None
        else replace(column, missing=masked(rule, column.missing))
        for column in table.layout
    )
    relation = replace(table.relation, columns=columns)
    return replace(table, relation=relation, layout=layout, rules=rules, ruled_names=bound.by_name)


def masked_columns(columns: Sequence[RelationColumn], rules: Sequence[Rule | None]) -> tuple[RelationColumn, ...]:
    """Return the columns of a relation as the log gets them."""
    return tuple(
        column if rule is None else RelationColumn(column.name, TEXT_OID, -1, column.in_identity, "text")
        for column, rule in zip(columns, rules, strict=True)
        if rule is not Rule.EXCLUDE
    )


def check_key(table: SourceTable, bound: BoundRules) -> None:
    """Raise `key_not_excludable` if a column of the key has a rule other than `hash`."""
    numbers = {column.name: column.number for column in table.layout}
    full = table.replica_identity is ReplicaIdentity.FULL
    key = [c.name for c in table.key] if full else [c.name for c in table.relation.columns if c.in_identity]
    for name in key:
        if bound.of(numbers[name], name) not in {None, Rule.HASH}:
            raise ConfigError(
                f"column {name} is in the key of table {table.full_name}: it can be hashed, not excluded or redacted",
                code="key_not_excludable",
                table=table.full_name,
                column=name,
            )


def explanations(columns: Sequence[RelationColumn], table: SourceTable, numbers_max: int) -> Iterator[tuple[int, ...]]:
    """Yield the numbers that the columns of a Relation message may have had; nothing if there are too many ways.

    Args:
        table: the table today, with the columns that are sent.
        numbers_max: the greatest number that a column of the table ever had.
    """
    width = len(columns)
    firm = sorted(column.number for column in _sent(table) if not column.generated)
    if (exact := _by_name(columns, table.layout, firm)) is not None:
        yield exact
        return
    loose = sorted({*range(1, numbers_max + 1)} - set(firm))
    tried = 0
    for last in range(numbers_max + 1):
        must = [number for number in firm if number <= last]
        may = [number for number in loose if number < last]
        if last in loose:
            must = [*must, last]
        missing = width - len(must)
        if not 0 <= missing <= len(may):
            continue
        tried += math.comb(len(may), missing)
        if tried > _WAYS_MAX:
            return
        for some in itertools.combinations(may, missing):
            yield tuple(sorted([*must, *some]))


def _by_name(
    columns: Sequence[RelationColumn], layout: Sequence[AttributeFacts], firm: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the numbers of columns that are today's: same names and types, in order, and every one that is surely sent."""
    named = {column.name: column for column in layout}
    found = [named.get(column.name) for column in columns]
    numbers = [column.number for column in found if column is not None]
    same = all(f is not None and f.type_oid == c.type_oid for f, c in zip(found, columns, strict=True))
    return tuple(numbers) if same and numbers == sorted(numbers) and set(firm) <= set(numbers) else None


def _sent(table: SourceTable) -> list[AttributeFacts]:
    sent = {column.name for column in table.relation.columns}
    return [column for column in table.layout if column.name in sent]


def _clash(table: SourceTable, names: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"a column of table {table.full_name} has two rules, under the names {' and '.join(sorted(names))}",
        code="rule_clash",
        table=table.full_name,
    )
