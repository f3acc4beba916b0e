"""The protocol of the writer's socket.

A frame is the length of a JSON text, the length of the Arrow streams after it (0 for none), and both. The
writer begins with `{"hello": …}`, which has its version.

A request is the header of a batch (`stream`, `deadline_s`, `tables`, `requests` or `write_ids`,
`keep_valid_rows`, `keep_valid_tables`, `acks`) and the rows of its tables, an Arrow stream each. An element of
`tables` is `[table, counts, size]`, with the size of its stream in bytes. The answer is `{"outcomes": […]}`, one per request in their
order, each `{"appended": …}` or `{"error": …}`; or `{"error": …}` for all of them.

`{"stream", "session"}` asks for the log's facts of a session; the answer is `{"session": …}`. A writer
that ends sends `{"closed": true}` on each connection: requests that it hasn't answered before were never
appended.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from millstream.errors import AppendOutcomeUnknown, IngestError, InvalidValue, MillstreamError, WriterClosed, error_of
from millstream.ingest.append_requests import REQUESTS_MAX
from millstream.ingest.python_rows import ROWS_BYTES_MAX
from millstream.model.operations import Appended
from millstream.model.replication import AckLevel
from millstream.model.writes import AppendBatch, SessionFacts, TableBatch, WriteId

LENGTHS: Final = struct.Struct("<II")
"""Length of the JSON, and of the Arrow streams after it."""
HEAD_BYTES_MAX: Final = 8 << 20
"""Largest header: a batch with the most requests allowed, with long ids."""
BODY_BYTES_MAX: Final = 2 * ROWS_BYTES_MAX
"""Largest Arrow streams of rows within bounds: buffers are padded, and strings have offsets."""
VERSION: Final = 4
HELLO: Final = {"hello": VERSION}
CLOSED: Final = {"closed": True}
HELLO_PATIENCE_S: Final = 5.0
ANSWER_PATIENCE_S: Final = 60.0
"""How much longer than its deadline an append may take before its caller gives up: an fsync that hangs."""


SESSION_PATIENCE_S: Final = 10.0
"""How long a request for a session's position waits for other machines, if the stream requires them."""


def frame_of(facts: Mapping[str, Any]) -> bytes:
    """Return a frame without rows."""
    encoded = json.dumps(facts).encode()
    return LENGTHS.pack(len(encoded), 0) + encoded


def asking(stream: str, batch: AppendBatch, deadline_s: float) -> tuple[bytes, pa.Buffer]:
    """Return a batch's frame: its beginning, and the Arrow streams after it.

    `IngestError` (`rows_too_large`) if the writer would refuse it.
    """
    sink = pa.BufferOutputStream()
    tables: list[tuple[str, list[int], int]] = []
    for table in batch.tables:
        start = sink.tell()
        with pa.ipc.new_stream(sink, table.rows.schema) as out:
            out.write_table(table.rows)
        tables.append((table.table, list(table.counts), sink.tell() - start))
    body = sink.getvalue()
    facts: dict[str, Any] = {
        "stream": stream,
        "deadline_s": deadline_s,
        "tables": tables,
        "keep_valid_rows": batch.keep_valid_rows,
        "keep_valid_tables": batch.keep_valid_tables,
    }
    if batch.acks is not None:
        facts["acks"] = str(batch.acks)
    if any(batch.write_ids):
        facts["write_ids"] = [one and (one.session, one.number, one.key) for one in batch.write_ids]
    else:
        facts["requests"] = len(batch.write_ids)
    head = json.dumps(facts).encode()
    if len(head) > HEAD_BYTES_MAX or body.size > BODY_BYTES_MAX:
        raise oversized(len(head) + body.size)
    return LENGTHS.pack(len(head), body.size) + head, body


def asking_session(stream: str, name: str) -> bytes:
    """Return the frame that asks for a session."""
    return frame_of({"stream": stream, "session": name})


def session_asked(head: bytes) -> tuple[str, str] | None:
    """Return the stream and the name of a session request; None if it is another request."""
    try:
        facts = json.loads(head)
        return (str(facts["stream"]), str(facts["session"])) if "session" in facts else None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValue(f"a request can't be read: {error}") from error


