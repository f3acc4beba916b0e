"""A stream's consumers in one process: what they hold of the log, and what happens when retention passes them."""

from __future__ import annotations

import contextlib
import errno
import json
import threading
import time
import types
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pyarrow as pa
import pytest
from structlog.testing import capture_logs
from tests.app.homes import make_home, wait_for
from tests.delivery.test_store import FailingDisk

from millstream.app.open_home import OpenHome
from millstream.catalog import TableState
from millstream.delivery import repeated_warnings, wait_clock
from millstream.delivery.consumer_store import LOG_NAME
from millstream.delivery.repeated_warnings import RepeatedWarnings
from millstream.delivery.running_consumer import Running
from millstream.delivery.service import StreamConsumers
from millstream.errors import CatalogError, CorruptWal, CursorExpired, DeliveryError, DiskFull, MillstreamError
from millstream.home.home import Home
from millstream.home.retention import tracker_of
from millstream.model.ids import SchemaVersion, TableId
from millstream.model.positions import Seq
from millstream.model.schema import Column, TableSchema
from millstream.protocol.delivery import Message
from millstream.protocol.retention import CutOff, HolderKind
from millstream.wal.files import RealFile
from millstream.workers import Worker
from millstream.writers.home_consumers import ConsumerHolders, surroundings

KEYS = '[streams.web]\n[streams.web.keys]\n"public.orders" = ["id"]\n'


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(make_home(tmp_path / "home", KEYS))


@pytest.fixture
def opened(home: Home) -> Iterator[OpenHome]:
    with OpenHome(home) as found:
        for n in range(4):
            found.append("web", "orders", {"id": n})
        yield found


def holders(home: Home) -> dict[str, int]:
    with home.open_catalog() as catalog:
        stream = catalog.stream("web").id
        return {
            position.name: int(position.needed_from)
            for position in catalog.pipelines(stream)
            if position.kind is HolderKind.CONSUMER and position.needed_from is not None
        }


