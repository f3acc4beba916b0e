"""`examples/read_log.py` knows only the format's description, and prints what `wal cat` prints, for every log."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Event
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.capture.capture_stage import make_config
from tests.catalog.sequencing import MemorySequenceStore
from tests.commands import run_command
from tests.wal.log_writers import Others
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_spilled, plain_table

from millstream.capture.run import run_capture
from millstream.catalog import Catalog
from millstream.codec.log_segment import SEGMENT_HEADER_SIZE
from millstream.errors import NotEnoughReplicas
from millstream.model.floats import render_float4, render_float8
from millstream.model.ids import Epoch, SchemaVersion, ShardId, SourceId, StreamId, TableId
from millstream.model.operations import OPERATION_SCHEMA, OperationKind, TableRows, WriteOps
from millstream.model.positions import Seq
from millstream.model.records import Op, append_row_schema
from millstream.model.replication import AckLevel
from millstream.model.schema import Column, TableKind, TableSchema
from millstream.protocol.retention import HolderKind, Retention, RetentionBounds
from millstream.testing import Workload
from millstream.testing.pytest_plugin import Database
from millstream.wal.mending.inspect import FrameInfo, inspect
from millstream.wal.segment_deletion import drop_segments
from millstream.wal.writing.number_sources import SharedNumbers
from millstream.wal.writing.writer import LogOptions, LogWriter

ROOT = Path(__file__).resolve().parents[2]
READER = ROOT / "examples" / "read_log.py"
STREAM = StreamId(UUID("5f0c21aa-0000-4000-8000-000000000001"))
SHARDS = [ShardId(0), ShardId(1), ShardId(2)]
SMALL = LogOptions(segment_bytes=20_000, frame_bytes_max=4_000, disk_used_max=1.0)
SHARD_OF = {1: 0, 2: 1, 3: 2}


def read(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the example in an interpreter that can't import Millstream."""
    command = [sys.executable, str(READER), str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, env={}, timeout=600, check=False)


def test_the_reader_says_how_it_is_called_and_what_is_no_log(tmp_path: Path) -> None:
    told = read(tmp_path, "--help")
    assert (told.returncode, told.stderr) == (0, "")
    assert "--without-mark" in told.stdout
    (tmp_path / "strange" / "data").mkdir(parents=True)
    for folder in (tmp_path / "missing", tmp_path / "strange"):
        told = read(folder)
        assert (told.returncode, told.stdout, len(told.stderr.splitlines())) == (2, "", 1)
        assert str(folder) in told.stderr


