"""Forms that records show between two looks: a form that passes has each of today's columns under its own name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.capture.transient_column_names import Expected, Form, Shape, Shown, ShownColumns, judged
from millstream.catalog import Catalog
from millstream.model.ids import SchemaVersion, SourceId, TableId
from millstream.model.positions import Lsn
from millstream.model.schema import Column, PgType, TableSchema

NAMES = ("a", "b", "c", "d")
TYPES = (23, 25)
TABLE = TableSchema(
    TableId(1),
    SchemaVersion(1),
    SourceId(1),
    "public",
    "t",
    (Column("id", pa.int32(), PgType(23, -1, "integer")), Column("a", pa.string(), PgType(25, -1, "text"))),
)


@dataclass
class Table:
    """A table that changes, and the number that each name stood for in each form that its records showed."""

    rng: Random
    types: Sequence[int] = TYPES
    at: int = 0
    numbers_max: int = 1
    columns: dict[int, tuple[str, int]] = field(default_factory=lambda: {1: ("id", 23)})
    forms: list[tuple[Form, tuple[int, ...], int]] = field(default_factory=list)
    looks: list[Shape] = field(default_factory=list)

    def change(self, step: str) -> None:
        self.at += 1
        free = [name for name in NAMES if name not in dict(self.columns.values())]
        mine = sorted(set(self.columns) - {1})
        if step == "add" and free:
            self.numbers_max += 1
            self.columns[self.numbers_max] = (self.rng.choice(free), self.rng.choice(self.types))
        elif step == "drop" and mine:
            del self.columns[self.rng.choice(mine)]
        elif step == "rename" and mine and free:
            number = self.rng.choice(mine)
            self.columns[number] = (self.rng.choice(free), self.columns[number][1])
        elif step == "swap" and len(mine) > 1:
            one, other = self.rng.sample(mine, 2)
            (name, type_), (second, second_type) = self.columns[one], self.columns[other]
            self.columns[one], self.columns[other] = (second, type_), (name, second_type)
        elif step == "write":
            self.forms.append((tuple(f for _, f in sorted(self.columns.items())), tuple(sorted(self.columns)), self.at))
        elif step == "look":
            self.looks.append(Shape(Lsn(self.at), self.numbers_max, dict(self.columns)))


STEPS = st.lists(st.sampled_from(["add", "drop", "rename", "swap", "write", "write", "look"]), max_size=30)


def played(steps: Sequence[str], seed: int, types: Sequence[int] = TYPES) -> Table:
    table = Table(Random(seed), types)
    for step in ["add", "add", "look", *steps, "look"]:
        table.change(step)
    return table


@given(STEPS, st.integers(0, 2**32), st.integers(0, 40))
def test_a_form_that_passes_has_todays_columns_under_their_own_names(steps: list[str], seed: int, behind: int) -> None:
    table = played(steps, seed)
    now = table.looks[-1]
    names = {name: number for number, (name, _) in now.columns.items()}
    for form, numbers, at in table.forms:
        # The stream may be known to be behind: an older look then has to do.
        found = judged([Shown(form, Lsn(max(at - behind, 0)))], table.looks, now)
        if found.news is None and not found.left:
            for (name, _), number in zip(form, numbers, strict=True):
                assert names.get(name, number) == number
                assert now.columns.get(number, (name,))[0] == name


@given(STEPS, st.integers(0, 2**32))
def test_what_happened_has_an_explanation(steps: list[str], seed: int) -> None:
    table = played(steps, seed)
    for form, _, at in table.forms:
        found = judged([Shown(form, Lsn(at), looks=1)], table.looks, table.looks[-1])
        assert "can't be explained" not in (found.news or "")


@given(st.lists(st.sampled_from(["add", "write", "write"]), max_size=12), st.integers(0, 2**32))
def test_columns_that_come_copy_nothing(steps: list[str], seed: int) -> None:
    assert_nothing_is_copied(played(steps, seed))


@given(st.lists(st.sampled_from(["drop", "write", "write"]), max_size=12), st.integers(0, 2**32))
def test_columns_that_go_copy_nothing(steps: list[str], seed: int) -> None:
    assert_nothing_is_copied(played(steps, seed))


def assert_nothing_is_copied(table: Table) -> None:
    shown = [Shown(form, Lsn(at)) for form, _, at in table.forms]
    assert judged(shown, table.looks, table.looks[-1]).news is None
    assert not judged(shown, table.looks, table.looks[-1]).left


def shape(at: int, numbers_max: int, **columns: tuple[int, int]) -> Shape:
    return Shape(Lsn(at), numbers_max, {number: (name, type_) for name, (number, type_) in columns.items()})


BEFORE = shape(1, 3, id=(1, 23), a=(2, 25), b=(3, 25))


def test_types_tell_columns_apart_that_came_and_went() -> None:
    shown = [Shown((("id", 23), ("a", 25), ("c", 23)), Lsn(5))]
    assert judged(shown, [BEFORE], shape(9, 4, id=(1, 23), a=(2, 25), c=(4, 23))).news is None
    alike = judged(
        [Shown((("id", 23), ("a", 25), ("c", 25)), Lsn(5))], [BEFORE], shape(9, 4, id=(1, 23), a=(2, 25), c=(4, 25))
    )
    assert alike.news is not None
    assert "some were dropped and added" in alike.news


def test_a_name_that_a_column_had_for_a_while_is_told() -> None:
    found = judged([Shown((("id", 23), ("x", 25), ("b", 25)), Lsn(5))], [BEFORE], BEFORE)
    assert found.news == "column a was called x for a while"


def test_a_form_that_comes_before_its_change_is_seen_waits_for_another_look() -> None:
    shown = Shown((("id", 23), ("a", 25), ("b", 25), ("c", 25)), Lsn(5))
    (left,) = judged([shown], [BEFORE], BEFORE).left
    assert judged([left], [BEFORE], shape(9, 4, id=(1, 23), a=(2, 25), b=(3, 25), c=(4, 25))).news is None
    assert "can't be explained" in (judged([left], [BEFORE], BEFORE).news or "")


def test_a_column_that_the_publication_lists_later_is_no_new_one() -> None:
    listed = Shape(Lsn(1), 3, {1: ("id", 23), 3: ("b", 25)})
    for names in (("id", "b"), ("id", "a", "b")):
        form = tuple((name, 23 if name == "id" else 25) for name in names)
        assert judged([Shown(form, Lsn(5))], [listed], BEFORE).news is None


def test_forms_from_before_a_copy_are_forgotten_even_while_a_look_explains_them(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path / "catalog.db")) as catalog:
        stream = catalog.resolve_stream("shop")
        shown = ShownColumns(catalog, stream)
        shown.end_look({}, {TABLE.table_id: Expected((("id", 23),), is_certain=True)})
        assert shown.note(TABLE)
        assert shown.waiting == ShownColumns(catalog, stream).begin_look(Lsn(0)).keys() == {TABLE.table_id}
        found = shown.begin_look(Lsn(7))
        shown.forget(TABLE.table_id)
        shown.end_look(found, {TABLE.table_id: Expected((("id", 23),), is_certain=True)})
        assert not shown.waiting
        assert not shown.begin_look(Lsn(8))
        assert not ShownColumns(catalog, stream).begin_look(Lsn(8))


def test_a_form_that_comes_during_a_look_is_for_the_next_one(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path / "catalog.db")) as catalog:
        stream = catalog.resolve_stream("shop")
        shown = ShownColumns(catalog, stream)
        shown.note(TABLE)
        shown.begin_look(Lsn(7))
        shown.note(TABLE)
        shown.end_look({}, {TABLE.table_id: Expected((("id", 23),), is_certain=True)})
        (later,) = shown.begin_look(Lsn(9))[TABLE.table_id]
        assert later == Shown((("id", 23), ("a", 25)), Lsn(7))
        # Nothing of a look that failed is lost.
        assert shown.begin_look(Lsn(9))[TABLE.table_id] == (later,)
        assert ShownColumns(catalog, stream).begin_look(Lsn(9))[TABLE.table_id] == (later,)


@pytest.mark.parametrize("by", ["a look", "a copy"])
def test_a_form_that_a_killed_process_left_counts_once(tmp_path: Path, by: str) -> None:
    with closing(Catalog(tmp_path / "catalog.db")) as catalog:
        stream = catalog.resolve_stream("shop")
        killed = ShownColumns(catalog, stream)
        killed.begin_look(Lsn(5))
        killed.end_look({}, {TABLE.table_id: Expected((("id", 23),), is_certain=True)})
        killed.note(TABLE)
        shown = ShownColumns(catalog, stream)
        if by == "a copy":
            shown.forget(TABLE.table_id)
        else:
            assert shown.begin_look(Lsn(7)).keys() == {TABLE.table_id}
            shown.end_look({}, {TABLE.table_id: Expected((("id", 23), ("a", 25)), is_certain=True)})
        # Explained again later, after a rename, it would request a copy at each start.
        assert not ShownColumns(catalog, stream).begin_look(Lsn(9))


def test_too_many_ways_are_unclear() -> None:
    later = shape(9, 43, id=(1, 23), a=(2, 25), **{f"n{n}": (n, 25) for n in range(34, 44)})
    form = (("id", 23), ("a", 25), *((f"n{n}", 25) for n in range(10)))
    assert judged([Shown(form, Lsn(5))], [BEFORE], later).news is not None


def test_a_column_that_came_and_went_is_no_older_one() -> None:
    later = shape(9, 5, id=(1, 23), a=(2, 25), b=(3, 25), c=(4, 25))
    form = (("id", 23), ("a", 25), ("b", 25), ("c", 25))
    assert judged([Shown(form, Lsn(5))], [BEFORE], later).news is None


def test_a_type_that_changed_twice_hides_no_column() -> None:
    found = judged([Shown((("id", 23), ("a", 20), ("b", 25)), Lsn(5))], [BEFORE], BEFORE)
    assert (found.news, found.left) == (None, ())
