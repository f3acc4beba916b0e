"""A log exported and imported is the same log; other programs can read the export."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.app.homes import run
from tests.wal.plain_operations import plain_spilled, plain_table
from tests.wal.test_records_json import ITEMS, MESSAGES, ORDERS, RAW, operation, ops, row

import millstream
from millstream.catalog import Catalog
from millstream.errors import LogError, UsageError
from millstream.export.log_export import EXPORT_FILE, export_arrow, file_facts, read_export
from millstream.export.log_import import import_log
from millstream.export.records_text import LineProtocol
from millstream.home.home import Home
from millstream.model.ids import SchemaVersion, ShardId, SourceId, StreamId, TableId
from millstream.model.operations import OperationKind, SpilledOp
from millstream.model.positions import Lsn, Offset, Seq
from millstream.model.records import Op
from millstream.model.schema import Column, PgType, TableSchema
from millstream.testing.errors import coded
from millstream.wal.mending.inspect import FrameInfo, inspect
from millstream.wal.mending.repair import plan_repair, repair
from millstream.wal.reader import StreamReader
from millstream.wal.records_json import Cat
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter

WIDER = replace(
    ORDERS, version=SchemaVersion(2), columns=(*ORDERS.columns, Column("more", pa.string(), PgType(25, -1, "text")))
)
BULK = replace(plain_table(9, "bulk"), relation_oid=20009)
FEW = replace(plain_table(8, "few"), relation_oid=20008)
NOTHING: dict[str, Any] = {"total": None, "ratio": None, "paid": None, "note": None}


def home_at(path: Path) -> Home:
    path.mkdir(parents=True, exist_ok=True)
    (path / "millstream.toml").write_text('[streams.shop.source]\ndsn = "host=127.0.0.1 port=1"\n')
    home = Home(path)
    home.prepare()
    return home


def known_stream(catalog: Catalog, *tables: TableSchema) -> StreamId:
    stream = catalog.resolve_stream("shop")
    assert catalog.resolve_source(stream, 77, "shop", 1) == 1
    for table in tables:
        catalog.table_for(stream, SourceId(1), table.relation_oid, table.namespace, table.name, kind=table.kind)
    return stream


def writer_of(home: Home, catalog: Catalog, stream: StreamId, options: LogOptions) -> LogWriter:
    return LogWriter.open(
        str(home.wal_folder("shop")),
        stream=stream,
        shards=[ShardId(0), ShardId(1)],
        epoch=catalog.register_writer(stream)[1],
        reservations=catalog.reservations(stream),
        options=options,
    )


def fill(home: Home) -> None:
    """Write every kind of operation and record, over two shards, two schema versions and several segments."""
    with home.open_catalog() as catalog:
        stream = known_stream(catalog, ORDERS, ITEMS, MESSAGES, RAW)
        with writer_of(home, catalog, stream, LogOptions(segment_bytes=40_000, frame_bytes_max=3_000)) as log:
            copied = operation(None, 8, OperationKind.COPY_CHUNK) | {"chunk_id": "1.0", "commit_end_lsn": None}
            log.append(ops([copied], (ORDERS, 0, [row(n, Op.COPY, id=n, **NOTHING) for n in range(40)])))
            log.append(
                ops(
                    [operation(7, 0x16B374D848), operation(8, 0x16B374E000)],
                    (ORDERS, 0, [
                        row(0, Op.CREATE, id=100, total=Decimal("1.50"), ratio=0.1, paid=True, note=""),
                        row(2, Op.UPDATE, id=101, total=None, ratio=float("inf"), paid=False, note=None, __unchanged=["note"],
                            __exact=[("total", "NaN")], __before=[("id", "100")]),
                        row(3, Op.DELETE, id=2**53 + 1, **NOTHING),
                        row(0, Op.TRUNCATE, 1, id=None, **NOTHING),
                    ]),
                    (ITEMS, 1, [row(1, Op.CREATE, id=5), row(1, Op.TRUNCATE, 1, id=None)]),
                    (MESSAGES, 0, [row(4, Op.MESSAGE, prefix="p", content=b"\x00\xff", transactional=True)]),
                )
            )  # fmt: skip
            log.append(
                ops(
                    [operation(None, 9, OperationKind.MESSAGE) | {"commit_ts": None}],
                    (MESSAGES, 0, [row(0, Op.MESSAGE, prefix="q", content=b"x")]),
                )
            )
            log.append(ops([operation(9, 0x16B374F000)], (RAW, 0, [row(0, Op.UPDATE, message=b"\x00U")])))
            for xid in range(10, 60):
                one = [row(0, Op.CREATE, id=xid, **NOTHING | {"note": f'línea,{xid}\n"q"'}, more="m")]
                log.append(
                    ops([operation(xid, 0x1700000000 + xid)], (WIDER, 0, one), (ITEMS, 1, [row(1, Op.CREATE, id=xid)]))
                )
            large = plain_spilled(
                90, [[(BULK, 15_000, "a"), (FEW, 20, "b")], [(BULK, 9_000, "c" * 30)]], shard_of={9: 1, 8: 0}
            )
            log.append(SpilledOp(large.operation, large.counts, large.chunks, {SourceId(1): Lsn(0x1800000000)}))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = home_at(tmp_path_factory.mktemp("filled"))
    fill(home)
    return home


@pytest.fixture(scope="module")
def exported(filled: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "out"
    done = wal(filled, "export", "--format", "arrow", "-o", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def wal(home: Home, *words: str) -> subprocess.CompletedProcess[str]:
    return run(home.path, "wal", *words)


def reader_of(home: Home) -> StreamReader:
    return StreamReader(str(home.wal_folder("shop")))


def lines(home: Home, values: str = "text") -> list[dict[str, Any]]:
    """Return all records as `wal cat` prints them, without `seq` and `epoch`, which are those of the writer here."""
    found = list(Cat("shop", reader_of(home), values).lines())  # type: ignore[arg-type]
    for line in found:
        del line["seq"], line["epoch"]
    return found


def operations_of(home: Home) -> dict[int, list[dict[str, Any]]]:
    """Return every operation's facts by shard, in order."""
    reader = reader_of(home)
    found: dict[int, list[dict[str, Any]]] = {}
    for group in reader.read_groups(Seq(reader.first_seq() - 1), reader.persisted_upto()):
        for frame in group:
            facts = found.setdefault(frame.header.shard, [])
            facts += [of for of in frame.operations.to_pylist() if not facts or of != facts[-1]]
    return found


