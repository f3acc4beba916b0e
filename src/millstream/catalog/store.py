"""The catalog's calls. Each is one short transaction, durable when it returns, safe from any thread and process."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from uuid import UUID, uuid4

import pyarrow as pa
from sqlalchemy import Connection, Row, Select, delete, func, select, update
from sqlalchemy.dialects.sqlite import insert

from millstream.catalog import tables as t
from millstream.catalog.database import BUSY_TIMEOUT_S, Database
from millstream.catalog.reservations import StreamReservations
from millstream.catalog.values import (
    ChunkState,
    CopyChunk,
    PipelinePosition,
    SourceRow,
    StreamRow,
    TableRow,
    TableState,
    WriterRow,
)
from millstream.errors import CatalogError, UnknownStream, UnknownTable
from millstream.model.ids import (
    Epoch,
    SchemaVersion,
    ShardId,
    SourceId,
    StreamId,
    TableId,
    WriterId,
    check_stream_name,
)
from millstream.model.positions import Lsn, Seq
from millstream.model.schema import TableKind, TableSchema
from millstream.protocol.retention import CutOff, HolderKind, cut_off_error


class Catalog:
    """A home's catalog. Made, or brought up to this version's schema, when it is opened.

    Raises:
        CatalogTooNew: a newer Millstream wrote it.
        CatalogBusy: it stayed locked past the busy timeout (any call may raise that).
        DiskFull: there is no space for what a call writes; nothing was changed.
        CatalogError: it can't be read or written (any call may raise that).

    Concurrency: any number of threads and processes; one object serves all threads of a process. Open it after a fork,
    never before.
    """

    def __init__(self, path: str | Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self._database = Database(Path(path), busy_timeout_s=busy_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; what was called has long been durable."""
        self._database.close()

    # --- streams -----------------------------------------------------------------------------------------------

    def resolve_stream(self, name: str, *, found: StreamId | None = None) -> StreamId:
        """The id of the stream of that name, made where it is new.

        Args:
            name: as the configuration has it.
            found: the id that the stream's segments bear, where its folder holds any. A new row takes it over (the
                catalog was lost); a row that has another one is an error, for its numbers belong to another log.

        Raises:
            CatalogError: the log on disk is another stream's.
            UsageError: no stream may bear that name.
        """
        check_stream_name(name)
        with self._database.write() as connection:
            row = connection.execute(select(t.streams).where(t.streams.c.name == name)).first()
            if row is None:
                stream = found or StreamId(uuid4())
                values = {"id": str(stream), "name": name, "created_us": _now_us()}
                connection.execute(insert(t.streams).values(values))
                return stream
        stream = StreamId(UUID(row.id))
        if found is not None and found != stream:
            raise CatalogError(
                f"the log of stream {name} bears the id {found}, the catalog says {stream}",
                hint="The folder or the catalog was exchanged: put back the one that belongs here.",
                stream=name,
            )
        return stream

    def stream(self, name: str) -> StreamRow:
        """The stream of that name; `UnknownStream` where it has never run."""
        for row in self.streams():
            if row.name == name:
                return row
        raise UnknownStream(
            f"the catalog has no stream {name}", hint="`millstream run` makes it, when it first runs.", stream=name
        )

    def streams(self) -> list[StreamRow]:
        """All streams, by name."""
        with self._database.read() as connection:
            rows = connection.execute(select(t.streams).order_by(t.streams.c.name)).all()
        return [StreamRow(StreamId(UUID(r.id)), r.name, r.created_us) for r in rows]

    # --- writers and numbers -----------------------------------------------------------------------------------

    def register_writer(
        self, stream: StreamId, name: str = "writer", *, above: Epoch = Epoch(0)
    ) -> tuple[WriterId, Epoch]:
        """Become the newest incarnation of a writer; the one before it is fenced from now on.

        Args:
            stream: whose shards it writes.
            name: tells writers of a stream apart.
            above: an epoch that the log bears, where the catalog is older than the log.

        Returns:
            The writer's id (from 1; the same for a name for ever) and an epoch above every one given before in the stream.
        """
        with self._database.write() as connection:
            _check_stream(connection, stream)
            epoch = connection.execute(
                update(t.streams)
                .where(t.streams.c.id == str(stream))
                .values(epoch=func.max(t.streams.c.epoch, above) + 1)
                .returning(t.streams.c.epoch)
            ).scalar_one()
            mine = (t.writers.c.stream == str(stream)) & (t.writers.c.name == name)
            writer = connection.execute(select(t.writers.c.id).where(mine)).scalar()
            values = {"epoch": epoch, "pid": os.getpid(), "registered_us": _now_us()}
            if writer is None:
                last = select(func.coalesce(func.max(t.writers.c.id), 0)).where(t.writers.c.stream == str(stream))
                writer = connection.execute(last).scalar_one() + 1
                connection.execute(insert(t.writers).values(stream=str(stream), id=writer, name=name, **values))
            else:
                connection.execute(update(t.writers).where(mine).values(**values))
        return WriterId(writer), Epoch(epoch)

    def writers(self, stream: StreamId) -> list[WriterRow]:
        """The stream's writers, each in its newest incarnation, by id."""
        with self._database.read() as connection:
            query = select(t.writers).where(t.writers.c.stream == str(stream)).order_by(t.writers.c.id)
            rows = connection.execute(query).all()
        return [WriterRow(stream, WriterId(r.id), r.name, Epoch(r.epoch), r.pid, r.registered_us) for r in rows]

    def reservations(self, stream: StreamId) -> StreamReservations:
        """The stream's number reservations, as `ports.SeqReservations`."""
        return StreamReservations(self._database, stream)

    # --- sources -----------------------------------------------------------------------------------------------

    def resolve_source(self, stream: StreamId, system_identifier: int, database: str, timeline: int) -> SourceId:
        """The number of one database's one history, given when it is first met.

        A new timeline is a new number that starts at 0; whether it may be followed is the caller's to judge, who
        then moves it to where the old one stood.
        """
        facts = {
            "stream": str(stream),
            "system_identifier": str(system_identifier),
            "database": database,
            "timeline": timeline,
        }
        with self._database.write() as connection:
            _check_stream(connection, stream)
            connection.execute(insert(t.sources).values(facts).on_conflict_do_nothing())
            same = [t.sources.c[name] == value for name, value in facts.items()]
            return SourceId(connection.execute(select(t.sources.c.id).where(*same)).scalar_one())

    def sources(self, stream: StreamId) -> list[SourceRow]:
        """The stream's sources, oldest first."""
        with self._database.read() as connection:
            query = select(t.sources).where(t.sources.c.stream == str(stream)).order_by(t.sources.c.id)
            rows = connection.execute(query).all()
        return [
            SourceRow(SourceId(r.id), stream, int(r.system_identifier), r.database, r.timeline, Lsn(r.reached))
            for r in rows
        ]

    def reached(self, source: SourceId) -> Lsn:
        """Where capture of the source has got to, as last told; the log's own group headers may know more."""
        with self._database.read() as connection:
            found = connection.execute(select(t.sources.c.reached).where(t.sources.c.id == source)).scalar()
        if found is None:
            raise CatalogError(f"the catalog has no source {source}", source=source)
        return Lsn(found)

    def move_reached(self, source: SourceId, lsn: Lsn) -> Lsn:
        """Move the position upward, durably; a lower one changes nothing. Returns where it stands.

        Call it before the slot is confirmed up to there.
        """
        with self._database.write() as connection:
            higher = (t.sources.c.id == source) & (t.sources.c.reached < lsn)
            connection.execute(update(t.sources).where(higher).values(reached=lsn))
            found = connection.execute(select(t.sources.c.reached).where(t.sources.c.id == source)).scalar()
        if found is None:
            raise CatalogError(f"the catalog has no source {source}", source=source)
        return Lsn(found)

    # --- tables and their schemas ------------------------------------------------------------------------------

    def table_for(
        self,
        stream: StreamId,
        source: SourceId,
        relation_oid: int,
        namespace: str,
        name: str,
        *,
        kind: TableKind = TableKind.TABLE,
        shard: ShardId = ShardId(0),
        state: TableState = TableState.COPY_REQUESTED,
        reason: str = "",
    ) -> TableRow:
        """The table of a relation, made with `shard`, `state` and `reason` where it is new.

        The relation is told by its OID within the same system and database, whatever the timeline, and by `kind`. A
        table that is there keeps id, shard and state; its name follows a rename. One that is `GONE` is never found: a
        relation that comes back is a new table.
        """
        with self._database.write() as connection:
            origin = connection.execute(select(t.sources).where(t.sources.c.id == source)).first()
            if origin is None and source != 0:
                raise CatalogError(f"the catalog has no source {source}", source=source)
            query = select(t.tables).where(
                t.tables.c.stream == str(stream),
                t.tables.c.relation_oid == relation_oid,
                t.tables.c.kind == kind.value,
                t.tables.c.state != TableState.GONE.value,
            )
            if origin is None:
                query = query.where(t.tables.c.source == 0, t.tables.c.namespace == namespace, t.tables.c.name == name)
            else:
                branches = select(t.sources.c.id).where(
                    t.sources.c.stream == str(stream),
                    t.sources.c.system_identifier == origin.system_identifier,
                    t.sources.c.database == origin.database,
                )
                query = query.where(t.tables.c.source.in_(branches))
            row = connection.execute(query).first()
            if row is None:
                _check_stream(connection, stream)
                values = {
                    "stream": str(stream),
                    "source": source,
                    "relation_oid": relation_oid,
                    "namespace": namespace,
                    "name": name,
                    "kind": kind.value,
                    "shard": shard,
                    "state": state.value,
                    "reason": reason,
                    "changed_us": _now_us(),
                }
                row = connection.execute(insert(t.tables).values(values).returning(t.tables)).one()
            elif (row.namespace, row.name) != (namespace, name):
                renamed = update(t.tables).where(t.tables.c.id == row.id).values(namespace=namespace, name=name)
                row = connection.execute(renamed.returning(t.tables)).one()
        return _table_row(row)

    def table(self, table: TableId) -> TableRow:
        """One table by its id; `UnknownTable` where there is none."""
        with self._database.read() as connection:
            row = connection.execute(select(t.tables).where(t.tables.c.id == table)).first()
        if row is None:
            raise UnknownTable(f"the catalog has no table {table}", table=table)
        return _table_row(row)

    def tables(self, stream: StreamId, *, gone: bool = False) -> list[TableRow]:
        """The stream's tables by name; with `gone`, those that have left too."""
        query = select(t.tables).where(t.tables.c.stream == str(stream))
        if not gone:
            query = query.where(t.tables.c.state != TableState.GONE.value)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(t.tables.c.namespace, t.tables.c.name, t.tables.c.id)).all()
        return [_table_row(row) for row in rows]

    def find_table(self, stream: StreamId, namespace: str, name: str) -> TableRow:
        """The table that bears that name now; `UnknownTable` where none does."""
        for row in self.tables(stream):
            if (row.namespace, row.name) == (namespace, name):
                return row
        raise UnknownTable(f"the stream has no table {namespace}.{name}", table=f"{namespace}.{name}")

    def set_state(
        self,
        table: TableId,
        state: TableState | str,
        reason: str = "",
        *,
        details: Mapping[str, Any] | None = None,
        copy_id: str | None = None,
        only_from: Iterable[TableState] | None = None,
    ) -> bool:
        """Say where a table stands and why.

        Args:
            table: whose.
            state: the new state.
            reason: one sentence for people.
            details: JSON-able facts; replaces those there were.
            copy_id: the copy that begins; kept as it is where None.
            only_from: change nothing unless the table is in one of these states (compare and set).

        Returns:
            Whether it was changed.
        """
        values: dict[str, Any] = {
            "state": TableState(state).value,
            "reason": reason,
            "details": json.dumps(dict(details or {})),
            "changed_us": _now_us(),
        }
        if copy_id is not None:
            values["copy_id"] = copy_id
        change = update(t.tables).where(t.tables.c.id == table).values(values)
        if only_from is not None:
            change = change.where(t.tables.c.state.in_([s.value for s in only_from]))
        with self._database.write() as connection:
            return connection.execute(change).rowcount > 0

    def put_schema(self, stream: StreamId, schema: TableSchema) -> TableSchema:
        """Number a schema: the same facts get the same version, new ones the next. It becomes the table's newest.

        Args:
            stream: the table's stream.
            schema: with a table id of `table_for`; its own version is not looked at.

        Raises:
            UnknownTable: the stream has no table of that id.
        """
        fingerprint = _fingerprint(schema)
        of_table = t.schema_versions.c.table_id == schema.table_id
        with self._database.write() as connection:
            owner = connection.execute(select(t.tables.c.stream).where(t.tables.c.id == schema.table_id)).scalar()
            if owner != str(stream):
                raise UnknownTable(f"the stream has no table {schema.table_id}", table=schema.table_id)
            same = select(t.schema_versions.c.version).where(of_table, t.schema_versions.c.fingerprint == fingerprint)
            version = connection.execute(same).scalar()
            if version is None:
                last = select(func.coalesce(func.max(t.schema_versions.c.version), 0)).where(of_table)
                version = connection.execute(last).scalar_one() + 1
                numbered = replace(schema, version=SchemaVersion(version))
                connection.execute(
                    insert(t.schema_versions).values(
                        table_id=schema.table_id,
                        version=version,
                        fingerprint=fingerprint,
                        arrow=numbered.to_arrow().serialize().to_pybytes(),
                        created_us=_now_us(),
                    )
                )
            newest = update(t.tables).where(t.tables.c.id == schema.table_id, t.tables.c.schema_version != version)
            connection.execute(newest.values(schema_version=version))
        return replace(schema, version=SchemaVersion(version))

    def schemas(self, stream: StreamId) -> dict[tuple[TableId, SchemaVersion], TableSchema]:
        """Every version of every table's schema."""
        query = select(t.schema_versions.c.arrow).join(t.tables).where(t.tables.c.stream == str(stream))
        return {(schema.table_id, schema.version): schema for schema in self._schemas(query)}

    def latest_schemas(self, stream: StreamId) -> dict[TableId, TableSchema]:
        """The newest schema of every table that has one."""
        query = select(t.schema_versions.c.arrow).join(t.tables).where(t.tables.c.stream == str(stream))
        newest = query.where(t.schema_versions.c.version == t.tables.c.schema_version)
        return {schema.table_id: schema for schema in self._schemas(newest)}

    def _schemas(self, query: Select[tuple[bytes]]) -> list[TableSchema]:
        with self._database.read() as connection:
            blobs = connection.execute(query).scalars().all()
        return [TableSchema.from_arrow(pa.ipc.read_schema(pa.py_buffer(blob))) for blob in blobs]

    # --- table copies ------------------------------------------------------------------------------------------

    def put_chunks(self, chunks: Iterable[CopyChunk]) -> None:
        """Write chunks as they are now, new ones and those there were, all or none."""
        rows = [
            {
                "table_id": c.table,
                "copy_id": c.copy_id,
                "number": c.number,
                "lower": c.lower,
                "upper": c.upper,
                "state": c.state.value,
                "snapshot": c.snapshot,
                "lsn": c.lsn,
                "row_count": c.row_count,
                "size_bytes": c.size_bytes,
                "facts": json.dumps(c.facts),
            }
            for c in chunks
        ]
        if not rows:
            return
        change = insert(t.copy_chunks)
        changed = {name: change.excluded[name] for name in rows[0] if name not in {"table_id", "copy_id", "number"}}
        keys = [t.copy_chunks.c.table_id, t.copy_chunks.c.copy_id, t.copy_chunks.c.number]
        with self._database.write() as connection:
            connection.execute(change.on_conflict_do_update(index_elements=keys, set_=changed), rows)

    def chunks(self, table: TableId, copy_id: str) -> list[CopyChunk]:
        """The chunks of one copy, by number."""
        query = select(t.copy_chunks).where(t.copy_chunks.c.table_id == table, t.copy_chunks.c.copy_id == copy_id)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(t.copy_chunks.c.number)).all()
        return [
            CopyChunk(
                table=TableId(r.table_id),
                copy_id=r.copy_id,
                number=r.number,
                lower=r.lower,
                upper=r.upper,
                state=ChunkState(r.state),
                snapshot=r.snapshot,
                lsn=None if r.lsn is None else Lsn(r.lsn),
                row_count=r.row_count,
                size_bytes=r.size_bytes,
                facts=json.loads(r.facts),
            )
            for r in rows
        ]

    def drop_chunks(self, table: TableId, *, but: str = "") -> None:
        """Forget the chunks of a table's copies, those of copy `but` excepted."""
        old = delete(t.copy_chunks).where(t.copy_chunks.c.table_id == table, t.copy_chunks.c.copy_id != but)
        with self._database.write() as connection:
            connection.execute(old)

    # --- pipelines ---------------------------------------------------------------------------------------------

    def set_needed_from(
        self, stream: StreamId, pipeline: str, seq: Seq, *, kind: HolderKind = HolderKind.PIPELINE
    ) -> None:
        """Hold every segment with numbers at or above `seq` for a pipeline (or another holder). Only upward.

        Args:
            stream: whose log.
            pipeline: the holder's name.
            seq: the lowest number that it may still ask for. Of a pipeline: the start of its last batch.
            kind: what the holder is, when it is new.

        Raises:
            CursorExpired, FollowerBehindRetention: it was cut off; `release` it to begin anew.
        """
        self._move_pipeline(stream, pipeline, "needed_from", seq, kind)

    def cut_off(self, stream: StreamId, gone: CutOff) -> bool:
        """Note that a holder was cut off: it holds nothing from now on, and is told so when it comes again.

        Returns:
            False where it has come on meanwhile, or is gone: then nothing was changed.
        """
        still = (t.pipelines.c.stream == str(stream)) & (t.pipelines.c.name == gone.name)
        still &= (t.pipelines.c.needed_from <= gone.needed_from) & t.pipelines.c.cut_off_at.is_(None)
        with self._database.write() as connection:
            done = connection.execute(
                update(t.pipelines).where(still).values(cut_off_at=gone.first, changed_us=_now_us())
            )
            return done.rowcount > 0

    def release(self, stream: StreamId, pipeline: str) -> None:
        """Forget a holder, also one that was cut off: it needs nothing any more."""
        gone = delete(t.pipelines).where(t.pipelines.c.stream == str(stream), t.pipelines.c.name == pipeline)
        with self._database.write() as connection:
            connection.execute(gone)

    def needed_from(self, stream: StreamId) -> dict[str, Seq]:
        """By holder, the lowest number that it may still ask for: what retention has to leave alone."""
        return {
            p.name: p.needed_from for p in self.pipelines(stream) if p.needed_from is not None and p.cut_off_at is None
        }

    def set_landed(self, stream: StreamId, pipeline: str, seq: Seq) -> None:
        """Say that a pipeline has everything up to `seq` committed in all its tables. Only upward."""
        self._move_pipeline(stream, pipeline, "landed", seq, HolderKind.PIPELINE)

    def landed(self, stream: StreamId, pipeline: str) -> Seq:
        """How far a pipeline has landed; 0 for one that is new."""
        return next((p.landed for p in self.pipelines(stream) if p.name == pipeline), Seq(0))

    def pipelines(self, stream: StreamId) -> list[PipelinePosition]:
        """Every pipeline and other holder of the stream, by name."""
        query = select(t.pipelines).where(t.pipelines.c.stream == str(stream)).order_by(t.pipelines.c.name)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return [
            PipelinePosition(
                stream,
                r.name,
                None if r.needed_from is None else Seq(r.needed_from),
                Seq(r.landed),
                r.changed_us,
                HolderKind(r.kind),
                None if r.cut_off_at is None else Seq(r.cut_off_at),
            )
            for r in rows
        ]

    def _move_pipeline(self, stream: StreamId, pipeline: str, column: str, seq: Seq, kind: HolderKind) -> None:
        now = _now_us()
        values = {"stream": str(stream), "name": pipeline, column: seq, "changed_us": now, "kind": kind.value}
        first = insert(t.pipelines).values(values)
        upward = func.max(func.coalesce(t.pipelines.c[column], 0), seq)
        change = first.on_conflict_do_update(
            index_elements=[t.pipelines.c.stream, t.pipelines.c.name], set_={column: upward, "changed_us": now}
        )
        with self._database.write() as connection:
            _check_stream(connection, stream)
            mine = (t.pipelines.c.stream == str(stream)) & (t.pipelines.c.name == pipeline)
            gone = connection.execute(select(t.pipelines).where(mine, t.pipelines.c.cut_off_at.is_not(None))).first()
            if gone is not None:
                raise cut_off_error(
                    CutOff(gone.name, HolderKind(gone.kind), Seq(gone.needed_from), Seq(gone.cut_off_at))
                )
            connection.execute(change)

    # --- facts -------------------------------------------------------------------------------------------------

    def put_fact(self, scope: str, name: str, value: Any) -> None:
        """Remember a JSON-able value; replaces the one there was. `scope` keeps rooms apart (`capture/<stream id>`)."""
        change = insert(t.facts).values(scope=scope, name=name, value=json.dumps(value))
        keys = [t.facts.c.scope, t.facts.c.name]
        with self._database.write() as connection:
            connection.execute(
                change.on_conflict_do_update(index_elements=keys, set_={"value": change.excluded["value"]})
            )

    def fact(self, scope: str, name: str, default: Any = None) -> Any:
        """The value remembered under that name, else `default`."""
        query = select(t.facts.c.value).where(t.facts.c.scope == scope, t.facts.c.name == name)
        with self._database.read() as connection:
            found = connection.execute(query).scalar()
        return default if found is None else json.loads(found)

    def facts(self, scope: str) -> dict[str, Any]:
        """Everything remembered in a scope."""
        query = select(t.facts.c.name, t.facts.c.value).where(t.facts.c.scope == scope)
        with self._database.read() as connection:
            return {row.name: json.loads(row.value) for row in connection.execute(query)}

    def drop_fact(self, scope: str, name: str) -> None:
        """Forget a value."""
        with self._database.write() as connection:
            connection.execute(delete(t.facts).where(t.facts.c.scope == scope, t.facts.c.name == name))


