"""Arrow Flight with a real server: durable bulk appends, records between tokens, and refused callers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import ssl
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, cast

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from tests.app.homes import done, make_home, wait_for
from tests.serving.servers import Authority, served

import millstream
from millstream.app.log_readers import open_reader
from millstream.app.open_home import home_appender
from millstream.errors import InvalidValue, MillstreamError
from millstream.home.home import Home
from millstream.leadership.node_calls import ACTION
from millstream.model.access import Rights
from millstream.model.ids import Epoch
from millstream.model.operations import Appended
from millstream.model.replication import Hello, NodeName
from millstream.replication.flight.wire import FollowRequest
from millstream.serving import server as serving_server
from millstream.serving.access import Access, Credentials, TokenBook
from millstream.serving.flight import read
from millstream.serving.flight import server as flight_server
from millstream.serving.flight.requests import Cutter, GetRequest, PutRequest
from millstream.serving.flight.server import FlightServer, FlightService, flight_error
from millstream.serving.server import _renewing
from millstream.serving.tls_files import Renewal
from millstream.testing.errors import coded
from millstream.workers import Worker

KEYED = '[streams.shop]\n[streams.shop.keys]\n"public.orders" = ["id"]\n[streams.web]\n'
ROWS = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])


def batch(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": ids, "name": [f"n{number}" for number in ids]}, schema=ROWS)


@contextlib.contextmanager
def running(folder: Path, text: str = KEYED, access: Access | None = None) -> Iterator[tuple[Home, FlightServer]]:
    home = Home(make_home(folder, text))
    home.prepare()
    appender = home_appender(home)
    access = access or Access(None)
    server = FlightServer(home, access, appender, ("127.0.0.1", 0), None)
    try:
        yield home, server
    finally:
        server.end()
        appender.close()
        access.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, FlightServer]]:
    with running(tmp_path_factory.mktemp("flight") / "home") as found:
        yield found


def client(server: FlightServer) -> fl.FlightClient:
    return fl.connect(f"grpc://{server.address}")


def descriptor(**facts: Any) -> fl.FlightDescriptor:
    return fl.FlightDescriptor.for_command(json.dumps(facts))


def put(
    server: FlightServer,
    where: fl.FlightDescriptor,
    *batches: pa.RecordBatch,
    metadata: dict[int, dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Write the batches; return the server's messages about them."""
    with client(server) as caller:
        writer, reader = caller.do_put(where, batches[0].schema)
        for place, rows in enumerate(batches):
            own = (metadata or {}).get(place)
            if own is None:
                writer.write_batch(rows)
            else:
                writer.write_with_metadata(rows, json.dumps(own).encode())
        writer.done_writing()
        told = []
        with contextlib.suppress(fl.FlightError):
            while (line := reader.read()) is not None:
                told.append(json.loads(line.to_pybytes()))
        writer.close()  # raises the call's error
        return told


def refused(call: Any) -> dict[str, Any]:
    with pytest.raises(fl.FlightError) as caught:
        call()
    facts: dict[str, Any] = json.loads(caught.value.extra_info)
    assert facts["code"] in str(caught.value)
    return facts


def records(server: FlightServer, **facts: Any) -> pa.Table:
    with client(server) as caller:
        return caller.do_get(fl.Ticket(json.dumps(facts))).read_all()


def test_each_batch_is_an_operation_and_told_of_once_it_is_durable(server: tuple[Home, FlightServer]) -> None:
    home, flight = server
    told = put(flight, fl.FlightDescriptor.for_path("shop", "public.orders"), batch(1, 2), batch(3), batch(4, 5, 6))
    assert [line["batch"] for line in told] == [0, 1, 2]
    appended = [Appended.from_dict(line) for line in told]
    assert [one.row_count for one in appended] == [2, 1, 3]
    with millstream.open(home.path) as opened:
        found = [
            row["id"]
            for rows in opened.read("shop", table="public.orders", upto=appended[1].token)
            for row in rows.to_pylist()
        ]
        assert found[-3:] == [1, 2, 3]
        assert opened.token("shop") == appended[2].token


