"""Columns under names that came and went between two looks at the source's catalogs.

A record in the log has the names of its moment. PostgreSQL sends names without column numbers, and the catalogs are
read every few seconds only. A column that is renamed and renamed back in between, or one that is dropped and added
again, looks untouched. Records from in between then have its values under another name.

So capture notes each form of a table that records show (`ShownColumns`). The next look explains it: which numbers may
the columns have had (`readings`)? Columns are sent in the order of their numbers. A column that exists at two looks
existed between them, and one that is younger than a live column came after it. If every reading gives each column that
exists today its present name, nothing is wrong. Otherwise the table is copied again (`judged`): capture never guesses
which of several readings is right.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from millstream.catalog import Catalog
from millstream.model.ids import StreamId, TableId
from millstream.model.positions import Lsn
from millstream.model.schema import TableKind, TableSchema

Form: TypeAlias = tuple[tuple[str, int], ...]
"""The log's name and the type's OID of each column, in order; 0 if the type isn't known."""

_WAYS_MAX: Final = 2000
"""Readings of a form that are tried; a form with more of them counts as unclear."""
_ASK_AGAIN_S: Final = 0.5
"""Time after which another look is requested for a form that waits for one."""
_LOOKS_MAX: Final = 2
"""Looks after which a form that no reading explains counts as unclear: the first may miss a change that has just
committed."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A table's columns at one look."""

    at: Lsn
    """An LSN at or above every change that the look saw."""
    numbers_max: int
    """The greatest number that a column of the table ever had."""
    columns: Mapping[int, tuple[str, int]]
    """The log's name and the type's OID of each column that is sent, by its number."""
    unsent: frozenset[int] = frozenset()
    """Numbers of columns that exist and aren't sent, by the publication's choice, which may have been another."""
    hidden: frozenset[int] = frozenset()
    """Numbers of columns that exist and are left out by a rule."""
    ruled: frozenset[int] = frozenset()  # numbers of columns that are sent hashed or redacted
    ruled_names: frozenset[str] = frozenset()  # under which records have any column hashed or redacted, or lack it
    excludes: bool = False  # whether they lack it under one of these

    @classmethod
    def loaded(cls, facts: Sequence[Any]) -> Shape:
        """Return the value that `stored` encoded."""
        at, numbers_max, columns = facts
        return cls(Lsn(at), numbers_max, {number: (name, type_oid) for number, name, type_oid in columns})

    def stored(self) -> list[Any]:
        """Return JSON-compatible facts of this look."""
        return [int(self.at), self.numbers_max, [[number, *facts] for number, facts in sorted(self.columns.items())]]

    def is_like(self, other: Shape) -> bool:
        """Return whether both have the same columns, and none came in between."""
        return (self.numbers_max, self.columns) == (other.numbers_max, other.columns)

    @property
    def form(self) -> Form:
        """The form of the records that this look expects."""
        return tuple(facts for _, facts in sorted(self.columns.items()))


@dataclass(frozen=True, slots=True)
class Expected:
    """The form that a look expects of later records."""

    form: Form
    is_certain: bool
    """Whether records of this form need no explanation: the stream has come past all changes of the columns."""
    numbers: tuple[int, ...] = ()
    """The numbers of the form's columns."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A form that records of a table have."""

    form: Form
    since: Lsn
    """The stream had come at least so far when the form was noted."""
    looks: int = 0
    """Looks that couldn't explain it."""
    is_numbered: bool = False
    """Whether its records name their columns' numbers, if a look finds them."""

    def stored_form(self) -> list[list[Any]]:
        """Return the form as JSON has it."""
        return list(map(list, self.form))


