"""A client's handling of requests and answers, without I/O: generators that yield calls and waits.

`client` and `millstream.aio` carry them out, one with blocking threads, the other on an event loop.
Queries are resent, and so are appends. Every append has an identity (`Idempotency-Key` if the caller gave
none), so that one whose answer was lost isn't appended twice.
"""

from __future__ import annotations

import json
import uuid
from base64 import b64encode
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from urllib.parse import quote, urlsplit

import pyarrow as pa

from millstream.client.pieces import ARROW_TYPE, PIECES_TYPE
from millstream.client.protocol import SERVER_DEADLINE_S_MAX, check_deadline
from millstream.errors import (
    AccessError,
    AnswerCutOff,
    AnswerUnreadable,
    AppendOutcomeUnknown,
    Fenced,
    MillstreamError,
    NotEnoughReplicas,
    PositionError,
    ReadOnly,
    RemoteError,
    ReplicaTooStale,
    RoutingError,
    SessionsNeedOneWriter,
    UnknownStream,
    UsageError,
    error_of,
)
from millstream.ingest.rows_to_arrow import table_of
from millstream.model.addresses import mask_address
from millstream.model.ids import check_stream_name
from millstream.model.names import parse_qualified_name
from millstream.model.operations import Appended, AppendedTables
from millstream.model.replication import AckLevel

if TYPE_CHECKING:
    from millstream.ingest.rows_to_arrow import Rows
    from millstream.model.positions import StreamToken

JSON_TYPE: Final = "application/json"
_PROBLEM_TYPE: Final = "application/problem+json"
_NAP_S: Final = 0.05
"""Wait before the second try; doubled with each one, up to `_NAP_MAX_S`."""
_NAP_MAX_S: Final = 2.0
_BUSY: Final = frozenset({429, 503})
"""Statuses that mean that nothing was done, but may be later."""
_UNTOLD: Final = frozenset({500, 502, 504})
"""Statuses of a failure on the way: how far the request had come is unknown."""

_Result = TypeVar("_Result")
_Written = TypeVar("_Written", Appended, AppendedTables)


@dataclass(frozen=True, slots=True)
class Call:
    """A request to make."""

    method: str
    path: str
    """The path from the server's root, quoted."""
    params: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    in_pieces: bool = False
    """Whether a successful answer is read piece by piece: it is returned open."""
    own_key: bool = False
    """Whether this client made the idempotency key: if the server knows no keys, the call goes without."""
    more_patience_s: float = 0.0
    """Additional seconds until its answer must begin."""


@dataclass(frozen=True, slots=True)
class Nap:
    """A wait."""

    seconds: float


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


Steps: TypeAlias = Generator[Call | Nap, HttpAnswer | Lost | None, _Result]


def check_url(url: str) -> str:
    """Return the address without a trailing slash.

    Raises:
        UsageError: it isn't HTTP, or contains a secret, which every error would show.
    """
    parts = urlsplit(url)
    if parts.username is not None:
        raise UsageError("an address has no user or password in it", hint="Pass the access token as token=….")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(
            f"{mask_address(url)!r} is no address of a server", hint="It reads like http://127.0.0.1:8787."
        )
    return url.rstrip("/")


def check_name(stream: str) -> None:
    """Raise `UnknownStream` if no stream can have the name."""
    try:
        check_stream_name(stream)
    except UsageError as error:
        raise UnknownStream(f"no stream {stream}", hint=error.hint, stream=stream) from error


def of_stream(stream: str, what: str) -> str:
    """Return the path of a stream's resource; `UnknownStream` if no stream can have the name."""
    check_name(stream)
    return f"/v1/streams/{quote(stream, safe='')}/{what}"


def session_call(stream: str, name: str) -> Call:
    """Return the request for the log's facts of a session."""
    return Call("GET", of_stream(stream, "session"), {"name": name})


def between(after: StreamToken | str | None, upto: StreamToken | str | None) -> dict[str, str]:
    """Return two tokens as parameters."""
    return {name: str(token) for name, token in (("after", after), ("upto", upto)) if token is not None}


