"""A table's rows at a position, as SQL: `current`, without rows that later records delete, with those they insert.

Each function returns a SELECT with the schema's columns, and `__exact` if a row needs it. If asked, rows of a
partitioned table have `__partition_oid`, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import LakeFilesGone, PositionError
from millstream.lake.column_conversion import EXACT, conform, text_maps
from millstream.lake.column_names import names_at, renames_in
from millstream.lake.data_files import ROW_GROUP_ROWS, LiveFile, TableFiles, files_of, table_in
from millstream.lake.folded.build import build_rows, plan_build
from millstream.lake.folded.current_rules import fold_records
from millstream.lake.folded.current_table import DEFAULT_SIZES, current_columns, tail_columns
from millstream.lake.history_folder import history_from, lacks_beginning
from millstream.lake.history_scan import scan_live
from millstream.lake.layout import LakeLayout
from millstream.lake.query.duckdb_connection import Engine, names, unavailable
from millstream.lake.query.renamed_records import rows_sql
from millstream.lake.query.tail_effect import SEQ, overlay
from millstream.lake.row_identity import Keys
from millstream.lake.table_format import OpenTable
from millstream.model.names import literal, quote
from millstream.model.positions import Seq, StreamToken
from millstream.model.records import PARTITION_OID
from millstream.model.schema import TableSchema

OVERLAY_ROWS_MAX: Final = 3_000_000
"""Records without a `current` below them: more are built into a scratch file, in bounded memory."""


class RecordRange:
    """A table's records in `(after, upto]`."""

    def __init__(
        self, engine: Engine, layout: LakeLayout, history: OpenTable, table: TableSchema, after: Seq, upto: Seq
    ) -> None:
        self._engine, self._history, self._table = engine, history, table
        self._files = TableFiles(layout, history.path)
        self._after, self._upto = int(after), int(upto)
        found = [
            file
            for file in files_of(history, SEQ)
            if (file.low is None or (file.high > after and file.low <= upto)) and table_in(file.path) == table.table_id
        ]
        self._found = sorted(found, key=lambda file: file.low or 0)
        self.rows = sum(file.rows for file in found)
        """Maximum number of records."""
        self._alike: Sequence[str] | None = None
        """The files' columns, once all have been read and had the same."""
        self._layout = layout
        self._is_renamed = renames_in(history, table.table_id, table, after=after, upto=upto) is not None
        self._named: tuple[str, Sequence[str]] | None = None
        """A scratch file with the records under the table's names, if they have others or lack values, and its columns."""

    def scan(self, needed: Sequence[str]) -> tuple[str, list[str]]:
        """Return the text behind FROM, and which columns it has."""
        if self._is_renamed and self._found:
            path, have = self._renamed()
            return self._engine.parquet([path]), [name for name in needed if name in have]
        return self._engine.scan(self._history, [file.path for file in self._found], needed, alike=self._alike)

    def read(self, needed: Sequence[str], seqs: pa.Array | None) -> pa.Table:
        """Read as `tail_effect.Read`. All records are read outside of the engine, which is slow with many small files."""
        if not self._found:
            return self._nothing(needed)
        if seqs is None:
            return self._read_named(needed) if self._is_renamed else self._read_all(needed)
        source, have = self.scan(needed)
        wanted = self._engine.register(pa.table({SEQ: seqs}))
        inside = f"{SEQ} > {self._after} AND {SEQ} <= {self._upto} AND {SEQ} IN (FROM {wanted})"
        return self._engine.fetch(f"SELECT {names(have)} FROM {source} WHERE {inside}")

    def scan_base(self, base: OpenTable, columns: pa.Schema) -> tuple[str, list[str]]:
        """Return the text behind FROM that reads rows of `current` under the table's names, and which columns it has."""
        assert base.n is not None, "it has rows"
        renamed = names_at(self._history, self._table, base.n)
        if renamed is None:
            return self._engine.scan(base, None, [*columns.names, EXACT.name])
        needed = [name for column in columns.names if isinstance(name := renamed.get(column, column), str)]
        source, have = self._engine.scan(base, None, [*needed, EXACT.name])
        return rows_sql(self._engine, source, have, columns, renamed) if source else ("", [])

    def _renamed(self) -> tuple[str, Sequence[str]]:
        """Write the records under the table's names to a scratch file, once; return it and its columns."""
        import pyarrow.parquet as pq

        if self._named is None:
            after, upto = Seq(self._after), Seq(self._upto)
            own = current_columns(self._layout, self._table, self._history)
            columns = ["__op", SEQ, "__unchanged", EXACT.name, "__before", *own.names]
            scan = scan_live(self._history, self._table, after=after, upto=upto, columns=columns, own=own)
            path = self._engine.scratch_file()
            with pq.ParquetWriter(path, scan.schema, compression="zstd", compression_level=1) as writer:
                for rows in scan.batches():
                    self._engine.watch.check()
                    writer.write_table(rows)
            self._named = path, scan.schema.names
        return self._named

    def _nothing(self, needed: Sequence[str]) -> pa.Table:
        """Return no records. History's own column of a name may have values of another column, of any type."""
        have, own = self._history.schema(), current_columns(self._layout, self._table, self._history)
        shape = {field.name: field for field in [*have, *own]}
        return pa.schema([shape[name] for name in needed if name in shape]).empty_table()

    def _read_named(self, needed: Sequence[str]) -> pa.Table:
        import pyarrow.parquet as pq

        path, have = self._renamed()
        return pq.read_table(path, columns=[name for name in needed if name in have])

    def _read_all(self, needed: Sequence[str]) -> pa.Table:
        shape = self._history.schema()
        shape = pa.schema([shape.field(name) for name in needed if name in shape.names])
        tables, schemas = [shape.empty_table()], list[Any]()
        try:
            for file in self._found:
                with self._files.open(file.path) as opened:
                    # Small files are read faster without threads.
                    rows = opened.read(columns=shape.names, use_threads=file.rows >= ROW_GROUP_ROWS)
                    schemas.append(opened.schema)
                    if self._alike is None and len(schemas) == 1:
                        self._alike = opened.schema_arrow.names
                tables.append(conform(self._inside(file, rows), shape))
        except LakeFilesGone as error:
            raise unavailable(self._history, error) from error
        if not all(schema.equals(schemas[0]) for schema in schemas[1:]):
            self._alike = None
        return pa.concat_tables(tables)

    def _inside(self, file: LiveFile, rows: pa.Table) -> pa.Table:
        """Return those of a file's rows that are in the run."""
        if file.low is not None and file.low > self._after and file.high <= self._upto:
            return rows
        seqs = rows.column(SEQ)
        return rows.filter(pc.and_(pc.greater(seqs, self._after), pc.less_equal(seqs, self._upto)))


