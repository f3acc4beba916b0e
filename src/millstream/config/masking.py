"""Configuration values as they may be shown: without their secrets."""

from __future__ import annotations

from typing import Any, Final

from millstream.model.addresses import MASK, is_secret_key, mask_address, mask_option, mask_path, mask_words

_OPTIONS: Final = frozenset({"storage_options", "client", "topic", "conf"})
"""Tables whose keys other systems define, and which are passed on unchanged."""


def mask(path: tuple[str | int, ...], value: Any) -> Any:
    """Return a configuration value as it may be shown: addresses without passwords, and secret keys' values masked.

    The value of a key that holds an address is masked whole if it can't be parsed.
    """
    if isinstance(value, list) and path[-2:] == ("command", "argv"):
        return mask_words([str(word) for word in value])
    if isinstance(value, list):
        return [mask((*path, number), item) for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    names = [part for part in path if isinstance(part, str)]
    key, table = names[-1] if names else "", names[-2] if len(names) > 1 else ""
    if table in _OPTIONS:
        return mask_option(key, value)
    if is_secret_key(key) or table == "headers":
        return MASK
    if (table, key) == ("alerts", "url"):
        return mask_path(value)
    return mask_address(value) if _is_address_key(key, table) or "://" in value else value


def _is_address_key(key: str, table: str) -> bool:
    return (
        key in {"dsn", "location", "object_store", "master"}
        or (table, key) == ("catalog", "url")
        or table in {"nodes", "regions"}
    )
