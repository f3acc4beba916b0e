"""A stream takes a buffer's operations into its log: each once, in order, whatever happens in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pyarrow as pa
import pytest
from tests.app.homes import wait_for
from tests.wal.log_writers import Others

from millstream.app.table_requests import retry_table
from millstream.catalog import Catalog
from millstream.codec.buffered_op import encode_op
from millstream.codec.checksums import crc32c
from millstream.errors import (
    BufferOffsetGone,
    CatalogError,
    MillstreamError,
    UnsupportedFormat,
    UsageError,
    WriteBufferError,
)
from millstream.ingest.buffered_op_conversion import OperationTaker
from millstream.ingest.schema_on_write import SchemaOnWrite, TableRules, WriteRules
from millstream.model.buffered_operations import BufferOffset
from millstream.model.ids import Epoch, ShardId, StreamId
from millstream.model.operations import FIRST_SHARD, WriteOps
from millstream.model.positions import Offset, Seq
from millstream.model.replication import AckLevel
from millstream.routing.router import Router
from millstream.routing.rules import Matcher, RoutingRules, RuleTarget, ShardConfig, SpecificTarget
from millstream.testing.errors import code_of, coded
from millstream.testing.memory_buffer import MemoryBuffer, MemoryServer
from millstream.testing.write_buffer import NORTH, SOUTH, application_op, every_kind_op
from millstream.wal.reader import StreamReader
from millstream.wal.writing.options import LogOptions
from millstream.wal.writing.writer import LogWriter
from millstream.writers.buffer_consumer import BufferTaking

NAME = "orders"


class Home:
    """A stream that reads a buffer, and that buffer."""

    def __init__(self, folder: Path) -> None:
        self.server = MemoryServer()
        self.buffer = MemoryBuffer(self.server, NAME, create_shards=2)
        self.name = NAME
        """The buffer's name in the configuration."""
        self.catalog = Catalog(folder / "catalog.db")
        self.stream: StreamId = self.catalog.resolve_stream("shop")
        self.wal = str(folder / "wal")
        self.keys: dict[str, tuple[str, ...]] = {}
        self.rules: RoutingRules | None = None
        self.log: dict[str, Any] = {}
        """More arguments of the log."""

    @contextmanager
    def taking(self, **options: Any) -> Iterator[tuple[BufferTaking, threading.Event]]:
        writer, epoch = self.catalog.register_writer(self.stream)
        with LogWriter.open(
            self.wal,
            stream=self.stream,
            shards=[FIRST_SHARD],
            epoch=epoch,
            reservations=self.catalog.reservations(self.stream),
            writer=writer,
            **self.log,
        ) as log:
            router = Router(self.rules, shard_of_table=lambda _: None if self.rules else FIRST_SHARD)
            rules = TableRules(
                rules_of=lambda _, name: WriteRules(SchemaOnWrite.CREATE, self.keys.get(name, ())),
                place=router.place,
                check_place=router.check,
                home_shard=lambda _: FIRST_SHARD,
            )
            taker = OperationTaker(self.catalog, self.stream, rules)
            yield (
                BufferTaking(self.buffer, self.name, self.catalog, self.stream, log, taker, **options),
                threading.Event(),
            )

    def take(self, **options: Any) -> BufferTaking:
        """Take operations until none are left."""
        with self.taking(**options) as (taking, stop):
            taking.run(stop, until_caught_up=True, tell=lambda: None)
        return taking

    def records(self, name: str = "clicks") -> list[dict[str, Any]]:
        return [
            record
            for found in StreamReader(self.wal).read(FIRST_SHARD, Offset(0))
            if found.schema.name == name
            for record in found.batch.to_pylist()
        ]

    def texts(self, name: str = "clicks") -> list[str]:
        return [record["text"] for record in self.records(name)]

    def put(self, shard: ShardId, *texts: str, name: str = "clicks", **more: Any) -> None:
        for text in texts:
            self.buffer.append(shard, application_op(name, [text], **more))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    home.catalog.close()


