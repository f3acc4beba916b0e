"""Errors of homes behind an address: what may happen on the way, beside what the home itself raises."""

from __future__ import annotations

from millstream.errors._root import MillstreamError, Retry


class RemoteError(MillstreamError):
    """A home behind an address can't be asked as it should be; details: url."""

    code = "remote"


class ServerUnreachable(RemoteError):
    """Nobody answers there, or not in time; nothing was done. Details: url."""

    code = "server_unreachable"
    retry = Retry.BACKOFF
    default_hint = "Check the address, and that `millstream serve` (or `run`) is there: its `/healthz` answers."


class AnswerCutOff(RemoteError):
    """An answer ended before its end: what came of it is right, and isn't all. Details: url."""

    code = "answer_cut_off"
    retry = Retry.BACKOFF
    default_hint = "Ask again, from the token on that was reached."


class AnswerUnreadable(RemoteError):
    """What answers isn't Millstream, or one of another version; details: url, status."""

    code = "answer_unreadable"
    retry = Retry.OPERATOR
    default_hint = "Check the address: it is that of `millstream serve`, without `/v1`."