def replayed(home: Home) -> dict[str, dict[str, Any]]:
    """Return the tables that the records produce, by key."""
    tables: dict[str, dict[str, Any]] = {}
    for line in lines(home):
        if line["op"] in ("m", "raw"):
            continue
        rows = tables.setdefault(line["table"], {})
        if line["op"] == "t":
            rows.clear()
            continue
        if line["before"]:
            rows.pop(line["before"]["id"], None)
        if line["op"] == "d":
            rows.pop(line["row"]["id"], None)
        else:
            rows[line["row"]["id"]] = line["row"]
    return tables


@pytest.mark.siege
def test_what_was_exported_and_imported_is_the_same_log(filled: Home, exported: Path, tmp_path: Path) -> None:
    home = home_at(tmp_path)
    done = wal(home, "import", str(exported))
    assert done.returncode == 0, done.stderr
    assert lines(home) == lines(filled)
    assert lines(home, "json") == lines(filled, "json")
    assert operations_of(home) == operations_of(filled)
    assert replayed(home) == replayed(filled)
    assert len(replayed(home)["public.bulk"]) == 24_000
    assert wal(home, "verify").returncode == 0
    ours, theirs = reader_of(home), reader_of(filled)
    assert [s.columns for s in ours.schemas().values()] == [s.columns for s in theirs.schemas().values()]
    assert [version for _, version in ours.schema_versions()] == [version for _, version in theirs.schema_versions()]
    with home.open_catalog() as catalog:
        stream = catalog.stream("shop").id
        assert ours.stream_id == stream != theirs.stream_id
        assert {(t.namespace, t.name) for t in catalog.tables(stream)} >= {
            ("public", "orders"),
            ("public", "Order Items"),
        }
        assert [(s.system_identifier, s.reached) for s in catalog.sources(stream)] == [(77, 0x1800000000)]
        # A writer goes on from there, above every number in use.
        with LogWriter.open(
            str(home.wal_folder("shop")),
            stream=stream,
            shards=[ShardId(0), ShardId(1)],
            epoch=catalog.register_writer(stream)[1],
            reservations=catalog.reservations(stream),
        ) as log:
            assert log.reached()[SourceId(1)] == 0x1800000000
            before = ours.persisted_upto()
            ack = log.append(ops([operation(99, 0x1900000000)], (ITEMS, 1, [row(0, Op.CREATE, id=1)])))
            assert ack.seqs.first > before
    again = wal(home, "import", str(exported))
    assert (again.returncode, "error[stream_not_empty]" in again.stderr) == (1, True)


