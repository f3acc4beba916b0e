"""Errors of requests over HTTP: unreadable, too large, too many at once, or too slow."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class HttpError(MillstreamError):
    """A request can't be answered; nothing of it was appended."""

    code = "http"


class UnknownPath(HttpError):
    """The requested path doesn't exist; details: path."""

    code = "unknown_path"
    default_hint = "`/docs` shows all paths, and `/openapi.json` describes them."


class MethodNotAllowed(HttpError):
    """The path exists, but takes other methods; details: method."""

    code = "method_not_allowed"
    default_hint = "`/docs` shows what each path takes."


class InvalidBody(HttpError):
    """A request's body isn't the JSON, Arrow or gzip that it claims to be; details: line or byte, if known."""

    code = "invalid_body"


class BodyTooLarge(HttpError):
    """A request's body exceeds the size limit, as sent or inflated; details: size_max."""

    code = "body_too_large"
    default_hint = "Send it in several requests; `[http] body_bytes_max` says how large one may be."


class MediaTypeUnknown(HttpError):
    """A body's type or encoding isn't supported here; details: header, value."""

    code = "media_type_unknown"


class ServerBusy(HttpError):
    """Requests in flight use all the memory that they may; this one was rejected before it was read."""

    code = "server_busy"
    retry = Retry.BACKOFF
    default_hint = "Send it again in a moment, or send less at once; `[http] inflight_bytes_max` is the bound."


class RequestTimeout(HttpError):
    """A request's head and body didn't arrive in time; nothing of it was appended."""

    code = "request_timeout"
    retry = Retry.BACKOFF
    default_hint = "Send it in smaller parts, or raise `[http] request_timeout`."


class TransferIdle(HttpError):
    """A bulk transfer's caller sent nothing for too long. Rows acknowledged before are durable. Details: time_s."""

    code = "transfer_idle"
    retry = Retry.BACKOFF
    default_hint = (
        "Send each batch within `[flight] idle_timeout` of the one before, or begin another call when there is one."
    )
