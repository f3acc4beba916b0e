"""Sessions of a browser: a cookie that stands for an access token and doesn't contain its secret.

A session names the token by its id, and ends with it. Its signature covers the token's digest, by a key that
lives as long as the server's process: a restart ends every session. A copy of a cookie ends with its logout.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, Final

LASTS_S: Final = 12 * 3600
"""A working day."""
_ENDED_MAX: Final = 10_000
"""Logouts that are remembered; the oldest are forgotten first."""
_SESSION: Final = re.compile(r"([0-9a-f]{12})\.([0-9]{1,12}\.[0-9a-f]{16})\.([0-9a-f]{64})")


class Sessions:
    """Signs and checks sessions."""

    def __init__(self) -> None:
        self._key: Final = secrets.token_bytes(32)
        self._ended: dict[str, None] = {}
        """Sessions that were ended before their time, in that order."""

    def issue(self, token_id: str, digest: bytes, *, expires_us: int | None) -> tuple[str, int]:
        """Return a session for a token, and for how many seconds it lasts."""
        now_s = int(time.time())
        until_s = now_s + LASTS_S if expires_us is None else min(now_s + LASTS_S, expires_us // 1_000_000)
        # Two logins within a second are two sessions: one's logout doesn't end the other.
        own = f"{until_s}.{secrets.token_hex(8)}"
        return f"{token_id}.{own}.{self._signature(token_id, own, digest)}", max(0, until_s - now_s)

    @staticmethod
    def token_id(session: str) -> str | None:
        """Return the id of the token that a session stands for; None if the text is no session."""
        found = _SESSION.fullmatch(session)
        return None if found is None else found[1]

    def is_valid(self, session: str, digest: bytes) -> bool:
        """Return whether this server issued the session for the token with that digest, and it hasn't ended."""
        found = _SESSION.fullmatch(session)
        if found is None or session in self._ended:
            return False
        until_s = int(found[2].partition(".")[0])
        return hmac.compare_digest(self._signature(found[1], found[2], digest), found[3]) and time.time() < until_s

    def end(self, session: str, digest: bytes) -> None:
        """End a session of the token with that digest before its time; others are left alone. For one thread."""
        if self.is_valid(session, digest):
            self._ended[session] = None
            if len(self._ended) > _ENDED_MAX:
                del self._ended[next(iter(self._ended))]

    def _signature(self, token_id: str, own: str, digest: bytes) -> str:
        return hmac.new(self._key, f"{token_id}.{own}.".encode() + digest, hashlib.sha256).hexdigest()


def cookie_name(scope: Mapping[str, Any]) -> str:
    """Return the name of the cookie: cookies don't distinguish ports, and another home may be served on one."""
    server = scope.get("server")
    return f"millstream_{server[1] if server else 0}"


def session_in(scope: Mapping[str, Any]) -> str | None:
    """Return the session in a request's cookies, if it counts.

    In a request that may change something it counts only if a page is named as its origin (`origin_check`
    refuses other servers' pages): a browser sends cookies for every page.
    """
    name = cookie_name(scope).encode()
    cookies = [value for key, value in scope["headers"] if key == b"cookie"]
    if not cookies or not (
        scope.get("method") in {"GET", "HEAD"} or any(key == b"origin" for key, _ in scope["headers"])
    ):
        return None
    for pair in b";".join(cookies).split(b";"):
        key, _, value = pair.strip().partition(b"=")
        if key == name:
            return value.decode("latin-1")
    return None
