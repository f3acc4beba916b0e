"""The checks of `millstream serve` for an application's own server: `Host`, `Origin` and access tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from millstream.home.home import Home
from millstream.model.access import Right
from millstream.serving.access import Access
from millstream.serving.origin_check import Origins


class Guard:
    """Checks the requests to a server of a home, as `[http]` of its `millstream.toml` asks.

    One event loop may call it.
    """

    def __init__(self, home: str | Path, *, listen: str = "127.0.0.1") -> None:
        """Read the configuration.

        Args:
            home: the home's folder.
            listen: the host that the application's server listens on.

        Raises:
            ConfigError: the configuration is invalid.
        """
        found = Home.find(home, needs_source=False, named_by="home")
        self._access: Final = Access.of_home(found)
        self._origins: Final = Origins(listen, found.config.http.hosts, any_host=self._access.is_asked)

    def check_origin(self, scope: Mapping[str, Any]) -> None:
        """Refuse a request that another site's page may have made.

        Raises:
            AccessError (`unknown_host`): it was sent to a name that isn't the server's.
            AccessError (`foreign_origin`): another server's page has made it.
        """
        self._origins.check(scope["headers"])

    async def check_token(self, scope: Mapping[str, Any], stream: str, right: str) -> None:
        """Check the request's access token, if `tokens_required` is set.

        Args:
            scope: ASGI's.
            stream: the stream that the request is about.
            right: `read`, `write` or `admin`.

        Raises:
            Unauthenticated: the request has no token of this home's, or one that was revoked or has expired.
            AccessError (`forbidden`): the token lacks the right.
            CatalogError: the tokens can't be read.
        """
        await self._access.allowed(scope, Right(right), stream)

    def close(self) -> None:
        """Close the catalog."""
        self._access.close()