def test_an_imported_log_has_a_number_for_each_record(tmp_path: Path) -> None:
    home, per_session = home_at(tmp_path / "old"), 5
    with home.open_catalog() as catalog:
        stream = known_stream(catalog, ORDERS, ITEMS)
        xid = 10
        for _ in range(3):
            with writer_of(home, catalog, stream, LogOptions()) as log:
                for _ in range(per_session):
                    xid += 1
                    orders = [row(0, Op.CREATE, id=10 * xid + n, **NOTHING) for n in range(3)]
                    items = [row(3 + n, Op.CREATE, id=10 * xid + n) for n in range(2)]
                    log.append(ops([operation(xid, 0x1700000000 + xid)], (ORDERS, 0, orders), (ITEMS, 1, items)))
    folder = tmp_path / "out"
    assert wal(home, "export", "--format", "arrow", "-o", str(folder)).returncode == 0
    imported = home_at(tmp_path / "new")
    done = wal(imported, "import", str(folder))
    assert done.returncode == 0, done.stderr
    assert lines(imported) == lines(home)
    assert replayed(imported) == replayed(home)
    reader = reader_of(imported)
    found: dict[int, list[int]] = {}
    for records in reader.read_between(Seq(0), reader.persisted_upto()):
        found.setdefault(records.schema.table_id, []).extend(records.batch.column("__seq").to_pylist())
    assert [len(numbers) for numbers in found.values()] == [3 * 3 * per_session, 3 * 2 * per_session]
    assert all(numbers == sorted(numbers) for numbers in found.values())
    assert len({seq for numbers in found.values() for seq in numbers}) == 3 * 5 * per_session


@pytest.mark.long
def test_an_export_without_a_catalog_is_imported_too(filled: Home, tmp_path: Path) -> None:
    bare = Home(tmp_path / "bare")
    shutil.copytree(filled.data / "wal", bare.data / "wal")
    for mark in bare.data.glob("wal/shop/*/durable.mark"):
        mark.unlink()
    assert wal(bare, "export", "--format", "arrow", "-o", str(tmp_path / "out")).returncode == 0
    home = home_at(tmp_path / "home")
    import_log(home, "shop", tmp_path / "out")
    assert lines(home) == lines(filled)


