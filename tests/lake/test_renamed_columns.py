"""A renamed column keeps its values in every view, at every moment, however its records land and fold.

So do rows that were written before a column was added with a default: they have it, though no record says so.

The source here is a model: rows by the numbers of their columns, and names that change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.lake.landing import append_history
from tests.seeds import Seeds

from millstream import failpoints
from millstream.errors import LakeConflict, LakeError
from millstream.lake.commit_cuts import commit_cut
from millstream.lake.folded.current_table import DEFAULT_SIZES, FoldSizes, current_columns, fold_table
from millstream.lake.folded.scd2_table import fold_into_versions, rebuild_versions
from millstream.lake.folded.version_columns import version_columns
from millstream.lake.history import open_history
from millstream.lake.iceberg.catalog import catalog_of
from millstream.lake.iceberg.names import identifier_of
from millstream.lake.layout import LakeLayout, TableCommit
from millstream.lake.new_and_wider_columns import widest
from millstream.lake.query.query_session import LakeSession
from millstream.lake.schema_history import ERAS_MAX, Eras
from millstream.model.ids import SchemaVersion, SourceId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.model.schema import Column, ReplicaIdentity, TableSchema

Records = Callable[..., pa.RecordBatch]
POINTS = (
    "lake.before_history_commit",
    "lake.after_history_commit",
    "lake.before_rewrite_commit",
    "lake.fold_file_written",
    "lake.before_fold_commit",
    "lake.after_fold_commit",
    "lake.before_scd2_commit",
    "lake.after_scd2_commit",
)
MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)
NUMERIC, WIDE, INTEGERS = pa.decimal128(10, 2), pa.decimal128(24, 2), pa.list_(pa.int32())
CASES = ("a", "A", "b", "B", "c", "d", "e", "f")
NAMES = ("a", "b", "c", "d", "e", "f")
OF_VERSIONS = ("valid_from", "Valid_To", "is_current", "a", "b", "c")
SMALL = FoldSizes(leaf_bytes=1500, small_bytes=0, part_bytes=3000, rows_max=6, build_rows_min=25, build_bytes=2000)


@dataclass
class Version:
    """A version of a row."""

    key: int
    row: dict[int, Any]
    ended: int | None = None


@dataclass
class Source:
    """A table that changes its names between its rows' changes."""

    rng: Random
    keyed: bool = True
    added: tuple[pa.DataType, ...] = (pa.string(), pa.string(), pa.bool_(), pa.float64())
    """Types of added columns."""
    among: tuple[str, ...] = NAMES
    names: dict[int, str] = field(default_factory=lambda: {1: "id", 2: "a", 3: "b"})
    numbers_max: int = 3
    version: int = 0
    n: int = 0
    rows: dict[int, dict[int, Any]] = field(default_factory=dict)
    kinds: dict[int, pa.DataType] = field(default_factory=lambda: {1: pa.int64()})
    """Types of the columns that aren't texts."""
    records: list[tuple[TableSchema, tuple[str, int, dict[str, Any]]]] = field(default_factory=list)
    written: list[tuple[int, dict[int, Any]]] = field(default_factory=list)
    """Number and values of each record that inserts or updates."""
    told: dict[int, Version] = field(default_factory=dict)
    """The rows' versions, by the number of the record that each began with."""
    began: dict[int, int] = field(default_factory=dict)
    """By key, the number of the record that its open version began with."""
    real: dict[int, int] = field(default_factory=dict)
    """The numbers that columns have at the source, of those with another type before: it was another column."""
    retypes: bool = False
    """Whether columns get types that hold none of their values."""
    versions: dict[tuple[object, ...], int] = field(default_factory=dict)
    filled: dict[int, str] = field(default_factory=dict)
    """By number, the default of columns that were added with one."""

    @property
    def schema(self) -> TableSchema:
        names = tuple(sorted((self.real.get(n, n), name, str(self.kinds.get(n, ""))) for n, name in self.names.items()))
        fills = tuple(sorted((number, text) for number, text in self.filled.items() if number in self.names))
        version = self.versions.setdefault((names, fills), len(self.versions) + 1)
        columns = tuple(
            Column(name, self.kinds.get(n, pa.string()), number=self.real.get(n, n), filled=self.filled.get(n))
            for n, name in sorted(self.names.items(), key=lambda item: self.real.get(item[0], item[0]))
        )
        return TableSchema(
            TableId(3),
            SchemaVersion(version),
            SourceId(1),
            "public",
            "t",
            columns,
            identity=(self.names[1],) if self.keyed else tuple(self.names.values()),
            key=(self.names[1],) if self.keyed else (),
            replica_identity=ReplicaIdentity.DEFAULT if self.keyed else ReplicaIdentity.FULL,
        )

    def define(self) -> None:
        used = {name.lower() for name in self.names.values()}
        free = [name for name in (*self.among, "id") if name.lower() not in used]
        mine = [number for number in self.names if number != 1]
        step = self.rng.choice(
            ["case", "case"] * (self.among != NAMES)
            + ["retype", "retype"] * self.retypes
            + ["rename", "rename", "key", "swap", "chain", "add", "default", "drop"]
        )
        if step == "rename" and mine:
            self.names[self.rng.choice(mine)] = self.rng.choice(free)
        elif step == "case":
            number = self.rng.choice(list(self.names))
            self.names[number] = self.names[number].swapcase()
        elif step == "key":
            self.names[1] = self.rng.choice(free)
        elif step == "swap" and len(mine) > 1:
            one, other = self.rng.sample(mine, 2)
            self.names[one], self.names[other] = self.names[other], self.names[one]
        elif step == "chain" and len(mine) > 1:
            one, other = self.rng.sample(mine, 2)
            self.names[one], self.names[other] = self.names[other], self.rng.choice(free)
        elif step in {"add", "default"} and len(self.names) < 6:
            self.numbers_max += 1
            self.names[self.numbers_max] = self.rng.choice(free)
            self.kinds[self.numbers_max] = self.rng.choice(self.added)
            if step == "default":
                self.add_default(self.numbers_max, self._new(self.numbers_max, None))
        elif step == "retype" and mine:
            self.retype(self.rng.choice(mine))
        elif step == "drop" and len(mine) > 1:
            gone = self.rng.choice(mine)
            del self.names[gone]
            for row in self.rows.values():
                row.pop(gone, None)

    def retype(self, number: int) -> None:
        """Give a column a type that holds no value of any that it has had: its rows' values come with a copy alone."""
        self.numbers_max += 1
        real = self.real.get(number, number)
        had = {self.kinds.get(n, pa.string()) for n in range(1, self.numbers_max) if self.real.get(n, n) == real}
        kinds = [
            kind
            for kind in (pa.string(), pa.int64(), pa.bool_(), NUMERIC, INTEGERS)
            if all(widest(kind, one) is None for one in had)
        ]
        if kinds:
            self.names[self.numbers_max] = self.names.pop(number)
            self.real[self.numbers_max], self.kinds[self.numbers_max] = real, self.rng.choice(kinds)
            for row in self.rows.values():
                row.pop(number, None)

    def add_default(self, number: int, value: object) -> None:
        """Give every row that there is, and was, a value in a new column."""
        text = printed(value)
        assert text is not None
        self.filled[number] = text
        for row in [*self.rows.values(), *(version.row for version in self.told.values())]:
            row[number] = value

    def write(self) -> None:
        self.n += 1
        key = self.rng.randrange(8)
        old = self.rows.get(key)
        row = {number: self._value(number) for number in self.names if number != 1}
        facts: dict[str, Any] = {}
        if key in self.began:
            self.told[self.began.pop(key)].ended = self.n
        if old is None:
            op = "c"
        elif self.rng.random() < 0.2:
            op = "d"
            del self.rows[key]
            whole = {} if self.keyed else {self.names[number]: old.get(number) for number in self.names if number != 1}
            self.records.append((self.schema, (op, self.n, {self.names[1]: key, **whole, **moment(self.n)})))
            return
        else:
            op = "u"
            changed, *others = self.rng.sample(list(row), len(row))
            row[changed] = self._new(changed, old.get(changed))  # an equal row is no version of its own
            if self.keyed and others and self.rng.random() < 0.4:
                left = others[0]
                row[left] = old.get(left)
                facts["__unchanged"] = [self.names[left]]
            if self.keyed and self.rng.random() < 0.3:
                facts["__before"] = [(self.names[1], str(key))]
                del self.rows[key]
                key = next(k for k in range(100, 1000) if k not in self.rows)
            if not self.keyed:
                facts["__before"] = [
                    (name, str(key) if number == 1 else printed(old.get(number))) for number, name in self.names.items()
                ]
        self.rows[key] = row
        self.told[self.n], self.began[key] = Version(key, row), self.n
        left_out = facts.get("__unchanged", [])
        sent = {self.names[number]: text for number, text in row.items() if self.names[number] not in left_out}
        self.records.append((self.schema, (op, self.n, {self.names[1]: key, **sent, **facts, **moment(self.n)})))
        self.written.append(
            (self.n, {number: text for number, text in row.items() if self.names[number] not in left_out})
        )

    def name(self) -> None:
        """Send a definition: no record has today's names so far."""
        self.n += 1
        self.records.append((self.schema.as_definition(), ("s", self.n, moment(self.n))))

    def _value(self, number: int) -> str | float | None:
        values: dict[Any, list[Any]] = {
            pa.bool_(): [True, False, None],
            pa.float64(): [1.5, None, float(self.n)],
            pa.int64(): [1, None, self.n],
            NUMERIC: [Decimal("1.50"), None, Decimal(self.n).scaleb(-2)],
            WIDE: [Decimal("1.50"), None, Decimal(self.n).scaleb(-2)],
            INTEGERS: [[1], None, [self.n, None]],
        }
        return self.rng.choice(values.get(self.kinds.get(number), ["x", "y", "z", None, f"text {self.n}"]))

    def _new(self, number: int, old: object) -> str | float:
        values: dict[Any, Any] = {
            pa.bool_(): old is not True,
            pa.float64(): self.n + 0.25,
            pa.int64(): self.n,
            NUMERIC: Decimal(self.n),
            WIDE: Decimal(self.n),
            INTEGERS: [self.n],
        }
        return values.get(self.kinds.get(number), f"text {self.n}")

    def expected(self) -> list[dict[str, Any]]:
        found = [
            {self.names[1]: key, **{name: row.get(number) for number, name in self.names.items() if number != 1}}
            for key, row in self.rows.items()
        ]
        return sorted(found, key=lambda row: row[self.names[1]])


