"""Errors as HTTP tells them: problem documents (RFC 9457)."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from millstream.errors import MillstreamError, Retry

PROBLEM_TYPE: Final = "application/problem+json"
_STATUS: Final = {
    "unknown_stream": 404,
    "unknown_table": 404,
    "offset_expired": 410,
    "beyond_retention": 410,
    "token_from_future": 409,
    "time_from_future": 409,
    "overloaded": 429,
}


def problem(error: MillstreamError) -> JSONResponse:
    """The answer that an error is."""
    status = _STATUS.get(error.code, 503 if error.retry in {Retry.BACKOFF, Retry.REOPEN} else 400)
    facts = error.as_dict()
    document = {
        "type": f"urn:millstream:error:{error.code}",
        "title": error.code.replace("_", " "),
        "status": status,
        "detail": facts["message"],
        "code": facts["code"],
        "hint": facts["hint"],
        "details": facts["details"],
    }
    headers = {"Retry-After": "1"} if status in {429, 503} else {}
    return JSONResponse(document, status, headers, media_type=PROBLEM_TYPE)


def tell_problems(app: FastAPI) -> None:
    """Have an application answer every error of ours by its document."""

    @app.exception_handler(MillstreamError)
    async def handle(_request: Request, error: MillstreamError) -> JSONResponse:
        return problem(error)
