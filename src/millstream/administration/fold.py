"""Folds of tables on request: the running pipeline does them; if none runs, this process does, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any

from millstream.administration.rebuild import COPYING, await_outcome, failed_view, folded_views
from millstream.catalog.rebuilds import RebuildRequest, Rebuilds
from millstream.errors import LakeBehind, MillstreamError, UnknownTable, UsageError
from millstream.home.config_mapping import pipeline_config
from millstream.home.home import Home
from millstream.model.names import parse_qualified_name

if TYPE_CHECKING:
    from millstream.catalog import Catalog
    from millstream.lake.commit_cuts import CutTable
    from millstream.model.ids import TableId
    from millstream.model.positions import Seq
    from millstream.model.schema import TableSchema
    from millstream.spark.pipeline import PipelineConfig


@dataclass(frozen=True, slots=True)
class FoldedView:
    """The result for one view of a table."""

    table: str
    view: str
    rows: int
    """Number of rows written."""


def fold_tables(
    home: Home,
    tables: Sequence[str] = (),
    *,
    stream: str | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> list[FoldedView]:
    """Fold tables to the lake's last cut, whatever their schedule, and return when they are done.

    Args:
        tables: `schema.table` of each; if empty, all tables of the lake whose copies are complete.

    Raises:
        UsageError: the stream has no folded views, or a named table has none, or its copy isn't complete in the lake.
        UnknownTable: the lake or the catalog has no table of a name.
        MillstreamError: a fold failed, with its reason.
    """
    from millstream.lake.commit_cuts import last_cut

    home.prepare()
    name, config = home.stream_config(stream)
    with home.open_catalog() as catalog:
        stream_id = catalog.stream(name).id
        pipeline = pipeline_config(home, name, config, stream_id)
        if not pipeline.folds:
            raise UsageError(f"{name} has no views to fold", hint='Set `views` of the lake to ["current", "history"].')
        cut = last_cut(pipeline.layout)
        landed = {} if cut is None else {table.table_id: table for table in cut.tables.values()}
        if tables:
            ids = [catalog.find_table(stream_id, *parse_qualified_name(table)).id for table in tables]
            for table, table_id in zip(tables, ids, strict=True):
                if table_id not in landed:
                    raise UnknownTable(f"nothing of {table} has landed in the lake yet", table=table)
        else:
            ids = [row.id for row in catalog.tables(stream_id) if row.id in landed]
        copying = {row.id: row for row in catalog.tables(stream_id) if row.state in COPYING}
        schemas = catalog.latest_schemas(stream_id)
        work = _Work(home, catalog, pipeline, schemas, say)
        wanted: list[tuple[CutTable, list[str]]] = []
        for table_id in ids:
            found, schema = landed[table_id], schemas.get(table_id)
            views = [] if schema is None else folded_views(pipeline.views, schema)
            if tables and not views:
                raise UsageError(f"{found.name} has history only, which isn't folded")
            if tables and table_id in copying:
                held = copying[table_id].is_copy_held
                raise UsageError(
                    f"{found.name} {'waits for a copy' if held else 'is being copied'}: its views are built once the copy is complete",
                    hint=f"Run `millstream tables copy {quote(found.name)}` when the source can bear it."
                    if held
                    else "`millstream tables` shows how far it is.",
                )
            if views and table_id not in copying:
                wanted.append((found, views))
        for found, views in wanted:
            work.requests.ask(found.table_id, views)
        return work.done(wanted)


@dataclass(frozen=True, slots=True)
class _Work:
    home: Home
    catalog: Catalog
    pipeline: PipelineConfig
    schemas: Mapping[TableId, TableSchema]
    say: Callable[[str], None]

    @property
    def requests(self) -> Rebuilds:
        return Rebuilds(self.catalog, self.pipeline.stream_id, self.pipeline.pipeline, "fold")

    def done(self, wanted: Sequence[tuple[CutTable, Sequence[str]]]) -> list[FoldedView]:
        """Return each request's result; raise the first error once every request has an outcome."""
        results: list[FoldedView] = []
        failure: MillstreamError | None = None
        for table, views in wanted:
            perform = partial(self._perform, table)
            try:
                outcome = await_outcome(self.home, self.requests, table.table_id, views, perform, self.say)
            except MillstreamError as error:
                failure = failure or error
                continue
            results += [FoldedView(table.name, view, int(outcome[view]["rows"])) for view in views]
        if failure is not None:
            raise failure
        return results

    def _perform(self, table: CutTable, request: RebuildRequest) -> None:
        """Carry out a request; the caller holds the pipeline's role."""
        from millstream.lake.commit_cuts import commit_cut, last_cut
        from millstream.lake.folded.current_table import fold_table
        from millstream.lake.folded.scd2_table import fold_into_versions

        layout, schema = self.pipeline.layout, self.schemas[table.table_id]
        cut = last_cut(layout)
        assert cut is not None, "the table has landed"
        for view in request.views:
            told: dict[str, Any]
            try:
                self._check_copy(table, cut.n)
                if view == "current":
                    commit = fold_table(layout, schema, cut.n)
                else:
                    commit = fold_into_versions(layout, schema, cut.n).commit
                commit_cut(layout, cut.n, [commit], committed_at=datetime.now(UTC))
                told = {"state": "done", "rows": commit.rows, "aside": None}
            except MillstreamError as error:
                told = failed_view(error)
            self.requests.settle(table.table_id, view, told)

    def _check_copy(self, table: CutTable, n: Seq) -> None:
        """Raise `LakeBehind` if the lake, which is at `n`, may lack a part of the table's copy."""
        from millstream.app.log_readers import open_reader
        from millstream.spark.complete_copies import CompleteCopies

        copies = CompleteCopies(self.catalog, self.pipeline.stream_id)
        reader = open_reader(self.home, self.pipeline.stream)
        upto = copies.observe(reader.persisted_upto)
        # Numbers that no record has can't be landed: a lake that has all records is at the log's end.
        reached = upto if reader.cut(n, rows_max=1) == n else n
        if table.table_id in copies.unfinished(reached):
            raise LakeBehind(
                f"the lake may lack a part of the copy of {table.name}",
                hint="Run `millstream pipeline run --until-caught-up` first.",
                table=table.name,
            )