def _now_us() -> int:
    return time.time_ns() // 1000


def _check_stream(connection: Connection, stream: StreamId) -> None:
    if connection.execute(select(t.streams.c.id).where(t.streams.c.id == str(stream))).first() is None:
        raise UnknownStream(f"the catalog has no stream {stream}", stream=str(stream))


def _table_row(row: Row[Any]) -> TableRow:
    return TableRow(
        id=TableId(row.id),
        stream=StreamId(UUID(row.stream)),
        source=SourceId(row.source),
        relation_oid=row.relation_oid,
        namespace=row.namespace,
        name=row.name,
        kind=TableKind(row.kind),
        shard=ShardId(row.shard),
        state=TableState(row.state),
        reason=row.reason,
        details=json.loads(row.details),
        schema_version=SchemaVersion(row.schema_version),
        copy_id=row.copy_id,
        changed_us=row.changed_us,
    )


def _fingerprint(schema: TableSchema) -> str:
    """SHA-256 over every fact but the version."""
    arrow = replace(schema, version=SchemaVersion(0)).to_arrow()
    types = [[field.name, str(field.type)] for field in arrow]
    metadata = sorted((key.decode(), value.decode()) for key, value in arrow.metadata.items())
    return hashlib.sha256(json.dumps([types, metadata]).encode()).hexdigest()
