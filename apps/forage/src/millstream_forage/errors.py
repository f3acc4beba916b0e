"""The errors that Forage raises on purpose, each with a code, a hint and the HTTP status that stands for it.

Errors of the log (`millstream.errors`) pass through unchanged. A broken invariant is not in this tree: it is a bug.
"""

from __future__ import annotations

from typing import ClassVar


class ForageError(Exception):
    """The root. `code` is stable and may be matched on; `hint` is one sentence that a person can act on."""

    code: ClassVar[str] = "forage"
    status: ClassVar[int] = 500
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        if self.hint:
            self.add_note(f"hint: {self.hint}")


class InvalidField(ForageError):
    """A field is missing, unknown, of the wrong type or out of range. `field` is its name."""

    code = "invalid_field"
    status = 422

    def __init__(self, field: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{field}: {reason}", hint=hint)
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type[InvalidField], tuple[str, str]]:
        return type(self), (self.field, self.reason)


class UnknownItem(ForageError):
    """No item has this id."""

    code = "unknown_item"
    status = 404
    default_hint = "List the items that exist: GET /items."


class UnknownImpression(ForageError):
    """No impression has this id."""

    code = "unknown_impression"
    status = 404
    default_hint = "Send the impression_id that the feed gave with the item."


class KeyReused(ForageError):
    """The user gave this idempotency key to another signal."""

    code = "key_reused"
    status = 409
    default_hint = "Give each signal a key of its own."


class EngineFailed(ForageError):
    """The engine is closed."""

    code = "engine_failed"
    status = 503
    default_hint = "Open it again: it reads its state from the log."


class RegistryUnreadable(ForageError):
    """The registry of sources can't be read."""

    code = "registry_unreadable"
    default_hint = "Name a file in TOML with a table [[sources]] for each source."


class SourceUnreadable(ForageError):
    """A source of items can't be read."""

    code = "source_unreadable"
    status = 502
    default_hint = "Check the source's path or address in the registry."


class SparkMissing(ForageError):
    """The batch side's packages aren't installed."""

    code = "spark_missing"
    default_hint = "Install millstream-forage[spark]."
