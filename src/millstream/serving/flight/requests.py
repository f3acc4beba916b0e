"""Requests of bulk transfers over Arrow Flight, and the split of a stream of batches into appends.

Pure: `server` answers them.

A descriptor is a path `[stream, table]`, or a command: a JSON object with the fields of `PutRequest` or
`GetRequest`. A ticket is a `GetRequest`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Self

import pyarrow as pa

from millstream.errors import UsageError
from millstream.ingest.append_requests import check_write_id
from millstream.ingest.arrow_stream_decoding import written_bytes
from millstream.model.operations import Appended
from millstream.model.replication import AckLevel
from millstream.model.writes import WriteId

PIECE_BYTES: Final = 16 << 20
"""Approximate size in bytes of one operation's rows: larger batches become several. Processing takes a few
times as much memory."""
DEADLINE_S: Final = 30.0
_PIECE_ROWS: Final = 4 << 20
"""Limit of an operation's rows that take hardly a byte each."""
DEADLINE_S_MAX: Final = 600.0
_COMMAND_BYTES_MAX: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class PutRequest:
    """The parameters of a `DoPut`."""

    stream: str
    table: str
    session: str | None = None
    """A session that the caller has made; each operation is a number in it."""
    number: int | None = None
    """Number of the first operation."""
    idempotency_key: str | None = None
    """Instead of a session: the prefix of the operations' keys."""
    keep_valid_rows: bool = False
    """Whether rows that don't fit the table are left out and named; otherwise they refuse their batch."""
    on_clash: str | None = None
    """The same in the word of HTTP: `rows` or `request`."""
    deadline_s: float = DEADLINE_S
    """How long an operation waits for room in the log's queue, and then for its level."""
    acks: str | None = None
    """Acknowledgement level of an operation; None: the stream's, which is the minimum."""

    @property
    def level(self) -> AckLevel | None:
        """Return the level that `acks` names."""
        return None if self.acks is None else AckLevel.parse(self.acks)

    @classmethod
    def parse(cls, path: Sequence[bytes] | None, command: bytes | None) -> Self:
        """Parse a descriptor. `UsageError` if it is something else."""
        found = cls(**_facts(cls, path, command))
        _check(isinstance(found.session, str | None), "session must be text")
        _check(_is_number(found.number) or found.number is None, "number must be a whole number")
        _check(isinstance(found.idempotency_key, str | None), "idempotency_key must be text")
        _check((found.session is None) == (found.number is None), "session and number go together")
        _check(found.session is None or found.idempotency_key is None, "session and idempotency_key exclude each other")
        _check(isinstance(found.keep_valid_rows, bool), "keep_valid_rows must be true or false")
        _check(found.on_clash in {None, "rows", "request"}, "on_clash must be rows or request")
        _check(found.on_clash != "request" or not found.keep_valid_rows, "keep_valid_rows and on_clash disagree")
        _check(_is_time(found.deadline_s), f"deadline_s must be seconds, up to {DEADLINE_S_MAX:g}")
        _check(isinstance(found.acks, str | None), "acks must be text")
        if found.acks is not None:
            AckLevel.parse(found.acks)
        return replace(found, keep_valid_rows=found.keep_valid_rows or found.on_clash == "rows")


@dataclass(frozen=True, slots=True)
class GetRequest:
    """The parameters of a `DoGet`: one table's records in `(after, upto]`."""

    stream: str
    table: str
    after: str | None = None
    """A token that was returned before; None: from the first record that is still there."""
    upto: str | None = None
    """None: everything that is durable at the call."""
    version: int | None = None
    """The table's schema version whose columns the records have; None: the newest."""

    @classmethod
    def parse(cls, path: Sequence[bytes] | None, command: bytes | None) -> Self:
        """Parse a descriptor or a ticket. `UsageError` if it is something else."""
        found = cls(**_facts(cls, path, command))
        for name in ("after", "upto"):
            _check(isinstance(getattr(found, name), str | None), f"{name} must be a token's text")
        _check(_is_number(found.version) or found.version is None, "version must be a whole number")
        return found

    def ticket(self) -> bytes:
        """Return the ticket that `parse` accepts."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None}).encode()


@dataclass(frozen=True, slots=True)
class Piece:
    """One operation of a bulk append: a batch, or a part of a large one."""

    rows: pa.RecordBatch
    batch: int
    """The batch's place in the transfer, from 0."""
    row: int
    """The first row's place in its batch."""
    write_id: WriteId | None
    size_bytes: int = 0
    """Size in bytes that it counts for."""

    def told(self, outcome: Appended) -> dict[str, object]:
        """Return the message for the sender."""
        number = None if self.write_id is None else self.write_id.number
        facts = {"batch": self.batch, "row": self.row, **({} if number is None else {"number": number})}
        return {**facts, **outcome.as_dict()}