def test_operations_are_taken_once_in_their_shards_order_through_restarts(home: Home) -> None:
    wanted: dict[ShardId, list[str]] = {NORTH: [], SOUTH: []}
    for start in range(4):
        for number in range(20):
            for shard, texts in wanted.items():
                texts.append(f"{shard}.{start}.{number}")
                home.put(shard, texts[-1])
        home.take()
        for shard, texts in wanted.items():
            assert [text for text in home.texts() if text.startswith(f"{shard}.")] == texts
    assert len(home.take().progress.shards) == 2
    assert len(home.texts()) == 160


def test_values_times_and_traces_are_what_they_were(home: Home) -> None:
    op = every_kind_op()
    home.buffer.append(NORTH, op)
    home.put(NORTH, "one", moment_us=1_700_000_000_000_000, said={"trace_id": "t", "session": "s", "session_number": 3})
    home.take()
    names = {table.schema.name for table in op.tables}
    schemas = {schema.name: schema for schema in StreamReader(home.wal).schemas().values()}
    assert set(schemas) == names | {"clicks"}
    for name in names:
        wanted = [row for t in op.tables if t.schema.name == name for row in t.rows.to_pylist()]
        own = [column.name for column in schemas[name].columns]
        assert [repr([r[c] for c in own]) for r in home.records(name)] == [repr([r[c] for c in own]) for r in wanted]
    assert schemas["clicks"].key == ("id",)
    reader = StreamReader(home.wal)
    frames = [
        frame for group in reader.read_groups(Seq(reader.first_seq() - 1), reader.persisted_upto()) for frame in group
    ]
    told = [row for frame in frames for row in frame.operations.to_pylist()]
    assert [(row["session"], row["session_number"], row["trace_id"]) for row in told][-1] == ("s", 3, "t")
    assert home.records()[0]["__commit_ts"].timestamp() == 1_700_000_000


def test_it_stops_when_told_though_the_log_has_no_room(home: Home) -> None:
    """The queue was full of what other machines lacked, and a thread that waited for room heard no stop."""
    options = LogOptions(acks=AckLevel.parse("durable(1)"), acks_patience_s=0.0, queue_bytes_max=20_000)
    home.log = {"high_water": Others(), "options": options}
    texts = [f"{number}" for number in range(60)]
    home.put(NORTH, *texts)
    with home.taking() as (taking, stop):
        thread = threading.Thread(target=taking.run, args=(stop,), kwargs={"tell": lambda: None}, daemon=True)
        thread.start()
        wait_for(lambda: taking._log.stats().awaited.size_bytes > 15_000)
        time.sleep(0.1)  # the next one waits for room
        stop.set()
        thread.join(10)
        stopped = not thread.is_alive()
    assert stopped
    home.log = {}
    home.take()
    assert home.texts() == texts


def test_it_goes_on_while_others_write_and_stops_when_told(home: Home) -> None:
    with home.taking() as (taking, stop):
        thread = threading.Thread(target=taking.run, args=(stop,), kwargs={"tell": lambda: None})
        thread.start()
        for number in range(50):
            home.put(ShardId(number % 2), str(number))
        wait_for(lambda: sum(shard.taken for shard in taking.progress.shards.values()) == 50)
        stop.set()
        thread.join(180)
        assert not thread.is_alive()
    assert sorted(home.texts(), key=int) == [str(number) for number in range(50)]
    home.take()
    assert len(home.texts()) == 50


