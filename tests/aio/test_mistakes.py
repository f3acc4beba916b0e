"""A caller's mistake is reported at once, by name, by every kind of home."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.aio.everywhere import WAYS, a_home
from tests.app.homes import make_home, run
from tests.app.served import serving
from tests.serving.servers import Authority

import millstream
from millstream import aio
from millstream.errors import (
    AppendOutcomeUnknown,
    ConfigError,
    HomeClosed,
    InvalidValue,
    MillstreamError,
    RemoteError,
    UnknownStream,
    UnknownTable,
    UsageError,
)
from millstream.testing.errors import coded


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("web"), "[streams.web]\n")


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with serving(home) as url:
        yield url


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_can_not_be_meant_is_refused_before_anything_is_done(way: str, home: Path, url: str) -> None:
    where: Any = url if way.endswith("connect") else home
    with a_home(way, where) as there:
        for table in (None, 7, "", "a.b.c"):
            with pytest.raises(UsageError, match="is not the name of a table"):
                there.append("web", table, {"n": 1})
        for deadline_s in (-1, -0.001, math.nan, math.inf, "5", None, True):
            with pytest.raises(UsageError, match="is no time to wait"):
                there.append("web", "clicks", {"n": 1}, deadline_s=deadline_s)
            with pytest.raises(UsageError, match="is no time to wait"):
                there.session("web", "one", next_number=1).append("clicks", {"n": 1}, deadline_s=deadline_s)
        for stream in (7, b"web", ["web"]):
            with pytest.raises(UnknownStream):
                there.token(stream)
            with pytest.raises(UnknownStream):
                there.append(stream, "clicks", {"n": 1})
        with pytest.raises(UsageError, match="is no acknowledgement level"):
            there.append("web", "clicks", {"n": 1}, acks=7)
        for name in ("", " ", 7):
            with pytest.raises(InvalidValue, match="can't name a session"):
                there.session("web", name)
        for number in (0, -1, "1", 1.5, True):
            for name in (None, "one"):
                with pytest.raises(UsageError, match="numbered from 1"):
                    there.session("web", name, next_number=number)
        with pytest.raises(UnknownStream):
            there.session("Not A Stream", "one")
        if not way.endswith("connect"):
            with pytest.raises(UnknownStream, match="no stream shop"):
                there.session("shop", "one")
        with contextlib.suppress(UnknownStream, UnknownTable):  # nothing was appended, so there may be no log
            assert list(there.read("web", table="clicks")) == []
        for number in (0, -1, 1.5, True):
            with pytest.raises(InvalidValue):
                there.append("web", "others", {"n": 1}, session="one", number=number)


@pytest.mark.parametrize("way", WAYS)
def test_a_home_that_was_closed_says_so_at_once(way: str, home: Path, url: str) -> None:
    """Regression: calls raised errors of httpx and of executors, and a session resent its write until its deadline."""
    where: Any = url if way.endswith("connect") else home
    with a_home(way, where) as there:
        session = there.session("web", "closed")
        session.append("clicks", {"n": 1})
        there.close()
        began_s = time.monotonic()
        for call in (
            lambda: there.append("web", "clicks", {"n": 2}),
            lambda: session.append("clicks", {"n": 2}),
            lambda: session.append_all({"clicks": {"n": 2}}),
            lambda: there.session_facts("web", "closed"),
            lambda: there.consumers("web").list(),
            lambda: there.follow("web").__anext__() if way.startswith("aio") else there.follow("web"),
        ):
            with pytest.raises(HomeClosed):
                call()
        if way != "open":  # which still reads
            for call in (there.streams, there.status, lambda: there.query("select 1"), lambda: there.token("web")):
                with pytest.raises(HomeClosed):
                    call()
            with pytest.raises(HomeClosed):
                list(there.read("web"))
        assert time.monotonic() - began_s < 20


def test_an_append_whose_home_is_closed_before_the_answer_says_that_its_outcome_is_unknown() -> None:
    """Regression: it ended with httpx's error about a closed client, though the rows were sent."""

    async def closed_within(port: int, arrived: asyncio.Event) -> None:
        for is_session in (False, True):
            arrived.clear()
            there = aio.connect(f"http://127.0.0.1:{port}")
            calls = there.session("web", "one", next_number=1) if is_session else there
            words = ("clicks",) if is_session else ("web", "clicks")
            appends = asyncio.ensure_future(calls.append(*words, {"n": 1}))
            await arrived.wait()
            await there.close()
            with pytest.raises(AppendOutcomeUnknown) as caught:
                await appends
            assert caught.value.details.keys() & {"number", "idempotency_key"}

    async def silent() -> None:
        arrived = asyncio.Event()

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            arrived.set()
            await reader.read()
            writer.close()

        async with await asyncio.start_server(take, "127.0.0.1", 0) as server, asyncio.timeout(60):
            await closed_within(server.sockets[0].getsockname()[1], arrived)

    asyncio.run(silent())