def test_a_consumer_holds_the_log_from_its_cursor_on(home: Home, opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    consumers.create("lake", start="earliest")  # the pipeline's name: they are holders of their own
    assert holders(home) == {"consumer:lake": 1}
    with opened.consume("web", "lake", wait_s=10) as messages:
        next(messages)
        next(messages)
    cursor = int(consumers.get("lake")["cursor"].rpartition(".s")[2])
    assert cursor == 2
    wait_for(lambda: holders(home) == {"consumer:lake": cursor + 1}, seconds=60, what=lambda: holders(home))
    with home.open_catalog() as catalog:
        tracker = tracker_of(catalog.pipelines(catalog.stream("web").id))
        assert {"lake", "consumer:lake"} <= set(tracker.holders)
    consumers.rewind("lake", "earliest")
    assert holders(home) == {"consumer:lake": 1}
    consumers.delete("lake")
    assert holders(home) == {}


@pytest.mark.usefixtures("opened")
def test_a_hold_that_a_killed_call_left_behind_ends_when_the_consumers_begin(home: Home) -> None:
    """It held the log until `retention_bytes_max`, and no call could release it."""
    with home.open_catalog() as catalog:
        around = surroundings(home, catalog, "web")
        with contextlib.closing(StreamConsumers(around)) as consumers:
            consumers.call("create", None, {"name": "kept", "start": "earliest"})
        around.holding.hold("half", Seq(1))  # a call's first step
        assert holders(home) == {"consumer:half": 1, "consumer:kept": 1}
        with contextlib.closing(StreamConsumers(around)):
            assert holders(home) == {"consumer:kept": 1}


@pytest.mark.usefixtures("opened")
def test_a_clock_that_is_set_back_prolongs_no_wait(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that wasn't acknowledged came again only once the clock showed again what it had shown."""
    with home.open_catalog() as catalog, contextlib.closing(StreamConsumers(surroundings(home, catalog, "web"))) as one:
        one.call("create", None, {"name": "late", "start": "earliest", "ack_wait_ms": 100})
        given = one.call("receive", "late", {}).body["messages"]
        assert len(given) == 4
        monkeypatch.setattr(wait_clock, "time", SetBack)
        again = one.call("receive", "late", {"wait_for_ms": 30_000}).body["messages"]
        assert [(each["id"], each["deliveries"]) for each in again] == [(each["id"], 2) for each in given]


class SetBack:
    """The clock after it was set back by three hours."""

    @staticmethod
    def time_ns() -> int:
        return time.time_ns() - 3 * 3600 * 10**9


def test_a_consumer_that_was_cut_off_says_so_until_it_is_rewound(home: Home, opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    consumers.create("slow", start="earliest")
    with opened.consume("web", "slow", wait_s=10) as messages:
        message = next(messages)
        with home.open_catalog() as catalog:
            stream = catalog.stream("web").id
            assert catalog.cut_off(stream, CutOff("consumer:slow", HolderKind.CONSUMER, Seq(1), Seq(3)))
        wait_for(lambda: consumers.get("slow")["state"] == "cut_off", seconds=60)
        with pytest.raises(CursorExpired):
            next(opened.consume("web", "slow", wait_s=1))
        assert message.ack() == "rewound"
    assert consumers.rewind("slow", "earliest")["state"] == "active"
    with opened.consume("web", "slow", wait_s=10) as messages:
        assert next(messages).id == message.id
        assert holders(home) == {"consumer:slow": 1}  # it moves seconds after the acknowledgement


def test_a_page_of_dead_letters_is_bounded_in_bytes(opened: OpenHome) -> None:
    consumers = opened.consumers("web")
    consumers.create("large", start="latest", max_deliver=1)
    for n in range(3):
        opened.append("web", "orders", {"id": n, "note": "x" * (3 << 20)})
    with opened.consume("web", "large", wait_s=0.1) as messages:
        for message in messages:
            message.nack()
    pages = [consumers.dead("large")]
    pages.append(consumers.dead("large", after=pages[0]["next"]))
    assert [[letter["record"]["row"]["id"] for letter in page["dead"]] for page in pages] == [[0, 1], [2]]
    assert pages[1]["next"] is None


@pytest.mark.usefixtures("opened")
def test_state_comes_back_as_it_was(home: Home) -> None:
    with home.open_catalog() as catalog:
        around = surroundings(home, catalog, "web")
        one = StreamConsumers(around)
        one.call("create", None, {"name": "search", "start": "earliest", "max_deliver": 1})
        first, second, third, _ = one.call("receive", "search", {}).body["messages"]
        one.call("nack", "search", {"ack_ids": [first["ack_id"]]})
        one.call("ack", "search", {"ack_ids": [third["ack_id"]]})
        shown = one.call("show", "search", None).body
        letters = one.call("dead", "search", {}).body
        one.close()
        again = StreamConsumers(around)
        found = again.call("show", "search", None).body
        assert {**found, "lag": None} == {**shown, "lag": None}
        assert again.call("dead", "search", {}).body == letters
        assert json.loads(letters["dead"][0]["record"])["row"] == {"id": 0}
        # A delivery of the earlier process counts.
        assert again.call("ack", "search", {"ack_ids": [second["ack_id"]]}).body["results"][0]["status"] == "acked"
        again.call("retry", "search", {"ids": "all"})
        (retried,) = again.call("receive", "search", {}).body["messages"]
        assert (retried["id"], retried["record"]) == (first["id"], letters["dead"][0]["record"])
        again.close()
        # A retried message that is in flight keeps its record, too.
        last = StreamConsumers(around)
        last.call("nack", "search", {"ack_ids": [retried["ack_id"]]})
        assert last.call("dead", "search", {}).body["dead"][0]["record"] == retried["record"]
        last.close()


@pytest.mark.usefixtures("opened")
def test_state_that_cannot_be_opened_for_now_holds_no_file(home: Home) -> None:
    """Each attempt left a file open, and a server makes one after the other while the disk is full."""
    with home.open_catalog() as catalog:
        around = surroundings(home, catalog, "web")
        consumers = StreamConsumers(around)
        consumers.call("create", None, {"name": "search", "start": "earliest"})
        consumers.close()

        def write(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no space")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(RealFile, "pwrite", write)
            with pytest.raises(DiskFull):
                StreamConsumers(around)
        log = str(home.delivery_folder("web") / LOG_NAME)
        assert log not in [file.path for file in psutil.Process().open_files()]
        StreamConsumers(around).close()


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("kind", ["changes", "latest"])
def test_messages_whose_delivery_cannot_be_kept_are_delivered_by_the_next_call(home: Home, kind: str) -> None:
    """They stayed in flight for a caller that had got an error; a pushing consumer would have waited for hours."""
    with home.open_catalog() as catalog:
        consumers = StreamConsumers(surroundings(home, catalog, "web"))
        consumers.call("create", None, {"name": "search", "start": "earliest", "kind": kind})
        store = consumers._store
        store._file = cast("RealFile", FailingDisk(store._file, "write"))
        with pytest.raises(MillstreamError, match="space"):
            consumers.call("receive", "search", {})
        found = consumers.call("show", "search", None).body
        assert (found["in_flight"], found["dead"]) == (0, 0)
        wait_for(lambda: not store.wants_compaction)
        messages = consumers.call("receive", "search", {}).body["messages"]
        assert [json.loads(message["record"])["row"] for message in messages] == [{"id": n} for n in range(4)]
        consumers.close()


@pytest.mark.usefixtures("opened")
def test_a_full_disk_loses_no_message(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log had no room for a dead letter, took the ack after it, and the message was gone after a restart."""
    with home.open_catalog() as catalog:
        around = surroundings(home, catalog, "web")
        consumers = StreamConsumers(around)
        consumers.call("create", None, {"name": "search", "start": "earliest", "max_deliver": 1, "group_by": "none"})
        first, second = consumers.call("receive", "search", {"batch_size": 2}).body["messages"]

        def no_room(_: object) -> None:
            raise DiskFull("no space")

        store = consumers._store
        monkeypatch.setattr(store, "compact", no_room)
        file = store._file
        store._file = cast("RealFile", FailingDisk(file, "write"))
        with pytest.raises(DiskFull):
            consumers.call("nack", "search", {"ack_ids": [first["ack_id"]]})
        store._file = file  # a small entry fits
        for _ in range(2):
            with pytest.raises(DiskFull):
                consumers.call("ack", "search", {"ack_ids": [second["ack_id"]]})
        with pytest.raises(DiskFull):
            consumers.call("retry", "search", {"ids": "all"})
        with pytest.raises(DiskFull):
            consumers.close()
        monkeypatch.undo()
        again = StreamConsumers(around)
        results = again.call("nack", "search", {"ack_ids": [first["ack_id"], second["ack_id"]]}).body["results"]
        assert [result["status"] for result in results] == ["nacked", "nacked"]
        again.close()


def test_many_clients_of_one_consumer_share_its_messages(opened: OpenHome) -> None:
    opened.append("web", "orders", [{"id": n % 7} for n in range(700)])
    consumers = opened.consumers("web")
    consumers.create("search", start="earliest")
    seen: dict[str, list[int]] = {}
    failures: list[BaseException] = []
    lock = threading.Lock()

    def receive() -> None:
        try:
            with opened.consume("web", "search", batch_size=5, wait_s=1) as messages:
                for message in messages:
                    group = str(message.group)
                    with lock:
                        seen.setdefault(group, []).append(message.record["offset"])
        except BaseException as error:  # noqa: BLE001 - raised by the test
            failures.append(error)

    threads = [threading.Thread(target=receive) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert sum(map(len, seen.values())) == 704
    assert all(offsets == sorted(offsets) for offsets in seen.values())
    assert consumers.get("search")["acked"] == 704


def test_tables_without_a_record_are_checked_and_a_later_one_of_a_name_counts(home: Home, opened: OpenHome) -> None:
    """A captured table without rows, and one without a key before its first record, weren't known."""
    consumers = opened.consumers("web")
    with home.open_catalog() as catalog:
        stream = catalog.stream("web").id
        source = catalog.resolve_source(stream, 7, "shop", 1)

        def make(oid: int, name: str, *key: str) -> TableId:
            state = TableState.STREAMING if key else TableState.HISTORY_ONLY
            table = catalog.table_for(stream, source, oid, "public", name, state=state).id
            columns = (Column("id", pa.int64()), Column("note", pa.string()))
            if key:
                wanted = TableSchema(table, SchemaVersion(0), source, "public", name, columns, key, key)
                catalog.put_schema(stream, wanted)
            return table

        make(1, "empty", "id")
        keyless = make(2, "Keyless")
    with pytest.raises(DeliveryError, match="no matching table has a column 'nope'"):
        consumers.create("c", tables=["public.empty"], where="nope = 1")
    with pytest.raises(DeliveryError, match="isn't in its replica identity"):
        consumers.create("c", tables=["public.empty"], group_by=["note"])
    with pytest.raises(DeliveryError, match='"Keyless" has no key'):
        consumers.create("c", kind="latest", tables=['public."Keyless"'])
    consumers.create("every", tables=['public."Keyless"'], where="later = 1")
    with home.open_catalog() as catalog:
        catalog.set_state(keyless, TableState.GONE)
        make(3, "Keyless", "id")
    consumers.create("newest", kind="latest", tables=['public."Keyless"'])


def test_a_rewind_that_cannot_hold_the_log_leaves_the_hold_as_it_was(
    home: Home, opened: OpenHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was held until the cursor moved: retention could pass the consumer."""
    consumers = opened.consumers("web")
    consumers.create("slow", start="earliest")
    with monkeypatch.context() as patched:
        hold, failures = ConsumerHolders.hold, [CatalogError("busy", code="catalog_busy")]

        def failing(own: ConsumerHolders, consumer: str, needed_from: Seq) -> None:
            if failures:
                raise failures.pop()
            hold(own, consumer, needed_from)

        patched.setattr(ConsumerHolders, "hold", failing)
        with pytest.raises(CatalogError, match="busy"):
            consumers.rewind("slow", "latest")
    assert holders(home) == {"consumer:slow": 1}


def test_records_behind_a_message_in_flight_cost_bounded_memory(home: Home) -> None:
    """A table without a key is one group: with one message in flight, 100,000 records of any size were in memory."""
    rows = [{"n": n, "body": str(n) * 500} for n in range(600)]
    with OpenHome(home) as opened:
        for first in range(0, len(rows), 10):
            opened.append("web", "events", rows[first : first + 10])
        opened.append("web", "orders", {"id": 1})
    with home.open_catalog() as catalog:
        around = replace(surroundings(home, catalog, "web"), unsettled_bytes_max=30_000)
        consumers = StreamConsumers(around)

        def receive(count: int, wait_ms: int) -> list[dict[str, Any]]:
            body = {"batch_size": count, "wait_for_ms": wait_ms}
            return cast("list[dict[str, Any]]", consumers.call("receive", "slow", body).body["messages"])

        def row_of(message: dict[str, Any]) -> dict[str, Any]:
            return cast("dict[str, Any]", json.loads(message["record"])["row"])

        consumers.call("create", None, {"name": "slow", "start": "earliest", "max_deliver": 1})
        (event,), (other,) = receive(1, 10_000), receive(1, 10_000)
        assert (row_of(event), row_of(other)) == (rows[0], {"id": 1})
        pending = consumers._running["slow"].machine._pending
        kept = [entry.message for entry in pending.entries.values() if entry.message.origin is not None]
        assert len(pending.entries) == len(rows) + 1
        assert sum(message.size for message in kept) == pending.records_bytes < 600_000
        consumers.call("ack", "slow", {"ack_ids": [event["ack_id"], other["ack_id"]]})
        seen = []
        while messages := receive(50, 1000):
            for message in messages:
                seen.append(row_of(message))
                how = "nack" if seen[-1]["n"] == 500 else "ack"
                consumers.call(how, "slow", {"ack_ids": [message["ack_id"]]})
        assert seen == rows[1:]
        consumers.close()
        again = StreamConsumers(around)
        (letter,) = again.call("dead", "slow", {}).body["dead"]
        assert row_of(letter) == rows[500]
        again.close()


def test_the_records_of_a_removed_consumers_dead_letters_leave_its_file(home: Home) -> None:
    """They are a person's data: they stayed until the file had grown by a megabyte, and no call could reach them."""
    with OpenHome(home) as opened:
        opened.append("web", "orders", {"id": 1, "name": "Ada Lovelace"})
        consumers = opened.consumers("web")
        consumers.create("mail", start="earliest", max_deliver=1)
        with opened.consume("web", "mail", wait_s=10) as messages:
            next(messages).nack()
        file = home.delivery_folder("web") / LOG_NAME
        assert b"Lovelace" in file.read_bytes()
        consumers.delete("mail")
        wait_for(lambda: b"Lovelace" not in file.read_bytes(), seconds=30)


@pytest.mark.parametrize("kind", ["changes", "latest"])
def test_an_answer_is_bounded_in_bytes_and_not_in_characters(home: Home, kind: str) -> None:
    with OpenHome(home) as opened, home.open_catalog() as catalog:
        for n in range(4):
            opened.append("web", "orders", {"id": n, "note": "漢" * (1 << 20)})  # 3 MiB
        consumers = StreamConsumers(surroundings(home, catalog, "web"))
        consumers.call("create", None, {"name": "search", "start": "earliest", "kind": kind})
        for _ in range(2):
            messages = consumers.call("receive", "search", {}).body["messages"]
            sizes = [len(message["record"].encode()) for message in messages]
            assert (len(sizes), sum(sizes) <= 8 << 20) == (2, True)
        consumers.close()


def test_an_answer_is_missing_nothing_that_was_written_before_its_request(home: Home) -> None:
    """Each second answer was empty: the reading that an earlier request had begun ended before the new record."""
    with OpenHome(home) as opened, home.open_catalog() as catalog:
        opened.append("web", "orders", {"id": 0})
        consumers = StreamConsumers(surroundings(home, catalog, "web"))
        consumers.call("create", None, {"name": "search", "start": "earliest"})
        for n in range(1, 6):
            (message,) = consumers.call("receive", "search", {"batch_size": 1}).body["messages"]
            consumers.call("ack", "search", {"ack_ids": [message["ack_id"]]})
            opened.append("web", "orders", {"id": n})
        consumers.close()


def test_a_consumer_that_reads_no_further_behind_a_failed_message_says_so(home: Home) -> None:
    """It delivered nothing to any group, and `error` was null."""
    with OpenHome(home) as opened, home.open_catalog() as catalog:
        opened.append("web", "events", [{"n": n} for n in range(6)])  # without a key: one group
        consumers = StreamConsumers(surroundings(home, catalog, "web"))
        consumers.call("create", None, {"name": "slow", "start": "earliest"})
        machine = consumers._running["slow"].machine
        machine.limits = replace(machine.limits, unsettled_max=4)

        def receive(count: int) -> list[dict[str, Any]]:
            body = {"batch_size": count}
            return cast("list[dict[str, Any]]", consumers.call("receive", "slow", body).body["messages"])

        def error() -> str | None:
            return cast("str | None", consumers.call("show", "slow", {}).body["error"])

        (failing,) = receive(1)
        assert (receive(1), error()) == ([], None)
        consumers.call("nack", "slow", {"ack_ids": [failing["ack_id"]], "delay_ms": 86_400_000})
        opened.append("web", "orders", {"id": 1})
        assert (receive(1), error()) == ([], "it reads no further until some of its 6 unsettled messages are settled")
        consumers.call("ack", "slow", {"ack_ids": [failing["ack_id"]]})
        rest = receive(10)
        assert (len(rest), error()) == (5, None)
        consumers.call("ack", "slow", {"ack_ids": [message["ack_id"] for message in rest]})
        assert len(receive(10)) == 1
        consumers.close()


def test_a_consumer_whose_records_cannot_be_read_holds_no_other(
    home: Home, opened: OpenHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its failure on, no consumer's acknowledgements were made durable, and none let go of the log."""
    read_again = Running._read_again

    def unless_hurt(running: Running, messages: Iterable[Message]) -> dict[int, Message]:
        if running.definition.name == "hurt":
            raise CorruptWal("the log is damaged where the records of dead messages are")
        return read_again(running, messages)

    consumers = opened.consumers("web")
    consumers.create("hurt", start="earliest")
    consumers.create("well", start="earliest")
    monkeypatch.setattr(Running, "_read_again", unless_hurt)
    with opened.consume("web", "well", wait_s=10) as messages:
        next(messages)
    wait_for(lambda: holders(home)["consumer:well"] == 2, seconds=15, what=lambda: holders(home))


@pytest.mark.usefixtures("opened")
def test_acknowledgements_are_durable_though_their_log_cannot_be_written_anew(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(_: object) -> None:
        raise DiskFull("no space")

    with home.open_catalog() as catalog:
        consumers = StreamConsumers(surroundings(home, catalog, "web"))
        consumers.call("create", None, {"name": "search", "start": "earliest"})
        store = consumers._store
        monkeypatch.setattr(type(store), "wants_compaction", True)
        monkeypatch.setattr(store, "compact", no_room)
        (message, *_) = consumers.call("receive", "search", {}).body["messages"]
        consumers.call("ack", "search", {"ack_ids": [message["ack_id"]]})
        wait_for(lambda: not store._is_dirty, seconds=15)
        monkeypatch.undo()
        consumers.close()


@pytest.mark.usefixtures("opened")
def test_consumers_that_could_not_begin_leave_no_thread_behind(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of theirs went on, with a store of its own on the same file."""
    start = Worker.start

    def refused(worker: Worker) -> Worker:
        if worker.name == "consumers-watch":
            raise OSError(errno.EAGAIN, "no more threads can be started")
        return start(worker)

    with home.open_catalog() as catalog:
        with monkeypatch.context() as patched:
            patched.setattr(Worker, "start", refused)
            with pytest.raises(OSError, match="no more threads"):
                StreamConsumers(surroundings(home, catalog, "web"))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("consumers-")]
        StreamConsumers(surroundings(home, catalog, "web")).close()


def test_a_disk_that_stays_full_is_logged_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was logged eight times a second."""
    now = [100.0]
    monkeypatch.setattr(repeated_warnings, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    warnings = RepeatedWarnings(stream="web")
    with capture_logs() as logs:
        for _ in range(100):
            warnings.warn("no room", DiskFull("full"))
            warnings.warn("no room", DiskFull("full"), consumer="other")
            now[0] += 0.25
        warnings.warn("no room", CatalogError("away"))
    assert [log.get("consumer", log["error"]) for log in logs] == ["full", "other", "away"]
    now[0] += 30.0
    with capture_logs() as logs:
        warnings.warn("no room", DiskFull("full"))
    assert [(log["stream"], log["error"]) for log in logs] == [("web", "full")]
