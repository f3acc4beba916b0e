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

from millstream.errors import (
    AccessError,
    AckLevelUnavailable,
    AddressInUse,
    AppendOutcomeUnknown,
    BeyondRetention,
    BodyTooLarge,
    CatalogBusy,
    CatalogUnreachable,
    CodecError,
    ConfigError,
    DedupWindowExpired,
    DiskFull,
    Fenced,
    Forbidden,
    HomeBusy,
    IngestError,
    InvalidBody,
    InvalidRoute,
    InvalidValue,
    KeyChanged,
    LogTruncated,
    MediaTypeUnknown,
    MethodNotAllowed,
    MillstreamError,
    NoRouteMatches,
    NotEnoughReplicas,
    OffsetBeyondEnd,
    OffsetExpired,
    Overloaded,
    PartialWrite,
    PositionError,
    QueryBound,
    ReadOnly,
    RequestTimeout,
    Retry,
    ServerBusy,
    SessionExpired,
    SessionGap,
    SessionsNeedOneWriter,
    SessionsNotKnown,
    StaleEpoch,
    TableCaptured,
    TableSetAside,
    TimeFromFuture,
    TokenFromFuture,
    Unauthenticated,
    UnknownColumn,
    UnknownHost,
    UnknownPath,
    UnknownStream,
    UnknownTable,
    UsageError,
    WriterClosed,
)
from millstream.serving.paths import allowed_of, method_not_allowed, unknown_path

MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 1
"""A group of appends takes some milliseconds, a writer's restart about a second."""

_CHALLENGE: Final = b'Bearer realm="millstream", Basic realm="millstream"'
"""The accepted forms of a token."""

_STATUS: Final[Mapping[type[MillstreamError], HTTPStatus]] = {
    MillstreamError: HTTPStatus.INTERNAL_SERVER_ERROR,
    # Errors in the request.
    UsageError: HTTPStatus.BAD_REQUEST,
    PositionError: HTTPStatus.BAD_REQUEST,
    InvalidBody: HTTPStatus.BAD_REQUEST,
    Unauthenticated: HTTPStatus.UNAUTHORIZED,
    Forbidden: HTTPStatus.FORBIDDEN,
    AccessError: HTTPStatus.FORBIDDEN,
    UnknownHost: HTTPStatus.MISDIRECTED_REQUEST,
    UnknownStream: HTTPStatus.NOT_FOUND,
    UnknownTable: HTTPStatus.NOT_FOUND,
    UnknownPath: HTTPStatus.NOT_FOUND,
    MethodNotAllowed: HTTPStatus.METHOD_NOT_ALLOWED,
    RequestTimeout: HTTPStatus.REQUEST_TIMEOUT,
    KeyChanged: HTTPStatus.CONFLICT,
    TableCaptured: HTTPStatus.CONFLICT,
    TableSetAside: HTTPStatus.CONFLICT,
    OffsetBeyondEnd: HTTPStatus.CONFLICT,
    TokenFromFuture: HTTPStatus.CONFLICT,
    LogTruncated: HTTPStatus.CONFLICT,
    SessionGap: HTTPStatus.CONFLICT,
    SessionExpired: HTTPStatus.CONFLICT,
    SessionsNeedOneWriter: HTTPStatus.CONFLICT,
    SessionsNotKnown: HTTPStatus.CONFLICT,
    AckLevelUnavailable: HTTPStatus.CONFLICT,
    DedupWindowExpired: HTTPStatus.CONFLICT,
    TimeFromFuture: HTTPStatus.CONFLICT,
    OffsetExpired: HTTPStatus.GONE,
    BeyondRetention: HTTPStatus.GONE,
    BodyTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    MediaTypeUnknown: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    IngestError: HTTPStatus.UNPROCESSABLE_ENTITY,
    UnknownColumn: HTTPStatus.UNPROCESSABLE_ENTITY,
    InvalidValue: HTTPStatus.UNPROCESSABLE_ENTITY,
    NoRouteMatches: HTTPStatus.UNPROCESSABLE_ENTITY,
    InvalidRoute: HTTPStatus.UNPROCESSABLE_ENTITY,
    QueryBound: HTTPStatus.UNPROCESSABLE_ENTITY,
    # Not a 5xx: clients resend those, and the sinks that took it would get it twice.
    PartialWrite: HTTPStatus.FAILED_DEPENDENCY,
    # Errors that may go away.
    Overloaded: HTTPStatus.TOO_MANY_REQUESTS,
    ServerBusy: HTTPStatus.TOO_MANY_REQUESTS,
    WriterClosed: HTTPStatus.SERVICE_UNAVAILABLE,
    HomeBusy: HTTPStatus.SERVICE_UNAVAILABLE,
    NotEnoughReplicas: HTTPStatus.SERVICE_UNAVAILABLE,
    # Not a 4xx, for which shippers of metrics drop their data: a resend may reach the leader, for
    # instance behind a load balancer.
    ReadOnly: HTTPStatus.SERVICE_UNAVAILABLE,
    Fenced: HTTPStatus.SERVICE_UNAVAILABLE,
    StaleEpoch: HTTPStatus.SERVICE_UNAVAILABLE,
    CatalogBusy: HTTPStatus.SERVICE_UNAVAILABLE,
    CatalogUnreachable: HTTPStatus.SERVICE_UNAVAILABLE,
    # Errors that an operator has to fix.
    ConfigError: HTTPStatus.INTERNAL_SERVER_ERROR,
    AddressInUse: HTTPStatus.INTERNAL_SERVER_ERROR,
    CodecError: HTTPStatus.INTERNAL_SERVER_ERROR,
    AppendOutcomeUnknown: HTTPStatus.INTERNAL_SERVER_ERROR,
    DiskFull: HTTPStatus.INSUFFICIENT_STORAGE,
}
"""Statuses by error class; a subclass without an entry has its nearest base's."""


