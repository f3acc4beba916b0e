"""Consumers over HTTP: made, received from, acknowledged and steered; see `millstream.delivery.service`.

A `receive` waits on a thread of its own, so that waiting clients keep no other request waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from millstream.delivery.running_consumer import Waiter
from millstream.errors import HttpError, InvalidValue
from millstream.model.access import Right
from millstream.protocol.delivery.messages import Kind
from millstream.serving.access import allow
from millstream.serving.openapi import KEY
from millstream.serving.request_bodies import SMALL_BYTES_MAX, ClientGoneError, Held, MemoryBudget, read_body
from millstream.serving.requests import ENDING, NEEDS_ITS_CLIENT, headers_said, key_said
from millstream.serving.row_writes import JSON_TYPE
from millstream.workers import Pool
from millstream.writers.home_consumers import HomeConsumers

if TYPE_CHECKING:
    from millstream.delivery.service import Answer
    from millstream.home.home import Home

_WAITING_MAX: Final = 512
"""Number of `receive` requests that wait at a time; others wait for their turn."""
_AT_ONCE: Final = 16
_GONE: Final = 499
"""Status of an answer without a waiting caller: it appears only in logs."""
_Text = Annotated[str | None, Query(max_length=4096)]

_TEXTS: Final = {"type": "array", "items": {"type": "string"}}
_PLACE: Final = {"type": "string", "description": "`earliest`, `latest`, a token or a time."}
_ACK_IDS: Final = {"ack_ids": {**_TEXTS, "maxItems": 10_000}}
_BODIES: Final[dict[str, dict[str, Any]]] = {
    "create": {
        "name": {"type": "string", "pattern": "[a-z][a-z0-9_-]{0,62}"},
        "tables": {**_TEXTS, "description": "Patterns of tables, as in `[source] tables`."},
        "where": {"type": "string", "description": "A condition on a row, as in a routing rule."},
        "columns": {**_TEXTS, "examples": [["id", "total as amount"]]},
        "kind": {
            "enum": [*Kind],
            "default": Kind.CHANGES,
            "description": "`latest`: the newest state of each key, instead of every change.",
        },
        "group_by": {"anyOf": [{"enum": ["key", "none"]}, _TEXTS], "default": "key"},
        "start": {**_PLACE, "default": "latest"},
        "ack_wait_ms": {"type": "integer", "minimum": 100, "maximum": 43_200_000, "default": 30_000},
        "max_deliver": {"type": "integer", "minimum": 0, "maximum": 1000, "default": 10},
        "max_ack_pending": {"type": "integer", "minimum": 1, "maximum": 100_000, "default": 1000},
        "backfill": {
            "type": "boolean",
            "default": False,
            "description": "Deliver the tables' rows as of `start` first.",
        },
        "webhook": {
            "type": "object",
            "description": "Deliver to a webhook: `[streams.S.consumers.C.webhook]` of the reference.",
        },
        "kafka": {"type": "object", "description": "Deliver to topics of Kafka: `[streams.S.consumers.C.kafka]`."},
        "redis": {"type": "object", "description": "Deliver to Redis streams: `[streams.S.consumers.C.redis]`."},
    },
    "receive": {
        "batch_size": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
        "wait_for_ms": {"type": "integer", "minimum": 0, "maximum": 30_000, "default": 0},
    },
    "ack": _ACK_IDS,
    "nack": {
        **_ACK_IDS,
        "delay_ms": {"type": "integer", "minimum": 0, "maximum": 86_400_000, "default": 0},
        "failed": {
            "type": "boolean",
            "default": True,
            "description": "False for messages that the client didn't look at: it doesn't count for `max_deliver`.",
        },
    },
    "extend": {**_ACK_IDS, "ack_wait_ms": {"type": "integer", "minimum": 100, "maximum": 43_200_000}},
    "rewind": {"to": _PLACE},
    "backfill": {
        "tables": {**_TEXTS, "description": "Patterns of tables; by default all of the consumer's."},
        "where": {"type": "string", "description": "A condition on a row, in addition to the consumer's."},
    },
    "retry": {"ids": {"anyOf": [_TEXTS, {"const": "all"}]}},
    "drop": {"ids": {"anyOf": [_TEXTS, {"const": "all"}]}},
}
_BACKFILL_KEY: Final = {
    **KEY,
    "description": "A key of the caller's making: sent again with it, the request begins no other backfill.",
}
_ACTIONS: Final[dict[str, tuple[str, Right, str]]] = {
    "receive": ("receive", Right.READ, "Messages that can be delivered now, or once there are some."),
    "ack": ("ack", Right.READ, "Settle messages."),
    "nack": ("nack", Right.READ, "Return messages, to be delivered again."),
    "extend": ("extend", Right.READ, "Let deliveries expire later."),
    "pause": ("pause", Right.ADMIN, "Deliver nothing until `resume`."),
    "resume": ("resume", Right.ADMIN, "Deliver again."),
    "rewind": ("rewind", Right.ADMIN, "Begin at another place of the log."),
    "backfill": ("backfill", Right.ADMIN, "Deliver the rows of tables as of the cursor, before later records."),
    "dead/retry": ("retry", Right.ADMIN, "Deliver dead messages again."),
    "dead/drop": ("drop", Right.ADMIN, "Forget dead messages."),
}


class Consumers:
    """The consumers' side of a home's server: `router` has its endpoints.

    The application has an `Access` in `app.state.access`.
    """

    def __init__(self, home: Home, budget: MemoryBudget) -> None:
        self._home = home
        self._budget = budget
        self.of_home: Final = HomeConsumers(home)
        self._waiting = Pool(_WAITING_MAX, thread_name_prefix="receive")
        self._threads = Pool(_AT_ONCE, thread_name_prefix="consumers")
        self._waiters: set[Waiter] = set()
        self.router: Final = APIRouter(prefix="/v1/streams/{stream}/consumers", tags=["consume"])
        self._add()

    def close(self) -> None:
        """End every wait, and give the consumers up if this process has them."""
        for waiter in tuple(self._waiters):
            waiter.leave()
        self.of_home.close()
        self._waiting.shutdown(wait=False)
        self._threads.shutdown(wait=False)

    def _add(self) -> None:
        may_read, may_change = [Depends(allow(Right.READ))], [Depends(allow(Right.ADMIN))]
        router = self.router

        @router.get("", dependencies=may_read, summary="A stream's consumers.")
        async def listed(stream: str) -> Response:
            return _json((await self._asked(stream, "list")).body)

        @router.post(
            "",
            dependencies=may_change,
            status_code=201,
            response_class=Response,
            summary="Make a consumer.",
            responses={200: {"description": "It exists, with the same definition."}},
            openapi_extra=_body_of("create"),
        )
        async def create(request: Request, stream: str) -> Response:
            async def do(body: Any) -> Response:
                made = await self._asked(stream, "create", body=body)
                return _json(made.body, 201 if made.is_new else 200)

            return await self._with_body(request, stream, do)

        @router.get("/{consumer}", dependencies=may_read, summary="A consumer's definition and progress.")
        async def show(stream: str, consumer: str) -> Response:
            return _json((await self._asked(stream, "show", consumer)).body)

        @router.delete(
            "/{consumer}",
            dependencies=may_change,
            status_code=204,
            response_class=Response,
            summary="Remove a consumer, with its dead letters.",
        )
        async def delete(stream: str, consumer: str) -> Response:
            await self._asked(stream, "delete", consumer)
            return Response(status_code=204)

        @router.get("/{consumer}/dead", dependencies=may_change, summary="Dead letters, the oldest first.")
        async def dead(stream: str, consumer: str, after: _Text = None, limit: _Text = None) -> Response:
            number = limit if limit is None else int(limit) if limit.isdigit() and limit.isascii() else limit
            fields = {"after": after, "limit": number}
            body = {field: value for field, value in fields.items() if value is not None}
            return _records((await self._asked(stream, "dead", consumer, body)).body, "dead")

        for path, (what, right, summary) in _ACTIONS.items():
            router.add_api_route(
                f"/{{consumer}}/{path}",
                self._action(what),
                methods=["POST"],
                status_code=202 if what == "backfill" else 200,
                dependencies=[Depends(allow(right))],
                response_class=Response,
                summary=summary,
                name=what,
                openapi_extra=_body_of(what),
            )

    def _action(self, what: str) -> Callable[..., Awaitable[Response]]:
        async def action(request: Request, stream: str, consumer: str) -> Response:
            async def do(body: Any) -> Response:
                if body is None:  # a call in Python has none if it has no fields
                    raise InvalidValue("the body is null", hint="Send an object, or no body.")
                if what == "receive":
                    return await self._receive(request, stream, consumer, body)
                if what == "backfill":
                    key = key_said(headers_said(request.scope))
                    return _json((await self._asked(stream, what, consumer, body, key)).body, 202)
                return _json((await self._asked(stream, what, consumer, body)).body)

            return await self._with_body(request, stream, do)

        return action

    async def _with_body(self, request: Request, stream: str, do: Callable[[Any], Awaitable[Response]]) -> Response:
        """Answer a request with its body's JSON value; an unknown stream wins over errors of the body."""
        self._home.written_stream(stream)
        with Held(self._budget) as held:
            try:
                data = await read_body(
                    request.receive, headers_said(request.scope), self._budget, held, bytes_max=SMALL_BYTES_MAX
                )
            except ClientGoneError:
                return Response(status_code=_GONE)
            try:
                body = msgspec.json.decode(data) if data.strip() else {}
            except (ValueError, RecursionError) as error:
                raise HttpError(f"the body isn't JSON: {error}", code="invalid_body") from error
            del data
            return await do(body)

    async def _receive(self, request: Request, stream: str, consumer: str, body: Any) -> Response:
        request.scope[NEEDS_ITS_CLIENT] = True
        waiter = Waiter()
        self._waiters.add(waiter)
        call = partial(self.of_home.call, stream, "receive", consumer, body, waiter=waiter)
        asked = asyncio.wrap_future(self._waiting.submit(call))
        aside: set[asyncio.Future[Any]] = {asyncio.create_task(_left(request))}
        if (ending := request.scope.get(ENDING)) is not None:
            aside.add(asyncio.create_task(ending.wait()))
        try:
            await asyncio.wait({asked, *aside}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                waiter.leave()
            return _records((await asked).body, "messages")
        finally:
            waiter.leave()
            self._waiters.discard(waiter)
            for task in aside:
                task.cancel()

    async def _asked(
        self, stream: str, what: str, consumer: str | None = None, body: Any = None, key: str | None = None
    ) -> Answer:
        call = partial(self.of_home.call, stream, what, consumer, body, key=key)
        return await asyncio.wrap_future(self._threads.submit(call))


async def _left(request: Request) -> None:
    """Return once the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _body_of(what: str) -> dict[str, Any]:
    """Return the part of the OpenAPI document that describes a request's body."""
    fields = _BODIES.get(what)
    if fields is None:
        return {}
    required = [field for field in ("name", "to", "ack_ids", "ids") if field in fields]
    schema = {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
    described: dict[str, Any] = {
        "requestBody": {"required": bool(required), "content": {JSON_TYPE: {"schema": schema}}}
    }
    if what == "backfill":
        described["parameters"] = [_BACKFILL_KEY]
    return described


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type=JSON_TYPE)


def _records(body: dict[str, Any], field: str) -> Response:
    """Return an answer whose items, which it changes, have their records as JSON texts."""
    for item in body[field]:
        item["record"] = msgspec.Raw(item["record"].encode())
    return _json(body)
