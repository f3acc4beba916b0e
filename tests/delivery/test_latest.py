"""A consumer of kind `latest` receives the newest state of each key, also through kills."""

from __future__ import annotations

import errno
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.delivery.test_record_reader import NOTHING, cat, read_all, reader_of, record
from tests.seeds import Seeds
from tests.wal.test_records_json import ITEMS, MESSAGES, ORDERS, operation, ops, row, schema

from millstream.catalog import Catalog
from millstream.delivery.consumer_store import Letter, Stored
from millstream.delivery.definition import Definition
from millstream.delivery.running_consumer import Running
from millstream.errors import DeliveryError, MillstreamError
from millstream.model.ids import ShardId, SourceId, StreamId
from millstream.model.operations import OperationKind
from millstream.model.positions import Seq
from millstream.model.records import Op
from millstream.protocol.delivery import Change, Consumer, State
from millstream.protocol.delivery.latest import ENTRY_BYTES
from millstream.protocol.delivery.messages import UNSETTLED_BYTES_MAX
from millstream.testing.errors import coded
from millstream.wal.reader import StreamReader
from millstream.wal.writing.writer import LogWriter

SMALL = 12
"""Number of messages that fit in memory, about."""
LATEST = {"kind": "latest"}
WHERE = LATEST | {"where": "paid = true"}


@pytest.fixture(params=[1, 2], ids=["one shard", "two shards"])
def log(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LogWriter]:
    with Catalog(tmp_path / "catalog.db") as catalog:
        stream = catalog.resolve_stream("shop")
        _, epoch = catalog.register_writer(stream)
        with LogWriter.open(
            str(tmp_path / "wal"),
            stream=stream,
            shards=[ShardId(n) for n in range(request.param)],
            epoch=epoch,
            reservations=catalog.reservations(stream),
        ) as writer:
            yield writer


def write(log: LogWriter, *rows: dict[str, Any], number: int = 1) -> None:
    """Append rows of orders as a transaction."""
    log.append(ops([operation(number, 0x1000 * number)], (ORDERS, 0, list(rows))))


def order(index: int, op: Op, id_: int, **values: Any) -> dict[str, Any]:
    own = {} if op is Op.DELETE else NOTHING
    return row(index, op, id=id_, **(own | values))


def shown(folder: Path, **fields: Any) -> list[tuple[str, str, Any, list[str]]]:
    """Return each message's id without the part that all have, its op, its row and its unchanged columns."""
    messages, _ = read_all(reader_of(folder, **LATEST, **fields))
    records = [record(message) for message in messages]
    return [
        (message.id.removeprefix(f"shop-{one['shard']}-{one['epoch']}-"), one["op"], one["row"], one["unchanged"])
        for message, one in zip(messages, records, strict=True)
    ]


def test_a_row_that_is_there_is_u_and_a_message_is_no_state(log: LogWriter, tmp_path: Path) -> None:
    write(log, order(0, Op.COPY, 1), order(1, Op.CREATE, 2), order(2, Op.UPDATE, 1), order(3, Op.DELETE, 2))
    log.append(ops([operation(None, 0x9000, OperationKind.MESSAGE)], (MESSAGES, 0, [row(0, Op.MESSAGE, prefix="p")])))
    lines = cat(tmp_path)[:4]
    found, _ = read_all(reader_of(tmp_path, **LATEST))
    assert [record(one) for one in found] == [line | {"op": op} for line, op in zip(lines, "uuud", strict=True)]


def test_a_change_of_a_key_is_a_delete_of_the_old_one_and_the_new_row(log: LogWriter, tmp_path: Path) -> None:
    write(log, order(0, Op.CREATE, 1, note="n"), order(1, Op.UPDATE, 7, note="n", __before=[("id", "1")]))
    assert shown(tmp_path, columns=["id as key", "note"]) == [
        ("0", "u", {"key": 1, "note": "n"}, []),
        ("1-old", "d", {"key": 1}, []),
        ("1", "u", {"key": 7, "note": "n"}, []),
    ]
    messages, _ = read_all(reader_of(tmp_path, **LATEST))
    assert [message.groups for message in messages] == [('[1,"1"]',), ('[1,"1"]',), ('[1,"7"]',)]
    assert len({message.position for message in messages}) == 3


