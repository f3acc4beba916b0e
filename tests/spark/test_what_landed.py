"""Retention during a pipeline that fails, is killed and returns: the log keeps what the lake lacks, and nothing else.

The log, the catalog, the pipeline's tables, the cuts and retention are the real ones. So is the order in which a batch
lands, is quarantined and catches up. Only Spark's job is simulated. The records that it would append to a table's history are remembered here, number by number, as the
oracle.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pyspark import SparkContext
from tests.spark.lake_run import config_of
from tests.wal.plain_operations import MemoryReservations, plain_ops, plain_table

from millstream.catalog import Catalog
from millstream.catalog.pipeline_tables import QuarantineFacts
from millstream.config.model import LogConfig
from millstream.errors import Retry
from millstream.home.retention import sweep
from millstream.lake.layout import TableCommit
from millstream.model.ids import SchemaVersion, ShardId, StreamId, TableId
from millstream.model.positions import Seq
from millstream.spark.batch_landing import BatchLander, Landed
from millstream.spark.complete_copies import CompleteCopies
from millstream.spark.driver import take_up
from millstream.spark.executor_access import ExecutorLog
from millstream.spark.executor_tasks import TableError
from millstream.spark.initial_replay import ReplayWatch
from millstream.spark.pipeline_tables import PipelineTables
from millstream.spark.session import SparkOptions
from millstream.wal.reader import StreamReader
from millstream.wal.segment_deletion import oldest_sealed
from millstream.wal.writing.writer import LogOptions, LogWriter

TABLES = [plain_table(number) for number in (1, 2, 3)]
IDS = [int(table.table_id) for table in TABLES]
TIGHTEST = LogConfig(retention_age="0s", retention_bytes="0B")
NOWHERE = TableError("lake_table_foreign", "somebody else wrote into it", "Mend it.", Retry.NEVER)


OPERATION = st.lists(st.tuples(st.sampled_from(IDS), st.integers(1, 3)), min_size=1, max_size=2)
"""Tables with their number of records."""
WRITES = st.sampled_from([None, None, 0, 1, 2, 3, 4])
"""Number of catalog writes that a process survives."""


NO_SPARK = cast("SparkContext", None)
NO_EXECUTORS = cast("ExecutorLog", None)


class Killed(BaseException):
    """The process dies here."""


class MortalCatalog(Catalog):
    """A catalog before one of whose writes the process may die."""

    writes_left: int | None = None

    def come(self) -> None:
        """Come to a write, and die there if none is left."""
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left < 0:
                raise Killed

    def set_landed(self, *args: Any) -> None:
        self.come()
        super().set_landed(*args)

    def set_needed_from(self, *args: Any, **named: Any) -> None:
        self.come()
        super().set_needed_from(*args, **named)

    def release(self, *args: Any) -> None:
        self.come()
        super().release(*args)

    def put_fact(self, *args: Any) -> None:
        self.come()
        super().put_fact(*args)

    def drop_fact(self, *args: Any) -> None:
        self.come()
        super().drop_fact(*args)


class Histories:
    """Every table's history: exactly once by its own position, as the lake's are."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {table: [] for table in IDS}
        self.upto = dict.fromkeys(IDS, 0)
        self.failing: set[int] = set()

    def copy(self) -> Histories:
        made = Histories()
        made.rows = {table: list(numbers) for table, numbers in self.rows.items()}
        made.upto = dict(self.upto)
        return made

    def append(self, table: int, numbers: list[int], upto: Seq) -> None:
        self.rows[table] += [number for number in numbers if number > self.upto[table]]
        self.upto[table] = max(self.upto[table], upto)


class Lander(BatchLander):
    """A lander of log ranges into remembered histories."""

    histories: Histories
    numbers: Callable[[Seq, Seq], dict[int, list[int]]]

    def _run(
        self, after: Seq, upto: Seq, held: frozenset[TableId], *, only: frozenset[TableId] | None = None
    ) -> Landed:
        commits: dict[TableId, TableCommit] = {}
        errors: dict[TableId, TableError] = {}
        for table, numbers in self.numbers(after, upto).items():
            table_id = TableId(table)
            if (only is not None and table_id not in only) or table_id in held:
                continue
            if table in self.histories.failing:
                errors[table_id] = NOWHERE
                continue
            self.histories.append(table, numbers, upto)
            name = f"public.table{table}"
            commits[table_id] = TableCommit(table_id, name, name, "history", 1, len(numbers), upto)
        versions = dict.fromkeys(commits, SchemaVersion(1))
        return Landed(after, upto, commits, errors, versions, {})


