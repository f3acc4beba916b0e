"""The paths that take rows, as an ASGI application: of the process that answers everything, and of those that only take rows."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from millstream.app.open_home import home_appender
from millstream.errors import AccessError, UsageError
from millstream.home.machine_code_folder import place_compiled_code
from millstream.ingest.line_protocol import warm
from millstream.process_metrics import HTTP_REQUEST_SECONDS
from millstream.serving.line_writes import LineWrites
from millstream.serving.origin_check import Origins
from millstream.serving.request_batching import RequestBatches
from millstream.serving.request_bodies import MemoryBudget, Receive
from millstream.serving.requests import Scope, Send, answer_problem
from millstream.serving.row_writes import ROWS_PATH, TABLES_PATH, Writes, is_rows_path, takes_rows
from millstream.workers import call_in_thread

if TYPE_CHECKING:
    from millstream.home.home import Home
    from millstream.serving.access import Access

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})


class RowRequests:
    """Appends the rows of requests."""

    def __init__(self, home: Home, access: Access, budget: MemoryBudget) -> None:
        place_compiled_code(home)
        self.appender: Final = home_appender(home)
        self.batches: Final = RequestBatches(self.appender.append_batch_async)
        self.writes: Final = Writes(home, self.batches, budget, access)
        # Compile or load it during the first requests: the first time on a machine it takes seconds.
        self.parser: Final = call_in_thread("warm-parser", warm)
        self.of_paths: Final = {
            b"/write": LineWrites(self.writes, "v1", self.parser),
            b"/api/v2/write": LineWrites(self.writes, "v2", self.parser),
        }

    def takes(self, scope: Scope) -> bool:
        """Return whether a request is for one of these paths."""
        return scope["method"] == "POST" and (takes_rows(scope["raw_path"]) or scope["raw_path"] in self.of_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer such a request as an ASGI application."""
        await self.of_paths.get(scope["raw_path"], self.writes)(scope, receive, send)

    def route_of(self, scope: Scope) -> str:
        """Return the path of such a request with names for its variable parts."""
        path = scope["raw_path"]
        if path in self.of_paths:
            return str(path.decode())
        return ROWS_PATH if is_rows_path(path) else TABLES_PATH

    def close(self) -> None:
        """Stop writing the home, if this process did."""
        self.appender.close()


def measured(
    home: Home,
    access: Access,
    application: Callable[[Scope, Receive, Send], Awaitable[None]],
    route_of: Callable[[Scope], str],
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Return an application that refuses other sites' pages, and whose requests are timed.

    Args:
        route_of: returns a request's path with names for its variable parts, once it was answered.
    """
    origins = Origins(home.config.http.address[0], home.config.http.hosts, any_host=access.is_asked)

    async def timed(scope: Scope, receive: Receive, send: Send) -> None:
        began_s, status = time.perf_counter(), "none"

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            try:
                origins.check(scope["headers"])
            except (AccessError, UsageError) as error:
                await answer_problem(noting, error)
            else:
                await application(scope, receive, noting)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            HTTP_REQUEST_SECONDS.of(method, route_of(scope), status).observe(time.perf_counter() - began_s)

    return timed
