"""How remote appends are told apart if a stream doesn't support keys."""

from __future__ import annotations

import json

import pytest

from millstream.client.appends import NOTHING_KNOWN, AppendRequest
from millstream.client.http_requests import Call, append_call
from millstream.client.http_retries import HttpAnswer, Lost, Nap, appended
from millstream.errors import (
    AppendOutcomeUnknown,
    DiskFull,
    Fenced,
    InvalidValue,
    MillstreamError,
    PartialWrite,
    ReadOnly,
    RoutingError,
    SessionsNeedOneWriter,
    UnknownTable,
)
from millstream.serving.problem_documents import status_of

PROBLEM = {"content-type": "application/problem+json"}
NO_KEYS = HttpAnswer(
    409, PROBLEM, json.dumps({"code": SessionsNeedOneWriter.code, "detail": "several writers"}).encode()
)


def calls_of(
    answers: list[HttpAnswer | Lost], *, key: str | None, deadline_s: float = 0.0
) -> tuple[list[Call], MillstreamError]:
    """Return the calls, one for each answer, and the final error."""
    request = AppendRequest("web", "t", [{"x": 1}], deadline_s, idempotency_key=key)
    tables, _ = request.columns(NOTHING_KNOWN)
    steps = appended(append_call(request, tables), request, url="http://there", now=lambda: 0.0)
    asked = []
    wish = next(steps)
    for answer in answers:
        assert isinstance(wish, Call)
        asked.append(wish)
        try:
            wish = steps.send(answer)
        except MillstreamError as ended:
            return asked, ended
        if isinstance(wish, Nap):
            wish = steps.send(None)
    raise AssertionError("it goes on")


def test_a_key_of_the_clients_own_is_left_out_where_a_stream_has_several_writers() -> None:
    asked, ended = calls_of([NO_KEYS, Lost("cut off", sent=True)], key=None)
    assert ["Idempotency-Key" in call.headers for call in asked] == [True, False]
    assert asked[0].body == asked[1].body
    assert isinstance(ended, AppendOutcomeUnknown)


@pytest.mark.parametrize("error", [PartialWrite(""), RoutingError("", code="no_route_matches")])
def test_what_routing_says_is_told_and_not_tried_again(error: MillstreamError) -> None:
    """A partial write was sent again until the deadline, also to the sinks that had taken it."""
    said = HttpAnswer(int(status_of(error)), PROBLEM, json.dumps({"code": error.code, "detail": "no"}).encode())
    asked, ended = calls_of([said], key=None, deadline_s=30.0)
    assert (len(asked), type(ended), ended.code) == (1, type(error), error.code)


@pytest.mark.parametrize("error", [ReadOnly, Fenced])
def test_who_doesnt_lead_says_who_does(error: type[MillstreamError]) -> None:
    """The server answered 500, after which the outcome of the write is unknown."""
    facts = {"code": error.code, "detail": "no", "details": {"leader": "b"}}
    said = HttpAnswer(int(status_of(error(""))), PROBLEM, json.dumps(facts).encode())
    asked, ended = calls_of([said], key=None, deadline_s=30.0)
    assert (len(asked), type(ended), ended.details["leader"]) == (1, error, "b")
    _, ended = calls_of([Lost("cut off", sent=True), said], key=None, deadline_s=30.0)
    assert isinstance(ended, AppendOutcomeUnknown), "the try before may be there"


@pytest.mark.parametrize("error", [DiskFull, UnknownTable, InvalidValue])
def test_a_refusal_of_a_second_try_does_not_settle_the_first(error: type[MillstreamError]) -> None:
    """A full disk was told as "nothing was appended", though the first try's answer alone was lost."""
    said = HttpAnswer(int(status_of(error(""))), PROBLEM, json.dumps({"code": error.code, "detail": "no"}).encode())
    _, ended = calls_of([Lost("cut off", sent=True), said], key=None, deadline_s=30.0)
    assert type(ended) is (error if error is InvalidValue else AppendOutcomeUnknown)


def test_a_partial_write_is_no_status_that_clients_try_again() -> None:
    assert 400 <= status_of(PartialWrite("")) < 500
    assert status_of(PartialWrite("")) not in {408, 425, 429}


def test_a_key_of_the_callers_is_not() -> None:
    asked, ended = calls_of([NO_KEYS], key="mine")
    assert len(asked) == 1
    assert isinstance(ended, SessionsNeedOneWriter)