class ShownColumns:
    """Forms that a stream's records showed and that no look has explained yet. Any thread.

    A form that isn't certain by the last look is kept in the catalog before its records enter the log.
    """

    def __init__(self, catalog: Catalog, stream: StreamId) -> None:
        self._catalog = catalog
        self._scope = f"capture/{stream}/shown"
        self._lock = threading.Lock()
        self._since = Lsn(0)
        """How far the stream was when the last look began."""
        self._expected: dict[TableId, Expected] = {}
        self._shown: dict[TableId, dict[Form, Shown]] = {}
        self._looked_at: dict[TableId, dict[Form, Shown]] = {}
        """Forms that the running look has to explain; the same form may be noted again at once."""
        self._forgotten: set[TableId] = set()
        """Tables whose forms were forgotten since the look began: what it leaves of them doesn't count."""
        self._explained: dict[TableId, dict[Form, tuple[int, ...]]] = {}
        """The numbers that the last look found for forms; empty for a form that it couldn't explain."""
        self._begun = self._ended = 0
        """Number of the last look that has begun, and of the last that has ended."""
        self._looks = threading.Condition(self._lock)
        """Notified after each look."""
        self._stored: set[TableId] = set()
        """Tables with forms in the catalog: also those of an earlier process, before the first look of this one."""
        for id_, forms in catalog.facts(self._scope).items():
            some = (
                Shown(tuple((n, t) for n, t in form), Lsn(since), looks, is_numbered=any(numbered))
                for form, since, looks, *numbered in forms
            )
            self._shown[TableId(int(id_))] = {shown.form: shown for shown in some}
            self._stored.add(TableId(int(id_)))

    def note(self, schema: TableSchema) -> bool:
        """Note the form of records that are about to enter the log; return whether it is another than expected."""
        if schema.kind is not TableKind.TABLE:
            return False
        with self._lock:
            return self._note(schema.table_id, form_of(schema), is_numbered=schema.is_numbered)

    def _note(self, table: TableId, form: Form, *, is_numbered: bool) -> bool:
        forms = self._shown.setdefault(table, {})
        if form in forms and forms[form].is_numbered <= is_numbered:
            return False
        shown = forms[form] = Shown(form, self._since, is_numbered=is_numbered)
        expected = self._expected.get(table)
        if self._is_unusual(shown, expected):
            self._store(table)
        return expected is not None and form != expected.form

    def numbers(self, table: TableId, form: Form) -> tuple[int, ...]:
        """Return the numbers of the columns of records of a form, if they are certain by the last look; else nothing."""
        with self._lock:
            expected = self._expected.get(table)
            is_known = expected is not None and expected.is_certain and expected.form == form
            return expected.numbers if expected is not None and is_known else ()

    def expects_others(self, table: TableId, form: Form, numbers: Sequence[int]) -> bool:
        """Return whether the last look found this form with other column numbers than these."""
        with self._lock:
            expected = self._expected.get(table)
            return expected is not None and expected.form == form and expected.numbers != tuple(numbers)

    def found_numbers(
        self, table: TableId, form: Form, *, look: Callable[[], None], patience_s: float
    ) -> tuple[int, ...]:
        """Wait for a look, and return the numbers of the columns of records of a form that come next in the stream.

        Returns:
            Nothing if more than one reading is possible, or no look has explained the form in time.
        """
        until = time.monotonic() + patience_s
        with self._lock:
            if table not in self._expected:
                return ()
            self._note(table, form, is_numbered=True)
            # A look that has begun by now may miss the change that the form shows.
            begun = self._begun
            while (left := until - time.monotonic()) > 0:
                look()
                self._looks.wait(min(left, _ASK_AGAIN_S))
                if self._ended > begun and form in self._explained.get(table, {}):
                    return self._explained[table][form]
            return ()

    def forget(self, table: TableId) -> None:
        """Forget a table's forms: its earlier records no longer count."""
        with self._lock:
            self._shown.pop(table, None)
            self._looked_at.pop(table, None)
            self._forgotten.add(table)
            if table in self._stored:
                self._store(table)

    def begin_look(self, passed: Lsn) -> Mapping[TableId, Sequence[Shown]]:
        """Return the forms that a look which begins now has to explain, by table.

        Args:
            passed: how far the stream is in the log.
        """
        with self._lock:
            self._since = max(self._since, passed)
            self._begun += 1
            for table, forms in self._shown.items():
                self._looked_at[table] = forms | self._looked_at.get(table, {})
            self._shown, self._forgotten = {}, set()
            return {table: tuple(forms.values()) for table, forms in self._looked_at.items()}

    def has_forgotten(self, table: TableId) -> bool:
        """Return whether `forget` was called for a table since the look began: the forms that it took no longer count."""
        with self._lock:
            return table in self._forgotten

    def end_look(
        self,
        left: Mapping[TableId, Sequence[Shown]],
        expected: Mapping[TableId, Expected],
        numbers: Mapping[TableId, Mapping[Form, tuple[int, ...]]] | None = None,
    ) -> None:
        """End the look: other forms than those that are left are explained, or no longer count.

        Args:
            left: the forms for the next look to explain, by table.
            expected: the form of later records, by table.
            numbers: the column numbers of forms, by table, as `numbers_of` returns them.
        """
        with self._lock:
            self._explained = {table: dict(forms) for table, forms in (numbers or {}).items()}
            self._ended = self._begun
            self._looks.notify_all()
            self._looked_at = {}
            self._expected = dict(expected)
            for table, forms in left.items():
                if table in self._forgotten:
                    continue
                self._shown[table] = self._shown.get(table, {}) | {shown.form: shown for shown in forms}
            for table in {*self._stored, *filter(self._unusual, self._shown)}:
                self._store(table)

    @property
    def since(self) -> Lsn:
        """The LSN from which on earlier shapes of tables may be needed."""
        with self._lock:
            forms = [*self._shown.values(), *self._looked_at.values()]
            return min([self._since, *(shown.since for some in forms for shown in some.values())])

    @property
    def waiting(self) -> set[TableId]:
        """The tables with a form that isn't certain, and that no look has explained."""
        with self._lock:
            return set(filter(self._unusual, {*self._shown, *self._looked_at}))

    def _unusual(self, table: TableId) -> list[Shown]:
        expected = self._expected.get(table)
        forms = self._shown.get(table, {}) | self._looked_at.get(table, {})
        return [shown for shown in forms.values() if self._is_unusual(shown, expected)]

    @staticmethod
    def _is_unusual(shown: Shown, expected: Expected | None) -> bool:
        return expected is not None and not (expected.is_certain and shown.form == expected.form)

    def _store(self, table: TableId) -> None:
        unusual = self._unusual(table)
        if unusual:
            facts = [[shown.stored_form(), int(shown.since), shown.looks, shown.is_numbered] for shown in unusual]
            self._catalog.put_fact(self._scope, str(table), facts)
            self._stored.add(table)
        else:
            self._catalog.drop_fact(self._scope, str(table))
            self._stored.discard(table)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome of a look at the forms of a table's records."""

    news: str | None
    """Why rows in the log aren't the source's; None if they are."""
    left: tuple[Shown, ...] = ()
    """Forms that the next look has to explain."""
    odd: Shown | None = None
    """The form that nothing explains."""


