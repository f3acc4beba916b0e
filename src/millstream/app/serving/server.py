"""`serve`: a home's status over HTTP, for Prometheus, for load balancers and for people. It only reads."""

from __future__ import annotations

import socket
import time
from typing import Any, Final

import structlog

from millstream.app.home import Home
from millstream.app.locks import LOCK_PATIENCE_S, RoleLock
from millstream.app.part import Lifeline
from millstream.app.status import collect_status
from millstream.errors import AddressInUse

logger = structlog.get_logger("millstream.serve")

_KEEP_S: Final = 1.0
"""Who asks oftener than this gets the same answer: a status reads the lake's last cut."""


def serve_home(home: Home, lifeline: Lifeline) -> None:
    """Serve until told to stop.

    Raises:
        HomeBusy: the home is served already.
        AddressInUse: it can't listen there.
    """
    import uvicorn

    home.prepare()
    host, port = home.config.http.address
    with (
        RoleLock.take(home.run_folder, "serve", patience_s=LOCK_PATIENCE_S if lifeline.supervised else 0.5),
        _listen(host, port) as listener,
    ):
        # A wildcard address isn't one that a person can open.
        address = f"{host}:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(make_app(home), log_config=None, access_log=False, lifespan="off"))
        lifeline.on_word(lambda: setattr(server, "should_exit", True))
        lifeline.tell("listening", {"address": address})
        logger.info("listening", address=address)
        # uvicorn would take the signals for itself, and raise them again at its end.
        server.capture_signals = _leave_signals  # type: ignore[method-assign]
        if not lifeline.stop.is_set():
            server.run(sockets=[listener])


def make_app(home: Home) -> Any:
    """The ASGI application."""
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse, Response

    from millstream.app.serving.access import Access
    from millstream.app.serving.problems import tell_problems
    from millstream.app.serving.reading import Reading

    app = FastAPI(title="Millstream", description="A home's status.")
    app.state.access = Access.of_home(home)
    tell_problems(app)
    app.include_router(Reading(home).router)
    kept: dict[str, Any] = {}

    def status() -> dict[str, Any]:
        if not kept or time.monotonic() - kept["at"] > _KEEP_S:
            kept["status"] = collect_status(home)
            kept["at"] = time.monotonic()
        found: dict[str, Any] = kept["status"]
        return found

    @app.get("/status", summary="The whole status, as `millstream status --json` prints it.")
    def get_status() -> JSONResponse:
        return JSONResponse(status())

    @app.get("/healthz", summary="200 while capture and pipeline run and nothing is unreadable, else 503.")
    def get_health() -> JSONResponse:
        found = status()
        parts = {part: found["processes"].get(part) is not None for part in ("owner", "pipeline")}
        healthy = all(parts.values()) and not found["problems"]
        # Restarting wouldn't help these, so they don't make anything unhealthy.
        waiting = [t["name"] for s in found["streams"] for t in s.get("tables", ()) if t["state"] == "set_aside"]
        facts = {"healthy": healthy, **parts, "problems": found["problems"], "set_aside": waiting}
        return JSONResponse(facts, 200 if healthy else 503)

    @app.get("/metrics", summary="Metrics in Prometheus's text format.")
    def get_metrics() -> Response:
        from millstream.app.serving.metrics import prometheus_text

        return Response(prometheus_text(status), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _listen(host: str, port: int) -> socket.socket:
    try:
        facts = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(facts[0], facts[1])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(facts[4])
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise AddressInUse(f"can't listen on {host}:{port}: {error}", address=f"{host}:{port}") from error
    return listener


def _leave_signals() -> Any:
    from contextlib import nullcontext

    return nullcontext()