def table_sql(
    engine: Engine,
    run: RecordRange,
    base: OpenTable | None,
    history: OpenTable,
    schema: TableSchema,
    columns: pa.Schema,
    *,
    upto: Seq,
    partitions: bool,
) -> str:
    """Return a table's rows.

    Args:
        base: `current` at or below the position; None if everything comes from history.
        schema: its schema at the position.
    """
    shown = [*schema.column_names, *([PARTITION_OID.name] if partitions and schema.partitioned else [])]
    if not schema.key:
        return _bag_sql(engine, run, base, schema, columns, shown)
    if base is None and run.rows > OVERLAY_ROWS_MAX:
        return _built_sql(engine, upto, history, schema, columns, shown)
    return _keyed_sql(engine, run, base, schema, columns, shown)


def _keyed_sql(
    engine: Engine,
    run: RecordRange,
    base: OpenTable | None,
    schema: TableSchema,
    columns: pa.Schema,
    shown: list[str],
) -> str:
    """Return the rows that records insert, on top of the rows of `current` that they leave."""
    stood = base is not None

    def lookup(keys: Keys) -> pa.Table:
        return _rows_of(engine, run, base, keys, columns)

    over = overlay(run.read, schema, columns, lookup, stood=stood)
    source, have = "", list[str]()
    if base is not None and not over.truncated:
        source, have = run.scan_base(base, columns)
    if EXACT.name in have or over.exact:
        shown = [*shown, EXACT.name]
    types = engine.register(pa.schema([*columns, EXACT]).empty_table())
    parts = []
    # DuckDB's own tables, which it probes faster than Arrow's: ten million times, for a query over everything.
    winners = engine.keep(over.winners) if over.winners.num_rows else ""
    if source:
        kept = f"SELECT {filled(engine, shown, have, 'c', types)} FROM {_staying(source, have, over.left)} c"
        if len(over.gone):
            # Every winner's key is among them.
            same = over.gone.typed and len(over.gone) == over.winners.num_rows
            gone = winners if same else engine.keep(gone_table(over.gone))
            kept += f" ANTI JOIN {gone} g ON {same_key(over.gone, with_exact=EXACT.name in have)}"
        parts.append(kept)
    if winners:
        parts.append(_winners_sql(engine, run, winners, schema, shown, types))
    if over.built.num_rows or not parts:
        parts.append(f"SELECT {names(shown)} FROM {engine.register(over.built)}")
    return " UNION ALL ".join(parts)


