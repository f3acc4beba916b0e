"""A home with tables of hostile names, and its application with the console, called without a server."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
from tests.app.homes import make_home

from millstream.app.open_home import OpenHome
from millstream.console.routes import Console
from millstream.console.shared_status import Timing
from millstream.home.home import Home
from millstream.model.access import Rights
from millstream.model.replication import NodeName
from millstream.protocol.replication.node_promises import Role, RoleFact
from millstream.serving.access import Access
from millstream.serving.application import Application

HOSTILE: Final = '"a/b"."<script>alert(1)</script>"'
COLUMN: Final = "<img src=x onerror=alert(2)>"
VALUE: Final = "</code><script>alert(3)</script>"
PATIENT: Final = Timing(first_patience_s=60.0)
"""Among other tests a first status may take longer than a viewer waits for one."""


def filled_home(folder: Path, more: str = "") -> Home:
    """Return a home with two streams of applications, `shop` and `web`."""
    home = Home(make_home(folder, f"[streams.shop]\n[streams.web]\n{more}"))
    home.prepare()
    with OpenHome(home) as opened:
        for number in range(30):
            opened.append("shop", "public.orders", [{"id": number, "total": number * 1.5}])
        opened.append("shop", "public.orders", [{"id": 1, "total": 2.0, "note": "new"}])
        opened.append("web", HOSTILE, [{"id": 1, COLUMN: VALUE}])
        opened.append("web", '".."."."', [{"id": 1}])
    return home


def followed_home(folder: Path) -> Home:
    """Return the home of node `b`, which follows `a` in the stream `shop` of `filled_home` and has never led it."""
    leader = filled_home(folder / "a")
    nodes = 'node = "b"\n[replication.nodes]\na = "grpc://127.0.0.1:1"\nb = "grpc://127.0.0.1:2"\n'
    home = Home(make_home(folder / "b", f"[streams.shop]\n[replication]\n{nodes}"))
    home.prepare()
    shutil.copytree(leader.wal_folder("shop"), home.wal_folder("shop"), dirs_exist_ok=True)
    home.role_file("shop").parent.mkdir(parents=True)
    home.role_file("shop").write_bytes(RoleFact(Role.FOLLOWS, leader=NodeName("a")).to_json())
    return home


@dataclass(slots=True)
class Site:
    """The application of a home, with its tokens."""

    home: Home
    application: Application
    asgi: Any
    loop: asyncio.Runner
    """The application is for one event loop."""
    tokens: dict[str, str] = field(default_factory=dict)

    def call(self, method: str, path: str, headers: Mapping[str, str] | None = None, **form: str) -> httpx.Response:
        """Call a path as `http://127.0.0.1:8787`."""

        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.asgi, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8787") as client:
                return await client.request(method, path, headers=headers, data=form or None)

        return self.loop.run(asked())

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Get a page."""
        return self.call("GET", path, headers)

    def cookie(self, kind: str) -> str:
        """Log in with a token; return the cookie as a browser sends it."""
        answer = self.call("POST", "/console/login", {"origin": "http://127.0.0.1:8787"}, token=self.tokens[kind])
        assert answer.status_code == 303, answer.text
        return answer.headers["set-cookie"].partition(";")[0]


@contextlib.contextmanager
def site_of(home: Home, timing: Timing = PATIENT) -> Iterator[Site]:
    """Open the application of a home."""
    with (
        contextlib.closing(Access.of_home(home)) as access,
        contextlib.closing(Application(home, access, [partial(Console, timing=timing)])) as application,
        asyncio.Runner() as loop,
    ):
        site = Site(home, application, application.asgi(), loop)
        with home.open_catalog() as catalog:
            for kind, rights in {"all": "*=read", "shop": "shop=read", "write": "*=write", "admin": "*=admin"}.items():
                if home.config.http.tokens_required:
                    site.tokens[kind] = catalog.create_access_token(Rights.parse([rights]), name=kind)[1]
        yield site
