"""Writes with keys, over HTTP: a repeated write is stored once, and a session goes on by its name."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import httpx
import pytest
from tests.app.homes import make_home
from tests.serving.serving_process import served

import millstream
import millstream.aio
from millstream.errors import IdempotencyKeyReused
from millstream.home.home import Home
from millstream.model.writes import SessionFacts
from millstream.serving.access import Access
from millstream.serving.application import Application


def test_probes_are_answered_while_sessions_wait_for_a_follower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They waited for a thread behind the requests for sessions, up to 30 s each."""
    home = Home(make_home(tmp_path / "home", "[streams.web]\n"))
    is_over = threading.Event()

    def waiting(*_: object, **__: object) -> SessionFacts:
        is_over.wait(60)
        return SessionFacts(0)

    async def probed(app: Application) -> tuple[list[int], bool]:
        transport = httpx.ASGITransport(app=app.asgi())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            sessions = [
                asyncio.create_task(client.get("/v1/streams/web/session", params={"name": "s"})) for _ in range(100)
            ]
            await asyncio.sleep(0.1)
            try:
                async with asyncio.timeout(30):
                    found = [(await client.get(path)).status_code for path in ("/healthz", "/readyz")]
            finally:
                is_over.set()
            return found, all(answer.status_code == 200 for answer in await asyncio.gather(*sessions))

    with contextlib.closing(Application(home, Access.of_home(home))) as app:
        monkeypatch.setattr(app.appender, "session", waiting)
        assert asyncio.run(probed(app)) == ([503, 200], True)


@pytest.mark.siege
def test_a_session_goes_on_over_http_and_a_retry_is_there_once(tmp_path: Path) -> None:
    home = make_home(tmp_path / "web", '[streams.web]\n[streams.web.keys]\n"public.users" = ["id"]\n')
    with served(home) as server:
        address = "http://{}:{}".format(*server.address)
        with millstream.connect(address) as remote:
            session = remote.session("web", "an app/2")
            assert session.next_number == 1
            told = [session.append("users", {"id": i}) for i in (1, 2)]
            again = remote.append("web", "users", {"id": 1}, idempotency_key="k")
            assert not again.duplicate
            again = remote.append("web", "users", {"id": 1}, idempotency_key="k")
            assert again.duplicate
            with pytest.raises(IdempotencyKeyReused):
                remote.append("web", "users", {"id": 2}, idempotency_key="k")
            kept = remote.append("web", "users", [{"id": 3}, {"id": "x"}, {"id": 4}, {}], keep_valid_rows=True)
            assert [row.row for row in kept.rejected] == [1, 3]
        with millstream.connect(address) as remote:
            assert remote.session_facts("web", "an app/2") == SessionFacts(2)
            session = remote.session("web", "an app/2")
            assert session.append("users", {"id": 2}, number=2).seqs == told[1].seqs
            assert session.next_number == 3

        async def by_tasks() -> None:
            async with millstream.aio.connect(address) as remote:
                session = remote.session("web", "an app/2")
                assert await session.resume() == 3
                await asyncio.gather(*(session.append("users", {"id": 10 + i}) for i in range(20)))
                assert await remote.session_facts("web", "an app/2") == SessionFacts(22)

        asyncio.run(by_tasks())
        url = f"{address}/v1/streams/web/tables/users"
        lines = b'{"id": 100}\n{"id": "x"}\n{"id": 101, "n": 1}\n{"n": 2}\n'
        found = httpx.post(
            url,
            content=lines,
            headers={"Content-Type": "application/x-ndjson"},
            params={"on_clash": "rows"},
            timeout=60,
        )
        assert found.status_code == 200, found.text
        assert [row["row"] for row in found.json()["rejected"]] == [1, 3]
        assert (
            httpx.get(f"{address}/v1/streams/web/session", params={"name": "unknown"}, timeout=60).json()
            == SessionFacts(0).as_dict()
        )
    with millstream.open(home) as opened:
        rows = [row["id"] for batch in opened.read("web", table="users") for row in batch.to_pylist()]
    assert sorted(rows) == [1, 1, 2, 3, 4, *range(10, 30), 100, 101]
