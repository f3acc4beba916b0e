"""A partitioned table's records, exported and imported: each has its leaf partition, and a leaf that left its record."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.flight as fl
from tests.app.landed import LandedHome
from tests.commands import run_command
from tests.export.test_log_export import home_at, known_stream, lines, reader_of, writer_of
from tests.wal.test_records_json import ITEMS, operation, ops, row

import millstream
from millstream.app.open_home import home_appender
from millstream.client.batch_stream import Pieces, latest_of, latest_piece
from millstream.client.call_results import Latest
from millstream.export.log_export import export_arrow
from millstream.export.log_import import import_log
from millstream.export.record_reading import latest_stretches
from millstream.export.records_text import CsvTable, LineProtocol
from millstream.home.home import Home
from millstream.model.positions import Seq
from millstream.model.records import Op
from millstream.serving.access import Access
from millstream.serving.flight.server import FlightServer
from millstream.testing.pytest_plugin import Database
from millstream.wal.records_json import Cat
from millstream.wal.writing.writer import LogOptions

LEAFY = replace(ITEMS, name="leafy", partitioned=True)
LEFT = {"__partition_oid": 16_500, "__before": [("partition", "public.leafy_1")]}


def filled_home(path: Path) -> Home:
    home = home_at(path)
    with home.open_catalog() as catalog:
        stream = known_stream(catalog, LEAFY)
        with writer_of(home, catalog, stream, LogOptions()) as log:
            changes: list[dict[str, Any]] = [
                row(0, Op.CREATE, id=1, __partition_oid=16_500),
                row(1, Op.CREATE, id=2),
                row(2, Op.PARTITION_LEFT, **LEFT),
            ]
            log.append(ops([operation(7, 8)], (LEAFY, 0, changes)))
    return home


def test_an_imported_log_has_each_rows_leaf_partition(tmp_path: Path) -> None:
    home = filled_home(tmp_path / "home")
    reader = reader_of(home)
    export_arrow(reader, tmp_path / "out", stream="shop", after=Seq(0), upto=reader.persisted_upto())
    other = home_at(tmp_path / "other")
    assert import_log(other, "shop", tmp_path / "out") == 3
    assert lines(other) == lines(home)
    assert [line["partition_oid"] for line in lines(other)] == [16_500, None, 16_500]


def test_csv_names_leaf_partitions_and_those_that_left(tmp_path: Path) -> None:
    reader, out = reader_of(filled_home(tmp_path)), io.StringIO()
    table = CsvTable(out, reader.schema_versions(), {LEAFY.table_id})
    for line in Cat("shop", reader, "text").records():
        table.write(line)
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert list(rows[0])[-3:] == ["__before", "__partition_oid", "id"]
    assert all(re.fullmatch(r"[-0-9]{10} [:0-9]{8}(\.[0-9]*[1-9])?\+00", row["__commit_ts"]) for row in rows)
    left = '{"partition": "public.leafy_1", "oid": 16500}'
    assert [list(row.values())[-3:] for row in rows] == [["", "16500", "1"], ["", "", "2"], [left, "16500", ""]]


def test_line_protocol_counts_partitions_that_left(tmp_path: Path) -> None:
    protocol = LineProtocol()
    (left,) = [line for line in Cat("shop", reader_of(filled_home(tmp_path))).records() if line.facts["op"] == "x"]
    assert protocol.line(left) is None
    assert protocol.left_out == {"records are left out: line protocol has no partitions that leave": 1}


def test_flight_sends_the_leaf_partition_of_each_record(tmp_path: Path) -> None:
    home = filled_home(tmp_path)
    with contextlib.closing(home_appender(home)) as appender:
        server = FlightServer(home, Access(None), appender, ("127.0.0.1", 0), None)
        try:
            ticket = fl.Ticket(b'{"stream": "shop", "table": "public.leafy"}')
            with fl.connect(f"grpc://{server.address}") as caller:
                rows = caller.do_get(ticket).read_all().select(["__op", "__before", "__partition_oid", "id"])
        finally:
            server.end()
    assert [tuple(one.values()) for one in rows.to_pylist()] == [
        ("c", None, 16_500, 1),
        ("c", None, None, 2),
        ("x", [("partition", "public.leafy_1")], 16_500, None),
    ]


def test_a_stretch_names_partitions_that_left(tmp_path: Path) -> None:
    (found,) = latest_stretches(reader_of(filled_home(tmp_path)), "public.leafy")
    lines = {row["id"]: (row["__op"], row["__partition_oid"]) for row in found.rows.to_pylist()}
    assert (found.left, lines) == ((16_500,), {1: ("d", None), 2: ("u", None)})
    (told,) = Pieces().feed(b"".join(latest_piece(found.emptied, found.rows, found.token)))
    assert Latest(*latest_of(told)).left == found.left, "over the network, too"


def test_capture_that_goes_on_from_an_import_finds_what_changed_since(postgres: Database, tmp_path: Path) -> None:
    """The import had no facts of what capture had seen. So a partition that was dropped before the next look left its rows."""
    with postgres.connect() as source:
        source.execute("CREATE TABLE days (d int, n int, PRIMARY KEY (d, n)) PARTITION BY LIST (d)")
        for day in (1, 2):
            source.execute(f"CREATE TABLE days_{day} PARTITION OF days FOR VALUES IN ({day})")
        source.execute("CREATE TABLE items (id int PRIMARY KEY)")
        source.execute(
            "CREATE TABLE old (d int NOT NULL, n int NOT NULL, PRIMARY KEY (d, n)); INSERT INTO old VALUES (7, 7)"
        )
        source.execute(
            "INSERT INTO days SELECT 1 + i % 2, i FROM generate_series(1, 6) i; INSERT INTO items VALUES (1)"
        )
        tables = ("public.days", "public.items")
        before = LandedHome(tmp_path / "before", postgres.dsn, tables=tables)
        before.capture()
        exported = run_command(
            ["--home", str(before.home.path), "wal", "export", "--format", "arrow", "-o", str(tmp_path / "out")]
        )
        assert exported.returncode == 0, exported.stderr
        after = LandedHome(tmp_path / "after", postgres.dsn, tables=tables)
        import_log(after.home, "shop", tmp_path / "out")
        source.execute("DROP TABLE days_1; ALTER TABLE days ATTACH PARTITION old FOR VALUES IN (7)")
        source.execute("ALTER TABLE items ADD note text DEFAULT 'new'")
        after.catch_up()
        with millstream.open(after.home.path) as home:
            for query in ("SELECT d, n FROM public.days ORDER BY d, n", "SELECT id, note FROM public.items"):
                rows = [tuple(row.values()) for row in home.query(query).to_pylist()]
                assert rows == source.execute(query).fetchall()
    read = [line["row"] for line in lines(after.home) if line["table"] == "public.days" and line["op"] == "r"]
    assert read[6:] == [{"d": "7", "n": "7"}], "the table was copied whole"
