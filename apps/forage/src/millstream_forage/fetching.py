"""Fetching of one address, if its host's robots.txt allows it. Links are not followed, nor redirects to other hosts."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit, urlunsplit
from urllib.robotparser import RobotFileParser

from millstream_forage.errors import SourceUnreadable

AGENT: Final = "millstream-forage"
TIMEOUT_S: Final = 10.0
"""Time for a connection, and for each piece of an answer."""
ANSWER_S: Final = 60.0
"""Time for a whole document: a host that sends a byte now and then would hold the run without end."""
PIECE_BYTES: Final = 64 << 10
ROBOTS_BYTES_MAX: Final = 500 << 10
"""As RFC 9309 asks: at least 500 KiB of a robots.txt are read."""


class SameHost(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to the host whose robots.txt was asked, and only to what its rules allow."""

    def __init__(self) -> None:
        self.robots: RobotFileParser | None = None
        """The host's rules, once they are read."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: object,
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the next request."""
        if urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            raise SourceUnreadable(f"{req.full_url}: leads to {newurl}", hint="Name the new address in the registry.")
        if self.robots is not None and not self.robots.can_fetch(AGENT, newurl):
            raise SourceUnreadable(
                f"{req.full_url}: leads to {newurl}, which robots.txt forbids", hint="Ask the owner for another way."
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def fetch(address: str, *, bytes_max: int, clock: Callable[[], float] = time.monotonic) -> bytes:
    """Return the document at an http or https address.

    Raises:
        SourceUnreadable: robots.txt forbids it or can't be asked, the host doesn't answer with a document, or the
            document is longer than `bytes_max` or takes longer than ANSWER_S.
    """
    redirects = SameHost()
    opener = urllib.request.build_opener(redirects)
    parts = urlsplit(address)
    robots = RobotFileParser()
    try:
        rules = get(opener, urlunsplit((parts.scheme, parts.netloc, "/robots.txt", "", "")), ROBOTS_BYTES_MAX, clock)
        robots.parse(rules.decode("utf-8-sig", errors="replace").splitlines())
    except urllib.error.HTTPError as error:
        # RFC 9309: without a robots.txt all is allowed; if the host can't answer for it, nothing is.
        if not 400 <= error.code < 500:
            raise SourceUnreadable(f"{address}: robots.txt: {error}", hint="Try again later.") from error
        robots.parse([])
    if not robots.can_fetch(AGENT, address):
        raise SourceUnreadable(f"{address}: robots.txt forbids it", hint="Ask the owner for another way.")
    redirects.robots = robots
    try:
        content = get(opener, address, bytes_max + 1, clock)
    except urllib.error.HTTPError as error:
        raise SourceUnreadable(f"{address}: {error}") from error
    if len(content) > bytes_max:
        raise SourceUnreadable(f"{address}: has more than {bytes_max} bytes")
    return content


def get(opener: urllib.request.OpenerDirector, address: str, bytes_max: int, clock: Callable[[], float]) -> bytes:
    """Return the first bytes at an address; HTTPError if it answers with an error."""
    request = urllib.request.Request(address, headers={"User-Agent": AGENT})  # noqa: S310 - the registry took http alone
    end_s = clock() + ANSWER_S
    content = bytearray()
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            while piece := answer.read1(min(PIECE_BYTES, bytes_max - len(content))):
                content += piece
                if clock() > end_s:
                    raise SourceUnreadable(f"{address}: takes longer than {ANSWER_S:.0f} s", hint="Try again later.")
            return bytes(content)
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SourceUnreadable(f"{address}: {error}", hint="Check the address and the network.") from error
