"""`token`: creates, lists and revokes access tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import UnknownStream, UsageError
from millstream.model.access import ALL_STREAMS, Right, Rights
from millstream.model.durations import duration_s

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
        rights: `STREAM=RIGHT`, RIGHT one of `read`, `write`, `admin`, or several with commas between.
        on_all: rights to all streams.
        name: identifies it; None: its id.
        expires: its lifetime, such as `30d`; None: it never expires.
        given: the text of another home's token, which is to be valid here too; None: a new one.

    Returns:
        Its facts, and its text, which can't be retrieved again.

    Raises:
        UsageError: no right was named, or one is invalid; the name or the time is invalid.
        UnknownStream: the configuration has no such stream.
        AccessError (`access_token_exists`): there is a token of that name.
    """
    granted = Rights.parse([*rights, *(f"{ALL_STREAMS}={right}" for right in on_all)])
    if not granted.of:
        raise UsageError(
            "a token needs a right",
            hint=f"Pass --stream S=RIGHT or --all RIGHT; rights are {', '.join(right.value for right in Right)}.",
        )
    unknown = sorted(granted.of.keys() - {ALL_STREAMS} - home.config.streams.keys())
    if unknown:
        raise UnknownStream(
            f"no stream {unknown[0]} in {home.config_file}",
            hint=f"Streams here: {', '.join(sorted(home.config.streams)) or 'none'}.",
            stream=unknown[0],
        )
    expires_us = None if expires is None else time.time_ns() // 1000 + _interval_us(expires)
    home.prepare()
    with home.open_catalog() as catalog:
        created, text = catalog.create_access_token(granted, name=name, expires_us=expires_us, given=given)
    return _facts(created), text


def list_tokens(home: Home) -> list[dict[str, Any]]:
    """Return the home's access tokens, by name.

    Each has `id`, `name`, `rights` by stream, `created`, `expires` (null: never), `expired`.
    """
    if not home.has_catalog():
        return []
    with home.open_catalog() as catalog:
        return [_facts(token) for token in catalog.access_tokens()]


def revoke_token(home: Home, token: str) -> dict[str, Any]:
    """Revoke an access token, by its name or id; return its facts. `unknown_access_token` if there is none."""
    home.prepare()
    with home.open_catalog() as catalog:
        return _facts(catalog.revoke_access_token(token))


def _interval_us(text: str) -> int:
    try:
        interval_us = round(duration_s(text) * 1e6)
    except ValueError as error:
        raise UsageError(f"--expires: {error}") from error
    if not 0 < interval_us <= _EXPIRES_MAX_US:
        raise UsageError(f"--expires: a token can't be valid for {text}", hint="Name one such as 30d, up to 36500d.")
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
