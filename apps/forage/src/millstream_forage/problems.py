"""Errors over HTTP: those that only a server raises, and the problem document (RFC 9457) of every error."""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.responses import Response

from millstream import MillstreamError, problem_of
from millstream_forage.errors import ForageError, InvalidField

MEDIA_TYPE: Final = "application/problem+json"
CHALLENGE: Final = 'Bearer realm="millstream", Basic realm="millstream"'
RETRY_AFTER_S: Final = 1


class MalformedBody(ForageError):
    """The body is no JSON."""

    code = "malformed_body"
    status = 400
    default_hint = "Send one JSON object, in UTF-8."


class BodyTooLarge(ForageError):
    """The body is larger than any that makes sense."""

    code = "body_too_large"
    status = 413
    default_hint = "Send one signal, change or item in each request."


class CrossSite(ForageError):
    """A page of another site has made the request."""

    code = "cross_site"
    status = 403
    default_hint = "Open Forage's own page, or send the request from a program."


class UnknownPath(ForageError):
    """There is no such path."""

    code = "unknown_path"
    status = 404


class MethodNotAllowed(ForageError):
    """The path doesn't take this method."""

    code = "method_not_allowed"
    status = 405

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message, hint=f"Use {allowed}.")
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[MethodNotAllowed], tuple[str, str]]:
        return type(self), (self.message, self.allowed)


class Bug(ForageError):
    """The server has a bug."""

    code = "bug"
    status = 500
    default_hint = "Look for the traceback in the server's output."


def document_of(error: ForageError | MillstreamError) -> dict[str, Any]:
    """Return the problem document of an error."""
    if isinstance(error, MillstreamError):
        return problem_of(error)
    title, _, _ = (type(error).__doc__ or error.code).partition(". ")
    document: dict[str, Any] = {
        "type": f"urn:millstream-forage:error:{error.code}",
        "title": title.strip().rstrip("."),
        "status": error.status,
        "detail": error.message,
        "code": error.code,
        "hint": error.hint,
    }
    return document | ({"field": error.field} if isinstance(error, InvalidField) else {})


def response_of(error: ForageError | MillstreamError) -> Response:
    """Return the answer for an error."""
    document = document_of(error)
    headers = {"cache-control": "no-store"}
    if document["status"] == 401:
        headers["www-authenticate"] = CHALLENGE
    if document["status"] in {429, 503}:
        headers["retry-after"] = str(RETRY_AFTER_S)
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allowed
    return Response(json.dumps(document), document["status"], headers, MEDIA_TYPE)
