"""The console's paths (pages, the stream of their differences, files, logging in and out) and the headers of all answers.

A viewer has the last area that was sent to it. So a slow one gets fewer and larger differences, and none waits in memory.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from importlib.resources import files
from typing import Final, ParamSpec, TypeAlias, TypeVar
from urllib.parse import parse_qs, quote, unquote

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from millstream.app.home_changes import look
from millstream.app.record_rates import Status
from millstream.console import (
    actions,
    charts_page,
    dead_letters,
    diff_page,
    log_page,
    pages,
    paths_page,
    query_page,
    table_page,
)
from millstream.console.html import Content, Piece, Rendered, tag
from millstream.console.page_frame import PAGES, address, error_content, link, login_content, page
from millstream.console.shared_status import USUAL, Live, Snapshot, Timing, View
from millstream.console.troubles import troubles_of
from millstream.console.visible_streams import VisibleStreams
from millstream.errors import (
    AccessError,
    DeliveryError,
    HttpError,
    MillstreamError,
    Unauthenticated,
    UnknownStream,
    UnknownTable,
)
from millstream.home.figure_ring import PERIODS
from millstream.model.access import Right
from millstream.serving.access import Caller, Credentials
from millstream.serving.application import Application
from millstream.serving.browser_sessions import cookie_name
from millstream.serving.chart_history import Figures
from millstream.serving.http_reads import Question
from millstream.serving.problem_documents import encoded, problem_of, status_of
from millstream.serving.request_bodies import ClientGoneError, Held, MemoryBudget, read_body
from millstream.serving.requests import ENDING, ClientStalledError, headers_said

Answer: TypeAlias = Callable[[Request], Awaitable[Response]]
_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")
_FILES: Final = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
_HEADERS: Final = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "cross-origin-resource-policy": "same-origin",
    # Not `no-referrer`: a browser would send forms of such a page without its origin.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
_HTML_TYPE: Final = "text/html; charset=utf-8"
_CHECK_EVERY_S: Final = 15.0
"""Seconds between checks that a viewer may still read: a token may be revoked."""
_TICK_S: Final = 2.0
"""A page that gets no tick for some of these knows that its home doesn't answer."""
_STALLED_S: Final = 30.0
"""How long a viewer may read nothing of its differences."""
_FORM_BYTES_MAX: Final = 64 << 10
_DETAILS_AT_ONCE: Final = 2
_REFUSED_NOTED_MAX: Final = 100
"""Lines of the audit log about callers without the right, within `_REFUSED_WITHIN_S`: any token may cause them, and they
mustn't fill the disk."""
_REFUSED_WITHIN_S: Final = 3600.0
_COMPRESSED_BYTES_MIN: Final = 4096
_CHARTS_KEPT: Final = 32
"""Number of areas with charts that are kept until there are newer figures: making one takes some 30 ms."""