def test_records_come_between_tokens_in_order_and_the_same_each_time(server: tuple[Home, FlightServer]) -> None:
    _, flight = server
    where = fl.FlightDescriptor.for_path("shop", "public.reads")
    told = put(flight, where, *(batch(number, number + 1000) for number in range(50)))
    tokens = [line["token"] for line in told]
    part = records(flight, stream="shop", table="public.reads", after=tokens[9], upto=tokens[19])
    assert part["id"].to_pylist() == [found for number in range(10, 20) for found in (number, number + 1000)]
    assert part["__seq"].to_pylist() == sorted(part["__seq"].to_pylist())
    with client(flight) as caller:
        info = caller.get_flight_info(where)
        before = caller.do_get(info.endpoints[0].ticket).read_all()
        assert before.schema.equals(info.schema, check_metadata=True)
        wider = pa.record_batch({"id": [9], "more": [1.5]})
        put(flight, where, wider)
        # Rows and columns that came since aren't in it.
        assert caller.do_get(info.endpoints[0].ticket).read_all().equals(before, check_metadata=True)
        assert caller.get_flight_info(where).schema.names[-3:] == ["id", "name", "more"]
    now = records(flight, stream="shop", table="public.reads")
    assert now.slice(0, 100)["more"].null_count == 100
    assert now["more"].to_pylist()[-1] == 1.5


def test_what_there_is_is_listed_with_its_columns(server: tuple[Home, FlightServer]) -> None:
    _, flight = server
    put(flight, fl.FlightDescriptor.for_path("web", "clicks"), batch(1))
    put(flight, fl.FlightDescriptor.for_path("shop", "public.listed"), batch(1))
    with client(flight) as caller:
        found = {tuple(info.descriptor.path): info for info in caller.list_flights()}
        assert {(b"shop", b"public.listed"), (b"web", b"public.clicks")} <= found.keys()
        assert found[b"web", b"public.clicks"].schema.names[-2:] == ["id", "name"]
        of_web = list(caller.list_flights(b"web"))
        assert [tuple(info.descriptor.path) for info in of_web] == [(b"web", b"public.clicks")]
        assert caller.do_get(of_web[0].endpoints[0].ticket).read_all()["id"].to_pylist() == [1]


def test_a_refused_batch_ends_the_transfer_and_loses_nothing_before_it(server: tuple[Home, FlightServer]) -> None:
    _, flight = server
    where = fl.FlightDescriptor.for_path("shop", "public.refused")
    put(flight, where, batch(1))
    with client(flight) as caller:
        writer, reader = caller.do_put(where, pa.schema([("id", pa.string())]))
        writer.write_batch(pa.record_batch({"id": ["x"]}))
        # The error comes before the caller ends: a sender that reads after each batch needn't wait for ever.
        told = json.loads(reader.read().to_pybytes())
        assert (told["batch"], told["error"]["code"]) == (0, "invalid_value")
        facts = refused(writer.close)
        assert (facts["code"], facts["details"]["batch"]) == ("invalid_value", 0)
    # So do errors that concern the whole transfer.
    for asked, code in (
        ({"stream": "nowhere", "table": "a"}, "unknown_stream"),
        ({"stream": "shop", "table": "a", "session": "s", "number": 0}, "invalid_value"),
    ):
        with client(flight) as caller:
            writer, reader = caller.do_put(descriptor(**asked), ROWS)
            writer.write_batch(batch(1))
            told = json.loads(reader.read().to_pybytes())
            assert (told["batch"], told["error"]["code"]) == (0, code)
            assert refused(writer.close)["code"] == code
    keyed = fl.FlightDescriptor.for_path("shop", "public.orders")
    nulls = pa.record_batch({"id": pa.array([None], pa.int64()), "name": ["x"]}, schema=ROWS)
    with client(flight) as caller:
        writer, reader = caller.do_put(keyed, ROWS)
        lines: list[dict[str, Any]] = []
        for rows in (batch(70), nulls, batch(71)):
            writer.write_batch(rows)
            if len(lines) < 2:
                lines.append(json.loads(reader.read().to_pybytes()))
        assert lines[0]["rows"] == 1
        assert lines[1]["error"]["hint"] is not None
        refused(writer.close)
    ids = records(flight, stream="shop", table="public.orders")["id"].to_pylist()
    assert 70 in ids
    assert 71 not in ids


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (fl.FlightDescriptor.for_path("shop"), "a path is [stream, table]"),
        (fl.FlightDescriptor.for_path("shop", "public", "orders"), "a path is [stream, table]"),
        (fl.FlightDescriptor.for_command(b"{"), "isn't JSON"),
        (fl.FlightDescriptor.for_command(b"[1]"), "JSON object"),
        (descriptor(stream="shop"), "must be named"),
        (descriptor(stream="shop", table="a", tabel="b"), "there is no tabel"),
        (descriptor(stream="shop", table="a", session="s"), "go together"),
        (descriptor(stream="shop", table="a", session="s", number=1, idempotency_key="k"), "exclude"),
        (descriptor(stream="shop", table="a", number=True, session="s"), "number"),
        (descriptor(stream="shop", table="a", deadline_s="soon"), "seconds"),
        (descriptor(stream="shop", table="a", deadline_s=float("inf")), "seconds, up to"),
        (descriptor(stream="shop", table="a", keep_valid_rows=1), "true or false"),
        (descriptor(stream="shop", table="a", on_clash="row"), "rows or request"),
        (descriptor(stream="shop", table="a", on_clash="request", keep_valid_rows=True), "disagree"),
    ],
)
def test_what_can_not_be_understood_says_why(
    server: tuple[Home, FlightServer], where: fl.FlightDescriptor, says: str
) -> None:
    facts = refused(lambda: put(server[1], where, batch(1)))
    assert facts["code"] == "usage"
    assert says in facts["message"]


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"stream": "none", "table": "a"}, "unknown_stream"),
        ({"stream": "shop", "table": "nothing"}, "unknown_table"),
        ({"stream": "shop", "table": "orders", "after": "x"}, "invalid_token"),
        ({"stream": "shop", "table": "orders", "upto": 7}, "usage"),
        ({"stream": "shop", "table": "a b"}, "usage"),
    ],
)
def test_a_wrong_ticket_is_a_typed_error(server: tuple[Home, FlightServer], asked: dict[str, Any], code: str) -> None:
    put(server[1], fl.FlightDescriptor.for_path("shop", "public.orders"), batch(1))
    assert refused(lambda: records(server[1], **asked))["code"] == code