@pytest.mark.parametrize("way", ["connect", "aio.connect"])
def test_an_address_without_its_s_or_with_one_too_many_says_so(way: str, home: Path, url: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    with (
        a_home(way, url.replace("http:", "https:")) as there,
        pytest.raises(RemoteError, check=coded("server_unreachable"), match="no TLS") as caught,
    ):
        there.append("web", "clicks", {"n": 1})
    assert f"Connect to {url}." == caught.value.hint
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with serving(home, context=context) as secured:
        with a_home(way, secured.replace("https:", "http:")) as there:

            def append() -> None:
                with contextlib.suppress(AppendOutcomeUnknown):  # a reset may overtake TLS's alert, once
                    there.append("web", "clicks", {"n": 1})
                there.append("web", "clicks", {"n": 1})

            for call in (there.streams, append):
                with pytest.raises(RemoteError, check=coded("server_unreachable"), match="speaks TLS") as caught:
                    call()
                assert f"Connect to {secured}." == caught.value.hint
        with (
            a_home(way, secured) as there,
            pytest.raises(RemoteError, check=coded("server_unreachable"), match="CERTIFICATE_VERIFY_FAILED") as caught,
        ):
            there.streams()
        assert "verify=" in caught.value.hint


def test_a_stream_that_has_nothing_yet_says_what_makes_it(tmp_path: Path) -> None:
    fresh = make_home(tmp_path / "fresh", "[streams.web]\n")
    with millstream.open(fresh) as here:
        for ask in (lambda: here.token("web"), lambda: next(here.read("web"))):
            with pytest.raises(UnknownStream, match="no log yet") as caught:
                ask()
            assert "The first append makes it" in caught.value.hint
        token = here.append("web", "clicks", {"n": 1}).token
        assert here.token("web") == token


def test_a_broken_configuration_is_told_as_that(tmp_path: Path) -> None:
    broken = make_home(tmp_path / "broken", "[streams.web\n")
    with millstream.open(broken) as here:
        for ask in (lambda: here.token("web"), lambda: here.session("web", "one")):
            with pytest.raises(ConfigError):
                ask()
    # An existing log is read without a configuration, as in a folder that was copied.
    with millstream.open(make_home(tmp_path / "web", "[streams.web]\n")) as here:
        here.append("web", "clicks", {"n": 1})
    make_home(tmp_path / "web", "[streams.web\n")
    with millstream.open(tmp_path / "web") as here:
        assert next(here.read("web")).num_rows == 1


@pytest.mark.long
def test_a_hint_is_seen_in_a_traceback_and_once(tmp_path: Path) -> None:
    script = "import sys, millstream; millstream.open(sys.argv[1])"
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert died.stderr.count("hint: ") == 1
    assert "MILLSTREAM_HOME" in died.stderr.rpartition("hint: ")[2]
    for words in (("status",), ("--debug", "status")):
        said = run(tmp_path, *words).stderr
        assert said.count("hint: ") == 1, said
    assert str(MillstreamError("it happened", hint="do this")) == "it happened"


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote"])
def test_a_wait_that_was_cancelled_leaves_what_comes_to_the_next_one(home: Path, url: str, *, is_remote: bool) -> None:
    """The iteration ended silently, and looked as if the log had ended."""

    async def followed() -> None:
        where = aio.connect(url) if is_remote else aio.open(home)
        async with where as there:
            start = (await there.append("web", "clicks", {"n": -1})).token
            async with there.follow("web", table="clicks", after=start) as following:
                for wait_s in (0.001, 0.01, 0.05, 0.2):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(anext(following), wait_s)
                rows = [{"n": number} for number in range(5)]
                for row in rows:
                    await there.append("web", "clicks", row)
                found: list[Any] = []
                async with asyncio.timeout(60):
                    while len(found) < len(rows):
                        with contextlib.suppress(TimeoutError):
                            batch, _ = await asyncio.wait_for(anext(following), 0.002)
                            found += [{"n": n} for n in batch.column("n").to_pylist()]
                assert found == rows
                waits = asyncio.ensure_future(anext(following))
                await asyncio.sleep(0.05)
                await following.close()
                with pytest.raises(StopAsyncIteration):
                    await waits

    asyncio.run(followed())