def _winners_sql(
    engine: Engine, run: RecordRange, winners: str, schema: TableSchema, shown: Sequence[str], types: str
) -> str:
    """Return the records that are rows. Keys come from memory, so that a condition on them avoids reading the files."""
    source, have = run.scan([*shown, SEQ])
    values = [f"w.{quote(name)}" if name in schema.key else filled(engine, [name], have, "h", types) for name in shown]
    return f"SELECT {', '.join(values)} FROM {winners} w JOIN {source} h ON h.{SEQ} = w.{SEQ}"


def _bag_sql(
    engine: Engine,
    run: RecordRange,
    base: OpenTable | None,
    schema: TableSchema,
    columns: pa.Schema,
    shown: list[str],
) -> str:
    """Return the rows of a table without a key.

    They are those of `current`, less as many equal ones as were deleted, and new ones.
    """
    folded = fold_records(run.read(tail_columns(columns), None), schema, columns, _nothing)
    source, have = "", list[str]()
    if base is not None and not folded.truncated:
        source, have = run.scan_base(base, columns)
    if EXACT.name in have or folded.rows.column(EXACT.name).null_count < folded.rows.num_rows:
        shown = [*shown, EXACT.name]
    fresh = f"SELECT {names(shown)} FROM {engine.register(folded.rows)}"
    if not source:
        return fresh
    types = engine.register(pa.schema([*columns, EXACT]).empty_table())
    kept = f"SELECT {filled(engine, shown, have, 'c', types)} FROM {_staying(source, have, folded.left)} c"
    if len(folded.gone):
        gone = engine.register(gone_table(folded.gone))
        kept = _without(kept, f"SELECT {names(shown)} FROM {gone}", shown, columns)
    return f"{kept} UNION ALL {fresh}"


def _staying(source: str, have: Sequence[str], left: Sequence[int]) -> str:
    """Return the text behind FROM for those rows of `current` that aren't in partitions that left."""
    if not left or PARTITION_OID.name not in have:
        return source
    oids = ", ".join(map(str, left))
    return f"(SELECT * FROM {source} WHERE coalesce({PARTITION_OID.name} NOT IN ({oids}), true))"


def left_sql(engine: Engine, layout: LakeLayout, history: OpenTable, schema: TableSchema, upto: Seq) -> str:
    """Return the rows of a table that lost its name to another, from its history: its `current` went with the name.

    Raises:
        PositionError (`beyond_retention`): it lacks its beginning.
    """
    if lacks_beginning(history):
        gone = history_from(history)
        raise PositionError(
            f"the records of {schema.full_name} up to {StreamToken.scalar(layout.stream_id, gone)} were dropped from history",
            code="beyond_retention",
            hint="Change the row at the source, which captures its missing values.",
            first=int(gone),
        )
    columns = current_columns(layout, schema, history)
    run = RecordRange(engine, layout, history, schema, Seq(0), upto)
    return (_keyed_sql if schema.key else _bag_sql)(engine, run, None, schema, columns, schema.column_names)


def _built_sql(
    engine: Engine, upto: Seq, history: OpenTable, schema: TableSchema, columns: pa.Schema, shown: list[str]
) -> str:
    """Return a large table's rows from all of its history, through a scratch file."""
    import pyarrow.parquet as pq

    parts, exact = plan_build(history, schema, columns, upto, part_bytes=DEFAULT_SIZES.build_bytes)
    shape = pa.schema([*columns, EXACT])
    path = engine.scratch_file()
    with pq.ParquetWriter(path, shape, compression="zstd", compression_level=1) as writer:
        for part in parts:
            engine.watch.check()
            writer.write_table(conform(build_rows(history, schema, columns, upto, part), shape))
    return f"SELECT {names([*shown, *([EXACT.name] if exact else [])])} FROM {engine.parquet([path])}"


