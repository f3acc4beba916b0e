"""Methods that the Flight server lacks, and ambiguous requests: clean errors, without a stack of the server's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from tests.app.homes import make_home

from millstream.app.open_home import home_appender
from millstream.errors import IngestError, InvalidValue
from millstream.home.home import Home
from millstream.leadership.node_calls import ACTION
from millstream.serving.access import Access
from millstream.serving.flight.requests import Cutter, PutRequest
from millstream.serving.flight.server import FlightServer
from millstream.testing.errors import coded

ROWS = pa.record_batch({"id": [1]})
DEEP = b"[" * 50_000
WHERE = fl.FlightDescriptor.for_path("web", "clicks")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fl.FlightClient]:
    home = Home(make_home(tmp_path_factory.mktemp("flight") / "home", "[streams.web]\n"))
    home.prepare()
    appender = home_appender(home)
    server = FlightServer(home, Access(None), appender, ("127.0.0.1", 0), None)
    try:
        with fl.connect(f"grpc://{server.address}") as made:
            yield made
    finally:
        server.end()
        appender.close()


def put(client: fl.FlightClient, command: dict[str, Any], metadata: bytes | None = None) -> None:
    writer, _ = client.do_put(fl.FlightDescriptor.for_command(json.dumps(command)), ROWS.schema)
    if metadata is None:
        writer.write_batch(ROWS)
    else:
        writer.write_with_metadata(ROWS, metadata)
    writer.close()


CALLS: dict[str, Callable[[fl.FlightClient], object]] = {
    "get_schema": lambda client: client.get_schema(WHERE),
    "get_schema of nothing": lambda client: client.get_schema(fl.FlightDescriptor.for_command(b"{")),
    "an unknown action": lambda client: list(client.do_action(fl.Action("CancelFlightInfo", b"x"))),
    "an action that says nothing": lambda client: list(client.do_action(fl.Action(ACTION, b""))),
    "an exchange with nothing to follow": lambda client: client.do_exchange(WHERE)[1].read_chunk(),
    "info of no table": lambda client: client.get_flight_info(fl.FlightDescriptor.for_command(b"{}")),
    "a ticket for nothing": lambda client: client.do_get(fl.Ticket(b"[]")).read_all(),
    "a ticket that nests deeply": lambda client: client.do_get(fl.Ticket(DEEP)).read_all(),
    "an action that nests deeply": lambda client: list(client.do_action(fl.Action(ACTION, DEEP))),
    "a handshake": lambda client: client.authenticate_basic_token("a", "b"),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_isnt_done_is_refused_without_a_stack(client: fl.FlightClient, what: str) -> None:
    with pytest.raises((pa.ArrowException, OSError)) as caught:
        CALLS[what](client)
    said = str(caught.value)
    assert "Traceback" not in said
    assert ".py" not in said
    assert "usage" in said or what == "a handshake", said  # which gRPC itself refuses
    if isinstance(caught.value, fl.FlightError):
        assert json.loads(caught.value.extra_info)["code"] == "usage"


def test_the_actions_are_listed(client: fl.FlightClient) -> None:
    assert [action.type for action in client.list_actions()] == [ACTION]


@pytest.mark.parametrize(
    ("command", "metadata"),
    [
        ({"idempotency_key": ""}, None),
        ({"idempotency_key": "  "}, None),
        ({"idempotency_key": "a"}, b'{"idempotency_key": ""}'),
        ({}, b'{"idempotency_key": ""}'),
        ({"session": "", "number": 1}, None),
        ({"idempotency_key": "a\0b"}, None),
    ],
)
def test_an_empty_key_is_refused_and_makes_no_two_callers_one(
    client: fl.FlightClient, command: dict[str, Any], metadata: bytes | None
) -> None:
    """The parts of their transfers had the same keys, so the second caller's rows were taken for the first one's."""
    for _ in range(2):
        with pytest.raises(fl.FlightError, match="invalid_value"):
            put(client, {"stream": "web", "table": "keyed", **command}, metadata)


def test_a_key_is_bounded_with_what_is_put_behind_it() -> None:
    with pytest.raises(IngestError, check=coded("rows_too_large")):
        list(Cutter(PutRequest("web", "t", idempotency_key="k" * 256)).pieces(ROWS))
    with pytest.raises(InvalidValue):
        list(Cutter(PutRequest("web", "t")).pieces(ROWS, b'{"idempotency_key": "\\u0000"}'))
