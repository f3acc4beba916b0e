"""`token`: access tokens made, listed and revoked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from millstream.config.quantities import duration_s
from millstream.errors import UnknownStream, UsageError
from millstream.model.access import ALL_STREAMS, Right, Rights

if TYPE_CHECKING:
    from millstream.catalog import AccessToken
    from millstream.home.home import Home

_EXPIRES_MAX_US: Final = 36_500 * 86_400 * 1_000_000
"""A hundred years: calendars have an end."""


def create_token(
    home: Home,
    rights: Sequence[str],
    *,
    on_all: Sequence[str] = (),
    name: str | None = None,
    expires: str | None = None,
    given: str | None = None,
) -> tuple[dict[str, Any], str]:
    """Make an access token.

    Args:
        home: whose.
        rights: `STREAM=RIGHT`, RIGHT one of `read`, `write`, `admin`, or several with commas between.
        on_all: rights to all streams.
        name: tells it apart; its id where None.
        expires: after how long it holds no more, such as `30d`; None: never.
        given: the text of a token that another home has made, which is to hold here too; None: a new one.

    Returns:
        What there is to know of it, and its text, which nobody can have again.

    Raises:
        UsageError: no right was named, or a text is none; the name can't be one; the time is no time.
        UnknownStream: the configuration has no such stream.
        AccessTokenExists: there is a token of that name.
    """
    found = Rights.parse([*rights, *(f"{ALL_STREAMS}={right}" for right in on_all)])
    if not found.of:
        raise UsageError(
            "a token without a right opens nothing",
            hint=f"--stream S=RIGHT or --all RIGHT; rights are {', '.join(right.value for right in Right)}.",
        )
    unknown = sorted(found.of.keys() - {ALL_STREAMS} - home.config.streams.keys())
    if unknown:
        raise UnknownStream(
            f"no stream {unknown[0]} in {home.config_file}",
            hint=f"Streams here: {', '.join(sorted(home.config.streams)) or 'none'}.",
            stream=unknown[0],
        )
    expires_us = None if expires is None else time.time_ns() // 1000 + _interval_us(expires)
    home.prepare()
    with home.open_catalog() as catalog:
        made, text = catalog.create_access_token(found, name=name, expires_us=expires_us, given=given)
    return _facts(made), text


def list_tokens(home: Home) -> list[dict[str, Any]]:
    """The home's access tokens, by name: `id`, `name`, `rights` by stream, `created`, `expires` (null: never), `expired`."""
    if not home.has_catalog():
        return []
    with home.open_catalog() as catalog:
        return [_facts(token) for token in catalog.access_tokens()]


def revoke_token(home: Home, token: str) -> dict[str, Any]:
    """Take an access token away, by its name or id; what there was to know of it. `UnknownAccessToken` where there is none."""
    home.prepare()
    with home.open_catalog() as catalog:
        return _facts(catalog.revoke_access_token(token))


def _interval_us(text: str) -> int:
    try:
        interval_us = round(duration_s(text) * 1e6)
    except ValueError as error:
        raise UsageError(f"--expires: {error}") from error
    if not 0 < interval_us <= _EXPIRES_MAX_US:
        raise UsageError(
            f"--expires: {text} is no time for a token to hold", hint="Name one such as 30d, up to 36500d."
        )
    return interval_us


def _facts(token: AccessToken) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "rights": token.rights.as_dict(),
        "created": _moment(token.created_us),
        "expires": None if token.expires_us is None else _moment(token.expires_us),
        "expired": token.has_expired(time.time_ns() // 1000),
    }


def _moment(moment_us: int) -> str:
    return datetime.fromtimestamp(moment_us // 1_000_000, UTC).isoformat().replace("+00:00", "Z")
