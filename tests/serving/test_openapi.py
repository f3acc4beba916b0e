"""Every request that the OpenAPI document allows gets an answer that the document describes, and the server goes on.

schemathesis draws the requests from the document; CI draws the same ones each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from tests.app.homes import wait_for
from tests.serving.serving_process import Served, served, web_home

SENT_AS_IT_IS = ("application/vnd.apache.arrow.stream", "application/x-ndjson")
CHECKED = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
EXAMPLES = 25
"""Number of requests for each operation."""
ENDLESS = "/v1/streams/{stream}/tail"
"""An answer goes on until the client has gone: it is read for some seconds, by a few requests."""
ENDLESS_EXAMPLES, ENDLESS_S = 5, 2.0
ROWS_EXAMPLES = 100
"""Drawn rows are mostly refused."""


@schemathesis.serializer(*SENT_AS_IT_IS)
def as_it_is(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    bounds = 'request_timeout = "5s"\nbody_bytes_max = "1MiB"'
    with served(web_home(tmp_path_factory.mktemp("homes") / "web", bounds)) as found:
        # A server compiles the parser at its start, which takes a while if no machine code exists.
        with found.client() as client:
            wait_for(lambda: client.post("/write?db=web", content=b"warm f=1").status_code == 204)
        yield found


WRITES = ("/v1/streams/{stream}/tables/{table}", "/write", "/api/v2/write")


def sent(server: Served, operation: Any, mode: schemathesis.GenerationMode) -> Counter[int]:
    """Send requests that are drawn for an operation; return how many answers had which status."""
    found: Counter[int] = Counter()
    numbers = count()
    more = {"timeout": ENDLESS_S} if operation.path == ENDLESS else {}
    examples = {ENDLESS: ENDLESS_EXAMPLES, WRITES[0]: ROWS_EXAMPLES}.get(operation.path, EXAMPLES)

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        # Name an existing stream: all others are refused alike.
        if "stream" in (case.path_parameters or {}):
            case.path_parameters["stream"] = "web"
        # In every other request only the rows vary: drawn names are hardly ever a table's, nor drawn bodies
        # gzip's.
        if "table" in (case.path_parameters or {}) and (number := next(numbers)) % 2:
            case.path_parameters["table"] = f"drawn_{number}"
            for name in ("Content-Encoding", "Millstream-Session", "Millstream-Session-Number"):
                (case.headers or {}).pop(name, None)
        for name in ("db", "bucket"):
            if name in (case.query or {}):
                case.query[name] = "web"
        if mode is schemathesis.GenerationMode.POSITIVE and "Millstream-Acks" in (case.headers or {}):
            case.headers["Millstream-Acks"] = "local"  # this server has no follower: for any other level, 503 is right
        answer = case.call(base_url=server.url, **more)
        found[answer.status_code] += 1
        # `/healthz` rightly answers 503 as long as nothing runs but the server itself.
        healthy = [] if operation.path == "/healthz" else [not_a_server_error]
        case.validate_response(answer, checks=[*CHECKED, *healthy])

    send()
    return found


@pytest.mark.long
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_the_server_answers_as_its_document_says(server: Served, mode: schemathesis.GenerationMode) -> None:
    described = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in described.get_all_operations()]
    assert {operation.path for operation in operations} >= {*WRITES, ENDLESS}
    for operation in operations:
        if mode is schemathesis.GenerationMode.POSITIVE or operation.path in WRITES:
            found = sent(server, operation, mode)
            assert found, operation.path
            if mode is schemathesis.GenerationMode.POSITIVE and operation.path == WRITES[0]:
                assert found[200], found


def test_the_server_lives_on_and_has_what_it_took(server: Served) -> None:
    assert server.process.poll() is None
    assert server.post("after", [{"a": 1}]).status_code == 200
    assert [row["a"] for row in server.rows("after")] == [1]
