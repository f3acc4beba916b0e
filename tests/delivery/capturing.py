"""Workloads captured into a real log, for the encoder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from tests.capture.capture_stage import Stage, make_config
from tests.delivery.golden_files import run, transactions

from millstream.catalog import Catalog
from millstream.delivery.kafka.debezium import DebeziumEncoder
from millstream.delivery.kafka.debezium_options import DebeziumOptions
from millstream.model.ids import ShardId
from millstream.model.positions import Offset
from millstream.model.schema import TableKind, TableSchema
from millstream.testing.postgres import EmbeddedPostgres
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogWriter

NOW_NS = 1_700_000_000_123_456_789
Captured = list[tuple[TableSchema, pa.RecordBatch]]


def captured(server: EmbeddedPostgres, folder: Path, *sources: str) -> Captured:
    """Return the changes that workloads make, one after the other, as records of a log with their offsets."""
    name = f"debezium_{os.getpid()}"
    dsn = server.create_database(name)
    before, after = ([t for source in sources for t in transactions(source)[part]] for part in (0, 1))
    with ExitStack() as stack:
        stack.callback(server.drop_database, name)
        catalog = stack.enter_context(Catalog(folder / "catalog.db"))
        stream = catalog.resolve_stream("shop")
        _, epoch = catalog.register_writer(stream)
        writer = LogWriter.open(
            str(folder / "wal"),
            stream=stream,
            shards=[ShardId(0)],
            epoch=epoch,
            reservations=catalog.reservations(stream),
        )
        log: Any = stack.enter_context(writer)
        stage = Stage(dsn, folder, catalog, make_config(dsn, folder, name), log)
        with stage.connect() as connection:
            run(connection, before)
            stage.catch_up()
            run(connection, after)
        stage.catch_up()
        return list(_changes(folder))


def _changes(folder: Path) -> Iterator[tuple[TableSchema, pa.RecordBatch]]:
    """Yield what transactions and messages wrote, without copies."""
    for part in StreamReader(str(folder / "wal")).read(ShardId(0), Offset(0)):
        batch = part.batch
        if part.schema.kind is TableKind.TABLE:
            batch = batch.filter(pc.is_valid(batch.column("__commit_index")))
        if batch.num_rows:
            yield part.schema, batch


def messages(changes: Captured, options: DebeziumOptions, database: str = "") -> list[dict[str, Any]]:
    """Return the messages of changes in the log's order, in the form of the golden files."""
    encoder = DebeziumEncoder("golden", database, options)
    found = []
    for schema, batch in changes:
        seqs = batch.column("__seq").to_pylist()
        for number, message in enumerate(encoder.encode(schema, batch, now_ns=NOW_NS)):
            key, value = (None if part is None else json.loads(part) for part in (message.key, message.value))
            headers = {name: json.loads(header) for name, header in message.headers}
            whole = {"topic": message.topic, "key": key, "value": value, "headers": headers}
            found.append(((seqs[message.row], number), whole))
    return [whole for _, whole in sorted(found, key=lambda pair: pair[0])]
