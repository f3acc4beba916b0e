"""SQL over all tables of a stream at one token, fresh: `current` at its last fold, under history's tail since then.

The token is that of the last commit cut, or of an earlier one. For each table, the session finds the records since
the fold that are rows now, and a DuckDB view lays them over `current`. So a query sees the last batch, whatever the
table's size, and never half a transaction. Nothing is written to the lake, and SQL reaches only the lake's files.

Views: `schema.table` for the rows, `history."schema.table"` for the records, `history._messages` for logical
messages, `scd2."schema.table"` for the versions of rows, if the lake keeps them. Only tables whose name stands in the
SQL are prepared. `merged."schema.table"` has the rows of all regions, from their logs. DuckDB is imported when a
session opens.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Final, cast

import pyarrow as pa

from millstream.closing import Closing
from millstream.errors import (
    InvalidQuery,
    LakeBehind,
    LakeError,
    LakeTableForeign,
    LakeUnavailable,
    MillstreamError,
)
from millstream.lake.commit_cuts import Cut, CutTable, last_cut
from millstream.lake.folded.current_table import current_columns
from millstream.lake.known_tables import (
    KnownTable,
    empty_views,
    is_meant,
    other_name,
    tables_there,
    unknown_table,
    where_they_land,
)
from millstream.lake.layout import MESSAGES, LakeLayout, has_current, without_rows
from millstream.lake.query.duckdb_connection import Engine, path_of
from millstream.lake.query.log_tail import TailTables
from millstream.lake.query.merged_sql import MergedTables, MergedViews
from millstream.lake.query.namesakes import Namesakes, names_written
from millstream.lake.query.overlaid_rows import RecordRange, left_sql, table_sql
from millstream.lake.query.query_limits import QueryBounds
from millstream.lake.query.renamed_records import records_sql
from millstream.lake.query.sql_keywords import CATALOG_WORDS, LIST, LISTED, stands_in, words_to_quote
from millstream.lake.query.tail_effect import SEQ
from millstream.lake.query.time_travel import (
    LogTail,
    add_since_the_cut,
    known_later,
    open_history,
    open_whole,
    standing_at,
    whole_history,
)
from millstream.lake.query.version_rows import versions_sql
from millstream.lake.schema_history import Era, era_at, era_of, newest_schema
from millstream.lake.table_format import OpenTable, open_table
from millstream.lake.table_renames import open_left_behind
from millstream.model.ids import TableId
from millstream.model.names import parse_qualified_name, quote
from millstream.model.positions import Seq, StreamToken
from millstream.model.query_reasons import Reason, with_reasons
from millstream.model.region_ages import RegionAge
from millstream.model.schema import TableSchema

HISTORY: Final = "history"
SCD2: Final = "scd2"
_STREAM_ROWS: Final = 1 << 16


class LakeSession(Closing):
    """A stream's tables at one token, as views of a private DuckDB connection.

    Use it from one thread. It stands at the last cut when it was opened, or at an earlier one. Files that folds
    replace stay for some minutes, so an older session may have to be opened again.
    """

    def __init__(
        self,
        layout: LakeLayout,
        *,
        as_of: Seq | datetime | None = None,
        held: Callable[[], Mapping[str, str]] | None = None,
        known: Callable[[], Sequence[KnownTable]] | None = None,
        copies: Callable[[], Mapping[TableId, Reason]] | None = None,
        landed_by: str | None = None,
        merged: MergedTables | None = None,
        log: LogTail | None = None,
        bounds: QueryBounds | None = None,
        partitions: bool = False,
    ) -> None:
        """Open a session.

        Args:
            as_of: an earlier position, or a moment (with a time zone): the last operation before the first one that
                committed after it. Tables then have their columns of that time. None for the newest position. A
                position inside an operation means the position before the operation.
            held: returns the tables that are quarantined, by name, with the reason. Called at most once, and only if a
                table of a query has received nothing lately: the call may take longer than the query.
            known: returns the source's tables as capture knows them. Called at most once, if a query names a table that
                the lake lacks, or may list all. Tables without a record are then empty; renamed ones have new names.
            copies: returns the tables whose copy isn't whole. Called at most once, after the first statement.
            landed_by: the other node that lands the stream's tables, for messages; None if this one does.
            merged: reads the tables that several regions write; None if there are none.
            log: reads the log's records that the lake lacks, which the session shows as if they had landed, up to the
                readable end; None for the lake alone.
            partitions: whether rows of a partitioned table have `__partition_oid`.

        Raises:
            UsageError (`missing_extra`): DuckDB isn't installed.
            TokenFromFuture: neither the lake nor the log has reached `as_of`.
            LakeBehind: the log has more records up to `as_of` than a query merges. Without `as_of` it then leaves them
                out (`left_out`).
            PositionError (`time_from_future`): the clock hasn't reached `as_of`.
            PositionError (`beyond_retention`): the lake begins after `as_of`.
            LakeTableForeign: another program wrote into `_commits`.
        """
        self._layout = layout
        folder = None if bounds is None else bounds.folder
        self._scratch = tempfile.TemporaryDirectory(prefix="millstream-query-", dir=folder)
        self._engine = Engine(self._scratch.name, bounds)
        self._past, self._shows_partitions = as_of is not None, partitions
        self.landed_by: Final = landed_by
        """The other node that lands the tables; None if this one does."""
        try:
            self._standing = standing_at(layout, as_of, log)
            self._n, self._cut = self._standing.n, self._standing.cut
            self.left_out: Final = self._standing.left_out
            """The reason why the log's newest records aren't merged; empty if they are, and if the log isn't read."""
            moved = as_of is not None and not isinstance(as_of, datetime) and as_of != self._n
            self._asked = cast("Seq", as_of) if moved else None
            self._quarantined: Final = cache(held or dict[str, str])
            self._log = log
            self._tail = TailTables(layout, log, self._standing, self._scratch.name, self._quarantined)
            self._tables = self._tail.tables()
            self._elsewhere = dict[str, str]()
            """Folders with the history of tables that were renamed behind the position, by the tables' folders."""
            if self._past and (self._cut is None or self._cut.n < self._n):
                self._elsewhere |= add_since_the_cut(layout, self._n, self._tables)
        except BaseException:
            self.close()
            raise
        self._capture_knows: Final = cache(known or list[KnownTable])
        self._copies: Final = cache(copies or dict[TableId, Reason])
        self._learned = known is None
        self._namesakes = Namesakes(self._engine)
        self._merged = MergedViews(self._engine, merged, past=self._past)
        self._old_versions = True
        """Whether `current` may be read at versions that aren't the newest: their files may go at any time."""
        self._makers: Final = {"": self._make_rows, HISTORY: self._make_records, SCD2: self._make_versions}
        self._left = {word: set(self._tables) for word in self._makers}
        """Folders of tables whose views aren't made yet, by the views' schema; empty for that of the table."""
        self._behind: dict[str, Seq] = {}
        """Tables that queries may have named and whose history ends below the token, with its end."""
        self._failures: dict[str, MillstreamError] = {}

    def close(self) -> None:
        """End the session; its results stay."""
        self._engine.close()
        self._scratch.cleanup()

    @property
    def token(self) -> StreamToken:
        """The position of all tables."""
        return StreamToken.scalar(self._layout.stream_id, self._n)

    @property
    def moved_from(self) -> StreamToken | None:
        """The requested token, if it lies inside an operation: `token` is the last one before it that splits none."""
        return None if self._asked is None else StreamToken.scalar(self._layout.stream_id, self._asked)

    @property
    def cut(self) -> Cut | None:
        """The session's cut; None if nothing has landed yet."""
        return self._cut

    def is_newest(self) -> bool:
        """Whether a new session would give the same rows: nothing new has come, and no merged rows were read."""
        if self._merged.has_rows or last_cut(self._layout) != self._cut:
            return False
        return self._log is None or bool(self.left_out) or self._log.end() <= self._n

    @property
    def regions(self) -> tuple[RegionAge, ...]:
        """The regions of the merged rows that the last statement named; empty if it named none."""
        return self._merged.regions

    @property
    def tables(self) -> list[str]:
        """The tables' names, as SQL takes them; also those of tables that have had no record so far."""
        landed = {table.table_id: table.name for folder, table in self._tables.items() if folder != MESSAGES}
        known = [] if self._past else [table for table in self._capture_knows() if table.table_id not in landed]
        return sorted({*landed.values(), *(table.full_name for table in known if table.schema and not table.waits)})

    def name_of(self, table_id: TableId) -> str | None:
        """Return a table's name in this session, whatever its current name; None if the lake has no record of it."""
        return next((table.name for table in self._tables.values() if table.table_id == table_id), None)

    def schema_of(self, table_id: TableId) -> TableSchema:
        """Return the schema that a table's rows have in this session. The lake has records of it."""
        folder = self._folder_of(table_id)
        return self._era(folder, self._history(folder)).schema

    def check_rows(self, table_id: TableId) -> None:
        """Check that a table's rows can be shown, without making them; raises `PositionError` (`beyond_retention`)."""
        folder = self._folder_of(table_id)
        history = self._history(folder)
        era = self._era(folder, history)
        if has_current(era.schema):
            self._begin(folder, history, era)

    @property
    def missing(self) -> Mapping[str, str]:
        """Tables that queries so far may have named and that can't be read, with the reason."""
        return {name: error.message for name, error in self._failures.items()}

    @property
    def is_left_behind(self) -> bool:
        """Whether another node lands the tables, and they are in a folder, in which nothing may land any longer."""
        return self.landed_by is not None and "://" not in self._layout.location

    @property
    def held_back(self) -> Mapping[str, str]:
        """Tables that queries may have named and that are quarantined, with the reason and their rows' position."""
        held = {**self._tail.left_out, **(self._quarantined() if self._behind else {})}
        return {
            name: f"{held[name]}; its rows stand at {StreamToken.scalar(self._layout.stream_id, at)}"
            for name, at in self._behind.items()
            if name in held
        }

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """The reasons why tables that queries may have named may lack rows of the source."""
        named = {table.table_id for folder, table in self._tables.items() if folder not in self._left[""]}
        behind = (f"the log's newest records are left out: {self.left_out}",) if self.left_out else ()
        return (
            *(Reason(LakeBehind.code, "", reason) for reason in behind),
            *(Reason("quarantined", name, reason) for name, reason in self.held_back.items()),
            *(reason for table_id, reason in self._copies().items() if table_id in named),
        )

    def query(self, sql: str) -> pa.Table:
        """Return the result of one SQL statement.

        Raises:
            InvalidQuery: DuckDB rejects it, with DuckDB's message; or it would do more than read.
            PositionError (`beyond_retention`): a table's past doesn't reach back so far.
            LakeTableForeign: another program wrote into a table.
            LakeUnavailable: files of the session's cut were deleted since: open another session.
            MillstreamError: as `OpenHome.merged`, of a table whose merged rows it names.
        """
        return self.stream(sql).read_all()

    def stream(self, sql: str, *, batch_rows: int = _STREAM_ROWS) -> pa.RecordBatchReader:
        """Return the same result while it is computed, in batches of at most so many rows.

        Each batch may raise an error. Read it to its end, or close it, before the session's next query. If it has
        merged rows, the schema's metadata lists their regions (`millstream.regions`), and `reasons` if there are any.
        """
        import duckdb

        said: object = sql
        if not isinstance(said, str):
            raise InvalidQuery(f"sql must be text, not {type(said).__name__}", hint="Pass one SELECT as text.")
        if len(self.statements(sql)) != 1:
            raise InvalidQuery("a query must be one statement", hint="Send one SELECT.")
        if LIST.fullmatch(sql):
            sql = LISTED
        try:
            reader = self._run(sql, batch_rows)
            schema = with_reasons(self._merged.stamped(reader.schema), self.reasons)
            return pa.RecordBatchReader.from_batches(schema, self._checked(reader, schema))
        except duckdb.Error as error:
            raise self._translated(error, sql) from error

    def statements(self, sql: str) -> list[str]:
        """Return the statements of a text; raises `InvalidQuery` as `read_only_sql.reading_statements`."""
        try:
            return self._engine.statements(sql)
        except InvalidQuery as error:
            to_quote = words_to_quote(sql, self._engine.keywords(), self._columns_in(sql))
            if error.hint or not to_quote:
                raise
            hint = f"Write {', '.join(map(quote, to_quote))} in double quotes if you mean the column."
            raise InvalidQuery(error.message, hint=hint) from error

    def _columns_in(self, sql: str) -> set[str]:
        """Return the columns of the tables that a text may name."""
        folders = [folder for folder in self._tables if self._stands_in(folder, sql.lower())]
        with suppress(MillstreamError):
            return {name for folder in folders for name in self._history(folder).schema().names}
        return set()

    def columns(self, table: str) -> list[tuple[str, str]]:
        """Return names and DuckDB's types of a table's columns.

        Raises:
            InvalidQuery: there is no such table.
        """
        found = self.query(f"DESCRIBE {table}").select(["column_name", "column_type"]).to_pylist()
        return [(column["column_name"], column["column_type"]) for column in found]

    def interrupt(self) -> None:
        """End the running query, from another thread or a signal handler."""
        self._engine.connection.interrupt()

    def _run(self, sql: str, batch_rows: int) -> pa.RecordBatchReader:
        import duckdb

        self._prepare(sql)
        try:
            return self._reader(sql, batch_rows)
        except duckdb.CatalogException:
            if not self._learn():
                raise
            return self._reader(sql, batch_rows)
        except duckdb.Error as error:
            gone = isinstance(self._engine.failure_in(error), LakeUnavailable)
            if not (self._past and self._old_versions and gone):
                raise
            self._engine.take_failure(error)
        # Maintenance came first: read everything from history, then.
        self._engine.forget_views()
        self._left = {word: set(self._tables) for word in self._makers}
        self._old_versions = False
        self._prepare(sql)
        return self._reader(sql, batch_rows)

    def _reader(self, sql: str, batch_rows: int) -> pa.RecordBatchReader:
        self._engine.watch.check()
        relation = self._engine.connection.sql(sql)
        # A statement without rows gives no relation, although DuckDB's stubs promise one.
        if relation is None:
            return pa.table({}).to_reader()  # type: ignore[unreachable]
        return relation.to_arrow_reader(batch_rows)

    def _checked(self, reader: pa.RecordBatchReader, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the batches, with DuckDB's errors as ours; pyarrow passes them on as its own."""
        import duckdb

        try:
            for batch in reader:
                self._engine.watch.check()
                yield batch.replace_schema_metadata(schema.metadata)
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception, sql: str = "") -> MillstreamError:
        import duckdb

        said = str(error)
        out_of_memory = isinstance(error, duckdb.OutOfMemoryException | MemoryError)
        if (bound := self._engine.watch.told(said, out_of_memory=out_of_memory)) is not None:
            return bound
        if (failure := self._engine.take_failure(error)) is not None:
            return failure
        table = unknown_table(said, names_written(sql))
        if table is None:
            return InvalidQuery(said)
        view, _, bare = table.partition(".")
        meant = bare if view in {HISTORY, SCD2} else table
        failures = [
            (name, failure)
            for name, failure in self._failures.items()
            if is_meant(meant, name) or is_meant(table, name)
        ]
        for _, failure in failures:
            if failure.code != LakeError.code:
                return failure
        if self._past and not (view == SCD2 and failures):
            later = known_later(self._layout, self._n, meant, self._tables.values())
            if later is not None:
                return later
        for name, failure in failures:
            return InvalidQuery(f"{name} {failure.message}", hint=failure.hint)
        landed = {one.table_id for one in self._tables.values()}
        for known in self._capture_knows():
            if known.table_id in landed or not is_meant(meant, known.full_name):
                continue
            if known.waits or known.schema is None:
                why = known.waits or "no change of it has come, so its columns are unknown"
                hint = known.hint or (None if self.landed_by is None else where_they_land(self.landed_by))
                return InvalidQuery(f"{known.full_name} has nothing in the lake yet: {why}", hint=hint)
            if self._past:
                at = f"at {self.token}, or it was empty: it had no record yet"
                return InvalidQuery(f"there was no table {known.full_name} {at}")
        # In our words, because DuckDB's suggestions are its own tables.
        hint = other_name(view, bare, self.tables, self._capture_knows())
        if bare == MESSAGES and MESSAGES in self._tables:
            hint = f"Logical messages are in {HISTORY}.{MESSAGES}."
        return InvalidQuery(
            f"there is no table {table} in the lake",
            hint=hint or tables_there(self.tables, self.missing, self.landed_by),
        )

    def _prepare(self, sql: str | None) -> None:
        """Make the views that a query may name, once each; all of them for None."""
        text = None if sql is None or CATALOG_WORDS.search(sql) else sql.lower()
        hidden = self._hide_namesakes(sql or "")
        self._merged.prepare(sql, is_listing=sql is not None and text is None)
        for word, make in self._makers.items():
            left = self._left[word]
            if (text is None and word == SCD2 and self._past) or (text is not None and word not in text):
                continue
            for folder in sorted(folder for folder in left - hidden if text is None or self._stands_in(folder, text)):
                left.discard(folder)
                name = f"{HISTORY}.{MESSAGES}" if folder == MESSAGES else self._tables[folder].name
                try:
                    make(folder)
                except LakeTableForeign as error:
                    self._failures[name] = LakeTableForeign(
                        f"{name} can't be read: {error.message}",
                        hint=f"Run `millstream pipeline rebuild {shlex.quote(name)}`, which moves that folder away and rebuilds the table.",
                        table=name,
                        **error.details,
                    )
                except MillstreamError as error:
                    self._failures[name] = error
        if text is None:
            self._learn()

    def _hide_namesakes(self, sql: str) -> set[str]:
        """Return the folders of tables that DuckDB would take for ones that the statement means, but that aren't."""
        hidden, dropped = self._namesakes.choose(sql, self._tables, self._capture_knows)
        for left in self._left.values():
            left.update(dropped)
        for folder in dropped:
            self._failures.pop(self._tables[folder].name, None)
        self._learned = self._learned and not dropped
        return hidden

    def _learn(self) -> bool:
        """Make views of tables that capture knows now and the lake lacks; return whether there were any."""
        if self._learned or self._past:
            return False
        self._learned = True
        mine = {table.table_id: table for table in self._tables.values()}
        more = False
        for known in self._capture_knows():
            found = mine.get(known.table_id)
            if known.full_name in {table.name for table in mine.values()} or self._engine.has_view(
                known.namespace, known.name
            ):
                continue
            try:
                if found is not None:
                    self._rename(found, known)
                elif known.schema is not None and (left := open_left_behind(self._layout, known.schema)) is not None:
                    sql = left_sql(self._engine, self._layout, left, known.schema, self._n)
                    self._engine.view(known.namespace, known.name, sql)
                elif not known.waits and known.schema is not None:
                    self._make_empty(known, known.schema)
                else:
                    continue
                more = True
            except MillstreamError as error:
                self._failures[known.full_name] = error
        return more

    def _rename(self, table: CutTable, known: KnownTable) -> None:
        """Let a table be named by its current name; its next record brings it a folder of that name."""
        folder = next(folder for folder, other in self._tables.items() if other is table)
        bare = f"{known.namespace}.{known.name}"
        for word, make in self._makers.items():
            if folder in self._left[word]:
                self._left[word].discard(folder)
                make(folder)
        namespace, name = parse_qualified_name(table.name)
        for schema, old, new in (
            (namespace, name, known.name),
            *((v, f"{namespace}.{name}", bare) for v in (HISTORY, SCD2)),
        ):
            if self._engine.has_view(schema, old):
                self._engine.view(
                    known.namespace if schema == namespace else schema, new, f"FROM {path_of(schema, old)}"
                )

    def _make_empty(self, known: KnownTable, schema: TableSchema) -> None:
        """Make views of a table that has never had a record."""
        has_versions = any(table.scd2 >= 0 for table in self._tables.values())
        for (view, name), rows in empty_views(known, schema, self._layout.types, has_versions=has_versions).items():
            self._engine.view(view, name, f"FROM {self._engine.register(rows)}")

    def _stands_in(self, folder: str, text: str) -> bool:
        """Whether a query (in lower case) may name the table."""
        return (
            MESSAGES in text
            if folder == MESSAGES
            else stands_in(parse_qualified_name(self._tables[folder].name)[1], text)
        )

    def _folder_of(self, table_id: TableId) -> str:
        return next(folder for folder, table in self._tables.items() if table.table_id == table_id)

    def _history(self, folder: str) -> OpenTable:
        table = self._tables[folder]
        if folder in self._elsewhere:
            return open_history(self._layout, self._elsewhere[folder], table.table_id)
        return self._tail.history(table.table_id, table.name, folder)

    def _era(self, folder: str, history: OpenTable) -> Era:
        """Return the table's schema and start at the token."""
        if folder == MESSAGES:
            return Era(newest_schema(history), Seq(0))
        is_elsewhere = folder in self._elsewhere
        era = era_of(history, self._tables[folder].table_id, self._n) if is_elsewhere else era_at(history, self._n)
        if era is not None:
            return era
        if self._past:
            raise LakeError("had no record then")
        return Era(newest_schema(history), Seq(0))

    def _make_records(self, folder: str) -> None:
        """Make `history."schema.table"`: every record up to the token."""
        history = self._history(folder)
        schema = self._era(folder, history).schema
        name = MESSAGES if folder == MESSAGES else f"{schema.namespace}.{schema.name}"
        is_elsewhere = folder in self._elsewhere or history.tail is not None
        moved = schema.table_id if is_elsewhere and not history.path.endswith(f"/{folder}") else None
        parts = records_sql(self._engine, history, schema, self._n, only=moved)
        parts += [f"FROM {self._engine.register(source)}" for source in self._tail.more_records(history)]
        records = " UNION ALL BY NAME ".join(parts)
        self._engine.view(HISTORY, name, f"SELECT * FROM ({records}) WHERE {SEQ} <= {int(self._n)}")

    def _make_versions(self, folder: str) -> None:
        """Make `scd2."schema.table"`: every version of the table's rows up to the token."""
        table = self._tables[folder]
        if folder == MESSAGES or table.scd2 < 0:
            return  # the lake keeps no versions of it
        history = self._history(folder)
        schema = newest_schema(history)
        if self._past:
            raise LakeError(
                "has versions of every moment: without --as-of, ask for those "
                "WHERE valid_from <= T AND (valid_to > T OR valid_to IS NULL)"
            )
        path, app = self._layout.table_path(SCD2, schema), self._layout.app_id(SCD2, schema.table_id)
        opened = open_table(self._layout, path, app)
        if opened is not None and opened.n is not None and opened.n > self._n:
            opened = open_table(self._layout, path, app, version=table.scd2)
        if opened is None or opened.n is None:
            raise LakeError("has no versions yet: they are being folded for the first time")
        self._engine.view(
            SCD2,
            f"{schema.namespace}.{schema.name}",
            versions_sql(self._engine, self._layout, schema, opened, history, self._n),
        )

    def _make_rows(self, folder: str) -> None:
        """Make `schema.table`: the rows at the token."""
        if folder == MESSAGES:
            return
        history = self._history(folder)
        name, landed = self._tables[folder].name, self._n if self._cut is None else min(self._n, self._cut.n)
        if history.n is None or history.n < landed or name in self._tail.left_out:
            self._behind[name] = history.n or Seq(0)
        era = self._era(folder, history)
        schema = era.schema
        if not has_current(schema):
            raise without_rows(schema, self._layout.stream_name)
        history, base, after = self._begin(folder, history, era)
        columns = current_columns(self._layout, schema, history)
        run = RecordRange(self._engine, self._layout, history, schema, after, self._n)
        sql = table_sql(
            self._engine, run, base, history, schema, columns, upto=self._n, partitions=self._shows_partitions
        )
        self._engine.view(schema.namespace, schema.name, sql)

    def _begin(self, folder: str, history: OpenTable, era: Era) -> tuple[OpenTable, OpenTable | None, Seq]:
        """Return the history to read, `current` as `_base`, and where that ends; raises as `whole_history`."""
        base = self._base(folder, era.schema)
        after = Seq(max(int(era.first) - 1, 0 if base is None or base.n is None else int(base.n)))
        known = None if self._past else self._capture_knows
        history = whole_history(self._layout, self._standing, folder, era.schema, history, after, known=known)
        return history, base, after

    def _base(self, folder: str, schema: TableSchema) -> OpenTable | None:
        """Return `current` at or below the token; None if everything must come from history."""
        path, app = f"{self._layout.root}/current/{folder}", self._layout.app_id("current", schema.table_id)
        opened = open_table(self._layout, path, app)
        if opened is None:
            return None
        # The folder may belong to another table now.
        if opened.held and opened.n is not None and opened.n <= self._n:
            return opened
        table = self._tables[folder]
        fits = table.current >= 0 and table.table_id == schema.table_id and table.current_n <= self._n
        if not fits or not self._old_versions:
            return None
        return open_whole(self._layout, path, app, table.current, self._n)
