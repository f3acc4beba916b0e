"""Rules for columns whose values never leave the source, and what takes the place of a value.

`exclude` leaves the column out, `hash` puts a keyed hash in the place of a value, and `redact` a constant. Hashed and
redacted columns are text. NULL stays NULL.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

REDACTED: Final = "[redacted]"
"""The text in place of every value of a redacted column."""


class Rule(StrEnum):
    """The change to a column's values before anything is stored.

    `capture.column_rules.apply_to_changes` applies it to changes, `capture.column_rules.apply_to_copies` to copied rows.
    """

    EXCLUDE = "exclude"
    HASH = "hash"
    REDACT = "redact"


@dataclass(frozen=True, slots=True)
class SourceRules:
    """The rules of one stream, as its configuration has them."""

    tables: Mapping[tuple[str, str], Mapping[str, Rule]] = field(default_factory=dict)
    """By schema and name of a table: the rules by column."""
    hash_key: bytes = field(default=b"", repr=False)
    """Key of the hashes; a secret."""

    def __bool__(self) -> bool:
        """Whether any table has a rule."""
        return bool(self.tables)

    def masked(self, rule: Rule, text: str) -> str | None:
        """Return what the log has for a text in a column with a rule; None if it has nothing."""
        match rule:
            case Rule.HASH:
                return self.hashed(text.encode()).decode()
            case Rule.REDACT:
                return REDACTED
            case Rule.EXCLUDE:
                return None

    def hashed(self, text: bytes) -> bytes:
        """Return what stands for a value in a hashed column: HMAC-SHA-256 of its text, as 64 hex digits."""
        return hmac.digest(self.hash_key, text, "sha256").hex().encode()
