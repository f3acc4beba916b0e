"""What tells appends from afar apart, where a stream knows no keys."""

from __future__ import annotations

import json

from millstream.app.remote.steps import Answer, Call, Lost, append_call, appended
from millstream.errors import AppendOutcomeUnknown, MillstreamError, SessionsNeedOneWriter

PROBLEM = {"content-type": "application/problem+json"}
NO_KEYS = Answer(409, PROBLEM, json.dumps({"code": SessionsNeedOneWriter.code, "detail": "several writers"}).encode())


def calls_of(answers: list[Answer | Lost], *, key: str | None) -> tuple[list[Call], MillstreamError]:
    """What is asked, one answer after the other, and how it ends."""
    call = append_call("web", "t", [{"x": 1}], session=None, number=None, idempotency_key=key, keep_valid_rows=False)
    steps = appended(call, url="http://there", deadline_s=0.0, now=lambda: 0.0)
    asked = []
    wish = next(steps)
    for answer in answers:
        assert isinstance(wish, Call)
        asked.append(wish)
        try:
            wish = steps.send(answer)
        except MillstreamError as ended:
            return asked, ended
    raise AssertionError("it goes on")


def test_a_key_of_the_clients_own_is_left_out_where_a_stream_has_several_writers() -> None:
    asked, ended = calls_of([NO_KEYS, Lost("cut off", sent=True)], key=None)
    assert ["Idempotency-Key" in call.headers for call in asked] == [True, False]
    assert asked[0].body == asked[1].body
    assert isinstance(ended, AppendOutcomeUnknown)


def test_a_key_of_the_callers_is_not() -> None:
    asked, ended = calls_of([NO_KEYS], key="mine")
    assert len(asked) == 1
    assert isinstance(ended, SessionsNeedOneWriter)