def printed(value: Any) -> str | None:
    """Return a value as PostgreSQL prints it."""
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, list):
        return "{" + ",".join("NULL" if item is None else str(item) for item in value) + "}"
    if isinstance(value, Decimal):
        return str(value)
    return value if value is None or isinstance(value, str) else f"{value:g}"


def moment(n: int) -> dict[str, Any]:
    """Return a record's place at the source."""
    return {"__commit_lsn": n, "__commit_index": 0, "__commit_ts": MIDNIGHT + timedelta(seconds=n)}


def names_in_versions(source: Source) -> dict[int, str]:
    """Return today's names of the columns of versions, by number: a version column keeps its own."""
    return {
        number: f"{name}__{number}" if name.lower() in {"valid_from", "valid_to", "is_current"} else name
        for number, name in source.names.items()
    }


def versions(source: Source) -> list[dict[str, Any]]:
    """Return the rows' versions under today's names."""
    names = names_in_versions(source)
    return [
        {
            **{name: source.told[n].row.get(number) for number, name in names.items() if number != 1},
            names[1]: source.told[n].key,
            "valid_to": None if (ended := source.told[n].ended) is None else MIDNIGHT + timedelta(seconds=ended),
            "__seq": n,
        }
        for n in sorted(source.told)
    ]