def test_the_new_row_of_a_changed_key_takes_what_is_unchanged_from_the_old_row(log: LogWriter, tmp_path: Path) -> None:
    old = [("id", "1"), ("note", "n"), ("total", "1.50")]
    write(log, order(0, Op.UPDATE, 7, __before=old, __unchanged=["note"]), order(1, Op.UPDATE, 8, __before=old[:1]))
    write(log, order(0, Op.UPDATE, 9, __before=old[:1], __unchanged=["note"]), number=2)
    messages, _ = read_all(reader_of(tmp_path, columns=["id", "note"], **LATEST))
    assert [(one["row"], one["before"], one["unchanged"]) for one in map(record, messages[1::2])] == [
        ({"id": 7, "note": "n"}, None, []),
        ({"id": 8, "note": None}, None, []),
        ({"id": 9}, None, ["note"]),
    ]


def test_an_update_that_no_longer_matches_is_a_delete(log: LogWriter, tmp_path: Path) -> None:
    def old(**values: str | None) -> list[tuple[str, str | None]]:
        return list(values.items())

    write(
        log,
        order(0, Op.CREATE, 1, paid=True),
        order(1, Op.CREATE, 2, paid=False),
        order(2, Op.COPY, 3, paid=False),
        order(3, Op.UPDATE, 1, paid=False, note="n"),
        order(4, Op.UPDATE, 2, paid=False, __before=old(id="2", paid="f")),
        order(5, Op.UPDATE, 3, paid=False, __before=old(id="3", paid="t")),
        order(6, Op.UPDATE, 3, paid=False, __before=old(id="3", paid=None)),
        order(7, Op.UPDATE, 4, paid=False, __before=old(id="3")),
        order(8, Op.UPDATE, 5, paid=False, __before=old(id="4", paid="f")),
        order(9, Op.DELETE, 5),
        row(10, Op.TRUNCATE),
    )
    assert shown(tmp_path, where="paid = true")[1:] == [
        ("3", "d", {"id": 1}, []),
        ("5", "d", {"id": 3}, []),
        ("7-old", "d", {"id": 3}, []),
        ("7", "d", {"id": 4}, []),
        ("9", "d", {"id": 5}, []),
        ("10", "t", None, []),
    ]


def test_a_row_that_an_application_replaces_is_an_update(log: LogWriter, tmp_path: Path) -> None:
    own = schema(9, "own", *ORDERS.columns)
    own = type(own)(own.table_id, own.version, SourceId(0), own.namespace, own.name, own.columns, own.key, own.key)
    for paid in (True, False):
        log.append(
            ops(
                [operation(None, 0x1000, OperationKind.APPEND) | {"source": 0}],
                (own, 0, [row(0, Op.CREATE, id=1, **NOTHING | {"paid": paid})]),
            )
        )
    assert [op for _, op, _, _ in shown(tmp_path, where="paid = true")] == ["u", "d"]


def test_a_table_without_a_key_is_left_out_by_name(log: LogWriter, tmp_path: Path) -> None:
    plain = schema(9, "plain", *ITEMS.columns)
    plain = type(plain)(plain.table_id, plain.version, plain.source, plain.namespace, plain.name, plain.columns)
    write(log, order(0, Op.CREATE, 1))
    log.append(ops([operation(2, 0x2000)], (plain, 0, [row(0, Op.CREATE, id=1)])))
    for tables in (None, ["public.*"]):
        reader = reader_of(tmp_path, tables=tables, **LATEST)
        assert [record(message)["table"] for message in read_all(reader)[0]] == ["public.orders"]
        assert reader.left_out() == ["public.plain"]
    assert reader_of(tmp_path, tables=["public.orders"], **LATEST).left_out() == []
    with pytest.raises(DeliveryError, check=coded("invalid_consumer")):
        Definition.parse({"name": "a", "tables": ["public.*"]} | LATEST).check([ORDERS, plain])
    Definition.parse({"name": "a"} | LATEST).check([ORDERS, plain])


