"""The root of the tree of errors: the facts that every error carries, and whether to retry."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar


class Retry(StrEnum):
    """A caller's options after an error."""

    NEVER = "never"
    """The same call always fails again."""
    BACKOFF = "backoff"
    """The same call may succeed later: wait, then repeat it."""
    REOPEN = "reopen"
    """The object is unusable: open it again, then repeat the call."""
    OPERATOR = "operator"
    """A person has to change something first; the hint names it."""


class MillstreamError(Exception):
    """The root. `code` is stable and may be matched on; `hint` is one sentence that a person can act on.

    Args:
        message: what happened, where, with the values that matter (never a secret).
        hint: the remedy; the class's own `default_hint` if not given.
        details: facts for programs, JSON-able.
    """

    code: ClassVar[str] = "millstream"
    retry: ClassVar[Retry] = Retry.NEVER
    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.details = details
        if self.hint:
            # For uncaught errors: a traceback shows notes under the message.
            self.add_note(f"hint: {self.hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.details))

    def as_dict(self) -> dict[str, Any]:
        """Return the error as JSON-able facts: code, message, hint, retry, details."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "retry": self.retry.value,
            "details": {name: value if _is_plain(value) else str(value) for name, value in self.details.items()},
        }


def error_of(facts: Mapping[str, Any]) -> MillstreamError:
    """Return an equal of the error that `as_dict` was called on in another process.

    A code from a newer Millstream's tree gives a `MillstreamError`.
    """
    kinds = [MillstreamError]
    for kind in kinds:
        if kind.code == facts["code"]:
            break
        kinds.extend(kind.__subclasses__())
    else:
        kind = MillstreamError
    return kind(facts["message"], hint=facts["hint"], **facts["details"])


def _rebuild(kind: type[MillstreamError], message: str, hint: str, details: dict[str, Any]) -> MillstreamError:
    return kind(message, hint=hint, **details)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | dict)