def judged(shown: Sequence[Shown], before: Sequence[Shape], now: Shape, *, follows: bool = False) -> Judgement:
    """Explain the forms of a table's records.

    Args:
        shown: the forms.
        before: the shapes of earlier looks, ascending; at least one that isn't younger than the forms.
        now: the shape at a look that began after the forms were noted.
        follows: whether readers follow columns by their numbers: records that name them, and have one reading, are right
            whatever the names are now. Otherwise a renamed column is copied again.
    """
    left = []
    for one in shown:
        found = _readings(one, before, now)
        columns = ", ".join(name for name, _ in one.form)
        if not found and one.looks + 1 < _LOOKS_MAX:
            left.append(replace(one, looks=one.looks + 1))
        elif not found or len(found) > _WAYS_MAX:
            return Judgement(f"records have the columns {columns}, which can't be explained", odd=one)
        elif follows and one.is_numbered and len(found) == 1 and _is_right(one, found[0], before, now):
            continue
        elif wrong := [w for numbers in found if (w := _misnamed(one.form, numbers, now)) is not None]:
            if len(wrong) == len(found) == 1:
                return Judgement(wrong[0])
            return Judgement(f"records have the columns {columns}, of which some were dropped and added since")
    return Judgement(None, tuple(left))


def numbers_of(shown: Sequence[Shown], before: Sequence[Shape], now: Shape) -> dict[Form, tuple[int, ...]]:
    """Return the column numbers of forms that have one reading, and nothing for those that have several.

    A form without a reading, which the next look may explain, isn't among them. The arguments are those of `judged`.
    """
    found = {one.form: _readings(one, before, now) for one in shown}
    return {form: ways[0] if len(ways) == 1 else () for form, ways in found.items() if ways}


def _readings(shown: Shown, before: Sequence[Shape], now: Shape) -> list[tuple[int, ...]]:
    return list(itertools.islice(readings(shown.form, _at(before, shown.since), now), _WAYS_MAX + 1))


def form_of(schema: TableSchema) -> Form:
    """Return the form of records with a schema."""
    return tuple((column.name, 0 if column.pg is None else column.pg.oid) for column in schema.columns)


def kept(before: Sequence[Shape], since: Lsn) -> list[Shape]:
    """Return the shapes that may still be needed: those from the one in force at an LSN on."""
    first = _at(before, since)
    return [shape for shape in before if shape.at >= first.at]