def test_a_table_that_cannot_take_its_rows_is_held_and_gets_what_it_lacked_once(home: Home) -> None:
    """Other tables go on, restarts change nothing, and a retry takes exactly the omitted rows of each partition."""

    def both(number: int) -> WriteOps:
        """One operation on two tables, one of them on two partitions by turns."""
        visits = application_op("visits", [f"v{number}"], partition=f"p{number % 2}").tables[0]
        return replace(
            application_op("clicks", [f"c{number}"]), tables=(*application_op("clicks", [f"c{number}"]).tables, visits)
        )

    home.keys["visits"] = ("id",)
    for number in range(6):
        if number == 2:
            home.take()
            home.keys["visits"] = ("text",)  # as if a user had changed the configuration
        home.buffer.append(NORTH, both(number))
    held = home.take().progress.held
    assert set(held) == {"public.visits"}
    assert (home.texts(), home.texts("visits")) == ([f"c{n}" for n in range(6)], ["v0", "v1"])
    assert set(home.take().progress.held) == {"public.visits"}
    home.buffer.append(NORTH, both(6))
    home.take()
    assert (home.texts(), home.texts("visits")) == ([f"c{n}" for n in range(7)], ["v0", "v1"])
    home.keys["visits"] = ("id",)
    assert home.take().progress.held == {}
    for _ in range(2):
        assert (home.texts(), home.texts("visits")) == ([f"c{n}" for n in range(7)], [f"v{n}" for n in range(7)])
        home.take()
    home.buffer.append(NORTH, both(7))
    home.take()
    assert (home.texts()[7:], home.texts("visits")[7:]) == (["c7"], ["v7"])


def test_a_value_that_does_not_fit_holds_its_table_alone(home: Home) -> None:
    home.put(NORTH, "one")
    other = application_op(texts=["two"]).tables[0]
    columns = [*other.rows.columns[:-1], pa.array([b"\x00"])]
    clash = replace(
        other.schema, columns=(other.schema.columns[0], replace(other.schema.columns[1], arrow=pa.binary()))
    )
    rows = pa.RecordBatch.from_arrays(columns, schema=clash.to_arrow(tuple(list(other.rows.schema)[:6])))
    home.buffer.append(NORTH, replace(application_op(), tables=(replace(other, schema=clash, rows=rows),)))
    home.put(NORTH, "fine", name="others")
    assert list(home.take().progress.held) == ["public.clicks"]
    assert (home.texts(), home.texts("others")) == (["one"], ["fine"])


@pytest.mark.parametrize(
    "told", [{"session": "s", "session_number": 7}, {"idempotency_key": "k"}], ids=["session", "key"]
)
def test_a_write_that_was_sent_again_is_taken_once_also_by_a_reader_that_starts_between(
    home: Home, told: dict[str, Any]
) -> None:
    home.put(NORTH, "first", said=told)
    home.take()
    home.put(
        NORTH, "other", said={name: f"{value}1" if name != "session_number" else 8 for name, value in told.items()}
    )
    home.put(NORTH, "again", said=told, moment_us=1_790_000_000_000_009)
    home.put(SOUTH, "elsewhere", said=told)  # another shard's part of the same operation
    assert home.take().progress.shards[NORTH].repeated == 1
    home.put(NORTH, "and again", said=told)
    home.put(NORTH, "last")
    home.take()
    assert [text for text in home.texts() if text != "elsewhere"] == ["first", "other", "last"]
    assert home.texts().count("elsewhere") == 1


@pytest.mark.parametrize("stops_at", [0, 5, 9, 10, 13])
def test_what_counts_as_sent_again_is_a_matter_of_the_buffer_alone(home: Home, stops_at: int) -> None:
    """A write was sent three times, the third within reach of the second alone.

    A reader that had seen the first took the third, and a reader that began after the first didn't.
    """
    for number in range(14):
        if number and number == stops_at:
            home.take(again_within=6)
        home.put(
            NORTH,
            f"k{number}" if number % 5 == 0 else "other",
            said={"idempotency_key": "k"} if number % 5 == 0 else {},
        )
    home.take(again_within=6)
    assert [text for text in home.texts() if text != "other"] == ["k0"]


def test_other_rows_under_a_known_id_are_taken_since_they_were_acknowledged(home: Home) -> None:
    for text, digest in [("first", 7), ("first", 7), ("others", 8), ("others", 8)]:
        op = application_op("clicks", [text], said={"idempotency_key": "k"})
        at = op.operations.schema.get_field_index("commit_end_lsn")
        digests = pa.array([digest], op.operations.schema.field(at).type)
        told = op.operations.set_column(at, op.operations.schema.field(at), digests)
        home.buffer.append(NORTH, replace(op, operations=told))
    assert home.take().progress.shards[NORTH].repeated == 2
    assert home.texts() == ["first", "others"]