def status_of(kind: type[MillstreamError]) -> HTTPStatus:
    """Return the status for an error: its own, or that of its base class; 503 if it may be retried."""
    for above in kind.__mro__:
        found = _STATUS.get(above)
        if found is None:
            continue
        if found is HTTPStatus.INTERNAL_SERVER_ERROR and above is not kind and kind.retry is Retry.BACKOFF:
            return HTTPStatus.SERVICE_UNAVAILABLE
        return found
    raise AssertionError("the root is in the table")


def problem_of(error: MillstreamError) -> dict[str, Any]:
    """Return the document."""
    status = status_of(type(error))
    return {
        "type": f"urn:millstream:error:{error.code}",
        "title": title_of(type(error)),
        "status": int(status),
        "detail": error.message,
        **{name: value for name, value in error.as_dict().items() if name != "message"},
    }


def plain_problem(status: int, detail: str = "") -> dict[str, Any]:
    """Return the document of an error that has only a status: an unknown path, a bug of ours."""
    phrase = HTTPStatus(status).phrase
    return {"type": "about:blank", "title": phrase, "status": status, "detail": detail or phrase}


def title_of(kind: type[MillstreamError]) -> str:
    """Return a constant title for a kind of error: the first sentence of its reference."""
    first, _, _ = " ".join((kind.__doc__ or "").split()).partition(". ")
    return first.partition("; details:")[0].partition("; ")[0].rstrip(".") or kind.code


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


def tell_problems(app: FastAPI) -> None:
    """Make an application answer every error with a problem document."""

    @app.exception_handler(MillstreamError)
    async def refused(_request: Request, error: MillstreamError) -> Response:
        return response_of(problem_of(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return response_of(problem_of(UsageError(said, hint="`/docs` shows what each path takes.")))

    @app.exception_handler(HTTPException)
    async def answered(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        if error.status_code == HTTPStatus.NOT_FOUND:
            return response_of(problem_of(unknown_path(path, app.openapi()["paths"])))
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            refused = method_not_allowed(request.method, path, allowed_of(error.headers))
            return response_of(problem_of(refused), error.headers)
        return response_of(plain_problem(error.status_code, str(error.detail)), error.headers)

    @app.exception_handler(Exception)
    async def failed(_request: Request, _error: Exception) -> Response:
        return response_of(plain_problem(HTTPStatus.INTERNAL_SERVER_ERROR, "this is a bug of the server's"))