class Killed:
    """A consumer that is killed and opened again: what was noted since `sync` may be lost."""

    def __init__(self, folder: Path, *, unsettled_bytes_max: int = UNSETTLED_BYTES_MAX, **fields: Any) -> None:
        self.folder = folder
        self.unsettled_bytes_max = unsettled_bytes_max
        self.durable = Stored(Definition.parse({"name": "search"} | fields), "ab", State.begin(0))
        self.noted: list[tuple[list[Change], dict[str, Letter]]] = []
        self.open()

    def open(self) -> None:
        stored = Stored.from_json(json.loads(json.dumps(self.durable.to_json())))
        reader = StreamReader(str(self.folder / "wal"))
        self.running = Running(
            "shop",
            StreamId(UUID(int=1)),
            stored,
            reader,
            b"k" * 32,
            self._note,
            dict,
            unsettled_bytes_max=self.unsettled_bytes_max,
        )
        self.running.save()
        self.sync()

    def _note(self, name: str, changes: list[Change], letters: dict[str, Letter]) -> None:
        assert name == "search"
        self.noted.append((changes, letters))

    def sync(self, count: int | None = None) -> None:
        for changes, letters in self.noted[:count]:
            self.durable.apply(changes, letters)
        self.noted = []

    def take(self, count: int) -> list[dict[str, Any]]:
        """Receive, and wait until the log was read."""
        is_more = True
        found: list[dict[str, Any]] = []
        while is_more and not found:
            found, is_more = self.running.take(count)
        return [one | {"record": json.loads(one["record"])} for one in found]

    def settle(self, how: str, *ack_ids: str) -> list[str]:
        def do(machine: Consumer, ids: Any) -> Any:
            return machine.ack(ids) if how == "ack" else machine.nack(ids, 0)

        return [one["status"] for one in self.running.settle(list(ack_ids), do)]


def test_undelivered_states_of_a_key_are_replaced_by_the_newest(log: LogWriter, tmp_path: Path) -> None:
    consumer = Killed(tmp_path, **LATEST, max_deliver=2)
    for number in range(1, 40):
        write(log, order(0, Op.UPDATE, 1, total=number), order(1, Op.UPDATE, 2, total=number), number=number)
    write(log, order(0, Op.DELETE, 2), number=40)
    first, second = consumer.take(1), consumer.take(10)
    assert [(one["record"]["op"], one["record"]["row"]["id"]) for one in first + second] == [("u", 1), ("d", 2)]
    assert first[0]["record"]["row"]["total"] == "39.00"
    # A change while its key is in flight is a new message, which replaces the older one if that comes back.
    write(log, order(0, Op.UPDATE, 1, total=50), number=50)
    assert consumer.take(10) == []
    assert consumer.settle("nack", first[0]["ack_id"]) == ["nacked"]
    assert consumer.settle("ack", first[0]["ack_id"]) == ["superseded"]
    (newer,) = consumer.take(10)
    assert (newer["deliveries"], newer["record"]["row"]["total"]) == (1, "50.00")
    assert consumer.settle("ack", newer["ack_id"], second[0]["ack_id"]) == ["acked"] * 2
    shown = consumer.running.shown()
    assert shown["lag"]["records"] == 0
    assert (shown["delivered"], shown["acked"], shown["in_flight"]) == (3, 2, 0)


def test_what_is_written_after_a_restart_replaces_what_was_in_flight(log: LogWriter, tmp_path: Path) -> None:
    consumer = Killed(tmp_path, **LATEST)
    write(log, order(0, Op.CREATE, 1), order(1, Op.CREATE, 2))
    old = consumer.take(10)
    consumer.sync()
    consumer.open()
    assert consumer.settle("nack", *(one["ack_id"] for one in old)) == ["nacked"] * 2
    write(log, order(0, Op.UPDATE, 1, note="new"), order(1, Op.CREATE, 3), number=2)
    found = consumer.take(10)
    assert [(one["record"]["row"]["id"], one["record"]["row"]["note"]) for one in found] == [
        (2, None),
        (1, "new"),
        (3, None),
    ]