class Console:
    """The console of a home's server: `router` has its paths. For one event loop."""

    def __init__(self, application: Application, *, timing: Timing = USUAL) -> None:
        self._home = application.home
        self._access = application.access
        self._reading = application.reading
        self._consumers = application.consumers.of_home
        self._forms = MemoryBudget(64 * _FORM_BYTES_MAX, _FORM_BYTES_MAX)
        self._threads = ThreadPoolExecutor(_DETAILS_AT_ONCE, thread_name_prefix="console-details")
        self.figures: Final = Figures(application.home, application.health.status)
        self.diffs: Final = diff_page.Diffs(application.home)
        self.live: Final = Live(
            application.health.renewed, self._area, partial(look, self._home), application.health.last, timing=timing
        )
        self._drawn = lru_cache(_CHARTS_KEPT)(self._draw)
        self._refused_s: deque[float] = deque(maxlen=_REFUSED_NOTED_MAX)
        """Times of the last refusals in the audit log, on the monotonic clock."""
        self._name = self._home.path.name
        folder = files("millstream.console").joinpath("static")
        self._files = {name: folder.joinpath(name).read_bytes() for name in _FILES}
        marks = {name: hashlib.blake2b(data, digest_size=6).hexdigest() for name, data in self._files.items()}
        self._versions = [f"/console/static/{name}?{mark}" for name, mark in marks.items()]
        self.router: Final = APIRouter()
        for path in PAGES:
            answer = {"/query": self._query_form, "/diff": self._diff_form}.get(path, partial(self._list, path))
            self._add(path, answer)
        self._add("/diff", self._diff, "POST")
        self._add("/query", self._query, "POST")
        self._add("/tables/{stream}/{table:path}", self._table)
        self._add("/log/{stream}", self._log)
        self._add("/consumers/{stream}/{consumer}", self._consumer)
        self._add("/charts/{period}/{stream}", self._charts)
        self._add("/docs", self._paths)
        self._add("/console/act", self._act, "POST")
        self._add("/console/login", self._login_form)
        self._add("/console/login", self._login, "POST")
        self._add("/console/logout", self._logout, "POST")
        self.router.add_route("/console/events", self._events, ["GET"], include_in_schema=False)
        self.router.add_route("/console/static/{name}", self._file, ["GET"], include_in_schema=False)

    def start(self) -> None:
        """Begin to keep figures."""
        self.figures.start()

    def close(self) -> None:
        """Close the threads."""
        self.figures.close()
        self.diffs.close()
        self.live.close()
        self._threads.shutdown(wait=False)

    async def _apart(
        self, work: Callable[_Arguments, _Answer], *args: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Answer:
        """Return the result of work that blocks, which a thread does."""
        return await asyncio.wrap_future(self._threads.submit(work, *args, **named))

    def _still(self, path: str, title: str, *content: Content, user: str | None = None) -> bytes:
        """Return a page without a live area."""
        return page(path, title, self._name, None, *content, versions=self._versions, user=user)

    def _add(self, path: str, answer: Answer, method: str = "GET") -> None:
        async def answered(request: Request) -> Response:
            try:
                return _compressed(request, await answer(request))
            except Unauthenticated:
                # The address as it was sent; that of a form alone can't be opened.
                back = "/" if path.startswith("/console/") else request.scope["raw_path"].decode("latin-1")
                return RedirectResponse(f"/console/login?next={quote(back, safe='/')}", 303, _HEADERS)
            except MillstreamError as error:
                content = self._still(request.scope["path"], "This can't be shown", error_content(error))
                return _html(content, int(status_of(error)))

        self.router.add_route(path, answered, [method], include_in_schema=False)

    async def _viewer(self, request: Request) -> tuple[Caller, VisibleStreams]:
        """Return who asks, and what they may see."""
        caller = await self._access.caller_of(request.scope)
        return caller, VisibleStreams.of(caller, iter(self._home.config.streams))

    async def _list(self, path: str, request: Request) -> Response:
        caller, visible = await self._viewer(request)
        return await self._page(View(path, visible), caller, PAGES[path])

    async def _table(self, request: Request) -> Response:
        caller, visible = await self._viewer(request)
        stream, name = request.path_params["stream"], request.path_params["table"]
        snapshot = await self.live.snapshot()
        table = table_page.find_table(visible.part_of(snapshot.status), stream, name)
        if table is None:
            raise UnknownTable(f"there is no table {name[:200]} in stream {stream[:64]}", hint="`/tables` lists all.")
        details = await self._apart(table_page.details, self._home, stream, table["id"])
        view = View(address("tables", stream, name), visible)
        offered = actions.offered_on_table(table) if self._may_act(caller, stream) else []
        return await self._page(view, caller, name, actions.buttons(offered, stream, name), *details)

    async def _consumer(self, request: Request) -> Response:
        caller, visible = await self._viewer(request)
        stream, name = request.path_params["stream"], request.path_params["consumer"]
        found = pages.find_consumer(visible.part_of((await self.live.snapshot()).status), stream, name)
        if found is None:
            raise DeliveryError(
                f"stream {stream[:64]} has no consumer {name[:64]}",
                code="unknown_consumer",
                hint="`/consumers` lists all.",
            )
        offered = actions.offered_on_consumer(found) if self._may_act(caller, stream) else []
        view = View(address("consumers", stream, name), visible)
        letters = None
        if found["dead"] and caller.may(Right.ADMIN, stream):
            work = partial(dead_letters.letters, may_act=self._access.is_asked)
            letters = await self._apart(work, self._consumers, stream, name)
        return await self._page(view, caller, f"Consumer {name}", actions.buttons(offered, stream, name), letters)

    def _area(self, view: View, snapshot: Snapshot) -> Rendered:
        """Return a view's live area."""
        status = view.visible.part_of(snapshot.status)
        parts = [unquote(part) for part in view.path.split("/")]
        pieces: Iterable[Piece]
        match parts[1:]:
            case ["tables", stream, table]:
                pieces = table_page.area(status, stream, table)
            case ["log", stream]:
                pieces = log_page.area(status, stream)
            case ["log"]:
                pieces = log_page.logs(status)
            case ["tables"]:
                pieces = pages.tables(status)
            case ["consumers", stream, name]:
                pieces = pages.consumer(status, stream, name, snapshot.rates)
            case ["consumers"]:
                pieces = pages.consumers(status, snapshot.rates)
            case ["nodes"]:
                pieces = pages.nodes(status)
            case ["diff"]:
                last = self.diffs.last
                pieces = diff_page.area(last, may_see=last is not None and view.visible.has(last.stream))
            case ["charts", *chosen]:
                names = [stream["name"] for stream in status["streams"] if stream.get("id")]
                period, stream = chosen or ["hour", next(iter(names), "")]
                pieces = self._drawn(self.figures.version, tuple(names), stream, period, view.visible)
            case _:
                assert view.path == "/", "`_live_path` knows each page"
                pieces = pages.overview(status, snapshot.rates)
        return Rendered(list(pieces), len(troubles_of(status)))

    def _draw(
        self, version: int, names: tuple[str, ...], stream: str, period: str, visible: VisibleStreams
    ) -> list[Piece]:
        del version  # the charts are the same while it is
        return list(charts_page.area(self.figures, names, stream, period, whole_home=visible.streams is None))

    async def _check_acts(self, caller: Caller, order: actions.Order) -> None:
        if not self._access.is_asked:
            raise AccessError(
                "without access tokens the console only reads",
                code="forbidden",
                hint="Set `tokens_required` in `[http]`, or use the command line.",
            )
        try:
            caller.check(Right.ADMIN, order.stream)
        except AccessError as error:
            now_s = time.monotonic()
            if len(self._refused_s) < _REFUSED_NOTED_MAX or now_s - self._refused_s[0] > _REFUSED_WITHIN_S:
                self._refused_s.append(now_s)
                await self._apart(actions.note_refused, self._home, order, error)
            raise

    def _may_act(self, caller: Caller, stream: str) -> bool:
        return self._access.is_asked and caller.may(Right.ADMIN, stream)

    async def _act(self, request: Request) -> Response:
        caller, _ = await self._viewer(request)
        fields = await self._form(request)
        name, stream, subject, text = (fields.get(key, "") for key in ("action", "stream", "subject", "text"))
        order = actions.Order(caller.name or "", name, stream, subject, text)
        await self._check_acts(caller, order)
        if order.action.warning and fields.get("confirmed") != "yes":
            title, content = "Are you sure?", actions.question(order)
        else:
            outcome = await self._apart(actions.carry_out, self._home, self._consumers, order)
            title, content = "Done", [tag("p", outcome)]
        kind = "consumers" if order.action.on_table is None else "tables"
        back = tag("p", link(f"Back to {order.subject}", kind, order.stream, order.subject))
        return _html(self._still(f"/{kind}", title, content, back, user=caller.name))

    async def _log(self, request: Request) -> Response:
        caller, visible = await self._viewer(request)
        name = request.path_params["stream"]
        status = await self._status_with_log(visible, name)
        details = await self._apart(log_page.details, self._home, status, name)
        return await self._page(View(address("log", name), visible), caller, f"Log of {name}", *details)

    async def _status_with_log(self, visible: VisibleStreams, stream: str) -> Status:
        """Return the status that a viewer may see; `UnknownStream` if the stream has no log in it."""
        status = visible.part_of((await self.live.snapshot()).status)
        if not any(one["name"] == stream and one.get("id") for one in status["streams"]):
            raise UnknownStream(f"no stream {stream[:64]} has a log here", hint="`/log` lists all.")
        return status

    async def _diff_form(self, request: Request) -> Response:
        caller, visible = await self._viewer(request)
        captured = [name for name, config in self._home.config.streams.items() if config.source is not None]
        may = [name for name in sorted(captured) if visible.has(name) and self._may_act(caller, name)]
        status = (await self.live.snapshot()).status
        tables = [table["name"] for one in status["streams"] if one["name"] in may for table in one.get("tables", ())]
        return await self._page(View("/diff", visible), caller, PAGES["/diff"], *diff_page.form(may, tables))

    async def _diff(self, request: Request) -> Response:
        caller, _ = await self._viewer(request)
        fields = await self._form(request)
        last = self.diffs.last
        stops = fields.get("do") == "stop"
        stream = last.stream if stops and last is not None else fields.get("stream", "")
        order = actions.Order(caller.name or "", "diff", stream, "" if stops else fields.get("table", "").strip())
        await self._check_acts(caller, order)
        if stops:
            self.diffs.stop(order.who)
        else:
            await self._apart(actions.start_diff, self._home, self.diffs, order)
        return RedirectResponse("/diff", 303, _HEADERS)

    async def _charts(self, request: Request) -> Response:
        caller, visible = await self._viewer(request)
        period, stream = request.path_params["period"], request.path_params["stream"]
        if period not in PERIODS:
            raise HttpError(f"there is no period {period[:20]}", code="unknown_path", hint="`/charts` has the hour.")
        await self._status_with_log(visible, stream)
        return await self._page(View(address("charts", period, stream), visible), caller, PAGES["/charts"])

    async def _paths(self, request: Request) -> Response:
        content = paths_page.paths(request.app.openapi())
        return _html(self._still("/docs", "Paths of this server", content))

    async def _query_form(self, request: Request) -> Response:
        caller, visible = await self._viewer(request)
        streams = self._streams(visible)
        asked = query_page.Asked(request.query_params.get("stream", ""), request.query_params.get("sql", ""))
        return _html(self._query_page(caller, asked, streams, await self._apart(query_page.names, self._home, streams)))

    async def _query(self, request: Request) -> Response:
        caller, visible = await self._viewer(request)
        fields = await self._form(request)
        wants_csv = fields.get("format") == "csv"
        asked = query_page.Asked(
            fields.get("stream", ""), fields.get("sql", ""), fields.get("as_of", "").strip()[:4096]
        )
        caller.check(Right.READ, asked.stream)
        streams = self._streams(visible)
        names = None if wants_csv else await self._apart(query_page.names, self._home, streams)

        def shown(answer: Content) -> bytes:
            return self._query_page(caller, asked, streams, [answer, names])

        encoded = (lambda parts, _: query_page.as_csv(parts)) if wants_csv else partial(query_page.as_page, shown)
        media_type = query_page.CSV_TYPE if wants_csv else _HTML_TYPE
        question = Question(sql=asked.sql, as_of=asked.as_of or None)
        try:
            answer = await self._reading.ask(request, asked.stream, question, media_type, encoded)
        except MillstreamError as error:
            return _html(shown(error_content(error)), int(status_of(error)))
        answer.headers.update(_HEADERS)
        if wants_csv:
            answer.headers["content-disposition"] = 'attachment; filename="query.csv"'
        return answer

    def _query_page(self, caller: Caller, asked: query_page.Asked, streams: list[str], rest: Content) -> bytes:
        form = query_page.form(asked, streams, query_page.limits_in_words(self._home.config.http))
        return self._still("/query", PAGES["/query"], form, rest, user=caller.name)

    def _streams(self, visible: VisibleStreams) -> list[str]:
        return [name for name in sorted(self._home.streams_on_disk()) if visible.has(name)]

    async def _page(self, view: View, caller: Caller, title: str, *rest: Content) -> Response:
        snapshot, area = await self.live.area(view)
        age_s = time.monotonic() - snapshot.taken_s
        return _html(
            page(view.path, title, self._name, area, *rest, versions=self._versions, user=caller.name, age_s=age_s)
        )

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files:
            return Response(status_code=404)
        # A new version has another address.
        headers = {**_HEADERS, "cache-control": "public, max-age=31536000, immutable"}
        return Response(self._files[name], 200, headers, f"{_FILES[name]}; charset=utf-8")

    async def _login_form(self, request: Request) -> Response:
        back = _back(request.query_params.get("next", "/"))
        return self._login_page(back) if self._access.is_asked else RedirectResponse(back, 303, _HEADERS)

    def _login_page(self, back: str, error: MillstreamError | None = None) -> Response:
        data = self._still("/console/login", "Log in", *login_content(back, error))
        return _html(data, 200 if error is None else int(status_of(error)))

    async def _login(self, request: Request) -> Response:
        fields = await self._form(request)
        back = _back(fields.get("next", "/"))
        if not self._access.is_asked:
            return RedirectResponse(back, 303, _HEADERS)
        token = fields.get("token", "").strip()
        try:
            caller = await self._access.caller_async(Credentials(token))
            VisibleStreams.of(caller, iter(self._home.config.streams))
        except AccessError as error:
            return self._login_page(back, error)
        answer = RedirectResponse(back, 303, _HEADERS)
        cookie = cookie_name(request.scope)
        # Behind a proxy that ends TLS the browser alone knows how it came.
        is_safe = request.scope["scheme"] == "https" or request.headers["origin"].startswith("https:")
        text, seconds = self._access.session_of(token)
        answer.set_cookie(cookie, text, seconds, path="/", secure=is_safe, httponly=True, samesite="strict")
        return answer

    async def _logout(self, request: Request) -> Response:
        _check_own_page(request)
        self._access.end_session(request.scope)
        answer = RedirectResponse("/console/login", 303, _HEADERS)
        answer.delete_cookie(cookie_name(request.scope), path="/", httponly=True, samesite="strict")
        return answer

    async def _form(self, request: Request) -> dict[str, str]:
        """Return the fields of a form that a page of this server sent."""
        _check_own_page(request)
        with Held(self._forms) as held:
            try:
                body = await read_body(request.receive, headers_said(request.scope), self._forms, held)
            except ClientGoneError as error:
                raise HttpError("the form never arrived whole", code="invalid_body") from error
        try:
            fields = parse_qs(body.decode("latin-1"), max_num_fields=16, keep_blank_values=True)
        except ValueError as error:
            raise HttpError(f"the form can't be read: {error}", code="invalid_body") from error
        return {name: values[0] for name, values in fields.items()}

    async def _events(self, request: Request) -> Response:
        try:
            path = _live_path(request.query_params.get("path", "/"))
            _, visible = await self._viewer(request)
        except MillstreamError as error:
            return Response(encoded(problem_of(error)), int(status_of(error)), media_type="application/problem+json")

        async def check() -> None:
            if (await self._viewer(request))[1] != visible:
                raise Unauthenticated("the viewer's rights have changed")

        return _Events(self.live, View(path, visible), request.query_params.get("version", ""), check)


class _Events(Response):
    """Sends a view's differences until its viewer goes, the server ends, or the viewer may no longer read."""

    def __init__(self, live: Live, view: View, version: str, check: Callable[[], Awaitable[None]]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={**_HEADERS, "x-accel-buffering": "no", "cache-control": "no-cache"}
        )
        self._live = live
        self._view = view
        self._version = version
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                continue

        headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        ends = [asyncio.create_task(listen()), asyncio.create_task(self._send_all(send))]
        if (ending := scope.get(ENDING)) is not None:
            ends.append(asyncio.create_task(ending.wait()))
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in ends:
                task.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _send_all(self, send: Send) -> None:
        sent: Rendered | None = None
        check_at_s = time.monotonic() + _CHECK_EVERY_S
        with self._live.watched(self._view):
            snapshot, area = await self._first()
            while True:
                if time.monotonic() >= check_at_s:
                    try:
                        await self._check()
                    except MillstreamError as error:
                        await _send(send, "problem", problem_of(error))
                        return
                    check_at_s = time.monotonic() + _CHECK_EVERY_S
                if sent is None and area.version == self._version:
                    sent = area
                for name, data in area.since(sent).items():
                    await _send(send, name, data)
                sent = area
                age_s = round(time.monotonic() - snapshot.taken_s, 3)
                await _send(send, "tick", {"age_s": age_s, "troubles": area.troubles})
                await self._live.next(within_s=_TICK_S)
                snapshot, area = self._live.current(self._view) or (snapshot, area)

    async def _first(self) -> tuple[Snapshot, Rendered]:
        """Return the first area. A page whose server has started again waits for it, however long a status hangs."""
        while True:
            try:
                return await self._live.area(self._view)
            except MillstreamError:
                await self._live.next(within_s=_TICK_S)


async def _send(send: Send, event: str, data: object) -> None:
    text = f"event: {event}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
    try:
        async with asyncio.timeout(_STALLED_S):
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
    except TimeoutError as error:
        raise ClientStalledError from error


def _live_path(path: str) -> str:
    """Return the one spelling of a page's path; `HttpError` (`unknown_path`) if no page with a live area has it."""
    parts = [unquote(part) for part in path.split("/")[1:]]
    pages_of: dict[str, tuple[int, ...]] = {
        "": (1,),
        "tables": (1, 3),
        "log": (1, 2),
        "consumers": (1, 3),
        "nodes": (1,),
        "diff": (1,),
        "charts": (1, 3),
    }
    is_known = len(parts) in pages_of.get(parts[0] if parts else "", ())
    if not is_known or (parts[0] == "charts" and len(parts) == 3 and parts[1] not in PERIODS):
        raise HttpError(f"there is no page {path[:200]}", code="unknown_path", hint="`/` is the first page.")
    return address(*parts)


def _html(data: bytes, status: int = 200) -> Response:
    return Response(data, status, _HEADERS, _HTML_TYPE)


def _compressed(request: Request, answer: Response) -> Response:
    """Return a whole answer with gzip, if the browser takes it: a list of 1,000 tables has 400 KB."""
    body = getattr(answer, "body", b"")
    if len(body) >= _COMPRESSED_BYTES_MIN and "gzip" in request.headers.get("accept-encoding", ""):
        answer.body = gzip.compress(body, 5)
        answer.headers.update({"content-encoding": "gzip", "content-length": str(len(answer.body))})
    answer.headers["vary"] = "accept-encoding"
    return answer


def _back(path: str) -> str:
    """Return a path of this server to go to; the overview for anything else."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"


def _check_own_page(request: Request) -> None:
    """Refuse a form that no page of this server sent: a browser always names the page of one (`Origin`).

    The application has compared the origin with the server already.
    """
    if "origin" not in request.headers:
        raise AccessError(
            "the form names no page that it comes from",
            code="foreign_origin",
            hint="Send it from the console's own page; programs use the paths under `/v1`.",
        )