def live(rows: list[dict[str, Any]], source: Source) -> list[dict[str, Any]]:
    """Return versions, without the columns that the source no longer has."""
    wanted = {*names_in_versions(source).values(), "valid_to", "__seq"}
    found = [{name: row.get(name) for name in wanted} for row in rows]
    return sorted(found, key=lambda row: row["__seq"])


def batches(source: Source, make: Records) -> list[pa.RecordBatch]:
    """Return the records since the last call, one batch a schema version in a row."""
    runs: list[tuple[TableSchema, list[tuple[str, int, dict[str, Any]]]]] = []
    for schema, record in source.records:
        if not runs or runs[-1][0] != schema:
            runs.append((schema, []))
        runs[-1][1].append(record)
    source.records = []
    return [make(schema, *rows) for schema, rows in runs]


def shown(session: LakeSession, key: str) -> list[dict[str, Any]]:
    rows = session.query(f'SELECT * FROM public.t ORDER BY "{key}"').to_pylist()
    return [{name: value for name, value in row.items() if name != "__exact"} for row in rows]


def test_columns_keep_their_values_under_their_names_of_each_moment(
    tmp_path: Path, records: Records, seeds: Seeds
) -> None:
    seed = seeds.kept_or_new(8)
    life(tmp_path, records, seed, keyed=seed % 4 > 0, rounds=2)


@pytest.mark.long
@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("seed", range(24))
def test_columns_keep_their_values_for_long(tmp_path: Path, records: Records, seed: int, *, keyed: bool) -> None:
    life(tmp_path, records, seed, keyed=keyed, rounds=Random(seed).randint(2, 6))


@pytest.mark.long
@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("seed", range(24))
def test_names_pass_between_columns_of_types_that_no_type_holds(
    tmp_path: Path, records: Records, seed: int, *, keyed: bool
) -> None:
    kinds = (pa.string(), pa.int64(), NUMERIC, WIDE, INTEGERS)
    life(tmp_path, records, seed, keyed=keyed, rounds=Random(seed).randint(2, 6), added=kinds)


@pytest.mark.parametrize("format_", ["delta", "iceberg"])
@pytest.mark.parametrize("seed", range(4))
def test_columns_may_have_the_names_of_version_columns(
    tmp_path: Path, records: Records, seed: int, format_: str
) -> None:
    """The versions of such a table were an error, for as long as `views` named `scd2`."""
    lake = iceberg(tmp_path) if format_ == "iceberg" else None
    life(tmp_path, records, seed, keyed=True, rounds=3, added=(pa.string(),), lake=lake, among=OF_VERSIONS)


@pytest.mark.long
@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_columns_keep_their_values_in_iceberg_tables(
    tmp_path: Path, records: Records, seed: int, *, keyed: bool
) -> None:
    kinds = (pa.string(), pa.int64(), NUMERIC, WIDE, INTEGERS) if seed % 2 else ()
    rounds = Random(seed).randint(2, 6)
    life(tmp_path, records, seed, keyed=keyed, rounds=rounds, added=kinds, lake=iceberg(tmp_path))


