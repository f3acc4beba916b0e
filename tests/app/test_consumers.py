"""Consumers in Python and on the command line: in this process, behind an address, and through the process that has them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.app.homes import done, run, wait_for
from tests.serving.serving_process import served, web_home

import millstream
import millstream.aio
from millstream.administration.consumer_checks import check_consumer_state
from millstream.delivery.consumer_lookup import Locked
from millstream.delivery.running_consumer import Waiter
from millstream.delivery.service import StreamConsumers
from millstream.errors import DeliveryError, InvalidValue, WriterClosed
from millstream.home.home import Home
from millstream.processes.role_locks import holder
from millstream.testing.errors import coded
from millstream.writers.home_consumers import HomeConsumers

KEYS = '[streams.web.keys]\n"public.orders" = ["id"]\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return web_home(tmp_path / "home", more=KEYS)


@contextlib.contextmanager
def opened(home: Path, how: str) -> Iterator[Any]:
    """Open a home: here, behind an address, or here while a server has the consumers."""
    if how == "here":
        with millstream.open(home) as found:
            yield found
        return
    with served(home) as server:
        if how == "address":
            with millstream.connect(server.url) as found:
                yield found
            return
        with server.client() as client:  # the server becomes the owner of the consumers
            assert client.get("/v1/streams/web/consumers").json() == {"consumers": []}
        with millstream.open(home) as found:
            yield found


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["here", "address", "forwarded"])
def test_a_block_receives_and_acknowledges(home: Path, how: str) -> None:
    with opened(home, how) as found:
        consumers = found.consumers("web")
        made = consumers.create("search", tables=["public.orders"], start="earliest")
        assert consumers.create("search", tables=("public.orders",), start="earliest") == made
        for n in range(5):
            found.append("web", "orders", {"id": n})
        with found.consume("web", "search", batch_size=2, wait_s=10) as messages:
            first = next(messages)
            assert (first.record["row"], first.deliveries) == ({"id": 0}, 1)
            assert consumers.get("search")["acked"] == 0
            second = next(messages)
            assert second.id == f"web-0-{second.record['epoch']}-1"
            assert consumers.get("search")["acked"] == 1
        shown = consumers.get("search")
        assert (shown["acked"], shown["in_flight"]) == (2, 0)
        with contextlib.suppress(ZeroDivisionError), found.consume("web", "search", wait_s=10) as messages:
            for _ in messages:
                raise ZeroDivisionError
        assert consumers.get("search")["in_flight"] == 0
        with found.consume("web", "search", wait_s=0.2) as messages:
            rest = [(message.record["row"]["id"], message.deliveries > 1) for message in messages]
        assert rest[0] == (2, True)
        assert [id_ for id_, _ in rest] == [2, 3, 4]
        assert consumers.get("search")["lag"]["records"] == 0
        assert [one["name"] for one in consumers.list()] == ["search"]
        with pytest.raises(DeliveryError, check=coded("invalid_consumer")):
            consumers.create("other", kind="newest")
        consumers.delete("search")
        with pytest.raises(DeliveryError, check=coded("unknown_consumer")):
            consumers.get("search")


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["here", "address"])
def test_a_consumer_of_kind_latest_receives_the_newest_row_of_each_key(home: Path, how: str) -> None:
    made = json.loads(
        done(
            home, "consumer", "create", "cache", "--kind", "latest", "--start", "earliest", "--json", "--stream", "web"
        )
    )
    assert made["kind"] == "latest"
    with opened(home, how) as found:
        consumers = found.consumers("web")
        found.append("web", "notes", {"text": "no key"})
        for note in ("a", "b", "c"):
            found.append("web", "orders", [{"id": 1, "note": note}, {"id": 2, "note": note}])
        with found.consume("web", "cache", wait_s=0.2) as messages:
            received = [(one.record["op"], one.record["row"], one.deliveries) for one in messages]
        assert received == [("u", {"id": 1, "note": "c"}, 1), ("u", {"id": 2, "note": "c"}, 1)]
        shown = consumers.get("cache")
        assert (shown["kind"], shown["acked"], shown["lag"]["records"]) == ("latest", 2, 0)
        assert "public.notes" in shown["error"]
        with pytest.raises(DeliveryError, check=coded("invalid_consumer")):
            consumers.create("notes", kind="latest", tables=["public.notes"])


def test_leaving_a_block_kills_no_message_that_was_never_seen(home: Path) -> None:
    with millstream.open(home) as found:
        consumers = found.consumers("web")
        consumers.create("search", start="earliest", max_deliver=1)
        found.append("web", "orders", [{"id": n} for n in range(10)])
        for n in range(10):
            with found.consume("web", "search", wait_s=10) as messages:
                assert next(messages).record["row"] == {"id": n}
        assert (consumers.get("search")["dead"], consumers.get("search")["acked"]) == (0, 10)


def test_a_message_is_settled_by_its_own_calls(home: Path) -> None:
    with millstream.open(home) as found:
        consumers = found.consumers("web")
        consumers.create("search", start="earliest", max_deliver=2)
        found.append("web", "orders", [{"id": 1}, {"id": 2}])
        with found.consume("web", "search", wait_s=0.1) as messages:
            for message in messages:
                assert message.extend(60) == "extended"
                for call in (message.nack, message.extend):
                    with pytest.raises(InvalidValue):
                        call(float("nan"))
                assert (message.nack() if message.record["row"]["id"] == 1 else message.ack()) in {"nacked", "acked"}
        assert consumers.get("search")["dead"] == 1
        (letter,) = consumers.dead("search")["dead"]
        assert (letter["record"]["row"], consumers.retry("search")["results"][0]["status"]) == ({"id": 1}, "retried")
        assert consumers.drop("search", [letter["id"]])["results"] == [{"id": letter["id"], "status": "unknown"}]


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_an_exception_of_the_block_stays_when_the_home_is_gone(home: Path, how: str) -> None:
    def threads() -> None:
        with millstream.open(home) as found, found.consume("web", "search", wait_s=10) as messages:
            message = next(messages)
            found.close()
            with pytest.raises(WriterClosed):
                message.ack()
            assert not message.is_settled
            raise ZeroDivisionError

    async def tasks() -> None:
        async with millstream.aio.open(home) as found, found.consume("web", "search", wait_s=10) as messages:
            message = await anext(messages)
            await found.close()
            with pytest.raises(WriterClosed):
                await message.ack()
            assert not message.is_settled
            raise ZeroDivisionError

    with millstream.open(home) as found:
        found.consumers("web").create("search", start="earliest")
        found.append("web", "orders", {"id": 1})
    with pytest.raises(ZeroDivisionError):
        threads() if how == "threads" else asyncio.run(tasks())


@pytest.mark.long
def test_tasks_receive_as_threads_do(home: Path) -> None:
    async def received(opening: Any) -> list[int]:
        async with opening as found:
            consumers = found.consumers("web")
            await consumers.create("search", start="earliest")
            await consumers.rewind("search", "earliest")
            async with found.consume("web", "search", wait_s=0.2) as messages:
                ids = [message.record["row"]["id"] async for message in messages]
            assert (await consumers.get("search"))["lag"]["records"] == 0
            return ids

    with millstream.open(home) as found:
        found.append("web", "orders", [{"id": n} for n in range(5)])
    assert asyncio.run(received(millstream.aio.open(home))) == [0, 1, 2, 3, 4]
    with served(home) as server:
        assert asyncio.run(received(millstream.aio.connect(server.url))) == [0, 1, 2, 3, 4]


def test_the_next_process_goes_on_where_the_last_one_was(home: Path) -> None:
    with millstream.open(home) as one, millstream.open(home) as two:
        one.consumers("web").create("search", start="earliest")
        one.append("web", "orders", [{"id": n} for n in range(4)])
        with one.consume("web", "search", wait_s=10) as messages:
            next(messages)
        with two.consume("web", "search", wait_s=10) as messages:
            assert next(messages).record["row"] == {"id": 1}
        one.close()
        with two.consume("web", "search", wait_s=10) as messages:
            assert next(messages).record["row"] == {"id": 2}
        with pytest.raises(WriterClosed):
            one.consumers("web").list()


def test_a_consumer_on_the_command_line(home: Path) -> None:
    words = ["consumer", "create", "search", "--tables", "public.*", "--where", "id > 1", "--start", "earliest"]
    made = json.loads(done(home, *words, "--columns", "id as number,note", "--json"))
    assert (made["tables"], made["where"], made["columns"]) == (["public.*"], "id > 1", ["id as number", "note"])
    with millstream.open(home) as found:
        found.append("web", "orders", [{"id": n} for n in range(4)])
        with found.consume("web", "search", wait_s=0.1) as messages:
            assert [message.record["row"] for message in messages] == [{"number": 2}, {"number": 3}]
    (one,) = json.loads(done(home, "consumer", "ls", "--json"))
    assert (one["acked"], one["lag"]["records"]) == (2, 0)
    assert "search" in done(home, "consumer", "ls")
    assert "paused" in done(home, "consumer", "pause", "search")
    (shown,) = json.loads(done(home, "status", "--json"))["streams"][0]["consumers"]
    assert (shown["name"], shown["state"]) == ("search", "paused")
    rewound = run(home, "consumer", "rewind", "search", "--to", "2000-01-01T00:00:00Z")
    assert (rewound.returncode, "the log has nothing earlier" in rewound.stderr) == (0, True)
    assert json.loads(done(home, "consumer", "rewind", "search", "--to", "earliest", "--json"))["cursor"].endswith(
        ".s0"
    )
    for words in (["rewind", "search", "--to", "zz"], ["backfill", "search", "--where", "id >"]):
        wrong = run(home, "consumer", *words)
        assert (wrong.returncode, "error[invalid_value]" in wrong.stderr) == (2, True)
    assert "active" in done(home, "consumer", "resume", "search")
    misspelt = run(
        home, "consumer", "create", "typo", "--tables", "public.ordrs", "--tables", "orders", "--tables", "!x"
    )
    assert (misspelt.returncode, misspelt.stderr.count("no table")) == (0, 1)
    assert "public.ordrs matches: typo waits for one" in misspelt.stderr
    odd = ["consumer", "create", "odd", "--tables", "later", "--group-by", 'a, "b,c", "d ""e"""', "--json"]
    assert json.loads(done(home, *odd))["group_by"] == ["a", "b,c", 'd "e"']
    odd = ["consumer", "create", "keyed", "--tables", "later", "--group-by", '"key"', "--json"]
    assert json.loads(done(home, *odd))["group_by"] == ["key"]
    assert json.loads(done(home, "consumer", "dead", "ls", "search", "--json")) == []
    for how in ("retry", "drop"):
        found = run(home, "consumer", "dead", how, "search", "web-0-1-99")
        assert (found.returncode, found.stdout) == (1, "web-0-1-99: unknown\n")
    assert run(home, "consumer", "rm", "search").returncode == 2
    done(home, "consumer", "rm", "search", "--yes")
    gone = run(home, "consumer", "show", "search")
    assert (gone.returncode, "unknown_consumer" in gone.stderr) == (2, True)


