"""Consumers in Python: `home.consumers(stream)` makes and steers them, `home.consume(stream, name)` receives from one.

A home of this machine and one behind an address carry out the requests (`Ask`). `millstream.aio` makes coroutines of the
calls.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self, TypeAlias
from urllib.parse import quote

from millstream.client.http_requests import Call, of_stream
from millstream.client.http_retries import HttpAnswer, json_of
from millstream.errors import InvalidValue, MillstreamError
from millstream.model.steps import Steps, blocking, run

_WAIT_S: Final = 5.0
"""How long one request waits for messages."""
_RECORDS: Final[Mapping[str, str]] = {"receive": "messages", "dead": "dead"}
"""Requests whose answers have records, and the field that they are in."""


class Ask(NamedTuple):
    """A request to a stream's consumers."""

    what: str
    name: str | None = None
    body: Any = None


Carry: TypeAlias = Callable[[Ask], Any]
"""Carries a request out, and returns the answer; for tasks, as a coroutine."""


def call_of(stream: str, ask: Ask) -> Call:
    """Return a request as one over HTTP."""
    path = of_stream(stream, "consumers")
    if ask.name is not None:
        path += "/" + quote(ask.name, safe="")
    if ask.what in {"list", "show"}:
        return Call("GET", path)
    if ask.what == "delete":
        return Call("DELETE", path)
    if ask.what == "dead":
        return Call("GET", f"{path}/dead", {name: str(value) for name, value in ask.body.items()})
    if ask.what != "create":
        path += f"/dead/{ask.what}" if ask.what in {"retry", "drop"} else f"/{ask.what}"
    body = {} if ask.body is None else ask.body
    wait_s = body.get("wait_for_ms", 0) / 1000 if ask.what == "receive" else 0.0
    headers = {"Content-Type": "application/json"}
    if ask.what == "backfill":
        headers["Idempotency-Key"] = uuid.uuid4().hex  # it is sent again if its answer is lost
    return Call("POST", path, {}, headers, json.dumps(body).encode(), more_patience_s=wait_s)


def answer_of_call(answer: HttpAnswer, url: str) -> Any:
    """Return the answer to a request over HTTP."""
    return json_of(answer, url) if answer.body else None


def with_records(ask: Ask, body: Any) -> Any:
    """Return an answer of a home of this machine with its records as objects."""
    field_ = _RECORDS.get(ask.what)
    if field_ is None:
        return body
    return {**body, field_: [{**item, "record": json.loads(item["record"])} for item in body[field_]]}


@dataclass(slots=True)
class MessageFacts:
    """The attributes of a `Message`, for threads and for tasks."""

    id: str
    """The same for ever, however often the message is delivered: `stream-shard-epoch-offset`."""
    deliveries: int
    """Number of deliveries of the message, this one included."""
    group: str | None
    """Equal for two messages if and only if their table and key are equal."""
    record: dict[str, Any]
    """The record as `millstream wal cat` prints it."""
    ack_id: str = field(repr=False)
    is_settled: bool = False
    """Whether it was acknowledged or returned here."""
    _carry: Carry | None = field(default=None, repr=False)
    _name: str = field(default="", repr=False)

    def _asked(self, what: str, **more: Any) -> Steps[str]:
        assert self._carry is not None
        answer = yield self._carry(Ask(what, self._name, {"ack_ids": [self.ack_id], **more}))
        self.is_settled |= what != "extend"
        return str(answer["results"][0]["status"])


class Message(MessageFacts):
    """A message of a consumer; see `Consumption`."""

    __slots__ = ()

    @blocking
    def ack(self) -> Steps[str]:
        """Settle the message; return the status."""
        return self._asked("ack")

    @blocking
    def nack(self, delay_s: float = 0.0) -> Steps[str]:
        """Return the message, to be delivered again after a delay; return the status."""
        return self._asked("nack", delay_ms=milliseconds("delay_s", delay_s))

    @blocking
    def extend(self, ack_wait_s: float | None = None) -> Steps[str]:
        """Let the delivery expire so many seconds from now (the consumer's `ack_wait_ms` if None); return the status."""
        more = {} if ack_wait_s is None else {"ack_wait_ms": milliseconds("ack_wait_s", ack_wait_s)}
        return self._asked("extend", **more)