@pytest.mark.parametrize("format_", ["delta", "iceberg"])
@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 24))])
def test_a_column_with_a_type_that_holds_no_earlier_value_is_another_one(
    tmp_path: Path, records: Records, seed: int, format_: str, *, keyed: bool
) -> None:
    """The table was set aside until it was rebuilt."""
    lake = iceberg(tmp_path) if format_ == "iceberg" else None
    kinds = (pa.string(), pa.int64(), NUMERIC, INTEGERS)
    life(tmp_path, records, seed, keyed=keyed, rounds=3, added=kinds, lake=lake, retypes=True)


@pytest.mark.parametrize("format_", ["delta", "iceberg"])
def test_values_of_a_type_that_nothing_converts_stay_in_every_view(
    tmp_path: Path, records: Records, format_: str
) -> None:
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    layout = iceberg(tmp_path) if format_ == "iceberg" else layout
    source = Source(Random(0), names={1: "id", 2: "price"})
    ids = list[int]()

    def land(*rows: tuple[str, dict[str, Any]]) -> None:
        found = [(op, source.n + place, {**row, **moment(source.n + place)}) for place, (op, row) in enumerate(rows, 1)]
        source.n += len(rows)
        landed = [append_history(layout, source.schema, [records(source.schema, *found)], Seq(source.n))]
        landed += [fold_table(layout, source.schema, Seq(source.n))]
        landed += [fold_into_versions(layout, source.schema, Seq(source.n)).commit]
        commit_cut(layout, Seq(source.n), landed, committed_at=datetime.now(UTC))

    def price_id() -> int:
        if format_ == "delta":
            return 0
        path = layout.table_path("history", source.schema)
        return catalog_of(layout).load_table(identifier_of(layout, path)).schema().find_field("price").field_id

    land(("c", {"id": 1, "price": "cheap"}), ("c", {"id": 2, "price": "dear"}))
    ids.append(price_id())
    source.retype(2)
    source.kinds[4] = pa.bool_()
    land(("u", {"id": 2, "price": True}))
    with LakeSession(layout) as session:
        assert shown(session, "id") == [{"id": 1, "price": None}, {"id": 2, "price": True}]
    land(("t", {}), ("r", {"id": 1, "price": False}), ("r", {"id": 2, "price": True}))
    ids.append(price_id())
    later = {"id": 1, "price": False}, {"id": 2, "price": True}
    with LakeSession(layout) as session:
        assert shown(session, "id") == [*later]
        ended = session.query('SELECT id, price, price__2 FROM scd2."public.t" WHERE valid_to IS NOT NULL ORDER BY ALL')
        assert {"id": 1, "price": None, "price__2": "cheap"} in ended.to_pylist()
    with LakeSession(layout, as_of=Seq(2)) as session:
        assert shown(session, "id") == [{"id": 1, "price": "cheap"}, {"id": 2, "price": "dear"}]
    history = read(layout, layout.table_path("history", source.schema)).sort_by("__seq")
    new, old = ("price", f"price__{ids[0]}") if format_ == "iceberg" else ("price__2", "price")
    assert history.column(new).to_pylist() == [None, None, True, None, False, True]
    assert history.column(old).to_pylist() == ["cheap", "dear", None, None, None, None]
    if format_ == "iceberg":
        table = catalog_of(layout).load_table(identifier_of(layout, layout.table_path("history", source.schema)))
        assert table.schema().find_field(old).field_id == ids[0] != ids[1]
        with LakeSession(layout) as session:
            found = session.query(f'SELECT price, {old} FROM history."public.t" ORDER BY __seq').to_pylist()
        assert [(row["price"], row[old]) for row in found[:3]] == [(None, "cheap"), (None, "dear"), (True, None)]


@pytest.mark.parametrize("format_", ["delta", "iceberg"])
def test_records_of_the_earlier_type_behind_a_copys_first_one_lie_with_the_others_of_it(
    tmp_path: Path, records: Records, format_: str
) -> None:
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    layout = iceberg(tmp_path) if format_ == "iceberg" else layout
    source = Source(Random(0), names={1: "id", 2: "price"})
    old = source.schema
    source.retype(2)
    source.kinds[4] = pa.bool_()
    new = source.schema
    append_history(layout, old, [records(old, ("c", 1, {"id": 1, "price": "cheap", **moment(1)}))], Seq(1))
    found = [
        records(new, ("t", 2, moment(2))),
        records(old, ("c", 3, {"id": 2, "price": "dear", **moment(3)})),
        records(new, ("r", 4, {"id": 1, "price": False, **moment(4)}), ("r", 5, {"id": 2, "price": True, **moment(5)})),
    ]
    landed = append_history(layout, new, found, Seq(5))
    commit_cut(layout, Seq(5), [landed], committed_at=datetime.now(UTC))
    own = [name for name in open_history(layout, new).schema().names if not name.startswith("__")]
    assert len(own) == 3, "one column a type"
    with LakeSession(layout) as session:
        assert shown(session, "id") == [{"id": 1, "price": False}, {"id": 2, "price": True}]
    with LakeSession(layout, as_of=Seq(3)) as session:
        assert shown(session, "id") == [{"id": 2, "price": "dear"}]