def readings(form: Form, earlier: Shape, now: Shape) -> Iterator[tuple[int, ...]]:
    """Yield the numbers that the columns of a form may have had, between two looks."""
    must = earlier.columns.keys() & now.columns.keys()
    young = {number for number in now.columns if number > earlier.numbers_max}
    came = set(range(earlier.numbers_max + 1, now.numbers_max + 1)) - now.hidden
    may = {*earlier.columns, *now.columns, *came, *now.unsent} - must - young
    ways = numberings(len(form), must=must, in_turn=young, may=may)
    some = list(itertools.islice(ways, _WAYS_MAX + 1))
    fit = [way for way in some if all(map(_fits, form, way, itertools.repeat(earlier), itertools.repeat(now)))]
    # A type may have changed twice in between.
    yield from fit or some


def numberings(
    width: int, *, must: Collection[int], in_turn: Collection[int], may: Collection[int]
) -> Iterator[tuple[int, ...]]:
    """Yield ascending column numbers, so many at a time.

    Args:
        in_turn: numbers of columns that came one after the other, and still exist: each comes with all lower ones, and
            before all greater ones.
        may: numbers that may be there or not.
    """
    turns = sorted(in_turn)
    for count in range(len(turns) + 1):
        fixed = {*must, *turns[:count]}
        last = turns[count] if count < len(turns) else math.inf
        free = sorted(number for number in may if number not in fixed and number < last)
        missing = width - len(fixed)
        if 0 <= missing <= len(free):
            for some in itertools.combinations(free, missing):
                yield tuple(sorted([*fixed, *some]))


def _fits(column: tuple[str, int], number: int, earlier: Shape, now: Shape) -> bool:
    is_any = column[0] in now.ruled_names or (number in now.ruled and number not in earlier.columns)
    known = {shape.columns[number][1] for shape in (earlier, now) if number in shape.columns}
    return is_any or not known or 0 in known or column[1] in {0, *known}


def _is_right(shown: Shown, numbers: Sequence[int], before: Sequence[Shape], now: Shape) -> bool:
    """Return whether readers that follow these numbers find today's columns, with the values that they have today."""
    earlier = _at(before, shown.since)
    possible = {*earlier.columns, *now.columns, *now.unsent, *range(earlier.numbers_max + 1, now.numbers_max + 1)}
    alike = [_is_ruled_alike(name, n, earlier, now) for (name, _), n in zip(shown.form, numbers, strict=True)]
    alike.append(not now.excludes or len(numbers) == len(possible))  # any may be missing, under an excluded name
    return all(alike) and _are_told(shown.form, numbers, before, now)


def _is_ruled_alike(name: str, number: int, earlier: Shape, now: Shape) -> bool:
    """Return whether records surely have a column under today's rule, which holds by its number or by its name then."""
    if number not in now.columns or now.columns[number][0] == name:
        return True
    return number in earlier.columns if number in now.ruled else name not in now.ruled_names


def _are_told(form: Form, numbers: Sequence[int], before: Sequence[Shape], now: Shape) -> bool:
    """Return whether readers learn what a form's names are now: by records as they are, or since a column was renamed.

    No definition enters for a column that was added under the name of one that is gone.
    """
    today = {name: number for number, (name, _) in now.columns.items()}
    had = {(number, name) for shape in before for number, (name, _) in shape.columns.items()}
    renamed = {now.columns[n][0] for n, name in had if n in now.columns and now.columns[n][0] != name}
    return all(
        today.get(name, number) == number or number in now.columns or name in renamed
        for (name, _), number in zip(form, numbers, strict=True)
    )


def _misnamed(form: Form, numbers: Sequence[int], now: Shape) -> str | None:
    """Return which of today's columns isn't what records have under its name; None if each is."""
    today = {name: number for number, (name, _) in now.columns.items()}
    for (name, _), number in zip(form, numbers, strict=True):
        if number in now.columns and now.columns[number][0] != name:
            return f"column {now.columns[number][0]} was called {name} for a while"
        if today.get(name, number) != number:
            return f"another column was called {name} for a while"
    return None


def _at(shapes: Sequence[Shape], lsn: Lsn) -> Shape:
    """Return the youngest shape that isn't younger than an LSN; the oldest if all are."""
    return next((shape for shape in reversed(shapes) if shape.at <= lsn), shapes[0])
