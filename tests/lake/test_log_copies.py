"""Landing into Delta tables in an object store by copies of their logs: few requests, and as exact as through the store itself."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from tests.lake.landing import append_history
from tests.servers.store_proxy import Fault, FaultRule, StoreProxy

from millstream.errors import LakeConflict, LakeError, LakeTableForeign, LakeUnavailable
from millstream.lake.commit_cuts import Cut, commit_cut, last_cut
from millstream.lake.data_files import remove_folder
from millstream.lake.delta.commits import DeltaHandle
from millstream.lake.delta.object_store import log_copy
from millstream.lake.delta.object_store import store_client as clients
from millstream.lake.delta.object_store.store_client import store_client
from millstream.lake.history import WrittenRecords, commit_records, write_records
from millstream.lake.layout import LakeLayout
from millstream.lake.maintenance import MaintenanceRules, maintain_table
from millstream.lake.table_format import Commit, open_table
from millstream.lake.table_renames import places_of
from millstream.model.ids import SchemaVersion, StreamId
from millstream.model.positions import Seq
from millstream.model.schema import TableSchema
from millstream.testing.errors import coded
from millstream.testing.s3 import EmbeddedS3

Records = Callable[..., pa.RecordBatch]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
BATCHES = 5
TABLES = 2
"""Tables of a batch that get a commit: the history, and `_commits`."""
REQUESTS_MAX = 6


class Process:
    """The logs that one process knows; inside the block they are those that this process knows."""

    def __init__(self) -> None:
        self._kept = log_copy.KeptLogs()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        others, log_copy._kept = log_copy._kept, self._kept
        try:
            yield
        finally:
            log_copy._kept = others


@pytest.fixture
def lake(store: EmbeddedS3, proxy: StoreProxy, request: pytest.FixtureRequest) -> LakeLayout:
    options = store.lake_options | {"AWS_ENDPOINT_URL": proxy.url}
    place = f"{store.url}/{request.node.name.replace('[', '-').rstrip(']')}"
    return LakeLayout(place, "shop", StreamId(UUID(int=42)), storage_options=options, patience_s=5.0)


@pytest.fixture
def row(orders: TableSchema, records: Records) -> Callable[[int], pa.RecordBatch]:
    return lambda n: records(orders, ("c", n, {"id": n}))


def ids(layout: LakeLayout, schema: TableSchema) -> list[int]:
    """Return the ids in history, through the store."""
    found = in_store(layout, schema).to_pyarrow_table(columns=["id"])
    return sorted(found.column("id").to_pylist())


def in_store(layout: LakeLayout, schema: TableSchema) -> DeltaTable:
    path = layout.table_path("history", schema)
    return DeltaTable(path, storage_options=layout.client_options(path))


def handle(layout: LakeLayout, schema: TableSchema) -> DeltaHandle:
    path, app = layout.table_path("history", schema), layout.app_id("history", schema.table_id)
    opened = open_table(layout, path, app, lands=True)
    assert isinstance(opened, DeltaHandle)
    assert opened.log is not None
    return opened


def land(layout: LakeLayout, schema: TableSchema, batch: pa.RecordBatch, n: int, cut: Cut | None) -> Cut:
    landed = append_history(layout, schema, [batch], Seq(n), places=places_of(cut))
    return commit_cut(layout, Seq(n), [landed], committed_at=NOW)


def without_tags(opened: tuple[Any, Any] | None) -> tuple[Any, Any]:
    """Return a client whose store has no tags in its answers; its listings have sizes and times."""
    assert opened is not None
    obstore, store = opened

    def put(*arguments: Any, **options: Any) -> dict[str, Any]:
        return dict(obstore.put(*arguments, **options)) | {"e_tag": None}

    def listed(*arguments: Any, **options: Any) -> Iterator[list[dict[str, Any]]]:
        return ([dict(one) | {"e_tag": None} for one in page] for page in obstore.list(*arguments, **options))

    return SimpleNamespace(get=obstore.get, put=put, list=listed, exceptions=obstore.exceptions), store


@pytest.mark.sampled
@pytest.mark.parametrize("tags", [True, False])
def test_a_steady_batch_takes_few_requests(
    lake: LakeLayout,
    orders: TableSchema,
    row: Callable[[int], pa.RecordBatch],
    proxy: StoreProxy,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tags: bool,
) -> None:
    """63 a table, up to 160: a table was opened three times, and each time its log was read commit by commit."""
    if not tags:
        opened = clients._opened
        monkeypatch.setattr(clients, "_opened", lambda *arguments: without_tags(opened(*arguments)))
    worker, cut, counts = Process(), None, []
    for n in range(1, BATCHES + 1):
        began = len(proxy.requests())
        with worker():
            written = write_records(lake, orders, [row(n)], Seq(n), places=places_of(cut))
        commit = commit_records(lake, [written], Seq(n), places=places_of(cut))
        cut = commit_cut(lake, Seq(n), [commit], committed_at=NOW)
        counts.append((len(proxy.requests()) - began) / TABLES)
    assert max(counts[2:]) <= REQUESTS_MAX + (not tags), counts
    assert ids(lake, orders) == list(range(1, BATCHES + 1))
    found = last_cut(lake)
    assert found is not None
    assert (found.number, found.n) == (BATCHES, BATCHES)


def test_a_driver_that_was_thought_dead_appends_nothing_twice(
    lake: LakeLayout, orders: TableSchema, row: Callable[[int], pa.RecordBatch]
) -> None:
    zombie = Process()
    with zombie():
        cut = land(lake, orders, row(1), 1, None)
        old = handle(lake, orders)
        parts: list[WrittenRecords] = [write_records(lake, orders, [row(2)], Seq(2), places=places_of(cut))]
    cut = land(lake, orders, row(2), 2, cut)
    with zombie():
        with pytest.raises(LakeConflict):
            old.swap(Commit(Seq(2)), add=parts[0].files)
        assert commit_records(lake, parts, Seq(2), places=places_of(cut)).rows == 0
        with pytest.raises(LakeConflict):
            commit_records(lake, parts, Seq(3), places=places_of(cut))
        again = commit_cut(lake, Seq(2), [], committed_at=NOW)
        assert again.number == 2
    land(lake, orders, row(3), 3, cut)
    assert ids(lake, orders) == [1, 2, 3]


def test_a_driver_that_was_thought_dead_is_refused_behind_a_newer_checkpoint(
    lake: LakeLayout, orders: TableSchema, row: Callable[[int], pa.RecordBatch]
) -> None:
    """It fetched the log from that checkpoint on, so the versions before it were missing from its copy."""
    zombie = Process()
    with zombie():
        cut = land(lake, orders, row(1), 1, None)
        old = handle(lake, orders)
        files = write_records(lake, orders, [row(2)], Seq(2), places=places_of(cut)).files
    cut = land(lake, orders, row(2), 2, cut)
    in_store(lake, orders).optimize.compact()
    in_store(lake, orders).create_checkpoint()
    with zombie(), pytest.raises(LakeConflict):
        old.swap(Commit(Seq(2)), add=files)
    with zombie():
        land(lake, orders, row(3), 3, cut)
    assert ids(lake, orders) == [1, 2, 3]


def test_without_a_temporary_folder_a_batch_lands_without_a_copy(
    lake: LakeLayout,
    orders: TableSchema,
    row: Callable[[int], pa.RecordBatch],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = land(lake, orders, row(1), 1, None)
    opened = handle(lake, orders)
    files = write_records(lake, orders, [row(2)], Seq(2), places=places_of(cut)).files
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    land(lake, orders, row(2), 2, cut)
    assert opened.log is not None
    shutil.rmtree(opened.log.folder)
    Path(opened.log.folder).write_text("")
    with pytest.raises(LakeUnavailable, match=re.escape(opened.log.folder)):
        opened.swap(Commit(Seq(2)), add=files)
    assert ids(lake, orders) == [1, 2]


def test_another_programs_maintenance_between_and_within_batches_is_no_conflict(
    lake: LakeLayout, orders: TableSchema, row: Callable[[int], pa.RecordBatch]
) -> None:
    cut: Cut | None = None
    for n in (1, 2):
        cut = land(lake, orders, row(n), n, cut)
    in_store(lake, orders).optimize.compact()
    cut = land(lake, orders, row(3), 3, cut)
    opened = handle(lake, orders)
    (written,) = write_records(lake, orders, [row(4)], Seq(4), places=places_of(cut)).files
    in_store(lake, orders).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    in_store(lake, orders).optimize.compact()
    version = opened.version
    opened.swap(Commit(Seq(4)), add=[written])
    assert opened.version > version + 1
    assert ids(lake, orders) == [1, 2, 3, 4]
    cut = land(lake, orders, row(5), 5, cut)
    assert ids(lake, orders) == [1, 2, 3, 4, 5]
    assert handle(lake, orders).version == in_store(lake, orders).version()


@pytest.mark.long
def test_a_commit_that_must_be_the_next_version_is_refused_behind_another(
    lake: LakeLayout, orders: TableSchema, row: Callable[[int], pa.RecordBatch]
) -> None:
    cut = land(lake, orders, row(1), 1, None)
    opened = handle(lake, orders)
    with Process()():
        land(lake, orders, row(2), 2, cut)
    with pytest.raises(LakeConflict):
        opened.swap(Commit(exact=True), add=[], remove=opened.files().column("path").to_pylist(), data_change=False)
    assert ids(lake, orders) == [1, 2]


@pytest.mark.long
def test_a_change_of_properties_behind_another_append_is_a_conflict(
    lake: LakeLayout, orders: TableSchema, row: Callable[[int], pa.RecordBatch]
) -> None:
    cut = land(lake, orders, row(1), 1, None)
    opened = handle(lake, orders)
    files = write_records(lake, orders, [row(2)], Seq(2), places=places_of(cut)).files
    with Process()():
        land(lake, orders, row(2), 2, cut)
    with pytest.raises(LakeConflict):
        opened.swap(Commit(Seq(3)), add=files, properties={"millstream.test": "1"})
    assert ids(lake, orders) == [1, 2]


def test_rows_of_another_program_are_noticed(
    lake: LakeLayout, orders: TableSchema, row: Callable[[int], pa.RecordBatch]
) -> None:
    cut = land(lake, orders, row(1), 1, None)
    there = in_store(lake, orders)
    write_deltalake(there, there.to_pyarrow_table(), mode="append", commit_properties=CommitProperties())
    for forget in (False, True):
        if forget:
            log_copy._kept = log_copy.KeptLogs()
        with pytest.raises(LakeTableForeign):
            land(lake, orders, row(2), 2, cut)


def test_a_table_that_is_dropped_or_made_again_is_not_the_known_one(
    lake: LakeLayout, orders: TableSchema, evolved: Callable[..., TableSchema], records: Records
) -> None:
    """Its next version would be written into an empty log, or into another table's."""
    cut = land(lake, orders, records(orders, ("c", 1, {"id": 1})), 1, None)
    cut = land(lake, orders, records(orders, ("c", 2, {"id": 2})), 2, cut)
    known = handle(lake, orders).version
    remove_folder(lake, lake.table_path("history", orders))
    with pytest.raises(LakeError, check=coded("lake_history_lost")):
        land(lake, orders, records(orders, ("c", 3, {"id": 3})), 3, cut)
    wider = evolved(colour=pa.string())
    with Process()():
        for n in (3, 4):
            append_history(lake, wider, [records(wider, ("c", n, {"id": n, "colour": "red"}))], Seq(n), places={})
        assert handle(lake, wider).version == known
    append_history(lake, wider, [records(wider, ("c", 5, {"id": 5, "colour": "blue"}))], Seq(5), places={})
    found = in_store(lake, wider).to_pyarrow_table(columns=["id", "colour"]).sort_by("id").to_pylist()
    assert found == [{"id": n, "colour": colour} for n, colour in ((3, "red"), (4, "red"), (5, "blue"))]