def test_what_is_no_operation_is_passed_and_counted(home: Home) -> None:
    home.put(NORTH, "one")
    home.server.put(NAME, NORTH, b"nothing")
    home.put(NORTH, "two")
    assert home.take().progress.shards[NORTH].undecodable == 1
    assert home.texts() == ["one", "two"]


def test_an_operation_of_a_newer_version_stops_the_reader_and_is_taken_later(home: Home) -> None:
    home.put(NORTH, "one")
    newer = bytearray(encode_op(application_op(texts=["two"])))
    newer[8] = 99
    newer[4:8] = crc32c(bytes(newer[8:])).to_bytes(4, "little")
    offset = home.server.put(NAME, NORTH, bytes(newer))
    home.put(NORTH, "three")
    for _ in range(2):
        with pytest.raises(UnsupportedFormat):
            home.take()
    assert home.texts() == ["one"]
    assert offset == 1


def remade(home: Home) -> None:
    home.server.drop(NAME)
    home.server.create(NAME, 2)


def cut(home: Home) -> None:
    home.server.cut_from(NAME, NORTH, BufferOffset(1))


def dropped(home: Home) -> None:
    home.put(NORTH, "lost", "there")
    home.server.drop_before(NAME, NORTH, BufferOffset(4))


@pytest.mark.parametrize(
    ("befalls", "code"), [(remade, "buffer_replaced"), (cut, "buffer_truncated"), (dropped, "buffer_offset_gone")]
)
def test_what_the_buffer_has_lost_is_said_by_name_at_the_start_and_while_it_runs(
    home: Home, befalls: Callable[[Home], None], code: str
) -> None:
    home.put(NORTH, "one", "two", "three")
    home.take()
    befalls(home)
    for _ in range(2):
        with pytest.raises(WriteBufferError, check=coded(code)) as caught:
            home.take()
        assert NAME in caught.value.message
    assert home.texts() == ["one", "two", "three"]


def dropping(*tables: str, others_stay: bool = True) -> ShardConfig:
    """Rules that drop tables' rows, and rules that take other tables' rows or leave them without a route."""
    rules = [SpecificTarget(Matcher.parse(rf"public\.{table}"), RuleTarget.parse("devnull")) for table in tables]
    if others_stay:
        rules.append(SpecificTarget(Matcher.parse(".*"), RuleTarget(FIRST_SHARD)))
    return ShardConfig(tuple(rules))


def lines_of_noise(home: Home) -> None:
    home.rules = dropping("noise")
    home.put(NORTH, *(f"n{number}" for number in range(5)), name="noise")


def writes_again(home: Home) -> None:
    home.put(NORTH, *["again"] * 5, said={"idempotency_key": "k"})


def what_is_no_operation(home: Home) -> None:
    for _ in range(5):
        home.server.put(NAME, NORTH, b"nothing")


@pytest.mark.parametrize("nothing_new", [lines_of_noise, writes_again, what_is_no_operation])
def test_what_puts_no_row_into_the_log_is_passed_durably(home: Home, nothing_new: Callable[[Home], None]) -> None:
    """The log recorded its progress only with rows.

    Once the buffer dropped such items, the log seemed to have lost operations that it had never taken.
    """
    home.put(NORTH, "first", said={"idempotency_key": "k"})
    home.take()
    for end in (6, 11):
        nothing_new(home)
        shard = home.take().progress.shards[NORTH]
        assert (shard.place, shard.end) == (end, end)
        home.server.drop_before(NAME, NORTH, BufferOffset(end - 1))
    home.put(NORTH, "last")
    for _ in range(2):
        home.take()
        assert home.texts() == ["first", "last"]
    home.put(NORTH, "lost", "there")
    home.server.drop_before(NAME, NORTH, BufferOffset(13))
    with pytest.raises(BufferOffsetGone):
        home.take()


