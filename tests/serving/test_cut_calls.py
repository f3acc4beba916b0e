"""Calls that are cut before their answers, and sent again after a kill of the server: the rows are stored once."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from tests.app.homes import make_home, wait_for
from tests.serving.servers import Served, served
from tests.serving.serving_process import LINES, rows_of

from millstream.errors import LogError

pytestmark = pytest.mark.siege

TEXT = '[streams.web]\n[flight]\nlisten = "127.0.0.1:0"\n'
TABLE = "public.clicks"
BODY = b'{"id": 1}\n{"id": 2}\n'
BATCH = pa.record_batch({"id": [1, 2]})
IDENTITIES: dict[str, dict[str, Any]] = {
    "key": {"idempotency_key": "one call"},
    "session": {"session": "till", "number": 1},
}
HEADERS = {
    "key": {"Idempotency-Key": "one call"},
    "session": {"Millstream-Session": "till", "Millstream-Session-Number": "1"},
}


class _Kill(Exception):
    pass


@contextlib.contextmanager
def killed(home: Path) -> Iterator[Served]:
    """Run a server; kill it at the end of the block."""
    with contextlib.suppress(_Kill), served(home) as server:
        yield server
        raise _Kill  # a server whose block fails is killed


def ids(home: Path) -> list[int]:
    try:
        return [row["id"] for row in rows_of(home, TABLE)]
    except LogError as error:
        if error.code != "log_empty":
            raise
        return []  # its folder is made before its first group


def wait_until_stored(home: Path) -> None:
    wait_for(lambda: ids(home) == [1, 2], what=lambda: ids(home))


def wait_for_nothing(_home: Path) -> None:
    """Return at once: the kill may hit the server before, during or after the write."""


WAITS = {"after the write": wait_until_stored, "at once": wait_for_nothing}


def send_and_cut(server: Served, headers: dict[str, str], wait: Callable[[], None]) -> None:
    """Send a write over HTTP, wait, and reset the connection without reading the answer."""
    host, _, port = server.address.rpartition(":")
    lines = {"Host": "localhost", "Content-Length": str(len(BODY)), **LINES, **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"POST /v1/streams/web/tables/{TABLE} HTTP/1.1\r\n{head}\r\n".encode() + BODY)
        wait()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def post(server: Served, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    url = f"http://{server.address}/v1/streams/web/tables/{TABLE}"
    answer = httpx.post(url, content=body, headers={**LINES, **headers}, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("kind", HEADERS)
def test_a_call_over_http_that_was_cut_is_stored_once(tmp_path: Path, kind: str, wait: Callable[[Path], None]) -> None:
    home = make_home(tmp_path / "web", TEXT)
    with killed(home) as server:
        send_and_cut(server, HEADERS[kind], lambda: wait(home))
    stored = ids(home)
    assert stored in ([], [1, 2])
    with killed(home) as server:
        again = post(server, BODY, HEADERS[kind])
        assert again["duplicate"] is (stored != [])
        assert again["rows"] == 2
        wait_until_stored(home)
    with served(home) as server:  # the answer to the retry may have been lost, too
        last = post(server, BODY, HEADERS[kind])
        assert (last["duplicate"], last["first"]) == (True, again["first"])
        following = dict(HEADERS[kind])
        following[list(following)[-1]] = "2"
        assert post(server, b'{"id": 3}\n', following)["duplicate"] is False
    assert ids(home) == [1, 2, 3]


def opened_put(server: Served, kind: str) -> tuple[fl.FlightClient, Any, Any]:
    caller = fl.connect(f"grpc://{server.flight}")
    command = json.dumps({"stream": "web", "table": TABLE, **IDENTITIES[kind]})
    return caller, *caller.do_put(fl.FlightDescriptor.for_command(command), BATCH.schema)


def put(server: Served, kind: str, *batches: pa.RecordBatch) -> list[dict[str, Any]]:
    caller, writer, told = opened_put(server, kind)
    with caller:
        for batch in batches:
            writer.write_batch(batch)
        writer.done_writing()
        found = [json.loads(told.read().to_pybytes()) for _ in batches]
        writer.close()
    return found


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("kind", IDENTITIES)
def test_a_call_over_flight_that_was_cut_is_stored_once(
    tmp_path: Path, kind: str, wait: Callable[[Path], None]
) -> None:
    home = make_home(tmp_path / "web", TEXT)
    with killed(home) as server:
        caller, writer, _ = opened_put(server, kind)
        writer.write_batch(BATCH)
        wait(home)
    with contextlib.suppress(fl.FlightError, pa.ArrowException):
        writer.close()  # its server is gone
    caller.close()
    stored = ids(home)
    assert stored in ([], [1, 2])
    with killed(home) as server:
        (again,) = put(server, kind, BATCH)
        assert again["duplicate"] is (stored != [])
        wait_until_stored(home)
    with served(home) as server:
        last, following = put(server, kind, BATCH, pa.record_batch({"id": [3]}))
        assert (last["duplicate"], last["first"]) == (True, again["first"])
        assert following["duplicate"] is False
    assert ids(home) == [1, 2, 3]
