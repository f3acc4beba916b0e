"""Each error class has a status that agrees with its `retry`, and a problem document."""

from __future__ import annotations

import json

import pytest
from tests.test_errors import CODES, KINDS, Kind

from millstream.errors import Retry
from millstream.serving.problem_documents import encoded, headers_of, plain_problem, problem_of, status_of


@pytest.mark.parametrize("kind", KINDS, ids=CODES)
def test_every_error_has_a_status_and_a_document(kind: Kind) -> None:
    error = kind[0]("it happened", code=kind[1], hint="do this", column="a", inner=ValueError("x"))
    status = status_of(error)
    assert 400 <= status < 600
    if error.retry is Retry.BACKOFF:
        # A client that waits and repeats the request may succeed, so no status may tell it otherwise.
        assert status in {408, 409, 429, 503}, status
    elif error.retry is Retry.NEVER:
        assert status not in {429, 503} or error.code == "stale_epoch"
    document = json.loads(encoded(problem_of(error)))
    assert document["type"] == f"urn:millstream:error:{error.code}"
    assert (document["status"], document["detail"], document["code"]) == (status, "it happened", error.code)
    assert (document["hint"], document["retry"]) == ("do this", error.retry.value)
    assert document["details"] == {"column": "a", "inner": "x"}
    assert document["title"]
    assert "\n" not in document["title"]
    headers = dict(headers_of(status))
    assert headers[b"content-type"] == b"application/problem+json"
    assert (b"retry-after" in headers) == (status in {429, 503})


def test_what_has_no_error_of_ours_is_a_document_too() -> None:
    document = plain_problem(404)
    assert (document["type"], document["title"], document["status"]) == ("about:blank", "Not Found", 404)
