"""An exported log, written into an empty stream: the same operations and records, in the same order.

All or nothing: every file of the export is checked first, the log is written next to the stream's folder,
and a rename publishes it. An interrupted import is started again with the same command. Sources, tables
and schemas get this home's own numbers in the catalog, in the exporting home's order; records get this
stream's numbers (`seq`). LSNs, transaction ids, times, indexes and texts stay the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc

from millstream.errors import LogError
from millstream.export.log_export import OPERATIONS_FILE, batches_of, check_columns, exported_rows, read_export
from millstream.home.home import Home
from millstream.leadership.node_roles import Roles
from millstream.model.ids import Epoch, RegionId, SchemaVersion, ShardId, SourceId, StreamId, TableId
from millstream.model.operations import OPERATION_SCHEMA, SpilledOp, TableRows, WriteOps
from millstream.model.positions import Lsn, Seq
from millstream.model.records import append_row_schema
from millstream.model.schema import TableSchema
from millstream.private_files import make_folder
from millstream.processes.role_locks import nobody_writes
from millstream.routing.router import in_key_order
from millstream.wal.files import RealFiles
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogOptions, LogWriter

if TYPE_CHECKING:
    from millstream.catalog import Catalog

_RECORDS_AT_ONCE: Final = 20_000
"""Number of records up to which operations are appended together; a larger operation goes in pieces."""
Position = tuple[int, int]
"""(batch, row in it)"""


@dataclass(slots=True)
class _File:
    """One table's rows, and the position up to which they have been taken."""

    path: Path
    reader: ipc.RecordBatchFileReader
    shard: ShardId
    schema: TableSchema
    """With this home's numbers."""
    partition: str | None
    at: Position = (0, 0)

    def rows(self, at: Position, ordinal: int) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """Yield the rows of operations up to an ordinal, batch by batch, each with its end position."""
        number, row = at
        while number < self.reader.num_record_batches:
            batch = self.reader.get_batch(number)
            end = int(np.searchsorted(batch.column("__operation").to_numpy(), ordinal, side="right"))
            whole = end == batch.num_rows
            following = (number + 1, 0) if whole else (number, end)
            if end > row:
                yield batch.slice(row, end - row), following
            if not whole:
                return
            number, row = following


class _Reservations:
    """Reservations while the log isn't the stream's yet: from the catalog's numbers, and recorded there in the end."""

    def __init__(self, reserved: Seq) -> None:
        self._reserved = reserved

    def reserved(self) -> Seq:
        """Return the greatest number reserved."""
        return self._reserved

    def reserve_to(self, seq: Seq, *, epoch: Epoch) -> None:
        """Reserve, only upward."""
        del epoch
        self._reserved = max(self._reserved, seq)


def import_log(home: Home, stream: str, folder: Path) -> int:
    """Import an export into a stream that has no records; return how many records it had.

    Raises:
        LogError (`export_unusable`): the export is incomplete, or of another version. Nothing was changed.
        LogError (`stream_not_empty`): the stream has records.
        HomeBusy: another process writes the home.
        ReadOnly, Fenced: another node leads the stream.
        DiskFull, CatalogError …: nothing is published; the same call starts again.
    """
    facts = read_export(folder)
    config = home.configured(stream)
    home.prepare()
    Roles(home).check_leads(stream)
    with nobody_writes(home.run_folder), home.open_catalog() as catalog:
        target = home.wal_folder(stream)
        found = _stream_on_disk(target, stream)
        stream_id = catalog.resolve_stream(stream, found=found)
        staging = home.data / "import" / stream
        shutil.rmtree(staging, ignore_errors=True)
        make_folder(staging.parent)
        sources = _sources(catalog, stream_id, facts)
        files = _open_files(catalog, stream_id, folder, facts, sources)
        _, epoch = catalog.register_writer(stream_id)
        durable = catalog.reservations(stream_id)
        reservations = _Reservations(durable.reserved())
        shards = sorted({ShardId(0), *(file.shard for file in files)})
        with LogWriter.open(
            str(staging),
            stream=stream_id,
            shards=shards,
            epoch=epoch,
            reservations=reservations,
            options=LogOptions() if config is None else LogOptions(frame_version=config.log.frame_version),
            region=RegionId(0 if config is None else config.region),
        ) as log:
            records = _append(log, folder, files, sources, _reached(facts, sources))
            failure = log.failure()
        if failure is not None:
            raise failure
        if records != facts["records"]:
            raise LogError(
                f"{folder} announces {facts['records']} records, {records} are there", code="export_unusable"
            )
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
        RealFiles().sync_dir(str(target.parent))
        durable.reserve_to(reservations.reserved(), epoch=epoch)
        for source, lsn in _reached(facts, sources).items():
            if source:
                catalog.move_reached(source, lsn, log_had=lsn)
    return records


