"""A home's catalog as one read transaction finds it: its status needs as many reads with 100 streams as with one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, TypeAlias
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Row, Subquery, Table, literal, select

import millstream.catalog.sql_tables as t
from millstream.catalog.copy_chunks import pauses_scope
from millstream.catalog.retention_holders import pipeline_position
from millstream.catalog.row_types import PipelinePosition, SourceRow, StreamRow, TableRow, TableState, WriterRow
from millstream.catalog.schema_versions import NameOfTable, name_of
from millstream.catalog.sources import followed_fact, source_row
from millstream.catalog.store import Catalog
from millstream.catalog.streams import stream_row
from millstream.catalog.tables import table_row
from millstream.catalog.writer_epochs import writer_row
from millstream.model.ids import Epoch, StreamId, TableId
from millstream.model.positions import Seq
from millstream.protocol.sequencer import Ledger

_SCOPES: Final = (
    "capture/{}",
    "capture/{}/raw_values",
    "capture/{}/slots",
    "copy pauses/{}",
    "pipeline/{}",
    "retention/{}",
    "routing/{}",
)
"""Scopes of the facts of a stream, by its id, that are read at once."""
_SCOPES_OF_PIPELINE: Final = ("figures/{}/", "fold_failed/{}/", "lake/{}/")
"""The same for a pipeline of the stream."""
_SCOPES_BY_NAME: Final = ("capture/{}", "pipeline/{}")
"""The same by the stream's name; the catalog needn't have the stream."""
_NAMES_AT_ONCE_MAX: Final = 500
"""Number of names of tables that are read one by one; if more are missing, all of the home are read."""

NamesByFingerprint: TypeAlias = dict[str, NameOfTable]
"""Names of tables by the fingerprints of their schemas, which differ if a name does. A caller that takes snapshots repeatedly
keeps it, as a schema takes longest to decode."""


class CatalogSnapshot(Catalog):
    """The part of the catalog that one home has, read in one transaction. Reads that it lacks go to the catalog.

    Never write through it: it wouldn't show the change. It is usable while the catalog is open.

    Args:
        catalog: the catalog; if it was opened for a home, nothing of other homes is read.
        known_names: names that earlier snapshots have decoded; this one adds its own, and removes those that no table has.

    Raises:
        CatalogError: as any call.

    Concurrency: one thread.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        pipeline: str,
        names: Iterable[str] = (),
        known_names: NamesByFingerprint | None = None,
    ) -> None:
        self._home = catalog.home
        self._database = catalog.database
        self._known_names = {}
        self._facts: dict[str, dict[str, str]] = {}
        """Values as JSON, by scope and name; a scope without facts is in it too."""
        with self._database.read() as connection:
            rows = connection.execute(self._own_streams()).all()
            self._streams = sorted((stream_row(row) for row in rows), key=lambda stream: stream.name)
            self._epochs = {StreamId(UUID(row.id)): row.epoch for row in rows}
            self._reserved = {StreamId(UUID(row.id)): Seq(row.reserved or 0) for row in rows}
            self._now_us = self._server_time_us(connection)
            own = self._own_streams().subquery()
            self._writers = _by_stream(connection, own, t.writers, t.writers.c.id)
            self._sources = _by_stream(connection, own, t.sources, t.sources.c.id)
            self._tables = _by_stream(connection, own, t.tables, t.tables.c.id)
            self._pipelines = _by_stream(connection, own, t.pipelines, t.pipelines.c.name)
            self._read_facts(connection, own, pipeline, names)
            self._newest_names = self._read_names(connection, own, {} if known_names is None else known_names)

    def _server_time_us(self, connection: Connection) -> int | None:
        if self._database.address is None:
            return None
        from millstream.catalog.shared_sequence import server_time_us

        return server_time_us(connection)

    def _read_facts(self, connection: Connection, own: Subquery, pipeline: str, names: Iterable[str]) -> None:
        of_ids = [*_SCOPES, *(f"{scope}{pipeline}" for scope in _SCOPES_OF_PIPELINE)]
        for stream in self._streams:
            self._facts |= {scope.format(stream.id): {} for scope in of_ids}
        named = {scope.format(name) for name in {*names, *(s.name for s in self._streams)} for scope in _SCOPES_BY_NAME}
        self._facts |= {scope: {} for scope in named}
        of_streams = t.facts.c.scope.in_([_filled(scope, own.c.id) for scope in of_ids])
        # A scope is the first column of the primary key: each is looked up, and the other facts aren't read.
        for query in (
            select(t.facts).join(own, of_streams),
            select(t.facts).where(t.facts.c.scope.in_(sorted(named))),
        ):
            for row in connection.execute(query):
                self._facts[row.scope][row.name] = row.value

    def _read_names(
        self, connection: Connection, own: Subquery, known: NamesByFingerprint
    ) -> dict[str, dict[TableId, NameOfTable]]:
        newest = (
            select(t.tables.c.stream, t.schema_versions.c.table_id, t.schema_versions.c.fingerprint)
            .join(t.tables)
            .where(t.tables.c.stream.in_(select(own.c.id)), t.schema_versions.c.version == t.tables.c.schema_version)
        )
        rows = connection.execute(newest).all()
        lacking = {row.fingerprint for row in rows} - known.keys()
        if lacking:
            columns = t.schema_versions.c
            blobs = newest.with_only_columns(columns.fingerprint, columns.arrow)
            if len(lacking) <= _NAMES_AT_ONCE_MAX:
                blobs = blobs.where(columns.fingerprint.in_(sorted(lacking)))
            known |= {row.fingerprint: name_of(row.arrow) for row in connection.execute(blobs)}
        for fingerprint in known.keys() - {row.fingerprint for row in rows}:
            del known[fingerprint]
        names: dict[str, dict[TableId, NameOfTable]] = defaultdict(dict)
        for row in rows:
            names[row.stream][TableId(row.table_id)] = known[row.fingerprint]
        return names

    def streams(self) -> list[StreamRow]:
        """Return the home's streams, by name."""
        return list(self._streams)

    def writers(self, stream: StreamId) -> list[WriterRow]:
        """Return a stream's writers, by id."""
        return [writer_row(row) for row in self._writers.get(str(stream), ())]

    def shared_ledger(self, stream: StreamId) -> tuple[Ledger, int] | None:
        """Return the writers of a stream and their numbers, and the time of the snapshot; None if writers can't share it."""
        if self._now_us is None:
            return None
        from millstream.catalog.shared_sequence import with_newest_known, writer_entry

        entries = tuple(writer_entry(row) for row in self._writers.get(str(stream), ()))
        return with_newest_known(Ledger(Seq(0), Epoch(self._epochs[stream]), entries)), self._now_us

    def reserved(self, stream: StreamId) -> Seq:
        """Return the greatest number ever reserved for a stream."""
        return self._reserved[stream]

    def all_sources(self, stream: StreamId) -> list[SourceRow]:
        """Return all sources of a stream's log, oldest first."""
        return [source_row(row) for row in self._sources.get(str(stream), ())]

    def followed_source(self, stream: StreamId) -> dict[str, Any]:
        """Return the facts of the followed source."""
        return dict(self.fact(*followed_fact(stream), {}))

    def tables(self, stream: StreamId, *, gone: bool = False) -> list[TableRow]:
        """Return a stream's tables by name; with `gone`, those that have left too."""
        rows = [row for row in self._tables.get(str(stream), ()) if gone or row.state != TableState.GONE.value]
        return sorted((table_row(row) for row in rows), key=lambda table: (table.namespace, table.name, table.id))

    def states(self, stream: StreamId) -> dict[TableId, TableState]:
        """Return the states of a stream's tables, except those that have left."""
        return {row.id: row.state for row in self.tables(stream)}

    def newest_names(self, stream: StreamId) -> dict[TableId, NameOfTable]:
        """Return the name in the newest schema of every table that has one."""
        return dict(self._newest_names.get(str(stream), {}))

    def paused_copies(self, stream: StreamId) -> frozenset[TableId]:
        """Return the tables whose copies are paused."""
        return frozenset(TableId(int(name)) for name in self.facts(pauses_scope(stream)))

    def pipelines(self, stream: StreamId) -> list[PipelinePosition]:
        """Return every pipeline and other holder of a stream, by name."""
        return sorted(
            (pipeline_position(row) for row in self._pipelines.get(str(stream), ())), key=lambda one: one.name
        )

    def fact(self, scope: str, name: str, default: Any = None) -> Any:
        """Return the value of that name, else `default`."""
        if scope not in self._facts:
            return super().fact(scope, name, default)
        found = self._facts[scope].get(name)
        return default if found is None else json.loads(found)

    def facts(self, scope: str) -> dict[str, Any]:
        """Return all values of a scope."""
        if scope not in self._facts:
            return super().facts(scope)
        return {name: json.loads(value) for name, value in self._facts[scope].items()}


def _by_stream(
    connection: Connection, own: Subquery, table: Table, order: ColumnElement[Any]
) -> defaultdict[str, list[Row[Any]]]:
    """Return the rows of the home's streams, by stream."""
    rows: defaultdict[str, list[Row[Any]]] = defaultdict(list)
    query = select(table).where(table.c.stream.in_(select(own.c.id)))
    for row in connection.execute(query.order_by(order)):
        rows[row.stream].append(row)
    return rows


def _filled(scope: str, stream: ColumnElement[str]) -> ColumnElement[str]:
    """Return a scope with the id of a row's stream in it."""
    before, _, after = scope.partition("{}")
    return literal(before).concat(stream).concat(literal(after))
