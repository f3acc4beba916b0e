"""Errors over HTTP: a status for each error of the tree, and a problem document (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.errors import MillstreamError, Retry, UsageError
from millstream.serving.unknown_paths import allowed_at, method_not_allowed, unknown_path
from millstream.wal.files import error_of_os

MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 1
"""Seconds in the header `Retry-After` of 429 and 503: a writer restarts in that time, and a full queue empties sooner."""

_CHALLENGE: Final = b'Bearer realm="millstream", Basic realm="millstream"'
"""The accepted forms of a token."""

_STATUS: Final[Mapping[str, HTTPStatus]] = {
    "millstream": HTTPStatus.INTERNAL_SERVER_ERROR,
    # The caller has to change something, or to wait for it.
    "usage": HTTPStatus.BAD_REQUEST,
    "position": HTTPStatus.BAD_REQUEST,
    "invalid_body": HTTPStatus.BAD_REQUEST,
    "unauthenticated": HTTPStatus.UNAUTHORIZED,
    "forbidden": HTTPStatus.FORBIDDEN,
    "access": HTTPStatus.FORBIDDEN,
    "unknown_host": HTTPStatus.MISDIRECTED_REQUEST,
    "unknown_stream": HTTPStatus.NOT_FOUND,
    "unknown_table": HTTPStatus.NOT_FOUND,
    "unknown_consumer": HTTPStatus.NOT_FOUND,
    "unknown_path": HTTPStatus.NOT_FOUND,
    "method_not_allowed": HTTPStatus.METHOD_NOT_ALLOWED,
    "request_timeout": HTTPStatus.REQUEST_TIMEOUT,
    "consumer_exists": HTTPStatus.CONFLICT,
    "consumer_configured": HTTPStatus.CONFLICT,
    "consumer_pushed": HTTPStatus.CONFLICT,
    "backfill_running": HTTPStatus.CONFLICT,
    "lake_behind": HTTPStatus.CONFLICT,
    "key_changed": HTTPStatus.CONFLICT,
    "merge_changed": HTTPStatus.CONFLICT,
    "table_captured": HTTPStatus.CONFLICT,
    "table_quarantined": HTTPStatus.CONFLICT,
    "offset_beyond_end": HTTPStatus.CONFLICT,
    "token_from_future": HTTPStatus.CONFLICT,
    "log_truncated": HTTPStatus.CONFLICT,
    "session_gap": HTTPStatus.CONFLICT,
    "session_expired": HTTPStatus.CONFLICT,
    "sessions_need_one_writer": HTTPStatus.CONFLICT,
    "sessions_not_known": HTTPStatus.CONFLICT,
    "ack_level_unavailable": HTTPStatus.CONFLICT,
    "dedup_window_expired": HTTPStatus.CONFLICT,
    "time_from_future": HTTPStatus.CONFLICT,
    "offset_expired": HTTPStatus.GONE,
    "beyond_retention": HTTPStatus.GONE,
    "cursor_expired": HTTPStatus.GONE,
    "body_too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "media_type_unknown": HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    "delivery": HTTPStatus.INTERNAL_SERVER_ERROR,
    "invalid_consumer": HTTPStatus.UNPROCESSABLE_ENTITY,
    "ingest": HTTPStatus.UNPROCESSABLE_ENTITY,
    "unknown_column": HTTPStatus.UNPROCESSABLE_ENTITY,
    "invalid_value": HTTPStatus.UNPROCESSABLE_ENTITY,
    "increment_unsuitable": HTTPStatus.UNPROCESSABLE_ENTITY,
    "counter_grows_only": HTTPStatus.UNPROCESSABLE_ENTITY,
    "not_one_operation": HTTPStatus.UNPROCESSABLE_ENTITY,
    "no_route_matches": HTTPStatus.UNPROCESSABLE_ENTITY,
    "invalid_route": HTTPStatus.UNPROCESSABLE_ENTITY,
    "query_memory_full": HTTPStatus.UNPROCESSABLE_ENTITY,
    "query_spill_full": HTTPStatus.UNPROCESSABLE_ENTITY,
    "query_timeout": HTTPStatus.UNPROCESSABLE_ENTITY,
    "query_crashed": HTTPStatus.UNPROCESSABLE_ENTITY,
    # Not a 5xx: clients resend those, and the sinks that took it would get it twice.
    "partial_write": HTTPStatus.FAILED_DEPENDENCY,
    # Errors that may pass: the caller resends.
    "overloaded": HTTPStatus.TOO_MANY_REQUESTS,
    "server_busy": HTTPStatus.TOO_MANY_REQUESTS,
    "writer_closed": HTTPStatus.SERVICE_UNAVAILABLE,
    "home_busy": HTTPStatus.SERVICE_UNAVAILABLE,
    "not_enough_replicas": HTTPStatus.SERVICE_UNAVAILABLE,
    # Not a 4xx, for which shippers of metrics drop their data: a resend may reach the leader, for
    # instance behind a load balancer.
    "read_only": HTTPStatus.SERVICE_UNAVAILABLE,
    "fenced": HTTPStatus.SERVICE_UNAVAILABLE,
    "stale_epoch": HTTPStatus.SERVICE_UNAVAILABLE,
    "catalog_busy": HTTPStatus.SERVICE_UNAVAILABLE,
    "catalog_unreachable": HTTPStatus.SERVICE_UNAVAILABLE,
    # Failures on this side.
    "config": HTTPStatus.INTERNAL_SERVER_ERROR,
    "address_in_use": HTTPStatus.INTERNAL_SERVER_ERROR,
    "codec": HTTPStatus.INTERNAL_SERVER_ERROR,
    "append_outcome_unknown": HTTPStatus.INTERNAL_SERVER_ERROR,
    "disk_full": HTTPStatus.INSUFFICIENT_STORAGE,
}
"""Statuses by code; a code without an entry has that of its class, or of the nearest base class."""


def status_of(error: MillstreamError) -> HTTPStatus:
    """Return the status for an error: its code's, or that of its class or base class; 503 if it may be retried."""
    bases = [kind.code for kind in type(error).__mro__ if issubclass(kind, MillstreamError)]
    found = next(_STATUS[code] for code in (error.code, *bases) if code in _STATUS)
    own = error.code in _STATUS
    if found is HTTPStatus.INTERNAL_SERVER_ERROR and not own and error.retry is Retry.BACKOFF:
        return HTTPStatus.SERVICE_UNAVAILABLE
    return found