def iceberg(folder: Path) -> LakeLayout:
    catalog = {"type": "sql", "uri": f"sqlite:///{folder}/iceberg.db"}
    return LakeLayout(str(folder / "lake"), "shop", StreamId(UUID(int=42)), format="iceberg", catalog=catalog)


def test_renamed_columns_keep_their_ids_in_iceberg(tmp_path: Path, records: Records) -> None:
    layout = iceberg(tmp_path)
    source = Source(Random(0), kinds={1: pa.int64(), 3: INTEGERS})
    path = layout.table_path("current", source.schema)
    ids = []
    for n, names in enumerate(({1: "id", 2: "a", 3: "b"}, {1: "key", 2: "b", 3: "a"}, {1: "id", 2: "c", 3: "a"}), 1):
        source.n, source.names, source.version = n, names, n
        row = {names[1]: n, names[2]: f"t{n}", names[3]: [n]}
        append_history(layout, source.schema, [records(source.schema, ("c", n, {**row, **moment(n)}))], Seq(n))
        fold_table(layout, source.schema, Seq(n))
        table = catalog_of(layout).load_table(identifier_of(layout, path))
        assert table.schema().identifier_field_names() == {names[1]}
        ids.append([table.schema().find_field(names[number]).field_id for number in (1, 2, 3)])
        found = table.scan().to_arrow().sort_by(names[1]).to_pylist()
        assert found == [{names[1]: at, names[2]: f"t{at}", names[3]: [at]} for at in range(1, n + 1)]
    assert ids == [ids[0]] * 3


@pytest.mark.parametrize("kind", [pa.int16(), pa.list_(pa.int16())])
def test_a_type_that_iceberg_stores_as_a_wider_one_is_rewritten_by_no_rename(
    tmp_path: Path, records: Records, kind: pa.DataType
) -> None:
    """Its files were taken for older ones of another type, at every fold, and rewritten whole."""
    layout = iceberg(tmp_path)
    source = Source(Random(0), kinds={1: pa.int64(), 3: kind})
    for n, name in enumerate("accc", 1):
        source.n, source.names, source.version = n, {1: "id", 2: name, 3: "b"}, min(n, 2)
        row = {"id": n, name: f"t{n}", "b": n if kind == pa.int16() else [n]}
        append_history(layout, source.schema, [records(source.schema, ("c", n, {**row, **moment(n)}))], Seq(n))
        for fold in (fold_table, fold_into_versions):
            fold(layout, source.schema, Seq(n))
    history = open_history(layout, source.schema)
    for view, columns in (
        ("current", current_columns(layout, source.schema, history)),
        ("scd2", version_columns(layout, history, source.schema, Seq(source.n)).columns),
    ):
        have = read(layout, layout.table_path(view, source.schema))
        assert [have.schema.field(name).type for name in ("id", "c", "b")] == [
            columns.field(name).type for name in ("id", "c", "b")
        ]
        assert {row["id"]: row["c"] for row in have.to_pylist()} == {n: f"t{n}" for n in range(1, 5)}


class Killed(Exception):
    """The process died at a failpoint."""


def repeated(rng: Random, step: Callable[[], TableCommit]) -> TableCommit:
    """Return the outcome of a step that may have been killed at some point before, and is done again then."""
    point = rng.choice([None, *POINTS])

    def hit(name: str) -> None:
        if name == point:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, suppress(Killed, LakeConflict):
        patch.setattr(failpoints, "hit", hit)
        step()
    try:
        return step()
    except LakeConflict:
        # Files of several versions were written before their table was there: its columns got other ids.
        return step()


def read(layout: LakeLayout, path: str) -> pa.Table:
    """Return a table as another program reads it."""
    if layout.format == "delta":
        return DeltaTable(path).to_pyarrow_table()
    return catalog_of(layout).load_table(identifier_of(layout, path)).scan().to_arrow()


