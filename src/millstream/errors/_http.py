"""Errors of requests over HTTP: unreadable, too large, too many at once, or too slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class HttpError(MillstreamError):
    """A request can't be answered; nothing of it was appended."""

    code = "http"
    codes: ClassVar[Mapping[str, Code]] = {
        "unknown_path": Code(
            "The requested path doesn't exist; details: path.",
            hint="Open `/docs` for all paths, or `/openapi.json` for their description.",
        ),
        "method_not_allowed": Code(
            "The path exists, but takes other methods; details: method.",
            hint="Open `/docs` for the methods of each path.",
        ),
        "invalid_body": Code(
            "A request's body isn't the JSON, Arrow or gzip that it claims to be; details: line or byte, if known.",
            hint="Send a body in the format that its headers name; `/docs` shows the body of each path.",
        ),
        "body_too_large": Code(
            "A request's body exceeds the size limit, as sent or inflated; details: size_max.",
            hint="Split the request, or raise `[http] body_bytes_max`.",
        ),
        "media_type_unknown": Code(
            "A body's type or encoding isn't supported here; details: header, value.",
        ),
        "server_busy": Code(
            "Requests in flight use all memory allowed for them; this one was rejected before it was read.",
            Retry.BACKOFF,
            "Repeat the request later, send less at once, or raise `[http] inflight_bytes_max`.",
        ),
        "request_timeout": Code(
            "A request's head and body didn't arrive in time; nothing of it was appended.",
            Retry.BACKOFF,
            "Send the request in smaller parts, or raise `[http] request_timeout`.",
        ),
        "transfer_idle": Code(
            "A bulk transfer's caller sent nothing for too long. Rows acknowledged before are durable. Details: "
            "time_s.",
            Retry.BACKOFF,
            "Send each batch within `[flight] idle_timeout` of the previous one, or start a new call for later "
            "batches.",
        ),
    }
