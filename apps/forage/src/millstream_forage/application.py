"""Forage over HTTP: the paths, the checks of what callers send, and the answers. `server` runs it.

The engine blocks until records are durable, so each call has a thread, and the event loop stays free.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millstream import Guard, MillstreamError
from millstream_forage.answers import Answer, Feed, ItemAnswer, SignalAnswer, as_json
from millstream_forage.engine import LIMIT, PAGE, ForageEngine
from millstream_forage.errors import ForageError, InvalidField
from millstream_forage.problems import (
    BodyTooLarge,
    Bug,
    CrossSite,
    MalformedBody,
    MethodNotAllowed,
    UnknownPath,
    response_of,
)
from millstream_forage.tables import STREAM

BODY_MAX: Final = 256 * 1024
"""Bytes of a body: ten times the longest item."""
DIGITS_MAX: Final = 40
"""Digits of a number that is read exactly: twice as many as the greatest id has."""
NUMBER: Final = re.compile(r"-?[0-9]{1,40}", re.ASCII)
PAGE_FILES: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
"""The page: for everybody, because a browser can't send a token with an address. It asks for the token itself."""
PAGE_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src data:; script-src 'self'; style-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
ANSWER_HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Fields: TypeAlias = Mapping[str, Any]
"""A body, or the parameters of an address: their texts."""

logger = logging.getLogger("millstream_forage")


@dataclass(frozen=True, slots=True)
class Call:
    """A path's method."""

    answer: Callable[[ForageEngine, Fields], Answer]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    checks_fields: bool = True
    """False if the engine knows the fields of the body."""


def signal(engine: ForageEngine, body: Fields) -> Answer:
    """Record a signal."""
    rest = {name: body.get(name) for name in CALLS["POST", "/signal"].optional}
    return engine.signal(body["user_id"], body["item_id"], body["signal_type"], **rest)


def hide(engine: ForageEngine, body: Fields) -> Answer:
    """Change what a user hides."""
    return engine.change_hidden(body["user_id"], body["target"], body["kind"])


def feed(engine: ForageEngine, query: Fields) -> Answer:
    """Return a feed."""
    return engine.feed(
        number("user", query["user"]),
        number("limit", query.get("limit", str(LIMIT))),
        number("seed", query["seed"]) if "seed" in query else None,
        preview=truth("preview", query.get("preview", "false")),
    )


def items(engine: ForageEngine, query: Fields) -> Answer:
    """Return a page of items."""
    after = number("after", query["after"]) if query.get("after") else None
    return engine.items(after, number("limit", query.get("limit", str(PAGE))))


def browse_tasks(engine: ForageEngine, query: Fields) -> Answer:
    """Return what an agent should look for."""
    return engine.browse_tasks(number("user", query["user"]) if "user" in query else None)


CALLS: Final[dict[tuple[str, str], Call]] = {
    ("GET", "/feed"): Call(feed, ("user",), ("limit", "seed", "preview")),
    ("GET", "/items"): Call(items, (), ("after", "limit")),
    ("GET", "/browse-tasks"): Call(browse_tasks, (), ("user",)),
    ("POST", "/signal"): Call(
        signal, ("user_id", "item_id", "signal_type"), ("duration_ms", "impression_id", "idempotency_key")
    ),
    ("POST", "/hide"): Call(hide, ("user_id", "target", "kind")),
    ("POST", "/items"): Call(lambda engine, body: engine.add_item(body), checks_fields=False),
    ("POST", "/discovery/heartbeat"): Call(lambda engine, _: engine.heartbeat()),
}
METRICS: Final = ("GET", "/metrics")