@pytest.mark.parametrize(
    "fault",
    [Fault.CUT_AFTER, *(pytest.param(one, marks=pytest.mark.long) for one in (Fault.CUT, Fault.BUSY_AFTER))],
)
def test_a_batch_is_there_once_whatever_became_of_its_answer(
    lake: LakeLayout, orders: TableSchema, row: Callable[[int], pa.RecordBatch], proxy: StoreProxy, fault: Fault
) -> None:
    cut = land(lake, orders, row(1), 1, None)
    version = handle(lake, orders).version
    proxy.set_rules([FaultRule(fault, "PUT", rf"history/.*_delta_log/{version + 1:020}\.json", times=1)])
    cut = land(lake, orders, row(2), 2, cut)
    assert handle(lake, orders).version == version + 1
    land(lake, orders, row(3), 3, cut)
    assert ids(lake, orders) == [1, 2, 3]


@pytest.mark.long
def test_a_lost_answer_of_a_commit_that_another_overtook_is_a_conflict(
    lake: LakeLayout, orders: TableSchema, row: Callable[[int], pa.RecordBatch], proxy: StoreProxy
) -> None:
    cut = land(lake, orders, row(1), 1, None)
    opened = handle(lake, orders)
    files = write_records(lake, orders, [row(2)], Seq(2), places=places_of(cut)).files
    with Process()():
        land(lake, orders, row(2), 2, cut)
    proxy.set_rules([FaultRule(Fault.CUT, "PUT", r"history/.*\.json", times=1)])
    with pytest.raises(LakeConflict):
        opened.swap(Commit(Seq(2)), add=files)
    assert ids(lake, orders) == [1, 2]


