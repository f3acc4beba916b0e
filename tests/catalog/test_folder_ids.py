"""Tables whose names differ only by case get their own folders, and a name keeps its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from millstream.catalog import Catalog, TableState
from millstream.catalog.tables import Grow
from millstream.errors import InvalidValue
from millstream.lake.layout import folder_of
from millstream.model.ids import ShardId
from millstream.model.schema import Column, TableSchema
from millstream.testing.catalog import example_schema
from millstream.testing.pytest_plugin import Database


class Tables:
    """The tables of a source, as capture enters them into a catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.stream = catalog.resolve_stream("shop")
        self.source = catalog.resolve_source(self.stream, 7, "shop", 1)

    def enter(self, oid: int, name: str, *columns: str) -> TableSchema:
        """Enter a relation under a name; return its schema as the catalog numbered it."""
        row = self.catalog.table_for(self.stream, self.source, oid, "public", name)
        schema = example_schema(row.id, self.source, "id", *columns)
        return self.catalog.put_schema(self.stream, replace(schema, name=name))

    def folder(self, oid: int, name: str, *columns: str) -> str:
        return folder_of(self.enter(oid, name, *columns))

    def drop(self, oid: int, name: str) -> None:
        row = self.catalog.table_for(self.stream, self.source, oid, "public", name)
        self.catalog.set_state(row.id, TableState.GONE)


@pytest.fixture(params=["sqlite", "postgresql"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tables]:
    if request.param == "sqlite":
        place: Path | str = tmp_path / "catalog.db"
    else:
        database: Database = request.getfixturevalue("postgres")
        place = database.dsn
    with closing(Catalog(place)) as catalog:
        yield Tables(catalog)


def test_the_later_of_two_names_that_differ_by_case_has_an_id_behind_its_own(tables: Tables) -> None:
    first, second = tables.enter(1, "User"), tables.enter(2, "user")
    assert folder_of(first) == "public.User"
    assert folder_of(second) == f"public.user~t{second.table_id}"
    assert tables.folder(3, "USER").startswith("public.USER~t")
    assert tables.folder(4, "users") == "public.users"


def test_new_columns_change_no_folder(tables: Tables) -> None:
    tables.enter(1, "user")
    before = tables.folder(2, "User")
    assert tables.folder(2, "User", "total") == before
    assert tables.folder(1, "user", "total") == "public.user"


def test_a_table_that_is_made_again_has_the_folder_of_its_name(tables: Tables) -> None:
    tables.enter(1, "user")
    before = tables.folder(2, "User")
    tables.drop(2, "User")
    assert tables.folder(3, "User") == before
    tables.drop(1, "user")
    assert tables.folder(4, "user") == "public.user"


def test_a_renamed_table_gets_the_folder_of_its_new_name_and_the_old_one_back(tables: Tables) -> None:
    tables.enter(1, "user")
    other = tables.enter(2, "other")
    assert folder_of(other) == "public.other"
    renamed = tables.folder(2, "User")
    assert renamed == f"public.User~t{other.table_id}"
    assert tables.folder(2, "other") == "public.other"
    tables.drop(1, "user")
    assert tables.folder(2, "User") == renamed


def test_letters_that_a_folder_escapes_have_no_case(tables: Tables) -> None:
    assert tables.folder(1, "é") == "public.~c3~a9"
    assert tables.folder(2, "É") == "public.~c3~89"


def test_the_schema_in_the_log_has_the_id(tables: Tables) -> None:
    tables.enter(1, "user")
    schema = tables.enter(2, "User")
    assert TableSchema.from_arrow(schema.to_arrow()) == schema
    assert folder_of(TableSchema.from_arrow(schema.to_arrow())) == folder_of(schema)


def test_a_name_that_a_table_left_keeps_its_folder_from_later_ones(tables: Tables) -> None:
    assert tables.folder(1, "user") == "public.user"
    assert tables.folder(1, "people") == "public.people"
    later = tables.enter(2, "User")
    assert folder_of(later) == f"public.User~t{later.table_id}"
    assert tables.folder(1, "user") == "public.user"


def test_a_name_that_another_table_left_has_the_folder_that_it_had(tables: Tables) -> None:
    tables.enter(1, "user")
    before = tables.folder(2, "User")
    tables.enter(2, "people")
    assert tables.folder(3, "User") == before
    assert tables.folder(4, "USER").startswith("public.USER~t")


def test_tables_of_one_call_are_made_all_or_none_and_see_each_others_names(tables: Tables) -> None:
    catalog, stream = tables.catalog, tables.stream

    def grow(newest: TableSchema) -> TableSchema:
        return replace(newest, columns=(Column("id", pa.int64()),))

    def fail(_: TableSchema) -> TableSchema:
        raise InvalidValue("nothing fits")

    def make(**grows: Grow) -> list[TableSchema]:
        wanted = {("public", name): (ShardId(0), grows[name]) for name in grows}
        return list(catalog.application_tables(stream, wanted).values())

    with pytest.raises(InvalidValue, match="nothing fits"):
        make(a=grow, b=fail)
    with pytest.raises(InvalidValue, match="one name"):
        make(a=grow, A=grow)
    assert (catalog.tables(stream), catalog.schemas(stream)) == ([], {})
    made = make(a=grow, b=grow)
    assert [(schema.name, schema.version, folder_of(schema)) for schema in made] == [
        ("a", 1, "public.a"),
        ("b", 1, "public.b"),
    ]
    assert made == [catalog.application_schema(stream, "public", name) for name in "ab"]
    assert make(b=grow, a=grow) == made[::-1], "a table that is as wanted stays as it is"