def test_a_sink_on_the_command_line(home: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("whsec_AAAA\n")
    words = ["consumer", "create", "hook", "--webhook", "https://example.com/hook", "--set", "batch_size=7"]
    words += ["--set", 'headers={"x-token": "t"}', "--set", "timeout=5s", "--json"]
    made = json.loads(done(home, *words, "--set", f"secret=@{tmp_path / 'secret'}"))["webhook"]
    assert (made["batch_size"], made["timeout"], made["headers"]) == (7, "5s", {"x-token": "***"})
    assert made["secret"] == "***"
    assert "webhook: https://example.com/hook" in done(home, "consumer", "show", "hook")
    for more, what in (
        (["--set", "secret=@/nowhere"], "can't be read"),
        (["--set", "secret"], "NAME=VALUE"),
        (["--redis", "redis://h"], "one sink"),
    ):
        refused = run(home, *words, *more)
        assert (refused.returncode, what in refused.stderr) == (2, True), refused.stderr
    assert "needs a sink" in run(home, "consumer", "create", "other", "--set", "maxlen=5").stderr


@pytest.mark.long
def test_a_client_that_left_this_process_takes_nothing_from_the_owner(home: Path) -> None:
    with opened(home, "forwarded") as found:
        consumers = found.consumers("web")
        consumers.create("search", start="earliest")
        found.append("web", "orders", [{"id": 1}])
        left = Waiter()
        left.leave()
        with contextlib.closing(HomeConsumers(Home(home))) as forwarding:
            assert forwarding.call("web", "receive", "search", {}, waiter=left).body == {"messages": []}
        assert consumers.get("search")["in_flight"] == 0
        with found.consume("web", "search", wait_s=10) as messages:
            assert next(messages).record["row"] == {"id": 1}


def test_an_unfinished_backfill_is_shown_with_the_state(home: Path) -> None:
    """The consumer read as caught up: its lag was 0, and only --json had the backfill."""
    with millstream.open(home) as found:
        found.append("web", "orders", [{"id": n} for n in range(3)])
        found.consumers("web").create("search", start="latest", backfill=True)
        with found.consume("web", "search", wait_s=10) as messages:
            assert next(messages).ack() == "acked"
    for words in (["consumer", "ls"], ["consumer", "show", "search"], ["status"]):
        assert "active, backfill 1 of 3 rows" in done(home, *words)


def test_damaged_state_is_refused_and_cut_off_only_where_the_loss_is_accepted(home: Path) -> None:
    with millstream.open(home) as found:
        found.append("web", "orders", [{"id": 1}])
        consumers = found.consumers("web")
        for name in ("first", "second"):
            consumers.create(name, start="earliest")
    assert check_consumer_state(Home(home), "web") == "the state of 2 consumers can be read"
    log = home / "data" / "delivery" / "web" / "consumers.log"
    data = bytearray(log.read_bytes())
    data[data.index(b'"second"')] ^= 1
    log.write_bytes(data)
    with millstream.open(home) as found, pytest.raises(DeliveryError, check=coded("consumer_state_unreadable")):
        found.consumers("web").list()
    with pytest.raises(DeliveryError, check=coded("consumer_state_unreadable")):
        check_consumer_state(Home(home), "web")
    told = run(home, "consumer", "repair")
    assert (told.returncode, "would be kept, as before the damage: first" in told.stdout) == (3, True), told
    assert log.read_bytes() == data
    done(home, "consumer", "repair", "--accept-loss")
    assert "nothing is damaged" in done(home, "consumer", "repair")
    with millstream.open(home) as found:
        assert [one["name"] for one in found.consumers("web").list()] == ["first"]


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_call_that_ctrl_c_interrupts_leaves_the_consumer_usable(
    home: Path, monkeypatch: pytest.MonkeyPatch, *, is_waiting: bool
) -> None:
    """Ctrl-C between the acquisition of a consumer's lock and the block left it held: closing the home waited for ever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with millstream.open(home) as found:
        found.append("web", "orders", {"id": 1})
        consumers = found.consumers("web")
        consumers.create("search", start="latest")
        enter = Locked.__enter__

        def interrupted(locked: Locked) -> Any:
            entered = enter(locked)
            signal.raise_signal(signal.SIGINT)
            return entered

        with monkeypatch.context() as patched, found.consume("web", "search") as messages:
            if is_waiting:
                timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
                timer.start()
            else:
                patched.setattr(Locked, "__enter__", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(messages) if is_waiting else consumers.pause("search")
            patched.undo()
        assert consumers.resume("search")["state"] == "active"


def test_a_task_that_gives_up_while_messages_are_taken_leaves_them_to_the_next(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: no one saw them until their delivery expired, and a table without a key had nothing else until then."""
    call = StreamConsumers.call
    taken, seen = threading.Event(), threading.Event()

    def slow(consumers: StreamConsumers, what: str, *args: Any, **named: Any) -> Any:
        answer = call(consumers, what, *args, **named)
        if what == "receive" and not taken.is_set():
            taken.set()
            assert seen.wait(60)
        return answer

    async def work() -> None:
        async with millstream.aio.open(home) as found:
            await found.append("web", "clicks", [{"id": 1}, {"id": 2}])
            await found.consumers("web").create("search", tables=["public.clicks"], start="earliest")
            monkeypatch.setattr(StreamConsumers, "call", slow)
            async with found.consume("web", "search") as messages:
                waits = asyncio.ensure_future(anext(messages))
                assert await asyncio.to_thread(taken.wait, 60)
                waits.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waits
            seen.set()
            async with found.consume("web", "search", wait_s=10.0) as messages:
                assert (await anext(messages)).record["row"]["id"] == 1

    asyncio.run(work())


def test_an_interrupt_just_as_messages_were_taken_leaves_them_to_the_next(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    call, main = StreamConsumers.call, threading.main_thread().ident
    assert main is not None

    def interrupted(consumers: StreamConsumers, what: str, *args: Any, **named: Any) -> Any:
        answer = call(consumers, what, *args, **named)
        if what == "receive":
            signal.pthread_kill(main, signal.SIGINT)
        return answer

    with millstream.open(home) as found:
        found.append("web", "clicks", [{"id": 1}, {"id": 2}])
        found.consumers("web").create("search", tables=["public.clicks"], start="earliest")
        with monkeypatch.context() as patched, found.consume("web", "search") as messages:
            patched.setattr(StreamConsumers, "call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(messages)
            patched.undo()
        with found.consume("web", "search", wait_s=10.0) as messages:
            assert next(messages).record["row"]["id"] == 1


def test_a_server_delivers_to_the_sink_of_a_consumer_that_a_command_made(home: Path) -> None:
    """The command had the consumers and ended; the server, which no request asked, left the messages to nothing."""
    with served(home) as server:
        done(home, "consumer", "create", "cache", "--stream", "web", "--redis", "redis://127.0.0.1:1/0")
        wait_for(lambda: holder(Home(home).run_folder, "delivery").get("pid") == server.process.pid)
