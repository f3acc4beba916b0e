"""The parts of requests other than the body (headers, parameters, path), and sending answers.

For paths outside FastAPI.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final
from urllib.parse import parse_qsl, unquote_to_bytes

from millstream.client.call_results import SERVER_DEADLINE_S_MAX
from millstream.errors import InvalidValue, MillstreamError, UsageError
from millstream.ingest.append_requests import check_write_id
from millstream.model.replication import AckLevel
from millstream.model.writes import WriteId
from millstream.serving.problem_documents import encoded, headers_of, problem_of

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
"""ASGI's `send`."""
ENDING: Final = "millstream.ending"
"""Key in an ASGI scope: an `asyncio.Event`, set once the server takes no more requests. Answers that would go on for
ever end then."""
NEEDS_ITS_CLIENT: Final = "millstream.needs_its_client"
"""Key in an ASGI scope, set by the application: a client that has ended its side of the connection is gone. It is for
requests whose answer takes something that another client would get."""
_PARAMETERS_MAX: Final = 32
_DIGITS_MAX: Final = 18


class ClientStalledError(Exception):
    """The client reads nothing of an answer that goes on: its connection is dropped, with the events that wait for it."""


def headers_said(scope: Scope) -> dict[bytes, bytes]:
    """Return a request's headers by lower-case name; the last of repeated ones."""
    return dict(scope["headers"])


def parameters_said(scope: Scope) -> dict[str, str]:
    """Return the parameters of a request's address; `UsageError` if they can't be parsed."""
    text: bytes = scope.get("query_string", b"")
    if not text:
        return {}
    try:
        return dict(
            parse_qsl(text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_PARAMETERS_MAX)
        )
    except ValueError as error:
        raise UsageError(f"the address's parameters can't be read: {error}") from error


def text_of_path(part: bytes) -> str:
    """Return a part of a path with percent signs decoded; `UsageError` if it isn't text."""
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError as error:
        raise UsageError("a name in the address isn't UTF-8") from error


def deadline_said(parameters: Mapping[str, str], default_s: float) -> float:
    """Return how long the request may wait for room."""
    text = parameters.get("deadline_s")
    if text is None:
        return default_s
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= SERVER_DEADLINE_S_MAX:
        raise UsageError(f"deadline_s={text!r}: it is a number of seconds, from 0 to {SERVER_DEADLINE_S_MAX:g}")
    return found


def level_said(headers: Mapping[bytes, bytes]) -> AckLevel | None:
    """Return the acknowledgement level in the request's headers, if any; `UsageError` if they name no level."""
    text = headers.get(b"millstream-acks")
    return None if text is None else AckLevel.parse(text.decode("latin-1").strip())


def choice_said(parameters: Mapping[str, str], name: str, choices: Mapping[str, bool], default: str) -> bool:
    """Return the choice of a parameter."""
    text = parameters.get(name, default)
    if text not in choices:
        raise UsageError(f"{name}={text!r}: it is one of {', '.join(choices)}")
    return choices[text]


def write_id_said(headers: Mapping[bytes, bytes]) -> WriteId | None:
    """Return the write's identity in the request's headers, if any.

    Raises:
        UsageError: a session without a number, a number without a session, or both a session and a key.
        InvalidValue, IngestError (`rows_too_large`): the number isn't one from 1, or a text is empty or too long.
    """
    key, session = headers.get(b"idempotency-key"), headers.get(b"millstream-session")
    number = headers.get(b"millstream-session-number")
    if key is None and session is None and number is None:
        return None
    if (session is None) != (number is None) or (key is None) == (session is None):
        raise UsageError(
            "a write is identified by Millstream-Session with Millstream-Session-Number, or by Idempotency-Key alone"
        )
    if session is None or number is None:
        assert key is not None
        return _checked(WriteId(key=_text("Idempotency-Key", key)))
    if not number.isdigit() or len(number) > _DIGITS_MAX or int(number) < 1:
        raise InvalidValue("Millstream-Session-Number isn't a whole number from 1")
    return _checked(WriteId(session=_text("Millstream-Session", session), number=int(number)))


def key_said(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the idempotency key in the headers of a request other than a write, if any. Raises as `write_id_said`."""
    key = headers.get(b"idempotency-key")
    return None if key is None else _checked(WriteId(key=_text("Idempotency-Key", key))).key


def _checked(write_id: WriteId) -> WriteId:
    # Checked here, for one request: in a batch it would refuse all of them.
    check_write_id(write_id)
    return write_id


def _text(header: str, value: bytes) -> str:
    try:
        text = value.decode().strip()
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{header} isn't UTF-8") from error
    if not text:
        raise InvalidValue(f"{header} is empty")
    return text


async def answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Send a whole answer."""
    if body:
        headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer_problem(send: Send, error: MillstreamError) -> None:
    """Send an error as a problem document."""
    document = problem_of(error)
    await answer(send, document["status"], encoded(document), headers_of(document["status"]))