def _rows_of(engine: Engine, run: RecordRange, base: OpenTable | None, keys: Keys, columns: pa.Schema) -> pa.Table:
    """Return rows of `current` that may have one of the keys."""
    shape = pa.schema([*columns, EXACT])
    source, have = ("", []) if base is None else run.scan_base(base, columns)
    if not source:
        return shape.empty_table()
    first = engine.register(keys.to_table().select([0]))
    name = quote(keys.names[0])
    found = engine.fetch(
        f"SELECT {names(have)} FROM {source} c WHERE EXISTS (FROM {first} k WHERE c.{name} IS NOT DISTINCT FROM k.{name})"
    )
    return conform(found, shape)


def filled(engine: Engine, shown: Sequence[str], have: Sequence[str], table: str, types: str) -> str:
    """Return a SELECT's list of columns, NULL for those that the files lack."""
    return ", ".join(
        f"{table}.{quote(name)}" if name in have else f"NULL::{engine.type_of(types, name)} AS {quote(name)}"
        for name in shown
    )


def _nothing(keys: Keys) -> pa.Table:
    """Look up rows for bags, which never need a row's past."""
    return keys.to_table()


def _without(kept: str, gone: str, shown: list[str], columns: pa.Schema) -> str:
    """Return a bag's rows without as many equal ones as `gone` has.

    The texts distinguish 0 and -0, which are equal in SQL. Each row that goes is one of its partition. If there is none, it
    is one of an unknown partition; if its own partition isn't known, it is any.
    """
    signs = "".join(f", CAST({quote(f.name)} AS VARCHAR)" for f in columns if pa.types.is_floating(f.type))
    own = f"{names([name for name in shown if name != PARTITION_OID.name])}{signs}"
    if PARTITION_OID.name not in shown:
        both = " EXCEPT ALL ".join(f"SELECT {own} FROM ({rows})" for rows in (kept, gone))
        return f"SELECT {names(shown)} FROM ({both})"
    both = f"SELECT *, false AS __is_gone FROM ({kept}) UNION ALL SELECT *, true FROM ({gone})"
    equal = f"PARTITION BY {own}, {PARTITION_OID.name}"
    others = "CASE WHEN __is_gone THEN __has ELSE __loses END"
    counts = f"count(*) FILTER (NOT __is_gone) OVER ({equal}) AS __has, count(*) FILTER (__is_gone) OVER ({equal}) AS __loses"
    paired = f"SELECT *, row_number() OVER ({equal}, __is_gone) AS __number, {counts} FROM ({both})"
    rest = f"SELECT * EXCLUDE (__number) FROM ({paired}) WHERE __number > {others}"
    fewer = f"count(*) FILTER (__is_gone) OVER (PARTITION BY {own}) AS __fewer"
    order = f"ORDER BY {PARTITION_OID.name} NULLS FIRST"
    number = f"row_number() OVER (PARTITION BY __is_gone, {own} {order}) AS __number"
    counted = f"SELECT *, {fewer}, {number} FROM ({rest})"
    return f"SELECT {names(shown)} FROM ({counted}) WHERE NOT __is_gone AND __number > __fewer"


def gone_table(gone: Keys) -> pa.Table:
    """Return keys as a table: the typed columns, `__exact`, and each column's text."""
    exact = [pa.nulls(len(gone), pa.string()) if e is None else e for e in gone.exact]
    arrays = [*gone.columns, text_maps(gone.names, exact, len(gone)), *exact]
    return pa.table(arrays, names=[*gone.names, EXACT.name, *(f"__exact.{name}" for name in gone.names)])


def same_key(gone: Keys, *, with_exact: bool) -> str:
    """Return the condition that a row of `current` (`c`) has a key of `gone` (`g`)."""
    if gone.typed:
        return " AND ".join(f"c.{quote(name)} = g.{quote(name)}" for name in gone.names)
    same = []
    for name in gone.names:
        same.append(f"c.{quote(name)} IS NOT DISTINCT FROM g.{quote(name)}")
        text = f"c.__exact[{literal(name)}]" if with_exact else "NULL"
        same.append(f"{text} IS NOT DISTINCT FROM g.{quote(f'__exact.{name}')}")
    return " AND ".join(same)