def test_what_is_passed_while_it_runs_is_noted_before_it_ends(home: Home) -> None:
    home.rules = dropping("noise")
    home.put(NORTH, "one")
    with home.taking(note_s=0.0) as (taking, stop):
        thread = threading.Thread(target=taking.run, args=(stop,), kwargs={"tell": lambda: None})
        thread.start()

        def is_noted(noted: dict[str, int]) -> bool:
            return bool(home.catalog.fact(taking._scope, f"passed/{NORTH}") == noted)

        try:
            for end in (4, 7):
                home.put(NORTH, "a", "b", "c", name="noise")
                noted = {"behind": 1, "place": end}
                wait_for(partial(is_noted, noted))
            wait_for(lambda: taking.progress.shards[NORTH].place == 7)
        finally:
            stop.set()
            thread.join(180)


def test_what_was_passed_counts_for_no_log_that_has_less(home: Home, tmp_path: Path) -> None:
    """A restored log has to take later operations again, also those below the progress that was passed."""
    home.rules = dropping("noise")
    home.put(NORTH, "one")
    home.take()
    copytree(home.wal, tmp_path / "copy")
    home.put(NORTH, "two")
    home.put(NORTH, "dropped", name="noise")
    home.take()
    rmtree(home.wal)
    copytree(tmp_path / "copy", home.wal)
    home.take()
    assert home.texts() == ["one", "two"]


def test_a_held_table_is_taken_later_where_nothing_else_was_put_into_the_log_meanwhile(home: Home) -> None:
    home.keys["visits"] = ("id",)
    home.put(NORTH, "v0", name="visits")
    home.take()
    home.keys["visits"] = ("text",)
    home.put(NORTH, "v1", "v2", name="visits")
    assert home.take().progress.shards[NORTH].place == 3
    home.put(NORTH, "v3", name="visits")
    assert set(home.take().progress.held) == {"public.visits"}
    home.keys["visits"] = ("id",)
    assert home.take().progress.held == {}
    with pytest.raises(UsageError, match="is not quarantined"):
        retry_table(home.catalog, home.stream, "visits", buffer=NAME)
    home.take()
    assert home.texts("visits") == ["v0", "v1", "v2", "v3"]


def test_a_held_table_is_asked_for_by_name_while_the_reader_runs_or_before(home: Home) -> None:
    """`tables retry` did nothing for it: only a restart took the missing operations."""
    home.keys["visits"] = ("id",)
    home.put(NORTH, "v0", name="visits")
    home.take()

    def retry(table: str) -> str:
        return retry_table(home.catalog, home.stream, table, buffer=NAME)

    def has_visits(count: int) -> bool:
        return len(home.texts("visits")) == count

    with home.taking(look_s=0.05) as (taking, stop):
        thread = threading.Thread(target=taking.run, args=(stop,), kwargs={"tell": lambda: None})
        thread.start()
        try:
            for number in (1, 2):
                home.keys["visits"] = ("text",)
                taking._taker._schemas.clear()  # as if it had started with that configuration
                home.put(NORTH, f"v{number}", name="visits")
                home.put(NORTH, f"c{number}")
                wait_for(lambda: set(taking.progress.held) == {"public.visits"})
                assert "held again" in retry("public.visits")
                wait_for(lambda: not taking._is_asked_again())  # it was tried, in vain
                wait_for(lambda: set(taking.progress.held) == {"public.visits"})
                home.keys["visits"] = ("id",)
                assert "write buffer" in retry("visits")
                wait_for(partial(has_visits, number + 1))
                wait_for(lambda: not taking.progress.held)
        finally:
            stop.set()
            thread.join(180)
    with pytest.raises(UsageError, match="is not quarantined"):
        retry("visits")
    assert (home.texts("visits"), home.texts()) == (["v0", "v1", "v2"], ["c1", "c2"])