@pytest.mark.parametrize("returns", ["never", "nacked", "killed"])
def test_what_is_unchanged_comes_from_a_row_that_was_inserted_again_unseen(
    log: LogWriter, tmp_path: Path, returns: str
) -> None:
    consumer = Killed(tmp_path, **WHERE)
    write(log, order(0, Op.CREATE, 1, paid=True, note="first"))
    (first,) = consumer.take(10)
    consumer.settle("ack", first["ack_id"])
    consumer.sync()
    write(log, order(0, Op.DELETE, 1), number=2)
    gone = consumer.take(10) if returns != "never" else []
    write(log, order(0, Op.CREATE, 1, paid=False, note="second"), number=3)
    write(log, order(0, Op.UPDATE, 1, paid=True, __unchanged=["note"]), number=4)
    if returns == "nacked":
        assert consumer.take(10) == []
        consumer.settle("nack", gone[0]["ack_id"])
    if returns == "killed":
        consumer.open()
    (newest,) = consumer.take(10)
    assert (newest["record"]["op"], newest["record"]["row"]["note"]) == ("u", "second")
    assert newest["record"]["unchanged"] == []


def test_a_dead_letter_with_a_newer_state_is_dropped_by_a_retry(log: LogWriter, tmp_path: Path) -> None:
    consumer = Killed(tmp_path, **LATEST, max_deliver=1)
    write(log, order(0, Op.CREATE, 1), order(1, Op.CREATE, 2))
    messages = consumer.take(10)
    consumer.settle("nack", *(one["ack_id"] for one in messages))
    write(log, order(0, Op.UPDATE, 1, note="n"), number=2)
    (newer,) = consumer.take(10)
    statuses = [one["status"] for one in consumer.running.settle_dead(None, retry=True)]
    assert statuses == ["dropped", "retried"]
    (retried,) = consumer.take(10)
    assert retried["id"] == messages[1]["id"]
    assert consumer.settle("ack", newer["ack_id"], retried["ack_id"]) == ["acked"] * 2
    assert consumer.running.shown()["dead"] == 0


def test_a_truncate_drops_what_waits_and_is_delivered(log: LogWriter, tmp_path: Path) -> None:
    write(log, order(0, Op.CREATE, 1), order(1, Op.CREATE, 2), row(2, Op.TRUNCATE), order(3, Op.CREATE, 2))
    consumer = Killed(tmp_path, **LATEST)
    (truncate,) = consumer.take(10)
    assert (truncate["record"]["op"], truncate["group"]) == ("t", None)
    consumer.settle("ack", truncate["ack_id"])
    assert [one["record"]["row"]["id"] for one in consumer.take(10)] == [2]


LEAFY = replace(ORDERS, partitioned=True)


def leafy(index: int, op: Op, id_: int, leaf: int, **values: Any) -> dict[str, Any]:
    return order(index, op, id_, __partition_oid=leaf, **values)


def left(index: int, leaf: int) -> dict[str, Any]:
    return row(index, Op.PARTITION_LEFT, __partition_oid=leaf, __before=[("partition", f"public.orders_{leaf}")])


def test_a_partition_that_left_drops_what_waits_of_its_rows(log: LogWriter, tmp_path: Path) -> None:
    changes = [leafy(0, Op.CREATE, 1, 11), leafy(1, Op.CREATE, 2, 12), left(2, 11), leafy(3, Op.CREATE, 1, 12)]
    log.append(ops([operation(1, 0x1000)], (LEAFY, 0, changes)))
    consumer = Killed(tmp_path, **LATEST)
    found = []
    while messages := consumer.take(10):
        consumer.settle("ack", *(one["ack_id"] for one in messages))
        found.append([(one["record"]["op"], one["record"]["partition_oid"]) for one in messages])
    assert found == [[("u", 12)], [("x", 11)], [("u", 12)]]


def test_a_row_that_moved_comes_before_its_partition_leaves(log: LogWriter, tmp_path: Path) -> None:
    consumer = Killed(tmp_path, **LATEST)
    log.append(ops([operation(1, 0x1000)], (LEAFY, 0, [leafy(0, Op.CREATE, 1, 11)])))
    consumer.settle("ack", *(one["ack_id"] for one in consumer.take(10)))
    changes = [leafy(0, Op.DELETE, 1, 11), leafy(1, Op.CREATE, 1, 12), left(2, 12)]
    log.append(ops([operation(2, 0x2000)], (LEAFY, 0, changes)))
    (moved,) = consumer.take(10)
    assert (moved["record"]["op"], moved["record"]["partition_oid"]) == ("u", 12)
    consumer.settle("ack", moved["ack_id"])
    assert [one["record"]["op"] for one in consumer.take(10)] == ["x"]