@pytest.mark.siege
def test_a_repaired_log_is_exported_and_imported_without_what_was_lost(filled: Home, tmp_path: Path) -> None:
    home = home_at(tmp_path / "hurt")
    shutil.copytree(filled.data / "wal", home.data / "wal", dirs_exist_ok=True)
    folder = str(home.wal_folder("shop"))
    frames = [f for f in inspect(folder) if isinstance(f, FrameInfo) and f.count]
    in_part = next(f for f in frames if len(f.tables) > 1)  # one table's rows
    in_head = next(f for f in frames if f.path != in_part.path)  # all of it
    for frame, at in ((in_part, in_part.position + in_part.length - 10), (in_head, in_head.position + 20)):
        data = bytearray(Path(frame.path).read_bytes())
        data[at] ^= 0xFF
        Path(frame.path).write_bytes(data)
    assert wal(home, "export", "--format", "arrow", "-o", str(tmp_path / "no")).returncode == 1
    assert wal(home, "export").returncode == 3
    repair(folder, plan_repair(folder).ranges())
    assert wal(home, "export", "--format", "arrow", "-o", str(tmp_path / "out")).returncode == 0
    again = home_at(tmp_path / "again")
    import_log(again, "shop", tmp_path / "out")

    def told(of: Home) -> list[dict[str, Any]]:
        return [{name: value for name, value in line.items() if name != "offset"} for line in lines(of)]

    assert told(again) == told(home)
    assert 0 < len(told(filled)) - len(told(home)) < 100


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("harm", ["cut", "flip", "gone", "version", "unfinished", "foreign", "columns"])
def test_an_export_that_isnt_whole_is_refused_and_nothing_is_imported(
    exported: Path, tmp_path: Path, harm: str
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    victim = next(folder.glob("*bulk*.arrow"))
    facts = json.loads((folder / EXPORT_FILE).read_bytes())
    match harm:
        case "cut":
            victim.write_bytes(victim.read_bytes()[:-1000])
        case "flip":
            data = bytearray(victim.read_bytes())
            data[len(data) // 2] ^= 1
            victim.write_bytes(data)
        case "gone":
            victim.unlink()
        case "version":
            (folder / EXPORT_FILE).write_text(json.dumps(facts | {"version": 2}))
        case "unfinished":
            (folder / EXPORT_FILE).unlink()
        case "foreign":
            (folder / EXPORT_FILE).write_text('{"format": "something"}')
        case "columns":
            table = pa.table({"id": [1]})
            with pa.OSFile(str(victim), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
                out.write_table(table)
            facts["files"] = [f | (file_facts(victim) if f["name"] == victim.name else {}) for f in facts["files"]]
            (folder / EXPORT_FILE).write_text(json.dumps(facts))
    home = home_at(tmp_path / "home")
    with pytest.raises(LogError, check=coded("export_unusable")):
        import_log(home, "shop", folder)
    assert home.streams_on_disk() == []
    import_log(home, "shop", exported)
    assert sum(1 for _ in reader_of(home).read(ShardId(0), Offset(0)))


@pytest.mark.parametrize(
    "changed",
    [
        {"records": None},
        {"stream": ["shop"]},
        {"reached": {"x": 1}},
        {"reached": {"1": 1 << 63}},
        {"sources": [None]},
        {"catalog": True},
        {"catalog": {"sources": [{"id": 1}]}},
        {"catalog": {"tables": [{"id": 1, "state": "x", "reason": ""}]}},
        {"files": []},
        {"files": [None]},
        {"shard": 1 << 63},
        {"shard": "0"},
        {"column": "__unchanged"},
        {"column": "commit_lsn"},
        {"column": "counts"},
    ],
    ids=str,
)
def test_an_export_that_somebody_changed_with_right_checksums_is_refused_by_name(
    exported: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    """They ended in tracebacks."""
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    facts = json.loads((folder / EXPORT_FILE).read_bytes())
    for file in facts["files"]:
        path = folder / file["name"]
        if "shard" in changed and "shard" in file:
            file["shard"] = changed["shard"]
        if "column" in changed and changed["column"] in (table := pa.ipc.open_file(str(path)).read_all()).column_names:
            table = table.drop_columns([changed["column"]])
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
                out.write_table(table)
            file.update(file_facts(path))
    facts |= {name: value for name, value in changed.items() if name in facts}
    (folder / EXPORT_FILE).write_text(json.dumps(facts))
    home = home_at(tmp_path / "home")
    with pytest.raises(LogError, check=coded("export_unusable")):
        import_log(home, "shop", folder)
    assert home.streams_on_disk() == []


@pytest.mark.long
def test_an_import_that_was_cut_short_is_begun_again(exported: Path, filled: Home, tmp_path: Path) -> None:
    home = home_at(tmp_path)
    facts = read_export(exported)
    (exported / EXPORT_FILE).rename(exported / "kept")
    try:
        (exported / EXPORT_FILE).write_text(json.dumps(facts | {"records": facts["records"] + 1}))
        with pytest.raises(LogError, check=coded("export_unusable"), match="announces"):
            import_log(home, "shop", exported)  # all was appended, and nothing is shown
    finally:
        (exported / "kept").rename(exported / EXPORT_FILE)
    assert home.streams_on_disk() == []
    import_log(home, "shop", exported)
    assert lines(home) == lines(filled)


def test_an_empty_stream_that_ran_before_takes_an_import_and_one_with_records_does_not(
    exported: Path, tmp_path: Path
) -> None:
    home = home_at(tmp_path)
    with home.open_catalog() as catalog:
        stream = catalog.resolve_stream("shop")
        opened = {"stream": stream, "shards": [ShardId(0)], "reservations": catalog.reservations(stream)}
        LogWriter.open(str(home.wal_folder("shop")), epoch=catalog.register_writer(stream)[1], **opened).close()
    import_log(home, "shop", exported)
    assert reader_of(home).stream_id == stream
    with pytest.raises(LogError, check=coded("stream_not_empty")):
        import_log(home, "shop", exported)


@pytest.mark.long
def test_a_part_of_the_log_is_exported_by_number_token_time_and_table(filled: Home, tmp_path: Path) -> None:
    reader = reader_of(filled)
    every = list(Cat("shop", reader).lines())
    half = every[len(every) // 2]["seq"]
    token = str(reader.token())

    def ndjson(*words: str) -> list[dict[str, Any]]:
        done = wal(filled, "export", *words)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    assert ndjson("--table", "public.orders") == [line for line in every if line["table"] == "public.orders"]
    assert ndjson("--since", str(half), "--table", "bulk") == [
        line for line in every if line["seq"] >= half and line["table"] == "public.bulk"
    ]
    assert ndjson("--until", "40", "--values", "text")[-1]["seq"] <= 40
    assert ndjson("--since", token) == []
    assert ndjson("--since", "2100-01-01") == []
    assert len(ndjson("--until", "2100-01-01", "--table", "orders")) == len(
        [1 for x in every if x["table"] == "public.orders"]
    )
    assert ndjson("--until", "2000-01-01") == []
    end = int(token.partition(".s")[2])
    for words in (("--since", str(end + 1)), ("--until", str(end + 1)), ("--until", f"{token[:8]}.s{end + 1}")):
        done = wal(filled, "export", *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert "error[token_from_future]" in done.stderr
    for since, until in (("30", "20"), (token, "20"), ("2026-03-02", "2026-03-01")):
        done = wal(filled, "export", "--since", since, "--until", until)
        assert (done.returncode, done.stdout) == (2, "")
        assert "is later than" in done.stderr
    count = export_arrow(
        reader, tmp_path / "part", stream="shop", after=Seq(40), upto=Seq(half), tables=frozenset({TableId(1)})
    )
    home = home_at(tmp_path / "home")
    assert import_log(home, "shop", tmp_path / "part") == count == len(lines(home))
    with pytest.raises(UsageError):
        export_arrow(reader, tmp_path / "part", stream="shop", after=Seq(0), upto=Seq(1))


@pytest.mark.long
def test_one_table_on_stdout_is_an_arrow_stream_or_csv(filled: Home) -> None:
    command = [sys.executable, "-m", "millstream.cli", "--home", str(filled.path), "wal", "export"]
    done = subprocess.run([*command, "--format", "arrow", "--table", "bulk"], capture_output=True, timeout=600)
    assert pa.ipc.open_stream(done.stdout).read_all().num_rows == 24_000
    done = subprocess.run([*command, "--format", "arrow", "--table", "orders"], capture_output=True, timeout=600)
    assert (done.returncode, b"columns change" in done.stderr) == (2, True)
    assert wal(filled, "export", "--format", "arrow").returncode == 2
    text = wal(filled, "export", "--format", "csv", "--table", "orders").stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0])[-6:] == ["id", "total", "ratio", "paid", "note", "more"]
    want = [line for line in Cat("shop", reader_of(filled), "text").lines() if line["table"] == "public.orders"]
    assert [(r["__op"], r["id"], r["note"], r["total"]) for r in rows] == [
        (w["op"], *((w["row"] or {}).get(name) or "" for name in ("id", "note", "total"))) for w in want
    ]
    assert '""' in text


@pytest.mark.long
def test_csv_of_several_tables_is_a_file_each(filled: Home, tmp_path: Path) -> None:
    assert wal(filled, "export", "--format", "csv", "-o", str(tmp_path / "csv")).returncode == 0
    rows = rows_of(tmp_path / "csv")
    public = [f"public.{name}.csv" for name in ("broken", "bulk", "few", "orders")]
    public.insert(0, "public.Order~20Items.csv")
    assert sorted(rows) == ["_messages.csv", *public]
    every = list(Cat("shop", reader_of(filled), "text").lines())
    assert sorted(int(row["__seq"]) for of in rows.values() for row in of) == sorted(line["seq"] for line in every)
    assert [row["prefix"] for row in rows["_messages.csv"]] == ["p", "q"]


def rows_of(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Return the rows of a folder's CSV files, by file."""
    found = {}
    for path in folder.iterdir():
        with path.open(newline="") as file:
            found[path.name] = list(csv.DictReader(file))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("style", ["ndjson", "csv", "line-protocol", "arrow"])
def test_every_record_is_exported_or_counted_as_left_out(filled: Home, tmp_path: Path, style: str) -> None:
    total = sum(1 for _ in Cat("shop", reader_of(filled)).lines())
    out = tmp_path / "out"
    done = wal(filled, "export", "--format", style, "-o", str(out))
    assert done.returncode == 0, done.stderr
    counted = [
        line.split(" records are left out: ") for line in done.stderr.splitlines() if " records are left" in line
    ]
    reasons = {why: int(count.rsplit(" ", 1)[-1]) for count, why in counted}
    assert reasons == (
        {
            "line protocol has no deletes": 1,
            "line protocol has no truncates": 2,
            "they have no time, or one beyond 64 bits of nanoseconds": 1,
            "their table was quarantined when they came": 1,
        }
        if style == "line-protocol"
        else {}
    )
    left_out = sum(reasons.values())
    assert f"{total - left_out:,} records in {out}" in done.stderr
    match style:
        case "ndjson":
            found = len(out.read_text().splitlines())
        case "line-protocol":
            found = len([line for line in out.read_text().splitlines() if line[-20:].isdigit() or line[-19:].isdigit()])
        case "csv":
            found = sum(len(rows) for rows in rows_of(out).values())
        case _:
            assert not [path for path in out.iterdir() if path.name.startswith(".")]
            files = [path for path in out.glob("*.arrow") if path.name != "operations.arrow"]
            found = sum(pa.ipc.open_file(path).read_all().num_rows for path in files)
    assert found == total - left_out


def test_logical_messages_are_asked_for_by_their_name(filled: Home) -> None:
    for command in (("cat",), ("export",)):
        done = wal(filled, *command, "--table", "_messages")
        assert [json.loads(line)["op"] for line in done.stdout.splitlines()] == ["m", "m"], done.stderr
    done = wal(filled, "cat", "--table", "public._messages")
    assert done.returncode == 2
    assert 'Use a table with records: _messages, public."Order Items", public.broken' in done.stderr


def test_a_range_without_records_gives_the_header_or_the_schema_all_the_same(filled: Home, tmp_path: Path) -> None:
    none = ("--since", "2100-01-01", "--table", "orders")
    done = wal(filled, "export", "--format", "csv", *none)
    (header,) = done.stdout.splitlines()
    assert header.split(",")[-6:] == ["id", "total", "ratio", "paid", "note", "more"]
    command = [sys.executable, "-m", "millstream.cli", "--home", str(filled.path), "wal", "export"]
    stream = subprocess.run([*command, "--format", "arrow", *none], capture_output=True, timeout=600, check=True)
    empty = pa.ipc.open_stream(stream.stdout).read_all()
    assert (empty.num_rows, empty.column_names[-1]) == (0, "more")
    done = wal(filled, "export", "--format", "csv", "--since", "2100-01-01", "-o", str(tmp_path / "csv"))
    assert {name: len(rows) for name, rows in rows_of(tmp_path / "csv").items() if rows} == {}
    assert len(list((tmp_path / "csv").iterdir())) == 6


def test_a_renamed_table_is_one_file_of_its_newest_name_and_answers_to_both(tmp_path: Path) -> None:
    home = home_at(tmp_path / "home")
    renamed = replace(ITEMS, version=SchemaVersion(2), name="things")
    with home.open_catalog() as catalog:
        stream = catalog.resolve_stream("shop")
        with LogWriter.open(
            str(home.wal_folder("shop")),
            stream=stream,
            shards=[ShardId(0)],
            epoch=catalog.register_writer(stream)[1],
            reservations=catalog.reservations(stream),
        ) as log:
            for number, of in enumerate((ITEMS, renamed, renamed), start=1):
                log.append(ops([operation(number, 0x1700000000 + number)], (of, 0, [row(0, Op.CREATE, id=number)])))
    assert wal(home, "export", "--format", "csv", "-o", str(tmp_path / "csv")).returncode == 0
    ids = {name: [row["id"] for row in rows] for name, rows in rows_of(tmp_path / "csv").items()}
    assert ids == {"public.things.csv": ["1", "2", "3"]}
    for name in ("public.things", 'public."Order Items"'):
        done = wal(home, "export", "--format", "csv", "--table", name)
        assert [row["id"] for row in csv.DictReader(io.StringIO(done.stdout))] == ["1", "2", "3"], done.stderr


def test_line_protocol_has_key_tags_typed_fields_and_commit_times(filled: Home) -> None:
    protocol = LineProtocol()
    found = [(line, protocol.line(line)) for line in Cat("shop", reader_of(filled), moments=True).records()]
    by = {(line.facts["op"], line.facts["table"], line.facts["offset"]): text for line, text in found}
    orders = [text for (op, table, _), text in by.items() if table == "public.orders" and op == "c"]
    assert orders[0] == 'orders id=100i,total="1.50",ratio=0.1,paid=true,note="" 1700000000000000000'
    update = next(text for (op, table, _), text in by.items() if table == "public.orders" and op == "u")
    assert update == 'orders id=101i,total="NaN",paid=false 1700000000000000000'
    assert protocol.left_out["values are left out: NaN, infinite, or beyond 64 bits"] == 1
    assert protocol.left_out["values are left out: an update didn't repeat them (unchanged TOAST)"] == 1
    items = next(text for (op, _, _), text in by.items() if op == "c" and text is not None and text.startswith("Order"))
    assert items.startswith("Order\\ Items id=5i ")
    message = next(text for (op, _, _), text in by.items() if op == "m")
    assert message is not None
    assert message.startswith("_messages,prefix=p ")
    # Copied rows have the time of their copy.
    assert all(text is not None for line, text in found if line.facts["op"] == "r")
    escaped = orders[1]
    assert escaped is not None
    assert 'note="línea,10\n\\"q\\"",more="m"' in escaped


def test_stats_names_tables_as_they_are_asked_for(filled: Home) -> None:
    found = json.loads(wal(filled, "stats", "--json").stdout)
    names = {table["name"] for table in found["tables"]}
    assert {'public."Order Items"', "_messages", "public.orders"} <= names


def hurt_copy(filled: Home, folder: Path) -> tuple[Home, FrameInfo, str]:
    """Return a copy of a home with a damaged batch, the batch's frame, and the name of its table."""
    home = Home(folder)
    shutil.copytree(filled.data / "wal", home.data / "wal")
    frames = [f for f in inspect(str(home.wal_folder("shop"))) if isinstance(f, FrameInfo) and len(f.tables) > 1]
    frame = frames[0]
    with Path(frame.path).open("r+b") as file:
        file.seek(frame.position + frame.length - 1)
        (last,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([last ^ 1]))
    hurt = frame.tables[-1][0]
    name = next(s.full_name for s in reader_of(filled).schemas().values() if s.table_id == hurt)
    return home, frame, name


def test_damage_is_told_with_the_names_of_tables(filled: Home, tmp_path: Path) -> None:
    home, frame, name = hurt_copy(filled, tmp_path / "hurt")
    hurt = frame.tables[-1][0]
    told = wal(home, "verify")
    assert f"records of table {name} ({hurt}) at offsets" in told.stderr
    assert f"some tables' records also at [{frame.first_offset}, {frame.first_offset + frame.count})" in told.stdout
    assert f"records of table {name} ({hurt}) at offsets" in wal(home, "repair", "--dry-run").stdout
    assert f"{name} ({hurt}) v1" in wal(home, "inspect").stdout


def raw(home: Home, *words: str) -> bytes:
    command = [sys.executable, "-m", "millstream.cli", "--home", str(home.path), "wal", *words]
    return subprocess.run(command, capture_output=True, timeout=600, check=True).stdout


@pytest.mark.sampled
@pytest.mark.parametrize("style", ["csv", "line-protocol", "arrow"])
def test_cat_prints_a_table_in_each_format_of_export(filled: Home, style: str) -> None:
    words = ("--format", style, "--table", 'public."Order Items"')
    whole = raw(filled, "cat", *words)
    assert whole == raw(filled, "export", *words)
    if style == "arrow":
        table = pa.ipc.open_stream(whole).read_all()
        some = pa.ipc.open_stream(raw(filled, "cat", *words, "--from-offset", "5", "--limit", "7")).read_all()
        offsets = [offset for offset in table["__offset"].to_pylist() if offset >= 5]
        assert some["__offset"].to_pylist() == offsets[:7]
    else:
        some_lines = raw(filled, "cat", *words, "--from-offset", "5", "--limit", "7").splitlines()
        lines_then = [line for line in some_lines if line not in whole.splitlines()]
        assert (len(some_lines), lines_then) == (8 if style == "csv" else 7, [])


@pytest.mark.parametrize("words", [("csv",), ("arrow",), ("csv", "--table", "orders", "--follow")])
def test_cat_refuses_columns_of_several_tables_and_of_a_time_to_come(filled: Home, words: tuple[str, ...]) -> None:
    done = wal(filled, "cat", "--format", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Name a table with --table" in done.stderr


@pytest.mark.sampled
@pytest.mark.long
@pytest.mark.parametrize("style", ["csv", "arrow"])
def test_the_only_table_of_a_log_needs_no_name(tmp_path: Path, style: str) -> None:
    home = home_at(tmp_path / "home")
    with millstream.open(home.path) as opened:
        opened.append("shop", "clicks", [{"id": 1}, {"id": 2}])
    whole = raw(home, "cat", "--format", style, "--table", "clicks")
    assert len(whole.splitlines() if style == "csv" else pa.ipc.open_stream(whole).read_all()) == 2 + (style == "csv")
    assert raw(home, "cat", "--format", style) == raw(home, "export", "--format", style) == whole


def test_cat_and_export_go_on_past_damage_in_each_format(filled: Home, tmp_path: Path) -> None:
    home, _, name = hurt_copy(filled, tmp_path / "hurt")
    counts = []
    for words in (("cat", "ndjson"), ("cat", "csv"), ("cat", "arrow"), ("export", "csv"), ("export", "arrow")):
        style = words[1]
        command = [sys.executable, "-m", "millstream.cli", "--home", str(home.path), "wal", words[0]]
        done = subprocess.run([*command, "--format", style, "--table", name], capture_output=True, timeout=600)
        assert (done.returncode, b"damaged: " in done.stderr) == (3, True), (style, done.stderr)
        found = (
            pa.ipc.open_stream(done.stdout).read_all().num_rows if style == "arrow" else len(done.stdout.splitlines())
        )
        counts.append(found - (style == "csv"))
    assert counts[0] > 0
    assert len(set(counts)) == 1, counts
