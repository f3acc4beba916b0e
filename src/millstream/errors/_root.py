"""The root of the tree of errors: the facts that every error carries, and whether to retry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Code:
    """A failure that has a code but no class, because no caller catches it alone."""

    summary: str
    """One sentence on what failed; then the names of the `details`."""
    retry: Retry = Retry.NEVER
    hint: str = ""
    exit_code: int = 1


class MillstreamError(Exception):
    """The root. `code` is stable and may be matched on; `hint` is one sentence that a person can act on.

    A class has a code of its own, and further ones in `codes`.

    Args:
        message: what happened, where, with the values that matter (never a secret).
        code: one of the class's `codes`; the class's own code if not given.
        hint: the remedy; the code's default hint if not given.
        details: facts for programs, JSON-able.
    """

    code: str = "millstream"
    retry: Retry = Retry.NEVER
    exit_code: int = 1
    default_hint: ClassVar[str] = ""
    codes: ClassVar[Mapping[str, Code]] = {
        "home_unwritable": Code(
            "A folder or file that the home needs isn't writable by this user; details: path.",
            Retry.OPERATOR,
            "Give this user write access to the path, or choose another home with --home.",
        ),
        "address_in_use": Code(
            "The address to listen on is in use, or doesn't belong to this machine; details: address.",
            Retry.OPERATOR,
            "Set [http] listen in millstream.toml (or MILLSTREAM_HTTP__LISTEN) to a free address.",
        ),
        "demo_failed": Code(
            "A claim of the demo didn't hold.",
            hint="This is a bug of Millstream's. run.log in the demo's folder says what happened.",
        ),
        "table_quarantined": Code(
            "The table is quarantined, or was when the records to read came: the log keeps them undecoded; details: table;"
            " of a reader, before and behind (the tokens around the records).",
            Retry.OPERATOR,
            "Run `millstream tables` for the reason, then `millstream tables retry T`. To skip the records, read on"
            " after `behind`.",
        ),
        "home_unreadable": Code(
            "A file or folder of the home isn't readable by this user; details: path.",
            Retry.OPERATOR,
            "Run as the user that owns the home, or give this user read access to the path.",
        ),
        "status_hangs": Code(
            "No status of the home could be taken so far: its catalog, log or lake doesn't answer.",
            Retry.BACKOFF,
            "Run `millstream doctor` to find what doesn't answer.",
        ),
        "io_failed": Code(
            "The operating system failed a call on a file, a disk or a connection; details: path (None if "
            "unknown), errno.",
            Retry.OPERATOR,
            "Check the operating system's log (`dmesg`) for the disk or the connection, repair it, and repeat the"
            " call.",
        ),
        "system_limit": Code(
            "The system lets the process have no more open files, threads or memory; details: path (None if unknown),"
            " errno.",
            Retry.BACKOFF,
            "Raise the limit of open files (`ulimit -n`, systemd's LimitNOFILE), of threads (`ulimit -u`, TasksMax) or of"
            " memory (MemoryMax), or keep fewer connections open.",
        ),
    }
    """Further codes that an error of this class may have."""

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        default = self.default_hint
        if code is not None and code != self.code:
            known = self.codes[code]
            self.code, self.retry, self.exit_code, default = code, known.retry, known.exit_code, known.hint
        self.message = message
        self.hint = default if hint is None else hint
        self.details = details
        if self.hint:
            # For uncaught errors: a traceback shows notes under the message.
            self.add_note(f"hint: {self.hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.code, self.hint, self.details))

    @property
    def summary(self) -> str:
        """The constant description of the error's code."""
        known = self.codes.get(self.code)
        return (self.__doc__ or "").partition("\n\n")[0] if known is None else known.summary

    def as_dict(self) -> dict[str, Any]:
        """Return the error as JSON-able facts: code, message, hint, retry, details."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "retry": self.retry.value,
            "details": {name: value if _is_plain(value) else str(value) for name, value in self.details.items()},
        }


def may_pass(code: str | None, retry: str | None) -> bool:
    """Return whether work that ended by such an error is begun again with nothing changed.

    A person has to make room on a full disk, or to free an address, but what waited for it goes on alone.
    """
    return retry in {Retry.BACKOFF, Retry.REOPEN} or code in {"disk_full", "address_in_use"}


def error_of(facts: Mapping[str, Any]) -> MillstreamError:
    """Return an equal of the error that `as_dict` was called on in another process.

    A code from a newer Millstream's tree gives a `MillstreamError`. If several classes have the code, the class that is named
    after it is returned.
    """
    code = facts["code"]
    kinds = [kind for kind, known in codes_of(MillstreamError) if known == code]
    if not kinds:
        return MillstreamError(facts["message"], hint=facts["hint"], **facts["details"])
    kind = min(kinds, key=lambda kind: kind.code != code)
    return kind(facts["message"], code=code, hint=facts["hint"], **facts["details"])


def codes_of(kind: type[MillstreamError]) -> Iterator[tuple[type[MillstreamError], str]]:
    """Yield each code of a class and of its subclasses, a parent's before its children's, with the class."""
    yield kind, kind.code
    for code in vars(kind).get("codes", ()):
        yield kind, code
    for child in kind.__subclasses__():
        yield from codes_of(child)


def _rebuild(
    kind: type[MillstreamError], message: str, code: str, hint: str, details: dict[str, Any]
) -> MillstreamError:
    return kind(message, code=code, hint=hint, **details)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | dict)