class LifeOfAPipeline(RuleBasedStateMachine):
    """Batches, failing tables, kills before catalog writes, a restored lake, the tightest retention."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.catalog = MortalCatalog(self.home / "data" / "catalog.db")
        self.stream: StreamId = self.catalog.resolve_stream("shop")
        self.config = config_of(
            self.home, self.stream, SparkOptions(self.home / "work"), views=("history",), batch_bytes_max=9_000
        )
        self.writer = LogWriter.open(
            str(self.config.wal_folder),
            stream=self.stream,
            shards=(ShardId(0),),
            epoch=1,
            reservations=MemoryReservations(),
            options=LogOptions(segment_bytes=5_000, disk_used_max=1.0),
        )
        self.histories = Histories()
        self.appended: dict[int, list[int]] = {table: [] for table in IDS}
        self.xid = 0
        self.append([[(1, 1)]])
        self.start()

    def teardown(self) -> None:
        try:
            self.all_that_was_wanting_lands_once_tables_are_mended()
        finally:
            self.writer.close()
            self.catalog.close()
            shutil.rmtree(self.home)

    # --- the process -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Do a driver's work before its first batch."""
        self.log = StreamReader(str(self.config.wal_folder))
        self.pipeline_tables = PipelineTables(self.config, self.catalog)
        take_up(self.config, self.log, self.pipeline_tables)
        replay = ReplayWatch(str(self.config.wal_folder), Seq(0), Seq(0), bytes_max=1)
        log = StreamReader(str(self.config.wal_folder))
        copies = CompleteCopies(self.catalog, self.stream)
        self.lander = Lander(
            NO_SPARK,
            self.config,
            self.catalog,
            log,
            self.pipeline_tables,
            copies,
            NO_EXECUTORS,
            replay,
            lambda _progress: None,
            lambda: None,
        )
        self.lander.histories, self.lander.numbers = self.histories, self.numbers
        self.lander.retry_held()

    def mortal(self, work: Callable[[], None], writes: int | None) -> None:
        """Do the work, or die before a catalog write and come back; in between, the owner's retention runs."""
        self.catalog.writes_left = writes
        try:
            work()
        except Killed:
            self.catalog.writes_left = None
            sweep(self.catalog, "shop", self.stream, self.config.wal_folder, TIGHTEST)
            self.start()
        finally:
            self.catalog.writes_left = None

    def numbers(self, after: Seq, upto: Seq) -> dict[int, list[int]]:
        """Return the log's numbers between two positions, by table. They are read, so they must be there."""
        found: dict[int, list[int]] = {}
        for piece in StreamReader(str(self.config.wal_folder)).read_between(after, upto):
            found.setdefault(int(piece.schema.table_id), []).extend(piece.batch.column("__seq").to_pylist())
        return found

    # --- what happens ------------------------------------------------------------------------------------------------

    @rule(operations=st.lists(OPERATION, min_size=1, max_size=4))
    def append(self, operations: list[list[tuple[int, int]]]) -> None:
        for rows in operations:
            before = self.writer.persisted_upto()
            self.xid += 1
            self.writer.append(plain_ops({self.xid: [(TABLES[table - 1], count, "x") for table, count in rows]}))
            for table, numbers in self.numbers(before, self.writer.persisted_upto()).items():
                self.appended[table] += numbers

    @rule(writes=WRITES)
    def land(self, writes: int | None) -> None:
        """Land a batch, if anything waits for one."""
        self.mortal(self.land_one, writes)

    def land_one(self) -> None:
        self.lander.land_next()
        self.catalog.come()

    @rule(table=st.sampled_from(IDS), count=st.integers(1, 3), writes=WRITES)
    def land_a_table_that_fails(self, table: int, count: int, writes: int | None) -> None:
        self.histories.failing.add(table)
        self.append([[(table, count)]])
        self.land(writes)

    @rule(table=st.sampled_from(IDS))
    def mend_table(self, table: int) -> None:
        self.histories.failing.discard(table)

    @precondition(lambda self: self.pipeline_tables.quarantine.tables)
    @rule(mended=st.booleans(), writes=WRITES)
    def retry(self, mended: bool, writes: int | None) -> None:
        """Retry tables after the others have got ahead."""
        self.append([[(table, 1)] for table in IDS])
        self.land_all()
        if mended:
            self.histories.failing.clear()
        for table in self.pipeline_tables.quarantine.tables:
            QuarantineFacts(self.catalog, self.config.stream_id, self.config.pipeline).request_retry(table)
        self.mortal(self.lander.retry_held, writes)

    @rule(writes=WRITES)
    def restart(self, writes: int | None) -> None:
        self.mortal(self.start, writes)

    @rule(operations=st.lists(OPERATION, min_size=1, max_size=4), mended=st.booleans(), writes=WRITES)
    def set_the_lake_back(self, operations: list[list[tuple[int, int]]], mended: bool, writes: int | None) -> None:
        """While nothing runs, replace the lake by a copy from before some batches, and before quarantined tables went on."""
        lake = self.keep_the_lake()
        kept = self.histories.copy()
        self.append(operations)
        self.land_all()
        if mended:
            self.mend_all()
        self.put_the_lake_back(lake, kept)
        # Before the process's first write only the lake knows its position: retention may drop records until
        # then.
        self.mortal(self.start, None if writes is None else writes + 1)
        self.retain()
        self.land(writes)
        self.retain()

    def keep_the_lake(self) -> Path:
        copy = self.home / "copy"
        if (self.home / "lake").is_dir():
            shutil.copytree(self.home / "lake", copy)
        return copy

    def put_the_lake_back(self, copy: Path, histories: Histories) -> None:
        shutil.rmtree(self.home / "lake", ignore_errors=True)
        if copy.is_dir():
            copy.rename(self.home / "lake")
        histories.failing = self.histories.failing
        self.histories = histories

    def mend_all(self) -> None:
        """Let all quarantined tables catch up."""
        self.histories.failing.clear()
        for table in list(self.pipeline_tables.quarantine.tables):
            QuarantineFacts(self.catalog, self.config.stream_id, self.config.pipeline).request_retry(table)
        self.lander.retry_held()
        assert not self.pipeline_tables.quarantine.tables

    def land_all(self) -> None:
        while self.pipeline_tables.cut is None or self.pipeline_tables.cut.n < self.writer.persisted_upto():
            self.land(None)

    @rule()
    def retain(self) -> None:
        """Drop segments that no holder needs; the oldest segment left must be needed."""
        sweep(self.catalog, "shop", self.stream, self.config.wal_folder, TIGHTEST)
        needed = [self.asked_from()] + [table.after for table in self.pipeline_tables.quarantine.tables.values()]
        oldest = oldest_sealed(str(self.config.wal_folder))
        assert oldest is None or oldest.last_seq > min(needed), "nobody needs it"

    # --- what must hold ----------------------------------------------------------------------------------------------

    def asked_from(self) -> Seq:
        """Return the number after which the log is kept: the last batch's start."""
        position = {p.name: p for p in self.catalog.pipelines(self.stream)}["lake"]
        assert position.needed_from is not None
        return Seq(position.needed_from - 1)

    @invariant()
    def the_log_has_what_the_lake_lacks(self) -> None:
        first = StreamReader(str(self.config.wal_folder)).first_seq()
        for table in IDS:
            lacks = set(self.appended[table]) - set(self.histories.rows[table])
            assert not lacks or min(lacks) >= first, f"table {table} lacks {min(lacks)}, the log begins at {first}"

    @invariant()
    def nothing_lands_twice(self) -> None:
        for numbers in self.histories.rows.values():
            assert len(numbers) == len(set(numbers))

    @invariant()
    def who_holds_the_log_is_the_pipeline_and_what_it_has_quarantined(self) -> None:
        holders = {position.name for position in self.catalog.pipelines(self.stream)}
        assert holders == {"lake", *(f"lake/{table}" for table in self.pipeline_tables.quarantine.tables)}

    def all_that_was_wanting_lands_once_tables_are_mended(self) -> None:
        self.histories.failing.clear()
        self.start()
        self.land_all()
        assert {table: sorted(rows) for table, rows in self.histories.rows.items()} == self.appended
        # After two more batches, of one segment each, nothing else is needed.
        for _ in range(2):
            self.append([[(1, 1)]])
            self.land(None)
        self.retain()
        (position,) = self.catalog.pipelines(self.stream)
        assert position.name == "lake"
        oldest = oldest_sealed(str(self.config.wal_folder))
        assert oldest is None or oldest.last_seq >= self.appended[1][-1]


def test_a_table_whose_records_are_gone_stays_quarantined_and_holds_no_other_up() -> None:
    """A lake was put back from before the table had caught up, and retention had dropped what it lacks."""
    life = LifeOfAPipeline()
    try:
        life.land_a_table_that_fails(2, 3, None)
        life.append([[(1, 3)]] * 200)
        life.land_all()
        lake, kept = life.keep_the_lake(), life.histories.copy()
        life.mend_all()
        life.retain()
        life.put_the_lake_back(lake, kept)
        life.start()
        (held,) = life.pipeline_tables.quarantine.tables.values()
        assert (held.table_id, held.code) == (2, "offset_expired")
        life.append([[(1, 1), (2, 1)]])
        life.land_all()
        assert life.histories.rows[1] == life.appended[1]
        assert life.histories.rows[2] == []
    finally:
        life.writer.close()
        life.catalog.close()
        shutil.rmtree(life.home)


TestLifeOfAPipeline = pytest.mark.long(LifeOfAPipeline.TestCase)
TestLifeOfAPipeline.settings = settings(max_examples=20, stateful_step_count=15)
