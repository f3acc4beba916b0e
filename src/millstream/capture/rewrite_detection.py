"""Detect changes of a table's definition that change rows without a message in the stream.

Such a table is copied again. PostgreSQL sends nothing of these changes:

- `ADD COLUMN … DEFAULT` gives every row a value. If that is a constant which the catalog still has, the schemas of the log
  can say so instead: `added_defaults`.
- `RENAME COLUMN` gives every row another column's values under a name.
- A change of type may rewrite every row.
- A column added under the name of a dropped one has none of its values. The log's records still hold
  those under that name.
- A partition may be detached, dropped, or truncated on its own.
- A partition may be attached. If the table has a key, the rows of that partition are copied, and no others (`attached`).
- An enum value is renamed, or a row type gains or loses a field. Rows hold numbers, which are printed by
  today's names and fields.
- A publication's column list gains a column, or its row filter changes.
- A table leaves a publication and rejoins it: its changes in between aren't sent.
- A column's rule changes (exclude, hash, redact), or the key of the hashes.

A changed key has the table copied again too: the log's deletes carry the old key.

The catalog keeps the columns (by number) and partitions as last seen. Comparing with them shows what
has happened since, even while no capture ran. Names that came and went in between show in the stream
alone: `transient_column_names`.

Whatever the catalogs can't rule out counts as a change. That may cause a needless copy, and misses nothing:

- An added column counts as filled if the catalog keeps a first default for it, or if the table has another
  file: rows may have been rewritten with a default or an identity that is gone by now. (`VACUUM FULL` and
  `TRUNCATE` only make another file.)
- A column's type counts as rewritten if its catalog row was written and the table has another file.
  (`VACUUM FULL` and `TRUNCATE` only make another file. A default that is set between the same two looks
  also writes the catalog row.)
- A table whose memberships in publications are all new ones counts as one that had left. (A schema that takes the
  place of its tables in a publication, or `SET SCHEMA` to another published schema, gives new ones too.)
- A partition with another file counts as truncated. (`VACUUM FULL`, `CLUSTER` and a `TRUNCATE` of the
  whole table make another file too.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from millstream.capture.added_defaults import AddedDefault
from millstream.capture.column_rules.binding import TEXT_OID
from millstream.capture.publication import Restriction
from millstream.capture.source_tables import AttributeFacts, PartitionFacts, SourceTable
from millstream.capture.transient_column_names import (
    Expected,
    Form,
    Judgement,
    Shape,
    Shown,
    judged,
    kept,
    numbers_of,
)
from millstream.catalog import Catalog
from millstream.model.column_rules import Rule, SourceRules
from millstream.model.exact_values import INEXACT, text_parser
from millstream.model.ids import StreamId, TableId
from millstream.model.pgtypes import log_type
from millstream.model.positions import Lsn
from millstream.model.records import log_names
from millstream.model.schema import ReplicaIdentity


class KnownLayouts:
    """The columns, key and partitions of each table as the log's rows, or those of the running copy, have them."""

    def __init__(self, catalog: Catalog, stream: StreamId, rules: SourceRules) -> None:
        self._catalog = catalog
        self._rules = rules
        self._scope = f"capture/{stream}/layout"
        self._known: dict[str, Any] = catalog.facts(self._scope)

    def renamed(self, table: SourceTable, id_: TableId) -> dict[str, str]:
        """Return the new names of columns by the old ones, if readers can follow them by the columns' numbers.

        Nothing if one of them has a name that the log alters.
        """
        known = self._known.get(str(id_))
        if known is None:
            return {}
        had = _known_names(known)
        sent = [column for column in _sent(table) if table.rules.get(column.name) is not Rule.EXCLUDE]
        names = log_names([column.name for column in sent])
        new = {c.number: name for c, name in zip(sent, names, strict=True) if had.get(c.number, name) != name}
        plain = {(number, name) for number, name, *_ in known["columns"]} >= {(n, had[n]) for n in new}
        plain = plain and {(c.number, c.name) for c in sent} >= set(new.items())
        return {had[n]: name for n, name in new.items()} if plain else {}

    def news(
        self,
        table: SourceTable,
        id_: TableId,
        sent: Restriction,
        members: set[str],
        *,
        follows: bool = False,
        apart: bool = False,
        told: Collection[int] = (),
        returned: Sequence[str] = (),
        departures_told: bool = False,
        truncates_told: bool = False,
    ) -> str | None:
        """Return what changed in the table, or in what is sent of it, that its rows in the log don't show.

        `members` are the table's memberships in publications. With `follows`, columns with the names of `renamed` are the same columns.
        With `apart`, rows of partitions that were attached are copied apart from the others.
        `told` are the numbers of new columns whose defaults schemas tell, `returned` the names of partitions that came back.
        With `departures_told` and `truncates_told`, records tell which partitions left or were truncated.
        """
        known = self._known.get(str(id_))
        if known is None:
            return None
        columns = list(_news_of_columns(known, table, self.renamed(table, id_) if follows else {}, told))
        news = [*columns, *_news_of_key(known, table)]
        news += _news_of_partitions(known, table, returned, told=departures_told)
        news += [] if apart else _news_of_attached(known, table)
        news += [*_news_of_types(known, table), *_news_of_restriction(known, table, sent)]
        news += self._news_of_rules(known, table)
        news += _news_of_members(known, members)
        # A column's new type rewrites partitions as well.
        news += [] if columns or truncates_told else _news_of_files(known, table)
        return "; ".join(news) or None

    def added_defaults(self, table: SourceTable, id_: TableId, sent: Restriction) -> dict[int, AddedDefault]:
        """Return the defaults of columns that are new since the last look, by number, if the catalog has them.

        Nothing for a column whose name the log alters or had for another column, whose type can't hold the default, or if only
        some columns are sent.
        """
        known = self._known.get(str(id_))
        kinds = {column.name: column for column in table.relation.columns}
        if known is None or (sent.columns is not None and not kinds.keys() <= {*sent.columns}):
            return {}
        had = {number for number, *_ in known["columns"]} | {*known["generated"]}
        new = [column for column in table.layout if column.number not in had and column.missing is not None]
        if not new:
            return {}
        gone = _gone(known, table)
        kept = dict(zip(kinds, log_names(list(kinds)), strict=True))
        return {
            column.number: AddedDefault(column.name, column.missing)
            for column in new
            if column.missing is not None
            and (kind := kinds.get(column.name)) is not None
            and kept[column.name] == column.name
            and column.name not in gone
            and text_parser(log_type(kind.type_oid, kind.type_modifier))(column.missing) is not INEXACT
        }

    def partitions_since(self, table: SourceTable, id_: TableId) -> frozenset[tuple[int, int, bool]]:
        """Return the OIDs of partitions that came or went since the table was last remembered: what attached them, whether they came."""
        known = self._known.get(str(id_))
        if known is None:
            return frozenset()
        before = {(int(oid), by) for oid, (_, by, _) in known["partitions"].items()}
        now = {(p.oid, p.attached_by) for p in table.partitions}
        return frozenset((oid, by, (oid, by) in now) for oid, by in now ^ before)

    def partitions_that_came(self, table: SourceTable, id_: TableId) -> list[str]:
        """Return the names of partitions that came, or came back, since the table was last remembered."""
        came = {oid for oid, _, came in self.partitions_since(table, id_) if came}
        return [part.name for part in table.partitions if part.oid in came]

    def attached(self, table: SourceTable, id_: TableId) -> list[PartitionFacts]:
        """Return the partitions without partitions below them that were attached; the stream doesn't send their rows, if any."""
        known = self._known.get(str(id_))
        return [] if known is None else _attached(known, table)

    def with_attached(self) -> frozenset[TableId]:
        """Return the tables with attached partitions that `remember` was given."""
        return frozenset(TableId(int(id_)) for id_, known in self._known.items() if known.get("attached"))

    def explained(self, id_: TableId, now: Shape, shown: Sequence[Shown], *, follows: bool = False) -> Judgement:
        """Explain the forms that records of a table showed, by what is known of its columns.

        With `follows`, records from before a rename are right.
        """
        known = self._known.get(str(id_))
        if known is None:
            return Judgement(None)
        shapes = _shapes(known)
        # If the stream shows again what a copy didn't change, another copy won't either.
        odd = known.get("odd", []) if now.is_like(shapes[-1]) else []
        left = [one for one in shown if one.stored_form() not in odd]
        return judged(left, shapes, now, follows=follows)

    def numbers(self, id_: TableId, now: Shape, shown: Sequence[Shown]) -> dict[Form, tuple[int, ...]]:
        """Return the column numbers of forms that records of a table showed; see `transient_column_names.numbers_of`."""
        known = self._known.get(str(id_))
        return {} if known is None else numbers_of(shown, _shapes(known), now)

    def renamed_since(self, id_: TableId, now: Shape, shown: Sequence[Shown]) -> dict[str, str]:
        """Return today's names of columns by those that they have in records, if the two differ."""
        found = {}
        for form, numbers in self.numbers(id_, now, shown).items():
            for (name, _), number in zip(form, numbers, strict=False):  # without numbers if there are several readings
                if number in now.columns and now.columns[number][0] != name:
                    found[name] = now.columns[number][0]
        return found

    def remember(
        self,
        table: SourceTable,
        id_: TableId,
        sent: Restriction,
        members: set[str],
        *,
        now: Shape,
        since: Lsn,
        shown: Sequence[Shown] = (),
        odd: Shown | None = None,
        copied: bool,
        attached: Sequence[PartitionFacts] = (),
    ) -> Expected:
        """Record the table's present state as that of the log's rows, or of the rows about to be copied.

        Return the form of records from here on.

        Args:
            since: the LSN from which on earlier shapes may be needed.
            odd: the one for which a copy was requested because nothing explains it.
            attached: partitions whose rows are still to be copied.
        """
        known = self._known.get(str(id_))
        gone, shapes, odd_forms = list[str](), [now], list[Any]()
        if known is not None:
            shapes = kept(_shapes(known), since)
            if now.is_like(shapes[-1]):
                odd_forms = known.get("odd", [])
            else:
                shapes.append(now)
            if not copied:
                # A copy brings the rows' present values. Without a copy, a dropped name may come back.
                today = {name for name, _ in now.columns.values()}
                gone = sorted((_gone(known, table) | {name for one in shown for name, _ in one.form}) - today)
        columns = _sent(table)
        value = {
            "relfilenode": table.relfilenode,
            "columns": [[c.number, c.name, c.type_oid, c.type_modifier] for c in columns],
            "gone": gone,
            "shapes": [shape.stored() for shape in shapes],
            "odd": odd_forms if odd is None else [*odd_forms, odd.stored_form()],
            "written_by": {str(c.number): c.written_by for c in columns},
            "generated": [c.number for c in table.layout if c not in columns],
            "parts": {str(c.number): dict(c.parts) for c in columns if c.parts},
            "listed": _listed(table, sent),
            "condition": sent.condition,
            "members": sorted(members),
            "rules": self._rules_by_number(table),
            "key": _key(table),
            "key_constraint": table.key_constraint,
            "partitions": {str(p.oid): [p.name, p.attached_by, p.relfilenode] for p in table.partitions},
            "attached": [p.oid for p in attached],
        }
        if known != value:
            self._catalog.put_fact(self._scope, str(id_), value)
            self._known[str(id_)] = value
        return Expected(now.form, is_certain=len(shapes) == 1, numbers=tuple(sorted(now.columns)))

    def forget(self, id_: TableId) -> None:
        """Delete what is recorded of a table that is gone: a relation that comes back is a new table."""
        if self._known.pop(str(id_), None) is not None:
            self._catalog.drop_fact(self._scope, str(id_))

    def raw_columns(self, table: SourceTable, id_: TableId) -> list[str]:
        """Return the log's names of columns that have a rule, or another one, while older records have their values."""
        sent = [column.name for column in table.relation.columns]
        logged = dict(zip(sent, log_names(sent), strict=True))  # without excluded columns, which no later record has
        _, columns = self._newly_ruled(table, id_)
        return sorted(logged[name] for name in columns if name in logged)

    def unruled_before(self, table: SourceTable, id_: TableId) -> list[str]:
        """Return the columns that have a rule now, and had none when older records were stored."""
        before, columns = self._newly_ruled(table, id_)
        return sorted(name for name, number in columns.items() if number not in before)

    def changed_rule(self, table: SourceTable, id_: TableId) -> str:
        """Return how a table's rules differ from those of its rows in the log; empty if they don't."""
        known = self._known.get(str(id_))
        if known is None:
            return "its rules haven't been applied yet" if table.rules else ""
        return next(self._news_of_rules(known, table), "")

    def _newly_ruled(self, table: SourceTable, id_: TableId) -> tuple[dict[str, str], dict[str, str]]:
        """Return the rules as last seen, and by name the numbers of known columns that have a rule, or another one."""
        known = self._known.get(str(id_))
        if known is None:
            return {}, {}
        before, now = known["rules"], self._rules_by_number(table)
        numbers = {str(number) for number, *_ in known["columns"]}
        names = {str(column.number): column.name for column in table.layout}
        return before, {names[n]: n for n in now if n in numbers and before.get(n) != now[n]}

    def _news_of_rules(self, known: dict[str, Any], table: SourceTable) -> Iterator[str]:
        before, now = known["rules"], self._rules_by_number(table)
        names = {str(column.number): column.name for column in table.layout}
        for number, *_ in known["columns"]:
            number_text = str(number)
            if before.get(number_text) != now.get(number_text) and number_text in names:
                yield f"the rule of column {names[number_text]} is another one"

    def _rules_by_number(self, table: SourceTable) -> dict[str, str]:
        """Return what stands for the rule of each column that has one; of a hash it shows the key's change, not the key."""
        key = self._rules.hashed(b"").decode()[:16] if Rule.HASH in table.rules.values() else ""
        return {
            str(c.number): rule.value + (f" {key}" if rule is Rule.HASH else "")
            for c in table.layout
            if (rule := table.rules.get(c.name)) is not None
        }