class Application:
    """The ASGI application of one engine. One event loop."""

    def __init__(self, engine: ForageEngine, guard: Guard) -> None:
        self._engine: Final = engine
        self._guard: Final = guard
        self._page: Final = {
            path: (files("millstream_forage").joinpath("page", name).read_bytes(), media)
            for path, (name, media) in PAGE_FILES.items()
        }
        self._registry: Final = CollectorRegistry()
        self._seconds: Final = Histogram(
            "forage_request_seconds", "Duration of requests.", ["method", "path", "status"], registry=self._registry
        )
        self._slots: Final = Counter(
            "forage_feed_slots", "Slots of feeds that were answered.", ["label", "explore"], registry=self._registry
        )
        self._signals: Final = Counter(
            "forage_signals", "Signals that were taken.", ["signal_type", "duplicate"], registry=self._registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        began_s = time.perf_counter()
        try:
            response = await self._answer(scope, receive)
        except (ForageError, MillstreamError) as error:
            response = response_of(error)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            response = response_of(Bug("this is a bug of the server"))
        known = {path for _, path in CALLS} | set(PAGE_FILES) | {METRICS[1]}
        series = (
            scope["method"] if scope["method"] in {"GET", "HEAD", "POST"} else "other",
            scope["path"] if scope["path"] in known else "other",
            str(response.status_code),
        )
        self._seconds.labels(*series).observe(time.perf_counter() - began_s)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        self._guard.check_origin(scope)
        method, path = scope["method"], scope["path"]
        if path in self._page and method in {"GET", "HEAD"}:
            content, media = self._page[path]
            return Response(content, headers=PAGE_HEADERS, media_type=media)
        call = CALLS.get((method, path))
        if call is None and (method, path) != METRICS:
            raise no_such_call(method, path)
        if (b"sec-fetch-site", b"cross-site") in scope["headers"]:
            raise CrossSite("a page of another site has made the request")
        await self._guard.check_token(scope, STREAM, "write" if method == "POST" else "read")
        if call is None:
            return Response(generate_latest(self._registry), headers=ANSWER_HEADERS, media_type=METRICS_TYPE)
        fields = json_object(await body_of(receive)) if method == "POST" else parameters(scope["query_string"])
        if call.checks_fields:
            check_names(fields, call)
        answer = await asyncio.to_thread(call.answer, self._engine, fields)
        self._count(fields, answer)
        created = isinstance(answer, ItemAnswer) and not answer.duplicate
        content = json.dumps(as_json(answer), ensure_ascii=False, separators=(",", ":")).encode()
        return Response(content, 201 if created else 200, ANSWER_HEADERS, "application/json")

    def _count(self, fields: Fields, answer: Answer) -> None:
        if isinstance(answer, Feed):
            for item in answer.items:
                self._slots.labels(item.label, str(item.explore).lower()).inc()
        elif isinstance(answer, SignalAnswer):
            self._signals.labels(fields["signal_type"], str(answer.duplicate).lower()).inc()


def no_such_call(method: str, path: str) -> ForageError:
    """Return the error for a path that doesn't exist, or that doesn't take the method."""
    allowed = sorted(taken for taken, known in [*CALLS, METRICS] if known == path)
    if path in PAGE_FILES:
        allowed = ["GET", "HEAD"]
    if not allowed:
        return UnknownPath(f"there is no path {path[:100]}")
    return MethodNotAllowed(f"{path} doesn't take {method}", ", ".join(allowed))


async def body_of(receive: Receive) -> bytes:
    """Return a request's body.

    Raises:
        BodyTooLarge: it has more bytes than `BODY_MAX`.
        MalformedBody: the client is gone before its end.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise MalformedBody("the body never arrived whole")
        body += message.get("body", b"")
        if len(body) > BODY_MAX:
            raise BodyTooLarge(f"the body has more than {BODY_MAX} bytes")
        if not message.get("more_body", False):
            return bytes(body)


def json_object(body: bytes) -> Fields:
    """Return the object of a body.

    Raises:
        MalformedBody: it is no JSON.
        InvalidField: it is JSON, and no object, or a field is given twice.
    """
    try:
        value = json.loads(body.decode(), parse_int=whole, parse_constant=no_number, object_pairs_hook=once_each)
    except (ValueError, RecursionError) as error:  # a text that isn't UTF-8 is a ValueError, too
        raise MalformedBody(f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidField("body", "must be an object")
    return value


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; of two fields of one name another reader might take the other one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise InvalidField(next(name for name in found if names.count(name) > 1)[:100], "is given twice")
    return found


def whole(text: str) -> int | float:
    """Return the number of a text of digits; those that are far too long only about."""
    return int(text) if len(text) <= DIGITS_MAX else float(text)


def no_number(text: str) -> float:
    """Refuse the names of numbers that JSON doesn't have, and Python's reader does."""
    raise ValueError(f"{text} is no number of JSON")


def parameters(query: bytes) -> Fields:
    """Return the parameters of an address.

    Raises:
        InvalidField: a parameter is given twice.
    """
    found: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name in found:
            raise InvalidField(name, "is given twice")
        found[name] = value
    return found


def check_names(fields: Fields, call: Call) -> None:
    """Check that no field is missing, and none unknown."""
    for name in call.required:
        if name not in fields:
            raise InvalidField(name, "is missing")
    for name in fields:
        if name not in call.required + call.optional:
            raise InvalidField(name, "is unknown here")


def number(name: str, text: str) -> int:
    """Return the whole number of a parameter."""
    if not NUMBER.fullmatch(text):
        raise InvalidField(name, "must be a whole number")
    return int(text)


def truth(name: str, text: str) -> bool:
    """Return the truth value of a parameter."""
    if text not in {"true", "false"}:
        raise InvalidField(name, "must be true or false")
    return text == "true"
