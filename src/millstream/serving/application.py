"""The ASGI application of a home: FastAPI for occasional requests, and separate fast paths for incoming rows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.requests import Request
from starlette.routing import Route

from millstream import __version__
from millstream.config.quantities import size_bytes
from millstream.errors import MillstreamError
from millstream.model.access import Right
from millstream.serving.access import Access, allow
from millstream.serving.consumer_requests import Consumers
from millstream.serving.health import Health
from millstream.serving.http_reads import Reading
from millstream.serving.line_writes import VERSION
from millstream.serving.openapi import with_writes
from millstream.serving.problem_documents import MEDIA_TYPE, plain_problem, response_of, tell_problems
from millstream.serving.request_bodies import MemoryBudget, Receive, alone
from millstream.serving.requests import Scope, Send
from millstream.serving.row_requests import RowRequests, measured
from millstream.serving.row_writes import ROWS_PATH, TABLES_PATH
from millstream.serving.tail.endpoint import Tails
from millstream.serving.unknown_paths import known_parameters
from millstream.workers import Pool

if TYPE_CHECKING:
    from millstream.home.home import Home

_TITLE: Final = "Millstream"
_SESSIONS_AT_ONCE: Final = 16
"""Number of requests for a session at a time; others wait for their turn."""
_ABOUT: Final = "An ordered, durable change log: rows in over HTTP, and how the home does."


class Part(Protocol):
    """A part of the application from a room above this one."""

    @property
    def router(self) -> APIRouter:
        """Its paths."""

    def start(self) -> None:
        """Begin work that no request asks for: the home is served now."""

    def close(self) -> None:
        """Close what it holds."""


class Application:
    """The application that `serve` runs."""

    def __init__(
        self,
        home: Home,
        access: Access,
        parts: Iterable[Callable[[Application], Part]] = (),
        share: Callable[[int], int] = alone,
    ) -> None:
        http = home.config.http
        self.home: Final = home
        self.access: Final = access
        self.health: Final = Health(home)
        self.budget: Final = MemoryBudget(size_bytes(http.inflight_bytes_max), size_bytes(http.body_bytes_max), share)
        self._rows = RowRequests(home, access, self.budget)
        self.appender: Final = self._rows.appender
        self.batches: Final = self._rows.batches
        self.parser: Final = self._rows.parser
        self.reading: Final = Reading(home, self.budget)
        self.consumers: Final = Consumers(home, self.budget)
        self.tails: Final = Tails(home)
        # A session waits for followers, for seconds: probes of health, on asyncio's threads, never wait behind it.
        self._sessions = Pool(_SESSIONS_AT_ONCE, thread_name_prefix="sessions")
        self._parts = [make(self) for make in parts]

    def drains(self) -> None:
        """Report from now on that the server is about to end."""
        self.health.draining = True

    def start(self) -> None:
        """Begin work that no request asks for; call it when this process serves the home."""
        self.consumers.of_home.start()
        for part in self._parts:
            part.start()

    def close(self) -> None:
        """Stop writing the home, if this process did."""
        for part in self._parts:
            part.close()
        self.consumers.close()
        self.reading.close()
        self.tails.close()
        self._rows.close()
        self.health.close()
        self._sessions.shutdown(wait=False, cancel_futures=True)

    async def _may_read(self, scope: Scope) -> bool:
        with contextlib.suppress(MillstreamError):
            return (await self.access.caller_of(scope)).may(Right.READ)
        return False

    async def _readiness(self, scope: Scope) -> tuple[bool, str, bool]:
        """Return whether writes are taken, and why not; and whether the caller may read the home.

        The reason can name streams, folders and nodes: only a caller that may read gets it.
        """
        ready, why = await asyncio.to_thread(self.health.ready)
        may_read = await self._may_read(scope)
        return ready, why if ready or may_read else "writes aren't taken", may_read

    def asgi(self) -> Any:
        """Return the application, as a server calls it."""
        others = self.make_fastapi()
        # FastAPI makes its tables of paths when it first looks for one, in tenths of a second: not while a viewer waits.
        for route in others.routes:
            route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})
        rows = self._rows

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await (rows if rows.takes(scope) else others)(scope, receive, send)

        return measured(self.home, self.access, application, self._route_of)

    def _route_of(self, scope: Scope) -> str:
        """Return a request's path with names for its variable parts; `other` for an unknown path."""
        return (
            self._rows.route_of(scope) if self._rows.takes(scope) else str(getattr(scope.get("route"), "path", "other"))
        )

    def _include_routers(self, app: FastAPI) -> None:
        for router in (self.reading.router, self.consumers.router, self.tails.router):
            app.include_router(router)
        for part in self._parts:
            app.include_router(part.router)

    def make_fastapi(self) -> FastAPI:
        """Return the part for everything except writes."""
        app = FastAPI(
            title=_TITLE,
            description=_ABOUT,
            version=__version__,
            # FastAPI's pages load scripts from another host, and a page of ours may act for a console's viewer.
            docs_url=None,
            redoc_url=None,
            responses=None,
            dependencies=[Depends(known_parameters)],
        )
        health = self.health
        tell_problems(app)
        app.state.access = self.access
        self._include_routers(app)
        may_read = [Depends(allow(Right.READ))]

        @app.get(
            "/status",
            tags=["health"],
            dependencies=may_read,
            summary="The whole status, as `millstream status --json` prints it, and its age: the last one if a new one hangs.",
        )
        def get_status() -> JSONResponse:
            return JSONResponse(health.answer())

        @app.get(
            "/v1/streams/{stream}/session",
            tags=["write"],
            dependencies=[Depends(allow(Right.WRITE))],
            summary="A session as the stream's log has it: its mark, and its numbers above the mark.",
        )
        async def get_session(stream: str, name: str) -> JSONResponse:
            found = await asyncio.wrap_future(self._sessions.submit(self.appender.session, stream, name))
            return JSONResponse(found.as_dict())

        unwell: Any = {503: {"description": "They don't."}}

        @app.get(
            "/healthz",
            tags=["health"],
            summary="200 while capture and pipeline run and nothing is unreadable, else 503.",
            responses=unwell,
        )
        async def get_health(request: Request) -> JSONResponse:
            healthy, facts = await asyncio.to_thread(health.healthy)
            # Load balancers have no token: they get the status without the reasons.
            if not await self._may_read(request.scope):
                facts = {"healthy": healthy}
            return JSONResponse(facts, 200 if healthy else 503)

        unready: Any = {
            503: {
                "description": "They aren't.",
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
            }
        }

        @app.get(
            "/readyz",
            tags=["health"],
            summary="200 while writes are taken; 503 while the server ends, or no writer takes them yet.",
            responses=unready,
        )
        async def get_readiness(request: Request) -> Response:
            ready, why, may_read = await self._readiness(request.scope)
            errors = await asyncio.to_thread(health.errors) if may_read else []
            if not ready:
                return response_of(plain_problem(503, why) | ({"errors": errors} if errors else {}))
            return JSONResponse({"ready": True, "detail": why, "errors": errors})

        @app.get(
            "/metrics",
            tags=["health"],
            dependencies=may_read,
            response_class=PlainTextResponse,
            summary="Metrics in Prometheus's text format.",
        )
        def get_metrics() -> Response:
            from millstream.serving.metrics import prometheus_text

            return Response(prometheus_text(health.answer), media_type="text/plain; version=0.0.4; charset=utf-8")

        influx = {"X-Influxdb-Version": VERSION.decode(), "X-Influxdb-Build": "OSS"}

        @app.head("/ping", status_code=204, response_model=None, include_in_schema=False)
        @app.get(
            "/ping",
            status_code=204,
            response_model=None,
            tags=["write"],
            summary="204 if the server answers, as InfluxDB's clients ask for it.",
        )
        def get_ping() -> Response:
            return Response(status_code=204, headers=influx)

        @app.get("/health", tags=["write"], summary="InfluxDB's: whether lines are taken.", responses=unready)
        async def get_influx_health(request: Request) -> JSONResponse:
            ready, why, _ = await self._readiness(request.scope)
            facts: dict[str, Any] = {
                "name": "influxdb",
                "message": why,
                "status": "pass" if ready else "fail",
                "checks": [],
            }
            return JSONResponse({**facts, "version": VERSION.decode()}, 200 if ready else 503, influx)

        # A path that takes writes reports its methods to other requests.
        for rows_path in (ROWS_PATH, TABLES_PATH):
            app.router.routes.append(Route(rows_path, self._rows.writes, methods=["POST"]))
        for path, endpoint in self._rows.of_paths.items():
            app.router.routes.append(Route(path.decode(), endpoint, methods=["POST"]))
        described = app.openapi

        def openapi() -> dict[str, Any]:
            if app.openapi_schema is None:
                app.openapi_schema = with_writes(described())
            return app.openapi_schema

        app.openapi = openapi  # type: ignore[method-assign]
        return app
