"""Answers of reading take what they may and no more, and give it back however they end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import make_home

import millstream
from millstream.app.home import Home
from millstream.app.serving.access import Access
from millstream.app.serving.application import Application


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = make_home(tmp_path / "web", "[streams.web]\n")
    with millstream.open(made) as opened:
        opened.append("web", "clicks", [{"n": n} for n in range(1000)])
    return made


def test_callers_that_go_before_the_first_byte_is_sent_leave_no_answer_behind(home: Path) -> None:
    """What makes the parts had begun, and what sends them hadn't: nothing ended it, and after 32 of them nobody was answered."""

    async def ask(*, goes: bool) -> int:
        heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        heard.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        statuses = []

        async def send(message: dict[str, Any]) -> None:
            if goes:
                raise ConnectionResetError
            statuses.extend([message["status"]] if "status" in message else [])

        path = "/v1/streams/web/records"
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"table=clicks",
            "headers": [(b"host", b"127.0.0.1")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 1),
        }
        await serves(scope, heard.get, send)
        return statuses[0]

    async def play() -> int:
        for _ in range(40):
            with contextlib.suppress(ConnectionResetError):
                await ask(goes=True)
        return await ask(goes=False)

    with contextlib.closing(Application(Home(home), Access.of_home(Home(home)))) as application:
        serves = application.asgi()
        assert asyncio.run(play()) == 200