def shape_of(table: SourceTable, sent: Restriction, at: Lsn) -> Shape:
    """Return the table's columns as the catalogs show them.

    Args:
        table: the table, with its rules applied.
        at: an LSN at or above every change that the catalogs show.
    """
    captured = {column.name for column in table.relation.columns}
    listed = [c for c in table.layout if c.name in captured and (sent.columns is None or c.name in sent.columns)]
    names = log_names([c.name for c in listed])
    # As the log has them: a column with a rule is text.
    types = [TEXT_OID if c.name in table.rules else c.type_oid for c in listed]
    hidden = {c.number for c in table.layout if table.rules.get(c.name) is Rule.EXCLUDE}
    return Shape(
        at,
        table.numbers_max,
        {c.number: (name, type_oid) for c, name, type_oid in zip(listed, names, types, strict=True)},
        unsent=frozenset({c.number for c in table.layout} - {c.number for c in listed} - hidden),
        hidden=frozenset(hidden),
        ruled=frozenset(c.number for c in listed if c.name in table.rules),
        ruled_names=frozenset({*table.ruled_names, *log_names([*table.ruled_names])}),
        excludes=Rule.EXCLUDE in table.ruled_names.values(),
    )


def _shapes(known: dict[str, Any]) -> list[Shape]:
    """Return the shapes of earlier looks."""
    return [Shape.loaded(facts) for facts in known["shapes"]]