def session_told(answer: Mapping[str, Any]) -> SessionFacts:
    """Return the session in an answer, or raise the error in it."""
    if "error" in answer:
        raise error_of(answer["error"])
    return SessionFacts.from_dict(answer["session"])


def asked(head: bytes, body: bytes) -> tuple[str, float, AppendBatch]:
    """Return the stream, the deadline in seconds and the batch of a request; `InvalidValue` if it isn't one."""
    try:
        facts = json.loads(head)
        stream, deadline_s = str(facts["stream"]), float(facts["deadline_s"])
        named = [(str(table), [int(count) for count in counts], int(size)) for table, counts, size in facts["tables"]]
        ids = facts.get("write_ids")
        requests = min(int(facts["requests"]), REQUESTS_MAX + 1) if ids is None else 0
        write_ids = [None] * requests if ids is None else [one and _write_id(*one) for one in ids]
        keep, keep_tables = bool(facts.get("keep_valid_rows")), bool(facts.get("keep_valid_tables"))
        acks = None if facts.get("acks") is None else AckLevel.parse(str(facts["acks"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidValue(f"a request can't be read: {error}") from error
    tables, start = [], 0
    for table, counts, size in named:
        tables.append(TableBatch(table, _rows_of(body[start : start + max(0, size)]), counts))
        start += max(0, size)
    return stream, deadline_s, AppendBatch(tables, write_ids, keep, acks, keep_tables)


def _write_id(session: str | None, number: int | None, key: str | None) -> WriteId:
    return WriteId(
        None if session is None else str(session),
        None if number is None else int(number),
        None if key is None else str(key),
    )


def _rows_of(body: bytes) -> pa.Table:
    try:
        with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
            rows: pa.Table = stream.read_all()
            rows.validate(full=True)
            return rows
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidValue(f"a request's rows can't be read: {error}") from error


def answered(outcomes: Sequence[Appended | MillstreamError]) -> bytes:
    """Return the frame that answers a batch."""
    told = [
        {"error": outcome.as_dict()} if isinstance(outcome, MillstreamError) else {"appended": _facts_of(outcome)}
        for outcome in outcomes
    ]
    return frame_of({"outcomes": told})


def _facts_of(appended: Appended) -> dict[str, object]:
    tables = {name: table.as_dict() for name, table in appended.tables.items()}
    return {**appended.as_dict(), "tables": tables}


def outcomes_of(answer: Mapping[str, Any]) -> list[Appended | MillstreamError]:
    """Return the outcome of each request in an answer; raises the error that applies to all."""
    if "error" in answer:
        raise error_of(answer["error"])
    return [
        error_of(outcome["error"]) if "error" in outcome else Appended.from_dict(outcome["appended"])
        for outcome in answer["outcomes"]
    ]


def greeted(first: Mapping[str, Any]) -> None:
    """Check the writer's greeting: `IngestError` for another version; `EOFError` if it ends instead."""
    version = first.get("hello")
    if version is None:
        raise EOFError("it just ends")
    if version != VERSION:
        raise IngestError(
            f"the process that writes the home speaks version {version} of appends, and this one {VERSION}",
            code="writer_version_differs",
            writer=version,
            own=VERSION,
        )


def answer_in(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer; `WriterClosed` if it is the writer's closing message."""
    if answer == CLOSED:
        raise WriterClosed("the writer's process has ended; nothing of it was appended")
    return answer


def no_answer(error: BaseException) -> AppendOutcomeUnknown:
    """Return the error of a request that was sent whole, and has no answer."""
    return AppendOutcomeUnknown(
        f"the writer's process gave no answer ({str(error) or type(error).__name__}): the rows may or may not be durable",
        hint="Look whether they are there (`millstream wal cat --table …`) before you send them again.",
    )


def oversized(size: int) -> IngestError:
    """Return the error of a request of that many bytes."""
    return IngestError(
        f"a request of {size} bytes is too large",
        code="rows_too_large",
        hint="Append it in several calls.",
        what="request",
        size=size,
    )