def test_a_large_batch_becomes_several_operations_in_order_and_memory_is_bounded(
    server: tuple[Home, FlightServer],
) -> None:
    _, flight = server
    count = 60_000
    wide = pa.record_batch({"id": range(count), "name": [f"{number:01000d}" for number in range(count)]}, schema=ROWS)
    assert wide.nbytes > 48 << 20
    told = put(flight, fl.FlightDescriptor.for_path("shop", "public.wide"), wide, batch(count))
    assert [line["batch"] for line in told][-1] == 1
    of_first = told[:-1]
    assert len(of_first) >= 3
    assert [line["row"] for line in of_first] == [
        sum(one["rows"] for one in of_first[:at]) for at in range(len(of_first))
    ]
    found = records(flight, stream="shop", table="public.wide")
    assert found["id"].to_pylist() == list(range(count + 1))


def of_another_shape(rows: pa.RecordBatch, was: bytes, is_now: bytes) -> pa.RecordBatch:
    """Return a batch with other bytes in one of its buffers, as an attacker would send."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as out:
        out.write_batch(rows)
    sent = sink.getvalue().to_pybytes()
    assert sent.count(was) == 1
    with pa.ipc.open_stream(pa.py_buffer(sent.replace(was, is_now))) as stream:
        return stream.read_next_batch()


def test_a_batch_that_is_not_what_it_says_is_refused_and_the_server_lives_on(server: tuple[Home, FlightServer]) -> None:
    """The server first computed the size of such a batch, which ended the process."""
    _, flight = server
    offsets, beyond = struct.pack("<3i", 0, 3, 7), struct.pack("<3i", 0, 1 << 30, (1 << 30) + 100)
    lists = pa.ListArray.from_arrays(pa.array([0, 3, 7], pa.int32()), pa.array(["a", "b"] * 4))
    rows = pa.RecordBatch.from_arrays([lists], ["x"])
    where = fl.FlightDescriptor.for_path("web", "shapes")
    put(flight, where, rows)
    assert refused(lambda: put(flight, where, of_another_shape(rows, offsets, beyond)))["code"] == "invalid_body"
    assert put(flight, where, rows)[0]["rows"] == 2


def test_what_a_batch_means_many_times_counts_as_often(server: tuple[Home, FlightServer]) -> None:
    """Written out, a dictionary's values took gigabytes before any check."""
    _, flight = server
    where = fl.FlightDescriptor.for_path("web", "often")

    def often(rows: int, size: int) -> pa.RecordBatch:
        column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * size]))
        return pa.RecordBatch.from_arrays([column], ["x"])

    assert refused(lambda: put(flight, where, often(20_000, 100_000)))["code"] == "rows_too_large"
    asked = PutRequest("web", "often")
    assert next(Cutter(asked).pieces(often(200, 100_000))).size_bytes > 200 * 100_000
    assert [piece.rows.num_rows for piece in Cutter(asked).pieces(nulls(9 << 20))] == [4 << 20, 4 << 20, 1 << 20]
    assert all(piece.size_bytes > 4 << 20 for piece in Cutter(asked).pieces(nulls(9 << 20)))