def milliseconds(name: str, seconds: float) -> int:
    """Return seconds as milliseconds. Raises `InvalidValue` if they are no finite number."""
    if not math.isfinite(seconds):
        raise InvalidValue(f"{name} isn't a number of seconds", hint="Pass a number, such as 1.5.")
    return round(seconds * 1000)


class ConsumptionSteps:
    """The messages of one `consume` block, for threads and for tasks.

    Args:
        batch_size: most messages of a request.
        wait_s: how long to wait for a message until the iteration ends; None: for ever.
    """

    _sleep: Callable[[float], Any]
    _message: type[MessageFacts]

    def __init__(self, carry: Carry, name: str, batch_size: int, wait_s: float | None) -> None:
        if wait_s is not None:
            milliseconds("wait_s", wait_s)
        self._carry = carry
        self._name = name
        self._batch_size = batch_size
        self._wait_s = wait_s
        self._fetched: deque[Any] = deque()
        self._current: Any = None
        """The message that was yielded last."""

    def _next(self) -> Steps[Any]:
        """Settle the current message and return the next one; None if none comes in time."""
        yield from self._ack_current()
        end_s = None if self._wait_s is None else time.monotonic() + self._wait_s
        while not self._fetched:
            left_s = _WAIT_S if end_s is None else max(0.0, min(_WAIT_S, end_s - time.monotonic()))
            asked = {"batch_size": self._batch_size, "wait_for_ms": int(left_s * 1000)}
            began_s = time.monotonic()
            answer = yield self._carry(Ask("receive", self._name, asked))
            messages = answer["messages"]
            self._fetched.extend(self._message(**message, _carry=self._carry, _name=self._name) for message in messages)
            if not self._fetched:
                if end_s is not None and time.monotonic() >= end_s:
                    return None
                if time.monotonic() - began_s < left_s / 2:
                    yield self._sleep(min(1.0, left_s))  # it is paused
        self._current = self._fetched.popleft()
        return self._current

    def _leave(self, *, has_failed: bool) -> Steps[None]:
        """Settle the current message, or return it; return the others, which don't count as failed.

        If the block failed, its own exception isn't replaced: messages that can't be returned come back by their expiry.
        """
        with suppress(*((MillstreamError,) if has_failed else ())):
            if not has_failed:
                yield from self._ack_current()
            elif self._current is not None and not self._current.is_settled:
                yield self._carry(Ask("nack", self._name, {"ack_ids": [self._current.ack_id]}))
            rest = [message.ack_id for message in self._fetched if not message.is_settled]
            self._fetched.clear()
            self._current = None
            if rest:
                yield self._carry(Ask("nack", self._name, {"ack_ids": rest, "failed": False}))

    def _ack_current(self) -> Steps[None]:
        current, self._current = self._current, None
        if current is not None and not current.is_settled:
            yield self._carry(Ask("ack", self._name, {"ack_ids": [current.ack_id]}))


class Consumption(ConsumptionSteps):
    """The messages of a consumer: a context manager that is iterated over. Made by `home.consume`.

    A message is acknowledged when the next one is asked for, and when the block ends. If the block ends with an
    exception, the message goes back instead, and is delivered again.

    Concurrency: one thread.
    """

    _sleep = staticmethod(time.sleep)
    _message = Message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        run(self._leave(has_failed=kind is not None))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        """Return the next message; wait for it.

        Raises:
            DeliveryError (`unknown_consumer`): the consumer was deleted.
            CursorExpired: it was cut off.
        """
        message: Message | None = run(self._next())
        if message is None:
            raise StopIteration
        return message