def _stream_on_disk(target: Path, stream: str) -> StreamId | None:
    """Return the id of an existing empty log; `stream_not_empty` if it isn't empty."""
    if not target.is_dir():
        return None
    reader = StreamReader(str(target), on_damage=lambda _error: None)
    marked = not reader.lacks_marks() and all(reader.durable_offset(shard) == 0 for shard in reader.shards)
    if not marked or any(file.stat().st_size > 4096 for file in target.glob("*/*.wal")):
        raise LogError(f"stream {stream} has records in {target}", code="stream_not_empty", stream=stream)
    return reader.stream_id if reader.shards else None


# --- the catalog ---------------------------------------------------------------------------------------------------


def _sources(catalog: Catalog, stream: StreamId, facts: Mapping[str, Any]) -> dict[int, SourceId]:
    """Return this home's number for each source of the export; an unknown source gets a history of its own."""
    known = {source["id"]: source for source in facts["catalog"].get("sources", ())}
    used = {int(source) for source in facts["reached"]} | set(known) | set(facts.get("sources", ()))
    found = {0: SourceId(0)}
    for number in sorted(used - {0}):
        of = known.get(number, {"system_identifier": 0, "database": "imported", "timeline": number})
        found[number] = catalog.resolve_source(stream, of["system_identifier"], of["database"], of["timeline"])
    return found


def _reached(facts: Mapping[str, Any], sources: Mapping[int, SourceId]) -> dict[SourceId, Lsn]:
    return {sources[int(source)]: Lsn(lsn) for source, lsn in facts["reached"].items()}


def _open_files(
    catalog: Catalog, stream: StreamId, folder: Path, facts: Mapping[str, Any], sources: Mapping[int, SourceId]
) -> list[_File]:
    opened: list[tuple[Path, ipc.RecordBatchFileReader, ShardId, TableSchema, str | None]] = []
    for file in facts["files"]:
        if file["name"] == OPERATIONS_FILE:
            continue
        path = folder / file["name"]
        try:
            reader = ipc.open_file(pa.memory_map(str(path)))
            schema = TableSchema.from_arrow(reader.schema)
            check_columns(path, reader.schema, exported_rows(schema))
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise LogError(f"{path} can't be read: {error}", code="export_unusable", file=str(path)) from error
        opened.append((path, reader, ShardId(file["shard"]), schema, file.get("partition")))
    tables = _tables(catalog, stream, [(shard, schema) for _, _, shard, schema, _ in opened], facts, sources)
    versions: dict[tuple[TableId, SchemaVersion], TableSchema] = {}
    for _, _, _, schema, _ in sorted(opened, key=lambda found: (found[3].table_id, found[3].version)):
        key = (schema.table_id, schema.version)
        if key not in versions:
            mine = replace(schema, table_id=tables[schema.table_id], source=sources[schema.source])
            versions[key] = catalog.put_schema(stream, mine)
    return [
        _File(path, reader, shard, versions[s.table_id, s.version], part) for path, reader, shard, s, part in opened
    ]


def _tables(
    catalog: Catalog,
    stream: StreamId,
    schemas: Sequence[tuple[ShardId, TableSchema]],
    facts: Mapping[str, Any],
    sources: Mapping[int, SourceId],
) -> dict[TableId, TableId]:
    """Return this home's id for each table of the export, in the order of its own."""
    from millstream.capture.facts_of_tables import put_facts_of_table
    from millstream.catalog import TableState

    known = {table["id"]: table for table in facts["catalog"].get("tables", ())}
    is_whole = bool(facts["reached"])
    newest = {schema.table_id: (shard, schema) for shard, schema in sorted(schemas, key=lambda found: found[1].version)}
    found: dict[TableId, TableId] = {}
    last_of = {
        (s.source, s.relation_oid, s.kind, s.namespace, s.name): table for table, (_, s) in sorted(newest.items())
    }
    for table, (shard, s) in sorted(newest.items()):
        is_last = last_of[s.source, s.relation_oid, s.kind, s.namespace, s.name] == table
        told = known.get(table, {}).get("state", TableState.STREAMING.value if is_last else TableState.GONE.value)
        if told not in set(TableState):
            raise LogError(
                f"the export says of {s.namespace}.{s.name} that it is {told!r}, which is no state",
                code="export_unusable",
            )
        state = TableState(told)
        if state is TableState.COPYING:
            state = TableState.COPY_REQUESTED  # its copy's position wasn't exported
        reason = str(known.get(table, {}).get("reason", ""))
        row = catalog.table_for(
            stream, sources[s.source], s.relation_oid, s.namespace, s.name, kind=s.kind, shard=shard, state=state, reason=reason
        )  # fmt: skip
        if row.id in found.values():
            raise LogError(
                f"two tables of the export are one relation of the source: {s.namespace}.{s.name} is the other",
                code="export_unusable",
            )
        if state is TableState.GONE:
            catalog.set_state(row.id, state, reason)
        if is_whole:
            put_facts_of_table(catalog, stream, row.id, known.get(table, {}).get("captured") or {})
        found[table] = row.id
    return found