def nulls(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(rows)], ["x"])


def test_batches_without_rows_are_none(server: tuple[Home, FlightServer]) -> None:
    _, flight = server
    told = put(flight, fl.FlightDescriptor.for_path("shop", "public.empty"), batch(), batch(1), batch())
    assert [line["batch"] for line in told] == [1]


def test_a_sender_that_is_killed_has_sent_what_was_told(server: tuple[Home, FlightServer]) -> None:
    _, flight = server
    code = f"""
import os, json, pyarrow as pa, pyarrow.flight as fl
caller = fl.connect("grpc://{flight.address}")
rows = pa.record_batch({{"id": [1], "name": ["a"]}})
writer, reader = caller.do_put(fl.FlightDescriptor.for_path("shop", "public.killed"), rows.schema)
for _ in range(3):
    writer.write_batch(rows)
    reader.read()
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert records(flight, stream="shop", table="public.killed").num_rows == 3
    # Its call is over, and so are those of readers that leave in mid-stream.
    with client(flight) as caller:
        reading = caller.do_get(fl.Ticket(json.dumps({"stream": "shop", "table": "public.wide"})))
        reading.read_chunk()
        reading.cancel()
    slots = flight._home.config.flight.calls_max
    wait_for(lambda: (flight._reads._value, flight._writes._value) == (slots, slots))


def test_a_transfer_that_is_sent_again_is_appended_once(server: tuple[Home, FlightServer]) -> None:
    _, flight = server
    for asked in ({"session": "nightly", "number": 1}, {"idempotency_key": "nightly"}):
        where = descriptor(stream="web", table=f"public.again_{len(asked)}", **asked)
        first = put(flight, where, batch(1), batch(2), batch(3))
        again = put(flight, where, batch(1), batch(2), batch(3), batch(4))
        assert [line["duplicate"] for line in again] == [True, True, True, False]
        assert [line["first"] for line in again[:3]] == [line["first"] for line in first]
        found = records(flight, stream="web", table=f"public.again_{len(asked)}")
        assert found["id"].to_pylist() == [1, 2, 3, 4]
    # Resume in the middle, each batch with a number or key of its own.
    where = descriptor(stream="web", table="public.own", session="own", number=1)
    assert [line["number"] for line in put(flight, where, batch(1), batch(2))] == [1, 2]
    told = put(flight, where, batch(2), batch(3), metadata={0: {"number": 2}})
    assert [(line["number"], line["duplicate"]) for line in told] == [(2, True), (3, False)]
    facts = refused(lambda: put(flight, where, batch(1), metadata={0: {"nmber": 2}}))
    assert facts["code"] == "usage"


def stalled(flight: FlightServer) -> tuple[fl.FlightClient, Any]:
    """Return a reader that has begun to read far more than connections buffer, and then stops."""
    text = "x" * 1000
    rows = pa.record_batch({"text": [f"{number}{text}" for number in range(8000)]})
    put(flight, fl.FlightDescriptor.for_path("shop", "public.long"), *[rows] * 8)
    caller = client(flight)
    reading = caller.do_get(fl.Ticket(b'{"stream": "shop", "table": "public.long"}'))
    reading.read_chunk()
    return caller, reading


def test_a_reader_that_takes_nothing_is_cut_off_and_others_are_not(tmp_path: Path) -> None:
    with running(tmp_path / "home") as (_, flight):
        flight._readers._within_s = 1.0
        watching = threading.Thread(target=flight._readers.watch, args=(flight.port, flight._closing), daemon=True)
        with client(flight) as other:
            list(other.list_flights())
            _, reading = stalled(flight)
            slots = flight._home.config.flight.calls_max
            assert flight._reads._value == slots - 1
            watching.start()
            wait_for(lambda: flight._reads._value == slots)
            # Cutting one leaves the others' connections alone.
            assert list(other.list_flights())
        with pytest.raises(fl.FlightError):
            reading.read_all()


def test_a_server_ends_while_a_reader_takes_nothing(tmp_path: Path) -> None:
    with running(tmp_path / "home") as (_, flight):
        idle, _ = stalled(flight)
        flight.end(within_s=1.0)
        assert not any(thread.name == "flight-ends" for thread in threading.enumerate())
        idle.close()


class RenewedOnce:
    """Certificates that are renewed at the first look."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> bool:
        self.looks += 1
        return self.looks == 1


