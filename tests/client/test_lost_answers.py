"""Calls other than appends whose answers are lost, without I/O: what is sent again, and what the second answer means."""

from __future__ import annotations

import json

import pytest

from millstream.client.consumers import Ask, call_of
from millstream.client.http_requests import Call
from millstream.client.http_retries import Exchange, HttpAnswer, Lost, Nap, asked
from millstream.errors import DeliveryError
from millstream.testing.errors import coded

URL = "http://127.0.0.1:8787"
_PROBLEM = {"code": "unknown_consumer", "detail": "stream web has no consumer 'search'"}
UNKNOWN = HttpAnswer(404, {"content-type": "application/problem+json"}, json.dumps(_PROBLEM).encode())


def sent_twice(what: str, *, is_sent: bool) -> tuple[Exchange[HttpAnswer], Call, Call]:
    """Return a request's steps after its first answer was lost, and both calls."""
    steps = asked(call_of("web", Ask(what, "search")), url=URL, patience_s=5.0, now=lambda: 0.0)
    first = next(steps)
    assert isinstance(first, Call)
    assert isinstance(steps.send(Lost("the connection was cut", sent=is_sent)), Nap)
    second = steps.send(None)
    assert isinstance(second, Call)
    return steps, first, second


def test_a_deletion_that_finds_nothing_after_a_lost_answer_has_succeeded() -> None:
    steps, _, _ = sent_twice("delete", is_sent=True)
    with pytest.raises(StopIteration) as ended:
        steps.send(UNKNOWN)
    assert ended.value.value.status == 204


def test_a_deletion_that_never_arrived_before_is_refused() -> None:
    steps, _, _ = sent_twice("delete", is_sent=False)
    with pytest.raises(DeliveryError, check=coded("unknown_consumer")):
        steps.send(UNKNOWN)


def test_after_two_seconds_a_warning_says_once_what_is_waited_for() -> None:
    """A call to a stopped server was silent for a minute."""
    now_s = 0.0
    steps = asked(Call("GET", "/status"), url=URL, patience_s=60.0, now=lambda: now_s)
    next(steps)
    warnings: list[tuple[float, str]] = []
    while now_s < 50.0:
        nap = steps.send(Lost("refused", sent=False))
        assert isinstance(nap, Nap)
        if nap.warning:
            warnings.append((now_s, nap.warning))
        now_s += nap.seconds
        steps.send(None)
    ((at_s, said),) = warnings
    assert at_s <= 2.0
    assert f"{URL} gives no answer: refused; the request is sent again for up to {60 - at_s:.0f} s" in said


def test_a_backfill_is_sent_again_under_its_key() -> None:
    """The server began a second one, or refused it because the first one ran."""
    _, first, second = sent_twice("backfill", is_sent=True)
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"]
    assert call_of("web", Ask("backfill", "search")).headers["Idempotency-Key"] != first.headers["Idempotency-Key"]
