"""Errors of positions: offsets, tokens and times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class PositionError(MillstreamError):
    """A position can't be used as asked."""

    code = "position"
    codes: ClassVar[Mapping[str, Code]] = {
        "time_from_future": Code("The time lies in the future; it is never clamped."),
        "invalid_time": Code(
            "The text is neither a time nor a token.",
            hint=(
                "Write an ISO time (2026-03-01, 2026-03-01T12:30, 2026-03-01T12:30:00+01:00), an age (10m ago), now or a "
                "token."
            ),
            exit_code=2,
        ),
        "beyond_retention": Code(
            "The position lies before everything that the lake still has; details: first (the earliest position available).",
            hint="Query a later time, or raise `history_retention`.",
        ),
        "invalid_token": Code("The text is not a token, or not a token of this stream.", exit_code=2),
    }


class TokenFromFuture(PositionError):
    """The token lies beyond what the stream has; it is never clamped."""

    code = "token_from_future"
    retry = Retry.BACKOFF


class OffsetBeyondEnd(PositionError):
    """The offset lies past the durable end; details: end."""

    code = "offset_beyond_end"
    retry = Retry.BACKOFF
    default_hint = "Read from the end or an earlier offset; `millstream wal ls` shows each shard's."


class OffsetExpired(PositionError):
    """Retention has dropped the offset (or the token); details: first (the first one left)."""

    code = "offset_expired"


class LogTruncated(PositionError):
    """A log was truncated while it was read. Details: persisted_upto (what is left).

    Its node led before and follows now. Records that only this node had were set aside.
    """

    code = "log_truncated"
    retry = Retry.BACKOFF
    default_hint = (
        "Read again from a token at or below the remaining end, and discard later records; "
        "data/wal/STREAM.aside-… has the removed records, with a report."
    )


class CursorExpired(PositionError):
    """A consumer fell so far behind that retention dropped what it needs.

    Details: holder, needed_from, first (where the log begins).
    """

    code = "cursor_expired"
    retry = Retry.OPERATOR
    default_hint = "Restart the consumer at the first remaining position, or raise `retention_bytes_max`."


class FollowerBehindRetention(PositionError):
    """A follower fell so far behind that retention dropped what it needs.

    Details: holder, needed_from, first (where the log begins).
    """

    code = "follower_behind_retention"
    retry = Retry.OPERATOR
    default_hint = (
        "Rebuild the copy with `millstream follow --rebuild`, or configure [replication] object_store for "
        "missing parts; raise `retention_bytes_max` to allow a larger lag."
    )
