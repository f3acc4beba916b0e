"""The ASGI application of a home: FastAPI for what people and programs ask now and then, and beside it the paths on which rows come in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.app.config.quantities import size_bytes
from millstream.app.serving.access import Access
from millstream.app.serving.groups import Groups
from millstream.app.serving.health import Health
from millstream.app.serving.intake import Intake, Receive
from millstream.app.serving.line_writes import VERSION, LineWrites
from millstream.app.serving.problems import MEDIA_TYPE, encoded, headers_of, plain_problem, problem_of
from millstream.app.serving.reading import Reading
from millstream.app.serving.requests import Scope, Send
from millstream.app.serving.writes import Writes, is_rows_path
from millstream.app.wiring import place_compiled_code
from millstream.app.writing.appending import HomeAppender
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.app.home import Home
    from millstream.model.appends import AppendBatch
    from millstream.model.operations import Appended

logger = structlog.get_logger("millstream.serve")

_TITLE: Final = "Millstream"
_ABOUT: Final = "An ordered, durable change log: rows in over HTTP, and how the home does."


class Application:
    """What `serve` serves.

    Args:
        home: which.
    """

    def __init__(self, home: Home) -> None:
        place_compiled_code(home)
        http = home.config.http
        self.home: Final = home
        self.health: Final = Health(home)
        self.appender: Final = HomeAppender(home)
        self.intake: Final = Intake(size_bytes(http.inflight_bytes_max), size_bytes(http.body_bytes_max))
        self.groups: Final = Groups(self._append)
        self.reading: Final = Reading(home)
        self._writes = Writes(home, self.groups, self.intake)
        self._of_paths = {b"/write": LineWrites(self._writes, "v1"), b"/api/v2/write": LineWrites(self._writes, "v2")}

    async def _append(self, stream: str, batch: AppendBatch, deadline_s: float) -> list[Appended | MillstreamError]:
        return await self.appender.append_batch_async(stream, batch, deadline_s=deadline_s)

    def close(self) -> None:
        """Where this process wrote the home, it is done with that."""
        self.reading.close()
        self.appender.close()

    def asgi(self) -> Any:
        """The application, as a server calls it."""
        others = self.make_fastapi()
        rows, lines = self._writes, self._of_paths

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["method"] == "POST":
                path = scope["raw_path"]
                if is_rows_path(path):
                    await rows(scope, receive, send)
                    return
                if path in lines:
                    await lines[path](scope, receive, send)
                    return
            await others(scope, receive, send)

        return application

    def make_fastapi(self) -> Any:
        """What isn't a write."""
        from fastapi import FastAPI
        from fastapi.exceptions import RequestValidationError
        from fastapi.responses import JSONResponse, Response
        from starlette.exceptions import HTTPException
        from starlette.requests import Request
        from starlette.routing import Route

        from millstream import __version__
        from millstream.app.serving.openapi import with_writes

        app = FastAPI(title=_TITLE, description=_ABOUT, version=__version__, responses=None)
        health = self.health
        app.state.access = Access.of_home(self.home)
        app.include_router(self.reading.router)

        def problem(document: dict[str, Any], headers: Any = None) -> Response:
            said = dict(headers or {})
            said.update({name.decode(): value.decode() for name, value in headers_of(document["status"])})
            return Response(encoded(document), document["status"], said, media_type=MEDIA_TYPE)

        @app.exception_handler(MillstreamError)
        async def refused(_request: Request, error: Exception) -> Response:
            assert isinstance(error, MillstreamError)
            return problem(problem_of(error))

        @app.exception_handler(RequestValidationError)
        async def invalid(_request: Request, error: Exception) -> Response:
            assert isinstance(error, RequestValidationError)
            said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            return problem(plain_problem(422, said))

        @app.exception_handler(HTTPException)
        async def answered(_request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            return problem(plain_problem(error.status_code, str(error.detail)), error.headers)

        @app.exception_handler(Exception)
        async def failed(_request: Request, _error: Exception) -> Response:
            return problem(plain_problem(500, "this is a bug of the server's"))

        @app.get("/status", tags=["health"], summary="The whole status, as `millstream status --json` prints it.")
        def get_status() -> JSONResponse:
            return JSONResponse(health.status())

        unwell: Any = {503: {"description": "They don't."}}

        @app.get(
            "/healthz",
            tags=["health"],
            summary="200 while capture and pipeline run and nothing is unreadable, else 503.",
            responses=unwell,
        )
        def get_health() -> JSONResponse:
            healthy, facts = health.healthy()
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
            summary="200 while writes are taken; 503 while the server ends, or nobody takes them yet.",
            responses=unready,
        )
        def get_readiness() -> Response:
            ready, why = health.ready()
            return JSONResponse({"ready": True, "detail": why}) if ready else problem(plain_problem(503, why))

        @app.get("/metrics", tags=["health"], summary="Metrics in Prometheus's text format.")
        def get_metrics() -> Response:
            from millstream.app.serving.metrics import prometheus_text

            return Response(prometheus_text(health.status), media_type="text/plain; version=0.0.4; charset=utf-8")

        influx = {"X-Influxdb-Version": VERSION.decode(), "X-Influxdb-Build": "OSS"}

        @app.api_route(
            "/ping",
            methods=["GET", "HEAD"],
            status_code=204,
            response_model=None,
            tags=["write"],
            summary="InfluxDB's.",
        )
        def get_ping() -> Response:
            return Response(status_code=204, headers=influx)

        @app.get("/health", tags=["write"], summary="InfluxDB's: whether lines are taken.", responses=unready)
        def get_influx_health() -> JSONResponse:
            ready, why = health.ready()
            facts = {"name": "influxdb", "message": why, "status": "pass" if ready else "fail", "checks": []}
            return JSONResponse({**facts, "version": VERSION.decode()}, 200 if ready else 503, influx)

        # A path that takes writes says so to who asks it otherwise.
        app.router.routes.append(Route("/v1/streams/{stream}/tables/{table}", self._writes, methods=["POST"]))
        for path, endpoint in self._of_paths.items():
            app.router.routes.append(Route(path.decode(), endpoint, methods=["POST"]))
        described = app.openapi

        def openapi() -> dict[str, Any]:
            if app.openapi_schema is None:
                app.openapi_schema = with_writes(described())
            return app.openapi_schema

        app.openapi = openapi  # type: ignore[method-assign]
        return app