def cat(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run_command(["--home", str(home), "wal", "cat", "--values", "text", *options])


def same(home: Path, *options: str) -> list[str]:
    """Check that both print the same lines, and return them."""
    ours, theirs = cat(home, *options), read(home / "data" / "wal" / "shop", *options)
    assert (ours.returncode, theirs.returncode) == (0, 0), ours.stderr + theirs.stderr
    assert theirs.stdout.splitlines() == ours.stdout.splitlines()
    return ours.stdout.splitlines()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a stream's empty log."""
    made = tmp_path / "home"
    (made / "data" / "wal").mkdir(parents=True)
    (made / "millstream.toml").touch()
    return made


@contextmanager
def writing(
    home: Path, *, epoch: int = 1, shards: Sequence[ShardId] = SHARDS, frame_version: int = 2
) -> Iterator[LogWriter]:
    folder = str(home / "data" / "wal" / "shop")
    reservations = MemoryReservations()
    if epoch > 1:
        reservations.reserve_to(1_000_000, epoch=Epoch(epoch))
    options = replace(SMALL, frame_version=frame_version)
    with LogWriter.open(
        folder, stream=STREAM, shards=shards, epoch=Epoch(epoch), reservations=reservations, options=options
    ) as log:
        yield log


def fill(log: LogWriter, *, groups: int = 5, shard_of: Mapping[int, int] = SHARD_OF) -> None:
    """Operations over one and several shards, of one and several frames, under two schema versions."""
    one, two, three, wider = plain_table(1), plain_table(2), plain_table(3), plain_table(1, version=2)
    for xid in range(1, 10 * groups, 10):
        log.append(
            plain_ops({xid: [(one, 3, "a"), (two, 2, "b")], xid + 1: [(three, 40, "c" * 30)]}, shard_of=shard_of)
        )
        log.append(plain_ops({xid + 2: [(wider, 1, "é")]}, shard_of=shard_of))
        chunks = [[(two, 50, f"{xid}" * 9), (one, 70, "z" * 40)], [(three, 90, "y" * 50)], [(two, 20, "x" * 90)]]
        log.append(plain_spilled(xid + 3, chunks, shard_of=shard_of))


def last_segment(home: Path, shard: int) -> Path:
    return max((home / "data" / "wal" / "shop" / f"{shard:05}").glob("*.wal"))


@pytest.mark.long
def test_a_captured_workload_with_and_without_its_marks(postgres: Database, home: Path, tmp_path: Path):
    workload = Workload(20_261_121, transaction_rows_max=1_500)
    source = postgres.connect()
    workload.setup(source)
    config = make_config(
        postgres.dsn,
        tmp_path,
        postgres.name,
        tables=('"Mixed Schema".*', "public.*"),
        shard_of=lambda table: ShardId(zlib.crc32(table.encode()) % len(SHARDS)),
        buffer_bytes_max=1 << 20,
    )
    with Catalog(tmp_path / "catalog.db") as catalog:
        stream = catalog.resolve_stream("shop")
        _, epoch = catalog.register_writer(stream)
        log = LogWriter.open(
            str(home / "data" / "wal" / "shop"),
            stream=stream,
            shards=SHARDS,
            epoch=epoch,
            reservations=catalog.reservations(stream),
            options=LogOptions(segment_bytes=300_000, frame_bytes_max=60_000, disk_used_max=1.0),
        )
        with log:
            kinds = set()
            for _ in range(2):
                assert run_capture(config, catalog, log, stop=Event(), until_caught_up=True).caught_up
                kinds |= {workload.step(source).kind for _ in range(40)}
            run_capture(config, catalog, log, stop=Event(), until_caught_up=True)
    assert {"truncate_several", "message", "large", "add_column"} <= kinds
    lines = same(home)
    text = "\n".join(lines)
    assert all(f'"op":"{op}"' in text for op in "cudrtm")
    assert '"unchanged":["' in text
    assert '"exact":{"' in text
    assert len({line.split(",")[1] for line in lines}) == len(SHARDS)
    for mark in home.rglob("durable.mark"):
        mark.unlink()
    assert same(home, "--without-mark") == lines


@pytest.mark.long
def test_operations_over_shards_frames_and_schema_versions_while_the_log_is_open_and_when_it_is_sealed(home: Path):
    with writing(home) as log:
        fill(log)
        lines = same(home)
        assert same(home, "--without-mark") == lines
        assert any(
            isinstance(f, FrameInfo) and f.more and f.count for f in inspect(str(home / "data" / "wal" / "shop"))
        )
    assert same(home) == lines
    with writing(home, epoch=2) as log:
        fill(log, groups=1)
    assert len(same(home)) > len(lines)


@pytest.mark.long
def test_several_writers_alive_gone_and_killed(home: Path):
    folder = home / "data" / "wal" / "shop"
    store = MemorySequenceStore()
    logs = {}
    for name, shards in (("a", [ShardId(0), ShardId(1)]), ("b", [ShardId(2)])):
        own = store.register(name, "here")
        logs[name] = LogWriter.open(
            str(folder), stream=STREAM, shards=shards, epoch=own.epoch, writer=own.writer, options=SMALL,
            reservations=SharedNumbers(store, own),
        )  # fmt: skip
    for number in range(1, 40):
        name, tables = ("b", [3]) if number % 3 == 0 else ("a", [1, 2])
        rows = [(plain_table(table), 5, f"{number}: {'x' * 200}") for table in tables]
        logs[name].append(plain_ops({number: rows}, shard_of=SHARD_OF))
    behind = same(home)
    for log in logs.values():
        log.follow()
    everything = same(home)
    assert len(everything) == 26 * 10 + 13 * 5 > len(behind) > 0
    logs["b"].close()
    assert same(home) == everything
    logs["a"].append(plain_ops({40: [(plain_table(1), 2, "the last")]}, shard_of=SHARD_OF))
    assert len(same(home)) == len(everything) + 2
    logs["a"].close()
    for mark in folder.glob("*/durable.mark"):
        mark.unlink()
    assert len(same(home, "--without-mark")) == len(everything) + 2


def test_an_upgrade_that_is_taken_back(home: Path):
    """Newer and older headers of frames one behind the other, in one log."""
    for epoch, frame_version in enumerate((1, 2, 1), 1):
        with writing(home, epoch=epoch, shards=SHARDS[:1], frame_version=frame_version) as log:
            fill(log, groups=2, shard_of=dict.fromkeys(SHARD_OF, 0))
    assert len(same(home)) > 1000


@pytest.mark.long
def test_whatever_lies_behind_the_last_frame_counts_for_nothing(home: Path):
    with writing(home) as log:
        fill(log, groups=2)
        lines = same(home)
        for shard in (0, 1):
            path = last_segment(home, shard)
            old_frames = path.read_bytes()[SEGMENT_HEADER_SIZE:]
            with path.open("ab") as file:  # as a recycled file has it behind its new frames
                file.write(old_frames if shard else bytes(5_000))
        assert same(home) == lines
        assert same(home, "--without-mark") == lines


def test_of_a_copy_that_lacks_a_part_of_its_last_group_nothing_of_that_group_is_shown(home: Path):
    with writing(home, shards=SHARDS[:2]) as log:
        both = plain_table(1), plain_table(2)
        for xid in (1, 2, 3):
            log.append(plain_ops({xid: [(both[0], 2, "a"), (both[1], 2, "b")]}, shard_of=SHARD_OF))
        path = last_segment(home, 1)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 100)
        lines = same(home, "--without-mark")
        assert len(lines) == 8
        assert not any('"xid":3' in line for line in lines)


