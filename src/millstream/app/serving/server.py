"""`serve`: a home over HTTP, for Prometheus, for load balancers and for people; and over Arrow Flight, where that is configured."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from typing import Any, Final

import structlog
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from millstream.app.home import Home
from millstream.app.locks import LOCK_PATIENCE_S, RoleLock
from millstream.app.part import Lifeline
from millstream.app.serving.access import CHALLENGE, Access, allow
from millstream.app.serving.certificates import Certificates, Renewal, telling_certificate
from millstream.app.serving.exposure import check_protected
from millstream.app.status import collect_status
from millstream.errors import AccessError, AddressInUse, MillstreamError, Unauthenticated
from millstream.model.access import Right

logger = structlog.get_logger("millstream.serve")

_KEEP_S: Final = 1.0
"""Who asks oftener than this gets the same answer: a status reads the lake's last cut."""
_BACKLOG: Final = 2048


def serve_home(home: Home, lifeline: Lifeline) -> None:
    """Serve until told to stop.

    Raises:
        HomeBusy: the home is served already.
        AddressInUse: it can't listen there.
        Unprotected: other machines would reach it, without TLS or without tokens.
        CertificateUnusable: TLS is configured, and can't be had.
    """
    import uvicorn

    home.prepare()
    host, port = home.config.http.address
    check_protected("http", (host, port), home.config.http)
    certificates = Certificates.of_home(home)
    context = None if certificates is None else certificates.server_context()
    access = Access.of_home(home)
    with (
        contextlib.closing(access),
        RoleLock.take(home.run_folder, "serve", patience_s=LOCK_PATIENCE_S if lifeline.supervised else 0.5),
        _listen(host, port) as listener,
    ):
        # A wildcard address isn't one that a person can open.
        address = f"{host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(make_app(home, access), log_config=None, access_log=False, lifespan="off")
        config.load()
        if certificates is not None and context is not None:
            _serve_tls(config, certificates, context)
        server = uvicorn.Server(config)
        lifeline.on_word(lambda: setattr(server, "should_exit", True))
        lifeline.tell("listening", {"address": address})
        logger.info("listening", address=address)
        # uvicorn would take the signals for itself, and raise them again at its end.
        server.capture_signals = _leave_signals  # type: ignore[method-assign]
        if not lifeline.stop.is_set():
            server.run(sockets=[listener])


def _serve_tls(config: Any, certificates: Certificates, context: ssl.SSLContext) -> None:
    """Have uvicorn speak TLS, tell who shows which certificate, and look whether ours is renewed."""
    renewal = Renewal(certificates, context)

    async def look() -> None:
        renewal.look()

    class Connection(config.http_protocol_class):  # type: ignore[misc] # known when it runs
        """uvicorn's, which says what its client has shown."""

        app: Any

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.app = telling_certificate(self.app, transport)

    config.ssl = context
    config.http_protocol_class = Connection
    config.callback_notify, config.timeout_notify = look, 1


def make_app(home: Home, access: Access) -> Any:
    """The ASGI application."""
    app = FastAPI(title="Millstream", description="A home's status.")
    app.state.access = access
    may_read = [Depends(allow(Right.READ))]

    @app.exception_handler(AccessError)
    def refused(_request: Request, error: AccessError) -> JSONResponse:
        unknown = isinstance(error, Unauthenticated)
        return JSONResponse(error.as_dict(), 401 if unknown else 403, headers=CHALLENGE if unknown else None)

    kept: dict[str, Any] = {}

    def status() -> dict[str, Any]:
        if not kept or time.monotonic() - kept["at"] > _KEEP_S:
            kept["status"] = collect_status(home)
            kept["at"] = time.monotonic()
        found: dict[str, Any] = kept["status"]
        return found

    @app.get(
        "/status",
        response_model=None,
        dependencies=may_read,
        summary="The whole status, as `millstream status --json` prints it.",
    )
    def get_status() -> JSONResponse:
        return JSONResponse(status())

    @app.get(
        "/healthz",
        response_model=None,
        summary="200 while capture and pipeline run and nothing is unreadable, else 503.",
    )
    async def get_health(request: Request) -> JSONResponse:
        found = await asyncio.to_thread(status)
        parts = {part: found["processes"].get(part) is not None for part in ("owner", "pipeline")}
        healthy = all(parts.values()) and not found["problems"]
        # Restarting wouldn't help these, so they don't make anything unhealthy.
        waiting = [t["name"] for s in found["streams"] for t in s.get("tables", ()) if t["state"] == "set_aside"]
        facts: dict[str, Any] = {"healthy": healthy}
        # Load balancers have no token: they are told that it is, not what.
        if await _may_read(access, request.scope):
            facts |= {**parts, "problems": found["problems"], "set_aside": waiting}
        return JSONResponse(facts, 200 if healthy else 503)

    @app.get("/metrics", response_model=None, dependencies=may_read, summary="Metrics in Prometheus's text format.")
    def get_metrics() -> Response:
        from millstream.app.serving.metrics import prometheus_text

        return Response(prometheus_text(status), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


async def _may_read(access: Access, scope: Any) -> bool:
    with contextlib.suppress(MillstreamError):
        return (await access.caller_of(scope)).may(Right.READ)
    return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        facts = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(facts[0], facts[1])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(facts[4])
            # Who is told the address finds it open: what comes before the server runs waits.
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise AddressInUse(f"can't listen on {host}:{port}: {error}", address=f"{host}:{port}") from error
    return listener


def _leave_signals() -> Any:
    from contextlib import nullcontext

    return nullcontext()