def problem_of(error: MillstreamError) -> dict[str, Any]:
    """Return the document."""
    status = status_of(error)
    return {
        "type": f"urn:millstream:error:{error.code}",
        "title": title_of(error),
        "status": int(status),
        "detail": error.message,
        **{name: value for name, value in error.as_dict().items() if name != "message"},
    }


def plain_problem(status: int, detail: str = "") -> dict[str, Any]:
    """Return the document of an error that has only a status: an unknown path, a bug of ours."""
    phrase = HTTPStatus(status).phrase
    return {"type": "about:blank", "title": phrase, "status": status, "detail": detail or phrase}


def title_of(error: MillstreamError) -> str:
    """Return a constant title for an error's code: the first sentence of its reference."""
    first, _, _ = " ".join(error.summary.split()).partition(". ")
    return first.partition("; details:")[0].partition("; ")[0].rstrip(".") or error.code


def headers_of(status: int) -> list[tuple[bytes, bytes]]:
    """Return a document's headers: its type, when to retry, and how to authenticate."""
    headers = [(b"content-type", MEDIA_TYPE.encode())]
    if status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    if status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", _CHALLENGE))
    return headers


def encoded(document: Mapping[str, Any]) -> bytes:
    """Return a document's bytes."""
    return msgspec.json.encode(document)


def response_of(document: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """Return a document as the answer of a FastAPI path."""
    said = {name.decode(): value.decode() for name, value in headers_of(document["status"])}
    return Response(encoded(document), document["status"], {**(headers or {}), **said})


class _SystemErrors:
    """Answers an error of the operating system, unless an answer has begun: the connection's own errors come after that."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except OSError as error:
            if has_begun:
                raise
            await response_of(problem_of(error_of_os(error)))(scope, receive, send)


def tell_problems(app: FastAPI) -> None:
    """Make an application answer every error with a problem document."""
    app.add_middleware(_SystemErrors)

    @app.exception_handler(MillstreamError)
    async def refused(_request: Request, error: MillstreamError) -> Response:
        return response_of(problem_of(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return response_of(problem_of(UsageError(said, hint="Open `/docs` for the parameters of each path.")))

    @app.exception_handler(HTTPException)
    async def answered(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if error.status_code == HTTPStatus.NOT_FOUND:
            return response_of(problem_of(unknown_path(path, app.openapi()["paths"])))
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = allowed_at(request.scope, app.routes)
            return response_of(problem_of(method_not_allowed(request.method, path, allowed)), {"Allow": allowed})
        return response_of(plain_problem(error.status_code, str(error.detail)), error.headers)

    @app.exception_handler(Exception)
    async def failed(_request: Request, _error: Exception) -> Response:
        return response_of(plain_problem(HTTPStatus.INTERNAL_SERVER_ERROR, "this is a bug of the server's"))
