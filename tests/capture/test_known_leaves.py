"""Which table a leaf partition's changes belong to at each position, and when its `x` may enter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millstream.capture.leaves.detached_leaves import KnownLeaves, LeafColumns
from millstream.capture.leaves.leaf_relations import _grown, _places
from millstream.capture.source_tables import KeyColumn, PartitionFacts, SourceTable
from millstream.catalog import Catalog
from millstream.codec.pgoutput import Relation
from millstream.model.ids import TableId
from millstream.model.positions import Lsn
from millstream.model.schema import ReplicaIdentity

PARTS, TREE = TableId(1), TableId(2)


def table(oid: int, *leaves: int) -> SourceTable:
    identity = ReplicaIdentity("d")
    parts = tuple(
        PartitionFacts(
            oid=leaf,
            name=f"public.leaf_{leaf}",
            attached_by=1,
            born=True,
            leaf=True,
            size_bytes=0,
            relfilenode=leaf,
            refiled=False,
            readable=True,
            columns=(),
        )
        for leaf in leaves
    )
    return SourceTable(
        oid=oid,
        namespace="public",
        name=f"t{oid}",
        partitioned=True,
        replica_identity=identity,
        usable=True,
        generated_identity=(),
        relation=Relation(oid, "public", f"t{oid}", identity, (), b""),
        key=(KeyColumn("id", "pg_catalog.int4", "pg_catalog"),),
        row_estimate=0,
        size_bytes=0,
        relfilenode=0,
        layout=(),
        key_constraint=0,
        partitions=parts,
        numbers_max=0,
    )


class Looks:
    """A session's known leaves, and looks at the source."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.stream = catalog.resolve_stream("shop")
        self.known = KnownLeaves(catalog, self.stream)

    def look(
        self, at: int, *, own: tuple[int, ...] = (), gone: tuple[int, ...] = (), **tables: tuple[int, ...]
    ) -> None:
        begun = self.known.begin_look()
        for name, leaves in tables.items():
            self.one(at, name, leaves, begun, own=own, gone=gone)

    def one(
        self,
        at: int,
        name: str,
        leaves: tuple[int, ...],
        begun: int,
        *,
        own: tuple[int, ...] = (),
        gone: tuple[int, ...] = (),
    ) -> None:
        id_ = {"parts": PARTS, "tree": TREE}[name]
        facts = table(100 + id_, *leaves)
        self.known.look(id_, facts, at=Lsn(at), at_us=at, begun=begun, by_leaves=True, own=own, gone_for_good=gone)

    def restart(self) -> None:
        self.known = KnownLeaves(self.catalog, self.stream)

    def ready(self, *busy: TableId) -> list[int]:
        return [one.oid for one in self.known.ready(busy)]

    def settle(self) -> None:
        for one in self.known.ready(()):
            self.known.durable(one)


@pytest.fixture
def looks(tmp_path: Path) -> Iterator[Looks]:
    catalog = Catalog(tmp_path / "catalog.db")
    yield Looks(catalog)
    catalog.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_leaf_belongs_to_its_table_until_the_stream_is_behind_the_look_that_misses_it(
    looks: Looks, *, restarts: bool
) -> None:
    looks.look(10, parts=(7, 8))
    looks.look(20, parts=(8,))
    if restarts:
        looks.restart()
    looks.known.passed(Lsn(19))
    assert looks.known.table_of(7) == PARTS
    assert looks.ready() == []
    looks.known.passed(Lsn(20))
    assert looks.known.table_of(7) is None
    assert looks.ready(PARTS) == [], "a copy may have read rows of it"
    assert looks.ready() == [7]
    assert looks.ready() == [], "once"
    assert looks.known.table_of(8) == PARTS


def test_a_leaf_that_no_record_names_costs_nothing_more_once_its_x_is_durable(looks: Looks) -> None:
    looks.look(10, parts=(7,))
    looks.look(20, parts=())
    looks.known.passed(Lsn(20))
    looks.settle()
    looks.restart()
    assert not looks.known.are_waiting
    assert looks.known.detached == {7}
    looks.look(30, parts=(), gone=(7,))
    assert looks.known.detached == frozenset()


def test_a_leaf_that_is_noted_during_a_look_isnt_gone(looks: Looks) -> None:
    looks.look(10, parts=(7,))
    begun = looks.known.begin_look()
    looks.known.note_record(PARTS, 8, "public.leaf_8", None, is_there=True)
    looks.one(20, "parts", (7,), begun)
    assert not looks.known.are_waiting
    assert looks.known.table_of(8) == PARTS
    looks.look(30, parts=(7,))
    looks.known.passed(Lsn(30))
    assert looks.ready() == [8]