def asked(call: Call, *, url: str, patience_s: float, now: Callable[[], float]) -> Steps[HttpAnswer]:
    """Return the answer to a query, which is resent while no server answers or has room.

    Args:
        call: a call that changes nothing, so that it may be made any number of times.
        url: for errors.
        patience_s: how long to retry.
        now: a clock that never goes back, in seconds.

    Raises:
        RemoteError (`server_unreachable`): no server answers.
        AnswerUnreadable: another kind of server answers.
        MillstreamError: the server's error.
    """
    give_up_s, nap_s = now() + patience_s, _NAP_S
    while True:
        got = yield call
        error: MillstreamError
        if isinstance(got, Lost):
            error, wait_s = _unreachable(f"{url} gives no answer: {got.why}", url, got.hint), nap_s
            if got.hint:
                raise error
        else:
            assert got is not None, "a call is answered"
            if 200 <= got.status < 300:
                return got
            error = problem_of(got, url)
            if got.status not in _BUSY or isinstance(error, PositionError | ReplicaTooStale):
                # If a follower is behind, ask the leader, at once.
                raise error
            wait_s = _wait_of(got, nap_s)
        if now() + wait_s >= give_up_s:
            raise error
        yield Nap(wait_s)
        nap_s = min(2 * nap_s, _NAP_MAX_S)


def append_call(
    stream: str,
    table: str,
    rows: Rows,
    identity: Mapping[str, str],
    *,
    keep_valid_rows: bool,
) -> Call:
    """Return an append as a request; one whose `identity_of` is empty gets a key.

    Raises:
        InvalidValue, RowsTooLarge: as `table_of`.
        UsageError: the table has no name.
    """
    parse_qualified_name(table)
    columns = rows if isinstance(rows, pa.Table) else table_of(rows)
    path = of_stream(stream, f"tables/{quote(table, safe='')}")
    return _append_of(path, identity, ARROW_TYPE, _stream_of(columns), keep_valid_rows=keep_valid_rows)


def append_all_call(
    stream: str,
    tables: Mapping[str, pa.Table],
    identity: Mapping[str, str],
    *,
    keep_valid_rows: bool,
) -> Call:
    """Return an append to several tables as a request: each table's rows are an Arrow stream, in base64 within JSON.

    So they keep their types. Raises as `append_call`.
    """
    rows = {name: b64encode(_stream_of(columns)).decode() for name, columns in tables.items()}
    body = json.dumps({"tables": rows}).encode()
    return _append_of(of_stream(stream, "tables"), identity, JSON_TYPE, body, keep_valid_rows=keep_valid_rows)


def identity_of(
    session: str | None, number: int | None, idempotency_key: str | None, acks: str | None = None
) -> dict[str, str]:
    """Return the headers that identify an append, and name its level.

    Raises:
        UsageError: they are two identities, or half of one; or `acks` is no level.
    """
    if (session is None) != (number is None) or (session is not None and idempotency_key is not None):
        raise UsageError(
            "an append has either a session and its number in it, or an idempotency key",
            hint="Pass session= and number=, or idempotency_key=, or neither.",
        )
    headers = {}
    if acks is not None:
        headers["Millstream-Acks"] = str(AckLevel.parse(acks))
    if session is not None:
        headers |= {"Millstream-Session": session, "Millstream-Session-Number": str(number)}
    elif idempotency_key is not None:
        headers["Idempotency-Key"] = idempotency_key
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()) or value != value.strip():
            raise UsageError(f"{name} {value!r} can't be sent", hint="Use printable ASCII, without blanks at the ends.")
    return headers


def _append_of(path: str, identity: Mapping[str, str], media_type: str, body: bytes, *, keep_valid_rows: bool) -> Call:
    """Return a write as a request; one without an identity gets a key."""
    headers = {"Content-Type": media_type, **identity}
    own_key = not headers.keys() & {"Millstream-Session", "Idempotency-Key"}
    if own_key:
        headers["Idempotency-Key"] = uuid.uuid4().hex
    params = {"on_clash": "rows" if keep_valid_rows else "request"}
    return Call("POST", path, params, headers, body, own_key=own_key)


def _stream_of(columns: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, columns.schema) as out:
        out.write_table(columns)
    return bytes(sink.getvalue().to_pybytes())


