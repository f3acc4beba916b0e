"""Errors of requests over HTTP: what can't be read, is too much at once, or takes too long to come."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class HttpError(MillstreamError):
    """A request can't be answered as asked; nothing of it was appended."""

    code = "http"


class UnknownPath(HttpError):
    """There is nothing at the path that was asked for; details: path."""

    code = "unknown_path"
    default_hint = "`/docs` shows all paths, and `/openapi.json` describes them."


class MethodNotAllowed(HttpError):
    """The path is there, and takes other methods; details: method."""

    code = "method_not_allowed"
    default_hint = "`/docs` shows what each path takes."


class InvalidBody(HttpError):
    """A request's body isn't what it says it is: JSON, Arrow or gzip; details: line or byte, where one is known."""

    code = "invalid_body"


class BodyTooLarge(HttpError):
    """A request's body has more bytes than are taken, as it is or inflated; details: size_max."""

    code = "body_too_large"
    default_hint = "Send it in several requests; `[http] body_bytes_max` says how large one may be."


class MediaTypeUnknown(HttpError):
    """A body is of a type, or in an encoding, that isn't taken here; details: header, value."""

    code = "media_type_unknown"


class ServerBusy(HttpError):
    """Requests in flight take as much memory as they may; this one was turned away before it was read."""

    code = "server_busy"
    retry = Retry.BACKOFF
    default_hint = "Send it again in a moment, or send less at once; `[http] inflight_bytes_max` is the bound."


class RequestTimeout(HttpError):
    """A request didn't come within its time, head and body; nothing of it was appended."""

    code = "request_timeout"
    retry = Retry.BACKOFF
    default_hint = "Send it in smaller parts, or raise `[http] request_timeout`."


class TransferIdle(HttpError):
    """A bulk transfer's caller sent nothing for too long while it was waited for; what it was told of is durable. Details: time_s."""

    code = "transfer_idle"
    retry = Retry.BACKOFF
    default_hint = (
        "Send each batch within `[flight] idle_timeout` of the one before, or begin another call when there is one."
    )