# --- the records ---------------------------------------------------------------------------------------------------


def _append(
    log: LogWriter,
    folder: Path,
    files: list[_File],
    sources: Mapping[int, SourceId],
    reached: Mapping[SourceId, Lsn],
) -> int:
    """Append all operations in order; return how many records they had."""
    done = 0
    waiting: list[dict[str, Any]] = []
    size = 0

    def flush(*, last: bool = False) -> None:
        nonlocal done, waiting, size
        if waiting:
            done += _append_some(log, files, waiting, sources, reached if last else {})
        waiting, size = [], 0

    held: dict[str, Any] | None = None
    for operation in (row for batch in batches_of(folder / OPERATIONS_FILE) for row in batch.to_pylist()):
        if held is not None:
            waiting.append(held)
            size += _records(held)
        held = None
        if size + _records(operation) > _RECORDS_AT_ONCE:
            flush()
        held = operation
    if held is not None:
        waiting.append(held)
    flush(last=True)
    return done


def _records(operation: Mapping[str, Any]) -> int:
    return sum(count["records"] for count in operation["counts"])


def _append_some(
    log: LogWriter,
    files: list[_File],
    operations: Sequence[dict[str, Any]],
    sources: Mapping[int, SourceId],
    reached: Mapping[SourceId, Lsn],
) -> int:
    first, last = operations[0]["number"], operations[-1]["number"]
    facts = pa.RecordBatch.from_pylist(
        [{**{n: op[n] for n in OPERATION_SCHEMA.names}, "source": sources[op["source"]]} for op in operations],
        schema=OPERATION_SCHEMA,
    )
    if len(operations) == 1 and _records(operations[0]) > _RECORDS_AT_ONCE:
        ends: dict[int, Position] = {}
        counts: dict[tuple[ShardId, TableId], int] = {}
        for place, file in enumerate(files):
            for batch, end in file.rows(file.at, last):
                key = (file.shard, file.schema.table_id)
                counts[key] = counts.get(key, 0) + batch.num_rows
                ends[place] = end
        log.append(SpilledOp(facts, counts, _chunks([(file, file.at) for file in files], last), reached))
        for place, end in ends.items():
            files[place].at = end
        return sum(counts.values())
    tables = []
    for file in files:
        pieces = []
        for batch, end in file.rows(file.at, last):
            pieces.append(_as_appended(batch, file.schema, first))
            file.at = end
        if pieces:
            rows = (
                pa.Table.from_batches(pieces)
                .combine_chunks()
                .sort_by([("__operation", "ascending"), ("__index", "ascending")])
            )
            (whole,) = rows.combine_chunks().to_batches()
            tables.append(TableRows(file.schema, whole, file.shard, file.partition))
    ops = WriteOps(facts, tuple(in_key_order(tables)), reached)
    log.append(ops)
    return ops.row_count


def _chunks(files: Sequence[tuple[_File, Position]], ordinal: int) -> Callable[[], Iterator[tuple[TableRows, ...]]]:
    """Yield a large operation's rows in pieces, over all its tables by index."""

    def chunks() -> Iterator[tuple[TableRows, ...]]:
        sources = {n: (file, file.rows(at, ordinal)) for n, (file, at) in enumerate(files)}
        heads: dict[int, pa.RecordBatch] = {}
        while sources or heads:
            for n, (file, rows) in list(sources.items()):
                if n not in heads:
                    found = next(rows, None)
                    if found is None:
                        del sources[n]
                    else:
                        heads[n] = _as_appended(found[0], file.schema, ordinal).sort_by("__index")
            if not heads:
                return
            upto = min(batch.column("__index")[-1].as_py() for batch in heads.values())
            made = []
            for n, batch in list(heads.items()):
                file = files[n][0]
                end = int(np.searchsorted(batch.column("__index").to_numpy(), upto, side="right"))
                if end:
                    made.append(TableRows(file.schema, batch.slice(0, end), file.shard, file.partition))
                if end == batch.num_rows:
                    del heads[n]
                else:
                    heads[n] = batch.slice(end)
            yield tuple(in_key_order(made))

    return chunks


def _as_appended(batch: pa.RecordBatch, schema: TableSchema, first: int) -> pa.RecordBatch:
    """Return exported rows as rows to append, under this home's schema."""
    target = append_row_schema(schema)
    letters = "".join(batch.column("__op").to_pylist()).encode("ascii")
    given = {
        "__operation": pc.cast(pc.subtract(batch.column("__operation"), first), pa.int32()),
        "__op": pa.array(np.frombuffer(letters, dtype=np.uint8)),
    }
    own = len(target) - len(schema.columns)
    columns = [given.get(name, batch.column(batch.schema.get_field_index(name))) for name in target.names[:own]]
    columns += batch.columns[batch.num_columns - len(schema.columns) :]
    return pa.RecordBatch.from_arrays(columns, schema=target)
