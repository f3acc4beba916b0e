"""Arrow Flight: bulk appends (`DoPut`), reads (`DoGet`), and listings (`ListFlights`, `GetFlightInfo`).

Each call has a thread of gRPC's own. The numbers of concurrent reads and writes are limited; further
calls are told to retry. Rights are checked at each call, as over HTTP; the errors carry ours as JSON in
`extra_info`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.flight as fl
import structlog

from millstream.app.log_readers import open_reader
from millstream.config.quantities import size_bytes
from millstream.errors import AccessError, MillstreamError, Overloaded, Retry, Unauthenticated, UsageError, WriterClosed
from millstream.export.record_reading import table_ids
from millstream.leadership.node_calls import ACTION
from millstream.model.access import Right
from millstream.model.column_renames import names_in
from millstream.model.durations import duration_s
from millstream.model.records import record_schema
from millstream.model.schema import TableSchema
from millstream.model.schema_conversion import conform
from millstream.nodes.peer_requests import answer_node
from millstream.replication.flight.wire import FollowRequest
from millstream.serving.access import Access, Caller, Credentials, token_said
from millstream.serving.bind_check import check_protected
from millstream.serving.flight.bulk_append import BulkAppend, TransferBudget
from millstream.serving.flight.connections import Readers, Sender, Senders, cut_connections
from millstream.serving.flight.read import records
from millstream.serving.flight.requests import GetRequest, PutRequest
from millstream.serving.tls_files import Certificates
from millstream.wal.files import error_of_os
from millstream.wal.flight_log import PIECES, SegmentRequest, requested_pieces
from millstream.workers import Worker

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.nodes.log_shipping import Shipping
    from millstream.wal.reader import StreamReader
    from millstream.writers.home_appender import HomeAppender

logger = structlog.get_logger("millstream.serve")

_ENDS_WITHIN_S: Final = 10.0
"""How long calls may take to end once the server does; one that waits for its caller may take for ever."""
_REASON_ARRIVES_S: Final = 0.2
"""How long connections outlive their calls when the server ends, for callers to read the reason."""
_AGAIN_S: Final = 2.0
_HEADERS: Final = "millstream"
_FACTS_BYTES_MAX: Final = 2500
"""Size in bytes of an error: gRPC's clients take 8 KiB of headers, which contain it once, in base64, and its
message three times."""
_WORDS_MAX: Final = 300
"""Characters of a message, and of a hint."""
_DETAIL_MAX: Final = 200
_OTHER_COLUMNS: Final = (
    "Read up to a token before the change and from it on: two calls, each in the columns of its time (`version`)."
)


class _Headers(fl.ServerMiddleware):  # type: ignore[misc] # pyarrow ships no types
    """The credentials of a call."""

    def __init__(self, authorization: str | None) -> None:
        self.token = None if authorization is None else token_said(authorization)


class _HeadersFactory(fl.ServerMiddlewareFactory):  # type: ignore[misc] # as above
    """Identifies the caller before anything of the call is read: the first message may be as large as gRPC allows.

    Args:
        mutual: whether a client certificate may stand for a token; it isn't available here.
    """

    def __init__(self, access: Access, *, mutual: bool) -> None:
        super().__init__()
        self._access = access
        self._mutual = mutual

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> _Headers:
        """Keep the one header that counts, and refuse unknown callers and unsupported calls."""
        found = _Headers(next(iter(headers.get("authorization", ())), None))
        token = found.token
        if token is not None or not self._mutual:
            with telling():
                self._access.caller(Credentials(token))
        if info.method == fl.FlightMethod.GET_SCHEMA:
            # Raised here: pyarrow reports an error from a server's method with our stack.
            raise flight_error(UsageError("there is no GetSchema", hint="GetFlightInfo has the columns of a table."))
        return found


def _told(call: Callable[..., Any]) -> Callable[..., Any]:
    """Raise our errors as Flight's."""

    @functools.wraps(call)
    def told(*args: Any) -> Any:
        with telling():
            return call(*args)

    return told


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Raise our errors as Flight's; a bug of ours is logged, and reported without details."""
    try:
        yield
    except MillstreamError as error:
        raise flight_error(error) from error
    except (fl.FlightError, pa.ArrowException):
        raise  # includes the transport's errors about a caller that went away
    except Exception as error:
        logger.exception("a Flight call failed")
        raise fl.FlightInternalError(f"unexpected: {type(error).__name__}; the server's log has it") from error