def test_late_changes_of_a_leaf_that_left_get_another_x(looks: Looks) -> None:
    looks.look(10, parts=(7,))
    looks.look(20, parts=())
    looks.known.passed(Lsn(25))
    (first,) = looks.known.ready(())
    looks.known.note_record(PARTS, 7, "public.leaf_7", None, is_there=False)
    assert looks.known.late_leaves > looks.known.looked_for
    looks.look(30, parts=())
    looks.known.durable(first)
    looks.known.passed(Lsn(30))
    assert looks.ready() == [7]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("first", ["parts", "tree"])
def test_a_leaf_that_goes_to_another_table_turns_with_the_look(looks: Looks, first: str, *, restarts: bool) -> None:
    looks.look(10, parts=(7,), tree=())
    facts = {"parts": (), "tree": (7,)}
    assert looks.known.returned(TREE, table(102, 7)) == ["public.leaf_7"], "it is copied whole"
    looks.look(20, **({first: facts[first]} | facts))
    if restarts:
        looks.restart()
    looks.known.passed(Lsn(19))
    assert looks.known.table_of(7) == PARTS
    looks.known.passed(Lsn(20))
    assert looks.known.table_of(7) == TREE, "also while the x of the first waits for its copy"
    assert looks.ready(PARTS) == []
    looks.settle()
    assert looks.known.table_of(7) == TREE


@pytest.mark.parametrize("restarts", [False, True])
def test_a_table_of_its_own_that_is_attached_turns_with_the_look(looks: Looks, *, restarts: bool) -> None:
    looks.look(10, parts=())
    looks.look(20, parts=(7,), own=(7,))
    if restarts:
        looks.restart()
    looks.known.passed(Lsn(19))
    assert looks.known.table_of(7) is None
    looks.known.passed(Lsn(20))
    assert looks.known.table_of(7) == PARTS


def test_a_leaf_that_comes_back_is_told_and_its_x_is_dropped(looks: Looks) -> None:
    looks.look(10, parts=(7,))
    looks.look(20, parts=())
    assert looks.known.returned(PARTS, table(101, 7)) == ["public.leaf_7"]
    looks.look(30, parts=(7,))
    assert not looks.known.are_waiting
    assert looks.known.returned(PARTS, table(101, 7)) == []
    looks.look(40, parts=())
    looks.known.passed(Lsn(40))
    looks.settle()
    assert looks.known.returned(PARTS, table(101, 7)) == ["public.leaf_7"], "also after its x"


def test_rows_name_their_leaves_after_a_copy_and_until_some_come_via_the_root(looks: Looks) -> None:
    known, facts = looks.known, table(101, 7)
    assert not known.is_whole(PARTS)
    known.begin_copy(PARTS, facts, voids=False)
    assert known.is_whole(PARTS)
    known.note_rows_without(PARTS)
    looks.restart()
    known = looks.known
    assert not known.is_whole(PARTS)
    known.note_rows_without(PARTS)
    known.begin_copy(PARTS, facts, voids=False)
    assert not known.is_whole(PARTS), "the log has rows that came before the copy and count"
    known.begin_copy(PARTS, facts, voids=True)
    assert known.is_whole(PARTS)