def life(
    tmp_path: Path,
    records: Records,
    seed: int,
    *,
    keyed: bool,
    rounds: int,
    added: Sequence[pa.DataType] = (),
    lake: LakeLayout | None = None,
    retypes: bool = False,
    among: Sequence[str] = CASES,
) -> None:
    """Land, fold and query a table whose columns are renamed, swapped, added and dropped between rows."""
    layout = lake or LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    source = Source(Random(seed), keyed, *([tuple(added), tuple(among)] if added else []), retypes=retypes)
    moments: list[tuple[int, str, list[dict[str, Any]]]] = []
    is_versioned = False
    for _ in range(rounds):
        for _ in range(source.rng.randint(1, 3)):
            for _ in range(source.rng.randint(0, 5)):
                source.write()
            source.define()
        source.rng.choice([source.write, source.name])()
        append = partial(append_history, layout, source.schema, batches(source, records), Seq(source.n))
        landed = [repeated(source.rng, append)]
        if source.rng.random() < 0.6:
            upto = source.rng.choice([source.n, *(n for n, _, _ in moments[-1:])])
            sizes = source.rng.choice([DEFAULT_SIZES, SMALL])
            fold = partial(fold_table, layout, source.schema, Seq(upto), sizes=sizes)
            landed.append(repeated(source.rng, fold))
        has_versions = keyed and source.rng.random() < 0.6
        if has_versions:
            sizes = source.rng.choice([DEFAULT_SIZES, SMALL])
            fold = partial(fold_into_versions, layout, source.schema, Seq(source.n), sizes=sizes)
            landed.append(repeated(source.rng, lambda fold=fold: fold().commit))
        commit_cut(layout, Seq(source.n), landed, committed_at=datetime.now(UTC))
        is_versioned = is_versioned or has_versions
        moments.append((source.n, source.names[1], source.expected()))
        with LakeSession(layout) as session:
            assert shown(session, source.names[1]) == moments[-1][2]
            history = session.query('SELECT * FROM history."public.t"').to_pylist()
            if is_versioned:
                rows = session.query('SELECT * FROM scd2."public.t"').to_pylist()
                assert live(rows, source) == versions(source)
        by_number = {row["__seq"]: row for row in history}
        for n, row in source.written:
            for number in row.keys() & source.names.keys():
                have, wanted = by_number[n].get(source.names[number]), row[number]
                # A column of history may be a text because it has the values of a text as well.
                assert have in {wanted, printed(wanted)} if isinstance(have, str) else have == wanted
    for n, key, rows in moments:
        with LakeSession(layout, as_of=Seq(n)) as session:
            assert shown(session, key) == rows, f"as of {n}"
    had: list[list[dict[str, Any]]] = []
    for anew in (False, True):
        done = fold_table(layout, source.schema, Seq(source.n), anew=anew)
        assert done.n == source.n
        current = read(layout, layout.table_path("current", source.schema))
        current = current.drop_columns([name for name in current.column_names if name == "__exact"])
        assert sorted(current.to_pylist(), key=lambda row: row[source.names[1]]) == source.expected()
    for fold in (fold_into_versions, rebuild_versions) if keyed else ():
        fold(layout, source.schema, Seq(source.n))
        rows = read(layout, layout.table_path("scd2", source.schema))
        assert live(rows.to_pylist(), source) == versions(source)
        had.append(sorted(rows.drop_columns(["valid_from"]).to_pylist(), key=lambda row: row["__seq"]))
    assert not had or had[0] == had[1], "a rebuild finds the same values of dropped columns"


def test_history_shows_columns_that_are_gone_also_under_a_name_of_another(tmp_path: Path, records: Records) -> None:
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    source = Source(Random(0))
    found = []
    for names in ({2: "a", 3: "b"}, {3: "a", 4: "b"}, {4: "b", 5: "c"}):
        source.names = {1: "id", **names}
        source.n += 1
        row = {source.names[number]: f"{number}" for number in names}
        found.append(records(source.schema, ("c", source.n, {"id": source.n, **row})))
    landed = append_history(layout, source.schema, found, Seq(source.n))
    commit_cut(layout, Seq(source.n), [landed], committed_at=datetime.now(UTC))
    with LakeSession(layout) as session:
        rows = session.query('SELECT __seq, a, b, c FROM history."public.t" ORDER BY 1').to_pylist()
    assert rows == [
        {"__seq": 1, "a": "2", "b": "3", "c": None},
        {"__seq": 2, "a": "3", "b": "4", "c": None},
        {"__seq": 3, "a": None, "b": "4", "c": "5"},
    ]


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_text_under_the_keys_old_name_leaves_keys_numbers_in_a_build_in_parts(
    tmp_path: Path, records: Records, *, is_copied: bool
) -> None:
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    source = Source(Random(0))

    def record(op: str, key: int | None = None, **facts: Any) -> None:
        source.n += 1
        row = {} if key is None else {source.names[1]: key, source.names[2]: f"text {source.n}"}
        source.records.append((source.schema, (op, source.n, {**row, **facts, **moment(source.n)})))

    for names in ({1: "id", 2: "a"}, {1: "k", 2: "a"}, {1: "k", 2: "id"}):
        source.names = names
        for key in range(10 * len(source.versions), 10 * len(source.versions) + 10):
            record("c", key)
    if is_copied:
        record("t")
        for key in range(30):
            record("r", key)
    record("u", 50, __before=[("k", "5")])
    landed = append_history(layout, source.schema, batches(source, records), Seq(source.n))
    commit_cut(layout, Seq(source.n), [landed], committed_at=datetime.now(UTC))
    fold_table(layout, source.schema, Seq(source.n), sizes=FoldSizes(build_rows_min=0, build_bytes=2000))
    rows = DeltaTable(layout.table_path("current", source.schema)).to_pyarrow_table()
    assert sorted(rows.column("k").to_pylist()) == [*range(5), *range(6, 30), 50]