def flight_error(error: MillstreamError) -> fl.FlightError:
    """Return the nearest of Flight's errors, with ours as JSON in `extra_info`.

    Long values are left out, since it travels in headers.
    """
    said = error.as_dict()
    said |= {name: _shortened(said[name]) for name in ("message", "hint")}
    facts = json.dumps(said, default=str).encode()
    if len(facts) > _FACTS_BYTES_MAX:
        said["details"] = {name: value for name, value in said["details"].items() if len(str(value)) <= _DETAIL_MAX}
        facts = json.dumps(said, default=str).encode()
    if len(facts) > _FACTS_BYTES_MAX:
        facts = json.dumps(said | {"details": {}}, default=str).encode()
    words = f"{error.code}: {_shortened(error.message)}" + (f" ({_shortened(error.hint)})" if error.hint else "")
    kind = fl.FlightServerError
    if isinstance(error, Unauthenticated):
        kind = fl.FlightUnauthenticatedError
    elif isinstance(error, AccessError):
        kind = fl.FlightUnauthorizedError
    elif error.retry in {Retry.BACKOFF, Retry.REOPEN}:
        kind = fl.FlightUnavailableError
    return kind(words, facts)


def _shortened(text: str) -> str:
    return text if len(text) <= _WORDS_MAX else f"{text[:_WORDS_MAX]}…"


