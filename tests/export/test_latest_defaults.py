"""A copy that `read_latest` keeps gets the default of a later column from the stretch in which the column appears."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from tests.wal.test_records_json import operation, ops, pg, row, schema

from millstream.catalog import Catalog
from millstream.client.batch_stream import Pieces, latest_of, latest_piece
from millstream.client.call_results import Latest
from millstream.export.record_reading import latest_stretches
from millstream.model.ids import SchemaVersion, ShardId
from millstream.model.records import Op
from millstream.model.schema import Column
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogWriter


def test_a_stretch_says_the_defaults_of_columns_that_a_copy_lacks(tmp_path: Path) -> None:
    key = Column("id", pa.int64(), pg(20, "bigint"), number=1)
    old = schema(5, "notes", key)
    grade = Column("grade", pa.int32(), pg(23, "integer"), number=2, filled="5")
    new = replace(old, version=SchemaVersion(2), columns=(key, grade))
    with Catalog(tmp_path / "catalog.db") as catalog:
        stream = catalog.resolve_stream("shop")
        _, epoch = catalog.register_writer(stream)
        with LogWriter.open(
            str(tmp_path / "wal"),
            stream=stream,
            shards=[ShardId(0)],
            epoch=epoch,
            reservations=catalog.reservations(stream),
        ) as log:
            log.append(ops([operation(1, 0x1000)], (old, 0, [row(0, Op.CREATE, id=1), row(1, Op.CREATE, id=2)])))
            reader = StreamReader(str(tmp_path / "wal"))
            (first,) = latest_stretches(reader, "public.notes")
            log.append(ops([operation(2, 0x1100)], (new, 0, [row(0, Op.UPDATE, id=2, grade=None)])))
    (later,) = latest_stretches(reader, "public.notes", after=first.token)
    assert (first.filled, later.filled) == ({}, {"grade": "5"})
    assert later.rows.select(["id", "grade"]).to_pylist() == [{"id": 2, "grade": None}]
    (told,) = Pieces().feed(b"".join(latest_piece(later.emptied, later.rows, later.token)))
    assert Latest(*latest_of(told)).filled == later.filled, "over the network, too"