def test_of_groups_that_others_have_to_hold_only_those_that_are_shown(home: Path):
    others = Others()
    options = replace(SMALL, acks=AckLevel.parse("durable(1)"), acks_patience_s=0.0)
    log = LogWriter.open(
        str(home / "data/wal/shop"), stream=STREAM, shards=SHARDS, epoch=Epoch(1), reservations=MemoryReservations(),
        options=options, high_water=others,
    )  # fmt: skip
    with log:
        others.hold(1)
        log.append(plain_ops({1: [(plain_table(1), 2, "held")]}, shard_of=SHARD_OF))
        with pytest.raises(NotEnoughReplicas):
            log.append(plain_ops({2: [(plain_table(2), 2, "hidden")]}, shard_of=SHARD_OF), deadline_s=0.01)
        lines = same(home)
        assert ["held" in line for line in lines] == [True, True]


@pytest.mark.long
def test_a_log_whose_front_retention_dropped(home: Path):
    folder = home / "data" / "wal" / "shop"
    with writing(home) as log:
        fill(log)
        whole = same(home)
        tracker = Retention()
        tracker.needs("lake/1", HolderKind.BACKLOG, Seq(900))
        assert drop_segments(str(folder), tracker, RetentionBounds(0, 0, 0)).dropped
        lines = same(home)
        assert 0 < len(lines) < len(whole)
        assert same(home, "--without-mark") == lines


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "tests" / "golden").glob("*.wal")))
def test_the_golden_segments(home: Path, name: str):
    shard = home / "data" / "wal" / "shop" / ("00000" if name == "segment-header-v1" else "00001")
    shard.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "golden" / f"{name}.wal", shard / "00000000000000001000.wal")
    expected = json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text())["rows"]
    seqs = [json.loads(line)["seq"] for line in same(home, "--without-mark")]
    assert seqs == [row["__seq"] for row in sorted(expected, key=lambda row: row["__offset"])]
    assert read(home / "data" / "wal" / "shop").returncode == 3


def table(number: int, name: str, *columns: Column, kind: TableKind = TableKind.TABLE) -> TableSchema:
    return TableSchema(
        TableId(number), SchemaVersion(1), SourceId(1), "public", name, columns, ("id",), ("id",), kind=kind
    )


def operation(kind: OperationKind, xid: int | None) -> dict[str, Any]:
    moment = 1_700_000_000_000_000
    return {"kind": int(kind), "source": 1, "commit_lsn": 1 << 33, "commit_end_lsn": 0, "xid": xid, "commit_ts": moment}


def rows(schema: TableSchema, *rows: dict[str, Any]) -> TableRows:
    facts = [{"__operation": at, "__index": 0, "__op": int(Op.CREATE)} | row for at, row in enumerate(rows)]
    return TableRows(schema, pa.RecordBatch.from_pylist(facts, schema=append_row_schema(schema)))


