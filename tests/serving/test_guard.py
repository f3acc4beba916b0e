"""`millstream.Guard`: an application's own server checks requests as `millstream serve` does."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from millstream import Guard
from millstream.administration.access_token_requests import create_token
from millstream.errors import AccessError, Unauthenticated
from millstream.home.home import Home

CONFIG = '[streams.shop]\n[http]\ntokens_required = {required}\nhosts = ["shop.example.com"]\n'


def home_in(folder: Path, required: str) -> Home:
    (folder / "millstream.toml").write_text(CONFIG.format(required=required))
    return Home.find(folder, needs_source=False)


def scope(**headers: str) -> dict[str, object]:
    return {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}


def test_origins_are_those_of_the_listening_host_and_of_the_configuration(tmp_path: Path) -> None:
    home_in(tmp_path, "false")
    with closing(Guard(tmp_path)) as guard:
        guard.check_origin(scope(host="127.0.0.1:4242", origin="http://127.0.0.1:4242"))
        guard.check_origin(scope(host="shop.example.com"))
        with pytest.raises(AccessError, match="isn't a name of this server"):
            guard.check_origin(scope(host="other.example.com"))
        with pytest.raises(AccessError, match="isn't this server"):
            guard.check_origin(scope(host="127.0.0.1:4242", origin="http://other.example.com"))
        asyncio.run(guard.check_token(scope(), "shop", "write"))


def test_tokens_have_rights_on_streams_if_the_configuration_requires_tokens(tmp_path: Path) -> None:
    home = home_in(tmp_path, "true")
    _, text = create_token(home, ["shop=read"])
    shown = scope(authorization=f"Bearer {text}")
    with closing(Guard(tmp_path)) as guard:

        async def check() -> None:
            await guard.check_token(shown, "shop", "read")
            with pytest.raises(AccessError, match="no right to write"):
                await guard.check_token(shown, "shop", "write")
            with pytest.raises(AccessError, match="no right to read"):
                await guard.check_token(shown, "other", "read")
            with pytest.raises(Unauthenticated, match="no access token"):
                await guard.check_token(scope(), "shop", "read")

        asyncio.run(check())