@pytest.mark.sampled
def test_a_receiver_whose_memory_is_full_has_the_rows_of_the_partitions_that_are_left(
    log: LogWriter, tmp_path: Path, seeds: Seeds
) -> None:
    chance = random.Random(seeds.kept_or_new(1))
    source: dict[int, int] = {}
    for number in range(1, 120):
        changes = []
        for key in chance.sample(range(40), 3):
            leaf = chance.choice((11, 12, 13))
            if source.get(key, leaf) != leaf:
                changes.append(leafy(len(changes), Op.DELETE, key, source.pop(key)))
            changes.append(leafy(len(changes), Op.UPDATE if key in source else Op.CREATE, key, leaf))
            source[key] = leaf
        if not number % 10:
            leaf = chance.choice((11, 12, 13))
            changes.append(left(len(changes), leaf))
            source = {key: known for key, known in source.items() if known != leaf}
        log.append(ops([operation(number, 0x1000 * number)], (LEAFY, 0, changes)))
    consumer = Killed(tmp_path, unsettled_bytes_max=SMALL * ENTRY_BYTES, **LATEST)
    received: dict[int, int] = {}
    while messages := consumer.take(5):
        for one in (message["record"] for message in messages):
            if one["op"] == "x":
                received = {key: leaf for key, leaf in received.items() if leaf != one["partition_oid"]}
            else:
                received.pop(one["row"]["id"], None)
                received |= {one["row"]["id"]: one["partition_oid"]} if one["op"] == "u" else {}
        consumer.settle("ack", *(one["ack_id"] for one in messages))
    assert received == source


@pytest.mark.sampled
def test_keys_that_memory_cannot_hold_come_once_with_their_newest_state(log: LogWriter, tmp_path: Path) -> None:
    keys, rounds = 50, 4
    for number in range(1, rounds * keys + 1):
        write(log, order(0, Op.UPDATE, number % keys, total=number), number=number)
    write(log, *(order(key, Op.UPDATE, key, total=1000 + key) for key in range(0, keys, 2)), number=number + 1)
    consumer = Killed(tmp_path, unsettled_bytes_max=SMALL * ENTRY_BYTES, **LATEST)
    received, most = [], 0
    while messages := consumer.take(7):
        received += [(one["record"]["row"]["id"], one["record"]["row"]["total"]) for one in messages]
        most = max(most, consumer.running.machine.unsettled)
        assert consumer.running.shown()["lag"]["records"] > 0
        consumer.settle("ack", *(one["ack_id"] for one in messages))
    wanted = {key: f"{1000 + key if key % 2 == 0 else rounds * keys - keys + key}.00" for key in range(keys)}
    assert sorted(received) == sorted(wanted.items())
    assert most <= SMALL + keys // 2  # a transaction is read whole
    assert consumer.running.shown()["lag"]["records"] == 0