def test_a_text_from_before_a_copy_under_a_name_that_a_number_has_leaves_the_rows_readable(
    tmp_path: Path, records: Records
) -> None:
    """The records with the text lack the columns' numbers."""
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    table = Source(Random(0)).schema
    key = Column("id", pa.int64(), number=1)
    shapes = (
        (Column("id", pa.int64()), Column("a", pa.string()), Column("b", pa.string())),
        (key, Column("a", pa.int64(), number=4), Column("b", pa.string(), number=3)),
        (key, Column("a", pa.int64(), number=4), Column("c", pa.string(), number=3)),
    )
    old, copied, new = (
        replace(table, version=SchemaVersion(place), columns=columns) for place, columns in enumerate(shapes, 1)
    )
    found = [
        records(old, ("c", 1, {"id": 1, "a": "text", "b": "x", **moment(1)})),
        records(copied, ("t", 2, moment(2)), ("r", 3, {"id": 1, "a": 5, "b": "x", **moment(3)})),
        records(new, ("c", 4, {"id": 2, "a": 6, "c": "y", **moment(4)})),
    ]
    landed = append_history(layout, new, found, Seq(4))
    commit_cut(layout, Seq(4), [landed], committed_at=datetime.now(UTC))
    with LakeSession(layout) as session:
        assert shown(session, "id") == [{"id": 1, "a": 5, "c": "x"}, {"id": 2, "a": 6, "c": "y"}]


def test_records_without_numbers_whose_name_had_values_of_another_type_are_a_conflict(
    tmp_path: Path, records: Records
) -> None:
    """Several readings fit them, so no one can tell whether the name is the same column."""
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    numbered = Source(Random(0), names={1: "id", 2: "a"}, kinds={1: pa.int64(), 2: INTEGERS}).schema
    columns = (Column("id", pa.int64()), Column("a", pa.string()))
    unclear = replace(numbered, version=SchemaVersion(2), columns=columns)
    append_history(layout, numbered, [records(numbered, ("c", 1, {"id": 1, "a": [1], **moment(1)}))], Seq(1))
    with pytest.raises(LakeError) as caught:
        append_history(layout, unclear, [records(unclear, ("c", 2, {"id": 2, "a": "x", **moment(2)}))], Seq(2))
    assert caught.value.code == "lake_schema_conflict"
    assert "pipeline rebuild public.t --from source" in caught.value.hint


def test_the_era_in_which_a_name_passes_on_in_another_case_is_kept_beyond_the_bound() -> None:
    source = Source(Random(0))
    told = []
    for n in range(ERAS_MAX + 10):
        # Beyond the bound, "a" is dropped and "A" added; all later eras add columns.
        source.names = {1: "id", 2: "a"} if n < 3 else {1: "id", 3: "A"}
        source.names |= {100 + place: f"c{place}" for place in range(n)}
        told.append((Seq(n), source.schema))
    kept = dict(Eras("public.t", tuple(told)).bounded().told)
    assert Seq(3) in kept
    assert Seq(2) not in kept


@pytest.mark.parametrize("is_one_batch", [True, False])
def test_a_timestamp_under_the_name_of_a_text_lies_in_a_column_of_its_own(
    tmp_path: Path, records: Records, *, is_one_batch: bool
) -> None:
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    source = Source(Random(0), kinds={1: pa.int64(), 4: pa.timestamp("us", "UTC"), 5: pa.int64()})
    expected, found, n = [], list[pa.RecordBatch](), 0
    for names in (
        {2: "a", 3: "b"},
        {2: "old", 3: "b", 4: "a"},
        {2: "old", 4: "b", 5: "a"},
        {2: "a", 4: "b", 5: "a__4"},
    ):
        source.names = {1: "id", **names}
        n += 1
        values = {2: f"text {n}", 3: f"text {n}", 4: MIDNIGHT, 5: n}
        expected.append({number: values[number] for number in names})
        row = {name: values[number] for number, name in names.items()}
        found.append(records(source.schema, ("c", n, {"id": n, **row, **moment(n)})))
        if not is_one_batch:
            append_history(layout, source.schema, found[-1:], Seq(n))
            fold_table(layout, source.schema, Seq(n))
            fold_into_versions(layout, source.schema, Seq(n))
    landed = append_history(layout, source.schema, found, Seq(n))
    folded = [fold_table(layout, source.schema, Seq(n)), fold_into_versions(layout, source.schema, Seq(n)).commit]
    commit_cut(layout, Seq(n), [landed, *folded], committed_at=datetime.now(UTC))
    wanted = [{name: row.get(number) for number, name in source.names.items() if number != 1} for row in expected]
    with LakeSession(layout) as session:
        for view in ("", "history.", "scd2."):
            table = '"public.t"' if view else "public.t"
            rows = session.query(f"SELECT a, b, a__4::int AS a__4 FROM {view}{table} ORDER BY id").to_pylist()
            assert rows == wanted, view
    history = DeltaTable(layout.table_path("history", source.schema)).to_pyarrow_table()
    kinds = {field.name: field.type for field in history.schema if not field.name.startswith("__")}
    assert kinds["a"] == kinds["b"] == pa.string()
    assert kinds["a__4"] == kinds["b__4"] == pa.timestamp("us", "UTC")