def test_rows_that_no_rule_takes_hold_their_table_and_make_none(home: Home) -> None:
    """The table was created first; and rows without a route stopped the tables that had one."""
    home.rules = dropping("noise", others_stay=False)
    home.put(NORTH, "one", name="noise")
    home.put(NORTH, "c0")
    home.put(NORTH, "two", name="noise")
    held = home.take().progress
    assert (list(held.held), held.shards[NORTH].place) == (["public.clicks"], 3)
    assert {table.name for table in home.catalog.tables(home.stream)} == {"noise"}
    home.rules = dropping("noise")
    home.put(NORTH, "c1")
    home.take()
    assert home.texts() == ["c0", "c1"]


def test_what_is_dropped_between_the_first_start_and_the_first_operation_is_said_by_name(home: Home) -> None:
    home.put(NORTH, "before")
    home.server.drop_before(NAME, NORTH, BufferOffset(1))
    assert home.take().progress.shards[NORTH].place == 1  # there was nothing for it
    home.put(NORTH, "lost", "there")
    home.server.drop_before(NAME, NORTH, BufferOffset(2))
    for _ in range(2):
        with pytest.raises(BufferOffsetGone):
            home.take()
    assert home.texts() == []


def test_a_log_whose_catalog_was_lost_is_not_written_again(home: Home, tmp_path: Path) -> None:
    home.put(NORTH, "one")
    home.put(SOUTH, "two")
    home.take()
    home.catalog.close()
    (tmp_path / "catalog.db").unlink()
    home.catalog = Catalog(tmp_path / "catalog.db")
    assert home.catalog.resolve_stream("shop", found=home.stream) == home.stream
    home.catalog.register_writer(home.stream, above=Epoch(100))
    with pytest.raises(CatalogError):
        home.take()
    assert len(home.texts()) == 2


def test_a_buffer_of_another_name_is_read_from_its_start(home: Home) -> None:
    home.put(NORTH, "one")
    home.take()
    assert home.catalog.sources(home.stream) == []
    with home.taking() as (taking, stop):
        other = MemoryBuffer(home.server, "others", create_shards=1)
        other.append(NORTH, application_op(texts=["two"]))
        again = BufferTaking(other, "others", home.catalog, home.stream, taking._log, taking._taker)
        again.run(stop, until_caught_up=True, tell=lambda: None)
    home.put(NORTH, "three")
    home.take()
    assert home.texts() == ["one", "two", "three"]


@pytest.mark.parametrize("names", [["moved"], ["moved", "moved/", NAME], ["moved", "elsewhere"]])
def test_a_buffer_under_another_name_goes_on_where_it_was(home: Home, names: list[str]) -> None:
    """A folder of log files that was moved, or whose path was written otherwise, was read again from its start."""
    home.keys["visits"] = ("id",)
    home.put(NORTH, "one")
    home.put(SOUTH, "two")
    home.put(NORTH, "v0", name="visits")
    home.take()
    home.keys["visits"] = ("text",)
    home.put(NORTH, "v1", name="visits")
    assert set(home.take().progress.held) == {"public.visits"}
    for home.name in names:
        home.put(NORTH, home.name)
        assert set(home.take().progress.held) == {"public.visits"}
    home.keys["visits"] = ("id",)
    assert retry_table(home.catalog, home.stream, "visits", buffer=home.name).startswith("its missing rows")
    home.take()
    first = home.texts()[:2]  # each in a shard of its own
    assert (sorted(first), home.texts()[2:], home.texts("visits")) == (["one", "two"], names, ["v0", "v1"])
    remade(home)
    with pytest.raises(WriteBufferError, check=coded("buffer_replaced")):
        home.take()


def test_a_buffer_made_anew_under_a_running_reader_ends_it(home: Home) -> None:
    home.put(NORTH, "one")
    with home.taking() as (taking, stop):
        found: list[MillstreamError] = []

        def run() -> None:
            try:
                taking.run(stop, tell=lambda: None)
            except MillstreamError as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        wait_for(lambda: taking.progress.shards and taking.progress.shards[NORTH].taken == 1)
        remade(home)
        home.put(NORTH, "another", "buffer's")
        thread.join(180)
        assert [code_of(error) for error in found] == ["buffer_replaced"]
    assert home.texts()[0] == "one"
