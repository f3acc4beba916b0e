"""The requests that a client makes of a server, as values.

Every append has an identity (`Idempotency-Key` if the caller gave none), so that one whose answer was lost isn't
appended twice. A stream with several writers takes none.
"""

from __future__ import annotations

import json
import uuid
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

import pyarrow as pa

from millstream.client.batch_stream import ARROW_TYPE, PIECES_TYPE
from millstream.errors import UnknownStream, UsageError
from millstream.model.addresses import mask_address
from millstream.model.as_of_parsing import moment_text
from millstream.model.ids import check_stream_name
from millstream.model.names import table_names
from millstream.model.replication import AckLevel

if TYPE_CHECKING:
    from millstream.client.appends import AppendRequest
    from millstream.model.positions import StreamToken

JSON_TYPE: Final = "application/json"


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
    """Whether this client made the idempotency key: if the stream has several writers, the call goes without."""
    more_patience_s: float = 0.0
    """Additional seconds until its answer must begin."""


def check_url(url: str) -> str:
    """Return the address without a trailing slash.

    Raises:
        UsageError: it isn't HTTP, or contains a secret, which every error would show.
    """
    said: object = url
    if not isinstance(said, str):
        raise UsageError(f"{url!r} is no address of a server", hint="It reads like http://127.0.0.1:8787.")
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


def append_call(request: AppendRequest, tables: Mapping[str, pa.Table]) -> Call:
    """Return an append as a request; one without an identity gets a key.

    One table's rows are the body, an Arrow stream. Those of several are such streams in base64 within JSON, so that
    they keep their types.

    Raises:
        UsageError: as `_identity_of`.
        UnknownStream: no stream can have the name.
    """
    if request.table is not None:
        what, media_type, body = (
            f"tables/{quote(request.table, safe='')}",
            ARROW_TYPE,
            _stream_of(tables[request.table]),
        )
    else:
        rows = {name: b64encode(_stream_of(columns)).decode() for name, columns in tables.items()}
        what, media_type, body = "tables", JSON_TYPE, json.dumps({"tables": rows}).encode()
    headers = {"Content-Type": media_type, **_identity_of(request)}
    own_key = not headers.keys() & {"Millstream-Session", "Idempotency-Key"}
    if own_key:
        headers["Idempotency-Key"] = uuid.uuid4().hex
    params = {"on_clash": "rows" if request.keep_valid_rows else "request"}
    return Call("POST", of_stream(request.stream, what), params, headers, body, own_key=own_key)


def _identity_of(request: AppendRequest) -> dict[str, str]:
    """Return the headers that identify an append, and name its level.

    Raises:
        UsageError: they are two identities, or half of one; or `acks` is no level.
    """
    session, number, idempotency_key = request.session, request.number, request.idempotency_key
    if (session is None) != (number is None) or (session is not None and idempotency_key is not None):
        raise UsageError(
            "an append has either a session and its number in it, or an idempotency key",
            hint="Pass session= and number=, or idempotency_key=, or neither.",
        )
    headers = {}
    if request.acks is not None:
        headers["Millstream-Acks"] = str(AckLevel.parse(request.acks))
    if session is not None:
        headers |= {"Millstream-Session": session, "Millstream-Session-Number": str(number)}
    elif idempotency_key is not None:
        headers["Idempotency-Key"] = idempotency_key
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()) or value != value.strip():
            raise UsageError(f"{name} {value!r} can't be sent", hint="Use printable ASCII, without blanks at the ends.")
    return headers


def _stream_of(columns: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, columns.schema) as out:
        out.write_table(columns)
    return bytes(sink.getvalue().to_pybytes())


def query_call(sql: str, stream: str, as_of: StreamToken | datetime | str | None, *, lake_only: bool = False) -> Call:
    """Return a query as a request."""
    asks: dict[str, Any] = {"sql": sql}
    if as_of is not None:
        asks["as_of"] = as_of.isoformat() if isinstance(as_of, datetime) else str(as_of)
    if lake_only:
        asks["lake_only"] = True
    headers = {"Content-Type": "application/json", "Accept": PIECES_TYPE}
    return Call("POST", of_stream(stream, "query"), {}, headers, json.dumps(asks).encode(), in_pieces=True)


def records_call(
    stream: str, table: str | None, after: StreamToken | str | None, upto: StreamToken | str | None
) -> Call:
    """Return the request for the records between two tokens."""
    params = between(after, upto) | ({} if table is None else {"table": table})
    return Call("GET", of_stream(stream, "records"), params, in_pieces=True)


def latest_call(
    stream: str, table: str, after: StreamToken | str | None, upto: StreamToken | str | None, rows_max: int
) -> Call:
    """Return the request for the changes of a table's rows between two tokens."""
    params = between(after, upto) | {"table": table, "rows_max": str(rows_max)}
    return Call("GET", of_stream(stream, "latest"), params, in_pieces=True)


def changes_call(stream: str, table: str | Sequence[str] | None, after: StreamToken | str, upto: StreamToken) -> Call:
    """Return the request for the records between two tokens, each batch with its token."""
    names = table_names(table)
    params: dict[str, str | Sequence[str]] = {**between(after, upto)}
    if names is not None:
        params["table"] = names
    return Call("GET", of_stream(stream, "changes"), params, in_pieces=True)


def merged_call(stream: str, table: str, at: datetime | str | None) -> Call:
    """Return the request for a table merged from all regions."""
    params = {"table": table} | ({} if at is None else {"at": moment_text(at)})
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
