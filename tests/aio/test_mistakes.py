"""A caller's mistake is reported at once, by name, by every kind of home."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import subprocess
import sys
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
    InvalidValue,
    MillstreamError,
    RemoteError,
    UnknownStream,
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
        with pytest.raises(UnknownStream):
            there.session("Not A Stream", "one")
        if not way.endswith("connect"):
            with pytest.raises(UnknownStream, match="no stream shop"):
                there.session("shop", "one")
        with contextlib.suppress(UnknownStream):  # nothing was appended, so there may be no log
            assert list(there.read("web", table="clicks")) == []


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
