"""Errors of homes behind an address: failures on the way, in addition to errors of the home itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from millstream.errors._root import Code, MillstreamError, Retry


class RemoteError(MillstreamError):
    """A remote home failed to answer correctly; details: url."""

    code = "remote"
    codes: ClassVar[Mapping[str, Code]] = {
        "server_unreachable": Code(
            "No server answers at the address, or not in time; nothing was done. Details: url.",
            Retry.BACKOFF,
            "Check the address, and that `millstream serve` (or `run`) answers at `/healthz`.",
        ),
        "answer_cut_off": Code(
            "An answer was cut off: the part received is right but incomplete. Details: url.",
            Retry.BACKOFF,
            "Repeat the call from the last token that you received.",
        ),
        "answer_unreadable": Code(
            "The server isn't Millstream, or is of another version; details: url, status.",
            Retry.OPERATOR,
            "Check that the address is that of `millstream serve`, without `/v1`.",
        ),
    }