class Table:
    """The rows of orders as a client has them."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def apply(self, op: str, row: Any, unchanged: list[str]) -> None:
        if op == "t":
            self.rows = {}
        elif op == "d":
            self.rows.pop(row["id"], None)
        else:
            known = self.rows.get(row["id"], {})
            self.rows[row["id"]] = row | {name: known[name] for name in unchanged if name in known}


class Workload:
    """Changes of orders drawn from a seed."""

    def __init__(self, draw: random.Random, log: LogWriter, keys: int) -> None:
        self.draw, self.log, self.keys = draw, log, keys
        self.rows: dict[int, dict[str, Any]] = {}
        self.number = 0

    def step(self) -> None:
        self.number += 1
        rows = [self._change(index) for index in range(self.draw.randint(1, 5))]
        shard = len(self.log.shards()) - 1
        self.log.append(
            ops(
                [operation(self.number, 0x1000 * self.number)],
                (ORDERS, 0, rows),
                (ITEMS, shard, [row(len(rows), Op.CREATE, id=self.number)]),
            )
        )

    def _change(self, index: int) -> dict[str, Any]:
        draw = self.draw
        key = draw.randrange(self.keys)
        values: dict[str, Any] = {
            "paid": draw.random() < 0.6,
            "note": f"{self.number}.{index}",
            "total": None,
            "ratio": None,
        }
        if draw.random() < 0.02:
            self.rows = {}
            return row(index, Op.TRUNCATE)
        if key not in self.rows:
            self.rows[key] = values
            return row(index, Op.CREATE, id=key, **values)
        if draw.random() < 0.2:
            del self.rows[key]
            return row(index, Op.DELETE, id=key)
        other = draw.randrange(self.keys)
        if other not in self.rows and draw.random() < 0.5:
            self.rows[other] = values
            del self.rows[key]
            return row(index, Op.UPDATE, id=other, __before=[("id", str(key))], **values)
        if draw.random() < 0.5:
            self.rows[key] = values | {"note": self.rows[key]["note"]}
            return row(index, Op.UPDATE, id=key, __unchanged=["note"], **values | {"note": None})
        self.rows[key] = values
        return row(index, Op.UPDATE, id=key, **values)


@pytest.mark.sampled
@pytest.mark.parametrize("keys", [6, 30])
@pytest.mark.parametrize("fields", [LATEST, WHERE], ids=["all", "where"])
def test_a_client_has_the_newest_rows_whatever_is_killed(
    log: LogWriter,
    tmp_path: Path,
    fields: dict[str, Any],
    keys: int,
    seeds: Seeds,
) -> None:
    draw = random.Random(seeds.kept_or_new(1))
    workload, client = Workload(draw, log, keys), Table()
    unsettled_bytes_max = SMALL * ENTRY_BYTES if keys > SMALL else UNSETTLED_BYTES_MAX
    consumer = Killed(
        tmp_path,
        unsettled_bytes_max=unsettled_bytes_max,
        tables=["public.orders"],
        max_deliver=0,
        ack_wait_ms=100,
        **fields,
    )
    held: list[dict[str, Any]] = []
    emptied: set[str] = set()

    def receive(count: int) -> bool:
        messages = consumer.take(count)
        for one in messages:
            facts = one["record"]
            if facts["op"] == "t" and one["id"] in emptied:
                continue  # a kill may have forgotten its ack, and not that of a later row
            if facts["op"] == "t":
                emptied.add(one["id"])
            client.apply(facts["op"], facts["row"], facts["unchanged"])
        held.extend(messages)
        return bool(messages)

    for _ in range(seeds.count(400, quick=120)):
        match draw.randrange(8):
            case 0 | 1 | 2:
                workload.step()
            case 3 | 4:
                receive(draw.randint(1, 4))
            case 5 if held:
                consumer.settle("ack", held.pop(draw.randrange(len(held)))["ack_id"])
            case 6 if held:
                consumer.settle("nack", held.pop(draw.randrange(len(held)))["ack_id"])
            case 7 if draw.random() < 0.5:
                consumer.sync(draw.randint(0, len(consumer.noted)))
                consumer.open()
            case _:
                consumer.sync()
    deadline = time.monotonic() + 60
    while consumer.running.shown()["lag"]["records"]:  # what a kill made fly again expires
        assert time.monotonic() < deadline
        receive(10)
        consumer.settle("ack", *(one["ack_id"] for one in held))
    wanted = {
        key: {"id": key, **values, "paid": "t" if values["paid"] else "f"}
        for key, values in workload.rows.items()
        if fields is LATEST or values["paid"]
    }
    if fields is WHERE:  # an update may leave a value unchanged that no matching record had
        assert client.rows.keys() == wanted.keys()
        wanted = {key: {name: wanted[key][name] for name in row} for key, row in client.rows.items()}
    assert client.rows == wanted


def test_a_lack_of_descriptors_is_an_error_of_its_code_and_passes(
    tmp_path: Path, log: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the threads that push, for ever."""
    write(log, order(1, Op.CREATE, 1))
    consumer = Killed(tmp_path, **LATEST)
    position = StreamReader.persisted_upto

    def refused(_reader: StreamReader) -> Seq:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(StreamReader, "persisted_upto", refused)
    with pytest.raises(MillstreamError, check=coded("system_limit")):
        consumer.take(10)
    assert consumer.running.error == "Too many open files"
    monkeypatch.setattr(StreamReader, "persisted_upto", position)
    assert [one["record"]["row"]["id"] for one in consumer.take(10)] == [1]
    assert consumer.running.error is None