class Cutter:
    """Makes operations of the batches of one transfer, in their order.

    A batch is cut by its size alone. So a repeated batch is cut the same way, and each operation is
    recognized.
    """

    def __init__(self, asked: PutRequest) -> None:
        self._asked = asked
        self._number = asked.number
        self._batches = 0

    def pieces(self, rows: pa.RecordBatch, metadata: bytes | None = None) -> Iterator[Piece]:
        """Yield the operations of the next batch; none if it has no rows.

        Args:
            rows: the batch, checked by `check_batch`.
            metadata: sent with the batch: JSON with its own `number` or `idempotency_key`, or nothing.

        Raises:
            UsageError: the metadata is something else.
            IngestError (`rows_too_large`), InvalidValue: a column is unsupported, or a key is empty or too long.
        """
        batch, self._batches = self._batches, self._batches + 1
        key = None
        if self._asked.idempotency_key is not None:
            # With its suffix an empty key would look like a valid one, and be the same for all callers.
            check_write_id(WriteId(key=self._asked.idempotency_key))
            key = f"{self._asked.idempotency_key}/{batch}"
        if metadata:
            key = self._own(metadata, key)
        count = rows.num_rows
        step = max(1, min(count, count * PIECE_BYTES // max(1, rows.nbytes), _PIECE_ROWS))
        for row in range(0, count, step):
            part = key if count <= step else f"{key}/{row}"
            piece = rows.slice(row, step)
            size_bytes = written_bytes(piece) + 1024
            yield Piece(piece, batch, row, self._next_id(None if key is None else part), size_bytes)

    def _next_id(self, key: str | None) -> WriteId | None:
        if self._number is None:
            return None if key is None else WriteId(key=key)
        number, self._number = self._number, self._number + 1
        return WriteId(self._asked.session, number)

    def _own(self, metadata: bytes, key: str | None) -> str | None:
        own = _object(metadata, "a batch's metadata")
        _check(not own.keys() - {"number", "idempotency_key"}, "a batch's metadata has number or idempotency_key")
        if "number" in own:
            _check(_is_number(own["number"]) and self._number is not None, "number is a whole one, of a session")
            self._number = own["number"]
        if "idempotency_key" in own:
            found = own["idempotency_key"]
            _check(isinstance(found, str) and self._number is None, "idempotency_key is text, and without a session")
            check_write_id(WriteId(key=found))
            return str(found)
        return key


def _facts(kind: type[PutRequest | GetRequest], path: Sequence[bytes] | None, command: bytes | None) -> dict[str, Any]:
    known = [field.name for field in fields(kind)]
    if command:
        found = _object(command, "a command")
        unknown = sorted(found.keys() - set(known))
        _check(not unknown, f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
        _check(
            all(isinstance(found.get(name), str) and found[name] for name in ("stream", "table")),
            "stream and table must be named",
        )
        return found
    try:
        names = [part.decode() for part in path or ()]
    except UnicodeDecodeError as error:
        raise _wrong("a path isn't UTF-8") from error
    _check(len(names) == 2 and all(names), "a path is [stream, table]")
    return {"stream": names[0], "table": names[1]}


def _object(text: bytes, what: str) -> dict[str, Any]:
    try:
        _check(len(text) <= _COMMAND_BYTES_MAX, f"{what} is too long")
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{what} isn't JSON: {error}") from error
    _check(isinstance(found, dict), f"{what} is a JSON object")
    return dict(found)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= DEADLINE_S_MAX


def _check(holds: bool, what: str) -> None:  # noqa: FBT001 - it reads as an assertion does
    if not holds:
        raise _wrong(what)


def _wrong(what: str) -> UsageError:
    return UsageError(
        f"the request can't be understood: {what}",
        hint='Name a path [stream, table], or a command such as {"stream": "shop", "table": "public.orders"}.',
    )
