"""Values of an object store's options."""

from __future__ import annotations

from typing import Final

_ON: Final = frozenset({"1", "on", "true", "y", "yes"})


def is_on(value: str) -> bool:
    """Return whether an option such as `AWS_ALLOW_HTTP` is switched on, by the words that delta-rs and obstore take."""
    return value.lower() in _ON