def test_a_refused_commit_is_not_sent_again(
    lake: LakeLayout, orders: TableSchema, row: Callable[[int], pa.RecordBatch], proxy: StoreProxy
) -> None:
    cut = land(lake, orders, row(1), 1, None)
    proxy.set_rules([FaultRule(Fault.FORBIDDEN, "PUT", r"history/.*\.json")])
    began = len(proxy.requests())
    with pytest.raises(LakeUnavailable, check=coded("lake_forbidden")):
        land(lake, orders, row(2), 2, cut)
    assert sum(one.fault is not None for one in proxy.requests()[began:]) == 1
    proxy.set_rules([])
    land(lake, orders, row(2), 2, cut)
    assert ids(lake, orders) == [1, 2]


@pytest.mark.long
def test_columns_change_through_a_copy(
    lake: LakeLayout, orders: TableSchema, evolved: Callable[..., TableSchema], records: Records
) -> None:
    cut = land(lake, orders, records(orders, ("c", 1, {"id": 1})), 1, None)
    added = evolved(at=pa.timestamp("us"))  # needs a feature of the protocol as well
    cut = land(lake, added, records(added, ("c", 2, {"id": 2})), 2, cut)
    later = replace(added, version=SchemaVersion(added.version + 1))
    land(lake, later, records(later, ("c", 3, {"id": 3})), 3, cut)
    assert ids(lake, orders) == [1, 2, 3]
    assert "at" in handle(lake, orders).schema().names
    assert dict(handle(lake, orders).properties) == dict(in_store(lake, orders).metadata().configuration)