def test_messages_raw_records_appends_and_odd_values(home: Path):
    messages = table(
        1, "_messages", Column("prefix", pa.string()), Column("content", pa.binary()), Column("transactional", pa.bool_()),
        kind=TableKind.MESSAGES,
    )  # fmt: skip
    raw = table(2, "quarantined", Column("message", pa.binary()), kind=TableKind.RAW)
    odd = table(
        3, "odd", Column("id", pa.int16()), Column("d", pa.decimal128(38, 12)), Column("at", pa.timestamp("us")),
        Column("day", pa.date32()), Column("l", pa.list_(pa.string())), Column("f", pa.list_(pa.float32())),
    )  # fmt: skip
    with writing(home) as log:
        said = rows(
            messages,
            {"__op": int(Op.MESSAGE), "prefix": "p", "content": "ñ".encode(), "transactional": False},
            {"__op": int(Op.MESSAGE), "prefix": "", "content": b"\xff", "transactional": True},
        )
        kinds = [operation(OperationKind.MESSAGE, None), operation(OperationKind.TRANSACTION, 7)]
        log.append(WriteOps(pa.RecordBatch.from_pylist(kinds, schema=OPERATION_SCHEMA), (said,)))
        found = rows(raw, {"message": b"\0I"}, {"__op": int(Op.DELETE), "message": b"\0D"}, {"__op": int(Op.TRUNCATE)})
        kinds = [operation(OperationKind.TRANSACTION, xid) for xid in (8, 9, 10)]
        log.append(WriteOps(pa.RecordBatch.from_pylist(kinds, schema=OPERATION_SCHEMA), (found,)))
        values = rows(
            odd,
            {"id": -1, "d": Decimal("0.000000000001"), "at": -1, "day": -719_162, "l": ["", "null", 'a"\\', None, "ü"]},
            {
                "id": None,
                "d": Decimal(0),
                "at": 10**15,
                "day": 2_932_896,
                "f": [1e6, 16777217.0, -0.0, None, float("nan")],
            },
        )
        kinds = [{"kind": int(OperationKind.APPEND), "source": 0}, operation(OperationKind.COPY_CHUNK, None)]
        log.append(WriteOps(pa.RecordBatch.from_pylist(kinds, schema=OPERATION_SCHEMA), (values,)))
        definition = rows(odd.as_definition(), {"__op": int(Op.DEFINITION), "__before": [("was", "day")]})
        kinds = [operation(OperationKind.COPY_CHUNK, None)]
        log.append(WriteOps(pa.RecordBatch.from_pylist(kinds, schema=OPERATION_SCHEMA), (definition,)))
        lines = same(home)
    assert len(lines) == 8
    assert '"renamed":{"was":"day"},"filled":{}},"before":null' in lines[7]
    assert '"row":{"message":"\\\\x0044"}' in lines[3]
    assert '"day":"0001-01-01"' in lines[5]


@pytest.mark.long
def test_damage_ends_it_and_what_was_printed_before_is_right(home: Path):
    with writing(home, shards=SHARDS[:1]) as log:
        fill(log, shard_of={})
    folder = home / "data" / "wal" / "shop"
    whole = read(folder).stdout.splitlines()
    segments = sorted((folder / "00000").glob("*.wal"))
    assert len(segments) > 3
    for path in segments[:2]:
        data = path.read_bytes()
        for at in (20, 90, SEGMENT_HEADER_SIZE + 40, len(data) // 2, len(data) - 200, len(data) - 40):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            damaged = read(folder)
            lines = damaged.stdout.splitlines()
            assert (damaged.returncode, lines) == (3, whole[: len(lines)]), (path, at)
        path.write_bytes(data)
    segments[1].unlink()
    assert read(folder).returncode == 3


@pytest.fixture(scope="module")
def example() -> Any:
    spec = spec_from_file_location("read_log", READER)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["read_log"] = module
    assert spec.loader is not None
    spec.loader.exec_module(module)
    yield module
    del sys.modules["read_log"]


@given(
    value=st.floats()
    | st.integers(53, 130).flatmap(lambda n: st.integers(0, 99).map(lambda m: float(2**n + m * 2 ** (n - 52))))
)
def test_floats_stand_as_postgresql_prints_them(example: Any, value: float):
    assert example.float_text(value, False) == render_float8(value)
    with np.errstate(over="ignore"):
        single = float(np.float32(value))
    assert example.float_text(single, True) == render_float4(single)
