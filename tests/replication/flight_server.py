"""A Flight server that serves exchanges alone, as a home's does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pyarrow.flight as fl

from millstream.errors import MillstreamError
from millstream.replication.flight.transport import FlightTransport
from millstream.replication.flight.wire import FollowRequest
from millstream.serving.flight.connections import cut_connections
from millstream.serving.flight.server import flight_error


class _Headers(fl.ServerMiddleware):  # type: ignore[misc] # pyarrow ships no types
    def __init__(self, authorization: str | None) -> None:
        self.authorization = authorization


class _HeadersFactory(fl.ServerMiddlewareFactory):  # type: ignore[misc] # as above
    def start_call(self, info: object, headers: dict[str, list[str]]) -> _Headers:
        del info
        return _Headers(next(iter(headers.get("authorization", ())), None))


class ExchangeServer(fl.FlightServerBase):  # type: ignore[misc] # pyarrow ships no types
    """A server that listens once it is constructed; `transport` gets the followers."""

    def __init__(
        self,
        transport: FlightTransport,
        *,
        check: Callable[[], None] = lambda: None,
        scheme: str = "grpc",
        **options: Any,
    ) -> None:
        super().__init__(f"{scheme}://127.0.0.1:0", middleware={"headers": _HeadersFactory()}, **options)
        self.transport = transport
        self.check = check
        self.refuses: MillstreamError | None = None
        self.calls = 0
        """Number of calls that run."""
        self.authorizations: list[str | None] = []
        """The credentials that each call has shown."""

    @property
    def place(self) -> str:
        return f"localhost:{self.port}"

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self.calls += 1
        self.authorizations.append(context.get_middleware("headers").authorization)
        try:
            if self.refuses is not None:
                raise self.refuses
            request = FollowRequest.parse(descriptor.command)
            cut = functools.partial(cut_connections, self.port, context.peer())
            self.transport.serve_exchange(request, reader, writer, cut=cut, check=self.check)
        except MillstreamError as error:
            raise flight_error(error) from error
        finally:
            self.calls -= 1