@pytest.mark.parametrize("keyed", [True, False])
def test_names_that_the_key_and_an_array_swap_are_read_before_the_next_change(
    tmp_path: Path, records: Records, *, keyed: bool
) -> None:
    """The query has no record to fold, and history's columns of the two names have each other's values."""
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    source = Source(Random(0), keyed, kinds={1: pa.int64(), 3: INTEGERS}, names={1: "a", 3: "b"})
    found = [records(source.schema, ("c", 1, {"a": 1, "b": [1], **moment(1)}))]
    source.names = {1: "b", 3: "a"}
    found.append(records(source.schema, ("c", 2, {"b": 2, "a": [2], **moment(2)})))
    landed = append_history(layout, source.schema, found, Seq(2))
    commit_cut(layout, Seq(2), [landed, fold_table(layout, source.schema, Seq(2))], committed_at=datetime.now(UTC))
    with LakeSession(layout) as session:
        assert shown(session, "b") == [{"b": 1, "a": [1]}, {"b": 2, "a": [2]}]


@pytest.mark.parametrize("kinds", [(pa.string(), WIDE), (WIDE, pa.string())])
def test_a_number_that_lies_in_columns_of_two_types_stays_a_number(
    tmp_path: Path, records: Records, kinds: tuple[pa.DataType, pa.DataType]
) -> None:
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    source = Source(Random(0), kinds={1: pa.int64(), 2: kinds[0], 3: kinds[1], 4: pa.int64()})
    found = []
    for n, names in enumerate(({2: "a", 3: "b"}, {2: "x", 3: "b", 4: "a"}, {2: "x", 3: "y", 4: "b"}), 1):
        source.names = {1: "id", **names}
        found.append(
            records(source.schema, ("c", n, {"id": n, **({source.names[4]: n} if n > 1 else {}), **moment(n)}))
        )
    landed = append_history(layout, source.schema, found, Seq(3))
    commit_cut(layout, Seq(3), [landed], committed_at=datetime.now(UTC))
    for fold in (lambda: None, lambda: fold_table(layout, source.schema, Seq(3))):
        fold()
        with LakeSession(layout) as session:
            assert [(row["id"], row["b"]) for row in shown(session, "id")] == [(1, None), (2, 2), (3, 3)]


def test_versions_of_an_earlier_table_go_on_under_a_name_that_differs_by_case(tmp_path: Path, records: Records) -> None:
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    before = Source(Random(0), names={1: "id", 2: "a"})
    after = Source(Random(0), names={1: "id", 2: "A"})
    for n, (source, table) in enumerate(((before, 3), (after, 9)), 1):
        schema = replace(source.schema, table_id=TableId(table))
        row = {"id": n, source.names[2]: f"text {n}"}
        landed = append_history(layout, schema, [records(schema, ("c", n, {**row, **moment(n)}))], Seq(n))
        folded = fold_into_versions(layout, schema, Seq(n)).commit
        commit_cut(layout, Seq(n), [landed, folded], committed_at=datetime.now(UTC))
    with LakeSession(layout) as session:
        rows = session.query('SELECT id, A FROM scd2."public.t" ORDER BY id').to_pylist()
    assert rows == [{"id": 1, "A": "text 1"}, {"id": 2, "A": "text 2"}]


def test_versions_of_an_earlier_table_keep_columns_named_as_version_columns(tmp_path: Path, records: Records) -> None:
    layout = LakeLayout(str(tmp_path / "lake"), "shop", StreamId(UUID(int=42)))
    tables = (
        (3, Source(Random(0), names={1: "id", 2: "valid_to"})),
        (9, Source(Random(0), names={1: "id", 2: "a", 3: "valid_to"})),
        (12, Source(Random(0), names={1: "id", 2: "a"})),
    )
    for n, (table, source) in enumerate(tables, 1):
        schema = replace(source.schema, table_id=TableId(table))
        row = {"id": n, **{name: f"text {n}" for number, name in source.names.items() if number > 1}}
        landed = append_history(layout, schema, [records(schema, ("c", n, {**row, **moment(n)}))], Seq(n))
        folded = fold_into_versions(layout, schema, Seq(n)).commit
        commit_cut(layout, Seq(n), [landed, folded], committed_at=datetime.now(UTC))
        with LakeSession(layout) as session:
            rows = session.query("SELECT id, * LIKE 'valid_to__%' FROM scd2.\"public.t\" ORDER BY id").to_pylist()
        first, second = {"id": 1, "valid_to__2": "text 1"}, {"id": 2, "valid_to__3": "text 2"}
        expected = [first, second, {"id": 3}][:n]
        assert [{name: value for name, value in one.items() if value is not None} for one in rows] == expected