def definition_of(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body that creates a consumer; sequences become lists."""
    body = {"name": name, **fields}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in body.items()}


def page_of(after: str | None, limit: int | None) -> dict[str, Any]:
    """Return the fields of a request for dead letters."""
    return {name: value for name, value in (("after", after), ("limit", limit)) if value is not None}


def rows_of(tables: Iterable[str] | None, where: str | None) -> dict[str, Any]:
    """Return the fields of a backfill; `InvalidValue` if `tables` isn't a pattern or several."""
    if tables is not None and not isinstance(tables, Iterable):
        raise InvalidValue(
            f"tables must be patterns of tables, not {type(tables).__name__}", hint='Pass a list: ["public.orders"].'
        )
    patterns = [tables] if isinstance(tables, str) else tables
    fields = {"tables": None if patterns is None else list(patterns), "where": where}
    return {name: value for name, value in fields.items() if value is not None}


def dead_letters(consumers: Consumers, name: str) -> Iterator[dict[str, Any]]:
    """Yield a consumer's dead letters, the oldest first, a page at a time."""
    after: str | None = None
    while True:
        page = consumers.dead(name, after=after, limit=1000)
        yield from page["dead"]
        after = page["next"]
        if after is None:
            return


def ids_of(ids: Iterable[str] | str) -> dict[str, Any]:
    """Return the fields that name dead letters; `all` names all of them."""
    return {"ids": ids if isinstance(ids, str) else list(ids)}


class ConsumersSteps:
    """The requests to a stream's consumers, for threads and for tasks."""

    def __init__(self, carry: Carry) -> None:
        self._carry = carry

    def _asked(self, ask: Ask) -> Steps[Any]:
        return (yield self._carry(ask))


class Consumers(ConsumersSteps):
    """A stream's consumers. Made by `home.consumers`.

    Every call raises `UnknownStream`, and `DeliveryError` (`unknown_consumer`) for a name that none has.
    """

    @blocking
    def create(self, /, name: str, **fields: Any) -> Steps[dict[str, Any]]:
        """Create a consumer, and return its definition and its cursor. The same call again changes nothing.

        Args:
            name: its name.
            fields: `tables`, `where`, `columns`, `kind`, `group_by`, `start`, `ack_wait_ms`, `max_deliver`,
                `max_ack_pending`, and the settings of a sink as `webhook`, `kafka` or `redis`; see the guide to consumers.

        Raises:
            DeliveryError (`invalid_consumer`, `consumer_exists`): a field is invalid, or the name is taken.
            CursorExpired: retention has passed the token of `start`.
        """
        return self._asked(Ask("create", None, definition_of(name, fields)))

    @blocking
    def list(self) -> Steps[list[dict[str, Any]]]:
        """Return every consumer with its progress, by name."""
        consumers: list[dict[str, Any]] = (yield from self._asked(Ask("list")))["consumers"]
        return consumers

    @blocking
    def get(self, name: str) -> Steps[dict[str, Any]]:
        """Return a consumer's definition and progress."""
        return self._asked(Ask("show", name))

    @blocking
    def pause(self, name: str) -> Steps[dict[str, Any]]:
        """Deliver nothing until `resume`; return what `get` does."""
        return self._asked(Ask("pause", name))

    @blocking
    def resume(self, name: str) -> Steps[dict[str, Any]]:
        """Deliver again; return what `get` does."""
        return self._asked(Ask("resume", name))

    @blocking
    def rewind(self, name: str, to: str) -> Steps[dict[str, Any]]:
        """Begin behind a token, at a time, at `earliest` or at `latest`; return what `get` does.

        Raises:
            InvalidValue, TokenFromFuture, CursorExpired: there is no such place; nothing was changed.
        """
        return self._asked(Ask("rewind", name, {"to": str(to)}))

    @blocking
    def backfill(self, name: str, *, tables: Iterable[str] | None = None, where: str | None = None) -> Steps[int]:
        """Deliver the rows of tables as of the cursor, before later records; return the backfill's number.

        Args:
            name: the consumer.
            tables: patterns of tables; None for all of the consumer's.
            where: a condition on a row, in addition to the consumer's own.

        Raises:
            DeliveryError (`backfill_running`): one runs already.
            LakeBehind: neither the lake nor the log has the tables from their beginning.
            InvalidValue: `tables` or `where` is invalid.
            CursorExpired: the consumer was cut off.
        """
        return int((yield from self._asked(Ask("backfill", name, rows_of(tables, where))))["backfill"])

    @blocking
    def dead(self, name: str, *, after: str | None = None, limit: int | None = None) -> Steps[dict[str, Any]]:
        """Return a page of dead letters, the oldest first: `dead`, and in `next` the `after` of the next page."""
        return self._asked(Ask("dead", name, page_of(after, limit)))

    @blocking
    def retry(self, name: str, ids: Iterable[str] | str = "all") -> Steps[dict[str, Any]]:
        """Deliver dead messages again; return the status of each."""
        return self._asked(Ask("retry", name, ids_of(ids)))

    @blocking
    def drop(self, name: str, ids: Iterable[str] | str = "all") -> Steps[dict[str, Any]]:
        """Forget dead messages; return the status of each."""
        return self._asked(Ask("drop", name, ids_of(ids)))

    @blocking
    def delete(self, name: str) -> Steps[None]:
        """Remove a consumer, with its dead letters."""
        return self._asked(Ask("delete", name))