def test_a_renewal_is_made_once_there_are_threads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No certificate was taken from then on, or Flight never listened again."""
    start, starts = Worker.start, Counter[str]()
    lacking = {"flight-renews": 1, "flight-ends": 1, "flight-callers": 2}

    def start_some(worker: Worker) -> Worker:
        starts[worker.name] += 1
        if lacking.get(worker.name) == starts[worker.name]:
            raise OSError(errno.EAGAIN, "no more threads can be started")
        return start(worker)

    async def renew(service: FlightService) -> None:
        renewing = asyncio.create_task(_renewing(cast("Renewal", RenewedOnce()), service))
        await asyncio.to_thread(wait_for, lambda: renewing.done() or starts["flight-callers"] == 4)
        assert not renewing.done()
        renewing.cancel()

    def watching() -> int:
        return sum(thread.name == "flight-callers" for thread in threading.enumerate())

    monkeypatch.setattr(serving_server, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(flight_server, "_AGAIN_S", 0.05)
    with running(tmp_path / "home") as (home, flight):
        service = FlightService(
            lambda address: FlightServer(home, flight._access, flight._appender, address, None), ("127.0.0.1", 0)
        )
        before = watching()
        with contextlib.ExitStack() as ending:
            ending.callback(service.end)
            with monkeypatch.context() as patched:
                patched.setattr(Worker, "start", start_some)
                asyncio.run(renew(service))
            wait_for(lambda: watching() == before)
            with fl.connect(f"grpc://{service.address}") as caller:
                list(caller.list_flights())
        assert starts == {"flight-renews": 2, "flight-ends": 1, "flight-callers": 4}


def test_a_renewed_certificate_reaches_flight(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("server")
    text = f"[streams.shop]\n[flight]\nlisten = '127.0.0.1:0'\n[http]\ntls_certificate = '{certificate}'\ntls_key = '{key}'\n"
    home = make_home(tmp_path / "home", text)
    with served(home) as running_server:
        port = int(running_server.flight.rpartition(":")[2])

        def seen() -> str:
            try:
                return ssl.get_server_certificate(("127.0.0.1", port)).strip()
            except OSError:
                return "none just now"

        assert seen() in certificate.read_text()
        files = authority.issue("renewed")
        renewed = files[0].read_text()
        files[1].replace(key)
        files[0].replace(certificate)
        wait_for(lambda: seen() in renewed, seconds=60)


def test_more_calls_than_may_run_are_told_to_come_again(tmp_path: Path) -> None:
    with running(tmp_path / "home", KEYED + "[flight]\ncalls_max = 1\n") as (_, flight):
        where = fl.FlightDescriptor.for_path("shop", "public.orders")
        with client(flight) as caller:
            writer, reader = caller.do_put(where, ROWS)
            writer.write_batch(batch(1))
            assert reader.read() is not None
            assert refused(lambda: put(flight, where, batch(2)))["code"] == "overloaded"
            # It doesn't block reads.
            assert records(flight, stream="shop", table="public.orders").num_rows == 1
            writer.close()
        wait_for(lambda: flight._writes._value == 1)
        assert len(put(flight, where, batch(2))) == 1


@pytest.mark.siege
def test_a_sender_of_nothing_is_told_so_and_gives_its_place_back(tmp_path: Path) -> None:
    """It kept its place for ever. A sender that reads messages ends its call itself; another is cut off."""
    with running(tmp_path / "home", KEYED + '[flight]\ncalls_max = 1\nidle_timeout = "3s"\n') as (_, flight):
        where = fl.FlightDescriptor.for_path("shop", "public.orders")
        put(flight, where, batch(0))  # the first one takes long
        for listens in (True, False):
            with client(flight) as caller:
                writer, reader = caller.do_put(where, ROWS)
                writer.write_batch(batch(1))
                told = json.loads(reader.read().to_pybytes())
                assert told.get("rows") == 1, told
                if listens:
                    error = json.loads(reader.read().to_pybytes())["error"]
                    assert error["code"] == "transfer_idle"
                    assert "[flight] idle_timeout" in error["hint"]
                    writer.close()
                wait_for(lambda: flight._writes._value == 1)
                if not listens:
                    with pytest.raises(fl.FlightError):
                        writer.close()
        assert len(put(flight, where, batch(2))) == 1
    with millstream.open(tmp_path / "home") as opened:
        assert sum(found.num_rows for found in opened.read("shop", table="public.orders")) == 4


def test_who_takes_no_word_of_what_it_sent_gives_its_place_back(tmp_path: Path) -> None:
    """Messages wait for their caller, the next batches behind them, and the call with them."""
    with running(tmp_path / "home", KEYED + '[flight]\ncalls_max = 1\nidle_timeout = "1500ms"\n') as (_, flight):
        put(flight, fl.FlightDescriptor.for_path("shop", "public.orders"), batch(1))
        wrong = pa.record_batch({"id": ["no number"] * 20_000})
        with client(flight) as caller:
            writer, _ = caller.do_put(
                descriptor(stream="shop", table="public.orders", keep_valid_rows=True), wrong.schema
            )

            def send() -> None:
                for _ in range(100_000):  # a busy machine takes more before it ends the call
                    writer.write_batch(wrong)

            with pytest.raises(fl.FlightError):
                send()
            wait_for(lambda: flight._writes._value == 1)


def test_an_error_with_long_details_comes_as_what_it_is() -> None:
    """Headers have limited room: beyond it, the caller got only an error about headers that are too long."""
    for error in (
        InvalidValue(
            "ü" * 10_000, hint="h" * 10_000, rejected=[{"row": n, "reason": "no number"} for n in range(1000)], row=7
        ),
        InvalidValue("m", **{f"d{n}": "x" * 150 for n in range(100)}),
    ):
        told = flight_error(error)
        assert len(told.extra_info) * 4 / 3 + 3 * len(str(told).encode()) < 7_500
        facts = json.loads(told.extra_info)
        assert (facts["code"], facts["details"].get("row")) == ("invalid_value", error.details.get("row"))


def test_an_address_that_is_taken_is_a_typed_error(server: tuple[Home, FlightServer]) -> None:
    home, flight = server
    with pytest.raises(MillstreamError, check=coded("address_in_use"), match="Flight can't listen"):
        FlightServer(home, Access(None), flight._appender, ("127.0.0.1", flight.port), None)


def test_a_server_that_ends_lets_a_running_transfer_go_on_elsewhere(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    with running(tmp_path / "home") as (home, flight), client(flight) as caller:
        writer, reader = caller.do_put(fl.FlightDescriptor.for_path("shop", "public.ended"), ROWS)
        writer.write_batch(batch(0))
        told.append(json.loads(reader.read().to_pybytes()))
        ending = threading.Thread(target=flight.end)
        ending.start()
        wait_for(flight._closing.is_set)
        with contextlib.suppress(fl.FlightError):
            for number in range(1, 10_000):
                writer.write_batch(batch(number))
        with contextlib.suppress(fl.FlightError):
            while (line := reader.read()) is not None:
                told.append(json.loads(line.to_pybytes()))
        with pytest.raises(fl.FlightUnavailableError, match="the server ends"):
            writer.close()
        ending.join()
    with millstream.open(home.path) as opened:
        rows = sum(found.num_rows for found in opened.read("shop", table="public.ended"))
    assert rows >= len(told) >= 1


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    folder = tmp_path / "pki"
    folder.mkdir()
    return Authority(folder)


@pytest.mark.long
def test_flight_is_part_of_serve_with_tls_and_tokens_and_certificates(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("server")
    home = make_home(
        tmp_path / "home",
        f"""