@pytest.mark.parametrize(
    ("sent", "order"),
    [
        ("id item day", (0, 2, 1)),  # as the source has it now
        ("id day item", (0, 2, 1)),  # before two columns swapped their names
        ("id item", (0, 1)),  # a column isn't sent
        ("id thing day", (0, 2, 1)),  # as the look before found it
        ("id other day", None),
    ],
)
def test_a_leaf_s_columns_are_found_by_names_then_by_positions(sent: str, order: tuple[int, ...] | None) -> None:
    now = LeafColumns(("id", "item", "day"), ("id", "day", "item"))
    before = LeafColumns(("id", "thing", "day"), ("id", "day", "thing"))
    found = _places(sent.split(), [now, before])
    assert found == order


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize(("first", "had"), [(49, True), (2**32 - 5, True), (51, False), (2**31 + 51, True)])
def test_an_x_comes_before_the_rows_of_an_attached_leaf_that_had_changes_before(
    looks: Looks, first: int, *, had: bool, restarts: bool, below: bool
) -> None:
    looks.look(10, parts=(8,))
    looks.known.note_record(PARTS, 7, "public.leaf_7", None, is_there=True)
    looks.known.note_first(7, first, Lsn(15))
    if restarts:
        looks.restart()
    facts = table(101, 7, 8, 9)
    leaf, *others = facts.partitions
    if below:  # what it is below was attached, and another such partition before
        trees = [
            replace(part, leaf=False, born=False, attached_by=by) for part, by in zip(others, (50, 45), strict=True)
        ]
        facts = replace(facts, partitions=(leaf, *trees))
    else:
        leaf = replace(leaf, born=False, attached_by=50)
    looks.known.note_attached(PARTS, facts, [leaf], at=Lsn(20), at_us=21)
    looks.look(20, parts=(7, 8))
    if restarts:
        looks.restart()
    assert looks.known.wait_beyond(Lsn(19))
    looks.known.passed(Lsn(19))
    assert looks.ready() == []
    looks.known.passed(Lsn(20))
    found = looks.known.ready({PARTS})
    assert [(one.oid, one.at_us) for one in found] == ([(7, 21)] if had else []), (
        "also while it is copied: none of its rows came so far"
    )
    looks.look(30, parts=(7, 8))
    assert looks.known.ready(()) == [], "once"
    for one in found:
        looks.known.durable(one)
    looks.restart()
    assert not looks.known.are_waiting
    assert looks.known.table_of(7) == PARTS
    assert looks.known.returned(PARTS, table(101, 7)) == []


@pytest.mark.parametrize(("committed", "had"), [(20, True), (21, False)])
def test_an_older_transaction_may_write_to_a_leaf_after_it_was_attached(
    looks: Looks, committed: int, *, had: bool
) -> None:
    looks.look(10, parts=(8,))
    facts = table(101, 7, 8)
    leaf = replace(facts.partitions[0], born=False, attached_by=50)
    looks.known.note_attached(PARTS, facts, [leaf], at=Lsn(20), at_us=21)
    looks.look(20, parts=(7, 8))
    looks.known.note_first(7, 49, Lsn(committed))
    looks.known.passed(Lsn(21))
    assert [one.is_empty for one in looks.known.ready(())] == [True] * had


@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.parametrize(("keyed", "committed", "had"), [(False, 20, True), (False, 21, False), (True, 20, False)])
def test_changes_of_an_attached_leaf_count_in_a_table_without_a_key(
    looks: Looks, committed: int, *, keyed: bool, had: bool, comes_first: bool
) -> None:
    looks.look(10, parts=(8,))
    facts = table(101, 7, 8)
    facts = facts if keyed else replace(facts, key=())
    leaf = replace(facts.partitions[0], born=False, attached_by=50)
    if comes_first and committed <= 20:
        looks.known.note_record(PARTS, 7, "public.leaf_7", None, is_there=True)
        looks.known.note_first(7, 51, Lsn(committed))
    looks.known.note_attached(PARTS, facts, [leaf], at=Lsn(20), at_us=21)
    looks.look(20, parts=(7, 8))
    looks.restart()
    if not comes_first or committed > 20:
        looks.known.note_first(7, 51, Lsn(committed))
    looks.known.passed(Lsn(21))
    assert [one.is_empty for one in looks.known.ready(())] == [True] * had


def test_a_leaf_of_an_earlier_look_is_no_new_one(looks: Looks) -> None:
    looks.look(10, parts=(7,))
    looks.known.note_first(7, 40, Lsn(15))
    facts = table(101, 7)
    looks.known.note_attached(
        PARTS, facts, [replace(facts.partitions[0], born=False, attached_by=50)], at=Lsn(20), at_us=21
    )
    assert not looks.known.are_waiting, "its rows wait for another copy, and its x has entered"


@pytest.mark.parametrize(
    ("sent", "grown"),
    [
        ("item day new", "day item new"),  # `id` was dropped after `new` had been added
        ("item day id new more", "id day item new more"),
        ("day item new", None),  # another leaf's order
        ("new item day", None),
    ],
)
def test_columns_that_are_added_come_last_in_a_leaf_and_its_table(sent: str, grown: str | None) -> None:
    found = _grown(LeafColumns(("item", "day", "id"), ("id", "day", "item")), sent.split())
    assert (found is None) == (grown is None)
    if found is not None and grown is not None:
        assert [name for name in found.table if name in sent.split()] == grown.split()