def _sent(table: SourceTable) -> list[AttributeFacts]:
    """Return the table's columns, except generated ones that aren't sent."""
    sent = {column.name for column in table.relation.columns}
    return [column for column in table.layout if not column.generated or column.name in sent]


def _gone(known: dict[str, Any], table: SourceTable) -> set[str]:
    """Return the log's names of columns dropped since the table's rows were last copied, as known before this look."""
    live = {column.number for column in table.layout}
    return {*known["gone"], *(name for number, name in _known_names(known).items() if number not in live)}


def _known_names(known: dict[str, Any]) -> dict[int, str]:
    """Return the log's names of the columns as last seen, by number."""
    columns = {number: name for number, name, _, _ in known["columns"]}
    return dict(zip(columns, log_names(list(columns.values())), strict=True))


def _news_of_columns(
    known: dict[str, Any], table: SourceTable, renamed: Mapping[str, str], told: Collection[int]
) -> Iterator[str]:
    before = {number: (name, type_oid, modifier) for number, name, type_oid, modifier in known["columns"]}
    generated, written_by = known["generated"], known["written_by"]
    gone, had = _gone(known, table), _known_names(known)
    sent = _sent(table)
    names = log_names([column.name for column in sent])
    files = {oid: file for oid, (_, _, file) in known["partitions"].items()}
    rewritten = table.relfilenode != known["relfilenode"] or any(
        files.get(str(p.oid), p.relfilenode) != p.relfilenode for p in table.partitions
    )
    for column, log_name in zip(sent, names, strict=True):
        if column.number in told or table.rules.get(column.name) is Rule.EXCLUDE:
            continue
        if column.number in generated:
            now = "sent by the publication" if column.generated else "one like others"
            yield f"column {column.name} was generated and not sent, and is {now} now"
        elif column.number not in before:
            if log_name in gone:
                yield f"column {column.name} was dropped and added again"
            elif column.filled:
                yield f"column {column.name} was added with a value for existing rows"
            elif rewritten:
                yield f"column {column.name} was added, and the rows were rewritten"
        else:
            name, type_oid, modifier = before[column.number]
            if renamed.get(name) == column.name:
                name = column.name
            if name != column.name:
                yield f"column {name} was renamed to {column.name}"
            elif renamed.get(had[column.number], had[column.number]) != log_name:
                yield f"column {name} is captured as {log_name} now"
            elif type_oid != column.type_oid or ((rewritten or table.partitioned) and modifier != column.type_modifier):
                yield f"column {name} got another type"
            elif rewritten and written_by.get(str(column.number), column.written_by) != column.written_by:
                yield f"column {name} was given its {'expression' if column.generated else 'type'} again"