@pytest.mark.long
def test_a_checkpoint_is_sent_and_the_log_before_it_may_go(
    lake: LakeLayout, orders: TableSchema, row: Callable[[int], pa.RecordBatch], proxy: StoreProxy
) -> None:
    worker, later = Process(), Process()
    cut = None
    with worker():
        for n in range(1, 24):
            cut = land(lake, orders, row(n), n, cut) if n == 1 else cut
            append_history(lake, orders, [row(n)], Seq(n), places=places_of(cut))
    written = {one.path.rsplit("/", 1)[1] for one in proxy.requests() if one.method == "PUT"}
    assert {f"{19:020}.checkpoint.parquet", "_last_checkpoint"} <= written
    assert DeltaTable(handle(lake, orders).log.folder).version() == in_store(lake, orders).version()  # type: ignore[union-attr]
    day_later_ms = int(datetime.now(UTC).timestamp() * 1000) + 86_400_000
    maintain_table(lake, "history", orders, now_ms=day_later_ms, rules=MaintenanceRules(compact_files=5))
    for process, n in ((worker, 24), (later, 25), (worker, 26)):
        with process():
            append_history(lake, orders, [row(n)], Seq(n), places=places_of(cut))
    assert ids(lake, orders) == list(range(1, 27))


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/srv/lake", {}),
        ("gs://bucket/lake", {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}),
        ("s3://bucket/lake", {}),
        ("s3://bucket/lake", {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_PROFILE": "c"}),
    ],
)
def test_where_delta_rs_finds_keys_of_its_own_it_is_left_to_it(
    path: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    layout = LakeLayout(path, "shop", StreamId(UUID(int=42)), storage_options=options)
    assert store_client(layout, path) is None


@pytest.mark.parametrize(
    ("word", "expected"), [("true", True), ("ON", True), ("y", True), ("false", False), ("", False)]
)
def test_requests_without_tls_are_allowed_by_the_words_that_delta_rs_takes(
    store: EmbeddedS3, word: str, *, expected: bool
) -> None:
    options = store.lake_options | {"AWS_ALLOW_HTTP": word}
    layout = LakeLayout(store.url, "shop", StreamId(UUID(int=42)), storage_options=options, patience_s=0.2)
    if expected:
        client = store_client(layout, f"{store.url}/nothing")
        assert client is not None
        assert client.listed("_delta_log") == []
    else:
        with pytest.raises(LakeUnavailable, match="without TLS"):
            store_client(layout, f"{store.url}/nothing")


def test_kept_logs_have_a_bounded_size_and_the_longest_unused_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_copy, "_KEPT_BYTES_MAX", 100)
    kept, keys = log_copy.KeptLogs(), [((), f"s3://bucket/{n}") for n in range(4)]

    def known(size_bytes: int) -> log_copy._Known:
        return log_copy._Known({"0": b"x" * size_bytes}, -1, 0, "tag")

    for n in (0, 1, 0, 2, 3):
        kept.put(keys[n], known(30))
    assert [kept.get(key) is not None for key in keys] == [True, False, True, True]
    kept.put(keys[0], known(40))
    kept.put(keys[2], None)
    kept.put(keys[1], known(30))
    assert [kept.get(key) is not None for key in keys] == [True, True, False, True]
    kept.put(keys[2], known(1000))
    assert [kept.get(key) is not None for key in keys] == [False, False, True, False]


def test_a_killed_process_leaves_no_copy_for_good(tmp_path: Path) -> None:
    left, used, other = (tmp_path / name for name in ("millstream-log-left", "millstream-log-used", "other"))
    for folder in (left, used, other):
        (folder / "_delta_log").mkdir(parents=True)
    two_days_ago_s = time.time() - 2 * 86_400
    for folder in (left, other):
        os.utime(folder, (two_days_ago_s, two_days_ago_s))
    log_copy.remove_left_copies(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == [used, other]
