"""A server process that takes rows, next to the one that answers everything else."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import structlog

from millstream.config.quantities import size_bytes
from millstream.processes.catalog_watch import watched_catalog
from millstream.processes.control_socket import ControlServer
from millstream.processes.role_locks import LOCK_PATIENCE_S, RoleLock, server_role
from millstream.serving.access import Access
from millstream.serving.request_bodies import MemoryBudget, Receive
from millstream.serving.requests import Scope, Send
from millstream.serving.row_processes.forwarding import FORWARDED_SOCKET, Forwarder
from millstream.serving.row_requests import RowRequests, measured
from millstream.serving.server import serve_until_told
from millstream.serving.tls_files import Renewal

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.processes.child_process import Lifeline
    from millstream.serving.row_processes.server_process import ServerProcess

logger = structlog.get_logger("millstream.serve")


def serve_rows(home: Home, lifeline: Lifeline, process: ServerProcess) -> None:
    """Take rows, and forward all other requests, until told to stop; then answer earlier requests, and end.

    Raises:
        AccessError (`certificate_unusable`): TLS is configured, but not usable.
    """
    home.prepare()
    renewal = Renewal.of_home(home)
    role = server_role(process.number)
    with (
        contextlib.closing(Access.of_home(home)) as access,
        RoleLock.take(home.run_folder, role, patience_s=LOCK_PATIENCE_S, what="a server process of `millstream serve`"),
        watched_catalog(home, lifeline),
        process.listener() as listener,
        contextlib.closing(_RowApplication(home, access, process)) as application,
        ControlServer(home, role, {}),
    ):
        lifeline.tell("takes_rows", {})  # from now on a restart waits for a configuration that is being edited
        logger.info("takes rows", process=process.number)
        serve_until_told(home, lifeline, application, listener, renewal, process=process)


class _RowApplication:
    """Appends rows, and forwards other requests."""

    def __init__(self, home: Home, access: Access, process: ServerProcess) -> None:
        http = home.config.http
        budget = MemoryBudget(
            size_bytes(http.inflight_bytes_max), size_bytes(http.body_bytes_max), process.share_of("held_bytes")
        )
        self._rows = RowRequests(home, access, budget)
        self._measured = measured(home, access, self._rows, self._rows.route_of)
        self._forwarder = Forwarder(home.make_socket_folder() / FORWARDED_SOCKET)
        self.batches: Final = self._rows.batches
        self.parser: Final = self._rows.parser
        self.close: Final = self._rows.close

    def drains(self) -> None:
        """Do nothing: the first process answers probes of readiness."""

    def asgi(self) -> Any:
        """Return the application, as a server calls it."""
        rows, answer_rows, forwarder = self._rows, self._measured, self._forwarder

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            # A browser's session is known to the process that issued it.
            is_own = rows.takes(scope) and not any(name == b"cookie" for name, _ in scope["headers"])
            await (answer_rows if is_own else forwarder)(scope, receive, send)

        return application