def appended(
    call: Call, kind: type[_Written], *, url: str, deadline_s: float, now: Callable[[], float]
) -> Steps[_Written]:
    """Send an append until it is answered, or its deadline is over; return its result as `kind`.

    It is sent again if no answer came, or the server had no room.

    Raises:
        AppendOutcomeUnknown: the final outcome is unknown.
        NotEnoughReplicas: it is durable there, but others didn't confirm by the deadline that they have
            it, or no later try was possible; details: idempotency_key.
        RemoteError (`server_unreachable`), Overloaded, …: nothing was appended.
        MillstreamError: the server's error.
    """
    give_up_s, nap_s = now() + check_deadline(deadline_s), _NAP_S
    unknown: AppendOutcomeUnknown | NotEnoughReplicas | None = None
    is_told_apart = True
    while True:
        left_s = max(0.0, give_up_s - now())
        at_once_s = min(left_s, SERVER_DEADLINE_S_MAX)
        params = {**call.params, "deadline_s": f"{at_once_s:.3f}"}
        got = yield replace(call, params=params, more_patience_s=at_once_s)
        error: MillstreamError
        wait_s = nap_s
        if isinstance(got, Lost):
            error = _unreachable(f"{url} gives no answer: {got.why}; nothing was appended", url, got.hint)
            if got.hint:
                raise unknown or error
            if got.sent:
                unknown = _doubt(AnswerCutOff(f"{url} gave no answer: {got.why}"), unknown, call, url)
        else:
            assert got is not None, "a call is answered"
            if got.status == 200:
                return _appended_of(got, kind, url)
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
            elif unknown is not None and isinstance(error, AccessError | SessionsNeedOneWriter):
                raise unknown from error  # it precedes any look-up of the earlier try
            else:
                raise error
        if now() + wait_s >= give_up_s or (unknown is not None and not is_told_apart):
            raise unknown or error
        yield Nap(wait_s)
        nap_s = min(2 * nap_s, _NAP_MAX_S)


def query_call(sql: str, stream: str, as_of: StreamToken | datetime | str | None, *, lake_only: bool = False) -> Call:
    """Return a query as a request."""
    asks: dict[str, Any] = {"sql": sql}
    if as_of is not None:
        asks["as_of"] = as_of.isoformat() if isinstance(as_of, datetime) else str(as_of)
    if lake_only:
        asks["lake_only"] = True
    headers = {"Content-Type": "application/json", "Accept": PIECES_TYPE}
    return Call("POST", of_stream(stream, "query"), {}, headers, json.dumps(asks).encode(), in_pieces=True)


def changes_call(stream: str, table: str | Sequence[str] | None, after: StreamToken | str, upto: StreamToken) -> Call:
    """Return the request for the records between two tokens, each batch with its token."""
    names = [table] if isinstance(table, str) else table
    if names is not None and not names:
        raise UsageError("no table is named", hint="Name at least one table, or leave the argument out for all.")
    params: dict[str, str | Sequence[str]] = {**between(after, upto)}
    if names is not None:
        params["table"] = list(names)
    return Call("GET", of_stream(stream, "changes"), params, in_pieces=True)


def merged_call(stream: str, table: str, at: datetime | None) -> Call:
    """Return the request for a table merged from all regions."""
    params = {"table": table} | ({} if at is None else {"at": at.isoformat()})
    return Call("GET", of_stream(stream, "merged"), params, {"Accept": PIECES_TYPE}, in_pieces=True)


def only_stream(names: list[str]) -> str:
    """Return the only stream.

    Raises:
        UnknownStream: there is none, or there are several.
    """
    if len(names) != 1:
        known = ", ".join(names) or "none yet"
        raise UnknownStream(f"the home has {len(names)} streams", hint=f"Pass stream=…, one of: {known}.", known=names)
    return names[0]


def json_of(answer: HttpAnswer, url: str) -> dict[str, Any]:
    """Return the object in an answer; `AnswerUnreadable` if there is none."""
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
        raise AnswerUnreadable(f"{url} answered without columns", url=url)
    return pa.concat_tables(found)


def _appended_of(answer: HttpAnswer, kind: type[_Written], url: str) -> _Written:
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


def _no_answer(answer: HttpAnswer, url: str) -> AnswerUnreadable:
    said = answer.body[:200].decode(errors="replace")
    return AnswerUnreadable(
        f"{url} answered {answer.status}, but the answer isn't Millstream's: {said!r}", url=url, status=answer.status
    )


def _wait_of(answer: HttpAnswer, otherwise_s: float) -> float:
    """Return the seconds of `Retry-After`; a date there is ignored."""
    said = answer.headers.get("retry-after", "")
    return max(float(said), otherwise_s) if said.isascii() and said.isdecimal() else otherwise_s