class FlightServer(fl.FlightServerBase):  # type: ignore[misc] # as above
    """A home over Flight. It listens when it is made.

    Args:
        address: host and port; port 0 for any free one.
        shipping: serves the nodes that follow; None if the home is no node.

    Raises:
        MillstreamError (`address_in_use`): it can't listen there.
        AccessError (`certificate_unusable`): as `Certificates.read`.
    """

    def __init__(
        self,
        home: Home,
        access: Access,
        appender: HomeAppender,
        address: tuple[str, int],
        certificates: Certificates | None,
        shipping: Shipping | None = None,
    ) -> None:
        self._home = home
        self._shipping = shipping
        self._access = access
        self._appender = appender
        self._mutual = certificates is not None and certificates.client_ca is not None
        self._closing = threading.Event()
        flight = home.config.flight
        self._writes = threading.BoundedSemaphore(flight.calls_max)
        self._reads = threading.BoundedSemaphore(flight.calls_max)
        self._readers = Readers()
        self._senders = Senders(duration_s(flight.idle_timeout))
        self._room = TransferBudget(size_bytes(flight.inflight_bytes_max))
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        options: dict[str, Any] = {"middleware": {_HEADERS: _HeadersFactory(access, mutual=self._mutual)}}
        if certificates is not None:
            certificate, key, client_ca = certificates.read()
            options |= {"tls_certificates": [(certificate, key)]}
            if client_ca is not None:
                options |= {"verify_client": True, "root_certificates": client_ca}
        scheme = "grpc" if certificates is None else "grpc+tls"
        try:
            super().__init__(f"{scheme}://{host}:{address[1]}", **options)
        except (pa.ArrowException, OSError) as error:
            raise MillstreamError(
                f"Flight can't listen on {host}:{address[1]}: {error}",
                code="address_in_use",
                hint="Set [flight] listen in millstream.toml to a free one.",
                address=f"{host}:{address[1]}",
            ) from error
        self.address: Final = f"{host}:{self.port}"
        try:
            for callers in (self._readers, self._senders):
                Worker("flight-callers", partial(callers.watch, self.port, self._closing)).start()
        except BaseException:
            self._closing.set()
            self.shutdown()
            raise

    def end(self, within_s: float = _ENDS_WITHIN_S) -> None:
        """Take no more, let running calls end, and cut off those whose callers don't within that time."""
        self._closing.set()
        until = time.monotonic() + within_s
        if self._wait_for_calls(until):
            # A caller that still sends when its connection closes sees the break, not the reason of its call's end.
            time.sleep(_REASON_ARRIVES_S)
        try:
            ending = Worker("flight-ends", self.shutdown).start()
        except OSError:  # on this thread, it would wait for callers without a bound
            cut_connections(self.port)
            self.shutdown()
            return
        if not ending.join(max(_REASON_ARRIVES_S, until - time.monotonic())):
            logger.warning(
                "Flight calls that wait for their callers are cut off", connections=cut_connections(self.port)
            )
            ending.join(within_s)

    def _wait_for_calls(self, until: float) -> bool:
        """Wait until running calls have ended, or a moment of the monotonic clock; return whether there were any."""
        were_any = False
        with contextlib.ExitStack() as taken:
            for slots in (self._writes, self._reads):
                for _ in range(self._home.config.flight.calls_max):
                    if not slots.acquire(blocking=False):
                        were_any = True
                        if not slots.acquire(timeout=max(0.0, until - time.monotonic())):
                            return True
                    taken.callback(slots.release)
        return were_any

    # --- writing

    @_told
    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Append the caller's batches: see `BulkAppend`."""
        asked = PutRequest.parse(descriptor.path, descriptor.command)
        shown = self._shown(context)
        self._check(shown, Right.WRITE, asked.stream)
        with self._slot(self._writes), self._senders.sending(context.peer(), writer.write) as sender:
            append = BulkAppend(asked, self._appender, self._room, sender.tell)
            sender.has_work = append.has_work
            append.run(_batches(reader, sender), self._closing, lambda: self._check(shown, Right.WRITE, asked.stream))

    # --- reading

    @_told
    def do_get(self, context: Any, ticket: Any) -> Any:
        """Send the records that a ticket names, or a segment's bytes, which Spark's executors read."""
        shown = self._shown(context)
        segment = SegmentRequest.parse(ticket.ticket)
        if segment is not None:
            self._check(shown, Right.READ, segment.stream)
            folder = str(self._home.wal_folder(segment.stream))
            pieces = requested_pieces(open_reader(self._home, segment.stream), folder, segment)
            return fl.GeneratorStream(PIECES, self._sent(pieces, segment.stream, context.peer(), shown))
        asked = GetRequest.parse(None, ticket.ticket)
        self._check(shown, Right.READ, asked.stream)
        reader = open_reader(self._home, asked.stream)
        schema = _schema_of(reader, asked)
        batches = _conformed(records(reader, asked), schema)
        sent = self._sent(batches, asked.stream, context.peer(), shown)
        return fl.GeneratorStream(record_schema(schema), sent)

    def _sent(
        self, batches: Iterator[pa.RecordBatch], stream: str, peer: str, shown: Credentials
    ) -> Iterator[pa.RecordBatch]:
        with telling(), self._slot(self._reads), self._readers.reading(peer) as took:
            for batch in batches:
                took()
                self._check(shown, Right.READ, stream)
                if self._closing.is_set():
                    raise WriterClosed(
                        "the server ends", hint="Read on from the last record's `__seq` when it is back."
                    )
                yield batch

    # --- other nodes

    @_told
    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Ship a stream that this node leads to another node: see `Shipping.serve_exchange`. Returns when that ends."""
        request = FollowRequest.parse(descriptor.command)
        shown = self._shown(context)
        self._check(shown, Right.ADMIN, request.stream)
        if self._shipping is None:
            raise UsageError(
                "this home has no node name, so no node can follow it",
                hint="Set [replication] node and nodes in its millstream.toml.",
            )
        peer = context.peer()
        self._shipping.serve_exchange(
            request,
            reader,
            writer,
            cut=lambda: cut_connections(self.port, peer),
            check=lambda: self._check(shown, Right.ADMIN, request.stream),
        )

    @_told
    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """Answer another node's call: see `nodes.peer_requests`."""
        if action.type != ACTION:
            raise UsageError(f"there is no action {action.type}", hint=f"There is {ACTION}, for nodes alone.")
        try:
            asked = json.loads(action.body.to_pybytes())
            stream = str(asked["stream"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"a node's question that can't be read: {error!r}") from error
        self._check(self._shown(context), Right.ADMIN, stream)
        return iter([json.dumps(answer_node(self._home, asked)).encode()])

    @_told
    def list_actions(self, context: Any) -> list[Any]:
        """Return the only action."""
        self._caller(context)
        return [fl.ActionType(ACTION, "Requests of other nodes.")]

    @_told
    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        """Return the columns of a table's records, and a ticket for the current range: its records never change.

        `GetSchema` isn't offered: `_HeadersFactory` refuses it.
        """
        asked = GetRequest.parse(descriptor.path, descriptor.command)
        self._caller(context).check(Right.READ, asked.stream)
        reader = open_reader(self._home, asked.stream)
        return self._info(reader, asked, _schema_of(reader, asked), descriptor)

    @_told
    def list_flights(self, context: Any, criteria: bytes) -> Iterator[Any]:
        """Yield each table that the caller may read; with `criteria`, of the stream of that name."""
        caller = self._caller(context)
        found = []
        for stream in self._home.streams_on_disk():
            if not caller.may(Right.READ, stream) or (criteria and criteria != stream.encode()):
                continue
            # Tables are listed for a stale stream, too: a read of its records raises the error.
            reader = open_reader(self._home, stream, of_any_age=True)
            for schema in reader.schemas().values():
                asked = GetRequest(stream, schema.full_name)
                found.append(self._info(reader, asked, schema, fl.FlightDescriptor.for_path(stream, schema.full_name)))
        return iter(found)

    @staticmethod
    def _info(reader: StreamReader, asked: GetRequest, schema: TableSchema, descriptor: Any) -> Any:
        upto = asked.upto or str(reader.token())
        ticket = GetRequest(asked.stream, asked.table, asked.after, upto, schema.version).ticket()
        # No location: the answering server has it.
        return fl.FlightInfo(record_schema(schema), descriptor, [fl.FlightEndpoint(ticket, [])], -1, -1)

    # --- who, and how many

    def _check(self, shown: Credentials, right: Right, stream: str) -> None:
        """Check a right; with each batch too, since a transfer may outlast its token."""
        self._access.caller(shown).check(right, stream)

    def _caller(self, context: Any) -> Caller:
        return self._access.caller(self._shown(context))

    def _shown(self, context: Any) -> Credentials:
        token = context.get_middleware(_HEADERS).token
        certificate = context.peer_identity().decode(errors="replace") if self._mutual else ""
        return Credentials(token, certificate or None)

    @contextlib.contextmanager
    def _slot(self, slots: threading.BoundedSemaphore) -> Iterator[None]:
        if self._closing.is_set():
            raise WriterClosed("the server ends")
        if not slots.acquire(blocking=False):
            raise Overloaded(
                f"{self._home.config.flight.calls_max} calls of this kind run already",
                hint="Repeat the call later, or raise [flight] calls_max.",
            )
        try:
            yield
        finally:
            slots.release()


class FlightService:
    """A home's Flight server, replaced when its certificate is renewed: gRPC keeps the certificate it started with."""

    def __init__(self, make: Callable[[tuple[str, int]], FlightServer], address: tuple[str, int]) -> None:
        self._make = make
        self._host = address[0]
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._server: FlightServer | None = make(address)
        self._port: Final = self._server.port

    @property
    def address(self) -> str:
        """Return the listening address."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    def renew(self) -> None:
        """End the server, whose callers are told to retry, and listen again: on a thread, whose lack raises `OSError`."""
        Worker("flight-renews", self._renew).start()

    def end(self) -> None:
        """Stop listening."""
        self._ended.set()
        with self._lock:
            if self._server is not None:
                self._server.end()
                self._server = None

    def _renew(self) -> None:
        with self._lock:
            if self._server is not None:
                self._server.end()
                self._server = None
            while not self._ended.is_set():
                try:
                    self._server = self._make((self._host, self._port))
                except (MillstreamError, OSError) as error:
                    told = error_of_os(error) if isinstance(error, OSError) else error
                    logger.warning("Flight can't listen again", error=told.message, code=told.code, in_s=_AGAIN_S)
                    self._ended.wait(_AGAIN_S)
                else:
                    logger.info("Flight has the renewed certificate")
                    return


@contextlib.contextmanager
def flight_of(
    home: Home, access: Access, appender: HomeAppender, shipping: Shipping | None = None
) -> Iterator[FlightService]:
    """Run a home's Flight server while the block lasts, on threads of its own; the home configures one.

    Raises:
        MillstreamError (`address_in_use`), AccessError (`unprotected`, `certificate_unusable`): it can't or may not listen.
    """
    address = home.config.flight.address
    assert address is not None
    check_protected("flight", address, home.config.http)

    def make(address: tuple[str, int]) -> FlightServer:
        return FlightServer(home, access, appender, address, Certificates.of_home(home), shipping)

    service = FlightService(make, address)
    try:
        logger.info("flight listens", address=service.address)
        yield service
    finally:
        service.end()


def _batches(reader: Any, sender: Sender) -> Iterator[tuple[pa.RecordBatch, bytes | None]]:
    """Yield a caller's batches; those that arrived whole count even if the caller goes away."""
    while True:
        try:
            with sender.waited_for():
                chunk = reader.read_chunk()
        except StopIteration:
            return
        metadata = None if chunk.app_metadata is None else chunk.app_metadata.to_pybytes()
        if chunk.data is not None:
            yield chunk.data, metadata


def _conformed(batches: Iterator[pa.RecordBatch], schema: TableSchema) -> Iterator[pa.RecordBatch]:
    """Yield the batches in the columns of one version of the table."""
    target = record_schema(schema)
    for batch in batches:
        is_other = not batch.schema.equals(target, check_metadata=True)
        names = names_in(TableSchema.from_arrow(batch.schema), schema) if is_other else None
        yield conform(batch, target, hint=_OTHER_COLUMNS, names=names)


def _schema_of(reader: StreamReader, asked: GetRequest) -> TableSchema:
    """Return the table's schema, of the requested version or the newest; raises as `table_ids`."""
    ids = table_ids(reader, asked.table)
    if asked.version is not None:
        found = reader.schema_versions()
        for key in ((table, asked.version) for table in reversed(ids)):
            if key in found:
                return found[key]
    return reader.schemas().get(ids[-1]) or max(
        (schema for (table, _), schema in reader.schema_versions().items() if table == ids[-1]),
        key=lambda schema: schema.version,
    )
