"""When a client resends a request, and the result or the error that an answer means, without I/O.

Generators yield calls and waits. `remote_home` carries them out on the caller's thread, `millstream.aio` on an event
loop. All calls are resent; an append without an identity isn't once its outcome is in doubt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import pyarrow as pa

from millstream.client.call_results import SERVER_DEADLINE_S_MAX
from millstream.client.http_requests import Call
from millstream.errors import (
    AppendOutcomeUnknown,
    Fenced,
    HomeClosed,
    MillstreamError,
    NotEnoughReplicas,
    PositionError,
    ReadOnly,
    RemoteError,
    RoutingError,
    SessionsNeedOneWriter,
    error_of,
)
from millstream.model.operations import Appended, AppendedTables

if TYPE_CHECKING:
    from millstream.client.appends import AppendRequest

_PROBLEM_TYPE: Final = "application/problem+json"
_NAP_S: Final = 0.05
"""Wait before the second try; doubled with each one, up to `_NAP_MAX_S`."""
_NAP_MAX_S: Final = 2.0
_QUIET_S: Final = 2.0
"""Time after which a warning says what is waited for: longer than a server takes to restart its listener, and shorter than a
person takes to wonder."""
_BUSY: Final = frozenset({429, 503})
"""Statuses that mean that nothing was done, but may be later."""
_UNTOLD: Final = frozenset({500, 502, 504})
"""Statuses of a failure on the way: how far the request had come is unknown."""
_JUDGED: Final = frozenset({400, 409, 413, 422})
"""Statuses of a refusal for what the request contains: an earlier try of it was refused, too."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Nap:
    """A wait."""

    seconds: float
    warning: str = ""
    """The reason to wait, if the caller hasn't been told and a person would ask by now."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    open: Any = None
    """The response itself, if it is read in pieces."""


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer came."""

    why: str
    sent: bool
    """Whether the request may have arrived."""
    hint: str = ""
    """Change that is needed before an answer can come: a resend would be lost again."""


@dataclass(slots=True)
class _Waiting:
    """How long one call has been resent."""

    began_s: float
    patience_s: float
    has_warned: bool = False

    @property
    def give_up_s(self) -> float:
        """When the call fails."""
        return self.began_s + self.patience_s

    def nap(self, seconds: float, now_s: float, error: MillstreamError) -> Nap:
        """Return the wait after an error, with a warning if it is the first that is due."""
        if self.has_warned or now_s + seconds - self.began_s < _QUIET_S:
            return Nap(seconds)
        self.has_warned = True
        left_s = max(0.0, self.give_up_s - now_s)
        return Nap(seconds, f"{error.code}: {error.message}; the request is sent again for up to {left_s:.0f} s")


Exchange: TypeAlias = Generator[Call | Nap, HttpAnswer | Lost | None, _Result]


def asked(call: Call, *, url: str, patience_s: float, now: Callable[[], float]) -> Exchange[HttpAnswer]:
    """Return the answer to a call other than an append, which is resent while no server answers or has room.

    Args:
        call: a call that may be made any number of times. If the first try of a deletion got no answer, a later one
            that finds nothing has succeeded.
        now: a clock that never goes back, in seconds.

    Raises:
        RemoteError (`server_unreachable`): no server answers.
        RemoteError (`answer_unreadable`): another kind of server answers.
        MillstreamError: the server's error.
    """
    waiting, nap_s = _Waiting(now(), patience_s), _NAP_S
    may_be_done = False
    while True:
        got = yield call
        error: MillstreamError
        if isinstance(got, Lost):
            may_be_done |= got.sent
            error, wait_s = _unreachable(f"{url} gives no answer: {got.why}", url, got.hint), nap_s
            if got.hint:
                raise error
        else:
            assert got is not None, "a call is answered"
            if 200 <= got.status < 300:
                return got
            error = problem_of(got, url)
            if may_be_done and call.method == "DELETE" and error.code == "unknown_consumer":
                return HttpAnswer(204, {}, b"")
            if got.status not in _BUSY or isinstance(error, PositionError) or error.code == "replica_too_stale":
                # If a follower is behind, ask the leader, at once.
                raise error
            wait_s = _wait_of(got, nap_s)
        if now() + wait_s >= waiting.give_up_s:
            raise error
        yield waiting.nap(wait_s, now(), error)
        nap_s = min(2 * nap_s, _NAP_MAX_S)