[streams.shop]
[streams.web]
[http]
tokens_required = true
tls_certificate = "{certificate}"
tls_key = "{key}"
client_ca = "{authority.file}"
[http.clients]
"loader.example.com" = "loader"
[flight]
listen = "127.0.0.1:0"
""",
    )
    done(home, "token", "create", "--name", "loader", "--stream", "shop=read,write")
    reader = done(home, "token", "create", "--stream", "shop=read").strip()
    expired = done(home, "token", "create", "--all", "admin", "--expires", "1ms").strip()
    with served(home) as running_server:
        address = f"grpc+tls://localhost:{running_server.flight.rpartition(':')[2]}"

        def connected(name: str | None, token: str | None = None) -> fl.FlightClient:
            shown = {}
            if name is not None:
                files = authority.issue("client", [name])
                shown = {"cert_chain": files[0].read_bytes(), "private_key": files[1].read_bytes()}
            found = fl.connect(address, tls_root_certs=authority.file.read_bytes(), **shown)
            return found if token is None else _Authorized(found, token)

        orders = fl.FlightDescriptor.for_path("shop", "public.orders")
        hello = Hello(None, NodeName("b"), Epoch(0), {})
        following = fl.FlightDescriptor.for_command(FollowRequest("shop", 1 << 20, hello).command())
        with connected("loader.example.com") as loader:
            writer, told = loader.do_put(orders, ROWS)
            writer.write_batch(batch(1))
            assert json.loads(told.read().to_pybytes())["rows"] == 1
            writer.close()
            assert [tuple(info.descriptor.path) for info in loader.list_flights()] == [(b"shop", b"public.orders")]
        everything: dict[str, Callable[[Any], Any]] = {
            "do_put": lambda caller: _put_one(caller, orders),
            "do_get": lambda caller: caller.do_get(fl.Ticket(b'{"stream": "shop", "table": "orders"}')).read_all(),
            "get_flight_info": lambda caller: caller.get_flight_info(orders),
            "list_flights": lambda caller: list(caller.list_flights()),
            "do_action": lambda caller: list(caller.do_action(fl.Action(ACTION, b'{"op": "state", "stream": "shop"}'))),
            "list_actions": lambda caller: list(caller.list_actions()),
            "do_exchange": lambda caller: caller.do_exchange(following)[1].read_chunk(),
        }
        offered = {name for name in vars(FlightServer) if name in dir(fl.FlightServerBase)} - {"__init__", "__doc__"}
        assert {name for name in offered if not name.startswith("_")} == set(everything)
        for name, call in everything.items():
            with connected("stranger.example.com") as caller:
                assert refused(lambda: call(caller))["code"] == "unauthenticated", name  # noqa: B023 - called at once
            for token, code in ((expired, "access_token_expired"), ("mst_wrong", "unauthenticated")):
                with connected("loader.example.com", token) as caller:
                    assert refused(lambda: call(caller))["code"] == code, name  # noqa: B023 - as above
        with connected("stranger.example.com", reader) as caller:
            for name in ("do_put", "do_action", "do_exchange"):
                assert refused(lambda: everything[name](caller))["code"] == "forbidden", name  # noqa: B023 - as above
            assert everything["do_get"](caller).num_rows == 1
            web = fl.FlightDescriptor.for_path("web", "clicks")
            assert refused(lambda: caller.get_flight_info(web))["code"] == "forbidden"
        with connected(None) as nobody, pytest.raises(fl.FlightError):
            list(nobody.list_flights())
        done(home, "token", "revoke", "loader")

        def is_refused() -> bool:
            try:
                with connected("loader.example.com") as caller:
                    list(caller.list_flights())
            except fl.FlightUnauthenticatedError:
                return True
            return False

        wait_for(is_refused)


def _put_one(caller: Any, where: fl.FlightDescriptor) -> None:
    writer, _ = caller.do_put(where, ROWS)
    with contextlib.suppress(fl.FlightError):  # the call may have ended before; `close` says how
        writer.write_batch(batch(1))
    writer.close()


class _Authorized:
    """A client whose calls carry a token."""

    def __init__(self, inner: fl.FlightClient, token: str) -> None:
        self._inner = inner
        self._options = fl.FlightCallOptions(headers=[(b"authorization", b"Bearer " + token.encode())])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.close()

    def do_put(self, where: Any, schema: Any) -> Any:
        return self._inner.do_put(where, schema, options=self._options)

    def do_get(self, ticket: Any) -> Any:
        return self._inner.do_get(ticket, options=self._options)

    def get_flight_info(self, where: Any) -> Any:
        return self._inner.get_flight_info(where, options=self._options)

    def list_flights(self) -> Any:
        return self._inner.list_flights(options=self._options)

    def list_actions(self) -> Any:
        return self._inner.list_actions(options=self._options)

    def do_action(self, action: Any) -> Any:
        return self._inner.do_action(action, options=self._options)

    def do_exchange(self, where: Any) -> Any:
        return self._inner.do_exchange(where, options=self._options)


@pytest.mark.long
def test_flight_does_not_listen_for_other_machines_without_tls_and_tokens(tmp_path: Path) -> None:
    home = make_home(tmp_path / "home", "[streams.shop]\n[flight]\nlisten = '0.0.0.0:0'\n")
    command = [sys.executable, "-m", "millstream.cli", "--home", str(home), "serve"]
    environ = {**os.environ, "MILLSTREAM_HTTP__LISTEN": "127.0.0.1:0"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert ended.returncode == 2
    assert "error[unprotected]: [flight] listens on" in ended.stderr


def test_rights_are_asked_for_each_stream(tmp_path: Path) -> None:
    home = Home(make_home(tmp_path / "home", KEYED + "[http]\ntokens_required = true\n"))
    home.prepare()
    with home.open_catalog() as catalog:
        _, text = catalog.create_access_token(Rights.parse(["shop=write", "web=read"]))
    tokens = KEYED + "[http]\ntokens_required = true\n"
    with (
        running(tmp_path / "home", tokens, Access.of_home(home)) as (_, flight),
        _Authorized(client(flight), text) as caller,
    ):
        writer, told = caller.do_put(fl.FlightDescriptor.for_path("shop", "a"), ROWS)
        writer.write_batch(batch(1))
        assert told.read() is not None
        writer.close()
        assert list(caller.list_flights()) == []
        assert refused(lambda: _put_one(caller, fl.FlightDescriptor.for_path("web", "a")))["code"] == "forbidden"
        reading = fl.Ticket(b'{"stream": "shop", "table": "a"}')
        assert refused(lambda: caller.do_get(reading).read_all())["code"] == "forbidden"


def test_a_transfer_does_not_outlast_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token was checked only at the start of a transfer, which may be days ago."""
    monkeypatch.setattr(read, "BATCH_BYTES", 1 << 10)
    text = KEYED + "[http]\ntokens_required = true\n"
    home = Home(make_home(tmp_path / "home", text))
    home.prepare()
    with (
        home.open_catalog() as catalog,
        running(tmp_path / "home", text, Access(TokenBook(lambda: catalog, fresh_s=0.0))) as (_, flight),
    ):
        made, token = catalog.create_access_token(Rights.parse(["shop=read,write"]))
        with _Authorized(client(flight), token) as caller:
            writer, told = caller.do_put(fl.FlightDescriptor.for_path("shop", "a"), ROWS)
            writer.write_batch(batch(*range(1000)))
            assert told.read() is not None
            # Batches that the transport has taken are on their way, so check the server's own side.
            log, asked = open_reader(home, "shop"), GetRequest("shop", "a")
            reading = flight._sent(read.records(log, asked), "shop", "ipv4:127.0.0.1:1", Credentials(token))
            assert next(reading).num_rows
            catalog.revoke_access_token(made.id)
            assert refused(lambda: next(reading))["code"] == "unauthenticated"
            writer.write_batch(batch(40))
            assert json.loads(told.read().to_pybytes())["error"]["code"] == "unauthenticated"
            assert refused(writer.close)["code"] == "unauthenticated"