def _news_of_types(known: dict[str, Any], table: SourceTable) -> Iterator[str]:
    for column in _sent(table):
        now = dict(column.parts)
        for part, text in known["parts"].get(str(column.number), {}).items():
            if now.get(part, text) != text:
                if part.startswith("value"):
                    yield f"value {text} of column {column.name} was renamed to {now[part]}"
                else:
                    yield f"the row type of column {column.name} has other fields"


def _listed(table: SourceTable, sent: Restriction) -> list[int]:
    """Return the numbers of the columns that are sent."""
    return [c.number for c in _sent(table) if sent.columns is None or c.name in sent.columns]


def _news_of_restriction(known: dict[str, Any], table: SourceTable, sent: Restriction) -> Iterator[str]:
    had, listed = {number for number, *_ in known["columns"]}, known["listed"]
    for number in _listed(table, sent):
        if number in had and number not in listed:
            name = next(c.name for c in table.layout if c.number == number)
            yield f"column {name} is sent by the publication now"
    if known["condition"] != sent.condition:
        yield "the publication's row filter is another one"


def _news_of_members(known: dict[str, Any], members: set[str]) -> Iterator[str]:
    before = known["members"]
    if before and members and members.isdisjoint(before):
        yield "it had left the publication"


def _key(table: SourceTable) -> list[int]:
    """Return the numbers of the key's columns, in the order of the log's schema of the table."""
    number = {column.name: column.number for column in table.layout}
    key = [number[column.name] for column in table.key]
    return key if table.replica_identity is ReplicaIdentity.FULL else sorted(key)