def appended(
    call: Call, request: AppendRequest, *, url: str, now: Callable[[], float]
) -> Exchange[Appended | AppendedTables]:
    """Send an append's call until it is answered, or its deadline is over; return its result.

    It is sent again if no answer came, or the server had no room.

    Raises:
        AppendOutcomeUnknown: the final outcome is unknown.
        HomeClosed: the connections were closed before any try; nothing was appended.
        NotEnoughReplicas: it is durable there, but others didn't confirm by the deadline that they have
            it, or no later try was possible; details: idempotency_key.
        RemoteError (`server_unreachable`), Overloaded, …: nothing was appended.
        MillstreamError: the server's error.
    """
    waiting, nap_s = _Waiting(now(), request.deadline_s), _NAP_S
    unknown: AppendOutcomeUnknown | NotEnoughReplicas | None = None
    is_told_apart = True
    while True:
        left_s = max(0.0, waiting.give_up_s - now())
        at_once_s = min(left_s, SERVER_DEADLINE_S_MAX)
        params = {**call.params, "deadline_s": f"{at_once_s:.3f}"}
        try:
            got = yield replace(call, params=params, more_patience_s=at_once_s)
        except HomeClosed as closed:
            raise (unknown or closed) from closed
        error: MillstreamError
        wait_s = nap_s
        if isinstance(got, Lost):
            error = _unreachable(f"{url} gives no answer: {got.why}; nothing was appended", url, got.hint)
            if got.hint:
                raise unknown or error
            if got.sent:
                unknown = _doubt(
                    RemoteError(f"{url} gave no answer: {got.why}", code="answer_cut_off"), unknown, call, url
                )
        else:
            assert got is not None, "a call is answered"
            if got.status == 200:
                return _appended_of(got, AppendedTables if request.table is None else Appended, url)
            error = problem_of(got, url)
            if isinstance(error, SessionsNeedOneWriter) and call.own_key and unknown is None:
                headers = {name: value for name, value in call.headers.items() if name != "Idempotency-Key"}
                call = replace(call, headers=headers, own_key=False)
                is_told_apart = False
                continue
            if isinstance(error, RoutingError):
                raise error  # no sink took it, or some did, which would get it again with each try
            if isinstance(error, ReadOnly | Fenced):
                # It stays so, and the error names the leader; the outcome of an earlier try is unknown
                # here.
                raise (unknown or error)
            if isinstance(error, NotEnoughReplicas | AppendOutcomeUnknown) or got.status in _UNTOLD:
                unknown, wait_s = _doubt(error, unknown, call, url), _wait_of(got, nap_s)
            elif got.status in _BUSY:
                wait_s = _wait_of(got, nap_s)
            elif unknown is not None and (got.status not in _JUDGED or isinstance(error, SessionsNeedOneWriter)):
                raise unknown from error  # it says nothing about the earlier try
            else:
                raise error
        if now() + wait_s >= waiting.give_up_s or (unknown is not None and not is_told_apart):
            raise unknown or error
        yield waiting.nap(wait_s, now(), unknown or error)
        nap_s = min(2 * nap_s, _NAP_MAX_S)


def json_of(answer: HttpAnswer, url: str) -> dict[str, Any]:
    """Return the object in an answer; `RemoteError` (`answer_unreadable`) if there is none."""
    try:
        found = json.loads(answer.body)
    except ValueError as error:
        raise _no_answer(answer, url) from error
    if not isinstance(found, dict):
        raise _no_answer(answer, url)
    return found


def problem_of(answer: HttpAnswer, url: str) -> MillstreamError:
    """Return the error in an answer."""
    said = answer.headers.get("content-type", "").partition(";")[0].strip()
    if said == _PROBLEM_TYPE:
        facts = json_of(answer, url)
        details = facts.get("details")
        if isinstance(facts.get("code"), str):
            return error_of(
                {
                    "code": facts["code"],
                    "message": str(facts.get("detail", "")),
                    "hint": str(facts.get("hint", "")),
                    "details": details if isinstance(details, dict) else {},
                }
            )
        if isinstance(facts.get("detail"), str):
            # It tells no more than its status: a path that an older server lacks, or a bug of the server.
            return RemoteError(f"{url} answered {answer.status}: {facts['detail']}", url=url, status=answer.status)
    return _no_answer(answer, url)


def whole_table(pieces: Iterator[pa.Table] | list[pa.Table], url: str) -> pa.Table:
    """Return the pieces of a query's answer as one table."""
    found = list(pieces)
    if not found:
        raise RemoteError(f"{url} answered without columns", code="answer_unreadable", url=url)
    return pa.concat_tables(found)


def _appended_of(answer: HttpAnswer, kind: type[Appended | AppendedTables], url: str) -> Appended | AppendedTables:
    facts = json_of(answer, url)
    try:
        return kind.from_dict(facts)
    except (KeyError, ValueError, TypeError) as error:
        raise _no_answer(answer, url) from error


def _unreachable(why: str, url: str, hint: str) -> RemoteError:
    return RemoteError(why, code="server_unreachable", hint=hint or None, url=url)


def _unknown(why: str, call: Call, url: str) -> AppendOutcomeUnknown:
    key = call.headers.get("Idempotency-Key")
    if key is not None:
        hint = f"Send the same rows again with idempotency_key={key!r}: they aren't appended twice."
    elif "Millstream-Session" in call.headers:
        hint = "Send the same rows again with its session and number: they aren't appended twice."
    else:
        hint = "Look whether they are there before you send them again."
    return AppendOutcomeUnknown(
        f"{why}: the rows may or may not be durable",
        hint=hint,
        url=url,
        **({} if key is None else {"idempotency_key": key}),
    )


def _doubt(
    error: MillstreamError, before: AppendOutcomeUnknown | NotEnoughReplicas | None, call: Call, url: str
) -> AppendOutcomeUnknown | NotEnoughReplicas:
    """Return the outcome known after an uncertain try: once it is reported durable, later tries don't change that."""
    if not isinstance(error, NotEnoughReplicas):
        return before if isinstance(before, NotEnoughReplicas) else _unknown(error.message, call, url)
    if "Idempotency-Key" in call.headers:
        error.details.setdefault("idempotency_key", call.headers["Idempotency-Key"])
    return error


def _no_answer(answer: HttpAnswer, url: str) -> RemoteError:
    said = answer.body[:200].decode(errors="replace")
    return RemoteError(
        f"{url} answered {answer.status}, but the answer isn't Millstream's: {said!r}",
        code="answer_unreadable",
        url=url,
        status=answer.status,
    )


def _wait_of(answer: HttpAnswer, otherwise_s: float) -> float:
    """Return the seconds of `Retry-After`; a date there is ignored."""
    said = answer.headers.get("retry-after", "")
    return max(float(said), otherwise_s) if said.isascii() and said.isdecimal() else otherwise_s