def _news_of_key(known: dict[str, Any], table: SourceTable) -> Iterator[str]:
    key = _key(table)
    if known["key"] != key:
        yield "its key is another one"
    elif key and table.replica_identity is ReplicaIdentity.FULL and known["key_constraint"] != table.key_constraint:
        # Rows with equal keys may have come and gone in between. Under other identities the stream shows it.
        yield "its primary key was dropped and added again"


def _news_of_partitions(
    known: dict[str, Any], table: SourceTable, returned: Sequence[str], *, told: bool
) -> Iterator[str]:
    before = known["partitions"]
    if not table.partitioned:
        return
    live = {str(p.oid): p for p in table.partitions}
    # The rows that it lost in between aren't known, even if it is empty by now.
    back = [p.name for oid, p in live.items() if oid in before and before[oid][1] != p.attached_by]
    if back := [*dict.fromkeys([*back, *returned])]:
        yield f"partition {_named(back)} was detached and attached again"
    left = [name for oid, (name, _, _) in before.items() if oid not in live]
    if left and not told:
        yield f"partition {_named(left)} was detached or dropped"


def _attached(known: dict[str, Any], table: SourceTable) -> list[PartitionFacts]:
    """Return the leaves whose rows, from before they were attached, are in no record of the log; also those without rows."""
    joined = [p for p in table.partitions if str(p.oid) not in known["partitions"]]
    waiting = set(known.get("attached", ()))
    if not all(p.born for p in joined):
        waiting |= {p.oid for p in joined}
    return [p for p in table.partitions if p.oid in waiting and p.leaf]


def _news_of_attached(known: dict[str, Any], table: SourceTable) -> Iterator[str]:
    if attached := [p for p in _attached(known, table) if p.size_bytes]:
        yield f"partition {_named([p.name for p in attached])} was attached"


def _news_of_files(known: dict[str, Any], table: SourceTable) -> Iterator[str]:
    before = known["partitions"]
    truncated = [p.name for p in table.partitions if _has_another_file(before.get(str(p.oid)), p)]
    truncated += [p.name for p in table.partitions if str(p.oid) not in before and p.refiled]
    if truncated:
        yield f"partition {_named(truncated)} was truncated or rewritten"


def _has_another_file(before: list[Any] | None, now: PartitionFacts) -> bool:
    return before is not None and before[1] == now.attached_by and before[2] != now.relfilenode


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
